"""What a machine and its torch provide: devices, precision, compilation, CUDA graphs, ORTModule."""

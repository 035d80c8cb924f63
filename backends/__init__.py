"""What a machine and its torch can do: devices, precision, compilation, recorded steps, prior work's accelerators."""

"""Build ORTModule's C++ extensions, as setup_venv.sh does once; its own command fails without a matching CUDA toolkit."""

import torch
from onnxruntime.training import ortmodule

if not torch.cuda.is_available():
    ortmodule.ONNXRUNTIME_CUDA_VERSION = None
from onnxruntime.training.ortmodule.torch_cpp_extensions import install

install.build_torch_cpp_extensions()

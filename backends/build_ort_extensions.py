"""Builds ORTModule's C++ extensions; setup_venv.sh runs it once for the legacy stack.

    .venv-legacy/bin/python -m backends.build_ort_extensions

ORTModule's own command fails on machines without a CUDA toolkit that matches its build.
"""


def main() -> None:
    """Build the extensions, without the CUDA ones where there is no GPU."""
    import torch
    from onnxruntime.training import ortmodule

    if not torch.cuda.is_available():
        ortmodule.ONNXRUNTIME_CUDA_VERSION = None  # read by the import below
    from onnxruntime.training.ortmodule.torch_cpp_extensions import install

    install.build_torch_cpp_extensions()


if __name__ == "__main__":
    main()

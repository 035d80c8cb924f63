"""TODO."""

from __future__ import annotations

import shutil
import sys

import torch

import errors
from backends import nvidia_apex, onnx_runtime
from backends.device import choose_device, has_bf16
from backends.torch_compat import TORCH_VERSION
from input_pipeline import torchtext_tokenizer

# -------------------------------------------------------------------- python backends.py: what
# there is here


def listing(device: torch.device) -> list[tuple[str, str]]:
    """(flag, 'available', or why it is not and how to get it)."""

    def status(reason: str) -> str:
        return f"not available: {reason}" if reason else "available"

    gpu = device.type == "cuda"
    compiler = (
        ""
        if gpu or shutil.which("g++") or shutil.which("clang++")
        else "needs a C++ compiler: install g++"
    )
    old = (
        ""
        if TORCH_VERSION >= (2, 9)
        else f"needs torch 2.9, this is {torch.__version__}: bash setup_venv.sh requirements.txt"
    )
    return [
        ("--backend eager", "available"),
        ("--backend compile", status(compiler)),
        ("--backend cudagraph", status("" if gpu else "needs a GPU")),
        ("--backend ort", status(onnx_runtime.unavailable_reason())),
        ("--precision fp32", "available"),
        ("--precision tf32", status("" if gpu else "needs a GPU")),
        (
            "--precision bf16",
            "available"
            if has_bf16(device)
            else "available, but slow: this device has no bf16 of its own",
        ),
        ("--precision fp16", "available" if gpu else "available, but slow on a CPU"),
        *(
            (f"--precision {level}", status(nvidia_apex.amp_unavailable_reason()))
            for level in nvidia_apex.LEVELS
        ),
        *(
            (f"--optimizer {name}", status(nvidia_apex.unavailable_reason(name)))
            for name in nvidia_apex.OPTIMIZERS
        ),
        ("--tokenizer torchtext", status(torchtext_tokenizer.unavailable_reason())),
        ("--parallel fsdp, hsdp", status(old)),
        ("--fuse", status("" if TORCH_VERSION >= (2, 4) else old)),
        ("--export", status(old)),
    ]


def main() -> None:
    """Print what is available here."""
    device = choose_device("auto", 0)
    print(f"torch {torch.__version__} on {device.type}, Python {sys.version.split()[0]}")
    for flag, status in listing(device):
        print(f"{flag:<26} {status}")


if __name__ == "__main__":
    sys.exit(errors.exit_code(main))

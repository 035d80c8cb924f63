"""Lists what this machine and this torch support, flag by flag, and how to get what is missing.

    python -m cli.capabilities

One line for each choice of --backend, --precision, --optimizer, --tokenizer and --parallel that
needs more than torch on a CPU, and for --fuse and --export.
"""

from __future__ import annotations

import shutil
import sys

import torch

import errors
from backends import nvidia_apex, onnx_runtime, torch_compat
from backends.device import choose_device, has_bf16
from input_pipeline import torchtext_tokenizer

INSTALL_DEFAULT_STACK = "bash setup_venv.sh requirements.txt"


def list_capabilities(device: torch.device) -> list[tuple[str, str]]:
    """Return (flag, status) for each choice.

    The status is 'available', possibly with a restriction, or 'not available' with the reason and
    what to do.
    """
    on_gpu = device.type == "cuda"
    needs_gpu = "" if on_gpu else "needs a GPU"
    has_compiler = on_gpu or shutil.which("g++") or shutil.which("clang++")
    bf16 = "" if has_bf16(device) else ", but slow: this device has no bf16 of its own"
    fp16 = "" if on_gpu else ", but slow on a CPU"
    return [
        ("--backend eager", "available"),
        ("--backend compile", status("" if has_compiler else "needs a C++ compiler: install g++")),
        ("--backend cudagraph", status(needs_gpu)),
        ("--backend ort", status(onnx_runtime.unavailable_reason())),
        ("--precision fp32", "available"),
        ("--precision tf32", status(needs_gpu)),
        ("--precision bf16", f"available{bf16}"),
        ("--precision fp16", f"available{fp16}"),
        *(
            (f"--precision {level}", status(nvidia_apex.amp_unavailable_reason()))
            for level in nvidia_apex.LEVELS
        ),
        *(
            (f"--optimizer {name}", status(nvidia_apex.unavailable_reason(name)))
            for name in nvidia_apex.OPTIMIZERS
        ),
        ("--tokenizer torchtext", status(torchtext_tokenizer.unavailable_reason())),
        ("--parallel fsdp, hsdp", torch_status("fsdp")),
        ("--fuse", torch_status("fuse")),
        ("--export", torch_status("export")),
    ]


def status(reason: str) -> str:
    """Return the status of a choice that is unavailable for this reason, '' for none."""
    return f"not available: {reason}" if reason else "available"


def torch_status(feature: str) -> str:
    """Return the status of a choice that needs a newer torch than the legacy stack has."""
    reason = torch_compat.unavailable_reason(feature)
    return status(f"{reason}: {INSTALL_DEFAULT_STACK}" if reason else "")


def main() -> None:
    """Print the list for the device that --device auto takes."""
    onnx_runtime.silence_onnxruntime_notice()
    device = choose_device("auto", local_rank=0)
    print(f"torch {torch.__version__} on {device.type}, Python {sys.version.split()[0]}")
    for flag, availability in list_capabilities(device):
        print(f"{flag:<26} {availability}")


if __name__ == "__main__":
    sys.exit(errors.exit_code(main))

"""Precision, graph and memory: what this machine and this torch can do. The one place that knows versions.

precision = choose_precision("auto", device)        # bf16 where the device computes in it, else fp16 or fp32
with precision.autocast(): ...
model = apply_backend("compile", model)
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import os
import shutil
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import apex_backend
import errors
import ort_backend
import words
from errors import InputError

PRECISIONS = ("auto", "fp32", "tf32", "bf16", "fp16", *apex_backend.LEVELS)
BACKENDS = ("eager", "compile", "cudagraph", "ort")
warnings.filterwarnings("ignore", message=".*cudart_version")  # onnxruntime-training, which old torch imports by itself
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


@dataclass(frozen=True)
class Precision:
    """How to compute: `dtype` is None without autocast; `scaled` asks for a GradScaler."""

    name: str
    device_type: str
    dtype: torch.dtype | None = None

    @property
    def scaled(self) -> bool:
        """Whether gradients can underflow, so that the loss is to be scaled."""
        return self.dtype is torch.float16

    def autocast(self) -> contextlib.AbstractContextManager:
        """Context of the forward pass and the loss."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, self.dtype)

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        """Model and optimizer as this precision wants them, and a GradScaler, or what acts like one."""
        if self.name in apex_backend.LEVELS:
            return apex_backend.prepare(self.name, model, optimizer)
        return model, optimizer, torch.amp.GradScaler(self.device_type, enabled=self.scaled)


def choose_device(name: str, local_rank: int) -> torch.device:
    """'auto' is this process's GPU where there is one, else the CPU.

    Raises:
        InputError: the device is not there, or there are more processes than GPUs.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"--device {name}: unknown; use auto, cpu or cuda") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise InputError(f"--device {name}: torch {torch.__version__} sees no GPU here; use --device cpu")
        index = local_rank if device.index is None else device.index
        if index >= torch.cuda.device_count():
            raise InputError(
                f"process {local_rank} of this node has no GPU ({torch.cuda.device_count()} there); start one process per GPU, "
                "or let all of them share one: --device cuda:0"
            )
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    elif device.type != "cpu":
        raise InputError(f"--device {name}: only cpu and cuda are supported")
    return device


def has_bf16(device: torch.device) -> bool:
    """Whether the device computes in bf16 natively: Ampere and later; AMX or AVX512-BF16 CPUs."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    probes = [getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    return any(probe() for probe in probes if probe)


def choose_precision(name: str, device: torch.device) -> Precision:
    """The precision of that name; 'auto' is the fastest that trains as well as fp32.

    tf32 lets GPU matrix products and convolutions round their inputs to 10 bits; on a CPU it is refused.
    Raises:
        InputError: the device cannot do it.
    """
    if name == "auto":
        name = "bf16" if has_bf16(device) else "fp16" if device.type == "cuda" else "fp32"
    if name in apex_backend.LEVELS and (lacking := apex_backend.lacks_amp()):
        raise InputError(f"--precision {name}: {lacking}; --precision fp16 is torch's own mixed precision")
    if name == "tf32" and device.type != "cuda":
        raise InputError("--precision tf32 needs a GPU; use bf16 or fp32 on a CPU")
    if device.type == "cuda":
        tf32 = name != "fp32"
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32 = tf32
        torch.backends.cudnn.benchmark = True
    elif name == "bf16":  # on CPUs the flash kernel's backward is slow in bf16: plain attention took a quarter of its time
        torch.backends.cuda.enable_flash_sdp(False)  # governs the CPU's choice of kernel as well
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)
    return Precision(name, device.type, dtype)


def apply_backend(name: str, model: nn.Module) -> nn.Module:
    """`model`, compiled or through ONNX Runtime in place: parameters and state_dict stay what they are.

    Raises:
        InputError: the backend is not here.
    """
    if name == "cudagraph" and next(model.parameters()).device.type != "cuda":
        raise InputError("--backend cudagraph needs a GPU; use --backend eager or compile")
    if name in ("compile", "cudagraph"):  # the whole step is recorded around the compiled model: see graphs.py
        model.compile()  # in place: no `_orig_mod.` prefix in the state_dict
    if name == "ort":
        if lacking := ort_backend.lacks():
            raise InputError(f"--backend ort: {lacking}; --backend compile is torch's own")
        ort_backend.apply(model)
    return model


def use_cores(threads: int, local_world_size: int) -> int:
    """Set torch's CPU threads: `threads`, or the cores shared out among this node's processes; returns the number.

    torchrun sets OMP_NUM_THREADS=1 when nobody did, which would idle all other cores: 1 is therefore not taken as a wish.
    """
    wished = os.environ.get("OMP_NUM_THREADS", "")
    if not threads and wished.isdigit() and int(wished) > 1:
        threads = int(wished)
    if not threads:
        threads = max(1, len(os.sched_getaffinity(0)) // local_world_size)
    torch.set_num_threads(threads)
    return threads


def keep_freed_memory() -> None:
    """Let glibc keep freed activation buffers for the next step instead of giving them back to the system.

    A training step frees and takes the same large blocks again and again; each return costs page faults on the next
    use (measured on two cores: 60 % of the faults and 11 % of a ResNet-50 step). Does nothing where glibc is not.
    """
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(mmap_threshold, 1 << 30)
        libc.mallopt(trim_threshold, (1 << 31) - 1)
    except (OSError, AttributeError):
        pass


def fused_optimizer(parameters: Iterable[Tensor]) -> bool:
    """Whether torch's fused optimizers take these parameters: on GPUs, and on CPUs from torch 2.5 on."""
    return TORCH >= (2, 5) or all(parameter.device.type == "cuda" for parameter in parameters)


def step_unless(optimizer: torch.optim.Optimizer, skip: Tensor) -> None:
    """The optimizer's step unless `skip`, a scalar; torch's fused kernels look at it on the device, so that nothing waits."""
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.found_inf = skip.float()  # type: ignore[attr-defined]
        optimizer.step()
    elif not skip:
        optimizer.step()


def ddp_local_buffers() -> dict[str, bool]:
    """The DistributedDataParallel argument that leaves BatchNorm statistics to each rank (renamed in torch 2.15)."""
    known = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}


def peak_memory(device: torch.device) -> int:
    """Bytes: the most the allocator held on a GPU; the largest resident size of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# -------------------------------------------------------------------- python backends.py: what there is here


def listing(device: torch.device) -> list[tuple[str, str]]:
    """(flag, 'available', or why it is not and how to get it)."""

    def status(lacking: str) -> str:
        return f"not available: {lacking}" if lacking else "available"

    gpu = device.type == "cuda"
    compiler = "" if gpu or shutil.which("g++") or shutil.which("clang++") else "needs a C++ compiler: install g++"
    old = "" if TORCH >= (2, 9) else f"needs torch 2.9, this is {torch.__version__}: bash setup_venv.sh requirements.txt"
    return [
        ("--backend eager", "available"),
        ("--backend compile", status(compiler)),
        ("--backend cudagraph", status("" if gpu else "needs a GPU")),
        ("--backend ort", status(ort_backend.lacks())),
        ("--precision fp32", "available"),
        ("--precision tf32", status("" if gpu else "needs a GPU")),
        ("--precision bf16", "available" if has_bf16(device) else "available, but slow: this device has no bf16 of its own"),
        ("--precision fp16", "available" if gpu else "available, but slow on a CPU"),
        *((f"--precision {level}", status(apex_backend.lacks_amp())) for level in apex_backend.LEVELS),
        *((f"--optimizer {name}", status(apex_backend.lacks(name))) for name in apex_backend.OPTIMIZERS),
        ("--tokenizer torchtext", status(words.lacks())),
        ("--parallel fsdp, hsdp", status(old)),
        ("--fuse", status("" if TORCH >= (2, 4) else old)),
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

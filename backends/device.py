"""Precision, graph and memory: what this machine and this torch can do. The one place that knows versions.

precision = choose_precision("auto", device)        # bf16 where the device computes in it, else fp16 or fp32
with precision.autocast(): ...
model = apply_backend("compile", model)
"""

from __future__ import annotations

import ctypes
import os

import torch

from errors import InputError


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
            raise InputError(
                f"--device {name}: torch {torch.__version__} sees no GPU here; use --device cpu"
            )
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
    probes = [
        getattr(torch.cpu, name, None)
        for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    ]
    return any(probe() for probe in probes if probe)


def set_num_threads(threads: int, local_world_size: int) -> int:
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


def peak_memory(device: torch.device) -> int:
    """Bytes: the most the allocator held on a GPU; the largest resident size of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

"""The device of a process: which one, its bf16 support, CPU threads and memory.

device = choose_device("auto", local_rank=0)        # this process's GPU, or the CPU
set_num_threads(0, sharers=2)                       # half the cores of this node
print(peak_memory(device), "bytes")
"""

import ctypes
import os
import re
import resource
import sys

import torch

from backends import torch_compat
from errors import InputError

MAX_THREADS = 1024  # of a process; some thousands take minutes to start


def choose_device(name: str, local_rank: int) -> torch.device:
    """Return the device of a process and make it torch's current one.

    Args:
        name: 'cpu', 'cuda', 'cuda:N', or 'auto', which is 'cuda' where there is one.
        local_rank: number of this process on its node, which 'cuda' takes as the number of the GPU.
    Raises:
        InputError: the device does not exist, or there are more processes than GPUs.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise InputError(f"device {name}: use auto, cpu, cuda or cuda:N")
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise InputError(f"device {name}: torch {torch.__version__} sees no GPU here; use cpu")
    index = local_rank if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise InputError(
            f"process {local_rank} of this node has no GPU ({torch.cuda.device_count()} there); "
            "start one process per GPU, or let all of them share one, as device cuda:0"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def is_here(name: str) -> bool:
    """Return whether this machine has the device of this name."""
    kind, _, index = name.partition(":")
    return kind != "cuda" or int(index or 0) < torch.cuda.device_count()


def has_bf16(device: torch.device) -> bool:
    """Return whether the device computes in bf16 natively.

    That is the case for GPUs from Ampere on, and for CPUs with AMX or AVX512-BF16.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return torch_compat.cpu_has_bf16()


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    if not sys.platform.startswith("linux"):
        return os.cpu_count() or 1
    return len(os.sched_getaffinity(0))


def set_num_threads(threads: int, sharers: int) -> None:
    """Set the number of torch's CPU threads.

    torchrun sets OMP_NUM_THREADS=1 where the user has not set it, which would leave all other cores
    idle; a value of 1 is therefore ignored. Where OMP_PROC_BIND binds threads to cores, this thread
    has been left one core since torch was loaded, and OpenMP has counted the cores before.

    Args:
        threads: the number; 0 takes OMP_NUM_THREADS if that is larger than 1, and else divides the
            cores among the `sharers`, the processes that use them.
    """
    requested = os.environ.get("OMP_NUM_THREADS", "")
    if not threads and requested.isdigit() and int(requested) > 1:
        threads = min(int(requested), MAX_THREADS)
    if not threads:
        cores = num_cores()
        if os.environ.get("OMP_PROC_BIND", "false").lower() != "false":
            cores = max(cores, torch.get_num_threads())
        threads = max(1, cores // sharers)
    torch.set_num_threads(threads)


def make_deterministic(device: torch.device) -> None:
    """Let torch choose kernels that give the same bits in every run, as those of CPUs always do.

    Where it has none it warns. Call this before the first operation on the GPU.
    """
    if device.type != "cuda":
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
    torch.backends.cudnn.benchmark = False  # else the fastest kernel is chosen, which varies
    torch.use_deterministic_algorithms(True, warn_only=True)
    # A safeguard that costs time; torch has no type for it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def keep_freed_memory() -> None:
    """Let glibc keep freed activation buffers for the next step instead of unmapping them.

    A training step frees and allocates the same large blocks again and again; each unmapped block
    costs page faults at its next use (measured on two cores: 60 % of the faults and 11 % of the
    time of a ResNet-50 step).
    """
    if not sys.platform.startswith("linux"):
        return
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(mmap_threshold, 1 << 30)
    libc.mallopt(trim_threshold, (1 << 31) - 1)


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes.

    On a GPU it is the peak of torch's allocator, on a CPU the largest resident size of the process.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

"""What a number in metrics.jsonl depends on beside the flags: versions, device, commit."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
MATRIX_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")  # the best one is named


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Versions, device, commit, torchrun's job and the command line."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device_name(device),
        "commit": commit.stdout.strip() or None,
        "elastic_id": os.environ.get("TORCHELASTIC_RUN_ID"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def device_name(device: torch.device) -> str:
    """The GPU's name; or the processor's, with the number of threads torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


def cpu_name() -> str:
    """The processor's name and its matrix instructions, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    pairs = (line.partition(":") for line in lines)
    fields = {key.strip(): value.strip() for key, _, value in pairs}
    flags = fields.get("flags", "").split()
    best = [flag for flag in MATRIX_INSTRUCTIONS if flag in flags][:1]
    return " ".join([fields.get("model name", platform.machine()), *best])

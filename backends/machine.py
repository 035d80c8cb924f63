"""What a number in metrics.jsonl depends on beside the flags: versions, device, commit.

describe_machine(device)["commit"]     # "31dfeba", "31dfeba-dirty", or None without git
modified_files()                       # ["ngd.py"]: why a commit is dirty
device_name(device)                    # "AMD EPYC (family 26, model 2, avx512_bf16), 2 threads"
"""

import contextlib
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from errors import first_line

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ("figures/logs", "figures/*.png", "docs/results.md", "benchmarks/results")
"""What runs, benchmarks and figures.draw write: no run depends on it."""
NOT_RESULTS = tuple(f":(exclude,glob){path}" for path in RESULTS)
"""Arguments that make a git command leave `RESULTS` out."""
CPUINFO = Path("/proc/cpuinfo")
MATRIX_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")  # the best one is named


class CommitUnknown(Exception):
    """The commit of this code cannot be told; the message says why."""


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Versions, device, processor, commit (None where it is unknown) and the command line."""
    return {
        "torch": str(torch.__version__),  # TorchVersion is no plain value of a checkpoint
        "python": platform.python_version(),
        "device": device_name(device),
        "processor": cpu_name(),
        "commit": commit_or_none(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


# -------------------------------------------------------------------- commit


def commit_or_none() -> str | None:
    """The commit of this code; it ends in -dirty if a committed file has changed since.

    Where git is not installed, or this folder is a copy without its history, it is what the
    environment variable COMMIT says, or None. Changed `RESULTS` do not make it dirty.
    """
    with contextlib.suppress(CommitUnknown):
        dirty = "-dirty" if modified_files() else ""
        return run_git("describe", "--always").strip() + dirty
    return os.environ.get("COMMIT") or None


def modified_files() -> list[str]:
    """Files of the last commit that have changed since or are deleted, but for `RESULTS`.

    Raises:
        CommitUnknown: git is not installed, or does not know this folder.
    """
    # A copy without .git that lies inside another repository must not get that one's commit.
    run_git("ls-files", "--error-unmatch", str(Path(__file__).resolve().relative_to(ROOT)))
    return run_git("diff", "--name-only", "-z", "HEAD", "--", ".", *NOT_RESULTS).split("\0")[:-1]


def untracked_files(ignored: Path) -> list[str]:
    """Files outside a folder that git does not know and does not ignore, but for `RESULTS`.

    Raises:
        CommitUnknown: as of `modified_files`.
    """
    excluded = list(NOT_RESULTS)
    if ROOT in ignored.resolve().parents:
        excluded.append(f":(exclude,literal){ignored.resolve().relative_to(ROOT)}")
    listing = run_git("ls-files", "--others", "--exclude-standard", "-z", "--", ".", *excluded)
    return listing.split("\0")[:-1]


def run_git(*arguments: str) -> str:
    """Run a git command in the project's folder, and return what it prints."""
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", *arguments],  # without locks: several runs may start
            cwd=ROOT,
            env={**os.environ, "LC_ALL": "C"},  # its messages in English, as ours
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise CommitUnknown(f"git cannot be started ({error.strerror})") from None
    if done.returncode:
        raise CommitUnknown(f"git {arguments[0]}: {first_line(Exception(done.stderr))}")
    return done.stdout


# -------------------------------------------------------------------- device


def device_name(device: torch.device) -> str:
    """The GPU's name; or the processor's, with the number of threads torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


def cpu_name() -> str:
    """The processor's name, its family, model and matrix instructions, as far as they are known.

    Processors of one name differ in speed by a factor of seven.
    """
    text = CPUINFO.read_text(encoding="utf-8") if CPUINFO.exists() else ""
    pairs = (line.partition(":") for line in text.splitlines())
    fields = {key.strip(): value.strip() for key, _, value in pairs}
    parts = {"family": "cpu family", "model": "model"}
    details = [f"{word} {fields[key]}" for word, key in parts.items() if key in fields]
    flags = fields.get("flags", "").split()
    details += [flag for flag in MATRIX_INSTRUCTIONS if flag in flags][:1]
    name = fields.get("model name") or platform.processor() or platform.machine()
    return f"{name} ({', '.join(details)})" if details else name

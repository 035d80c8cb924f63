"""Run the experiments of experiments.yaml that are not done yet: see run_all.sh.

python -m figures.experiments cpu --only ngd_batch --minutes 30
python -m figures.experiments gpu --list

Each run is a command as one would type it, to which `--seed N --out figures/logs/GROUP/NAME-seedN` is added. The entry scripts
record flags, device, versions and commit in config.json. A run is done when its log holds its last epoch; its weights are then
deleted. One that was stopped goes on from its checkpoint. One that fails is named at the end, and the others go on.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

import torch  # noqa: E402
import yaml  # noqa: E402

import errors  # noqa: E402
from cli import flags
from errors import InputError, Interrupted  # noqa: E402
from figures.logs import finished, read_rows

HERE = ROOT / "figures"
PLAN = HERE / "experiments.yaml"
SEEDS = (0, 1, 2)
LEAVE = 120.0  # seconds that a run has to write its checkpoint
LEFT_OVERS = (
    "*.pt",
    "*.part",
    "tokenizer.json",
    "shards-*",
)  # of a finished run: nothing that a figure needs


@dataclass(frozen=True)
class Run:
    """One command, with one seed; a group whose own script runs it has no name and no seed."""

    group: str
    name: str
    seed: int
    command: str
    logs: Path
    rows: int = 0  # of the training set, where it can be had in several sizes

    @property
    def folder(self) -> Path:
        return (
            self.logs / self.group / f"{self.name}-seed{self.seed}"
            if self.name
            else self.logs / self.group
        )

    @property
    def done(self) -> bool:
        """Whether its log holds its last epoch. A group's own script knows by itself, and is asked."""
        return bool(self.name) and finished(self.folder)

    def words(self) -> tuple[list[str], dict[str, str]]:
        """The command's words, and the variables in front of them."""
        words = shlex.split(self.command)
        given = {}
        while "=" in words[0]:
            name, _, value = words.pop(0).partition("=")
            given[name] = value
        if words[0] == "python":
            words[0] = sys.executable
        if self.name:
            folder = os.path.relpath(self.folder, ROOT)  # a log is to name no machine's folders
            words += ["--seed", str(self.seed), "--out", folder]
            words += ["--resume", folder] if (self.folder / "last.pt").exists() else []
        return words, given


def read_plan(path: Path, device: str, logs: Path) -> list[Run]:
    """The runs of experiments.yaml for a device: all first seeds, in the plan's order, then all second ones."""
    runs = []
    for group, entry in yaml.safe_load(path.read_text())[device].items():
        for name, words in entry.get("runs", {"": ""}).items():
            for place, seed in enumerate(entry.get("seeds", SEEDS) if name else [0]):
                command = f"{entry['command']} {words or ''}".strip()
                runs.append((place, Run(group, name, seed, command, logs, entry.get("rows", 0))))
    return [run for _, run in sorted(runs, key=lambda pair: pair[0])]


def perform(run: Run, until: float, hidden: Mapping[str, str]) -> str:
    """Run it, at most until then (monotonic), with more variables set; what went wrong, or nothing.

    Raises:
        Interrupted: the time was over, or Ctrl-C; its checkpoint is written.
    """
    if until and time.monotonic() >= until:
        raise Interrupted("the time is over; the same command goes on")
    if run.name and run.folder.exists() and not (run.folder / "last.pt").exists():
        shutil.rmtree(run.folder)  # it never came to its first checkpoint
    words, given = run.words()
    process = subprocess.Popen(
        words, cwd=ROOT, env=os.environ | {"PYTHON": sys.executable, **hidden} | given
    )
    try:
        code = process.wait(max(0.0, until - time.monotonic()) if until else None)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(LEAVE)
        except subprocess.TimeoutExpired:
            process.kill()
        raise Interrupted(
            f"stopped in {run.folder.name} of {run.group}; the same command goes on with it"
        ) from None
    if not run.name:  # a benchmark: 1 is a bar that does not hold, not a failure
        return f"exit code {code}" if code > 1 else ""
    if code or not run.done:
        return f"exit code {code}"
    trained = read_rows(run.folder)[0]["samples"]
    tidy(run.folder)
    if run.rows and not 0.9 * run.rows <= trained <= run.rows:
        shutil.rmtree(run.folder)
        return f"trained on {trained} rows, the plan wants {run.rows}: other data lie here, so its log is deleted"
    return ""


def tidy(folder: Path) -> None:
    """Delete what only a resume needs."""
    for pattern in LEFT_OVERS:
        for path in folder.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def chosen(runs: Sequence[Run], only: Sequence[str]) -> Iterator[Run]:
    """Those of some groups; of all where none is named.

    Raises:
        InputError: there is no such group.
    """
    groups = dict.fromkeys(run.group for run in runs)
    for group in only:
        if group not in groups:
            raise InputError(f"--only {group}: no such group; there are {', '.join(groups)}")
    return (run for run in runs if not only or run.group in only)


def main(argv: Sequence[str] | None = None) -> None:
    parser = flags.Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "device",
        nargs="?",
        choices=("cpu", "gpu"),
        help="whose experiments (default: gpu where there is one)",
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="GROUP", help="groups of the plan")
    parser.add_argument(
        "--minutes", type=flags.positive, help="stop after so long (default: when all is done)"
    )
    parser.add_argument("--list", action="store_true", help="print what is done and what is open")
    parser.add_argument(
        "--draw", action="store_true", help="then draw, whatever became of the runs"
    )
    parser.add_argument("--plan", type=Path, default=PLAN, help="(default %(default)s)")
    parser.add_argument("--logs", type=Path, default=HERE / "logs", help="(default %(default)s)")
    args = parser.parse_args(argv)
    gpu = torch.cuda.is_available()
    device = args.device or ("gpu" if gpu else "cpu")
    runs = list(chosen(read_plan(args.plan, device, args.logs.resolve()), args.only))
    if args.list:
        for run in runs:
            print(
                f"{run.group}/{run.folder.name}: {'done' if run.done else 'open: ' + run.command}"
            )
        return
    if device == "gpu" and not gpu:
        raise InputError("gpu: there is none here; bash figures/run_all.sh cpu")
    try:
        run_all(runs, time.monotonic() + 60 * args.minutes if args.minutes else 0.0, device)
    finally:
        if args.draw:
            subprocess.run([sys.executable, "-m", "figures.draw"], cwd=ROOT, check=False)


def run_all(runs: Sequence[Run], until: float, device: str) -> None:
    """All that are not done; on a CPU where that is wanted.

    Raises:
        InputError: some failed.
        Interrupted: see `perform`.
    """
    for way in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # a shell's background jobs start with SIGINT ignored
        signal.signal(way, signal.default_int_handler)
    failed = []
    for number, run in enumerate(runs, 1):
        what = f"{run.group}/{run.folder.name}"
        print(f"[{number}/{len(runs)}] {what}: {'done' if run.done else run.command}", flush=True)
        if run.done:
            tidy(run.folder)  # it may have come to its end while it was being stopped
        elif wrong := perform(run, until, {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}):
            failed.append(f"{what} ({wrong})")
    if failed:
        raise InputError(f"{len(failed)} run(s) failed, see above: {', '.join(failed)}")


if __name__ == "__main__":
    sys.exit(errors.exit_code(main))

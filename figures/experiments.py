"""Run the experiments of experiments.yaml that have no finished log yet.

python -m figures.experiments                       # of the GPU if there is one, else of two cores
python -m figures.experiments cpu --only mixup_agnews6k --minutes 30    # again to go on
python -m figures.experiments gpu --list            # what is done, what is open, and the commands

All experiments run with their first seed before any runs with its second.
A run is a command as one would type it, to which `--seed N --out figures/logs/GROUP/NAME-seedN` is
added. The entry scripts record flags, device, versions and commit in config.json. A run is done
when its log holds the last epoch; it is then packed into figures/logs/GROUP.jsonl, and its folder
deleted. An interrupted run resumes from its checkpoint. A failed run does not end the others; it is
named at the end.

A log is evidence only together with the code that made it, so no run starts while a file is not
committed. To try something out: --allow_dirty --logs FOLDER.
"""

import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml

from backends import machine
from cli import flag_parser
from cli.flag_parser import Choice, FlagParser, file_path, switch
from errors import InputError, Interrupted, exit_code
from figures.run_logs import LOGS, ROOT, finished, pack, read_rows
from training.checkpoint import latest_files
from training.run_folder import lock_run_folder

PLAN = ROOT / "figures" / "experiments.yaml"
SEEDS = (0, 1, 2)
SHUTDOWN_SECONDS = 120.0  # that a run has to write its checkpoint after SIGTERM
POLL_SECONDS = 1.0  # between two looks at a run
MAX_NAMED_FILES = 3  # in the message of a run that is refused


@dataclass(frozen=True)
class PlannedRun:
    """One command with one seed."""

    folder: Path  # of the log, LOGS/GROUP/NAME-seedN
    seed: int  # random seed
    command: str  # the command line, without seed and folder
    rows: int = 0  # expected size of the training set, 0 if any size is right

    @property
    def title(self) -> str:
        """What messages call the run: GROUP/NAME-seedN."""
        return f"{self.folder.parent.name}/{self.folder.name}"

    def arguments(self) -> list[str]:
        """Return the command line with seed and folder; `env` sets the variables before it."""
        words = ["env", *shlex.split(self.command)]
        if "python" in words:
            words[words.index("python")] = sys.executable
        folder = os.path.relpath(self.folder, ROOT)  # logs do not name a machine's folders
        resume = ["--resume", folder] if latest_files(self.folder) else []
        return [*words, "--seed", str(self.seed), "--out", folder, *resume]


def read_plan(path: Path, device: str, logs: Path) -> list[PlannedRun]:
    """Return the runs of a plan for cpu or gpu: all of the first seed, then of the second."""
    ordered = []
    for group, entry in yaml.safe_load(path.read_text(encoding="utf-8"))[device].items():
        for name, extra in entry["runs"].items():
            command = f"{entry['command']} {extra or ''}".strip()
            for position, seed in enumerate(entry.get("seeds", SEEDS)):
                folder = logs / group / f"{name}-seed{seed}"
                run = PlannedRun(folder, seed, command, entry.get("rows", 0))
                ordered.append((position, run))
    return [run for _, run in sorted(ordered, key=lambda pair: pair[0])]


def execute(run: PlannedRun, deadline: float, variables: Mapping[str, str]) -> str:
    """Execute a run, pack its log, and return what went wrong, or an empty string.

    Raises:
        Interrupted: the deadline has passed, or Ctrl-C; the run's checkpoint is written.
    """
    if time.monotonic() >= deadline:
        raise Interrupted("the time is over; run the same command again to continue")
    if run.folder.exists() and not latest_files(run.folder):
        lock_run_folder(run.folder).close()  # no other process writes to it
        shutil.rmtree(run.folder)  # it was stopped before its first checkpoint, or has none
    environment = {**os.environ, "PYTHON": sys.executable, **variables}
    process = subprocess.Popen(run.arguments(), cwd=ROOT, env=environment)
    try:
        while (code := wait(process, POLL_SECONDS)) is None:
            if time.monotonic() >= deadline:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        process.send_signal(signal.SIGTERM)
        if wait(process, SHUTDOWN_SECONDS) is None:
            process.kill()
        kept = "resume it" if latest_files(run.folder) else "begin it anew"
        message = f"stopped in {run.title}; run the same command again to {kept}"
        raise Interrupted(message) from None
    if code or not finished(run.folder):
        return f"exit code {code}"
    rows = read_rows(run.folder)[0]["samples"]
    if run.rows and not 0.9 * run.rows <= rows <= run.rows:
        shutil.rmtree(run.folder)
        return f"another data set of {rows} rows, the plan expects {run.rows}; its log is deleted"
    pack(run.folder)
    return ""


def wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Return the exit code of a process, or None if it still runs after `seconds`."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def check_committed(logs: Path) -> None:
    """Check that a run started now would log the commit of the code that it runs.

    Raises:
        InputError: files are not committed, but for those in `logs`; or there is no commit.
    """
    try:
        changed = machine.modified_files() + machine.untracked_files(ignored=logs)
    except machine.CommitUnknown as reason:
        changed = [f"this code ({reason})"]
    if changed:
        more = ", ..." if len(changed) > MAX_NAMED_FILES else ""
        raise InputError(
            f"not committed: {', '.join(changed[:MAX_NAMED_FILES])}{more}; a log's commit would "
            "not be the code that made it: commit or stash them first, in a git clone, or use "
            "--allow_dirty with --logs FOLDER"
        )


def execute_all(
    runs: Sequence[PlannedRun], deadline: float, device: str, *, ignored: Path | None
) -> None:
    """Execute all runs that are not done; with device cpu, GPUs are hidden from them.

    Files must be committed, but for those in the folder `ignored`, where that is not None.

    Raises:
        InputError: files are not committed; or some runs failed: the message names them.
        Interrupted: the deadline has passed, or Ctrl-C.
    """
    variables = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    failures = []
    for position, run in enumerate(runs, 1):
        title = f"[{position}/{len(runs)}] {run.title}"
        if finished(run.folder):
            print(f"{title}: done", flush=True)
            if run.folder.is_dir():  # the run had finished when the runner was stopped
                pack(run.folder)
            continue
        if ignored is not None:
            check_committed(ignored)
        print(f"{title}: {run.command}", flush=True)
        if failure := execute(run, deadline, variables):
            failures.append(f"{run.title} ({failure})")
    if failures:
        raise InputError(f"{len(failures)} run(s) failed, see above: {', '.join(failures)}")


def experiments_parser() -> FlagParser:
    """Return the parser of the command line."""
    parser = FlagParser(__doc__, usage="[cpu | gpu] [flags]")
    add = parser.group("flags")
    devices = Choice(["cpu", "gpu"])
    add("device", devices, None, "device whose experiments run (default gpu if any)", nargs="?")
    add("--only", str, [], "groups of the plan (default all)", nargs="+", metavar="GROUP")
    text = "minutes until it stops; the same command continues later (default never)"
    add("--minutes", flag_parser.positive, None, text, metavar="N")
    add("--list", switch, False, "names of what is done and what is open; nothing runs")
    text = "file of the experiments (default figures/experiments.yaml)"
    add("--plan", file_path, PLAN, text, metavar="YAML")
    add("--logs", file_path, LOGS, "folder for the logs (default figures/logs)", metavar="DIR")
    text = "runs although files are not committed; needs --logs of another folder"
    add("--allow_dirty", switch, False, text)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run or list the experiments that the command line names."""
    args = experiments_parser().parse_args(argv)
    logs = args.logs.resolve()
    if args.allow_dirty and (logs == LOGS or LOGS in logs.parents):
        raise InputError(
            "--allow_dirty: the logs of figures/logs are evidence and need a commit; give another "
            "folder: --logs FOLDER"
        )
    has_gpu = torch.cuda.is_available()
    device = args.device or ("gpu" if has_gpu else "cpu")
    runs = read_plan(args.plan, device, logs)
    groups = {run.folder.parent.name for run in runs}
    if unknown := sorted({*args.only} - groups):
        known = ", ".join(sorted(groups))
        raise InputError(f"--only {unknown[0]}: no such group; there are {known}")
    runs = [run for run in runs if run.folder.parent.name in (args.only or groups)]
    if args.list:
        for run in runs:
            status = "done" if finished(run.folder) else f"open: {run.command}"
            print(f"{run.title}: {status}")
        return
    if device == "gpu" and not has_gpu:
        raise InputError("gpu: this machine has none; give cpu")
    deadline = time.monotonic() + 60 * args.minutes if args.minutes else math.inf
    execute_all(runs, deadline, device, ignored=None if args.allow_dirty else logs)


if __name__ == "__main__":
    sys.exit(exit_code(main))

"""One trial of a sweep: the entry script in a process of its own, followed by its metrics.jsonl.

runner = TrialRunner(config, arguments, gpu_slots(config))
value = runner(trial, ["--lr", "0.1"])    # raises optuna.TrialPruned or TrialFailed
"""

import fcntl
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
import torch

import errors
from distributed.worker import SWEEP
from errors import InputError
from figures.run_logs import ROOT, measured, read_rows
from training.epoch_report import is_evaluated
from tuning.config import SweepConfig

START = "-- start"  # a line of console.log; an error before it was that of an earlier start
POLL_SECONDS = 0.1  # between two reads of metrics.jsonl
SHUTDOWN_SECONDS = 60.0  # that a script has to write its checkpoint after SIGTERM


class TrialFailed(Exception):
    """The script ended with an error; the message is the script's error line."""


def trial_folder(config: SweepConfig, trial: optuna.Trial | optuna.trial.FrozenTrial) -> Path:
    """The run folder of a trial, also where the sweep's folder was moved."""
    return config.out.resolve() / "trials" / f"{trial.number:04d}"


@dataclass(frozen=True)
class TrialRunner:
    """Runs trials; several threads may share one."""

    config: SweepConfig
    arguments: list[str]  # that all trials share
    # CUDA_VISIBLE_DEVICES of each trial that may run at the same time; None on CPUs
    gpu_slots: queue.Queue[str | None]
    stop: threading.Event = field(default_factory=threading.Event)  # set to end all trials

    def __call__(self, trial: optuna.Trial, arguments: list[str]) -> float:
        """Run one trial and return what is measured, see `run_logs.measured`.

        Args:
            trial: its user attributes get its folder, from whose checkpoint a killed one resumes.
            arguments: the searched flags.

        Raises:
            optuna.TrialPruned: others do better.
            TrialFailed: the script failed.
            SystemExit: the sweep was interrupted; or, with a message, a strict one failed.
        """
        folder = trial_folder(self.config, trial)
        trial.set_user_attr("folder", str(folder))
        gpus = self.gpu_slots.get()
        try:
            return self.follow(trial, folder, process=self.start(folder, arguments, gpus=gpus))
        except TrialFailed as error:
            trial.set_user_attr("error", str(error))
            raise
        finally:
            self.gpu_slots.put(gpus)

    def start(
        self, folder: Path, arguments: list[str], *, gpus: str | None
    ) -> subprocess.Popen[str]:
        """Start the script; it resumes from the folder's checkpoint if there is one."""
        folder.mkdir(parents=True, exist_ok=True)
        command = [str(ROOT / self.config.script.file), *self.arguments, *arguments]
        if self.config.nproc > 1:
            launcher = str(ROOT / "distributed" / "launch.py")
            processes = f"--nproc_per_node={self.config.nproc}"
            command = [launcher, "--standalone", processes, *command]
        command = [sys.executable, *command, "--out", str(folder)]
        env = os.environ | ({} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus})
        env[SWEEP] = str(os.getpid())
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
        with open(folder / "console.log", "a", encoding="utf-8") as log:
            # The process holds the lock as long as it writes here: one whose sweep was killed may
            # still be saving its checkpoint.
            fcntl.flock(log, fcntl.LOCK_EX)
            print(START, file=log, flush=True)
            if (folder / "last.pt").exists():
                command += ["--resume", str(folder)]
            else:  # it may have been stopped before its first checkpoint
                (folder / "metrics.jsonl").unlink(missing_ok=True)
            return subprocess.Popen(command, stdout=log, stderr=log, text=True, env=env)

    def follow(self, trial: optuna.Trial, folder: Path, *, process: subprocess.Popen[str]) -> float:
        """Report each epoch to Optuna; end the process if it is pruned before its last one."""
        num_reported, script = 0, self.config.script
        before = trial.study.get_trials(deepcopy=False)[trial.number].intermediate_values
        try:
            while True:
                ended = process.poll() is not None  # asked first: then the rows are all there
                rows = complete_rows(folder)
                if rows and self.config.ends_after_one:
                    break
                for row in filter(is_evaluated, rows[num_reported:]):
                    if row["epoch"] not in before:
                        trial.report(measured(row), row["epoch"])
                    if trial.should_prune() and row["epoch"] < script.flags(trial.params)["epochs"]:
                        raise optuna.TrialPruned
                num_reported = len(rows)
                if self.stop.is_set() or process.returncode == errors.INTERRUPTED:
                    raise SystemExit(errors.INTERRUPTED)
                if ended and (process.returncode or not rows):
                    reason = how_it_failed(folder, process.returncode or 0)
                    if self.config.is_strict and process.returncode != errors.NON_FINITE:
                        raise SystemExit(f"{folder}: {reason}")  # so that it can be resumed
                    raise TrialFailed(reason)
                if ended:
                    break
                time.sleep(POLL_SECONDS)
        finally:
            terminate(process)
        if rows[-1].get("rollbacks") and not self.config.keeps_weights:
            raise TrialFailed("diverged at this rate, and went on at a lower one")
        return measured(rows[-1])


def complete_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl, which is always written as a whole; [] without any yet."""
    path = folder / "metrics.jsonl"
    return read_rows(folder) if path.exists() and path.stat().st_size else []


def how_it_failed(folder: Path, code: int) -> str:
    """Return the script's error line from its console, else its exit code and the last line."""
    console = (folder / "console.log").read_text(encoding="utf-8", errors="replace")
    lines = [line for line in console.rpartition(START)[2].splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("error: ")]
    if code >= 0 and said:
        return said[-1][:300]
    ended = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"{ended} after: {(lines or ['no line'])[-1][:300]}"


def terminate(process: subprocess.Popen[str]) -> None:
    """End a process: SIGTERM first, so that torchrun ends its workers, then SIGKILL."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(SHUTDOWN_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def gpu_slots(config: SweepConfig) -> queue.Queue[str | None]:
    """Divide the GPUs that torch sees among `jobs` trials, `nproc` GPUs each; on CPUs none.

    Raises:
        InputError: the trials need more GPUs than there are.
    """
    slots: queue.Queue[str | None] = queue.Queue()
    jobs, nproc = config.jobs, config.nproc
    gpus = 0 if config.script.given.get("device") == "cpu" else torch.cuda.device_count()
    if gpus and jobs * nproc > gpus:
        raise InputError(
            f"--jobs {jobs} with --nproc {nproc} needs {jobs * nproc} GPUs, but there are {gpus}"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(number) for number in range(gpus)]
    for job in range(jobs):
        slots.put(",".join(names[job * nproc : (job + 1) * nproc]) if gpus else None)
    return slots

"""More than 200 accidents, each of which must end as it should; and random SIGKILLs.

    PYTHONPATH=. python tests/fault_injection.py                        # all areas
    PYTHONPATH=. python tests/fault_injection.py --only kill --kills 50 --jobs 2
    PYTHONPATH=. python tests/fault_injection.py --list

A case runs an entry script on small data, lets something go wrong, and checks the exit code, that
there is no traceback, that no process is left after ten seconds, and, where a run can be resumed,
that the resumed run equals an uninterrupted one bit for bit. test_faults.py runs a few.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import ranks

RUN_SECONDS = 300  # within which every run ends, on a loaded machine
LEFT_SECONDS = 10  # after which no process of a job may be left
IMAGES = "--dataset digits --arch resnet8 --epochs 3 --save_every 4 --threads 1 --seed 3".split()
TEXTS = "--dataset headlines --epochs 3 --save_every 4 --threads 1 --depth 1 --width 32".split()
MODES = {  # of the runs that are killed: number of ranks, script, flags
    "sgd": (1, "resnet50_test.py", [*IMAGES, "--bs", "64"]),
    "ngd-meta": (1, "resnet50_test.py", [*IMAGES, "--bs", "64", "--ngd", "--meta_learning"]),
    "texts": (1, "transformer_test.py", [*TEXTS, "--bs", "16"]),
    "background": (1, "resnet50_test.py", [*IMAGES, "--bs", "64", "--save_in_background", "yes"]),
    "slamb-2": (2, "resnet50_test.py", [*IMAGES, "--bs", "32", "--optimizer", "slamb"]),
    "noise-2": (2, "resnet50_test.py", [*IMAGES, "--bs", "32", "--dynamic_batch", "noise"]),
    "local-2": (2, "resnet50_test.py", [*IMAGES, "--bs", "32", "--sync", "local"]),
    "diloco-2": (2, "resnet50_test.py", [*IMAGES, "--bs", "32", "--sync", "diloco"]),
    "demo-2": (2, "resnet50_test.py", [*IMAGES, "--bs", "32", "--optimizer", "demo"]),
    "fsdp-2": (2, "resnet50_test.py", [*IMAGES, "--bs", "32", "--parallel", "fsdp"]),
    "sgd-4": (4, "resnet50_test.py", [*IMAGES, "--bs", "16"]),
    "slamb-4": (4, "resnet50_test.py", [*IMAGES, "--bs", "16", "--optimizer", "slamb"]),
}


class Failed(AssertionError):
    """A case did not end as it should; the message says how it ended."""


@dataclass(frozen=True)
class Case:
    """An accident.

    Attributes:
        area, name: what it is called.
        body: called with an empty folder; raises Failed.
    """

    area: str
    name: str
    body: Callable[[Path], None]


# -------------------------------------------------------------------- running


class Job:
    """A command whose output is read through a pipe, so that limits on files do not silence it."""

    def __init__(
        self, command: Sequence[object], folder: Path, *, file_limit: int | None = None, **env: str
    ) -> None:
        self.job = f"{os.getpid()}-{time.monotonic_ns()}-{threading.get_ident()}"
        self.lines: list[str] = []

        def limit() -> None:
            if file_limit is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))

        self.process = subprocess.Popen(
            [str(word) for word in command],
            cwd=folder,
            env={**os.environ, "PYTHON": sys.executable, "TEST_JOB": self.job, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            preexec_fn=limit,
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    @property
    def console(self) -> str:
        """What the command has printed so far."""
        return "".join(self.lines)

    def members(self) -> list[tuple[int, bytes]]:
        """(process number, environment) of the processes of this job that are alive."""
        alive = []
        for number, environment in ranks.relatives(self):  # type: ignore[arg-type]
            with contextlib.suppress(OSError):
                state = (
                    Path(f"/proc/{number}/stat")
                    .read_text(encoding="utf-8")
                    .rpartition(")")[2]
                    .split()[0]
                )
                if state != "Z":
                    alive.append((number, environment))
        return alive

    def worker(self, rank: int) -> int | None:
        """The process number of a rank, or None."""
        mark = f"\0RANK={rank}\0".encode()
        return next((number for number, env in self.members() if mark in env), None)

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        """Wait until the condition holds; returns whether it did before the command ended."""
        end = time.monotonic() + RUN_SECONDS
        while self.process.poll() is None:
            if condition():
                return True
            if time.monotonic() > end:
                raise Failed(f"waited {RUN_SECONDS} s:\n{self.console[-1000:]}")
            time.sleep(0.01)
        return False

    def finish(self, *codes: int, seconds: float = RUN_SECONDS) -> str:
        """Wait for one of these exit codes; returns the console, which has no traceback."""
        try:
            code = self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.end()
            raise Failed(f"still running after {seconds:.0f} s:\n{self.console[-1000:]}") from None
        self.reader.join(timeout=LEFT_SECONDS)
        self.check_nothing_left()
        if code not in codes:
            raise Failed(f"exit code {code}, expected {codes}:\n{self.console[-1500:]}")
        if "Traceback" in self.console or "terminate called" in self.console:
            raise Failed(f"a traceback:\n{self.console[-3000:]}")
        return self.console

    def check_nothing_left(self) -> None:
        """Check that all processes of the job end within LEFT_SECONDS."""
        end = time.monotonic() + LEFT_SECONDS
        while left := self.members():
            if time.monotonic() > end:
                self.end()
                raise Failed(f"{len(left)} processes are left after {LEFT_SECONDS} s")
            time.sleep(0.05)

    def end(self) -> None:
        """SIGKILL to all processes of the job."""
        for number, _ in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        self.process.wait()


def command(
    script: str, flags: Sequence[object], size: int = 1
) -> tuple[list[str], dict[str, str]]:
    """The command line of a script on so many ranks, and its environment variables."""
    if size == 1:
        return ranks.script(script, *flags), {}
    return ranks.torchrun(script, *flags), {"NGPU": str(size)}


def start(script: str, flags: Sequence[object], folder: Path, size: int = 1, **env: str) -> Job:
    """Start a script on so many ranks, with further environment variables."""
    words, environment = command(script, flags, size)
    return Job(words, folder, **environment, **env)


def error_line(console: str) -> str:
    """The one line of a console that is an error."""
    errors = [line for line in console.splitlines() if line.startswith("error:")]
    if len(errors) != 1:
        raise Failed(f"{len(errors)} error lines:\n{console[-1500:]}")
    return errors[0]


def same_run(one: Path, other: Path) -> None:
    """Check that two run folders hold the same run, timing aside, bit for bit."""
    try:
        ranks.same_run(one, other)
    except AssertionError as error:
        raise Failed(f"the runs differ: {str(error)[:300]}") from None


class References:
    """Uninterrupted runs, each of which is made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.locks = {mode: threading.Lock() for mode in MODES}

    def __getitem__(self, mode: str) -> Path:
        size, script, flags = MODES[mode]
        folder = self.folder / mode
        with self.locks[mode]:
            if not (folder / "done").exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                start(script, [*flags, "--out", folder / "run"], folder, size).finish(0)
                (folder / "done").touch()
        return folder / "run"


# -------------------------------------------------------------------- kills and signals


def kill(folder: Path, *, mode: str, seed: int, references: References) -> None:
    """SIGKILL to the launcher or a rank at a random moment, then a resume."""
    reference, dice = references[mode], random.Random(seed)
    size, script, flags = MODES[mode]
    run = folder / "run"
    flags = [*flags, "--out", run]
    job = start(script, flags, folder, size)
    if dice.random() < 0.85:  # else while it starts
        rows = dice.randrange(3)

        def has_rows() -> bool:
            path = run / "metrics.jsonl"
            return path.exists() and len(path.read_text().splitlines()) >= rows

        job.wait_for(has_rows)
        time.sleep(dice.random() * 0.5)
    else:
        time.sleep(dice.random() * 8)
    victim = dice.randrange(-1, size) if size > 1 else -1  # -1 is the launcher, or the only process
    number = job.process.pid if victim < 0 else job.worker(victim)
    if number is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    job.process.wait(timeout=RUN_SECONDS)
    job.check_nothing_left()
    if job.process.returncode == 0:  # it was over before
        same_run(reference, run)
        return
    if "Traceback" in job.console:
        raise Failed(f"a traceback:\n{job.console[-2000:]}")
    resume = ["--resume"] if (run / "last.pt").exists() else []
    start(script, [*flags, *resume], folder, size).finish(0)
    same_run(reference, run)


def stop_by_signal(
    folder: Path, *, mode: str, seed: int, number: int, references: References
) -> None:
    """SIGTERM or SIGINT at a random moment of the training, to the launcher or to one rank."""
    reference, dice = references[mode], random.Random(seed)
    size, script, flags = MODES[mode]
    run = folder / "run"
    flags = [*flags, "--out", run]
    job = start(script, flags, folder, size)
    job.wait_for(lambda: (run / "metrics.jsonl").exists())
    time.sleep(0.2 + dice.random())
    victim = dice.randrange(-1, size) if size > 1 else -1
    process = job.process.pid if victim < 0 else job.worker(victim)
    if process is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)
    console = job.finish(0, 130, -number)
    if job.process.returncode == -number and "run folder" not in console.splitlines()[-1]:
        raise Failed(f"ended by the signal before the run was over:\n{console[-500:]}")
    if job.process.returncode == 130:
        if "go on with --resume" not in error_line(console):
            raise Failed(f"nothing says how to go on:\n{console[-500:]}")
        start(script, [*flags, "--resume"], folder, size).finish(0)
    same_run(reference, run)


def restart(folder: Path, *, mode: str, victim: int, references: References) -> None:
    """A killed rank, and a launcher that may restart the job once."""
    reference = references[mode]
    size, script, flags = MODES[mode]
    run = folder / "run"
    job = start(script, [*flags, "--out", run], folder, size, MAX_RESTARTS="1")
    job.wait_for(lambda: (run / "metrics.jsonl").exists())
    time.sleep(0.3)
    if (number := job.worker(victim)) is not None:
        os.kill(number, signal.SIGKILL)
    job.finish(0)
    same_run(reference, run)


def stop_one_rank(folder: Path, *, victim: int) -> None:
    """A rank that is stopped for ever: the others end within the limit of --timeout."""
    flags = [*MODES["sgd-4"][2], "--bs", "32", "--timeout", "30", "5", "--epochs", "300"]
    job = start("resnet50_test.py", [*flags, "--out", folder / "run"], folder, 2)
    if not job.wait_for(lambda: (folder / "run" / "metrics.jsonl").exists()):
        raise Failed(job.console[-1000:])
    number = job.worker(victim)
    assert number is not None
    os.kill(number, signal.SIGSTOP)
    error_line(job.finish(1, seconds=120))


def differ(folder: Path, *, other: Sequence[str], name: str) -> None:
    """Rank 1 has other flags: one line that names the difference, and no run folder."""
    wrapper = ranks.ROOT / "tests" / "one_rank_differs.py"
    job = start(str(wrapper), ["resnet50_test.py", *IMAGES, "--", *other], folder, 2)
    line = error_line(job.finish(2))
    if name not in line:
        raise Failed(line)
    if (folder / "runs").exists():
        raise Failed("a run folder was made")


def refuse_once(folder: Path, *, flags: Sequence[str]) -> None:
    """Flags that cannot succeed are not started again, however often that is allowed."""
    job = start("resnet50_test.py", [*IMAGES, *flags], folder, 2, MAX_RESTARTS="3")
    error_line(job.finish(2))


# -------------------------------------------------------------------- disks and folders


def limit_files(folder: Path, *, mode: str, size: int) -> None:
    """No file can become larger than `size` bytes, as on a full disk; then there is room again."""
    _, script, flags = MODES[mode]
    run = folder / "run"
    words = ranks.script(script, *flags, "--out", run)
    console = Job(words, folder, file_limit=size).finish(0, 2)
    if "could not be written" not in console and "cannot be written" not in console:
        if not (run / "last.pt").exists():
            raise Failed(f"nothing says that no checkpoint was written:\n{console[-800:]}")
        return
    if (run / "last.pt").exists():
        start(script, ["--resume", run], folder).finish(0)


def bad_out(folder: Path, *, out: str, codes: Sequence[int]) -> None:
    """A run folder that is no folder, or has an odd name."""
    (folder / "file").write_text("")
    (folder / "link").symlink_to(folder / "elsewhere")
    (folder / "loop").symlink_to(folder / "loop")
    flags = [*IMAGES, "--epochs", "1", "--out", out]
    console = start("resnet50_test.py", flags, folder).finish(*codes)
    if codes == (2,):
        error_line(console)


def disturb_folder(folder: Path, *, how: str) -> None:
    """Something happens to the run folder while the run goes on."""
    run = folder / "run"
    job = start("resnet50_test.py", [*IMAGES, "--epochs", "12", "--out", run], folder)
    job.wait_for(lambda: (run / "metrics.jsonl").exists())
    if how == "delete":
        shutil.rmtree(run, ignore_errors=True)
    elif how == "move":
        run.rename(folder / "elsewhere")
    elif how == "last is a folder":
        with contextlib.suppress(FileNotFoundError):
            (run / "last.pt").unlink()
        (run / "last.pt").mkdir(exist_ok=True)
    elif how == "metrics is a folder":
        (run / "metrics.jsonl").unlink()
        (run / "metrics.jsonl").mkdir()
    elif how == "part is a folder":
        (run / "last.pt.part").mkdir(exist_ok=True)
    job.finish(0, 2)


def damage(folder: Path, *, how: str, seed: int, references: References) -> None:
    """A damaged last.pt: the run goes on from the one before, and comes to the same end.

    A folder of that name is no damage but somebody's work: it is refused, and left alone.
    """
    reference, dice = references["sgd"], random.Random(seed)
    cut = stopped_run(references)
    run = folder / "run"
    shutil.copytree(cut, run)
    last = run / "last.pt"
    content = bytearray(last.read_bytes())
    if how == "truncate":
        content = content[: dice.randrange(len(content))]
    elif how == "flip":
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    elif how == "zero":
        begin = dice.randrange(len(content))
        content[begin : begin + 4096] = bytes(len(content[begin : begin + 4096]))
    elif how == "garbage":
        content = bytearray(dice.randbytes(dice.randrange(5000)))
    elif how == "append":
        content += dice.randbytes(100)
    last.unlink()
    if how == "folder":
        last.mkdir()
    elif how != "missing":
        last.write_bytes(content)
    if how == "folder":
        error_line(start("resnet50_test.py", ["--resume", run], folder).finish(2))
        return
    start("resnet50_test.py", ["--resume", run], folder).finish(0)
    same_run(reference, run)


def stopped_run(references: References) -> Path:
    """A run that was interrupted with two checkpoints in its folder; it is made once."""
    folder = references.folder / "stopped"
    with references.locks["sgd"]:
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            flags = [*MODES["sgd"][2], "--out", folder / "run"]
            job = start("resnet50_test.py", flags, folder)
            job.wait_for(lambda: '"epoch": 1' in read(folder / "run" / "metrics.jsonl"))
            job.process.send_signal(signal.SIGTERM)
            job.finish(130)
            assert (folder / "run" / "last-1.pt").exists()
            (folder / "done").touch()
    return folder / "run"


def read(path: Path) -> str:
    """The text of a file, or '' if it is not there."""
    return path.read_text() if path.exists() else ""


def damage_side_file(folder: Path, *, name: str, content: bytes, references: References) -> None:
    """config.json, metrics.jsonl or a left-over file is damaged: the resume mends or ignores it."""
    reference = references["sgd"]
    run = folder / "run"
    shutil.copytree(stopped_run(references), run)
    (run / name).write_bytes(content)
    start("resnet50_test.py", ["--resume", run], folder).finish(0)
    same_run(reference, run)


# -------------------------------------------------------------------- numbers


def numbers(folder: Path, *, flags: Sequence[str], codes: Sequence[int] = (0, 3)) -> None:
    """Settings at the edge: the run trains, or says in one line that it cannot."""
    script = "transformer_test.py" if "headlines" in flags else "resnet50_test.py"
    base = IMAGES if script == "resnet50_test.py" else []
    job = start(script, [*base, "--epochs", "1", *flags, "--out", folder / "run"], folder)
    console = job.finish(*codes)
    if job.process.returncode:
        error_line(console)
        return

    def refuse(name: str) -> None:
        raise Failed(f"{name} in metrics.jsonl")

    for line in (folder / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)


# -------------------------------------------------------------------- the cases


def all_cases(references: References, kills: int) -> Iterator[Case]:
    """All cases, area by area."""
    modes = list(MODES)
    for seed in range(kills):
        mode = modes[seed % len(modes)]
        body = functools.partial(kill, mode=mode, seed=seed, references=references)
        yield Case("kill", f"{mode} {seed}", body)
    for seed in range(20):
        mode, number = modes[seed % len(modes)], (signal.SIGTERM, signal.SIGINT)[seed % 2]
        body = functools.partial(
            stop_by_signal, mode=mode, seed=seed, number=number, references=references
        )
        yield Case("signal", f"{number.name} {mode} {seed}", body)
    yield from rank_cases(references)
    yield from disk_cases(references)
    yield from number_cases()


def rank_cases(references: References) -> Iterator[Case]:
    """Ranks that end, stop or disagree."""
    for mode in ("slamb-2", "noise-2", "diloco-2", "demo-2", "fsdp-2", "sgd-4"):
        for victim in (0, 1):
            body = functools.partial(restart, mode=mode, victim=victim, references=references)
            yield Case("ranks", f"restart {mode} rank {victim}", body)
    for victim in (0, 1):
        yield Case("ranks", f"stop rank {victim}", functools.partial(stop_one_rank, victim=victim))
    for other, name in (
        ("--lr 0.01", "--lr"),
        ("--bs 16", "--batch_size"),
        ("--seed 5", "--seed"),
        ("--epochs 4", "--epochs"),
        ("--subset 0.5", "--subset"),
        ("--ngd", "--optimizer"),
        ("--arch resnet20", "--arch"),
        ("--dataset mnist --data_dir /nowhere", "--dataset"),
        ("--val_fraction 0.1", "--val_fraction"),
        ("--mixup cutmix", "--mixup"),
        ("--precision bf16", "--precision"),
        ("--clip 1", "--clip"),
        ("--accumulate 2", "--accumulate"),
        ("--sync local", "--sync"),
        ("--save_every 5", "--save_every"),
        ("--keep 5", "--keep"),
    ):
        body = functools.partial(differ, other=other.split(), name=name)
        yield Case("ranks", f"rank 1 has {other}", body)
    for flags in ("--lr -1", "--dataset folder --data_dir /nowhere", "--bs 5000", "--warmup 9"):
        yield Case("ranks", f"refuse {flags}", functools.partial(refuse_once, flags=flags.split()))


def disk_cases(references: References) -> Iterator[Case]:
    """Full disks, odd folders and damaged files."""
    for mode in ("sgd", "background", "texts"):
        for size in (1, 100, 1_000, 5_000, 20_000, 100_000, 300_000, 650_000, 2_000_000):
            body = functools.partial(limit_files, mode=mode, size=size)
            yield Case("disk", f"{mode}, files of at most {size} bytes", body)
    for out, codes in (
        ("file", (2,)),
        ("file/run", (2,)),
        ("loop", (2,)),
        ("/proc/run", (2,)),
        ("/dev/null", (2,)),
        ("x" * 300, (2,)),
        ("link", (0, 2)),
        ("a name with blanks", (0,)),
        ("größe-模型", (0,)),
        ("two\nlines", (0,)),
        ("deep/deeper/deepest", (0,)),
        (".", (0,)),
    ):
        body = functools.partial(bad_out, out=out, codes=codes)
        yield Case("disk", f"--out {out[:20]!r}", body)
    for how in (
        "delete",
        "move",
        "last is a folder",
        "metrics is a folder",
        "part is a folder",
    ):
        yield Case("disk", f"run folder: {how}", functools.partial(disturb_folder, how=how))
    for how, times in (
        ("truncate", 12),
        ("flip", 12),
        ("zero", 6),
        ("garbage", 4),
        ("append", 1),
        ("missing", 1),
        ("folder", 1),
    ):
        for seed in range(times):
            body = functools.partial(damage, how=how, seed=seed, references=references)
            yield Case("disk", f"last.pt: {how} {seed}", body)
    for name, content in (
        ("config.json", b""),
        ("config.json", b"[1, 2"),
        ("config.json", b"\xff\xfe\x00"),
        ("metrics.jsonl", b""),
        ("metrics.jsonl", b'{"epoch": 1'),
        ("metrics.jsonl", b"\x00" * 100),
        ("last.pt.part", b"half a checkpoint"),
        ("best.pt", b""),
        (".lock", b"\xff\xff"),
    ):
        body = functools.partial(
            damage_side_file, name=name, content=content, references=references
        )
        yield Case("disk", f"{name}: {content[:12]!r}", body)


def number_cases() -> Iterator[Case]:
    """Settings at the edge of what is possible."""
    for optimizer in ("sgd", "adamw", "ngd", "lars", "lamb", "slamb", "demo"):
        for lr in ("1e-300", "1e-30", "1e3", "1e10", "1e30", "1e300"):
            flags, codes = ["--optimizer", optimizer, "--lr", lr], (2,) if lr == "1e300" else (0, 3)
            body = functools.partial(numbers, flags=flags, codes=codes)
            yield Case("numbers", " ".join(flags), body)
    for line in (
        "--weight_decay 1e30",
        "--clip 1e-30",
        "--label_smoothing 0.999",
        "--mixup mixup --alpha 1e-9",
        "--mixup mixup --alpha 1e9",
        "--bs 1437",
        "--image_size 1",
        "--image_size 64 --bs 256",
        "--subset 0.02 --bs 8",
        "--precision fp16",
        "--precision fp16 --lr 1e10",
        "--momentum 0.999",
        "--warmup 0.999",
        "--ngd --ngd_alpha 1e-9",
        "--ngd --ngd_eta 0.999999",
        "--meta_learning --meta_lr 1e10",
        "--dataset headlines --lr 1e10",
        "--dataset headlines --bs 1",
        "--dataset headlines --max_len 4",
        "--dataset headlines --ngd --lr 1e5",
    ):
        yield Case("numbers", line, functools.partial(numbers, flags=line.split(), codes=(0, 2, 3)))


# -------------------------------------------------------------------- the program


def run_case(case: Case, scratch: Path) -> str:
    """Run a case in a folder of its own; returns what went wrong, or ''."""
    folder = Path(tempfile.mkdtemp(prefix="case-", dir=scratch))
    try:
        case.body(folder)
    except Failed as error:
        return str(error)
    except Exception as error:  # an accident of the harness is no success
        return f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return ""


def main() -> int:
    """Run the cases; returns 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50, help="Number of random SIGKILLs.")
    parser.add_argument("--only", nargs="+", default=[], help="Run these areas.")
    parser.add_argument("--match", default="", help="Run cases whose name contains this.")
    parser.add_argument("--jobs", type=int, default=2, help="Run so many cases at a time.")
    parser.add_argument("--json", type=Path, help="Write the results to this file.")
    parser.add_argument("--list", action="store_true", help="Print the cases and run none.")
    args = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="faults-"))
    references = References(scratch / "references")
    cases = [
        case
        for case in all_cases(references, args.kills)
        if (not args.only or case.area in args.only) and args.match in case.name
    ]
    if args.list:
        print("\n".join(f"{case.area}: {case.name}" for case in cases))
        return 0
    results = []
    with ThreadPoolExecutor(args.jobs) as pool:
        problems = pool.map(functools.partial(run_case, scratch=scratch), cases)
        for case, problem in zip(cases, problems):
            results.append({"area": case.area, "case": case.name, "problem": problem})
            print(f"{case.area}: {case.name}: {problem or 'as it should be'}", flush=True)
    shutil.rmtree(scratch)
    failed = [result for result in results if result["problem"]]
    print(f"{len(results)} cases, {len(results) - len(failed)} as they should be")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

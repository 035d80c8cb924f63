"""What a process knows of its launcher, torchrun or distributed.launch, or of its sweep.

end_with_launcher()     # first; or end_with_sweep()
launcher_id()           # the same after every restart, and that of no other job
"""

import contextlib
import ctypes
import os
import select
import signal
import threading
from pathlib import Path

LAUNCHER = "FASTER_TRAINING_LAUNCHER"  # environment variable: what `process_name` says of it
SWEEP = "FASTER_TRAINING_SWEEP"  # another: that of the sweep that started this process for a trial
PR_SET_PDEATHSIG = 1  # of prctl(2)


def process_name() -> str:
    """This process's number, and the namespace in which it is the number of this process."""
    return f"{os.getpid()} {os.readlink('/proc/self/ns/pid')}"


def end_with_launcher() -> None:
    """Let the kernel kill this worker when its launcher ends, however that ends.

    A launcher that is killed, as by the kernel when memory runs out, cannot stop its workers. They
    would go on writing to a run folder that a resumed run writes to as well, or wait for each other
    and hold memory. A program in between, such as a profiler, is no launcher: then a thread waits
    for the end of the launcher, unless it is outside this container.
    """
    number, _, namespace = os.environ.get(LAUNCHER, "").partition(" ")
    if number == str(os.getppid()) or (not number and "TORCHELASTIC_RUN_ID" in os.environ):
        _end_with_parent(number, signal.SIGKILL)
    elif number and namespace == process_name().partition(" ")[2]:
        threading.Thread(target=_end_after, args=(int(number),), daemon=True).start()


def _end_after(process: int) -> None:
    """Kill this process when another one ends, or if it has ended."""
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(process)], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


def end_with_sweep() -> None:
    """Let the kernel send SIGTERM to the process of a trial when its sweep ends."""
    if sweep := os.environ.pop(SWEEP, None):  # children of this process must not inherit it
        _end_with_parent(sweep, signal.SIGTERM)


def _end_with_parent(parent: str | None, number: signal.Signals) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if parent and int(parent) != os.getppid():  # it ended before the call
        os.kill(os.getpid(), number)


def launcher_id() -> str:
    """What names the torchrun that started this process, here and nowhere else; '' without one.

    torchrun, ours or torch's own, is one process per node from the start of a job to its end,
    through all restarts. Its number may be used again later, so that its start time and the boot
    of the machine belong to the name. Where /proc is not, it has no name.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        status = Path(f"/proc/{os.getppid()}/stat").read_text(encoding="utf-8")
    except OSError:
        return ""
    after_name = status.rpartition(")")[2].split()  # the name of a program may hold blanks
    return f"{boot}-{os.getppid()}-{after_name[19]}"  # field 22 of proc(5): clock ticks since boot


def is_restarted() -> bool:
    """Whether torchrun starts this process anew because the one before it failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0

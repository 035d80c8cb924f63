"""What a process knows of its launcher, torchrun or distributed.launch, or of its sweep.

end_with_launcher()     # first; or end_with_sweep()
launcher_id()           # the same after every restart, and that of no other job
"""

import ctypes
import os
import signal
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
    and hold memory. A program between the two, such as a profiler, is no launcher. torch's own
    launcher dies of signals that the workers may have got as well: it leaves them time to save.
    """
    number, _, namespace = os.environ.get(LAUNCHER, "").partition(" ")
    has_ended = bool(number) and not Path(f"/proc/{number}").exists()
    if number == str(os.getppid()) or (has_ended and process_name().endswith(namespace)):
        end_with_parent(signal.SIGKILL, number)
    elif not number and "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(signal.SIGTERM)


def end_with_sweep() -> None:
    """Let the kernel send SIGTERM to the process of a trial when its sweep ends."""
    if sweep := os.environ.pop(SWEEP, None):  # children of this process must not inherit it
        end_with_parent(signal.SIGTERM, sweep)


def end_with_parent(number: signal.Signals, parent: str = "") -> None:
    """Let the kernel send a signal to this process when its parent, if it is this one, ends."""
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

"""torchrun with the project's exit codes, and workers that do not outlive it.

python -m distributed.launch --standalone --nproc_per_node=4 resnet50_test.py --bs 256
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

LAUNCHER = "FASTER_TRAINING_LAUNCHER"  # environment variable: the launcher's process number
PR_SET_PDEATHSIG = 1  # of prctl(2)


def end_with_launcher() -> None:
    """Let the kernel kill this worker when its launcher ends, however that ends.

    A launcher that is killed, as by the kernel when memory runs out, cannot stop its workers. They
    would go on writing to a run folder that a resumed run writes to as well, or wait for each other
    and hold memory. Only Linux can do this; elsewhere nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    launcher = os.environ.get(LAUNCHER)
    if launcher and int(launcher) != os.getppid():  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def launch(arguments: list[str]) -> int:
    """Run torchrun with these arguments.

    Returns:
        The exit code of the first process that failed, without torchrun's own traceback; 130 after
        an interruption; 128 + n for a process that signal n ended.
    """
    os.environ[LAUNCHER] = str(os.getpid())
    os.environ.setdefault("LOGLEVEL", "CRITICAL")  # the script's own line says what went wrong
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.main(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            number = -failure.exitcode
            print(f"error: process {rank} was ended by signal {number}", file=sys.stderr)
            return 128 + number
        return failure.exitcode
    except (SignalException, KeyboardInterrupt):
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))

"""torchrun with the project's exit codes, and workers that do not outlive it.

python -m distributed.launch --standalone --nproc_per_node=4 resnet50_test.py --bs 256
"""

import logging
import os
import signal
import sys

from distributed.worker import FAILURE, LAUNCHER, end_with_sweep
from errors import INTERRUPTED, LOST_PEER, first_line

SHUTDOWN_SECONDS = "110"  # from SIGTERM to SIGKILL: time to write a checkpoint


class FailureHandler(logging.Handler):
    """Hands on to the processes of a restart which one failed before them: torch logs it alone."""

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith("failed (exitcode") and isinstance(record.args, tuple):
            code, local_rank, *_ = record.args
            os.environ[FAILURE] = f"{local_rank} {code}"


def launch(arguments: list[str]) -> int:
    """Run torchrun with these arguments.

    Returns:
        The exit code of the first process that failed, 128 + n where signal n ended it; 130 after a
        signal to the launcher; 1 where the nodes did not meet, or the first one was lost.
    """
    end_with_sweep()
    os.environ[LAUNCHER] = str(os.getpid())
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN_SECONDS)
    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")  # but for those that nohup lets us ignore
    handled = [each for each in names if signal.getsignal(signal.Signals[each]) != signal.SIG_IGN]
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", ",".join(handled))  # read by torchrun
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no stack of C++ for a closed connection
    is_quiet = "LOGLEVEL" not in os.environ  # the script's own line says what went wrong
    os.environ.setdefault("LOGLEVEL", "CRITICAL")
    # These load torch, which reads the variables.
    from torch.distributed import DistError, run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    log = logging.getLogger("torch.distributed.elastic")
    log.addHandler(FailureHandler())
    log.propagate = not is_quiet
    try:
        run.run(run.parse_args(arguments))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return failure.exitcode
        print(f"error: process {rank} was ended by signal {-failure.exitcode}", file=sys.stderr)
        return 128 - failure.exitcode
    except (RendezvousError, DistError) as error:
        print(f"error: no connection to the first node ({first_line(error)})", file=sys.stderr)
        return LOST_PEER
    except (SignalException, KeyboardInterrupt):
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))

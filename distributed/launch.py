"""torchrun with the project's exit codes, and workers that do not outlive it.

python -m distributed.launch --standalone --nproc_per_node=4 resnet50_test.py --bs 256
"""

from __future__ import annotations

import logging
import os
import sys

from distributed.worker import LAUNCHER
from errors import INTERRUPTED, first_line


def launch(arguments: list[str]) -> int:
    """Run torchrun with these arguments.

    Returns:
        The exit code of the first process that failed, without torchrun's own traceback; 130 after
        an interruption; 128 + n for a process that signal n ended.
    """
    os.environ[LAUNCHER] = str(os.getpid())
    if "LOGLEVEL" not in os.environ:  # the script's own line says what went wrong
        os.environ["LOGLEVEL"] = "CRITICAL"
        logging.disable(logging.CRITICAL)  # torch's messages about the end of each worker
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no stack of C++ for a closed connection
    # These load torch, which reads the variables.
    from torch.distributed import DistError, run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    from distributed.agent import JobEnded, first_failure, use_job_agent

    use_job_agent()
    try:
        run.main(arguments)
    except ChildFailedError as error:
        rank, failure = first_failure(error.failures)
        if failure.exitcode < 0:
            print(f"error: process {rank} was ended by signal {-failure.exitcode}", file=sys.stderr)
        return shell_exit_code(failure.exitcode)
    except JobEnded as error:
        print(f"error: {error}", file=sys.stderr)
        return shell_exit_code(error.exit_code)
    except (RendezvousError, DistError) as error:
        print(
            f"error: the nodes of this job cannot reach each other ({first_line(error)}); the "
            "job has ended on another node, or a node was not started or has another address",
            file=sys.stderr,
        )
        return 1
    except (SignalException, KeyboardInterrupt):
        return INTERRUPTED
    return 0


def shell_exit_code(exit_code: int) -> int:
    """An exit code as shells have it: 128 + n for a process that signal n ended, which is -n."""
    return 128 - exit_code if exit_code < 0 else exit_code


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))

"""torchrun with the project's exit codes.

python -m distributed.launch --standalone --nproc_per_node=4 resnet50_test.py --bs 256
"""

from __future__ import annotations

import os
import sys


def launch(arguments: list[str]) -> int:
    """Run torchrun with these arguments.

    Returns:
        The exit code of the first process that failed, without torchrun's own traceback; 130 after
        an interruption; 128 + n for a process that signal n ended.
    """
    os.environ.setdefault("LOGLEVEL", "CRITICAL")  # the script's own line says what went wrong
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.main(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            signal = -failure.exitcode
            print(f"error: process {rank} was ended by signal {signal}", file=sys.stderr)
            return 128 + signal
        return failure.exitcode
    except (SignalException, KeyboardInterrupt):
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))

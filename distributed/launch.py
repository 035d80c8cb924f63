"""TODO."""

from __future__ import annotations

import os
import sys


def launch(arguments: list[str]) -> int:
    """torchrun with these arguments; the exit code is that of the first process that failed, without torchrun's traceback."""
    os.environ.setdefault(
        "LOGLEVEL", "CRITICAL"
    )  # torchrun's own report of a failed process: ours is one line
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.main(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            print(f"error: process {rank} was ended by signal {-failure.exitcode}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except (SignalException, KeyboardInterrupt):
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))

"""The two ways a run ends early, and their exit codes. The lowest module: everything may import it.

raise InputError("--bs 0: must be at least 1")       # one line on stderr, exit code 2
raise NonFiniteLoss("...")                            # exit code 3
sys.exit(exit_code(main))                             # what both entry scripts end with
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

BAD_INPUT, NON_FINITE, INTERRUPTED = 2, 3, 130
GRACE = 3.0  # seconds that rank 0 has to speak first


class InputError(Exception):
    """Bad flags or data: the message is one line that says what, why, and what to do."""


class NonFiniteLoss(Exception):
    """The loss stayed non-finite after every recovery that was allowed."""


class Interrupted(Exception):
    """SIGINT or SIGTERM arrived and a checkpoint was written; the message names it."""


def exit_code(main: Callable[[], None]) -> int:
    """Run `main` and turn the exceptions above into one line on stderr and the documented exit code.

    Under torchrun one rank speaks for all: the others wait first, and are ended meanwhile when rank 0 failed too.
    """
    try:
        main()
    except (InputError, NonFiniteLoss, Interrupted) as error:
        first = os.environ.get("RANK", "0") == "0"
        if not first:
            time.sleep(GRACE)
        if first or isinstance(error, InputError):  # the others happen to all ranks alike
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return {InputError: BAD_INPUT, NonFiniteLoss: NON_FINITE, Interrupted: INTERRUPTED}[
            type(error)
        ]
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0

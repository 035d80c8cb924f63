"""torchrun with the project's exit codes, and workers that do not outlive it.

python -m distributed.launch --standalone --nproc_per_node=4 resnet50_test.py --bs 256
"""

import contextlib
import logging
import os
import signal
import socket
import sys
from argparse import Namespace
from types import FrameType

from distributed.waiting import named_wait, why_unreachable
from distributed.worker import LAUNCHER, end_with_sweep, process_name
from errors import INTERRUPTED, LOST_PEER, exit_code, first_line, refused_as, stop_signals

SHUTDOWN_SECONDS = "110"  # from SIGTERM to SIGKILL: time to write a checkpoint
START_SECONDS = 300.0  # that --timeout allows where the script has none
MOST_SECONDS = 1e9


def launch(arguments: list[str]) -> int:
    """Run torchrun with these arguments.

    Returns:
        The exit code of the first process that failed, 128 + n where signal n ended it; 130 after a
        signal to the launcher; 1 where the nodes did not meet, or the first one was lost.
    Raises:
        InputError: this is the first node, and cannot listen at its port.
    """
    end_with_sweep()
    os.environ[LAUNCHER] = process_name()
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN_SECONDS)
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGTERM")  # read by torchrun
    for each in set(stop_signals()) - {signal.SIGTERM}:
        signal.signal(each, terminate)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no stack of C++ for a closed connection
    is_quiet = "LOGLEVEL" not in os.environ  # the script's own line says what went wrong
    os.environ.setdefault("LOGLEVEL", "CRITICAL")
    # These load torch, which reads the variables.
    from torch.distributed import DistError, run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    log = logging.getLogger("torch.distributed.elastic")
    log.addHandler(logging.NullHandler())  # else warnings are printed
    log.propagate = not is_quiet
    from distributed.interface import check_port

    args, seconds = run.parse_args(arguments), START_SECONDS
    with contextlib.suppress(KeyError, ValueError):  # a wrong number is refused by the script
        words = [word for each in args.training_script_args for word in each.split("=", 1)]
        given = float(dict(zip(words, words[1:]))["--timeout"])
        seconds = given if 0 < given < MOST_SECONDS else START_SECONDS
    if args.standalone:  # whatever the name of this machine is, and PET_NNODES
        args.nnodes, args.local_addr = "1", args.local_addr or "127.0.0.1"
    elif args.rdzv_backend == "static" and args.node_rank == 0 and args.master_port:
        check_port(args.master_port)
    # torch's own limits come after that of `named_wait`.
    later = int(seconds) + 60
    args.rdzv_conf = f"timeout={later},join_timeout={later},{args.rdzv_conf}".strip(",")
    try:
        what = "MASTER_ADDR, MASTER_PORT or another setting of the launcher"
        wait = named_wait(lambda: missing_nodes(args), seconds, is_over=has_workers)
        with refused_as(what), wait:
            run.run(args)
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


def terminate(number: int, _: FrameType | None) -> None:
    """End the job by one SIGTERM, after a checkpoint; a closed terminal may send SIGHUP twice."""
    if number != signal.SIGINT:  # a second Ctrl-C ends at once
        signal.signal(number, signal.SIG_IGN)
    os.kill(os.getpid(), signal.SIGTERM)


def missing_nodes(args: Namespace) -> str:
    """What the launcher waits for before its workers start."""
    if args.standalone:
        return f"this machine's start; to look up its own name, {socket.gethostname()}, takes long"
    end = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port}"
    host, _, port = end.rpartition(":")
    why = why_unreachable(host.strip("[]"), int(port)) if port.strip("0").isdecimal() else ""
    return why or f"not all launchers of {args.nnodes} nodes have come"


def has_workers() -> bool:
    """Whether this process has started others."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(exit_code(lambda: launch(sys.argv[1:])))

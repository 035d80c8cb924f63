"""torchrun's agent on each node, which ends the job where a restart would only repeat a failure.

use_job_agent()         # torchrun makes a JobAgent from now on
torch.distributed.run.main(arguments)

torch restarts its workers after every failure and has no setting for it. `LocalElasticAgent` leaves
`_monitor_workers` to its subclasses, and torch itself sets `_remaining_restarts` to 0 there for a
worker that no signal ends. Workers could find out for themselves that they need not start again,
but only after all of them had loaded torch and met once more.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from typing import Any

from torch.distributed import Store
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.launcher import api

from backends.torch_compat import has_shutdown_timeout
from errors import FINAL_EXIT_CODES

SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # torch's environment variable
SHUTDOWN_SECONDS = 110  # from SIGTERM to SIGKILL where the variable is not set
EXIT_CODE_KEY, COUNT_KEY = "job/exit_code", "job/nodes_that_know"  # in the store of a start
RESTARTS_KEY = "job/restarts"  # of each node
GOODBYE_SECONDS = 10.0  # within which all nodes have read the exit code


class JobEnded(Exception):
    """Another node has ended the job; the message says so, and exit_code is that of the job."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def first_failure(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """The rank whose failure made the others fail, and that failure, from those of all ranks.

    It is the first one whose exit code forbids a restart, or else the first one.
    """
    in_order = sorted(failures.items(), key=lambda item: item[1].timestamp)
    final = [item for item in in_order if item[1].exitcode in FINAL_EXIT_CODES]
    return (final or in_order)[0]


class JobAgent(LocalElasticAgent):
    """torch's agent, with three differences.

    1. It does not restart after an exit code of FINAL_EXIT_CODES, and the agents of the other nodes
       end when one of them does: they look into the store in which they have met.
    2. All nodes count the same restarts. In torch a node whose workers still run when another node
       restarts its own does not count that, and tells its workers a number of its own in
       TORCHELASTIC_RESTART_COUNT.
    3. With every torch, workers have the time of TORCH_ELASTIC_SHUTDOWN_TIMEOUT to end after a
       signal to the agent. Workers of a job in which one has failed have torch's 30 s.
    """

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        super()._rendezvous(worker_group)
        store, nodes = worker_group.store, worker_group.group_world_size or 1
        if store is None or nodes == 1:
            return
        restarts = worker_group.spec.max_restarts - self._remaining_restarts
        store.set(f"{RESTARTS_KEY}/{worker_group.group_rank}", str(restarts))
        most = max(int(store.get(f"{RESTARTS_KEY}/{node}")) for node in range(nodes))
        self._remaining_restarts = worker_group.spec.max_restarts - most

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        store, nodes = worker_group.store, worker_group.group_world_size or 1
        if store is not None and nodes > 1:
            self._leave_with_other_nodes(store)
        if result.is_failed():
            _, failure = first_failure(result.failures)
            if failure.exitcode in FINAL_EXIT_CODES:
                self._remaining_restarts = 0
            if store is not None and nodes > 1 and self._remaining_restarts == 0:
                self._tell_other_nodes(store, failure.exitcode, nodes=nodes)
        return result

    def _leave_with_other_nodes(self, store: Store) -> None:
        """Raise JobEnded if the agent of another node has ended the job, or is gone."""
        try:
            if not store.check([EXIT_CODE_KEY]):
                return
            exit_code = int(store.get(EXIT_CODE_KEY))
            store.add(COUNT_KEY, 1)
        except RuntimeError:  # the store is in the agent of the first node
            raise JobEnded("the connection to the first node is lost", exit_code=1) from None
        raise JobEnded("the job has ended on another node; see its messages", exit_code)

    def _tell_other_nodes(self, store: Store, exit_code: int, *, nodes: int) -> None:
        """Write the exit code into the store, and wait until all nodes have read it."""
        with contextlib.suppress(RuntimeError):  # the node of the store has read it, and has left
            store.set(EXIT_CODE_KEY, str(exit_code))
            end = time.monotonic() + GOODBYE_SECONDS
            known = store.add(COUNT_KEY, 1)
            while known < nodes and time.monotonic() < end:
                time.sleep(0.1)
                known = store.add(COUNT_KEY, 0)

    def _shutdown(self, *arguments: Any, **named: Any) -> None:
        is_signalled = bool(arguments)  # with its number; after a failure torch passes none
        if is_signalled and self._pcontext is not None and not has_shutdown_timeout(type(self)):
            seconds = int(os.environ.get(SHUTDOWN_TIMEOUT, SHUTDOWN_SECONDS))
            self._pcontext.close(arguments[0], timeout=seconds)
        super()._shutdown(*arguments, **named)


def use_job_agent() -> None:
    """Let torchrun make `JobAgent`s in this process, and give workers `SHUTDOWN_SECONDS` to end."""
    os.environ.setdefault(SHUTDOWN_TIMEOUT, str(SHUTDOWN_SECONDS))
    api.LocalElasticAgent = JobAgent  # type: ignore[misc]

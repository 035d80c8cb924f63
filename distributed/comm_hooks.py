"""What DistributedDataParallel sends: gradients as they are, in 16 bits or of low rank; a step late; or weights now and then.

    hook = Lag(world)                                          # or Compressed(world, "bf16"), Local(world, every=8, after=100)
    wrapped.register_comm_hook(None, hook.run)

Each counts its payload into `world.bytes_sent`. `state_dict` holds what a resumed run needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from distributed.averaging import RankAverager, average

COMPRESSIONS = ("none", "fp16", "bf16", "powersgd")
SYNCS = ("sync", "lag", "local")
WIRE = {"fp16": torch.float16, "bf16": torch.bfloat16}
POWER_SGD_START = 2  # steps before PowerSGD compresses: torch's least with error feedback


class AllReduceHook:
    """Averaged gradients through torch's own hooks.

    Args:
        world: `distributed.World`.
        name: one of `COMPRESSIONS`.
        rank: of PowerSGD (arXiv:1905.13727), whose error feedback is not saved: a resumed run starts without it.
    """

    def __init__(self, world: Any, name: str = "none", rank: int = 2) -> None:
        self.world, self.name = world, name
        self.watchers: list[Callable[[Any], None]] = []  # called with each bucket before it is sent
        self.power = None
        if name == "powersgd":
            self.power = powerSGD_hook.PowerSGDState(None, rank, POWER_SGD_START)  # type: ignore[arg-type]

    def run(self, state, bucket):  # no annotations: DDP checks them, and they are strings here
        """The hook."""
        for watcher in self.watchers:
            watcher(bucket)
        buffer = bucket.buffer()
        if self.power is not None:
            before, early = (
                self.power.total_numel_after_compression,
                self.power.iter < POWER_SGD_START,
            )
            future = powerSGD_hook.powerSGD_hook(self.power, bucket)
            sent = buffer.numel() if early else self.power.total_numel_after_compression - before
            self.world.bytes_sent += sent * buffer.element_size()
            return future
        self.world.bytes_sent += buffer.numel() * WIRE.get(self.name, buffer.dtype).itemsize
        hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
        return hooks.get(self.name, default_hooks.allreduce_hook)(dist.group.WORLD, bucket)  # type: ignore[arg-type]

    def after_step(self, parameters: Sequence[Tensor]) -> None:
        """Nothing."""

    def state_dict(self, parameters: Sequence[Tensor]) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """Nothing."""


class DelayedAllReduce(AllReduceHook):
    """Each step takes the averaged gradient of the step before, so that sending overlaps a whole step (arXiv:1810.01993).

    The first step takes zeros. A copy of the gradients more is kept.
    """

    def __init__(self, world: Any, name: str = "none") -> None:
        super().__init__(world, name)
        self.late: dict[
            Tensor, tuple[Any, Tensor]
        ] = {}  # of each parameter: the work that averages it, its gradient

    def run(self, state, bucket):  # as above
        """The hook."""
        for watcher in self.watchers:
            watcher(bucket)
        buffer, parameters, found = bucket.buffer(), bucket.parameters(), bucket.gradients()
        sent = buffer.to(WIRE.get(self.name, buffer.dtype), copy=True).div_(self.world.size)
        self.world.bytes_sent += sent.nbytes
        work = dist.all_reduce(sent, async_op=True)
        for p, gradient in zip(parameters, found):
            late = self.late.get(p)
            place = gradient.storage_offset() - buffer.storage_offset()
            self.late[p] = work, sent.as_strided(gradient.shape, gradient.stride(), place)
            if late is None:
                gradient.zero_()
            else:
                gradient.copy_(arrived(*late))
        devices = [buffer.device] if buffer.device.type == "cuda" else None
        done: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        done.set_result(buffer)
        return done

    def state_dict(self, parameters: Sequence[Tensor]) -> dict[str, Any]:
        """The gradients under way, the same on all ranks."""
        return {
            str(number): arrived(*self.late[p]).cpu()
            for number, p in enumerate(parameters)
            if p in self.late
        }

    def load_state_dict(self, state: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """Undo to `state_dict`."""
        self.late = {
            p: (None, state[str(n)].to(p.device))
            for n, p in enumerate(parameters)
            if str(n) in state
        }


def arrived(work: Any, gradient: Tensor) -> Tensor:
    """The gradient, once it is averaged."""
    if work is not None:
        work.wait()
    return gradient


class LocalSGD(AllReduceHook):
    """Post-local SGD (arXiv:1808.07217): averaged gradients at first, then each rank alone, and the mean of weights now and then.

    torch's own averager puts new memory under the weights, which takes them out of channels_last; ours keeps them where they are.

    Args:
        world: `distributed.World`.
        every: steps between averagings of the weights.
        after: steps with averaged gradients.
    """

    def __init__(self, world: Any, every: int, after: int = 0) -> None:
        super().__init__(world)
        self.every, self.after, self.steps = every, after, 0
        self.exchange = RankAverager(None, None)

    def run(self, state, bucket):  # as above
        """The hook."""
        if self.steps < self.after:
            return super().run(state, bucket)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    def after_step(self, parameters: Sequence[Tensor]) -> None:
        """Count the step; average the weights if it is time."""
        self.steps += 1
        if self.steps > self.after and (self.steps - self.after) % self.every == 0:
            self.settle(parameters)

    def settle(self, parameters: Sequence[Tensor]) -> None:
        """Weights become their mean over the ranks."""
        average(parameters, self.exchange)
        self.world.bytes_sent += self.exchange.take_bytes()

    def state_dict(self, parameters: Sequence[Tensor]) -> dict[str, Any]:
        """How many steps there were."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """Undo to `state_dict`."""
        self.steps = state["steps"]

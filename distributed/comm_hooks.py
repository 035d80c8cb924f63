"""What data-parallel training sends: gradients, compressed or a step late; or weights.

    hook = DelayedAllReduce(world)       # or AllReduceHook(world, "bf16"), LocalSGD(world, every=8)
    wrapped.register_comm_hook(None, hook.run)     # wrapped: a DistributedDataParallel

Each hook counts its payload into `world.bytes_sent`; its `state_dict` holds what a resumed run
needs. To add one, subclass `AllReduceHook`: it declares everything that the training loop asks of a
hook.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future

from backends import torch_compat
from distributed.averaging import RankAverager, average_tensors
from distributed.world import World

COMPRESSIONS = ("none", "fp16", "bf16", "powersgd")
SYNCS = ("sync", "lag", "local", "diloco")
WIRE_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
POWER_SGD_START = 2  # steps before PowerSGD compresses: torch's least with error feedback


class AllReduceHook:
    """Gradients averaged over the ranks, through torch's own hooks; the base class of all hooks.

    Args:
        world: the ranks.
        compression: one of `COMPRESSIONS`.
        rank: of PowerSGD's approximation (arXiv:1905.13727). Its error feedback is not saved: a
            resumed run starts without it.

    Attributes:
        replicas_diverge: whether the ranks' weights differ between two averagings.
        observers: called with each bucket of this rank's own gradients before it is sent.
    """

    replicas_diverge = False

    def __init__(self, world: World, compression: str = "none", *, rank: int = 2) -> None:
        self.world, self.compression = world, compression
        self.observers: list[Callable[[dist.GradBucket], None]] = []
        self.rank = rank
        self.power_sgd = self._new_power_sgd() if compression == "powersgd" else None

    def _new_power_sgd(self) -> powerSGD_hook.PowerSGDState:
        return powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=self.rank,
            start_powerSGD_iter=POWER_SGD_START,
        )

    def run(self, state, bucket):  # DDP compares annotations with types, and ours are strings
        """What DistributedDataParallel calls: (None, GradBucket) -> Future of its buffer."""
        self._notify_observers(bucket)
        if self.power_sgd is not None:
            return self._power_sgd(bucket)
        buffer = bucket.buffer()
        wire_dtype = WIRE_DTYPES.get(self.compression, buffer.dtype)
        self.world.bytes_sent += buffer.numel() * wire_dtype.itemsize
        if buffer.is_cuda and must_not_use_futures():
            return self._all_reduce_now(buffer, wire_dtype)
        send = {
            "none": default_hooks.allreduce_hook,
            "fp16": default_hooks.fp16_compress_hook,
            "bf16": default_hooks.bf16_compress_hook,
        }[self.compression]
        return send(dist.group.WORLD, bucket)  # type: ignore[arg-type]

    def _all_reduce_now(self, buffer: Tensor, wire_dtype: torch.dtype) -> Future[Tensor]:
        """Average a buffer of gradients, and wait for it before the backward pass goes on."""
        sent = buffer.to(wire_dtype, copy=True).div_(self.world.size)
        dist.all_reduce(sent)
        return _finished(buffer.copy_(sent))

    def _power_sgd(self, bucket: dist.GradBucket) -> Future[Tensor]:
        power_sgd, buffer = self.power_sgd, bucket.buffer()
        assert power_sgd is not None
        _replace_non_finite(power_sgd)
        before = power_sgd.total_numel_after_compression
        uncompressed = power_sgd.iter < POWER_SGD_START
        future = powerSGD_hook.powerSGD_hook(power_sgd, bucket)
        sent = power_sgd.total_numel_after_compression - before
        self.world.bytes_sent += (buffer.numel() if uncompressed else sent) * buffer.element_size()
        return future

    def _notify_observers(self, bucket: dist.GradBucket) -> None:
        for observe in self.observers:
            observe(bucket)

    def start(self, parameters: Sequence[Tensor]) -> None:
        """Called before the first step, when all ranks have the same weights; here it is no use."""

    def after_step(self, parameters: Sequence[Tensor]) -> None:
        """Called after each optimizer step; here nothing is left to do."""

    def sync_replicas(self, parameters: Sequence[Tensor]) -> None:
        """Make the ranks' weights equal, before evaluation; here they are equal at all times."""

    def state_dict(self, parameters: Sequence[Tensor]) -> dict[str, Any]:
        """Everything that a resumed run needs of the hook; here that is nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """Load what `state_dict` returned; PowerSGD starts again without error feedback."""
        if self.power_sgd is not None:
            self.power_sgd = self._new_power_sgd()


class DelayedAllReduce(AllReduceHook):
    """Each step takes the averaged gradient of the step before (arXiv:1810.01993).

    Sending then overlaps a whole step. The first step takes zeros. One more copy of the gradients
    is kept.
    """

    def __init__(self, world: World, compression: str = "none") -> None:
        super().__init__(world, compression)
        # Of each parameter: the work that averages its last gradient, and where that gradient
        # arrives.
        self.in_flight: dict[Tensor, tuple[dist.Work | None, Tensor]] = {}

    def run(self, state, bucket):  # see AllReduceHook.run
        """Send this step's gradients, and replace them by those of the step before."""
        self._notify_observers(bucket)
        buffer = bucket.buffer()
        wire_dtype = WIRE_DTYPES.get(self.compression, buffer.dtype)
        sent = buffer.to(wire_dtype, copy=True).div_(self.world.size)
        self.world.bytes_sent += sent.nbytes
        work = dist.all_reduce(sent, async_op=True)
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients()):
            previous = self.in_flight.get(parameter)
            offset = gradient.storage_offset() - buffer.storage_offset()
            arriving = sent.as_strided(gradient.shape, gradient.stride(), offset)
            self.in_flight[parameter] = work, arriving
            if previous is None:
                gradient.zero_()
            else:
                gradient.copy_(_wait_for(*previous))
        return _finished(buffer)

    def state_dict(self, parameters: Sequence[Tensor]) -> dict[str, Any]:
        """The gradients in flight by the parameters' numbers, the same on all ranks."""
        numbered = enumerate(parameters)
        sent = {str(n): self.in_flight[p] for n, p in numbered if p in self.in_flight}
        return {number: _wait_for(*each).cpu() for number, each in sent.items()}

    def load_state_dict(self, state: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """Load what `state_dict` returned."""
        self.in_flight = {
            parameter: (None, state[str(number)].to(parameter.device))
            for number, parameter in enumerate(parameters)
            if str(number) in state
        }


class LocalSGD(AllReduceHook):
    """Post-local SGD (arXiv:1808.07217): averaged gradients first, later only averaged weights.

    torch's own averager puts new memory under the weights, which takes them out of channels_last;
    this one keeps them where they are.

    Args:
        world: the ranks.
        every: steps between two averagings of the weights.
        after: steps at the start in which gradients are averaged instead.
    """

    replicas_diverge = True

    def __init__(self, world: World, every: int, *, after: int = 0) -> None:
        super().__init__(world)
        self.every, self.after, self.steps = every, after, 0
        self.averager = RankAverager(None, None)

    def run(self, state, bucket):  # see AllReduceHook.run
        """Average gradients during the first `after` steps; later leave each rank its own."""
        if self.steps < self.after:
            return super().run(state, bucket)
        return _finished(bucket.buffer())

    def after_step(self, parameters: Sequence[Tensor]) -> None:
        """Count the step, and average the weights when it is time."""
        self.steps += 1
        if self.steps > self.after and (self.steps - self.after) % self.every == 0:
            self.sync_replicas(parameters)

    def sync_replicas(self, parameters: Sequence[Tensor]) -> None:
        """Replace the weights by their mean over the ranks."""
        average_tensors(parameters, self.averager)
        self.world.bytes_sent += self.averager.take_bytes()

    def state_dict(self, parameters: Sequence[Tensor]) -> dict[str, Any]:
        """The number of steps so far."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """Load what `state_dict` returned."""
        self.steps = state["steps"]


def _replace_non_finite(power_sgd: powerSGD_hook.PowerSGDState) -> None:
    """Clean PowerSGD's memory of a step whose gradients were not finite. Nothing waits for it.

    That step is skipped, but its error feedback and its factors would make all later steps
    non-finite. Errors become zeros, and factors random numbers, the same on all ranks.
    """
    for error in power_sgd.error_dict.values():
        error.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    for factors in power_sgd.q_memory_dict.values():
        generator = torch.Generator(factors.device).manual_seed(0)
        fresh = torch.randn(
            factors.shape, generator=generator, device=factors.device, dtype=factors.dtype
        )
        factors.copy_(torch.where(factors.isfinite().all(), factors, fresh))


def _wait_for(work: dist.Work | None, gradient: Tensor) -> Tensor:
    """The gradient, once it is averaged; `work` is None for one that came out of a checkpoint."""
    if work is not None:
        work.wait()
    return gradient


def must_not_use_futures() -> bool:
    """Whether the futures of this process group are not to be trusted with a GPU's tensors."""
    return dist.get_backend() == "gloo" and torch_compat.gloo_future_is_early()


def _finished(buffer: Tensor) -> Future[Tensor]:
    """A future that already holds its buffer."""
    future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
    future.set_result(buffer)
    return future

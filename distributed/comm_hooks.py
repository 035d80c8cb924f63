"""What data-parallel training sends: gradients, compressed or not; or weights.

    hook = RoundedGradients(world, "int4")  # or AllReduceHook(world), LocalSGD(world, every=8)
    wrapped.register_comm_hook(None, hook.run)     # wrapped: a DistributedDataParallel
    hook.start(parameters)                         # hook.after_step(parameters) after each step,
                                                   # hook.sync_replicas(parameters) at the end

Each hook counts its payload into `world.traffic`; its `state_dict` holds what a resumed run
needs. To add one, subclass `AllReduceHook`: it declares everything that the training loop asks of a
hook.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future

from distributed.averaging import RankAverager, Traffic, average_tensors
from distributed.quantization import dequantize, quantize
from distributed.world import World
from errors import InputError

ROUNDED_BITS = {"int8": 8, "int4": 4, "sign": 1}  # of the compressions of `RoundedGradients`
SMALLEST_ROUNDED = 1024  # elements of a matrix; what is smaller is a small part of a model's bytes
SYNCS = ("sync", "local", "diloco")
WIRE_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class AllReduceHook:
    """Gradients averaged over the ranks, through torch's own hooks; the base class of all hooks.

    Args:
        compression: one of `compressions`.

    Raises:
        ValueError: the hook does not have this compression.
    """

    replicas_diverge = False  # whether the ranks' weights differ between two averagings
    compressions: Sequence[str] = ("none", "fp16", "bf16")

    def __init__(self, world: World, compression: str = "none") -> None:
        if compression not in self.compressions:
            raise ValueError(f"compression={compression} is not one of {self.compressions}")
        self.world, self.compression = world, compression
        # Called with each bucket of this rank's own gradients before it is sent.
        self.observers: list[Callable[[dist.GradBucket], None]] = []

    # DDP compares annotations with types, and ours are strings.
    def run(self, state, bucket):  # type: ignore[no-untyped-def]
        """What DistributedDataParallel calls: (None, GradBucket) -> Future of its buffer."""
        for observe in self.observers:
            observe(bucket)
        self.world.stage += 1
        return self.send(bucket)

    def send(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Replace the gradients of a bucket by what the optimizer gets, and count the bytes."""
        buffer = bucket.buffer()
        wire_dtype = WIRE_DTYPES.get(self.compression, buffer.dtype)
        payload = buffer.numel() * wire_dtype.itemsize
        self.world.traffic += Traffic.reduced(payload, self.world.size)
        send = {
            "none": default_hooks.allreduce_hook,
            "fp16": default_hooks.fp16_compress_hook,
            "bf16": default_hooks.bf16_compress_hook,
        }[self.compression]
        return send(dist.group.WORLD, bucket)  # type: ignore[arg-type]

    def start(self, parameters: Sequence[Tensor]) -> None:
        """Called before the first step, when all ranks have the same weights; does nothing here."""

    def after_step(self, parameters: Sequence[Tensor]) -> None:
        """Called after each optimizer step; here nothing is left to do."""

    def sync_replicas(self, parameters: Sequence[Tensor]) -> None:
        """Make the ranks' weights equal, before evaluation; here they are equal at all times."""

    def state_dict(self, parameters: Sequence[Tensor]) -> dict[str, Any]:
        """Everything that a resumed run needs of the hook; here that is nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """Load what `state_dict` returned."""

    def rank_state_dict(self, parameters: Sequence[Tensor]) -> dict[str, Tensor]:
        """What a resumed run needs of the hook that is this rank's own; here that is nothing.

        The mean over the ranks must mean the same for any number of ranks that take it.
        """
        return {}

    def load_rank_state_dict(self, state: dict[str, Tensor], parameters: Sequence[Tensor]) -> None:
        """Load what `rank_state_dict` returned, or its mean over the ranks."""


class RoundedGradients(AllReduceHook):
    """Gradients rounded to few bits, which each rank corrects by its next ones (error feedback).

    On each of W ranks, with g its gradient and e what rounding has left so far, zeros at first:
        s = rounded(g + e),  e <- g + e - s;  the optimizer gets the mean of s over the ranks.
    So the sum of all gradients that were sent is off by the last e alone (Karimireddy et al.,
    arXiv:1901.09847), unless a loss scale changes in between. Matrices of at least 1,024 elements
    are rounded (see `quantization.py`), the rest is sent in bf16, and the backward pass waits for
    it. All codes go to all ranks instead of being reduced on the way: a rank sends 1/4 (int8),
    1/7.5 (int4) or 1/26 (sign) of fp32's bytes, and receives as much from each of the others.

    Where a step is skipped because its gradients are not finite, e is zero afterwards in the rows
    that were not.
    """

    compressions = tuple(ROUNDED_BITS)

    def __init__(self, world: World, compression: str) -> None:
        super().__init__(world, compression)
        self.bits = ROUNDED_BITS[compression]
        self.averager = RankAverager()
        # e of each parameter that is rounded
        self.errors: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def send(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Send this step's gradients plus the last rounding error, and keep the new error."""
        gradients, buffer = dict(zip(bucket.parameters(), bucket.gradients())), bucket.buffer()
        matrices = [p for p in gradients if p.ndim > 1 and p.numel() >= SMALLEST_ROUNDED]
        rounded = [gradients.pop(p) for p in matrices] or [buffer[:0]]  # also without a matrix
        whole = list(gradients.values()) or [buffer[:0]]
        for p, g in zip(matrices, rounded):
            if p in self.errors:
                g.add_(self.errors[p])
        codes, scales = quantize(rounded, self.bits)
        others = torch.cat([g.flatten() for g in whole]).bfloat16()
        decode = partial(dequantize, bits=self.bits, like=rounded)
        received = self.averager.gather([codes, scales, others])
        self.world.traffic += self.averager.take_traffic()
        for p, g, sent in zip(matrices, rounded, decode(codes, scales)):
            self.errors[p] = (g - sent).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        buffer.zero_()
        # In the order of the ranks, so that all of them get the same bits.
        for their_codes, their_scales, their_others in received:
            torch._foreach_add_(rounded, decode(their_codes, their_scales))
            parts = their_others.to(buffer.dtype).split([g.numel() for g in whole])
            torch._foreach_add_(whole, [part.view(g.shape) for part, g in zip(parts, whole)])
        return _finished(buffer.div_(self.world.size))

    def rank_state_dict(self, parameters: Sequence[Tensor]) -> dict[str, Tensor]:
        """What rounding has left on this rank, by the parameters' numbers."""
        numbered = enumerate(parameters)
        return {f"gradient {n}": self.errors[p].cpu() for n, p in numbered if p in self.errors}

    def load_rank_state_dict(self, state: dict[str, Tensor], parameters: Sequence[Tensor]) -> None:
        numbered = {f"gradient {n}": p for n, p in enumerate(parameters)}
        self.errors = {p: state[n].to(p.device) for n, p in numbered.items() if n in state}


class LocalSGD(AllReduceHook):
    """Post-local SGD (arXiv:1808.07217): averaged gradients first, later only averaged weights.

    torch's own averager puts new memory under the weights, which takes them out of channels_last;
    this one keeps them where they are.

    Args:
        every: steps from one averaging of the weights to the next, but for the end of an epoch.
        after: steps at the start in which gradients are averaged instead.

    Attributes:
        met: the step after which the ranks have last agreed.
    """

    replicas_diverge = True

    def __init__(self, world: World, every: int, *, after: int = 0) -> None:
        super().__init__(world)
        self.every, self.after, self.steps, self.met = every, after, 0, after
        self.averager = RankAverager()

    def send(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Average gradients during the first `after` steps; later leave each rank its own."""
        if self.steps < self.after:
            return super().send(bucket)
        return _finished(bucket.buffer())

    def after_step(self, parameters: Sequence[Tensor]) -> None:
        self.steps += 1
        if self.steps == self.after:
            self.start(parameters)
        elif self.steps - self.met >= self.every:
            self.outer_step(parameters)

    def outer_step(self, parameters: Sequence[Tensor]) -> None:
        """What the ranks do together after `every` steps: here they average the weights."""
        average_tensors(parameters, self.averager)
        self.world.traffic += self.averager.take_traffic()
        self.met = self.steps

    def sync_replicas(self, parameters: Sequence[Tensor]) -> None:
        if self.met < self.steps:
            self.outer_step(parameters)

    def state_dict(self, parameters: Sequence[Tensor]) -> dict[str, Any]:
        return {"steps": self.steps, "met": self.met, "after": self.after}

    def load_state_dict(self, state: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        if (after := state.get("after", self.after)) != self.after:
            raise InputError(
                f"gradients were to be averaged in the first {after} steps, which cannot become "
                f"{self.after}; use the flags of the first run"
            )
        self.steps = state.get("steps", 0)  # 0 after a run without this hook
        self.met = state.get("met", self.after)


def _finished(buffer: Tensor) -> Future[Tensor]:
    """A future that already holds its buffer."""
    future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
    future.set_result(buffer)
    return future

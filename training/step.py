"""One optimizer step: micro-batches, loss scaling, clipping, skipping what is not finite, and sums kept on the device.

step = Step(model, classification(), optimizer, precision, world, accumulate=4, clip=1.0)
step.wrap()                      # data parallelism, once the micro-batch fits the memory
step(inputs, labels)             # this rank's share of a global batch
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from backends.cuda_graph import CudaGraphRunner, Record
from backends.precision import Precision
from distributed import ddp, fsdp
from distributed.comm_hooks import AllReduceHook, LocalSGD
from distributed.world import World
from errors import InputError
from optimizers import base
from training import checkpoint
from training.losses import LossFn
from training.step_stats import ComputeTimer, LocalGradNorm, squared_norm

LOSS, HITS, LAMBDA, SAMPLES, SMALL, PER_SMALL, BIG, PER_BIG, SKIPPED, SKIPPED_RUN = range(10)
"""Entries of `Step.sums`: sums of loss, hits, lambda and samples; of what `dynamic_batch.noise_scale` takes; steps skipped this
epoch; steps skipped in a row."""


class MetaLearner(Protocol):
    """Something that learns beside the model, such as `meta_learning.MetaMixupStep`."""

    def __call__(self, step: Step, inputs: Tensor, labels: Tensor) -> None:
        """Before a step on this rank's batch; parameters, buffers and gradients are left as they are."""
        ...

    def tables(self) -> dict[str, Tensor]:
        """What has been learned, as square tables by name."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Step:
    """The training step of `model` under `task`.

    Args:
        model: on its device, unwrapped.
        task: loss and hits of a micro-batch.
        optimizer: over parameters of `model`.
        precision: autocast and loss scaling.
        world: the process group; gradients are averaged over it.
        accumulate: micro-batches of a step, at least.
        micro_batch: samples of one at most; None is no limit.
        clip: largest norm of the averaged gradient; 0 is no limit.
        sync_bn: BatchNorm over all ranks.
        say: where a line for the user goes.
        learner: called before each step, or None.
        hook: what data parallelism sends, of hooks.py; None is the gradients as they are.
    """

    def __init__(
        self,
        model: nn.Module,
        task: LossFn,
        optimizer: torch.optim.Optimizer,
        precision: Precision,
        world: World,
        accumulate: int = 1,
        clip: float = 0.0,
        sync_bn: bool = False,
        say: Callable[[str], None] = print,
        learner: MetaLearner | None = None,
        hook: AllReduceHook | None = None,
        micro_batch: int | None = None,
    ) -> None:
        self.model, self.optimizer, self.scaler = precision.prepare(model, optimizer)
        self.task = task
        self.precision, self.world, self.clip, self.sync_bn, self.info = (
            precision,
            world,
            clip,
            sync_bn,
            say,
        )
        self.splits, self.micro_batch, self.learner = accumulate, micro_batch, learner
        self.parallel: nn.Module = self.model
        self.parameters = [
            parameter for group in self.optimizer.param_groups for parameter in group["params"]
        ]
        self.sums = torch.zeros(SKIPPED_RUN + 1, dtype=torch.float64, device=world.device)
        self.hook = hook or AllReduceHook(world)
        self.communicates = isinstance(optimizer, base.CommunicatingOptimizer)
        self.replicas_diverge = self.communicates or isinstance(
            self.hook, LocalSGD
        )  # ranks' weights differ between averagings
        self.is_sharded_model = fsdp.is_sharded(
            model
        )  # ranks gather weights from each other in every micro-batch
        self.traffic = fsdp.traffic(model) if self.is_sharded_model else (0, 0)
        self.copied: tuple[Tensor, torch.cuda.Event] | None = None
        self.watch: ComputeTimer | None = None
        self.replay: CudaGraphRunner | None = None
        self.own: LocalGradNorm | None = None

    def time(self) -> None:
        """Also time what this rank computes."""
        self.watch = ComputeTimer(self.world.device)
        self.hook.watchers.append(self.watch.handed_over)

    def measure_noise(self) -> None:
        """Also sum what the gradient noise scale is estimated from: squared norms of the averaged gradient, and of the first
        micro-batch's; or, without accumulation, of each rank's. One process alone takes two micro-batches for it."""
        self.own = LocalGradNorm(self.parameters, self.world.device)
        self.hook.watchers.append(self.own.add)
        if self.world.size == 1:
            self.splits = max(self.splits, 2)

    def noise(self, totals: Sequence[float], steps: int) -> tuple[float, ...] | None:
        """Of so many steps, what `dynamic_batch.noise_scale` takes; None where that was not measured."""
        if self.own is None or steps <= 0:
            return None
        return tuple(
            totals[entry] / (steps * self.world.size) for entry in (SMALL, PER_SMALL, BIG, PER_BIG)
        )

    def take_seconds(self, all_seconds: float) -> float:
        """This rank's since the last call, without waiting for others; all there were where that was not timed."""
        return self.watch.take() if self.watch is not None else all_seconds

    def parts(self, batch: int) -> int:
        """Micro-batches of so many samples."""
        return min(batch, max(self.splits, -(-batch // (self.micro_batch or batch))))

    def wrap(self) -> None:
        """Wrap the model for the process group, once it is known whether there are micro-batches: they rule a static graph out.

        An optimizer that communicates itself (`communicates`, such as SLAMB) takes each rank's own gradients.
        """
        if self.communicates:
            return
        if self.is_sharded_model:
            return
        static = (
            self.world.max_over_ranks(int(self.splits > 1 or self.micro_batch is not None)) == 0
        )
        self.parallel = ddp.wrap(self.model, self.world, self.sync_bn, static, self.hook)

    def __call__(self, inputs: Tensor, labels: Tensor, weight: float = 1.0) -> None:
        """Do the step; micro-batches are halved while the GPU's memory runs out.

        Args:
            inputs, labels: this rank's share of the global batch.
            weight: of its mean loss in the mean over the ranks: share x ranks / global batch.
        """
        if self.replay is not None:
            self.replay(inputs, labels, weight=weight)
            return
        learner = self.learner
        while True:
            try:
                if learner is not None:
                    once, learner = learner, None
                    once(self, inputs, labels)
                sums = self.forward_backward(self.parallel, inputs, labels, weight)
                break
            except ValueError as error:
                if "more than 1 value per channel" not in str(error):
                    raise
                raise InputError(
                    "--bs 1: BatchNorm needs two values a channel; use a larger --bs or image"
                ) from None
            except torch.cuda.OutOfMemoryError:
                if (
                    self.world.size > 1
                ):  # the other ranks are inside a collective: there is no going back alone
                    raise InputError(
                        f"out of memory in mid-run on rank {self.world.rank}; use a smaller --bs"
                    ) from None
                self.halve_micro_batch(len(labels))
        if self.watch is not None:
            self.watch.stop()
        self.update(sums)

    def body(self, inputs: Tensor, labels: Tensor, weight: float) -> None:
        """The step without its exceptions: nothing in it waits for the device."""
        self.update(self.forward_backward(self.parallel, inputs, labels, weight))

    def capture(self, record: Record | None = None) -> None:
        """Record the step and replay it, each shape of batch for itself: see graphs.py."""
        self.replay = CudaGraphRunner(self.body, record)

    def set_lr(self, lr: float) -> None:
        """The learning rate of the steps to come; where they are replayed, it is written where they read it."""
        for group in self.optimizer.param_groups:
            if self.replay is None:
                group["lr"] = lr
            elif isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = torch.tensor(lr, device=self.world.device)

    def moved(self) -> None:
        """Weights or the optimizer's state were loaded, and may lie elsewhere now."""
        if self.replay is not None:
            self.replay.forget()

    def forward_backward(
        self, model: nn.Module, inputs: Tensor, labels: Tensor, weight: float = 1.0
    ) -> Tensor:
        """Gradients of weight x the mean loss of the batch, in `parts` micro-batches; returns its `sums`."""
        sums = torch.zeros(SKIPPED, dtype=torch.float64, device=labels.device)
        splits = self.parts(len(labels))
        parts = list(zip(inputs.chunk(splits), labels.chunk(splits)))
        for number, (x, y) in enumerate(parts, 1):
            early = number < len(parts)
            with ddp.no_gradient_sync(model) if early else contextlib.nullcontext():
                with self.precision.autocast():
                    loss, num_correct, mixed = self.task(model, x, y)
                counts = weight * len(y) / len(labels)
                self.scaler.scale(loss * counts).backward()
            self.world.bytes_sent += self.traffic[0] + (0 if early else self.traffic[1])
            sums[LOSS] += loss.detach() * len(y)
            sums[HITS] += num_correct
            if mixed is not None:
                sums[LAMBDA] += mixed
            sums[SAMPLES] += len(y)
            if self.own is not None and number == 1 and (early or self.world.size > 1):
                square = squared_norm(self.gradients()) if early else self.own.read()
                scale = self.scaler.scale(
                    torch.ones((), device=labels.device)
                )  # asked for its number, the scaler would wait
                sums[SMALL], sums[PER_SMALL] = square / (counts * scale).square(), 1 / len(y)
                sums[PER_BIG] = weight / (len(labels) * self.world.size)
        return sums

    def gradients(self) -> list[Tensor]:
        """Of the parameters that have one."""
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def update(self, sums: Tensor) -> None:
        """Unscale, clip, step, clear. A step with a non-finite gradient is skipped, on the device, by all ranks alike.

        The gradients are already averaged, so a non-finite one on any rank is non-finite on all; where they are not, the
        optimizer lets the others know.
        """
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        gradients = self.gradients()
        norm = fsdp.full(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))))
        skip = ~torch.isfinite(norm)
        if self.replicas_diverge and not self.communicates:
            skip = self.world.sum(skip.float()) > 0
        if self.clip:
            if self.replicas_diverge:  # one scalar more: the root of the mean square over the ranks
                norm = (self.world.sum(norm.square()) / self.world.size).sqrt()
            torch._foreach_mul_(gradients, (self.clip / (norm + 1e-6)).clamp(max=1.0))
        if self.scaler.is_enabled():
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            base.step_unless_skipped(self.optimizer, skip)
        if self.communicates:
            skip = self.optimizer.skipped > 0  # type: ignore[attr-defined]
            self.world.bytes_sent += self.optimizer.take_bytes()  # type: ignore[attr-defined]
        if self.own is not None:
            sums[BIG] = norm.square()
        self.hook.after_step(self.parameters)
        self.optimizer.zero_grad(set_to_none=True)
        self.sums[:SKIPPED] += torch.where(skip | ~torch.isfinite(sums[LOSS]), 0, sums)
        self.sums[SKIPPED] += skip
        self.sums[SKIPPED_RUN] = (self.sums[SKIPPED_RUN] + 1) * skip

    def settle(self) -> None:
        """All ranks come to have the same weights and BatchNorm statistics; in front of measuring."""
        self.world.average_buffers(self.model)
        if self.communicates:
            self.optimizer.average_weights()  # type: ignore[attr-defined]
            self.world.bytes_sent += self.optimizer.take_bytes()  # type: ignore[attr-defined]
        elif isinstance(self.hook, LocalSGD):
            self.hook.settle(self.parameters)

    def read_sums(self, wait: bool) -> list[float] | None:
        """The sums on the host. On a GPU without `wait`: those of the call before, long copied, so nothing is waited for."""
        if self.sums.device.type == "cpu":
            return self.sums.tolist()
        event = torch.cuda.Event()
        copy = self.sums.to("cpu", non_blocking=True)
        event.record()
        ready, self.copied = self.copied, (copy, event)
        if wait:
            ready, self.copied = self.copied, None
        if ready is None:
            return None
        ready[1].synchronize()
        return ready[0].tolist()

    def halve_micro_batch(self, batch: int) -> None:
        """Twice as many micro-batches a step: the same global batch in half the memory."""
        if self.parts(batch) >= batch:
            raise InputError(
                "out of memory with a micro-batch of one sample; use a smaller model or image, or another device"
            )
        before = -(-batch // self.parts(batch))
        self.micro_batch = -(-before // 2)
        self.optimizer.zero_grad(set_to_none=True)
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()
        self.info(
            f"out of memory: micro-batch halved to {self.micro_batch}, accumulation raised to {self.parts(batch)}; "
            "the global batch is unchanged (BatchNorm now sees the smaller micro-batch)"
        )

    def probe_memory(self, inputs: Tensor, labels: Tensor) -> None:
        """Halve this rank's micro-batch until this batch fits, without communication.

        Weights, statistics and random states are left as they were.
        """
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        states = checkpoint.rng_states(self.world.device)
        self.model.train()
        while True:
            try:
                self.forward_backward(self.model, inputs, labels)
                break
            except torch.cuda.OutOfMemoryError:
                self.halve_micro_batch(len(labels))
        self.optimizer.zero_grad(set_to_none=True)
        for buffer, before in zip(self.model.buffers(), buffers):
            buffer.copy_(before)
        checkpoint.set_rng_states(states, self.world.device)

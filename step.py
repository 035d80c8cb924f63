"""One optimizer step: micro-batches, loss scaling, clipping, skipping what is not finite, and sums kept on the device.

step = Step(model, classification(), optimizer, precision, world, accumulate=4, clip=1.0)
step.wrap()                      # data parallelism, once the micro-batch fits the memory
step(inputs, labels)             # this rank's share of a global batch
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import checkpoint
import distributed
import mixup
from backends import Precision
from distributed import World
from errors import InputError
from hooks import Compressed, Local
from mixup import Mix

LOSS, HITS, LAMBDA, SAMPLES, SKIPPED, SKIPPED_RUN = range(6)
"""Entries of `Step.sums`: sums of loss, hits, lambda and samples, steps skipped this epoch, steps skipped in a row."""

Task = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor, Tensor | None]]
"""(model, inputs, labels) -> (mean loss, number of hits, sum of the samples' lambda or None where nothing is mixed)."""


def classification(label_smoothing: float = 0.0) -> Task:
    """Cross-entropy in fp32 or wider and the number of correct predictions."""

    def task(model: nn.Module, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, None]:
        logits = model(inputs)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = F.cross_entropy(logits, labels, label_smoothing=label_smoothing)
        return loss, (logits.detach().argmax(1) == labels).sum(), None

    return task


class MixedClassification:
    """The task of `classification` on mixed samples; hits are weighted by lambda.

    Args:
        draw: (labels, height, width) -> how these are mixed; for texts the sizes mean nothing.
        inside: the model mixes its hidden representation itself: it is called with the inputs, the partners and lambda.
        label_smoothing: as usual.
    """

    def __init__(self, draw: Callable[[Tensor, int, int], Mix], inside: bool, label_smoothing: float = 0.0) -> None:
        self.draw, self.inside, self.label_smoothing = draw, inside, label_smoothing

    def __call__(self, model: nn.Module, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.under(self.draw(labels, *inputs.shape[-2:]), model, inputs, labels)

    def under(self, mix: Mix, model: nn.Module, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The task with the samples mixed like this."""
        logits = model(inputs, mix.partner, mix.weight) if self.inside else model(mixup.blend(inputs, mix))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = mixup.cross_entropy(logits, labels, mix, self.label_smoothing)
        return loss, mixup.hits(logits, labels, mix), mix.weight.detach().sum()


class Learner(Protocol):
    """Something that learns beside the model, such as `meta_learning.MetaLearning`."""

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
        accumulate: micro-batches of a step.
        clip: largest norm of the averaged gradient; 0 is no limit.
        sync_bn: BatchNorm over all ranks.
        say: where a line for the user goes.
        learner: called before each step, or None.
        hook: what data parallelism sends, of hooks.py; None is the gradients as they are.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        optimizer: torch.optim.Optimizer,
        precision: Precision,
        world: World,
        accumulate: int = 1,
        clip: float = 0.0,
        sync_bn: bool = False,
        say: Callable[[str], None] = print,
        learner: Learner | None = None,
        hook: Compressed | None = None,
    ) -> None:
        self.model, self.task, self.optimizer = model, task, optimizer
        self.precision, self.world, self.clip, self.sync_bn, self.say = precision, world, clip, sync_bn, say
        self.splits, self.learner = accumulate, learner
        self.scaler = precision.scaler()
        self.parallel: nn.Module = model
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.sums = torch.zeros(6, dtype=torch.float64, device=world.device)
        self.hook = hook or Compressed(world)
        self.communicates = getattr(optimizer, "communicates", False)
        self.apart = self.communicates or isinstance(self.hook, Local)  # ranks' weights differ between averagings
        self.copied: tuple[Tensor, torch.cuda.Event] | None = None

    def wrap(self) -> None:
        """Wrap the model for the process group; `splits` should be final, since a static graph rules accumulation out.

        An optimizer that communicates itself (`communicates`, such as SLAMB) takes each rank's own gradients.
        """
        if self.communicates:
            return
        self.parallel = distributed.wrap(self.model, self.world, self.sync_bn, self.splits == 1, self.hook)

    def __call__(self, inputs: Tensor, labels: Tensor) -> None:
        """Do the step; micro-batches are halved while the GPU's memory runs out."""
        learner = self.learner
        while True:
            try:
                if learner is not None:
                    once, learner = learner, None
                    once(self, inputs, labels)
                sums = self.forward_backward(self.parallel, inputs, labels)
                break
            except ValueError as error:
                if "more than 1 value per channel" not in str(error):
                    raise
                raise InputError("--bs 1: BatchNorm needs two values a channel; use a larger --bs or image") from None
            except torch.cuda.OutOfMemoryError:
                if self.world.size > 1:  # the other ranks are inside a collective: there is no going back alone
                    raise InputError(f"out of memory in mid-run on rank {self.world.rank}; use a smaller --bs") from None
                self.halve_micro_batch(len(labels))
        self.update(sums)

    def forward_backward(self, model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        """Gradients of the mean loss of the batch, in `splits` parts; returns its sums of loss, hits, lambda and samples."""
        sums = torch.zeros(SKIPPED, dtype=torch.float64, device=labels.device)
        splits = min(self.splits, len(labels))
        parts = list(zip(inputs.chunk(splits), labels.chunk(splits)))
        for number, (x, y) in enumerate(parts, 1):
            early = number < len(parts)
            with model.no_sync() if early and isinstance(model, DistributedDataParallel) else contextlib.nullcontext():
                with self.precision.autocast():
                    loss, hits, weight = self.task(model, x, y)
                self.scaler.scale(loss * (len(y) / len(labels))).backward()
            sums[LOSS] += loss.detach() * len(y)
            sums[HITS] += hits
            if weight is not None:
                sums[LAMBDA] += weight
            sums[SAMPLES] += len(y)
        return sums

    def update(self, sums: Tensor) -> None:
        """Unscale, clip, step, clear. A step with a non-finite gradient is skipped, on the device, by all ranks alike.

        The gradients are already averaged, so a non-finite one on any rank is non-finite on all; where they are not, the
        optimizer lets the others know.
        """
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        skip = ~torch.isfinite(norm)
        if self.apart and not self.communicates:
            skip = self.world.sum(skip.float()) > 0
        if self.clip:
            if self.apart:  # one scalar more: the root of the mean square over the ranks
                norm = (self.world.sum(norm.square()) / self.world.size).sqrt()
            torch._foreach_mul_(gradients, (self.clip / (norm + 1e-6)).clamp(max=1.0))
        if self.scaler.is_enabled():
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif getattr(self.optimizer, "_step_supports_amp_scaling", False):  # torch's fused optimizers skip on the device
            self.optimizer.found_inf = skip.float()  # type: ignore[attr-defined]
            self.optimizer.step()
        elif not skip:
            self.optimizer.step()
        if self.communicates:
            skip = self.optimizer.skipped > 0  # type: ignore[attr-defined]
            self.world.bytes_sent += self.optimizer.take_bytes()  # type: ignore[attr-defined]
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
        elif isinstance(self.hook, Local):
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
        if self.splits >= batch:
            raise InputError("out of memory with a micro-batch of one sample; use a smaller model or image, or another device")
        self.splits = min(2 * self.splits, batch)
        self.optimizer.zero_grad(set_to_none=True)
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()
        self.say(
            f"out of memory: micro-batch halved to {-(-batch // self.splits)}, accumulation raised to {self.splits}; "
            "the global batch is unchanged (BatchNorm now sees the smaller micro-batch)"
        )

    def probe_memory(self, inputs: Tensor, labels: Tensor) -> None:
        """Halve the micro-batch until this batch fits, without communication; then agree on the smallest of all ranks.

        Weights, statistics and random states are left as they were.
        """
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        states = checkpoint.random_states(self.world.device)
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
        checkpoint.set_random_states(states, self.world.device)
        self.splits = self.world.most(self.splits)

"""Batches that are tried before training begins; they change nothing of the model.

    probe = Probe(model, world, micro_batches, forward_backward, log=log)
    probe.fit_memory(train, largest=256, epoch=49)     # until they fit into the GPU's memory
    probe.lay_out_buckets(wrapped, train, largest=256, steps=9)         # where a run goes on

A trial is forward and backward passes without an optimizer step.
"""

import contextlib
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from backends.execution import without_compilation
from distributed.averaging import Traffic
from distributed.world import World
from errors import InputError
from input_pipeline.dataset import BatchedDataset
from training.checkpoint import rng_states, set_rng_states
from training.micro_batches import MicroBatches
from training.run_log import RunLog

STATE_TENSORS = 2  # of an optimizer for each weight, with its size, as AdamW and LAMB have them
# Of the GPU's memory. A recorded step keeps its own, and cannot be cut when memory runs out; the
# first steps of another shape of batch are computed beside it.
GRAPH_MARGIN = 0.5


@dataclass(frozen=True)
class Probe:
    """Tries batches, and halves micro-batches while memory runs out."""

    model: nn.Module  # not wrapped for data parallelism
    world: World
    micro_batches: MicroBatches
    forward_backward: Callable[[nn.Module, Tensor, Tensor], Any]  # of model or wrapped, a batch
    _: KW_ONLY
    log: RunLog

    def fit_memory(
        self, data: BatchedDataset, *, largest: int, epoch: int, records_steps: bool = False
    ) -> None:
        """Try the largest batch, so that a micro-batch that does not fit is halved at the start.

        Args:
            epoch: whose images are the largest.
            records_steps: whether the steps will be recorded as CUDA graphs.
        """
        rows = torch.arange(len(data))
        if data.lengths is not None:
            rows = torch.argsort(data.lengths, descending=True)
        reserved = self.reserve_memory(records_steps)
        for inputs, labels in data.batches([rows[:largest]], epoch=epoch):
            self.try_batch(self.model, inputs, labels)
        reserved.clear()
        torch.cuda.empty_cache()  # a graph's own memory cannot come from what torch keeps
        torch.cuda.reset_peak_memory_stats(self.world.device)  # of which a run reports its own

    def reserve_memory(self, records_steps: bool) -> list[Tensor]:
        """Return tensors as large as what a step needs and a trial lacks; as many as there fit.

        These are the optimizer's state and, on several ranks, DDP's buffers of gradients; and a
        part of the GPU's memory where steps are recorded as CUDA graphs.
        """
        reserved, device = [], self.world.device
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            for parameter in self.model.parameters():
                for _ in range(STATE_TENSORS + (self.world.size > 1)):
                    reserved.append(torch.empty_like(parameter))
            if records_steps:
                size = int(GRAPH_MARGIN * torch.cuda.mem_get_info(device)[1])
                reserved.append(torch.empty(size, dtype=torch.uint8, device=device))
        return reserved

    def lay_out_buckets(
        self, wrapped: nn.Module, data: BatchedDataset, *, largest: int, steps: int
    ) -> None:
        """Reproduce DDP's bucket layout after `steps` steps; collective.

        DDP lays out its buckets of gradients anew after one or two steps, in the order in which
        gradients become ready. A sum over more than two ranks depends on the layout by its
        rounding, so a resumed run needs the right one from its first step on. What else this
        changes, loading the checkpoint sets anew.
        """
        if self.world.size <= 2 or wrapped is self.model:
            return
        rows = torch.arange(min(largest, len(data)))
        for inputs, labels in data.batches([rows] * min(steps, 2), epoch=0):
            self.try_batch(wrapped, inputs, labels)
        self.world.traffic = Traffic()

    def try_batch(self, module: nn.Module, inputs: Tensor, labels: Tensor) -> None:
        """Halve this rank's micro-batch until a batch fits the model, which may be wrapped.

        Weights, BatchNorm statistics and random states are left as they were.
        """
        model, device = self.model, self.world.device
        buffers = [buffer.clone() for buffer in model.buffers()]
        states = rng_states(device)
        model.train()
        while True:
            try:
                # Not for a batch that may never come; DDP's layout depends on the compiled model.
                with without_compilation(module is model):
                    self.forward_backward(module, inputs, labels)
                break
            except torch.cuda.OutOfMemoryError:
                self.halve_micro_batch(len(labels))
        model.zero_grad(set_to_none=True)
        for buffer, before in zip(model.buffers(), buffers):
            buffer.copy_(before)
        set_rng_states(states, device)

    def halve_micro_batch(self, batch_size: int) -> None:
        """Go on with the same global batch in half the memory, if it has more than one sample."""
        micro_batches, number = self.micro_batches, self.micro_batches.number(batch_size)
        if number >= batch_size:
            raise InputError(
                "out of memory with a micro-batch of one sample; use a smaller model or image, "
                "or another device"
            )
        largest = -(-batch_size // number)
        micro_batches.limit = -(-largest // 2)
        self.model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        self.log.info(
            f"out of memory: micro-batch halved to {micro_batches.limit}, accumulation raised to "
            f"{micro_batches.number(batch_size)}; the global batch is unchanged "
            "(BatchNorm now sees the smaller micro-batch)"
        )

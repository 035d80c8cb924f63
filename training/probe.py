"""Batches that are tried before training begins; they change nothing of the model.

probe = Probe(model, trainer.forward_backward, micro_batches, world=world, log=log)
probe.fit_memory(train_set, batches)                # halves micro-batches until they fit the GPU
probe.lay_out_buckets(parallel_model, train_set, share=64, steps=9)     # where a run goes on
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from backends.execution import without_compilation
from distributed.averaging import Traffic
from distributed.world import World
from input_pipeline.dataset import BatchedDataset
from training.batch_sampler import DynamicBatchSampler
from training.checkpoint import rng_states, set_rng_states
from training.micro_batches import MicroBatches
from training.run_log import RunLog

STATE_TENSORS = 2  # of an optimizer for each weight, with its size, as AdamW and LAMB have them
GRAPH_MARGIN = 0.1  # of the GPU's memory: a recorded step cannot be cut further when it runs out


class Probe:
    """Tries batches: forward and backward passes without an optimizer step.

    Args:
        model: not wrapped for data parallelism.
        forward_backward: (model, inputs, labels) -> gradients of the parameters.
        micro_batches: how `forward_backward` cuts a batch.
    """

    def __init__(
        self,
        model: nn.Module,
        forward_backward: Callable[[nn.Module, Tensor, Tensor], object],
        micro_batches: MicroBatches,
        *,
        world: World,
        log: RunLog,
    ) -> None:
        self.model, self.forward_backward = model, forward_backward
        self.micro_batches, self.world, self.log = micro_batches, world, log

    def fit_memory(
        self, train_set: BatchedDataset, batches: DynamicBatchSampler, *, with_graphs: bool
    ) -> None:
        """Try the largest batch, so that a micro-batch that does not fit is halved at the start."""
        rows = torch.arange(len(train_set))
        if train_set.lengths is not None:
            rows = torch.argsort(train_set.lengths, descending=True)
        largest = max(batches.largest_share, self.micro_batches.limit or 0)
        reserved = self.reserve_memory(with_graphs)
        for inputs, labels in train_set.batches([rows[:largest]], epoch=0):
            self.try_batch(self.model, inputs, labels)
        reserved.clear()
        torch.cuda.empty_cache()  # a graph's own memory cannot come from what torch keeps

    def reserve_memory(self, with_graphs: bool) -> list[Tensor]:
        """Tensors as large as what a step needs and a trial lacks; as many of them as there fit.

        These are the optimizer's state and, on several ranks, DDP's buffers of gradients; and a
        part of the GPU's memory where steps are recorded as CUDA graphs.
        """
        device, reserved = self.world.device, []
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            for parameter in self.model.parameters():
                for _ in range(STATE_TENSORS + (self.world.size > 1)):
                    reserved.append(torch.empty_like(parameter))
            if with_graphs:
                size = int(GRAPH_MARGIN * torch.cuda.mem_get_info(device)[1])
                reserved.append(torch.empty(size, dtype=torch.uint8, device=device))
        return reserved

    def lay_out_buckets(
        self, parallel_model: nn.Module, train_set: BatchedDataset, *, share: int, steps: int
    ) -> None:
        """Reproduce DDP's bucket layout after `steps` steps; collective.

        DDP lays out its buckets of gradients anew after one or two steps, in the order in which
        gradients become ready. A sum over more than two ranks depends on the layout by its
        rounding, so a resumed run needs the right one from its first step on. What else this
        changes, loading the checkpoint sets anew.

        Args:
            parallel_model: wrapped for data parallelism.
            share: rows of a rank in a step.
            steps: that the run has done.
        """
        if self.world.size <= 2 or parallel_model is self.model:
            return
        rows = torch.arange(min(share, len(train_set)))
        for inputs, labels in train_set.batches([rows] * min(steps, 2), epoch=0):
            self.try_batch(parallel_model, inputs, labels)
        self.world.traffic = Traffic()

    def try_batch(self, model: nn.Module, inputs: Tensor, labels: Tensor) -> None:
        """Halve this rank's micro-batch until a batch fits.

        Weights, BatchNorm statistics and random states are left as they were.

        Args:
            model: wrapped for data parallelism, or not.
            inputs, labels: (batch, ...) and (batch,).
        """
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        states = rng_states(self.world.device)
        self.model.train()
        while True:
            try:
                # Not for a batch that may never come; DDP's layout depends on the compiled model.
                with without_compilation(model is self.model):
                    self.forward_backward(model, inputs, labels)
                break
            except torch.cuda.OutOfMemoryError:
                self.halve_micro_batch(len(labels))
        self.model.zero_grad(set_to_none=True)
        for buffer, before in zip(self.model.buffers(), buffers):
            buffer.copy_(before)
        set_rng_states(states, self.world.device)

    def halve_micro_batch(self, batch_size: int) -> None:
        """Go on with the same global batch in half the memory.

        Raises:
            InputError: a micro-batch of one sample does not fit.
        """
        message = self.micro_batches.halve(batch_size)
        self.model.zero_grad(set_to_none=True)
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()
        self.log.info(message)

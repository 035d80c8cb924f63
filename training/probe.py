"""Batches that are tried before training begins; they change nothing of the model.

    fit_memory(trainer)                # halves micro-batches until they fit into the GPU's memory
    lay_out_buckets(trainer, steps=9)  # where a run goes on

A trial is forward and backward passes without an optimizer step.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from backends.execution import without_compilation
from distributed.averaging import Traffic
from training.checkpoint import rng_states, set_rng_states

if TYPE_CHECKING:
    from training.trainer import Trainer

STATE_TENSORS = 2  # of an optimizer for each weight, with its size, as AdamW and LAMB have them
# Of the GPU's memory. A recorded step keeps its own, and cannot be cut when memory runs out; the
# first steps of another shape of batch are computed beside it.
GRAPH_MARGIN = 0.5


def fit_memory(trainer: Trainer) -> None:
    """Try the largest batch, so that a micro-batch that does not fit is halved at the start."""
    data = trainer.train_set
    rows = torch.arange(len(data))
    if data.lengths is not None:
        rows = torch.argsort(data.lengths, descending=True)
    largest = max(trainer.batches.largest_share, trainer.micro_batches.limit or 0)
    reserved = reserve_memory(trainer)
    last = trainer.config.epochs - 1  # whose images are the largest
    for inputs, labels in data.batches([rows[:largest]], epoch=last):
        try_batch(trainer, trainer.model, inputs, labels)
    reserved.clear()
    torch.cuda.empty_cache()  # a graph's own memory cannot come from what torch keeps
    torch.cuda.reset_peak_memory_stats(trainer.world.device)  # of which a run reports its own


def reserve_memory(trainer: Trainer) -> list[Tensor]:
    """Tensors as large as what a step needs and a trial lacks; as many of them as there fit.

    These are the optimizer's state and, on several ranks, DDP's buffers of gradients; and a part of
    the GPU's memory where steps are recorded as CUDA graphs.
    """
    world, reserved = trainer.world, []
    with contextlib.suppress(torch.cuda.OutOfMemoryError):
        for parameter in trainer.model.parameters():
            for _ in range(STATE_TENSORS + (world.size > 1)):
                reserved.append(torch.empty_like(parameter))
        if trainer.graph is not None:
            size = int(GRAPH_MARGIN * torch.cuda.mem_get_info(world.device)[1])
            reserved.append(torch.empty(size, dtype=torch.uint8, device=world.device))
    return reserved


def lay_out_buckets(trainer: Trainer, *, steps: int) -> None:
    """Reproduce DDP's bucket layout after `steps` steps; collective.

    DDP lays out its buckets of gradients anew after one or two steps, in the order in which
    gradients become ready. A sum over more than two ranks depends on the layout by its rounding, so
    a resumed run needs the right one from its first step on. What else this changes, loading the
    checkpoint sets anew.
    """
    if trainer.world.size <= 2 or trainer.parallel_model is trainer.model:
        return
    data = trainer.train_set
    rows = torch.arange(min(trainer.batches.largest_share, len(data)))
    for inputs, labels in data.batches([rows] * min(steps, 2), epoch=0):
        try_batch(trainer, trainer.parallel_model, inputs, labels)
    trainer.world.traffic = Traffic()


def try_batch(trainer: Trainer, model: nn.Module, inputs: Tensor, labels: Tensor) -> None:
    """Halve this rank's micro-batch until a batch fits.

    Weights, BatchNorm statistics and random states are left as they were.

    Args:
        model: the trainer's, wrapped for data parallelism or not.
        inputs, labels: (batch, ...) and (batch,).
    """
    plain, device = trainer.model, trainer.world.device
    buffers = [buffer.clone() for buffer in plain.buffers()]
    states = rng_states(device)
    plain.train()
    while True:
        try:
            # Not for a batch that may never come; DDP's layout depends on the compiled model.
            with without_compilation(model is plain):
                trainer.forward_backward(model, inputs, labels)
            break
        except torch.cuda.OutOfMemoryError:
            halve_micro_batch(trainer, len(labels))
    plain.zero_grad(set_to_none=True)
    for buffer, before in zip(plain.buffers(), buffers):
        buffer.copy_(before)
    set_rng_states(states, device)


def halve_micro_batch(trainer: Trainer, batch_size: int) -> None:
    """Go on with the same global batch in half the memory.

    Raises:
        InputError: a micro-batch of one sample does not fit.
    """
    message = trainer.micro_batches.halve(batch_size)
    trainer.model.zero_grad(set_to_none=True)
    if trainer.world.device.type == "cuda":
        torch.cuda.empty_cache()
    trainer.log.info(message)

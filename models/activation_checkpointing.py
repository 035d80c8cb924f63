"""Activation checkpointing: less memory for a second forward pass (Chen et al., arXiv:1604.06174).

    checkpoint_activations(model)        # in place; every residual block stores its input only

The activations within a block are computed again in the backward pass, with the same random
numbers.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from models.hugging_face import Encoder
from models.residual import ResidualBlock, residual_blocks


def checkpoint_activations(model: nn.Module) -> int:
    """Let every residual block store only its input for the backward pass, in place.

    Encoders of Hugging Face do this themselves.

    Returns:
        The number of blocks; 0 where the model has none.
    """
    if isinstance(model, Encoder):
        return model.checkpoint_activations()
    blocks = residual_blocks(model)
    for block in blocks:
        block.forward = partial(run_checkpointed, block)  # type: ignore[method-assign]
    return len(blocks)


def run_checkpointed(block: ResidualBlock, *inputs: Tensor) -> Tensor:
    """Compute a block whose activations are computed again in the backward pass.

    The running statistics of BatchNorm are updated by the forward pass alone.
    """

    def contexts() -> tuple[Any, Any]:  # of the forward pass and of the recomputation
        return contextlib.nullcontext(), _frozen_statistics(block)

    compute = partial(type(block).forward, block)
    return checkpoint(compute, *inputs, use_reentrant=False, context_fn=contexts)


@contextlib.contextmanager
def _frozen_statistics(model: nn.Module) -> Iterator[None]:
    """Context in which BatchNorm does not update its running statistics."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    settings = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
        norm.num_batches_tracked = None
    try:
        yield
    finally:
        for norm, (momentum, num_batches_tracked) in zip(norms, settings):
            norm.momentum = momentum
            norm.num_batches_tracked = num_batches_tracked

"""TODO."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial, partialmethod
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def checkpoint_activations(model: nn.Module) -> int:
    """Let every residual block (class attribute `residual`) keep its input alone, through torch.utils.checkpoint; returns how many.

    BatchNorm's running statistics take the forward pass alone, not what is computed again.
    """
    blocks = [module for module in model.modules() if getattr(module, "residual", False)]
    for block in blocks:
        kind = type(block)
        block.__class__ = type(
            f"Checkpointed{kind.__name__}",
            (kind,),
            {"forward": partialmethod(_checkpointed, kind.forward)},
        )
    return len(blocks)


def _checkpointed(self: nn.Module, forward: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    def contexts() -> tuple[Any, Any]:
        return contextlib.nullcontext(), _statistics_as_they_are(self)

    return checkpoint(partial(forward, self), *inputs, use_reentrant=False, context_fn=contexts)


@contextlib.contextmanager
def _statistics_as_they_are(model: nn.Module) -> Iterator[None]:
    """Within the block the running statistics of batch-norm do not move."""
    norms = [
        module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
        norm.num_batches_tracked = None
    try:
        yield
    finally:
        for norm, (momentum, tracked) in zip(norms, before):
            norm.momentum, norm.num_batches_tracked = momentum, tracked

"""Base class of residual blocks: the units that are sharded, or recomputed, as a whole.

activation_checkpointing.py lets blocks recompute their activations in the backward pass, and FSDP
gathers the weights of one block at a time.
"""

from torch import nn


class ResidualBlock(nn.Module):
    """A shortcut and the layers that it bypasses."""


def residual_blocks(model: nn.Module) -> list[ResidualBlock]:
    """Return the residual blocks of a model, in the order of `model.modules()`."""
    return [module for module in model.modules() if isinstance(module, ResidualBlock)]

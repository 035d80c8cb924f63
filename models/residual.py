"""Base class of residual blocks: the units that are sharded, or recomputed, as a whole.

    class Block(ResidualBlock):
        def compute(self, x):                    # instead of forward
            return x + self.branch(x)

activation_checkpointing.py lets blocks recompute their activations in the backward pass, and FSDP
gathers the weights of one block at a time.
"""

from collections.abc import Callable

from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """A shortcut and the layers that it bypasses.

    Attributes:
        compute: the computation of the block, (*inputs) -> output; every subclass defines it.
        run: how `forward` executes `compute`, (block, *inputs) -> output.
    """

    compute: Callable[..., Tensor]
    run: Callable[..., Tensor] = staticmethod(lambda block, *inputs: block.compute(*inputs))

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.run(self, *inputs)


def residual_blocks(model: nn.Module) -> list[ResidualBlock]:
    """Return the residual blocks of a model, in the order of `model.modules()`."""
    return [module for module in model.modules() if isinstance(module, ResidualBlock)]

"""The peers of optimizers.py that are not in torch as they are used: Muon for a whole model, and K-FAC.

optimizer = Muon(model, lr=1e-3, weight_decay=5e-4)
optimizer = KFAC(model, images)          # raises Absent where there is no K-FAC here, or it cannot take the model
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.stepping import clock

try:
    import nngeometry.layercollection
    import nngeometry.metrics
    import nngeometry.object
except ImportError:
    nngeometry = None

NOT_MATRICES = (
    "embed.",
    "positions",
    "fc.",
    "head.",
)  # embeddings and classifiers, which Muon's authors leave to AdamW


class Absent(Exception):
    """A peer that cannot be measured; the message says why."""


class Muon:
    """torch.optim.Muon for the hidden layers' weights, a convolution's as (outputs, rest); AdamW for all others."""

    def __init__(self, model: nn.Module, lr: float, weight_decay: float) -> None:
        self.weights, others = [], []
        for name, p in model.named_parameters():
            (others if p.ndim < 2 or name.startswith(NOT_MATRICES) else self.weights).append(p)
        self.matrices = [nn.Parameter(self.matrix(p.detach())) for p in self.weights]
        # steps as large as AdamW's, so that one learning rate serves both
        self.muon = torch.optim.Muon(
            self.matrices, lr, weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        self.adamw = torch.optim.AdamW(others, lr, weight_decay=weight_decay, fused=True)

    @staticmethod
    def matrix(weight: Tensor) -> Tensor:
        """A view (outputs, rest) of a weight in channels_last."""
        return weight.permute(0, *range(2, weight.ndim), 1).view(len(weight), -1)

    @property
    def state(self) -> dict[Tensor, Any]:
        """Of both."""
        return {**self.muon.state, **self.adamw.state}

    def step(self) -> None:
        """One step of both."""
        for p, matrix in zip(self.weights, self.matrices):
            matrix.grad = None if p.grad is None else self.matrix(p.grad)
        self.muon.step()
        self.adamw.step()


class KFAC:
    """K-FAC from the matrices of nngeometry: SGD along F^-1 g for convolutions and linear layers, along g for the rest.

    Time is what it costs beyond the training pass: the pass in which the factors are gathered runs once more without
    gathering them, and is taken off. No running average of the factors and no clipping; a user would pay for those too.
    """

    FACTORS, INVERSES = 10, 100  # steps between updates
    DAMPING = 1e-2
    LR = 1e-6  # too small to train: with it the model stays where its factors are finite

    def __init__(self, model: nn.Module, images: Tensor | None) -> None:
        if nngeometry is None:
            raise Absent("not installed: pip install nngeometry")
        self.name = f"nngeometry {version('nngeometry')}"
        if images is None:
            raise Absent(f"{self.name} takes neither token numbers nor linear layers on sequences")
        self.model, self.images = model, images
        self.layers = nngeometry.layercollection.LayerCollection()
        self.modules = {
            name: part
            for name, part in model.named_modules()
            if isinstance(part, nn.Conv2d | nn.Linear)
        }
        for module in self.modules.values():
            self.layers.add_layer_from_model(model, module)
        self.sgd = torch.optim.SGD(model.parameters(), self.LR, 0.9, foreach=True)
        self.factors: Any = None
        self.inverses: Any = None
        self.inverting = 0.0  # seconds

    @property
    def state(self) -> dict[Any, Any]:
        """Momentum, factors and inverses."""
        return {
            **self.sgd.state,
            "kfac": {"factors": self.factors.data, "inverses": self.inverses.data},
        }

    def gather(self) -> None:
        """The factors of one batch, with labels drawn from the model."""
        matrix = nngeometry.object.PMatKFAC
        self.factors = nngeometry.metrics.FIM_MonteCarlo(
            self.model, (self.images,), matrix, layer_collection=self.layers
        )

    def same_pass(self) -> None:
        """The forward and backward pass of `gather`, which goes to the inputs only."""
        images = self.images.clone().requires_grad_()
        output = F.log_softmax(self.model(images), dim=1)[:, 0].sum()
        torch.autograd.grad(output, images)

    def invert(self) -> None:
        """Their inverses."""
        self.inverses = self.factors.inverse(self.DAMPING)

    def step(self) -> None:
        """Precondition the gradients and step."""
        parameters = {name: list(module.parameters()) for name, module in self.modules.items()}
        gradients = {  # `mv` takes a view (outputs, rest), which a gradient in channels_last does not have
            name: tuple(p.grad.contiguous() for p in some if p.grad is not None)
            for name, some in parameters.items()
        }
        vector = nngeometry.object.PVector(self.layers, dict_repr=gradients)
        for name, directions in self.inverses.mv(vector).to_dict().items():
            for p, direction in zip(parameters[name], directions):
                p.grad = direction
        self.sgd.step()

    def seconds(self, set_gradients: Callable[[], None], scale: float) -> dict[str, float]:
        """Of each of its parts, and amortised; what depends on the batch is multiplied by `scale`.

        The inverses are timed on the first call only: they are the longest to take and the least of the sum.
        """
        gathering, passing = clock(self.gather), clock(self.same_pass)
        if not self.inverting:
            self.inverting = clock(self.invert)
        set_gradients()
        stepping, factors = clock(self.step), scale * (gathering - passing)
        amortised = stepping + factors / self.FACTORS + self.inverting / self.INVERSES
        return {
            "step": stepping,
            "factors": factors,
            "inverses": self.inverting,
            "amortised": amortised,
        }

"""Peers of optimizer_step.py that torch does not have: K-FAC, and SOAP of another library.

optimizer = KFAC(model, images)     # raises Absent if not installed, or not for such a model
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
try:
    import pytorch_optimizer
except ImportError:
    pytorch_optimizer = None

OPTIONAL = ("nngeometry", "pytorch_optimizer")  # packages, which are None where they are missing
SOAP_PERIOD = 10  # steps after which SOAP renews its bases, with the library's settings


class Absent(Exception):
    """A peer that cannot be measured; the message says why."""


class KFAC:
    """K-FAC from the matrices of nngeometry, with SGD along F^-1 g, or along g for other layers.

    Convolutions and linear layers are preconditioned. Time is what K-FAC costs beyond the training
    pass: the pass that collects the factors runs once more without collecting them, and its time
    is subtracted. There is no running average of the factors and no clipping, which a user would
    pay for as well.
    """

    FACTORS, INVERSES = 10, 100  # steps between updates
    DAMPING = 1e-2
    LR = 1e-6  # too small to train, so that the factors stay finite

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
        self.inverse_seconds = 0.0  # 0 until measured

    @property
    def state(self) -> dict[Any, Any]:
        """Momentum, factors and inverses."""
        return {
            **self.sgd.state,
            "kfac": {"factors": self.factors.data, "inverses": self.inverses.data},
        }

    def collect_factors(self) -> None:
        """Compute the factors of one batch, with labels sampled from the model."""
        matrix = nngeometry.object.PMatKFAC
        self.factors = nngeometry.metrics.FIM_MonteCarlo(
            self.model, (self.images,), matrix, layer_collection=self.layers
        )

    def pass_alone(self) -> None:
        """Run the forward and backward pass of `collect_factors`, without collecting."""
        images = self.images.clone().requires_grad_()
        output = F.log_softmax(self.model(images), dim=1)[:, 0].sum()
        torch.autograd.grad(output, images)

    def invert(self) -> None:
        """Invert the factors of all layers."""
        self.inverses = self.factors.inverse(self.DAMPING)

    def step(self) -> None:
        """Precondition the gradients and step."""
        parameters = {name: list(module.parameters()) for name, module in self.modules.items()}
        gradients = {  # contiguous, because `mv` needs a view of shape (outputs, rest)
            name: tuple(p.grad.contiguous() for p in some if p.grad is not None)
            for name, some in parameters.items()
        }
        vector = nngeometry.object.PVector(self.layers, dict_repr=gradients)
        for name, directions in self.inverses.mv(vector).to_dict().items():
            for p, direction in zip(parameters[name], directions):
                p.grad = direction
        self.sgd.step()

    def seconds(self, set_gradients: Callable[[], None], scale: float) -> dict[str, float]:
        """Measure the seconds of each part, and the amortised seconds of a step.

        The inverses are timed on the first call only: they take longest and count least.

        Args:
            set_gradients: gives the parameters their next gradients.
            scale: factor for what depends on the batch size.
        """
        collecting, passing = clock(self.collect_factors), clock(self.pass_alone)
        if not self.inverse_seconds:
            self.inverse_seconds = clock(self.invert)
        set_gradients()
        stepping, factors = clock(self.step), scale * (collecting - passing)
        amortised = stepping + factors / self.FACTORS + self.inverse_seconds / self.INVERSES
        return {
            "step": stepping,
            "factors": factors,
            "inverses": self.inverse_seconds,
            "amortised": amortised,
        }

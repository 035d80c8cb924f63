"""NVIDIA apex, where it is installed: mixed precision O1 and O2.

    model, optimizer, scaler = prepare("apex_O1", model, optimizer=optimizer)

Apex has no releases, and its amp was removed in May 2025. The package named apex on the package
registry is another project. The code follows apex's documented interface and has not been run on
it.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

LEVELS = ("apex_O1", "apex_O2")
INSTALL_HINT = (
    "build github.com/NVIDIA/apex, as of before May 2025, with --cpp_ext --cuda_ext "
    "(the apex of package registries is another)"
)


def unavailable_reason() -> str:
    """Return why apex.amp cannot be used and how to get it, or ''."""
    try:
        importlib.import_module("apex.amp")
    except Exception:  # it is not there, another package of that name, or built for another torch
        return f"there is no apex.amp: {INSTALL_HINT}"
    return "" if torch.cuda.is_available() else "apex needs a GPU"


def prepare(
    level: str, model: nn.Module, *, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, torch.optim.Optimizer, Scaler]:
    """Convert model and optimizer with `apex.amp.initialize`, in the place of torch's autocast.

    O1 wraps functions so that they cast their inputs. O2 converts the model to fp16, and the
    optimizer then updates fp32 copies of the weights. No autocast is needed around the forward
    pass, and the returned scaler takes the place of torch.amp.GradScaler.

    Args:
        level: one of `LEVELS`.
        model: on its GPU, not yet wrapped for data parallelism.
    """
    amp = importlib.import_module("apex.amp")
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level.removeprefix("apex_"), verbosity=0
    )
    return model, optimizer, Scaler(amp, optimizer)


class Scaler:
    """Stands in for torch.amp.GradScaler: the same methods, on amp's dynamic loss scale.

    amp unscales gradients at the end of each backward pass, skips the optimizer's step after an
    overflow, and updates the scale, all by itself. Methods for these purposes have nothing to do.
    """

    def __init__(self, amp: ModuleType, optimizer: torch.optim.Optimizer) -> None:
        self.amp, self.optimizer = amp, optimizer

    def is_enabled(self) -> bool:
        return True

    def scale(self, loss: Tensor) -> ScaledLoss:
        return ScaledLoss(self, loss)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing, because gradients are already unscaled after each backward pass."""

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Call the optimizer's step, which amp has replaced by one that skips after an overflow."""
        optimizer.step()

    def update(self) -> None:
        """Do nothing, because amp updates the scale itself."""

    def state_dict(self) -> dict[str, Any]:
        return self.amp.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.amp.load_state_dict(state)


class ScaledLoss:
    """A loss whose backward pass goes through `apex.amp.scale_loss`."""

    def __init__(self, scaler: Scaler, loss: Tensor) -> None:
        self.scaler, self.loss = scaler, loss

    def backward(self) -> None:
        """Add the unscaled gradients of the loss to those of the parameters."""
        with self.scaler.amp.scale_loss(self.loss, self.scaler.optimizer) as scaled:
            scaled.backward()

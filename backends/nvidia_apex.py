"""NVIDIA apex, where it is installed: mixed precision O1 and O2, FusedSGD, FusedLAMB and LARC.

    optimizer = create_optimizer("apex_lamb", groups, lr=4e-3)
    model, optimizer, scaler = prepare("apex_O1", model, optimizer=optimizer)

Apex has no releases, and its parts come and go: amp and parallel (with LARC) were removed in May
2025, and the others need its CUDA extensions. Each part is therefore looked up by itself. The
package named apex on the package registry is another project. The code follows apex's documented
interface and has not been run on it.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

LEVELS = ("apex_O1", "apex_O2")
OPTIMIZERS = ("apex_sgd", "apex_lamb", "apex_larc")
MODULES = {
    **dict.fromkeys(LEVELS, "apex.amp"),  # left in May 2025, as did LARC
    **dict.fromkeys(("apex_sgd", "apex_lamb"), "amp_C"),  # the CUDA extensions
    "apex_larc": "apex.parallel.LARC",
}
"""The module of apex that each choice needs."""
INSTALL_HINT = (
    "build github.com/NVIDIA/apex, as of before May 2025, with --cpp_ext --cuda_ext "
    "(the apex of package registries is another)"
)


def unavailable_reason(name: str) -> str:
    """Return why one of `MODULES` cannot be used and how to get it, or '', also for other names."""
    if name not in MODULES:
        return ""
    if importlib.util.find_spec("apex") is None:
        return f"apex is not installed: {INSTALL_HINT}"
    if not torch.cuda.is_available():
        return "apex needs a GPU"
    try:
        importlib.import_module(MODULES[name])
    except Exception:  # another package of that name, or a build for another torch
        return f"this apex has no {MODULES[name]}: {INSTALL_HINT}"
    return ""


def create_optimizer(
    name: str,
    groups: list[dict[str, Any]],
    *,
    lr: float,
    momentum: float = 0.9,
    nesterov: bool = False,
    betas: tuple[float, float] = (0.9, 0.999),
    trust_coefficient: float = 0.001,
) -> torch.optim.Optimizer:
    """Create an apex optimizer, whose `unavailable_reason` is ''.

    Args:
        name: 'apex_sgd' is FusedSGD, 'apex_lamb' is FusedLAMB (arXiv:1904.00962), and 'apex_larc'
            is LARC (arXiv:1708.03888, with clipping) around torch's SGD.
        groups: parameter groups.
        lr: learning rate.
        momentum: of SGD, FusedSGD and LARC.
        nesterov: Nesterov momentum of SGD, FusedSGD and LARC.
        betas: of FusedLAMB.
        trust_coefficient: of LARC.
    """
    if name == "apex_lamb":
        return _submodule("optimizers").FusedLAMB(groups, lr=lr, betas=betas)
    if name == "apex_sgd":
        fused_sgd = _submodule("optimizers").FusedSGD
        return fused_sgd(groups, lr=lr, momentum=momentum, nesterov=nesterov)
    sgd = torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov)
    return _submodule("parallel.LARC").LARC(sgd, trust_coefficient=trust_coefficient)


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
        optimizer: over the parameters of `model`.
    """
    amp = _submodule("amp")
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level.removeprefix("apex_"), verbosity=0
    )
    return model, optimizer, Scaler(amp, optimizer)


class Scaler:
    """Stands in for torch.amp.GradScaler: the same methods, on amp's dynamic loss scale.

    amp unscales gradients at the end of each backward pass, skips the optimizer's step after an
    overflow, and updates the scale, all by itself. Methods for these purposes have nothing to do.

    Args:
        amp: the module apex.amp.
        optimizer: the optimizer that `amp.initialize` returned.
    """

    def __init__(self, amp: ModuleType, optimizer: torch.optim.Optimizer) -> None:
        self.amp = amp
        self.optimizer = optimizer

    def is_enabled(self) -> bool:
        return True

    def scale(self, loss: Tensor) -> ScaledLoss:
        """Return an object whose `backward` computes unscaled gradients by way of a scaled loss."""
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
        self.scaler = scaler
        self.loss = loss

    def backward(self) -> None:
        """Add the unscaled gradients of the loss to those of the parameters."""
        with self.scaler.amp.scale_loss(self.loss, self.scaler.optimizer) as scaled:
            scaled.backward()


def _submodule(name: str) -> Any:
    """Import a submodule of apex."""
    return importlib.import_module(f"apex.{name}")

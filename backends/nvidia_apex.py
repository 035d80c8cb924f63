"""NVIDIA apex, where it is installed: mixed precision O1 and O2, FusedSGD, FusedLAMB and LARC.

    model, optimizer, scaler = apex_backend.prepare("apex_O1", model, optimizer)
    optimizer = apex_backend.build_optimizer("apex_lamb", groups, lr=4e-3)

Written against apex's documented interface. Parts of it have come and gone, so each is looked for by itself: amp, parallel (and
LARC with it) left in May 2025, what remains needs CUDA extensions. The package registry has another package of that name.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

LEVELS = ("apex_O1", "apex_O2")
OPTIMIZERS = ("apex_sgd", "apex_lamb", "apex_larc")
GET = "build github.com/NVIDIA/apex, as of before May 2025, with --cpp_ext --cuda_ext (the apex of package registries is another)"


def part(name: str) -> Any:
    """A submodule of apex, or None."""
    try:
        return importlib.import_module(f"apex.{name}")
    except Exception:  # the other package of that name, a build for another torch
        return None


def cuda_unavailable_reason() -> str:
    """Why nothing of apex runs here; '' where it may."""
    if importlib.util.find_spec("apex") is None:
        return f"apex is not installed: {GET}"
    return "" if torch.cuda.is_available() else "apex needs a GPU"


def amp_unavailable_reason() -> str:
    """Why apex's mixed precision cannot be used, and how to get it; '' where it can."""
    return cuda_unavailable_reason() or (
        ""
        if hasattr(part("amp"), "initialize")
        else f"this apex has no amp, which left in May 2025: {GET}"
    )


def kernels_unavailable_reason() -> str:
    """Why apex's fused optimizers cannot be used, and how to get them; '' where they can."""
    applier = getattr(part("multi_tensor_apply"), "multi_tensor_applier", None)
    return cuda_unavailable_reason() or (
        ""
        if getattr(applier, "available", False)
        else f"apex was built without its CUDA extensions: {GET}"
    )


def unavailable_reason(optimizer: str) -> str:
    """Why that optimizer of `OPTIMIZERS` cannot be used, and how to get it; '' where it can."""
    if optimizer != "apex_larc":
        return kernels_unavailable_reason()
    return cuda_unavailable_reason() or (
        ""
        if hasattr(part("parallel.LARC"), "LARC")
        else f"this apex has no LARC, which left in May 2025: {GET}"
    )


def build_optimizer(
    name: str,
    groups: list[dict[str, Any]],
    lr: float,
    momentum: float = 0.9,
    nesterov: bool = False,
    betas: tuple[float, float] = (0.9, 0.999),
    trust_coefficient: float = 0.001,
) -> torch.optim.Optimizer:
    """FusedSGD, FusedLAMB, or LARC (arXiv:1708.03888, clipped) around torch's SGD."""
    if name == "apex_lamb":
        return part("optimizers").FusedLAMB(groups, lr=lr, betas=betas)
    if name == "apex_sgd":
        return part("optimizers").FusedSGD(groups, lr=lr, momentum=momentum, nesterov=nesterov)
    sgd = torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov)
    return part("parallel.LARC").LARC(sgd, trust_coefficient=trust_coefficient)


def prepare(
    level: str, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, torch.optim.Optimizer, Scaler]:
    """What amp makes of them: O1 casts functions, O2 the model, whose fp32 weights the optimizer then holds."""
    amp = part("amp")
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level.removeprefix("apex_"), verbosity=0
    )
    return model, optimizer, Scaler(amp, optimizer)


class Scaler:
    """amp's dynamic loss scale behind the methods of torch.amp.GradScaler that a step calls."""

    def __init__(self, amp: Any, optimizer: torch.optim.Optimizer) -> None:
        self.amp, self.optimizer = amp, optimizer

    def is_enabled(self) -> bool:
        return True

    def scale(self, loss: Tensor) -> Scaled:
        """What is to be called `backward` on; gradients are divided by the scale after it."""
        return Scaled(self, loss)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing: each backward pass leaves true gradients."""

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's step, which amp skips after an overflow."""
        optimizer.step()

    def update(self) -> None:
        """Nothing: amp changes the scale itself."""

    def state_dict(self) -> dict[str, Any]:
        return self.amp.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.amp.load_state_dict(state)


class Scaled:
    """A loss under amp."""

    def __init__(self, scaler: Scaler, loss: Tensor) -> None:
        self.scaler, self.loss = scaler, loss

    def backward(self) -> None:
        """Of the scaled loss."""
        with self.scaler.amp.scale_loss(self.loss, self.scaler.optimizer) as scaled:
            scaled.backward()

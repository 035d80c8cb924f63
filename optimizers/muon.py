"""torch's Muon for the matrices of hidden layers, and AdamW for the rest: a peer of `ngd.NGD`.

optimizer = Muon(ngd_groups(model, weight_decay=0.05), lr=0.04)
"""

from typing import Any

import torch
from torch import Tensor, nn

from optimizers.base import CheckedOptimizer
from optimizers.param_groups import is_matrix
from optimizers.torch_fused import laid_out_like


class Muon(CheckedOptimizer):
    """torch.optim.Muon (Jordan, 2024) and torch.optim.AdamW as one optimizer.

    A convolution's weight is a matrix of shape (outputs, everything else). A step of a matrix has
    about the length that `ngd.NGD` gives it; Muon's polynomial makes it up to a fifth shorter, and
    it is much shorter where the momentum has a low rank, in small batches.

    Args:
        params: parameters or parameter groups. A group with `ngd=False` is under AdamW, as are
            parameters without two axes longer than 1.
        lr: learning rate of the matrices.
        momentum, nesterov: of Muon.
        weight_decay: decoupled.
        adamw_ratio: the learning rate of AdamW is lr * adamw_ratio.
        betas: of AdamW.
        ngd: False puts this group's matrices under AdamW, as in the groups of `ngd_groups`.

    Raises:
        ValueError: a hyper-parameter is out of its range.
    """

    own_ranges = {"adamw_ratio": lambda ratio: ratio >= 0}

    def __init__(
        self,
        params: Any,
        lr: float = 0.04,
        *,
        momentum: float = 0.6,
        nesterov: bool = True,
        weight_decay: float = 0.05,
        adamw_ratio: float = 0.075,
        betas: tuple[float, float] = (0.9, 0.999),
        ngd: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "adamw_ratio": adamw_ratio,
            "betas": betas,
            "ngd": ngd,
        }
        super().__init__(params, defaults)

    def _create_parts(self) -> None:
        """Creates the optimizers of each group, whose states are those of this optimizer."""
        self.matrices: list[list[tuple[nn.Parameter, nn.Parameter]]] = []
        self.parts: list[list[torch.optim.Optimizer]] = []
        for group in self.param_groups:
            pairs = [
                (p, nn.Parameter(as_matrix(p.detach())))
                for p in group["params"]
                if is_matrix(p, group)
            ]
            others = [p for p in group["params"] if not is_matrix(p, group)]
            parts: list[torch.optim.Optimizer] = []
            if pairs:
                muon = torch.optim.Muon([matrix for _, matrix in pairs])
                for p, matrix in pairs:
                    buffer = self.state[p].get("momentum_buffer", torch.zeros_like(p))
                    self.state[p]["momentum_buffer"] = buffer = laid_out_like(buffer, p)
                    muon.state[matrix]["momentum_buffer"] = as_matrix(buffer)
                parts.append(muon)
            if others:
                adamw = torch.optim.AdamW(others, fused=True)
                for p in others:
                    adamw.state[p] = self.state[p]
                    if "step" in self.state[p]:
                        self.state[p]["step"] = self.state[p]["step"].to(p.device)
                parts.append(adamw)
            self.matrices.append(pairs)
            self.parts.append(parts)

    def _made_of(self) -> list[Any]:
        parameters = [p for group in self.param_groups for p in group["params"]]
        layout = [number for p in parameters for number in (p.data_ptr(), *p.stride())]
        return [*layout, *self.held("momentum_buffer", "exp_avg", "exp_avg_sq")]

    def _apply_step(self) -> None:
        self.remake(self._made_of, self._create_parts)
        for group, parts, pairs in zip(self.param_groups, self.parts, self.matrices):
            for p, matrix in pairs:
                matrix.grad = None if p.grad is None else as_matrix(p.grad, like=p)
            for part in parts:
                settings = part.param_groups[0]
                is_muon = isinstance(part, torch.optim.Muon)
                settings["lr"] = group["lr"] * (1 if is_muon else group["adamw_ratio"])
                for name in settings.keys() & {"momentum", "nesterov", "weight_decay", "betas"}:
                    settings[name] = group[name]
                part.step()


def as_matrix(weight: Tensor, *, like: Tensor | None = None) -> Tensor:
    """Returns a weight as a matrix (outputs, everything else) in the same memory.

    Args:
        weight: two axes or more, contiguous or channels_last; a gradient may be copied instead.
        like: of a gradient, the weight, whose memory format decides on the order of the columns.
    """
    is_channels_last = not (weight if like is None else like).is_contiguous()
    if is_channels_last:
        weight = weight.permute(0, *range(2, weight.ndim), 1)
    return weight.view(len(weight), -1) if like is None else weight.reshape(len(weight), -1)

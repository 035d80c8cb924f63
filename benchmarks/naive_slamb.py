"""SLAMB as a literal translation of its equations: element masks, a loop, a collective per tensor.

communication.py compares slamb.py with it. The formulas are those of
`AuthorsSLAMB(selection="random")`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slamb import SLAMB

CLAMP = (0.01, 1000.0)


class NaiveSLAMB(torch.optim.Optimizer):
    """LAMB with sparse communication of the momentum among `ranks` ranks."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        compress_ratio: float = 0.1,
        beta3: float = 0.99,
        local_steps: int = 50,
        ranks: int = 1,
    ) -> None:
        names = ("lr", "betas", "eps", "weight_decay", "compress_ratio", "beta3")
        super().__init__(
            params, dict(zip(names, (lr, betas, eps, weight_decay, compress_ratio, beta3)))
        )
        self.local_steps, self.ranks, self.t = local_steps, ranks, 0
        self.parameters = [p for group in self.param_groups for p in group["params"]]
        self.large = [
            p for p in self.parameters if p.ndim > 1 and p.numel() >= SLAMB.default_smallest_large
        ]
        total = sum(p.numel() for p in self.large)
        order = torch.randperm(total, generator=torch.Generator().manual_seed(0))
        self.chunks = order.tensor_split(max(1, int(1 / self.defaults["compress_ratio"])))

    def reduce(self, values: Tensor) -> None:
        """Sum over the ranks, in place."""
        dist.all_reduce(values)

    def masks(self) -> dict[Tensor, Tensor]:
        """Return a mask of the elements that are sent in this step, for each large parameter."""
        mask = torch.zeros(sum(p.numel() for p in self.large), dtype=torch.bool)
        mask[self.chunks[self.t % len(self.chunks)]] = True
        return {
            p: part.view(p.shape)
            for p, part in zip(self.large, mask.split([p.numel() for p in self.large]))
        }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step all parameters; average the weights every `local_steps` steps."""
        self.t += 1
        masks = self.masks()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, group, masks.get(p))
        if self.t % self.local_steps == 0:
            for p in self.parameters:
                self.reduce(p)
                p.div_(self.ranks)

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any], mask: Tensor | None) -> None:
        """Step one parameter; without a mask all of its momentum is sent."""
        state, (b1, b2), lr = self.state[p], group["betas"], group["lr"]
        if not state:
            state.update(m=torch.zeros_like(p), v=torch.zeros_like(p), age=torch.zeros_like(p))
        m, v, age = state["m"], state["v"], state["age"]
        m.mul_(b1).add_(g, alpha=1 - b1)
        v.mul_(b2).addcmul_(g, g, value=1 - b2)
        sent = m if mask is None else m[mask]
        self.reduce(sent)
        sent /= self.ranks
        if mask is not None:
            m[mask] = sent
        u = (m / (1 - b1**self.t)) / ((v / (1 - b2**self.t)).sqrt() + group["eps"]) + group[
            "weight_decay"
        ] * p
        if mask is None:
            trust = ratio(p, u)
            p.sub_(u * (trust.clamp(*CLAMP) if p.ndim > 1 else trust) * lr)
            return
        age += 1
        age[mask] = 0
        r = group["beta3"] ** age
        trust = r * ratio(p[mask], u[mask]) + (1 - r) * ratio(p[~mask], u[~mask])
        p.sub_(lr * (r + (1 - r) / math.sqrt(self.ranks)) * trust.clamp(*CLAMP) * u)


def ratio(w: Tensor, u: Tensor) -> Tensor:
    """Return the trust ratio |w| / |u|, or 1 if either norm is 0."""
    weights, updates = w.norm(), u.norm()
    return torch.where((weights > 0) & (updates > 0), weights / updates, 1.0)

"""The outer step of DiLoCo, by which ranks that have trained apart agree on weights again.

    outer_step = OuterStep(parameters, lr=0.7, momentum=0.9, wire_dtype=torch.bfloat16)
    outer_step.step(averager)               # after each rank's own steps, on all ranks

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
arXiv:2311.08105, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distributed.averaging import RankAverager


class OuterStep:
    """SGD with Nesterov momentum along the mean change of the ranks' weights since the last step.

    A tensor that no rank has changed since then stays as it is, and so does its momentum.

    Args:
        parameters: on all ranks the same at this moment.
        lr: eta, of the outer step.
        momentum: mu.
        wire_dtype: dtype in which changes are sent.

    Attributes:
        common: the weights a on which the ranks have last agreed, in fp32 at least.
        momenta: b.
    """

    def __init__(
        self, parameters: Sequence[Tensor], *, lr: float, momentum: float, wire_dtype: torch.dtype
    ) -> None:
        self.parameters = list(parameters)
        self.lr, self.momentum, self.wire_dtype = lr, momentum, wire_dtype
        self.common = [
            p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
            for p in self.parameters
        ]
        self.momenta = [torch.zeros_like(each) for each in self.common]

    @torch.no_grad()
    def step(self, averager: RankAverager) -> None:
        """Take the step on all ranks: one collective, of one number of `wire_dtype` a weight."""
        changes = [_change(a, p) for a, p in zip(self.common, self.parameters)]
        sizes = [change.numel() for change in changes]
        sent = torch.cat([change.flatten() for change in changes]).to(self.wire_dtype)
        received = averager.mean(sent).split(sizes)
        for p, a, b, mean in zip(self.parameters, self.common, self.momenta, received):
            d = mean.view(a.shape).to(a.dtype)
            has_changed = d.any()
            momentum = b * self.momentum + d
            step = torch.add(d, momentum, alpha=self.momentum)
            b.copy_(torch.where(has_changed, momentum, b))
            a.copy_(torch.where(has_changed, torch.add(a, step, alpha=-self.lr), a))
            p.copy_(a)


def _change(common: Tensor, parameter: Tensor) -> Tensor:
    """Returns a - w, zeros where the parameter is what its own dtype keeps of a."""
    has_changed = (parameter != common.to(parameter.dtype)).any()
    return torch.where(has_changed, common - parameter, 0.0)

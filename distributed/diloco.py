"""DiLoCo: ranks train apart and agree now and then, by a step with momentum of their own.

    hook = DiLoCo(world, every=50)                    # in place of `comm_hooks.AllReduceHook`
    hook.start(parameters)                            # while all ranks have the same weights
    hook.after_step(parameters)                       # after each step of any optimizer

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
arXiv:2311.08105, algorithm 1. Each rank's optimizer takes H steps from the common weights a; then
    d = mean over the ranks of (a - w),  b <- mu b + d,  a <- a - eta (d + mu b),  w <- a
on every rank, which is a step of SGD with Nesterov momentum along the mean change. The optimizers'
own states are never exchanged.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from distributed.comm_hooks import LocalSGD
from distributed.world import World


class DiLoCo(LocalSGD):
    """DiLoCo (see above) as what data parallelism sends.

    Before an evaluation the ranks take the mean of their weights, as with `LocalSGD`, and go on
    from it. The mean change of the weights stays the same, but the next gradients are those of the
    mean weights. So the outer steps depend on when the ranks are evaluated.

    Args:
        every: H, steps between two outer steps.
        after: steps at the start in which gradients are averaged instead.
        lr: eta, of the outer step.
        momentum: mu, of the outer step.
        wire_dtype: dtype in which changes of weights are sent.

    Attributes:
        common: the weights a on which the ranks have last agreed, in fp32 at least.
        momenta: b.
    """

    def __init__(
        self,
        world: World,
        every: int,
        *,
        after: int = 0,
        lr: float = 0.7,
        momentum: float = 0.9,
        wire_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__(world, every, after=after)
        if not (lr > 0 and 0 <= momentum < 1):
            raise ValueError(f"lr={lr} must be above 0, and momentum={momentum} within [0, 1)")
        self.lr, self.momentum, self.wire_dtype = lr, momentum, wire_dtype
        self.common: list[Tensor] = []
        self.momenta: list[Tensor] = []

    def start(self, parameters: Sequence[Tensor]) -> None:
        """Keep the weights from which the ranks part."""
        self.common = [
            p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
            for p in parameters
        ]
        self.momenta = [torch.zeros_like(each) for each in self.common]

    @torch.no_grad()
    def outer_step(self, parameters: Sequence[Tensor]) -> None:
        """Take the outer step: one collective, of one number of `wire_dtype` a weight."""
        parameters = list(parameters)  # it may be model.parameters(), which is gone through once
        # from the weights that the ranks got, which are rounded where p is in bf16 or fp16
        changes = [(a.to(p.dtype).to(a) - p).flatten() for a, p in zip(self.common, parameters)]
        mean_changes = self.averager.mean(torch.cat(changes).to(self.wire_dtype))
        self.world.traffic += self.averager.take_traffic()
        received = mean_changes.split([len(change) for change in changes])
        for p, a, b, mean in zip(parameters, self.common, self.momenta, received):
            d = mean.view(a.shape).to(a.dtype)
            b.mul_(self.momentum).add_(d)
            a.sub_(torch.add(d, b, alpha=self.momentum), alpha=self.lr)
            p.copy_(a)

    def state_dict(self, parameters: Sequence[Tensor]) -> dict[str, Any]:
        return {
            **super().state_dict(parameters),
            "common": [a.cpu() for a in self.common],
            "momenta": [b.cpu() for b in self.momenta],
        }

    def load_state_dict(self, state: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        parameters = list(parameters)
        super().load_state_dict(state, parameters)
        if "common" not in state:  # of a run without this hook
            self.sync_replicas(parameters)
            self.start(parameters)
            return
        devices = [p.device for p in parameters]
        self.common = [a.to(on, copy=True) for a, on in zip(state["common"], devices)]
        self.momenta = [b.to(on, copy=True) for b, on in zip(state["momenta"], devices)]

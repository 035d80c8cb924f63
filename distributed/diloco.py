"""DiLoCo: ranks train apart and agree now and then, by a step with momentum of their own.

    hook = DiLoCo(world, every=50)                    # in place of `comm_hooks.AllReduceHook`
    hook.start(parameters)                            # while all ranks have the same weights
    hook.after_step(parameters)                       # after each step of any optimizer

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
arXiv:2311.08105, algorithm 1. Each rank's optimizer takes H steps from the common weights a; then
    d = mean over the ranks of (a - w),  b <- mu b + d,  a <- a - eta (d + mu b),  w <- a
on every rank, which is a step of SGD with Nesterov momentum along the mean change. The optimizers'
own states are never exchanged. With several fragments of the parameters each fragment does this
once in H steps, one after the other, so that less is sent at a time (arXiv:2501.18512, without its
delay and its mixing of both weights).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from distributed.averaging import RankAverager
from distributed.comm_hooks import LocalSGD
from distributed.world import World


class DiLoCo(LocalSGD):
    """DiLoCo (see above) as what data parallelism sends.

    Before an evaluation the ranks take the mean of their weights, as with `LocalSGD`, and go on
    from it. The mean change of the weights stays the same, but the next gradients are those of the
    mean weights. So the outer steps depend on when the ranks are evaluated.

    Args:
        world: the ranks.
        every: H, steps between two outer steps of a parameter.
        after: steps at the start in which gradients are averaged instead.
        lr: of the outer step.
        momentum: of the outer step.
        fragments: in how many parts of about equal size the parameters take turns.
        wire_dtype: dtype in which changes of weights are sent.
    """

    def __init__(
        self,
        world: World,
        every: int,
        *,
        after: int = 0,
        lr: float = 0.7,
        momentum: float = 0.9,
        fragments: int = 1,
        wire_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__(world, every, after=after)
        self.lr, self.momentum, self.wire_dtype = lr, momentum, wire_dtype
        self.num_fragments = fragments
        self.outer_steps: list[OuterStep] = []  # of each fragment

    def start(self, parameters: Sequence[Tensor]) -> None:
        """Keep the weights from which the ranks part."""
        self.outer_steps = [
            OuterStep(fragment, lr=self.lr, momentum=self.momentum, wire_dtype=self.wire_dtype)
            for fragment in split_evenly(parameters, self.num_fragments)
        ]

    def after_step(self, parameters: Sequence[Tensor]) -> None:
        """Count the step, and take the outer steps of the fragments whose turn it is."""
        self.steps += 1
        if self.steps == self.after:
            self.start(parameters)
        elif self.steps > self.after:
            for number, outer_step in enumerate(self.outer_steps):
                turn = (number + 1) * self.every // len(self.outer_steps)
                if (self.steps - self.after) % self.every == turn % self.every:
                    outer_step.step(self.averager)
            self.world.bytes_sent += self.averager.take_bytes()

    def state_dict(self, parameters: Sequence[Tensor]) -> dict[str, Any]:
        """The number of steps so far, and of all parameters what the outer steps remember."""
        return {
            **super().state_dict(parameters),
            "common": [a.cpu() for each in self.outer_steps for a in each.common],
            "momenta": [b.cpu() for each in self.outer_steps for b in each.momenta],
        }

    def load_state_dict(self, state: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """Load what `state_dict` returned; the number of fragments may be another one."""
        super().load_state_dict(state, parameters)
        self.start(parameters)
        common = [a for each in self.outer_steps for a in each.common]
        momenta = [b for each in self.outer_steps for b in each.momenta]
        for mine, stored in zip([*common, *momenta], [*state["common"], *state["momenta"]]):
            mine.copy_(stored)


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


def split_evenly(parameters: Sequence[Tensor], parts: int) -> list[list[Tensor]]:
    """Cut a list of tensors into parts of about as many elements each; none of them is empty."""
    total, done = sum(p.numel() for p in parameters), 0
    split: list[list[Tensor]] = [[] for _ in range(parts)]
    for p in parameters:
        split[min(parts - 1, done * parts // max(total, 1))].append(p)
        done += p.numel()
    return [part for part in split if part]


def _change(common: Tensor, parameter: Tensor) -> Tensor:
    """Returns a - w, zeros where the parameter is what its own dtype keeps of a."""
    has_changed = (parameter != common.to(parameter.dtype)).any()
    return torch.where(has_changed, common - parameter, 0.0)

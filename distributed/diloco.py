"""DiLoCo: ranks train apart and agree now and then, by a step with momentum of their own.

    hook = DiLoCo(world, every=50)                    # in place of `comm_hooks.AllReduceHook`
    hook.start(parameters)                            # while all ranks have the same weights
    hook.after_step(parameters)                       # after each step of any optimizer

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
arXiv:2311.08105, algorithm 1. Each rank's optimizer takes H steps from the common weights a; then
    d = mean over the ranks of (a - w),  b <- mu b + d,  a <- a - eta (d + mu b),  w <- a
on every rank, which is a step of SGD with Nesterov momentum along the mean change. The optimizers'
own states are never exchanged. Around Muon, NGD's kin, it is MuLoCo (arXiv:2505.23725), which sends
changes in few bits, with error feedback: with e what rounding has left so far, zeros at first,
    s = rounded(a - w + e),  e <- a - w + e - s,  d = mean over the ranks of s.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distributed.comm_hooks import LocalSGD
from distributed.quantization import dequantize, quantize
from distributed.world import World


class DiLoCo(LocalSGD):
    """DiLoCo (see above) as what data parallelism sends.

    After each epoch the ranks take an outer step as well, so that all evaluate the same weights;
    the next one is H steps later.

    Args:
        every: H, steps from one outer step to the next.
        after: steps at the start in which gradients are averaged instead.
        lr: eta, of the outer step.
        momentum: mu, of the outer step; the paper has 0.9, which loses 4 points in short runs
            (docs/large_batch.md).
        wire_dtype: dtype in which changes of weights are sent.
        wire_bits: 8, 4 or 1: bits of each change that is sent, and two bytes for 64 of them; all
            ranks gather them (nothing is reduced on the way). 0: they are sent in `wire_dtype`.
    """

    def __init__(
        self,
        world: World,
        every: int,
        *,
        after: int = 0,
        lr: float = 0.7,
        momentum: float = 0.5,
        wire_dtype: torch.dtype = torch.bfloat16,
        wire_bits: int = 0,
    ) -> None:
        super().__init__(world, every, after=after)
        if not (lr > 0 and 0 <= momentum < 1):
            raise ValueError(f"lr={lr} must be above 0, and momentum={momentum} within [0, 1)")
        self.lr, self.momentum = lr, momentum
        self.wire_dtype, self.wire_bits = wire_dtype, wire_bits
        self.common: list[Tensor] = []  # a, on which the ranks have last agreed, in fp32 at least
        self.momenta: list[Tensor] = []  # b
        self.errors: list[Tensor] = []  # e, of this rank

    def start(self, parameters: Sequence[Tensor]) -> None:
        """Keep the weights from which the ranks part."""
        self.common = [
            p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
            for p in parameters
        ]
        self.momenta = [torch.zeros_like(each) for each in self.common]
        self.errors = [torch.zeros_like(each) for each in self.common]
        self.met = max(self.steps, self.after)

    @torch.no_grad()
    def outer_step(self, parameters: Sequence[Tensor]) -> None:
        """Take the outer step; one collective."""
        parameters = list(parameters)  # it may be model.parameters(), which is gone through once
        # from the weights that the ranks got, which are rounded where p is in bf16 or fp16
        changes = [a.to(p.dtype).to(a) - p for a, p in zip(self.common, parameters)]
        means = self.rounded_mean(changes) if self.wire_bits else self.mean(changes)
        self.world.traffic += self.averager.take_traffic()
        for p, a, b, d in zip(parameters, self.common, self.momenta, means):
            b.mul_(self.momentum).add_(d)
            a.sub_(torch.add(d, b, alpha=self.momentum), alpha=self.lr)
            p.copy_(a)
        self.met = self.steps

    def mean(self, changes: Sequence[Tensor]) -> list[Tensor]:
        """Return the mean of each change over the ranks, sent in `wire_dtype`."""
        flat = torch.cat([each.flatten() for each in changes]).to(self.wire_dtype)
        received = self.averager.mean(flat).split([each.numel() for each in changes])
        return [mean.view(each.shape).to(each.dtype) for mean, each in zip(received, changes)]

    def rounded_mean(self, changes: Sequence[Tensor]) -> list[Tensor]:
        """Return the mean of what the ranks send in few bits, and keep what rounding leaves."""
        corrected = [each + e for each, e in zip(changes, self.errors)]
        mine = quantize(corrected, self.wire_bits)
        decode = partial(dequantize, bits=self.wire_bits, like=corrected)
        self.errors = [each - sent for each, sent in zip(corrected, decode(*mine))]
        # In the order of the ranks, so that all of them get the same bits.
        of_ranks = [decode(*codes) for codes in self.averager.gather(mine)]
        return [sum(each[1:], each[0]) / len(each) for each in zip(*of_ranks)]

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
            super().outer_step(parameters)
            self.start(parameters)
            return
        devices = [p.device for p in parameters]
        self.common = [a.to(on, copy=True) for a, on in zip(state["common"], devices)]
        self.errors = [torch.zeros_like(a) for a in self.common]
        self.momenta = [b.to(on, copy=True) for b, on in zip(state["momenta"], devices)]

    def rank_state_dict(self, parameters: Sequence[Tensor]) -> dict[str, Tensor]:
        """What rounding has left on this rank, by the parameters' numbers."""
        errors = self.errors if self.wire_bits else []
        return {f"change {n}": e.cpu() for n, e in enumerate(errors)}

    def load_rank_state_dict(self, state: dict[str, Tensor], parameters: Sequence[Tensor]) -> None:
        for number, e in enumerate(self.errors):
            e.copy_(state.get(f"change {number}", torch.zeros_like(e)))

"""SLAMB with the formulas of the paper's authors, beside which ours is tested."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from optimizers.adam import AdamStep, update_moments, weights_to_updates_
from optimizers.flat_buffer import FlatLayout
from optimizers.lamb import lamb_trust_ratios
from slamb import SLAMB, TRUST_CLAMP, ParamGroupBuffers

AUTHORS_SMALLEST_LARGE = 9000


class AuthorsSLAMB(SLAMB):
    """SLAMB with the formulas of the paper's authors; its arguments are those of `SLAMB`.

    The momentum of small tensors is averaged instead of their gradient, there are no dense steps,
    all tensors have trust ratios (`adapt` has no effect), and the units of a step are a fixed part
    of the order. Early updates are much larger than LAMB's.
    """

    default_smallest_large = AUTHORS_SMALLEST_LARGE

    def _new_group_buffers(self, group: dict[str, Any], seed: int) -> ParamGroupBuffers:
        return AuthorsParamGroupBuffers(group, self.state, selection=self.selection, seed=seed)

    def _is_dense_step(self, group: dict[str, Any]) -> bool:
        return False


class AuthorsParamGroupBuffers(ParamGroupBuffers):
    """The buffers of a parameter group with the formulas of the paper's authors."""

    def __init__(
        self,
        group: dict[str, Any],
        state: dict[Tensor, dict[str, Any]],
        *,
        selection: str,
        seed: int,
    ) -> None:
        super().__init__(group, state, selection=selection, seed=seed)
        self.is_vector = torch.tensor(
            [p.ndim < 2 for p in self.small.tensors], dtype=torch.bool, device=self.small.device
        )

    def _adapts(self, parameter: Tensor) -> bool:
        return True

    def _next_units(self, call: int) -> Tensor:
        return self.order.partition(call, int(1 / self.group["compress_ratio"]))

    def _whole_values(self, layout: FlatLayout) -> Tensor:
        return torch.lerp(self.m[layout], self.g[layout], 1 - self.group["betas"][0]).view(-1)

    def _update_whole(self, layout: FlatLayout, means: Tensor, *, adam: AdamStep) -> None:
        m, v = self.m[layout], self.v[layout]
        means = means.view_as(m)
        if adam.active is not None:
            means = torch.where(adam.active > 0, means, m)
        update_moments([m], [v], grads=[self.g[layout]], adam=adam)
        m.copy_(means)
        weights_to_updates_([self.u[layout]], [m], [v], adam=adam)

    def _clamp_small(self, ratios: Tensor) -> Tensor:
        return torch.where(self.is_vector, ratios, ratios.clamp(*TRUST_CLAMP))

    def _selected_ratios(self, weights: Tensor, updates: Tensor, *, others: Tensor) -> Tensor:
        return lamb_trust_ratios(weights, updates)

    def _clamp_large_(self, trust: Tensor, units: Tensor | None) -> None:
        trust.clamp_(*TRUST_CLAMP)

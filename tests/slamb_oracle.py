"""SLAMB for all ranks at once, with element masks, as the docstring of slamb.py writes it; float64, one process."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from optimizers.flat_buffer import FlatLayout, RoundRobin
from slamb import BLOCK, CLAMP, SMALL

SHAPES = [(20, 16, 6, 6), (30, 10), (7,), (96, 101), (20,), (5, 3, 2)]


def start(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """The weights that every rank begins with."""
    generator = torch.Generator().manual_seed(0)
    return [
        (0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
        for shape in SHAPES
    ]


def gradient(step: int, rank: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """The gradients of a rank at a step: a part that all have in common, and noise."""
    common, own = (
        torch.Generator().manual_seed(1000 + step),
        torch.Generator().manual_seed(77 * step + rank + 5),
    )
    parts = []
    for shape in SHAPES:
        one, other = (torch.randn(shape, generator=g, dtype=torch.float64) for g in (common, own))
        parts.append((0.02 * (one + other)).to(dtype))
    return parts


class Oracle:
    """Weights, moments and ages of every rank."""

    def __init__(
        self, ranks: int, k: float, selection: str, compat: bool, **settings: float
    ) -> None:
        self.ranks, self.k, self.compat, self.t, self.selection = ranks, k, compat, 0, selection
        self.settings = {
            "lr": 0.01,
            "b1": 0.9,
            "b2": 0.999,
            "eps": 1e-6,
            "decay": 0.01,
            "beta3": 0.99,
            "local": 50,
            "dense": 10,
        }
        self.settings |= settings
        self.w = [start() for _ in range(ranks)]
        self.m, self.v = (
            [[torch.zeros_like(p) for p in start()] for _ in range(ranks)] for _ in range(2)
        )
        self.age = [torch.zeros_like(p) for p in start()]
        self.large = [
            number for number, p in enumerate(start()) if p.ndim > 1 and p.numel() >= SMALL
        ]
        self.lay = FlatLayout([start()[number] for number in self.large], BLOCK)
        self.ring = RoundRobin(self.lay.places() if selection == "random" else self.lay.rows, 0)

    def masks(self, dense: bool) -> list[Tensor]:
        """Of each tensor, which elements are exchanged on this step."""
        found = [torch.ones_like(p, dtype=torch.bool) for p in start()]
        if dense:
            return found
        units = self.ring.part(self.t, int(1 / self.k)) if self.compat else self.ring.take(self.k)
        buffer = torch.zeros(self.lay.rows, BLOCK, dtype=torch.float64)
        (buffer.view(-1) if self.selection == "random" else buffer)[units] = 1
        for number, view in zip(self.large, self.lay.views(buffer)):
            found[number] = view.clone() > 0
        return found

    def step(self) -> None:
        """One step of all ranks."""
        self.t += 1
        s, t, W = self.settings, self.t, self.ranks
        dense = not self.compat and (t <= s["dense"] or self.k >= 1 or W == 1)
        masks = self.masks(dense)
        gradients = [gradient(t, rank) for rank in range(W)]
        for number, mask in enumerate(masks):
            large = number in self.large
            if not self.compat and (dense or not large):
                mean = sum(each[number] for each in gradients) / W
                for each in gradients:
                    each[number] = mean
            for rank in range(W):
                g = gradients[rank][number]
                self.m[rank][number] = s["b1"] * self.m[rank][number] + (1 - s["b1"]) * g
                self.v[rank][number] = s["b2"] * self.v[rank][number] + (1 - s["b2"]) * g**2
            if self.compat or not (dense or not large):
                mean = sum(self.m[rank][number] for rank in range(W)) / W
                for rank in range(W):
                    self.m[rank][number] = torch.where(mask, mean, self.m[rank][number])
            self.age[number] = torch.where(mask, 0, self.age[number] + 1)
            r = s["beta3"] ** self.age[number]
            for rank in range(W):
                w, m, v = self.w[rank][number], self.m[rank][number], self.v[rank][number]
                u = (m / (1 - s["b1"] ** t)) / ((v / (1 - s["b2"] ** t)).sqrt() + s["eps"]) + s[
                    "decay"
                ] * w
                chosen, others = self.ratio(w[mask], u[mask]), self.ratio(w[~mask], u[~mask])
                if not self.compat and not (mask.any() and w[mask].norm() > 0):
                    chosen = others
                trust = r * chosen + (1 - r) * others
                if self.compat and w.ndim > 1:
                    trust = trust.clamp(*CLAMP)
                if not self.compat and w.ndim < 2:
                    trust = torch.ones_like(trust)
                self.w[rank][number] = w - s["lr"] * (r + (1 - r) / math.sqrt(W)) * trust * u
        if t % s["local"] == 0:
            for number in range(len(masks)):
                mean = sum(self.w[rank][number] for rank in range(W)) / W
                for rank in range(W):
                    self.w[rank][number] = mean

    @staticmethod
    def ratio(w: Tensor, u: Tensor) -> Tensor | float:
        """The trust ratio of what is selected; 1 where there is nothing."""
        return w.norm() / u.norm() if w.numel() and w.norm() > 0 and u.norm() > 0 else 1.0

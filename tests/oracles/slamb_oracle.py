"""SLAMB as slamb.py documents it, with element masks, for all ranks in one process, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from optimizers.flat_buffer import FlatLayout, next_units, shuffled
from slamb import BLOCK, LARGEST_TRUST, SMALLEST_LARGE

SHAPES = [(20, 16, 6, 6), (30, 40), (7,), (96, 101), (20,), (5, 3, 2)]
SETTINGS = {"lr": 0.01, "b1": 0.9, "b2": 0.999, "eps": 1e-6, "decay": 0.01, "bits": 0}


def start(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Returns the weights that every rank starts with."""
    generator = torch.Generator().manual_seed(0)
    return [
        (0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
        for shape in SHAPES
    ]


def gradient(step: int, rank: int) -> list[Tensor]:
    """Returns the gradients of a rank at a step: a common part and the rank's own noise."""
    seeds = (1000 + step, 77 * step + rank + 5)
    both = [torch.Generator().manual_seed(seed) for seed in seeds]
    return [
        sum(0.02 * torch.randn(shape, generator=part, dtype=torch.float64) for part in both)
        for shape in SHAPES
    ]


def rounded(values: Tensor, bits: int) -> Tensor:
    """What is sent of values: whole multiples of a scale, or signs, for each BLOCK elements."""
    sent, most = values.clone(), 2 ** (bits - 1) - 1
    for block in sent.split(BLOCK):
        if bits == 1:
            scale = block.abs().mean().bfloat16().double()
            block.copy_(torch.where(block >= 0, scale, -scale))
        elif block.any():
            scale = (block.abs().max() / most).bfloat16().double()
            block.copy_((block / scale).round().clamp(-most, most) * scale)
    return sent


class Oracle:
    """The weights, moments and ages of every rank."""

    def __init__(self, ranks: int, k: float, **settings: float) -> None:
        self.ranks, self.k, self.t = ranks, k, 0
        self.settings = SETTINGS | settings
        self.w = [start() for _ in range(ranks)]
        self.m, self.v = (
            [[torch.zeros_like(p) for p in start()] for _ in range(ranks)] for _ in range(2)
        )
        self.age = [torch.zeros_like(p) for p in start()]
        self.large = [
            number for number, p in enumerate(start()) if p.ndim > 1 and p.numel() >= SMALLEST_LARGE
        ]
        self.layout = FlatLayout([start()[number] for number in self.large], BLOCK)
        self.units = torch.arange(self.layout.rows)  # that are exchanged in this step
        self.order, self.cursor = shuffled(self.units, 0), 0

    def masks(self, dense: bool) -> list[Tensor]:
        """Returns a mask of each tensor: the elements that are exchanged in this step."""
        masks = [torch.ones_like(p, dtype=torch.bool) for p in start()]
        if dense:
            return masks
        self.units = next_units(self.order, self.cursor, self.k)
        self.cursor = (self.cursor + len(self.units)) % len(self.order)
        buffer = torch.zeros(self.layout.rows, BLOCK, dtype=torch.float64)
        buffer[self.units] = 1
        for number, view in zip(self.large, self.layout.views(buffer)):
            masks[number] = view.clone() > 0
        return masks

    def step(self) -> None:
        """Takes one step on all ranks."""
        self.t += 1
        s, t, W = self.settings, self.t, self.ranks
        dense = t <= s["dense"] or self.k >= 1 or W == 1
        masks = self.masks(dense)
        gradients = [gradient(t, rank) for rank in range(W)]
        for number in range(len(masks)):
            if dense or number not in self.large:
                mean = sum(each[number] for each in gradients) / W
                for each in gradients:
                    each[number] = mean
            for rank in range(W):
                g = gradients[rank][number]
                self.m[rank][number] = s["b1"] * self.m[rank][number] + (1 - s["b1"]) * g
                self.v[rank][number] = s["b2"] * self.v[rank][number] + (1 - s["b2"]) * g**2
        all_sent = [m if dense else self.as_sent(m) for m in self.m]
        for number, mask in enumerate(masks):
            if not dense and number in self.large:
                own = [self.m[rank][number] for rank in range(W)]
                sent = [all_sent[rank][number] for rank in range(W)]
                mean = sum(sent) / W
                for rank in range(W):
                    self.m[rank][number] = torch.where(
                        mask, mean + own[rank] - sent[rank], own[rank]
                    )
            self.age[number] = torch.where(mask, 0, self.age[number] + 1)
            r = s["beta3"] ** self.age[number]
            for rank in range(W):
                w, m, v = self.w[rank][number], self.m[rank][number], self.v[rank][number]
                u = (m / (1 - s["b1"] ** t)) / ((v / (1 - s["b2"] ** t)).sqrt() + s["eps"]) + s[
                    "decay"
                ] * w
                selected, others = self.ratio(w[mask], u[mask]), self.ratio(w[~mask], u[~mask])
                if not (mask.any() and w[mask].norm() > 0):
                    selected = others
                trust = r * selected + (1 - r) * others
                if w.ndim < 2:
                    trust = torch.ones_like(trust)
                elif not dense and number in self.large:
                    trust = trust.clamp(max=LARGEST_TRUST)
                self.w[rank][number] = w - s["lr"] * (r + (1 - r) / math.sqrt(W)) * trust * u
        if t % s["local"] == 0:
            for number in range(len(masks)):
                mean = sum(self.w[rank][number] for rank in range(W)) / W
                for rank in range(W):
                    self.w[rank][number] = mean

    def as_sent(self, momenta: list[Tensor]) -> list[Tensor]:
        """Returns a rank's momenta as they are sent: the units of this step, one after another."""
        bits = self.settings["bits"]
        if not bits:
            return momenta
        buffer = self.layout.new_buffer()
        for number, view in zip(self.large, self.layout.views(buffer)):
            view.copy_(momenta[number])
        buffer[self.units] = rounded(buffer[self.units].flatten(), bits).view(-1, BLOCK)
        sent = list(momenta)
        for number, view in zip(self.large, self.layout.views(buffer)):
            sent[number] = view.clone()
        return sent

    @staticmethod
    def ratio(w: Tensor, u: Tensor) -> Tensor | float:
        """Returns the trust ratio of these elements, or 1 where there are none."""
        return w.norm() / u.norm() if w.numel() and w.norm() > 0 and u.norm() > 0 else 1.0

"""SLAMB as slamb.py documents it, with element masks, for all ranks in one process, in float64."""

import math

import torch
from torch import Tensor

from optimizers.flat_buffer import FlatLayout, next_units, shuffled
from slamb import BLOCK, LARGEST_TRUST, SMALLEST_LARGE

SHAPES = [(20, 16, 6, 6), (30, 40), (7,), (96, 101), (20,), (5, 3, 2)]
SETTINGS = {"lr": 0.01, "b1": 0.9, "b2": 0.999, "eps": 1e-6, "decay": 0.01, "bits": 0}
SETTINGS["most"] = LARGEST_TRUST


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
    """The weights w and moments m, v, (ranks, *shape) of each tensor; and the ages."""

    def __init__(self, ranks: int, k: float, **settings: float) -> None:
        self.ranks, self.k, self.t = ranks, k, 0
        self.settings = SETTINGS | settings
        self.w = [torch.stack([p] * ranks) for p in start()]
        self.m, self.v = ([torch.zeros_like(p) for p in self.w] for _ in range(2))
        self.age = [torch.zeros_like(p) for p in start()]
        self.large = [
            number for number, p in enumerate(start()) if p.ndim > 1 and p.numel() >= SMALLEST_LARGE
        ]
        self.layout = FlatLayout([start()[number] for number in self.large], BLOCK)
        self.order, self.cursor = shuffled(torch.arange(self.layout.rows), 0), 0

    def step(self) -> None:
        self.t += 1
        s, t, W = self.settings, self.t, self.ranks
        dense = t <= s["dense"] or self.k >= 1 or W == 1
        sparse = [] if dense else self.large  # of whose momentum units are exchanged
        for number, of_ranks in enumerate(zip(*(gradient(t, rank) for rank in range(W)))):
            g = torch.stack(of_ranks)
            g = g if number in sparse else g.mean(0).expand_as(g)
            self.m[number] = s["b1"] * self.m[number] + (1 - s["b1"]) * g
            self.v[number] = s["b2"] * self.v[number] + (1 - s["b2"]) * g**2
        masks = [torch.ones_like(age, dtype=torch.bool) for age in self.age]
        if not dense:
            self.exchange(masks)
        for number, (mask, w, m, v) in enumerate(zip(masks, self.w, self.m, self.v)):
            self.age[number] = torch.where(mask, 0, self.age[number] + 1)
            r = s["beta3"] ** self.age[number]
            u = (m / (1 - s["b1"] ** t)) / ((v / (1 - s["b2"] ** t)).sqrt() + s["eps"])
            u += s["decay"] * w
            for of_rank, update in zip(w, u):
                others = self.ratio(of_rank[~mask], update[~mask])
                selected = self.ratio(of_rank[mask], update[mask]) if mask.any() else others
                trust = r * selected + (1 - r) * others if w.ndim > 2 else 1.0
                if number in sparse:
                    trust = trust.clamp(max=s["most"])
                of_rank -= s["lr"] * (r + (1 - r) / math.sqrt(W)) * trust * update
            if t % s["local"] == 0:
                w.copy_(w.mean(0))

    def exchange(self, masks: list[Tensor]) -> None:
        """Exchanges the momentum of the next units, and makes the masks those of their elements."""
        units, bits = next_units(self.order, self.cursor, self.k), self.settings["bits"]
        self.cursor = (self.cursor + len(units)) % len(self.order)
        buffers = [self.layout.new_buffer() for _ in range(self.ranks + 1)]
        views = [self.layout.views(buffer) for buffer in buffers]  # of the momenta, and of masks
        for number, (*of_ranks, _) in zip(self.large, zip(*views)):
            torch._foreach_copy_(of_ranks, list(self.m[number]))
        own = torch.stack([buffer[units] for buffer in buffers[:-1]])
        sent = torch.stack(
            [rounded(each.flatten(), bits).view_as(each) if bits else each for each in own]
        )
        for buffer, values in zip(buffers, [*(sent.mean(0) + own - sent), 1.0]):
            buffer[units] = values
        for number, (*of_ranks, mask) in zip(self.large, zip(*views)):
            self.m[number], masks[number] = torch.stack(of_ranks), mask > 0

    @staticmethod
    def ratio(w: Tensor, u: Tensor) -> Tensor | float:
        """Returns the trust ratio of these elements, or 1 where there are none."""
        return w.norm() / u.norm() if w.numel() and w.norm() > 0 and u.norm() > 0 else 1.0

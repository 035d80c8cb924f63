"""One rank's half of SLAMB: a group's parameters in flat buffers, what of them is exchanged at a step, and the update.

    part = Part(group, optimizer.state, "block", compat=False, seed=0)
    part.load(None)                                   # gradients and weights into the buffers
    units = part.units(step)
    received = ...                                    # the mean over the ranks of part.values(units)
    part.update(units, received, live, nodes)

The equations are in slamb.py.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from base import subtract
from flat import Lay, Ring
from lamb import trust_ratios

BLOCK = 64  # elements of a unit of 'block'
SMALL = 9000  # tensors with fewer elements are exchanged whole on every step
CLAMP = (0.01, 1000.0)  # of trust ratios of what is exchanged in parts


class Part:
    """The parameters of a group and their moments, in flat buffers: small tensors, and large ones in rows.

    Args:
        group: the parameter group.
        state: the optimizer's, by parameter; what is there is taken over, and from then on it holds views of the buffers.
        selection: 'block' or 'random'.
        compat: the authors' formulas.
        seed: of the order of the units.
    """

    def __init__(self, group: dict[str, Any], state: dict[Tensor, dict[str, Any]], selection: str, compat: bool, seed: int) -> None:
        parameters = [p for p in group["params"] if p.requires_grad and p.numel()]
        small = [p.ndim < 2 or p.numel() < SMALL for p in parameters]
        self.group, self.selection, self.compat = group, selection, compat
        self.small = Lay([p for p, yes in zip(parameters, small) if yes], 1)
        self.large = Lay([p for p, yes in zip(parameters, small) if not yes], BLOCK)
        self.lays = [lay for lay in (self.small, self.large) if lay.rows]
        self.m, self.v, self.g, self.p = ({lay: lay.buffer() for lay in self.lays} for _ in range(4))
        rows = self.large.buffer()
        self.fresh = torch.ones_like(rows if selection == "random" else rows[:, :1])  # r = beta3^age, of an element or a row
        self.mask = torch.empty_like(self.fresh)  # 1 where a step exchanges, else 0
        self.room = torch.empty_like(self.fresh)  # for what a step multiplies with
        self.ring = Ring(self.large.places() if selection == "random" else self.large.rows, seed)
        self.ring.cursor = group.get("cursor", 0)
        self.owners, self.small_owners = self.large.owners(), self.small.owners()
        self.g_views, self.p_views = ({lay: lay.views(buffer) for lay, buffer in each.items()} for each in (self.g, self.p))
        adapt = [[compat or (p.ndim > 1 if group["adapt"] is None else group["adapt"]) for p in lay.tensors] for lay in self.lays]
        self.adapted = {lay: torch.tensor(each, device=lay.device) for lay, each in zip(self.lays, adapt)}
        self.bare = torch.tensor([p.ndim < 2 for p in self.small.tensors], dtype=torch.bool, device=self.small.device)
        for name, buffers in (("exp_avg", self.m), ("exp_avg_sq", self.v)):
            for lay in self.lays:
                adopt(state, name, lay.tensors, lay.views(buffers[lay]))
        fresh = (
            self.large.views(self.fresh)
            if selection == "random"
            else [self.fresh[self.large.rows_of(number), 0] for number in range(len(self.large.tensors))]
        )
        adopt(state, "fresh", self.large.tensors, fresh)

    def load(self, scale: Tensor | None) -> None:
        """Gradients and weights into the buffers; a gradient that is not there is zero."""
        for lay in self.lays:
            views = self.g_views[lay]
            there = [(view, p.grad) for view, p in zip(views, lay.tensors) if p.grad is not None]
            if len(there) < len(views):
                self.g[lay].zero_()
            if there:
                torch._foreach_copy_([view for view, _ in there], [grad for _, grad in there])
            torch._foreach_copy_(self.p_views[lay], lay.tensors)
            if scale is not None:
                self.g[lay].div_(scale)

    def units(self, step: int) -> Tensor:
        """The numbers of the units whose turn it is."""
        k = self.group["compress_ratio"]
        if self.compat:
            return self.ring.part(step, int(1 / k))
        found = self.ring.take(k)
        self.group["cursor"] = self.ring.cursor
        return found

    def give_back(self, units: Tensor | None) -> None:
        """The step was not done: it is not counted, and the units keep their turn."""
        self.group["calls"] -= 1
        if units is not None:
            self.ring.cursor = (self.ring.cursor - len(units)) % len(self.ring.order)
            self.group["cursor"] = self.ring.cursor

    def chosen(self, buffer: Tensor, units: Tensor) -> Tensor:
        """The elements of a buffer of the large tensors that are in these units, flat."""
        return buffer.view(-1).index_select(0, units) if self.selection == "random" else buffer.index_select(0, units).view(-1)

    def put(self, buffer: Tensor, units: Tensor, values: Tensor) -> None:
        """Undo to `chosen`."""
        if self.selection == "random":
            buffer.view(-1).index_copy_(0, units, values)
        else:
            buffer.index_copy_(0, units, values.view(len(units), -1))

    def split_norms(self, buffer: Tensor, units: Tensor | None) -> tuple[Tensor, Tensor]:
        """Norms (tensors,) of each large tensor's chosen elements, and of its others; of all of it, and 0, without units."""
        squares = torch.linalg.vector_norm(buffer, dim=1).square()
        if units is None:
            whole = self.large.sums(squares).sqrt()
            return whole, torch.zeros_like(whole)
        if self.selection == "block":
            chosen = squares * self.mask[:, 0]
        else:
            chosen = torch.linalg.vector_norm(torch.mul(buffer, self.mask, out=self.room), dim=1).square()
        return self.large.sums(chosen).sqrt(), self.large.sums((squares - chosen).clamp(min=0)).sqrt()

    def values(self, units: Tensor | None) -> dict[Lay, Tensor]:
        """What is to be averaged of each buffer, flat: momenta a gradient further, or gradients; of the large tensors `units`."""
        keep, found = 1 - self.group["betas"][0], {}
        for lay in self.lays:
            m, g = self.m[lay], self.g[lay]
            if lay is self.large and units is not None:
                found[lay] = torch.lerp(self.chosen(m, units), self.chosen(g, units), keep)
            else:
                found[lay] = torch.lerp(m, g, keep).view(-1) if self.compat else g.view(-1)
        return found

    def update(self, units: Tensor | None, received: dict[Lay, Tensor], live: Tensor, nodes: int) -> None:
        """The step with what was received, of `nodes` in all; nothing where `live` is 0."""
        group = self.group
        host = live.device.type == "cpu"  # then a step to be skipped does not come here
        for lay, values in received.items():
            m, v, g = self.m[lay], self.v[lay], self.g[lay]
            some = units if lay is self.large else None
            if some is None and not self.compat:
                g.copy_(values.view_as(g))
            if not host:
                g.copy_(torch.where(live > 0, g, 0.0))
            move_moments(m, v, g, group["betas"], None if host else live)
            if some is not None:
                self.put(m, some, values if host else torch.where(live > 0, values, self.chosen(m, some)))
            elif self.compat:
                m.copy_(values.view_as(m) if host else torch.where(live > 0, values.view_as(m), m))
            u = adam_direction(m, v, group, group["steps"], out=g)
            u.add_(self.p[lay], alpha=group["weight_decay"])
        if self.small.rows:
            self.move_small(live)
        if self.large.rows:
            self.refresh(units, live)
            self.move_large(units, live, nodes)

    def move_small(self, live: Tensor) -> None:
        """LAMB's step of the small tensors; their updates lie in the buffer of the gradients."""
        lay, u = self.small, self.g[self.small]
        weights, updates = (lay.sums(buffer.view(-1).square()).sqrt() for buffer in (self.p[lay], u))
        ratios = trust_ratios(weights, updates)
        if self.compat:
            ratios = torch.where(self.bare, ratios, ratios.clamp(*CLAMP))
        rates = torch.where(self.adapted[lay], ratios, 1.0) * (self.group["lr"] * live)
        u.mul_(rates.to(lay.dtype)[self.small_owners, None])
        subtract(lay.tensors, self.g_views[lay], 1.0)

    def refresh(self, units: Tensor | None, live: Tensor) -> None:
        """The mask; and ages: everything is a step older but for what was exchanged."""
        fresh, beta3 = self.fresh, self.group["beta3"]
        if units is None:
            fresh.copy_(torch.where(live > 0, 1.0, fresh))
            return
        self.mask.zero_().view(-1).index_fill_(0, units, 1.0)
        fresh.mul_(1 - live * (1 - beta3))
        torch.maximum(fresh, self.mask if live.device.type == "cpu" else (self.mask * live).to(fresh.dtype), out=fresh)

    def move_large(self, units: Tensor | None, live: Tensor, nodes: int) -> None:
        """The step of the large tensors; their updates lie in the buffer of the gradients."""
        lay, u, r = self.large, self.g[self.large], self.fresh
        weights, updates = self.split_norms(self.p[lay], units), self.split_norms(u, units)
        chosen, others = (trust_ratios(*pair) for pair in zip(weights, updates))
        if not self.compat:  # at a small k a step may exchange nothing of a tensor: then there is but one ratio
            chosen = torch.where((weights[0] > 0) & (updates[0] > 0), chosen, others)
        chosen, others = (torch.where(self.adapted[lay], ratio, 1.0)[self.owners, None] for ratio in (chosen, others))
        trust = torch.lerp(others, chosen, r, out=self.room)
        if self.compat:
            trust.clamp_(*CLAMP)
        elif units is not None:
            trust.clamp_(max=CLAMP[1])
        alone = 1 / math.sqrt(nodes)
        rate = self.group["lr"] * live
        u.mul_(trust)
        u.mul_(torch.mul(r, (1 - alone) * rate, out=self.room).add_(alone * rate))
        subtract(lay.tensors, self.g_views[lay], 1.0)


def adopt(state: dict[Tensor, dict[str, Any]], name: str, tensors: list[Tensor], views: list[Tensor]) -> None:
    """Copy a state that is there into views of a buffer, and let the state be these views."""
    for p, view in zip(tensors, views):
        if name in state[p]:
            view.copy_(state[p][name])
        state[p][name] = view


def move_moments(m: Tensor, v: Tensor, g: Tensor, betas: tuple[float, float], live: Tensor | None) -> None:
    """Adam's moments a gradient further; not where `live` is 0."""
    b1, b2 = betas
    if live is None:
        m.lerp_(g, 1 - b1)
        v.mul_(b2)
    else:
        m.mul_(1 - live * (1 - b1)).add_(g, alpha=1 - b1)
        v.mul_(1 - live * (1 - b2))
    v.addcmul_(g, g, value=1 - b2)


def adam_direction(m: Tensor, v: Tensor, group: dict[str, Any], steps: Tensor, out: Tensor) -> Tensor:
    """(m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps), in three passes over memory."""
    b1, b2 = group["betas"]
    counted = steps.clamp(min=1)  # a skipped first step has not happened
    debias = 1 - b1**counted
    torch.sqrt(v, out=out).mul_(debias / (1 - b2**counted).sqrt()).add_(group["eps"] * debias)
    return torch.div(m, out, out=out)

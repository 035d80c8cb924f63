"""SLAMB: LAMB whose ranks exchange a share of the momentum a step (Xu et al., "SLAMB: Accelerated Large Batch Training with Sparse
Communication", ICML 2023). `LAMB` is here as well.

    optimizer = SLAMB(model.parameters(), lr=2e-3, compress_ratio=0.1)       # the model is NOT wrapped for data parallelism
    loss.backward()
    optimizer.step()                         # one collective of a tenth of the model, and one of all of it every 50 steps

Per rank, with g the local gradient, W ranks, k the compress ratio, M the units whose turn it is (a fixed random order, a share k
a step), together with all of every small tensor, and age the steps since a unit's last turn:
    m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2,  m[M] <- mean of m[M] over the ranks
    u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay w,  r = beta3^age
    trust = clamp(r |w[M]| / |u[M]| + (1 - r) |w[not M]| / |u[not M]|, 0.01, 1000) a tensor
    w <- w - lr (r + (1 - r) / sqrt(W)) trust u;  every `local_steps` steps w <- mean of w over the ranks
What a rank has not sent yet stays in its m: the mean of m over the ranks is the momentum of the mean gradient at any time.

As written (`compat`), second moments are never exchanged, so that early updates are up to a hundred times LAMB's, and k = 1 is not
LAMB. By default the gradients of small tensors are averaged instead of their momentum (as many bytes), the first `dense_steps`
and all steps at k = 1 average all gradients, and then every rank does what LAMB does.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from distributed.averaging import RankAverager, average_tensors
from optimizers.base import GradScalerOptimizer, subtract_updates
from optimizers.flat_buffer import FlatLayout, RoundRobin
from optimizers.lamb import LAMB, lamb_trust_ratios

__all__ = ["LAMB", "SLAMB"]

BLOCK = 64  # elements of a unit of 'block'
SMALL = 9000  # tensors with fewer elements are exchanged whole on every step
CLAMP = (0.01, 1000.0)  # of trust ratios of what is exchanged in parts


class ParamGroupBuffers:
    """The parameters of a group and their moments, in flat buffers: small tensors, and large ones in rows.

    Args:
        group: the parameter group.
        state: the optimizer's, by parameter; what is there is taken over, and from then on it holds views of the buffers.
        selection: 'block' or 'random'.
        compat: the authors' formulas.
        seed: of the order of the units.
    """

    def __init__(
        self,
        group: dict[str, Any],
        state: dict[Tensor, dict[str, Any]],
        selection: str,
        compat: bool,
        seed: int,
    ) -> None:
        parameters = [p for p in group["params"] if p.requires_grad and p.numel()]
        small = [p.ndim < 2 or p.numel() < SMALL for p in parameters]
        self.group, self.selection, self.compat = group, selection, compat
        self.small = FlatLayout([p for p, yes in zip(parameters, small) if yes], 1)
        self.large = FlatLayout([p for p, yes in zip(parameters, small) if not yes], BLOCK)
        self.lays = [lay for lay in (self.small, self.large) if lay.rows]
        self.m, self.v, self.g, self.p = (
            {lay: lay.buffer() for lay in self.lays} for _ in range(4)
        )
        rows = self.large.buffer()
        self.fresh = torch.ones_like(
            rows if selection == "random" else rows[:, :1]
        )  # r = beta3^age, of an element or a row
        self.mask = torch.empty_like(self.fresh)  # 1 where a step exchanges, else 0
        self.room = torch.empty_like(self.fresh)  # for what a step multiplies with
        self.ring = RoundRobin(
            self.large.places() if selection == "random" else self.large.rows, seed
        )
        self.ring.cursor = group.get("cursor", 0)
        self.owners, self.small_owners = self.large.owners(), self.small.owners()
        self.g_views, self.p_views = (
            {lay: lay.views(buffer) for lay, buffer in each.items()} for each in (self.g, self.p)
        )
        adapt = [
            [
                compat or (p.ndim > 1 if group["adapt"] is None else group["adapt"])
                for p in lay.tensors
            ]
            for lay in self.lays
        ]
        self.adapted = {
            lay: torch.tensor(each, device=lay.device) for lay, each in zip(self.lays, adapt)
        }
        self.bare = torch.tensor(
            [p.ndim < 2 for p in self.small.tensors], dtype=torch.bool, device=self.small.device
        )
        for name, buffers in (("exp_avg", self.m), ("exp_avg_sq", self.v)):
            for lay in self.lays:
                adopt(state, name, lay.tensors, lay.views(buffers[lay]))
        fresh = (
            self.large.views(self.fresh)
            if selection == "random"
            else [
                self.fresh[self.large.rows_of(number), 0]
                for number in range(len(self.large.tensors))
            ]
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
        return (
            buffer.view(-1).index_select(0, units)
            if self.selection == "random"
            else buffer.index_select(0, units).view(-1)
        )

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
            chosen = torch.linalg.vector_norm(
                torch.mul(buffer, self.mask, out=self.room), dim=1
            ).square()
        return self.large.sums(chosen).sqrt(), self.large.sums(
            (squares - chosen).clamp(min=0)
        ).sqrt()

    def values(self, units: Tensor | None) -> dict[FlatLayout, Tensor]:
        """What is to be averaged of each buffer, flat: momenta a gradient further, or gradients; of the large tensors `units`."""
        keep, found = 1 - self.group["betas"][0], {}
        for lay in self.lays:
            m, g = self.m[lay], self.g[lay]
            if lay is self.large and units is not None:
                found[lay] = torch.lerp(self.chosen(m, units), self.chosen(g, units), keep)
            else:
                found[lay] = torch.lerp(m, g, keep).view(-1) if self.compat else g.view(-1)
        return found

    def update(
        self, units: Tensor | None, received: dict[FlatLayout, Tensor], live: Tensor, nodes: int
    ) -> None:
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
                self.put(
                    m, some, values if host else torch.where(live > 0, values, self.chosen(m, some))
                )
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
        weights, updates = (
            lay.sums(buffer.view(-1).square()).sqrt() for buffer in (self.p[lay], u)
        )
        ratios = lamb_trust_ratios(weights, updates)
        if self.compat:
            ratios = torch.where(self.bare, ratios, ratios.clamp(*CLAMP))
        rates = torch.where(self.adapted[lay], ratios, 1.0) * (self.group["lr"] * live)
        u.mul_(rates.to(lay.dtype)[self.small_owners, None])
        subtract_updates(lay.tensors, self.g_views[lay], 1.0)

    def refresh(self, units: Tensor | None, live: Tensor) -> None:
        """The mask; and ages: everything is a step older but for what was exchanged."""
        fresh, beta3 = self.fresh, self.group["beta3"]
        if units is None:
            fresh.copy_(torch.where(live > 0, 1.0, fresh))
            return
        self.mask.zero_().view(-1).index_fill_(0, units, 1.0)
        fresh.mul_(1 - live * (1 - beta3))
        torch.maximum(
            fresh,
            self.mask if live.device.type == "cpu" else (self.mask * live).to(fresh.dtype),
            out=fresh,
        )

    def move_large(self, units: Tensor | None, live: Tensor, nodes: int) -> None:
        """The step of the large tensors; their updates lie in the buffer of the gradients."""
        lay, u, r = self.large, self.g[self.large], self.fresh
        weights, updates = self.split_norms(self.p[lay], units), self.split_norms(u, units)
        chosen, others = (lamb_trust_ratios(*pair) for pair in zip(weights, updates))
        if (
            not self.compat
        ):  # at a small k a step may exchange nothing of a tensor: then there is but one ratio
            chosen = torch.where((weights[0] > 0) & (updates[0] > 0), chosen, others)
        chosen, others = (
            torch.where(self.adapted[lay], ratio, 1.0)[self.owners, None]
            for ratio in (chosen, others)
        )
        trust = torch.lerp(others, chosen, r, out=self.room)
        if self.compat:
            trust.clamp_(*CLAMP)
        elif units is not None:
            trust.clamp_(max=CLAMP[1])
        alone = 1 / math.sqrt(nodes)
        rate = self.group["lr"] * live
        u.mul_(trust)
        u.mul_(torch.mul(r, (1 - alone) * rate, out=self.room).add_(alone * rate))
        subtract_updates(lay.tensors, self.g_views[lay], 1.0)


def adopt(
    state: dict[Tensor, dict[str, Any]], name: str, tensors: list[Tensor], views: list[Tensor]
) -> None:
    """Copy a state that is there into views of a buffer, and let the state be these views."""
    for p, view in zip(tensors, views):
        if name in state[p]:
            view.copy_(state[p][name])
        state[p][name] = view


def move_moments(
    m: Tensor, v: Tensor, g: Tensor, betas: tuple[float, float], live: Tensor | None
) -> None:
    """Adam's moments a gradient further; not where `live` is 0."""
    b1, b2 = betas
    if live is None:
        m.lerp_(g, 1 - b1)
        v.mul_(b2)
    else:
        m.mul_(1 - live * (1 - b1)).add_(g, alpha=1 - b1)
        v.mul_(1 - live * (1 - b2))
    v.addcmul_(g, g, value=1 - b2)


def adam_direction(
    m: Tensor, v: Tensor, group: dict[str, Any], steps: Tensor, out: Tensor
) -> Tensor:
    """(m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps), in three passes over memory."""
    b1, b2 = group["betas"]
    counted = steps.clamp(min=1)  # a skipped first step has not happened
    debias = 1 - b1**counted
    torch.sqrt(v, out=out).mul_(debias / (1 - b2**counted).sqrt()).add_(group["eps"] * debias)
    return torch.div(m, out, out=out)


Plan = tuple[ParamGroupBuffers, Tensor | None, dict[FlatLayout, Tensor]]


class SLAMB(GradScalerOptimizer):
    """LAMB with sparse communication; see above. It exchanges what is to be exchanged itself.

    Args:
        params: parameters or parameter groups of a model that is not wrapped for data parallelism.
        lr, betas, eps, weight_decay: as `LAMB`.
        compress_ratio: k, in (0, 1]; may change at any step.
        warmup: k of the first epochs, at least `compress_ratio`; for those who call `start_epoch`.
        beta3: how fast trust in a unit's momentum fades with its age.
        local_steps: between averagings of the weights.
        dense_steps: at the start, in which all gradients are averaged.
        selection: of what the order consists: 'block', rows of 64 elements, or 'random', elements.
        wire_dtype: of what is sent; the weights are sent in their own.
        process_group: the ranks; None is torch's default group. Without one nothing is sent and this is LAMB.
        node_group: this node's ranks, as many on every node: gradients are averaged within it; nodes take the place of ranks.
        compat: the authors' formulas.
        adapt: whether a group has trust ratios; None: its parameters with two axes or more, in `compat` all.

    Call it on all ranks alike. A gradient that is missing on a rank is zero there. A step that a GradScaler, or our engine, finds
    not finite on one rank (`found_inf`) changes nothing on any. The schedule of units is the host's: on a GPU, where the host
    does not wait to hear of it, a skipped step's units wait another round.

    State, each rank its own: `exp_avg`, `exp_avg_sq`, `fresh` (beta3^age; of each element, or of each row of 64) of a parameter,
    `steps`, `calls` and `cursor` of a group. `skipped` is () and 1 after a skipped step.

    Raises:
        ValueError: a hyper-parameter is out of its range.
        RuntimeError: the model is also wrapped in DistributedDataParallel.
    """

    communicates = True  # the engine leaves gradients alone and keeps a state a rank

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
        dense_steps: int = 10,
        selection: str = "block",
        wire_dtype: torch.dtype = torch.bfloat16,
        process_group: dist.ProcessGroup | None = None,
        node_group: dist.ProcessGroup | None = None,
        compat: bool = False,
        adapt: bool | None = None,
        warmup: Sequence[float] = (),
    ) -> None:
        if selection not in ("block", "random"):
            raise ValueError(f"SLAMB: selection={selection}, wanted block or random")
        if local_steps < 1 or dense_steps < 0:
            raise ValueError(
                f"SLAMB: local_steps={local_steps}, dense_steps={dense_steps}, wanted at least 1 and 0"
            )
        self.local_steps, self.dense_steps, self.selection, self.compat = (
            local_steps,
            dense_steps,
            selection,
            compat,
        )
        self.wire_dtype, self.warmup = wire_dtype, list(warmup)
        self.exchange = RankAverager(process_group, node_group)
        self.parts: list[ParamGroupBuffers] | None = None
        self.skipped: Tensor | None = None
        names = ("lr", "betas", "eps", "weight_decay", "compress_ratio", "beta3", "adapt")
        super().__init__(
            params, dict(zip(names, (lr, betas, eps, weight_decay, compress_ratio, beta3, adapt)))
        )
        self.ratios = [group["compress_ratio"] for group in self.param_groups]  # after the warm-up

    def check_hyperparameters(self, group: dict[str, Any]) -> dict[str, bool]:
        """See Base."""
        return {
            "lr": group["lr"] >= 0,
            "betas": all(0 <= beta < 1 for beta in group["betas"]),
            "eps": group["eps"] >= 0,
            "weight_decay": group["weight_decay"] >= 0,
            "compress_ratio": 0 < group["compress_ratio"] <= 1,
            "beta3": 0 <= group["beta3"] <= 1,
        }

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self.parts = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See Base."""
        super().load_state_dict(state_dict)
        self.parts = None

    def start_epoch(self, epoch: int) -> None:
        """Set every group's k for an epoch, counted from 0."""
        for group, ratio in zip(self.param_groups, self.ratios):
            group["compress_ratio"] = (
                max(ratio, self.warmup[epoch]) if epoch < len(self.warmup) else ratio
            )

    def take_bytes(self) -> int:
        """This rank's payload in all collectives since the last call."""
        return self.exchange.take_bytes()

    def build(self) -> list[ParamGroupBuffers]:
        """Lay everything out, at the first step and after a change of groups or state."""
        if self.exchange.size > 1:
            mine = {p for group in self.param_groups for p in group["params"]}
            for thing in gc.get_objects():
                if issubclass(type(thing), DistributedDataParallel) and not mine.isdisjoint(
                    thing.parameters()
                ):
                    raise RuntimeError(
                        "SLAMB exchanges momentum itself: do not wrap the model in DistributedDataParallel, which would average "
                        "the gradients first"
                    )
        for group in self.param_groups:
            if group["params"]:
                group.setdefault(
                    "steps", torch.zeros((), dtype=torch.float64, device=group["params"][0].device)
                )
            group.setdefault("calls", 0)
        return [
            ParamGroupBuffers(group, self.state, self.selection, self.compat, seed)
            for seed, group in enumerate(self.param_groups)
        ]

    def _apply_step(self) -> None:
        """See Base."""
        if self.parts is None:
            self.parts = self.build()
        for part in self.parts:
            part.load(getattr(self, "grad_scale", None))
        flag = self.share_in_node(self.parts)
        plans = [self.plan(part) for part in self.parts]
        live = self.swap(plans, flag)
        if live.device.type == "cpu" and not live:
            for part, units, _ in plans:
                part.give_back(units)
            return
        for part, units, received in plans:
            part.group["steps"] += live
            part.update(units, received, live, self.exchange.nodes)
        if self.exchange.size > 1 and self.parts[0].group["calls"] % self.local_steps == 0:
            self.average_weights()

    def share_in_node(self, parts: list[ParamGroupBuffers]) -> Tensor:
        """All gradients become this node's mean. Returns (1,) more than 0 where one of its ranks wants to skip the step."""
        buffers = [part.g[lay] for part in parts for lay in part.lays]
        found = getattr(self, "found_inf", None)
        flag = (
            torch.zeros(1, device=buffers[0].device) if found is None else found.reshape(1).float()
        )
        if self.exchange.local_size == 1:
            return flag
        flat = self.exchange.mean_in_node(
            torch.cat([flag, *(buffer.view(-1) for buffer in buffers)])
        )
        flag, *means = flat.split([1, *(buffer.numel() for buffer in buffers)])
        for buffer, mean in zip(buffers, means):
            buffer.copy_(mean.view_as(buffer))
        return flag

    def plan(self, part: ParamGroupBuffers) -> Plan:
        """What of a part is exchanged on this step: units of the large tensors (None: all of them), and values."""
        group = part.group
        group["calls"] += 1
        alone, beginning = self.exchange.size == 1, group["calls"] <= self.dense_steps
        dense = not self.compat and (alone or beginning or group["compress_ratio"] >= 1)
        units = None if dense or not part.large.rows else part.units(group["calls"])
        return part, units, part.values(units)

    def swap(self, plans: list[Plan], flag: Tensor) -> Tensor:
        """The step's one collective: values become their means over the ranks. Returns () whether the step is to be done."""
        pieces = [values for _, _, each in plans for values in each.values()]
        if self.exchange.size > 1:
            flat = self.exchange.mean_across(torch.cat([flag, *pieces]).to(self.wire_dtype)).to(
                pieces[0].dtype
            )
            flag, *means = flat.split([1, *(len(piece) for piece in pieces)])
            found = iter(means)
            for _, _, each in plans:
                for lay in each:
                    each[lay] = next(found)
        self.skipped = (flag[0] != 0).double()
        return 1 - self.skipped

    def average_weights(self) -> None:
        """Weights become their mean over the ranks; for a step's end, and in front of evaluation and saving."""
        average_tensors(
            [p for group in self.param_groups for p in group["params"] if p.requires_grad],
            self.exchange,
        )

"""SLAMB: LAMB whose ranks exchange a share of the momentum at each step. `LAMB` is here as well.

    optimizer = SLAMB(model.parameters(), lr=0.01, compress_ratio=0.1)  # the model is NOT wrapped
    loss.backward()                                                     # in DDP
    optimizer.step()    # one collective of a tenth of the model, and of all of it every 50 steps

Xu et al., "SLAMB: Accelerated Large Batch Training with Sparse Communication", ICML 2023. On each
of W ranks, with g the local gradient and k the compress ratio:
    M    the units (rows of 64 elements) whose turn it is, in a fixed random order, a share k at
         each step; together with all of every small tensor
    age  the steps since a unit's last turn
    m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2,  m[M] <- mean of m[M] over the ranks
    u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay w,  r = beta3^age
    trust = min(r |w[M]| / |u[M]| + (1 - r) |w[not M]| / |u[not M]|, 1000) for each tensor
    w <- w - lr (r + (1 - r) / sqrt(W)) trust u;  every `local_steps` steps w <- mean of w
What a rank has not sent yet stays in its m: at each step the mean of m over the ranks is the
momentum of the mean gradient, but for the rounding to `wire_dtype` (in bf16 about 1e-3 of it).

As the authors write it, second moments are never exchanged, so that early updates are up to a
hundred times LAMB's, and k = 1 is not LAMB. `SLAMB` averages the gradients of small tensors instead
of their momentum (as many bytes), and all gradients in the first `dense_steps` and wherever k = 1;
then every rank does what LAMB does. The authors' trust ratios are 0.01 at least, of vectors too.

With `wire_bits` 8 or 4 each rank rounds the momentum that it sends, m[M], to 8 or 4 bits, and keeps
the rounding error e: m[M] <- mean of the rounded m[M] + e. So rounding does not change the mean of
m over the ranks, and no error adds up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distributed.averaging import RankAverager, Traffic, average_tensors
from distributed.quantization import dequantize, quantize
from optimizers.adam import AdamStep, adam_update_, weights_to_updates_
from optimizers.base import CommunicatingOptimizer, subtract_updates
from optimizers.flat_buffer import FlatLayout, next_units, shuffled
from optimizers.lamb import LAMB, lamb_trust_ratios

__all__ = ["LAMB", "SLAMB"]

BLOCK = 64  # elements of a unit
SMALLEST_LARGE = 1024  # elements of a tensor of which parts are exchanged
SETTINGS = (  # attributes of the optimizer that belong to no parameter group
    "local_steps",
    "dense_steps",
    "wire_dtype",
    "wire_bits",
    "warmup",
    "final_ratios",
    "averager",
)
LARGEST_TRUST = 1000.0  # the largest trust ratio of tensors that are exchanged in parts


# ------------------------------------------------------------ the optimizer


class SLAMB(CommunicatingOptimizer):
    """LAMB with sparse communication (see above), which it does itself.

    The ranks are those of torch's default process group; without one nothing is sent, and this is
    LAMB. Of vectors, and of tensors with fewer than 1,024 elements, everything is exchanged.

    All ranks must begin with the same weights, call it alike, and freeze the same weights
    (`requires_grad`), which then change by the next averaging alone. A gradient that is missing on
    some ranks is zero there; where all ranks miss it, the weight and its state stay as they are. On
    a CPU the ranks exchange which gradients they have, by a second collective, in the steps in
    which a rank misses one; on a GPU, where the host does not wait to learn of it, in every step,
    as further numbers of the first. A step that is non-finite on one rank (`found_inf`) changes
    nothing on any. The schedule of units is the host's: on a GPU, where the host does not wait to
    learn of it, the units of a skipped step miss their turn.

    State of a parameter, each rank its own:
        exp_avg      the shape of the parameter, m, in fp32 at least.
        exp_avg_sq   the same, v.
        fresh        beta3^age of each unit (rows,).
    State of a group:
        steps        (), t, float64.
        calls        int, all calls of `step`, without those that the host knows to be skipped.
        cursor       int, the place in the order of the units.

    Args:
        params: parameters or parameter groups of a model that is not wrapped for data parallelism.
        lr, betas, eps, weight_decay: as of `LAMB`.
        compress_ratio: k, in (0, 1]; may change at any step.
        beta3: how fast trust in a unit's momentum fades with its age.
        local_steps: steps between averagings of the weights, which are sent in their own dtype.
        dense_steps: first steps, in which all gradients are averaged.
        wire_dtype: dtype of what is sent.
        wire_bits: 8 or 4: bits of each element when the momentum of large tensors is sent; every
            64 elements take two bytes more. All ranks gather it (nothing is reduced on the way),
            which saves bytes for two or three ranks (8) and for up to seven (4). 0: momentum is
            sent in `wire_dtype`, as gradients always are.
        warmup: k of the first epochs, where it is above `compress_ratio`; see `start_epoch`.

    Raises:
        ValueError: a hyper-parameter is out of its range, or a group is on several devices.
    """

    own_ranges = {
        "compress_ratio": lambda ratio: 0 < ratio <= 1,
        "beta3": lambda beta3: 0 <= beta3 <= 1,
        "eps": lambda eps: eps > 0,  # which divides the zeros that fill the last row of a tensor
    }
    needs_one_device = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        compress_ratio: float = 0.1,
        beta3: float = 0.99,
        local_steps: int = 50,
        dense_steps: int = 10,
        wire_dtype: torch.dtype = torch.bfloat16,
        wire_bits: int = 0,
        warmup: Sequence[float] = (),
    ) -> None:
        if local_steps < 1:
            raise ValueError(f"SLAMB: local_steps={local_steps} must be at least 1")
        if dense_steps < 0:
            raise ValueError(f"SLAMB: dense_steps={dense_steps} must be at least 0")
        if wire_bits not in (0, 4, 8):
            raise ValueError(f"SLAMB: wire_bits={wire_bits} must be 0, 4 or 8")
        self.local_steps = local_steps
        self.dense_steps = dense_steps
        self.wire_dtype = wire_dtype
        self.wire_bits = wire_bits
        self.warmup = list(warmup)
        self.averager = RankAverager()
        self.buffers: list[ParamGroupBuffers] = []  # of each group
        self.final_ratios: list[float] = []  # of each group, after the warm-up
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "compress_ratio": compress_ratio,
            "beta3": beta3,
        }
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        settings = {name: getattr(self, name) for name in SETTINGS}
        return {**super().__getstate__(), **settings}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self.final_ratios.append(self.param_groups[-1]["compress_ratio"])

    def start_epoch(self, epoch: int) -> None:
        """Sets every group's compress ratio for an epoch, counted from 0: the warm-up."""
        for group, ratio in zip(self.param_groups, self.final_ratios):
            if epoch < len(self.warmup):
                ratio = max(ratio, self.warmup[epoch])
            group["compress_ratio"] = ratio

    def epoch_metrics(self) -> dict[str, float]:
        return {"compress_ratio": self.param_groups[0]["compress_ratio"]}

    def take_traffic(self) -> Traffic:
        return self.averager.take_traffic()

    def average_weights(self) -> None:
        weights = [p for group in self.param_groups for p in group["params"]]
        trained = [p for p in weights if p.requires_grad or p in self.state]  # or frozen since
        average_tensors(trained, self.averager)

    def _apply_step(self) -> None:
        self.remake(self._made_of, self._create_buffers)
        weights = [p for each in self.buffers for layout in each.layouts for p in layout.tensors]
        if not weights:  # all are frozen, on all ranks
            self.skipped = torch.zeros((), dtype=torch.float64)
            return
        for buffers in self.buffers:
            buffers.load(self.loss_scale)
        of_groups = [buffers.parts_to_average(self._is_dense(buffers)) for buffers in self.buffers]
        parts = [part for of_group in of_groups for part in of_group]
        flags = self._exchange(parts, self._own_flags(weights))
        self.skipped = (~flags[0].isfinite()).double()
        active = 1 - self.skipped
        if not _is_decided_on_device(active) and not active:
            return
        self._note_missing(parts, flags, weights=weights)
        for buffers, of_group in zip(self.buffers, of_groups):
            buffers.update(of_group, active, ranks=self.averager.size)
        calls = self.buffers[0].group["calls"]
        if self.averager.size > 1 and calls % self.local_steps == 0:
            self.average_weights()

    def _made_of(self) -> list[Any]:
        trained = [p.requires_grad for group in self.param_groups for p in group["params"]]
        return [*self.held("exp_avg", "exp_avg_sq", "fresh"), *trained]

    def _create_buffers(self) -> None:
        """Lays all groups out: at first, and after a change of groups, state or frozen weights."""
        for group in self.param_groups:
            if group["params"]:
                device = group["params"][0].device
                group.setdefault("steps", torch.zeros((), dtype=torch.float64, device=device))
            group.setdefault("calls", 0)
            group.setdefault("cursor", 0)
        self.buffers = [
            ParamGroupBuffers(group, self.state, seed=seed)
            for seed, group in enumerate(self.param_groups)
        ]

    def _own_flags(self, weights: list[Tensor]) -> Tensor:
        """Returns what this rank tells the others beside its gradients; they get the mean.

        Returns:
            (1,): infinite where this rank asks to skip the step, else 1 where it misses a gradient,
            else 0. Where the host does not wait to read the mean, (1 + weights,): after that number
            1 for each weight that has a gradient, and 0 for the others.
        """
        has_all = all(p.grad is not None for p in weights)
        flags = torch.full((1,), 0.0 if has_all else 1.0, device=weights[0].device)
        if self.found_inf is not None:
            flags.masked_fill_(self.found_inf.reshape(1) != 0, math.inf)
        if self.averager.size > 1 and _is_decided_on_device(flags):
            flags = torch.cat([flags, _has_gradient(weights)])
        return flags

    def _is_dense(self, buffers: ParamGroupBuffers) -> bool:
        """Whether all gradients of a group are averaged in this step, as for LAMB."""
        is_warming_up = buffers.group["calls"] < self.dense_steps
        return self.averager.size == 1 or is_warming_up or buffers.group["compress_ratio"] >= 1

    def _exchange(self, parts: list[Part], flags: Tensor) -> Tensor:
        """Replaces the values of the parts by their means over the ranks; returns that of flags."""
        if self.averager.size == 1:
            return flags
        if self.wire_bits and any(part.units is not None for part in parts):
            return self._gather_quantized(parts, flags)
        values = [*(part.values for part in parts), flags]
        flat = self.averager.mean(torch.cat([each.to(self.wire_dtype) for each in values]))
        *means, flags = flat.split([len(each) for each in values])
        for part, mean in zip(parts, means):
            part.values = mean.to(part.values.dtype)
        return flags

    def _gather_quantized(self, parts: list[Part], flags: Tensor) -> Tensor:
        """As `_exchange`, with the values of units sent in `wire_bits`.

        To the mean of the units' values each rank adds what its own have lost by rounding.
        """
        pieces = [flags.to(self.wire_dtype)]
        for part in parts:
            if part.units is None:
                pieces.append(part.values.to(self.wire_dtype))
            else:
                pieces += quantize([part.values], self.wire_bits)
        of_ranks = [self._decode(each, parts) for each in self.averager.gather(pieces)]
        # Summed in the order of the ranks, so that all of them get the same bits.
        flags, *means = [sum(each[1:], each[0]) / len(each) for each in zip(*of_ranks)]
        _, *own = of_ranks[dist.get_rank()]
        for part, mean, sent in zip(parts, means, own):
            part.values = mean if part.units is None else mean + (part.values - sent)
        return flags

    def _decode(self, pieces: list[Tensor], parts: list[Part]) -> list[Tensor]:
        """Returns the flags and the values that a rank has sent, in the order of the parts."""
        remaining = iter(pieces)
        decoded = [next(remaining).float()]
        for part in parts:
            if part.units is None:
                decoded.append(next(remaining).to(part.values.dtype))
            else:
                codes, scales = next(remaining), next(remaining)
                decoded += dequantize(codes, scales, bits=self.wire_bits, like=[part.values])
        return decoded

    def _note_missing(self, parts: list[Part], flags: Tensor, *, weights: list[Tensor]) -> None:
        """Writes into the parts of all groups which weights have a gradient on some rank.

        `flags` is the mean over the ranks of `_own_flags`; the weights are in the parts' order.
        """
        has_gradient = flags[1:]
        if not len(has_gradient):
            is_missing = any(p.grad is None for p in weights)
            if self.averager.size > 1:
                is_missing = bool(flags[0] > 0)  # read by the host of a CPU, alike on all ranks
            if not is_missing:
                return
            has_gradient = self.averager.mean(_has_gradient(weights).to(self.wire_dtype))
        sizes = [len(part.layout.tensors) for part in parts]
        for part, of_tensors in zip(parts, (has_gradient > 0).split(sizes)):
            part.has_gradient = of_tensors


@dataclass
class Part:
    """What is exchanged in one step of the small or of the large tensors of a parameter group."""

    layout: FlatLayout
    values: Tensor  # flat: what is averaged, then the means
    units: Tensor | None  # (units,) of which these are the momenta; None: gradients of everything
    # (tensors,), bool: whether a rank has a gradient; None: all tensors have one
    has_gradient: Tensor | None = None


# ------------------------------------------------------------ the tensors of a parameter group


class ParamGroupBuffers:
    """The parameters of a group and their moments in flat buffers.

    Small tensors lie in buffers of one column, large ones in buffers of rows of `BLOCK` elements.

    Args:
        group: the parameter group.
        state: the optimizer's state, by parameter; what is there is taken over, and from then on
            it consists of views of the buffers.
        seed: seed of the order of the units.
    """

    def __init__(
        self, group: dict[str, Any], state: dict[Tensor, dict[str, Any]], *, seed: int
    ) -> None:
        parameters = [p for p in group["params"] if p.requires_grad and p.numel()]
        is_small = [p.ndim < 2 or p.numel() < SMALLEST_LARGE for p in parameters]
        self.group = group
        self.small = FlatLayout([p for p, small in zip(parameters, is_small) if small], 1)
        self.large = FlatLayout([p for p, small in zip(parameters, is_small) if not small], BLOCK)
        self.layouts = [layout for layout in (self.small, self.large) if layout.rows]

        # of each layout: moments, gradients, and weights that a step turns into u, (rows, width)
        self.m = {layout: layout.new_buffer() for layout in self.layouts}
        self.v = {layout: layout.new_buffer() for layout in self.layouts}
        self.g = {layout: layout.new_buffer() for layout in self.layouts}
        self.u = {layout: layout.new_buffer() for layout in self.layouts}
        self.g_views = {layout: layout.views(self.g[layout]) for layout in self.layouts}
        self.u_views = {layout: layout.views(self.u[layout]) for layout in self.layouts}

        # of the units, (rows, 1)
        self.freshness = torch.ones_like(self.large.new_buffer()[:, :1])
        # 1 where this step exchanges, else 0; at its end memory for rates, as scratch is
        self.mask = torch.empty_like(self.freshness)
        self.scratch = torch.empty_like(self.freshness)

        large = self.large
        self.order = shuffled(torch.arange(large.rows, device=large.device), seed)
        self.row_tensors = {layout: layout.tensor_of_row() for layout in self.layouts}
        # whether a small tensor has a trust ratio, (tensors,)
        adapts = [p.ndim > 1 for p in self.small.tensors]
        self.adapts = torch.tensor(adapts, dtype=torch.bool, device=self.small.device)
        for layout in self.layouts:
            _share_state(state, "exp_avg", layout.tensors, views=layout.views(self.m[layout]))
            _share_state(state, "exp_avg_sq", layout.tensors, views=layout.views(self.v[layout]))
        fresh = list(self.freshness[:, 0].split(large.counts))
        _share_state(state, "fresh", large.tensors, views=fresh)

    def load(self, loss_scale: Tensor | None) -> None:
        """Copies gradients and weights into the buffers; a missing gradient is zero."""
        for layout in self.layouts:
            views = self.g_views[layout]
            present = [
                (view, p.grad) for view, p in zip(views, layout.tensors) if p.grad is not None
            ]
            if len(present) < len(views):
                self.g[layout].zero_()
            if present:
                torch._foreach_copy_([view for view, _ in present], [grad for _, grad in present])
            torch._foreach_copy_(self.u_views[layout], layout.tensors)
            if loss_scale is not None:
                self.g[layout].div_(loss_scale)

    def parts_to_average(self, is_dense: bool) -> list[Part]:
        """Returns what is averaged over the ranks.

        Args:
            is_dense: average the gradients of all tensors; otherwise of the large ones the next
                momentum of the units whose turn it is.
        """
        parts = []
        for layout in self.layouts:
            units: Tensor | None = None
            values = self.g[layout].view(-1)
            if layout is self.large and not is_dense:
                units = next_units(self.order, self.group["cursor"], self.group["compress_ratio"])
                units = units.sort().values  # in the order of memory, which is fastest
                m, g = (each[layout].index_select(0, units) for each in (self.m, self.g))
                values = m.lerp_(g, 1 - self.group["betas"][0]).view(-1)
            parts.append(Part(layout, values, units))
        return parts

    # -------------------------------------------------------- the update

    def update(self, parts: list[Part], active: Tensor, *, ranks: int) -> None:
        """Takes the step with the means that were received; nothing changes if `active` is 0.

        Args:
            parts: the means.
            active: (), 0 where the step is skipped; a CPU step that is skipped does not come here.
            ranks: how many exchange.
        """
        self.group["calls"] += 1
        if not parts:
            return
        known = [part.has_gradient for part in parts if part.has_gradient is not None]
        self.group["steps"] += active * torch.cat(known).any() if known else active
        of_device = active if _is_decided_on_device(active) else None
        adam = AdamStep.of(self.group, self.group["steps"], active=of_device)
        for part in parts:
            layout, units = part.layout, part.units
            if units is not None:
                self.group["cursor"] = (self.group["cursor"] + len(units)) % len(self.order)
                self.mask.zero_().index_fill_(0, units, 1.0)
            weight_norms = self._tensor_norms(layout, units)
            changes: Tensor | None = None  # (rows, 1), whether a row's tensor has a gradient
            if part.has_gradient is not None:
                changes = part.has_gradient.index_select(0, self.row_tensors[layout])[:, None]
            moments = self.m[layout], self.v[layout]
            before = [each.clone() for each in moments] if changes is not None else []
            if units is not None:
                self._update_selected(units, part.values, adam=adam)
            else:
                u, grads = self.u[layout], part.values.view_as(self.u[layout])
                adam_update_([u], [self.m[layout]], [self.v[layout]], grads=[grads], adam=adam)
            if changes is not None:
                for each, old in zip(moments, before):
                    torch.where(changes, each, old, out=each)
                self.u[layout].masked_fill_(~changes, 0.0)
            update_norms = self._tensor_norms(layout, units)
            if layout is self.small:
                trust = lamb_trust_ratios(weight_norms[0], update_norms[0])
                rates = torch.where(self.adapts, trust, 1.0) * (self.group["lr"] * active)
                self.u[layout].mul_(rates.to(layout.dtype)[self.row_tensors[layout], None])
                subtract_updates(layout.tensors, self.u_views[layout], lr=1.0)
                continue
            self._update_freshness(units, active if changes is None else active * changes)
            selected, others = map(lamb_trust_ratios, weight_norms, update_norms)
            # At a small k a step may select nothing of a tensor, which then has one ratio only.
            has_selected = (weight_norms[0] > 0) & (update_norms[0] > 0)
            ratios = torch.where(has_selected, selected, others), others
            self._update_large(ratios, active, ranks=ranks, is_whole=units is None)

    def _tensor_norms(self, layout: FlatLayout, units: Tensor | None) -> tuple[Tensor, Tensor]:
        """Computes norms of what the buffer of u holds: weights, then updates.

        Returns:
            Of each tensor (tensors,) the norm of its selected elements, and that of the others;
            without units the norms of all elements, and zeros.
        """
        squares = torch.linalg.vector_norm(self.u[layout], dim=1).square()  # of each row
        if units is None:
            of_tensors = layout.sum_per_tensor(squares).sqrt()
            return of_tensors, torch.zeros_like(of_tensors)
        selected = squares * self.mask[:, 0]
        others = (squares - selected).clamp(min=0)
        return layout.sum_per_tensor(selected).sqrt(), layout.sum_per_tensor(others).sqrt()

    def _update_selected(self, units: Tensor, means: Tensor, *, adam: AdamStep) -> None:
        """Computes moments and u of the large tensors, of which some units were exchanged.

        All elements move by this rank's own gradients, and those of the units then get the mean
        momentum (`means`, flat) and a new u, from the weights before this step, which are therefore
        read first.
        """
        m, v, u = self.m[self.large], self.v[self.large], self.u[self.large]
        means = means.view(len(units), BLOCK)
        if adam.active is not None:
            means = torch.where(adam.active > 0, means, m.index_select(0, units))
        of_units = u.index_select(0, units)
        adam_update_([u], [m], [v], grads=[self.g[self.large]], adam=adam)
        weights_to_updates_([of_units], [means], [v.index_select(0, units)], adam=adam)
        m.index_copy_(0, units, means)
        u.index_copy_(0, units, of_units)

    def _update_freshness(self, units: Tensor | None, active: Tensor) -> None:
        """Makes all units a step older but for those that were exchanged; None is everything.

        `active` is () or (rows, 1), 0 where nothing changes, else 1.
        """
        freshness, beta3 = self.freshness, self.group["beta3"]
        if units is None:
            freshness.copy_(torch.where(active > 0, 1.0, freshness))
            return
        freshness.mul_((1 - active * (1 - beta3)).to(freshness.dtype))
        renewed = self.mask
        if active.ndim or _is_decided_on_device(active):
            renewed = (self.mask * active).to(freshness.dtype)
        torch.maximum(freshness, renewed, out=freshness)

    def _update_large(
        self, trust: tuple[Tensor, Tensor], active: Tensor, *, ranks: int, is_whole: bool
    ) -> None:
        """Takes SLAMB's step of the large tensors.

        Args:
            trust: ratios of the selected elements and of the others (tensors,).
            active: (), 0 where nothing changes.
            ranks: how many exchange.
            is_whole: whether everything was exchanged, and trust has no limit, as in LAMB.
        """
        layout, u, r = self.large, self.u[self.large], self.freshness
        selected, others = (
            each.index_select(0, self.row_tensors[layout])[:, None] for each in trust
        )
        rates = torch.lerp(others, selected, r, out=self.scratch)
        if not is_whole:
            rates.clamp_(max=LARGEST_TRUST)
        stale = 1 / math.sqrt(ranks)  # the share of the rate for momentum of one rank alone
        rate = self.group["lr"] * active
        trusted = torch.mul(r, (1 - stale) * rate, out=self.mask).add_(stale * rate)
        u.mul_(rates.mul_(trusted))
        subtract_updates(layout.tensors, self.u_views[layout], lr=1.0)


def _is_decided_on_device(active: Tensor) -> bool:
    """Tells whether the host does not wait to learn that a step is skipped, as on a GPU."""
    return active.device.type != "cpu"


def _has_gradient(weights: list[Tensor]) -> Tensor:
    """Returns (weights,), 1 for each weight that has a gradient, else 0; the host need not wait."""
    has_gradient = torch.ones(len(weights), device=weights[0].device)
    for index, p in enumerate(weights):
        if p.grad is None:
            has_gradient[index].zero_()
    return has_gradient


def _share_state(
    state: dict[Tensor, dict[str, Any]], name: str, tensors: list[Tensor], *, views: list[Tensor]
) -> None:
    """Copies the states that exist into views of a buffer, which become the states."""
    for p, view in zip(tensors, views):
        if name in state[p]:
            view.copy_(state[p][name])
        state[p][name] = view

"""SLAMB: LAMB whose ranks exchange a share of the momentum at each step. `LAMB` is here as well.

    optimizer = SLAMB(model.parameters(), lr=2e-3, compress_ratio=0.1)  # the model is NOT wrapped
    loss.backward()                                                     # in DDP
    optimizer.step()    # one collective of a tenth of the model, and of all of it every 50 steps

Xu et al., "SLAMB: Accelerated Large Batch Training with Sparse Communication", ICML 2023. On each
of W ranks, with g the local gradient and k the compress ratio:
    M    the units whose turn it is, in a fixed random order, a share k at each step; together with
         all of every small tensor
    age  the steps since a unit's last turn
    m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2,  m[M] <- mean of m[M] over the ranks
    u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay w,  r = beta3^age
    trust = clamp(r |w[M]| / |u[M]| + (1 - r) |w[not M]| / |u[not M]|, 0.01, 1000) for each tensor
    w <- w - lr (r + (1 - r) / sqrt(W)) trust u;  every `local_steps` steps w <- mean of w
What a rank has not sent yet stays in its m: at each step the mean of m over the ranks is the
momentum of the mean gradient, but for the rounding to `wire_dtype` (in bf16 about 1e-3 of it).

As the authors write it (tests/oracles/authors_slamb.py), second moments are never exchanged, so
that early updates are up to a hundred times LAMB's, and k = 1 is not LAMB. `SLAMB` averages the
gradients of small tensors instead of their momentum (as many bytes), and all gradients in the first
`dense_steps` and wherever k = 1; then every rank does what LAMB does.

With `wire_bits` 8 or 4 each rank sends its momentum in M rounded to so many bits, and keeps what
rounding left, e, in its own: m[M] <- mean of the rounded m[M] + e. So the mean of m over the ranks
stays what it is, as for what was not sent, and no error adds up.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distributed.averaging import RankAverager, average_tensors
from distributed.quantization import dequantize, quantize
from optimizers.adam import AdamStep, adam_update_, update_moments, weights_to_updates_
from optimizers.base import CommunicatingOptimizer, global_norm, subtract_updates
from optimizers.flat_buffer import FlatLayout, RoundRobin
from optimizers.lamb import LAMB, lamb_trust_ratios

__all__ = ["LAMB", "SLAMB"]

BLOCK = 64  # elements of a unit of the selection 'block'
SETTINGS = (  # attributes of the optimizer that belong to no parameter group
    "local_steps",
    "dense_steps",
    "selection",
    "wire_dtype",
    "wire_bits",
    "warmup",
    "final_ratios",
)
TRUST_CLAMP = (0.01, 1000.0)  # range of the trust ratios of tensors that are exchanged in parts


# ------------------------------------------------------------ the optimizer


class SLAMB(CommunicatingOptimizer):
    """LAMB with sparse communication (see above), which it does itself.

    All ranks must call it alike, and freeze the same weights (`requires_grad`), which then stay as
    they are. A gradient that is missing on some ranks is zero there; where all ranks miss it, the
    weight and its state stay as they are. On a CPU the ranks exchange which gradients they have, by
    a second collective, in the steps in which a rank misses one; on a GPU, where the host does not
    wait to learn of it, in every step, as further numbers of the first. A step that is non-finite
    on one rank (`found_inf`) changes nothing on any. The schedule of units is the
    host's: on a GPU, where the host does not wait to learn of it, the units of a skipped step miss
    their turn.

    State of a parameter, each rank its own:
        exp_avg      the shape of the parameter, m, in fp32 at least.
        exp_avg_sq   the same, v.
        fresh        beta3^age: of each element, or of each row of 64 elements (rows,).
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
        selection: what the units are: 'block', rows of 64 elements, or 'random', elements.
        wire_dtype: dtype of what is sent.
        wire_bits: 8 or 4: the momentum of large tensors is sent in so many bits, and two more
            bytes for every 64 elements. It is gathered from all ranks instead of reduced on the
            way, which saves bytes for two or three ranks (8) and for up to seven (4). 0: it is sent
            in `wire_dtype`, as gradients always are.
        process_group: the ranks; None is torch's default group. Without one nothing is sent and
            this is LAMB.
        node_group: the ranks of this node, as many on every node: gradients are averaged within
            it, and nodes take the place of ranks.
        smallest_large: of tensors with fewer elements, and of vectors, everything is exchanged
            (default 1024; of `AuthorsSLAMB` 9000).
        adapt: whether a group has trust ratios; None: its parameters with two axes or more have
            them.
        warmup: k of the first epochs, where it is above `compress_ratio`; see `start_epoch`.
        amp_scaling: see `optimizers.base.GradScalerOptimizer`. With False, a GradScaler would skip
            a step on one rank alone, which then misses the collectives: only for bf16 and fp32.

    Raises:
        ValueError: a hyper-parameter is out of its range.
    """

    default_smallest_large = 1024

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
        selection: str = "block",
        wire_dtype: torch.dtype = torch.bfloat16,
        wire_bits: int = 0,
        process_group: dist.ProcessGroup | None = None,
        node_group: dist.ProcessGroup | None = None,
        smallest_large: int | None = None,
        adapt: bool | None = None,
        warmup: Sequence[float] = (),
        amp_scaling: bool = True,
    ) -> None:
        if selection not in ("block", "random"):
            raise ValueError(f"SLAMB: selection={selection} must be block or random")
        if local_steps < 1:
            raise ValueError(f"SLAMB: local_steps={local_steps} must be at least 1")
        if dense_steps < 0:
            raise ValueError(f"SLAMB: dense_steps={dense_steps} must be at least 0")
        if wire_bits not in (0, 4, 8):
            raise ValueError(f"SLAMB: wire_bits={wire_bits} must be 0, 4 or 8")
        if wire_bits and node_group is not None:
            raise ValueError(f"SLAMB: wire_bits={wire_bits} is not supported with node_group")
        self.local_steps = local_steps
        self.dense_steps = dense_steps
        self.selection = selection
        self.wire_dtype = wire_dtype
        self.wire_bits = wire_bits
        self.warmup = list(warmup)
        self.averager = RankAverager(process_group, node_group)
        self.buffers: list[ParamGroupBuffers] | None = None  # of each group
        self.trained: list[bool] = []  # which parameters are in them
        self.checks_gradients = self.averager.size > 1  # until a step has compared them
        self.final_ratios: list[float] = []  # of each group, after the warm-up
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "compress_ratio": compress_ratio,
            "beta3": beta3,
            "smallest_large": (
                self.default_smallest_large if smallest_large is None else smallest_large
            ),
            "adapt": adapt,
        }
        super().__init__(params, defaults, amp_scaling=amp_scaling)

    def __getstate__(self) -> dict[str, Any]:
        """Returns what pickle and deepcopy keep.

        Raises:
            TypeError: the ranks are process groups of one's own, which belong to this process.
        """
        if self.averager.group is not None or self.averager.node_group is not None:
            raise TypeError(
                "SLAMB with process_group or node_group cannot be pickled or copied: "
                "make a new one and use state_dict() and load_state_dict()"
            )
        settings = {name: getattr(self, name) for name in SETTINGS}
        return {**super().__getstate__(), **settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.buffers, self.trained = None, []
        if "averager" not in vars(self):  # an unpickled one; load_state_dict comes here as well
            self.averager = RankAverager(None, None)
            self.checks_gradients = self.averager.size > 1

    def check_hyperparameters(self, group: dict[str, Any]) -> dict[str, bool]:
        return {
            "lr": group["lr"] >= 0,
            "betas": all(0 <= beta < 1 for beta in group["betas"]),
            "eps": group["eps"] >= 0,
            "weight_decay": group["weight_decay"] >= 0,
            "compress_ratio": 0 < group["compress_ratio"] <= 1,
            "beta3": 0 <= group["beta3"] <= 1,
            "smallest_large": group["smallest_large"] >= 0,
        }

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self.final_ratios.append(self.param_groups[-1]["compress_ratio"])
        self.buffers = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.buffers = None

    def start_epoch(self, epoch: int) -> None:
        """Sets every group's compress ratio for an epoch, counted from 0: the warm-up."""
        for group, ratio in zip(self.param_groups, self.final_ratios):
            if epoch < len(self.warmup):
                ratio = max(ratio, self.warmup[epoch])
            group["compress_ratio"] = ratio

    def epoch_metrics(self) -> dict[str, float]:
        return {"compress_ratio": self.param_groups[0]["compress_ratio"]}

    def take_bytes(self) -> int:
        return self.averager.take_bytes()

    def average_weights(self) -> None:
        weights = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        average_tensors(weights, self.averager)

    def _apply_step(self) -> None:
        trained = [p.requires_grad for group in self.param_groups for p in group["params"]]
        if self.buffers is None or trained != self.trained:
            self.buffers, self.trained = self._create_buffers(), trained
        weights = [p for each in self.buffers for layout in each.layouts for p in layout.tensors]
        if not weights:  # all are frozen, on all ranks
            self.skipped = torch.zeros((), dtype=torch.float64)
            return
        for buffers in self.buffers:
            buffers.load(self.loss_scale)
        if self.checks_gradients:
            self._warn_if_gradients_are_averaged(self.buffers)
        own_flags = self._own_flags(weights)
        flags = self._average_in_node(self.buffers, own_flags)
        exchanges = [self._plan_exchange(buffers) for buffers in self.buffers]
        flags = self._exchange(exchanges, flags)
        self.skipped = (~flags[0].isfinite()).double()
        active = 1 - self.skipped
        if not _is_decided_on_device(active) and not active:
            for exchange in exchanges:
                exchange.buffers.undo_selection(exchange.units)
            return
        self._note_missing(exchanges, flags, weights=weights)
        for exchange in exchanges:
            exchange.buffers.update(exchange, active, nodes=self.averager.nodes)
        calls = self.buffers[0].group["calls"]
        if self.averager.size > 1 and calls % self.local_steps == 0:
            self.average_weights()

    def _create_buffers(self) -> list[ParamGroupBuffers]:
        """Lays all groups out: at first, and after a change of groups, state or frozen weights."""
        for group in self.param_groups:
            if group["params"]:
                device = group["params"][0].device
                group.setdefault("steps", torch.zeros((), dtype=torch.float64, device=device))
            group.setdefault("calls", 0)
        return [
            self._new_group_buffers(group, seed) for seed, group in enumerate(self.param_groups)
        ]

    def _new_group_buffers(self, group: dict[str, Any], seed: int) -> ParamGroupBuffers:
        return ParamGroupBuffers(group, self.state, selection=self.selection, seed=seed)

    def _warn_if_gradients_are_averaged(self, group_buffers: list[ParamGroupBuffers]) -> None:
        """Compares the norms of the ranks' gradients, once, at the first step that has any.

        Equal norms mean that something, such as DistributedDataParallel, has averaged the gradients
        already, so that SLAMB saves no communication.
        """
        grads = [buffers.g[layout] for buffers in group_buffers for layout in buffers.layouts]
        norm = global_norm(grads).double()
        norm = torch.where(torch.isfinite(norm), norm, 0.0)
        extremes = torch.stack([norm, -norm])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self.averager.group)
        largest, negated_smallest = extremes.tolist()
        smallest = -negated_smallest
        self.checks_gradients = largest == 0  # the same on all ranks
        if largest == smallest and largest > 0:
            warnings.warn(
                "SLAMB: all ranks have the same gradients, so they have been averaged already; "
                "SLAMB communicates itself: do not wrap the model in DistributedDataParallel",
                stacklevel=2,
            )

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

    def _average_in_node(self, group_buffers: list[ParamGroupBuffers], flags: Tensor) -> Tensor:
        """Replaces all gradients by their mean over this node's ranks; returns that of flags."""
        if self.averager.local_size == 1:
            return flags
        grads = [buffers.g[layout] for buffers in group_buffers for layout in buffers.layouts]
        flat = torch.cat([flags, *(grad.view(-1) for grad in grads)])
        flat = self.averager.mean_in_node(flat)
        flags, *means = flat.split([len(flags), *(grad.numel() for grad in grads)])
        for grad, mean in zip(grads, means):
            grad.copy_(mean.view_as(grad))
        return flags

    def _plan_exchange(self, buffers: ParamGroupBuffers) -> GroupExchange:
        """Selects what a group exchanges in this step."""
        group = buffers.group
        group["calls"] += 1
        if self._is_dense_step(group) or not buffers.large.rows:
            units = None
        else:
            units = buffers.select_units(group["calls"])
        return GroupExchange(buffers, units=units, values=buffers.values_to_average(units))

    def _is_dense_step(self, group: dict[str, Any]) -> bool:
        """Whether all gradients of a group are averaged in this step, as for LAMB."""
        is_warming_up = group["calls"] <= self.dense_steps
        return self.averager.size == 1 or is_warming_up or group["compress_ratio"] >= 1

    def _exchange(self, exchanges: list[GroupExchange], flags: Tensor) -> Tensor:
        """Replaces the values by their means over the ranks; returns the mean flags."""
        if self.averager.size == 1:
            return flags
        if self.wire_bits and any(exchange.units is not None for exchange in exchanges):
            return self._gather_quantized(exchanges, flags)
        return self._all_reduce(exchanges, flags)

    def _note_missing(
        self, exchanges: list[GroupExchange], flags: Tensor, *, weights: list[Tensor]
    ) -> None:
        """Writes into the exchanges which weights have a gradient on some rank.

        Args:
            exchanges: of all groups.
            flags: mean over the ranks of `_own_flags`.
            weights: all weights, in the order of the exchanges.
        """
        if len(flags) > 1:
            has_gradient = flags[1:]
        else:
            if self.averager.size == 1:
                is_missing = any(p.grad is None for p in weights)
            else:
                is_missing = bool(flags[0] > 0)  # read by the host of a CPU, alike on all ranks
            if not is_missing:
                return
            has_gradient = self.averager.mean(_has_gradient(weights).to(self.wire_dtype))
        sizes = [len(layout.tensors) for exchange in exchanges for layout in exchange.values]
        remaining = iter((has_gradient > 0).split(sizes))
        for exchange in exchanges:
            exchange.has_gradient = {layout: next(remaining) for layout in exchange.values}

    def _all_reduce(self, exchanges: list[GroupExchange], flags: Tensor) -> Tensor:
        """Replaces the values by their means, sent in `wire_dtype`; returns the mean flags."""
        values = [each for exchange in exchanges for each in exchange.values.values()]
        flat = torch.cat([each.to(self.wire_dtype) for each in (*values, flags)])
        flat = self.averager.mean_across(flat)
        *means, flags = flat.split([len(each) for each in (*values, flags)])
        remaining = iter(means)
        for exchange in exchanges:
            for layout, sent in exchange.values.items():
                exchange.values[layout] = next(remaining).to(sent.dtype)
        return flags

    def _gather_quantized(self, exchanges: list[GroupExchange], flags: Tensor) -> Tensor:
        """Replaces the values by their means, those of units sent in `wire_bits`.

        To the mean of the units' values each rank adds what its own have lost by rounding.

        Returns:
            The mean flags.
        """
        pieces = [flags.to(self.wire_dtype)]
        for exchange in exchanges:
            for layout, values in exchange.values.items():
                if exchange.is_sparse(layout):
                    pieces += quantize(values, self.wire_bits)
                else:
                    pieces.append(values.to(self.wire_dtype))
        of_ranks = [self._decode(each, exchanges) for each in self.averager.gather(pieces)]
        # Summed in the order of the ranks, so that all of them get the same bits.
        flags, *means = [sum(each[1:], each[0]) / len(each) for each in zip(*of_ranks)]
        _, *own = of_ranks[dist.get_rank(self.averager.group)]
        remaining = iter(zip(means, own))
        for exchange in exchanges:
            for layout, values in exchange.values.items():
                mean, sent = next(remaining)
                is_sparse = exchange.is_sparse(layout)
                exchange.values[layout] = mean + (values - sent) if is_sparse else mean
        return flags

    def _decode(self, pieces: list[Tensor], exchanges: list[GroupExchange]) -> list[Tensor]:
        """Returns the flags and the values that a rank has sent, in the order of the exchanges."""
        remaining = iter(pieces)
        decoded = [next(remaining).float()]
        for exchange in exchanges:
            for layout, values in exchange.values.items():
                if exchange.is_sparse(layout):
                    codes, scales = next(remaining), next(remaining)
                    decoded.append(dequantize(codes, scales, bits=self.wire_bits, like=values))
                else:
                    decoded.append(next(remaining).to(values.dtype))
        return decoded


@dataclass
class GroupExchange:
    """What one parameter group exchanges in one step."""

    buffers: ParamGroupBuffers
    units: Tensor | None  # (units,) of the large tensors; None: all of them
    values: dict[FlatLayout, Tensor]  # flat, by layout: what is averaged, then the means
    # of each layout (tensors,), bool: whether a rank has a gradient; None: all tensors have one
    has_gradient: dict[FlatLayout, Tensor] | None = None

    def is_sparse(self, layout: FlatLayout) -> bool:
        """Tells whether only the momentum of some units of this layout is exchanged."""
        return self.units is not None and layout is self.buffers.large


# ------------------------------------------------------------ the tensors of a parameter group


class ParamGroupBuffers:
    """The parameters of a group and their moments in flat buffers.

    Small tensors lie in buffers of one column, large ones in buffers of rows of `BLOCK` elements.

    Args:
        group: the parameter group.
        state: the optimizer's state, by parameter; what is there is taken over, and from then on
            it consists of views of the buffers.
        selection: 'block' or 'random'.
        seed: seed of the order of the units.
    """

    def __init__(
        self,
        group: dict[str, Any],
        state: dict[Tensor, dict[str, Any]],
        *,
        selection: str,
        seed: int,
    ) -> None:
        parameters = [p for p in group["params"] if p.requires_grad and p.numel()]
        is_small = [p.ndim < 2 or p.numel() < group["smallest_large"] for p in parameters]
        self.group = group
        self.selects_elements = selection == "random"
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
        self.w_norms = {layout: RowNorms.empty(layout) for layout in self.layouts}
        self.u_norms = {layout: RowNorms.empty(layout) for layout in self.layouts}

        # of the large tensors, (rows, BLOCK) of elements or (rows, 1) of blocks
        buffer = self.large.new_buffer()
        self.freshness = torch.ones_like(buffer if self.selects_elements else buffer[:, :1])
        # 1 where this step exchanges, else 0; at its end memory for rates, as scratch is
        self.mask = torch.empty_like(self.freshness)
        self.scratch = torch.empty_like(self.freshness)

        large = self.large
        units = large.element_indices() if self.selects_elements else large.row_numbers()
        self.order = RoundRobin(units, seed)
        self.order.cursor = group.get("cursor", 0)
        self.row_tensors = {layout: layout.tensor_of_row() for layout in self.layouts}
        self.adapts = {  # of each layout, (tensors,): whether a tensor has a trust ratio
            layout: torch.tensor([self._adapts(p) for p in layout.tensors], device=layout.device)
            for layout in self.layouts
        }
        for layout in self.layouts:
            _share_state(state, "exp_avg", layout.tensors, views=layout.views(self.m[layout]))
            _share_state(state, "exp_avg_sq", layout.tensors, views=layout.views(self.v[layout]))
        _share_state(state, "fresh", self.large.tensors, views=self._freshness_views())

    def _adapts(self, parameter: Tensor) -> bool:
        """Whether a parameter has a trust ratio."""
        return parameter.ndim > 1 if self.group["adapt"] is None else self.group["adapt"]

    def _freshness_views(self) -> list[Tensor]:
        if self.selects_elements:
            return self.large.views(self.freshness)
        return [
            self.freshness[self.large.rows_of(index), 0] for index in range(len(self.large.tensors))
        ]

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

    # -------------------------------------------------------- what is exchanged

    def select_units(self, call: int) -> Tensor:
        """Returns the units whose turn it is at this call of `step`, counted from 1.

        Blocks are in the order of memory, in which they are written fastest.
        """
        units = self._next_units(call)
        return units if self.selects_elements else units.sort().values

    def _next_units(self, call: int) -> Tensor:
        units = self.order.next_units(self.group["compress_ratio"])
        self.group["cursor"] = self.order.cursor
        return units

    def undo_selection(self, units: Tensor | None) -> None:
        """Takes a skipped step back: it is not counted, and its units keep their turn."""
        self.group["calls"] -= 1
        if units is not None:
            self.order.undo_next(len(units))
            self.group["cursor"] = self.order.cursor

    def gather_units(self, buffer: Tensor, units: Tensor) -> Tensor:
        """Returns the elements of these units of a buffer of the large tensors, flat."""
        if self.selects_elements:
            return buffer.view(-1).index_select(0, units)
        return buffer.index_select(0, units).view(-1)

    def scatter_units(self, buffer: Tensor, units: Tensor, *, values: Tensor) -> None:
        """Inverse of `gather_units`: writes flat values to these units of a buffer."""
        if self.selects_elements:
            buffer.view(-1).index_copy_(0, units, values)
        else:
            buffer.index_copy_(0, units, values.view(len(units), BLOCK))

    def values_to_average(self, units: Tensor | None) -> dict[FlatLayout, Tensor]:
        """Returns for each layout what is averaged over the ranks, flat.

        Args:
            units: of the large tensors, whose next momentum is averaged; None: the gradients of all
                large tensors are averaged instead, as those of the small ones always are.
        """
        values = {}
        for layout in self.layouts:
            if layout is self.large and units is not None:
                m = self.gather_units(self.m[layout], units)
                g = self.gather_units(self.g[layout], units)
                values[layout] = m.lerp_(g, 1 - self.group["betas"][0])
            else:
                values[layout] = self._whole_values(layout)
        return values

    def _whole_values(self, layout: FlatLayout) -> Tensor:
        """Returns what is averaged of a layout that is exchanged whole, flat."""
        return self.g[layout].view(-1)

    # -------------------------------------------------------- the update

    def update(self, exchange: GroupExchange, active: Tensor, *, nodes: int) -> None:
        """Takes the step with the means that were received; nothing changes if `active` is 0.

        Args:
            exchange: the means.
            active: (), 0 where the step is skipped; a CPU step that is skipped does not come here.
            nodes: how many nodes (or ranks) exchange.
        """
        if not self.layouts:
            return
        counted = active
        if exchange.has_gradient is not None:
            counted = active * torch.cat(list(exchange.has_gradient.values())).any()
        self.group["steps"] += counted
        adam = AdamStep(
            betas=self.group["betas"],
            eps=self.group["eps"],
            weight_decay=self.group["weight_decay"],
            steps=self.group["steps"],
            active=active if _is_decided_on_device(active) else None,
        )
        units = exchange.units
        if units is not None:
            self.mask.zero_().view(-1).index_fill_(0, units, 1.0)
        for layout, means in exchange.values.items():
            self._take_norms(layout, self.w_norms[layout], units=units)
            changes = self._rows_that_change(layout, exchange)
            moments = self.m[layout], self.v[layout]
            before = [each.clone() for each in moments] if changes is not None else []
            if units is not None and layout is self.large:
                self._update_selected(units, means, adam=adam)
            else:
                self._update_whole(layout, means, adam=adam)
            if changes is not None:
                for each, old in zip(moments, before):
                    each.copy_(torch.where(changes, each, old))
                self.u[layout].masked_fill_(~changes, 0.0)
            self._take_norms(layout, self.u_norms[layout], units=units)
        if self.small.rows:
            self._update_small(active)
        if self.large.rows:
            changes = self._rows_that_change(self.large, exchange)
            self._update_freshness(units, active if changes is None else active * changes)
            self._update_large(units, active, nodes)

    def _rows_that_change(self, layout: FlatLayout, exchange: GroupExchange) -> Tensor | None:
        """Returns for each row of a layout (rows, 1) whether its tensor has a gradient.

        None: all tensors have one.
        """
        if exchange.has_gradient is None:
            return None
        return exchange.has_gradient[layout].index_select(0, self.row_tensors[layout])[:, None]

    def _take_norms(self, layout: FlatLayout, norms: RowNorms, *, units: Tensor | None) -> None:
        """Takes the norms of the rows of what the buffer of u holds: weights, then updates.

        Where single elements are selected, those of each row's selected ones as well.
        """
        values = self.u[layout]
        torch.linalg.vector_norm(values, dim=1, out=norms.all)
        if units is not None and layout is self.large and self.selects_elements:
            values = torch.mul(values, self.mask, out=self.scratch)
            torch.linalg.vector_norm(values, dim=1, out=norms.selected)

    def _update_selected(self, units: Tensor, means: Tensor, *, adam: AdamStep) -> None:
        """Computes moments and u of the large tensors, of which some units were exchanged.

        All elements move by this rank's own gradients, and those of the units then get the mean
        momentum. Units of rows also get a new u, from the weights before this step, which are
        therefore read first. Single elements are slower to read than all of them in their order.

        Args:
            units: what was exchanged.
            means: of their momentum over the ranks, flat.
            adam: of this step.
        """
        m, v, u = self.m[self.large], self.v[self.large], self.u[self.large]
        if adam.active is not None:
            means = torch.where(adam.active > 0, means, self.gather_units(m, units))
        if self.selects_elements:
            update_moments([m], [v], grads=[self.g[self.large]], adam=adam)
            self.scatter_units(m, units, values=means)
            weights_to_updates_([u], [m], [v], adam=adam)
            return
        of_units = self.gather_units(u, units)
        adam_update_([u], [m], [v], grads=[self.g[self.large]], adam=adam)
        weights_to_updates_([of_units], [means], [self.gather_units(v, units)], adam=adam)
        self.scatter_units(m, units, values=means)
        self.scatter_units(u, units, values=of_units)

    def _update_whole(self, layout: FlatLayout, means: Tensor, *, adam: AdamStep) -> None:
        """Computes moments and u of a layout that was exchanged whole.

        Args:
            layout: the layout.
            means: of `_whole_values` over the ranks, flat.
            adam: of this step.
        """
        u = self.u[layout]
        adam_update_([u], [self.m[layout]], [self.v[layout]], grads=[means.view_as(u)], adam=adam)

    def _update_small(self, active: Tensor) -> None:
        """Takes LAMB's step of the small tensors."""
        layout, u = self.small, self.u[self.small]
        w_norms, u_norms = (
            layout.sum_per_tensor(norms[layout].all.square()).sqrt()
            for norms in (self.w_norms, self.u_norms)
        )
        ratios = self._clamp_small(lamb_trust_ratios(w_norms, u_norms))
        rates = torch.where(self.adapts[layout], ratios, 1.0) * (self.group["lr"] * active)
        u.mul_(rates.to(layout.dtype)[self.row_tensors[layout], None])
        subtract_updates(layout.tensors, self.u_views[layout], lr=1.0)

    def _clamp_small(self, ratios: Tensor) -> Tensor:
        """Limits the trust ratios (tensors,) of the small tensors; here not at all, as LAMB."""
        return ratios

    def _update_freshness(self, units: Tensor | None, active: Tensor) -> None:
        """Makes all units a step older but for those that were exchanged.

        Args:
            units: what was exchanged; None: everything.
            active: () or (rows, 1), 0 where nothing changes, else 1.
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

    def _update_large(self, units: Tensor | None, active: Tensor, nodes: int) -> None:
        """Takes SLAMB's step of the large tensors."""
        layout, u, r = self.large, self.u[self.large], self.freshness
        w_selected, w_others = self._split_norms(self.w_norms[layout], units)
        u_selected, u_others = self._split_norms(self.u_norms[layout], units)
        others = lamb_trust_ratios(w_others, u_others)
        selected = self._selected_ratios(w_selected, u_selected, others=others)
        row_tensors = self.row_tensors[layout]
        selected, others = (
            torch.where(self.adapts[layout], each, 1.0).index_select(0, row_tensors)[:, None]
            for each in (selected, others)
        )
        rates = torch.lerp(others, selected, r, out=self.scratch)
        self._clamp_large_(rates, units)
        stale = 1 / math.sqrt(nodes)  # the share of the rate for momentum of one rank alone
        rate = self.group["lr"] * active
        trusted = torch.mul(r, (1 - stale) * rate, out=self.mask).add_(stale * rate)
        u.mul_(rates.mul_(trusted))
        subtract_updates(layout.tensors, self.u_views[layout], lr=1.0)

    def _selected_ratios(self, weights: Tensor, updates: Tensor, *, others: Tensor) -> Tensor:
        """Returns the trust ratios (tensors,) of the selected elements.

        At a small k a step may select nothing of a tensor, which then has one ratio only.

        Args:
            weights: norms of the selected weights (tensors,).
            updates: norms of the selected elements of u (tensors,).
            others: trust ratios of the other elements (tensors,).
        """
        has_selected = (weights > 0) & (updates > 0)
        return torch.where(has_selected, lamb_trust_ratios(weights, updates), others)

    def _clamp_large_(self, trust: Tensor, units: Tensor | None) -> None:
        """Limits the trust ratios of the large tensors, in place."""
        if units is not None:
            trust.clamp_(max=TRUST_CLAMP[1])

    def _split_norms(self, norms: RowNorms, units: Tensor | None) -> tuple[Tensor, Tensor]:
        """Computes the norms of each large tensor's selected elements and of its others.

        Returns:
            Two tensors (tensors,); without units the norms of all elements, and zeros.
        """
        squares = norms.all.square()
        if units is None:
            of_tensors = self.large.sum_per_tensor(squares).sqrt()
            return of_tensors, torch.zeros_like(of_tensors)
        selected = norms.selected.square() if self.selects_elements else squares * self.mask[:, 0]
        others = (squares - selected).clamp(min=0)
        return (
            self.large.sum_per_tensor(selected).sqrt(),
            self.large.sum_per_tensor(others).sqrt(),
        )


@dataclass
class RowNorms:
    """The norm of each row of a buffer, and, of single selected elements, that of the selected."""

    all: Tensor  # (rows,)
    selected: Tensor  # (rows,), unused where whole rows are selected

    @classmethod
    def empty(cls, layout: FlatLayout) -> RowNorms:
        """Memory for the norms of the rows of a layout."""
        like = torch.empty(layout.rows, dtype=layout.dtype, device=layout.device)
        return cls(like, torch.empty_like(like))


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

"""Online natural gradient (Povey, Zhang and Khudanpur, arXiv:1410.7455, appendix A; Kaldi's OnlineNaturalGradient), as SGD.

    optimizer = NGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    loss.backward()
    optimizer.step()

Each axis of a weight, D long, carries a running estimate of the gradients' second moment along it, F = R' diag(d) R + rho I
with R orthonormal rows (rank, D). The gradient is multiplied by F^-1, smoothed towards I by `alpha`, axis after axis, and
scaled back to its own norm: SGD's step length, natural gradient's direction.

With W = E^1/2 R, E = d / (beta + d) and beta = rho (1 + alpha) + alpha sum(d) / D, that is X - X W' W: two thin matrix
products an axis, and a third every `update_period` steps for the estimate.

How it is kept cheap: parameters of one shape are worked on together, in one scratch buffer; a convolution is laid out once
as (outputs, kernel, inputs), and all axes of its kernel are one small matrix from one Gram matrix; the estimates of all
axes of equal (rank, D) are updated together, in float64, a quarter of them each step. The host waits for a GPU
only inside torch's eigen-decomposition, and once more in the second step, to learn whether the first was skipped.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from optimizers.base import GradScalerOptimizer
from optimizers.fisher import (
    DENSE_KERNEL,
    Axis,
    Mode,
    Update,
    UpdateContext,
    apply_updates,
    build_preconditioners,
    initial_factor,
    norms,
)

FIRST_UPDATES = 10  # steps at the start that update all estimates
CHUNK_BYTES = {"cpu": 16 * 2**20}  # of parameters worked on together: what a cache holds
OTHER_CHUNK_BYTES = 2**28  # ... and elsewhere: few launches
STATE = (
    "factor",
    "eigenvalues",
    "floor",
)  # what state[parameter] holds of an axis: W (rank, D), d (rank,), rho ()


# -------------------------------------------------------------------- parameters of one shape


class ParameterBatch:
    """Parameters of one shape, dtype and device that are worked on together, one row each.

    Args:
        parameters: the parameters.
        states: what the optimizer holds of each. What is lacking is made, and tensors become views of this chunk's batches.
        group: the hyper-parameters; the settings of the constructor are read now, those that may change at each step.
    """

    def __init__(
        self, parameters: list[Tensor], states: list[dict[str, Any]], group: dict[str, Any]
    ) -> None:
        self.parameters, self.states = parameters, states
        self.first = first = parameters[0]
        self.wide = torch.promote_types(first.dtype, torch.float32)
        preconditioned = group["ngd"] and first.ndim >= group["min_ndim"]
        dtype = (group["factor_dtype"] if preconditioned else None) or self.wide
        self.place = first.device, dtype
        self.weights = len(parameters) * first.numel()
        kernel = (
            first.ndim > 2 and first.shape[2:].numel() <= DENSE_KERNEL
        )  # laid out as (outputs, kernel, inputs)
        self.order = [0, *range(2, first.ndim), 1] if kernel else list(range(first.ndim))
        self.natural = self.order == sorted(self.order)
        self.back = sorted(range(first.ndim), key=self.order.__getitem__)
        self.shape = [first.shape[axis] for axis in self.order]
        self.axes: list[Axis] = []
        self.modes: list[Mode] = []
        if preconditioned:
            make = functools.partial(self.axis, group=group)
            self.modes = build_preconditioners(first.shape, kernel, group["max_dim"], make)
        self.missing = torch.full((), math.nan, dtype=first.dtype, device=first.device).expand(
            self.shape
        )
        self.momentum: Tensor | None = None
        self.steps: int = states[0].get("step", 0)
        self.phase = 0

    def axis(self, number: int, group: dict[str, Any]) -> Axis:
        """The estimates of an axis of all parameters, from their states or from scratch."""
        dim, (device, dtype) = self.first.shape[number], self.place
        rank = min((dim + 1) // 2, group["rank"])
        start = (
            initial_factor(rank, dim, group["alpha"]).to(device, dtype),
            torch.zeros(rank, dtype=torch.float64, device=device),
            torch.zeros((), dtype=torch.float64, device=device),
        )
        batches = []
        for name, fresh in zip(STATE, start):
            name = f"axis{number}_{name}"
            batch = torch.stack([state.get(name, fresh).to(fresh) for state in self.states])
            for state, row in zip(self.states, batch):
                state[name] = row
            batches.append(batch)
        self.axes.append(Axis(number, *batches))
        return self.axes[-1]

    def begun(self) -> bool:
        """Whether any estimate has learnt something; the host waits for the answer, once."""
        return bool((self.axes[0].rho > 0).any())

    def make_momentum(self) -> Tensor:
        """The momentum of all parameters (batch, weights), from their states or zero."""
        rows = [
            state["momentum_buffer"].permute(self.order).to(self.wide)
            if "momentum_buffer" in state
            else torch.zeros(self.shape, dtype=self.wide, device=self.first.device)
            for state in self.states
        ]
        batch = torch.stack(rows)
        for state, row in zip(self.states, batch):
            state["momentum_buffer"] = row.permute(self.back)
        return batch.view(len(rows), -1)

    def cost(self) -> int:
        """About how many multiplications an update of the estimates takes."""
        return len(self.parameters) * sum(mode.cost() for mode in self.modes)

    def step(
        self,
        group: dict[str, Any],
        scratch: tuple[Tensor, Tensor],
        scale: Tensor | None,
        skip: Tensor | None,
    ) -> list[Update]:
        """Move the parameters by their gradients, which are `scale` times too large; returns what the estimates are to learn.

        A parameter whose gradient is missing or not finite, and all where `skip` is not 0, stays as it is.
        """
        if all(p.grad is None for p in self.parameters):
            return []
        if self.steps == 1 and self.modes and not self.begun():
            self.steps = 0  # the first step was skipped, as a loss scale that is too large makes it: this one is the first
        batch = len(self.parameters)
        learning = (
            self.steps < FIRST_UPDATES or (self.steps + self.phase) % group["update_period"] == 0
        )
        X, spare = (buffer[: self.weights].view(batch, -1) for buffer in scratch)
        gradients = [
            self.missing if p.grad is None else self.laid_out(p.grad) for p in self.parameters
        ]
        torch.stack(gradients, out=X.view(batch, *self.shape))
        norm = norms(X)
        live = torch.isfinite(norm)
        if skip is not None:
            live &= skip == 0
        wanted = norm if scale is None else norm / scale
        updates: list[Update] = []
        torch.nan_to_num_(X, 0.0, 0.0, 0.0)
        if self.modes:
            learn = live & (norm > 0)
            g0 = torch.where(learn, wanted.square(), 1)
            lesson = (
                UpdateContext(
                    learn, g0, norm.square(), group["alpha"], group["eta"], self.steps == 0
                )
                if learning
                else None
            )
            for mode in self.modes:
                X, spare = mode(X, spare, lesson)
                if lesson is not None:
                    mode.forget()
            norm = norms(X)
            updates = lesson.updates if lesson else []
        X.mul_(torch.where(live & (norm > 0), wanted / norm, 0).to(X.dtype)[:, None])
        self.move(X, live.to(self.wide), group)
        self.steps += 1
        for state in self.states:
            state["step"] = self.steps
        return updates

    def laid_out(self, parameter: Tensor) -> Tensor:
        """A parameter or gradient with its axes in the order of the scratch buffer."""
        return parameter if self.natural else parameter.permute(self.order)

    def rows(self, X: Tensor) -> list[Tensor]:
        """Each row of X (batch, weights) in the shape of the parameters."""
        X = X.view(-1, *self.shape)
        return list(
            (X if self.natural else X.permute(0, *(1 + axis for axis in self.back))).unbind()
        )

    def move(self, X: Tensor, live: Tensor, group: dict[str, Any]) -> None:
        """SGD's step along X (batch, weights) where `live` (batch,) is 1: weight decay, momentum, step."""
        momentum, decay = group["momentum"], group["weight_decay"]
        steps = list((live * -group["lr"]).unbind())
        if decay and group["decoupled_weight_decay"]:
            torch._foreach_addcmul_(self.parameters, self.parameters, steps, value=decay)
        elif decay:
            torch._foreach_addcmul_(
                self.rows(X), self.parameters, list(live.to(X.dtype).unbind()), value=decay
            )
        moves = X
        if momentum:
            if self.momentum is None:
                self.momentum = self.make_momentum()
            self.momentum.mul_((1 + live * (momentum - 1))[:, None]).add_(X)
            moves = X.add_(self.momentum, alpha=momentum) if group["nesterov"] else self.momentum
        torch._foreach_addcmul_(self.parameters, self.rows(moves), steps)


class UpdateSchedule:
    """Which parameters are worked on together, and when each updates its estimates.

    Args:
        groups: the parameter groups.
        state: the optimizer's state, by parameter.
        wanted: whether each parameter wants a gradient; the others are left out.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        state: dict[Tensor, dict[str, Any]],
        wanted: list[bool],
    ) -> None:
        self.wanted = wanted
        flags = iter(wanted)
        self.chunks = [
            self.split([p for p in group["params"] if next(flags) and p.numel()], state, group)
            for group in groups
        ]
        self.periods = [0] * len(groups)
        sizes: dict[tuple[torch.device, torch.dtype], int] = defaultdict(int)
        for chunk in (chunk for chunks in self.chunks for chunk in chunks):
            sizes[chunk.place] = max(sizes[chunk.place], chunk.weights)
        self.scratch = {
            (device, dtype): (
                torch.empty(size, device=device, dtype=dtype),
                torch.empty(size, device=device, dtype=dtype),
            )
            for (device, dtype), size in sizes.items()
        }

    def split(
        self,
        parameters: Sequence[Tensor],
        state: dict[Tensor, dict[str, Any]],
        group: dict[str, Any],
    ) -> list[ParameterBatch]:
        """Chunks of one group."""
        alike: dict[Any, list[Tensor]] = defaultdict(list)
        for p in parameters:
            alike[p.shape, p.dtype, p.device, state[p].get("step", 0)].append(p)
        chunks = []
        for some in alike.values():
            limit = CHUNK_BYTES.get(some[0].device.type, OTHER_CHUNK_BYTES)
            most = max(1, limit // (some[0].numel() * some[0].element_size()))
            for start in range(0, len(some), most):
                part = some[start : start + most]
                chunks.append(ParameterBatch(part, [state[p] for p in part], group))
        return chunks

    def stagger(self, number: int, period: int) -> list[ParameterBatch]:
        """The chunks of a group, each with the phase of the period that had least to do so far, the costliest first."""
        if self.periods[number] != period:
            self.periods[number] = period
            load = [0] * period
            for chunk in sorted(self.chunks[number], key=ParameterBatch.cost, reverse=True):
                chunk.phase = load.index(min(load))
                load[chunk.phase] += chunk.cost()
        return self.chunks[number]


# -------------------------------------------------------------------- the optimizer


class NGD(GradScalerOptimizer):
    """SGD with momentum along the natural gradient, estimated online (arXiv:1410.7455).

    Args:
        params: parameters or parameter groups. A group with `ngd=False` takes plain SGD.
        lr: learning rate; as for SGD, since the direction has the gradient's norm.
        momentum, nesterov: as torch.optim.SGD.
        weight_decay: added to the direction, after the preconditioning; p.grad is never written.
        decoupled_weight_decay: shrink the weights by lr * weight_decay instead (arXiv:1711.05101).
        ngd: whether this group is preconditioned.
        rank: eigenvectors kept of an axis, at most half its length.
        alpha: smoothing of the estimate towards a multiple of the identity; larger is closer to SGD.
        eta: weight of a new gradient in the running estimate.
        update_period: steps between updates of an estimate; the first ten steps update all.
        max_dim: longer axes are left alone (vocabularies).
        min_ndim: parameters with fewer axes take plain SGD (biases, normalisation).
        factor_dtype: of the factors and of the products with them; None is the parameter's, at least float32.

    A parameter whose gradient is missing or not finite stays as it is, as do its estimates; a gradient of zeros teaches
    nothing. Once the estimates have begun, a skipped step counts all the same in the schedule of updates, which the host keeps.

    State of a parameter: `step`, `momentum_buffer`, and of each preconditioned axis `axis<n>_factor` (rank, D),
    `axis<n>_eigenvalues` (rank,) and `axis<n>_floor` (). lr, momentum, nesterov, both weight decays, alpha, eta and
    update_period may change at any step; the others are read when the parameter is first seen.

    Raises:
        ValueError: a hyper-parameter is out of its range.
        RuntimeError: a gradient is sparse.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        decoupled_weight_decay: bool = False,
        ngd: bool = True,
        rank: int = 80,
        alpha: float = 4.0,
        eta: float = 0.1,
        update_period: int = 4,
        max_dim: int = 4096,
        min_ndim: int = 2,
        factor_dtype: torch.dtype | None = None,
    ) -> None:
        self.plan: UpdateSchedule | None = None
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "decoupled_weight_decay": decoupled_weight_decay,
            "ngd": ngd,
            "rank": rank,
            "alpha": alpha,
            "eta": eta,
            "update_period": update_period,
            "max_dim": max_dim,
            "min_ndim": min_ndim,
            "factor_dtype": factor_dtype,
        }
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.plan = None

    def check_hyperparameters(self, group: dict[str, Any]) -> dict[str, bool]:
        """See Base."""
        return {
            "lr": group["lr"] >= 0,
            "momentum": 0 <= group["momentum"] < 1,
            "weight_decay": group["weight_decay"] >= 0,
            "nesterov": group["momentum"] > 0 or not group["nesterov"],
            "rank": group["rank"] >= 1,
            "alpha": group["alpha"] > 0,
            "eta": 0 < group["eta"] < 1,
            "update_period": group["update_period"] >= 1,
            "max_dim": group["max_dim"] >= 1,
            "factor_dtype": group["factor_dtype"] is None
            or group["factor_dtype"].is_floating_point,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See Base."""
        super().load_state_dict(state_dict)
        self.plan = None

    def _apply_step(self) -> None:
        """See Base."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        if any(p.grad is not None and p.grad.is_sparse for p in parameters):
            raise RuntimeError("NGD does not take sparse gradients")
        wanted = [p.requires_grad for p in parameters]
        if self.plan is None or self.plan.wanted != wanted:
            self.plan = UpdateSchedule(self.param_groups, self.state, wanted)
        scale, skip = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            for number, group in enumerate(self.param_groups):
                updates = []
                for chunk in self.plan.stagger(number, group["update_period"]):
                    updates += chunk.step(group, self.plan.scratch[chunk.place], scale, skip)
                apply_updates(updates, group["alpha"], group["eta"])

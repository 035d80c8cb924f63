"""KaldiNGD: SGD along the natural gradient as Kaldi estimates it, online.

    optimizer = KaldiNGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    loss.backward()
    optimizer.step()

Povey, Zhang and Khudanpur, arXiv:1410.7455, appendix A; Kaldi's OnlineNaturalGradient. Each axis of
a weight carries a running estimate F of the gradients' second moment along it. The gradient is
multiplied by F^-1, smoothed towards the identity, axis after axis, and scaled back to its own norm:
SGD's step length, natural gradient's direction.

The symbols of the code, for one axis of length D of one parameter (everything in the code has a
leading `batch` dimension, the parameters of one shape that are updated together):

    symbol  shape      meaning
    X       (N, D)     the gradient, with this axis last and all others as N rows
    F       (D, D)     running estimate of X'X, = R'SR + rho (I - R'R); never stored as a matrix
    R       (rank, D)  orthonormal rows, which span the leading eigenvectors of F
    S       (rank, rank)  symmetric: F between the rows of R
    rho     ()         the eigenvalue of F in all other directions
    alpha   ()         smoothing of F towards a multiple of the identity
    beta    ()         = rho + alpha trace(F) / D, the eigenvalue of the smoothed F there
    K       (rank, rank)  = (S - rho I) (S - rho I + beta I)^-1, a symmetric matrix
    W       (rank, D)  any matrix with W'W = R'KR, what is stored of R and S; F^-1, smoothed and
                       scaled, is I - W'W
    H       (N, rank)  = X W', so that the preconditioned gradient is X - H W
    J       (rank, D)  = H'X = W X'X, what an update of F needs of the gradient
    eta     ()         weight of the new gradient in F: T = eta X'X + (1 - eta) F
    Y       (rank, D)  = R T, whose rows span those of the next R; the next S is (Y Y')^1/2
    g0      ()         squared norm of the gradient, before any axis is preconditioned; in eta X'X,
                       X is scaled to it, having lost length at other axes

So preconditioning is two thin matrix products an axis, X - (X W') W, and a third one, H'X, every
`update_period` steps for the update of the estimate. Kaldi keeps the eigenvectors of F as the rows
of R; here they may be any orthonormal rows, so that an update needs a square root of a small matrix
and no eigenvectors ([matrix_functions.py](matrix_functions.py)).

It is kept cheap as follows. Parameters of one shape are updated together, in one scratch buffer. A
convolution is laid out once as (outputs, kernel, inputs), and all axes of its kernel are one small
matrix from one Gram matrix. The estimates of many axes are updated together, in float64, a quarter
of them at each step. The host waits for a GPU in the first two steps only, where it creates the
estimates and learns whether the first step was skipped.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from optimizers.base import GradScalerOptimizer
from optimizers.fisher import (
    MAX_DENSE_KERNEL,
    AxisEstimate,
    EstimateUpdate,
    Preconditioner,
    UpdateContext,
    apply_updates,
    build_preconditioners,
    initial_factor,
    row_norms,
)

FIRST_UPDATES = 10  # at so many first steps all estimates are updated
CPU_BATCH_BYTES = 16 * 2**20  # of parameters that are updated together: what a cache holds
GPU_BATCH_BYTES = 2**28  # ... on other devices: few kernel launches


class KaldiNGD(GradScalerOptimizer):
    """SGD with momentum along the natural gradient, estimated online (arXiv:1410.7455).

    A parameter whose gradient is missing or not finite stays as it is, as do its estimates; a
    gradient of zeros does not change the estimates. The schedule of updates is the host's: once
    the estimates have started, a skipped step counts in it all the same.

    lr, momentum, nesterov, both weight decays, alpha, eta and update_period may change at any step;
    the other settings are read when a parameter is first seen.

    State of a parameter:
        step                   int, the steps in which a parameter of its batch had a gradient.
        momentum_buffer        the shape of the parameter, in fp32 at least.
        axis<n>_factor         (rank, D), W of axis n, for each preconditioned axis.
        axis<n>_floor          (), rho, float64.
        axis<n>_smoothed_floor (), beta, float64.

    Args:
        params: parameters or parameter groups. A group with `ngd=False` takes plain SGD.
        lr: learning rate; as for SGD, since the direction has the gradient's norm.
        momentum, nesterov: as of torch.optim.SGD.
        weight_decay: added to the direction after the preconditioning; p.grad is never written.
        decoupled_weight_decay: shrink the weights by lr * weight_decay instead (arXiv:1711.05101).
        ngd: whether this group is preconditioned.
        rank: directions of an axis whose eigenvalues are told apart, at most half its length.
        alpha: smoothing of the estimate towards a multiple of the identity; larger values are
            closer to SGD.
        eta: weight of a new gradient in the running estimate.
        update_period: steps between updates of an estimate; the first ten steps update all.
        max_dim: longer axes are not preconditioned (vocabularies).
        min_ndim: parameters with fewer axes take plain SGD (biases, normalisation).
        factor_dtype: dtype of the products of gradients and factors; None is the parameter's, at
            least fp32. The factors themselves are kept in fp32 at least.
        amp_scaling: see `optimizers.base.GradScalerOptimizer`.

    Raises:
        ValueError: a hyper-parameter is out of its range.
        RuntimeError: a gradient is sparse (in `step`).
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.1,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        decoupled_weight_decay: bool = False,
        ngd: bool = True,
        rank: int = 32,
        alpha: float = 4.0,
        eta: float = 0.1,
        update_period: int = 4,
        max_dim: int = 4096,
        min_ndim: int = 2,
        factor_dtype: torch.dtype | None = None,
        amp_scaling: bool = True,
    ) -> None:
        self.schedule: UpdateSchedule | None = None
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
        super().__init__(params, defaults, amp_scaling=amp_scaling)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.schedule = None

    def check_hyperparameters(self, group: dict[str, Any]) -> dict[str, bool]:
        factor_dtype = group["factor_dtype"]
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
            "factor_dtype": factor_dtype is None or factor_dtype.is_floating_point,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.schedule = None

    def _apply_step(self) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        requires_grad = [p.requires_grad for p in parameters]
        if self.schedule is None or self.schedule.requires_grad != requires_grad:
            self.schedule = UpdateSchedule(
                self.param_groups, self.state, requires_grad=requires_grad
            )
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            for index, group in enumerate(self.param_groups):
                updates = []
                for batch in self.schedule.group_batches(index, group["update_period"]):
                    updates += batch.step(
                        group,
                        self.schedule.scratch[batch.scratch_key],
                        loss_scale=self.loss_scale,
                        found_inf=self.found_inf,
                    )
                apply_updates(updates, alpha=group["alpha"], eta=group["eta"])


class UpdateSchedule:
    """Which parameters are updated together, and at which steps each updates its estimates.

    Args:
        groups: the parameter groups.
        state: the optimizer's state, by parameter.
        requires_grad: for each parameter of the groups; those that do not are left out.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        state: dict[Tensor, dict[str, Any]],
        *,
        requires_grad: list[bool],
    ) -> None:
        self.requires_grad = requires_grad
        trained = iter(requires_grad)
        self.batches = [  # of each group
            list(
                make_batches(
                    [p for p in group["params"] if next(trained) and p.numel()], state, group=group
                )
            )
            for group in groups
        ]
        self.periods = [0] * len(groups)
        sizes: dict[tuple[torch.device, torch.dtype], int] = defaultdict(int)
        for batch in (batch for batches in self.batches for batch in batches):
            sizes[batch.scratch_key] = max(sizes[batch.scratch_key], batch.elements)
        self.scratch = {  # two flat buffers for each device and dtype, shared by all batches
            (device, dtype): (
                torch.empty(size, device=device, dtype=dtype),
                torch.empty(size, device=device, dtype=dtype),
            )
            for (device, dtype), size in sizes.items()
        }

    def group_batches(self, index: int, period: int) -> list[ParameterBatch]:
        """Returns the batches of a group.

        Their updates are spread over the period: where the period is new, each batch, the costliest
        first, is given the phase that has least to do so far.
        """
        if self.periods[index] != period:
            self.periods[index] = period
            load = [0] * period
            costliest_first = sorted(
                self.batches[index], key=ParameterBatch.update_cost, reverse=True
            )
            for batch in costliest_first:
                batch.phase = load.index(min(load))
                load[batch.phase] += batch.update_cost()
        return self.batches[index]


def make_batches(
    parameters: Sequence[Tensor], state: dict[Tensor, dict[str, Any]], *, group: dict[str, Any]
) -> Iterator[ParameterBatch]:
    """Cuts parameters into batches of one shape, dtype, device and number of steps done.

    Args:
        parameters: of one parameter group.
        state: the optimizer's state, by parameter.
        group: the parameter group.
    """
    by_kind: dict[Any, list[Tensor]] = defaultdict(list)
    for p in parameters:
        by_kind[p.shape, p.dtype, p.device, state[p].get("step", 0)].append(p)
    for alike in by_kind.values():
        limit = CPU_BATCH_BYTES if alike[0].device.type == "cpu" else GPU_BATCH_BYTES
        size = max(1, limit // (alike[0].numel() * alike[0].element_size()))
        for start in range(0, len(alike), size):
            batch = alike[start : start + size]
            yield ParameterBatch(batch, [state[p] for p in batch], group=group)


class ParameterBatch:
    """Parameters of one shape, dtype and device that are updated together, one row each.

    Args:
        parameters: the parameters.
        states: the optimizer's state of each. What is missing is created, and the tensors become
            views of this batch's tensors.
        group: the hyper-parameters. Those that may not change are read now, the others at each
            step.
    """

    def __init__(
        self, parameters: list[Tensor], states: list[dict[str, Any]], *, group: dict[str, Any]
    ) -> None:
        self.parameters = parameters
        self.states = states
        first = parameters[0]
        self.device = first.device
        self.elements = len(parameters) * first.numel()
        self.wide_dtype = torch.promote_types(first.dtype, torch.float32)  # of the momentum
        is_preconditioned = group["ngd"] and first.ndim >= group["min_ndim"]
        self.scratch_dtype = self.wide_dtype
        if is_preconditioned and group["factor_dtype"] is not None:
            self.scratch_dtype = group["factor_dtype"]
        self.scratch_key = (self.device, self.scratch_dtype)

        # the order of the axes in the scratch buffer: kernels as (outputs, kernel, inputs)
        is_kernel = first.ndim > 2 and first.shape[2:].numel() <= MAX_DENSE_KERNEL
        self.axis_order = [0, *range(2, first.ndim), 1] if is_kernel else list(range(first.ndim))
        self.inverse_order = sorted(range(first.ndim), key=self.axis_order.__getitem__)
        self.is_permuted = self.axis_order != sorted(self.axis_order)
        self.permuted_shape = [first.shape[axis] for axis in self.axis_order]

        self.axes: list[AxisEstimate] = []
        self.preconditioners: list[Preconditioner] = []
        if is_preconditioned:
            self.preconditioners = build_preconditioners(
                first.shape,
                is_kernel,
                max_dim=group["max_dim"],
                new_estimate=lambda axis: self._create_estimate(axis, group),
            )
        missing = torch.full((), math.nan, dtype=first.dtype, device=first.device)
        self.missing_grad = missing.expand(self.permuted_shape)
        self.momentum: Tensor | None = None  # (batch, elements of a parameter), wide_dtype
        self.steps: int = states[0].get("step", 0)
        self.phase = 0  # the estimates are updated when (steps + phase) % update_period == 0

    def update_cost(self) -> int:
        """Returns about how many multiplications an update of the estimates takes."""
        costs = (preconditioner.update_cost() for preconditioner in self.preconditioners)
        return len(self.parameters) * sum(costs)

    def step(
        self,
        group: dict[str, Any],
        scratch: tuple[Tensor, Tensor],
        *,
        loss_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> list[EstimateUpdate]:
        """Updates the parameters by their gradients.

        A parameter whose gradient is missing or not finite, and all where `found_inf` is not 0,
        stays as it is.

        Args:
            group: the hyper-parameters of this step.
            scratch: two flat buffers with room for all gradients.
            loss_scale: the factor by which the gradients are too large (); None is 1.
            found_inf: other than 0 where the step must be skipped (); None is 0.

        Returns:
            What the estimates learn from, if this is one of the steps that update them.
        """
        if all(p.grad is None for p in self.parameters):
            return []
        if self.steps == 1 and self.preconditioners and not self._has_started():
            self.steps = 0  # the first step was skipped (the loss scale is too large at first)
        X, spare = (buffer[: self.elements].view(len(self.parameters), -1) for buffer in scratch)
        self._gather_grads(X)
        norm = row_norms(X)
        active = torch.isfinite(norm)
        if found_inf is not None:
            active &= found_inf == 0
        target_norm = norm if loss_scale is None else norm / loss_scale
        updates: list[EstimateUpdate] = []
        torch.nan_to_num_(X, 0.0, 0.0, 0.0)
        if self.preconditioners:
            context = None
            if self._updates_estimates(group["update_period"]):
                learns = active & (norm > 0)
                context = UpdateContext(
                    learns=learns,
                    g0=torch.where(learns, target_norm.square(), 1),
                    squared_norm=norm.square(),
                    alpha=group["alpha"],
                    eta=group["eta"],
                    is_first=self.steps == 0,
                )
                updates = context.updates
            for preconditioner in self.preconditioners:
                X, spare = preconditioner(X, spare, context=context)
                if context is not None:
                    preconditioner.invalidate()
            norm = row_norms(X)
        X.mul_(torch.where(active & (norm > 0), target_norm / norm, 0).to(X.dtype)[:, None])
        self._sgd_step(X, active.to(self.wide_dtype), group)
        self.steps += 1
        for state in self.states:
            state["step"] = self.steps
        return updates

    def _has_started(self) -> bool:
        """Whether any estimate has learned from a gradient; the host waits for it, once."""
        return bool((self.axes[0].rho > 0).any())

    def _updates_estimates(self, period: int) -> bool:
        return self.steps < FIRST_UPDATES or (self.steps + self.phase) % period == 0

    def _gather_grads(self, X: Tensor) -> None:
        """Copies the gradients into the rows of X (batch, elements); missing ones become NaN."""
        grads = [
            self.missing_grad if p.grad is None else self._permuted(p.grad) for p in self.parameters
        ]
        torch.stack(grads, out=X.view(len(grads), *self.permuted_shape))

    def _permuted(self, tensor: Tensor) -> Tensor:
        """Returns a parameter or gradient with its axes in the order of the scratch buffer."""
        return tensor.permute(self.axis_order) if self.is_permuted else tensor

    def _parameter_views(self, X: Tensor) -> list[Tensor]:
        """Returns the rows of X (batch, elements) in the shape of the parameters."""
        X = X.view(-1, *self.permuted_shape)
        if self.is_permuted:
            X = X.permute(0, *(1 + axis for axis in self.inverse_order))
        return list(X.unbind())

    def _sgd_step(self, X: Tensor, active: Tensor, group: dict[str, Any]) -> None:
        """Takes SGD's step, with weight decay and momentum, along X (batch, elements).

        Where `active` (batch,) is 0 nothing changes.
        """
        momentum, weight_decay = group["momentum"], group["weight_decay"]
        is_decoupled = group["decoupled_weight_decay"]
        if weight_decay and not is_decoupled:
            torch._foreach_add_(self._parameter_views(X), self.parameters, alpha=weight_decay)
        direction = X
        if momentum:
            if self.momentum is None:
                self.momentum = self._create_momentum()
            self.momentum.mul_((1 + active * (momentum - 1))[:, None])
            self.momentum.addcmul_(X, active[:, None])
            if group["nesterov"]:
                X.add_(self.momentum, alpha=momentum)
            else:
                direction = self.momentum
        if weight_decay and is_decoupled:
            direction = X.copy_(direction)
            torch._foreach_add_(self._parameter_views(X), self.parameters, alpha=weight_decay)
        torch.mul(direction, (active * -group["lr"])[:, None], out=X)
        torch._foreach_add_(self.parameters, self._parameter_views(X))

    def _create_estimate(self, axis: int, group: dict[str, Any]) -> AxisEstimate:
        """Creates the estimate of an axis of all parameters, from their states or from scratch."""
        dim = self.parameters[0].shape[axis]
        rank = min((dim + 1) // 2, group["rank"])
        W = initial_factor(rank, dim, alpha=group["alpha"])
        W = W.to(self.device, torch.promote_types(self.scratch_dtype, torch.float32))
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        for state in self.states:
            if f"axis{axis}_eigenvalues" in state:  # as checkpoints had it that kept eigenvectors
                floor = state[f"axis{axis}_floor"]
                trace = dim * floor + state.pop(f"axis{axis}_eigenvalues").sum()
                state[f"axis{axis}_smoothed_floor"] = floor + group["alpha"] / dim * trace
        sizes = torch.tensor([[dim], [rank]], dtype=torch.float64, device=self.device)
        estimate = AxisEstimate(
            W=self._stack_state(f"axis{axis}_factor", W),
            rho=self._stack_state(f"axis{axis}_floor", zero),
            beta=self._stack_state(f"axis{axis}_smoothed_floor", zero),
            sizes=sizes.expand(2, len(self.parameters)),
        )
        self.axes.append(estimate)
        return estimate

    def _stack_state(self, name: str, initial: Tensor) -> Tensor:
        """Stacks a state of all parameters; the states become views of the result's rows."""
        stacked = torch.stack([state.get(name, initial).to(initial) for state in self.states])
        for state, row in zip(self.states, stacked):
            state[name] = row
        return stacked

    def _create_momentum(self) -> Tensor:
        """Creates the momentum (batch, elements) of all parameters, from their states or zero."""
        rows = [
            state["momentum_buffer"].permute(self.axis_order).to(self.wide_dtype)
            if "momentum_buffer" in state
            else torch.zeros(self.permuted_shape, dtype=self.wide_dtype, device=self.device)
            for state in self.states
        ]
        stacked = torch.stack(rows)
        for state, row in zip(self.states, stacked):
            state["momentum_buffer"] = row.permute(self.inverse_order)
        return stacked.view(len(rows), -1)

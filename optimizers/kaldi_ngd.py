"""KaldiNGD: SGD along the natural gradient as Kaldi estimates it, online.

    optimizer = KaldiNGD(decay_groups(model, weight_decay=5e-4), lr=0.1, momentum=0.9)
    loss.backward()
    optimizer.step()

Povey, Zhang and Khudanpur, arXiv:1410.7455, appendix A; Kaldi's OnlineNaturalGradient. Each axis of
a weight carries a running estimate F of the gradients' second moment along it. The gradient is
multiplied by F^-1, smoothed towards the identity, axis after axis, and scaled back to its own norm:
SGD's step length, natural gradient's direction.

The symbols of the code, for one axis of length D of one parameter (everything in the code has a
leading `batch` dimension, the parameters of one shape that are updated together):

    symbol  shape         meaning
    X       (N, D)        the gradient, with this axis last and all others as N rows
    F       (D, D)        running estimate of X'X, = R'SR + rho (I - R'R); never stored as a matrix
    R       (rank, D)     orthonormal rows, which span the leading eigenvectors of F
    S       (rank, rank)  symmetric: F between the rows of R
    rho     ()            the eigenvalue of F in all other directions
    alpha   ()            smoothing of F towards a multiple of the identity
    beta    ()            = rho + alpha trace(F) / D, the eigenvalue of the smoothed F there
    K       (rank, rank)  = (S - rho I) (S - rho I + beta I)^-1, so that F^-1, smoothed and scaled,
                          is I - R'KR
    H       (N, rank)     = X R', so that the preconditioned gradient is X - H K R
    J       (rank, D)     = H'X = R X'X, what an update of F needs of the gradient
    eta     ()            weight of the new gradient in F: T = eta X'X + (1 - eta) F
    Y       (rank, D)     = R T, whose rows span those of the next R; the next S is (Y Y')^1/2
    g0      ()            squared norm of the gradient, before any axis is preconditioned; in
                          eta X'X, X is scaled to it, having lost length at other axes

Kaldi keeps the eigenvectors of F as the rows of R; here they may be any orthonormal rows, so that
an update needs no eigenvectors and the host waits for no GPU
([matrix_functions.py](matrix_functions.py)).
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optimizers.base import GradScalerOptimizer
from optimizers.low_rank import project, row_norms, second_moment, subtract_projection
from optimizers.matrix_functions import absolute_value, inverse, square_root, traces

FIRST_UPDATES = 10  # steps at the start that update all estimates
BATCH_BYTES = 16 * 2**20  # of gradients that are worked on together: what a CPU's cache holds
# The smallest eigenvalue that an estimate may have, relative to the root of the sum of the squares
# of all (Kaldi's delta, which there is relative to the largest). Relative to the mean eigenvalue of
# a new gradient, it is the smallest that an estimate may have had before.
FLOOR = 5e-4


class Estimate(NamedTuple):
    """The running estimate F of one axis of `batch` parameters."""

    R: Tensor  # (batch, rank, D), in fp32 at least
    S: Tensor  # (batch, rank, rank), float64; 0 where nothing is known yet, as are K and rho
    K: Tensor  # (batch, rank, rank), float64
    rho: Tensor  # (batch,), float64


class KaldiNGD(GradScalerOptimizer):
    """SGD with momentum along the natural gradient, estimated online (arXiv:1410.7455).

    Parameters with fewer than two axes take plain SGD. A gradient of zeros does not change the
    estimates, nor does a step that is skipped, which counts as a step all the same. All settings
    may change at any step; with a new rank the estimates begin anew.

    State of a parameter:
        momentum_buffer  the shape of the parameter, in fp32 at least.
        step             int, how many gradients it had; of a preconditioned one.
        axis<n>_R, axis<n>_S, axis<n>_K, axis<n>_rho
                         the estimate of axis n, for each preconditioned axis; see `Estimate`.

    Args:
        params: parameters or parameter groups.
        lr: learning rate; as for SGD, since the direction has the gradient's norm.
        momentum, nesterov: as of torch.optim.SGD.
        weight_decay: added to the direction after the preconditioning; p.grad is never written.
        rank: rows of R, at most half the length of the axis.
        alpha: smoothing of the estimate towards a multiple of the identity; larger values are
            closer to SGD.
        eta: weight of a new gradient in the running estimate.
        update_period: steps between updates of an estimate; the first ten steps update all.
        max_dim: longer axes are not preconditioned (vocabularies).

    Raises:
        ValueError: a hyper-parameter is out of its range.
    """

    own_ranges = {
        "alpha": lambda alpha: alpha > 0,
        "eta": lambda eta: 0 < eta < 1,
        "update_period": lambda period: period >= 1,
        "max_dim": lambda dim: dim >= 1,
    }

    def __init__(
        self,
        params: Any,
        lr: float = 0.1,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        rank: int = 32,
        alpha: float = 4.0,
        eta: float = 0.1,
        update_period: int = 4,
        max_dim: int = 4096,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "rank": rank,
            "alpha": alpha,
            "eta": eta,
            "update_period": update_period,
            "max_dim": max_dim,
        }
        super().__init__(params, defaults)

    def _apply_step(self) -> None:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            for group in self.param_groups:
                parameters, grads, active = self.unscaled_grads(group)
                if not parameters:
                    continue
                updates = self._precondition(group, parameters, grads=grads)
                if decay := group["weight_decay"]:
                    updates = list(torch._foreach_add(updates, parameters, alpha=decay))
                self.step_along(updates, parameters, group=group, active=active)

    def _precondition(
        self, group: dict[str, Any], parameters: list[Tensor], *, grads: list[Tensor]
    ) -> list[Tensor]:
        """Returns the direction of each parameter: its gradient, preconditioned if it is a matrix.

        The batches take turns in updating their estimates.
        """
        directions = list(grads)
        for number, indices in enumerate(self._batches(parameters, grads=grads)):
            states = [self.state[parameters[index]] for index in indices]
            step = states[0].get("step", 0)
            learns = step < FIRST_UPDATES or (step + number) % group["update_period"] == 0
            X = torch.stack([grads[index] for index in indices])
            X = precondition(X, states, group=group, learns=learns, is_first=step == 0)
            for index, state, direction in zip(indices, states, X):
                state["step"] = step + 1
                directions[index] = direction
        return directions

    def _batches(self, parameters: list[Tensor], *, grads: list[Tensor]) -> Iterator[list[int]]:
        """Yields the indices of matrices of one shape, dtype, device and number of gradients."""
        by_kind: dict[Any, list[int]] = defaultdict(list)
        for index, (p, grad) in enumerate(zip(parameters, grads)):
            if p.ndim >= 2 and p.numel():
                step = self.state[p].get("step", 0)
                by_kind[p.shape, grad.dtype, p.device, step].append(index)
        for alike in by_kind.values():
            size = max(1, BATCH_BYTES // grads[alike[0]].nbytes)
            for start in range(0, len(alike), size):
                yield alike[start : start + size]


# ------------------------------------------------------------ the mathematics, on batches


def precondition(
    X: Tensor,
    states: Sequence[dict[str, Any]],
    *,
    group: dict[str, Any],
    learns: bool,
    is_first: bool,
) -> Tensor:
    """Returns the directions of parameters of one shape, and updates the estimates in their states.

    Args:
        X: their gradients (batch, *shape).
        states: of each parameter; what is missing is created.
        group: the hyper-parameters of this step.
        learns: whether the estimates are updated.
        is_first: of the first gradients the estimates learn before they precondition them, too.
    """
    # in memory a convolution's axes are (outputs, kernel, inputs), as channels_last has them
    order = [0, 1, *range(3, X.ndim), 2]
    inverse_order = sorted(range(X.ndim), key=order.__getitem__)
    X = X.permute(order).contiguous()
    flat = X.view(len(X), -1)
    norm = row_norms(flat)
    for axis in reversed(range(X.ndim - 1)):  # of the parameters
        place = order.index(axis + 1)
        dim = X.shape[place]
        if not 1 < dim <= group["max_dim"]:
            continue
        along = X.view(len(X), -1, dim, X.shape[place + 1 :].numel())
        estimate = load_estimate(states, axis, dim, rank=group["rank"], like=X)
        R = estimate.R
        if learns:
            scale = (norm / row_norms(flat)).square()
            if is_first:
                for _ in range(1 if flat.shape[1] <= R.shape[1] * dim else 3):
                    J = _double_moment(project(R, along), along)
                    estimate = next_estimate(estimate, J, scale=scale, g0=norm**2, group=group)
                    R = estimate.R
        H = project(R, along)
        KR = estimate.K.to(X.dtype) @ R
        if learns:
            J = _double_moment(H, along)
            estimate = next_estimate(estimate, J, scale=scale, g0=norm**2, group=group)
            store_estimate(states, axis, estimate)
        subtract_projection(along, H, W=KR)
    new_norm = row_norms(flat)
    flat.mul_(torch.where(new_norm > 0, norm / new_norm, 1).to(X.dtype)[:, None])
    return X.permute(inverse_order)


def _double_moment(H: Tensor, X: Tensor) -> Tensor:
    """Returns J in float64: the error of fp32 in the leading directions would drown the others."""
    return second_moment(H.double(), X.double())


def next_estimate(
    estimate: Estimate, J: Tensor, *, scale: Tensor, g0: Tensor, group: dict[str, Any]
) -> Estimate:
    """Computes the estimates after T = eta X'X + (1 - eta) F.

    Args:
        estimate: of an axis of `batch` parameters.
        J: R X'X (batch, rank, D).
        scale: by which X'X is to be multiplied (batch,), float64.
        g0: squared norm of the gradients (batch,), float64.
        group: the hyper-parameters alpha and eta.

    Returns:
        The new estimate; the old one of parameters whose gradient is zero, and where the new one
        cannot be computed.
    """
    R, rho = estimate.R.double(), estimate.rho
    rank, dim = R.shape[1:]
    alpha, eta = group["alpha"], group["eta"]
    eye = torch.eye(rank, dtype=R.dtype, device=R.device)

    def times_eye(factor: Tensor) -> Tensor:
        return factor[:, None, None] * eye

    # the estimates are 0 at first, or may come from far smaller gradients
    missing = (FLOOR * g0 / dim - rho).clamp(min=0)
    rho = rho + missing
    S = estimate.S + times_eye(2 * missing)
    Y = eta * scale[:, None, None] * J + (1 - eta) * S @ R
    L, info = torch.linalg.cholesky_ex(Y @ Y.mT)
    R = torch.linalg.solve_triangular(L, Y, upper=False)
    squares = L.mT @ L  # Y'Y between the rows of the new R
    trace_T = eta * g0 + (1 - eta) * (traces(S) + (dim - rank) * rho)
    S = square_root(squares)
    rho = (trace_T - traces(S)) / (dim - rank)
    # D is S - rho I, but each eigenvalue is at least the floor
    floor = FLOOR * traces(squares).sqrt()
    above = S - times_eye(rho + floor)
    D = (above + absolute_value(above)) / 2 + times_eye(floor)
    rho = torch.maximum(rho, floor)
    beta = rho * (1 + alpha) + alpha / dim * traces(D)
    K = eye - beta[:, None, None] * inverse(D + times_eye(beta))

    new = Estimate(R.to(estimate.R.dtype), D + times_eye(rho), K, rho)
    is_valid = info == 0  # on a GPU that of NaN too, which a gradient of zeros makes by its scale
    for part in new:
        is_valid = is_valid & part.reshape(len(part), -1).isfinite().all(1)
    masks = (is_valid.view(-1, *[1] * (part.ndim - 1)) for part in new)
    return Estimate(*map(torch.where, masks, new, estimate))


# ------------------------------------------------------------ the estimates in the state


def load_estimate(
    states: Sequence[dict[str, Any]], axis: int, dim: int, *, rank: int, like: Tensor
) -> Estimate:
    """Returns the estimate of an axis of all parameters, anew where its rank is not this one.

    R has the dtype of `like`, and is on its device.
    """
    rank = min((dim + 1) // 2, rank)
    if missing := [s for s in states if len(s.get(f"axis{axis}_R", ())) != rank]:
        R = initial_directions(rank, dim, like=like)
        zeros = torch.zeros(len(R), len(R), dtype=torch.float64, device=R.device)
        for state in missing:
            for name, initial in zip(Estimate._fields, (R, zeros, zeros, zeros[0, 0])):
                state[f"axis{axis}_{name}"] = initial.clone()
    rows = [[state[f"axis{axis}_{name}"] for state in states] for name in Estimate._fields]
    R, *others = map(torch.stack, rows)
    return Estimate(R.to(like.dtype), *others)  # a loaded R may have another dtype


def store_estimate(states: Sequence[dict[str, Any]], axis: int, estimate: Estimate) -> None:
    """Writes the estimate of an axis into the states of the parameters."""
    for name, values in zip(Estimate._fields, estimate):
        rows = values.contiguous().unbind()  # of equal strides, which a GPU copies in one kernel
        torch._foreach_copy_([state[f"axis{axis}_{name}"] for state in states], rows)


def initial_directions(rank: int, dim: int, *, like: Tensor) -> Tensor:
    """Returns R_0 (rank, dim), whose rows any gradient has a component along.

    Its rows are 1.1 e_i + e_(i + rank) + e_(i + 2 rank) + ..., scaled to unit length.
    """
    eye = torch.eye(rank, dim, dtype=like.dtype, device=like.device)
    rows = eye[:, :rank].repeat(1, -(-dim // rank))[:, :dim] + 0.1 * eye
    return rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True)

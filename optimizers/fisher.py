"""Running estimates of the gradients' second moment along each axis, and their inverses.

    preconditioner = LowRankPreconditioner(left=1, dim=30, right=40, axis=estimate)
    X, spare = preconditioner(X, spare, context=context)   # X (batch, elements), preconditioned
    apply_updates(context.updates, alpha=alpha, eta=eta)   # the estimates learn from X

This is the mathematics of `kaldi_ngd.KaldiNGD`, whose docstring explains the symbols (those of
appendix A of arXiv:1410.7455): an axis of length D keeps F = R'SR + rho (I - R'R), stored as W, rho
and beta, and a gradient X becomes X - X W'W along the axis. Everything is batched: each function
works on the gradients of `batch` parameters of one shape at once.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from optimizers.matrix_functions import EIGH_DEVICES, SquareRoot, inverse

# The smallest eigenvalue that an estimate may have, relative to the root of the sum of the squares
# of all (Kaldi's delta, which there is relative to the largest). Relative to the mean eigenvalue of
# a new gradient, it is the smallest that an estimate may have had before.
EIGENVALUE_FLOOR = 5e-4
# Squared length of a row that fills up a W of smaller rank: as short as one with an eigenvalue of F
# hardly above rho, so that it has no part in the largest ones.
MADE_UP = 1e-3
# Axes up to this long are preconditioned by one (D, D) matrix, not two thin ones.
MAX_DENSE_DIM = 16
MAX_DENSE_KERNEL = 64  # all axes of a convolution's kernel share one matrix up to this many weights


# ------------------------------------------------------------ the mathematics, on batches of axes


def initial_factor(rank: int, dim: int, *, alpha: float) -> Tensor:
    """Returns W_0 (rank, dim), whose rows any gradient has a component along.

    Its rows are 1.1 e_i + e_(i + rank) + e_(i + 2 rank) + ..., scaled to equal length.
    """
    eye = torch.eye(rank, dim, dtype=torch.float64)
    rows = eye[:, :rank].repeat(1, -(-dim // rank))[:, :dim] + 0.1 * eye
    lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return rows / lengths / math.sqrt(2 + (dim + rank) * alpha / dim)


def update_estimates(
    gram: Tensor,
    *,
    rho: Tensor,
    beta: Tensor,
    dim: Tensor,
    rank: Tensor,
    g0: Tensor,
    squared_norm: Tensor,
    alpha: float,
    eta: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the estimates after T = eta X'X + (1 - eta) F, for a batch of axes.

    The products of the rows of W and J say all of them that is needed. Axes of any length are one
    batch, and so are axes of different rank: where one has fewer than `size` rows, further rows
    are made up, which are orthogonal to all others and of which X has nothing.

    Args:
        gram: (batch, 2 size, 2 size), float64: the products of the rows of W and, from row `size`
            on, of J. Rows that are made up have MADE_UP on the diagonal, those of J have 0.
        rho, beta: (batch,), float64; 0 where nothing is known yet.
        dim, rank: the axis's length and its rows of W (batch,), float64.
        g0: squared norm of the gradient at scale (batch,), float64.
        squared_norm: squared norm of X (batch,), float64, whose scale may be another.
        alpha: smoothing of F towards a multiple of the identity.
        eta: weight of the new gradient.

    Returns:
        A (batch, size, 2 size): the new W is A [W; J]. The new rho and beta. Whether they could be
        computed (batch,), bool; the others hold anything where they could not.
    """
    size = gram.shape[1] // 2
    eye = torch.eye(size, dtype=gram.dtype, device=gram.device)
    is_row = torch.arange(size, device=gram.device) < rank[:, None]

    def trace(matrix: Tensor) -> Tensor:
        return torch.where(is_row, matrix.diagonal(dim1=1, dim2=2), 0).sum(1)

    def times_eye(factor: Tensor) -> Tensor:
        return factor[:, None, None] * eye

    # The rows of R = C^-1 W are orthonormal. K and S are in their coordinates.
    C, w_info = torch.linalg.cholesky_ex(gram[:, :size, :size])
    C_inverse = torch.linalg.solve_triangular(C, eye, upper=False)
    K = C.mT @ C
    # the estimates are 0 at first, or may come from far smaller gradients
    floored_rho = torch.maximum(rho, EIGENVALUE_FLOOR * g0 / dim)
    S = beta[:, None, None] * inverse(eye - K)
    S += times_eye(2 * floored_rho - rho - beta)

    # all that follows is divided by 1 - eta: T = eta / (1 - eta) X'X + F
    new_weight = eta / (1 - eta)
    k = new_weight * g0 / squared_norm
    B = torch.cat([S @ C_inverse, k[:, None, None] * C_inverse], dim=2)  # Y = R T = B [W; J]
    L, y_info = torch.linalg.cholesky_ex(B @ gram @ B.mT)  # Y Y' = L L', and the new R is L^-1 Y
    S_squared = L.mT @ L
    root = SquareRoot(S_squared)
    new_S = root.matrix
    new_rho = floored_rho + (trace(S) + new_weight * g0 - trace(new_S)) / (dim - rank)
    floor = EIGENVALUE_FLOOR * trace(S_squared).sqrt()
    level = new_rho + floor  # D is S - rho I, but each eigenvalue is at least the floor
    D = (new_S + root.distance_from(level) + times_eye(floor - new_rho)) / 2
    new_rho = torch.maximum(new_rho, floor)
    new_beta = new_rho * (1 + alpha) + alpha / dim * trace(D)
    new_K = eye - new_beta[:, None, None] * inverse(D + times_eye(new_beta))
    G, k_info = torch.linalg.cholesky_ex(new_K)  # new K = G G', so that the new W is G' L^-1 Y
    A = G.mT @ torch.linalg.solve_triangular(L, B, upper=False)
    is_valid = (w_info + y_info + k_info) == 0
    is_valid &= A.isfinite().flatten(1).all(1)  # on a GPU the factor of NaN counts as computed
    return A, new_rho * (1 - eta), new_beta * (1 - eta), is_valid


def project(W: Tensor, X: Tensor, *, buffer: Tensor) -> Tensor:
    """Computes H = X W', the components of X along the rows of W.

    Args:
        W: (batch, rank, dim).
        X: (batch, left, dim, right), with left or right 1.
        buffer: flat memory for the result.

    Returns:
        H, (batch, left, rank) if right is 1, else (batch, rank, right).
    """
    (batch, left, dim, right), rank = X.shape, W.shape[1]
    H = buffer[: batch * left * rank * right]
    if right == 1:
        return torch.bmm(X.view(batch, left, dim), W.mT, out=H.view(batch, left, rank))
    return torch.bmm(W, X.view(batch, dim, right), out=H.view(batch, rank, right))


def second_moment(H: Tensor, X: Tensor) -> Tensor:
    """Computes J = W X'X (batch, rank, dim) from H of `project` and X (batch, left, dim, right)."""
    batch, left, dim, right = X.shape
    if right == 1:
        return torch.bmm(H.mT, X.view(batch, left, dim))
    return torch.bmm(H, X.view(batch, dim, right).mT)


def subtract_projection(X: Tensor, H: Tensor, *, W: Tensor) -> None:
    """Computes X -= H W in place, with H of `project` and X (batch, left, dim, right)."""
    batch, left, dim, right = X.shape
    if right == 1:
        X.view(batch, left, dim).baddbmm_(H, W, alpha=-1)
    else:
        X.view(batch, dim, right).baddbmm_(W.mT, H, alpha=-1)


def row_norms(X: Tensor) -> Tensor:
    """Returns the norm of each row of X (batch, elements), shape (batch,), float64."""
    dtype = torch.promote_types(X.dtype, torch.float32)
    return torch.linalg.vector_norm(X, dim=1, dtype=dtype).double()


def gram_matrix(X: Tensor) -> Tensor:
    """Computes X'X along the third axis: (batch, left, D, right) to (batch, D, D), float64."""
    batch, left, dim, right = X.shape
    if right == 1:
        X = X.view(batch, left, dim)
        return torch.bmm(X.mT, X).double()
    X = X.view(batch * left, dim, right)
    return torch.bmm(X, X.mT).view(batch, left, dim, dim).sum(1, dtype=torch.float64)


# ------------------------------------------------------------ the estimates and their updates


@dataclass
class AxisEstimate:
    """The running estimate F = R'SR + rho (I - R'R) of one axis of `batch` parameters."""

    W: Tensor  # (batch, rank, dim): the factor, with W'W = R'KR
    rho: Tensor  # (batch,), float64: the eigenvalue of F in all directions but R's
    beta: Tensor  # (batch,), float64: the eigenvalue of the smoothed F in them
    sizes: Tensor  # (2, batch), float64: dim and rank, where the device can read them


@dataclass
class EstimateUpdate:
    """What the estimate of one axis learns from in this step."""

    axis: AxisEstimate
    J: Tensor  # (batch, rank, dim): W X'X of the gradients at this axis
    squared_norm: Tensor  # (batch,), float64: |X|^2
    g0: Tensor  # (batch,), float64: squared norm of the gradients at scale
    learns: Tensor  # (batch,), bool: whether the gradient is finite and not zero


def apply_updates(updates: Sequence[EstimateUpdate], *, alpha: float, eta: float) -> None:
    """Updates the estimates in place.

    On a CPU axes of equal rank are one batch. On other devices, where the launch of a kernel costs
    more than its work on small matrices, all axes are.
    """
    together: dict[Any, list[EstimateUpdate]] = defaultdict(list)
    for update in updates:
        device, rank = update.J.device, update.J.shape[1]
        together[device, rank if device.type in EIGH_DEVICES else None].append(update)
    for alike in together.values():
        _update_together(alike, alpha=alpha, eta=eta)


def _update_together(updates: Sequence[EstimateUpdate], *, alpha: float, eta: float) -> None:
    """Updates the estimates of axes of any shape, all on one device, as one batch."""
    by_shape: dict[Any, list[EstimateUpdate]] = defaultdict(list)
    for update in updates:
        by_shape[update.J.shape[1:], update.J.dtype].append(update)
    updates = [update for alike in by_shape.values() for update in alike]
    axes = [update.axis for update in updates]
    old_W = [torch.cat([update.axis.W for update in alike]) for alike in by_shape.values()]
    rows = [  # those of W and of J, (axes of this shape, 2 rank, dim)
        torch.cat([W, torch.cat([update.J for update in alike])], dim=1).double()
        for W, alike in zip(old_W, by_shape.values())
    ]

    size = max(W.shape[1] for W in old_W)
    gram = torch.cat([_padded_gram(stacked, size=size) for stacked in rows])
    rho = torch.cat([axis.rho for axis in axes])
    beta = torch.cat([axis.beta for axis in axes])
    dim, rank = torch.cat([axis.sizes for axis in axes], dim=1)
    squared_norm = torch.cat([update.squared_norm for update in updates])
    learns = torch.cat([update.learns for update in updates]) & (squared_norm > 0)
    learns &= gram.isfinite().flatten(1).all(1)
    harmless = torch.eye(2 * size, dtype=gram.dtype, device=gram.device) / 2
    A, new_rho, new_beta, is_valid = update_estimates(
        torch.where(learns[:, None, None], gram, harmless),
        rho=rho,
        beta=beta,
        dim=dim,
        rank=rank,
        g0=torch.cat([update.g0 for update in updates]),
        squared_norm=torch.where(learns, squared_norm, 1),
        alpha=alpha,
        eta=eta,
    )

    learns &= is_valid
    new_W: list[Tensor] = []
    counts = [len(W) for W in old_W]
    for W, stacked, part, valid in zip(old_W, rows, A.split(counts), learns.split(counts)):
        product = _unpadded(part, rank=W.shape[1]) @ stacked
        new_W += torch.where(valid[:, None, None], product.to(W.dtype), W).unbind()
    torch._foreach_copy_([W for axis in axes for W in axis.W.unbind()], new_W)
    new_rho, new_beta = torch.where(learns, new_rho, rho), torch.where(learns, new_beta, beta)
    counts = [len(axis.rho) for axis in axes]
    torch._foreach_copy_(
        [axis.rho for axis in axes] + [axis.beta for axis in axes],
        new_rho.split(counts) + new_beta.split(counts),
    )


def _padded_gram(rows: Tensor, *, size: int) -> Tensor:
    """Returns the `gram` of `update_estimates` for W and J, which are `rows` (n, 2 rank, dim)."""
    rank = rows.shape[1] // 2
    products = (rows @ rows.mT).view(-1, 2, rank, 2, rank)
    if missing := size - rank:
        products = F.pad(products, (0, missing, 0, 0, 0, missing))
    gram = products.view(-1, 2 * size, 2 * size)
    if missing:
        gram.diagonal(dim1=1, dim2=2)[:, rank:size].fill_(MADE_UP)
    return gram


def _unpadded(A: Tensor, *, rank: int) -> Tensor:
    """Returns the rows and columns of A (n, size, 2 size) that exist, (n, rank, 2 rank)."""
    size = A.shape[1]
    return A.view(-1, size, 2, size)[:, :rank, :, :rank].reshape(-1, rank, 2 * rank)


@dataclass
class UpdateContext:
    """Collects what the axes of a batch of parameters learn from in one step."""

    learns: Tensor  # (batch,), bool: whether the gradient is finite and not zero
    g0: Tensor  # (batch,), float64: squared norm of the gradients at scale
    squared_norm: Tensor | None  # (batch,), float64: of the gradients at the next axis, if known
    alpha: float  # smoothing of F towards a multiple of the identity
    eta: float  # weight of the new gradients in F
    is_first: bool  # the first gradients: estimates start on them before they precondition them
    updates: list[EstimateUpdate] = field(default_factory=list)  # applied at the end of the step

    def start_estimate(
        self,
        axis: AxisEstimate,
        rows: int,
        *,
        squared_norm: Tensor,
        moment: Callable[[], Tensor],
    ) -> None:
        """Estimates an axis from scratch if these are the first gradients.

        Args:
            axis: the estimate, updated in place.
            rows: rows of the gradient along this axis.
            squared_norm: of the gradients at this axis (batch,).
            moment: returns J for the W that the axis has at the time of the call.
        """
        if self.is_first:
            for _ in range(1 if rows <= axis.W.shape[1] else 3):
                update = self.new_update(axis, moment(), squared_norm=squared_norm)
                apply_updates([update], alpha=self.alpha, eta=self.eta)

    def new_update(self, axis: AxisEstimate, J: Tensor, *, squared_norm: Tensor) -> EstimateUpdate:
        """Returns the update from J of gradients with this squared norm (batch,) at this axis."""
        return EstimateUpdate(axis, J=J, squared_norm=squared_norm, g0=self.g0, learns=self.learns)


# ------------------------------------------------------------ preconditioners


@dataclass
class LowRankPreconditioner:
    """Preconditions one axis by two thin products.

    X (batch, left, dim, right) becomes X - X W'W along `dim`.
    """

    left: int  # elements of the axes before this one
    dim: int  # length of the axis
    right: int  # elements of the axes after it
    axis: AxisEstimate

    def __call__(
        self, X: Tensor, spare: Tensor, *, context: UpdateContext | None
    ) -> tuple[Tensor, Tensor]:
        """Preconditions X (batch, elements) in place; returns X and `spare`, a buffer alike."""
        view = X.view(len(X), self.left, self.dim, self.right)
        if self.left == 1 or self.right == 1:
            self._precondition(view, spare.view(-1), context)
        else:  # an axis between two others that is no kernel: rare enough for two copies
            transposed = view.transpose(2, 3).reshape(len(X), -1, self.dim, 1)
            self._precondition(transposed, spare.view(-1), context)
            back = transposed.view(len(X), self.left, self.right, self.dim)
            view.copy_(back.transpose(2, 3))
        return X, spare

    def _precondition(self, X: Tensor, buffer: Tensor, context: UpdateContext | None) -> None:
        W = self.axis.W.to(X.dtype)
        if context is None:
            subtract_projection(X, project(W, X, buffer=buffer), W=W)
            return
        squared_norm = context.squared_norm
        if squared_norm is None:
            squared_norm = row_norms(X.view(len(X), -1)) ** 2
        context.squared_norm = None
        context.start_estimate(
            self.axis,
            self.left * self.right,
            squared_norm=squared_norm,
            moment=lambda: second_moment(project(self.axis.W.to(X.dtype), X, buffer=buffer), X),
        )
        W = self.axis.W.to(X.dtype)  # the estimate may have started
        H = project(W, X, buffer=buffer)
        J = second_moment(H, X)
        context.updates.append(context.new_update(self.axis, J, squared_norm=squared_norm))
        subtract_projection(X, H, W=W)

    def invalidate(self) -> None:
        """Drops what was computed from the estimates, which have changed; here nothing."""

    def update_cost(self) -> int:
        """Returns the multiplications of one update for one parameter.

        They are those of J, and roughly those of the update of W.
        """
        rank = self.axis.W.shape[1]
        return rank * self.dim * (self.left * self.right + 8 * rank)


@dataclass
class DenseAxis:
    """One of the axes that a `DensePreconditioner` joins: dim = before x D x after."""

    before: int
    estimate: AxisEstimate
    after: int


@dataclass
class DensePreconditioner:
    """Preconditions short axes by one product.

    X (batch, left, dim, right) is multiplied along `dim` by the product of the I - W'W of the axes.
    """

    left: int  # elements of the axes before these
    dim: int  # elements of these axes together
    right: int  # elements of the axes after them
    axes: list[DenseAxis]  # the last axis comes first
    projector: Tensor | None = None  # (batch, dim, dim): the product, if it is up to date

    def __call__(
        self, X: Tensor, spare: Tensor, *, context: UpdateContext | None
    ) -> tuple[Tensor, Tensor]:
        """Preconditions X (batch, elements) into `spare`; returns it and the buffer X was in."""
        view = X.view(len(X), self.left, self.dim, self.right)
        if context is not None:
            self._collect_updates(gram_matrix(view), context)
        if self.projector is None:
            projectors = [self._axis_projector(axis) for axis in self.axes]
            self.projector = functools.reduce(torch.bmm, projectors).to(X.dtype)
        if self.right == 1:
            shape = len(X), self.left, self.dim
            torch.bmm(X.view(shape), self.projector, out=spare.view(shape))
        else:
            torch.matmul(self.projector[:, None], view, out=spare.view(view.shape))
        return spare, X

    def _collect_updates(self, G: Tensor, context: UpdateContext) -> None:
        """Computes each axis's J from the Gram matrix G (batch, dim, dim) of all axes.

        An axis sees the gradient preconditioned by the axes that come before it in `axes`.
        """
        for axis in self.axes:
            estimate = axis.estimate
            dim = estimate.W.shape[2]
            split = G.view(len(G), *2 * (axis.before, dim, axis.after))
            moments = torch.einsum("zbiabja->zij", split)
            squared_norm = moments.diagonal(dim1=1, dim2=2).sum(1)
            moment = functools.partial(_factor_times, estimate, moments)
            context.start_estimate(
                estimate,
                self.left * self.dim // dim * self.right,
                squared_norm=squared_norm,
                moment=moment,
            )
            update = context.new_update(estimate, moment(), squared_norm=squared_norm)
            context.updates.append(update)
            P = self._axis_projector(axis)
            G = P @ G @ P
        context.squared_norm = G.diagonal(dim1=1, dim2=2).sum(1)

    def _axis_projector(self, axis: DenseAxis) -> Tensor:
        """Returns I - W'W of one axis as a matrix over all of them (batch, dim, dim), float64."""
        W = axis.estimate.W.double()
        eye = functools.partial(torch.eye, dtype=W.dtype, device=W.device)
        P = eye(W.shape[2]) - W.mT @ W
        expanded = torch.einsum("ab,zij,cd->zaicbjd", eye(axis.before), P, eye(axis.after))
        return expanded.reshape(-1, self.dim, self.dim)

    def invalidate(self) -> None:
        """Drops the projector, because the estimates have changed."""
        self.projector = None

    def update_cost(self) -> int:
        """Returns the multiplications of one update for one parameter: the Gram matrix."""
        return self.left * self.dim * self.right * self.dim


Preconditioner = LowRankPreconditioner | DensePreconditioner


def _factor_times(estimate: AxisEstimate, moments: Tensor) -> Tensor:
    return estimate.W.double() @ moments


def build_preconditioners(
    shape: Sequence[int],
    is_kernel: bool,
    *,
    max_dim: int,
    new_estimate: Callable[[int], AxisEstimate],
) -> list[Preconditioner]:
    """Builds the preconditioners of parameters of this shape, from the last axis to the first.

    Args:
        shape: the shape of the parameters.
        is_kernel: the gradients are laid out as (outputs, kernel..., inputs), and all of the kernel
            is one product.
        max_dim: longer axes are not preconditioned.
        new_estimate: creates the estimate of an axis of the parameters, given its number.
    """
    ndim = len(shape)
    if is_kernel:
        axis_order = [0, *range(2, ndim), 1]
        blocks = [range(2, ndim), range(1, 2), range(1)]
    else:
        axis_order = list(range(ndim))
        blocks = [range(axis, axis + 1) for axis in reversed(range(ndim))]
    sizes = [shape[axis] for axis in axis_order]
    preconditioners: list[Preconditioner] = []
    for block in blocks:
        used = [axis for axis in reversed(block) if 1 < shape[axis] <= max_dim]
        if not used:
            continue
        place = axis_order.index(block[0])
        left, right = math.prod(sizes[:place]), math.prod(sizes[place + len(block) :])
        dim = math.prod(shape[axis] for axis in block)
        if dim > MAX_DENSE_DIM and len(block) == 1:
            estimate = new_estimate(used[0])
            low_rank = LowRankPreconditioner(left=left, dim=dim, right=right, axis=estimate)
            preconditioners.append(low_rank)
        else:
            axes = [
                DenseAxis(
                    before=math.prod(shape[block[0] : axis]),
                    estimate=new_estimate(axis),
                    after=math.prod(shape[axis + 1 : block[-1] + 1]),
                )
                for axis in used
            ]
            dense = DensePreconditioner(left=left, dim=dim, right=right, axes=axes)
            preconditioners.append(dense)
    return preconditioners

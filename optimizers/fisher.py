"""Running estimates of the second moment of gradients along each axis, and the product with their inverse: the parts of NGD.

    mode = ThinMode(left, dim, right, axis)      # or DenseMode, or all of a parameter: build_modes
    X, spare = mode(X, spare, lesson)            # X (batch, weights) preconditioned; the lesson collects what is to be learnt
    apply_updates(lesson.updates, alpha, eta)

An axis of length D keeps F = R' diag(d) R + rho I with R (rank, D) orthonormal (arXiv:1410.7455, appendix A, whose symbols
are used here). The smoothed inverse, up to a factor, is I - W'W with W = E^1/2 R, E = d / (beta + d) and
beta = rho (1 + alpha) + alpha sum(d) / D. Gradients come in batches: one row for each parameter of the same shape.
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

FLOOR = 5e-4  # of an eigenvalue, relative to the largest (Kaldi's delta) and to the mean of those of a new gradient
DENSE = (
    16  # an axis up to this long is preconditioned by one (D, D) matrix instead of two thin ones
)
DENSE_KERNEL = 64  # ... and all axes of a convolution's kernel together, up to this many weights


# -------------------------------------------------------------------- the mathematics, on batches of axes


def initial_factor(rank: int, dim: int, alpha: float) -> Tensor:
    """W_0 (rank, dim): rows 1.1 e_i + e_(i + rank) + e_(i + 2 rank) + ... of equal length, which any gradient meets."""
    eye = torch.eye(rank, dim, dtype=torch.float64)
    rows = eye[:, :rank].repeat(1, -(-dim // rank))[:, :dim] + 0.1 * eye
    return (
        rows
        / torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        / math.sqrt(2 + (dim + rank) * alpha / dim)
    )


def updated(
    W: Tensor,
    d: Tensor,
    rho: Tensor,
    J: Tensor,
    k: Tensor,
    g0: Tensor,
    learn: Tensor,
    alpha: float,
    eta: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The estimates after T = eta X'X + (1 - eta) F, of a batch of axes (appendix A of the paper; its N cancels).

    Everything is in units of the trace of T, so nothing depends on the gradient's scale.

    Args:
        W: factors (batch, rank, dim), rows orthogonal.
        d, rho: eigenvalues (batch, rank) and the floor below them (batch,), float64; 0 where nothing is known yet.
        J: W X'X (batch, rank, dim) of gradients of any scale.
        k: eta times the square of what brings those gradients to scale (batch,), float64.
        g0: their squared norm at scale (batch,), float64.
        learn: where the gradient is finite and not zero (batch,); elsewhere the estimate stays as it is.

    Returns:
        The new W, d and rho.
    """
    rank, dim = W.shape[1:]
    start = torch.maximum(
        rho, FLOOR / dim * g0
    )  # what is 0 at first, or was learnt from far smaller gradients
    known = torch.maximum(d, FLOOR / dim * g0[:, None])
    total = eta * g0 + (1 - eta) * (dim * start + known.sum(1))
    to_rows = 1 / torch.linalg.vector_norm(W, dim=2, dtype=torch.float64)  # E^-1/2: R = E^-1/2 W
    dtype = torch.promote_types(J.dtype, torch.float32)
    Y = J * ((k / total)[:, None] * to_rows)[:, :, None].to(dtype)  # R T
    Y.addcmul_(
        W, ((1 - eta) / total[:, None] * (known + start[:, None]) * to_rows)[:, :, None].to(dtype)
    )
    wide = Y.double()
    c, U = torch.linalg.eigh(torch.nan_to_num(wide @ wide.mT))
    s = torch.maximum(c.flip(1), ((1 - eta) * start / total).square()[:, None]).sqrt()  # descending
    new_rho = (1 - s.sum(1)) / (dim - rank)
    least = FLOOR * s[:, 0]
    new_d = torch.maximum(s - new_rho[:, None], least[:, None])
    new_rho = torch.maximum(new_rho, least)
    beta = new_rho * (1 + alpha) + alpha / dim * new_d.sum(1)
    rows = (U.flip(2).mT / s[:, :, None]).to(dtype) @ Y
    L, failed = torch.linalg.cholesky_ex(
        (rows @ rows.mT).double()
    )  # makes rows orthonormal, the larger before the smaller
    back = torch.linalg.solve_triangular(
        L, torch.eye(rank, dtype=L.dtype, device=L.device).expand_as(L), upper=False
    )
    new_W = ((new_d / (beta[:, None] + new_d)).sqrt()[:, :, None] * back).to(dtype) @ rows
    good = learn & (failed == 0)
    return (
        torch.where(good[:, None, None], new_W.to(W.dtype), W),
        torch.where(good[:, None], new_d * total[:, None], d),
        torch.where(good, new_rho * total, rho),
    )


def along(W: Tensor, X: Tensor, buffer: Tensor) -> Tensor:
    """H: the rows W (batch, rank, D) against X (batch, left, D, right) with left or right 1; kept in the flat `buffer`."""
    (batch, left, dim, right), rank = X.shape, W.shape[1]
    H = buffer[: batch * left * rank * right]
    if right == 1:
        return torch.bmm(X.view(batch, left, dim), W.mT, out=H.view(batch, left, rank))
    return torch.bmm(W, X.view(batch, dim, right), out=H.view(batch, rank, right))


def second_moment(H: Tensor, X: Tensor) -> Tensor:
    """J = W X'X (batch, rank, D), with H from `along`."""
    batch, left, dim, right = X.shape
    return (
        torch.bmm(H.mT, X.view(batch, left, dim))
        if right == 1
        else torch.bmm(H, X.view(batch, dim, right).mT)
    )


def remove(W: Tensor, H: Tensor, X: Tensor) -> None:
    """X -= H W, in place."""
    batch, left, dim, right = X.shape
    if right == 1:
        X.view(batch, left, dim).baddbmm_(H, W, alpha=-1)
    else:
        X.view(batch, dim, right).baddbmm_(W.mT, H, alpha=-1)


def norms(X: Tensor) -> Tensor:
    """Norm of each row of X (batch, weights), float64."""
    return torch.linalg.vector_norm(
        X, dim=1, dtype=torch.promote_types(X.dtype, torch.float32)
    ).double()


def gram(X: Tensor) -> Tensor:
    """X X' along the third axis: (batch, left, D, right) to (batch, D, D), float64."""
    batch, left, dim, right = X.shape
    if right == 1:
        X = X.view(batch, left, dim)
        return torch.bmm(X.mT, X).double()
    X = X.view(batch * left, dim, right)
    return torch.bmm(X, X.mT).view(batch, left, dim, dim).sum(1, dtype=torch.float64)


# -------------------------------------------------------------------- a gradient on its way through its axes


@dataclass
class Axis:
    """The running estimates of one axis of the parameters of a chunk: F = R' diag(d) R + rho I, W = E^1/2 R."""

    number: int
    W: Tensor  # (batch, rank, dim)
    d: Tensor  # (batch, rank) float64
    rho: Tensor  # (batch,) float64


@dataclass
class Update:
    """What the estimates of an axis are to learn from; see `updated`."""

    axis: Axis
    J: Tensor
    k: Tensor
    g0: Tensor
    learn: Tensor


def apply_updates(updates: Sequence[Update], alpha: float, eta: float) -> None:
    """Do them, axes of equal (rank, dim) in one batch."""
    alike: dict[Any, list[Update]] = defaultdict(list)
    for update in updates:
        alike[update.J.shape[1:], update.J.device, update.J.dtype].append(update)
    for some in alike.values():
        columns = zip(*((u.axis.W, u.axis.d, u.axis.rho, u.J, u.k, u.g0, u.learn) for u in some))
        W, d, rho, J, k, g0, learn = (torch.cat(column) for column in columns)
        new = updated(W, d, rho, J, k, g0, learn, alpha, eta)
        for u, parts in zip(some, zip(*(tensor.split([len(u.k) for u in some]) for tensor in new))):
            for mine, part in zip((u.axis.W, u.axis.d, u.axis.rho), parts):
                mine.copy_(part)


@dataclass
class UpdateContext:
    """How the axes of a chunk learn in one step; `learn` and `g0` (batch,) as in `updated`."""

    learn: Tensor
    g0: Tensor
    squared: (
        Tensor | None
    )  # norm of the gradients as they come to the next axis (batch,), where it is known
    alpha: float
    eta: float
    first: (
        bool  # the very first gradient: the estimates are started on it before it is preconditioned
    )
    updates: list[Update] = field(
        default_factory=list
    )  # all others are done together at the end of the step

    def start(self, axis: Axis, rows: int, squared: Tensor, moment: Callable[[], Tensor]) -> None:
        """On the very first gradient, of `rows` rows: estimate from scratch. `moment` returns J for the W of the moment."""
        if self.first:
            for _ in range(1 if rows <= axis.W.shape[1] else 3):
                apply_updates([self.update(axis, moment(), squared)], self.alpha, self.eta)

    def update(self, axis: Axis, J: Tensor, squared: Tensor) -> Update:
        """The update from J of gradients whose squared norm, at this axis, is `squared` (batch,)."""
        k = torch.where(self.learn & (squared > 0), self.eta * self.g0 / squared, 0)
        return Update(axis, J, k, self.g0, self.learn)


@dataclass
class LowRankPreconditioner:
    """One axis, preconditioned by two thin products: X (batch, left, dim, right) becomes X - X W'W along `dim`."""

    left: int
    dim: int
    right: int
    axis: Axis

    def __call__(
        self, X: Tensor, spare: Tensor, lesson: UpdateContext | None
    ) -> tuple[Tensor, Tensor]:
        """X (batch, weights) preconditioned, in place, and `spare`."""
        view = X.view(len(X), self.left, self.dim, self.right)
        if self.left == 1 or self.right == 1:
            self.precondition(view, spare.view(-1), lesson)
        else:  # an axis between two others, which are not a kernel: rare enough for two copies
            moved = view.transpose(2, 3).reshape(len(X), -1, self.dim, 1)
            self.precondition(moved, spare.view(-1), lesson)
            view.copy_(moved.view(len(X), self.left, self.right, self.dim).transpose(2, 3))
        return X, spare

    def precondition(self, X: Tensor, buffer: Tensor, lesson: UpdateContext | None) -> None:
        axis = self.axis
        if lesson is not None:
            squared = norms(X.view(len(X), -1)) ** 2 if lesson.squared is None else lesson.squared
            lesson.squared = None
            lesson.start(
                axis,
                self.left * self.right,
                squared,
                lambda: second_moment(along(axis.W, X, buffer), X),
            )
        H = along(axis.W, X, buffer)
        if lesson is not None:
            lesson.updates.append(lesson.update(axis, second_moment(H, X), squared))
        remove(axis.W, H, X)

    def forget(self) -> None:
        """The estimates have changed."""

    def cost(self) -> int:
        """Multiplications of one update for one parameter: J, and the small algebra at half the speed."""
        rank = self.axis.W.shape[1]
        return rank * self.dim * (self.left * self.right + 8 * rank)


@dataclass
class DensePreconditioner:
    """Short axes, preconditioned by one product: X (batch, left, dim, right) times the product of their I - W'W."""

    left: int
    dim: int
    right: int
    axes: list[
        tuple[int, Axis, int]
    ]  # before, axis, after: dim = before x D x after; the last axis comes first
    projector: Tensor | None = None

    def __call__(
        self, X: Tensor, spare: Tensor, lesson: UpdateContext | None
    ) -> tuple[Tensor, Tensor]:
        """X (batch, weights) preconditioned, in `spare`, and the buffer that X was in."""
        view = X.view(len(X), self.left, self.dim, self.right)
        if lesson is not None:
            self.learn(gram(view), lesson)
        if self.projector is None:
            parts = [self.expand(axis, before, after) for before, axis, after in self.axes]
            self.projector = functools.reduce(torch.bmm, parts).to(X.dtype)
        if self.right == 1:
            torch.bmm(
                X.view(len(X), self.left, self.dim),
                self.projector,
                out=spare.view(len(X), self.left, self.dim),
            )
        else:
            torch.matmul(self.projector[:, None], view, out=spare.view(view.shape))
        return spare, X

    def learn(self, G: Tensor, lesson: UpdateContext) -> None:
        """The moments of each axis from the Gram matrix (batch, dim, dim) of all, which it sees preconditioned by those before."""
        for before, axis, after in self.axes:
            dim = axis.W.shape[2]
            moments = torch.einsum("zbiabja->zij", G.view(len(G), *2 * (before, dim, after)))
            squared = moments.diagonal(dim1=1, dim2=2).sum(1)
            moment = functools.partial(
                lambda axis, moments: axis.W.double() @ moments, axis, moments
            )
            lesson.start(axis, self.left * self.dim // dim * self.right, squared, moment)
            lesson.updates.append(lesson.update(axis, moment(), squared))
            P = self.expand(axis, before, after)
            G = P @ G @ P
        lesson.squared = G.diagonal(dim1=1, dim2=2).sum(1)

    def expand(self, axis: Axis, before: int, after: int) -> Tensor:
        """I - W'W of one axis as a matrix over all of them (batch, dim, dim), float64."""
        W = axis.W.double()
        eye = functools.partial(torch.eye, dtype=W.dtype, device=W.device)
        P = eye(W.shape[2]) - W.mT @ W
        return torch.einsum("ab,zij,cd->zaicbjd", eye(before), P, eye(after)).reshape(
            -1, self.dim, self.dim
        )

    def forget(self) -> None:
        """The estimates have changed."""
        self.projector = None

    def cost(self) -> int:
        """Multiplications of one update for one parameter: the Gram matrix."""
        return self.left * self.dim * self.right * self.dim


Mode = LowRankPreconditioner | DensePreconditioner


def build_preconditioners(
    shape: Sequence[int], kernel: bool, max_dim: int, axis: Callable[[int], Axis]
) -> list[Mode]:
    """The products of a parameter of this shape, from its last axis to its first; `axis` makes the estimates of one.

    With `kernel` it lies as (outputs, kernel..., inputs) and all of the kernel is one product.
    """
    last = len(shape)
    blocks = (
        [range(2, last), range(1, 2), range(1)]
        if kernel
        else [range(a, a + 1) for a in reversed(range(last))]
    )
    places = [0, *range(2, last), 1] if kernel else list(range(last))
    sizes = [shape[a] for a in places]
    modes: list[Mode] = []
    for block in blocks:
        used = [a for a in reversed(block) if 1 < shape[a] <= max_dim]
        if not used:
            continue
        place = places.index(block[0])
        left, right = math.prod(sizes[:place]), math.prod(sizes[place + len(block) :])
        dim = math.prod(shape[a] for a in block)
        if dim > DENSE and len(block) == 1:
            modes.append(LowRankPreconditioner(left, dim, right, axis(used[0])))
        else:
            inside = [
                (math.prod(shape[block[0] : a]), axis(a), math.prod(shape[a + 1 : block[-1] + 1]))
                for a in used
            ]
            modes.append(DensePreconditioner(left, dim, right, inside))
    return modes

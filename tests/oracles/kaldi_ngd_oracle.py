"""Online natural gradient in plain float64, one parameter and one axis at a time.

It follows appendix A of arXiv:1410.7455 literally, is slow on purpose, and is what kaldi_ngd.py is
tested against. N, the number of rows, is kept as in the paper, and so is the expansion of Z_t
through K_t = J J' and L_t = H' H; the small constants are relative to the gradient, as there.
"""

import torch
from torch import Tensor

DELTA, CONDITION = 5e-4, 1e6


class Axis:
    """The Fisher factor F_t = R_t' D_t R_t + rho_t I of one axis of length `dim`."""

    def __init__(self, dim: int, rank=32, alpha=4.0, eta=0.1, period=4, phase=0) -> None:
        self.D, self.R = dim, min((dim + 1) // 2, rank)
        self.alpha, self.eta, self.period, self.phase = alpha, eta, period, phase
        rows = torch.zeros(self.R, dim, dtype=torch.float64)
        for i in range(self.R):
            rows[i, i :: self.R] = 1.0
            rows[i, i] = 1.1
        rows /= rows.norm(dim=1, keepdim=True)
        self.W = rows / (2 + (dim + self.R) * alpha / dim) ** 0.5
        self.rho = 0.0  # not yet known
        self.d = torch.zeros(self.R, dtype=torch.float64)
        self.t = 0

    def precondition(self, X: Tensor) -> Tensor:
        """X (N, D) through F_t^-1 as estimated so far, then the estimate is taken one step on."""
        N = len(X)
        g0 = float((X * X).sum())
        self.t += 1
        if self.t == 1:
            for _ in range(1 if N <= self.R else 3):
                self.update(X, g0)
        H = X @ self.W.T
        out = X - H @ self.W
        if self.t <= 10 or (self.t + self.phase) % self.period == 0:
            self.update(X, g0)
        return out * (g0 / float((out * out).sum())) ** 0.5

    def update(self, X: Tensor, g0: float) -> None:
        N, D, R, W, eta = len(X), self.D, self.R, self.W, self.eta
        # ours: no direction counts for less than this, so that none drowns in rounding
        missing = max(0.0, DELTA * g0 / (N * D) - self.rho)
        d, rho = self.d + missing, self.rho + missing
        H = X @ W.T
        J, L = H.T @ X, H.T @ H
        K = J @ J.T
        e = (W * W).sum(1)  # = E_t; of W_0 too, whose d and rho are not known yet
        left, kept = (eta / N) * e**-0.5, (1 - eta) * (d + rho) * e**-0.5
        # Y = left J + kept W and J W' = L, W W' = E
        Z = (
            left[:, None] * K * left
            + left[:, None] * L * kept
            + kept[:, None] * L * left
            + torch.diag(kept**2 * e)
        )
        c, U = torch.linalg.eigh(Z)
        c, U = c.flip(0), U.flip(1)
        limit = (rho * (1 - eta)) ** 2
        bad = bool(c[0] > CONDITION * c[-1]) or bool((c < limit).any())
        s = c.clamp(min=limit).sqrt()
        rho = ((eta / N) * g0 + (1 - eta) * (D * rho + float(d.sum())) - float(s.sum())) / (D - R)
        floor = DELTA * float(s.norm())  # ours: Kaldi's is relative to the largest
        bad_d = bool((s - rho < floor).any()) or rho < floor
        self.d = (s - rho).clamp(min=floor)
        self.rho = max(rho, floor)
        beta = self.rho * (1 + self.alpha) + self.alpha * float(self.d.sum()) / D
        e = self.d / (beta + self.d)  # E_t, the diagonal of W_t W_t'
        rows = (U.T @ (left[:, None] * J + kept[:, None] * W)) / s[:, None]
        if bad or bad_d:
            Q, T = torch.linalg.qr(rows.T)
            rows = Q.T * torch.sign(T.diagonal())[:, None]
        self.W = e.sqrt()[:, None] * rows


class Oracle:
    """The direction of one parameter: its axes precondition it in turn, the last one first."""

    def __init__(self, shape: tuple[int, ...], max_dim: int = 4096, **settings: float) -> None:
        self.axes = {
            axis: Axis(dim, **settings)  # type: ignore[arg-type]
            for axis, dim in enumerate(shape)
            if 1 < dim <= max_dim
        }

    def __call__(self, gradient: Tensor) -> Tensor:
        X = gradient.double()
        for a in sorted(self.axes, reverse=True):
            moved = X.movedim(a, -1)
            X = (
                self.axes[a]
                .precondition(moved.reshape(-1, moved.shape[-1]))
                .view(moved.shape)
                .movedim(-1, a)
            )
        return X

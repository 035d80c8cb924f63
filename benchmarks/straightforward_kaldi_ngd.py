"""Online natural gradient in the way of its PyTorch ports: an object per axis, Python numbers.

optimizer_step.py compares KaldiNGD with it. The mathematics is that of arXiv:1410.7455, appendix A,
in the dtype of the parameter, for every axis of every parameter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

EPSILON, DELTA = 1e-10, 5e-4


class OnlineNaturalGradient:
    """The running low-rank estimate of the Fisher matrix of one axis."""

    def __init__(
        self, rank: int = 32, alpha: float = 4.0, eta: float = 0.1, period: int = 4
    ) -> None:
        self.rank, self.alpha, self.eta, self.period = rank, alpha, eta, period
        self.t = 0

    def start(self, X: Tensor) -> None:
        """Initialise the estimate from the first gradient, X of shape (N, D)."""
        N, D = X.shape
        R = min((D + 1) // 2, self.rank)
        rows = torch.zeros(R, D, dtype=X.dtype, device=X.device)
        for i in range(R):
            rows[i, i::R] = 1.0
            rows[i, i] = 1.1
        rows /= rows.norm(dim=1, keepdim=True)
        self.W = rows / (2 + (D + R) * self.alpha / D) ** 0.5
        self.rho = EPSILON
        self.d = torch.full((R,), EPSILON, dtype=X.dtype, device=X.device)
        for _ in range(1 if N <= R else 3):
            self.update(X, X @ self.W.T)

    def precondition(self, X: Tensor) -> Tensor:
        """Return X (N, D) times the inverse of the estimate, scaled to the norm of X."""
        if self.t == 0:
            self.start(X)
        before = (X * X).sum().item()
        if before == 0:
            return X
        H = X @ self.W.T
        out = X - H @ self.W
        if self.t < 10 or self.t % self.period == 0:
            self.update(X, H)
        self.t += 1
        after = (out * out).sum().item()
        return out * (before / after) ** 0.5

    def update(self, X: Tensor, H: Tensor) -> None:
        """Update the estimate with X (N, D) and H = X W' (N, R)."""
        (N, D), R, W, eta = X.shape, len(self.d), self.W, self.eta
        J = H.T @ X
        L, K = H.T @ H, J @ J.T
        total = self.d.sum().item()
        beta = self.rho * (1 + self.alpha) + self.alpha * total / D
        e = self.d / (beta + self.d)
        left, kept = (eta / N) * e**-0.5, (1 - eta) * (self.d + self.rho) * e**-0.5
        Z = (
            left[:, None] * K * left
            + left[:, None] * L * kept
            + kept[:, None] * L * left
            + torch.diag(kept**2 * e)
        )
        scale = max(1.0, Z.trace().item())
        c, U = torch.linalg.eigh(Z / scale)
        c, U = c.flip(0) * scale, U.flip(1)
        s = c.clamp(min=(self.rho * (1 - eta)) ** 2).sqrt()
        norm = (X * X).sum().item()
        rho = ((eta / N) * norm + (1 - eta) * (D * self.rho + total) - s.sum().item()) / (D - R)
        floor = max(EPSILON, DELTA * s.max().item())
        self.d = (s - rho).clamp(min=floor)
        self.rho = max(rho, floor)
        beta = self.rho * (1 + self.alpha) + self.alpha * self.d.sum().item() / D
        e = self.d / (beta + self.d)
        self.W = (e.sqrt() / s)[:, None] * (U.T @ (left[:, None] * J + kept[:, None] * W))


class StraightforwardNGD(torch.optim.Optimizer):
    """SGD with momentum on gradients that are preconditioned axis by axis."""

    def __init__(
        self,
        params: Any,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        **settings: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.settings = settings

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Precondition and step one parameter after the other."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["axes"] = {
                        a: OnlineNaturalGradient(**self.settings)
                        for a in range(p.ndim)
                        if p.shape[a] > 1
                    }
                    state["momentum"] = torch.zeros_like(p)
                X = p.grad
                if group["weight_decay"]:
                    X = X.add(p, alpha=group["weight_decay"])
                for a, axis in state["axes"].items():
                    axis_last = X.movedim(a, -1)
                    X = (
                        axis.precondition(axis_last.reshape(-1, axis_last.shape[-1]))
                        .view(axis_last.shape)
                        .movedim(-1, a)
                    )
                state["momentum"].mul_(group["momentum"]).add_(X)
                p.add_(state["momentum"], alpha=-group["lr"])

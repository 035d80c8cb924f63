"""The direction of NGD in plain float64, one matrix at a time, by other means than ngd.py's.

It follows the head of ngd.py with orthonormal bases by QR factors and powers of matrices by
eigenvectors, is slow on purpose, and is what ngd.py is tested against.
"""

import torch
from torch import Tensor

FLOOR, KEPT, RIDGE, SAMPLE = 1e-7, 1e-5, 1e-10, 4


class Oracle:
    """The steps of one matrix (outputs, inputs) at learning rate 1, without weight decay."""

    def __init__(self, shape: tuple[int, int], *, rank=32, momentum=0.6, nesterov=True) -> None:
        self.outputs, self.inputs = shape
        self.D = min(shape)
        self.r = min((self.D + 1) // 2, rank)
        self.mu, self.nesterov = momentum, nesterov
        self.mean = torch.zeros(shape, dtype=torch.float64)
        rows = torch.zeros(self.r, self.D, dtype=torch.float64)
        for i in range(self.r):
            rows[i, i :: self.r] = 1.0
        self.R = rows / rows.norm(dim=1, keepdim=True)

    def __call__(self, gradient: Tensor) -> Tensor:
        g = gradient.double()
        self.mean = self.mu * self.mean + (1 - self.mu) * g
        M = self.mu * self.mean + (1 - self.mu) * g if self.nesterov else self.mean
        X = M if self.outputs <= self.inputs else M.T
        self.follow(X)
        direction = self.inverse_root_of_F(X) @ X
        direction = direction if self.outputs <= self.inputs else direction.T
        length = (self.D * max(1, self.outputs / self.inputs)) ** 0.5
        return -length * direction / direction.norm()

    def follow(self, X: Tensor) -> None:
        """Two steps of subspace iteration; directions in which X is nothing stay as they are."""
        step = max(1, min(SAMPLE, X.shape[1] // (2 * self.r)))
        for part in (X[:, ::step], X):
            G = self.R @ part @ part.T @ self.R.T
            C = torch.linalg.cholesky(G + RIDGE * G.trace() * torch.eye(self.r))
            Y = torch.linalg.inv(C) @ self.R @ part @ part.T + KEPT * X.norm() * self.R
            basis, T = torch.linalg.qr(Y.T)
            self.R = torch.sign(T.diagonal())[:, None] * basis.T

    def inverse_root_of_F(self, X: Tensor) -> Tensor:
        """F^(-1/2) (D, D) of F = R'SR + rho (I - R'R), by the eigenvectors of F."""
        R, size = self.R, float(X.square().sum())
        S = R @ X @ X.T @ R.T
        rho = max((size - float(S.trace())) / max(1, self.D - self.r), FLOOR * size)
        S = S + FLOOR * size * torch.eye(self.r)
        F = R.T @ S @ R + rho * (torch.eye(self.D) - R.T @ R)
        values, vectors = torch.linalg.eigh(F)
        return vectors @ torch.diag(values**-0.5) @ vectors.T

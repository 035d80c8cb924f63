"""What other people's training loops do with our optimizers; run where only the wheel is installed.

What an optimizer promises by itself is in unit/test_optim.py.

python tests/foreign_loop.py            # prints {"NGD one_cycle": "", ...}: '' or what went wrong
"""

from __future__ import annotations

import copy
import io
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from faster_training import LAMB, LARS, NGD, SLAMB
from torch import Tensor, nn

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "NGD": NGD,
    "SLAMB": SLAMB,
    "LAMB": LAMB,
    "LARS": LARS,
}
RATES = {"NGD": 0.05, "SLAMB": 0.02, "LAMB": 0.02, "LARS": 2.0}


class Loop:
    """A small regression problem and someone's loop."""

    def __init__(self, name: str) -> None:
        self.make, self.lr = OPTIMIZERS[name], RATES[name]
        torch.manual_seed(0)
        self.model = nn.Sequential(
            # no bias in front of the normalisation: its gradient would be rounding errors, which
            # Adam's step magnifies
            nn.Conv2d(2, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(),
            nn.Linear(96, 128), nn.Tanh(), nn.Linear(128, 3),
        )  # fmt: skip
        self.x, self.y = torch.randn(32, 2, 4, 4), torch.randn(32, 3)

    def loss(self, model: nn.Module | None = None) -> Tensor:
        return ((model or self.model)(self.x) - self.y).square().mean()

    def new(self, params: Any = None, **settings: Any) -> torch.optim.Optimizer:
        return self.make(
            self.model.parameters() if params is None else params, lr=self.lr, **settings
        )

    def train(
        self, optimizer: torch.optim.Optimizer, steps: int = 8, after: Callable[[], Any] = int
    ) -> None:
        """Take steps, after each of which something is called, and assert that the loss falls."""
        before = self.loss().item()
        for _ in range(steps):
            optimizer.zero_grad()
            self.loss().backward()
            optimizer.step()
            after()
        assert self.loss().item() < before, f"the loss went from {before} to {self.loss().item()}"


def one_cycle(loop: Loop) -> None:
    optimizer = loop.new()
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=loop.lr, total_steps=12)
    loop.train(optimizer, after=schedule.step)
    assert optimizer.param_groups[0]["lr"] < loop.lr


def grad_scaler_with_clipping(loop: Loop) -> None:
    optimizer, scaler = loop.new(amp_scaling=False), torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = loop.loss().item()
    for step in range(8):
        optimizer.zero_grad()
        scaler.scale(loop.loss()).backward()
        weights = [p.detach().clone() for p in loop.model.parameters()]
        if step == 3:
            next(loop.model.parameters()).grad.view(-1)[0] = float("inf")
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        same = all(torch.equal(p, q) for p, q in zip(loop.model.parameters(), weights))
        assert same == (step == 3)
    assert loop.loss().item() < before


def compiled_model(loop: Loop) -> None:
    model = torch.compile(loop.model, backend="aot_eager")
    optimizer = loop.new(model.parameters())
    before = loop.loss().item()
    for _ in range(6):
        optimizer.zero_grad()
        loop.loss(model).backward()
        optimizer.step()
    assert loop.loss().item() < before


def resuming_bit_for_bit(loop: Loop) -> None:
    optimizer = loop.new()
    loop.train(optimizer, 5)
    file = io.BytesIO()
    torch.save({"model": loop.model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    loop.train(optimizer, 5)
    twin = copy.deepcopy(loop)
    twin.model.load_state_dict(state["model"])
    other = twin.new()
    other.load_state_dict(state["optimizer"])
    twin.train(other, 5)
    assert all(torch.equal(p, q) for p, q in zip(loop.model.parameters(), twin.model.parameters()))


CHECKS = (one_cycle, grad_scaler_with_clipping, compiled_model, resuming_bit_for_bit)


def main() -> None:
    torch.set_num_threads(1)
    results = {}
    for name in OPTIMIZERS:
        for check in CHECKS:
            try:
                check(Loop(name))
                results[f"{name} {check.__name__}"] = ""
            except Exception:
                results[f"{name} {check.__name__}"] = traceback.format_exc()
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()

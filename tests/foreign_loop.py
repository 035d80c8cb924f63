"""What other people's training loops do with our optimizers; run where only the wheel is installed.

python tests/foreign_loop.py            # prints {"NGD one_cycle": "", ...}: '' or what went wrong
"""

from __future__ import annotations

import copy
import io
import json
import pickle
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


def closure(loop: Loop) -> None:
    optimizer = loop.new()

    def compute() -> Tensor:
        optimizer.zero_grad()
        loss = loop.loss()
        loss.backward()
        return loss

    losses = [optimizer.step(compute).item() for _ in range(8)]
    assert losses[-1] < losses[0]


def late_group(loop: Loop) -> None:
    parameters = list(loop.model.parameters())
    optimizer = loop.new(parameters[:3])
    loop.train(optimizer, 3)
    before = parameters[3].detach().clone()
    optimizer.add_param_group({"params": parameters[3:], "lr": loop.lr / 2})
    loop.train(optimizer, 5)
    assert not torch.equal(parameters[3], before)


def rate_in_a_tensor(loop: Loop) -> None:
    twin = copy.deepcopy(loop)
    optimizer, other = loop.new(), twin.new()
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(loop.lr)
    for each, own in ((loop, optimizer), (twin, other)):
        each.train(own, 2)
    for p, q in zip(loop.model.parameters(), twin.model.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


def compiled_model(loop: Loop) -> None:
    model = torch.compile(loop.model, backend="aot_eager")
    optimizer = loop.new(model.parameters())
    before = loop.loss().item()
    for _ in range(6):
        optimizer.zero_grad()
        loop.loss(model).backward()
        optimizer.step()
    assert loop.loss().item() < before


def pickling(loop: Loop) -> None:
    optimizer = loop.new()
    loop.train(optimizer, 3)
    model, other = pickle.loads(pickle.dumps((loop.model, optimizer)))
    twin = copy.copy(loop)
    twin.model = model
    loop.train(optimizer, 3)
    twin.train(other, 3)
    assert all(torch.equal(p, q) for p, q in zip(loop.model.parameters(), model.parameters()))


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


def accumulation_and_set_to_zero(loop: Loop) -> None:
    optimizer = loop.new()
    before = loop.loss().item()
    for _ in range(6):
        optimizer.zero_grad(set_to_none=False)
        for part in range(2):
            rows = slice(16 * part, 16 * part + 16)
            ((loop.model(loop.x[rows]) - loop.y[rows]).square().mean() / 2).backward()
        optimizer.step()
    assert loop.loss().item() < before


CHECKS = (
    one_cycle,
    grad_scaler_with_clipping,
    closure,
    late_group,
    rate_in_a_tensor,
    compiled_model,
    pickling,
    resuming_bit_for_bit,
    accumulation_and_set_to_zero,
)


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

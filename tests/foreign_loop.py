"""What other people's training loops do with our optimizers; run where only the wheel is installed.

python tests/foreign_loop.py            # prints {"NGD one_cycle": "", ...}: '' or what went wrong

What an optimizer promises by itself is in unit/test_optim.py.
"""

from __future__ import annotations

import copy
import io
import json
import sys
import traceback
from collections.abc import Callable

import torch
from faster_training import LAMB, LARS, NGD, SLAMB
from torch import Tensor, nn

RATES = {NGD: 0.05, SLAMB: 0.02, LAMB: 0.02, LARS: 2.0}


class Loop:
    """Someone's loop, in which a small regression problem is learned."""

    def __init__(self, make: type[torch.optim.Optimizer], **settings: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            # no bias in front of the normalisation: its gradient would be rounding errors, which
            # Adam's step magnifies
            nn.Conv2d(2, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(),
            nn.Linear(96, 128), nn.Tanh(), nn.Linear(128, 3),
        )  # fmt: skip
        self.x, self.y = torch.randn(32, 2, 4, 4), torch.randn(32, 3)
        self.optimizer = make(self.model.parameters(), lr=RATES[make], **settings)

    def loss(self) -> Tensor:
        return (self.model(self.x) - self.y).square().mean()

    def train(self, steps: int, after: Callable[[], object] = int) -> None:
        before = self.loss().item()
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.loss().backward()
            self.optimizer.step()
            after()
        assert self.loss().item() < before, f"the loss went from {before} to {self.loss().item()}"


def one_cycle(make: type[torch.optim.Optimizer]) -> None:
    loop, schedulers = Loop(make), torch.optim.lr_scheduler
    schedule = schedulers.OneCycleLR(loop.optimizer, max_lr=RATES[make], total_steps=12)
    loop.train(8, after=schedule.step)
    assert loop.optimizer.param_groups[0]["lr"] < RATES[make]


def grad_scaler_with_clipping(make: type[torch.optim.Optimizer]) -> None:
    loop, scaler = Loop(make), torch.amp.GradScaler("cpu")
    loop.optimizer._step_supports_amp_scaling = False
    for step in range(8):
        loop.optimizer.zero_grad()
        scaler.scale(loop.loss()).backward()
        before = copy.deepcopy(list(loop.model.parameters()))
        if step == 3:
            next(loop.model.parameters()).grad.view(-1)[0] = float("inf")
        scaler.unscale_(loop.optimizer)
        nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
        scaler.step(loop.optimizer)
        scaler.update()
        same = all(torch.equal(p, q) for p, q in zip(loop.model.parameters(), before))
        assert same == (step == 3)


def compiled_and_resumed(make: type[torch.optim.Optimizer]) -> None:
    loop, other, file = Loop(make), Loop(make), io.BytesIO()
    for each in (loop, other):
        each.model.compile(backend="aot_eager")
    loop.train(5)
    torch.save([loop.model.state_dict(), loop.optimizer.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    other.model.load_state_dict(weights)
    other.optimizer.load_state_dict(state)
    for each in (loop, other):
        each.train(5)
    pairs = zip(loop.model.parameters(), other.model.parameters())
    assert all(torch.equal(p, q) for p, q in pairs)


def main() -> None:
    torch.set_num_threads(1)
    results = {}
    for make in RATES:
        for check in (one_cycle, grad_scaler_with_clipping, compiled_and_resumed):
            try:
                check(make)
                results[f"{make.__name__} {check.__name__}"] = ""
            except Exception:
                results[f"{make.__name__} {check.__name__}"] = traceback.format_exc()
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()

"""Parameters, gradients and steps for the tests of KaldiNGD."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from optimizers.kaldi_ngd import KaldiNGD

Shapes = Sequence[tuple[int, ...]]
# two alike, a convolution, biases, a scalar, a 3-d one laid out as a convolution, and one whose
# middle axis lies between two others
SHAPES: Shapes = [(40, 30), (40, 30), (20, 10, 3, 3), (7,), (7,), (), (30, 20, 4), (8, 20, 40)]
PLAIN = (3, 4, 5)  # those of SHAPES that are not preconditioned
SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}


def weights(shapes: Shapes = SHAPES, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def create_ngd(**settings: Any) -> KaldiNGD:
    return KaldiNGD(weights(), **(SGD | settings))


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def set_gradients(parameters: Sequence[Tensor], t: int, scale: float = 1.0) -> None:
    """Random gradients of step `t`, in the memory format of the parameters."""
    for number, p in enumerate(parameters):
        noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * t + number))
        p.grad = torch.empty_like(p, requires_grad=False).copy_(noise * scale)


def train(optimizer: Any, steps: Iterable[int], scale: float = 1.0) -> Any:
    for t in steps:
        set_gradients(parameters_of(optimizer), t, scale)
        optimizer.step()
    return optimizer


def snapshot(
    optimizer: KaldiNGD, numbers: Iterable[int] | None = None
) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Copies of parameters and of the tensors in their states."""
    some = (
        parameters_of(optimizer)
        if numbers is None
        else [parameters_of(optimizer)[number] for number in numbers]
    )
    tensors = [
        {
            name: value.clone()
            for name, value in optimizer.state[p].items()
            if isinstance(value, Tensor)
        }
        for p in some
    ]
    return [(p.detach().clone(), state) for p, state in zip(some, tensors)]


def estimates(optimizer: KaldiNGD, part: str = "axis") -> list[Tensor]:
    return [
        value for _, state in snapshot(optimizer) for name, value in state.items() if part in name
    ]


def assert_same(one: Any, other: Any, tolerance: float = 0.0) -> None:
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def distance(one: Tensor, other: Tensor) -> float:
    return float(
        (one.detach().double() - other.detach().double()).norm() / other.detach().double().norm()
    )


def through_a_file(optimizer: KaldiNGD, **settings: Any) -> KaldiNGD:
    """Returns an optimizer of copies of the parameters that loaded the state, with `settings`."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert all(
        isinstance(value, Tensor | int | float)
        for entry in state["state"].values()
        for value in entry.values()
    )
    state["param_groups"][0].update(settings)
    other = KaldiNGD([nn.Parameter(p.detach().clone()) for p in parameters_of(optimizer)], lr=7.0)
    other.load_state_dict(state)
    return other

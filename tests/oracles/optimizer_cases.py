"""Parameters, gradients and steps for the tests of NGD and KaldiNGD."""

import io
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

Shapes = Sequence[tuple[int, ...]]


def weights(shapes: Shapes, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def copied(parameters: Iterable[Tensor]) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().clone()) for p in parameters]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def set_gradients(parameters: Sequence[Tensor], t: int, scale: float = 1.0) -> None:
    """Random gradients of step `t`, in the memory format of the parameters."""
    for number, p in enumerate(parameters):
        noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * t + number))
        p.grad = torch.empty_like(p, requires_grad=False).copy_(noise * scale)


def train(optimizer, steps: Iterable[int], scale: float = 1.0):
    for t in steps:
        set_gradients(parameters_of(optimizer), t, scale)
        optimizer.step()
    return optimizer


def snapshot(optimizer: torch.optim.Optimizer) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Copies of parameters and of the tensors in their states."""
    tensors = [
        {n: value.clone() for n, value in optimizer.state[p].items() if isinstance(value, Tensor)}
        for p in parameters_of(optimizer)
    ]
    return [(p.detach().clone(), state) for p, state in zip(parameters_of(optimizer), tensors)]


def assert_same(one, other, tolerance: float = 0.0) -> None:
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def distance(one: Tensor, other: Tensor) -> float:
    one, other = one.detach().double(), other.detach().double()
    return float((one - other).norm() / other.norm())


def through_a_file(optimizer: torch.optim.Optimizer):
    """An optimizer of copies of the parameters that loaded the state."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other = type(optimizer)(copied(parameters_of(optimizer)), lr=7.0)
    other.load_state_dict(state)
    return other


def correlated(shape: Sequence[int], steps: int, seed=1, decay=3.0, spike=0.0):
    """Yield random float64 gradients, mixed along each axis by an ill-conditioned matrix.

    Its spectrum falls by `decay` decades. At steps 20 to 24 a gradient of rank one, `spike` times
    as large, is added.
    """
    generator = torch.Generator().manual_seed(seed)
    mixing = []
    for dim in shape:
        left, right = torch.randn(2, dim, dim, generator=generator, dtype=torch.float64)
        spectrum = torch.logspace(0, -decay, dim, dtype=torch.float64)
        mixing.append(torch.linalg.qr(left)[0] * spectrum @ right / dim**0.5)
    for step in range(steps):
        gradient = torch.randn(shape, generator=generator, dtype=torch.float64)
        if 20 <= step < 25:
            gradient = gradient + spike * gradient[:1]
        for axis, matrix in enumerate(mixing):
            gradient = torch.tensordot(gradient, matrix, dims=([axis], [0])).movedim(-1, axis)
        yield gradient

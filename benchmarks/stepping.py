"""Measure an optimizer: seconds of its steps, bytes of its state, operators of a step.

side = Side(model, NGD(model.parameters()), gradients)
side.warm_up()
side()          # mean seconds of a step over one update period
side.facts()
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ngd import NGD

PERIOD = 4  # steps between updates of both KaldiNGDs, and steps of a round
WARM_UP = 12  # steps; KaldiNGD updates all estimates in the first ten
COUNTED_STEP = 5  # the warm-up step whose operators are counted


def clock(work: Callable[[], Any]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def state_bytes(optimizer: Any, prefix: str = "") -> int:
    """Return the bytes of all tensors in the state whose key starts with `prefix`."""
    return sum(
        tensor.numel() * tensor.element_size()
        for state in optimizer.state.values()
        for name, value in state.items()
        if name.startswith(prefix)
        for tensor in tensors(value)
    )


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in a tensor, a container or the attributes of an object."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | tuple | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors(part)
    elif hasattr(value, "__dict__"):
        yield from tensors(vars(value))


class Operators(TorchDispatchMode):
    """Counts the ATen operators that are launched, without views.

    A foreach or fused operator counts once for each of its tensors. `syncs` counts reads of a
    tensor by the host.
    """

    def __init__(self) -> None:
        super().__init__()
        self.all = self.syncs = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, inputs: Any = (), options: Any = None
    ) -> Any:
        listed = func.overloadpacket.__name__.startswith(("_foreach_", "_fused_"))
        self.all += len(inputs[0]) if listed else not func.is_view
        self.syncs += func.overloadpacket is torch.ops.aten._local_scalar_dense
        return func(*inputs, **(options or {}))


@dataclass
class Side:
    """An optimizer on its own copy of the model; a call measures one period of steps.

    Attributes:
        model: a copy.
        optimizer: of its parameters.
        gradients: of each batch, which it takes in turn.
        period: how many steps make one: those after which its rare work comes again.
        operators: counted in one step of the warm-up.
        seconds: of each step of each round (rounds, steps).
        steps: taken so far.
    """

    model: nn.Module
    optimizer: Any
    gradients: list[list[Tensor | None]]
    period: int = PERIOD
    operators: Operators = field(default_factory=Operators)
    seconds: list[list[float]] = field(default_factory=list)
    steps: int = 0

    def set_gradients(self) -> None:
        """Give the parameters their next gradients."""
        for p, gradient in zip(
            self.model.parameters(), self.gradients[self.steps % len(self.gradients)]
        ):
            p.grad = gradient
        self.steps += 1

    def warm_up(self) -> None:
        """Take the first steps, and count the operators of one of them."""
        for number in range(WARM_UP):
            self.set_gradients()
            if number == COUNTED_STEP:
                with self.operators:
                    self.optimizer.step()
            else:
                self.optimizer.step()

    def __call__(self) -> float:
        """Return the mean seconds of a step over one period."""
        self.seconds.append([])
        for _ in range(self.period):
            self.set_gradients()
            self.seconds[-1].append(clock(self.optimizer.step))
        return statistics.mean(self.seconds[-1])

    def facts(self) -> dict[str, Any]:
        """Return operators, host reads, and bytes per weight for the table."""
        weights = sum(p.numel() for p in self.model.parameters())
        scratch = 0  # what NGD keeps besides its state
        if isinstance(self.optimizer, NGD):
            (groups,) = self.optimizer.batches.values()
            batches = [b for lists in groups for together in lists for b in together]
            storages = {b.X.untyped_storage().data_ptr(): b.X.untyped_storage() for b in batches}
            scratch = sum(storage.nbytes() for storage in storages.values())
        return {
            "operators": self.operators.all,
            "syncs": self.operators.syncs,
            "state_bytes": state_bytes(self.optimizer) / weights,
            "factor_bytes": (
                state_bytes(self.optimizer, "axis") + state_bytes(self.optimizer, "directions")
            )
            / weights,  # the keys of KaldiNGD and NGD
            "scratch_bytes": scratch / weights,
        }

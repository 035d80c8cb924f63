"""What is measured of an optimizer: seconds of its steps, bytes of its state, operators of a step.

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

PERIOD = 4  # steps between updates of both NGDs; a round of everything else
WARM_UP = 12  # steps: the first ten update all estimates, and the first starts them
COUNTED = 5  # the step, of those, whose operators are counted


def clock(work: Callable[[], Any]) -> float:
    """Seconds of a call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def state_bytes(optimizer: Any, prefix: str = "") -> int:
    """Bytes of all tensors that an optimizer keeps of the parameters, of those whose key starts with `prefix`."""
    return sum(
        tensor.numel() * tensor.element_size()
        for state in optimizer.state.values()
        for name, value in state.items()
        if name.startswith(prefix)
        for tensor in tensors(value)
    )


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in a tensor, a dict, a tuple or an object."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | tuple | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors(part)
    elif hasattr(value, "__dict__"):
        yield from tensors(vars(value))


class Operators(TorchDispatchMode):
    """Counts the ATen operators that are launched: views are not, a foreach or fused one counts for each of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.all = self.syncs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        listed = func.overloadpacket.__name__.startswith(("_foreach_", "_fused_"))
        self.all += len(args[0]) if listed else not func.is_view
        self.syncs += func.overloadpacket is torch.ops.aten._local_scalar_dense
        return func(*args, **(kwargs or {}))


@dataclass
class Side:
    """An optimizer on its own copy of the model."""

    model: nn.Module
    optimizer: Any
    gradients: list[list[Tensor | None]]
    operators: Operators = field(default_factory=Operators)
    seconds: list[list[float]] = field(default_factory=list)  # of each step, a list a round
    done: int = 0

    def set_gradients(self) -> None:
        """The next ones."""
        for p, gradient in zip(
            self.model.parameters(), self.gradients[self.done % len(self.gradients)]
        ):
            p.grad = gradient
        self.done += 1

    def warm_up(self) -> None:
        """The first steps; one of them under the counter."""
        for number in range(WARM_UP):
            self.set_gradients()
            if number == COUNTED:
                with self.operators:
                    self.optimizer.step()
            else:
                self.optimizer.step()

    def __call__(self) -> float:
        """Mean seconds of a step over a period."""
        self.seconds.append([])
        for _ in range(PERIOD):
            self.set_gradients()
            self.seconds[-1].append(clock(self.optimizer.step))
        return statistics.mean(self.seconds[-1])

    def worst(self) -> float:
        """Seconds of the longest step of the period, each the median over the rounds."""
        return max(map(statistics.median, zip(*self.seconds)))

    def facts(self) -> dict[str, Any]:
        """For the table: operators, and bytes a weight."""
        weights = sum(p.numel() for p in self.model.parameters())
        scratch = 0  # what our NGD keeps besides its state
        if isinstance(self.optimizer, NGD) and self.optimizer.schedule is not None:
            buffers = tensors(self.optimizer.schedule.scratch)
            scratch = sum(t.numel() * t.element_size() for t in buffers)
        return {
            "operators": self.operators.all,
            "syncs": self.operators.syncs,
            "state_bytes": state_bytes(self.optimizer) / weights,
            "factor_bytes": state_bytes(self.optimizer, "axis")
            / weights,  # of ours: its keys start so
            "scratch_bytes": scratch / weights,
        }

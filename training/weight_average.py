"""An exponential moving average of the weights over the steps of a run.

average = WeightAverage(model, decay=0.999)
average.update(model)                     # after each step
evaluate(average.model, ...)              # a model of its own

Averaged weights are those of a longer schedule: they make up for a learning rate that is still
large (Polyak and Juditsky, 1992). After t steps the weights of the last step count by

    1 - min(decay, t / (t + 10)),

so that a short run does not keep its first weights (as in timm, with another constant). BatchNorm's
statistics are averaged in the same way.
"""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from training.checkpoint import load_into, to_cpu

FIRST_STEPS = 10  # steps after which the decay is a half at most


class WeightAverage:
    """torch's AveragedModel with a decay that rises from 0, and without its waiting for the GPU.

    Args:
        model: whose weights are averaged; a copy of it is made.
        decay: the weight of the average in the next one, in the long run.

    Attributes:
        model: the model with the averaged weights.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self.steps = decay, 0
        self.model = copy.deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take a step's weights into the average; those of the first step are the average."""
        self.steps += 1
        decay = min(self.decay, self.steps / (self.steps + FIRST_STEPS)) if self.steps > 1 else 0.0
        floats: list[tuple[Tensor, Tensor]] = []
        counts: list[tuple[Tensor, Tensor]] = []  # of batches
        averages, values = (chain(m.parameters(), m.buffers()) for m in (self.model, model))
        for pair in zip(averages, values):
            (floats if pair[0].is_floating_point() else counts).append(pair)
        torch._foreach_lerp_([each for each, _ in floats], [v for _, v in floats], 1 - decay)
        if counts:
            torch._foreach_copy_([each for each, _ in counts], [v for _, v in counts])

    def state_dict(self) -> dict[str, Any]:
        """The averaged weights, and the number of steps that they are of."""
        return {"weights": self.model.state_dict(), "steps": self.steps}

    def own_state(self) -> dict[str, Tensor]:
        """The averaged BatchNorm statistics, which are each rank's own until an evaluation."""
        names = {name for name, _ in self.model.named_buffers()}
        weights = self.model.state_dict()
        return {name: to_cpu(weights[name]) for name in weights if name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_into(self.model, state["weights"], "averaged model")
        self.steps = state["steps"]

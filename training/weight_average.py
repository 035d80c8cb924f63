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

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from training.checkpoint import load_into, to_cpu

FIRST_STEPS = 10  # steps after which the decay is a half at most


class WeightAverage:
    """torch.optim.swa_utils.AveragedModel with a decay that rises from 0.

    Args:
        model: whose weights are averaged; a copy of it is made.
        decay: the weight of the average in the next one, in the long run.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self.steps = decay, 0
        self.averaged = AveragedModel(model, multi_avg_fn=self._move, use_buffers=True)
        self.averaged.requires_grad_(False)
        self.averaged.n_averaged = self.averaged.n_averaged.cpu()  # else the host waits to read it

    @property
    def model(self) -> nn.Module:
        """The model with the averaged weights."""
        return self.averaged.module

    def update(self, model: nn.Module) -> None:
        """Take a step's weights into the average."""
        self.steps += 1
        self.averaged.update_parameters(model)

    @torch.no_grad()
    def _move(self, averages: Any, values: Any, _: Tensor | int) -> None:
        """Move averages of one dtype towards new values."""
        if not averages[0].is_floating_point():  # numbers of batches
            torch._foreach_copy_(averages, values)
            return
        decay = min(self.decay, self.steps / (self.steps + FIRST_STEPS))
        torch._foreach_lerp_(averages, values, 1 - decay)

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
        self.averaged.n_averaged.fill_(self.steps)

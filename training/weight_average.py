"""An exponential moving average of the weights over the steps of a run.

average = WeightAverage(model, decay=0.999)
average.update()                          # after each step
evaluate(average.model, ...)              # a model of its own

Averaged weights are those of a longer schedule: they make up for a learning rate that is still
large (Polyak and Juditsky, 1992). After t > 1 steps the weights of the last step count by

    1 - min(decay, t / (t + 10)),

so that a short run does not keep its first weights (as in timm, with another constant). BatchNorm's
statistics are averaged in the same way.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from training.checkpoint import load_into, to_cpu

OWN_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")  # of BatchNorm, of each rank
FIRST_STEPS = 10  # steps after which the decay is a half at most


class WeightAverage:
    """torch's AveragedModel with a decay that rises from 0, and without its waiting for the GPU.

    Args:
        model: whose weights are averaged; the attribute `model` is a copy with the averages.
        decay: the weight of the average in the next one, in the long run.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.start(model)

    def start(self, model: nn.Module) -> None:
        self.steps = 0
        self.model = copy.deepcopy(model).requires_grad_(False)
        # each average and its value, paired once: to walk the modules takes time in every step
        pairs = list(zip(*([*m.parameters(), *m.buffers()] for m in (self.model, model))))
        self.floats = [pair for pair in pairs if pair[0].is_floating_point()]
        self.counts = [pair for pair in pairs if not pair[0].is_floating_point()]  # of batches

    @torch.no_grad()
    def update(self) -> None:
        """Take a step's weights into the average; those of the first step are the average."""
        self.steps += 1
        decay = min(self.decay, self.steps / (self.steps + FIRST_STEPS)) if self.steps > 1 else 0.0
        averages, values = zip(*self.floats)
        torch._foreach_lerp_(averages, values, 1 - decay)
        if self.counts:
            averages, values = zip(*self.counts)
            torch._foreach_copy_(averages, values)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.model.state_dict(), "steps": self.steps}

    def own_state(self) -> dict[str, Tensor]:
        """The averaged BatchNorm statistics, which are each rank's own until an evaluation."""
        weights = self.model.state_dict()
        return {name: to_cpu(weights[name]) for name in weights if name.endswith(OWN_BUFFERS)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_into(self.model, state["weights"], "averaged model")
        self.steps = state["steps"]

"""What a step computes of a batch: loss and hits, of samples as they are or mixed.

task = classification(label_smoothing=0.1)
loss, hits, weight = task(model, inputs, labels)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mixup
from mixup import Mix

LossFn = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor, Tensor | None]]
"""(model, inputs, labels) -> (mean loss, number of hits, sum of the samples' lambda or None where nothing is mixed)."""


def classification(label_smoothing: float = 0.0) -> LossFn:
    """Cross-entropy in fp32 or wider and the number of correct predictions."""

    def task(model: nn.Module, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, None]:
        logits = model(inputs)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = F.cross_entropy(logits, labels, label_smoothing=label_smoothing)
        return loss, (logits.detach().argmax(1) == labels).sum(), None

    return task


class MixedCrossEntropy:
    """The task of `classification` on mixed samples; hits are weighted by lambda.

    Args:
        draw: (labels, height, width) -> how these are mixed; for texts the sizes mean nothing.
        inside: the model mixes its hidden representation itself: it is called with the inputs, the partners and lambda.
        label_smoothing: as usual.
    """

    def __init__(
        self, draw: Callable[[Tensor, int, int], Mix], inside: bool, label_smoothing: float = 0.0
    ) -> None:
        self.draw, self.inside, self.label_smoothing = draw, inside, label_smoothing

    def __call__(
        self, model: nn.Module, inputs: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.under(self.draw(labels, *inputs.shape[-2:]), model, inputs, labels)

    def under(
        self, mix: Mix, model: nn.Module, inputs: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The task with the samples mixed like this."""
        logits = (
            model(inputs, mix.partner, mix.weight)
            if self.inside
            else model(mixup.blend(inputs, mix))
        )
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = mixup.cross_entropy(logits, labels, mix=mix, label_smoothing=self.label_smoothing)
        return loss, mixup.num_correct(logits, labels, mix=mix), mix.weight.detach().sum()

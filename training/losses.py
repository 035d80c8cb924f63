"""What a training step computes of a batch: loss and correct predictions.

loss_fn = CrossEntropy(label_smoothing=0.1)
batch = loss_fn(model, inputs, labels)         # batch.loss, batch.num_correct, batch.mix_weight
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mixup
from mixup import Mix


class BatchLoss(NamedTuple):
    """What a loss function returns of a batch."""

    loss: Tensor  # (), the mean over the batch
    num_correct: Tensor  # (), correct predictions; of mixed samples each counts its label's weight
    mix_weight: Tensor | None = None  # (), sum of the samples' lambda; None: nothing is mixed


class LossFn(Protocol):
    """What the training loop asks of a loss."""

    def __call__(self, model: nn.Module, inputs: Tensor, labels: Tensor) -> BatchLoss:
        """Run the model on a batch (batch, ...) with labels (batch,), and compare."""
        ...


class CrossEntropy:
    """Cross-entropy in fp32 or wider.

    Args:
        label_smoothing: weight of the uniform distribution in the labels.
    """

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self.label_smoothing = label_smoothing

    def __call__(self, model: nn.Module, inputs: Tensor, labels: Tensor) -> BatchLoss:
        logits = at_least_fp32(model(inputs))
        loss = F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)
        return BatchLoss(loss, (logits.detach().argmax(1) == labels).sum())


class MixedCrossEntropy:
    """Cross-entropy of mixed samples.

    Args:
        sample_mix: (labels, height=, width=) -> partners and lambda for labels (batch,); of texts
            the sizes mean nothing.
        model_mixes: the model mixes its hidden representation itself: it is called with the inputs,
            the partners and lambda.
        label_smoothing: as of `CrossEntropy`.
    """

    def __init__(
        self,
        sample_mix: Callable[..., Mix],
        model_mixes: bool,
        *,
        label_smoothing: float = 0.0,
    ) -> None:
        self.sample_mix, self.model_mixes = sample_mix, model_mixes
        self.label_smoothing = label_smoothing

    def __call__(self, model: nn.Module, inputs: Tensor, labels: Tensor) -> BatchLoss:
        height, width = inputs.shape[-2:]
        mix = self.sample_mix(labels, height=height, width=width)
        return self.with_mix(mix, model, inputs=inputs, labels=labels)

    def with_mix(self, mix: Mix, model: nn.Module, *, inputs: Tensor, labels: Tensor) -> BatchLoss:
        """The loss with the samples mixed in a given way."""
        if self.model_mixes:
            logits = model(inputs, mix.partner, mix.weight)
        else:
            logits = model(mixup.blend(inputs, mix))
        logits = at_least_fp32(logits)
        return BatchLoss(
            mixup.cross_entropy(logits, labels, mix=mix, label_smoothing=self.label_smoothing),
            mixup.num_correct(logits, labels, mix=mix),
            mix.weight.detach().sum(),
        )


def at_least_fp32(logits: Tensor) -> Tensor:
    """Logits of autocast in fp32; wider ones as they are."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))

"""What a training step computes of a batch: loss and correct predictions.

loss_fn = CrossEntropy(label_smoothing=0.1)
batch = loss_fn(model, inputs, labels)         # batch.loss, batch.num_correct, batch.mix_weight
"""

from collections.abc import Callable
from typing import NamedTuple

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


LossFn = Callable[[nn.Module, Tensor, Tensor], BatchLoss]
"""Runs the model on a batch (batch, ...) with labels (batch,), and compares."""


class CrossEntropy:
    """Cross-entropy in fp32 or wider: the mean over the rows of - sum over c of w_c q_c log p_c.

    q is the label, p are the probabilities. As the mean is over rows, also with weights, it does
    not matter how the rows of a step are shared out among micro-batches and ranks.

    Args:
        label_smoothing: weight of the uniform distribution in the labels.
        class_weights: w, (classes,); None is 1.
    """

    def __init__(self, label_smoothing: float = 0.0, class_weights: Tensor | None = None) -> None:
        self.label_smoothing, self.class_weights = label_smoothing, class_weights

    def __call__(self, model: nn.Module, inputs: Tensor, labels: Tensor) -> BatchLoss:
        logits = at_least_fp32(model(inputs))
        weights = self.class_weights
        loss = F.cross_entropy(logits, labels, weights, label_smoothing=self.label_smoothing)
        if weights is not None:  # torch's mean is divided by the sum of the rows' weights
            loss = loss * weights[labels].mean()
        return BatchLoss(loss, (logits.detach().argmax(1) == labels).sum())


class MixedCrossEntropy:
    """Cross-entropy of mixed samples.

    Args:
        sample_mix: (labels, height=, width=) -> partners and lambda for labels (batch,); of texts
            the sizes mean nothing.
        model_mixes: the model mixes its hidden representation itself: it is called with the inputs,
            the partners and lambda.
        unmixed: the loss of samples that are not mixed, whose settings hold for mixed ones too.
        observe: is called with the logits, the labels and the mix of each batch of training.
        mixes: whether the samples of an epoch, counted from 0, are mixed; asked at its start.
    """

    def __init__(
        self,
        sample_mix: Callable[..., Mix],
        model_mixes: bool,
        *,
        unmixed: CrossEntropy | None = None,
        observe: Callable[[Tensor, Tensor, Mix], None] = lambda logits, labels, mix: None,
        mixes: Callable[[int], bool] = lambda epoch: True,
    ) -> None:
        self.sample_mix, self.model_mixes, self.observe = sample_mix, model_mixes, observe
        self.unmixed = unmixed or CrossEntropy()
        self.mixes, self.is_mixing = mixes, True

    def start_epoch(self, epoch: int) -> bool:
        """Decide whether samples are mixed in an epoch; return whether this is a change."""
        before = self.is_mixing
        self.is_mixing = self.mixes(epoch)
        return self.is_mixing != before

    def __call__(self, model: nn.Module, inputs: Tensor, labels: Tensor) -> BatchLoss:
        if not self.is_mixing:
            whole = torch.full((), float(len(labels)), device=labels.device)
            return self.unmixed(model, inputs, labels)._replace(mix_weight=whole)
        height, width = inputs.shape[-2:]
        mix = self.sample_mix(labels, height=height, width=width)
        if self.model_mixes:
            logits = at_least_fp32(model(inputs, mix.partner, mix.weight))
        else:
            logits = at_least_fp32(model(mixup.blend(inputs, mix)))
        self.observe(logits, labels, mix)
        loss = mixup.cross_entropy(
            logits,
            labels,
            mix=mix,
            label_smoothing=self.unmixed.label_smoothing,
            class_weights=self.unmixed.class_weights,
        )
        num_correct = mixup.num_correct(logits, labels, mix=mix)
        return BatchLoss(loss, num_correct, mix.weight.detach().sum())


def at_least_fp32(logits: Tensor) -> Tensor:
    """Logits of autocast in fp32; wider ones as they are."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))

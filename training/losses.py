"""What a training step computes of a batch: loss and correct predictions.

loss_fn = CrossEntropy(label_smoothing=0.1)
batch = loss_fn(model, inputs, labels)         # batch.loss, batch.num_correct, batch.mix_weight
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
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
"""Runs the model on a batch (batch, ...) with labels (batch,) or (batch, classes), and compares."""


@dataclass(eq=False)
class CrossEntropy:
    """Cross-entropy in fp32 or wider: the mean over the rows of - sum over c of w_c q_c log p_c.

    q is the label, p are the probabilities. As the mean is over rows, also with weights, it does
    not matter how the rows of a step are shared out among micro-batches and ranks.
    """

    label_smoothing: float = 0.0  # weight of the uniform distribution in the labels
    class_weights: Tensor | None = None  # w, (classes,); None is 1

    def __call__(self, model: nn.Module, inputs: Tensor, labels: Tensor) -> BatchLoss:
        return self.compare(at_least_fp32(model(inputs)), labels)

    def compare(self, logits: Tensor, labels: Tensor) -> BatchLoss:
        """Compare the logits (batch, classes) of samples with their labels."""
        weights = None if self.class_weights is None else self.class_weights.to(logits.dtype)
        loss = F.cross_entropy(logits, labels, weights, label_smoothing=self.label_smoothing)
        if weights is not None:  # torch's mean is divided by the sum of the rows' weights
            loss = loss * weights[labels].mean()
        return BatchLoss(loss, is_right(logits.detach(), labels).sum())

    def compare_mixed(self, logits: Tensor, labels: Tensor, mix: Mix) -> BatchLoss:
        """Compare the logits of mixed samples with the labels of the unmixed batch."""
        loss = mixup.cross_entropy(
            logits,
            labels,
            mix=mix,
            label_smoothing=self.label_smoothing,
            class_weights=self.class_weights,
        )
        num_correct = mixup.num_correct(logits, labels, mix=mix)
        return BatchLoss(loss, num_correct, mix.weight.detach().sum())


class BinaryCrossEntropy(CrossEntropy):
    """Cross-entropy of rows with several labels: that of each class, added up over the classes.

    It is the mean over the rows of - sum over c of w_c q_c log p_c + (1 - q_c) log(1 - p_c). q_c is
    1 where the row has the label c, else 0; p_c is the sigmoid of its logit; the weights are of
    the labels that rows have. As a sum it has gradients as large as those of one label a row. A row
    is predicted correctly where all its labels are. `label_smoothing` is the weight of 1/2 in q.
    """

    def compare(self, logits: Tensor, labels: Tensor) -> BatchLoss:
        loss = self._loss(logits, labels.to(logits.dtype))
        return BatchLoss(loss, is_right(logits.detach(), labels).sum())

    def compare_mixed(self, logits: Tensor, labels: Tensor, mix: Mix) -> BatchLoss:
        partners = labels.index_select(0, mix.partner)
        own, other = (is_right(logits.detach(), each) for each in (labels, partners))
        weight = mix.weight[:, None].to(logits.dtype)
        targets = torch.lerp(partners.to(logits.dtype), labels.to(logits.dtype), weight)
        num_correct = (mix.weight * own + (1 - mix.weight) * other).sum()
        return BatchLoss(self._loss(logits, targets), num_correct, mix.weight.detach().sum())

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        smooth = targets + self.label_smoothing * (0.5 - targets)
        loss = F.binary_cross_entropy_with_logits(
            logits, smooth, pos_weight=self.class_weights, reduction="sum"
        )
        return loss / len(logits)


@dataclass(eq=False)
class MixedCrossEntropy:
    """Cross-entropy of mixed samples."""

    # (labels, height=, width=) -> partners and lambda for labels (batch,); the sizes are of images.
    sample_mix: Callable[..., Mix]
    model_mixes: bool  # the model does it itself: it is called with inputs, partners and lambda
    _: KW_ONLY
    # The loss of samples that are not mixed, whose settings hold for mixed ones too.
    unmixed: CrossEntropy = field(default_factory=CrossEntropy)
    # Called with the logits, the labels and the mix of each batch of training.
    observe: Callable[[Tensor, Tensor, Mix], None] = lambda logits, labels, mix: None
    # Whether the samples of an epoch, counted from 0, are mixed; asked at its start.
    mixes: Callable[[int], bool] = lambda epoch: True
    is_mixing: bool = field(default=True, init=False)

    def start_epoch(self, epoch: int) -> bool:
        """Decide whether samples are mixed in an epoch; return whether this is a change."""
        before = self.is_mixing
        self.is_mixing = self.mixes(epoch)
        return self.is_mixing != before

    def __call__(self, model: nn.Module, inputs: Tensor, labels: Tensor) -> BatchLoss:
        if not self.is_mixing:
            whole = labels.new_ones(len(labels), dtype=torch.float32)
            logits = at_least_fp32(model(inputs))
            self.observe(
                logits, labels, Mix(torch.arange(len(labels), device=labels.device), whole)
            )
            return self.unmixed.compare(logits, labels)._replace(mix_weight=whole.sum())
        height, width = inputs.shape[-2:]
        mix = self.sample_mix(labels, height=height, width=width)
        if self.model_mixes:
            logits = at_least_fp32(model(inputs, mix.partner, mix.weight))
        else:
            logits = at_least_fp32(model(mixup.blend(inputs, mix)))
        self.observe(logits, labels, mix)
        return self.unmixed.compare_mixed(logits, labels, mix)


def is_right(logits: Tensor, labels: Tensor) -> Tensor:
    """Whether the class of each row is predicted, or exactly its labels (batch, classes)."""
    if labels.ndim == 1:
        return logits.argmax(1) == labels
    return ((logits > 0) == (labels > 0)).all(1)


def at_least_fp32(logits: Tensor) -> Tensor:
    """Logits of autocast in fp32; wider ones as they are."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))

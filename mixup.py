"""Mixup and its kin: every sample of a batch is mixed with another one, and so are their labels.

    mix = mixup(labels, alpha=0.2)                       # whom with, and how much; or intra, attention, cutmix
    logits = model(blend(images, mix))
    loss = cross_entropy(logits, labels, mix)            # - lambda log p(own label) - (1 - lambda) log p(partner's)

lambda is the weight of the unpermuted sample, everywhere. All functions are pure and wait for nothing; their randomness
comes from `generator` (None: torch's own). Hidden representations mix as images do: `blend` takes any (batch, ...) tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

FIELD, CONTRAST = 4, 2.0  # of attention maps: side of the noise they are interpolated from, and how strong it is


KINDS = ("none", "mixup", "intra", "attention", "cutmix")


@dataclass
class Mix:
    """How a batch is mixed.

    Attributes:
        partner: (batch,) the row each sample is mixed with.
        weight: (batch,) lambda, the weight of the sample's own label.
        map: (batch, 1, height, width) weight of the sample's own pixels, whose mean over space is `weight`; None: `weight`
            everywhere.
    """

    partner: Tensor
    weight: Tensor
    map: Tensor | None = None


# -------------------------------------------------------------------- whom with, and how much


def draw_beta(alpha: float, count: int, device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """(count,) draws of Beta(alpha, alpha), float32; of float64 gammas, as both of a pair underflow float32 when alpha is small."""
    first, second = torch._standard_gamma(torch.full((2, count), alpha, dtype=torch.float64, device=device), generator=generator)
    return (first / (first + second)).float()


def mixup(labels: Tensor, alpha: float, per_sample: bool = False, generator: torch.Generator | None = None) -> Mix:
    """Partners by a random permutation, lambda ~ Beta(alpha, alpha), one for the batch or `per_sample` (arXiv:1710.09412)."""
    count, device = len(labels), labels.device
    weight = draw_beta(alpha, count if per_sample else 1, device, generator).expand(count)
    return Mix(torch.randperm(count, generator=generator, device=device), weight)


def intra(labels: Tensor, alpha: float, same_class: bool = False, generator: torch.Generator | None = None) -> Mix:
    """As `mixup` per sample, with partners of another class, or of the same class; who finds none stays as it is."""
    wanted = (labels[:, None] == labels) == same_class
    wanted.fill_diagonal_(False)
    order = torch.rand(wanted.shape, generator=generator, device=labels.device).masked_fill_(~wanted, -1.0)
    best, partner = order.max(1)
    weight = draw_beta(alpha, len(labels), labels.device, generator)
    return Mix(partner, torch.where(best < 0, 1.0, weight))


def attention(labels: Tensor, alpha: float, height: int, width: int, generator: torch.Generator | None = None) -> Mix:
    """As `mixup` per sample, with a smooth random map over space around lambda; its mean is the label's weight."""
    mix = mixup(labels, alpha, True, generator)
    noise = torch.randn(len(labels), 1, FIELD, FIELD, generator=generator, device=labels.device)
    field = F.interpolate(noise, (height, width), mode="bilinear", align_corners=False)
    map = torch.sigmoid(torch.logit(mix.weight, eps=1e-4)[:, None, None, None] + CONTRAST * field)
    return Mix(mix.partner, map.mean((1, 2, 3)), map)


def cutmix(labels: Tensor, alpha: float, height: int, width: int, generator: torch.Generator | None = None) -> Mix:
    """A rectangle of up to 1 - lambda of the image comes from the partner; the labels weigh as the pixels do (arXiv:1905.04899)."""
    mix = mixup(labels, alpha, True, generator)
    half = (1 - mix.weight).sqrt() / 2
    centre = torch.rand(2, len(labels), generator=generator, device=labels.device)
    inside = []
    for middle, size in zip(centre, (height, width)):
        first = ((middle - half) * size).round().clamp(0, size)
        last = ((middle + half) * size).round().clamp(0, size)
        place = torch.arange(size, device=labels.device)
        inside.append((place >= first[:, None]) & (place < last[:, None]))  # (batch, size)
    map = 1.0 - (inside[0][:, None, :, None] & inside[1][:, None, None, :]).float()
    return Mix(mix.partner, map.mean((1, 2, 3)), map)


# -------------------------------------------------------------------- mixing, and its loss


def blend(x: Tensor, mix: Mix) -> Tensor:
    """x (batch, ...), floating, mixed: lambda x + (1 - lambda) x[partner]."""
    weight = mix.weight.view(-1, *[1] * (x.ndim - 1)) if mix.map is None else mix.map
    return torch.lerp(x[mix.partner], x, weight.to(x.dtype))


def cross_entropy(logits: Tensor, labels: Tensor, mix: Mix, label_smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy to the mixed labels: that of both labels, weighted, and of the soft label (batch, classes) alike."""
    scores = logits.log_softmax(1)
    both = torch.stack([labels, labels[mix.partner]], 1)  # (batch, 2)
    weights = torch.stack([mix.weight, 1 - mix.weight], 1).to(scores.dtype)
    loss = -(scores.gather(1, both) * weights).sum(1)
    if label_smoothing:
        loss = (1 - label_smoothing) * loss - label_smoothing * scores.mean(1)
    return loss.mean()


def hits(logits: Tensor, labels: Tensor, mix: Mix) -> Tensor:
    """Sum over the batch of the predicted labels' weights: accuracy under mixing is lambda-weighted, as the field reports it."""
    predicted = logits.detach().argmax(1)
    return (mix.weight * (predicted == labels) + (1 - mix.weight) * (predicted == labels[mix.partner])).sum()


def draw(kind: str, labels: Tensor, alpha: float, height: int, width: int) -> Mix:
    """The Mix of that kind, one of `KINDS` but 'none', for images of height x width; texts have neither."""
    match kind:
        case "mixup":
            return mixup(labels, alpha)
        case "intra":
            return intra(labels, alpha)
        case "attention":
            return attention(labels, alpha, height, width)
        case "cutmix":
            return cutmix(labels, alpha, height, width)
    raise ValueError(f"unknown kind of mixing {kind}")

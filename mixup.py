"""Mixup, its variants, and meta-mixup, which learns how much to mix.

Mixing. Every sample of a batch is mixed with a partner from the same batch, and so are their
labels (arXiv:1710.09412). lambda is the weight of the unpermuted sample, everywhere:
x <- lambda x + (1 - lambda) x[partner], and the loss is
- lambda log p(own label) - (1 - lambda) log p(partner's label).

    mix = mixup(labels, alpha=0.2)               # partners and lambda; or intra, attention, cutmix
    logits = model(blend(images, mix))
    loss = cross_entropy(logits, labels, mix=mix)

Hidden representations are mixed in the same way: `blend` takes any (batch, ...) tensor. The
functions are pure, never wait for the device, and take their randomness from `generator` (None is
torch's default one).

The meta-gradient. How does a clean loss depend on lambda after one SGD step on the mixed loss?
With the virtual step theta' = theta - a grad_theta L_mix(theta, lambda) and the gradient v of
L_clean at theta',

    d L_clean(theta') / d lambda = - a d/d lambda (v . grad_theta L_mix(theta, lambda))
                                 ~ - a (g(theta + e v) - g(theta - e v)) / (2 e),

where g(theta) = d L_mix(theta, lambda) / d lambda. These central differences are equation 8 of
DARTS (arXiv:1806.09055). No graph of gradients is built, so that any model will do: four forward
and backward passes, two of which need no gradient of the parameters.

    def mixed_loss(mix): return cross_entropy(model(blend(images, mix)), labels, mix=mix)
    def clean_loss(): return F.cross_entropy(model(clean_images), clean_labels)
    gradient = meta_gradient(model, lam, mixed_loss=lambda lam: mixed_loss(Mix(partner, lam)),
                             clean_loss=clean_loss, rate=lr)

Meta-mixup. `MetaMixup` follows the meta-gradient while the model is trained (arXiv:1908.10059).

    meta = MetaMixup(classes=10, rows=len(training_set))
    meta.rows = rows                             # of the batch, before each step
    meta.learn(model, labels, mixed_loss=mixed_loss, clean_loss=clean_loss, rate=lr)  # each 32nd
    mix = meta.mix(labels)                       # on every step; then as with any other mix
    meta.observe(logits, labels, mix)            # what the model said of the mixed batch
    meta.row_losses.end_epoch()
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from backends import torch_compat
from optimizers.base import global_norm, step_unless_skipped

KINDS = ("none", "mixup", "intra", "attention", "cutmix", "meta")
TEXT_KINDS = ("none", "mixup", "intra", "meta")  # those that need no height and width
POLICIES = ("loss", "pair")  # of MetaMixup

ATTENTION_GRID = 4  # side of the noise from which attention maps are interpolated
ATTENTION_CONTRAST = 2.0  # standard deviation of that noise, on the logit of lambda
FINITE_DIFFERENCE_STEP = 0.01  # |e v| relative to |theta|
LEAST_SHARE = 1e-4  # of a mix, beyond which its logarithm says nothing
LARGEST_EXCESS = 10.0  # of a row's loss


@dataclass
class Mix:
    """How a batch is mixed.

    Without `weight_map` and `box` the weight of a sample is `weight` everywhere.

    Attributes:
        partner: (batch,) the row with which each sample is mixed.
        weight: (batch,) lambda, the weight of the sample's own label.
        weight_map: (batch, 1, height, width) weight of the sample's own pixels; its mean over space
            is `weight`.
        box: (top, bottom, left, right) of the pixels that come from the partner alone, the same in
            all samples; its share of the image is 1 - `weight`.
    """

    partner: Tensor
    weight: Tensor
    weight_map: Tensor | None = None
    box: tuple[int, int, int, int] | None = None


# -------------------------------------------------------------------- partners and lambda


def sample_beta(
    alpha: float,
    count: int,
    *,
    weight: float | None = None,
    device: torch.device | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Samples from Beta(alpha, alpha), or `weight` if given, as a float32 tensor (count,).

    They are ratios of float64 gammas: in float32 both gammas underflow when alpha is small. Where
    they do so in float64 too, as for alpha 0, lambda is 1.
    """
    if weight is not None:
        if not 0 <= weight <= 1:
            raise ValueError(f"weight={weight} must be between 0 and 1")
        return torch.full((count,), weight, device=device)
    if not alpha >= 0:
        raise ValueError(f"alpha={alpha} must be at least 0")
    alphas = torch.full((2, count), alpha, dtype=torch.float64, device=device)
    own, other = torch._standard_gamma(alphas, generator=generator)
    underflow = (own == other) & (own < 1)
    return torch.where(underflow, 1.0, own / (own + other)).float()


def mixup(
    labels: Tensor,
    alpha: float,
    *,
    weight: float | None = None,
    per_sample: bool = False,
    generator: torch.Generator | None = None,
) -> Mix:
    """Sample partners by a permutation, and lambda from Beta(alpha, alpha) (arXiv:1710.09412).

    Args:
        labels: (batch,) integers; only their number and device count.
        alpha: parameter of the Beta distribution; a small one mixes little.
        weight: lambda, if it is not to be sampled.
        per_sample: sample a lambda for each sample instead of one for the batch.
        generator: on the device of `labels`.

    Returns:
        A Mix whose `weight` is expanded (stride 0) unless `per_sample`.
    """
    count, device = len(labels), labels.device
    numbers = count if per_sample else 1
    weights = sample_beta(alpha, numbers, weight=weight, device=device, generator=generator)
    partner = torch.randperm(count, generator=generator, device=device)
    return Mix(partner, weights.expand(count))


def intra(
    labels: Tensor,
    alpha: float,
    *,
    weight: float | None = None,
    generator: torch.Generator | None = None,
) -> Mix:
    """Sample a lambda for each sample, and partners only of another class.

    Args:
        labels: (batch,) integers.
        alpha: parameter of the Beta distribution of lambda.
        weight: lambda, if it is not to be sampled.
        generator: on the device of `labels`.

    Returns:
        A Mix in which samples have lambda = 1, so are not mixed, where all are of one class.
    """
    eligible = labels[:, None] != labels  # (batch, batch)
    scores = torch.rand(eligible.shape, generator=generator, device=labels.device)
    best, partner = scores.masked_fill_(~eligible, -1.0).max(1)
    weights = sample_beta(
        alpha, len(labels), weight=weight, device=labels.device, generator=generator
    )
    return Mix(partner, torch.where(best < 0, 1.0, weights))


def attention(
    labels: Tensor,
    alpha: float,
    *,
    height: int,
    width: int,
    generator: torch.Generator | None = None,
) -> Mix:
    """Sample a lambda for each sample and vary it over the image by a smooth random map.

    Args:
        labels: (batch,) integers; only their number and device count.
        alpha: parameter of the Beta distribution of lambda, around which the map varies.
        height, width: of the images, in pixels.
        generator: on the device of `labels`.

    Returns:
        A Mix whose `weight` is the mean of its `weight_map` over the image.
    """
    mix = mixup(labels, alpha, per_sample=True, generator=generator)
    grid = (len(labels), 1, ATTENTION_GRID, ATTENTION_GRID)
    noise = torch.randn(grid, generator=generator, device=labels.device)
    field = F.interpolate(noise, (height, width), mode="bilinear", align_corners=False)
    logits = torch.logit(mix.weight, eps=1e-4)[:, None, None, None]
    weight_map = torch.sigmoid(logits + ATTENTION_CONTRAST * field)
    return Mix(mix.partner, weight_map.mean((1, 2, 3)), weight_map)


def cutmix(
    labels: Tensor,
    alpha: float,
    *,
    height: int,
    width: int,
    generator: torch.Generator | None = None,
) -> Mix:
    """Paste a rectangle of the partner whose area is at most 1 - lambda (arXiv:1905.04899).

    The rectangle is centred anywhere in the image and cut off at its border; lambda then becomes
    the share of pixels that are left of the own image.

    Args:
        labels: (batch,) integers; only their number and device count.
        alpha: parameter of the Beta distribution of lambda.
        height, width: of the images, in pixels.
        generator: on the CPU, since the rectangle is sampled on the host.

    Returns:
        A Mix with a `box`.
    """
    count, device = len(labels), labels.device
    on = device if generator is None else "cpu"
    partner = torch.randperm(count, generator=generator, device=on).to(device)
    lam = sample_beta(alpha, 1, generator=generator).item()
    vertical = torch.rand((), generator=generator).item()
    horizontal = torch.rand((), generator=generator).item()
    top, bottom = _pixel_range(vertical, lam, size=height)
    left, right = _pixel_range(horizontal, lam, size=width)
    own = 1 - (bottom - top) * (right - left) / (height * width)
    weight = torch.full((1,), own, device=device).expand(count)
    return Mix(partner, weight, box=(top, bottom, left, right))


def _pixel_range(centre: float, lam: float, *, size: int) -> tuple[int, int]:
    """Return the first pixel, and the one after the last, that a rectangle covers of an axis.

    Args:
        centre: of the rectangle, as a share of the axis.
        lam: lambda; the rectangle has the share sqrt(1 - lam) of the axis.
        size: pixels of the axis.
    """
    half = math.sqrt(1 - lam) / 2
    return max(0, round((centre - half) * size)), min(size, round((centre + half) * size))


def sample_mix(
    kind: str,
    labels: Tensor,
    *,
    alpha: float,
    height: int,
    width: int,
    **settings: Any,
) -> Mix:
    """Sample a Mix of a kind that is named by a string.

    Args:
        kind: one of `KINDS` except 'none' and 'meta'.
        labels: (batch,) integers.
        alpha: parameter of the Beta distribution of lambda.
        height, width: of the images, in pixels; kinds of `TEXT_KINDS` ignore them.
        settings: further arguments of that kind's function.
    """
    kinds: dict[str, Callable[..., Mix]]
    kinds = {"mixup": mixup, "intra": intra, "attention": attention, "cutmix": cutmix}
    size = {} if kind in TEXT_KINDS else {"height": height, "width": width}
    return kinds[kind](labels, alpha, **size, **settings)


# -------------------------------------------------------------------- mixing and its loss


def blend(x: Tensor, mix: Mix) -> Tensor:
    """Mix a batch: lambda x + (1 - lambda) x[partner].

    Args:
        x: (batch, ...) of a floating-point dtype; images (batch, channels, height, width) where the
            mix has a `weight_map` or a `box`.
        mix: partners and weights.

    Returns:
        A new tensor of the shape, dtype and memory format of `x`.
    """
    if mix.box is not None:
        return _paste(x, mix.partner, mix.box)
    per_sample = (-1, *[1] * (x.ndim - 1))
    weight = mix.weight.view(per_sample) if mix.weight_map is None else mix.weight_map
    weight, partners = weight.to(x.dtype), _select_rows(x, mix.partner)
    if weight.requires_grad or x.requires_grad:
        return torch.lerp(partners, x, weight)
    return partners.lerp_(x, weight)


def _paste(x: Tensor, partner: Tensor, box: tuple[int, int, int, int]) -> Tensor:
    """Copy x (batch, channels, height, width) and fill the box of each image from its partner."""
    top, bottom, left, right = box
    mixed = x.clone()
    source, target = x[..., top:bottom, left:right], mixed[..., top:bottom, left:right]
    if x.requires_grad:
        target.copy_(_select_rows(source, partner))
    else:
        _select_rows(source, partner, out=target)
    return mixed


def _select_rows(x: Tensor, rows: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return x[rows]; `out` has the strides of `x`.

    In channels_last it is three times as fast as torch's indexing.
    """
    if x.ndim == 4 and x.stride(1) == 1:
        into = None if out is None else out.permute(0, 2, 3, 1)
        return torch.index_select(x.permute(0, 2, 3, 1), 0, rows, out=into).permute(0, 3, 1, 2)
    return torch.index_select(x, 0, rows, out=out)


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    mix: Mix,
    label_smoothing: float = 0.0,
    class_weights: Tensor | None = None,
) -> Tensor:
    """Mean cross-entropy to the mixed labels.

    The weighted sum of the losses to both labels equals the loss to the soft label
    lambda one_hot(own) + (1 - lambda) one_hot(partner's), which is never built.

    Args:
        logits: (batch, classes) of the mixed batch, or (batch, classes, ...), as of pixels.
        labels: (batch,) or (batch, ...) integers of the unmixed batch, of which none is ignored.
        mix: how the batch was mixed.
        label_smoothing: share of the label that is spread evenly over the classes.
        class_weights: (classes,) factors of the losses to each class; None is 1.

    Returns:
        A scalar.
    Raises:
        ValueError: labels of pixels with a mix whose weight differs from pixel to pixel.
    """
    if labels.ndim > 1 and (mix.box or mix.weight_map is not None):
        raise ValueError("labels of pixels are mixed by one weight a sample: use mixup or intra")
    scores = logits.log_softmax(1)
    if class_weights is not None:
        scores = scores * class_weights.view(-1, *[1] * (scores.ndim - 2))
    partner_labels = labels.index_select(0, mix.partner)
    one_lambda = mix.weight.stride(0) == 0  # for the whole batch: the means can be taken first
    per_label = mix.weight.view(-1, *[1] * (labels.ndim - 1))
    weight = (mix.weight[0] if one_lambda else per_label).to(scores.dtype)
    reduction = "mean" if one_lambda else "none"
    own = F.nll_loss(scores, labels, reduction=reduction)
    other = F.nll_loss(scores, partner_labels, reduction=reduction)
    loss = torch.lerp(other, own, weight)
    if not one_lambda:
        loss = loss.mean()
    if label_smoothing:
        loss = (1 - label_smoothing) * loss - label_smoothing * scores.mean()
    return loss


def num_correct(logits: Tensor, labels: Tensor, *, mix: Mix) -> Tensor:
    """Sum of the weights of the predicted labels: accuracy under mixing is weighted by lambda.

    Args:
        logits: (batch, classes) of the mixed batch.
        labels: (batch,) integers of the unmixed batch.
        mix: how the batch was mixed.

    Returns:
        A scalar between 0 and the batch size: lambda for each prediction of the own label, and
        1 - lambda for each of the partner's.
    """
    predicted = logits.detach().argmax(1)
    own = predicted == labels
    other = predicted == labels.index_select(0, mix.partner)
    return (mix.weight * own + (1 - mix.weight) * other).sum()


# -------------------------------------------------------------------- the meta-gradient


def meta_gradient(
    model: nn.Module,
    weights: Tensor,
    *,
    mixed_loss: Callable[[Tensor], Tensor],
    clean_loss: Callable[[], Tensor],
    rate: float,
    metric: list[Tensor] | None = None,
    scale: Tensor | float = 1.0,
) -> Tensor:
    """Gradient of the clean loss after a virtual SGD step on the mixed loss, to `weights`.

    The equation stands at the top of this file. With a metric m the step is a m grad_theta L_mix,
    and m v stands for v. Parameters, buffers (the statistics of BatchNorm) and random states are
    left unchanged, and no `.grad` is written. All passes see the same random numbers, so that
    dropout is part of the function that is differentiated.

    Args:
        model: its parameters take the virtual step; not wrapped for data parallelism.
        weights: the lambdas, of any shape.
        mixed_loss: computes a scalar from `weights` by `model`.
        clean_loss: computes a scalar by `model`, on samples that are not mixed.
        rate: a, the learning rate of the virtual step.
        metric: factors of the step, a tensor for each parameter that is trained; None is 1.
        scale: factor of the losses before each backward pass, for gradients in fp16.

    Returns:
        The gradient, of the shape of `weights`.
    """
    parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    weights = weights.detach().clone(memory_format=torch.contiguous_format)  # not an expanded one
    devices = {parameter.device for parameter in parameters if parameter.device.type != "cpu"}

    def gradient(loss: Callable[[], Tensor], inputs: list[Tensor]) -> list[Tensor]:
        with torch.random.fork_rng(list(devices)), torch.enable_grad():
            scaled = torch.autograd.grad(
                loss() * scale, inputs, allow_unused=True, materialize_grads=True
            )
            torch.clear_autocast_cache()  # the caller's block may hold copies of these weights
        return list(torch._foreach_div(scaled, scale))

    with torch.no_grad(), restore_on_exit(parameters, list(model.buffers())) as start:
        step = gradient(lambda: mixed_loss(weights), parameters)
        if metric:
            torch._foreach_mul_(step, metric)
        torch._foreach_add_(parameters, step, alpha=-rate)
        del step  # frees a copy of the model
        direction = gradient(clean_loss, parameters)
        if metric:
            torch._foreach_mul_(direction, metric)
        epsilon = FINITE_DIFFERENCE_STEP * global_norm(start) / global_norm(direction)
        torch._foreach_mul_(direction, epsilon)
        leaf = weights.requires_grad_()
        sides = []  # the gradient of the mixed loss with respect to the leaf at theta +- e v
        for sign in (1, -1):
            torch._foreach_copy_(parameters, start)
            torch._foreach_add_(parameters, direction, alpha=sign)
            sides += gradient(lambda: mixed_loss(leaf), [leaf])
        return (sides[1] - sides[0]) * (rate / (2 * epsilon))


@contextlib.contextmanager
def restore_on_exit(parameters: list[Tensor], buffers: list[Tensor]) -> Iterator[list[Tensor]]:
    """Context in which parameters and buffers may change: on exit they are bit for bit as before.

    Yields:
        Copies of the parameters as they were on entry.
    """
    start = [parameter.detach().clone() for parameter in parameters]
    statistics = [buffer.detach().clone() for buffer in buffers]
    try:
        yield start
    finally:
        with torch.no_grad():
            for tensor, old in zip([*parameters, *buffers], [*start, *statistics]):
                tensor.copy_(old)


# -------------------------------------------------------------------- meta-mixup


class RowLosses:
    """How much larger the loss of each training row was than a blend explains, an epoch ago.

    In an epoch a row has a place in two mixes, its own and that of the row whose partner it is. A
    network that sees both parts of a blend gives the label of a part a probability q: its share w,
    or 1 where both have the same label. The excess of a row is the mean of log q - log p(label)
    over its places, weighted by w, in [-10, 10]: large where the network doubts the label.

    Attributes:
        excess: (rows,) of the epoch before; 0 before the second epoch, when `is_known` is False.
        sums: (2, rows) of this epoch, on this rank: w times the excess, and w.
    """

    def __init__(self, rows: int, device: torch.device | None) -> None:
        self.excess = torch.zeros(rows, device=device)
        self.is_known = False
        self.sums = torch.zeros(2, rows, device=device)

    def add(self, rows: Tensor, logits: Tensor, *, labels: Tensor, mix: Mix) -> None:
        """Count a mixed batch.

        Args:
            rows: (batch,) of the training set.
            logits: (batch, classes) of the mixed batch.
            labels: (batch,) of the unmixed batch.
            mix: how it was mixed.
        """
        scores, rows = logits.detach().float().log_softmax(1), rows.to(logits.device)
        of_one_class = labels == labels[mix.partner]
        for place, share in (
            (torch.arange(len(rows), device=rows.device), mix.weight),
            (mix.partner, 1 - mix.weight),
        ):
            share = share.detach().float().clamp(min=LEAST_SHARE)
            explained = torch.where(of_one_class, 1.0, share).log()
            excess = explained - scores.gather(1, labels[place, None])[:, 0]
            excess = torch.nan_to_num(excess, 0.0).clamp(-LARGEST_EXCESS, LARGEST_EXCESS)
            self.sums.index_add_(1, rows[place], torch.stack([share * excess, share]))

    def end_epoch(self) -> None:
        """Turn what was counted into the excess; collective. Other rows keep theirs."""
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(self.sums)
        mean = self.sums[0] / self.sums[1]
        self.excess = torch.where(self.sums[1] > 0, mean, self.excess)
        self.is_known = True
        self.sums.zero_()


class MetaMixup:
    """Mixup whose lambda follows the gradient of a clean loss through a virtual step.

    The idea is that of Mai et al. (arXiv:1908.10059). They learn online, with the training; here a
    policy remembers what it has learned from one batch to the next. Its use stands at the top of
    this file. Partners are sampled as by `mixup`. Policies:

    1. 'loss': one number, the slope k. lambda0 ~ Beta(alpha, alpha) for each sample, and with the
       excess of `RowLosses` in the epoch before

           logit lambda = logit lambda0 + k (excess of the partner - excess of the sample).

       So a row whose label the network doubts gives way to its partner. It starts as mixup, with
       k = 0. Weighting samples by their losses is that of arXiv:1902.07379 and arXiv:1904.11238.
    2. 'pair': lambda is a number for each unordered pair of the C classes, C (C + 1) / 2 in all.
       It starts at 0.75, the mean of max(lambda, 1 - lambda) under Beta(1, 1). A sample has the
       larger share in its own mix, lambda in [0.5, 1], where 1 is no mixing: the partner's row of
       the same batch stands for the other half.

    Args:
        classes: C, the number of classes.
        policy: one of `POLICIES`.
        rows: of the training set, for 'loss'.
        alpha: of the Beta distribution of 'loss'.
        lr: learning rate of Adam on k, or on the logits of 2 lambda - 1.
        device: of the labels.

    Attributes:
        numbers: (1,) k; or (C (C + 1) / 2,) differences of those logits from the start.

    Raises:
        ValueError: there is no such policy, or 'loss' has no rows.
    """

    def __init__(
        self,
        classes: int,
        policy: str = "loss",
        *,
        rows: int = 0,
        alpha: float = 1.0,
        lr: float = 0.1,
        device: torch.device | None = None,
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"unknown policy {policy}: choose one of {', '.join(POLICIES)}")
        if policy == "loss" and not rows:
            raise ValueError("policy loss needs the number of training rows")
        self.policy = policy
        self.alpha = alpha
        count = classes * (classes + 1) // 2 if policy == "pair" else 1
        if policy == "pair":
            # (classes, classes): which number belongs to a pair of classes, in both orders
            self.pair_index = torch.empty(classes, classes, dtype=torch.long, device=device)
            low, high = torch.triu_indices(classes, classes, device=device)
            self.pair_index[low, high] = torch.arange(count, device=device)
            self.pair_index[high, low] = self.pair_index[low, high]
        self.numbers = torch.zeros(count, device=device, requires_grad=True)
        # Its epsilon is far below the gradients, which are as small as a learning rate divided by
        # the batch size and the number of pairs.
        fused = torch_compat.supports_fused_optimizers([self.numbers])
        self.adam = torch.optim.Adam([self.numbers], lr=lr, eps=1e-20, fused=fused)
        self.learned_mix: Mix | None = None  # of the last call of `learn`, until `mix` returns it
        self.row_losses = RowLosses(rows, device)
        self.rows = torch.empty(0, dtype=torch.long, device=device)  # of the next batches
        self.mixed_rows = self.rows  # of the last one

    def mix(self, labels: Tensor) -> Mix:
        """Sample the Mix of a batch by the policy.

        The first call after `learn` returns the Mix on which the policy learned, corrected, if the
        batch has the same size: the paper orders the two steps in this way.
        """
        self.mixed_rows, self.rows = self.rows.tensor_split([len(labels)])
        learned_mix, self.learned_mix = self.learned_mix, None
        if learned_mix is not None and len(learned_mix.weight) == len(labels):
            return learned_mix
        with torch.no_grad():
            partner = torch.randperm(len(labels), device=labels.device)
            weight = self.lambdas(self.numbers, labels, partner=partner, rows=self.mixed_rows)
            return Mix(partner, weight)

    def observe(self, logits: Tensor, labels: Tensor, mix: Mix) -> None:
        """Take note of what the model said of the last mixed batch, for policy 'loss'."""
        if self.policy == "loss" and len(self.mixed_rows) == len(labels):
            self.row_losses.add(self.mixed_rows, logits, labels=labels, mix=mix)

    def lambdas(self, numbers: Tensor, labels: Tensor, *, partner: Tensor, rows: Tensor) -> Tensor:
        """Compute lambda of each sample, differentiable with respect to the policy's numbers.

        Args:
            numbers: the policy's, of the shape of `self.numbers`.
            labels: (batch,) integers.
            partner: (batch,) rows of the batch.
            rows: (batch,) rows of the training set, for 'loss'; without them, (0,), the slope has
                no effect.

        Returns:
            (batch,) numbers in [0.5, 1], of 'loss' in [0, 1].
        """
        if self.policy == "pair":
            return (1 + torch.sigmoid(numbers[self.pair_index[labels, labels[partner]]])) / 2
        excess = torch.zeros_like(labels, dtype=torch.float32)
        if len(rows) == len(labels):  # else it is not said which rows they are
            excess = self.row_losses.excess[rows]
        start = sample_beta(self.alpha, len(labels), device=labels.device)
        logit = torch.logit(start, eps=LEAST_SHARE)
        return torch.sigmoid(logit + numbers * (excess[partner] - excess))

    def learn(
        self,
        model: nn.Module,
        labels: Tensor,
        *,
        mixed_loss: Callable[[Mix], Tensor],
        clean_loss: Callable[[], Tensor],
        rate: float,
        metric: list[Tensor] | None = None,
        scale: Tensor | float = 1.0,
    ) -> None:
        """Take one step of Adam on the policy.

        In a process group every rank calls this with its own batches; the policy follows the mean
        of their gradients and stays the same on all ranks. A non-finite gradient changes nothing.
        The host never waits for the device.

        Args:
            model: the model that is trained, not wrapped for data parallelism.
            labels: (batch,) integers of the batch to be mixed.
            mixed_loss: computes the loss of that batch under a Mix.
            clean_loss: computes the loss of a batch that is not mixed.
            rate: learning rate of the virtual step.
            metric, scale: see `meta_gradient`.
        """
        partner = torch.randperm(len(labels), device=labels.device)
        rows = self.rows[: len(labels)]
        weight = self.lambdas(self.numbers, labels, partner=partner, rows=rows)
        if self.policy == "pair" or self.row_losses.is_known:  # else the slope has no gradient
            of_weight = meta_gradient(
                model,
                weight,
                mixed_loss=lambda weight: mixed_loss(Mix(partner, weight)),
                clean_loss=clean_loss,
                rate=rate,
                metric=metric,
                scale=scale,
            )
            (gradient,) = torch.autograd.grad(weight, self.numbers, of_weight)
            if dist.is_available() and dist.is_initialized():
                dist.all_reduce(gradient)
                gradient /= dist.get_world_size()
            self.numbers.grad, before = gradient, self.numbers.detach().clone()
            step_unless_skipped(self.adam, (~torch.isfinite(gradient)).any())
            with torch.no_grad():  # pairs that did not occur keep their numbers
                self.numbers.copy_(torch.where(gradient == 0, before, self.numbers))
        with torch.no_grad():
            if self.policy == "pair":
                weight = self.lambdas(self.numbers, labels, partner=partner, rows=rows)
            # of 'loss': the very samples by which the policy was judged
            self.learned_mix = Mix(partner, weight.detach())

    def state_dict(self) -> dict[str, Any]:
        """Return the policy and the state of its optimizer as tensors and numbers."""
        return {
            "numbers": self.numbers.detach(),
            "adam": self.adam.state_dict(),
            "excess": self.row_losses.excess,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned.

        Raises:
            ValueError: it is of another policy, or of other data.
        """
        of_this = self.state_dict()
        if any(state[name].shape != of_this[name].shape for name in ("numbers", "excess")):
            raise ValueError("a policy of another kind, or of other data")
        with torch.no_grad():
            self.numbers.copy_(state["numbers"])
            self.row_losses.excess.copy_(state["excess"])
        self.row_losses.is_known = bool(state["excess"].any())
        own = self.adam.state_dict()["param_groups"]  # whose rate may be another one
        self.adam.load_state_dict({**state["adam"], "param_groups": own})

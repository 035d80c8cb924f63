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

Meta-mixup. `MetaMixup` learns while the model is trained which of two samples gets the larger
share, by what steps of the model's own optimizer do to held-out rows.

    meta = MetaMixup(len(training_set))
    meta.rows = rows                             # of the batch, before each step
    meta.learn(model, optimizer, labels, mixed_loss=mixed_loss, measure=measure)  # each 16th
    mix = meta.mix(labels)                       # on every step; then as with any other mix
    meta.observe(logits, labels, mix)            # what the model said of the mixed batch
    meta.row_losses.end_epoch()

    def mixed_loss(mix): return cross_entropy(model(blend(images, mix)), labels, mix=mix)
    def measure(): return mean_doubt(model(held_out_images), held_out_labels)
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from optimizers.base import clip_gradients, global_norm, step_unless_skipped

TEXT_KINDS = ("none", "mixup", "inter_class", "intra_class", "meta")
KINDS = (*TEXT_KINDS, "fmix", "cutmix")  # the last ones need height and width

FMIX_DECAY = 3.0  # power of the frequency by which the amplitudes of FMix's noise fall
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


def inter_class(
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
        A Mix in which samples without such a partner have lambda = 1, so are not mixed.
    """
    eligible = labels[:, None] != labels
    return _among(eligible, alpha, weight=weight, generator=generator)


def intra_class(
    labels: Tensor,
    alpha: float,
    *,
    weight: float | None = None,
    generator: torch.Generator | None = None,
) -> Mix:
    """Sample as `inter_class`, but partners only of the same class: labels stay as they are."""
    eligible = (labels[:, None] == labels).fill_diagonal_(False)
    return _among(eligible, alpha, weight=weight, generator=generator)


def _among(
    eligible: Tensor, alpha: float, *, weight: float | None, generator: torch.Generator | None
) -> Mix:
    """Sample partners evenly among those that are `eligible` (batch, batch) for each sample."""
    device = eligible.device
    scores = torch.rand(eligible.shape, generator=generator, device=device)
    best, partner = scores.masked_fill_(~eligible, -1.0).max(1)
    weights = sample_beta(alpha, len(best), weight=weight, device=device, generator=generator)
    return Mix(partner, torch.where(best < 0, 1.0, weights))


def fmix(
    labels: Tensor,
    alpha: float,
    *,
    height: int,
    width: int,
    generator: torch.Generator | None = None,
) -> Mix:
    """Cut a shape out of the partner, the darkest pixels of smooth noise (arXiv:2002.12047).

    The amplitudes of the noise fall with the third power of the frequency. The batch has one shape,
    in which the share lambda of the pixels, rounded to whole ones, is of the own image.

    Args:
        labels: (batch,) integers; only their number and device count.
        alpha: parameter of the Beta distribution of lambda.
        height, width: of the images, in pixels.
        generator: on the device of `labels`.

    Returns:
        A Mix whose `weight` is the mean of its `weight_map`, of zeros and ones, over the image.
    """
    mix = mixup(labels, alpha, generator=generator)
    device = labels.device
    rows, columns = (
        torch.fft.fftfreq(height, device=device),
        torch.fft.rfftfreq(width, device=device),
    )
    frequency = (rows[:, None].square() + columns.square()).sqrt()
    parts = torch.randn((2, *frequency.shape), generator=generator, device=device)
    spectrum = (
        torch.complex(*parts.unbind()) / frequency.clamp(min=1 / max(height, width)) ** FMIX_DECAY
    )
    noise = torch.fft.irfft2(spectrum, (height, width)).flatten()
    rank = noise.argsort().argsort()  # of each pixel among all
    own = (rank < (mix.weight[0] * len(noise)).round()).float()
    weight_map = own.view(1, 1, height, width).expand(len(labels), -1, -1, -1)
    return Mix(mix.partner, own.mean().expand(len(labels)), weight_map)


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
    kinds = {
        "mixup": mixup,
        "inter_class": inter_class,
        "intra_class": intra_class,
        "fmix": fmix,
        "cutmix": cutmix,
    }
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
        raise ValueError("labels of pixels are mixed by one weight a sample: use mixup")
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
        self.excess = torch.zeros(rows, dtype=torch.float32, device=device)
        self.is_known = False
        self.sums = torch.zeros(2, rows, dtype=torch.float32, device=device)

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


def mean_doubt(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean of 1 - p(label), which wrong labels among those of `labels` shift by a constant.

    The sum of it over all labels is the same for any prediction, so that labels which are wrong at
    random do not change which prediction is the better one (arXiv:1712.09482), as they do of the
    cross-entropy.

    Args:
        logits: (batch, classes).
        labels: (batch,) integers.

    Returns:
        A scalar between 0 and 1.
    """
    return 1 - logits.softmax(1).gather(1, labels[:, None]).mean()


def after_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    loss: Callable[[], Tensor],
    measure: Callable[[], Tensor],
    scale: Tensor | float = 1.0,
    max_grad_norm: float = 0.0,
) -> Tensor:
    """Return what `measure` is after a step of the optimizer on a loss, and take the step back.

    Parameters, their gradients, buffers, the optimizer's state and random states are left as they
    were. Any optimizer will do whose state_dict is its whole state. The step is one of this process
    alone.

    Args:
        model: whose parameters the optimizer has; not wrapped for data parallelism.
        optimizer: after its first step.
        loss: computes a scalar by `model`.
        measure: computes a scalar by `model`.
        scale: factor of the loss before the backward pass, for gradients in fp16.
        max_grad_norm: gradients are clipped to this norm; 0 is no limit.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = [p.grad for p in parameters]
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    before = [each.detach().clone() for each in tensors]
    state = copy.deepcopy(optimizer.state_dict())
    devices = {parameter.device for parameter in parameters if parameter.device.type != "cpu"}
    try:
        with torch.random.fork_rng(list(devices)), torch.enable_grad():
            found = torch.autograd.grad(loss() * scale, parameters, allow_unused=True)
            for p, new in zip(parameters, found):
                p.grad = None if new is None else new / scale
            written = [p.grad for p in parameters if p.grad is not None]
            norm = global_norm(written)
            if max_grad_norm:
                clip_gradients(written, norm, max_grad_norm)
            step_unless_skipped(optimizer, ~torch.isfinite(norm))
            torch.clear_autocast_cache()  # the caller's block may hold copies of other weights
            with torch.no_grad():
                return measure()
    finally:
        torch.clear_autocast_cache()
        with torch.no_grad():
            torch._foreach_copy_(tensors, before)
        optimizer.load_state_dict(state)
        for p, gradient in zip(parameters, gradients):
            p.grad = gradient


class MetaMixup:
    """Mixup that learns whether a row whose label the network doubts should give way.

    The idea of learning how to mix beside the model is that of Mai et al. (arXiv:1908.10059). What
    is learned here is one number, the slope k. Partners are sampled as by `mixup`; for each sample
    lambda0 ~ Beta(alpha, alpha), and

        logit lambda = (logit lambda0 + k s D) / sqrt(1 + k^2),

    where D is the excess of the partner in the epoch before (see `RowLosses`) minus that of the
    sample, of unit standard deviation in the batch, and s is the standard deviation of
    logit lambda0. So lambda keeps its distribution: k decides who gets the larger share, and not
    how much is mixed. It starts at 0, as mixup. Weighting samples by their losses is that of
    arXiv:1902.07379 and arXiv:1904.11238.

    `learn` tries a step of the model's optimizer with k + 1, and one with k - 1, on the same batch.
    When the mean difference of their effects on held-out rows is known to two of its standard
    errors, k moves by 0.5 towards the better side, and the next measurement begins.

    Args:
        rows: of the training set.
        alpha: of the Beta distribution.
        device: of the labels.

    Attributes:
        slope: () k.
        trials: (3,) number, sum and sum of squares of the differences since k moved.
    """

    SPAN = 1.0  # between k and the slopes that are tried
    STRIDE = 0.5  # by which k moves
    LARGEST = 2.0  # of |k|
    GOES_ON = 1.0  # from which k mixing is to go on to the end of the run
    LEAST_TRIALS = 4
    LEAST_ERRORS = 2.0  # standard errors by which the mean difference must differ from 0

    def __init__(
        self, rows: int, *, alpha: float = 1.0, device: torch.device | None = None
    ) -> None:
        self.alpha = alpha
        # the standard deviation of the logit of a Beta variable, as far as it is not cut off
        variance = 2 * torch.polygamma(1, torch.tensor(alpha, dtype=torch.float64)).item()
        self.spread = min(math.sqrt(variance), -math.log(LEAST_SHARE))
        self.slope = torch.zeros((), dtype=torch.float32, device=device)
        self.trials = torch.zeros(3, dtype=torch.float32, device=device)
        self.row_losses = RowLosses(rows, device)
        self.rows = torch.empty(0, dtype=torch.long, device=device)  # of the next batches
        self.mixed_rows = self.rows  # of the last one

    def mix(self, labels: Tensor) -> Mix:
        """Sample the Mix of a batch."""
        self.mixed_rows, self.rows = self.rows.tensor_split([len(labels)])
        return self.sample(labels, rows=self.mixed_rows)[0]

    def observe(self, logits: Tensor, labels: Tensor, mix: Mix) -> None:
        """Take note of what the model said of the last mixed batch."""
        if len(self.mixed_rows) == len(labels):
            self.row_losses.add(self.mixed_rows, logits, labels=labels, mix=mix)

    def sample(self, labels: Tensor, *, rows: Tensor, spans: Sequence[float] = (0.0,)) -> list[Mix]:
        """Sample partners and lambda0, and compute the Mix of each of some slopes.

        Args:
            labels: (batch,) integers; only their number and device count.
            rows: (batch,) rows of the training set; where they are others in number, it is not
                known which ones these are, and the slope has no effect.
            spans: what is added to the slope.
        """
        count, device = len(labels), labels.device
        partner = torch.randperm(count, device=device)
        start = torch.logit(sample_beta(self.alpha, count, device=device), eps=LEAST_SHARE)
        difference = torch.zeros_like(start)
        if len(rows) == count > 1:
            excess = self.row_losses.excess[rows]
            difference = excess[partner] - excess
            difference = difference / difference.std().clamp(min=1e-6)
        mixes = []
        for span in spans:
            slope = self.slope + span
            logit = (start + slope * self.spread * difference) / (1 + slope.square()).sqrt()
            mixes.append(Mix(partner, torch.sigmoid(logit)))
        return mixes

    def learn(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        labels: Tensor,
        *,
        mixed_loss: Callable[[Mix], Tensor],
        measure: Callable[[], Tensor],
        scale: Tensor | float = 1.0,
        max_grad_norm: float = 0.0,
    ) -> None:
        """Try both sides of the slope, and move it if by now one is known to be better.

        In a process group every rank calls this with its own batches; the slope follows the mean of
        their differences and stays the same on all ranks. A difference that is not finite does not
        count. The host does not wait for the device. In the first epoch nothing is tried.

        Args:
            model, optimizer: see `after_step`.
            labels: (batch,) integers of the batch to be mixed, the first of `rows`.
            mixed_loss: computes the loss of that batch under a Mix.
            measure: computes by `model` what is to be small on held-out rows, as `mean_doubt` does.
            scale, max_grad_norm: see `after_step`.
        """
        if not self.row_losses.is_known:
            return
        mixes = self.sample(labels, rows=self.rows[: len(labels)], spans=(self.SPAN, -self.SPAN))
        more, less = (
            after_step(
                model,
                optimizer,
                loss=partial(mixed_loss, mix),
                measure=measure,
                scale=scale,
                max_grad_norm=max_grad_norm,
            )
            for mix in mixes
        )
        difference = (more - less).detach().float()
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(difference)
            difference /= dist.get_world_size()
        self.count(difference)

    def count(self, difference: Tensor) -> None:
        """Count a difference () of the held-out measure, above k minus below it."""
        counted = torch.stack([torch.ones_like(difference), difference, difference.square()])
        self.trials += torch.where(torch.isfinite(difference), counted, 0.0)
        number, total, squares = self.trials.unbind()
        variance = (squares - total.square() / number).clamp(min=0) / (number - 1)
        is_known = total.abs() > self.LEAST_ERRORS * (number * variance).sqrt()
        moves = is_known & (number >= self.LEAST_TRIALS)
        slope = self.slope - self.STRIDE * moves * total.sign()
        self.slope.copy_(slope.clamp(-self.LARGEST, self.LARGEST))
        self.trials *= ~moves

    def goes_on(self) -> bool:
        """Whether the slope says that labels are wrong, so that mixing is to go on to the end."""
        return self.slope.item() >= self.GOES_ON

    def state_dict(self) -> dict[str, Tensor]:
        """Return what was learned."""
        return {"slope": self.slope, "trials": self.trials, "excess": self.row_losses.excess}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load what `state_dict` returned.

        Raises:
            ValueError: it is of other data.
        """
        if state["excess"].shape != self.row_losses.excess.shape:
            raise ValueError("losses of other data")
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])
        self.row_losses.is_known = bool(state["excess"].any())

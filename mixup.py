"""Mixup, its variants, and meta-mixup, which learns how much to mix.

Mixing. Every sample of a batch is mixed with a partner from the same batch, and so are their
labels (arXiv:1710.09412). lambda is the weight of the unpermuted sample, everywhere:
x <- lambda x + (1 - lambda) x[partner], and the loss is
- lambda log p(own label) - (1 - lambda) log p(partner's label).

    mix = mixup(labels, alpha=0.2)               # partners and lambda; or inter_class, fmix, cutmix
    logits = model(blend(images, mix))
    loss = cross_entropy(logits, labels, mix=mix)

Hidden representations are mixed in the same way: `blend` takes any (batch, ...) tensor. The
functions are pure, never wait for the device, and take their randomness from `generator` (None is
torch's default one).

Meta-mixup. `MetaMixup` learns on held-out rows how many labels are wrong. Where they are, samples
whose label the network doubts give way to their partners.

    meta = MetaMixup(len(training_set))
    meta.rows = rows                             # of the batch, before each step
    mix = meta.mix(labels)                       # then as with any other mix
    meta.observe(logits, labels, mix)            # what the model said of the mixed batch

    meta.row_losses.end_epoch()                  # after each epoch
    confidence, predicted = model(held_out_images).softmax(1).max(1)
    meta.learn(predicted, confidence, held_out_labels)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

TEXT_KINDS = ("none", "mixup", "inter_class", "meta")
KINDS = (*TEXT_KINDS, "fmix", "cutmix")  # the last ones need height and width

FMIX_DECAY = 3.0  # power of the frequency by which the amplitudes of FMix's noise fall
LEAST_SHARE = 1e-4  # of a mix, beyond which its logarithm says nothing
LARGEST_EXCESS = 10.0  # of a row's loss


@dataclass
class Mix:
    """How a batch is mixed.

    Without `weight_map` and `box` the weight of a sample is `weight` everywhere.
    """

    partner: Tensor  # (batch,) the row with which each sample is mixed
    weight: Tensor  # (batch,) lambda, the weight of the sample's own label
    # (batch, 1, height, width) weight of the sample's own pixels; its mean over space is `weight`.
    weight_map: Tensor | None = None
    # (top, bottom, left, right) of the pixels that come from the partner alone, the same in all
    # samples; its share of the image is 1 - `weight`.
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
    if not 0 <= alpha <= 1e38:
        raise ValueError(f"alpha={alpha} must be from 0 to 1e38")
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

    Samples without such a partner have lambda = 1, so are not mixed.

    Args:
        labels, alpha, weight, generator: as of `mixup`.
    """
    count, device = len(labels), labels.device
    scores = torch.rand((count, count), generator=generator, device=device)
    best, partner = scores.masked_fill_(labels[:, None] == labels, -1.0).max(1)
    weights = sample_beta(alpha, count, weight=weight, device=device, generator=generator)
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
        labels, alpha, generator: as of `mixup`.
        height, width: of the images, in pixels.

    Returns:
        A Mix whose `weight` is the mean of its `weight_map`, of zeros and ones, over the image.
    """
    mix = mixup(labels, alpha, generator=generator)
    device = labels.device
    rows = torch.fft.fftfreq(height, device=device)
    columns = torch.fft.rfftfreq(width, device=device)
    frequency = (rows[:, None].square() + columns.square()).sqrt()
    parts = torch.randn((2, *frequency.shape), generator=generator, device=device)
    decay = frequency.clamp(min=1 / max(height, width)) ** FMIX_DECAY
    spectrum = torch.complex(*parts.unbind()) / decay
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
    """Paste a rectangle of the partner with about the area 1 - lambda (arXiv:1905.04899).

    The rectangle is centred anywhere in the image and cut off at its border; lambda then becomes
    the share of pixels that are left of the own image.

    Args:
        labels, alpha: as of `mixup`.
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

    It has the share sqrt(1 - lam) of the axis, around `centre`, which is a share as well.
    """
    half = math.sqrt(1 - lam) / 2
    return max(0, round((centre - half) * size)), min(size, round((centre + half) * size))


def sample_mix(
    kind: str, labels: Tensor, *, alpha: float, height: int, width: int, **settings: Any
) -> Mix:
    """Sample a Mix of a kind that is named by a string.

    Args:
        kind: one of `KINDS` except 'none' and 'meta'.
        labels, alpha: as of `mixup`.
        height, width: of the images, in pixels; kinds of `TEXT_KINDS` ignore them.
        settings: further arguments of that kind's function.
    """
    kinds: dict[str, Callable[..., Mix]] = {
        "mixup": mixup,
        "inter_class": inter_class,
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
        top, bottom, left, right = mix.box
        mixed = x.clone()
        pasted = _select_rows(x[..., top:bottom, left:right], mix.partner)
        mixed[..., top:bottom, left:right] = pasted
        return mixed
    per_sample = (-1, *[1] * (x.ndim - 1))
    weight = mix.weight.view(per_sample) if mix.weight_map is None else mix.weight_map
    weight, partners = weight.to(x.dtype), _select_rows(x, mix.partner)
    if weight.requires_grad or x.requires_grad:
        return torch.lerp(partners, x, weight)
    return partners.lerp_(x, weight)


def _select_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return x[rows]; in channels_last it is three times as fast as torch's indexing."""
    if x.ndim in (4, 5) and x.stride(1) == 1:
        return x.movedim(1, -1).index_select(0, rows).movedim(-1, 1)
    return x.index_select(0, rows)


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
    scores, labels = logits.log_softmax(1), labels.long()
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
        logits, labels, mix: as of `cross_entropy`, one label a sample.

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
        excess: (rows,) of the last epoch that had the row; NaN before.
        sums: (2, rows) of this epoch, on this rank: w times the excess, and w.
    """

    def __init__(self, rows: int, device: torch.device | None) -> None:
        self.excess = torch.full((rows,), math.nan, device=device)
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
        labels = labels.long()
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
        self.excess.copy_(torch.where(self.sums[1] > 0, mean, self.excess))
        self.sums.zero_()


def wrong_labels(predicted: Tensor, confidence: Tensor, labels: Tensor) -> tuple[float, int, float]:
    """Estimate the share of wrong labels by a network that was not trained on these rows.

    Where the network is most confident, its errors are those of the labels, as in confident
    learning (arXiv:1911.00068). The quarter of the rows with the highest probability counts, of
    those that are taken for each class, so that a class of right labels does not hide another;
    none of fewer than four rows.

    Args:
        predicted: (rows,) class numbers.
        confidence: (rows,) probabilities of these classes.
        labels: (rows,) integers.

    Returns:
        The share, NaN if no row counted; how many rows counted; and the share of all rows whose
        prediction is not their label.
    """
    order = confidence.argsort(descending=True)
    order = order[predicted[order].argsort(stable=True)]
    counts = predicted.bincount()
    first = counts.cumsum(0) - counts  # of each class in this order
    place = torch.arange(len(order), device=order.device) - first[predicted[order]]
    counted = order[4 * (place + 1) <= counts[predicted[order]]]
    is_error = (predicted != labels).double()
    return is_error[counted].mean().item(), len(counted), is_error.mean().item()


def least_share(share: float, number: int, errors: float = 2.0) -> float:
    """What a share in a sample of some number is at least: Wilson's bound, for standard errors."""
    middle = share + errors**2 / (2 * number)
    width = errors * math.sqrt(share * (1 - share) / number + (errors / (2 * number)) ** 2)
    return (middle - width) / (1 + errors**2 / number)


class MetaMixup:
    """Mixup where labels are wrong, in which rows give way whose label the network doubts.

    The idea of learning how to mix beside the model is that of Mai et al. (arXiv:1908.10059). What
    is learned here is the share of wrong labels, on rows that are not trained on in the meantime.
    Until labels are known to be wrong, lambda is 1: nothing is mixed. From then on partners are
    sampled as by `mixup`, lambda0 ~ Beta(alpha, alpha) for each sample, and

        logit lambda = (logit lambda0 + k s D) / sqrt(1 + k^2),

    where D is the excess of the partner in the epoch before (see `RowLosses`) minus that of the
    sample, of unit standard deviation in the batch, and s is the standard deviation of
    logit lambda0. So lambda is distributed about as lambda0: the slope k decides who gets the
    larger share, and not how much is mixed. It is four times the share of wrong labels, at most 2.
    Weighting samples by their losses is that of arXiv:1902.07379 and arXiv:1904.11238.

    Args:
        rows: of the training set.
        alpha: of the Beta distribution, where labels are wrong.
        device: of the labels.

    Attributes:
        shares: of wrong labels and of errors, as `wrong_labels` returns them, measured after each
            epoch and averaged with those before, half and half; None before the first one.
        wrong: the share of wrong labels, at most `MOST_WRONG`; 0 where it may be less than
            `LEAST_WRONG`, and at first where a network that still learns would look the same: most
            confident predictions are errors, or fewer than before by a standard error, or far fewer
            than of all predictions.
    """

    LEAST_WRONG, MOST_WRONG = 0.15, 0.5
    LEAST_RATIO = 0.6  # of errors among confident predictions to those among all
    SLOPE = 4.0  # for each wrong label
    LARGEST_SLOPE = 2.0

    def __init__(
        self, rows: int, *, alpha: float = 1.0, device: torch.device | None = None
    ) -> None:
        self.alpha = alpha
        # the standard deviation of the logit of a Beta variable, as far as it is not cut off
        variance = 2 * torch.polygamma(1, torch.tensor(alpha, dtype=torch.float64)).item()
        self.spread = min(math.sqrt(variance), -math.log(LEAST_SHARE))
        self.shares: tuple[float, float] | None = None
        self.wrong = 0.0
        self.row_losses = RowLosses(rows, device)
        self.rows = torch.empty(0, dtype=torch.long, device=device)  # of the next batches

    @property
    def slope(self) -> float:
        """How much the difference of two doubts shifts lambda's logit, in its deviations."""
        return min(self.SLOPE * self.wrong, self.LARGEST_SLOPE)

    def mix(self, labels: Tensor) -> Mix:
        """Sample the Mix of a batch; where `rows` does not say which rows these are, with k = 0."""
        rows, count, device = self.rows[: len(labels)], len(labels), labels.device
        if not self.wrong:
            return Mix(torch.arange(count, device=device), torch.ones(count, device=device))
        partner = torch.randperm(count, device=device)
        logit = torch.logit(sample_beta(self.alpha, count, device=device), eps=LEAST_SHARE)
        if self.alpha and len(rows) == count > 1:
            excess = self.row_losses.excess[rows]  # that of others for a new row
            excess = torch.where(excess.isnan(), excess.nanmean(), excess).nan_to_num()
            difference = excess[partner] - excess
            difference = difference / difference.std().clamp(min=1e-6)
            logit = (logit + self.slope * self.spread * difference) / math.hypot(1, self.slope)
        return Mix(partner, torch.sigmoid(logit))

    def observe(self, logits: Tensor, labels: Tensor, mix: Mix) -> None:
        """Take note of what the model said of a batch, whose rows are the next of `rows`."""
        rows, self.rows = self.rows.tensor_split([len(labels)])
        if len(rows) == len(labels):
            self.row_losses.add(rows, logits, labels=labels, mix=mix)

    def learn(self, predicted: Tensor, confidence: Tensor, labels: Tensor) -> None:
        """Learn from all held-out rows, after an epoch; see `wrong_labels` for the arguments."""
        share, number, errors = wrong_labels(predicted, confidence, labels)
        if not number:
            return
        before = self.shares or (share, errors)
        error = math.sqrt(share * (1 - share) / number)
        has_settled = self.shares is not None and share + error >= before[0]
        share, errors = self.shares = (before[0] + share) / 2, (before[1] + errors) / 2
        has_learned = share <= self.MOST_WRONG and share >= self.LEAST_RATIO * errors
        is_wrong = least_share(share, number) >= self.LEAST_WRONG
        is_known = is_wrong and (self.wrong > 0 or (has_settled and has_learned))
        self.wrong = min(share, self.MOST_WRONG) if is_known else 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"shares": self.shares, "wrong": self.wrong, "excess": self.row_losses.excess}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned.

        Raises:
            ValueError: it is of other data.
        """
        if state["excess"].shape != self.row_losses.excess.shape:
            raise ValueError("losses of other data")
        self.shares, self.wrong = state["shares"], state["wrong"]
        self.row_losses.excess.copy_(state["excess"])

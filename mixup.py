"""Mixup and its kin: every sample of a batch is mixed with another one, and so are their labels.

    mix = mixup(labels, alpha=0.2)                       # whom with, and how much; or intra, attention, cutmix
    logits = model(blend(images, mix))
    loss = cross_entropy(logits, labels, mix)            # - lambda log p(own label) - (1 - lambda) log p(partner's)

lambda is the weight of the unpermuted sample, everywhere. All functions are pure and wait for nothing; their randomness
comes from `generator` (None: torch's own). Hidden representations mix as images do: `blend` takes any (batch, ...) tensor.
`MetaMixup` learns lambda while the model learns.
"""

from __future__ import annotations

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
from optimizers import base

FIELD, CONTRAST = (
    4,
    2.0,
)  # of attention maps: side of the noise they are interpolated from, and how strong it is
KINDS = ("none", "mixup", "intra", "attention", "cutmix", "meta")
STRETCH = 0.01  # length of e v beside that of theta
POLICIES = ("pair", "beta", "sample")


@dataclass
class Mix:
    """How a batch is mixed.

    Attributes:
        partner: (batch,) the row each sample is mixed with.
        weight: (batch,) lambda, the weight of the sample's own label.
        map: (batch, 1, height, width) weight of the sample's own pixels, whose mean over space is `weight`.
        box: (top, bottom, left, right) of the pixels that are the partner's alone, the same in all samples; their share of the
            image is 1 - `weight`. Without map and box it is `weight` everywhere.
    """

    partner: Tensor
    weight: Tensor
    map: Tensor | None = None
    box: tuple[int, int, int, int] | None = None


# -------------------------------------------------------------------- whom with, and how much


def draw_beta(
    alpha: float, count: int, device: torch.device, generator: torch.Generator | None = None
) -> Tensor:
    """(count,) draws of Beta(alpha, alpha), float32; of float64 gammas, as both of a pair underflow float32 when alpha is small."""
    first, second = torch._standard_gamma(
        torch.full((2, count), alpha, dtype=torch.float64, device=device), generator=generator
    )
    return (first / (first + second)).float()


def mixup(
    labels: Tensor, alpha: float, per_sample: bool = False, generator: torch.Generator | None = None
) -> Mix:
    """Partners by a random permutation, lambda ~ Beta(alpha, alpha), one for the batch or `per_sample` (arXiv:1710.09412)."""
    count, device = len(labels), labels.device
    weight = draw_beta(alpha, count if per_sample else 1, device, generator).expand(count)
    return Mix(torch.randperm(count, generator=generator, device=device), weight)


def intra(
    labels: Tensor, alpha: float, same_class: bool = False, generator: torch.Generator | None = None
) -> Mix:
    """As `mixup` per sample, with partners of another class, or of the same class; who finds none stays as it is."""
    wanted = (labels[:, None] == labels) == same_class
    wanted.fill_diagonal_(False)
    order = torch.rand(wanted.shape, generator=generator, device=labels.device).masked_fill_(
        ~wanted, -1.0
    )
    best, partner = order.max(1)
    weight = draw_beta(alpha, len(labels), labels.device, generator)
    return Mix(partner, torch.where(best < 0, 1.0, weight))


def attention(
    labels: Tensor, alpha: float, height: int, width: int, generator: torch.Generator | None = None
) -> Mix:
    """As `mixup` per sample, with a smooth random map over space around lambda; its mean is the label's weight."""
    mix = mixup(labels, alpha, True, generator)
    noise = torch.randn(len(labels), 1, FIELD, FIELD, generator=generator, device=labels.device)
    field = F.interpolate(noise, (height, width), mode="bilinear", align_corners=False)
    map = torch.sigmoid(torch.logit(mix.weight, eps=1e-4)[:, None, None, None] + CONTRAST * field)
    return Mix(mix.partner, map.mean((1, 2, 3)), map)


def cutmix(
    labels: Tensor,
    alpha: float,
    height: int,
    width: int,
    per_sample: bool = False,
    generator: torch.Generator | None = None,
) -> Mix:
    """A rectangle of up to 1 - lambda of the image comes from the partner; the labels weigh as the pixels do (arXiv:1905.04899).

    One rectangle for the batch, drawn on the host by a CPU generator, or one `per_sample`.
    """
    count, device = len(labels), labels.device
    if not per_sample:
        partner = torch.randperm(
            count, generator=generator if device.type == "cpu" else None, device=device
        )
        lam = draw_beta(alpha, 1, torch.device("cpu"), generator).item()
        top, bottom, left, right = box = (
            *edges(torch.rand((), generator=generator).item(), lam, height),
            *edges(torch.rand((), generator=generator).item(), lam, width),
        )
        kept = 1 - (bottom - top) * (right - left) / (height * width)
        return Mix(partner, torch.full((1,), kept, device=device).expand(count), box=box)
    mix = mixup(labels, alpha, True, generator)
    half = (1 - mix.weight).sqrt() / 2
    centre = torch.rand(2, count, generator=generator, device=device)
    inside = []
    for middle, size in zip(centre, (height, width)):
        first = ((middle - half) * size).round().clamp(0, size)
        last = ((middle + half) * size).round().clamp(0, size)
        at = torch.arange(size, device=device)
        inside.append((at >= first[:, None]) & (at < last[:, None]))  # (batch, size)
    map = 1.0 - (inside[0][:, None, :, None] & inside[1][:, None, None, :]).float()
    return Mix(mix.partner, map.mean((1, 2, 3)), map)


def edges(middle: float, lam: float, size: int) -> tuple[int, int]:
    """First and last + 1 of the pixels of an axis of `size` that lie in a stretch of sqrt(1 - lam) of it around `middle`."""
    half = math.sqrt(1 - lam) / 2
    return max(0, round((middle - half) * size)), min(size, round((middle + half) * size))


# -------------------------------------------------------------------- mixing, and its loss


def blend(x: Tensor, mix: Mix) -> Tensor:
    """x (batch, ...), floating, mixed: lambda x + (1 - lambda) x[partner]. A new tensor in x's memory format."""
    if mix.box is not None:
        top, bottom, left, right = mix.box
        mixed = x.clone()
        source, target = (each[..., top:bottom, left:right] for each in (x, mixed))
        if x.requires_grad:
            target.copy_(rows_of(source, mix.partner))
        else:
            rows_of(source, mix.partner, out=target)
        return mixed
    weight = mix.weight.view(-1, *[1] * (x.ndim - 1)) if mix.map is None else mix.map
    weight, partners = weight.to(x.dtype), rows_of(x, mix.partner)
    return (
        torch.lerp(partners, x, weight)
        if weight.requires_grad or x.requires_grad
        else partners.lerp_(x, weight)
    )


def rows_of(x: Tensor, rows: Tensor, out: Tensor | None = None) -> Tensor:
    """x[rows] as fast as memory goes: torch's own index is three times slower in channels_last. `out` has x's strides."""
    if x.ndim == 4 and x.stride(1) == 1:
        into = None if out is None else out.permute(0, 2, 3, 1)
        return torch.index_select(x.permute(0, 2, 3, 1), 0, rows, out=into).permute(0, 3, 1, 2)
    return torch.index_select(x, 0, rows, out=out)


def cross_entropy(logits: Tensor, labels: Tensor, mix: Mix, label_smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy to the mixed labels: that of both labels, weighted, and of the soft label (batch, classes) alike."""
    scores = logits.log_softmax(1)
    one = mix.weight.stride(0) == 0  # lambda for the whole batch: the means can be taken first
    weight = (mix.weight[0] if one else mix.weight).to(scores.dtype)
    own, other = (
        F.nll_loss(scores, some, reduction="mean" if one else "none")
        for some in (labels, labels.index_select(0, mix.partner))
    )
    loss = torch.lerp(other, own, weight)
    if not one:
        loss = loss.mean()
    return (
        (1 - label_smoothing) * loss - label_smoothing * scores.mean() if label_smoothing else loss
    )


def num_correct(logits: Tensor, labels: Tensor, mix: Mix) -> Tensor:
    """Sum over the batch of the predicted labels' weights: accuracy under mixing is lambda-weighted, as the field reports it."""
    predicted = logits.detach().argmax(1)
    return (
        mix.weight * (predicted == labels)
        + (1 - mix.weight) * (predicted == labels.index_select(0, mix.partner))
    ).sum()


def sample_mix(kind: str, alpha: float, labels: Tensor, height: int, width: int) -> Mix:
    """The Mix of that kind, one of `KINDS` but 'none' and 'meta', for images of height x width; texts have neither."""
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


# -------------------------------------------------------------------- the gradient through a virtual step


def meta_gradient(
    model: nn.Module,
    mixed_loss: Callable[[Tensor], Tensor],
    clean_loss: Callable[[], Tensor],
    weights: Tensor,
    rate: float,
    scale: Tensor | float = 1.0,
    stretch: float = STRETCH,
) -> Tensor:
    """Gradient to `weights` of `clean_loss()` at theta - rate * grad `mixed_loss(weights)`; of the shape of `weights`.

    Parameters, buffers (BatchNorm's statistics) and random states are left as they were; no `.grad` is touched. All
    passes see the same random numbers, so dropout is part of the function that is differentiated.

    Args:
        model: whose parameters step; not wrapped for data parallelism.
        mixed_loss, clean_loss: scalars, computed by `model`.
        weights: what the first depends on.
        rate: of the virtual step, a.
        scale: losses are multiplied by it in front of each backward pass, for fp16.
        stretch: length of the differences' step beside the parameters' own.
    """
    parameters: list[Tensor] = [
        parameter for parameter in model.parameters() if parameter.requires_grad
    ]
    devices = {parameter.device for parameter in parameters if parameter.device.type != "cpu"}

    def gradient(loss: Callable[[], Tensor], to: list[Tensor]) -> list[Tensor]:
        with torch.random.fork_rng(list(devices)), torch.enable_grad():
            found = torch.autograd.grad(
                loss() * scale, to, allow_unused=True, materialize_grads=True
            )
        return list(torch._foreach_div(found, scale))

    with torch.no_grad(), unchanged(parameters, list(model.buffers())) as start:
        step = gradient(lambda: mixed_loss(weights.detach()), parameters)
        torch._foreach_add_(parameters, step, alpha=-rate)
        del step  # a copy of the model less
        direction = gradient(clean_loss, parameters)
        epsilon = stretch * base.global_norm(start) / base.global_norm(direction)
        torch._foreach_mul_(direction, epsilon)
        leaf, sides = weights.detach().requires_grad_(), []
        for sign in (1, -1):
            torch._foreach_copy_(parameters, start)
            torch._foreach_add_(parameters, direction, alpha=sign)
            sides += gradient(lambda: mixed_loss(leaf), [leaf])
        return (sides[1] - sides[0]) * (rate / (2 * epsilon))


@contextlib.contextmanager
def unchanged(parameters: list[Tensor], buffers: list[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters and buffers are bit for bit what they were, whatever the block does to them; gives the parameters' copies."""
    start, before = (
        [tensor.detach().clone() for tensor in tensors] for tensors in (parameters, buffers)
    )
    try:
        yield start
    finally:
        with torch.no_grad():
            for tensor, old in zip([*parameters, *buffers], [*start, *before]):
                tensor.copy_(old)


# -------------------------------------------------------------------- learning how much


class MetaMixup:
    """Mixup whose lambda is learned: it follows the gradient of a clean loss through a virtual step (arXiv:1908.10059).

        meta = MetaMixup(classes=10)
        if step % 16 == 0:
            meta.learn(model, labels, lambda mix: cross_entropy(model(blend(x, mix)), labels, mix),
                       lambda: F.cross_entropy(model(clean_x), clean_labels), rate=lr)
        mix = meta.mix(labels)                       # then as with any other mix

    Partners are drawn as by `mixup`. The own sample takes the larger share, lambda in [0.5, 1]: the partner's row of the same
    batch stands for the other half. 1 is no mixing. Policies:
        pair    lambda is a number for each unordered pair of classes, C (C + 1) / 2 in all; 0.75 at the start, the mean that
                Beta(1, 1) gives the larger share.
        beta    as `pair`, of two numbers: lambda ~ Beta(a, b), or 1 minus it if that is larger; Beta(alpha, alpha) at first.
        sample  as in the paper, a lambda for each sample of the batch in hand: drawn as by `beta` at first, then corrected, and
                gone with the batch. It mixes like `mixup` on all batches it does not learn from.

    Args:
        classes: C.
        policy: one of `POLICIES`.
        alpha: see above.
        lr: of Adam, on the logit of 2 lambda - 1, or on log a and log b.
        device: of the labels.
        process_group: whose ranks learn one policy; None is torch's default group, where there is one.
    """

    def __init__(
        self,
        classes: int,
        policy: str = "pair",
        alpha: float = 1.0,
        lr: float = 0.1,
        device: torch.device | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"unknown policy {policy}, wanted one of {', '.join(POLICIES)}")
        self.policy, self.alpha, self.lr, self.process_group = policy, alpha, lr, process_group
        pairs = classes * (classes + 1) // 2
        first, second = torch.triu_indices(classes, classes, device=device)
        self.numbers = torch.empty(
            classes, classes, dtype=torch.long, device=device
        )  # of each pair, in both orders
        self.numbers[first, second] = self.numbers[second, first] = torch.arange(
            pairs, device=device
        )
        shape = {"pair": (1, pairs), "beta": (2, pairs), "sample": (1, 0)}[policy]
        self.table = torch.zeros(
            shape, device=device, requires_grad=True
        )  # distances from the start
        self.adam = self.optimizer(self.table)
        self.learned: Mix | None = None

    def optimizer(self, parameter: Tensor) -> torch.optim.Adam:
        """Adam; its epsilon is far below the gradients, whose size is that of a learning rate over batch and pairs."""
        return torch.optim.Adam(
            [parameter],
            lr=self.lr,
            eps=1e-20,
            fused=torch_compat.supports_fused_optimizers([parameter]),
        )

    def mix(self, labels: Tensor) -> Mix:
        """The Mix of a batch; right after `learn`, the one it learned from, as the paper orders the two steps."""
        learned, self.learned = self.learned, None
        if learned is not None and len(learned.weight) == len(labels):
            return learned
        with torch.no_grad():
            partner = torch.randperm(len(labels), device=labels.device)
            policy = self.start(len(labels)) if self.policy == "sample" else self.table
            return Mix(partner, self.weigh(policy, labels, partner))

    def start(self, count: int) -> Tensor:
        """(1, count) what `sample` learns of a batch, before it has."""
        weight = draw_beta(self.alpha, count, self.table.device)
        return torch.logit((2 * weight - 1).abs(), eps=1e-4)[None]

    def weigh(self, policy: Tensor, labels: Tensor, partner: Tensor) -> Tensor:
        """(batch,) lambda under `policy`, differentiable."""
        rows = (
            policy if self.policy == "sample" else policy[:, self.numbers[labels, labels[partner]]]
        )
        if self.policy != "beta":
            return (1 + torch.sigmoid(rows[0])) / 2
        a, b = self.alpha * rows.double().exp()
        weight = torch.distributions.Beta(a, b, validate_args=False).rsample()
        return torch.maximum(weight, 1 - weight).float()

    def learn(
        self,
        model: nn.Module,
        labels: Tensor,
        mixed_loss: Callable[[Mix], Tensor],
        clean_loss: Callable[[], Tensor],
        rate: float,
        scale: Tensor | float = 1.0,
    ) -> None:
        """One step of the policy: see `meta_gradient.meta_gradient` for model, losses, rate and scale.

        In a process group every rank calls this with its own batches; the policy follows the mean of their gradients and
        stays the same on all ranks. A non-finite gradient changes nothing. The host waits for nothing.
        """
        online = self.policy == "sample"
        partner = torch.randperm(len(labels), device=labels.device)
        policy = self.start(len(labels)).requires_grad_() if online else self.table
        adam = self.optimizer(policy) if online else self.adam
        weight = self.weigh(policy, labels, partner)
        gradient = meta_gradient(
            model, lambda weight: mixed_loss(Mix(partner, weight)), clean_loss, weight, rate, scale
        )
        (policy.grad,) = torch.autograd.grad(weight, policy, gradient)
        if dist.is_available() and dist.is_initialized() and not online:
            dist.all_reduce(policy.grad, group=self.process_group)
            policy.grad /= dist.get_world_size(self.process_group)
        base.step_unless_skipped(adam, (~torch.isfinite(policy.grad)).any())
        with torch.no_grad():
            self.learned = Mix(
                partner,
                weight.detach() if self.policy == "beta" else self.weigh(policy, labels, partner),
            )

    def tables(self) -> dict[str, Tensor]:
        """What was learned, by name: (classes, classes) symmetric tables of lambda, or of a and b; none for `sample`."""
        with torch.no_grad():
            if self.policy == "pair":
                return {"lambda": (1 + torch.sigmoid(self.table[0, self.numbers])) / 2}
            if self.policy == "beta":
                return dict(zip("ab", self.alpha * self.table.exp()[:, self.numbers]))
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The policy and its optimizer, as tensors and numbers."""
        return {"table": self.table.detach(), "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo to `state_dict`."""
        with torch.no_grad():
            self.table.copy_(state["table"])
        self.adam.load_state_dict(state["adam"])

"""A linear probe: logistic regression on what a pretrained network computes before its classifier.

    head = last_linear(model)
    features, labels = compute_features(model, head, train, precision=..., world=world)
    weight, bias = fit_probe(features, labels, classes=10)        # a first classifier, in seconds
    train = Features(features, labels, world.device)              # epochs without the network
    model.forward = head.forward

A classifier that begins as the probe spares the layers before it the large first gradients of a
random one (Kumar et al., "Fine-Tuning can Distort Pretrained Features", arXiv:2202.10054).
"""

from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backends.execution import without_compilation
from backends.precision import Precision
from distributed.world import World
from input_pipeline.dataset import BatchedDataset
from input_pipeline.sampler import spread
from training import evaluation
from training.losses import BinaryCrossEntropy, CrossEntropy

# Of the squared weights, halved, beside the mean loss. On features of unit variance it was within
# .8 points of the best of 7 strengths on 200 to 5,000 rows of texts and images.
DECAY = 0.1
ITERATIONS = 100  # of L-BFGS


class Features:
    """A data set of vectors (rows, width) with labels (rows,) or (rows, classes) of 0 and 1."""

    lengths = None

    def __init__(self, features: Tensor, labels: Tensor, device: torch.device) -> None:
        self.features, self.labels = features.to(device), labels.to(device)

    def __len__(self) -> int:
        return len(self.labels)

    def batches(
        self, row_batches: Sequence[Tensor], epoch: int | None = None
    ) -> Generator[tuple[Tensor, Tensor]]:
        for rows in row_batches:
            rows = rows.to(self.labels.device)
            yield self.features[rows], self.labels[rows]


def last_linear(model: nn.Module) -> nn.Linear | None:
    """Return the layer whose outputs are the logits, if there is one."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return layers[-1] if layers else None


@torch.no_grad()
def compute_features(
    model: nn.Module,
    head: nn.Linear,
    data: BatchedDataset,
    *,
    precision: Precision,
    world: World,
    most: int | None = None,
    multilabel_classes: int = 0,
    **how: Any,
) -> tuple[Tensor, Tensor] | None:
    """Return what the head sees of each row, (rows, width) in fp32, and the labels; collective.

    Each rank computes a share. The model is in evaluation mode, and views are not augmented.

    Args:
        most: rows at most, spread evenly; None is all of them.
        multilabel_classes: number of classes where rows may have several labels, else 0.
        how: further arguments of `evaluation.outputs`.
    Returns:
        Both on the CPU of every rank; None where the head does not compute the logits alone.
    Raises:
        InputError: a row cannot be read.
    """
    seen: list[Tensor] = []
    hook = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    rows = spread(len(data), most or len(data))
    features = torch.zeros(len(rows), head.in_features, device=world.device)
    of_row = [multilabel_classes] if multilabel_classes else []
    labels = torch.zeros(len(rows), *of_row, dtype=torch.long, device=world.device)
    is_alone = True
    found = evaluation.outputs(model, data, rows, precision=precision, world=world, **how)
    for places, logits, targets in found:
        last = torch.cat(seen)[-len(logits) :] if seen else logits  # some before ran out of memory
        is_alone = is_alone and last.shape == (len(logits), head.in_features)
        if is_alone:
            with precision.autocast(), without_compilation():
                is_alone = torch.allclose(head(last).float(), logits)
            places = places.to(world.device)
            features[places], labels[places] = last.float(), targets.long()
        seen.clear()
    hook.remove()
    if not all(world.all_gather(is_alone)):
        return None
    return world.sum(features).cpu(), world.sum(labels).cpu()


def fit_probe(
    features: Tensor, labels: Tensor, *, classes: int, class_weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Fit a logistic regression with weight decay, by L-BFGS in float64.

    Args:
        features: (rows, width).
        labels: (rows,) class numbers; or (rows, classes) of 0 and 1, for one regression each.
        class_weights: (classes,) factors of the losses of each class; None is 1.
    Returns:
        weight (classes, width) and bias (classes,) of a linear layer.
    """
    mean, scale = features.mean(0), features.std(0, correction=0).clamp(min=1e-6)
    inputs = ((features - mean) / scale).to(torch.float64)
    weight = inputs.new_zeros(classes, inputs.shape[1], requires_grad=True)
    bias = inputs.new_zeros(classes, requires_grad=True)
    loss_fn = (BinaryCrossEntropy if labels.ndim > 1 else CrossEntropy)(0.0, class_weights)
    optimizer = torch.optim.LBFGS(
        [weight, bias], max_iter=ITERATIONS, line_search_fn="strong_wolfe", tolerance_grad=1e-5
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = loss_fn.compare(F.linear(inputs, weight, bias), labels).loss
        value = value + DECAY / 2 * weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    own = weight.detach() / scale
    return own, bias.detach() - own @ mean.to(own.dtype)

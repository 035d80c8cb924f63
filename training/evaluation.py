"""What a trained model is good for: its accuracy, overall and of each class.

result = evaluate(model, test, precision=precision, world=world, batch_size=256)
result.loss, result.accuracy                # with count_classes=10 its confusion as well, for
print(class_table(result, classes))         # the accuracy of each class
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backends.execution import without_compilation
from backends.precision import Precision
from distributed import fsdp
from distributed.world import World
from input_pipeline.dataset import BatchedDataset
from input_pipeline.sampler import rank_share
from training.progress_bar import progress_bar

EVAL_SET_NAMES = {"val": "validation", "test": "test"}  # in sentences


@dataclass(frozen=True)
class Evaluation:
    """What a model does on a set."""

    loss: float  # mean cross-entropy
    accuracy: float  # in 0..1
    # (classes, classes) number of samples, by their class (row) and the predicted one (column);
    # None where it was not asked for.
    confusion: Tensor | None = None


@torch.no_grad()  # in inference mode FSDP would make tensors that training cannot use
def evaluate(
    model: nn.Module,
    data: BatchedDataset,
    *,
    precision: Precision,
    world: World,
    batch_size: int,
    count_classes: int = 0,
    title: str = "",
) -> Evaluation:
    """Loss and accuracy over a set, of which each rank takes a share; one read of the device.

    The model runs eagerly, also where it is compiled for training.

    Args:
        count_classes: count the confusion of so many classes as well; 0 is none.
        title: with one, rank 0 shows a progress bar over its share.
    """
    model.eval()
    lengths = data.lengths
    order = torch.arange(len(data)) if lengths is None else torch.argsort(lengths, stable=True)
    plan = list(rank_share(order, world.rank, world_size=world.size).split(batch_size))
    mine, total = len(plan), sum(map(len, plan))
    if any(map(fsdp.is_sharded, model.modules())):
        # Every batch gathers weights from all ranks, so all ranks take part in as many batches.
        plan += [order[:1]] * (max(world.all_gather(mine)) - mine)
    sums = torch.zeros(3, dtype=torch.float64, device=world.device)  # loss, correct, samples
    pairs = torch.zeros(count_classes**2, dtype=torch.float64, device=world.device)
    with progress_bar(title, total, is_main=world.is_main and bool(title)) as bar:
        for number, (inputs, labels) in enumerate(data.batches(plan)):
            with precision.autocast(), without_compilation():
                logits = model(inputs).float()
            if number >= mine:
                continue
            predicted = logits.argmax(1)
            sums[0] += F.cross_entropy(logits, labels, reduction="sum")
            sums[1] += (predicted == labels).sum()
            sums[2] += len(labels)
            if count_classes:
                ones = torch.ones_like(labels, dtype=torch.float64)
                pairs.index_add_(0, count_classes * labels + predicted, ones)
            bar.update(len(labels))
    totals = world.sum(torch.cat([sums, pairs])).cpu()
    loss, num_correct, samples = totals[:3].tolist()
    confusion = totals[3:].long().view(count_classes, count_classes) if count_classes else None
    return Evaluation(loss / samples, num_correct / samples, confusion)


def evaluate_sets(
    model: nn.Module,
    eval_sets: Mapping[str, BatchedDataset],
    *,
    precision: Precision,
    world: World,
    batch_size: int,
    count_classes: int = 0,
) -> dict[str, Evaluation]:
    """`evaluate` on each set, by its name."""
    return {
        name: evaluate(
            model,
            data,
            precision=precision,
            world=world,
            batch_size=batch_size,
            count_classes=count_classes,
            title=f"evaluating on the {EVAL_SET_NAMES[name]} set",
        )
        for name, data in eval_sets.items()
    }


def class_table(evaluation: Evaluation, classes: Sequence[str]) -> str:
    """A table for the console: the accuracy of each class, from the confusion, and of all."""
    assert evaluation.confusion is not None
    num_correct, samples = evaluation.confusion.diag(), evaluation.confusion.sum(1)
    shares = (num_correct / samples.clamp(min=1)).tolist()
    lines = [
        f"{name:>20}  {100 * share:6.2f} %  of {number}"
        for name, share, number in zip(classes, shares, samples.tolist())
    ]
    lines.append(f"{'all':>20}  {100 * evaluation.accuracy:6.2f} %  loss {evaluation.loss:.4f}")
    return "\n".join(lines)

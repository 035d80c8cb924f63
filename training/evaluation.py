"""What a trained model is for: measuring it, per-class accuracy, predictions, export.

loss, accuracy = evaluate(model, test, precision, world, batch_size=256)
export(model, example_inputs, Path("model.onnx"), dynamic={0: ("batch", LARGEST_BATCH)})
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backends.precision import Precision
from distributed import fsdp
from distributed.world import World
from input_pipeline.sampler import rank_share


@torch.inference_mode()
def predict_logits(
    model: nn.Module, data: Any, precision: Precision, world: World, batch_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """(logits, labels) of this rank's rows, batch by batch; each row comes once over all ranks."""
    model.eval()
    order = (
        torch.arange(len(data))
        if data.lengths is None
        else torch.argsort(data.lengths, stable=True)
    )
    plan = list(rank_share(order, world.rank, world_size=world.size).split(batch_size))
    mine = len(plan)
    if fsdp.is_sharded(
        model
    ):  # weights are gathered from all ranks in every batch: all take part in as many
        plan += [order[:1]] * (world.max_over_ranks(mine) - mine)
    for number, (inputs, labels) in enumerate(data.batches(plan)):
        with precision.autocast():
            logits = model(inputs)
        if number < mine:
            yield logits.float(), labels


def evaluate(
    model: nn.Module, data: Any, precision: Precision, world: World, batch_size: int
) -> tuple[float, float]:
    """(mean cross-entropy, accuracy in 0..1) over the whole set; one read of the device at the end."""
    sums = torch.zeros(3, dtype=torch.float64, device=world.device)
    for logits, labels in predict_logits(model, data, precision, world, batch_size):
        sums[0] += F.cross_entropy(logits, labels, reduction="sum")
        sums[1] += (logits.argmax(1) == labels).sum()
        sums[2] += len(labels)
    loss, num_correct, count = world.sum(sums).tolist()
    return loss / count, num_correct / count


def report(
    model: nn.Module,
    data: Any,
    classes: list[str],
    precision: Precision,
    world: World,
    batch_size: int,
) -> dict[str, Any]:
    """Accuracy of the whole set and of each class: {'accuracy', 'loss', 'per_class': {name: (accuracy, samples)}}."""
    table = torch.zeros(
        3, len(classes), dtype=torch.float64, device=world.device
    )  # loss, hits, samples per class
    for logits, labels in predict_logits(model, data, precision, world, batch_size):
        table[0].index_add_(0, labels, F.cross_entropy(logits, labels, reduction="none").double())
        table[1].index_add_(0, labels, (logits.argmax(1) == labels).double())
        table[2].index_add_(0, labels, torch.ones_like(labels, dtype=torch.float64))
    losses, num_correct, counts = world.sum(table).cpu()
    return {
        "accuracy": (num_correct.sum() / counts.sum()).item(),
        "loss": (losses.sum() / counts.sum()).item(),
        "per_class": {
            name: ((h / max(n, 1)).item(), int(n))
            for name, h, n in zip(classes, num_correct, counts)
        },
    }


def print_report(result: dict[str, Any]) -> None:
    """The table of `report` on the console."""
    for name, (accuracy, samples) in result["per_class"].items():
        print(f"{name:>20}  {100 * accuracy:6.2f} %  of {samples}")
    print(f"{'all':>20}  {100 * result['accuracy']:6.2f} %  loss {result['loss']:.4f}")


@torch.inference_mode()
def print_predictions(
    model: nn.Module, inputs: Tensor, names: list[str], classes: list[str], batch_size: int
) -> None:
    """One line an input: its name, then the three likeliest classes with their probabilities."""
    model.eval()
    for part, part_names in zip(inputs.split(batch_size), chunks(names, batch_size)):
        probabilities = model(part).float().softmax(1)
        values, indices = probabilities.topk(min(3, len(classes)))
        for name, row, which in zip(part_names, values.tolist(), indices.tolist()):
            guesses = ", ".join(f"{classes[i]} {100 * p:.1f} %" for p, i in zip(row, which))
            print(f"{name}: {guesses}")


def chunks(items: list[str], size: int) -> Iterator[list[str]]:
    """Consecutive parts of `size` items."""
    for start in range(0, len(items), size):
        yield items[start : start + size]

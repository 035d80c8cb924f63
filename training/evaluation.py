"""What a trained model is good for: its accuracy and F1, overall and of each class.

how = {"precision": precision, "world": world, "batch_size": 256}
result = evaluate(model, test, num_classes=10, **how)
result.loss, result.accuracy
print(class_table(result, classes))         # the accuracy and F1 of each class
for rows, logits, labels in outputs(model, test, **how): ...
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backends.execution import without_compilation
from backends.precision import Precision
from distributed import fsdp
from distributed.agreement import raise_together
from distributed.world import World
from errors import InputError
from input_pipeline.dataset import BatchedDataset
from training.progress_bar import progress_bar
from training.scores import ScoredRows, keeps_logits

EVAL_SET_NAMES = {"val": "validation", "test": "test"}  # in sentences
METRIC_NAMES = {  # in sentences; the last ones are of rows with several labels
    "accuracy": "accuracy",
    "macro_f1": "macro-F1",
    "loss": "loss",
    "auroc": "AUROC",
    "map": "mean average precision",
    "micro_f1": "micro-F1",
}
TOP = 5  # most likely classes, of which one is to be right
MAX_CONFUSED_CLASSES = 1000  # of a confusion matrix: 8 MB


@dataclass(frozen=True)
class Evaluation:
    """What a model does on a set.

    Where rows may have several labels, a label is predicted above a probability of 1/2.
    """

    loss: float  # mean cross-entropy
    accuracy: float  # in 0..1; of several labels the share of rows of which all are right
    top5_accuracy: float  # in 0..1; 1 for as many classes; not a number for several labels
    class_counts: Tensor  # (3, classes) correct samples, samples and predictions of each
    # (classes, classes) number of samples, by their class (row) and the predicted one (column);
    # None for more than `MAX_CONFUSED_CLASSES`.
    confusion: Tensor | None = None
    # (classes,) average precision of each, not a number where no row has the label; None for one
    # label a row.
    average_precision: Tensor | None = None
    rows: ScoredRows | None = None  # None where there are too many

    @property
    def map(self) -> float | None:
        """The mean of the average precisions, of labels that rows have; None without them."""
        return None if self.average_precision is None else self.average_precision.nanmean().item()

    @property
    def micro_f1(self) -> float:
        """F1 of all decisions together, whichever class they are about."""
        correct, rows, predicted = self.class_counts.sum(1).tolist()
        return 2 * correct / max(rows + predicted, 1)

    @property
    def macro_f1(self) -> float:
        """The mean of the classes' F1, in 0..1."""
        return class_scores(self.class_counts)[-1, 2].item()

    @property
    def auroc(self) -> float | None:
        """The mean of the classes' areas under the ROC curve, in 0..1; None without the rows."""
        return None if self.rows is None else self.rows.auroc()

    def spread(self, eval_set: str) -> str:
        """The accuracy's standard error by chance of the rows, in words; '' of several labels.

        It is that of a binomial distribution, after Agresti and Coull, so that none is 0.
        """
        if self.average_precision is not None:
            return ""
        rows = int(self.class_counts[1].sum())
        share = (rows * self.accuracy + 2) / (rows + 4)
        error = 100 * math.sqrt(share * (1 - share) / (rows + 4))
        return f" (accuracy on {rows:,} {eval_set} rows: +- {error:.1f})"

    def calibrated(self, temperature: float) -> Evaluation:
        """The same, with probabilities of logits that are divided by `temperature`."""
        rows = self.rows
        return self if rows is None else replace(self, rows=replace(rows, temperature=temperature))


@torch.no_grad()  # in inference mode FSDP would make tensors that training cannot use
def outputs(
    model: nn.Module,
    data: BatchedDataset,
    rows: Tensor | None = None,
    *,
    precision: Precision,
    world: World,
    batch_size: int,
    title: str = "",
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Run a model on a set, of which each rank takes a share, in evaluation mode; collective.

    The model runs eagerly, also where it is compiled for training, and on parts of a batch where a
    GPU has no memory for it.

    Args:
        rows: of the set; None is all of them.
        title: with one, rank 0 shows a progress bar over its share.
    Yields:
        Of each of this rank's batches the places in `rows`, logits (batch, classes) and labels.
    Raises:
        InputError: a GPU has no memory for one sample, or for a batch of a sharded model, or a
            file is broken; on every rank, unless the model is sharded.
    """
    model.eval()
    rows = torch.arange(len(data)) if rows is None else rows
    order = torch.arange(len(rows))
    if data.lengths is not None:
        order = torch.argsort(data.lengths[rows], stable=True)
    plan = [part for part in order[world.rank :: world.size].split(batch_size) if len(part)]
    mine, total = len(plan), sum(map(len, plan))
    is_sharded = any(map(fsdp.is_sharded, model.modules()))
    if is_sharded:
        # Every batch gathers weights from all ranks, so all ranks take part in as many batches.
        plan += [order[:1]] * (max(world.all_gather(mine)) - mine)
    at_once = batch_size  # samples that the model takes
    bar = progress_bar(title, total, is_main=world.is_main and bool(title))
    # The ranks of a sharded model are inside its collectives, where one that fails ends alone.
    with bar, contextlib.nullcontext() if is_sharded else raise_together(world):
        batches = data.batches([rows[part] for part in plan])
        for number, (inputs, labels) in enumerate(batches):
            logits = None
            while logits is None:
                try:
                    with precision.autocast(), without_compilation():
                        logits = torch.cat([model(part).float() for part in inputs.split(at_once)])
                except torch.cuda.OutOfMemoryError:
                    if at_once == 1 or is_sharded:
                        raise InputError(
                            f"out of memory in an evaluation with {at_once} samples of a process; "
                            "use a smaller model or image, or another device"
                        ) from None
                    at_once = -(-at_once // 2)
            if number < mine:
                yield plan[number], logits, labels
                bar.update(len(labels))


@torch.no_grad()
def evaluate(
    model: nn.Module,
    data: BatchedDataset,
    *,
    num_classes: int,
    is_multilabel: bool = False,
    world: World,
    **how: Any,
) -> Evaluation:
    """Evaluate a model on a set by its `outputs`, of which `how` are arguments; two reads."""
    is_kept = keeps_logits(len(data), num_classes)
    widths = [num_classes * (is_kept or is_multilabel), num_classes if is_multilabel else 1, 1, 1]
    # Of each row: logits, targets, the predicted class, whether the right one is among the top 5.
    table = torch.zeros(len(data), sum(widths), device=world.device)
    loss = torch.zeros((), dtype=torch.float64, device=world.device)
    for rows, logits, labels in outputs(model, data, world=world, **how):
        targets, likely = labels.view(len(labels), -1), logits.topk(min(TOP, num_classes)).indices
        is_likely = (likely == targets[:, :1]).any(1, keepdim=True)
        columns = [logits[:, : widths[0]], targets, logits.argmax(1, keepdim=True), is_likely]
        table[rows.to(world.device)] = torch.cat([column.float() for column in columns], 1)
        if not is_multilabel:
            loss += F.cross_entropy(logits, labels, reduction="sum")
    logits_of_rows, *columns = world.sum(table).cpu().split(widths, 1)
    if is_multilabel:
        result = evaluate_labels(logits_of_rows, columns[0])
        return result if is_kept else replace(result, rows=None)
    targets, predicted, is_likely = (column[:, 0].long() for column in columns)
    right, every, confusion = targets == predicted, torch.ones_like(targets), None
    if num_classes <= MAX_CONFUSED_CLASSES:
        pairs = _count(num_classes**2, num_classes * targets + predicted, every)
        confusion = pairs.view(num_classes, num_classes)
    counted = ((targets, right.long()), (targets, every), (predicted, every))
    return Evaluation(
        world.sum(loss).item() / len(data),
        right.double().mean().item(),
        is_likely.double().mean().item(),
        class_counts=torch.stack([_count(num_classes, *each) for each in counted]),
        confusion=confusion,
        rows=ScoredRows(logits_of_rows, targets) if is_kept else None,
    )


def _count(size: int, numbers: Tensor, weights: Tensor) -> Tensor:
    # as bincount, which fake tensors, whose values nobody knows, do not have
    return torch.zeros(size, dtype=torch.long).index_add_(0, numbers, weights)


def evaluate_labels(logits: Tensor, targets: Tensor) -> Evaluation:
    """Evaluate logits (rows, classes) by targets of that shape, 1 for each label of a row."""
    rows, is_set, is_predicted = ScoredRows(logits, targets), targets > 0, logits > 0
    parts = [is_set & is_predicted, is_set, is_predicted]
    loss = F.binary_cross_entropy_with_logits(logits.double(), targets.double(), reduction="sum")
    return Evaluation(
        loss.item() / len(logits),
        (is_set == is_predicted).all(1).double().mean().item(),
        torch.nan,
        class_counts=torch.stack([part.sum(0) for part in parts]),
        average_precision=rows.average_precisions(),
        rows=rows,
    )


def class_scores(class_counts: Tensor) -> Tensor:
    """Precision, recall and F1 of each class, as in scikit-learn, then means: (classes + 1, 3).

    A score without rows is 0. The means are over the classes that have rows or predictions; that of
    F1 is the macro-F1. `class_counts` are those of an `Evaluation`.
    """
    correct, rows, predicted = class_counts
    parts = torch.stack([correct, correct, 2 * correct], dim=1).double()
    scores = parts / torch.stack([predicted, rows, rows + predicted], dim=1).clamp(min=1)
    return torch.cat([scores, scores[rows + predicted > 0].mean(0, keepdim=True)])


def class_table(evaluation: Evaluation, classes: Sequence[str]) -> str:
    """A table for the console: accuracy and F1 of each class, and of all.

    Average precision takes the place of accuracy where rows may have several labels.
    """
    scores, rows = class_scores(evaluation.class_counts).tolist(), evaluation.class_counts[1]
    title, shown = "", [recall for _, recall, _ in scores]
    of_all = f"{100 * evaluation.accuracy:6.2f} %  F1 {100 * scores[-1][2]:6.2f} %"
    if evaluation.average_precision is not None:
        title, shown = "AP ", evaluation.average_precision.tolist()
        shares = {"mAP": evaluation.map, "micro-F1": evaluation.micro_f1}
        shares |= {"macro-F1": evaluation.macro_f1, "all labels right": evaluation.accuracy}
        of_all = "  ".join(f"{name} {100 * (share or 0):.2f} %" for name, share in shares.items())
    lines = [
        f"{name:>20}  {title}{100 * first:6.2f} %  F1 {100 * f1:6.2f} %  of {number}"
        for name, first, (_, _, f1), number in zip(classes, shown, scores, rows.tolist())
    ]
    return "\n".join([*lines, f"{'all':>20}  {of_all}  loss {evaluation.loss:.4f}"])

"""What a trained model is good for: its accuracy and F1, overall and of each class.

result = evaluate(model, test, precision=precision, world=world, batch_size=256)
result.loss, result.accuracy                # with count_classes=10 counts of them as well, for
print(class_table(result, classes))         # the accuracy and F1 of each class
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backends.device import widest_float
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
MAX_CONFUSED_CLASSES = 1000  # of a confusion matrix: 8 MB, which the ranks add up


@dataclass(frozen=True)
class Evaluation:
    """What a model does on a set.

    Where rows may have several labels, a label is predicted above a probability of 1/2.
    """

    loss: float  # mean cross-entropy
    accuracy: float  # in 0..1; of several labels the share of rows of which all are right
    top5_accuracy: float  # in 0..1; 1 for as many classes; not a number for several labels
    # (3, classes) correct samples, samples and predictions of each; None where not asked for
    class_counts: Tensor | None = None
    # (classes, classes) number of samples, by their class (row) and the predicted one (column);
    # None for more than `MAX_CONFUSED_CLASSES`.
    confusion: Tensor | None = None
    # (classes,) average precision of each, not a number where no row has the label; None for one
    # label a row.
    average_precision: Tensor | None = None
    rows: ScoredRows | None = None  # None where there are too many, or classes are not counted

    @property
    def map(self) -> float | None:
        """The mean of the average precisions, of labels that rows have; None without them."""
        return None if self.average_precision is None else self.average_precision.nanmean().item()

    @property
    def micro_f1(self) -> float | None:
        """F1 of all decisions together, whichever class they are about; None without counts."""
        if self.class_counts is None:
            return None
        correct, rows, predicted = self.class_counts.sum(1).tolist()
        return 2 * correct / max(rows + predicted, 1)

    @property
    def macro_f1(self) -> float | None:
        """The mean of the classes' F1, in 0..1; None without their counts."""
        return None if self.class_counts is None else class_scores(self.class_counts)[-1, 2].item()

    @property
    def auroc(self) -> float | None:
        """The mean of the classes' areas under the ROC curve, in 0..1; None without the rows."""
        return None if self.rows is None else self.rows.auroc()

    def calibrated(self, temperature: float) -> Evaluation:
        """The same, with probabilities of logits that are divided by `temperature`."""
        rows = self.rows
        return self if rows is None else replace(self, rows=replace(rows, temperature=temperature))


@torch.no_grad()  # in inference mode FSDP would make tensors that training cannot use
def evaluate(
    model: nn.Module,
    data: BatchedDataset,
    *,
    precision: Precision,
    world: World,
    batch_size: int,
    count_classes: int = 0,
    is_multilabel: bool = False,
    title: str = "",
    on_logits: Callable[[Tensor, Tensor], None] = lambda logits, labels: None,
) -> Evaluation:
    """Evaluate a model on a set, of which each rank takes a share; two reads of the device.

    The model runs eagerly, also where it is compiled for training, and on parts of a batch where a
    GPU has no memory for it.

    Args:
        count_classes: number of classes that are counted; 0 counts none. With it the logits are
            kept, unless there are very many.
        is_multilabel: rows may have several labels; the classes must be counted.
        title: with one, rank 0 shows a progress bar over its share.
        on_logits: is called with logits (rows, classes) and labels of each of this rank's batches.
    Raises:
        InputError: a GPU has no memory for one sample, or for a batch of a sharded model, or a
            file is broken; on every rank, unless the model is sharded.
    """
    model.eval()
    lengths = data.lengths
    order = torch.arange(len(data)) if lengths is None else torch.argsort(lengths, stable=True)
    plan = [rows for rows in order[world.rank :: world.size].split(batch_size) if len(rows)]
    mine, total = len(plan), sum(map(len, plan))
    is_sharded = any(map(fsdp.is_sharded, model.modules()))
    if is_sharded:
        # Every batch gathers weights from all ranks, so all ranks take part in as many batches.
        plan += [order[:1]] * (max(world.all_gather(mine)) - mine)
    dtype = widest_float(world.device)
    sums = torch.zeros(4, dtype=dtype, device=world.device)  # loss, correct, top 5, samples
    rows = batch_size  # that the model takes at a time
    counts = sums.new_zeros(3, count_classes)
    pairs = sums.new_zeros(count_classes**2 if count_classes <= MAX_CONFUSED_CLASSES else 0)
    is_kept = count_classes > 0 and keeps_logits(len(data), count_classes)
    widths = [count_classes, count_classes if is_multilabel else 1]  # of a row's logits, targets
    kept = torch.zeros(len(data) * (is_kept or is_multilabel), sum(widths), device=world.device)
    bar = progress_bar(title, total, is_main=world.is_main and bool(title))
    # The ranks of a sharded model are inside its collectives, where one that fails ends alone.
    with bar, contextlib.nullcontext() if is_sharded else raise_together(world):
        for number, (inputs, labels) in enumerate(data.batches(plan)):
            logits = None
            while logits is None:
                try:
                    with precision.autocast(), without_compilation():
                        logits = torch.cat([model(part).float() for part in inputs.split(rows)])
                except torch.cuda.OutOfMemoryError:
                    if rows == 1 or is_sharded:
                        raise InputError(
                            f"out of memory in an evaluation with {rows} samples of a process; "
                            "use a smaller model or image, or another device"
                        ) from None
                    rows = -(-rows // 2)
            if number >= mine:
                continue
            on_logits(logits, labels)
            bar.update(len(labels))
            if len(kept):
                targets = labels.float().view(len(labels), -1)
                kept[plan[number].to(world.device)] = torch.cat([logits, targets], 1)
            if is_multilabel:
                continue
            predicted, ones = logits.argmax(1), torch.ones_like(labels, dtype=dtype)
            right = (predicted == labels).to(dtype)
            sums[0] += F.cross_entropy(logits, labels, reduction="sum")
            sums[1] += right.sum()
            likely = logits.topk(min(TOP, logits.shape[1])).indices
            sums[2] += (likely == labels[:, None]).sum()
            sums[3] += len(labels)
            if count_classes:
                counts[0].index_add_(0, labels, right)
                counts[1].index_add_(0, labels, ones)
                counts[2].index_add_(0, predicted, ones)
            if len(pairs):
                pairs.index_add_(0, count_classes * labels + predicted, ones)
    logits_of_rows, targets = world.sum(kept).cpu().split(widths, 1)
    if is_multilabel:
        result = evaluate_labels(logits_of_rows, targets)
        return result if is_kept else replace(result, rows=None)
    totals = world.sum(torch.cat([sums, counts.flatten(), pairs])).cpu()
    loss, correct, in_top5, samples = totals[:4].tolist()
    counts, pairs = totals[4:].long().tensor_split([counts.numel()])
    return Evaluation(
        loss / samples,
        correct / samples,
        in_top5 / samples,
        class_counts=counts.view(3, count_classes) if count_classes else None,
        confusion=pairs.view(count_classes, count_classes) if len(pairs) else None,
        rows=ScoredRows(logits_of_rows, targets[:, 0].long()) if is_kept else None,
    )


def evaluate_labels(logits: Tensor, targets: Tensor) -> Evaluation:
    """Evaluate logits where rows may have several labels.

    Args:
        logits: (rows, classes).
        targets: (rows, classes), 1 where a row has the label, else 0.
    """
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
    """Precision, recall and F1 of each class, and their means, in 0..1; as in scikit-learn.

    A score without rows is 0. The means are over the classes that have rows or predictions; that of
    F1 is the macro-F1.

    Args:
        class_counts: (3, classes), as of `Evaluation`.
    Returns:
        (classes + 1, 3) float64, the means last.
    """
    correct, rows, predicted = class_counts
    parts = torch.stack([correct, correct, 2 * correct], dim=1).double()
    scores = parts / torch.stack([predicted, rows, rows + predicted], dim=1).clamp(min=1)
    return torch.cat([scores, scores[rows + predicted > 0].mean(0, keepdim=True)])


def class_table(evaluation: Evaluation, classes: Sequence[str]) -> str:
    """A table for the console: accuracy and F1 of each class, and of all.

    Average precision takes the place of accuracy where rows may have several labels.
    """
    assert evaluation.class_counts is not None
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

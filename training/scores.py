"""How good a model's probabilities are: ranking, agreement, calibration; and the worst rows.

rows = evaluate(model, val, ...).rows                    # None where there are too many
rows = replace(rows, temperature=fit_temperature(rows))
describe_scores(rows.scores())                           # AUROC 99.12 %, average precision ...
worst_rows(rows, classes, show)                          # those of the highest loss

The temperature is that of Guo et al., "On Calibration of Modern Neural Networks", arXiv:1706.04599.
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from errors import InputError

BINS = 15  # of probabilities, whose rows are compared with how often they are right
MOST_FITTED = 1_000_000  # logits that a temperature is fitted to, which takes a second
MAX_CLASSES = 1000  # of an evaluation that keeps the logits of its rows
MAX_LOGITS = 10_000_000  # of one: 40 MB, which the ranks add up
TOO_MANY = "AUROC and calibration are left out beyond 1,000 classes or 10 million logits"
SCORES = {  # in words
    "auroc": "AUROC {:.2%}",
    "average_precision": "average precision {:.2%}",
    "kappa": "Cohen's kappa {:.4f}",
    "calibration_error": "calibration error {:.2%}",
    "uncalibrated_error": "{:.2%} without the temperature",
    "temperature": "which is {:.3f}",
}
WORST = 12  # rows that a report shows
MOST_NAMED = 5  # labels of a row that it names
Show = Callable[[int], dict[str, str]]
"""Returns what a page shows of a row: `text`, or `image`, a PNG as a data URI, and `name`."""


@dataclass(frozen=True, eq=False)
class ScoredRows:
    """The rows of an evaluation, on the CPU."""

    logits: Tensor  # (rows, classes) float32
    targets: Tensor  # (rows,) class numbers; or (rows, classes), 1 for each label of a row
    temperature: float = 1.0  # which divides the logits

    @property
    def is_multilabel(self) -> bool:
        """Whether rows may have several labels."""
        return self.targets.ndim > 1

    def probabilities(self) -> Tensor:
        """Return the probability of each class, (rows, classes) float64."""
        scaled = self.logits.double() / self.temperature
        return scaled.sigmoid() if self.is_multilabel else scaled.softmax(1)

    def losses(self, temperature: float | Tensor) -> Tensor:
        """Return the cross-entropy of each row, (rows,) float64, added up over several labels."""
        scaled = self.logits.double() / temperature
        if not self.is_multilabel:
            return F.cross_entropy(scaled, self.targets, reduction="none")
        targets = self.targets.double()
        return F.binary_cross_entropy_with_logits(scaled, targets, reduction="none").sum(1)

    def of_each_class(self, measure: Callable[[Any, Any], float], *, least_others: int) -> Tensor:
        """Return a measure of each class against the rest, (classes,) float64.

        It is not a number where no row has the class. Of two classes only the second one counts.

        Args:
            measure: of whether rows have the class, and of their scores.
            least_others: rows without the class, with fewer of which it is not a number either.
        """
        # Of several labels, logits have the order of the probabilities.
        scores = self.logits if self.is_multilabel else self.probabilities()
        found = torch.full((scores.shape[1],), torch.nan, dtype=torch.float64)
        first = int(len(found) == 2 and not self.is_multilabel)
        for number in range(first, len(found)) if scores.isfinite().all() else ():
            has = self.targets[:, number] > 0 if self.is_multilabel else self.targets == number
            if 0 < has.sum() <= len(has) - least_others:
                found[number] = measure(has.numpy(), scores[:, number].numpy())
        return found

    def auroc(self) -> float:
        """Return the mean of the classes' areas under the ROC curve."""
        from sklearn.metrics import roc_auc_score

        return self.of_each_class(roc_auc_score, least_others=1).nanmean().item()

    def average_precisions(self) -> Tensor:
        """Return the average precision of each class, as of `of_each_class`."""
        from sklearn.metrics import average_precision_score  # takes a second

        return self.of_each_class(average_precision_score, least_others=0)

    def calibration_error(self) -> float:
        """Return the mean distance between probability and share of hits over 15 bins, in 0..1.

        The probabilities are those of the predicted class, of several labels those of each label.
        """
        confidence, is_hit = self.probabilities(), self.targets > 0
        if not self.is_multilabel:
            confidence, predicted = confidence.max(1)
            is_hit = predicted == self.targets
        bins = (confidence * BINS).long().clamp(max=BINS - 1).flatten()
        gaps = (is_hit.double() - confidence).flatten()
        sums = torch.zeros(BINS, dtype=torch.float64).index_add_(0, bins, gaps)
        return (sums.abs().sum() / len(gaps)).item()

    def scores(self) -> dict[str, float]:
        """Return the finite figures of `SCORES` by their names."""
        from sklearn.metrics import cohen_kappa_score

        if not self.logits.isfinite().all():
            return {}
        found: dict[str, Any] = {"auroc": self.auroc()}
        found["average_precision"] = self.average_precisions().nanmean()
        if not self.is_multilabel:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of rows of one class, which have none
                found["kappa"] = cohen_kappa_score(self.targets, self.logits.argmax(1))
        found["calibration_error"] = self.calibration_error()
        if self.temperature != 1:
            found["uncalibrated_error"] = replace(self, temperature=1.0).calibration_error()
            found["temperature"] = self.temperature
        return {name: float(value) for name, value in found.items() if math.isfinite(value)}


def keeps_logits(rows: int, classes: int) -> bool:
    """Return whether an evaluation of this many rows and classes keeps the logits of each row."""
    return classes <= MAX_CLASSES and rows * classes <= MAX_LOGITS


def describe_scores(scores: Mapping[str, float] | None) -> str:
    """Write `ScoredRows.scores` as a line; None stands for too many rows or classes."""
    if scores is None:
        return TOO_MANY
    words = [form.format(scores[name]) for name, form in SCORES.items() if name in scores]
    return ", ".join(words).replace("%", " %") or "a logit is not finite"


def fit_temperature(rows: ScoredRows) -> float:
    """Return what the logits are divided by for the least cross-entropy; 1 if one is not finite.

    A normal distribution of its logarithm, which weighs as much as a row, keeps it from the limit
    where a few rows are all right.

    Args:
        rows: that the model was not trained on; of more than a million logits a part is used.
    """
    if not rows.logits.isfinite().all():
        return 1.0
    every = -(-rows.logits.numel() // MOST_FITTED)
    some = replace(rows, logits=rows.logits[::every], targets=rows.targets[::every])
    log = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([log], max_iter=50, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = (some.losses(log.exp()).sum() + log.square() / 2) / len(some.logits)
        value.backward()
        return value

    optimizer.step(loss)
    return log.exp().item()


def worst_rows(rows: ScoredRows, classes: Sequence[str], show: Show) -> list[dict[str, Any]]:
    """Return the rows of the highest loss, whose labels may be wrong, as plain values.

    Returns:
        Of each row its number from 1 on, loss, labels and predictions with their probabilities, and
        what `show` returns, unless it cannot read the row.
    """
    losses, found = rows.losses(rows.temperature), []
    for number in losses.topk(min(WORST, len(losses))).indices.tolist():
        logits, target = rows.logits[number], rows.targets[number]
        one = replace(rows, logits=logits[None], targets=target[None])
        [probabilities] = one.probabilities().tolist()
        numbers = {"labels": target, "predicted": logits.argmax()}
        if rows.is_multilabel:
            numbers = {"labels": target.nonzero(), "predicted": (logits > 0).nonzero()}
        row: dict[str, Any] = {"row": number + 1, "loss": losses[number].item()}
        for name, each in numbers.items():
            few = each.flatten().tolist()[:MOST_NAMED]
            row[name] = [[classes[i], probabilities[i]] for i in few]
        with contextlib.suppress(InputError, OSError):
            row |= show(number)
        found.append(row)
    return found

"""Predictions of a trained model: printed, or written as JSON lines or as csv.

predictions = predict(classifier, paths, samples, batch_size=64, unread={})
write_predictions(Path("out.jsonl"), predictions, classifier.card)
"""

import csv
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from errors import InputError, writing
from training.atomic_file import atomic_write
from training.card import Outputs
from training.classifier import Classifier

SUFFIXES = (".jsonl", ".csv")
MOST_LIKELY = 3  # classes that a printed prediction names
LONGEST_TEXT = 60  # characters of a text that a printed prediction repeats
DECIMALS = 6  # of a probability in a file
ROWS_AT_ONCE = 256  # a device may not have the memory for a whole batch of the training


@dataclass(frozen=True)
class Sample:
    """What a prediction is of: a file or a line of one, and the text of the line."""

    name: str
    text: str | None = None

    def show(self) -> str:
        """The text, or the name where there is none, cut to fit on a line."""
        shown = self.name if self.text is None else " ".join(self.text.split())
        is_long = self.text is not None and len(shown) > LONGEST_TEXT
        return shown[: LONGEST_TEXT - 3] + "..." if is_long else shown


Prediction = tuple[Sample, list[float]]
"""A sample and the probability of every class."""


def predict(
    classifier: Classifier,
    inputs: Sequence[Any],
    samples: Iterable[Sample],
    *,
    batch_size: int,
    unread: dict[str, str],
) -> Iterator[Prediction]:
    """Yield the prediction of each sample, of which the classifier takes `inputs`.

    Those that cannot be read are left out; `unread` gets their names, and why.
    """
    rows, coming = min(batch_size, ROWS_AT_ONCE), iter(samples)
    for start in range(0, len(inputs), rows):
        batch = inputs[start : start + rows]
        try:
            found = classifier.probabilities(batch, batch_size=rows).tolist()
        except InputError as error:
            if len(batch) > 1:  # each alone, to tell which cannot be read
                yield from predict(classifier, batch, coming, batch_size=1, unread=unread)
            else:
                unread[next(coming).name] = str(error)
        else:
            yield from zip(itertools.islice(coming, len(found)), found)


def print_predictions(predictions: Iterable[Prediction], outputs: Outputs) -> None:
    """Print a line for each sample: its most likely classes, or all labels where it may have any.

    Of a sample without a label the most likely one is said.
    """
    for sample, probabilities in predictions:
        count = len(outputs.labels(probabilities)) if outputs.is_multilabel else MOST_LIKELY
        likely = sorted(zip(probabilities, outputs.classes), key=lambda each: -each[0])
        guesses = (f"{name} {100 * share:.1f} %" for share, name in likely[: max(count, 1)])
        none = "" if count else "no label; most likely "
        print(f"{sample.show()}: {none}{', '.join(guesses)}")


def write_predictions(path: Path, predictions: Iterable[Prediction], outputs: Outputs) -> int:
    """Write name, predicted class and all probabilities of each sample; returns their number.

    The file appears when it is complete. In names that are not UTF-8 the other bytes are written as
    backslash escapes. Where a sample may have several labels, they are a list in JSON, and joined
    by their separator in csv.

    Raises:
        InputError: the file cannot be written.
    """
    count, classes = 0, outputs.classes
    with (
        writing(f"--predict_out {path}", "file"),
        atomic_write(path) as temporary,
        open(temporary, "w", newline="", encoding="utf-8", errors="backslashreplace") as file,
    ):
        rows = csv.writer(file)
        for count, (sample, probabilities) in enumerate(predictions, 1):
            predicted: Any = classes[probabilities.index(max(probabilities))]
            if outputs.label_separator is not None:
                predicted = outputs.labels(probabilities)
                if path.suffix == ".csv":
                    predicted = outputs.label_separator.join(predicted)
            record: dict[str, Any] = {
                "name": sample.name,
                **({} if sample.text is None else {"text": sample.text}),
                "predicted": predicted,
            }
            rounded = [round(probability, DECIMALS) for probability in probabilities]
            if path.suffix == ".jsonl":
                record["probabilities"] = dict(zip(classes, rounded))
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
                continue
            if count == 1:
                rows.writerow([*record, *(f"probability_{name}" for name in classes)])
            rows.writerow([*record.values(), *rounded])
    return count

"""A trained run as a function of texts or images, without its data, flags or training loop.

    classifier = load("runs/my-run")                     # or a .pt file
    classifier.predict(["a text", "another one"])        # ["sports", "business"]
    classifier.predict(["cat.png", image, array])        # paths, PIL images, uint8 arrays
    classifier.probabilities(["a text"])                 # (1, classes)
    multilabel.predict(["a text"], threshold=0.4)        # [["sports", "politics"]]

The probabilities are those of `--predict`. Images need Pillow and numpy, texts tokenizers.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from training import checkpoint
from training.card import THRESHOLD, Card, read_card


def load(path: str | Path, *, device: str | torch.device = "cpu") -> Classifier:
    """Load the model of a run.

    Args:
        path: a run folder, whose last epoch counts, or a .pt file in it, such as best.pt.
        device: where the model computes.
    Raises:
        InputError: there is no checkpoint, or it is damaged.
    Warns:
        The last checkpoint of the folder is damaged, and the one before it is taken.
    """
    found = checkpoint.load(Path(path).expanduser())
    if found.warning:
        warnings.warn(found.warning, stacklevel=2)
    return of_checkpoint(found, torch.device(device), {})


def of_checkpoint(
    found: checkpoint.Checkpoint, device: torch.device, changes: Mapping[str, Any]
) -> Classifier:
    """Make the model of a checkpoint with changes to its metadata.

    Raises:
        InputError: the weights do not fit.
    """
    card = read_card({**found.metadata, **changes}, found.temperature)
    model = card.create_model()
    checkpoint.load_into(model, found.weights, "model")
    model = model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Classifier(model.eval(), card)


class Classifier:
    """A model, from what `prepare` returns to logits (batch, classes), and what it means."""

    def __init__(self, model: nn.Module, card: Card) -> None:
        self.model, self.card, self.classes = model, card, list(card.classes)

    def prepare(self, samples: Sequence[Any]) -> Tensor:
        """Return the model's inputs for a list of samples, on its device."""
        return self.card.prepare(samples, next(self.model.parameters()).device)

    def predict(
        self, samples: Sequence[Any], *, batch_size: int = 64, threshold: float = THRESHOLD
    ) -> list[Any]:
        """Return the most likely class of each sample; of a run of several labels all of them.

        Args:
            samples: texts; or images, each a path, a PIL image, or a uint8 array (height, width)
                or (height, width, 3). A list, also of a single one.
            batch_size: samples that are computed together.
            threshold: of several labels, the probability above which a sample has one.
        Returns:
            A name for each sample; or a list of names, which may be empty.
        Raises:
            InputError: an image cannot be read, or is another kind of array.
            TypeError: the samples are no list, or one of them is no text.
        """
        found = self.probabilities(samples, batch_size=batch_size)
        if self.card.is_multilabel:
            return [self.card.labels(row, threshold) for row in found.tolist()]
        return [self.classes[number] for number in found.argmax(1).tolist()]

    @torch.inference_mode()
    def probabilities(self, samples: Sequence[Any], *, batch_size: int = 64) -> Tensor:
        """Return the probability of each class, (samples, classes) float32 on the CPU.

        Args, raises: see `predict`.
        """
        if isinstance(samples, str | Mapping) or not hasattr(samples, "__getitem__"):
            raise TypeError("give a list of samples, also of a single one")
        shape: tuple[int, ...] = getattr(samples, "shape", ())
        if len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3, 4)):
            raise TypeError("give a list of samples, also of a single image")
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1")
        parts = [torch.empty(0, len(self.classes))]
        for start in range(0, len(samples), batch_size):
            logits = self.model(self.prepare(samples[start : start + batch_size]))
            parts.append(self.card.probabilities(logits.float()).cpu())
        return torch.cat(parts)

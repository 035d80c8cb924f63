"""A trained run as a function of texts or images, without its data, flags or training loop.

    classifier = load("runs/my-run")                     # or a .pt file
    classifier.predict(["a text", "another one"])        # ["sports", "business"]
    classifier.predict(["cat.png", image, array])        # paths, PIL images, uint8 arrays
    classifier.probabilities(["a text"])                 # (1, classes)

The probabilities are those of `--predict`. Images need Pillow and numpy, texts tokenizers.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from errors import InputError, excerpt, first_line
from training import checkpoint


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
    state, device = checkpoint.load(Path(path), flag="load"), torch.device(device)
    if "warning" in state:
        warnings.warn(state["warning"], stacklevel=2)
    make = _text_classifier if state["script"] == "transformer_test" else _image_classifier
    model, prepare = make(state, device)
    checkpoint.load_into(model, checkpoint.trained_weights(state), "model", flag="load")
    return Classifier(model.to(device).eval(), state["classes"], prepare)


class Classifier:
    """A model with its classes and its preprocessing.

    Attributes:
        model: from what `prepare` returns to logits (batch, classes).
        classes: their names, in the order of the outputs.
        prepare: from a list of samples to the model's inputs, on its device.
    """

    def __init__(
        self, model: nn.Module, classes: Sequence[str], prepare: Callable[[Sequence[Any]], Tensor]
    ) -> None:
        self.model, self.classes, self.prepare = model, list(classes), prepare

    def predict(self, samples: Sequence[Any], *, batch_size: int = 64) -> list[str]:
        """Return the most likely class of each sample.

        Args:
            samples: texts; or images, each a path, a PIL image, or a uint8 array (height, width)
                or (height, width, 3). A list, also of a single one.
            batch_size: samples that are computed together.
        Raises:
            InputError: an image cannot be read, or is another kind of array.
            TypeError: the samples are no list, or one of them is no text.
        """
        likely = self.probabilities(samples, batch_size=batch_size).argmax(1)
        return [self.classes[number] for number in likely.tolist()]

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
            parts.append(logits.float().softmax(1).cpu())
        return torch.cat(parts)


def _text_classifier(
    state: dict[str, Any], device: torch.device
) -> tuple[nn.Module, Callable[[Sequence[str]], Tensor]]:
    from input_pipeline import tokenization
    from models import hugging_face, transformer

    tokenizer, classes = tokenization.load_tokenizer(state["tokenizer"]), len(state["classes"])
    if state["encoder"]:
        with hugging_face.refused(state["flags"]["arch"]):
            model: nn.Module = hugging_face.Encoder(**state["encoder"], classes=classes)
    else:
        sizes = {"max_len": state["max_len"], "prior": state["prior"]}
        sizes |= state["flags"]["model_args"]
        model = transformer.Transformer(tokenizer.get_vocab_size(), classes, **sizes)

    settings = {"max_len": state["max_len"], "pad": state["pad"], "device": device}
    return model, partial(_prepare_texts, tokenizer=tokenizer, **settings)


def _prepare_texts(
    texts: Sequence[str], *, tokenizer: Any, max_len: int, pad: int, device: torch.device
) -> Tensor:
    from input_pipeline.text_batches import encode_texts

    if strange := [text for text in texts if not isinstance(text, str)]:
        raise TypeError(f"{excerpt(strange[0])} is not a text")
    return encode_texts(texts, tokenizer, max_len=max_len, pad=pad).to(device)


def _image_classifier(
    state: dict[str, Any], device: torch.device
) -> tuple[nn.Module, Callable[[Sequence[Any]], Tensor]]:
    from models import image_models

    size, channels = state["size"], state["channels"]
    mean, std = (torch.tensor(state[name], device=device) for name in ("mean", "std"))
    model = image_models.create_model(
        state["flags"]["arch"], classes=len(state["classes"]), channels=channels, image_size=size
    )

    settings = {"size": size, "channels": channels, "interpolation": state["interpolation"]}
    return model, partial(_prepare_images, mean=mean, std=std, **settings)


def _prepare_images(
    images: Sequence[Any], *, mean: Tensor, std: Tensor, size: int, **settings: Any
) -> Tensor:
    from input_pipeline.image_datasets import read_images

    pixels = read_images([_source(image) for image in images], size, **settings)
    return ((pixels.to(mean.device) / 255 - mean) / std).permute(0, 3, 1, 2)


def _source(image: Any) -> Any:
    """An image as `read_images` takes it."""
    import numpy as np
    from PIL import Image

    if isinstance(image, Image.Image):
        return image
    try:
        if isinstance(image, str | os.PathLike):
            return os.fsencode(image)
        pixels = np.asarray(image)
    except Exception as error:  # of many kinds: lists of several lengths, tensors on a GPU
        raise InputError(f"{excerpt(image)} is no image ({first_line(error)})") from None
    if pixels.dtype != np.uint8 or pixels.shape[2:] not in ((), (1,), (3,)) or pixels.ndim < 2:
        raise InputError(
            f"an array of {pixels.dtype} {pixels.shape}: give uint8 of (height, width) or "
            "(height, width, 3)"
        )
    return pixels if pixels.ndim == 3 else pixels[:, :, None]

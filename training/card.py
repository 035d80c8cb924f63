"""What a trained model is: its network, classes and preprocessing, as a checkpoint keeps them.

card = read_card(checkpoint.load(path).metadata)      # an ImageCard or a TextCard
model = card.create_model()                           # with random weights
logits = model(card.prepare(["cat.png"], device))
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from errors import InputError, excerpt, first_line
from models import hugging_face, image_models, own_parts
from models.transformer import Transformer
from training.export import LARGEST_BATCH

THRESHOLD = 0.5  # of the probability of a label
Kind = TypeVar("Kind", bound="Outputs")


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """What the outputs of a network mean."""

    classes: Sequence[str]  # names, in the order of the outputs
    label_separator: str | None = None  # of the labels of a sample; None where each has one
    temperature: float = 1.0  # which divides the logits, so that probabilities are calibrated

    @classmethod
    def read(cls: type[Kind], metadata: Mapping[str, Any]) -> Kind:
        """Return the card of a checkpoint's metadata, whose flags are fields of a card as well."""
        known = {**metadata["flags"], **metadata}
        return cls(**{each.name: known[each.name] for each in fields(cls) if each.name in known})

    @property
    def is_multilabel(self) -> bool:
        """Whether a sample may have several labels, or none."""
        return self.label_separator is not None

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probability of each class, (samples, classes)."""
        logits = logits / self.temperature
        return logits.sigmoid() if self.is_multilabel else logits.softmax(1)

    def labels(self, probabilities: Iterable[float], threshold: float = THRESHOLD) -> list[str]:
        """Return the classes above the threshold, of a sample that may have several labels."""
        return [name for name, p in zip(self.classes, probabilities) if p > threshold]

    def described(self) -> dict[str, Any]:
        """Return what an exported file says of its outputs."""
        said = "logits; the sigmoid is the probability of each label, set above 0.5"
        of_labels = {"output": said} if self.is_multilabel else {}
        return {**of_labels, "temperature": self.temperature}


@dataclass(frozen=True, kw_only=True)
class ImageCard(Outputs):
    """An image model. Images need Pillow and numpy."""

    arch: str
    size: int  # pixels a side of an image
    channels: int  # 3 for colour, 1 for grey
    interpolation: str  # by which images are scaled
    mean: Sequence[float]  # of each channel, of pixels from 0 to 1
    std: Sequence[float]
    model_args: Mapping[str, Any] = field(default_factory=dict)  # of a network of one's own

    def create_model(self) -> nn.Module:
        """Return the network with random weights."""
        sizes = {"channels": self.channels, "image_size": self.size}
        if own_parts.is_own(self.arch):
            sample = torch.zeros(2, self.channels, self.size, self.size)
            return own_parts.create_model(
                self.arch, len(self.classes), sample, settings=self.model_args, **sizes
            )
        return image_models.create_model(self.arch, classes=len(self.classes), **sizes)

    def prepare(self, images: Sequence[Any], device: torch.device) -> Tensor:
        """Return what the network takes, (images, channels, size, size).

        Args:
            images: paths, PIL images, or uint8 arrays (height, width) or (height, width, 3).
        Raises:
            InputError: an image cannot be read, or is another kind of array.
        """
        from input_pipeline.image_datasets import read_images

        read = partial(
            read_images,
            size=self.size,
            channels=self.channels,
            interpolation=self.interpolation,
        )
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            pixels = torch.cat(list(pool.map(read, [[_source(image)] for image in images])))
        mean, std = (torch.tensor(each, device=device) for each in (self.mean, self.std))
        return ((pixels.to(device) / 255 - mean) / std).permute(0, 3, 1, 2)

    def example(self) -> Tensor:
        """Return two inputs of the network."""
        return torch.randn(2, self.channels, self.size, self.size)

    def export_settings(self) -> dict[str, Any]:
        """Return which dimensions of an input may change, and what an exported file says."""
        of_input = "float32 (batch, channels, size, size): (pixel / 255 - mean) / std, RGB or grey"
        names = ("arch", "classes", "channels", "mean", "std", "size", "interpolation")
        said = {"input": of_input, **self.described()}
        said |= {name: getattr(self, name) for name in names}
        return {"dynamic": {0: ("batch", LARGEST_BATCH)}, "metadata": said}


@dataclass(frozen=True, kw_only=True)
class TextCard(Outputs):
    """A text model. Texts need tokenizers."""

    arch: str
    dataset: str  # value of --dataset
    model_args: Mapping[str, Any]  # sizes of the Transformer, settings of a network of one's own
    tokenizer: str  # in the library's own JSON
    max_len: int  # tokens of a text at most
    pad: int  # token behind shorter texts
    encoder: Mapping[str, Any]  # what an `Encoder` is made of; empty for the Transformer
    prior: Tensor | None  # (tokens, classes) scores of the Transformer

    @property
    def is_repaired(self) -> bool:
        """Whether entities get the ampersands that those of its data set have lost."""
        from input_pipeline.text_datasets import REPAIRED

        return self.dataset in REPAIRED

    @cached_property
    def loaded_tokenizer(self) -> Any:
        """What texts are cut into tokens by, parsed at its first use."""
        from input_pipeline.tokenization import load_tokenizer

        return load_tokenizer(self.tokenizer)

    def create_model(self, *, mix_at: str = "pooled", **dropout: Any) -> nn.Module:
        """Return the network with random weights; mixup mixes at `mix_at`."""
        classes = len(self.classes)
        if self.encoder:
            with hugging_face.refused(self.arch):
                return hugging_face.Encoder(**self.encoder, classes=classes, mix_at=mix_at)
        if own_parts.is_own(self.arch):
            sizes = {"vocab_size": self.loaded_tokenizer.get_vocab_size(), "max_len": self.max_len}
            return own_parts.create_model(
                self.arch, classes, self.example(), settings=self.model_args, **sizes, pad=self.pad
            )
        return Transformer(
            self.loaded_tokenizer.get_vocab_size(),
            classes,
            max_len=self.max_len,
            prior=self.prior,
            mix_at=mix_at,
            **dropout,
            **self.model_args,
        )

    def prepare(self, texts: Sequence[str], device: torch.device) -> Tensor:
        """Return what the network takes, (texts, length); what is no text is a TypeError."""
        from input_pipeline.text_batches import encode_texts
        from input_pipeline.text_datasets import repair

        if strange := [text for text in texts if not isinstance(text, str)]:
            raise TypeError(f"{excerpt(strange[0])} is not a text")
        if self.is_repaired:
            texts = [*map(repair, texts)]
        settings = {"max_len": self.max_len, "pad": self.pad}
        return encode_texts(texts, self.loaded_tokenizer, **settings).to(device)

    def example(self) -> Tensor:
        """Return two inputs of the network."""
        texts = ["Stocks rise after the bank's report", "Home team wins"]
        return self.prepare(texts, torch.device("cpu"))

    def export_settings(self) -> dict[str, Any]:
        """Return which dimensions of an input may change, and what an exported file says."""
        names = ("classes", "max_len", "tokenizer", "encoder", "pad")
        metadata = {
            "input": "int32 (batch, length): a text's tokens, those of `pad` behind shorter texts",
            "texts": "ampersands put before '#39;' and the like, "
            * self.is_repaired
            + "HTML entities decoded, then tags and URLs removed, backslashes as spaces, "
            "NFC, single spaces",
            **self.described(),
            **{name: getattr(self, name) for name in names},
            "flags": {name: getattr(self, name) for name in ("arch", "max_len", "model_args")},
        }
        dynamic = {0: ("batch", LARGEST_BATCH), 1: ("length", self.max_len)}
        return {"dynamic": dynamic, "metadata": metadata}


Card = ImageCard | TextCard


def read_card(metadata: Mapping[str, Any], temperature: float = 1.0) -> Card:
    """Return the card of the metadata of a checkpoint, and its temperature."""
    kind = TextCard if metadata["script"] == "transformer_test" else ImageCard
    return replace(kind.read(metadata), temperature=temperature)


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

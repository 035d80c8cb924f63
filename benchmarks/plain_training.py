"""The peer that people write first: a plain training loop of the same model and batch as ours.

for samples in train(Recipe.of(opened), "data", batch_size=64):     # a step each

torchvision transforms on PIL images or a tokenizing collate function, DataLoader workers, fp32,
eager, NCHW, and torch's optimizers with their defaults. It starts from the weights of ours.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from benchmarks import bench, trainers
from input_pipeline import text_datasets

WORKERS = 2  # of the DataLoader: one per core


@dataclass(frozen=True)
class Recipe:
    """What the plain side trains, without any of our settings."""

    texts: bool
    metadata: dict[str, Any]
    model: nn.Module  # with our initial weights, in NCHW
    lr: float
    momentum: float
    weight_decay: float

    @classmethod
    def of(cls, opened: trainers.Opened) -> Recipe:
        """Copy the model, the data's metadata and the rates."""
        model = copy.deepcopy(opened.trainer.model)
        return cls(
            texts=opened.run.script == "transformer_test",
            metadata=opened.data.metadata,
            model=model.to(memory_format=torch.contiguous_format),  # type: ignore[call-overload]
            lr=opened.args.lr,
            momentum=opened.args.momentum,
            weight_decay=opened.args.weight_decay,
        )

    def optimizer(self) -> torch.optim.Optimizer:
        """Create torch's optimizer, with its own defaults."""
        weights, decay = self.model.parameters(), self.weight_decay
        if self.texts:
            return torch.optim.AdamW(weights, self.lr, weight_decay=decay)
        return torch.optim.SGD(weights, self.lr, self.momentum, weight_decay=decay)


class Collate:
    """Cleans and tokenises a batch and pads it to its longest row.

    It is a class because spawned workers cannot pickle a closure.
    """

    def __init__(self, tokenizer: Tokenizer, max_len: int) -> None:
        self.tokenizer, self.max_len = tokenizer, max_len

    def __call__(self, rows: list[tuple[str, int]]) -> tuple[Tensor, Tensor]:
        texts = [text_datasets.clean_text(text) for text, _ in rows]
        ids = [torch.tensor(self.tokenizer.encode(text).ids[: self.max_len]) for text in texts]
        return pad_sequence(ids, batch_first=True), torch.tensor([label for _, label in rows])


def read_batches(recipe: Recipe, data_dir: str, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Load CIFAR-10 or AG News in the usual way; yield the batches of all epochs."""
    # Without it tokenizers warns in every forked worker.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    metadata, collate = recipe.metadata, None
    if recipe.texts:
        train_set = text_datasets.read_text_splits("agnews", data_dir)[0]["train"]
        data: Any = [*zip(train_set.texts, train_set.labels)]
        collate = Collate(Tokenizer.from_str(metadata["tokenizer"]), metadata["max_len"])
    else:
        augment = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
        scale = [transforms.ToTensor(), transforms.Normalize(metadata["mean"], metadata["std"])]
        data = datasets.CIFAR10(data_dir, transform=transforms.Compose([*augment, *scale]))
    batches = DataLoader(
        data,
        batch_size,
        shuffle=True,
        num_workers=WORKERS,
        collate_fn=collate,
        drop_last=True,
        persistent_workers=True,  # so that starting them does not count
    )
    while True:
        yield from batches


def train(recipe: Recipe, data_dir: str, batch_size: int) -> Iterator[int]:
    """Run the training loop of a tutorial; yield the samples of each step."""
    model = recipe.model.to(bench.DEVICE)
    optimizer = recipe.optimizer()
    for inputs, labels in read_batches(recipe, data_dir, batch_size):
        inputs, labels = inputs.to(bench.DEVICE), labels.to(bench.DEVICE)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        yield len(labels)

"""TODO."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Protocol

from torch import Tensor


class BatchedDataset(Protocol):
    """What a data set owes the loop; `images.ImageDataset` and `texts.TextDataset` are two."""

    @property
    def lengths(self) -> Tensor | None:
        """(rows,) tokens of each row on the CPU, or None where rows are equally long."""

    def __len__(self) -> int: ...

    def batches(
        self, plan: Sequence[Tensor], epoch: int | None = None
    ) -> Generator[tuple[Tensor, Tensor]]:
        """(inputs, labels) on the device for each tensor of row numbers; augmented when `epoch` is given."""
        ...

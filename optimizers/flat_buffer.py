"""Many tensors in one buffer of rows, and the order in which the rows or elements of it take turns; for `slamb.SLAMB`.

lay = Lay(parameters, width=64)
buffer = lay.buffer()                       # (rows, 64), zeros
torch._foreach_copy_(lay.views(buffer), gradients)
ring = Ring(lay.rows, seed=0)
ring.take(0.1)                              # the next tenth of the row numbers, in a fixed random order
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class FlatLayout:
    """Where each of some tensors lies in a buffer of shape (rows, width): each starts a row, the last row of each is padded.

    Args:
        tensors: of one device.
        width: elements of a row.
    """

    def __init__(self, tensors: Sequence[Tensor], width: int) -> None:
        self.tensors, self.width = list(tensors), width
        counts = [-(-tensor.numel() // width) for tensor in self.tensors]
        self.starts = [sum(counts[:number]) for number in range(len(counts))]
        self.counts, self.rows = counts, sum(counts)
        self.elements = sum(tensor.numel() for tensor in self.tensors)
        self.device = self.tensors[0].device if self.tensors else torch.device("cpu")
        self.dtype = torch.float32
        for tensor in self.tensors:
            self.dtype = torch.promote_types(self.dtype, tensor.dtype)
        self.lengths = torch.tensor(counts, dtype=torch.long, device=self.device)

    def buffer(self) -> Tensor:
        """(rows, width) zeros, fp32 at least."""
        return torch.zeros(self.rows, self.width, dtype=self.dtype, device=self.device)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Of a buffer, one in the shape (and, where it is dense, the memory format) of each tensor."""
        found = []
        for tensor, start in zip(self.tensors, self.starts):
            dense = tensor.is_contiguous() or (
                tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
            )
            strides = (
                tensor.stride() if dense else torch.empty(tensor.shape, device="meta").stride()
            )
            found.append(buffer.as_strided(tensor.shape, strides, start * self.width))
        return found

    def rows_of(self, number: int) -> slice:
        """The rows of a tensor."""
        return slice(self.starts[number], self.starts[number] + self.counts[number])

    def places(self) -> Tensor:
        """(elements,) places in the flattened buffer that are not padding."""
        parts = [
            torch.arange(start * self.width, start * self.width + tensor.numel())
            for tensor, start in zip(self.tensors, self.starts)
        ]
        return torch.cat(parts).to(self.device) if parts else torch.zeros(0, dtype=torch.long)

    def owners(self) -> Tensor:
        """(rows,) the number of the tensor each row belongs to."""
        return torch.repeat_interleave(
            torch.arange(len(self.tensors), device=self.device), self.lengths
        )

    def sums(self, rows: Tensor) -> Tensor:
        """(tensors,) sums of a value a row (rows,), added in the same order on every rank."""
        return torch.segment_reduce(rows, "sum", lengths=self.lengths)


class RoundRobin:
    """Units in a fixed random order that take turns: each step takes the next share, the end of the order followed by its start.

    At any sequence of shares in (0, 1], a unit's turn comes again within ceil(1 / k) steps, k the smallest share meanwhile.

    Args:
        units: their numbers, or how many there are.
        seed: of the order; torch's own random state is left alone.
    """

    def __init__(self, units: Tensor | int, seed: int) -> None:
        numbers = torch.arange(units) if isinstance(units, int) else units
        order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(seed)).to(
            numbers.device
        )
        self.order, self.cursor = numbers[order], 0

    def take(self, share: float) -> Tensor:
        """The units whose turn it is: ceil(share x units) of them."""
        count = min(len(self.order), math.ceil(share * len(self.order) - 1e-9))
        first = self.order[self.cursor : self.cursor + count]
        rest = self.order[: count - len(first)]
        self.cursor = (self.cursor + count) % max(1, len(self.order))
        return torch.cat([first, rest]) if len(rest) else first

    def part(self, number: int, parts: int) -> Tensor:
        """The order cut into so many parts: that number of them."""
        parts = max(1, min(parts, len(self.order)))
        return self.order.tensor_split(parts)[number % parts]

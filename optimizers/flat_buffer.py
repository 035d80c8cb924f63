"""Many tensors in one buffer of rows, and the order in which its units take turns; for SLAMB.

layout = FlatLayout(parameters, width=64)
buffer = layout.new_buffer()                      # (rows, 64), zeros
torch._foreach_copy_(layout.views(buffer), gradients)
order = shuffled(torch.arange(layout.rows), seed=0)
units = next_units(order, cursor, 0.1)            # the next tenth of the row numbers
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class FlatLayout:
    """Where each of several tensors lies in a buffer of shape (rows, width).

    Each tensor starts a row; the last row of each is padded.

    Args:
        tensors: tensors of one device.
        width: elements of a row.
    """

    def __init__(self, tensors: Sequence[Tensor], width: int) -> None:
        self.tensors = list(tensors)
        self.width = width
        self.counts = [-(-tensor.numel() // width) for tensor in self.tensors]  # rows of each
        self.starts = [sum(self.counts[:index]) for index in range(len(self.counts))]
        self.rows = sum(self.counts)
        self.device = self.tensors[0].device if self.tensors else torch.device("cpu")
        self.dtype = torch.float32
        for tensor in self.tensors:
            self.dtype = torch.promote_types(self.dtype, tensor.dtype)
        self._counts = torch.tensor(self.counts, dtype=torch.long, device=self.device)

    def new_buffer(self) -> Tensor:
        """Returns zeros of shape (rows, width), in fp32 at least."""
        return torch.zeros(self.rows, self.width, dtype=self.dtype, device=self.device)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Returns a view of the buffer for each tensor, in its shape.

        A dense tensor's view also has its memory format.
        """
        views = []
        for tensor, start in zip(self.tensors, self.starts):
            is_dense = tensor.is_contiguous() or (
                tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
            )
            like = tensor if is_dense else torch.empty(tensor.shape, device="meta")
            views.append(buffer.as_strided(tensor.shape, like.stride(), start * self.width))
        return views

    def tensor_of_row(self) -> Tensor:
        """Returns for each row the index of the tensor it belongs to, shape (rows,)."""
        indices = torch.arange(len(self.tensors), device=self.device)
        # With its size given, the host need not wait to learn it.
        return torch.repeat_interleave(indices, self._counts, output_size=self.rows)

    def sum_per_tensor(self, rows: Tensor) -> Tensor:
        """Sums a value per row (rows,) to one per tensor (tensors,), in a fixed order."""
        # Unless it is `unsafe`, the host waits to check that the counts add up to the rows.
        return torch.segment_reduce(rows, "sum", lengths=self._counts, unsafe=True)


def shuffled(units: Tensor, seed: int) -> Tensor:
    """Returns the units (units,) in a random order; torch's global random state is not used."""
    order = torch.randperm(len(units), generator=torch.Generator().manual_seed(seed))
    return units[order.to(units.device)]


def next_units(order: Tensor, cursor: int, share: float) -> Tensor:
    """Returns the next ceil(share x units) units of an order in which they take turns.

    After the end of the order comes its start. For any sequence of shares in (0, 1], a unit has its
    next turn within ceil(1 / k) steps, where k is the smallest share until then.

    Args:
        order: (units,), fixed.
        cursor: the place of the next one.
        share: of all units.
    """
    count = min(len(order), math.ceil(share * len(order) - 1e-9))
    units = order[cursor : cursor + count]
    wrapped = order[: count - len(units)]
    return torch.cat([units, wrapped]) if len(wrapped) else units

"""How a rank's share of a batch is cut into micro-batches, whose gradients are added up.

micro_batches = MicroBatches(accumulation_steps=4, limit=None)
for x, y in micro_batches.split(inputs, labels): ...
"""

from dataclasses import dataclass

from torch import Tensor

MIN_ROWS = 2  # of a micro-batch where the memory allows it: BatchNorm needs two


@dataclass
class MicroBatches:
    """The number of micro-batches of a step."""

    accumulation_steps: int = 1  # how many there are at least
    limit: int | None = None  # samples of one at most; None is no limit

    @property
    def several(self) -> bool:
        return self.accumulation_steps > 1 or self.limit is not None

    def number(self, batch_size: int) -> int:
        needed = -(-batch_size // (self.limit or batch_size))
        return max(needed, min(self.accumulation_steps, batch_size // MIN_ROWS), 1)

    def number_on_all_ranks(self, samples: int, ranks: int) -> int:
        """How many micro-batches every rank takes of a batch that is shared out equally.

        Shares differ by one sample where the batch is not divisible. Ranks that gather sharded
        weights from each other for every micro-batch must still agree on the number.
        """
        return min(self.number(-(-samples // ranks)), samples // ranks)

    def split(
        self, inputs: Tensor, labels: Tensor, *, number: int | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """Cut inputs (batch, ...) and labels into micro-batches, whose sizes differ by one.

        Their number is by default what the batch needs.
        """
        number = number or self.number(len(labels))
        return list(zip(inputs.tensor_split(number), labels.tensor_split(number)))

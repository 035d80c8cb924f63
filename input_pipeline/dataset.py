"""The protocol between a data set and the training loop.

The loop asks for three things: the number of rows, the length of each row, and batches of given
rows. `ImageDataset` and `TextDataset` of this package provide them, and so can any class of yours;
`Features` of training/linear_probe.py is a short one.

The data set does not decide which rows make a batch, or which rank computes them:
`input_pipeline.sampler` and `training.batch_sampler` do, in the same way for every data set.
"""

from collections.abc import Generator, Sequence
from typing import Protocol

from torch import Tensor


class BatchedDataset(Protocol):
    """What a data set owes the training loop and the evaluation."""

    @property
    def lengths(self) -> Tensor | None:
        """(rows,) int64 on the CPU: number of tokens of each row; None where all are equally long.

        Rows of similar length are put into the same batch, which keeps padding low.
        """

    def __len__(self) -> int: ...

    def batches(
        self, row_batches: Sequence[Tensor], epoch: int | None = None
    ) -> Generator[tuple[Tensor, Tensor]]:
        """Yield one (inputs, labels) pair for each entry of `row_batches`, in the same order.

        The loop may close the generator before its end, for example when the run is interrupted.

        Args:
            row_batches: row numbers of each batch, (batch,) int64 on the CPU. They differ in size,
                and a row may occur several times.
            epoch: number of the training epoch, from 0 on; None in evaluation, which means no
                augmentation. Augmentation may depend on the row, the epoch and a seed, and on
                nothing else: a resumed run and a run with other ranks then see the same inputs.
        Yields:
            inputs: (batch, ...), what the model takes, on the training device.
            labels: (batch,) int64, class numbers from 0 on, on the training device; or (batch,
                classes) uint8, 1 for each label of a row, where it may have several.
        Raises:
            InputError: a row cannot be read; the message names the file and the remedy.
        """
        ...

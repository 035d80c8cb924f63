"""TODO."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from input_pipeline.text_datasets import TextSplit, clean_text
from input_pipeline.tokenization import AnyTokenizer

PAD = 0


PAD_MULTIPLE = {
    "cpu": 1,
    "cuda": 4,
}  # GPU kernels, compiled ones and recorded steps want few lengths, and even ones


class TextDataset:
    """A tokenised split: one flat tensor of token ids, resident on the device, and where each row starts.

    Args:
        rows: labels and texts.
        tokenizer: trained tokenizer; rows are encoded once, in parallel.
        max_len: tokens kept of a row, [CLS] included.
        device: where tokens and labels live.
    """

    def __init__(
        self, rows: TextSplit, tokenizer: AnyTokenizer, max_len: int, device: torch.device
    ) -> None:
        tokenizer.encode_special_tokens = True  # "[PAD]" in a text is text
        self.max_len = max_len
        encodings = tokenizer.encode_batch_fast(rows.texts)
        ids = [encoding.ids[:max_len] for encoding in encodings]
        self.lengths = torch.tensor([len(row) for row in ids])
        self.starts = (self.lengths.cumsum(0) - self.lengths).to(device)
        self.flat = torch.tensor(
            [token for row in ids for token in row], dtype=torch.int32, device=device
        )
        self.labels = torch.tensor(rows.labels, device=device)
        self._device_lengths = self.lengths.to(device)
        self.longest = int(self.lengths.max())
        self.device = device

    def __len__(self) -> int:
        return len(self.labels)

    def batches(
        self, plan: Sequence[Tensor], epoch: int | None = None
    ) -> Generator[tuple[Tensor, Tensor]]:
        """(tokens (batch, length) int32, labels (batch,)) for each tensor of row numbers in `plan`.

        `length` is the longest row of the batch, on a GPU rounded up to a multiple of 4. `epoch` is not used: nothing is random.
        """
        for rows in plan:
            length = self.padded_length(rows)
            on_device = rows.to(self.device, non_blocking=True)
            yield self.gather(on_device, length), self.labels[on_device]

    def padded_length(self, rows: Tensor) -> int:
        """Of a batch of these rows."""
        multiple = PAD_MULTIPLE[self.device.type]
        return min(-(-int(self.lengths[rows].max()) // multiple) * multiple, self.max_len)

    def padding(self, plan: Sequence[Tensor]) -> float:
        """Padded tokens over real ones, of the batches of a plan."""
        return (
            sum(self.padded_length(rows) * len(rows) for rows in plan)
            / sum(int(self.lengths[rows].sum()) for rows in plan)
            - 1
        )

    def gather(self, rows: Tensor, length: int) -> Tensor:
        """Tokens of `rows` padded with 0 to `length`: (len(rows), length) int32."""
        column = torch.arange(length, device=self.device)
        beyond = column >= self._device_lengths.index_select(0, rows)[:, None]
        where = (self.starts.index_select(0, rows)[:, None] + column).clamp_(max=len(self.flat) - 1)
        return (
            self.flat.index_select(0, where.flatten()).view(where.shape).masked_fill_(beyond, PAD)
        )


def encode_texts(texts: Sequence[str], tokenizer: AnyTokenizer, max_len: int) -> Tensor:
    """Padded tokens of a few texts: (len(texts), length) int32; for predictions."""
    rows = TextSplit([0] * len(texts), [clean_text(text) for text in texts])
    data = TextDataset(rows, tokenizer, max_len, torch.device("cpu"))
    return next(data.batches([torch.arange(len(rows))]))[0]

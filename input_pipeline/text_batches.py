"""Batches of texts: token ids resident on the device, padded to the longest row of each batch.

train = TextDataset(splits["train"], tokenizer, max_len=128).to(torch.device("cpu"))
for tokens, labels in train.batches(row_batches): ...      # (batch, length) int32 and (batch,)
tokens = encode_texts(["Stocks rise"], tokenizer, max_len=128)      # for predictions
"""

from __future__ import annotations

from array import array
from collections.abc import Generator, Iterator, Sequence

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from input_pipeline.stored_texts import NodeFile
from input_pipeline.text_datasets import TextSplit, clean_text
from input_pipeline.tokenization import SPECIAL_TOKENS, AnyTokenizer

PAD = SPECIAL_TOKENS.index("[PAD]")
LENGTH_MULTIPLE = 8
"""On a GPU batches are padded to a multiple of this length. Its attention reads masks whose rows
have a multiple of 8 elements, and torch copies all others first. Compiled kernels and CUDA graphs
are made once for each length."""
CHUNK_ROWS = 256  # that are encoded together, in parallel; a token takes 100 bytes meanwhile
LONGEST_TOKEN = 1000  # characters; a text is cut after `max_len` times as many


class TextDataset:
    """A tokenised split: the token ids of all rows in a file and, with `to`, on a device.

    Other processes of the node can load a pickle of it, and then share the file.

    Args:
        max_len: number of tokens kept of a row, [CLS] included.
        pad: id of the tokens behind the end of a row.

    Attributes:
        lengths: (rows,) int64 on the CPU, number of tokens of each row.
        tokens: (sum of lengths,) int32 on the device, the token ids of all rows in a line; the
            CPU maps the file.
        starts: (rows,) int64 on the device, position of each row's first token in `tokens`.
        labels: (rows,) int64 or (rows, classes) uint8 on the device.
    """

    def __init__(
        self, split: TextSplit, tokenizer: AnyTokenizer, *, max_len: int, pad: int = PAD
    ) -> None:
        self.max_len, self.pad = max_len, pad
        self.token_file, lengths = NodeFile(), array("q")
        for ids in encode_rows(split.texts, tokenizer, max_len=max_len, pad=pad):
            self.token_file.write(ids)
            lengths.append(len(ids))
        self.lengths = torch.frombuffer(lengths, dtype=torch.int64)
        self.labels = torch.as_tensor(split.labels)

    def to(self, device: torch.device) -> TextDataset:
        """Put tokens and labels where batches are made; returns the data set."""
        self.device = device
        tokens = np.memmap(self.token_file.file, dtype=np.int32, mode="c")
        self.tokens = torch.from_numpy(tokens).to(device)
        self.starts = (self.lengths.cumsum(0) - self.lengths).to(device)
        self.labels = self.labels.to(device)
        self._device_lengths = self.lengths.to(device)
        return self

    def __len__(self) -> int:
        return len(self.labels)

    def batches(
        self, row_batches: Sequence[Tensor], epoch: int | None = None
    ) -> Generator[tuple[Tensor, Tensor]]:
        """Yield (tokens, labels) of each batch, without augmentation; see `BatchedDataset`.

        Yields:
            tokens: (batch, length) int32, where `length` is that of the longest row of the batch,
                on a GPU rounded up to a multiple of 8; positions after a row's end hold `pad`.
            labels: (batch,) int64.
        """
        for rows in row_batches:
            column = torch.arange(self.padded_length(rows), device=self.device)
            device_rows = rows.to(self.device, non_blocking=True)
            is_padding = column >= self._device_lengths.index_select(0, device_rows)[:, None]
            positions = self.starts.index_select(0, device_rows)[:, None] + column
            positions.clamp_(max=len(self.tokens) - 1)  # padding after the last row
            tokens = self.tokens.index_select(0, positions.flatten()).view(positions.shape)
            yield tokens.masked_fill_(is_padding, self.pad), self.labels[device_rows]

    def padded_length(self, rows: Tensor) -> int:
        multiple = 1 if self.device.type == "cpu" else LENGTH_MULTIPLE
        longest = int(self.lengths[rows].max())
        return min(-(-longest // multiple) * multiple, self.max_len)


def encode_rows(
    texts: Sequence[str], tokenizer: AnyTokenizer, *, max_len: int, pad: int
) -> Iterator[array[int]]:
    """Yield the token ids of each text, as int32; of one without any, `pad`."""
    tokenizer.encode_special_tokens = True  # "[PAD]" in a text is ordinary text
    if isinstance(tokenizer, Tokenizer):
        tokenizer.enable_truncation(max_len)  # before a [SEP] is added
    for start in range(0, len(texts), CHUNK_ROWS):
        chunk = [text[: max_len * LONGEST_TOKEN] for text in texts[start : start + CHUNK_ROWS]]
        for encoding in tokenizer.encode_batch_fast(chunk):
            yield array("i", encoding.ids[:max_len] or [pad])


def encode_texts(
    texts: Sequence[str], tokenizer: AnyTokenizer, *, max_len: int, pad: int = PAD
) -> Tensor:
    """Clean, tokenise and pad a few raw texts as `TextDataset` does, for predictions.

    Returns:
        (len(texts), length) int32 on the CPU.
    """
    cleaned = [clean_text(text) for text in texts]
    ids = encode_rows(cleaned, tokenizer, max_len=max_len, pad=pad)
    rows = [torch.frombuffer(row, dtype=torch.int32) for row in ids]
    return pad_sequence(rows, batch_first=True, padding_value=pad)

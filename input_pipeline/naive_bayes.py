"""TODO."""

from __future__ import annotations

import torch
from torch import Tensor

from input_pipeline.text_batches import TextDataset
from input_pipeline.tokenization import SPECIALS


def naive_bayes(data: TextDataset, vocab_size: int, classes: int) -> Tensor:
    """Scores of each token for each class, counted on a training split: (vocab_size, classes) fp32.

    score(t, c) = (log p(t | c) - mean over c of log p(t | c)) * log((1 + rows) / (1 + df(t)))
    with p(t | c) from the rows of class c that hold t, one added (multinomial naive Bayes on binary counts, as in Wang
    and Manning, ACL 2012), and df(t) the rows that hold t. Special tokens score 0.
    """
    lengths, flat = data.lengths, data.flat.cpu().long()
    row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    held = torch.unique(row * vocab_size + flat)  # each (row, token) once
    counts = torch.zeros(vocab_size, classes, dtype=torch.float64)
    places = held % vocab_size, data.labels.cpu()[held // vocab_size]
    counts.index_put_(places, torch.ones(len(held), dtype=torch.float64), accumulate=True)
    logs = ((counts + 1) / (counts + 1).sum(0)).log()
    rarity = ((1 + len(lengths)) / (1 + counts.sum(1, keepdim=True))).log()
    scores = (logs - logs.mean(1, keepdim=True)) * rarity
    scores[: len(SPECIALS)] = 0
    return scores.float()

"""Naive Bayes scores of each token for each class, which a model can add to its logits.

    scores = naive_bayes_scores(train, vocab_size=30_000, classes=4)       # (30000, 4)
    logits = scores[tokens].sum(1) + model(tokens)                         # tokens: (batch, length)

Source: Wang and Manning, "Baselines and Bigrams: Simple, Good Sentiment and Topic Classification",
ACL 2012.
"""

import torch
from torch import Tensor

from input_pipeline.text_batches import TextDataset
from input_pipeline.tokenization import SPECIAL_TOKENS

CHUNK_ROWS = 200  # whose tokens are counted at once
FEW_ROWS, FEW_ROWS_FACTOR = 4000, 2.5  # up to which the scores count more
MOST_SCORES = 2 * 10**7  # tokens times classes, which each batch looks up and each checkpoint holds


def naive_bayes_scores(
    data: TextDataset, vocab_size: int, *, classes: int, without: TextDataset | None = None
) -> Tensor | None:
    """Count the tokens of a training split and score each token for each class.

        score(t, c) = (log p(t | c) - mean over c of log p(t | c)) * log((1 + rows) / (1 + df(t)))

    p(t | c) is proportional to one plus the number of rows of class c that contain t (multinomial
    naive Bayes on binary counts with add-one smoothing). df(t) is the number of rows of all classes
    that contain t. Up to `FEW_ROWS` rows it counts `FEW_ROWS_FACTOR` times. Where rows may have
    several labels, the mean over c is the log p(t | not c).

    Args:
        without: rows of the split that are not to count.

    Returns:
        (vocab_size, classes) fp32 on the CPU; special tokens score 0. None beyond `MOST_SCORES`.
    """
    if vocab_size * classes > MOST_SCORES:
        return None
    is_multilabel = data.labels.ndim > 1
    counts, rows = _count(data, vocab_size, classes), len(data)
    if without is not None:
        counts, rows = counts - _count(without, vocab_size, classes), rows - len(without)
    of_all = counts[:, -1:] if is_multilabel else counts.sum(1, keepdim=True)
    counts = counts[:, :classes]
    log_probabilities = ((counts + 1) / (counts + 1).sum(0)).log()
    rarity = ((1 + rows) / (1 + of_all)).log()
    others = log_probabilities.mean(1, keepdim=True)
    if is_multilabel:
        others = ((of_all - counts + 1) / (of_all - counts + 1).sum(0)).log()
    scores = (log_probabilities - others) * rarity * (FEW_ROWS_FACTOR if rows <= FEW_ROWS else 1)
    scores[: len(SPECIAL_TOKENS)] = 0
    return scores.float()


def _count(data: TextDataset, vocab_size: int, classes: int) -> Tensor:
    """Number of rows of each class that contain a token, (vocab_size, classes) float64.

    Where rows may have several labels, a last column counts all rows.
    """
    all_labels, end = data.labels.cpu(), 0
    is_multilabel = all_labels.ndim > 1
    counts = torch.zeros(vocab_size, classes + is_multilabel, dtype=torch.float64)
    for lengths, labels in zip(data.lengths.split(CHUNK_ROWS), all_labels.split(CHUNK_ROWS)):
        start, end = end, end + int(lengths.sum())
        row_of_token = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        pairs = row_of_token * vocab_size + data.tokens[start:end].cpu()
        pairs = torch.unique(pairs)  # each (row, token) pair once
        token, label = pairs % vocab_size, labels[pairs // vocab_size]
        ones = torch.ones(len(pairs), dtype=torch.float64)
        if is_multilabel:
            counts.index_add_(0, token, torch.cat([label.double(), ones[:, None]], 1))
            continue
        counts.index_put_((token, label), ones, accumulate=True)
    return counts

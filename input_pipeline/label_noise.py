"""Wrong labels on purpose, to see how a method of training bears them.

labels = with_noise(labels, 0.4, classes=10, seed=0)     # 40 % of the rows of each class
"""

from __future__ import annotations

import torch
from torch import Tensor

from input_pipeline.sampler import stratified_rows


def with_noise(labels: Tensor, fraction: float, *, classes: int, seed: int) -> Tensor:
    """Give rows of each class, chosen at random, a label of another class, each alike likely.

    Args:
        labels: (rows,) class numbers.
        fraction: of the rows of each class that get a wrong label, in (0, 1).
        classes: how many classes there are, two or more.
        seed: of the choice.
    Returns:
        (rows,) class numbers, as new memory.
    """
    rows, _ = stratified_rows(labels, fraction, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    moved = torch.randint(1, classes, (len(rows),), generator=generator)
    noisy = labels.clone()
    noisy[rows] = (labels[rows] + moved) % classes
    return noisy

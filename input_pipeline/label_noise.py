"""Wrong labels on purpose, to see how a method of training bears them.

labels = with_noise(labels, 0.4, classes=10, seed=0)     # 40 % of the rows of each class
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from errors import did_you_mean, excerpt
from input_pipeline.own_data import list_names, normal_form


def with_noise(
    labels: Tensor, fraction: float, *, classes: int, seed: int, wrong: Tensor | None = None
) -> Tensor:
    """Give rows of each class, chosen at random, a label of another class.

    Args:
        labels: (rows,) class numbers.
        fraction: of the rows of each class that get a wrong label, in (0, 1); rounded to whole
            rows, and at least one row of each class keeps its label.
        classes: how many classes there are, two or more.
        seed: of the choice.
        wrong: (classes,) the wrong label of each class; a class whose own number stands there keeps
            its rows. None: any other class, all equally likely.
    Returns:
        (rows,) class numbers, as new memory.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator)
    noisy = labels.clone()
    for label in labels.unique():
        rows_of_class = order[labels[order] == label]
        count = min(round(fraction * len(rows_of_class)), len(rows_of_class) - 1)
        offset = torch.randint(1, classes, (count,), generator=generator)
        others = (label + offset) % classes
        noisy[rows_of_class[:count]] = others if wrong is None else wrong[label]
    return noisy


def swapped_classes(pairs: str, classes: Sequence[str]) -> Tensor | None:
    """The wrong label of each class (classes,) by pairs such as 'cat=dog,deer=horse'; or None.

    Raises:
        ValueError: there is no such class.
    """
    wrong = torch.arange(len(classes))
    for pair in pairs.split(",") if pairs else ():
        a, b = (class_number(name, classes) for name in pair.split("="))
        wrong[a], wrong[b] = b, a
    return wrong if pairs else None


def class_number(name: str, classes: Sequence[str]) -> int:
    """The number of a class; ValueError where there is none of that name."""
    if normal_form(name) in (forms := list(map(normal_form, classes))):
        return forms.index(normal_form(name))
    raise ValueError(
        f"there is no class {excerpt(name)}; the classes are {list_names(classes)}"
        f"{did_you_mean(name, classes)}"
    )

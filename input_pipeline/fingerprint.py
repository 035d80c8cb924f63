"""What tells one data set from another: its classes, and the rows and labels of each split.

    data = fingerprint(["cat", "dog"], {"train": [0, 0, 1], "test": [1]})
    differences(data, other)           # ["the test split has 2 rows instead of 1"]

Pixels and texts are not looked at, so that data that is decoded later costs nothing here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

DIGITS = 16  # of a SHA-256 in hexadecimal


def fingerprint(
    classes: Sequence[str], labels: Mapping[str, Sequence[int] | Tensor]
) -> dict[str, Any]:
    """The fingerprint of a data set as plain values, which a checkpoint can hold.

    Args:
        classes: names of the classes.
        labels: the class number of each row, by the name of the split.
    """
    splits = {}
    for name, numbers in labels.items():
        digest = hashlib.sha256(np.asarray(numbers, dtype=np.int64).tobytes()).hexdigest()
        splits[name] = {"rows": len(numbers), "labels": digest[:DIGITS]}
    return {"classes": list(classes), "splits": splits}


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], splits: Iterable[str]
) -> list[str]:
    """How the rows of a data set differ from what they were; its classes are not compared.

    Args:
        before, now: two fingerprints.
        splits: the names of the splits that are compared, as far as one of the two has them.
    """
    found = []
    for name in splits:
        old, new = before["splits"].get(name), now["splits"].get(name)
        if old == new:
            continue
        if old is None or new is None:
            found.append(f"there is {'a' if old is None else 'no'} {name} split")
        elif old["rows"] != new["rows"]:
            found.append(f"the {name} split has {new['rows']} rows instead of {old['rows']}")
        else:
            found.append(f"the {name} split has other labels, or its rows in another order")
    return found

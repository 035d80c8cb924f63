"""Whether a run has the data that it should: the same on all ranks, and that of its checkpoint.

metadata["data"] = check_data(world, classes, data={"train": split}, trained=None, source="DIR")
"""

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distributed.agreement import check_equal
from distributed.world import World
from errors import SharedInputError

DIGITS = 16  # of a SHA-256 in hexadecimal


def check_data(
    world: World,
    classes: Sequence[str],
    *,
    data: Mapping[str, Any],
    trained: Mapping[str, Any] | None,
    source: str,
) -> dict[str, Any]:
    """Check that all ranks read the same data, and that it is what the checkpoint was trained on.

    Other rows of the same classes are reported (rank 0) and accepted. Pixels and texts are not
    compared, so that data that is decoded later costs nothing here. Collective.

    Args:
        data: the splits by their names: the `labels` of all rows, and `marks()`, bytes by name
            that differ where ranks would mean other rows of the same labels by the same numbers.
        trained: the metadata of the checkpoint that the run goes on from, or None.
        source: how the user named the data.
    Returns:
        Of each split the number of rows and hashes of labels and marks, which checkpoints keep.
    Raises:
        InputError: the ranks read different data, or the classes are not those of the checkpoint.
    """
    splits: dict[str, dict[str, Any]] = {}
    for name, split in data.items():
        digest = hashlib.sha256(np.asarray(split.labels, dtype=np.int64).tobytes()).hexdigest()
        splits[name] = {"rows": len(split.labels), "labels": digest[:DIGITS]}
    values: dict[str, Any] = {f"the {name} split": {**split} for name, split in splits.items()}
    for name, split in data.items():
        for mark, content in split.marks().items():
            values[f"the hash of the {mark} of the {name} files"] = splits[name][mark] = zlib.crc32(
                content
            )
    check_equal(
        world, {**values, "the list of classes": classes}, advice="give all nodes the same data"
    )
    if trained is None:
        return {"splits": splits}
    if list(trained["classes"]) != list(classes):
        raise SharedInputError(
            f"{source}: the checkpoint was trained on other classes; give the data of its run"
        )
    for name, split in splits.items():
        before, rows = trained["data"]["splits"].get(name, {"rows": 0}), split["rows"]
        if not is_same(before, split) and world.is_main:
            is_other = before["rows"] == rows
            and_had = "with other labels or files" if is_other else f"and had {before['rows']}"
            print(
                "warning: the data is not that of the checkpoint's run: "
                f"the {name} split has {rows} rows {and_had}"
            )
    return {"splits": splits}


def is_same(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether what checkpoints keep of two splits is the same, as far as both have it."""
    return all(now[name] == value for name, value in before.items() if name in now)

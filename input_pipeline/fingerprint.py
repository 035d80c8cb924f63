"""Whether a run has the data that it should: the same on all ranks, and that of its checkpoint.

metadata["data"] = check_data(world, classes, labels={"train": labels}, state=state, source="DIR")
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from distributed.agreement import check_equal
from distributed.world import World
from errors import SharedInputError

DIGITS = 16  # of a SHA-256 in hexadecimal


def check_data(
    world: World,
    classes: Sequence[str],
    *,
    labels: Mapping[str, Sequence[int] | Tensor],
    state: Mapping[str, Any] | None,
    source: str,
) -> dict[str, Any]:
    """Check that all ranks read the same data, and that it is what the checkpoint was trained on.

    Other rows of the same classes are reported (rank 0) and accepted. Pixels and texts are not
    compared, so that data that is decoded later costs nothing here. Collective.

    Args:
        labels: the class number of each row of the data set, by the name of the split.
        state: the checkpoint that the run goes on from, or None.
        source: how the user named the data.
    Returns:
        The number of rows and the hash of the labels of each split, which checkpoints keep.
    Raises:
        InputError: the ranks read different data, or the classes are not those of the checkpoint.
    """
    splits: dict[str, dict[str, Any]] = {}
    for name, numbers in labels.items():
        digest = hashlib.sha256(np.asarray(numbers, dtype=np.int64).tobytes()).hexdigest()
        splits[name] = {"rows": len(numbers), "labels": digest[:DIGITS]}
    values = {f"the {name} split": split for name, split in splits.items()}
    check_equal(
        world, {**values, "the list of classes": classes}, advice="give all nodes the same data"
    )
    if state is None:
        return {"splits": splits}
    if list(state["classes"]) != list(classes):
        raise SharedInputError(
            f"{source}: the checkpoint was trained on other classes; give the data of its run"
        )
    for name, split in splits.items():
        before, rows = state["data"]["splits"].get(name, {"rows": 0}), split["rows"]
        if before != split and world.is_main:
            and_had = "with other labels" if before["rows"] == rows else f"and had {before['rows']}"
            print(
                "warning: the data is not that of the checkpoint's run: "
                f"the {name} split has {rows} rows {and_had}"
            )
    return {"splits": splits}

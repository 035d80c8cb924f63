"""What is checked before a run begins, once all of its processes are there.

    check_processes(args, parser, world, state)                  # same flags, code and checkpoint
    metadata["data"] = check_data(args, run.world, classes, labels=labels, state=state)

All of it is collective, and what one process finds ends all of them with one line.
"""

from __future__ import annotations

import hashlib
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from backends.machine import commit_or_none
from cli.flag_parser import Scope, ScriptParser
from distributed.agreement import check_equal, on_main, report_restart
from distributed.world import World
from errors import SharedInputError
from training.tracking import check_tracker

DIGITS = 16  # of a SHA-256 in hexadecimal


def check_processes(
    args: Namespace, parser: ScriptParser, world: World, state: Mapping[str, Any] | None
) -> None:
    """Check that all processes of a job were started alike; collective.

    Args:
        parser: of the script. Paths, and what a node has, may differ.
        state: the checkpoint that the run goes on from, or None.
    Raises:
        InputError: they differ in a flag, in the code, in torch, or in where they go on from; or
            the tracker is not installed.
    """
    report_restart(world, 1 if state is None else state["progress"]["epoch"] + 1)
    on_main(world, lambda: check_tracker(args.track))
    if world.size == 1:
        return
    started = {name: bool(getattr(args, name)) for name in parser.of_scope(Scope.START)}
    values = {name: getattr(args, name) for name in parser.of_scope(Scope.RESULT, Scope.HOW)}
    check_equal(
        world,
        {
            **{f"--{name}": value for name, value in values.items()},
            "the version of the code": commit_or_none(),
            "the version of torch": torch.__version__,
            "the checkpoint": state and [state["progress"][key] for key in ("step", "seconds")],
            **{f"--{name}": value for name, value in started.items()},
        },
        advice="start every process with the same flags, code and checkpoint",
    )


def check_data(
    args: Namespace,
    world: World,
    classes: Sequence[str],
    *,
    labels: Mapping[str, Sequence[int] | Tensor],
    state: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Check that all ranks read the same data, and that it is what the checkpoint was trained on.

    Other rows of the same classes are reported (rank 0) and accepted. Pixels and texts are not
    compared, so that data that is decoded later costs nothing here. Collective.

    Args:
        labels: the class number of each row of the data set, by the name of the split.
        state: the checkpoint that the run goes on from, or None.
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
            f"--data_dir {args.data_dir}: the checkpoint was trained on other classes; give the "
            "data of its run"
        )
    for name, split in splits.items():
        before = state["data"]["splits"].get(name)
        if before != split and world.is_main and not (args.evaluate and name == "train"):
            print(
                "warning: the data is not that of the checkpoint's run: "
                f"the {name} split had {before} and has {split}"
            )
    return {"splits": splits}

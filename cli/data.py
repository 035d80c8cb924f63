"""The data of a run: which rows it trains and is evaluated on, and what is said of them.

chosen, fingerprint = use_rows(settings, run, splits, classes)      # collective, and prints
chosen = choose_rows(settings, splits, classes)                     # the same without a run
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from backends.precision import Precision
from cli.options import check_validation_set
from cli.settings import Settings
from distributed.agreement import on_main
from distributed.world import READ_SECONDS, World
from errors import InputError, refused_as
from input_pipeline import own_data
from input_pipeline.baseline import MOST_CLASSES, Baseline
from input_pipeline.dataset import BatchedDataset
from input_pipeline.fingerprint import check_data, is_same
from input_pipeline.label_noise import swapped_classes, with_noise
from input_pipeline.sampler import fold_of_rows, held_out_rows, parted, stratified_rows
from training.checkpoint import Checkpoint
from training.epoch_report import EVAL_SET_NAMES

FOLD_SEED = 0  # whatever --seed is
NOISE_SEED = 2  # added to --seed for --label_noise; --val_fraction adds 1
POLICY_SEED = 3  # for the rows that --mixup meta learns from
MOST_POLICY_ROWS = 500  # which are enough; but at least one of each class
REDRAWING = ("--seed", "--subset", "--val_fraction", "the data")  # what chooses other rows


@dataclass(frozen=True)
class Run:
    """What a run computes with."""

    script: str
    world: World
    precision: Precision
    checkpoint: Checkpoint | None = None  # from which it goes on, or whose model it uses


@dataclass(frozen=True)
class Data:
    """The data of a run."""

    train: BatchedDataset
    eval_sets: Mapping[str, BatchedDataset]  # 'test', or 'val' (own or held-out rows), or both
    metadata: dict[str, Any]  # plain values for checkpoints: class names, what preprocessing needs
    labels: Tensor  # (rows,) class numbers of the training set; or (rows, classes) of 0 and 1
    held_out: BatchedDataset | None = None  # from which a mixing policy learns: `policy_rows`
    model_mixes: bool = False  # it mixes hidden representations itself; see `MixedCrossEntropy`
    seconds: float = 0.0  # that computing features of the training set took
    eval_seconds: float = 0.0  # of the others
    # What a report shows of a row of an evaluation set, by the name of the set.
    shown: Mapping[str, Callable[[int], dict[str, str]]] = field(default_factory=dict)


@dataclass(frozen=True)
class ChosenRows:
    """The rows of each split that a run uses, and what there is to say of them."""

    splits: dict[str, Any]  # with 'val' by --val_fraction or --fold, 'held_out' by --mixup meta
    lines: list[str] = field(default_factory=list)  # of what was read, held out or changed


def reading(settings: Settings, run: Run) -> dict[str, Any]:
    """How own data is read: the classes of a checkpoint, and which splits are enough."""
    classes = run.checkpoint.classes if run.checkpoint else ()
    enough = ["test", "val"] * settings.evaluate + ["train"] * settings.holds_out
    return {"classes": classes, "enough": enough}


def use_rows(
    settings: Settings, run: Run, splits: Mapping[str, Any], classes: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Check what was read, choose rows of it, and print what there is to say; collective.

    Args:
        splits: what was read of the data set, 'train' and some of 'val' and 'test'.
    Returns:
        The chosen splits, and what a checkpoint keeps of the data to know it again.
    """
    used = [name for name in splits if name != "train" or is_train_used(settings, splits)]
    fingerprint = check_data(
        run.world,
        classes,
        data={name: splits[name] for name in used},
        trained=run.checkpoint.metadata if run.checkpoint else None,
        source=f"--data_dir {settings.data_dir}",
    )
    if run.checkpoint and (now := fingerprint["splits"].get("train")):
        before = run.checkpoint.splits.get("train")
        if before and not is_same(before, now):
            # other rows are held out, and a baseline is another
            other = "other " * (before["rows"] == now["rows"])
            pair = [f"{before['rows']} rows", f"{other}{now['rows']} rows"]
            run.checkpoint.changed["the data"] = pair
    chosen = choose_rows(settings, splits, classes, redrawn=redrawn_by(run))
    if run.world.is_main and chosen.lines:
        print(*chosen.lines, sep="\n", flush=True)
    return chosen.splits, fingerprint


def holds_out(settings: Settings, splits: Mapping[str, Any]) -> bool:
    """Whether rows of the training split are the validation set."""
    return settings.holds_out and "val" not in splits


def is_train_used(settings: Settings, splits: Mapping[str, Any]) -> bool:
    """Whether rows of the training split are looked at, be it to train or as held-out ones."""
    has_test = "test" in splits and settings.test
    return not settings.evaluate or (holds_out(settings, splits) and not has_test)


def choose_rows(
    settings: Settings,
    splits: Mapping[str, Any],
    classes: Sequence[str],
    *,
    redrawn: Mapping[str, Sequence[Any]] = {},
) -> ChosenRows:
    """The rows of each split that a run uses; --label_noise makes labels of 'train' wrong.

    Args:
        redrawn: as of `redrawn_by`, for a run that goes on.
    """
    unused = {"train"} if settings.test else {"train", "test"}
    chosen = ChosenRows({name: split for name, split in splits.items() if name not in unused})
    train, has_val = splits["train"], "val" in splits
    is_other_data = settings.evaluate and "the data" in redrawn
    check_validation_set(settings, has_val or settings.holds_out)
    rows_of = {"train": torch.arange(len(train.labels))}
    if is_other_data and holds_out(settings, splits):
        rows_of["val"] = rows_of["train"]  # all are evaluated
    elif is_train_used(settings, splits):
        rows_of = split_rows(settings, torch.as_tensor(train.labels), has_val, train.groups)
    for name, rows in rows_of.items():
        is_whole = len(rows) == len(train.labels)
        chosen.splits[name] = train if is_whole else train.select_rows(rows)
    if settings.dataset in own_data.DATASETS and not settings.evaluate:
        chosen.lines.extend(note for split in splits.values() for note in split.notes)
        if has_val and settings.val_fraction:
            chosen.lines.append("no training rows are held out: the data has val rows")
        of = {name: torch.as_tensor(each.labels) for name, each in chosen.splits.items()}
        numbers = {name: class_numbers(labels).tolist() for name, labels in of.items()}
        chosen.lines.extend(own_data.class_table(classes, numbers))
        if settings.label_separator:
            bare = {name: len(each) - int(each.any(1).sum()) for name, each in of.items()}
            said = (f"{bare[name]} of {len(each)} in {name}" for name, each in of.items())
            chosen.lines.append(f"rows without a label: {', '.join(said)}")
    before, now = redrawn.get("--val_fraction", (0, settings.val_fraction))
    has_fewer = list(redrawn) == ["--val_fraction"] and now < before  # of the same rows
    is_drawn = not settings.fold or "the data" in redrawn  # folds are the same for every seed
    if redrawn and holds_out(settings, splits) and is_drawn and not has_fewer:
        what = "has trained on some of the rows now held out"
        if is_other_data:
            what = "may have trained on some of the rows that are evaluated"
        chosen.lines.append(f"warning: {' and '.join(redrawn)} changed: the run {what}")
    train = chosen.splits["train"]
    if settings.evaluate:  # only one training row is prepared, since nothing trains
        chosen.splits["train"] = train.select_rows(torch.arange(1))
        return chosen
    name = "val" if "val" in chosen.splits else "test"
    if name in chosen.splits:
        check_measure(settings.best_by, torch.as_tensor(chosen.splits[name].labels), name)
    if settings.label_noise:
        train, line = with_wrong_labels(settings, train, classes)
        chosen.splits["train"] = train
        chosen.lines.append(line)
    if (learned_from := policy_rows(settings, torch.as_tensor(train.labels))) is not None:
        chosen.splits["held_out"] = train.select_rows(learned_from)
    return chosen


def check_measure(best_by: str, labels: Tensor, name: str) -> None:
    """Check that what chooses the best epoch is a number on the rows of the set of this name.

    Raises:
        InputError: no row has a label, or for AUROC none has a class that others lack.
    """
    counts = labels.sum(0) if labels.ndim > 1 else labels.bincount()
    needed = {"map": counts > 0, "auroc": (counts > 0) & (counts < len(labels))}
    if best_by in needed and not needed[best_by].any():
        raise InputError(
            f"--best_by {best_by}: the {EVAL_SET_NAMES[name]} rows are all of one class or of "
            "none; choose others, or --best_by loss"
        )


def class_numbers(labels: Tensor) -> Tensor:
    """The class numbers of rows, of several labels those of each row in turn."""
    return labels if labels.ndim == 1 else labels.nonzero()[:, 1]


def split_rows(
    settings: Settings,
    labels: Tensor,
    has_val: bool,
    groups_of_rows: Callable[[], Sequence[str]],
) -> dict[str, Tensor]:
    """Class-balanced row numbers of 'train' and, with --val_fraction or --fold, of 'val'.

    Args:
        labels: (rows,) of the training set; (rows, classes) of several labels are not balanced.
        has_val: the data set has a validation set of its own, which is used instead.
        groups_of_rows: of each row what it belongs to, if --group_column is given.
    Raises:
        InputError: no rows are left, or there is a validation set beside --fold.
    """
    rows = torch.arange(len(labels))
    if labels.ndim > 1:
        labels = torch.zeros_like(rows)  # as of one class
    if settings.subset < 1:
        rows, _ = stratified_rows(labels, settings.subset, seed=settings.seed)
    if has_val and settings.fold:
        raise InputError(
            f"--fold {settings.fold}: the data has a validation set of its own; leave --fold out, "
            "or make it a part of the training set"
        )
    if has_val or not settings.holds_out:
        return {"train": rows}
    groups = groups_of_rows()  # read where rows are parted only: other data may have none
    if settings.fold:  # of all rows: folds of different seeds pair
        with refused_as(f"--fold {settings.fold}"):
            number, folds = map(int, settings.fold.split("/"))
            fold = fold_of_rows(labels, folds, seed=FOLD_SEED, groups=groups)[rows]
            is_val, has_groups = fold == number - 1, bool(groups)
            val, train = parted(labels[rows], is_val, settings.fold, has_groups=has_groups)
        return {"train": rows[train], "val": rows[val]}
    with refused_as("--val_fraction"):
        val, train = held_out_rows(
            labels[rows],
            settings.val_fraction,
            seed=settings.seed + 1,
            groups=[groups[row] for row in rows.tolist()] if groups else (),
        )
    return {"train": rows[train], "val": rows[val]}


def with_wrong_labels(settings: Settings, train: Any, classes: Sequence[str]) -> tuple[Any, str]:
    """A training split with the labels of --label_noise, and a line that says how many."""
    share, _, pairs = str(settings.label_noise).partition(":")
    right, seed = torch.as_tensor(train.labels), settings.seed + NOISE_SEED
    with refused_as("--label_noise"):
        wrong = swapped_classes(pairs, classes)
    noisy = with_noise(right, float(share), classes=len(classes), seed=seed, wrong=wrong)
    of_texts = right is not train.labels
    train = dataclasses.replace(train, labels=noisy.tolist() if of_texts else noisy)
    count = int((noisy != right).sum())
    return train, f"--label_noise: {count} of {len(right)} training labels are wrong"


def policy_rows(settings: Settings, labels: Tensor) -> Tensor | None:
    """The rows of the training set that --mixup meta learns from while it mixes the others.

    Args:
        labels: (rows,) of the training set.
    Raises:
        InputError: there are too few.
    """
    if settings.mixup != "meta":
        return None
    share = settings.mixup_args["held_out"]
    if not 0 < share < 1:
        raise InputError(f"--mixup_args held_out={share:g} must be above 0 and below 1")
    share = min(share, MOST_POLICY_ROWS / len(labels))
    with refused_as("--mixup_args held_out"):
        return held_out_rows(labels, share, seed=settings.seed + POLICY_SEED)[0]


def redrawn_by(run: Run) -> dict[str, Any]:
    """What, changed since the checkpoint, chooses other rows; each as [before, now]."""
    changed = run.checkpoint.changed if run.checkpoint else {}
    return {name: changed[name] for name in REDRAWING if name in changed}


def report_baseline(
    settings: Settings, run: Run, splits: Mapping[str, Any], measure: Callable[[Any, Any], Baseline]
) -> dict[str, Any]:
    """With --baseline, what a linear model reaches, which rank 0 prints; for checkpoints.

    Args:
        measure: fits the model to a training split, and evaluates it on another.
    """
    known = run.checkpoint.metadata.get("baseline") if run.checkpoint else None
    if known and not redrawn_by(run):
        return known
    is_wanted = settings.baseline
    if is_wanted is None:
        few = len(class_numbers(torch.as_tensor(splits["train"].labels)).unique()) <= MOST_CLASSES
        is_wanted = few and settings.dataset in own_data.DATASETS
    if settings.evaluate or not is_wanted:
        return {}
    name = "test" if "test" in splits else "val"
    with run.world.waiting_at_most(READ_SECONDS):
        found = on_main(run.world, lambda: measure(splits["train"], splits[name]))
    if run.world.is_main:
        print(found.line(EVAL_SET_NAMES[name]), flush=True)
    return {"eval_set": name, **dataclasses.asdict(found)}

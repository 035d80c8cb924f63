"""What rows of metrics.jsonl say, in words, and the summary of a run."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backends.device import peak_memory
from distributed.world import World
from errors import InputError
from input_pipeline.baseline import Baseline
from training.checkpoint import read_progress
from training.evaluation import EVAL_SET_NAMES, METRIC_NAMES, Evaluation, class_table
from training.progress import Progress, whole_epochs
from training.run_log import RunLog
from training.scores import Show, describe_scores, worst_rows

SHARES = {"map": "mAP", "accuracy": "accuracy", "micro_f1": "micro-F1", "macro_f1": "macro-F1"} | {
    "auroc": "AUROC"
}
MAX_LISTED = 20  # classes of a table at the end of a run


def is_evaluated(row: Mapping[str, Any]) -> bool:
    """Whether there was an evaluation after the epoch of a row of metrics.jsonl."""
    return any(row.get(f"{name}_accuracy") is not None for name in EVAL_SET_NAMES)


def training_seconds(row: Mapping[str, Any]) -> float:
    """The time that a run took to reach this row of metrics.jsonl: the clock of every comparison.

    Training steps and their data count; compiling and evaluating do not. Rows of older logs do not
    have these apart, so that everything counts.
    """
    return row["seconds"] - row.get("compile_seconds", 0.0) - row.get("eval_seconds", 0.0)


def show_result(row: Mapping[str, Any]) -> str:
    """A row of metrics.jsonl, as 'epoch 6, test accuracy 94.00 %, macro-F1 93.71 %'."""
    epoch = f"epoch {row['epoch']}" if row else "before the first epoch"
    return ", ".join([epoch, *_shares(row, "")])


def show_views(row: Mapping[str, Any]) -> str:
    """The same of outputs that are averaged over views of each image; '' without such."""
    if "views" not in row:
        return ""
    shares = ", ".join(_shares(row, "_views"))
    return f"{shares}, averaged over {row['views']} views of each image"


def _shares(row: Mapping[str, Any], suffix: str) -> list[str]:
    """The metrics of `SHARES` on each evaluation set in words, as far as the row has them."""
    shares = []
    for name, eval_set in EVAL_SET_NAMES.items():
        found = {text: row.get(f"{name}_{metric}{suffix}") for metric, text in SHARES.items()}
        words = [
            f"{text} {100 * share:.2f} %"
            for text, share in found.items()
            if share is not None and math.isfinite(share)
        ]
        shares += [f"{eval_set} {words[0]}", *words[1:]] if words else []
    return shares


def how_chosen(rows: Sequence[Mapping[str, Any]], *, chosen_by: str) -> str:
    """How a column of metrics.jsonl chose the best of its rows, and what that means."""
    if len(rows) == 1:
        return "the only epoch"
    if sum(map(is_evaluated, rows)) == 1:
        return "the only epoch that was evaluated"
    return what_chose(chosen_by)


def what_chose(chosen_by: str) -> str:
    """What a column of metrics.jsonl chose an epoch on, and what that means."""
    eval_set, _, metric = chosen_by.partition("_")
    by = "" if metric == "accuracy" else f"by {METRIC_NAMES[metric]} "
    if eval_set == "test":
        return f"chosen {by}on the test set, so it is optimistic"
    return f"chosen {by}on validation rows"


def report_result(
    progress: Progress,
    world: World,
    log: RunLog,
    *,
    is_saved: bool,
    metadata: Mapping[str, Any],
    evaluated: Mapping[str, Evaluation],
    shown: Mapping[str, Show],
) -> None:
    """Print what the last and the best epoch of a run reached, and the cost; write result.json.

    Rank 0 alone does. Where rows may have several labels there is a table of them.

    Args:
        is_saved: whether the last checkpoint could be written.
        metadata: of the checkpoints: `classes`, and what simple models reached, `baseline` and
            `probe`, as of `against`.
        evaluated: the last evaluation on each set.
        shown: what a report shows of the rows of a set, by its name.
    Raises:
        InputError: the checkpoint could not be written.
    """
    if not world.is_main:
        return
    rows, best_epoch, classes = progress.rows, progress.best["epoch"], metadata["classes"]
    missing = "" if is_saved else "; this epoch is not in the file, which could not be written"
    last = rows[-1] if rows else {}
    main_set = "test" if "test" in evaluated else "val"
    spread = evaluated[main_set].spread(EVAL_SET_NAMES[main_set]) if evaluated else ""
    print(f"last.pt: {show_result(last)}{spread}{missing}")
    if over_views := show_views(last):
        print(f"last.pt: {over_views}")
    if best_epoch:
        chosen = how_chosen(rows, chosen_by=progress.best["chosen_by"])
        best = next(row for row in rows if row["epoch"] == best_epoch)
        print(f"best.pt: {show_result(best)} ({chosen})")
    else:
        print("best.pt holds no epoch of this run, see above")
    for name, found in evaluated.items():
        if found.average_precision is not None:
            *lines, of_all = class_table(found, classes).splitlines()
            more = [f"{len(lines) - MAX_LISTED:>20} more"] if len(lines) > MAX_LISTED else []
            print(f"last.pt: each label on the {EVAL_SET_NAMES[name]} set")
            print(*lines[:MAX_LISTED], *more, of_all, sep="\n")
    if evaluated:
        show = shown.get(main_set, lambda row: {})
        result = final_result(
            main_set, evaluated[main_set], classes=classes, epoch=last["epoch"], show=show
        )
        log.result(result)
        print(f"probabilities of last.pt {describe_probabilities(result)}")
    peak = max(peak_memory(world.device), *(row["peak_memory_bytes"] for row in rows))
    train_seconds = sum(row["train_seconds"] for row in whole_epochs(rows)) + progress.train_seconds
    speed = progress.samples / max(train_seconds, 1e-9)
    print(
        f"{progress.seconds:.1f} s, {speed:.0f} samples/s, peak memory "
        f"{peak / 2**30:.2f} GiB, {progress.device_hours(world):.4f} "
        f"device-hours; run folder {log.folder}",
        flush=True,
    )
    for simple, name in (("baseline", "baseline"), ("probe", "linear probe")):
        if verdict := against(metadata.get(simple), rows, name=name):
            print(f"last.pt: {verdict}", flush=True)
    if not is_saved:
        raise InputError(
            f"{log.folder}/last.pt could not be written at the end of the run (see the warnings "
            "above); make room, or a folder that can be written, and train again or go on with "
            "--resume"
        )


def describe_probabilities(result: Mapping[str, Any]) -> str:
    """What result.json says of the probabilities, and of which rows."""
    words = describe_scores(result["scores"])
    is_of_val = result["eval_set"] == EVAL_SET_NAMES["val"]
    if is_of_val and "temperature" in (result["scores"] or {}):
        words += ", fitted to these rows"
    return f"on the {result['eval_set']} set: {words}"


def against(
    simple: Mapping[str, Any] | None, rows: Sequence[Mapping[str, Any]], name: str = "baseline"
) -> str:
    """How the last row of metrics.jsonl compares with a simple model; '' where that is not known.

    Args:
        simple: what that model reached: the fields of a `Baseline`, and `eval_set`.
        name: what the model is called.
    """
    known = dict(simple or {})
    eval_set = known.pop("eval_set", "")
    reached = rows[-1].get(f"{eval_set}_{known.get('metric', 'accuracy')}") if rows else None
    if reached is None or not math.isfinite(reached):
        return ""
    return Baseline(**known).verdict(reached, name)


def final_result(
    name: str, found: Evaluation, *, classes: Sequence[str], epoch: int, show: Show
) -> dict[str, Any]:
    """What a report shows of an evaluation after `epoch`, on the set of this name."""
    rows = found.rows
    scores = None if rows is None else rows.scores()
    result = {"epoch": epoch, "eval_set": EVAL_SET_NAMES[name], "scores": scores}
    if found.average_precision is not None:
        result |= {"labels": list(classes), "label_counts": found.class_counts.tolist()}
        result |= {} if rows is None else {"rows": len(rows.targets)}
    else:
        result["rows"] = int(found.class_counts[1].sum())
    if rows is not None and scores:
        result["worst"] = worst_rows(rows, classes, show)
    return result


def describe_checkpoint(path: Path, progress: Mapping[str, Any]) -> str:
    """The file and epoch of a checkpoint; and where best and last differ, those of the other."""
    line = f"weights of {path}: {describe_progress(progress)}"
    other = path.with_name({"last.pt": "best.pt", "best.pt": "last.pt"}.get(path.name, path.name))
    stored = read_progress(other)
    if stored is None or stored["step"] == progress["step"]:
        return line
    return f"{line}; {other.name} is of {describe_progress(stored)}: --checkpoint {other}"


def describe_progress(progress: Mapping[str, Any]) -> str:
    """Where a checkpoint was written, and the accuracies of the evaluation before."""
    row = progress["rows"][-1] if progress["rows"] else {}
    steps = progress["step"] - row.get("step", 0)
    return f"{show_result(row)}, and {steps} steps after it" if steps else show_result(row)

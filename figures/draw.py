"""Draw accuracy and loss of runs against epochs and seconds.

python figures/draw.py                                     # every picture and the results table, from figures/logs
python figures/draw.py --runs runs/a runs/b --out a.png    # your own runs, one line each
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  the backend comes first

HERE = Path(__file__).parent
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito, told apart by the colour-blind
MARKERS = "os^Dv*"


def read_rows(folder: Path) -> list[dict]:
    """Rows of a run's metrics.jsonl."""
    try:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    except OSError:
        sys.exit(f"error: {folder} holds no metrics.jsonl; give run folders")
    if not rows:
        sys.exit(f"error: {folder}/metrics.jsonl is empty: the run has not finished an epoch")
    return rows


def by_name(folders: list[Path]) -> dict[str, list[Path]]:
    """Runs that differ in the seed alone (folders NAME-seedN), by NAME."""
    named: dict[str, list[Path]] = {}
    for folder in folders:
        named.setdefault(folder.name.rpartition("-seed")[0] or folder.name, []).append(folder)
    return named


def draw_runs(folders: list[Path], out: Path) -> None:
    """Test accuracy against epochs and seconds, training loss against epochs: the mean over seeds, and a band from least to most.

    Where some were repeated with other seeds, the runs of a single seed are left out: they are the search for the setting.
    """
    named = by_name(folders)
    several = {name: runs for name, runs in named.items() if len(runs) > 1}
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for number, (name, runs) in enumerate((several or named).items()):
        epochs = list(zip(*(read_rows(folder) for folder in runs)))  # rows of all seeds, an epoch each
        colour = COLOURS[number % 6]
        style = {"color": colour, "marker": MARKERS[number % 6], "markersize": 4, "label": name}
        across = [row[0]["epoch"] for row in epochs]
        accuracy = [[100 * row["test_accuracy"] for row in rows] for rows in epochs]
        loss = [[row["train_loss"] for row in rows] for rows in epochs]
        seconds = [statistics.mean(row["seconds"] for row in rows) for rows in epochs]
        for axis, horizontal, vertical in zip(axes, (across, seconds, across), (accuracy, accuracy, loss)):
            axis.plot(horizontal, [statistics.mean(values) for values in vertical], **style)
            axis.fill_between(horizontal, list(map(min, vertical)), list(map(max, vertical)), color=colour, alpha=0.15, linewidth=0)
    labels = (("epoch", "test accuracy / %"), ("time / s", "test accuracy / %"), ("epoch", "training loss"))
    for axis, (horizontal, vertical) in zip(axes, labels):
        axis.set(xlabel=horizontal, ylabel=vertical)
        axis.grid(alpha=0.3)
    axes[0].legend()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)
    plt.close(figure)
    print(out)


def results_table(groups: dict[str, list[Path]]) -> str:
    """Markdown: a line for the runs that differ in the seed alone, all from metrics.jsonl.

    Accuracy is that of the last epoch, so that the test set chooses nothing.
    """
    lines = [
        "| runs | seeds | test accuracy, last epoch | seconds | device-hours | peak memory |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for group, folders in groups.items():
        for name, runs in by_name(folders).items():
            last = [read_rows(folder)[-1] for folder in runs]
            accuracy = [100 * row["test_accuracy"] for row in last]
            spread = f" ± {statistics.stdev(accuracy):.2f}" if len(last) > 1 else ""
            seconds = statistics.mean(row["seconds"] for row in last)
            hours = statistics.mean(row["seconds"] * row["world_size"] / 3600 for row in last)
            memory = max(row["peak_memory_bytes"] for row in last) / 2**30
            lines.append(
                f"| [{group}/{name}](figures/logs/{group}) | {len(last)} | {statistics.mean(accuracy):.2f}{spread} % "
                f"| {seconds:.0f} | {hours:.4f} | {memory:.2f} GiB |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("--out", type=Path, default=Path("accuracy.png"), help="picture (default accuracy.png)")
    args = parser.parse_args()
    if args.runs:
        draw_runs(args.runs, args.out)
        return
    logs = sorted((HERE / "logs").glob("*/*/metrics.jsonl"))
    groups = {path.parent.parent.name: [] for path in logs}
    for path in logs:
        groups[path.parent.parent.name].append(path.parent)
    for group, folders in groups.items():
        draw_runs(folders, HERE / f"{group}.png")
    print(results_table(groups))


if __name__ == "__main__":
    main()

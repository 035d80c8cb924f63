"""Draw accuracy and loss of runs against epochs and seconds.

python figures/draw.py                                     # every picture, from the logs in figures/logs
python figures/draw.py --runs runs/a runs/b --out a.png    # your own runs, one line each
"""

from __future__ import annotations

import argparse
import json
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


def draw_runs(folders: list[Path], out: Path) -> None:
    """Test accuracy against epochs and against seconds, and training loss against epochs."""
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for number, folder in enumerate(folders):
        rows = read_rows(folder)
        style = {"color": COLOURS[number % 6], "marker": MARKERS[number % 6], "markersize": 4, "label": folder.name}
        epochs = [row["epoch"] for row in rows]
        accuracy = [100 * row["test_accuracy"] for row in rows]
        axes[0].plot(epochs, accuracy, **style)
        axes[1].plot([row["seconds"] for row in rows], accuracy, **style)
        axes[2].plot(epochs, [row["train_loss"] for row in rows], **style)
    labels = (("epoch", "test accuracy / %"), ("time / s", "test accuracy / %"), ("epoch", "training loss"))
    for axis, (horizontal, vertical) in zip(axes, labels):
        axis.set(xlabel=horizontal, ylabel=vertical)
        axis.grid(alpha=0.3)
    axes[0].legend()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)
    plt.close(figure)
    print(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("--out", type=Path, default=Path("accuracy.png"), help="picture (default accuracy.png)")
    args = parser.parse_args()
    if args.runs:
        draw_runs(args.runs, args.out)
        return
    for group in sorted(path for path in (HERE / "logs").iterdir() if path.is_dir()):
        folders = sorted(path.parent for path in group.glob("*/metrics.jsonl"))
        if folders:
            draw_runs(folders, HERE / f"{group.name}.png")


if __name__ == "__main__":
    main()

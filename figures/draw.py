"""Draw every picture, and write the results table of README.md, from the logs.

python -m figures.draw                                     # all of it, from figures/logs
python -m figures.draw --runs runs/a runs/b --out a.png    # your own runs; those named NAME-seedN become one line
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from figures import table
from figures.logs import LOGS, ROOT, by_name, read_groups
from figures.pictures import PICTURES, overview

HERE = ROOT / "figures"


def save(figure: Figure, path: Path) -> None:
    """Write a picture, aside first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    figure.savefig(part, dpi=150, format=path.suffix.lstrip(".") or "png")
    part.replace(path)
    plt.close(figure)
    print(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", nargs="+", type=Path, help="run folders")
    parser.add_argument(
        "--out", type=Path, default=Path("accuracy.png"), help="picture (default accuracy.png)"
    )
    args = parser.parse_args()
    if args.runs:
        save(overview(by_name(args.runs)), args.out)
        return
    groups = read_groups(LOGS)
    for name, picture in PICTURES.items():
        figure = picture(groups)
        if figure is None:
            print(f"{name}.png: its runs are not there yet")
        else:
            save(figure, HERE / f"{name}.png")
    new = table.text(groups, HERE / "experiments.yaml")
    table.write(new, ROOT / "README.md")
    print(new)


if __name__ == "__main__":
    main()

"""Draw every picture and write the table of docs/results.md, from the logs.

python -m figures.draw                                     # everything, from figures/logs
python -m figures.draw --runs runs/a runs/b --labels SGD NGD --title "digits" --out a.png

Runs of your own that are named NAME-seedN, or that have the same label, become one line with a
band.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import yaml
from matplotlib.figure import Figure
from PIL import Image

from cli.flag_parser import FlagParser, file_path
from errors import InputError, exit_code
from figures import table
from figures.experiments import PLAN
from figures.methods import read_pictures
from figures.pictures import draw_picture, overview
from figures.run_logs import LOGS, ROOT, by_name, read_groups
from training.atomic_file import atomic_write, atomic_write_text
from training.epoch_report import is_evaluated

RESULTS_PAGE = ROOT / "docs" / "results.md"


def save(figure: Figure, path: Path) -> None:
    """Write a picture and print its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        if path.suffix in ("", ".png"):
            save_png(figure, temporary)
        else:
            figure.savefig(temporary, format=path.suffix.lstrip("."))
    plt.close(figure)
    print(path)


def save_png(figure: Figure, path: Path) -> None:
    """Write a PNG file with a palette of 256 colours, a third as large as one with all colours."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=150, format="png")
    image = Image.open(buffer).convert("RGB")
    palette = Image.Quantize.MAXCOVERAGE  # which changes no colour by more than can be seen
    image = image.quantize(256, method=palette, dither=Image.Dither.NONE)
    image.save(path, format="png", optimize=True)


def draw_all() -> None:
    """Draw every picture and write the results table."""
    groups = read_groups(LOGS)
    for name in read_pictures()["pictures"]:
        save(draw_picture(name, groups), ROOT / "figures" / f"{name}.png")
    plan = yaml.safe_load(PLAN.read_text(encoding="utf-8"))
    page = RESULTS_PAGE.read_text(encoding="utf-8")
    atomic_write_text(RESULTS_PAGE, table.page_with_results(page, groups, plan))
    print(RESULTS_PAGE)


def draw_parser() -> FlagParser:
    """Return the parser of the command line."""
    parser = FlagParser(__doc__)
    add = parser.group("flags")
    add("--runs", nargs="+", type=file_path, metavar="DIR", help="Run folders to draw.")
    add(
        "--labels", nargs="+", metavar="NAME", help="A name for each of --runs (default its folder)"
    )
    add("--title", metavar="TEXT", default="", help="Title over the picture of --runs.")
    help_of_out = "File for the picture of --runs (default %(default)s)."
    add("--out", type=file_path, default=Path("accuracy.png"), metavar="FILE", help=help_of_out)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the runs that the command line names, or all figures and the results table."""
    args = draw_parser().parse_args(argv)
    if not args.runs:
        if args.labels or args.title:
            raise InputError("--labels and --title describe runs of your own: give --runs too")
        draw_all()
        return
    if args.labels and len(args.labels) != len(args.runs):
        raise InputError(
            f"--labels: {len(args.labels)} names for {len(args.runs)} --runs; give one for each"
        )
    named_runs = by_name(args.runs, args.labels or ())
    for name, runs in named_runs.items():
        named_runs[name] = runs = [list(filter(is_evaluated, rows)) for rows in runs]
        if not all(runs):
            raise InputError(f"{name}: no epoch has been evaluated yet; train longer")
    save(overview(named_runs, args.title), args.out)


if __name__ == "__main__":
    sys.exit(exit_code(main))

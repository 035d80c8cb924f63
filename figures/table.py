"""The results table of README.md, from the logs and the plan of the experiments.

table.write(read_groups(LOGS), ROOT / "README.md")
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from figures.logs import Runs, accuracy, device_hours, last, spread

BEGIN, END = "<!-- results: written by figures/draw.py -->", "<!-- end of results -->"
HEAD = """| method | seeds | test accuracy | time / s | device-hours | peak memory | command | log |
| --- | ---: | ---: | ---: | ---: | ---: | --- | --- |"""


def lines(groups: Mapping[str, Mapping[str, Runs]], plan: Mapping[str, Any]) -> list[str]:
    """A row for each run of the plan: measured ones, then those that wait for a GPU, then published ones.

    Accuracy is that of the last epoch, so that the test set chooses nothing.
    """
    found = []
    for device in ("cpu", "gpu"):
        for group, entry in plan[device].items():
            shown = entry.get("table", list(entry.get("runs", ())))
            for name in shown:
                runs = groups.get(group, {}).get(name)
                if runs or device == "gpu":
                    found.append(
                        row(
                            f"{entry['what']}: {name}",
                            command(entry, name),
                            f"figures/logs/{group}",
                            runs,
                        )
                    )
    for entry in plan["published"]:
        found.append(
            f"| *published:* {entry['method']} | | {entry['accuracy']} | | | | | {entry['source']} |"
        )
    return found


def command(entry: Mapping[str, Any], name: str) -> str:
    """As one would type it."""
    return f"{entry['command']} {entry['runs'][name] or ''}".strip()


def row(method: str, typed: str, folder: str, runs: Runs | None) -> str:
    """Of the table; open where there are no runs."""
    if not runs:
        return f"| {method} | | open | | | | `{typed}` | |"
    rows = [each[-1] for each in runs]
    taken = statistics.mean(row["seconds"] for row in rows)
    hours = statistics.mean(map(device_hours, rows))
    memory = max(row["peak_memory_bytes"] for row in rows) / 2**30
    values = spread(last(runs, accuracy))
    return f"| {method} | {len(runs)} | {values} % | {taken:.0f} | {hours:.4f} | {memory:.2f} GiB | `{typed}` | [log]({folder}) |"


def text(groups: Mapping[str, Mapping[str, Runs]], plan: Path) -> str:
    """All of the table, in Markdown."""
    return "\n".join([HEAD, *lines(groups, yaml.safe_load(plan.read_text()))])


def write(new: str, readme: Path) -> None:
    """Put the table where README.md has its marks.

    Raises:
        ValueError: it does not have them, once each.
    """
    old = readme.read_text()
    if old.count(BEGIN) != 1 or old.count(END) != 1:
        raise ValueError(f"{readme}: wanted one '{BEGIN}' and one '{END}'")
    before, after = old.split(BEGIN)[0], old.split(END)[1]
    readme.write_text(f"{before}{BEGIN}\n{new}\n{END}{after}")

"""Pack the logs of finished runs: a file for each group, in place of a folder for each run.

pack(Path("figures/logs/GROUP/NAME-seed0"))    # into figures/logs/GROUP.jsonl

A run is one line, {"run": "NAME-seed0", "flags": {...}, "commit": ..., ...}, which is its
config.json, and behind it the lines of its metrics.jsonl as they are. What names the machine's
folders and processes is left out. The folder is deleted.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from errors import InputError
from figures.run_logs import finished, packed_file, packed_runs, read_config, row_lines
from training.atomic_file import atomic_write_text


def pack(folder: Path) -> None:
    """Move the log of a finished run from LOGS/GROUP/NAME-seedN into LOGS/GROUP.jsonl.

    A run of the same name that is there already is replaced.

    Raises:
        InputError: the run is not finished.
    """
    if not folder.is_dir() or not finished(folder):
        raise InputError(f"{folder}: is no folder of a finished run")
    config = read_config(folder)
    config.pop("launchers", None)  # processes of the machine
    head = json.dumps({"run": folder.name, **without_places(config)})
    path = packed_file(folder)
    runs = {**packed_runs(path), folder.name: [head, *row_lines(folder)]}
    lines = [line for name in sorted(runs) for line in runs[name]]
    atomic_write_text(path, "\n".join(lines) + "\n")
    shutil.rmtree(folder)
    if not any(folder.parent.iterdir()):
        folder.parent.rmdir()


def without_places(value: Any) -> Any:
    """Return a value of config.json in which the name of a file stands for its absolute path."""
    if isinstance(value, dict):
        return {name: without_places(each) for name, each in value.items()}
    if isinstance(value, list):
        return [without_places(each) for each in value]
    if not isinstance(value, str):
        return value
    flag, equals, path = value.partition("=") if value.startswith("--") else ("", "", value)
    return f"{flag}{equals}{Path(path).name}" if path.startswith(("/", "../")) else value

"""How long a run still takes, in words.

seconds_left(row, epochs=50)       # by the mean time of the epochs that are done
in_words(72_000)                   # '20 h'
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def in_words(seconds: float) -> str:
    """A duration for a sentence: 45 s, 20 min, 2.5 h, 16 h, 3.2 days."""
    for unit, name, largest in ((1, "s", 90), (60, "min", 90), (3600, "h", 48)):
        if seconds < largest * unit:
            digits = 1 if name == "h" and seconds < 9.95 * unit else 0
            return f"{seconds / unit:.{digits}f} {name}".replace(".0 ", " ")
    return f"{seconds / 86400:.1f} days".replace(".0 ", " ")


def seconds_left(row: Mapping[str, Any], *, epochs: int) -> float:
    """Seconds from the epoch of a row of metrics.jsonl to the end of a run of so many epochs."""
    return row["seconds"] / row["epoch"] * (epochs - row["epoch"])

"""How long a run still takes, in words.

time_left(5_000, done=12.5, epochs=50)     # '4.2 h', as if all epochs took the same time
in_words(72_000)                           # '20 h'
"""

from __future__ import annotations


def in_words(seconds: float) -> str:
    """A duration for a sentence: 45 s, 20 min, 2.5 h, 16 h, 3.2 days."""
    for unit, name, largest in ((1, "s", 90), (60, "min", 90), (3600, "h", 48)):
        if seconds < largest * unit:
            digits = 1 if name == "h" and seconds < 9.95 * unit else 0
            return f"{seconds / unit:.{digits}f} {name}".replace(".0 ", " ")
    return f"{seconds / 86400:.1f} days".replace(".0 ", " ")


def time_left(seconds: float, *, done: float, epochs: int) -> str:
    """The time to the end of a run that took `seconds` for its first `done` epochs, in words."""
    return in_words(seconds / done * (epochs - done))

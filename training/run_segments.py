"""The segments of a run: from which step on it was trained with which flags, by which code, where.

    segments = next_segments(checkpoint, {"commit": "31dfeba", "torch": "2.15.0"})
    segments[-1]    # {"after_epochs": 1, "after_steps": 12, "commit": "31dfeba", ...,
                    #  "changed": {name of a flag: [value before, and now]}}

Every checkpoint holds the segments of its run, and config.json holds them where there are several:
its other entries are those of the last one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from training.checkpoint import Checkpoint

PLACE = ("after_epochs", "after_steps", "changed")  # what a segment has beside its environment

Segment = dict[str, Any]
"""What is said of a segment: its place, the flags that it changed, and its environment."""


def next_segments(checkpoint: Checkpoint | None, environment: Mapping[str, Any]) -> list[Segment]:
    """The segments of a run, the oldest first, with the one that begins now.

    None begins where nothing has changed, as after an interruption on the same machine.

    Args:
        checkpoint: what the run goes on from, or None for a new run.
        environment: what results depend on beside the flags: commit, versions, device.
    """
    if checkpoint is None:
        return [{"after_epochs": 0, "after_steps": 0, "changed": {}, **environment}]
    segments, changed = list(checkpoint.metadata["segments"]), checkpoint.changed
    if not changed and not changes_between(segments[-1], environment):
        return segments
    progress = checkpoint.progress
    done = {"after_epochs": progress["epoch"], "after_steps": progress["step"]}
    return [*segments, {**done, "changed": changed, **environment}]


def changes_between(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """What differs between the environments of two segments, as [value before, value now].

    What only one of them records is left out.
    """
    common = [name for name in now if name in before and name not in PLACE]
    return {name: [before[name], now[name]] for name in common if before[name] != now[name]}


def describe_last(segments: Sequence[Segment]) -> str:
    """What the last segment changed: 'commit bbb (was aaa), torch 2.15.0 (was 2.14.0)'; or ''."""
    environment = changes_between(segments[-2], segments[-1]) if len(segments) > 1 else {}
    return ", ".join(
        f"{name} {flag_value(now)} (was {flag_value(before)})"
        for name, (before, now) in {**segments[-1]["changed"], **environment}.items()
    )


def describe_all(segments: Sequence[Segment]) -> str:
    """What each segment changed and from which step on; '' for an uninterrupted run."""
    return "; ".join(
        f"from step {segments[number]['after_steps'] + 1} on: "
        f"{describe_last(segments[: number + 1])}"
        for number in range(1, len(segments))
    )


def flag_value(value: Any) -> str:
    """The value of a flag as one would type it: numbers without needless digits."""
    if value is None:
        return "not given"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        value = [f"{name}={setting}" for name, setting in value.items()]
    if isinstance(value, list | tuple):
        value = " ".join(map(flag_value, value))
    return f"{value:.15g}" if isinstance(value, float) else str(value) or "none"

"""The parts of a run that went on with other flags, by other code or on another machine.

    history = next_history(state, {"commit": "31dfeba", "torch": "2.15.0"})
    history[-1]     # {"after_epochs": 1, "after_steps": 12, "commit": "31dfeba", ...,
                    #  "changed": {"--label_noise": [0.0, 0.4]}}: before, and now

Every checkpoint holds the history of its run, and config.json one of more than one part: without
it, config.json would say that the last part's flags and code trained the whole run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any


def next_history(
    state: Mapping[str, Any] | None, circumstances: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The parts of a run, the oldest first, with the one that begins now.

    No part begins where nothing has changed, as after an interruption on the same machine. Parts
    before the oldest one were trained by a version that kept no history.

    Args:
        state: the checkpoint that the run goes on from, or None for a new run. Its `changed` maps
            names of flags to [value before, value now].
        circumstances: what the part depends on beside its flags: commit, versions, device.
    """
    if state is None:
        return [{"after_epochs": 0, "after_steps": 0, "changed": {}, **circumstances}]
    progress, history = state["progress"], list(state.get("history", []))
    changed = dict(state.get("changed", {}))
    if history and not changed and circumstances.items() <= history[-1].items():
        return history
    done = {"after_epochs": progress["epoch"], "after_steps": progress["step"]}
    return [*history, {**done, "changed": changed, **circumstances}]


def describe_changes(changed: Mapping[str, Any]) -> str:
    """Write changed flags in words: '--bs 64 (before: 128), --label_noise 0.4 (before: 0.0)'."""
    return ", ".join(f"{flag} {now} (before: {before})" for flag, (before, now) in changed.items())


def describe_parts(history: Sequence[Mapping[str, Any]]) -> str:
    """Write in words what each part of a run but the first has changed; '' if there is one part.

    Args:
        history: what `next_history` returned.
    """
    lines = []
    for before, part in pairwise(history):
        other = {
            name: [before[name], value]
            for name, value in part.items()
            if name in before and name not in ("after_epochs", "after_steps", "changed")
            if before[name] != value
        }
        changes = describe_changes({**part["changed"], **other})
        lines.append(
            f"after {part['after_epochs']} epochs and {part['after_steps']} steps: {changes}"
        )
    return "; ".join(lines)

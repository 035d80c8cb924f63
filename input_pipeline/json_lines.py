"""Reads jsonl files, whose lines are objects such as {"label": "spam", "text": "Win now"}.

names, *rows = parse_json_lines(text, path=Path("my_texts/train.jsonl"))
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from errors import InputError


def parse_json_lines(text: str, *, path: Path) -> list[tuple[int, list[str]]]:
    """Return the names of all objects as row 0, and the values of the object of each line.

    Null, lists and objects are empty; other values that are no strings are as JSON writes them.

    Raises:
        InputError: a line is not an object.
    """

    def cell(value: Any) -> str:
        if value is None or isinstance(value, list | dict):
            return ""
        text = value if isinstance(value, str) else json.dumps(value)
        return text.encode("utf-8", "replace").decode("utf-8")  # without lone surrogates

    objects: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}, row {number}: is not JSON ({error}); correct it") from None
        if not isinstance(value, dict):
            raise InputError(f"{path}, row {number}: is not a JSON object with label and text")
        objects[number] = value
    names = list(dict.fromkeys(name for value in objects.values() for name in value))
    if not names:
        raise InputError(f"{path} is empty: it needs at least one object with label and text")
    return [
        (0, names),
        *((number, [cell(each.get(name)) for name in names]) for number, each in objects.items()),
    ]

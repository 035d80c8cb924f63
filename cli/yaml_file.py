"""Reading the YAML files that people write: recipes, and the search spaces of sweeps.

entries = read_yaml(Path("recipes/fast94.yaml"), "--recipe fast94")     # {"dataset": ...}
"""

from pathlib import Path
from typing import Any

import yaml

from errors import InputError, first_line


def read_yaml(path: Path, source: str, *, as_text: bool = False) -> Any:
    """The content of a YAML file: plain values, lists and dicts.

    Args:
        path: the file.
        source: how the user named it, which messages begin with.
        as_text: leave values as they are written, for a caller that converts them: `no`, 1e-5 and
            2026-01-01 are text.
    Raises:
        InputError: the file cannot be read, is not YAML, or has a key twice.
    """
    try:
        loader = yaml.BaseLoader if as_text else yaml.SafeLoader
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=loader)
        twice = repeated_key(root)
        content = yaml.load(text, Loader=loader)
    except OSError as error:
        raise InputError(f"{source}: {error.strerror}; give the path of a YAML file") from None
    # Beside YAMLError, impossible dates, wrong tags and deep nesting raise errors of many types.
    except Exception as error:
        raise InputError(f"{source}: not YAML ({first_line(error)})") from None
    if twice is not None:
        raise InputError(f"{source}: {twice} is given twice, of which YAML takes the last")
    return content


def repeated_key(root: yaml.Node | None) -> str | None:
    """A key that a mapping in a YAML document has twice; None if there is none."""
    nodes, seen = [root], set()
    while nodes:
        node = nodes.pop()
        if id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            scalars = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            keys = [(key.tag, key.value) for key in scalars if key.value != "<<"]  # which merges
            if twice := next((key for key in keys if keys.count(key) > 1), None):
                return twice[1]
            nodes += [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            nodes += node.value
    return None

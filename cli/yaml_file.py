"""Reading the YAML files that people write: recipes, and the search spaces of sweeps.

entries = read_yaml(Path("recipes/fast94.yaml"), "--recipe fast94")     # {"dataset": ...}
"""

from pathlib import Path
from typing import Any

import yaml

from errors import InputError, first_line


class _EachKeyOnce:
    """Part of a loader that refuses a mapping with a key twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        scalars = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        keys = [(key.tag, key.value) for key in scalars if key.value != "<<"]  # which merges
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise InputError(f"{twice[1]} is given twice, of which YAML takes the last")
        return super().construct_mapping(node, deep)  # type: ignore[misc]


class _Texts(_EachKeyOnce, yaml.BaseLoader): ...


class _Values(_EachKeyOnce, yaml.SafeLoader): ...


def read_yaml(path: Path, source: str, *, as_text: bool = False) -> Any:
    """The content of a YAML file: plain values, lists and dicts.

    Args:
        source: how the user named it, which messages begin with.
        as_text: leave values as they are written, for a caller that converts them: `no`, 1e-5 and
            2026-01-01 are text.
    Raises:
        InputError: the file cannot be read, is not YAML, or has a key twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
        return yaml.load(text, Loader=_Texts if as_text else _Values)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None
    except OSError as error:
        raise InputError(f"{source}: {error.strerror}; give the path of a YAML file") from None
    # Beside YAMLError, impossible dates, wrong tags and deep nesting raise errors of many types.
    except Exception as error:
        raise InputError(f"{source}: not YAML ({first_line(error)})") from None

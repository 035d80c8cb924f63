"""The words of the field: no definition has a name of the private vocabulary that was replaced."""

from __future__ import annotations

import ast

import pytest

from test_layers import TREES

REPLACED = set(
    """Step do_step splits parts apart lockstep moved settle look lap told say Keeper Base move take
    ranges found live moves room fresh Part Lay Ring swap give_back first most everyone from_first
    Lesson along remove ThinMode DenseMode Held Learner hits draw inside Lag Local Exchange lacks
    Chunk Plan""".split()
)
SHORTEST_DOCSTRING = 4  # words


def definitions(name: str) -> list[ast.FunctionDef | ast.ClassDef]:
    """Return the functions, methods and classes of a module."""
    kinds = ast.FunctionDef, ast.ClassDef
    return [node for node in ast.walk(TREES[name]) if isinstance(node, kinds)]


@pytest.mark.parametrize("name", TREES)
def test_definitions_have_the_names_of_the_field(name: str) -> None:
    assert not REPLACED & {each.name for each in definitions(name)}


@pytest.mark.parametrize("name", TREES)
def test_docstrings_say_something(name: str) -> None:
    for each in definitions(name):
        docstring = ast.get_docstring(each)
        assert docstring is None or len(docstring.split()) >= SHORTEST_DOCSTRING, each.name

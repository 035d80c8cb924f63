"""README.md and docs/: their size, their links, and the flags that they name."""

from __future__ import annotations

import functools
import re
import textwrap

import pytest
import torch

import ranks
import resnet50_test
import transformer_test
from cli import compatibility

README = ranks.ROOT / "README.md"
PAGES = [README, *sorted((ranks.ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9_-]*")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
TOOL_FLAGS = {
    "test.sh": {"--all", "--legacy"},
    "figures": {"--list", "--only", "--minutes", "--runs"},
    "benchmarks": {"--quick", "--json"},
    "tuning": {
        "--jobs",
        "--nproc",
        "--objective",
        "--pruner",
        "--sampler",
        "--space",
        "--storage",
        "--trials",
    },
    "sbatch": {"--nodes", "--gpus-per-node"},
}


@functools.cache
def known_flags() -> set[str]:
    parsers = resnet50_test.parser(), transformer_test.parser()
    options = {name for parser in parsers for name in parser._option_string_actions}
    return options.union(*TOOL_FLAGS.values())


@functools.cache
def anchors(text: str) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_one_page_and_begins_with_a_command():
    text = README.read_text()
    assert len(text.split()) <= 1200
    fence = text[: text.index("```bash")].count("\n") + 1
    assert fence + 1 <= 40, "the first command comes within 40 lines"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_links_to_is_there(page):
    for target in LINK.findall(page.read_text()):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(linked.read_text()), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_flags_that_a_page_names_are_known(page):
    unknown = set(FLAG.findall(page.read_text())) - known_flags()
    assert not unknown, f"{page.name} names {', '.join(sorted(unknown))}"


def test_the_index_lists_every_page():
    index = (ranks.ROOT / "docs" / "README.md").read_text()
    for page in PAGES[1:]:
        assert page.name == "README.md" or f"]({page.name})" in index


def test_every_committed_picture_is_shown_or_linked():
    text = "".join(page.read_text() for page in PAGES)
    for picture in (ranks.ROOT / "figures").glob("*.png"):
        assert f"figures/{picture.name})" in text, picture.name


def test_the_optimizer_of_the_page_on_extending_works():
    text = (ranks.ROOT / "docs" / "extending.md").read_text()
    source = text.split("```python\n", 1)[1].split("```", 1)[0]
    names: dict = {}
    exec(textwrap.dedent("   " + source.lstrip()), names)
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = names["Lion"]([weight], lr=0.1)
    weight.grad = torch.tensor([2.0, -3.0, 0.0])
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert weight.tolist() == [1, 1, 1], "a step that is to be skipped changes nothing"
    del optimizer.found_inf
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([0.9, 1.1, 1.0]))
    with pytest.raises(ValueError, match="Lion"):
        names["Lion"]([weight], lr=-1)


def test_the_table_of_incompatible_flags_is_that_of_the_code() -> None:
    page = compatibility.PAGE.read_text()
    assert compatibility.page_with_table(page) == page

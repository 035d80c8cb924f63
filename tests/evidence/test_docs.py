"""README.md, CONTRIBUTING.md and docs/: size, links, flags, and the Python code that they show."""

import functools
import re
import textwrap

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ranks
from cli.foreign_names import FOREIGN
from conftest import parser
from figures import flags_page
from package.assemble import assemble
from tuning.compare import compare_parser
from tuning.sweep import sweep_parser

README, DOCS = ranks.ROOT / "README.md", ranks.ROOT / "docs"
PAGES = [README, ranks.ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
PYTHON = re.compile(r"^ *```python\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


TOOL_FLAGS = "--all --legacy --allow_dirty --list --logs --only --compile --quick --json --source"
TOOL_FLAGS += " --sides --batch-size --nnodes --rdzv_backend --rdzv_endpoint"  # torchrun's, ours
TOOL_FLAGS += " --nodes --gpus-per-node --cpus-per-task --ipc --entrypoint"  # of sbatch and docker


@functools.cache
def anchors(text: str) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_what_a_page_links_to_is_there():
    links = [(page, target) for page in PAGES for target in LINK.findall(page.read_text())]
    for page, target in links:
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(linked.read_text()), f"{page.name} links to {target}"


def test_the_flags_that_a_page_names_are_known():
    parsers = [parser("images"), parser("texts"), compare_parser(), sweep_parser()]
    known = {*TOOL_FLAGS.split(), *FOREIGN}.union(*(parser.names() for parser in parsers))
    for page in PAGES:
        named = re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*", page.read_text())
        unknown = set(named) - known
        assert not unknown, f"{page.name} names {', '.join(sorted(unknown))}"


def test_every_page_and_picture_is_linked():
    index, text = (DOCS / "README.md").read_text(), "".join(page.read_text() for page in PAGES)
    for page in DOCS.glob("*.md"):
        assert page.name == "README.md" or f"]({page.name})" in index, page.name
    for picture in (ranks.ROOT / "figures").glob("*.png"):
        assert f"figures/{picture.name})" in text, picture.name


def test_the_python_code_of_the_pages_runs(tmp_path, monkeypatch):
    """The blocks of a page in order, after what a reader's own code provides."""
    assemble(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # the package faster_training
    for page in PAGES:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 10))
        images, labels = torch.randn(6, 3, 8, 8), torch.tensor([0, 1, 2, 3, 4, 9])
        names = {
            "model": model,
            "images": images,
            "labels": labels,
            "loss": nn.functional.cross_entropy(model(images), labels),
            "DataLoader": DataLoader,
            "dataset": TensorDataset(images.repeat(50, 1, 1, 1), labels.repeat(50)),
            "criterion": nn.CrossEntropyLoss(),
            "optimizer": torch.optim.SGD(model.parameters()),
            "mean_loss": 1.0,
            "seconds": 1.0,
        }
        for source in PYTHON.findall(page.read_text()):
            exec(compile(textwrap.dedent(source), str(page), "exec"), names)


def test_the_page_of_flags_lists_those_of_the_parsers() -> None:
    page = flags_page.PAGE.read_text()
    assert flags_page.page_with_flags(page) == page, "run python -m figures.flags_page"

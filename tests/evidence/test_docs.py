"""README.md, CONTRIBUTING.md and docs/: size, links, flags, and the Python code that they show."""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ranks
import resnet50_test
import transformer_test
from cli.flags import OptimizerChoice
from cli.foreign_names import FOREIGN
from distributed.comm_hooks import AllReduceHook
from distributed.world import World
from figures import flags_page
from input_pipeline.dataset import BatchedDataset
from package.assemble import assemble
from tuning.sweep import sweep_parser

README = ranks.ROOT / "README.md"
DOCS = ranks.ROOT / "docs"
EXTENDING = DOCS / "extending.md"
PAGES = [README, ranks.ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
COLUMNS = 100
LINK = re.compile(r"\]\(([^)\s]+)\)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9_-]*")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
PYTHON = re.compile(r"^ *```python\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
TABLE_ROW = re.compile(r'"\w+": ')
TOOL_FLAGS = {
    "test.sh": {"--all", "--legacy"},
    "figures": {"--allow_dirty", "--list", "--logs", "--minutes", "--only"},
    "benchmarks": {"--compile", "--quick", "--json", "--logs", "--network", "--only", "--ranks"}
    | {"--cifar", "--report", "--source", "--text"},
    "written with hyphens": {"--batch-size", "--no-sync-bn"},
    "sbatch": {"--nodes", "--gpus-per-node", "--cpus-per-task"},
    "docker": {"--gpus", "--ipc"},
    "TensorBoard": {"--logdir"},
}


@functools.cache
def known_flags() -> set[str]:
    parsers = resnet50_test.parser(), transformer_test.parser(), sweep_parser("resnet50_test.py")
    options = {name for parser in parsers for name in parser.names()} | set(FOREIGN)
    return options.union(*TOOL_FLAGS.values())


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
    for page in PAGES:
        unknown = set(FLAG.findall(page.read_text())) - known_flags()
        assert not unknown, f"{page.name} names {', '.join(sorted(unknown))}"


def test_the_index_lists_every_page():
    index = (DOCS / "README.md").read_text()
    for page in DOCS.glob("*.md"):
        assert page.name == "README.md" or f"]({page.name})" in index


def test_every_committed_picture_is_shown_or_linked():
    text = "".join(page.read_text() for page in PAGES)
    for picture in (ranks.ROOT / "figures").glob("*.png"):
        assert f"figures/{picture.name})" in text, picture.name


def run_python_blocks(page: Path) -> dict[str, Any]:
    """Run the Python blocks of a page in order, in one namespace, which is returned.

    The namespace begins with what a reader's own code provides: model, images, labels, loss. A
    block that is a row of a table, such as `"lion": choice,`, becomes an entry of `rows`.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 10))
    images, labels = torch.randn(6, 3, 8, 8), torch.tensor([0, 1, 2, 3, 4, 9])
    names: dict[str, Any] = {
        "model": model,
        "images": images,
        "labels": labels,
        "loss": nn.functional.cross_entropy(model(images), labels),
        "OptimizerChoice": OptimizerChoice,
        "rows": [],
        "DataLoader": DataLoader,
        "dataset": TensorDataset(images.repeat(50, 1, 1, 1), labels.repeat(50)),
        "criterion": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD(model.parameters()),
        "mean_loss": 1.0,
        "seconds": 1.0,
    }
    for source in PYTHON.findall(page.read_text()):
        source = textwrap.dedent(source)
        if TABLE_ROW.match(source):
            source = f"rows.append({{{source}}})"
        exec(compile(source, str(page), "exec"), names)
    return names


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "```python" in page.read_text()], ids=lambda page: page.stem
)
def test_the_python_code_of_a_page_runs(page, tmp_path, monkeypatch):
    assemble(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # the package faster_training
    text = page.read_text()
    assert len(PYTHON.findall(text)) == text.count("```python")
    run_python_blocks(page)


def test_the_optimizer_of_the_page_on_extending_works():
    names = run_python_blocks(EXTENDING)
    _, choice = (row["lion"] for row in names["rows"])
    weight = nn.Parameter(torch.ones(3))
    settings = dict.fromkeys(choice.settings.values(), (0.9, 0.999))
    assert settings.keys() == {"betas"}
    optimizer = choice.make([weight], lr=0.1, **settings)
    assert isinstance(optimizer, names["Lion"])
    weight.grad = torch.tensor([2.0, -3.0, 0.0])
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert weight.tolist() == [1, 1, 1], "a step that is to be skipped changes nothing"
    del optimizer.found_inf
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([0.9, 1.1, 1.0]))
    with pytest.raises(ValueError, match="Lion"):
        names["Lion"]([weight], lr=-1)


def test_the_data_set_of_the_page_on_extending_follows_the_protocol():
    tabular = run_python_blocks(EXTENDING)["Tabular"]
    wanted = inspect.signature(BatchedDataset.batches).parameters
    assert list(inspect.signature(tabular.batches).parameters) == list(wanted)
    features, labels = torch.arange(8.0).view(4, 2), torch.tensor([0, 1, 0, 1])
    dataset = tabular(features, labels, torch.device("cpu"))
    assert len(dataset) == 4
    assert dataset.lengths is None
    row_batches = [torch.tensor([3, 0, 3]), torch.tensor([1])]
    for rows, batch in zip(row_batches, dataset.batches(row_batches=row_batches, epoch=0)):
        torch.testing.assert_close(batch, (features[rows], labels[rows]))


def test_the_page_on_extending_lists_every_member_of_a_communication_hook():
    hook = AllReduceHook(World())
    arguments = inspect.signature(AllReduceHook.__init__).parameters
    members = {name for name in dir(hook) if not name.startswith("_")}
    members -= {*arguments, "power_sgd"}
    section = EXTENDING.read_text().split("## Add a communication hook")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    listed = re.findall(r"`(\w+)(?:\(([\w, ]*)\))?`", " ".join(cells))
    assert {name for name, _ in listed} == members
    for name, parameters in listed:
        if callable(getattr(hook, name)):
            assert parameters == ", ".join(inspect.signature(getattr(hook, name)).parameters)


def test_the_page_of_flags_lists_those_of_the_parsers() -> None:
    page = flags_page.PAGE.read_text()
    assert flags_page.page_with_flags(page) == page, "run python -m figures.flags_page"

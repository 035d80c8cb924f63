"""The package faster_training: built by pip, installed alone, and used from another folder."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from conftest import each_of
from package import assemble
from ranks import ROOT

OPTIMIZERS = ("NGD", "SLAMB", "LAMB", "LARS")
CHECKS = [  # the functions of foreign_loop.py
    node.name
    for node in ast.parse((ROOT / "tests" / "foreign_loop.py").read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name != "main"
]
BUILD_TOOLS_MISSING = "Could not find a version that satisfies the requirement setuptools"


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "-w", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    if BUILD_TOOLS_MISSING in done.stderr:
        pytest.skip("pip cannot download setuptools")
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="session")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the installed wheel and nothing else."""
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def run_elsewhere(site: Path, *arguments: str) -> str:
    """Run python in another folder, where nothing of this repository can be imported."""
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=site, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nothing_but_the_package_lands_at_the_top_level(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert "faster_training/py.typed" in names
    assert {re.sub(r"-[\d.]+\.dist-info$", "", top) for top in tops} == {"faster_training"}


def test_metadata_names_the_extras_and_only_torch_is_required(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    [name] = [name for name in archive.namelist() if name.endswith("METADATA")]
    text = archive.read(name).decode()
    required = re.findall(r"^Requires-Dist: (.*)$", text, re.MULTILINE)
    assert [line for line in required if "extra ==" not in line] == ["torch>=2.9"]
    extras = re.findall(r"^Provides-Extra: (.*)$", text, re.MULTILINE)
    assert sorted(extras) == ["onnx", "safetensors", "tensorboard", "track", "tune"]


def test_importing_it_imports_neither_the_loop_nor_large_libraries(site: Path) -> None:
    names = "NGD, SLAMB, LAMB, LARS, MetaMixup, mixup, DynamicBatchSampler"
    modules = run_elsewhere(
        site,
        "-c",
        f"import sys; from faster_training import {names}; print(*sys.modules, sep='\\n')",
    ).split()
    for unwanted in ("matplotlib", "optuna", "sklearn", "torchvision", "yaml", "optimizers", "ngd"):
        assert unwanted not in modules
    assert "faster_training.training.trainer" not in modules


def test_every_name_of_the_api_is_there_and_has_a_docstring(site: Path) -> None:
    run_elsewhere(
        site,
        "-c",
        "import faster_training as f; assert all(getattr(f, n).__doc__ for n in f.__all__)",
    )


def test_modules_of_the_package_import_only_each_other(tmp_path: Path) -> None:
    assemble.assemble(tmp_path)
    tops = {name.partition(".")[0] for name in assemble.needed_modules()}
    for path in (tmp_path / assemble.PACKAGE).rglob("*.py"):
        imported = {name.partition(".")[0] for name in assemble.imported_names(path.read_text())}
        assert not imported & tops, path


@pytest.fixture(scope="session")
def foreign_loop(site: Path) -> dict[str, str]:
    """What came of each check of foreign_loop.py: '' or what went wrong."""
    return json.loads(run_elsewhere(site, str(ROOT / "tests" / "foreign_loop.py")))


@pytest.mark.process
@each_of("check", CHECKS)
@each_of("optimizer", OPTIMIZERS)
def test_loops_of_other_projects(optimizer: str, check: str, foreign_loop: dict[str, str]) -> None:
    assert foreign_loop[f"{optimizer} {check}"] == ""


# -------------------------------------------------------------------- examples


EXAMPLES = {  # what each needs, and how its last line of numbers begins
    "plain_loop": ("sklearn", "epoch 8: batch 128, loss"),
    "with_timm": ("timm", "epoch 10: loss"),
    "hf_trainer": ("transformers", "training loss"),
    "with_lightning": ("lightning", "training loss"),
    "slamb_torchrun": ("torch", "step 60: loss"),
}


def test_every_example_is_tested_and_listed() -> None:
    page = (ROOT / "examples" / "README.md").read_text()
    names = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert names == {*EXAMPLES, "serve_onnx"}  # test_training.py has that one
    assert all(f"({name}.py)" in page for name in names)


@pytest.mark.process
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run_where_their_library_is(name: str, site: Path) -> None:
    library, result = EXAMPLES[name]
    pytest.importorskip(library)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    words = launcher if name == "slamb_torchrun" else []
    console = run_elsewhere(site, *words, str(ROOT / "examples" / f"{name}.py"))
    [line] = [line for line in console.splitlines() if line.startswith(result)]
    loss = float(re.search(r"loss (\d+\.\d+)", line)[1])
    assert loss < {"plain_loop": 1.0, "hf_trainer": 0.65}.get(name, 0.6)

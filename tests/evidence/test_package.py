"""The package faster_training: built by pip, installed alone, and used from another folder."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import ranks
from ranks import ROOT

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


def test_the_wheel_holds_one_package_that_needs_torch_alone(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    tops = {name.partition("/")[0] for name in names}
    assert "faster_training/py.typed" in names
    assert {re.sub(r"-[\d.]+\.dist-info$", "", top) for top in tops} == {"faster_training"}
    [metadata] = [archive.read(name).decode() for name in names if name.endswith("METADATA")]
    required = re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)
    assert [line for line in required if "extra ==" not in line] == ["torch>=2.9"]


def test_importing_it_imports_neither_the_loop_nor_large_libraries(site: Path) -> None:
    code = "import sys, faster_training as f; [getattr(f, name) for name in f.__all__]"
    modules = run_elsewhere(site, "-c", f"{code}; print(*sys.modules, sep='\\n')").split()
    for unwanted in ("matplotlib", "optuna", "sklearn", "torchvision", "yaml", "optimizers", "ngd"):
        assert unwanted not in modules
    assert "faster_training.training.trainer" not in modules


def test_a_run_is_loaded_by_the_package_alone(site: Path, tmp_path: Path) -> None:
    flags = "--dataset digits --arch resnet8 --epochs 1 --subset 0.2 --out run"
    ranks.run(f"resnet50_test.py {flags}", tmp_path)
    metadata = (ROOT / "pyproject.toml").read_text()
    code = f"""
import numpy as np, faster_training as f
[label] = f.load({str(tmp_path / "run")!r}).predict([np.zeros((30, 40), dtype=np.uint8)])
assert label in "0123456789"
assert f'version = "{{f.__version__}}"' in {metadata!r}
assert not [name for name in dir(f) if name[:1] == "_" and name != "__version__"]
"""
    run_elsewhere(site, "-c", code)


# -------------------------------------------------------------------- examples


EXAMPLES = {  # what each needs, and how its last line of numbers begins
    "plain_loop": ("sklearn", "epoch 8: batch 128, loss"),
    "with_timm": ("timm", "epoch 10: loss"),
    "hf_trainer": ("accelerate", "training loss"),
    "with_lightning": ("lightning", "training loss"),
    "slamb_torchrun": ("torch", "step 60: loss"),
}


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

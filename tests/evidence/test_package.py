"""The package faster_training: built by pip, installed alone, and used from another folder."""

import csv
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from input_pipeline.text_datasets import HEADLINES
from package.assemble import assemble_editable
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


def test_fit_trains_on_a_folder_and_load_reads_its_run(site: Path, tmp_path: Path) -> None:
    """Of the wheel, and of `pip install -e .`; recipes come with it."""
    for number in range(40):
        file = tmp_path / "photos" / ("train" if number % 4 else "test") / f"{number % 2}"
        file.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(number).integers(0, 100, (8, 8)) + 150 * (number % 2)
        Image.fromarray(noise.astype(np.uint8)).save(file / f"{number}.png")
    rows = list(csv.reader(HEADLINES.open(encoding="utf-8")))
    for name, part in (("train", rows[::3]), ("test", rows[1::3])):
        lines = [["label", "text"], *([row[0], row[-1]] for row in part)]
        (tmp_path / "texts").mkdir(exist_ok=True)
        with (tmp_path / "texts" / f"{name}.csv").open("w", encoding="utf-8") as file:
            csv.writer(file).writerows(lines)
    code = f"""
import importlib.metadata, os, faster_training as f, numpy as np
os.chdir({str(tmp_path)!r})
if __name__ == "__main__":
    shared = {{"epochs": 1, "precision": "fp32", "threads": 1}}
    flags = {{"recipe": "fast94", "small_epochs": 0, "warmup": 0, "bs": 4}}
    kinds = {{"betas": (0.9, 0.99), "weights": None, "ema": np.float32(0.5), "opt_args": {{}}}}
    images = f.fit("photos", arch="resnet8", **flags, **kinds, **shared)
    [run] = os.listdir("runs")
    assert images.predict(["photos/test/0/0.png"]) == f.load(f"runs/{{run}}").predict(
        ["photos/test/0/0.png"])
    os.rename(f"runs/{{run}}", f"was-{{run}}")
    sizes = {{"width": 8, "depth": 1}}
    texts = f.fit("texts", model_args=sizes, optimizer="sgd", nesterov=False, **shared)
    assert texts.predict(["Stocks fall"])[0] in "1234"
    f.fit("texts", resume=True, **(shared | {{"epochs": 2}}))
    [run] = os.listdir("runs")
    assert sum(1 for line in open(f"runs/{{run}}/metrics.jsonl")) == 2
    os.mkdir("both")
    with open("both/train.csv", "w") as file:
        file.write("image,text,label\\na.png,x,1\\n")
    for folder, more, said in (
        ("txts", {{"label_column": "label"}}, "txts: there is no such folder"),
        ("both", {{}}, "has the columns image and text"),
        ("texts", {{"resume": "auto"}}, "--resume auto: give --out"),
        ("texts", {{"evaluate": True, "checkpoint": "last"}}, "fit trains"),
        ("texts", {{"data-dir": "photos"}}, "fit trains on its folder"),
        ("none", {{"dataset": "cifar10", "tokenizer": "wordpiece"}}, "--tokenizer"),  # of images
    ):
        try:
            f.fit(folder, **more)
        except Exception as error:
            assert said in str(error), error
        else:
            raise AssertionError(said)
    assert importlib.metadata.version("faster-training") == f.__version__
    assert not [name for name in dir(f) if name[:1] == "_" and name != "__version__"]
"""
    (tmp_path / "fit.py").write_text(code)
    assemble_editable(tmp_path / "editable")
    run_elsewhere(site, str(tmp_path / "fit.py"))
    run_elsewhere(
        tmp_path / "editable", "-c", "from faster_training import NGD, fit, images_command"
    )


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

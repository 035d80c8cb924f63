"""Fixtures of several files: real data sets, finished runs, and calls that must be refused."""

import contextlib
import csv
import inspect
import io
import itertools
import re
import sys
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import errors
import resnet50_test
import transformer_test
from backends import device
from budget import COLD_STARTS
from cli import options
from cli.flag_parser import ScriptParser
from cli.settings import Settings
from input_pipeline.text_datasets import AGNEWS_CLASSES, read_headlines

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SHORT = "--epochs 1 --bs 32 --device cpu --precision fp32 --threads 1"
IMAGES = f"--dataset digits --arch resnet20 --subset 0.1 {SHORT}"
TEXTS = f"--dataset headlines --subset 0.2 --width 8 --heads 2 --depth 1 {SHORT}"
LABELS = f"--dataset csv --label_separator | --width 8 --heads 2 --depth 1 {SHORT} --bs 8"
SCRIPTS = {"images": (resnet50_test, IMAGES), "texts": (transformer_test, TEXTS)}
FILES = {f"{script.SCRIPT}.py": script for script, _ in SCRIPTS.values()}


starts: list[str] = []  # commands of interpreters that this process has started


def note_start(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: note a command of python or of a shell script."""
    if event == "subprocess.Popen":
        words = list(map(str, arguments[1]))
        command, is_torchs = " ".join(words), any("inductor" in word for word in words)
        if not is_torchs and any(Path(w).name.startswith(("python", "bash")) for w in words[:2]):
            starts.append(command[:200])


sys.addaudithook(note_start)


@pytest.fixture(scope="module", autouse=True)
def few_cold_starts(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each start costs seconds: a file has no more than `budget.COLD_STARTS` allows it."""
    before = len(starts)
    yield
    name = f"{request.path.parent.name}/{request.path.name}"
    started = starts[before:]
    assert len(started) <= COLD_STARTS.get(name, 0), "\n".join(started)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test by its folder."""
    for item in items:
        if item.path.parent.name in ("process", "ranks", "evidence"):
            item.add_marker(item.path.parent.name)


def call(name: str, words: list[str]) -> int:
    """The exit code of the script of "images" or "texts" with these words."""
    script, _ = SCRIPTS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [f"{script.SCRIPT}.py", *words])
        return errors.exit_code(script.main)


def run(name: str, *texts: object, code: int = 0) -> str:
    """Run a script with the words of some texts; returns stdout and stderr."""
    console = io.StringIO()
    with contextlib.redirect_stdout(console), contextlib.redirect_stderr(console):
        found = call(name, " ".join(map(str, texts)).split())
    assert found == code, console.getvalue()
    return console.getvalue()


def parser(name: str) -> ScriptParser[Any]:
    return SCRIPTS[name][0].parser()


def parsed(name: str, *texts: object) -> Settings:
    """The flags that a script reads from the words of some texts."""
    script, words = SCRIPTS[name][0], " ".join(map(str, texts)).split()
    return options.parse(script.parser(), script.SCRIPT, words)[0]


def for_each(cases: Iterable[tuple[Any, ...]], check: Callable[..., object]) -> None:
    """Call a check with each case, and fail with a line for each case that fails."""
    failures = []
    for case in cases:
        try:
            check(*case)
        except (AssertionError, errors.InputError) as error:
            failures.append(f"{case}: {error}")
    assert not failures, "\n".join(failures)


def each_of(names: str | tuple[str, ...], values: Iterable[Any]) -> Callable[..., Any]:
    """Call a test in a loop over values, as `pytest.mark.parametrize` makes a test of each."""
    names = tuple(names.replace(" ", "").split(",")) if isinstance(names, str) else names
    cases = [value if len(names) > 1 else (value,) for value in values]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def loop(**fixtures: Any) -> None:
            for_each(cases, lambda *case: test(**fixtures, **dict(zip(names, case, strict=True))))

        parameters = inspect.signature(test).parameters.values()
        own = [parameter for parameter in parameters if parameter.name not in names]
        loop.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
        loop.__name__, loop.__doc__ = test.__name__, test.__doc__
        loop.pytestmark = getattr(test, "pytestmark", [])  # type: ignore[attr-defined]
        return loop

    return decorate


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Scripts that are called take one core, since the tests of other cores run beside them."""
    monkeypatch.setattr(device, "num_cores", lambda: 1)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)


def write(folder: Path, **files: str) -> Path:
    """Write files; a double underscore in a name stands for the dot of its suffix."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_bytes(text.encode())
    return folder


def write_images(folder: Path, classes: Any, *, rows: int, size: int, parts=("train", "test")):
    """PNGs of noise: train/CLASS/00.png and so on, as many in test."""
    generator = torch.Generator().manual_seed(0)
    for part, name in itertools.product(parts, classes):
        (folder / part / name).mkdir(parents=True, exist_ok=True)
        for number in range(rows):
            pixels = torch.randint(256, (size, size, 3), generator=generator, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(folder / part / name / f"{number:02}.png")
    return folder


def write_headlines(folder: Path) -> Path:
    """Headlines with several labels: their class, unless it is Sports, and whether of digits."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, split in read_headlines().items():
        with open(folder / f"{part}.csv", "w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["text", "label"])
            for number, text in zip(split.labels, split.texts):
                names = [AGNEWS_CLASSES[number]] * (number != 1)
                rows.writerow([text, " | ".join(names + ["digits"] * bool(re.search(r"\d", text)))])
    return folder


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished run of each script, of one epoch."""
    folders = {name: tmp_path_factory.mktemp(name) / "run" for name in SCRIPTS}
    for name, (_, words) in SCRIPTS.items():
        assert call(name, [*words.split(), "--out", str(folders[name])]) == 0
    return folders


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, in which the test runs as a job that was not restarted."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    return tmp_path


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys) -> Callable[..., str]:
    """Run a script without network; assert exit code 2 and one line; return the line."""

    def no_network(*_: object, **__: object) -> None:
        raise urllib.error.URLError("no network in tests")

    monkeypatch.chdir(tmp_path)
    for name in ("DATA_DIR", "RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(urllib.request, "urlopen", no_network)

    def run(name: str, extra: str, names: str, base: str | None = None) -> str:
        words = SCRIPTS[name][1] if base is None else base
        capsys.readouterr()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("default", UserWarning)
            code = call(name, [*words.split(), *extra.split()])
        lines = capsys.readouterr().err.splitlines()
        lines = [line for line in lines if not line.startswith("weights of ")]  # of --predict
        assert code == 2
        assert len(lines) == 1, lines
        assert lines[0].startswith("error: ")
        assert names in lines[0]
        assert len(lines[0]) < 500
        assert not [str(warning.message) for warning in warned]  # each would be two more lines
        return lines[0]

    return run

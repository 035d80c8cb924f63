"""Assembles the package `faster_training` from the files of this repository, when pip builds it.

pip install .                        # calls build_wheel, as pyproject.toml says

The repository's modules lie side by side at its root, and other packages have modules of the same
names. Here they become one package: package/api.py is its __init__, and the modules of the root and
of `ROOMS` lie beside it as they lie here, with imports such as

    from optimizers.base import GradScalerOptimizer                     # in the repository
    from faster_training.optimizers.base import GradScalerOptimizer     # in the package
"""

import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "faster_training"
API = ROOT / "package" / "api.py"
ROOMS = ("cli", "training", "optimizers", "distributed", "models", "input_pipeline", "backends")
BUILD_SYSTEM = """[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[tool.setuptools]
packages = {packages}

[tool.setuptools.package-data]
{package} = ["py.typed", "recipes/*.yaml", "input_pipeline/*.csv"]
"""
DATA = ("recipes/*.yaml", "input_pipeline/*.csv")  # of the repository, beside its modules
EDITABLE = """import sys

sys.path.append({root!r})
from package.api import *
from package.api import __version__, images_command, texts_command
"""


# -------------------------------------------------------------------- what pip calls (PEP 517)


def build_wheel(
    wheel_directory: str, config_settings: object = None, metadata_directory: object = None
) -> str:
    """Build the wheel into a folder; returns its file name."""
    return _build(wheel_directory, assemble)


def build_editable(
    wheel_directory: str, config_settings: object = None, metadata_directory: object = None
) -> str:
    """Build a wheel that imports the modules from where they lie; returns its file name."""
    return _build(wheel_directory, assemble_editable)


def build_sdist(sdist_directory: str, config_settings: object = None) -> str:
    """Pack the package as `assemble` makes it; returns the file name."""
    return _build(sdist_directory, assemble, kind="sdist")


def _build(directory: str, write: Callable[[Path], None], kind: str = "wheel") -> str:
    """Build the wheel or sdist of what is written into a folder."""
    from setuptools import build_meta  # is there while pip builds

    target = str(Path(directory).resolve())
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        os.chdir(folder)  # pip calls this in a process of its own
        name = getattr(build_meta, f"build_{kind}")(target)
        os.chdir(ROOT)
    return name


# -------------------------------------------------------------------- assembling


def assemble(folder: Path) -> None:
    """Write the package and its pyproject.toml into a folder."""
    modules = [
        API,
        *ROOT.glob("*.py"),
        *(path for room in ROOMS for path in ROOT.glob(f"{room}/*.py")),
    ]
    for path in modules:
        target = folder / PACKAGE / ("__init__.py" if path == API else path.relative_to(ROOT))
        target.parent.mkdir(parents=True, exist_ok=True)
        text = with_package_imports(path.read_text(encoding="utf-8"))
        target.write_text(text, encoding="utf-8")
    for path in (path for pattern in DATA for path in ROOT.glob(pattern)):
        target = folder / PACKAGE / path.relative_to(ROOT)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)
    (folder / PACKAGE / "py.typed").touch()  # its annotations are for type checkers
    write_project(folder)


def assemble_editable(folder: Path) -> None:
    """Write a package that takes its modules from this repository, wherever it is used."""
    (folder / PACKAGE).mkdir(parents=True)
    (folder / PACKAGE / "__init__.py").write_text(EDITABLE.format(root=str(ROOT)))
    write_project(folder)


def write_project(folder: Path) -> None:
    """Write the pyproject.toml of the package in a folder, and what it names."""
    for name in ("README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, folder / name)
    sections = re.split(
        r"(?m)^(?=\[[^\[\n]+\]$)", (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    )
    project = "".join(section for section in sections if section.startswith("[project"))
    version = re.findall(r'(?m)^__version__ = "(.+)"', API.read_text(encoding="utf-8"))[0]
    project = project.replace('dynamic = ["version"]', f'version = "{version}"')
    parents = {path.parent.relative_to(folder) for path in folder.rglob("*.py")}
    packages = sorted(".".join(parent.parts) for parent in parents)
    (folder / "pyproject.toml").write_text(
        project + BUILD_SYSTEM.format(packages=packages, package=PACKAGE), encoding="utf-8"
    )


def with_package_imports(source: str) -> str:
    """A module's source with the imports of this repository's modules as the package has them.

    Those of examples in docstrings are changed as well.
    """
    top = "|".join([*ROOMS, *(path.stem for path in ROOT.glob("*.py"))])
    source = re.sub(rf"(?m)^(\s*)import ({top})$", rf"\1from {PACKAGE} import \2", source)
    return re.sub(rf"(?m)^(\s*)from ({top})(?=[. ])", rf"\1from {PACKAGE}.\2", source)

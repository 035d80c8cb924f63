"""Parts of faster-training for your own training loop.

from faster_training import NGD, ngd_groups

optimizer = NGD(ngd_groups(model, weight_decay=0.05), lr=0.08)

And training on your own data, and a trained run as a function:

from faster_training import fit, load

fit("photos", weights="DEFAULT", arch="resnet18").predict(["cat.png"])     # --weights, --arch
load("runs/my-run").predict(["a text", "another one"])
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mixup
from distributed.comm_hooks import AllReduceHook, LocalSGD, RoundedGradients
from distributed.diloco import DiLoCo
from distributed.world import World, init_world
from dynamic_batch import (
    ByLoss,
    ByNoise,
    NoiseScale,
    Rule,
    Scheduled,
    WorkerBalancer,
    at_milestones,
    replacing_decay,
)
from errors import InputError, exit_code, interruptible
from mixup import MetaMixup
from ngd import NGD
from optimizers.base import GradScalerOptimizer
from optimizers.kaldi_ngd import KaldiNGD
from optimizers.lamb import LAMB
from optimizers.lars import LARS
from optimizers.param_groups import decay_groups, ngd_groups
from slamb import SLAMB
from training.batch_sampler import DynamicBatchSampler
from training.classifier import Classifier, load

__version__ = "0.1.0"

__all__ = [
    "LAMB",
    "LARS",
    "NGD",
    "SLAMB",
    "AllReduceHook",
    "ByLoss",
    "ByNoise",
    "DiLoCo",
    "DynamicBatchSampler",
    "GradScalerOptimizer",
    "KaldiNGD",
    "LocalSGD",
    "MetaMixup",
    "NoiseScale",
    "RoundedGradients",
    "Rule",
    "Scheduled",
    "WorkerBalancer",
    "World",
    "at_milestones",
    "decay_groups",
    "fit",
    "init_world",
    "load",
    "mixup",
    "ngd_groups",
    "replacing_decay",
]


def fit(folder: str | Path, **flags: Any) -> Classifier:
    """Train a classifier of your own images or texts, as the scripts do.

    Args:
        folder: with train/CLASS/ of images, or with train.csv, .tsv or .jsonl of texts or of
            images, as docs/own_data.md describes it.
        flags: those of resnet50_test.py or transformer_test.py: weights="DEFAULT", freeze=True,
            betas=(0.9, 0.99), opt_args={"rank": 16}; None is the default. `out`, the run folder,
            is a new one below runs/ by default.
    Returns:
        The trained model of the last epoch, as `load` returns it.
    Raises:
        InputError: a flag or the data is wrong.
        ImportError: a package of requirements.txt is missing.
    """
    folder = Path(folder).expanduser()
    flags = {name: plain for name, value in flags.items() if (plain := _plain(value)) is not None}
    with _training_packages():  # the scripts need more than torch
        from cli.options import flag_arguments
        from input_pipeline import own_data

        names = {each.strip("-").replace("-", "_").lower() for each in flags}
        if others := sorted(names & {"data_dir", "help", "evaluate", "predict", "export"}):
            raise InputError(f"fit({others[0]}=...): fit trains on its folder; leave it out")
        if flags.get("dataset", "csv") in own_data.DATASETS and not folder.exists():
            raise InputError(f"{folder}: there is no such folder")
        if "dataset" not in flags:
            flags["dataset"] = _own_dataset(folder, flags.get("label_separator"))
        flags = {"data_dir": folder, **flags}
        import resnet50_test
        import transformer_test

        is_of_images = flags["dataset"] in resnet50_test.parser().kind.datasets
        script = resnet50_test if is_of_images else transformer_test
    parser = script.parser()
    words = [
        word
        for name, value in flags.items()
        if value not in ({}, [])
        for word in flag_arguments(name, value, parser)
    ]
    return load(script.main(words))


def _own_dataset(folder: Path, label_separator: str | None) -> str:
    """The --dataset of a folder: csv where its tables are of texts, else folder.

    Raises:
        InputError: a table has columns of both.
    """
    from input_pipeline import csv_tables, own_data

    kinds = []
    for path in own_data.find_splits(folder, csv_tables.SUFFIXES).values():
        _, header = next(csv_tables.table_reader(path, label_separator)())
        names = {*map(csv_tables.normalise, header)}
        kinds.append("folder" if "image" in names else "csv")
        if "image" in names and (texts := names & csv_tables.TEXT_NAMES):
            raise InputError(
                f"{path}: has the columns image and {min(texts)}; give dataset='folder' for its "
                "images, or dataset='csv' for its texts"
            )
    return "csv" if "csv" in kinds else "folder"


def _plain(value: Any) -> Any:
    """A value without numpy's types and tuples."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [*map(_plain, value)] if isinstance(value, tuple | list | range) else value


@contextlib.contextmanager
def _training_packages() -> Iterator[None]:
    """Say what to install where a package is missing that training needs."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{error}: pip install 'faster-training[train]'") from error


def images_command() -> int:
    """Run resnet50_test.py as a console script; returns the exit code."""
    interruptible()
    with _training_packages():
        import resnet50_test

    return exit_code(resnet50_test.main)


def texts_command() -> int:
    """Run transformer_test.py as a console script; returns the exit code."""
    interruptible()
    with _training_packages():
        import transformer_test

    return exit_code(transformer_test.main)


def __dir__() -> list[str]:
    """Names for completion: the public ones."""
    return [*__all__, "__version__"]

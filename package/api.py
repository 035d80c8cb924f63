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
from errors import exit_code
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
    with _training_packages():  # the scripts need more than torch
        from cli.options import flag_arguments
        from input_pipeline import csv_tables, own_data
        from training.run_folder import make_run_folder

        tables = own_data.find_splits(folder, csv_tables.SUFFIXES).values()
        readers = [csv_tables.table_reader(each, flags.get("label_separator")) for each in tables]
        headers = [[*map(csv_tables.normalise, next(read())[1])] for read in readers]
        own = "folder" if all("image" in header for header in headers) else "csv"
        flags = {"dataset": own, "data_dir": folder, **flags}
        script: Any
        if flags["dataset"] == "folder":
            import resnet50_test

            script = resnet50_test
        else:
            import transformer_test

            script = transformer_test
    parser = script.parser()
    words = [
        word
        for name, value in flags.items()
        if (plain := _plain(value)) not in (None, {}, [])
        for word in flag_arguments(name, plain, parser)
    ]
    given = parser.given(words)
    out, going_on = given.get("out"), given.get("resume")
    if out is None and going_on not in (None, "", "auto"):
        out = going_on if Path(going_on).is_dir() else str(Path(going_on).parent)
    new = make_run_folder(None, script.SCRIPT) if out is None else None
    out = out or str(new)
    try:
        script.main([*words, "--out", out])
    finally:
        if new:  # it stays where the run has begun
            with contextlib.suppress(OSError):
                new.rmdir()
    return load(out)


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
    with _training_packages():
        import resnet50_test

    return exit_code(resnet50_test.main)


def texts_command() -> int:
    """Run transformer_test.py as a console script; returns the exit code."""
    with _training_packages():
        import transformer_test

    return exit_code(transformer_test.main)


def __dir__() -> list[str]:
    """Names for completion: the public ones."""
    return [*__all__, "__version__"]

"""Parts of faster-training for your own training loop.

from faster_training import NGD, ngd_groups

optimizer = NGD(ngd_groups(model, weight_decay=0.05), lr=0.08)

And training on your own data, and a trained run as a function:

from faster_training import fit, load

fit("photos", weights="DEFAULT", arch="resnet18").predict(["cat.png"])     # --weights, --arch
load("runs/my-run").predict(["a text", "another one"])
"""

import time
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

__version__ = "0.1.0"  # as in pyproject.toml

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
        folder: with train/CLASS/ of images, or with train.csv, .tsv or .jsonl of texts, as
            docs/own_data.md describes it; of a table of images with dataset="folder".
        flags: those of resnet50_test.py or transformer_test.py: weights="DEFAULT", freeze=True,
            opt_args={"rank": 16}. `out`, the run folder, is one below runs/ by default.
    Returns:
        The trained model of the last epoch, as `load` returns it.
    Raises:
        InputError: a flag or the data is wrong.
        ImportError: a package of requirements.txt is missing: pip install 'faster-training[train]'.
    """
    from cli.options import flag_arguments  # the scripts need more packages than torch

    parser: Any
    if flags.get("dataset") == "folder" or (Path(folder) / "train").is_dir():
        import resnet50_test

        parser, main, dataset = resnet50_test.parser(), resnet50_test.main, "folder"
    else:
        import transformer_test

        parser, main, dataset = transformer_test.parser(), transformer_test.main, "csv"
    out = f"runs/fit-{time.strftime('%Y%m%d-%H%M%S')}"
    flags = {"dataset": dataset, "data_dir": folder, "out": out, **flags}
    main([word for name, value in flags.items() for word in flag_arguments(name, value, parser)])
    return load(flags["out"])


def images_command() -> int:
    """The command faster-images."""
    import resnet50_test
    from errors import exit_code

    return exit_code(resnet50_test.main)


def texts_command() -> int:
    """The command faster-texts."""
    import transformer_test
    from errors import exit_code

    return exit_code(transformer_test.main)


def __dir__() -> list[str]:
    """Names for completion: the public ones."""
    return [*__all__, "__version__"]

"""Parts of faster-training for your own training loop.

from faster_training import NGD, ngd_groups

optimizer = NGD(ngd_groups(model, weight_decay=0.05), lr=0.08)

And a trained run as a function:

from faster_training import load

load("runs/my-run").predict(["a text", "another one"])
"""

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
from training.classifier import load

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
    "init_world",
    "load",
    "mixup",
    "ngd_groups",
    "replacing_decay",
]


def __dir__() -> list[str]:
    """Names for completion: the public ones."""
    return [*__all__, "__version__"]

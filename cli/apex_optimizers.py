"""The optimizers of NVIDIA apex as values of --optimizer; they are part of the legacy stack."""

from __future__ import annotations

from functools import partial

from backends.nvidia_apex import create_optimizer
from cli.flags import ADAM, SGD, OptimizerChoice

APEX_OPTIMIZERS = {
    "apex_sgd": OptimizerChoice(
        partial(create_optimizer, "apex_sgd"), SGD, lr=0.02, weight_decay=5e-4
    ),
    "apex_lamb": OptimizerChoice(
        partial(create_optimizer, "apex_lamb"), ADAM, lr=4e-3, weight_decay=0.01
    ),
    "apex_larc": OptimizerChoice(
        partial(create_optimizer, "apex_larc"), SGD, lr=1.0, weight_decay=5e-4
    ),
}

"""The values of --optimizer: how each is made, and its defaults but for the learning rate.

OPTIMIZERS = optimizer_choices(sgd=0.1, adamw=3e-3, ngd=0.08, ...)      # docs/recipes.md has more
"""

from functools import partial

from cli.flags import OptimizerChoice
from ngd import NGD
from optimizers.kaldi_ngd import KaldiNGD
from optimizers.lars import LARS
from optimizers.muon import Muon
from optimizers.param_groups import ngd_groups
from optimizers.torch_fused import fused_adamw, fused_sgd
from slamb import LAMB, SLAMB

MOMENTUM, ADAM = ("momentum", "nesterov"), ("betas",)
COMPRESSION = ("compress_ratio", "compress_warmup", "local_steps", "dense_steps")


def optimizer_choices(**lr: float) -> dict[str, OptimizerChoice]:
    """All optimizers, by their name; `lr` has the default learning rate of each."""
    sgd = partial(OptimizerChoice, flags=MOMENTUM, weight_decay=5e-4, nesterov=True)
    whitened = partial(
        OptimizerChoice,
        flags=MOMENTUM + ADAM,
        weight_decay=0.05,
        nesterov=True,
        momentum=0.6,
        groups=ngd_groups,
    )
    kaldi = ("rank", "alpha", "eta", "update_period", "max_dim")
    lamb = partial(OptimizerChoice, weight_decay=0.01)
    return {
        "sgd": sgd(fused_sgd, lr=lr["sgd"]),
        "adamw": OptimizerChoice(fused_adamw, ADAM, lr=lr["adamw"], weight_decay=0.05),
        "ngd": whitened(NGD, lr=lr["ngd"], own=("rank", "adamw_ratio")),
        "kaldi_ngd": sgd(KaldiNGD, lr=lr["kaldi_ngd"], own=kaldi),
        "muon": whitened(Muon, lr=lr["muon"], own=("adamw_ratio",)),
        "lars": sgd(LARS, lr=lr["lars"], own=("trust_coefficient", "clip")),
        "lamb": lamb(LAMB, ADAM, lr=lr["lamb"]),
        "slamb": lamb(SLAMB, ADAM + COMPRESSION, lr=lr["slamb"], own=("beta3",)),
    }

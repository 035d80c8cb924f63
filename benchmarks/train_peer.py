"""Train with an optimizer of another library, in every other respect as an entry script does.

python -m benchmarks.train_peer soap resnet50_test.py --optimizer adamw --lr 3e-3 --out runs/soap

The flags after the script are the script's own: --lr, --betas and --weight_decay reach the peer,
which takes the place of the AdamW that they name.
config.json names the peer and its version. An interrupted run goes on with --resume.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from types import ModuleType
from typing import Any

import torch
from torch import nn

from benchmarks.trainers import SCRIPTS, Opened, open_script
from cli import options
from distributed.world import TimeLimits, World, init_world
from errors import InputError, exit_code, needing
from optimizers.param_groups import decay_groups


def create_soap(model: nn.Module, settings: Mapping[str, Any]) -> torch.optim.Optimizer:
    """SOAP (arXiv:2409.11321) of pytorch_optimizer, with the library's other settings."""
    with needing("soap", "pytorch_optimizer"):
        from pytorch_optimizer import SOAP
    groups = decay_groups(model, settings["weight_decay"])
    return SOAP(groups, lr=settings["lr"], betas=tuple(settings["betas"]))  # type: ignore


# Flags that only the script's main or its optimizers read.
REFUSED = ("weights", "freeze", "lr_scaling", "evaluate", "predict", "export")
STANDS_FOR = "adamw"  # the value of --optimizer in a peer's run
PEERS: Mapping[str, tuple[str, Callable[..., torch.optim.Optimizer]]] = {
    "soap": ("pytorch_optimizer", create_soap),
}


FILES = {f"{script.SCRIPT}.py": script for script in SCRIPTS.values()}


@dataclass(frozen=True)
class PeerRun:
    """What a command line asks for: a peer's name, an entry script, and flags of the script."""

    peer: str
    script: ModuleType
    flags: Sequence[str]
    args: argparse.Namespace

    def open(self, world: World) -> Opened:
        """Create the trainer of the peer, with its model and data."""
        package, create = PEERS[self.peer]
        make = partial(create, settings=vars(self.args))
        opened = open_script(self.script, self.flags, world, create_optimizer=make)
        opened.trainer.log.config["peer"] = f"{self.peer}, {package} {version(package)}"
        return opened


def parse(arguments: Sequence[str]) -> PeerRun:
    """Read a peer's name, a script's name, and flags of the script.

    Raises:
        InputError: there is no such peer or script, or --optimizer is not what the peer replaces.
    """
    if len(arguments) < 2 or arguments[0] not in PEERS or arguments[1] not in FILES:
        names = f"{{{', '.join(PEERS)}}} {{{', '.join(FILES)}}}"
        raise InputError(f"usage: python -m benchmarks.train_peer {names} FLAGS")
    peer, script, flags = arguments[0], FILES[arguments[1]], arguments[2:]
    args, _ = options.parse(script.parser(), script.SCRIPT, flags)
    usual = script.parser().defaults()
    for name in REFUSED:
        if getattr(args, name) != usual[name]:
            raise InputError(f"{peer}: --{name} is for the script alone; leave it out")
    if args.optimizer != STANDS_FOR:
        raise InputError(
            f"{peer}: add --optimizer {STANDS_FOR}, whose defaults and groups it takes"
        )
    return PeerRun(peer, script, flags, args)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train as the command line says."""
    run = parse(sys.argv[1:] if arguments is None else arguments)
    with init_world(run.args.device, TimeLimits(*run.args.timeout)) as world:
        opened = run.open(world)
        opened.trainer.fit(opened.checkpoint)
        opened.trainer.report()


if __name__ == "__main__":
    sys.exit(exit_code(main))

"""Train with an optimizer of another library, in every other respect as an entry script does.

python -m benchmarks.train_peer soap resnet50_test.py --optimizer adamw --lr 3e-3 --out runs/soap

The flags are the script's own: --lr, --betas, --momentum and --weight_decay reach the peer, which
takes the place of the AdamW or Muon that they name. dion is github.com/microsoft/dion,
distributed_shampoo github.com/facebookresearch/optimizers (below Python 3.12 it is installed with
--ignore-requires-python, and works). config.json names the peer and its version. An interrupted run
goes on with --resume.
"""

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import packages_distributions, version
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.trainers import SCRIPTS, open_script
from cli import options
from cli.settings import Settings
from distributed.world import TimeLimits, init_world
from errors import InputError, exit_code, needing
from optimizers.muon import as_matrix
from optimizers.param_groups import decay_groups, is_matrix, ngd_groups


def create_soap(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """SOAP (arXiv:2409.11321) of pytorch_optimizer, with the library's other settings."""
    from pytorch_optimizer import SOAP

    groups = decay_groups(model, settings.weight_decay)
    return SOAP(groups, lr=settings.lr, betas=tuple(settings.betas))  # type: ignore


def create_kron(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """PSGD Kron (arXiv:1512.04202) of pytorch_optimizer, its longer axis under a diagonal."""
    from pytorch_optimizer import Kron

    groups = decay_groups(model, settings.weight_decay)
    for group in groups:  # the library's einsum of four axes takes minutes
        group["params"] = matrices_of(group["params"])
    momentum = settings.betas[0]
    return copying_gradients(
        Kron(groups, lr=settings.lr, momentum=momentum, memory_save_mode="one_diag"), groups
    )


def create_schedule_free(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Schedule-Free AdamW (arXiv:2405.15682) of its authors; BatchNorm's statistics as they ask.

    Before an evaluation, the averaged weights see the last batches again.
    """
    from schedulefree import AdamWScheduleFree

    groups = decay_groups(model, settings.weight_decay)
    optimizer = AdamWScheduleFree(groups, lr=settings.lr, betas=tuple(settings.betas))
    batches: deque[Any] = deque(maxlen=RECALIBRATION_BATCHES)
    norms = [each for each in model.modules() if isinstance(each, nn.BatchNorm2d)]

    def keep(model: nn.Module, inputs: Any) -> None:
        if model.training and norms and torch.is_grad_enabled():
            batches.append(inputs)

    @torch.no_grad()
    def train(mode: bool = True) -> nn.Module:
        optimizer.train() if mode else optimizer.eval()
        if not mode and model.training:
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None  # the mean of all batches
            for inputs in batches:
                model(*inputs)
            for norm in norms:
                norm.momentum = 0.1
        return type(model).train(model, mode)

    model.register_forward_pre_hook(keep)
    model.train = train  # type: ignore[method-assign, assignment]
    return optimizer


def create_shampoo(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Distributed Shampoo (arXiv:2309.06497) of Meta, roots every ten steps, grafted on Adam.

    Adam alone has what it has in `NGD`: embeddings, norms and the classifier.
    """
    import distributed_shampoo as shampoo

    betas = tuple(settings.betas)
    adam = shampoo.AdamPreconditionerConfig(beta2=betas[1], epsilon=1e-8)
    groups: list[dict[str, Any]] = []
    for group in ngd_groups(model, settings.weight_decay):
        for is_whitened in (True, False):
            weights = [p for p in group["params"] if is_matrix(p, group) == is_whitened]
            own = {"grafting_config": adam} if is_whitened else {"preconditioner_config": adam}
            groups.append({**group, "params": matrices_of(weights), **own})
    groups = [group for group in groups if group["params"]]
    optimizer = shampoo.DistributedShampoo(
        groups, lr=settings.lr, betas=betas, precondition_frequency=10
    )
    return copying_gradients(optimizer, groups)


def create_of_dion(name: str, model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """An optimizer of Microsoft's dion for matrices, and its AdamW for the rest, as in `Muon`.

    The library makes a step of m outputs and n inputs sqrt(m / n) long. `lr_scale` makes it
    as long as that of `Muon`, sqrt(max(1, m / n)), so that both search the same rates.
    """
    import dion

    own = {
        "Dion": {"mu": settings.momentum, "rank_fraction": 0.5},  # arXiv:2504.05295
        "Dion2": {"ef_decay": settings.momentum},  # arXiv:2512.16928
        "NorMuon": {"mu": settings.momentum, "nesterov": True},  # arXiv:2510.05491
    }[name]
    ratio = settings.opt_args.get("adamw_ratio", 0.075)
    groups: list[dict[str, Any]] = []
    for group in ngd_groups(model, settings.weight_decay):
        decay = group["weight_decay"]
        for p in group["params"]:
            [weight] = matrices_of([p])
            one: dict[str, Any] = {"params": [weight], "weight_decay": decay}
            if is_matrix(p, group):
                one["lr_scale"] = max(1.0, weight.shape[1] / weight.shape[0]) ** 0.5
            else:
                one |= {"algorithm": "adamw", "lr_scale": ratio, "epsilon": 1e-8}
            groups.append(one)
    make = getattr(dion, name)
    optimizer = make(groups, lr=settings.lr, betas=tuple(settings.betas), **own)

    def scale_rates(sign: int, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= group["lr_scale"] ** sign

    optimizer.register_step_pre_hook(partial(scale_rates, 1))
    optimizer.register_step_post_hook(partial(scale_rates, -1))
    return copying_gradients(optimizer, groups)


def matrices_of(weights: Sequence[Tensor]) -> list[nn.Parameter]:
    """Return parameters in the same memory, those of three axes and more as matrices."""
    flat = [as_matrix(p.detach()) if p.ndim > 2 else p.detach() for p in weights]
    pairs = [(nn.Parameter(each), p) for each, p in zip(flat, weights)]
    for each, p in pairs:
        each.of = p  # type: ignore[attr-defined]
    return [each for each, _ in pairs]


def copying_gradients(
    optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]
) -> torch.optim.Optimizer:
    """Let the optimizer of `matrices_of` have the gradients of the model's parameters."""
    weights = [weight for group in groups for weight in group["params"]]

    def take(weight: nn.Parameter, p: Tensor) -> None:
        weight.grad = as_matrix(p.grad, like=p) if p.ndim > 2 else p.grad  # type: ignore[arg-type]

    def clear(set_to_none: bool = True) -> None:
        for weight in weights:
            weight.grad = weight.of.grad = None

    for weight in weights:
        weight.of.register_post_accumulate_grad_hook(partial(take, weight))
    optimizer.zero_grad = clear  # type: ignore[method-assign]
    return optimizer


@dataclass(frozen=True)
class Peer:
    """An optimizer of another library."""

    package: str  # that has it
    stands_for: str  # the value of --optimizer whose flags, defaults and groups it takes
    create: Callable[..., torch.optim.Optimizer]  # called as create(model, settings=...)


# Flags that only the script's main or its optimizers read.
REFUSED = ("weights", "freeze", "lr_scaling", "evaluate", "predict", "export")
RECALIBRATION_BATCHES = 20
PEERS: Mapping[str, Peer] = {
    "soap": Peer("pytorch_optimizer", "adamw", create_soap),
    "kron": Peer("pytorch_optimizer", "adamw", create_kron),
    "schedule_free": Peer("schedulefree", "adamw", create_schedule_free),
    "shampoo": Peer("distributed_shampoo", "adamw", create_shampoo),
    "dion": Peer("dion", "muon", partial(create_of_dion, "Dion")),
    "dion2": Peer("dion", "muon", partial(create_of_dion, "Dion2")),
    "normuon": Peer("dion", "muon", partial(create_of_dion, "NorMuon")),
}


FILES = {f"{script.SCRIPT}.py": script for script in SCRIPTS.values()}


@dataclass(frozen=True)
class PeerRun:
    """What a command line asks for: a peer's name, an entry script, and flags of the script."""

    peer: str
    script: ModuleType
    flags: Sequence[str]
    settings: Settings


def parse(arguments: Sequence[str]) -> PeerRun:
    """Read a peer's name, a script's name, and flags of the script, in any order.

    Raises:
        InputError: there is no such peer or script, or --optimizer is not what the peer replaces.
    """
    words = [next((each for each in arguments if each in names), "") for names in (PEERS, FILES)]
    if not all(words):
        names = f"{{{', '.join(PEERS)}}} {{{', '.join(FILES)}}}"
        raise InputError(f"usage: python -m benchmarks.train_peer {names} FLAGS")
    flags = list(arguments)
    for word in words:
        flags.remove(word)
    peer, script = words[0], FILES[words[1]]
    settings, _ = options.parse(script.parser(), script.SCRIPT, flags)
    usual = script.parser().defaults()
    for name in REFUSED:
        if getattr(settings, name) != usual[name]:
            raise InputError(f"{peer}: --{name} is for the script alone; leave it out")
    stands_for = PEERS[peer].stands_for
    if settings.optimizer != stands_for:
        raise InputError(
            f"{peer}: add --optimizer {stands_for}, whose defaults and groups it takes"
        )
    return PeerRun(peer, script, flags, settings)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train as the command line says."""
    run = parse(sys.argv[1:] if arguments is None else arguments)
    peer = PEERS[run.peer]
    with needing(run.peer, peer.package):
        import_module(peer.package)
    create = partial(peer.create, settings=run.settings)
    with init_world(run.settings.device, TimeLimits(*run.settings.timeout)) as world:
        opened = open_script(run.script, run.flags, world, create_optimizer=create)
        release = version(packages_distributions()[peer.package][0])
        opened.trainer.log.config["peer"] = f"{run.peer}, {peer.package} {release}"
        opened.trainer.fit(opened.run.checkpoint)
        opened.trainer.report()


if __name__ == "__main__":
    sys.exit(exit_code(main))

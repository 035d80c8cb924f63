"""Train the published network of cifar10-airbench by its own optimizer and settings, on a CPU.

git clone https://github.com/KellerJordan/cifar10-airbench
python -m benchmarks.airbench --source cifar10-airbench/airbench94_muon.py --out runs/airbench

It is the peer of recipes/fast94_vgg8.yaml: same data, machine, precision and clock. Network,
optimizer, augmentation and test views are taken from the file of --source as it is run; the loop
around them is written for this benchmark, since the file's own needs a GPU. Weights are in fp32 and
products in bf16, where the file has both in fp16, which a CPU computes slowly. The log is that of
the entry scripts. With --optimizer ngd the filters have NGD in place of Muon, at Muon's rate. All
else is the peer's: a step first sets the filters' norms back, and no weight decays.
"""

import argparse
import hashlib
import itertools
import math
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from backends.device import keep_freed_memory
from benchmarks.peer_log import PeerLog, peer_parser
from cli.flag_parser import FlagParser, file_path
from errors import InputError, exit_code, first_line
from input_pipeline.image_datasets import ImageSplit, read_image_splits
from models.averaged_views import VIEWS
from ngd import NGD

NEEDED = (
    "CifarNet Muon zeropower_via_newtonschulz5 CifarLoader CIFAR_MEAN CIFAR_STD T infer".split()
)
WHITENING_ROWS = 5000
# What `main` of airbench94_muon.py sets, at commit f1c599c:
EPOCHS = 8
WHITENING_BIAS_EPOCHS = 3
BATCH_SIZE = 2000
BIAS_LR = 0.053
HEAD_LR = 0.67
FILTER_LR = 0.24
WEIGHT_DECAY = 2e-6 * BATCH_SIZE
SGD_MOMENTUM = 0.85
MUON_MOMENTUM = 0.6
LABEL_SMOOTHING = 0.2
ALL_VIEWS = 2  # its number for the six views


def load_source(path: Path) -> ModuleType:
    """Import the peer's file.

    Raises:
        InputError: it is not there, or it is another file.
    """
    if not path.is_file():
        raise InputError(f"--source {path}: no such file; clone KellerJordan/cifar10-airbench")
    loader = SourceFileLoader("airbench_source", str(path))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    source = module_from_spec(spec)
    try:
        loader.exec_module(source)
    except Exception as error:  # whatever another file does
        raise InputError(f"--source {path}: cannot be run ({first_line(error)})") from None
    if missing := [name for name in NEEDED if not hasattr(source, name)]:
        raise InputError(f"--source {path}: has no {', '.join(missing)}; give airbench94_muon.py")
    return source


def create_loader(source: ModuleType, split: ImageSplit, *, train: bool) -> Any:
    images = split.decode(torch.arange(len(split))).permute(0, 3, 1, 2).float().div_(255)
    loader = source.CifarLoader.__new__(source.CifarLoader)  # its __init__ reads a file onto a GPU
    loader.images = images.contiguous(memory_format=torch.channels_last)
    loader.labels = split.labels
    loader.normalize = source.T.Normalize(source.CIFAR_MEAN, source.CIFAR_STD)
    loader.proc_images, loader.epoch = {}, 0
    loader.aug = {"flip": True, "translate": 2} if train else {}
    loader.batch_size = BATCH_SIZE
    loader.drop_last = loader.shuffle = train
    return loader


class NGDOfFixedNorm(NGD):
    """NGD of filters whose norms are set back before each step, as the peer's Muon does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for weight in self.param_groups[0]["params"]:
            weight.data.mul_(len(weight) ** 0.5 / weight.data.norm())
        super().step(closure)


def create_optimizers(source: ModuleType, net: Any, *, name: str) -> list[torch.optim.Optimizer]:
    """The peer's two optimizers; the first group of the first one is the first layer's bias."""
    filters = [p for p in net.parameters() if p.ndim == 4 and p.requires_grad]
    norms = [p for name, p in net.named_parameters() if "norm" in name and p.requires_grad]
    groups = [
        {"params": [net.whiten.bias], "lr": BIAS_LR, "weight_decay": WEIGHT_DECAY / BIAS_LR},
        {"params": norms, "lr": BIAS_LR, "weight_decay": WEIGHT_DECAY / BIAS_LR},
        {"params": [net.head.weight], "lr": HEAD_LR, "weight_decay": WEIGHT_DECAY / HEAD_LR},
    ]
    sgd = torch.optim.SGD(groups, momentum=SGD_MOMENTUM, nesterov=True, fused=True)
    settings: dict[str, Any] = {"lr": FILTER_LR, "momentum": MUON_MOMENTUM, "nesterov": True}
    if name == "ngd":
        of_filters = NGDOfFixedNorm(filters, weight_decay=0.0, **settings)
    else:
        of_filters = source.Muon(filters, **settings)
    for group in (*sgd.param_groups, *of_filters.param_groups):
        group["initial_lr"] = group["lr"]
    return [sgd, of_filters]


def set_rates(optimizers: Sequence[torch.optim.Optimizer], step: int, steps: int) -> None:
    """Set the rates of a step, counted from 0: all fall to 0 in a line."""
    for number, group in enumerate(g for each in optimizers for g in each.param_groups):
        last = steps if number else bias_steps(steps)
        group["lr"] = group["initial_lr"] * max(0.0, 1 - step / last)


def bias_steps(steps: int) -> int:
    """In how many of all steps the first layer's bias is trained."""
    return math.ceil(steps * WHITENING_BIAS_EPOCHS / EPOCHS)


def accuracy(source: ModuleType, net: torch.nn.Module, loader: Any, views: int) -> float:
    """Return the peer's accuracy in 0..1 over one view of each image, or `ALL_VIEWS`."""
    logits = source.infer(net, loader, views)
    return float((logits.argmax(1) == loader.labels).float().mean())


def train(args: argparse.Namespace, source: ModuleType, log: PeerLog) -> None:
    splits, _ = read_image_splits("cifar10", args.data_dir, image_size=0)
    loader, test_loader = (
        create_loader(source, splits[name], train=name == "train") for name in ("train", "test")
    )
    torch.manual_seed(args.seed)
    net = source.CifarNet().float().to(memory_format=torch.channels_last)
    net.reset()
    optimizers = create_optimizers(source, net, name=args.optimizer)
    autocast = torch.autocast("cpu", torch.bfloat16)
    forward = torch.compile(net) if args.compile else net
    steps = args.epochs * len(loader)
    with log.clock("train"):
        net.init_whiten(loader.normalize(loader.images[:WHITENING_ROWS]))
    with log.clock("compile"):
        warm_up(source, net, forward, loader, autocast)

    numbers = itertools.count()  # of the steps

    def evaluate() -> dict[str, Any]:
        with autocast:
            results = {"test_accuracy": accuracy(source, net, test_loader, 0)}
            if len(log.rows) + 1 == args.epochs:
                results["test_accuracy_views"] = accuracy(source, net, test_loader, ALL_VIEWS)
                results["views"] = VIEWS["mirror_shift"]
        return results

    def step(inputs: Tensor, labels: Tensor) -> tuple[Tensor, float, float]:
        number = next(numbers)
        set_rates(optimizers, number, steps)
        with autocast:
            outputs = forward(inputs, whiten_bias_grad=number < bias_steps(steps))
        loss = F.cross_entropy(
            outputs.float(), labels, label_smoothing=LABEL_SMOOTHING, reduction="sum"
        )
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        net.zero_grad(set_to_none=True)
        return outputs, loss.item(), optimizers[1].param_groups[0]["lr"]

    log.train(net, loader, step, evaluate)


def warm_up(source: ModuleType, net: Any, forward: Any, loader: Any, autocast: Any) -> None:
    """Let what is compiled be compiled, without a step."""
    for weight in net.parameters():
        if weight.ndim == 4 and weight.requires_grad:  # the file compiles what Muon calls
            source.zeropower_via_newtonschulz5(torch.randn_like(weight).flatten(1))
    if forward is not net:
        inputs = loader.normalize(loader.images[: loader.batch_size])
        for whiten_bias_grad in (True, False):
            with autocast:
                outputs = forward(inputs, whiten_bias_grad=whiten_bias_grad)
            F.cross_entropy(outputs.float(), loader.labels[: loader.batch_size]).backward()
        net.zero_grad(set_to_none=True)


def parser() -> FlagParser:
    flags = peer_parser(__doc__, epochs=EPOCHS)
    add = flags.add_argument
    add("--source", type=file_path, required=True, help="airbench94_muon.py of a clone")
    add("--optimizer", choices=("muon", "ngd"), default="muon", help="of the filters")
    add("--compile", action="store_true", help="compile the network, as the peer")
    return flags


def main(arguments: Sequence[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    keep_freed_memory()  # as the entry scripts do
    source = load_source(args.source)
    digest = hashlib.sha256(args.source.read_bytes()).hexdigest()[:12]
    peer = f"cifar10-airbench {args.source.name}, sha256 {digest}"
    command = f"python -m benchmarks.airbench, {args.source.name}"
    train(args, source, PeerLog(args, peer, precision="bf16", command=command))


if __name__ == "__main__":
    sys.exit(exit_code(main))

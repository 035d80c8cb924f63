"""What SLAMB's sparse communication saves, compared with LAMB and the comm hooks of DDP.

python -m benchmarks.communication --quick                   # at most five minutes on two cores
python -m benchmarks.communication --json communication.json # more rounds, and ResNet-50

Two gloo ranks, one thread each, take a step without forward and backward, on the loopback device
and between network namespaces at 1 Gbit/s and 100 Mbit/s (slow_network.py; Linux and root). A step
is: clear the gradients, a backward pass that only hands over fixed gradients, the communication,
the optimizer. SLAMB averages the weights once in 50 steps; this is measured separately, and its
step includes a fiftieth of it. In training, DDP overlaps its communication with the backward pass,
which SLAMB and the hooks that round do not.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from backends import torch_compat
from benchmarks import bench, slow_network
from benchmarks.slow_network import NETWORKS
from distributed.comm_hooks import RoundedGradients
from distributed.world import World
from errors import exit_code
from models import image_models
from optimizers.lamb import LAMB
from slamb import SLAMB

# Bars, all for ResNet-110.
# SLAMB's share of DDP's step at 100 Mbit/s, DDP in fp32 and in bf16: the shares of the bytes are
# 0.08 and 0.15, the rest is compute.
OF_DDP, OF_BF16 = 0.25, 0.45
# Share of DDP's step on loopback: selecting must pay off even where bytes cost nearly nothing.
LOOPBACK = 1.0

ARCHS = {"ResNet-110": "resnet110", "ResNet-50": "resnet50"}
JUDGED = "ResNet-110"
RANKS = 2
DDP, DDP_BF16, OURS = "DDP + LAMB", "DDP bf16 hook + LAMB", "SLAMB block k=0.1 bf16"
LOCAL_STEPS = 50  # SLAMB's default
NEVER = 10**9  # steps; beyond the end of any measurement
MEAN_OF_WEIGHTS = "SLAMB's mean of the weights"
# Steps: DDP rebuilds its buckets after the first, PowerSGD starts at the third, the last is timed.
WARM_UP = 5
MAX_STEPS = 40  # of a turn

# -------------------------------------------------------------------- one rank


class FixedGradients(torch.autograd.Function):
    """A loss of zero whose backward pass gives the parameters fixed gradients."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        return None, *ctx.gradients


class Parameters(nn.Module):
    """A model's parameters, with a backward pass that costs nothing."""

    def __init__(self, model: nn.Module, gradients: Sequence[Tensor]) -> None:
        super().__init__()
        self.parameter_list = nn.ParameterList(p.detach().clone() for p in model.parameters())
        self.gradients = gradients

    def forward(self) -> Tensor:
        return FixedGradients.apply(self.gradients, *self.parameter_list)


class Method:
    """A model and its optimizer, which take a step together."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model().backward()
        self.optimizer.step()


def ddp_lamb(parameters: Parameters, hook: Callable[..., Any], rank: int = 0) -> Method:
    """Return DistributedDataParallel with a comm hook, and LAMB; `rank` is that of PowerSGD."""
    settings: dict[str, Any] = dict(torch_compat.ddp_buffer_arguments())
    settings["bucket_cap_mb"] = 1000  # one bucket: on gloo PowerSGD aborts with several
    model = DistributedDataParallel(parameters, gradient_as_bucket_view=True, **settings)
    state = powerSGD_hook.PowerSGDState(None, rank, start_powerSGD_iter=2) if rank else None
    model.register_comm_hook(state, hook)
    return Method(model, LAMB(parameters.parameters()))


def slamb(parameters: Parameters) -> Method:
    """Return SLAMB from its first sparse step on; its average of the weights is measured apart."""
    settings = {"selection": "block", "compress_ratio": 0.1, "wire_dtype": torch.bfloat16}
    return Method(
        parameters, SLAMB(parameters.parameters(), dense_steps=0, local_steps=NEVER, **settings)
    )


def methods(world: World) -> dict[str, Callable[[Parameters], Method]]:
    """Return the methods by name."""
    return {
        DDP: partial(ddp_lamb, hook=default_hooks.allreduce_hook),
        DDP_BF16: partial(ddp_lamb, hook=default_hooks.bf16_compress_hook),
        "DDP PowerSGD rank 2 + LAMB": partial(ddp_lamb, hook=powerSGD_hook.powerSGD_hook, rank=2),
        "DDP int4 hook + LAMB": partial(ddp_lamb, hook=RoundedGradients(world, "int4").run),
        "DDP sign hook + LAMB": partial(ddp_lamb, hook=RoundedGradients(world, "sign").run),
        OURS: slamb,
    }


class Turn:
    """A number of steps of one method, on all ranks at once; a call returns their mean seconds."""

    def __init__(self, step: Callable[[], None], seconds: float) -> None:
        self.step = step
        for _ in range(WARM_UP - 1):
            step()
        dist.barrier()
        took = torch.tensor(bench.clock(step))
        dist.broadcast(took, 0)
        self.steps = max(1, min(MAX_STEPS, round(seconds / took.item())))

    def __call__(self) -> float:
        dist.barrier()
        return bench.clock(lambda: [self.step() for _ in range(self.steps)]) / self.steps


def measure_rank(world: World, *, arch: str, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Measure all methods in turn as one rank: the seconds of a step, for each round."""
    torch.manual_seed(0)
    network = image_models.create_model(arch, classes=10, channels=3, image_size=32)
    torch.manual_seed(1 + world.rank)
    gradients = [0.01 * torch.randn_like(p) for p in network.parameters()]
    turns = {}
    for name, make in methods(world).items():
        method = make(Parameters(network, gradients))
        turns[name] = Turn(method.step, seconds)
        if isinstance(method.optimizer, SLAMB):
            turns[MEAN_OF_WEIGHTS] = Turn(method.optimizer.average_weights, seconds)
    return bench.take_turns(turns, rounds)


# -------------------------------------------------------------------- the table of a network


def measure_network(name: str, network: str, quick: bool) -> dict[str, bench.Row]:
    """Print a model's table on a network and return its rows.

    A row's ratio is DDP's rate over the method's: the method's time in units of DDP's.

    Raises:
        slow_network.Unavailable: this machine cannot set up such a network.
    """
    sizes = {"rounds": 3, "seconds": 0.3} if quick else {"rounds": 5, "seconds": 0.5}
    with slow_network.places(NETWORKS[network], RANKS) as places:
        taken = slow_network.run(places, "communication.measure_rank", arch=ARCHS[name], **sizes)
    means = taken.pop(MEAN_OF_WEIGHTS)
    taken[OURS] = [step + mean / LOCAL_STEPS for step, mean in zip(taken[OURS], means)]
    lines, rows = [[f"{name}, {RANKS} x {network}", "ms/step", "x DDP", "spread"]], {}
    for method, seconds in taken.items():
        rows[method] = row = bench.Row.of_seconds(f"{name} {network} {method}", taken[DDP], seconds)
        milliseconds = f"{1e3 * statistics.median(seconds):.1f}"
        lines.append([method, milliseconds, f"{row.ratio:.2f}", bench.spread(row.ratios)])
    print("\n" + bench.aligned(lines), flush=True)
    return rows


def network_bars(network: str, rows: dict[str, bench.Row]) -> list[bench.Bar]:
    """Return the bars of one network, from the rows of ResNet-110."""
    if network == "loopback":
        return [bench.Bar("loopback step of DDP", rows[OURS].ratio, LOOPBACK, at_most=True)]
    if network != "100 Mbit/s":
        return []
    # The seconds of both are the inverse of the rates, which a row has of each round.
    pairs = zip(rows[OURS].peer, rows[DDP_BF16].peer)
    of_bf16 = statistics.median(peer / ours for ours, peer in pairs)
    return [
        bench.Bar("100 Mbit/s step of DDP", rows[OURS].ratio, OF_DDP, at_most=True),
        bench.Bar("100 Mbit/s step of DDP bf16 hook", of_bf16, OF_BF16, at_most=True),
    ]


def main() -> int:
    args = bench.parser(__doc__).parse_args()
    machine = bench.machine(torch.device("cpu"), ["torch"])
    print(machine)
    rows: list[bench.Row] = []
    bars: list[bench.Bar] = []
    for network in NETWORKS:
        for name in [JUDGED] if args.quick else ARCHS:
            try:
                timed = measure_network(name, network, args.quick)
            except slow_network.Unavailable as reason:
                print(f"\n{network} left out: {reason}")
                break
            rows += timed.values()
            if name == JUDGED:
                bars += network_bars(network, timed)
    print("\nx DDP: median over the rounds of the ratio of times, spread: min..max")
    print(f"SLAMB: a step and 1/{LOCAL_STEPS} of its average of the weights")
    return bench.finish(args, bars, rows=rows, machine=machine, ranks=RANKS)


if __name__ == "__main__":
    sys.exit(exit_code(main))

"""What SLAMB's sparse communication costs and saves, compared with LAMB and DDP's comm hooks.

python -m benchmarks.communication --quick                   # at most five minutes on two cores
python -m benchmarks.communication --json communication.json # more rounds, more models

Compute: a step of each optimizer in one process on one thread, with fixed gradients. SLAMB takes
its sparse steps as one of two ranks, without the collective.

Networks: two gloo ranks, one thread each, take a step without forward and backward, on
the loopback device and between network namespaces at 1 Gbit/s and 100 Mbit/s (slow_network.py;
Linux and root). A step is: clear the gradients, a backward pass that only hands over fixed
gradients, the communication, the optimizer. Bytes are those that rank 0's network device has sent,
including the headers of its packets (up to 32 KiB on a slow network, 64 KiB on loopback). SLAMB
averages the weights once in 50 steps; this is measured separately, and 'with weights' is a step and
a fiftieth of it. In training, DDP overlaps its communication with the backward pass, which SLAMB
and the hooks that round do not.
"""

from __future__ import annotations

import copy
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import timm.optim.lamb
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from backends import torch_compat
from backends.device import keep_freed_memory
from benchmarks import bench, slow_network
from benchmarks.slow_network import NETWORKS
from benchmarks.stepping import Side, clock
from distributed.comm_hooks import RoundedGradients
from distributed.world import World
from errors import exit_code
from models import image_models
from optimizers.lamb import LAMB
from slamb import SLAMB

# Bars, all for ResNet-110 at k = 0.1 but for one.
# Times of foreach Adam's step: rows of 64 are gathered as fast as read, single elements are not.
BLOCK, RANDOM = 1.1, 2.6
# The same for ResNet-50, whose tensors fit no cache: one pass over memory for moments and updates.
BLOCK_RESNET50 = 1.5
# MB sent per step: a tenth of the large tensors, all of the small ones, and headers.
SENT = {"fp32": 0.735, "bf16": 0.37}
# Share of DDP's step at 100 Mbit/s, DDP in fp32 and in bf16, SLAMB sending bf16: the shares of the
# bytes are 0.08 and 0.15, the rest is compute.
OF_DDP, OF_BF16 = 0.25, 0.45
# Share of DDP's step on loopback: selecting must pay off even where bytes cost nearly nothing.
LOOPBACK = 1.0

ARCHS = {"ResNet-20": "resnet20", "ResNet-110": "resnet110", "ResNet-50": "resnet50"}
JUDGED = "ResNet-110"
RANKS = 2
ADAM = "Adam (foreach)"
DDP, DDP_BF16 = "DDP + LAMB", "DDP bf16 hook + LAMB"
LOCAL_STEPS = 50  # SLAMB's default
NEVER = 10**9  # steps; beyond the end of any measurement
MEAN_OF_WEIGHTS = "SLAMB's mean of the weights"
# Steps: DDP rebuilds its buckets after the first, PowerSGD starts at the third, the last is timed.
WARM_UP = 5
MAX_STEPS = 40  # of a turn
LARGE = 10_000_000  # weights; larger models are measured with fewer methods, to fit into memory
PROBE = 8 * 2**20  # bytes of the all-reduce that measures the network's bandwidth

# -------------------------------------------------------------------- compute


def without_network(optimizer: Any) -> Any:
    """Make SLAMB one of two ranks with equal values, whose all_reduce needs no network."""
    optimizer.averager.size = optimizer.averager.nodes = 2
    optimizer.averager.all_reduce = lambda values, group: values.mul_(2)
    return optimizer


def slamb(model: nn.Module, selection: str) -> Any:
    return without_network(
        SLAMB(model.parameters(), selection=selection, dense_steps=0, local_steps=NEVER)
    )


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    ADAM: lambda m: torch.optim.Adam(m.parameters(), foreach=True),
    "Adam (fused)": lambda m: torch.optim.Adam(m.parameters(), fused=True),
    "LAMB (ours)": lambda m: LAMB(m.parameters()),
    "LAMB (timm)": lambda m: timm.optim.lamb.Lamb(m.parameters()),
    "SLAMB block": lambda m: slamb(m, "block"),
    "SLAMB random": lambda m: slamb(m, "random"),
}


def measure_compute(name: str, rounds: int, *, deadline: float) -> dict[str, bench.Row]:
    """Print a model's table and return its rows; `deadline` is that of `bench.take_turns`.

    A row's ratio is foreach Adam's rate over the optimizer's: the optimizer's time in units of
    Adam's.
    """
    torch.manual_seed(0)
    model = image_models.create_model(ARCHS[name], classes=10, channels=3, image_size=32)
    gradients: list[list[Tensor | None]] = [
        [0.01 * torch.randn_like(p) for p in model.parameters()] for _ in range(3)
    ]
    sides: dict[str, Side] = {}
    for optimizer, make in OPTIMIZERS.items():
        mine = copy.deepcopy(model)
        sides[optimizer] = Side(mine, make(mine), gradients)
        sides[optimizer].warm_up()
    seconds = bench.take_turns(sides, rounds, deadline=deadline)
    weights = sum(p.numel() for p in model.parameters()) / 1e6
    title = f"{name}, {weights:.2f} M weights, {len(seconds[ADAM])} rounds"
    lines, rows = [[title, "ms/step", "x Adam", "spread", "operators"]], {}
    for optimizer, taken in seconds.items():
        rows[optimizer] = row = bench.Row.of_seconds(f"{name} {optimizer}", seconds[ADAM], taken)
        times = [f"{1000 * statistics.median(taken):.2f}", f"{row.ratio:.2f}"]
        operators = str(sides[optimizer].operators.all)
        lines.append([optimizer, *times, bench.spread(row.ratios), operators])
    print("\n" + bench.aligned(lines))
    return rows


def compute_bars(name: str, rows: dict[str, bench.Row]) -> list[bench.Bar]:
    """Return the bars of an optimizer step, from the rows of a model."""
    if name == "ResNet-50":
        ratio = rows["SLAMB block"].ratio
        return [bench.Bar("block of Adam, ResNet-50", ratio, BLOCK_RESNET50, at_most=True)]
    if name != JUDGED:
        return []
    return [
        bench.Bar("block of Adam", rows["SLAMB block"].ratio, BLOCK, at_most=True),
        bench.Bar("random of Adam", rows["SLAMB random"].ratio, RANDOM, at_most=True),
    ]


# -------------------------------------------------------------------- networks


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


def sparse(parameters: Parameters, **settings: Any) -> Method:
    """Return SLAMB from its first sparse step on; its average of the weights is measured apart."""
    return Method(
        parameters, SLAMB(parameters.parameters(), dense_steps=0, local_steps=NEVER, **settings)
    )


def methods(weights: int, world: World) -> dict[str, Callable[[Parameters], Method]]:
    """Return the methods for a model with so many weights, by name."""
    makers: dict[str, Callable[[Parameters], Method]] = {
        "DDP + LAMB": partial(ddp_lamb, hook=default_hooks.allreduce_hook),
        "DDP bf16 hook + LAMB": partial(ddp_lamb, hook=default_hooks.bf16_compress_hook),
        "DDP fp16 hook + LAMB": partial(ddp_lamb, hook=default_hooks.fp16_compress_hook),
        "DDP PowerSGD rank 2 + LAMB": partial(ddp_lamb, hook=powerSGD_hook.powerSGD_hook, rank=2),
        "DDP int4 hook + LAMB": partial(ddp_lamb, hook=RoundedGradients(world, "int4").run),
        "DDP sign hook + LAMB": partial(ddp_lamb, hook=RoundedGradients(world, "sign").run),
    }
    for selection in ("block",) if weights > LARGE else ("block", "random"):
        for k in (0.1, 0.01):
            for wire, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
                make = partial(sparse, selection=selection, compress_ratio=k, wire_dtype=dtype)
                makers[f"SLAMB {selection} k={k} {wire}"] = make
    return makers


def sent_bytes(device: str) -> int:
    """Return the bytes that a network device has sent since it exists."""
    for line in Path("/proc/net/dev").read_text(encoding="utf-8").splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == device:
            return int(numbers.split()[8])
    raise RuntimeError(f"no network device {device}")


class Turn:
    """A number of steps of one method, on all ranks at once; a call returns their mean seconds."""

    def __init__(self, step: Callable[[], None], seconds: float, device: str) -> None:
        self.step, self.device = step, device
        self.sent_bytes: list[float] = []  # bytes per step, of each turn
        for _ in range(WARM_UP - 1):
            step()
        dist.barrier()
        took = torch.tensor(clock(step))
        dist.broadcast(took, 0)
        self.steps = max(1, min(MAX_STEPS, round(seconds / took.item())))

    def __call__(self) -> float:
        dist.barrier()
        before = sent_bytes(self.device)
        taken = clock(lambda: [self.step() for _ in range(self.steps)])
        dist.barrier()  # ranks may share the device: count the bytes of all of them
        ranks = dist.get_world_size() if self.device == "lo" else 1
        self.sent_bytes.append((sent_bytes(self.device) - before) / self.steps / ranks)
        return taken / self.steps


def measure_rank(
    world: World, *, device: str, arch: str, rounds: int, seconds: float
) -> dict[str, Any]:
    """Measure all methods in turn as one rank: seconds and bytes of a step, for each round."""
    torch.manual_seed(0)
    network = image_models.create_model(arch, classes=10, channels=3, image_size=32)
    torch.manual_seed(1 + world.rank)
    gradients = [0.01 * torch.randn_like(p) for p in network.parameters()]
    weights, probe = sum(p.numel() for p in network.parameters()), torch.zeros(PROBE // 4)
    turns = {"probe": Turn(lambda: dist.all_reduce(probe), 0.0, device)}
    for name, make in methods(weights, world).items():
        method = make(Parameters(network, gradients))
        turns[name] = Turn(method.step, seconds, device)
        if isinstance(method.optimizer, SLAMB) and MEAN_OF_WEIGHTS not in turns:
            turns[MEAN_OF_WEIGHTS] = Turn(method.optimizer.average_weights, seconds, device)
    taken = bench.take_turns(turns, rounds)
    ring = 2 * (world.size - 1) / world.size  # bytes that a rank sends for each of the all-reduce
    return {
        "weights": weights,
        "rate": ring * PROBE * 8 / min(taken.pop("probe")),
        "methods": {
            name: {"seconds": each, "sent_bytes": turns[name].sent_bytes}
            for name, each in taken.items()
        },
    }


def amortised(results: dict[str, Any], name: str, key: str) -> list[float]:
    """Return seconds or bytes of a step in each round, with a share of SLAMB's weight average."""
    values = results["methods"][name][key]
    if name == MEAN_OF_WEIGHTS or "SLAMB" not in name:
        return values
    means = results["methods"][MEAN_OF_WEIGHTS][key]
    return [value + mean / LOCAL_STEPS for value, mean in zip(values, means)]


def measure_network(
    name: str, network: str, quick: bool
) -> tuple[dict[str, Any], dict[str, bench.Row]]:
    """Print a model's table on a network and return its results and rows.

    A row's ratio is DDP's rate over the method's: the method's time in units of DDP's.

    Raises:
        slow_network.Unavailable: this machine cannot set up such a network.
    """
    sizes = {"rounds": 3, "seconds": 0.3} if quick else {"rounds": 5, "seconds": 0.5}
    with slow_network.places(NETWORKS[network], RANKS) as places:
        results = slow_network.run(places, "communication.measure_rank", arch=ARCHS[name], **sizes)
    title = f"{name}, {RANKS} x {network} ({results['rate'] / 1e6:.0f} Mbit/s)"
    columns = ["ms/step", "with weights", "x DDP", "spread", "kB sent", "with weights"]
    lines, rows = [[title, *columns]], {}
    for method, facts in results["methods"].items():
        seconds, sent = (amortised(results, method, key) for key in ("seconds", "sent_bytes"))
        row = bench.Row.of_seconds(
            f"{name} {network} {method}", results["methods"][DDP]["seconds"], seconds
        )
        times = [f"{1e3 * statistics.median(each):.1f}" for each in (facts["seconds"], seconds)]
        sizes = [f"{statistics.median(each) / 1e3:.1f}" for each in (facts["sent_bytes"], sent)]
        lines.append([method, *times, f"{row.ratio:.2f}", bench.spread(row.ratios), *sizes])
        rows[method] = row
    print("\n" + bench.aligned(lines), flush=True)
    return results, rows


def network_bars(
    network: str, results: dict[str, Any], rows: dict[str, bench.Row]
) -> list[bench.Bar]:
    """Return the bars of one network, from the results of ResNet-110."""
    name = "SLAMB block k=0.1 {}".format
    if network == "loopback":
        return [
            bench.Bar(
                f"loopback step of DDP, {wire}", rows[name(wire)].ratio, LOOPBACK, at_most=True
            )
            for wire in SENT
        ]
    if network != "100 Mbit/s":
        return []
    of_bf16 = statistics.median(
        peer / ours for ours, peer in zip(rows[name("bf16")].peer, rows[DDP_BF16].peer)
    )
    sent = {
        wire: statistics.median(results["methods"][name(wire)]["sent_bytes"]) / 1e6 for wire in SENT
    }
    return [
        *(
            bench.Bar(f"MB sent, {wire}", sent[wire], target, at_most=True)
            for wire, target in SENT.items()
        ),
        bench.Bar("100 Mbit/s step of DDP", rows[name("bf16")].ratio, OF_DDP, at_most=True),
        bench.Bar("100 Mbit/s step of DDP bf16 hook", of_bf16, OF_BF16, at_most=True),
    ]


def main() -> int:
    args = bench.parser(__doc__).parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    machine = bench.machine(torch.device("cpu"), ("torch", "timm"))
    print(machine)
    rows: list[bench.Row] = []
    bars: list[bench.Bar] = []
    networks: dict[str, Any] = {}
    # The networks' measurements, of a fixed number of short turns, take more than half of the time.
    budget = bench.Budget(args.quick, 2 * len(ARCHS) + 1)
    for name in ARCHS:
        deadline = budget.next_deadline()
        rounds = (15 if args.quick else 41) if name != "ResNet-50" else (5 if args.quick else 15)
        compute = measure_compute(name, rounds, deadline=deadline)
        rows += compute.values()
        bars += compute_bars(name, compute)
    for network in NETWORKS:
        for name in [JUDGED] if args.quick else ARCHS:
            try:
                results, timed = measure_network(name, network, args.quick)
            except slow_network.Unavailable as reason:
                print(f"\n{network} left out: {reason}")
                break
            networks[f"{name} {network}"] = results
            rows += timed.values()
            if name == JUDGED:
                bars += network_bars(network, results, timed)
    print("\nx Adam, x DDP: median over the rounds of the ratio of times, spread: min..max")
    print(f"with weights: a step and 1/{LOCAL_STEPS} of SLAMB's average of the weights")
    print("sent: by rank 0's network device, headers included")
    return bench.finish(args, bars, rows=rows, machine=machine, ranks=RANKS, networks=networks)


if __name__ == "__main__":
    sys.exit(exit_code(main))

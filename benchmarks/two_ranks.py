"""One rank of communication.py: data-parallel steps without a model's forward and backward.

communication.py starts `python -m benchmarks.two_ranks` with torchrun's environment; rank 0 prints
the measurements as JSON. The methods take turns within this process. A step is: clear the
gradients, a backward pass that only hands over fixed gradients, the communication, the optimizer.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from backends import torch_compat
from backends.device import keep_freed_memory
from benchmarks import bench
from benchmarks.stepping import clock
from distributed.comm_hooks import RoundedGradients
from distributed.world import World, init_world
from models import image_models
from optimizers.lamb import LAMB
from slamb import SLAMB

MEAN_OF_WEIGHTS = "SLAMB's mean of the weights"
# Steps: DDP rebuilds its buckets after the first, PowerSGD starts at the third, the last is timed.
WARM_UP = 5
MAX_STEPS = 40  # of a turn
LARGE = 10_000_000  # weights; larger models are measured with fewer methods, to fit into memory
PROBE = 8 * 2**20  # bytes of the all-reduce that measures the network's bandwidth


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


# -------------------------------------------------------------------- the methods


def ddp_lamb(parameters: Parameters, hook: Callable[..., Any], rank: int = 0) -> Method:
    """Return DistributedDataParallel with a comm hook, and LAMB.

    Args:
        parameters: what is trained.
        hook: the comm hook.
        rank: rank of PowerSGD's approximation, 0 for other hooks. There is one bucket, because on
            gloo PowerSGD aborts with several.
    """
    local: dict[str, Any] = dict(torch_compat.ddp_buffer_arguments())
    model = DistributedDataParallel(
        parameters, gradient_as_bucket_view=True, bucket_cap_mb=1000, **local
    )
    state = powerSGD_hook.PowerSGDState(None, rank, start_powerSGD_iter=2) if rank else None
    model.register_comm_hook(state, hook)
    return Method(model, LAMB(parameters.parameters()))


def slamb(parameters: Parameters, **settings: Any) -> Method:
    """Return SLAMB from its first sparse step on; its average of the weights is measured apart."""
    return Method(
        parameters, SLAMB(parameters.parameters(), dense_steps=0, local_steps=10**9, **settings)
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
                make = partial(slamb, selection=selection, compress_ratio=k, wire_dtype=dtype)
                makers[f"SLAMB {selection} k={k} {wire}"] = make
    return makers


# -------------------------------------------------------------------- measuring


class PayloadCounter:
    """Replaces torch's collectives by ones that count the bytes which this rank gives them."""

    def __init__(self) -> None:
        self.bytes = 0
        dist.all_reduce = self._counting(dist.all_reduce, given=0)
        dist.all_gather_into_tensor = self._counting(dist.all_gather_into_tensor, given=1)

    def _counting(self, collective: Callable[..., Any], *, given: int) -> Callable[..., Any]:
        """Return a collective that counts the argument at the place `given`."""

        def count_and_call(*tensors: Tensor, **named: Any) -> Any:
            self.bytes += tensors[given].nbytes
            return collective(*tensors, **named)

        return count_and_call


def sent_bytes(device: str) -> int:
    """Return the bytes that a network device has sent since it exists."""
    for line in Path("/proc/net/dev").read_text(encoding="utf-8").splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == device:
            return int(numbers.split()[8])
    raise RuntimeError(f"no network device {device}")


class Turn:
    """A number of steps of one method, on all ranks at once."""

    def __init__(
        self, step: Callable[[], None], seconds: float, device: str, payload: PayloadCounter
    ) -> None:
        self.step, self.device, self.payload = step, device, payload
        self.sent_bytes: list[float] = []  # bytes per step, of each turn
        self.payload_bytes = 0.0  # bytes per step
        for _ in range(WARM_UP - 1):
            step()
        dist.barrier()
        took = torch.tensor(clock(step))
        dist.broadcast(took, 0)
        self.steps = max(1, min(MAX_STEPS, round(seconds / took.item())))

    def __call__(self) -> float:
        """Return the mean seconds of a step."""
        dist.barrier()
        payload, before, start = self.payload.bytes, sent_bytes(self.device), time.perf_counter()
        for _ in range(self.steps):
            self.step()
        taken = time.perf_counter() - start
        dist.barrier()  # ranks may share the device: count the bytes of all of them
        ranks = dist.get_world_size() if self.device == "lo" else 1
        self.sent_bytes.append((sent_bytes(self.device) - before) / self.steps / ranks)
        self.payload_bytes = (self.payload.bytes - payload) / self.steps
        return taken / self.steps


def measure(arch: str, rounds: int, seconds: float, device: str, *, world: World) -> dict[str, Any]:
    """Measure all methods in turn: seconds and bytes of a step, for each round."""
    torch.manual_seed(0)
    network = image_models.create_model(arch, classes=10, channels=3, image_size=32)
    torch.manual_seed(1 + dist.get_rank())
    gradients = [0.01 * torch.randn_like(p) for p in network.parameters()]
    weights, payload = sum(p.numel() for p in network.parameters()), PayloadCounter()
    probe = torch.zeros(PROBE // 4)
    turns = {"probe": Turn(lambda: dist.all_reduce(probe), 0.0, device, payload)}
    for name, make in methods(weights, world).items():
        method = make(Parameters(network, gradients))
        turns[name] = Turn(method.step, seconds, device, payload)
        if isinstance(method.optimizer, SLAMB) and MEAN_OF_WEIGHTS not in turns:
            turns[MEAN_OF_WEIGHTS] = Turn(
                method.optimizer.average_weights, seconds, device, payload
            )
    taken = bench.take_turns(turns, rounds)
    results: dict[str, dict[str, Any]] = {
        name: {
            "seconds": taken[name],
            "sent_bytes": turn.sent_bytes,
            "payload_bytes": turn.payload_bytes,
            "steps": turn.steps,
        }
        for name, turn in turns.items()
    }
    # Bytes that each rank of a ring sends for each byte of the all-reduce.
    ring = 2 * (dist.get_world_size() - 1) / dist.get_world_size()
    return {
        "weights": weights,
        "rate": ring * PROBE * 8 / min(results.pop("probe")["seconds"]),
        "methods": results,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("arch")
    parser.add_argument("rounds", type=int)
    parser.add_argument("seconds", type=float, help="seconds of a turn")
    parser.add_argument("device", help="network device whose bytes are counted")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    with init_world("cpu") as world:
        results = measure(args.arch, args.rounds, args.seconds, args.device, world=world)
        if world.is_main:
            print(json.dumps(results))


if __name__ == "__main__":
    main()

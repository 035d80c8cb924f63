"""One of the ranks that measure ways to train data-parallel, without a model's forward and backward; started by communication.py.

torchrun's environment says which rank this is; rank 0 prints what was measured as JSON. The methods take turns within this
process. A step is: no gradients, a backward pass that only hands over fixed ones, the exchange, the optimizer.
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
from benchmarks.naive_slamb import NaiveSLAMB
from benchmarks.stepping import clock
from distributed.world import init_world
from models import resnet
from optimizers.lamb import LAMB
from slamb import SLAMB

MEAN_OF_WEIGHTS = "SLAMB's mean of the weights"
WARM_UP = 5  # steps: DDP lays its buckets out anew after the first, PowerSGD begins at the third; the last is clocked
MOST_STEPS = 40  # of a turn
LARGE = 10_000_000  # weights: of models with more, as few methods as fit into memory
PROBE = 8 * 2**20  # bytes all-reduced to find the network's rate


class Handed(torch.autograd.Function):
    """A loss of zero; its backward pass gives the parameters the gradients it was handed."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        return None, *ctx.gradients


class Parameters(nn.Module):
    """A model's parameters and a backward pass that costs nothing."""

    def __init__(self, model: nn.Module, gradients: Sequence[Tensor]) -> None:
        super().__init__()
        self.parts = nn.ParameterList(p.detach().clone() for p in model.parameters())
        self.gradients = gradients

    def forward(self) -> Tensor:
        return Handed.apply(self.gradients, *self.parts)


class Method:
    """A model and its optimizer."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model().backward()
        self.optimizer.step()


# -------------------------------------------------------------------- the methods


def wrapped(parameters: Parameters, hook: Callable[..., Any], rank: int = 0) -> Method:
    """DistributedDataParallel with a hook, and LAMB; `rank` is PowerSGD's, which on gloo aborts where there are several buckets."""
    local: dict[str, Any] = dict(torch_compat.ddp_buffer_arguments())
    model = DistributedDataParallel(
        parameters, gradient_as_bucket_view=True, bucket_cap_mb=1000, **local
    )
    state = powerSGD_hook.PowerSGDState(None, rank, start_powerSGD_iter=2) if rank else None
    model.register_comm_hook(state, hook)
    return Method(model, LAMB(parameters.parameters()))


def sparse(parameters: Parameters, **settings: Any) -> Method:
    """SLAMB from its first sparse step on; the mean of the weights is measured apart."""
    return Method(
        parameters, SLAMB(parameters.parameters(), dense_steps=0, local_steps=10**9, **settings)
    )


def naive(parameters: Parameters) -> Method:
    return Method(
        parameters,
        NaiveSLAMB(parameters.parameters(), ranks=dist.get_world_size(), local_steps=10**9),
    )


def methods(weights: int) -> dict[str, Callable[[Parameters], Method]]:
    """By name."""
    found: dict[str, Callable[[Parameters], Method]] = {
        "DDP + LAMB": partial(wrapped, hook=default_hooks.allreduce_hook),
        "DDP bf16 hook + LAMB": partial(wrapped, hook=default_hooks.bf16_compress_hook),
        "DDP fp16 hook + LAMB": partial(wrapped, hook=default_hooks.fp16_compress_hook),
        "DDP PowerSGD rank 2 + LAMB": partial(wrapped, hook=powerSGD_hook.powerSGD_hook, rank=2),
    }
    for selection in ("block",) if weights > LARGE else ("block", "random"):
        for k in (0.1, 0.01):
            for wire, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
                make = partial(sparse, selection=selection, compress_ratio=k, wire_dtype=dtype)
                found[f"SLAMB {selection} k={k} {wire}"] = make
    if weights <= LARGE:
        found["naive SLAMB k=0.1"] = naive
    return found


# -------------------------------------------------------------------- measuring


class Payload:
    """Counts the bytes that go into all_reduce."""

    def __init__(self) -> None:
        self.bytes, self.inner = 0, dist.all_reduce
        dist.all_reduce = self  # type: ignore[assignment]

    def __call__(self, values: Tensor, *rest: Any, **named: Any) -> Any:
        self.bytes += values.nbytes
        return self.inner(values, *rest, **named)


def sent(device: str) -> int:
    """Bytes that a network device has sent."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == device:
            return int(numbers.split()[8])
    raise RuntimeError(f"no network device {device}")


class Turn:
    """So many steps of one method, on all ranks at once."""

    def __init__(
        self, step: Callable[[], None], seconds: float, device: str, payload: Payload
    ) -> None:
        self.step, self.device, self.payload = step, device, payload
        self.sent_bytes: list[float] = []  # a step of each turn
        self.payload_bytes = 0.0  # a step
        for _ in range(WARM_UP - 1):
            step()
        dist.barrier()
        took = torch.tensor(clock(step))
        dist.broadcast(took, 0)
        self.steps = max(1, min(MOST_STEPS, round(seconds / took.item())))

    def __call__(self) -> float:
        """Mean seconds of a step."""
        dist.barrier()
        payload, before, start = self.payload.bytes, sent(self.device), time.perf_counter()
        for _ in range(self.steps):
            self.step()
        taken = time.perf_counter() - start
        dist.barrier()  # so that what this device has sent is of the other rank's steps too where they share it
        ranks = dist.get_world_size() if self.device == "lo" else 1
        self.sent_bytes.append((sent(self.device) - before) / self.steps / ranks)
        self.payload_bytes = (self.payload.bytes - payload) / self.steps
        return taken / self.steps


def measure(arch: str, rounds: int, seconds: float, device: str) -> dict[str, Any]:
    """All methods in turn: seconds and bytes of a step, a number a round."""
    torch.manual_seed(0)
    network = resnet.create_model(arch, classes=10, channels=3, image_size=32)
    torch.manual_seed(1 + dist.get_rank())
    gradients = [0.01 * torch.randn_like(p) for p in network.parameters()]
    weights, payload = sum(p.numel() for p in network.parameters()), Payload()
    probe = torch.zeros(PROBE // 4)
    turns = {"probe": Turn(lambda: payload(probe), 0.0, device, payload)}
    for name, make in methods(weights).items():
        method = make(Parameters(network, gradients))
        turns[name] = Turn(method.step, seconds, device, payload)
        if isinstance(method.optimizer, SLAMB) and MEAN_OF_WEIGHTS not in turns:
            turns[MEAN_OF_WEIGHTS] = Turn(
                method.optimizer.average_weights, seconds, device, payload
            )
    taken = bench.take_turns(turns, rounds)
    found: dict[str, dict[str, Any]] = {
        name: {
            "seconds": taken[name],
            "sent_bytes": turn.sent_bytes,
            "payload_bytes": turn.payload_bytes,
            "steps": turn.steps,
        }
        for name, turn in turns.items()
    }
    ring = (
        2 * (dist.get_world_size() - 1) / dist.get_world_size()
    )  # of the bytes are sent by a rank
    return {
        "weights": weights,
        "rate": ring * PROBE * 8 / min(found.pop("probe")["seconds"]),
        "methods": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("arch")
    parser.add_argument("rounds", type=int)
    parser.add_argument("seconds", type=float, help="of a turn")
    parser.add_argument("device", help="the network device whose bytes are counted")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    with init_world("cpu") as world:
        found = measure(args.arch, args.rounds, args.seconds, args.device)
        if world.is_main:
            print(json.dumps(found))


if __name__ == "__main__":
    main()

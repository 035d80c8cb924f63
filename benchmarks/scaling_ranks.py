"""One rank of scaling.py: real training steps, with and without the communication.

scaling.py starts `python -m benchmarks.scaling_ranks` with torchrun's environment; rank 0 prints
the measurements as JSON. In turn run: rank 0 alone, all ranks without sending, all ranks with
sending, and all-reduces of several sizes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from backends.device import keep_freed_memory
from backends.precision import choose_precision
from benchmarks import bench, trainers
from benchmarks.stepping import clock
from distributed.comm_hooks import AllReduceHook
from distributed.world import World, init_world
from models import image_models
from optimizers.param_groups import decay_groups
from slamb import LAMB, SLAMB

ALONE, SILENT, SENDING = "alone", "silent", "sending"
METHODS = {  # compression of DDP's gradients; empty for SLAMB
    "DDP + LAMB": "none",
    "DDP bf16 hook + LAMB": "bf16",
    "SLAMB block k=0.1 bf16": "",
}
PROBES = 4, 2**16, 2**19, 2**22  # bytes of the all-reduces that latency is fitted to
PROBE_TIMES = 5  # all-reduces of each size in a turn; one of the largest
WARM_UP = 4  # steps
NEVER = 10**9  # steps; beyond the end of any measurement


class SkippedWork:
    """The handle of an all-reduce that was skipped: complete at once."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a completed future with the unchanged values."""
        done: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        done.set_result([self.values])
        return done


class AllReduceRecorder:
    """Replaces dist.all_reduce and records when in a step it is called, and with how many bytes.

    While `silent`, nothing is sent.
    """

    def __init__(self) -> None:
        self.inner: Callable[..., Any] = dist.all_reduce
        self.silent, self.start = False, 0.0
        # Of the current step: seconds from its start, bytes, whether the call is asynchronous.
        self.sends: list[tuple[float, int, bool]] = []
        dist.all_reduce = self  # type: ignore[assignment]

    def start_step(self) -> None:
        """Start the clock and the records of a step."""
        self.start, self.sends = time.perf_counter(), []

    def __call__(self, values: Tensor, *rest: Any, async_op: bool = False, **named: Any) -> Any:
        self.sends.append((time.perf_counter() - self.start, values.nbytes, async_op))
        if self.silent:
            return SkippedWork(values) if async_op else None
        return self.inner(values, *rest, async_op=async_op, **named)


class Training:
    """Training steps on one batch, as the scripts take them."""

    def __init__(self, arch: str, batch: int, world: World, optimizer: str, compress: str) -> None:
        torch.manual_seed(0)
        model = (
            image_models.create_model(arch, classes=10, channels=3, image_size=32)
            .train()
            .to(memory_format=torch.channels_last)
        )
        groups = decay_groups(model, 0.01)
        if optimizer == "slamb":
            made = SLAMB(groups, 1e-3, local_steps=NEVER, dense_steps=0, compress_ratio=0.1)
        else:
            made = LAMB(groups, 1e-3)
        self.trainer = trainers.step_trainer(
            model,
            made,
            world,
            precision=choose_precision("auto", world.device),
            comm_hook=AllReduceHook(world, compress or "none"),
        )
        self.trainer.wrap_model()
        torch.manual_seed(1 + world.rank)
        self.inputs = torch.randn(batch, 3, 32, 32).to(memory_format=torch.channels_last)
        self.labels = torch.randint(10, (batch,))

    def __call__(self) -> None:
        self.trainer.train_step(self.inputs, self.labels)


def repeat(work: Callable[[], Any], times: int) -> None:
    """Call a function several times."""
    for _ in range(times):
        work()


class Turns:
    """Measures one turn at a time, of a number of steps on which all ranks agree."""

    def __init__(self, world: World, recorder: AllReduceRecorder, seconds: float) -> None:
        self.world, self.recorder, self.seconds = world, recorder, seconds
        self.steps: dict[Training, int] = {}
        self.sends: dict[str, list[list[tuple[float, int, bool]]]] = {}

    def warm_up(self, training: Training, alone: bool) -> None:
        """Take the first steps, and choose the number of steps of a turn."""
        took = torch.zeros(())
        if not alone or self.world.is_main:
            for _ in range(WARM_UP):
                training()
            took.fill_(clock(training))
        dist.broadcast(took, 0)
        self.steps[training] = max(2, round(self.seconds / took.item()))

    def together(self, training: Training, name: str, silent: bool) -> float:
        """Return the mean seconds of a step of all ranks."""
        dist.barrier()
        self.recorder.silent, start = silent, time.perf_counter()
        for _ in range(self.steps[training]):
            self.recorder.start_step()
            training()
            if silent:
                self.sends.setdefault(name, []).append(self.recorder.sends)
        taken = time.perf_counter() - start
        self.recorder.silent = False
        return taken / self.steps[training]

    def alone(self, training: Training) -> float:
        """Return the mean seconds of a step of rank 0 while the others wait."""
        dist.barrier()
        taken = 0.0
        if self.world.is_main:
            taken = clock(partial(repeat, training, self.steps[training]))
        dist.barrier()
        return taken / self.steps[training]

    def probe(self, size: int) -> float:
        """Return the mean seconds of an all-reduce of `size` bytes."""
        values, times = torch.zeros(max(1, size // 4)), 1 if size == PROBES[-1] else PROBE_TIMES
        dist.barrier()
        return clock(partial(repeat, partial(self.recorder.inner, values), times)) / times


def measure(arch: str, batch: int, rounds: int, seconds: float, world: World) -> dict[str, Any]:
    """Measure everything in turn and return the values of each round."""
    turns = Turns(world, AllReduceRecorder(), seconds)
    plain = Training(arch, batch, World(device=world.device), "lamb", "")
    turns.warm_up(plain, alone=True)
    sides: dict[str, Callable[[], float]] = {ALONE: partial(turns.alone, plain)}
    if world.size > 1:
        for size in PROBES:
            sides[f"probe {size}"] = partial(turns.probe, size)
        for name, compress in METHODS.items():
            training = Training(arch, batch, world, "lamb" if compress else "slamb", compress)
            turns.warm_up(training, alone=False)
            sides[f"{name} {SILENT}"] = partial(turns.together, training, name, True)
            sides[f"{name} {SENDING}"] = partial(turns.together, training, name, False)
    taken = bench.take_turns(sides, rounds)
    weights = sum(p.numel() for p in plain.trainer.model.parameters())
    return {"weights": weights, "batch": batch, "seconds": taken, "sends": turns.sends}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("arch")
    parser.add_argument("batch", type=int, help="samples per process")
    parser.add_argument("rounds", type=int)
    parser.add_argument("seconds", type=float, help="seconds of a turn")
    parser.add_argument("device", help="network device (not used)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    with init_world("cpu") as world:
        results = measure(args.arch, args.batch, args.rounds, args.seconds, world)
        if world.is_main:
            print(json.dumps(results))


if __name__ == "__main__":
    main()

"""A training step of both scripts by precision, backend and memory saving, compared with peers.

python -m benchmarks.step --quick                    # ours and plain; five minutes
python -m benchmarks.step --json step.json           # all; half an hour on two cores
python -m benchmarks.step --only resnet50            # one script
python -m benchmarks.step --sides plain "plain, our allocator" ours

Every side is a process of its own and trains on the real data, input pipeline included; each takes
turns with a baseline of its own. That is 'plain' of plain_training.py: fp32, eager, NCHW,
DataLoader workers. 'compiled' is under torch.compile, and 'as timm' does what timm's train.py does
with --amp --channels-last --torchcompile: autocast (in bf16, where the device has it),
channels_last, compiled model, timm's optimizer factory. With --sides the first one is the baseline,
no side has a target, and plain may have what ours has: ', our allocator', which keeps memory for
the next step, also ', bf16', also ', channels_last'. With --quick the batch is a quarter; the
tables name it.
"""

import statistics
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from backends.device import keep_freed_memory
from benchmarks import bench, plain_training, trainers
from benchmarks.plain_training import Recipe
from benchmarks.trainers import BATCHES
from errors import exit_code, needing

PLAIN, OUR_ALLOCATOR, BF16, CHANNELS_LAST = "plain", ", our allocator", ", bf16", ", channels_last"
# Speed-up over plain on two cores with AMX; bf16, channels_last and compile give ResNet-50 3.0.
BARS = {"resnet50": 5.0, "transformer": 2.5}
OURS = {
    "ours": "",
    "ours, compile": "--backend compile",
    "ours, fuse": "--fuse",
    "ours, checkpoint": "--checkpoint_activations",
    "ours, fp32": "--precision fp32",
    "ours, fp32, ort": "--precision fp32 --backend ort",  # in the legacy stack, by --sides alone
}
TIMM = "as timm"
PEERS = ("compiled", TIMM)  # besides plain; both compile
# By --sides alone: what ours has, one after another.
EXTENDED = [*(peer + OUR_ALLOCATOR for peer in (PLAIN, *PEERS)), PLAIN + OUR_ALLOCATOR + BF16]
EXTENDED += [EXTENDED[-1] + CHANNELS_LAST]
# Rounds, and seconds of each side in a round; with --quick and without.
SIZES = {True: (bench.QUICK_ROUNDS, 4.0), False: (5, 8.0)}


def peer_steps(side: str, recipe: Recipe, data_dir: str, batch: int) -> Iterator[int]:
    """Take training steps of a peer without end; yield the number of samples of each."""
    recipe = recipe.in_own_memory()
    is_timm, optimizer = side.startswith(TIMM), None
    if OUR_ALLOCATOR in side:
        keep_freed_memory()
    if not side.startswith(PLAIN):
        recipe.model.compile()
    if is_timm:
        import timm.optim  # here, since the legacy stack does not have it

        kind = {"opt": "adamw"} if recipe.texts else {"opt": "sgd", "momentum": recipe.momentum}
        optimizer = timm.optim.create_optimizer_v2(
            recipe.model, lr=recipe.lr, weight_decay=recipe.weight_decay, **kind
        )
    return plain_training.train(
        recipe,
        plain_training.read_batches(recipe, data_dir, batch),
        optimizer=optimizer,
        bf16=is_timm or BF16 in side,
        channels_last=is_timm or CHANNELS_LAST in side,
    )


def measure_script(
    name: str, sides: list[str], data_dir: str, *, quick: bool
) -> tuple[dict[str, bench.Row], dict[str, int], int]:
    """Measure the sides of a script over the first one and print their table.

    Returns:
        The rows and the peak memory of each side, and the batch size.
    """
    rounds, seconds = SIZES[quick]
    batch = BATCHES[name] // (4 if quick else 1)
    flags = ["--data_dir", data_dir, "--bs", str(batch)]
    with trainers.ready(name, flags) as opened:
        recipe = Recipe.of(opened)
    starts = {}
    for side in sides:
        work: tuple[Any, ...]
        if side in OURS:
            work = trainers.train_steps, name, [*flags, *OURS[side].split()]
        else:
            work = peer_steps, side, recipe, data_dir, batch
        starts[side] = partial(bench.Remote, *work)
    rows, memory = bench.compare(starts, name, rounds=rounds, seconds=seconds)
    columns = ["samples/s", f"x {sides[0]}", "spread", "peak GiB", "rounds"]
    lines = [[f"{name}, batch {batch}", *columns]]
    for side, row in rows.items():
        ratios = [f"{row.ratio:.2f}", bench.spread(row.ratios)]
        cells = [*ratios, f"{memory[side] / 2**30:.2f}", str(len(row.ours))]
        lines.append([side, f"{statistics.median(row.ours):.1f}", *cells])
    print("\n" + bench.aligned(lines), flush=True)
    return rows, memory, batch


def create_bars(name: str, measured: dict[str, bench.Row]) -> list[bench.Bar]:
    """Return the bars of a script: ours over plain, and its ratio over that of each peer."""
    ours = measured["ours"]
    peers = [measured[side] for side in PEERS if side in measured]
    return [
        bench.Bar(f"{ours.name} of plain", ours.ratio, BARS[name]),
        *(bench.Bar(f"{ours.name} of {peer.name}", ours.ratio / peer.ratio, 1.0) for peer in peers),
    ]


def main() -> int:
    parser = bench.parser(__doc__)
    bench.add_data_dir(parser)
    parser.add_argument("--only", choices=list(trainers.SCRIPTS), help="measure one script only")
    every = [PLAIN, *PEERS, *EXTENDED, *OURS]
    parser.add_argument("--sides", nargs="+", choices=every, metavar="SIDE", help="two or more")
    args = parser.parse_args()
    ours = [side for side in OURS if "ort" not in side]
    usual = [PLAIN, ours[0]] if args.quick else [PLAIN, ours[0], *PEERS, *ours[1:]]
    sides = [*dict.fromkeys(args.sides or usual)]
    if len(sides) < 2:
        parser.error("--sides: name two or more different ones")
    timm = ["timm"] if any(TIMM in side for side in sides) else []
    with needing(TIMM, "timm"):  # whose version `machine` asks for
        machine = bench.machine(bench.DEVICE, ["torch", "torchvision", *timm])
    print(machine)
    rows: list[bench.Row] = []
    bars: list[bench.Bar] = []
    memories: dict[str, Any] = {}
    batches: dict[str, int] = {}
    names = [args.only] if args.only else list(trainers.SCRIPTS)
    for name in names:
        measured, memories[name], batches[name] = measure_script(
            name, sides, args.data_dir, quick=args.quick
        )
        rows += measured.values()
        if not args.sides:
            bars += create_bars(name, measured)
    return bench.finish(args, bars, rows=rows, machine=machine, batches=batches, memory=memories)


if __name__ == "__main__":
    sys.exit(exit_code(main))

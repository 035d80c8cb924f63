"""Image classification: ResNet-50 on CIFAR-10, and other models and data sets by flag.

python resnet50_test.py                                          # ResNet-50, CIFAR-10, 50 epochs
python resnet50_test.py --dataset digits --arch resnet20         # embedded data, a minute on a CPU
bash run_distributed.sh resnet50_test.py --bs 256                # all GPUs of this node
python resnet50_test.py --resume runs/my-run --evaluate          # accuracy of its last checkpoint
python resnet50_test.py --resume runs/my-run --predict cat.png   # or --export model.onnx
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

import errors
from cli import factory, flags, options
from distributed.world import init_world
from input_pipeline import image_batches, image_datasets
from models import resnet
from training import evaluation
from training import export as exporting

SCRIPT = "resnet50_test"


def parser() -> flags.Parser:
    """The shared flags and those of images."""
    parser = flags.shared_parser(__doc__, datasets=list(image_batches.DATASETS))
    group = parser.add_argument_group("images")
    add = group.add_argument
    add(
        "--arch",
        default="resnet50",
        help=f"{', '.join(resnet.STAGES)}, or any torchvision model (default %(default)s)",
    )
    add(
        "--image_size",
        type=flags.natural,
        default=0,
        metavar="PIXELS",
        help="side, 0 is the data set's (folder: 32)",
    )
    add(
        "--augment",
        choices=("standard", "none"),
        default="standard",
        help="random crop and flip (default %(default)s)",
    )
    add(
        "--resident",
        choices=("auto", "yes", "no"),
        default="auto",
        help="keep all pixels on the device (auto: if they fit)",
    )
    return parser


def create_model(
    args: argparse.Namespace, metadata: dict[str, Any], run: factory.Run
) -> torch.nn.Module:
    """The model, channels_last, on its device."""
    model = resnet.create_model(
        args.arch,
        classes=len(metadata["classes"]),
        channels=metadata["channels"],
        image_size=metadata["size"],
    )
    return model.to(run.world.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def build_sets(
    args: argparse.Namespace, run: factory.Run, state: dict[str, Any] | None
) -> tuple[dict[str, image_batches.ImageDataset], dict[str, Any]]:
    """Data sets by name ('train', 'val', 'test') and the header: classes, size and statistics of the pixels."""
    with run.world.local_main_first():
        splits, classes = image_datasets.read_image_splits(
            args.dataset, args.data_dir, args.image_size
        )
    whole = splits.pop("train")
    for name, rows in factory.split_rows(whole.labels, args).items():
        splits[name] = whole.take(rows) if len(rows) < len(whole) else whole
    train = splits["train"]
    mean, std = (state["mean"], state["std"]) if state else image_batches.channel_statistics(train)
    augmentation = (
        image_batches.DATASETS[args.dataset]
        if args.augment == "standard"
        else image_batches.Augmentation(0, False)
    )
    sets = {}
    for name, split in splits.items():
        resident = {
            "auto": image_batches.fits_in_memory(split, run.world.device),
            "yes": True,
            "no": False,
        }[args.resident]
        sets[name] = image_batches.ImageDataset(
            split, augmentation, mean, std, run.world.device, args.seed, args.workers, resident
        )
    return sets, {
        "classes": classes,
        "mean": mean,
        "std": std,
        "channels": train.channels,
        "size": train.size,
    }


def predict(args: argparse.Namespace, run: factory.Run, state: dict[str, Any]) -> None:
    """Classify the image files of --predict."""
    pixels = torch.stack(
        [
            image_datasets.read_image(Path(file), state["size"], state["channels"])
            for file in args.predict
        ]
    )
    device = run.world.device
    mean, std = (
        torch.tensor(state["mean"], device=device),
        torch.tensor(state["std"], device=device),
    )
    inputs = image_batches.normalise(pixels.to(device), mean, std)
    evaluation.print_predictions(
        factory.load_weights(create_model(args, state, run), state),
        inputs,
        args.predict,
        state["classes"],
        args.batch_size,
    )


def export(args: argparse.Namespace, run: factory.Run, state: dict[str, Any]) -> None:
    """Write the model of --export."""
    example = torch.randn(2, state["channels"], state["size"], state["size"])
    model = factory.load_weights(create_model(args, state, run), state)
    difference = exporting.export(
        model, example, Path(args.export), {0: ("batch", exporting.LARGEST_BATCH)}
    )
    print(f"{args.export}: same probabilities as the model, to {difference:.1g}")


def main() -> None:
    args, state = options.parse(parser(), SCRIPT)
    with init_world(args.device) as world:
        run = factory.create_run(args, SCRIPT, world)
        if state and args.predict:
            return predict(args, run, state)
        if state and args.export:
            return export(args, run, state)
        sets, metadata = build_sets(args, run, state)
        if state and args.evaluate:
            model = factory.load_weights(create_model(args, metadata, run), state)
            return factory.evaluate_checkpoint(args, run, model, sets["test"], metadata["classes"])
        model = create_model(args, metadata, run)
        trainer = factory.trainer(args, run, model, sets.pop("train"), sets, metadata)
        factory.report(run, trainer.fit(state), validated="val" in sets)


if __name__ == "__main__":
    sys.exit(errors.exit_code(main))

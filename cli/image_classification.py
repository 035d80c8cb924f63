"""What only the image script builds from flags: its own flags, data, model, predictions, export."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cli import fine_tuning
from cli.factory import Data, Run, load_weights, report_own_data, report_predictions, split_rows
from cli.flags import Parser, number
from cli.start_checks import check_data
from distributed.agreement import local_main_first
from input_pipeline import image_batches, image_datasets
from input_pipeline.dataset import BatchedDataset
from input_pipeline.image_batches import AUGMENTATIONS, Augmentation, ImageDataset
from input_pipeline.image_datasets import ImageSplit
from models import image_models
from models.vgg import VGG8
from training import predictions, pretrained
from training.export import LARGEST_BATCH, export
from training.predictions import Sample

WHITENING_ROWS = 1000  # images whose patches are enough for the first layer of VGG8
LARGEST_IMAGE_SIZE = 4096  # pixels a side; a batch of larger images fits into no memory


def long_run_hint(args: Namespace, run: Run) -> str:
    """A line for the user of a run of many hours: what makes it shorter."""
    remedies = ["a smaller --arch such as resnet20", "a part of the rows such as --subset 0.1"]
    if not args.recipe and args.dataset == "cifar10":
        remedies.append("few epochs as in --recipe recipes/fast94.yaml")
    else:
        remedies.append("fewer --epochs")
    if run.world.device.type == "cpu":
        remedies.append("a GPU")
    return f"for a shorter run: {', '.join(remedies[:-1])}, or {remedies[-1]}"


def add_flags(parser: Parser) -> None:
    """Add the group 'images'."""
    add = parser.group("images", after="data")
    add(
        "--arch",
        aliases=("--model",),
        default="resnet50",
        metavar="NAME",
        help=f"Train this network: {', '.join(image_models.ARCHITECTURES)}, or any classifier of "
        "torchvision, or timm:NAME where timm is installed (default %(default)s).",
        common=True,
    )
    fine_tuning.add_flags(
        add,
        "FILE|DEFAULT",
        "Begin with these weights: a run folder or .pt file of this project, a .safetensors or "
        "state_dict file, or DEFAULT, those of torchvision or timm.",
    )
    add(
        "--image_size",
        type=number(int, 0, LARGEST_IMAGE_SIZE),
        default=0,
        metavar="PIXELS",
        help="Scale images to this many pixels a side; 0 keeps the data set's own size, and is 32 "
        "for folder (default %(default)s).",
        common=True,
    )
    add(
        "--augment",
        choices=("standard", "none"),
        default="standard",
        help="Crop and flip training images at random (standard), or leave them as they are "
        "(none) (default %(default)s).",
        common=True,
    )
    add(
        "--resident",
        choices=("auto", "yes", "no"),
        default="auto",
        help="Keep all pixels on the device (yes), decode them again in each epoch (no), or keep "
        "them if they fit (auto) (default %(default)s).",
    )


def load_data(args: Namespace, run: Run, checkpoint: Mapping[str, Any] | None) -> Data:
    """Training, validation and test images, with the statistics of the training pixels.

    Args:
        args: the flags.
        run: the run.
        checkpoint: whose statistics are taken, or None to measure them.
    Raises:
        InputError: the data set is missing or broken.
    """
    with local_main_first(run.world):
        splits, classes = image_datasets.read_image_splits(
            args.dataset,
            args.data_dir,
            image_size=args.image_size,
            classes=checkpoint["classes"] if checkpoint else (),
            train_is_enough=bool(args.val_fraction),
        )
    fingerprint = check_data(
        args,
        run.world,
        classes,
        labels={name: split.labels for name, split in splits.items()},
        state=checkpoint,
    )
    labelled = splits.pop("train")
    has_val = "val" in splits
    for name, rows in split_rows(args, labelled.labels, has_val).items():
        splits[name] = labelled.select_rows(rows) if len(rows) < len(labelled) else labelled
    labels = {name: split.labels.tolist() for name, split in splits.items()}
    report_own_data(args, run, classes, labels=labels, has_val=has_val)
    train = splits["train"]
    if checkpoint is None:
        mean, std = image_batches.channel_statistics(train)
    else:
        mean, std = checkpoint["mean"], checkpoint["std"]
    standard = args.augment == "standard"
    augmentation = AUGMENTATIONS[args.dataset] if standard else Augmentation(pad=0, flip=False)
    sets = {}
    for name, split in splits.items():
        fits = image_batches.fits_in_memory(split, run.world.device)
        sets[name] = ImageDataset(
            split,
            augmentation,
            mean=mean,
            std=std,
            device=run.world.device,
            seed=args.seed,
            workers=args.workers,
            resident={"auto": fits, "yes": True, "no": False}[args.resident],
        )
    metadata = {
        "classes": classes,
        "data": fingerprint,
        "mean": mean,
        "std": std,
        "channels": train.channels,
        "size": train.size,
    }
    return Data(sets.pop("train"), sets, metadata)


def create_model(
    args: Namespace, run: Run, metadata: Mapping[str, Any], *, images: BatchedDataset | None = None
) -> nn.Module:
    """The model of --arch, channels_last, on its device.

    Args:
        args: the flags.
        run: the run.
        metadata: of the data, or of a checkpoint.
        images: the training set, from whose pixels some networks take first weights; without it
            they are random, which does where those of a checkpoint are loaded.
    """
    model = image_models.create_model(
        args.arch,
        classes=len(metadata["classes"]),
        channels=metadata["channels"],
        image_size=metadata["size"],
    )
    model = model.to(run.world.device)
    if args.freeze:
        pretrained.freeze_all_but_classifier(model)
    if images is not None and isinstance(model, VGG8):
        rows = torch.linspace(0, len(images) - 1, min(len(images), WHITENING_ROWS)).long().unique()
        model.set_whitening(next(images.batches([rows]))[0])
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def begin_with_weights(args: Namespace, run: Run, model: nn.Module) -> None:
    """Load the weights of --weights, if given, into a new model.

    Raises:
        InputError: there are none, or they are not of this model.
    """
    fine_tuning.begin_with_weights(
        args,
        run,
        model,
        flags="--arch, --image_size",
        default=lambda: image_models.default_weights(args.arch),
    )


def predict(args: Namespace, run: Run, checkpoint: Mapping[str, Any]) -> None:
    """Classify the image files of --predict, and those below its folders."""
    files = [file for path in args.predict for file in image_datasets.expand_images(Path(path))]
    images = ImageDataset(
        ImageSplit(
            torch.zeros(len(files), dtype=torch.long),  # labels, which are not known
            files=files,
            size=checkpoint["size"],
            channels=checkpoint["channels"],
        ),
        Augmentation(pad=0, flip=False),
        mean=checkpoint["mean"],
        std=checkpoint["std"],
        device=run.world.device,
        workers=args.workers if len(files) > args.batch_size else 0,
        resident=False,
    )
    rows = torch.arange(len(files)).split(args.batch_size)
    found = predictions.predict(
        load_weights(args, run, create_model(args, run, checkpoint), checkpoint),
        [Sample(str(file)) for file in files],
        (inputs for inputs, _ in images.batches(rows)),
    )
    report_predictions(args, run, found, classes=checkpoint["classes"])


def export_model(args: Namespace, run: Run, checkpoint: Mapping[str, Any]) -> None:
    """Write the model to the file of --export."""
    example = torch.randn(2, checkpoint["channels"], checkpoint["size"], checkpoint["size"])
    model = load_weights(args, run, create_model(args, run, checkpoint), checkpoint)
    dynamic = {0: ("batch", LARGEST_BATCH)}
    metadata = {
        "arch": args.arch,
        "input": "float32 (batch, channels, size, size): (pixel / 255 - mean) / std, RGB or grey",
        **{name: checkpoint[name] for name in ("classes", "channels", "size", "mean", "std")},
    }
    difference = export(model, example, Path(args.export), dynamic=dynamic, metadata=metadata)
    print(f"{args.export}: same probabilities as the model, to {difference:.1g}")

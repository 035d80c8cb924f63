"""What only the image script builds from flags: its own flags, data, model, predictions, export."""

from __future__ import annotations

import dataclasses
import sys
from argparse import Namespace
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cli.factory import (
    Data,
    Run,
    choose_rows,
    load_weights,
    report_baseline,
    report_predictions,
)
from cli.flag_parser import Choice, Scope, ScriptParser, natural, number, setting
from cli.settings import own, refused_as
from distributed.agreement import local_main_first, on_main
from distributed.world import READ_SECONDS
from errors import InputError
from input_pipeline import image_batches, image_datasets, own_data
from input_pipeline.baseline import image_baseline
from input_pipeline.dataset import BatchedDataset
from input_pipeline.image_batches import AUGMENTATIONS, Augmentation, FileDecoder, ImageDataset
from input_pipeline.image_datasets import ImageSplit
from models import image_models, pretrained
from models.averaged_views import VIEWS
from models.vgg import VGG8
from training import predictions
from training.export import LARGEST_BATCH, export
from training.predictions import Sample

WHITENING_ROWS = 1000  # images whose patches are enough for the first layer of VGG8
LARGEST_IMAGE_SIZE = 4096  # pixels a side; a batch of larger images fits into no memory


# fmt: off
def add_flags(parser: ScriptParser) -> None:
    """Declare the flags of images."""
    add = parser.group("images")
    small = own(Augmentation, "small_size", "small_stages")
    add("--arch", str, "resnet50", f"network: {', '.join(image_models.ARCHITECTURES)}, a "
        "classifier of torchvision, or timm:NAME", metavar="NAME", common=True)
    add("--image_size", number(int, 0, LARGEST_IMAGE_SIZE), 0, "pixels a side to which images are "
        "scaled; 0 is the data set's own size, 32 for folder", metavar="PIXELS", common=True)
    add("--augment", Choice(["standard", "none"]), "standard", "random crops and flips of training "
        "images", common=True)
    add("--small_epochs", natural, 0, "first epochs, with smaller images", metavar="N")
    add("--augment_args", setting, {}, "pad, fill (black or reflect) and "
        "alternate of crops and flips; small_size and small_stages of --small_epochs",
        owner="augment", parts={
            "standard": {"pad": None, **own(Augmentation, "fill", "alternate"), **small},
            "none": small})
    add("--test_views", Choice(VIEWS), "none", "views of a test image over which outputs are "
        "averaged at the end: itself and its mirror image, also shifted by a pixel")
    add("--resident", Choice(["auto", "yes", "no"]), "auto", "pixels on the device, or decoded in "
        "each epoch; auto keeps them if they fit", scope=Scope.NODE)
# fmt: on


def load_data(args: Namespace, run: Run) -> Data:
    """Training, validation and test images, with the statistics of the training pixels.

    The classes and statistics of a checkpoint are taken where the run has one.

    Raises:
        InputError: the data set is missing or broken.
    """
    with local_main_first(run.world):
        splits, classes = image_datasets.read_image_splits(
            args.dataset,
            args.data_dir,
            image_size=args.image_size,
            classes=run.checkpoint["classes"] if run.checkpoint else (),
            train_is_enough=bool(args.val_fraction),
        )
    chosen, fingerprint = choose_rows(args, run, splits, classes)
    train = chosen["train"]
    decoder = FileDecoder(args.workers if train.files is not None else 0)
    with run.world.waiting_at_most(READ_SECONDS):
        for name, split in chosen.items():
            keep = is_resident(args, run, split)
            chosen[name] = image_batches.decode_on_node(split, decoder, run.world, keep=keep)
        measure = partial(image_batches.channel_statistics, chosen["train"], decoder)
        if run.checkpoint:
            mean, std = run.checkpoint["mean"], run.checkpoint["std"]
        else:
            mean, std = on_main(run.world, measure)
    metadata = {
        "classes": classes,
        "data": fingerprint,
        "baseline": report_baseline(args, run, chosen, image_baseline),
        "mean": mean,
        "std": std,
        "channels": train.channels,
        "size": train.size,
    }
    augmentation = create_augmentation(args, train.size)
    sets = {
        name: ImageDataset(
            split,
            augmentation,
            mean=mean,
            std=std,
            device=run.world.device,
            seed=args.seed,
            decoder=decoder,
            resident=split.pixels is not None and is_resident(args, run, split),
        )
        for name, split in chosen.items()
    }
    return Data(sets.pop("train"), sets, metadata, chosen["train"].labels)


def is_resident(args: Namespace, run: Run, split: ImageSplit) -> bool:
    """Whether the pixels of a split are kept in memory, by --resident."""
    fits = image_batches.fits_in_memory(split, run.world.device)
    return {"auto": fits, "yes": True, "no": False}[args.resident]


def create_augmentation(args: Namespace, size: int) -> Augmentation:
    """What happens to training images.

    Args:
        size: pixels a side of an image.
    Raises:
        InputError: a flag does not fit the data set or another flag.
    """
    standard, settings = AUGMENTATIONS[args.dataset], args.augment_args
    if not standard.flip and (settings.get("alternate") or args.test_views != "none"):
        raise InputError(
            f"--augment_args alternate and --test_views mirror images, and those of {args.dataset} "
            "mean something else then; leave them out"
        )
    if args.augment == "none":
        standard = Augmentation(pad=0, flip=False)
    given = {name: value for name, value in settings.items() if value is not None}
    with refused_as("--augment_args"):
        augmentation = dataclasses.replace(standard, small_epochs=args.small_epochs, **given)
        augmentation.check_size(size)
    return augmentation


def create_model(
    args: Namespace, run: Run, metadata: Mapping[str, Any], *, images: BatchedDataset | None = None
) -> nn.Module:
    """The model of --arch, channels_last, on its device.

    Args:
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
    if images is not None:  # those of --small_epochs are smaller
        augmentation = create_augmentation(args, metadata["size"])
        sizes = {augmentation.size_of_epoch(n, metadata["size"]) for n in range(args.small_epochs)}
        for size in sorted(sizes):
            image_models.checked(model, args.arch, channels=metadata["channels"], image_size=size)
    model = model.to(run.world.device)
    if args.freeze:
        pretrained.freeze_all_but_classifier(model)
    if images is not None and isinstance(model, VGG8):
        rows = torch.linspace(0, len(images) - 1, min(len(images), WHITENING_ROWS)).long().unique()
        model.set_whitening(next(images.batches([rows]))[0])
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def predict(args: Namespace, run: Run) -> None:
    """Classify the image files of --predict, and those below its folders."""
    checkpoint = run.checkpoint
    suffixes = image_datasets.SUFFIXES
    what = f"images ({', '.join(sorted(suffixes))})"
    found_in = [own_data.expand_files(Path(path), suffixes, what=what) for path in args.predict]
    files = [file for files_of_path, _ in found_in for file in files_of_path]
    images = ImageDataset(
        ImageSplit(
            torch.zeros(len(files), dtype=torch.long),  # labels, which are not known
            files=image_datasets.paths_array(files),
            size=checkpoint["size"],
            channels=checkpoint["channels"],
        ),
        Augmentation(pad=0, flip=False),
        mean=checkpoint["mean"],
        std=checkpoint["std"],
        device=run.world.device,
        decoder=FileDecoder(args.workers if len(files) > args.batch_size else 0),
        resident=False,
    )
    rows = torch.arange(len(files)).split(args.batch_size)
    found = predictions.predict(
        load_weights(args, run, create_model(args, run, checkpoint)),
        [Sample(own_data.utf8_name(file)) for file in files],
        (inputs for inputs, _ in images.batches(rows)),
    )
    report_predictions(args, run, found)
    if run.world.is_main:
        for note in (note for _, notes in found_in for note in notes):
            print(note, file=sys.stderr)


def export_model(args: Namespace, run: Run) -> None:
    """Write the model to the file of --export."""
    checkpoint = run.checkpoint
    metadata = {
        "arch": args.arch,
        "input": "float32 (batch, channels, size, size): (pixel / 255 - mean) / std, RGB or grey",
        **{name: checkpoint[name] for name in ("classes", "channels", "size", "mean", "std")},
    }
    difference = export(
        load_weights(args, run, create_model(args, run, checkpoint)),
        torch.randn(2, checkpoint["channels"], checkpoint["size"], checkpoint["size"]),
        Path(args.export),
        dynamic={0: ("batch", LARGEST_BATCH)},
        metadata=metadata,
    )
    print(f"{args.export}: same probabilities as the model, to {difference:.1g}")

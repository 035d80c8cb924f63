"""What only the image script builds from flags: its own flags, data, model, predictions, export."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mixup
from cli.data import Data, Run, reading, report_baseline, use_rows
from cli.factory import report_predictions
from cli.flag_parser import ON, Choice, Scope, flag, number, own, setting, switch
from cli.settings import Measured, Settings
from distributed.agreement import local_main_first, on_main
from distributed.world import READ_SECONDS
from errors import InputError, refused_as
from input_pipeline import csv_tables, image_batches, image_datasets, own_data
from input_pipeline.augmentation import AUGMENTATIONS, POLICIES, Augmentation
from input_pipeline.baseline import image_baseline
from input_pipeline.csv_tables import ColumnChoice
from input_pipeline.image_batches import FileDecoder, ImageDataset
from input_pipeline.image_datasets import ImageSplit
from models import image_models, pretrained
from models.averaged_views import VIEWS
from models.pretrained import SavedModel
from models.vgg import VGG8
from training.card import ImageCard
from training.evaluation import EVAL_SET_NAMES
from training.predictions import Sample

WHITENING_ROWS = 1000  # images whose patches are enough for the first layer of VGG8
WHITENING_PIXELS = WHITENING_ROWS * 32**2  # of all these images: more would fill the memory
LARGEST_IMAGE_SIZE = 4096  # pixels a side; a batch of larger images fits into no memory
SMALL_IMAGE = 64  # pixels a side, above which images of one's own are cropped as photos are
CROPS = ("auto", "resized", "pad", "center")


# A share of small_epochs, below 1, is one of --epochs.
SMALL_FIRST = {"small_epochs": 0.0, **own(Augmentation, "small_size", "small_stages")}
RESNET50_ON_CIFAR10 = Measured(  # figures/logs/resnet50_cifar10.jsonl: 93.7 %
    {
        "epochs": 12,
        "lr_schedule": "polynomial",
        "label_smoothing": 0.1,
        "augment_args": {
            "alternate": True,
            "fill": "reflect",
            "small_epochs": 0.6,
            "small_size": 16,
            "small_stages": 2,
        },
    },
    lr={"ngd": 0.12},
    batch=256,
    longest_warmup=1.0,
    image_size=32,
)
CHANGES = {"pad": None, **own(Augmentation, "fill", "alternate", "jitter"), **SMALL_FIRST}


@dataclass(frozen=True, kw_only=True)
class ImageSettings(Settings):
    """What resnet50_test.py can be told."""

    datasets, mixing = list(AUGMENTATIONS), mixup.KINDS
    fewest_steps = 32
    measured = {("cifar10", "resnet50"): RESNET50_ON_CIFAR10}
    pretrained = {
        "batch_size": 16,
        "epochs": 5,
        "lr_schedule": "polynomial",
        "crop": "pad",
        "freeze_norms": True,
    }
    pretrained_lr = {"ngd": 1.5e-3, "muon": 1.5e-3, "adamw": 3e-4, "sgd": 1e-3}
    frozen = {"augment": "none"}
    model_flags = ("arch", "model_args")

    # fmt: off
    arch: str = flag(str, "resnet50", f"network: {', '.join(image_models.ARCHITECTURES)}, a "
        "classifier of torchvision, timm:NAME, or MODULE:FUNCTION, which makes your own",
        metavar="NAME", common=True, group="images")
    model_args: dict[str, Any] = flag(setting, {}, "settings of your own network", owner="arch")
    image_size: int = flag(number(int, 0, LARGEST_IMAGE_SIZE), 0, "pixels a side to which images "
        "are scaled; 0 is the data set's own size, for folder that of --weights, else 32",
        metavar="PIXELS", common=True)
    augment: str = flag(Choice(["standard", "none", *POLICIES]), "standard",
        "random changes of training images: crops and flips (standard), and besides the policies "
        "TrivialAugment, RandAugment or AutoAugment", common=True)
    crop: str = flag(Choice(CROPS), "auto", "part of a training image: of random size, read anew "
        "in each epoch (resized), shifted by some pixels (pad) or the centre (center); auto is "
        f"pad, and resized for folder above {SMALL_IMAGE} pixels", only_with=[{"augment": ON}])
    random_erasing: float = flag(number(float, 0, 1), 0.0, "probability that a rectangle of a "
        "training image is erased", metavar="P")
    augment_args: dict[str, Any] = flag(setting, {}, "pad, fill (black or reflect) and alternate "
        "of crops and flips; jitter of colours; in small_epochs first epochs (below 1: a share of "
        "them) images grow from small_size in small_stages", owner="augment",
        parts={**dict.fromkeys(["standard", *POLICIES], CHANGES), "none": SMALL_FIRST})
    freeze_norms: bool = flag(switch, False, "statistics of BatchNorm that stay those of "
        "--weights, with which this is on", only_with=[{"weights": ON}])
    test_views: str = flag(Choice(VIEWS), "none", "views of a test image over which outputs are "
        "averaged at the end: itself and its mirror image, also shifted by a pixel")
    resident: str = flag(Choice(["auto", "yes", "no"]), "auto", "pixels on the device, or decoded "
        "in each epoch; auto keeps them if they fit", scope=Scope.NODE)
    # fmt: on

    @property
    def views(self) -> int:
        return VIEWS[self.test_views]

    @property
    def repeats_samples(self) -> bool:
        return self.augment == "none" and not self.random_erasing and not self.several_sizes

    @property
    def several_sizes(self) -> bool:
        return self.augment_args["small_epochs"] > 0


def load_data(settings: ImageSettings, run: Run, saved: SavedModel | None = None) -> Data:
    """Training, validation and test images, prepared as for the weights that a run begins with.

    The classes, size, interpolation, mean and standard deviation of a checkpoint are taken where
    the run has one; all but the classes are those of `saved` where that has them; otherwise mean
    and standard deviation are those of the training pixels.

    Args:
        saved: what --weights names.
    Raises:
        InputError: the data set is missing or broken.
    """
    given = run.checkpoint.metadata if run.checkpoint else saved.preprocessing if saved else {}
    own_size = given.get("size", 0) if settings.dataset == "folder" else 0
    with local_main_first(run.world):
        splits, classes = image_datasets.read_image_splits(
            settings.dataset,
            settings.data_dir,
            image_size=settings.image_size or own_size,
            interpolation=given.get("interpolation", "bilinear"),
            choice=ColumnChoice(
                settings.label_column,
                separator=settings.label_separator,
                group=settings.group_column,
            ),
            **reading(settings, run),
        )
    chosen, fingerprint = use_rows(settings, run, splits, classes)
    shown = {name: chosen[name].show for name in EVAL_SET_NAMES if name in chosen}
    train = chosen["train"]
    augmentation = create_augmentation(settings, train.size)
    if augmentation.by_row and settings.resident == "yes":
        raise InputError(
            "--resident yes: random policies, erasing and crops of random size change each image "
            "anew in every epoch; leave it out"
        )
    if augmentation.by_row:
        import torchvision.transforms.v2  # noqa: F401  before the workers, which share its memory
    workers = settings.workers if train.files is not None or augmentation.by_row else 0
    decoder = FileDecoder(workers, seconds=run.world.limits.start, splits=chosen.values())
    with run.world.waiting_at_most(READ_SECONDS):
        for name, split in chosen.items():
            is_read_anew = name == "train" and augmentation.resized
            keep = is_resident(settings, run, split) and not is_read_anew
            chosen[name] = image_batches.decode_on_node(split, decoder, run.world, keep=keep)
        measure = partial(image_batches.channel_statistics, chosen["train"], decoder)
        mean, std = (given["mean"], given["std"]) if given else on_main(run.world, measure)
    baseline = report_baseline(settings, run, chosen, partial(image_baseline, decoder=decoder))
    metadata = {
        "classes": classes,
        "data": fingerprint,
        "baseline": baseline,
        "mean": of_channels(mean, train.channels),
        "std": of_channels(std, train.channels),
        "channels": train.channels,
        "size": train.size,
        "interpolation": train.interpolation,
    }
    sets = {
        name: ImageDataset(
            split,
            augmentation,
            mean=metadata["mean"],
            std=metadata["std"],
            device=run.world.device,
            seed=settings.seed,
            decoder=decoder,
            resident=is_resident(settings, run, split)
            and not (name == "train" and augmentation.by_row),
        )
        for name, split in chosen.items()
    }
    train, held_out = sets.pop("train"), sets.pop("held_out", None)
    return Data(train, sets, metadata, chosen["train"].labels, held_out, shown=shown)


def of_channels(values: Sequence[float], channels: int) -> list[float]:
    """A value of each channel; their mean where weights are for another number of channels."""
    return list(values) if len(values) == channels else [sum(values) / len(values)] * channels


def is_resident(settings: ImageSettings, run: Run, split: ImageSplit) -> bool:
    """Whether the pixels of a split are kept in memory, by --resident."""
    fits = image_batches.fits_in_memory(split, run.world.device)
    return {"auto": fits, "yes": True, "no": False}[settings.resident]


def create_augmentation(settings: ImageSettings, size: int) -> Augmentation:
    """What happens to training images.

    Args:
        size: pixels a side of an image.
    Raises:
        InputError: a flag does not fit the data set or another flag.
    """
    standard, own = AUGMENTATIONS[settings.dataset], settings.augment_args
    if not standard.flip and (own.get("alternate") or settings.test_views != "none"):
        raise InputError(
            "--augment_args alternate and --test_views mirror images, and those of "
            f"{settings.dataset} mean something else then; leave them out"
        )
    given = {name: value for name, value in own.items() if value is not None}
    if given["small_epochs"] < 1:
        given["small_epochs"] = int(given["small_epochs"] * settings.epochs)
    is_large = settings.dataset == "folder" and size > SMALL_IMAGE
    crop = settings.crop
    if crop == "auto":
        is_padded = "pad" in given or given.get("fill") == "reflect"
        crop = "resized" if is_large and not is_padded else "pad"
    elif crop != "pad" and given.get("pad"):
        raise InputError(f"--crop {crop}: pad of --augment_args is for --crop pad")
    with refused_as("--augment_args"):
        if settings.augment == "none":
            standard = Augmentation(pad=0, flip=False)
        elif crop != "pad":
            standard = dataclasses.replace(standard, pad=0, resized=crop == "resized")
            given["fill"] = "black"  # there is none
        if settings.augment in POLICIES:
            standard = dataclasses.replace(standard, policy=settings.augment)
        if is_large:
            standard = dataclasses.replace(standard, learned_on="imagenet")
        augmentation = dataclasses.replace(standard, erasing=settings.random_erasing, **given)
        augmentation.check_size(size)
    return augmentation


def create_model(settings: ImageSettings, run: Run, data: Data) -> nn.Module:
    """The model of --arch, channels_last, on its device; some take first weights from images."""
    arch, metadata, images = settings.arch, data.metadata, data.train
    augmentation = create_augmentation(settings, metadata["size"])
    epochs = range(augmentation.small_epochs)
    sizes = {augmentation.size_of_epoch(number, metadata["size"]) for number in epochs}
    with refused_as(f"--arch {arch}", (InputError,)):
        model = ImageCard.read({**metadata, "flags": vars(settings)}).create_model()
        for size in sorted(sizes):  # those of small_epochs are smaller
            image_models.checked(model, arch, channels=metadata["channels"], image_size=size)
    model = model.to(run.world.device)
    if settings.freeze_norms and settings.weights and not settings.freeze:
        pretrained.hold_norms(model)
    if isinstance(model, VGG8):
        most = min(len(images), WHITENING_ROWS, max(1, WHITENING_PIXELS // metadata["size"] ** 2))
        rows = torch.linspace(0, len(images) - 1, most).long().unique()
        model.set_whitening(next(images.batches([rows]))[0])
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def predict(settings: ImageSettings, run: Run, paths: Sequence[str]) -> None:
    """--predict: classify image files, and those below folders."""
    suffixes = image_datasets.image_suffixes()
    if tables := [path for path in paths if Path(path).suffix.lower() in csv_tables.SUFFIXES]:
        raise InputError(f"--predict {tables[0]}: is a table; give its images or their folder")
    found_in = [own_data.expand_files(Path(path), suffixes, what="images") for path in paths]
    files = [file for files_of_path, _ in found_in for file in files_of_path]
    samples = [Sample(str(file)) for file in files]
    notes = [note for _, notes in found_in for note in notes]
    report_predictions(settings, run, files, samples, notes=notes)

"""Images: augmentation against a plain reference, batches, and reading of every data set."""

import dataclasses
import itertools
import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms
from torchvision.transforms import functional, v2

from conftest import each_of, write_images
from distributed import waiting
from errors import InputError
from input_pipeline.augmentation import POLICIES, Augmentation, draw_crops
from input_pipeline.image_batches import (
    FileDecoder,
    ImageDataset,
    channel_statistics,
    fits_in_memory,
    normalise,
)
from input_pipeline.image_datasets import ImageSplit, paths_array, read_image_splits, read_images

CPU = torch.device("cpu")
MEAN, STD = [0.49, 0.48, 0.45], [0.25, 0.24, 0.26]


def random_pixels(*shape: int) -> torch.Tensor:
    return torch.randint(256, shape, dtype=torch.uint8)


def normalised(pixels: torch.Tensor) -> torch.Tensor:
    images = torch.empty(pixels.shape)
    normalise(pixels, torch.tensor(MEAN), std=torch.tensor(STD), out=images)
    return images.permute(0, 3, 1, 2)


@each_of(
    ("height", "width", "channels", "pad"),
    [(32, 32, 3, 4), (28, 28, 1, 2), (5, 9, 3, 3), (4, 4, 2, 0), (5, 6, 1, 4)],
)
@each_of("mode", ["constant", "reflect"])
def test_crops_equal_torchvision(height, width, channels, pad, mode):
    pixels = random_pixels(40, height, width, channels)
    offsets = torch.randint(2 * pad + 1, (40, 2), dtype=torch.uint8)
    flips = torch.randint(2, (40,), dtype=torch.uint8)
    fill = "reflect" if mode == "reflect" else "black"
    ours = Augmentation(pad, True, fill=fill).crop(pixels, offsets, flips)
    for image, given, (top, left), flip in zip(ours, pixels, offsets.tolist(), flips.tolist()):
        padded = functional.pad(given.permute(2, 0, 1), [pad], padding_mode=mode)
        window = functional.crop(padded, top, left, height, width)
        expected = functional.hflip(window) if flip else window
        assert torch.equal(image.permute(2, 0, 1).byte(), expected)


def test_normalise_equals_torchvision():
    pixels = random_pixels(6, 16, 12, 3)
    peer = transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
    expected = torch.stack([peer(image.numpy()) for image in pixels])
    torch.testing.assert_close(normalised(pixels), expected, rtol=0, atol=1e-6)


def test_statistics_are_those_of_the_pixels():
    pixels = random_pixels(50, 8, 8, 3) // torch.tensor([1, 2, 5], dtype=torch.uint8)
    mean, std = channel_statistics(ImageSplit(torch.zeros(50), pixels, size=8), FileDecoder(0))
    values = pixels.numpy().reshape(-1, 3).astype(np.float64) / 255
    assert mean == pytest.approx(values.mean(0))
    assert std == pytest.approx(values.std(0))


@pytest.fixture
def train() -> ImageDataset:
    images = ImageSplit(torch.arange(200) % 10, random_pixels(200, 12, 12, 3), size=12)
    augmentation = Augmentation(pad=2, flip=True)
    return ImageDataset(images, augmentation, mean=MEAN, std=STD, device=CPU, seed=4)


def by_row(data: ImageDataset, row_batches: list[torch.Tensor], epoch: int | None) -> torch.Tensor:
    """Put the images of all batches back into the order of the rows."""
    out = torch.zeros(len(data), 3, 12, 12)
    for rows, (pixels, labels) in zip(row_batches, data.batches(row_batches, epoch)):
        assert torch.equal(labels, data.images.labels[rows])
        assert pixels.is_contiguous(memory_format=torch.channels_last)
        out[rows] = pixels
    return out


def test_every_crop_and_flip_is_drawn_and_alternating_flips_in_two_epochs(train):
    draw = partial(draw_crops, rows=200, seed=4)
    drawn = (draw(train.augmentation, epoch=epoch) for epoch in range(10))
    offsets, flips = (torch.cat(of_epochs) for of_epochs in zip(*drawn))
    assert [column.unique().tolist() for column in offsets.unbind(1)] == [[0, 1, 2, 3, 4]] * 2
    assert flips.unique().tolist() == [0, 1]
    alternate = dataclasses.replace(train.augmentation, alternate=True)
    first, second, third = (draw(alternate, epoch=epoch)[1] for epoch in range(3))
    assert torch.equal(first + second, torch.ones_like(first))
    assert torch.equal(first, third)
    assert 0.3 < first.float().mean() < 0.7


def test_images_of_the_first_epochs_are_smaller_and_grow_in_stages(train):
    rows = [torch.arange(32)]
    small = {"small_epochs": 5, "small_size": 6, "small_stages": 3}
    train.augmentation = Augmentation(pad=0, flip=False, **small)
    images = [next(train.batches(rows, epoch))[0] for epoch in range(7)]
    assert [each.shape[2] for each in images] == [6, 6, 8, 8, 10, 12, 12]
    assert all(each.is_contiguous(memory_format=torch.channels_last) for each in images)
    expected = images[-1][:, :, 2:10, 2:10]  # where the filter does not reach over an edge
    mean = images[0][:, :, 1:5, 1:5].mean((2, 3)) - expected.mean((2, 3))
    assert mean.abs().max() < 0.5 * expected.std()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_images(tmp_path, ("blue", "red"), rows=20, size=16)


def test_folder_of_png_reads_as_it_was_written(folder):
    (folder / "train" / "red" / "notes.txt").write_text("not an image")
    splits, classes = read_image_splits("folder", str(folder), image_size=16)
    assert classes == ["blue", "red"]
    for part in ("train", "test"):
        assert splits[part].labels.tolist() == [0] * 20 + [1] * 20
    expected = np.asarray(Image.open(folder / "test" / "red" / "03.png"))
    assert np.array_equal(splits["test"].decode(torch.tensor([23]))[0].numpy(), expected)
    assert splits["train"].select_rows(torch.tensor([25, 3])).labels.tolist() == [1, 0]


def test_changes_by_row_depend_on_seed_epoch_and_row_alone(folder):
    """Not on the batch, the number of workers, or whether pixels are in memory."""
    images = read_image_splits("folder", str(folder), image_size=12)[0]["train"]
    assert fits_in_memory(images, CPU)
    with_pixels = dataclasses.replace(images, pixels=images.decode(torch.arange(40)))
    generator, state = torch.Generator().manual_seed(0), torch.get_rng_state()
    create = partial(ImageDataset, mean=MEAN, std=STD, device=CPU, decoder=FileDecoder(2))
    resident = partial(create, with_pixels, resident=True)
    streamed = partial(create, images, resident=False)
    sets = (
        partial(streamed, decoder=FileDecoder(0)),
        streamed,
        partial(create, with_pixels, resident=False),
    )
    standard = Augmentation(pad=2, flip=True)
    reflecting = dataclasses.replace(standard, fill="reflect")
    rows, unchanged = [torch.arange(40)], normalised(with_pixels.pixels)
    plain = by_row(streamed(standard), rows, 3)
    for augmentation, epoch in itertools.product((standard, reflecting), (3, None)):
        one, other = (each(augmentation) for each in (resident, streamed))
        assert (one.images.pixels is None, other.images.pixels is None) == (False, True)
        batched = by_row(one, list(torch.randperm(40, generator=generator).split(7)), epoch)
        assert torch.equal(batched, by_row(other, rows, epoch))
        assert torch.equal(batched, unchanged) == (epoch is None)
        for another in (by_row(one, rows, 4), by_row(resident(augmentation, seed=5), rows, 3)):
            assert (batched != another).flatten(1).any(1).float().mean() > 0.8
    changes = [{"policy": policy} for policy in POLICIES] + [{"jitter": 0.5}, {"erasing": 1.0}]
    for change in [*changes, {"resized": True, "pad": 0}]:
        first, second, third = (data(dataclasses.replace(standard, **change)) for data in sets)
        expected = by_row(first, list(torch.arange(40).flip(0).split(9)), 3)
        assert torch.equal(expected, by_row(second, rows, 3)), change
        if "resized" not in change:  # whose parts are those of files
            assert torch.equal(expected, by_row(third, rows, 3)), change
        assert (expected != by_row(first, rows, 4)).flatten(1).any(1).sum() > 30
        assert (expected != plain).flatten(1).any(1).sum() > 10, change
    assert torch.equal(state, torch.get_rng_state())


def test_a_part_of_random_size_is_that_of_torchvision(folder):
    images = read_image_splits("folder", str(folder), image_size=12)[0]["train"]
    augmentation = Augmentation(pad=0, flip=False, resized=True)
    settings = {"mean": MEAN, "std": STD, "device": CPU, "resident": False}
    data = ImageDataset(images, augmentation, seed=4, **settings)
    torch.manual_seed(int(np.random.SeedSequence((4, 7, 25)).generate_state(1)[0]))
    crop = v2.RandomResizedCrop(12)
    peer = np.array(crop(Image.open(os.fsdecode(images.files[25]))))
    found, _ = next(data.batches([torch.tensor([25])], 7))
    assert torch.equal(found, normalised(torch.from_numpy(peer)[None]))


def test_an_erased_rectangle_has_the_mean_colour(train):
    train.augmentation = Augmentation(pad=0, flip=False, erasing=1.0)
    train.images.pixels = torch.full_like(train.images.pixels, 255)
    erased = by_row(train, [torch.arange(200)], epoch=0).abs().amax(1) < 0.01
    shares = erased.float().mean((1, 2))
    assert 0.01 < shares.min() < 0.1 < 0.2 < shares.max() < 0.4


def test_workers_stay_over_epochs_and_two_sets_may_be_read_in_turns(folder: Path) -> None:
    splits, _ = read_image_splits("folder", str(folder), image_size=16)
    others = {child.pid for child in multiprocessing.active_children()}  # of tests before
    with ThreadPoolExecutor() as pool:  # whose threads end
        decoder, workers = pool.submit(FileDecoder, 2).result(), set()
    for _ in range(3):
        train, test = (
            decoder.batches(split, torch.randperm(len(split)).split(3)) for split in splits.values()
        )
        for split, (rows, pixels) in zip(
            itertools.cycle(splits.values()), itertools.chain.from_iterable(zip(train, test))
        ):
            assert torch.equal(torch.cat(pixels), split.decode(rows))
        train.close()  # within its epoch
        workers |= set(multiprocessing.active_children())
    workers = {each for each in workers if each.pid not in others}
    assert len(workers) == 4
    del decoder, train, test
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0, "else torch raises an error in the main thread"
    paths = splits["train"].files
    assert paths.nbytes == len(paths) * len(os.fsencode(folder / "train" / "blue" / "00.png"))


def read_with_a_stopped_worker(folder: Path) -> None:
    """Write the worker's number and what this process prints, and wait for what it reads."""
    os.dup2(os.open(folder / "stderr", os.O_CREAT | os.O_WRONLY), 2)
    images = read_image_splits("folder", str(folder), image_size=16)[0]["train"]
    batches = FileDecoder(1, seconds=5).batches(images, torch.arange(40).split(2))
    next(batches)
    [worker] = multiprocessing.active_children()
    os.kill(worker.pid, signal.SIGSTOP)
    (folder / "worker").write_text(str(worker.pid))
    waiting.FIRST_SECONDS = 0.5
    list(batches)


def test_a_worker_that_hangs_is_named_and_ends_with_the_process(folder: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=read_with_a_stopped_worker, args=(folder,))
    process.start()
    process.join(240)
    worker = (folder / "worker").read_text()
    assert process.exitcode == 1
    waits, ends = (folder / "stderr").read_text().splitlines()
    assert waits == f"waiting up to 5 s (--timeout): images of process {worker} (is stopped)"
    assert ends.startswith("error: no answer for 5 s")
    end = time.monotonic() + 240
    while (is_there := Path("/proc", worker, "exe").exists()) and time.monotonic() < end:
        time.sleep(0.01)
    assert not is_there  # it is at most a zombie


def read_image(path: Path, size: int, *, channels: int = 3) -> torch.Tensor:
    return read_images(paths_array([path]), size, channels=channels)[0]


@each_of("size", [(40, 20), (20, 40)])
@each_of("mode", ["L", "RGB", "RGBA", "P", "1", "CMYK"])
def test_image_file_of_any_mode_is_scaled_and_cut_to_the_centre(mode, size, tmp_path):
    image = Image.new("RGB", size, (0, 0, 0))
    centre_and_margin = (8, 0, 32, 20) if size[0] == 40 else (0, 8, 20, 32)
    image.paste((255, 255, 255), centre_and_margin)
    path = tmp_path / ("image.tif" if mode == "CMYK" else "image.png")
    image.convert(mode).save(path)
    colour, grey = read_image(path, 10), read_image(path, 10, channels=1)
    assert tuple(colour.shape) == (10, 10, 3)
    assert tuple(grey.shape) == (10, 10, 1)
    assert colour.min() == grey.min() == 255


@each_of("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_white_and_broken_metadata_does_no_harm(mode, tmp_path):
    clear = Image.new("RGBA", (4, 4), (0, 0, 0, 0)).convert(mode)
    clear.save(tmp_path / "clear.png", exif=b"Exif\0\0broken")
    assert read_image(tmp_path / "clear.png", 4).min() == 255


def test_a_photo_is_scaled_as_its_pixels_are(tmp_path):
    """The smaller scale of a JPEG, the cut and the camera's orientation keep every part's place."""
    generator = torch.Generator().manual_seed(3)
    coarse = torch.randint(256, (3, 4, 3), generator=generator, dtype=torch.uint8)
    exact = coarse.repeat_interleave(600, 0).repeat_interleave(600, 1)  # 1,800 x 2,400 pixels
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(exact.numpy()).save(tmp_path / "x.jpg", quality=95)
    Image.fromarray(exact.numpy()).save(tmp_path / "turned.jpg", quality=95, exif=exif)
    middle = coarse.repeat_interleave(2, 1)[:, 1:7].repeat_interleave(2, 0)  # of half squares
    sample = [4, 13, 22, 31, 40, 49]  # pixels in the middle of these, of 54
    for name, expected in (("x", middle), ("turned", middle.rot90(-1))):
        result = read_image(tmp_path / f"{name}.jpg", 54)[sample][:, sample]
        assert (result.float() - expected).abs().max() < 12


@each_of("suffix", ["png", "tif", "pgm"])
def test_grey_pixels_of_16_bits_are_scaled(suffix, tmp_path):
    values = np.array([[0, 257], [257 * 100, 65535]], dtype=np.uint16)
    path = tmp_path / f"grey.{suffix}"
    Image.fromarray(values).save(path)
    expected = [[0, 1], [100, 255]]
    assert read_image(path, 2, channels=1)[:, :, 0].tolist() == expected
    assert read_image(path, 2)[:, :, 2].tolist() == expected
    Image.fromarray(values).save(tmp_path / "clear.png", transparency=257)
    assert read_image(tmp_path / "clear.png", 2)[:, :, 0].tolist() == [[0, 255], [100, 255]]


def test_pixels_without_a_common_range_are_refused(tmp_path):
    path = tmp_path / "image.tif"
    Image.fromarray(np.full((4, 4), 300, dtype=np.float32)).save(path)
    with pytest.raises(InputError, match="image.tif: its pixels are floats"):
        read_image(path, 4)


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "folder", "shapes", "smallest"),
    [
        ("cifar10", "cifar-10-batches-py", "50000x32x32x3 10000x32x32x3", [5_000, 1_000]),
        ("mnist", "MNIST/raw", "60000x28x28x1 10000x28x28x1", [5_421, 892]),
    ],
)
def test_official_files_have_the_official_counts(name, folder, shapes, smallest):
    data_dir = Path(os.environ.get("DATA_DIR") or "none")
    if not (data_dir / folder).is_dir():
        pytest.skip(f"{name} is not below DATA_DIR={data_dir}")
    splits = [read_image_splits(name, str(data_dir))[0][part] for part in ("train", "test")]
    assert ["x".join(map(str, split.pixels.shape)) for split in splits] == shapes.split()
    assert [int(split.labels.bincount(minlength=10).min()) for split in splits] == smallest

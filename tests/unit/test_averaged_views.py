"""Views of test images, whose outputs are averaged; wrong labels on purpose."""

import torch
from torch import nn

import ranks
from conftest import run, write_images
from input_pipeline.label_noise import with_noise
from models.averaged_views import AveragedViews


def test_views_and_their_weights():
    images = torch.randn(3, 2, 6, 6, dtype=torch.float64)
    weight = torch.randn(5, 72, dtype=torch.float64)
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 5, bias=False, dtype=torch.float64))
    model[1].weight.data = weight

    def shifted(down: int) -> torch.Tensor:
        """Each pixel is that `down` pixels below and to the right, reflected at the edges."""
        padded = nn.functional.pad(images, [1] * 4, mode="reflect")
        return padded[:, :, 1 + down : 7 + down, 1 + down : 7 + down]

    def both_ways(x: torch.Tensor) -> torch.Tensor:
        return (x.flatten(1) @ weight.T + x.flip(3).flatten(1) @ weight.T) / 2

    centre = both_ways(images)
    expected = {
        1: images.flatten(1) @ weight.T,
        2: centre,
        6: centre / 2 + both_ways(shifted(-1)) / 4 + both_ways(shifted(1)) / 4,
    }
    for views, logits in expected.items():
        torch.testing.assert_close(AveragedViews(model, views)(images), logits)


def test_a_run_reports_the_accuracy_over_views(here, monkeypatch):
    forward = AveragedViews.forward

    def with_little_memory(model: AveragedViews, images: torch.Tensor) -> torch.Tensor:
        if len(images) > 3:
            raise torch.cuda.OutOfMemoryError
        return forward(model, images)

    write_images(here / "images", ("a", "b"), rows=20, size=8)
    flags = "--dataset folder --data_dir images --image_size 8 --arch resnet8 --bs 16 --epochs 2"
    flags += " --threads 1 --test_views mirror --alternate_flip --small_epochs 1 --small_size 6"
    console = run("images", flags, "--out run")
    first, last = ranks.metrics(here / "run")
    assert "test_accuracy_views" not in first
    accuracy = f"{100 * last['test_accuracy_views']:.2f} %"
    assert f"last.pt: test accuracy {accuracy}, macro-F1 " in console
    assert " %, averaged over 2 views of each image\n" in console
    monkeypatch.setattr(AveragedViews, "forward", with_little_memory)
    for file in (here / "images/train/b").iterdir():
        file.write_bytes(file.read_bytes()[:100])  # which nobody reads
    console = run("images", "--checkpoint run --evaluate --test_views mirror")
    assert "accuracy on the test set, averaged over 2 views of each image" in console
    assert f"all  {100 * last['test_accuracy_views']:6.2f} %" in console


def test_noise_gives_a_share_of_each_class_other_labels():
    labels = torch.arange(4000) % 4
    noisy = with_noise(labels, 0.25, classes=4, seed=3)
    changed = noisy != labels
    for label in range(4):
        assert changed[labels == label].sum() == 250
        new = noisy[(labels == label) & changed].bincount(minlength=4)
        assert (new[label], new.sum()) == (0, 250)
        assert (new[torch.arange(4) != label] - 250 / 3).abs().max() < 45  # 6 standard deviations
    assert torch.equal(noisy, with_noise(labels, 0.25, classes=4, seed=3))
    assert not torch.equal(noisy, with_noise(labels, 0.25, classes=4, seed=4))
    assert torch.equal(with_noise(torch.arange(4), 0.9, classes=4, seed=0), torch.arange(4))
    pairs = with_noise(labels, 0.25, classes=4, seed=3, wrong=torch.tensor([3, 1, 2, 0]))
    changed = pairs != labels
    assert [int(changed[labels == label].sum()) for label in range(4)] == [250, 0, 0, 250]
    assert torch.equal(pairs[changed], 3 - labels[changed])
    few = with_noise(labels, 1e-4, classes=4, seed=0)
    assert torch.equal(few, labels)


def test_only_training_rows_get_wrong_labels(here):
    """With every label wrong, what is learned is wrong on the rows that are held out."""
    words = "--dataset digits --arch resnet8 --lr 0.1 --epochs 4 --bs 32 --threads 1 --out noisy"
    words += " --val_fraction 0.2 --label_noise 0.99:0=1,2=3,4=5,6=7,8=9"
    assert "training labels are wrong" in run("images", words)
    last = ranks.metrics(here / "noisy")[-1]
    assert last["train_accuracy"] > 2 * max(last["val_accuracy"], last["test_accuracy"])

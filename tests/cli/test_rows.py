"""Which rows of the splits a run uses, and what it says of them."""

from dataclasses import dataclass, replace

import torch

import resnet50_test
import transformer_test
from cli.data import choose_rows
from conftest import parsed


@dataclass(frozen=True)
class Split:
    labels: list[int]
    notes: tuple[str, ...] = ()

    def select_rows(self, rows: torch.Tensor) -> "Split":
        return replace(self, labels=[self.labels[row] for row in rows])


def test_rows_that_the_run_has_trained_on_are_warned_of_where_others_are_held_out():
    splits, classes = {"train": Split([0, 1] * 20), "test": Split([0, 1])}, ["a", "b"]
    for share, redrawn, is_warned in (
        (0.2, {}, False),
        (0.1, {"--val_fraction": (0.2, 0.1)}, False),
        (0.2, {"--val_fraction": (0.1, 0.2)}, True),
        (0.1, {"--val_fraction": (0.2, 0.1), "--seed": (0, 1)}, True),
        (0.0, {"--seed": (0, 1)}, False),
    ):
        settings = parsed(transformer_test, f"--dataset headlines --val_fraction {share}")
        chosen = choose_rows(settings, splits, classes, redrawn=redrawn)
        assert any("has trained on" in line for line in chosen.lines) == is_warned, redrawn
        held_out = len(chosen.splits["val"].labels) if share else 0
        assert (held_out, len(chosen.splits["train"].labels)) == (40 * share, 40 * (1 - share))


def test_a_mixing_policy_learns_from_a_few_rows_of_each_class():
    settings = parsed(
        transformer_test, "--dataset headlines --mixup meta --mixup_args held_out=0.1"
    )
    chosen = choose_rows(settings, {"train": Split([0, 1] * 20), "test": Split([0])}, ["a", "b"])
    assert sorted(chosen.splits["held_out"].labels) == [0, 0, 1, 1]


def test_an_image_is_the_same_in_every_epoch_only_where_nothing_changes_it():
    same = "--dataset folder --augment none"
    for more, expected in (
        ("", True),
        ("--random_erasing 0.1", False),
        ("--augment trivial", False),
    ):
        assert parsed(resnet50_test, same, more).repeats_samples == expected
    assert not parsed(resnet50_test, same, "--augment_args small_epochs=1").repeats_samples

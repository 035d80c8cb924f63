"""Which rows of the splits a run uses, and what it says of them."""

import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import ranks
from cli import factory
from cli.data import choose_rows
from conftest import SHORT, for_each, parsed, parser, run, write, write_images
from input_pipeline.csv_tables import ColumnChoice
from input_pipeline.image_datasets import read_image_splits
from input_pipeline.text_datasets import read_text_splits

TEXTS = f"--dataset csv {SHORT} --width 8 --heads 2 --depth 1 --vocab_size 300 --bs 8"


@dataclass(frozen=True)
class Split:
    labels: list[int]
    notes: tuple[str, ...] = ()
    groups: Callable[[], list[str]] = list
    rows: list[int] = field(default_factory=list)  # which were chosen

    def select_rows(self, rows) -> "Split":
        return replace(self, labels=[self.labels[row] for row in rows], rows=rows.tolist())


def test_rows_that_the_run_has_trained_on_are_warned_of_where_others_are_held_out():
    splits, classes = {"train": Split([0, 1] * 20), "test": Split([0, 1])}, ["a", "b"]
    for share, redrawn, is_warned in (
        (0.2, {}, False),
        (0.1, {"--val_fraction": (0.2, 0.1)}, False),
        (0.2, {"--val_fraction": (0.1, 0.2)}, True),
        (0.1, {"--val_fraction": (0.2, 0.1), "--seed": (0, 1)}, True),
        (0.0, {"--seed": (0, 1)}, False),
    ):
        settings = parsed("texts", f"--dataset headlines --val_fraction {share}")
        chosen = choose_rows(settings, splits, classes, redrawn=redrawn)
        assert any("has trained on" in line for line in chosen.lines) == is_warned, redrawn
        held_out = len(chosen.splits["val"].labels) if share else 0
        assert (held_out, len(chosen.splits["train"].labels)) == (40 * share, 40 * (1 - share))


def test_a_mixing_policy_learns_from_a_few_rows_of_each_class():
    settings = parsed("texts", "--dataset headlines --mixup meta --mixup_args held_out=0.1")
    chosen = choose_rows(settings, {"train": Split([0, 1] * 20), "test": Split([0])}, ["a", "b"])
    assert sorted(chosen.splits["held_out"].labels) == [0, 0, 1, 1]


def test_an_image_is_the_same_in_every_epoch_only_where_nothing_changes_it():
    same = "--dataset folder --augment none"
    for more, expected in (
        ("", True),
        ("--random_erasing 0.1", False),
        ("--augment trivial", False),
    ):
        assert parsed("images", same, more).repeats_samples == expected
    assert not parsed("images", same, "--augment_args small_epochs=1").repeats_samples


def held_out(flags: str, labels: list[int], groups: list[str]) -> list[int]:
    """The rows that are held out of a training set; all others are trained on."""
    splits = {"train": Split(labels, groups=lambda: groups), "test": Split([0, 1])}
    chosen = choose_rows(parsed("texts", "--dataset csv", flags), splits, ["a", "b"])
    val, train = (chosen.splits[name].rows for name in ("val", "train"))
    if "--subset" not in flags:
        assert sorted([*val, *train]) == list(range(len(labels)))
    assert not {groups[row] for row in val} & {groups[row] for row in train} if groups else True
    return val


def test_folds_part_the_rows_alike_for_every_seed_and_keep_groups_and_classes():
    """Each class in proportion; of a subset, which is of a seed, the rows that a fold has."""
    labels = [0, 1, 1, 1] * 15
    for groups in ([], [f"patient {row // 3}" for row in range(60)]):
        flags = "--group_column patient" if groups else ""
        folds = [held_out(f"--fold {n}/5 {flags}", labels, groups) for n in range(1, 6)]
        assert sorted(sum(folds, [])) == list(range(60))
        for number, fold in enumerate(folds, 1):
            counts = Counter(labels[row] for row in fold)
            assert groups or counts == {0: 3, 1: 9}
            assert 2 <= counts[0] <= 4
            assert held_out(f"--fold {number}/5 {flags} --seed 7", labels, groups) == fold
            part = held_out(f"--fold {number}/5 {flags} --subset 0.5 --seed 7", labels, groups)
            assert 0 < len(part) < len(fold)
            assert {*part} < {*range(60)}
    splits = {"train": Split(labels), "test": Split([0, 1])}
    whole = set(held_out("--fold 2/5", labels, []))
    settings = parsed("texts", "--dataset csv --fold 2/5 --subset 0.5 --seed 7")
    chosen = choose_rows(settings, splits, ["a", "b"]).splits
    assert {*chosen["val"].rows} < whole
    assert not {*chosen["train"].rows} & whole


def test_a_share_of_the_groups_is_held_out():
    labels = [0, 1, 1, 1] * 15
    for size in (1, 3, 7):
        groups = [f"patient {row // size}" for row in range(60)]
        draws = {
            seed: held_out(f"--val_fraction 0.3 --group_column p --seed {seed}", labels, groups)
            for seed in range(3)
        }
        assert all(abs(len(rows) - 18) <= 2 * size for rows in draws.values()), draws
        assert len({tuple(rows) for rows in draws.values()}) > 1
    labels, groups = list(range(40)) * 5, [f"patient {row // 4}" for row in range(200)]
    few = held_out("--val_fraction 0.1 --group_column p", labels, groups)
    assert abs(len(few) - 20) <= 4, "also where no class has rows in every fold"


def test_rows_of_one_group_stay_together_in_a_run(tmp_path):
    """A column of a table, also of images and of several labels; of a folder the one below it."""
    for name, labels in (("several", ["a|b", "", "b"]), ("texts", ["a", "b"])):
        rows = (f"word {n},{labels[n % len(labels)]},s{n // 9}" for n in range(90))
        write(tmp_path / name, train__csv="\n".join(["text,label,source", *rows, ""]))
    out = tmp_path / "run"
    flags = f"{TEXTS} --group_column source --data_dir {tmp_path}"
    console = run("texts", f"{flags}/several --label_separator | --fold 5/5 --out {out}-of-several")
    assert "rows without a label: 24 of 72 in train, 6 of 18 in val" in console
    given = parser("texts").given(["--label_separator", " "])
    assert given == {"label_separator": " "}
    console = run("texts", re.sub(r"--bs \d+", "", f"{flags}/texts --fold 2/5 --out {out}"))
    assert re.search(r"all 2 classes +72 +18", console)
    assert "batches of 36, as there are 72 training samples" in console
    first = ranks.metrics(out)[0]["val_loss"]
    resumed = run("texts", f"--resume {out} --epochs 2 --seed 5")
    assert "warning" not in resumed, "the fold is the same with another seed"
    console = run("texts", f"--checkpoint {out} --evaluate")
    assert "also chose the best epoch" in console
    assert first != ranks.metrics(out)[1]["val_loss"]
    # of fewer rows than folds, and without the column
    rows = "text,label\nmine,a\nyours,b\n"
    newer = write(tmp_path / "newer", train__csv=rows, test__csv=rows)
    console = run("texts", f"--checkpoint {out} --evaluate --data_dir {newer}")
    assert console.count("of 1\n") == 2
    # the column is none of the texts', whatever its name is
    for name, rows in (
        ("named", "text,label,subject\ngo,a,s1\nstop,b,s2\n"),
        ("3", "a,go,s1\nb,stop,s2\n"),
    ):
        folder = write(tmp_path / name, train__csv=rows)
        group = ColumnChoice(group="subject" if name == "named" else name)
        splits, _ = read_text_splits("csv", str(folder), choice=group, enough=["train"])
        assert list(splits["train"].texts) == ["go", "stop"]
        assert splits["train"].groups() == ["s1", "s2"]
    images = write_images(tmp_path / "images", ["x/p", "x/q", "y/p", "y/q"], rows=3, size=8)
    shutil.rmtree(images / "test")
    groups = ColumnChoice(group="folder")
    splits, _ = read_image_splits("folder", str(images), enough=["train"], choice=groups)
    assert splits["train"].groups() == ["p"] * 3 + ["q"] * 3 + ["p"] * 3 + ["q"] * 3
    base = f"--dataset folder --arch resnet8 --image_size 8 --workers 1 {SHORT} --bs 4"
    flags = f"--group_column folder --data_dir {images} --val_fraction 0.5 --out {tmp_path}/run2"
    assert re.search(r"all 2 classes +6 +6", run("images", base, flags))


def test_folds_that_cannot_be_are_one_line(tmp_path, refused):
    rows = "".join(f"{row},word {row},{'xyz'[row % 3]},{row % 3}\n" for row in range(60))
    rows = f"id,text,label,site\n{rows}"
    write(tmp_path / "mine", train__csv=f"{rows},a,x,\n", test__csv=rows)
    write(tmp_path / "val", train__csv=rows, val__csv=rows)
    images = write_images(tmp_path / "images", ["x", "y"], rows=3, size=8)
    deeper = write_images(tmp_path / "deeper", ["x/p", "y/p"], rows=3, size=8)
    run("texts", TEXTS, f"--data_dir {tmp_path}/val --out {tmp_path}/run")
    clean = write(tmp_path / "clean", train__csv=rows, test__csv=rows)
    run("texts", TEXTS, f"--data_dir {clean} --fold 1/3 --out {tmp_path}/folded")
    mine = f"--data_dir {tmp_path}/mine"
    cases = [
        (f"{mine} --fold 6/5", "--fold: must be as 2/5"),
        (f"{mine} --fold 2/5 --val_fraction 0.1", "--fold 2/5 is not supported with --val_fr"),
        (f"{mine} --fold 2/30", "--fold 2/30: there are 20 rows of the smallest class; give fewer"),
        (f"--data_dir {tmp_path}/val --fold 2/5", "--fold 2/5: the data has a validation set"),
        (f"{mine} --fold 2/5 --group_column place", "no column place (columns: id, text, label, s"),
        (f"{mine} --fold 2/5 --group_column site", "row 62: the group (column 4 (site)) is empty"),
        (f"--data_dir {clean} --fold 2/5 --group_column site", "2/5: there are 3 groups; give"),
        (f"--data_dir {clean} --fold 2/3 --group_column site", "leaves no training rows of 1 of"),
        (f"--data_dir {clean} --val_fraction 0.01 --group_column site", "0.01 of 3 groups is none"),
        (f"--resume {tmp_path}/folded --fold 2/3", "--fold 2/3: the run was trained with 1/3"),
        (f"--resume {tmp_path}/run --fold 2/3", "--fold 2/3: the run was trained with none"),
        (f"--resume {tmp_path}/folded --group_column id", "--group_column id: the run was trained"),
    ]
    for_each(cases, lambda flags, message: refused("texts", flags, message, TEXTS))
    base = f"--dataset folder --arch resnet8 {SHORT} --fold 1/3 --group_column"
    refused("images", f"site --data_dir {deeper}", "their class, not by site", base)
    refused("images", f"folder --data_dir {images}", "x/00.png lies in none", base)
    refused("texts", "--group_column text --fold 1/3", "the rows of that data belong to nothing")


def test_the_batch_of_few_rows_is_smaller_unless_it_is_given():
    def batch(script, rows: int, ranks: int = 1, flags: str = "", resumed: Any = None) -> int:
        settings = parsed(script, flags)
        world = SimpleNamespace(size=ranks, is_main=False)
        run = SimpleNamespace(world=world, checkpoint=resumed)
        data = SimpleNamespace(train=range(rows))
        return factory.with_batch_size(settings, run, data).batch_size

    few = [batch("images", rows) for rows in (3, 20, 500, 1437, 4096, 50_000)]
    assert few == [3, 8, 16, 45, 128, 256]
    assert batch("images", 50_000, 8) == 32, "in all, as it was measured"
    assert batch("images", 50_000, 8, "--arch resnet20") == 128
    assert [batch("images", 60, ranks) for ranks in (2, 16, 80)] == [8, 3, 1]
    assert batch("images", 2000, 2, "--accumulate 2") == 16
    assert batch("images", 2000, flags="--dynamic_batch increase") == 250
    assert [batch("texts", rows) for rows in (72, 280, 1500)] == [36, 64, 64]
    assert [batch("images", rows, flags="--weights x") for rows in (6, 100, 9999)] == [6, 16, 16]
    assert batch("texts", 5, flags="--arch hf:x") == 5
    assert batch("images", 500, flags="--bs 128") == 128
    resumed = SimpleNamespace(changed={})
    assert batch("images", 1024, 8, "--bs 128", resumed) == 128
    assert batch("images", 600, 8, "--bs 128", resumed) == 75
    assert resumed.changed == {"--bs": [128, 75]}, "which a line names"
    assert batch("images", 600, 8, "--bs 128", resumed) == 128, "refused, as it was asked for"

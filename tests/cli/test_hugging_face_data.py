"""Parquet tables, and data sets of Hugging Face that become own data."""

import functools
import io
import os
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from PIL import Image
from test_own_data import EXPECTED, IMAGES, TEST_ROWS, TEXTS, TRAIN_ROWS, read

import ranks
from conftest import for_each, run
from errors import InputError
from input_pipeline import hugging_face_data
from input_pipeline.csv_tables import ColumnChoice
from input_pipeline.hugging_face_data import convert
from input_pipeline.image_datasets import read_image_splits
from input_pipeline.text_datasets import read_text_files, read_text_splits
from tuning.target_script import TargetScript

datasets = pytest.importorskip("datasets", reason="needs datasets: the extra [hf-data]")
pandas = pytest.importorskip("pandas")
pyarrow = pytest.importorskip("pyarrow")
CLASSES = ["spam", "ham"]  # in an order of their own
ROWS = {"text": ["a prize", "at noon", "see you", "win now"] * 4, "label": [0, 1, 1, 0] * 4}


def with_classes(columns: dict[str, list[Any]], **more: Any) -> Any:
    kinds = {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=CLASSES), **more}
    features = datasets.Features({name: kinds[name] for name in columns})
    return datasets.Dataset.from_dict(columns, features=features)


def png(shade: int) -> bytes:
    Image.new("RGB", (8, 8), (shade, 0, 0)).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def saved(folder: Path, **splits: Any) -> Path:
    """Write splits as `save_to_disk` does."""
    datasets.disable_progress_bars()
    datasets.DatasetDict(splits).save_to_disk(str(folder))
    return folder


def write_parquet(folder: Path, train: Any, test: Any = None) -> Path:
    """Write a table, of pandas or of `datasets`, as train.parquet, and as test.parquet."""
    folder.mkdir(exist_ok=True)
    train.to_parquet(folder / "train.parquet")
    (train if test is None else test).to_parquet(folder / "test.parquet")
    return folder


def test_a_parquet_table_reads_as_the_others_do(tmp_path):
    """From pandas, also by category; from `datasets`, whose numbers of classes are named."""
    for number, kind in enumerate(("string", "category", "numbered")):
        tables = []
        for labels, texts in (TRAIN_ROWS, TEST_ROWS):
            names = [["ham", "spam"][label] for label in labels]
            table = pandas.DataFrame({"id": 7.5, "text": texts, "label": names})
            numbers = [CLASSES.index(name) for name in names]
            of_datasets = with_classes({"text": texts, "label": numbers})
            tables.append(of_datasets if kind == "numbered" else table.astype({"label": kind}))
        folder = write_parquet(tmp_path / str(number), *tables)
        assert read(folder) == (EXPECTED, ["ham", "spam"]), kind
    assert [*read_text_files(folder / "test.parquet")[0].values()] == [{1: "Hello there"}]
    prices = [Decimal("1.50"), Decimal("2")]
    folder = write_parquet(tmp_path / "prices", pandas.DataFrame({"text": "ab", "label": prices}))
    assert read(folder)[1] == ["1.50", "2.00"]
    several = datasets.List(datasets.ClassLabel(names=CLASSES))
    nested = {"who": [{"name": "x"}] * 3, "text": ["a", "b", "c"], "label": [[0, 1], [], [1]]}
    who = {"name": datasets.Value("string")}
    several = with_classes(nested, label=several, who=who)
    write_parquet(folder, several)
    choice = ColumnChoice(separator="|")
    splits, classes = read_text_splits("csv", str(folder), choice=choice)
    assert (splits["test"].labels.tolist(), classes) == ([[1, 1], [0, 0], [1, 0]], ["ham", "spam"])


def test_wrong_parquet_tables_are_one_line(tmp_path, refused):
    frame = functools.partial(pandas.DataFrame, columns=["text", "label"])
    nan = {"text": ["a", "b"], "label": pyarrow.array([1.0, float("nan")], from_pandas=False)}
    cases: list[tuple[Any, str]] = [
        (datasets.Dataset(pyarrow.table(nan)), "row 2: the label (column 2 (label)) is empty"),
        (frame([[b"a", "x"], [b"b", "y"]]), "row 1: column 1 (text) is a list, an object or by"),
        (frame([]), "train.parquet is empty"),
        (None, "train.parquet cannot be read as parquet ("),
    ]

    def check(table: Any, message: str) -> None:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        frame([["a", "x"], ["b", "y"]]).to_parquet(folder / "test.parquet")
        (folder / "train.parquet").write_bytes((folder / "test.parquet").read_bytes()[:300])
        if table is not None:
            table.to_parquet(folder / "train.parquet")
        refused("texts", f"--data_dir {folder}", message, TEXTS)

    for_each(cases, check)
    with mock.patch.dict(sys.modules, {"pyarrow": None}):
        refused("texts", f"--data_dir {tmp_path}/1", "needs a package (import of pyarrow", TEXTS)


def test_a_data_set_becomes_own_data_once(tmp_path, monkeypatch):
    """Then all goes without `datasets`: the same command, resuming, a search; not other files."""
    table = with_classes(ROWS)
    unlabelled = with_classes({**ROWS, "label": [-1] * 16})
    source = saved(tmp_path / "mine", train=table, validation=table, test=unlabelled, more=table)
    monkeypatch.chdir(tmp_path)
    data = f"--dataset hf:mine --data_dir {tmp_path}/data"
    base, out = TEXTS.replace("--dataset csv", ""), tmp_path / "run"
    console = run("texts", base, data, f"--out {out}")
    for line in ("the test split has no labels", "not converted: the splits more"):
        assert line in console
    assert "hf/mine-" in console.splitlines()[0]
    with mock.patch.dict(sys.modules, {"datasets": None}):
        run("texts", base, data, f"--out {tmp_path}/again")
        assert ranks.metrics(out)[0]["val_loss"] == ranks.metrics(tmp_path / "again")[0]["val_loss"]
        assert "warning" not in run("texts", f"--resume {out} --epochs 2", data)
        run("texts", f"--resume {out} --evaluate")
        script = TargetScript.read("transformer_test.py", data.split())
        assert [*script.own_splits()] == ["train", "val"]
        os.utime(source / "dataset_dict.json", (0, 0))  # as one that was written anew
        with pytest.raises(InputError, match="needs a package"):
            convert("mine", tmp_path / "data")


def test_images_become_files_and_paths_stay(tmp_path):
    """Bytes in a column of any name that is one of images, or of a table; a run reads them."""
    kinds = {"img": datasets.Image(), "image": datasets.Value("binary")}
    for name, kind in kinds.items():
        columns = {name: list(map(png, range(0, 160, 20))), "label": [0, 1] * 4}
        table = with_classes(columns, **{name: kind})
        folder = write_parquet(tmp_path / name, table)
        splits, classes = read_image_splits("folder", str(convert(str(folder), tmp_path)))
        assert classes == ["ham", "spam"]
        assert splits["test"].labels.tolist() == [1, 0] * 4
        assert splits["test"].decode(splits["test"].labels)[:, 0, 0, 0].tolist() == [20, 0] * 4
    base = IMAGES.replace("--dataset folder", f"--dataset hf:{folder} --data_dir {tmp_path}")
    assert "all 2 classes         8         8" in run("images", base, f"--out {tmp_path}/run")
    listed = tmp_path / "listed"
    listed.mkdir()
    for shade in range(4):
        (listed / f"{shade}.png").write_bytes(png(shade))
    rows = pandas.DataFrame({"image": [f"{n}.png" for n in range(4)], "label": list("xyxy")})
    rows.to_parquet(listed / "train.parquet")
    for each in (listed, convert(str(listed), tmp_path)):
        splits, _ = read_image_splits("folder", str(each), enough=["train"])
        assert splits["train"].decode(splits["train"].labels)[:, 0, 0, 0].tolist() == [0, 1] * 2


def test_what_cannot_be_converted_is_one_line(tmp_path, refused, monkeypatch):
    table, data = with_classes(ROWS), f"--data_dir {tmp_path}/data"
    base = TEXTS.replace("--dataset csv", "")
    both = {"img": [png(0)] * 2, "more": [png(0)] * 2, "label": [0, 1]}
    both = with_classes(both, img=datasets.Image(), more=datasets.Image())
    cases = [
        ({"one": table, "other": table}, "no split is named train, validation or test (there is o"),
        ({"test": table}, "train.csv is missing"),
        ({"train": table, "dev": table, "valid": table}, "are both there: both would be the val"),
        ({"train": both, "test": both}, "several columns have images: img, more"),
        ({"train": table.remove_columns("label"), "test": table}, "no column is known to be the l"),
    ]

    def check(splits: dict[str, Any], message: str) -> None:
        source = saved(tmp_path / str(len(list(tmp_path.iterdir()))), **splits)
        refused("texts", f"--dataset hf:{source} {data}", message, base)

    for_each(cases, check)
    assert not [*(tmp_path / "data" / "hf").glob("*.part")]
    broken = write_parquet(tmp_path / "broken", table.select([]), table)
    refused("texts", f"--dataset hf:{broken} {data}", "corresponds to no data!)", base)
    (broken / "train.parquet").write_bytes(b"PAR1")
    refused("texts", f"--dataset hf:{broken} {data}", "cannot be loaded (", base)
    offline = ConnectionError("Couldn't reach 'no/where' on the Hub\nin several lines")
    with mock.patch.object(datasets, "load_dataset", side_effect=offline) as load:
        words = f"--dataset hf:no/where:plain {data}"
        line = refused("texts", words, "check the name and th", base)
    assert (load.call_args.args, "in several lines" in line) == (("no/where", "plain"), False)


def test_half_a_conversion_is_none_and_several_processes_share_one(tmp_path, monkeypatch):
    table, write = with_classes(ROWS), hugging_face_data.write_splits
    source = saved(tmp_path / "mine", train=table, test=table)

    def killed(splits: Any, folder: Path, source: Path) -> None:
        write({"train": splits["train"]}, folder, source)
        shutil.copytree(folder, tmp_path / "half")
        raise KeyboardInterrupt

    monkeypatch.setattr(hugging_face_data, "write_splits", killed)
    with pytest.raises(KeyboardInterrupt):
        convert(str(source), tmp_path / "data")
    (lock,) = (tmp_path / "data" / "hf").iterdir()
    (tmp_path / "half").rename(lock.with_suffix(".part"))  # as one that was killed leaves it
    waits, calls = threading.Barrier(2), []

    def slow(splits: Any, folder: Path, source: Path) -> None:
        calls.append(folder)
        threading.Event().wait(0.5)
        write(splits, folder, source)

    def start(_: int) -> Path:
        waits.wait()
        return convert(str(source), tmp_path / "data")

    monkeypatch.setattr(hugging_face_data, "write_splits", slow)
    with ThreadPoolExecutor(2) as pool:
        folders = set(pool.map(start, range(2)))
    assert (len(folders), len(calls)) == (1, 1)
    names = sorted(path.name for path in folders.pop().iterdir())
    assert names == ["test.parquet", "train.parquet"]

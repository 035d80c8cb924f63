"""Data of your own: header rows, columns, separators, splits, and predictions into files."""

import csv
import json
import re
from unittest import mock

import pytest
import torch
from PIL import Image

import conftest
import ranks
from cli import data as cli_data
from conftest import SHORT, for_each, run, write, write_images
from errors import InputError
from input_pipeline import own_data
from input_pipeline.csv_tables import ColumnChoice
from input_pipeline.image_datasets import image_suffixes, read_image_splits
from input_pipeline.own_data import expand_files
from input_pipeline.text_datasets import TextSplit, read_text_files, read_text_splits

TEXTS = f"--dataset csv {SHORT} --width 8 --heads 2 --depth 1 --vocab_size 300 --bs 8 --lr 0.01"
IMAGES = f"--dataset folder --arch resnet8 {SHORT} --bs 4 --image_size 8 --workers 1"
TRAIN_ROWS = [1, 0, 1, 0], ["Win, now", "see you", "a prize", "at noon"]
TEST_ROWS = [0], ["Hello there"]
EXPECTED = {"train": TextSplit(*TRAIN_ROWS), "test": TextSplit(*TEST_ROWS)}
"""What each way to write the same small data set must be read as; the classes are ham and spam."""


def read(folder, label: str | None = None, *texts: str) -> tuple[dict[str, TextSplit], list[str]]:
    splits, classes = read_text_splits("csv", str(folder), choice=ColumnChoice(label, texts))
    for split in splits.values():
        split.texts = list(split.texts)
    return splits, classes


# -------------------------------------------------------------------- header rows and columns

PLAIN = {
    "train__csv": 'spam,"Win, now"\nham,see you\nspam,a prize\nham,at noon\n',
    "test__csv": "ham,Hello there\n",
}


def with_header(names: str) -> dict[str, str]:
    return {name: f"{names}\n{text}" for name, text in PLAIN.items()}


def json_lines(rows: list) -> str:
    records = [{"id": 3, "text": text, "label": label, "tags": []} for label, text in rows]
    return "".join(json.dumps(record) + "\n" for record in records)


READ_ALIKE = {
    "no header": PLAIN,
    "names in another case, a byte-order mark": with_header('\ufeff"CATEGORY","Content"'),
    "blank rows": with_header("\nla\u00adbel,text\u200b\n  \n , "),
    "semicolon": {
        "train__csv": "text;label\nWin, now;spam\nsee you;ham\na prize;spam\nat noon;ham\n",
        "test__csv": "text;label\nHello there;ham\n",
    },
    "an index and a title, in another order in each file": {
        "train__csv": ',title,description,Class Index\n0,"Win,",now,spam\n1,see,you,ham\n'
        "2,a,prize,spam\n3,at,noon,ham\n",
        "test__csv": "description,Class-Index,title,date\nthere,ham,Hello,1\n",
    },
    "quoted line breaks, spaces after commas": {
        "train__csv": '"label", "text"\r\n"spam", "Win,\nnow"\r\nham, see you\r\n'
        'spam,"a\r\nprize"\r\nham,at noon\r\n',
        "test__csv": 'label,text\r\nham,"Hello\n\nthere"\r\n',
    },
    "other names of the files": {
        "Training__csv": PLAIN["train__csv"],
        "TEST__TSV": "ham\tHello there\n",
    },
    "jsonl": {
        f"{part}__jsonl": "\n"
        + json_lines([(["ham", "spam"][label], text) for label, text in zip(*rows)])
        for part, rows in (("train", TRAIN_ROWS), ("test", TEST_ROWS))
    },
}


def test_every_form_of_a_file_reads_alike(tmp_path):
    for number, (how, files) in enumerate(READ_ALIKE.items()):
        splits, classes = read(write(tmp_path / str(number), **files))
        assert (splits, classes) == (EXPECTED, ["ham", "spam"]), how


def test_a_value_of_an_object_is_a_text(tmp_path):
    rows = json_lines([(1, "one"), (2.5, None), (True, "\ud800 half"), (False, "")])
    splits, classes = read(write(tmp_path, train__jsonl=rows, test__jsonl=rows, val__json=rows))
    assert splits["train"].notes[2].endswith("not read: val.json")
    assert classes == ["1", "2.5", "false", "true"]
    assert splits["train"].texts == ["one", "", "? half", ""]
    assert "2 of 4 rows have no text (the first is row 2)" in splits["train"].notes[1]


def test_columns_are_chosen_by_name_or_number(tmp_path):
    """In a file without a header by number; there the first row is a sample, whatever it holds."""
    rows = "v1,v2,topic\nspam,Win now,mail\nham,see you,chat\nspam,a prize,mail\nham,noon,chat\n"
    folder = write(tmp_path, train__csv=rows, test__csv=rows)
    for label, texts, classes, first in (
        ("V1", ("v2", "topic"), ["ham", "spam"], "Win now mail"),
        ("v1", ("topic", "2"), ["ham", "spam"], "mail Win now"),
        (None, ("v2",), ["chat", "mail"], "Win now"),
    ):
        splits, read_classes = read(folder, label, *texts)
        assert read_classes == classes
        assert [(split.texts[0], len(split)) for split in splits.values()] == [(first, 4)] * 2
    for header, label in (("", "3"), ("7,2,0\n", "0")):
        rows = f"{header}1,5,1\n2,b,0\n3,c,1\n"
        splits, classes = read(write(tmp_path, train__csv=rows, test__csv=rows), label, "2")
        assert (classes, splits["train"].texts) == (["0", "1"], ["5", "b", "c"])
    for rows in ("0,1984\n1,It\n0,Dune\n1,Emma\n", "label,text\na,b\nb,c\na,d\nlabel,Click me\n"):
        splits, _ = read(write(tmp_path, train__csv=rows, test__csv=rows))
        assert len(splits["train"]) == 4, "no row of data is taken for a header"
    for names, label, text in (("0,1", "0", "1"), ("1,5", "1", "5")):
        write(tmp_path, **with_header(names))  # as pandas numbers the columns, or some of them
        assert read(tmp_path, label, text)[0] == EXPECTED


def test_quotes_in_tab_separated_files_are_text(tmp_path):
    """Those that do not pair, and those that would swallow the rows between them."""
    train = 'label\ttext\nham\t"no" he said\nspam\tthe "best\n'
    test = 'label\ttext\nham\t"no he said\nspam\twin\nham\tthe end"\nspam\tnow\n'
    splits, _ = read(write(tmp_path, train__tsv=train, test__tsv=test))
    assert splits["train"].texts == ['"no" he said', 'the "best']
    assert splits["test"].texts == ['"no he said', "win", 'the end"', "now"]


def test_long_texts_are_read_and_labels_sorted_as_numbers_or_words(tmp_path):
    text = "word " * 40_000
    rows = "".join(f"{label},{text}\n" for label in ("world", "art", "10", "9"))
    splits, classes = read(write(tmp_path, train__csv=rows, test__csv=rows))
    assert classes == ["9", "10", "art", "world"]
    assert len(splits["train"].texts[0]) == len(text) - 1


# -------------------------------------------------------------------- files that are refused

NO_DATA = "is no data; the header must be the first row and the only one, so delete this row"
TRAIN = PLAIN["train__csv"]
WRONG_FILES: list[tuple[dict[str, str] | str, str, str]] = [  # a text is that of train.csv
    ("label,text\nspam,a\n ,b\n", "", "train.csv, row 3: the label (column 1 (label)) is empty"),
    ("label,text\nspam,\nham,\n", "", "no row has a text"),
    ("".join(f"{row},a\n" for row in range(20)), "", "column 1 was read as the label and has 20"),
    # which columns
    ("stars,text\na,b\nc,d\n", "", "label (columns: stars, text); choose with --label_column"),
    ("label,topic,text\na,x,a\nb,y,c\n", "", "several columns may be the label"),
    ("label,text,text\na,b,c\n", "--text_column text", "train.csv: there are several columns text"),
    ("label,text\na,b\n", "--label_column kind", "there is no column kind (columns: label, text)"),
    *(("a,b\nc,d\n", f"--label_column {n}", "no column") for n in ("0", "3")),
    # rows that are no data, which must not become classes
    (f"v1,v2\n{TRAIN}" * 2, "", "row 1: no other text has the label 'v1'; if this row is"),
    (f"label,v2\n{TRAIN}" * 2, "--text_column 2", f"row 6 (label, v2): {NO_DATA}"),
    (f"label,text\n{TRAIN}label,text\n", "", f"row 6 (label, text): {NO_DATA}"),
    (f"label,text\n---,---\n{TRAIN}", "", f"row 2 (---, ---): {NO_DATA}"),
    ("sep=;\nspam;Win now\nham;see you\n", "", f"row 1 (sep=, ): {NO_DATA}"),
    # rows that are no rows
    ("ham,a\nspam,b\nham,one,two\n", "", "train.csv, row 3: 3 columns, expected 2"),
    ("# mine\nham,a\nspam,b\n", "", "train.csv, row 1: has one column"),
    (f'{TRAIN}ham,"never closed\n', "", "train.csv"),
    ({"test__csv": ""}, "", "test.csv is empty"),
    ({"train__jsonl": "{\n"}, "", "train.jsonl, row 1: is not JSON (Expecting"),
    ({"train__jsonl": '{"label": 1, "text": "a"}\n{"text": "b"}\n'}, "", "row 2: the label ("),
    ({"train__jsonl": '{"label": NaN, "text": "a"}\n'}, "", "row 1: the label ("),
    ({"train__jsonl": json_lines([("a", "b"), (["a"], "b")])}, "", "row 2: column 3 (label) is a"),
    # files that do not fit each other
    ("label,text\na,b\nc,d\n", "", "test.csv: there is no column text (columns: ham, Hello"),
    ({"test__csv": "ham,a\neggs,b\n"}, "", "test.csv, row 2: label 'eggs' is out of range"),
    ({"train__tsv": "ham\ta\n"}, "", "train.csv and train.tsv are both there"),
]


def test_a_header_is_one_wherever_it_stands_in_texts_to_classify(tmp_path):
    headers = ["text", '\ufeff"Text"', "'TEXT'", "0", "text,label", "text|topic", '"text"\t"y"', ""]
    for number, header in enumerate(headers):
        mark = next((each for each in ",|\t" if each in header), "")
        path = tmp_path / f"{number}.{'tsv' if mark == chr(9) else 'csv'}"
        rows = f"{header}\n" + "".join(f"{word}{mark and mark + 'a'}\n" for word in ("Good", "Bad"))
        path.write_text(rows)
        assert list(read_text_files(path)[0][path].values()) == ["Good", "Bad"]
        path.write_text(f"{rows}{header.upper()}\n")
        if mark:
            with pytest.raises(InputError, match=NO_DATA):
                read_text_files(path)
        elif header == "text":  # which a row of a single column may be as well
            assert list(read_text_files(path)[0][path].values()) == ["Good", "Bad", "TEXT"]


def test_wrong_files_are_refused(refused, tmp_path):
    def check(files: dict[str, str] | str, flags: str, names: str) -> None:
        files = {"train__csv": files} if isinstance(files, str) else files
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        write(folder, **(PLAIN | files))
        if "train__jsonl" in files:
            (folder / "train.csv").unlink()
        refused("texts", f"--data_dir {folder} {flags}", names, TEXTS)

    for_each(WRONG_FILES, check)
    folder = write(tmp_path / "mine", **PLAIN)
    refused("texts", f"--data_dir {folder}/train.csv", "train.csv: is a file", TEXTS)
    none = "--dataset folder --data_dir none --arch resnet18 --weights DEFAULT"
    refused("images", none, "none: there is no such folder", "")  # before a download
    refused("texts", "--data_dir none", "none: there is no such folder", TEXTS)
    for encoding, text in (("latin-1", "caf\xe9"), ("utf-16", "caf\xe9"), ("utf-16-le", "bar")):
        (folder / "train.csv").write_bytes(f"{text},ein\nbaz,zwei\n".encode(encoding))
        refused("texts", f"--data_dir {folder}", "NUL" if text == "bar" else "not UTF-8", TEXTS)


# -------------------------------------------------------------------- what a run says and does


def test_a_run_is_evaluated_and_classifies_by_its_own_columns_and_classes(tmp_path):
    """Where a class is lacking, its number must not go to the next one.

    A table is not classified by the label, where its column has a usual name of texts; nor by
    another's number.
    """
    rows = "".join(f"{row},word {row % 3},{'xyz'[row % 3]}\n" for row in range(60))
    table = f"id,text,subject\n{rows}"
    folder = write(tmp_path / "mine", train__csv=table, test__csv=table)
    write(folder, moved__csv="text,id,subject\nword 0,1,x\n")
    for out, flags in (("named", ""), ("numbered", "--text_column 2")):
        data = f"--label_column subject --data_dir {folder} --out {tmp_path}/{out} {flags}"
        run("texts", TEXTS, "--epochs 12 --dropout 0 --token_dropout 0", data)
        assert ranks.metrics(tmp_path / out)[-1]["test_accuracy"] == 1
        for file in ("test", "moved"):
            predict = f"--checkpoint {tmp_path}/{out} --predict {folder}/{file}.csv"
            assert run("texts", predict).splitlines()[2].startswith("word 0: ")
    write(folder, chosen__csv="text,other\nword 0,word 1\n")
    chosen = f"--checkpoint {tmp_path}/numbered --predict {folder}/chosen.csv --text_column"
    for column, word in (("2", "word 1"), ("1", "word 0"), ("other", "word 1")):
        assert run("texts", chosen, column).splitlines()[2].startswith(word), "a flag wins"
    lacking = "".join(line + "\n" for line in table.splitlines() if not line.endswith("x"))
    other = write(tmp_path / "other", train__csv=lacking, test__csv=lacking)
    for data, accuracies in ((folder, ["100.00"] * 3), (other, ["0.00", "100.00", "100.00"])):
        resume = f"--resume {tmp_path}/numbered --evaluate --data_dir {data}"
        lines = run("texts", resume).splitlines()
        shown = dict(line.split()[:2] for line in lines[-5:-2])  # before all, and the scores
        assert shown == dict(zip("xyz", accuracies))
    table, new = table.replace("text,subject", "1,label"), "1\nword 0\n"
    folder = write(tmp_path / "unusual", train__csv=table, test__csv=table, new__csv=new)
    data = f"--data_dir {folder} --text_column 2 --epochs 1 --out {tmp_path}/opinions"
    run("texts", TEXTS, data)
    predict = f"--checkpoint {tmp_path}/opinions --predict {folder}/new.csv"
    assert run("texts", predict).splitlines()[2].startswith("word 0: ")


# -------------------------------------------------------------------- validation sets


def image_folder(root, *parts: str, classes: tuple[str, ...] = ("cat", "dog")):
    """Write six images of each class into root/part/class for each part; "." is root itself."""
    return write_images(root, classes, rows=6, size=16, parts=parts)


def csv_folder(root, *parts: str):
    rows = "".join(f"sample {row},{'ham' if row % 2 else 'spam'}\n" for row in range(24))
    return write(root, **{f"{part}__csv": f"text,label\n{rows}" for part in parts})


KINDS = [  # script, flags, and what writes data
    ("texts", TEXTS, csv_folder),
    ("images", IMAGES, image_folder),
]


def test_splits_are_found_by_several_names(tmp_path, refused):
    for number, val in enumerate(["val", "validation", "DEV"]):
        data = image_folder(tmp_path / str(number), "Train", "testing", val)
        splits, classes = read_image_splits("folder", str(data))
        assert (list(splits), classes) == (["train", "test", "val"], ["cat", "dog"])
    image_folder(data, "val")
    refused("images", f"--data_dir {data}", "DEV and val are both there", IMAGES)
    data = image_folder(tmp_path / "mine", "Test", "Dev")  # which are no classes
    refused("images", f"--data_dir {data} --val_fraction 0.1", "mine/train is missing", IMAGES)
    for name, base, make in KINDS:  # a broken link is not taken for a split that is not there
        data = make(tmp_path / name, "train", "val")
        (data / ("test" if name == "images" else "test.csv")).symlink_to("nowhere")
        refused(name, f"--data_dir {data}", "is a link to nothing", base)
    data = image_folder(tmp_path / "more", "train", "val")
    image_folder(data, "val", classes=("emu",))
    refused("images", f"--data_dir {data}", "more/val/emu: not one of the 2 classes", IMAGES)
    image_folder(data, "train", classes=("emu", "fox"))
    console = run("images", IMAGES, f"--data_dir {data} --out {tmp_path}/run")
    assert "warning: the val split has no row of 1 of the 4 classes: fox" in console


def test_a_validation_set_of_its_own_chooses_the_best_epoch(tmp_path, refused):
    """It is what is measured where there is no test set."""
    for name, base, make in KINDS:
        data, out = make(tmp_path / name, "train", "val"), tmp_path / f"run-{name}"
        flags = f"--epochs 2 --bs 4 --val_fraction 0.1 --out {out}"
        console = run(name, base, flags, "--data_dir", data)
        assert "no training rows are held out" in console
        assert "on validation rows" in console
        assert "test accuracy" not in console
        rows = ranks.metrics(out)
        best = torch.load(out / "best.pt", weights_only=True)["progress"]["best"]
        accuracies = [row["val_accuracy"] for row in rows]
        assert accuracies[best["epoch"] - 1] == max(accuracies)
        assert "test_accuracy" not in rows[0]
        lines = run(name, base, f"--resume {out} --evaluate").splitlines()
        assert "accuracy on the validation set, which also chose the best epoch" in lines
        assert f"{100 * rows[-1]['val_accuracy']:.2f} %" in lines[-2]
        data = make(tmp_path / f"without-{name}", "train", "test")
        refused(name, f"--data_dir {data} --no-test", "give --val_fraction above 0", base)
        meta = f"--data_dir {data} --meta_learning --mixup_args held_out=1"
        refused(name, meta, "held_out=1 must be above 0 and below 1", base)


def test_rows_are_held_out_of_a_training_set_alone(tmp_path, refused):
    """Others with another seed; a folder of class folders is a training set as well."""
    seeds, held_out = [], cli_data.held_out_rows
    unsplit = ("images", IMAGES, lambda root, _: image_folder(root, "."))
    for number, (name, base, make) in enumerate([*KINDS, unsplit]):
        data, out = make(tmp_path / str(number), "train"), tmp_path / f"run-{number}"
        assert "--val_fraction 0.1" in refused(name, f"--data_dir {data}", "is missing", base)
        names = "--val_fraction: 0.99 leaves no training rows of 2 of the 2 classes"
        refused(name, f"--data_dir {data} --val_fraction 0.99", names, base)
        if name == "images":
            (data / ".ipynb_checkpoints").mkdir()  # which is no class
        with mock.patch.object(cli_data, "held_out_rows", side_effect=held_out) as record:
            flags = f"--data_dir {data} --val_fraction 0.25 --seed {number} --out {out}"
            table = run(name, base, flags).splitlines()
        seeds += [called.kwargs["seed"] for called in record.call_args_list]
        total = next(line.split()[-2:] for line in table if "all 2 classes" in line)
        assert total == (["18", "6"] if name == "texts" else ["8", "4"])
        assert "val_accuracy" in ranks.metrics(out)[-1]
        if number < 2:
            for part in ("train", "test"):  # all rows of what the run has not seen
                new = make(tmp_path / f"new-{number}" / part, part)
                next(new.glob("*/cat/01.*" if number else "*.csv")).rename(new / "away.txt")
                if not number:
                    write(new, **{f"{part}__csv": "text,label\nb,ham\nc,ham\nd,spam\n"})
                console = run(name, "", f"--checkpoint {out} --evaluate --data_dir {new}")
                counts = re.findall(r"of (\d+)\n", console)
                assert counts == (["5", "6"] if number else ["2", "1"]), console
                assert "the run has trained on" not in console
                assert "also chose" not in console
    assert seeds == [1, 2, 3]
    few = write(tmp_path / "few", train__csv="ham,a\nspam,b\n")
    refused("texts", f"--data_dir {few} --val_fraction 0.25", "leaves no validation rows", TEXTS)


def test_every_image_is_used_or_counted_with_the_reason(tmp_path):
    """Hidden folders, links of all kinds and other files, in the data and in what is predicted."""
    data = image_folder(tmp_path / "mine", "train", "test")
    cat, elsewhere = data / "train" / "cat", image_folder(tmp_path, "elsewhere") / "elsewhere"
    image_folder(cat, ".ipynb_checkpoints", "__MACOSX")
    (cat / "._2.png").write_bytes(b"what macOS leaves in archives")
    for name in ("7.heic", "8.ico", "../labels.csv", "../../val.zip"):
        (cat / name).write_bytes(b"no picture that Pillow reads by itself")
    (cat / "folder.png").mkdir()
    (data / "train" / "stray.jpe").write_bytes((cat / "02.png").read_bytes())
    (cat / "00.png").unlink()
    for link, target in (
        (cat / "00.png", "annex/objects/0.png"),
        (data / "train" / "bird", "nowhere"),
        (cat / "more", elsewhere / "cat"),
        (cat / "6.JFIF", elsewhere / "dog" / "00.png"),
        (data / "train" / "fish", elsewhere / "dog"),
        (cat / "up", ".."),
        (data / "train" / "parent", data / "train"),
    ):
        link.symlink_to(target)
    splits, classes = read_image_splits("folder", str(data), enough=["train"])
    assert classes == ["cat", "dog", "fish"]
    assert splits["train"].labels.bincount().tolist() == [5 + 6 + 1, 6, 6]
    for reason in (
        "dangling links (2, such as bird)",
        "files of other types (2, such as cat/7.heic)",
        "files outside the folders of the classes (1, such as labels.csv)",
        "hidden files and folders (3, such as cat/._2.png)",
        "images outside the folders of the classes (1, such as stray.jpe)",
        "links to a folder above (2, such as parent)",
    ):
        assert reason in splits["train"].notes[0]
    read = "folders, .csv, .tsv, .jsonl, .parquet"
    assert splits["train"].notes[1] == f"{data}: train, test, val are {read}; not read: val.zip"
    assert splits["test"].notes == ()
    assert len(expand_files(cat, image_suffixes(), what="images")[0]) == 12
    vehicles = image_folder(tmp_path / "vehicles", ".", classes=("bus", "train"))
    (vehicles / "@eaDir").mkdir()
    assert read_image_splits("folder", str(vehicles), enough=["train"])[1] == ["bus", "train"]
    image_folder(vehicles / "train", ".")  # now with classes below it: the training set
    assert read_image_splits("folder", str(vehicles), enough=["train"])[1] == ["cat", "dog"]


def test_classes_that_join_several_labels_are_named():
    def warned(*names: str) -> bool:
        line = own_data.class_table(names, {"train": range(len(names))})[-1]
        return "look like several labels, such as" in line

    assert warned("a", "b", "a|b")
    for names in (("a|b", "c"), ("New York, NY", "Albany, NY", "x"), ("A", "A+", "B", "B+")):
        assert not warned(*names), names
    table = own_data.class_table(["Spam", "1", "spam", "1.0", "ham"], {"train": range(5)})
    assert table[-1].endswith("in case or in .0 only: Spam, 1, spam, 1.0")


def test_names_in_two_forms_are_one_class(tmp_path):
    """Composed and decomposed characters, as systems write them."""
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    data = image_folder(tmp_path / "mine", "train", classes=(composed, "dog"))
    image_folder(data, "test", classes=(decomposed, "dog"))
    splits, found = read_image_splits("folder", str(data))
    assert (found, len(splits["test"].labels)) == ([composed, "dog"], 12)
    rows = f"text,label\na,{composed}\nb,bar\nc,{decomposed}\n"
    splits, found = read(write(tmp_path, train__csv=rows, test__csv=rows))
    assert (found, splits["train"].labels) == (["bar", composed], [1, 0, 1])


# -------------------------------------------------------------------- predictions


def test_a_folder_of_images_is_classified_in_order(runs, tmp_path, capsys, refused):
    """In two batches; predictions stand alone on the standard output."""
    photos = tmp_path / "photos"
    for i in range(40):
        path = write(photos / ("b" if i % 2 else "a")) / f"{i:02}.png"
        Image.new("L", (8, 8), 6 * i).save(path)

    def predict(*words: object) -> str:
        flags = ["--resume", runs["images"], "--predict", *words]
        assert conftest.call("images", list(map(str, flags))) == 0
        console = capsys.readouterr()
        assert console.err.startswith(f"weights of {runs['images']}/last.pt: epoch ")
        return console.out

    printed = predict(photos).splitlines()
    files = [str(path) for path in sorted(photos.rglob("*.png"))]
    assert [line.split(": ")[0] for line in printed] == files
    assert predict(files[33]).splitlines() == [printed[33]]
    for suffix in ("jsonl", "csv"):
        out = tmp_path / f"out.{suffix}"
        assert predict(photos, "--predict_out", out) == f"{out}: 40 predictions\n"
    records = list(map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines()))
    rows = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    for file, line, record, row in zip(files, printed, records, rows, strict=True):
        probabilities = record["probabilities"]
        predicted = max(probabilities, key=probabilities.get)
        assert (record["name"], record["predicted"]) == (file, predicted)
        assert f": {predicted} {100 * probabilities[predicted]:.1f} %" in line
        columns = {f"probability_{name}": str(value) for name, value in probabilities.items()}
        assert row == {"name": file, "predicted": predicted, **columns}
    victims = photos / "b" / "39.png", photos / "a" / "02.png"  # of the later batch first
    for number, victim in enumerate(victims, 1):
        victim.write_bytes(victim.read_bytes()[:40])
        out = tmp_path / f"{number}.csv"
        flags = f"--resume {runs['images']} --predict {photos} --predict_out {out}"
        line = refused("images", flags, f": {victim}: not a readable image", "")
        assert "no prediction of " in line
        read = list(csv.DictReader(out.read_text().splitlines()))
        broken = [*map(str, victims[:number])]
        assert [each["name"] for each in read] == [name for name in files if name not in broken]
    flags = f"--dataset folder --data_dir {photos} --val_fraction 0.5 {SHORT}"
    line = refused("images", flags, "of 40 images 2 cannot be read", "")
    assert all(line.count(str(victim)) for victim in victims), "also of the split that is not read"


def test_the_lines_of_a_folder_and_the_rows_of_tables_are_classified(runs, tmp_path, refused):
    folder, out = tmp_path / "texts", tmp_path / "out.csv"
    write(folder / "b", one__txt='\nHome team wins, "again"\n\n')
    write(folder, a__txt="Stocks rise\nOil down\n", empty__txt=" \n", notes__md="no text")
    write(folder / ".ipynb_checkpoints", a__txt="An older version\n")
    resume = f"--resume {runs['texts']} --predict {folder}"
    console = run("texts", resume, "--predict_out", out)
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert [(row["name"], row["text"]) for row in rows] == [
        (f"{folder}/a.txt:1", "Stocks rise"),
        (f"{folder}/a.txt:2", "Oil down"),
        (f"{folder}/b/one.txt:2", 'Home team wins, "again"'),
    ]
    assert "files of other types (1, such as notes.md), hidden files and folders (1" in console
    assert f"warning: {folder}/empty.txt: contains no text and is left out" in console
    printed = run("texts", resume).splitlines()[-3:]
    assert [line.split(":")[0] for line in printed] == [row["text"] for row in rows]
    write(folder, new__csv="id,text,label\n1,Stocks rise,\n2,,x\n", one__csv="text\nStocks rise\n")
    write(folder, new__jsonl='{"other": "Oil down"}\n', bare__tsv="1\tOil down\n")
    tables = f"--predict {folder}/new.csv {folder}/one.csv"
    console = run("texts", f"--resume {runs['texts']} {tables}")
    assert "column 3 (label), the text column 2 (text); left out: column 1 (id)" in console
    assert f"warning: {folder}/new.csv: 1 of 2 rows have no text" in console
    printed += console.splitlines()[-3:]
    for file, column in (("new.jsonl", "other"), ("bare.tsv", "2")):
        flags = f"--resume {runs['texts']} --predict {folder}/{file} --text_column {column}"
        printed += run("texts", flags).splitlines()[-1:]
    assert printed[3:] == [printed[0], printed[4], printed[0], printed[1], printed[1]]
    assert printed[4].startswith(": ")
    write(folder, list__json='["a text"]')
    for file, names in (("empty.txt", "no text"), ("list.json", ".jsonl")):
        refused("texts", f"--resume {runs['texts']} --predict {folder}/{file}", names, "")
    column = 'text\nOil; down\n""\n"Stocks, rise"\n'  # as a library writes a single column
    write(folder, column__csv=column)
    console = run("texts", f"--resume {runs['texts']} --predict {folder}/column.csv")
    assert "1 of 3 rows have no text" in console
    shown = [line.split(":")[0] for line in console.splitlines()[-3:]]
    assert shown == ["Oil; down", "", "Stocks, rise"]

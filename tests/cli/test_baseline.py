"""The linear model that a run is compared with."""

import re
import shutil

import pytest
import torch

from conftest import SCRIPTS, run
from input_pipeline.baseline import image_baseline, text_baseline
from input_pipeline.image_batches import FileDecoder
from input_pipeline.image_datasets import ImageSplit
from input_pipeline.stored_texts import StoredTexts
from input_pipeline.text_datasets import TextSplit


def test_a_run_says_what_the_baseline_reaches_and_how_it_compares(tmp_path):
    def lines(script: str, words: str) -> list[str]:
        console = run(script, words, "--out", tmp_path / "run")
        return [line for line in console.splitlines() if "baseline" in line]

    for script, (_, words) in SCRIPTS.items():
        found, verdict = lines(script, f"{words} --baseline")
        accuracy = re.search(r"(?:regression|Bayes) ([\d.]+) % on the test set", found)
        assert f"baseline of {accuracy[1]} %" in verdict
        assert "behind" in verdict, "one epoch of a small network"
        (again,) = lines(script, f"--resume {tmp_path / 'run'} --epochs 2")
        assert f"baseline of {accuracy[1]} %" in again, "it is not measured again"
        shutil.rmtree(tmp_path / "run")
        assert lines(script, words) == [], "data of the project itself"
        assert len(lines(script, f"--resume {tmp_path / 'run'} --epochs 2 --baseline")) == 2
        shutil.rmtree(tmp_path / "run")


def test_baselines_find_what_a_linear_model_can():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(200) % 2
    pixels = torch.randint(200, (200, 9, 9, 3), generator=generator, dtype=torch.uint8)
    pixels[labels == 1, :, :4] += 55
    images = ImageSplit(labels, pixels, size=9)
    some = images.select_rows(torch.arange(101))
    found = image_baseline(images, some, decoder=FileDecoder(0))
    assert found.accuracy > 0.95
    assert found.largest_class == 51 / 101
    stored = StoredTexts()
    for text in [*["oil up \u6cb9\u4ef7", "goal, late", "a goal"] * 20, "\u6cb9\u7530"]:
        stored.append(text)
    texts = TextSplit([0, 1, 1] * 20 + [0], stored)
    train = texts.select_rows(range(60))
    assert text_baseline(train, texts).accuracy == 1.0, "a word of one letter"
    stored = StoredTexts()
    for _ in range(2):
        stored.append("!")
    assert text_baseline(TextSplit([0, 1], stored), texts).accuracy < 1, "there is no word"
    stored, truth = StoredTexts(), torch.arange(800) % 2
    for label in truth.tolist():  # half of the words of a class are also the other's
        words = 100 * label + torch.randint(200, (8,), generator=generator)
        stored.append(" ".join(map(str, words.tolist())))
    given = torch.where(torch.rand(800, generator=generator) < 0.4, 1 - truth, truth)
    noisy, true = (TextSplit(labels.tolist(), stored) for labels in (given, truth))
    found = text_baseline(noisy.select_rows(range(400)), true.select_rows(range(400, 800)))
    assert found.kind == "naive Bayes", "two in five labels are wrong"
    assert found.accuracy > 0.8
    one_class = texts.select_rows([1, 2])
    assert text_baseline(one_class, texts).accuracy == pytest.approx(40 / 61)

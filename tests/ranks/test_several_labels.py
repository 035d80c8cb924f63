"""Several labels a row on two ranks, and of a run that goes on."""

import json

import pytest

import ranks
from conftest import LABELS, write_headlines


def test_two_ranks_and_a_resumed_run_measure_what_one_process_does(tmp_path):
    folder = write_headlines(tmp_path / "texts")
    flags = f"transformer_test.py {LABELS} --data_dir {folder} --val_fraction 0.1 --subset 0.5"
    flags += " --best_by auroc"
    flags += " --lr_schedule constant --warmup 0 --dropout 0 --token_dropout 0 --no-baseline"
    ranks.run(f"{flags} --epochs 2 --out {tmp_path / 'whole'}", tmp_path / "a")
    ranks.run(f"{flags} --bs 4 --epochs 1 --out {tmp_path / 'two'}", tmp_path / "b", 2)
    ranks.run(f"transformer_test.py --resume {tmp_path / 'two'} --epochs 2", tmp_path / "c", 2)
    alone, together = (ranks.metrics(tmp_path / name) for name in ("whole", "two"))
    names = [name for name in alone[0] if name.startswith(("val_", "test_", "train_"))]
    assert {"val_map", "val_auroc", "test_micro_f1"} <= {*names}
    one, two = (
        json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "two")
    )
    assert one["scores"] == pytest.approx(two["scores"], rel=1e-3)
    assert [each["row"] for each in one["worst"][:3]] == [each["row"] for each in two["worst"][:3]]
    for one, two in zip(alone, together, strict=True):
        assert [one[n] for n in names] == pytest.approx([two[n] for n in names], rel=1e-3)

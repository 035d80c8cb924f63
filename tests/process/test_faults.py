"""A few of the accidents of fault_injection.py, which has more than 200."""

from __future__ import annotations

import pytest

import fault_injection

CASES = [
    "kill: sgd 0",
    "disk: sgd, files of at most 5000 bytes",
    "disk: last.pt: flip 0",
    "numbers: --optimizer lamb --lr 1e30",
    "ranks: rank 1 has --clip 1",
]


@pytest.mark.process
@pytest.mark.parametrize("name", CASES)
def test_an_accident_ends_as_it_should(name, tmp_path):
    references = fault_injection.References(tmp_path / "references")
    cases = {
        f"{case.area}: {case.name}": case for case in fault_injection.all_cases(references, kills=1)
    }
    assert len(cases) > 190
    assert fault_injection.run_case(cases[name], tmp_path) == ""

"""The model of benchmarks/scaling.py: fitted networks, and predicted steps."""

from __future__ import annotations

import pytest

from benchmarks.scaling import Network, step_seconds

LINE = Network(latency=0.001, seconds_per_byte=1e-6)


def test_the_fit_recovers_latency_and_bandwidth() -> None:
    for ranks in (2, 4):
        taken = {size: LINE.all_reduce(size, ranks) for size in (4, 1 << 16, 1 << 22)}
        fitted = Network.fit(taken, ranks)
        assert fitted.latency == pytest.approx(LINE.latency)
        assert fitted.seconds_per_byte == pytest.approx(LINE.seconds_per_byte)


def test_the_backward_pass_hides_what_is_sent_during_it() -> None:
    cost = LINE.all_reduce(1000, 2)  # 3 ms
    assert step_seconds(0.1, [], LINE, 2) == 0.1
    assert step_seconds(0.1, [(0.02, 1000, True), (0.09, 1000, True)], LINE, 2) == pytest.approx(
        0.1 + cost
    )  # the first is hidden
    late = [(0.088, 1000, True), (0.09, 1000, True)]  # the second waits for the first
    assert step_seconds(0.1, late, LINE, 2) == pytest.approx(0.1 + 0.088 + 2 * cost - 0.09)

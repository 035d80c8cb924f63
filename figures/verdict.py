"""The verdict of a race: a table, a sentence, what they do not show, and a picture.

paired_difference([85.6, 85.4], [86.9, 86.5], row=0.01).verdict     # '', 'ahead of' or 'behind'
table([Contender("sgd", 0.1, trials, runs), Contender("ngd", 0.08, ...)])
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scipy import stats

from figures.draw import save
from figures.methods import COLOURS
from figures.panels import add_legend, create_panels, label_axes, plain_log_ticks
from figures.report import subject, write_report
from figures.run_logs import ReportedRun, Row, last, mean_and_deviation, measure, measured
from training.atomic_file import atomic_write_text
from training.epoch_report import training_seconds
from training.progress import device_hours

VERSIONS = ("commit", "torch", "processor")  # of a config.json, which the runs of a race share


@dataclass(frozen=True)
class Difference:
    """The mean of the differences between two arms, seed by seed, in points of accuracy."""

    mean: float  # above 0 where the second arm is better
    error: float  # standard error of the mean over seeds; 0 for one seed
    needed: float  # what the mean must exceed

    @property
    def verdict(self) -> str:
        """'ahead of' or 'behind' the first arm, or '' where the two cannot be told apart."""
        return "" if abs(self.mean) <= self.needed else "ahead of" if self.mean > 0 else "behind"

    def __str__(self) -> str:
        return f"{self.mean:+.2f}" + f" ± {self.error:.2f}" * math.isfinite(self.needed)


def paired_difference(first: Sequence[float], second: Sequence[float], row: float) -> Difference:
    """Compare two arms over the same seeds.

    Args:
        first: accuracy of each seed in percent.
        second: of the same seeds.
        row: the share of one test row in percent; a smaller error over seeds counts as that.
    """
    differences = [theirs - ours for ours, theirs in zip(first, second, strict=True)]
    mean, count = statistics.mean(differences), len(differences)
    if count == 1:
        return Difference(mean, 0.0, math.inf)
    error = max(statistics.stdev(differences), row) / math.sqrt(count)
    return Difference(mean, error, errors_needed(count) * error)


def errors_needed(seeds: int) -> float:
    """Return how many errors a difference must exceed: Student's t for 95 %, at least 2."""
    return max(2.0, float(stats.t.ppf(0.975, seeds - 1)))


@dataclass(frozen=True)
class Contender:
    """What an arm of a race has reached."""

    name: str  # of the arm
    trials: Mapping[float, Row]  # the last row of each trial by rate; {} where training diverged
    runs: Sequence[ReportedRun]  # at the best rate in full, one for each seed

    @property
    def differ_in(self) -> str:
        """What its runs differ in: 'seeds', or 'folds' on which they are measured."""
        return "folds" if self.runs[0].flags.get("fold") else "seeds"

    @property
    def rate(self) -> float:
        """The best learning rate of the search."""
        return best_rate(self.trials)

    @property
    def accuracies(self) -> list[float]:
        """What is measured of each run, in percent, on the test set or its fold."""
        return last([run.rows for run in self.runs], lambda row: round(100 * measured(row), 9))

    @property
    def measure(self) -> str:
        """What is measured, in words: the accuracy, or the mAP of several labels."""
        return "mAP" if measure(self.runs[0].rows[-1]) == "map" else "accuracy"

    @property
    def seconds(self) -> float:
        """Training time of a run, the mean of the seeds."""
        return statistics.mean(training_seconds(run.rows[-1]) for run in self.runs)

    @property
    def test_rows(self) -> int:
        """Rows of the test set; 0 where there are too many to keep their several labels."""
        confusion, result = self.runs[0].confusion, self.runs[0].result
        return int(confusion.counts.sum()) if confusion else result.get("rows", 0)

    def difference(self, first: Contender) -> Difference:
        """Return how far the arm is ahead of another one."""
        row = 100 / self.test_rows if self.test_rows else 0.0
        return paired_difference(first.accuracies, self.accuracies, row)


def best_rate(trials: Mapping[float, Row]) -> float:
    """Return the rate with the highest held-out measure; of equal ones, with the lowest loss."""

    def key(rate: float) -> tuple[float, float]:
        loss = trials[rate].get("val_loss")
        return measured(trials[rate]), -math.inf if loss is None else -loss

    return max(trials, key=key)


def winner(arms: Sequence[Contender]) -> Contender:
    """Return the best of the arms that are ahead of the first one, or else the first one."""
    ahead = [arm for arm in arms if arm.difference(arms[0]).verdict == "ahead of"]
    return max(ahead, key=lambda arm: statistics.mean(arm.accuracies), default=arms[0])


def table(arms: Sequence[Contender]) -> list[str]:
    """Return the lines of a table in Markdown, which a terminal shows aligned."""
    what = arms[0].measure
    what = f"{what} on folds" if arms[0].differ_in == "folds" else f"test {what}"
    titles = f"arm|rate|{what}|difference to {arms[0].name}|training time"
    rows = [[*titles.split("|"), "device-hours of a run", "with its search"]]
    for arm in arms:
        hours = statistics.mean(device_hours(run.rows) for run in arm.runs)
        searched = sum(device_hours([row]) for row in arm.trials.values() if row)
        difference = str(arm.difference(arms[0])) if arm is not arms[0] else ""
        values = [arm.name, f"{arm.rate:g}", f"{mean_and_deviation(arm.accuracies)} %", difference]
        rows.append([*values, f"{arm.seconds:.1f} s", f"{hours:.4f}", f"{hours + searched:.4f}"])
    widths = [max(map(len, column)) for column in zip(*rows)]
    rows.insert(1, ["-" * width for width in widths])
    return [f"| {' | '.join(map(str.ljust, row, widths))} |" for row in rows]


def sentence(arms: Sequence[Contender]) -> str:
    """Return the verdict in one sentence."""
    first = arms[0]
    if len(arms) == 1:
        return f"{first.name} alone has come to its end."
    if len(first.runs) == 1:
        return "With one seed nothing can be concluded: chance may have ordered the arms."
    clauses = []
    for arm in arms[1:]:
        difference, ratio = arm.difference(first), arm.seconds / first.seconds
        verb = f"is {difference.verdict}" if difference.verdict else "cannot be told apart from"
        clauses.append(
            f"{arm.name} {verb} {first.name} ({difference} points) at {ratio:.2f} times its "
            "training time"
        )
    return f"{'; '.join(clauses)}."


def limits(arms: Sequence[Contender]) -> list[str]:
    """Return what may not be concluded from accuracies and rates, a sentence each."""
    seeds, found = len(arms[0].runs), []
    differ_in = arms[0].differ_in
    if seeds > 1:
        least = " (an error below that of one test row counts as that)" if arms[0].test_rows else ""
        found.append(
            f"An arm is ahead or behind where the difference exceeds {errors_needed(seeds):.1f} of "
            f"its standard errors, Student's t for {seeds} {differ_in} and 95 %{least}."
        )
    if differ_in == "folds":
        found.append(
            "Folds share training rows, so that errors are too small, and the rates were searched "
            "on rows of the folds."
        )
    if seeds < 3:
        found.append("With fewer than 3 runs the error is hardly known: small gains stay hidden.")
    if len(arms) > 2:
        found.append(
            f"These are {len(arms) - 1} comparisons: in up to {5 * (len(arms) - 1)} % of such "
            "races chance alone puts an arm ahead or behind."
        )
    if arms[0].runs[0].confusion:
        runs = arms[0].runs if differ_in == "folds" else arms[0].runs[:1]
        counts = sum(run.confusion.counts.sum(1) for run in runs if run.confusion)  # of each class
        rows = int(counts.sum())

        def spread(share: float) -> float:
            return math.sqrt(share * (1 - share) / rows)

        by_chance = 100 * spread(statistics.mean(arms[0].accuracies) / 100)
        found.append(f"Another {rows} rows may change an accuracy by {by_chance:.1f} points.")
        largest = counts.max() / rows  # a share of the rows
        found += [
            f"{arm.name} has learned nothing: the largest class alone has {100 * largest:.1f} %."
            for arm in arms
            if statistics.mean(arm.accuracies) / 100 < largest + 2 * spread(largest)
        ]
    decays = {arm.name: arm.runs[0].flags.get("weight_decay") or 0.0 for arm in arms}
    if len({*decays.values()}) > 1:
        said = ", ".join(f"{name} {decay:g}" for name, decay in decays.items())
        found.append(f"Weight decay is not searched; the arms have {said}.")
    versions = defaultdict[str, set[str]](set)
    configs = [run.config for arm in arms for run in arm.runs]
    for each in (part for config in configs for part in (config, *config.get("segments", ()))):
        recorded = {name: each[name] for name in VERSIONS if each.get(name)}
        for name, version in {**recorded, **each.get("own_code", {})}.items():
            versions[name].add(version)
    found += [
        f"Runs are not of one {name}: {' and '.join(sorted(each))}; another --out begins anew."
        for name, each in versions.items()
        if len(each) > 1
    ]
    for arm in arms:
        if halved := sum(bool(run.rows[-1].get("rollbacks")) for run in arm.runs):
            found.append(f"{halved} runs of {arm.name} diverged and went on at a lower rate.")
        if arm.rate in (min(arm.trials), max(arm.trials)):
            edge = "lowest" if arm.rate == min(arm.trials) else "highest"
            found.append(
                f"{arm.name}'s best rate is the {edge} it tried: one beyond may be better."
            )
    return found


def write_verdict(arms: Sequence[Contender], out: Path, limits: Sequence[str]) -> str:
    """Write verdict.md, verdict.png and report.html, and return the text of the first."""
    first = arms[0].runs[0]
    names = ", ".join(arm.name for arm in arms)
    title = f"{names}: {subject(first)}, {first.rows[-1]['epoch']} epochs"
    lines = [f"# {title}", "", *table(arms), "", f"**{sentence(arms)}**", ""]
    text = "\n".join([*lines, *(f"- {limit}" for limit in limits)])
    atomic_write_text(out / "verdict.md", f"{text}\n")
    draw_race(arms, out / "verdict.png", title=title)
    write_report([run for arm in arms for run in arm.runs], out / "report.html")
    return text


def draw_race(arms: Sequence[Contender], path: Path, *, title: str) -> None:
    """Draw the search of each arm, and what its seeds reach in full over their training time."""
    figure, (searched, in_full) = create_panels(2, title)
    for arm, colour in zip(arms, itertools.cycle(COLOURS.values())):
        shown = {rate: 100 * measured(row) for rate, row in arm.trials.items() if row}
        rates = sorted(shown)
        searched.plot(rates, [shown[rate] for rate in rates], "o-", color=colour, label=arm.name)
        if arm.rate in shown:  # else no trial has come to its end
            searched.plot(arm.rate, shown[arm.rate], "*", color=colour, markersize=14)
        seconds = [training_seconds(run.rows[-1]) for run in arm.runs]
        in_full.plot(seconds, arm.accuracies, "o", color=colour, alpha=0.5)
        in_full.plot(arm.seconds, statistics.mean(arm.accuracies), "_", color=colour, markersize=20)
    searched.set_xscale("log")
    plain_log_ticks(searched.xaxis)
    what = f"{arms[0].measure} / %"
    label_axes(searched, "learning rate", f"held-out {what}", title="search; star: best rate")
    label_axes(in_full, "training time / s", what, title="in full; bar: mean")
    add_legend(figure, searched, title="a point for each trial and seed")
    save(figure, path)

"""A flag that changes nothing, because what it is a setting of is not chosen, is named."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

import pytest

import resnet50_test
import transformer_test
from cli import factory, options, unused_flags
from distributed.world import World

PARSERS = {"resnet50_test": resnet50_test.parser, "transformer_test": transformer_test.parser}
OTHERWISE = {  # a second value of each setting of a schedule
    "gamma": 0.5,
    "step_size": 2,
    "milestones": [2],
    "power": 2.0,
    "lr_end": 0.1,
    "peak": 3.0,
}


def warned(capsys: pytest.CaptureFixture[str], *flags: str, script: str = "resnet50_test") -> str:
    """What a command line with these flags prints on stderr."""
    capsys.readouterr()
    options.parse(PARSERS[script](), script, flags)
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--alpha 0.2", "--alpha has no effect without --mixup"),
        ("--alpha=0.2 --mixup mixup", ""),
        ("--small_size 16", "--small_size has no effect without --small_epochs"),
        ("--small_size 16 --small_epochs 2", ""),
        ("--ngd_rank 16", "--ngd_rank has no effect without --optimizer ngd or kaldi_ngd"),
        ("--ngd_rank 16 --ngd", ""),
        ("--meta_lr 0.1 --meta_every 4 --mixup mixup", "--meta_every, --meta_lr have no effect"),
        ("--demo_topk 8 --demo_chunk 32 --optimizer demo", ""),
        ("--recipe best --mixup none", ""),  # its alpha was not given here
        ("--recipe best --mixup none --alpha 1", "--alpha has no effect"),
        ("--lr 0.2 --no-nesterov --epochs 3", ""),
    ],
)
def test_a_setting_of_what_is_not_chosen_is_named(flags, message, capsys):
    printed = warned(capsys, *flags.split())
    assert (f"warning: {message}" in printed) if message else (printed == "")
    assert printed.count("\n") == bool(message)


def test_texts_and_aliases(capsys):
    printed = warned(capsys, "--mix-at", "tokens", script="transformer_test")
    assert printed == "warning: --mix_at has no effect without --mixup\n"


def test_other_ranks_are_silent(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert warned(capsys, "--alpha", "0.2") == ""


def flags_of(name: str, *flags: str) -> Namespace:
    args, _ = options.parse(PARSERS[name](), name, flags)
    return args


def named(args: Namespace, names: Sequence[str]) -> set[str]:
    """Which of these flags change nothing, by the table."""
    lines = [
        line
        for name in names
        for line in unused_flags.warnings(resnet50_test.parser(), {name}, args)
    ]
    return {name for name in names if any(f"--{name} " in line for line in lines)}


def test_the_table_agrees_with_the_settings_that_optimizers_get():
    """A mark in place of a flag's value is found again in an optimizer's settings, or is not."""
    names = [
        name
        for settings in unused_flags.SETTINGS
        if settings.chosen_by.startswith("--optimizer") and "sync" not in settings.chosen_by
        for name in settings.names
        if name not in ("ngd_skip", "node_groups")  # they choose groups of parameters, of ranks
    ]
    world = World()
    for optimizer in resnet50_test.parser().optimizers:
        args = flags_of("resnet50_test", "--optimizer", optimizer)
        unused = named(args, names)
        assert len(unused) < len(names)
        for name in names:
            mark = object()
            marked = Namespace(**{**vars(args), name: (mark,) if name == "betas" else mark})
            settings = factory.optimizer_settings(marked, world).get(optimizer, {})
            is_used = any(value is mark or value == (mark,) for value in settings.values())
            assert is_used == (name not in unused), f"--optimizer {optimizer} --{name}"


def test_the_table_agrees_with_the_schedules():
    choices = next(f for f in resnet50_test.parser().flags if f.name == "--lr_schedule").choices()
    for schedule in choices:
        args = flags_of("resnet50_test", "--epochs", "40", "--lr_schedule", schedule)
        unused = named(args, list(OTHERWISE))
        for name, value in OTHERWISE.items():
            other = Namespace(**{**vars(args), name: value})
            curves = [
                [factory.create_lr_schedule(each)(epoch) for epoch in range(40)]
                for each in (args, other)
            ]
            assert (curves[0] != curves[1]) == (name not in unused), f"{schedule} --{name}"


def test_every_name_of_the_table_is_a_flag():
    known = {*resnet50_test.parser().names(), *transformer_test.parser().names()}
    for settings in unused_flags.SETTINGS:
        assert known >= set(settings.names)

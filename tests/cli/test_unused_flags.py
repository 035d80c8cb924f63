"""A flag that changes nothing in a run is named in a warning."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Collection

import pytest

import resnet50_test
import transformer_test
from cli import factory, options, unused_flags
from conftest import each_of
from distributed.world import World

SCRIPTS = {"resnet50_test": resnet50_test, "transformer_test": transformer_test}
CASES = [  # a flag, what gives it an effect ('' is nothing), and what it is to say without
    ("--small_size 16", "--small_epochs 2", "without --small_epochs"),
    ("--small_stages 2", "--small_epochs 2", "without --small_epochs"),
    ("--alpha 0.2", "--mixup cutmix", "without --mixup"),
    ("--alpha=0.2 --mixup meta", "--meta_policy beta", "with --meta_policy pair"),
    ("--alpha 0.2 --mixup mixup --mixup_weight 0.5", "", "with --mixup_weight"),
    ("--meta_lr 0.1", "--meta_learning", "without --meta_learning"),
    ("--meta_every 3 --mixup mixup", "--mixup meta", "without --meta_learning"),
    ("--no-nesterov --optimizer lamb", "--optimizer sgd", "without --optimizer sgd, ngd, "),
    ("--betas 0.9 0.99", "--optimizer adamw", "without --optimizer adamw, ngd, muon, lamb or sl"),
    ("--ngd_rank 16", "--ngd", "without --optimizer ngd or kaldi_ngd"),
    ("--ngd_skip conv1", "--ngd", "without --optimizer ngd, kaldi_ngd or muon"),
    ("--step_size 3", "--lr_schedule cyclic", "without --lr_schedule step or cyclic"),
    ("--base_bs 64", "--lr_scaling sqrt", "on the rate without --lr_scaling"),
    ("--powersgd_rank 4", "--grad_compress powersgd", "without --grad_compress powersgd"),
    ("--local_steps 20", "--sync local", "without --optimizer slamb, --sync local or --sync dil"),
    ("--dense_steps 20", "--optimizer slamb", "without --optimizer slamb, --sync local or --sync"),
    ("--outer_lr 0.5", "--sync diloco", "without --sync diloco"),
    ("--wire_dtype fp16", "--optimizer demo", "without --optimizer slamb, --optimizer demo or"),
    ("--fragments 2 --sync local", "--sync diloco", "without --sync diloco"),
    ("--min_bs 16", "--dynamic_batch noise", "without --dynamic_batch"),
    ("--dynamic_lr sqrt", "--dynamic_batch loss", "without --dynamic_batch"),
    ("--batch_factor 4", "--dynamic_batch increase", "without --dynamic_batch"),
    ("--batch_factor 4 --dynamic_batch increase --batch_growth 2", "", "with --batch_growth or"),
    ("--loss_window 2", "--dynamic_batch loss", "without --dynamic_batch loss"),
    ("--loss_window 2 --dynamic_batch loss --loss_rule score", "", "with --loss_rule score"),
]
OTHERWISE = {  # a second value of each setting of a schedule
    "gamma": 0.5,
    "step_size": 2,
    "milestones": [2],
    "power": 2.0,
    "lr_end": 0.1,
    "peak": 3.0,
}


def flags_of(name: str, *flags: str) -> Namespace:
    args, _ = options.parse(SCRIPTS[name].parser(), name, flags)
    return args


def warned(*flags: str, script: str = "resnet50_test") -> list[str]:
    """The warnings for a command line."""
    parser = SCRIPTS[script].parser()
    names = parser.given(flags).keys()
    return unused_flags.warnings(names, flags_of(script, *flags), parser=parser)


@each_of(("flags", "remedy", "message"), CASES)
def test_a_flag_without_effect_is_named(flags, remedy, message):
    name = flags.split()[0].partition("=")[0].replace("--no-", "--")
    lines = warned(*flags.split())
    assert [line.startswith(f"{name} has no effect {message}") for line in lines].count(True) == 1
    if remedy:
        assert not any(name in line for line in warned(*flags.split(), *remedy.split()))


def test_several_flags_share_a_line():
    (line,) = warned("--meta_lr", "0.1", "--meta_every", "4", "--meta_policy", "beta")
    assert line.startswith("--meta_policy, --meta_every and --meta_lr have no effect")


def test_flags_of_several_processes(monkeypatch):
    flags = ["--grad_compress", "bf16", "--balance_workers"]
    (line,) = warned(*flags)
    assert line == "--grad_compress and --balance_workers have no effect in a single process"
    assert warned("--sync", "diloco") == []  # its outer step is taken by a single process too
    others = (["--sync", "lag"], ["--sync", "local"], ["--sync_bn"])
    assert all(len(warned(*other)) == 1 for other in others)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not any(warned(*each) for each in (flags, *others))


def test_flags_of_how_a_run_begins():
    parser = transformer_test.parser()
    args = flags_of("transformer_test")
    for given, message in (("resume", "with --resume"), ("weights", "with --weights")):
        chosen = Namespace(**{**vars(args), given: "runs/a"})
        lines = unused_flags.warnings(["vocab_size", "weights"], chosen, parser=parser)
        assert any("--vocab_size" in line and line.endswith(message) for line in lines)
    assert unused_flags.warnings(["vocab_size", "weights"], args, parser=parser) == []


def test_values_of_a_recipe_are_not_named():
    assert warned("--recipe", "best", "--mixup", "none") == []
    assert len(warned("--recipe", "best", "--mixup", "none", "--alpha", "1")) == 1


@pytest.mark.parametrize(("rank", "flags"), [("0", []), ("1", []), ("0", ["--evaluate"])])
def test_the_first_rank_prints_what_changes_nothing_in_training(rank, flags, capsys, monkeypatch):
    command = ["--mix-at", "tokens", *flags]
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(sys, "argv", ["transformer_test.py", *command])
    args = transformer_test.parser().parse_args(command)
    unused_flags.warn(transformer_test.parser(), args)
    line = "warning: --mix_at has no effect without --mixup\n"
    assert capsys.readouterr().err == ("" if rank == "1" or flags else line)


def test_a_switch_that_is_turned_off_needs_no_warning(capsys, monkeypatch):
    for switch, line in (
        ("--balance_workers", "warning: --balance_workers has no effect in a single process\n"),
        ("--no-balance_workers", ""),
        ("--no-larc", ""),
    ):
        monkeypatch.setattr(sys, "argv", ["resnet50_test.py", switch])
        args = resnet50_test.parser().parse_args([switch])
        unused_flags.warn(resnet50_test.parser(), args)
        assert capsys.readouterr().err == line


# -------------------------------------------------------------------- the table and the code


def named(names: Collection[str], args: Namespace) -> set[str]:
    """Which of these flags change nothing, by the table."""
    parser = resnet50_test.parser()
    return {name for name in names if unused_flags.warnings([name], args, parser=parser)}


def test_the_table_agrees_with_the_settings_that_optimizers_get():
    """A mark in place of a flag's value is found again in an optimizer's settings, or is not."""
    names = {
        name
        for condition in unused_flags.CONDITIONS
        if condition.otherwise.startswith("without --optimizer")
        and "sync" not in condition.otherwise
        for name in condition.names
    } - {"ngd_skip", "node_groups"}  # they choose groups of parameters, and of ranks
    for optimizer in resnet50_test.parser().optimizers:
        args = flags_of("resnet50_test", "--optimizer", optimizer)
        unused = named(names, args)
        for name in names:
            mark = object()
            marked = Namespace(**{**vars(args), name: (mark,) if name == "betas" else mark})
            settings = factory.optimizer_settings(marked, World()).get(optimizer, {})
            is_used = any(value is mark or value == (mark,) for value in settings.values())
            assert is_used == (name not in unused), f"--optimizer {optimizer} --{name}"


def test_the_table_agrees_with_the_schedules():
    choices = next(f for f in resnet50_test.parser().flags if f.name == "--lr_schedule").choices()
    for schedule in choices:
        args = flags_of("resnet50_test", "--epochs", "40", "--lr_schedule", schedule)
        unused = named(OTHERWISE, args)
        for name, value in OTHERWISE.items():
            other = Namespace(**{**vars(args), name: value})
            curves = [
                [factory.create_lr_schedule(each)(epoch) for epoch in range(40)]
                for each in (args, other)
            ]
            assert (curves[0] != curves[1]) == (name not in unused), f"{schedule} --{name}"


def test_every_flag_of_the_table_has_a_case():
    """A condition that is always or never fulfilled would fail in one of the tests above."""
    tested = {case[0].split()[0].partition("=")[0].removeprefix("--") for case in CASES}
    for condition in unused_flags.CONDITIONS:
        names = {name for name in condition.names if name not in OTHERWISE}
        is_by_code = condition.otherwise.startswith("without --optimizer")
        begins = condition.otherwise in ("with --resume", "with --weights", unused_flags.ALONE)
        assert not names or is_by_code or begins or names & tested, condition.names

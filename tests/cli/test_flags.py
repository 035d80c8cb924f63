"""Flags: their other spellings, recipes by name, --help, and the texts of all parsers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import conftest
import errors
import resnet50_test
import transformer_test
from backends import nvidia_apex, onnx_runtime
from benchmarks import bench
from cli import options
from cli.flag_parser import FlagParser
from cli.flags import Parser
from conftest import each_of
from errors import InputError
from figures import experiments, report
from tuning import sweep

SCRIPTS = {"resnet50_test": resnet50_test.parser, "transformer_test": transformer_test.parser}
PARSERS: dict[str, Callable[[], FlagParser]] = {
    **SCRIPTS,
    "sweep": lambda: sweep.sweep_parser("resnet50_test.py"),
    "experiments": experiments.experiments_parser,
    "report": report.report_parser,
}
ALIASES = [  # of timm and of Hugging Face's Trainer, and the same in our names
    ("--opt lamb", "--optimizer lamb"),
    ("--optim lamb", "--optimizer lamb"),
    ("--sched step", "--lr_schedule step"),
    ("--lr_scheduler_type constant", "--lr_schedule constant"),
    ("--warmup_epochs 3", "--warmup 3"),
    ("--clip_grad 1", "--clip 1"),
    ("--max_grad_norm 1", "--clip 1"),
    ("--grad_accum_steps 2", "--accumulate 2"),
    ("--gradient_accumulation_steps 2", "--accumulate 2"),
    ("--grad_checkpointing", "--checkpoint_activations"),
    ("--gradient_checkpointing", "--checkpoint_activations"),
    ("--model_ema_decay 0.99", "--ema 0.99"),
    ("--layer_lr_decay 0.8", "--layer_decay 0.8"),
    ("--output my-run", "--out my-run"),
    ("--output_dir my-run", "--out my-run"),
    ("--config fast94", "--recipe fast94"),
    ("-c fast94", "--recipe fast94"),
    ("--torch_compile", "--backend compile"),
    ("--torchcompile", "--backend compile"),
    ("--bf16", "--precision bf16"),
    ("--fp16", "--precision fp16"),
    ("--learning_rate 0.3", "--lr 0.3"),
    ("--per_device_train_batch_size 32", "--bs 32"),
    ("--num_train_epochs 3", "--epochs 3"),
    ("--wd 0.1", "--weight_decay 0.1"),
    ("--smoothing 0.1", "--label_smoothing 0.1"),
    ("--label_smoothing_factor 0.1", "--label_smoothing 0.1"),
    ("--dataloader_num_workers 4", "--workers 4"),
    ("--resume_from_checkpoint runs/a-b", "--resume runs/a-b"),
    ("--report_to trackio", "--track trackio"),
    ("--log_wandb", "--track wandb"),
    ("--tensorboard", "--track tensorboard"),
]
HYPHENS = [
    ("--batch-size 64", "--batch_size 64"),
    ("--label-smoothing=0.1", "--label_smoothing=0.1"),
    ("--no-nesterov", "--no-nesterov"),
    ("--no_nesterov", "--no-nesterov"),
    ("--no-sync-bn", "--no-sync_bn"),
    ("--meta-learning", "--meta_learning"),
    ("--grad-checkpointing", "--checkpoint_activations"),
    ("--output-dir=my-run", "--out=my-run"),
]


def parse(arguments: str, parser: Parser | None = None) -> dict[str, object]:
    return vars((parser or resnet50_test.parser()).parse_args(arguments.split()))


# -------------------------------------------------------------------- spellings


def test_other_spellings_mean_the_same() -> None:
    def check(spelling: str, own: str) -> None:
        for script in SCRIPTS:
            parsed = parse(spelling, SCRIPTS[script]())
            assert parsed == parse(own, SCRIPTS[script]()), script
            assert spelling.startswith("--no") or parsed != parse("", SCRIPTS[script]()), script

    conftest.for_each([*ALIASES, *HYPHENS], check)


def test_model_is_the_architecture() -> None:
    assert parse("--model resnet20") == parse("--arch resnet20")


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_alias_is_in_the_table_above(script: str) -> None:
    listed = {alias.split()[0] for alias, _ in ALIASES} | {"--model"}
    for flag in SCRIPTS[script]().flags:
        assert {*flag.aliases, *flag.value_aliases} <= listed, (
            f"add the aliases of {flag.name} to ALIASES of this test"
        )


def test_values_keep_their_hyphens() -> None:
    arguments = ["--out", "my-run", "--data-dir=--odd-folder", "--ngd-skip", "a-b", "batch-size"]
    parsed = resnet50_test.parser().parse_args([*arguments, "--predict", "cat-1.png"])
    assert parsed.out == "my-run"
    assert parsed.data_dir == "--odd-folder"
    assert parsed.ngd_skip == ["a-b", "batch-size"]
    assert parsed.predict == ["cat-1.png"]
    after = FlagParser()
    after.add_argument("--fast_mode", action="store_true")
    after.add_argument("files", nargs="*")
    assert after.parse_args(["--", "--fast-mode"]).files == ["--fast-mode"]


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        ("--lr 1 --learning-rate 2", "lr", 2.0),
        ("--learning-rate 2 --lr 1", "lr", 1.0),
        ("--backend eager --torch_compile", "backend", "compile"),
        ("--torch_compile --backend eager", "backend", "eager"),
    ],
)
def test_the_later_of_two_spellings_counts(arguments: str, name: str, value: object) -> None:
    assert parse(arguments)[name] == value


def test_an_alias_stands_for_one_flag() -> None:
    parser = FlagParser()
    parser.add_argument("--clip", aliases=("--max_norm",))
    with pytest.raises(ValueError, match="--max-norm would stand for two flags"):
        parser.add_argument("--norm", aliases=("--max-norm",))


@each_of("name", ["recipe", "checkpoint", "out", "data_dir", "resume", "ngd_skip"])
@each_of("empty", [["--{}", ""], ["--{}="], ["--{}", " "]])
def test_an_empty_value_is_refused(name: str, empty: list[str]) -> None:
    arguments = [word.format(name) for word in empty]
    with pytest.raises(InputError, match=f"^--{name}: the value is empty"):
        resnet50_test.parser().parse_args(arguments)


def test_an_empty_data_dir_of_the_environment_counts_as_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DATA_DIR", "")
    assert resnet50_test.parser().parse_args([]).data_dir == "./data"


def test_home_folders_are_expanded_in_every_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the command line, a recipe and the environment."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DATA_DIR", "~/d")
    parser = resnet50_test.parser()
    assert parser.parse_args([]).data_dir == f"{tmp_path}/d"
    for name in (
        *("data_dir", "out", "resume", "checkpoint", "recipe", "weights", "predict", "predict_out"),
        "export",
    ):
        given = getattr(parser.parse_args([f"--{name}=~/x y"]), name)
        assert given in (f"{tmp_path}/x y", [f"{tmp_path}/x y"]), name
    (tmp_path / "mine.yaml").write_text("out: ~/r\ndata_dir: ~/e\n")
    args, _ = options.parse(resnet50_test.parser(), "resnet50_test", ["--recipe=~/mine.yaml"])
    assert (args.out, args.data_dir) == (f"{tmp_path}/r", f"{tmp_path}/e")
    for module, words in (
        (sweep.sweep_parser("resnet50_test.py"), ["--out=~/x", "--recipe_out=~/x", "--space=~/x"]),
        (experiments.experiments_parser(), ["--logs=~/x", "--plan=~/x"]),
        (bench.parser(None), ["--json=~/x"]),
    ):
        values = vars(module.parse_args(words)).values()
        assert [str(v) for v in values if str(v).endswith("/x")] == [f"{tmp_path}/x"] * len(words)


# -------------------------------------------------------------------- recipes and checkpoints


def test_a_recipe_may_have_any_spelling(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "model: resnet20\nlearning-rate: 0.3\nno-nesterov: true\ntorch_compile: true\n"
        "grad_checkpointing: false\ntorchcompile: false\nmilestones: [3, 4]\n"
    )
    arguments = options.recipe_arguments(str(recipe), resnet50_test.parser())
    assert arguments == (
        "--arch resnet20 --lr 0.3 --no-nesterov --backend=compile --no-checkpoint_activations "
        "--milestones 3 4".split()
    )


def test_the_command_line_overrides_a_recipe_in_any_spelling(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("lr: 0.3\nbs: 32\n")
    given = f"--config {recipe} --learning-rate 0.1".split()
    args, _ = options.parse(resnet50_test.parser(), "resnet50_test", given)
    assert (args.lr, args.batch_size) == (0.1, 32)


@pytest.mark.parametrize(
    ("name", "switch"),
    [
        ("alternate_flip", "--no-alternate_flip"),
        ("freeze", "--no_freeze"),
        ("fuse", "--no-fuse"),
        ("grad-checkpointing", "--no-checkpoint_activations"),
        ("checkpoint_activations", "--no-grad-checkpointing"),
        ("noise_scale", "--no-noise-scale"),
        ("balance_workers", "--no-balance_workers"),
        ("replace_decay", "--no-replace_decay"),
    ],
)
def test_the_command_line_turns_off_what_a_recipe_turns_on(
    name: str, switch: str, tmp_path: Path
) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"{name}: true\n")
    parser = resnet50_test.parser()
    flag = parser.find(name)
    assert flag is not None
    arguments = options.recipe_arguments(str(recipe), parser)
    values = [
        vars(parser.parse_args(parser.translate(given)))[flag.action.dest]
        for given in (arguments, [*arguments, switch])
    ]
    assert values == [True, False]


def test_an_unknown_flag_of_a_recipe_is_refused_also_where_it_is_false(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("nestrov: false\n")
    with pytest.raises(InputError, match="did you mean --nesterov?"):
        options.recipe_arguments(str(recipe), resnet50_test.parser())


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("resident: no", "--resident no"),
        ("resident: yes", "--resident yes"),
        ("augment: no", "--augment none"),
        ("mixup: off", "--mixup none"),
        ("mixup: false", "--mixup none"),
        ("nesterov: no", "--no-nesterov"),
        ("no-nesterov: true", "--no-nesterov"),
        ("no-nesterov: false", "--nesterov"),
        ("fuse: no", "--no-fuse"),
        ("compress_warmup: []", "--compress_warmup"),
    ],
)
def test_yes_and_no_of_a_recipe_mean_what_they_say(
    text: str, arguments: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    parser = resnet50_test.parser()
    assert options.recipe_arguments(str(tmp_path / "mine.yaml"), parser) == arguments.split()


def test_recipes_are_found_by_name_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("fast94", "fast94.yaml", str(options.RECIPES / "fast94.yaml")):
        args, _ = options.parse(resnet50_test.parser(), "resnet50_test", ["--recipe", name])
        assert (args.lr_schedule, args.recipe) == ("polynomial", name)
    (tmp_path / "fast94").mkdir()  # a folder cannot be meant
    assert options.recipe_path("fast94") == options.RECIPES / "fast94.yaml"
    with pytest.raises(InputError, match=r"did you mean fast94 or fast94_vgg8\?"):
        options.recipe_path("recipes/fast94.yaml")


def test_a_file_wins_over_a_recipe_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "best").write_text("lr: 0.7\n")
    assert options.recipe_arguments("best", resnet50_test.parser()) == ["--lr", "0.7"]


def test_run_folders_and_resumed_runs_have_the_scripts_own_names(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    given = [*"--opt lamb --model resnet8 --num-train-epochs 1".split(), "--output_dir"]
    words = [*conftest.IMAGES.split(), *given, str(tmp_path / "run")]
    assert conftest.call(resnet50_test, words) == 0
    flags = json.loads((tmp_path / "run" / "config.json").read_text())["flags"]
    assert (flags["optimizer"], flags["arch"], flags["epochs"]) == ("lamb", "resnet8", 1)
    usual = json.loads((runs["images"] / "config.json").read_text())["flags"]
    assert flags.keys() == usual.keys()
    resumed = f"--resume {tmp_path / 'run'} --num-train-epochs 2".split()
    args, _ = options.parse(resnet50_test.parser(), "resnet50_test", resumed)
    assert (args.optimizer, args.arch, args.epochs) == ("lamb", "resnet8", 2)


# -------------------------------------------------------------------- --help


def print_help(script: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        SCRIPTS[script]().parse_args(arguments)
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_all_may_be_in_capitals(capsys: pytest.CaptureFixture[str]) -> None:
    texts = [print_help("resnet50_test", ["--help", word], capsys) for word in ("ALL", "all")]
    assert texts[0] == texts[1]


def shown_flags(text: str, parser: FlagParser) -> set[str]:
    lines = [line.split("  ")[1].strip() for line in text.splitlines() if line.startswith("  -")]
    return {flag.name for flag in parser.flags if flag.signature() in lines}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_is_short_and_says_how_to_see_the_rest(
    script: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text, parser = print_help(script, [option], capsys), SCRIPTS[script]()
    assert text.splitlines()[0].endswith(" [flags]")
    assert text.startswith("usage: ")
    assert (parser.description or "no docstring") in text, "the launch examples"
    shown = shown_flags(text, parser)
    assert shown == {flag.name for flag in parser.flags if flag.common}
    assert 25 <= len(shown) <= 40, "the short --help is for the flags that most runs need"
    assert {"--dataset", "--data_dir", "--epoch", "--lr", "--ngd", "--mixup", "--resume"} <= shown
    assert "--help all" in text.split("\n\n")[-1]


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_all_shows_every_flag_in_its_group_and_no_alias(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text, parser = print_help(script, ["--help", "all"], capsys), SCRIPTS[script]()
    assert shown_flags(text, parser) == {flag.name for flag in parser.flags} - {"--help"}
    for title in ("natural gradient:", "communication:"):
        assert f"\n{title}\n" in text
    words = text.partition("\n")[2].replace(",", " ").split()  # without the name of the program
    for flag in parser.flags:
        assert not {*flag.aliases, *flag.value_aliases} & set(words), flag.name
    assert (parser.description or "no docstring") in text


@pytest.mark.parametrize("name", PARSERS)
def test_help_fits_the_terminal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    parser = PARSERS[name]()
    text = parser.format_help(everything=True).replace(parser.description or "", "")
    assert max(map(len, text.splitlines())) <= 80
    for flag in parser.flags:
        if flag.group != "help":
            assert flag.signature() in text


def test_help_lists_only_choices_that_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(name: str) -> list[str]:
        parser = resnet50_test.parser()
        return next(flag for flag in parser.flags if flag.name == name).choices()

    for reason in ("apex is not installed", ""):
        monkeypatch.setattr(nvidia_apex, "unavailable_reason", lambda name, why=reason: why)
        monkeypatch.setattr(nvidia_apex, "amp_unavailable_reason", lambda why=reason: why)
        monkeypatch.setattr(onnx_runtime, "unavailable_reason", lambda why=reason: why)
        assert ("apex_lamb" in shown("--optimizer")) == (not reason)
        assert ("apex_O1" in shown("--precision")) == (not reason)
        assert ("ort" in shown("--backend")) == (not reason)
        assert "sgd" in shown("--optimizer")
        assert ("apex_lamb" in resnet50_test.parser().format_help()) == (not reason)


# -------------------------------------------------------------------- the texts

SENTENCE = (
    "Help is a sentence that a newcomer understands without reading the code: it begins with a "
    "capital, says what the flag does and in which unit, and ends with a full stop"
)


@pytest.mark.parametrize("name", PARSERS)
def test_every_flag_was_added_to_a_group_of_ours(name: str) -> None:
    parser = PARSERS[name]()
    assert [flag.action for flag in parser.flags] == parser._actions, (
        'add flags by parser.group("title")(...), not by parser.add_argument_group: '
        "--help, docs/flags.md and aliases know no others"
    )


# -------------------------------------------------------------------- suggestions


@pytest.mark.parametrize(
    ("word", "names", "expected"),
    [
        ("sdg", ["sgd", "adamw"], "; did you mean sgd?"),
        ("SGD", ["sgd", "adamw"], "; did you mean sgd?"),
        ("ResNet_18", ["resnet18", "resnet50"], "; did you mean resnet18?"),
        ("cos", ["cosine", "cosine_restart", "step"], "; did you mean cosine or cosine_restart?"),
        ("resnet51", ["resnet50", "resnet56"], "; did you mean resnet50?"),
        ("imagenet", ["cifar10", "mnist"], ""),
        ("--modle", ["--max_len", "--mlp_width"], ""),
        ("", ["sgd"], ""),
        ("x", [], ""),
    ],
)
def test_did_you_mean(word: str, names: list[str], expected: str) -> None:
    assert errors.did_you_mean(word, names) == expected

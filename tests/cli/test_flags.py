"""Flags: their other spellings, recipes by name, --help, and those without effect."""

import json
from pathlib import Path

import pytest

from cli import options
from cli.flag_parser import OFF
from cli.image_classification import create_augmentation
from conftest import SCRIPTS, each_of, for_each, parsed, parser
from errors import InputError
from figures.run_logs import ROOT

SPELLINGS = [  # some of those of timm and of Hugging Face's Trainer, and the same in our names
    ("-c fast94", "--recipe fast94"),
    ("--torch_compile", "--backend compile"),
    ("--no-noise-scale", "--no-noise_scale"),
    ("--grad-checkpointing", "--checkpoint_activations"),
    ("--output-dir=my-run", "--out=my-run"),
]


def parse(arguments: str, script: str = "images") -> dict[str, object]:
    return parser(script).given(arguments.split())


def test_other_spellings_mean_the_same():
    def check(spelling: str, own: str) -> None:
        for script in SCRIPTS:
            given = parse(spelling, script)
            assert given == parse(own, script), script
            assert given, script

    for_each(SPELLINGS, check)


def test_a_foreign_name_without_a_counterpart_says_what_there_is():
    answers = {"--amp": "it is --precision", "--min-lr": "it is --lr_args", "--hflip": "--help all"}
    for name, answer in answers.items():
        with pytest.raises(InputError, match=f"^{name}: there is no such flag; {answer}"):
            parse(f"{name} 1")
    assert parse("--save_total_limit 3") == {"keep": 3}


def test_values_keep_their_hyphens():
    given = parse("--out my-run --data-dir=--odd-folder --predict cat-1.png")
    assert given == {"out": "my-run", "data_dir": "--odd-folder", "predict": ["cat-1.png"]}


def test_home_folders_are_expanded_in_every_path(tmp_path, monkeypatch):
    """Of the command line, a recipe and the environment."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for given, expected in (("", "./data"), ("~/d", f"{tmp_path}/d")):
        monkeypatch.setenv("DATA_DIR", given)
        images = parser("images")
        assert images.defaults()["data_dir"] == expected
    for flag in ("out", "resume", "checkpoint", "weights"):
        assert images.given([f"--{flag}=~/x y"]) == {flag: f"{tmp_path}/x y"}
    assert images.given(["--predict", "~/x y"]) == {"predict": [f"{tmp_path}/x y"]}
    for text, value in (("2.0", 2), ("3", 3), ("1e-1", 0.1)):
        assert images.given(["--eval_every", text]) == {"eval_every": value}
    (tmp_path / "mine.yaml").write_text("out: ~/r\ndata_dir: ~/e\n")
    args = parsed("images", "--recipe=~/mine.yaml")
    assert (args.out, args.data_dir) == (f"{tmp_path}/r", f"{tmp_path}/e")


def test_yes_and_no_of_a_recipe_mean_what_they_say(tmp_path):
    recipe = tmp_path / "mine.yaml"
    for text, own in (
        ("model: resnet20\nlearning-rate: 0.3", "--arch resnet20 --lr 0.3"),
        ("torch_compile: yes\nmilestones: [3, 4]", "--backend compile --milestones 3 4"),
        ("grad_checkpointing: false", "--no-checkpoint_activations"),
        ("resident: no", "--resident no"),
        ("no-nesterov: true", "--no-nesterov"),
        ("compress_warmup: []", "--compress_warmup"),
        ("class_weights: {a: 3}", '--class_weights {"a":"3"}'),
    ):
        recipe.write_text(text)
        flags = options.recipe_arguments(str(recipe), parser("images"))
        assert parser("images").given(flags) == parse(own), text


def test_recipes_are_found_by_name_from_any_folder(here):
    for name in ("fast94", "fast94.yaml", str(options.RECIPES / "fast94.yaml")):
        args = parsed("images", "--recipe", name)
        assert (args.lr_schedule, args.recipe) == ("polynomial", name)
    (here / "fast94").mkdir()  # a folder cannot be meant
    assert options.recipe_path("fast94") == options.RECIPES / "fast94.yaml"
    (here / "best").write_text("lr: 0.7\n")  # a file wins over a recipe of that name
    assert options.recipe_arguments("best", parser("images")) == ["--lr", "0.7"]


@each_of("script", SCRIPTS)
@each_of("words", [["-h"], ["--help", "all"]])
def test_help_shows_the_common_flags_or_all(script, words, capsys):
    with pytest.raises(SystemExit, match="^0$"):
        parser(script).given(words)
    shown = capsys.readouterr().out
    for flag in parser(script).flags.values():
        assert (f"\n  {flag.name}" in shown) == (flag.common or len(words) > 1), flag.name


UNUSED = [  # a flag, what gives it an effect, and what it is to say without
    ("--nesterov --optimizer lamb", "--optimizer sgd", "--optimizer sgd, ngd, "),
    ("--local_steps 20", "--sync local", "--optimizer slamb or --sync local or diloco"),
]


def unused(*words: str) -> list[str]:
    """The warnings for a command line."""
    images = parser("images")
    return images.unused(images.given(words), vars(parsed("images", *words)))


@each_of(("flags", "remedy", "message"), UNUSED)
def test_a_flag_without_effect_is_named(flags, remedy, message):
    name, lines = flags.split()[0], unused(*flags.split())
    start = f"{name} has no effect here: it is for {message}"
    assert sum(line.startswith(start) for line in lines) == 1, lines
    assert not any(name in line for line in unused(*flags.split(), *remedy.split()))


@each_of("script", SCRIPTS)
def test_every_condition_names_flags_and_values_that_there_are(script):
    flags = parser(script).flags
    for flag in flags.values():
        for values in flag.only_with:
            for name, each in values.items():
                assert name == "processes" or name in flags, flag.name
                choices = getattr(flags[name].type, "names", []) if name in flags else []
                named = [value for value in each if value not in OFF]
                assert not choices or set(named) <= set(choices), flag.name


def test_flags_of_several_processes(monkeypatch):
    flags = ["--grad_compress", "bf16", "--balance_workers"]
    for line, name in zip(unused(*flags), flags[::2], strict=True):
        assert line == f"{name} has no effect here: it is for several processes"
    assert unused("--sync", "diloco") == []  # its outer step is taken by a single process too
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert unused(*flags) == []
    monkeypatch.setenv("WORLD_SIZE", "abc")
    assert unused(*flags) == [], "which is refused later"


def test_values_of_a_recipe_are_not_named_and_the_first_rank_speaks(here, capsys, monkeypatch):
    Path("mixed").write_text("mixup: mixup\nalpha: 0.2\n")
    assert unused("--recipe", "mixed", "--mixup", "none", "--no-nesterov") == []
    assert len(unused("--recipe", "mixed", "--mixup", "none", "--alpha", "1")) == 1
    assert unused("--optimizer", "adamw", "--no-nesterov") == []
    capsys.readouterr()
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        parsed("texts", "--mix-at tokens")
        line = "warning: --mix_at has no effect here: it is for --mixup\n"
        assert capsys.readouterr().err == (line if rank == "0" else "")


def test_a_checkpoint_from_before_a_flag_is_restored():
    for script, words in (("texts", "--arch hf:any"), ("images", "--weights DEFAULT")):
        flags = dict(vars(parsed(script, words)))
        for newer in ("lora", "label_separator"):
            del flags[newer]
        restored = options.restored_flags(flags, parser(script))
        assert restored["arch"] == flags["arch"]
        assert "lora" not in restored


def test_settings_reach_their_part_and_are_complete_in_the_run(tmp_path):
    words = "--ngd --opt-args rank=4 --opt_args adamw_ratio=1e-2 --ngd_rank 5"
    args = parsed("images", words)
    assert args.opt_args == {"rank": 5, "adamw_ratio": 0.01}
    (tmp_path / "a.yaml").write_text("ngd: true\nopt_args: {rank: 7}\nalternate_flip: true\n")
    args = parsed("images", f"--recipe {tmp_path}/a.yaml --opt_args adamw_ratio=0.5")
    assert args.opt_args == {"rank": 7, "adamw_ratio": 0.5}
    assert args.augment_args["alternate"] is True
    args = parsed("images", f"--recipe {tmp_path}/a.yaml --optimizer lars --augment trivial")
    assert args.augment_args["alternate"] is True, "policies have the same settings"
    assert args.opt_args.keys() == {"trust_coefficient", "clip"}, "other optimizer, other settings"


def test_a_bare_command_is_what_was_logged_and_its_smaller_images_fit_any_length():
    with open(ROOT / "figures/logs/resnet50_cifar10.jsonl", encoding="utf-8") as log:
        configs = [row for row in map(json.loads, log) if "flags" in row]
    [logged] = [row["flags"] for row in configs if row["run"] == "resnet50_fast94_12epochs-seed0"]
    bare = vars(parsed("images"))
    same = "epochs optimizer lr momentum weight_decay lr_schedule warmup label_smoothing".split()
    assert [bare[name] for name in same] == [logged[name] for name in same]

    def sizes(flags: str) -> list[int]:
        settings = parsed("images", flags)
        augmentation = create_augmentation(settings, 32)
        return [augmentation.size_of_epoch(epoch, 32) for epoch in range(settings.epochs)]

    seven = f"--small_epochs {logged['small_epochs']} --small_size {logged['small_size']}"
    seven += f" --small_stages {logged['small_stages']}"
    assert sizes("") == sizes(seven) == [16] * 4 + [24] * 3 + [32] * 5
    assert [sizes(f"--epochs {length}") for length in (1, 2, 4)] == [
        [32],
        [16, 32],
        [16, 24, 32, 32],
    ]
    assert sizes("--arch resnet20 --epochs 2") == [32, 32]
    margins = [bare["augment_args"][name] for name in ("fill", "alternate")]
    assert margins == [logged["crop_fill"], logged["alternate_flip"]]
    assert [parsed("images", flag).base_bs for flag in ("", "--optimizer sgd")] == [256, 128]
    create_augmentation(parsed("images", "--crop center"), 32)
    rates = [parsed("images", f"--image_size {size}").lr for size in (8, 32)]
    assert rates == [0.08, 0.12], "images of another size are other data"

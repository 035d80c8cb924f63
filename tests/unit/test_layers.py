"""The layers of the repository: imports never go up, and the rules that keep each package apart."""

import ast
import re
from pathlib import Path

from conftest import each_of, parser

ROOT = Path(__file__).resolve().parents[2]
LAYERS = (  # from the lowest; a module imports from its own layer and those below
    ("errors",),
    ("optimizers", "distributed", "models", "input_pipeline", "backends"),
    ("ngd", "slamb", "mixup", "dynamic_batch"),
    ("training",),
    ("cli",),
    ("resnet50_test", "transformer_test", "tuning", "figures", "benchmarks"),
)
LEVELS = {package: level for level, layer in enumerate(LAYERS) for package in layer}
TREES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text())
    for package in LEVELS
    for path in (ROOT / f"{package}.py", *sorted((ROOT / package).glob("*.py")))
    if path.exists()
}
NAME_FLAGS = set(  # modules that are still to give the reason alone
    """distributed.launch distributed.waiting distributed.world input_pipeline.augmentation
    input_pipeline.csv_tables input_pipeline.image_datasets input_pipeline.own_data
    input_pipeline.text_datasets input_pipeline.torchtext_tokenizer training.classifier
    training.epoch_report training.predictions""".split()
)


def level_of(module: str) -> int:
    return LEVELS[module.split(".")[0]]


def imported_modules(name: str) -> set[str]:
    imported = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert not node.level, f"{name}: relative import"
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            imported |= submodules & TREES.keys() or {node.module}
    return imported & TREES.keys()


def test_imports_never_go_up_a_layer():
    for name in TREES:
        for other in imported_modules(name):
            assert level_of(other) <= level_of(name), f"{name} imports {other}"


@each_of("name", LAYERS[2])
def test_a_method_imports_little_of_the_repository(name):
    """Who takes a method into their own loop takes this with it, and nothing of ours is run."""
    seen, open_names = set(), {name}
    while open_names:
        seen |= open_names
        open_names = set().union(*map(imported_modules, open_names)) - seen
    files = "adam base flat_buffer lamb low_rank matrix_functions param_groups shards".split()
    shared = {"backends.torch_compat", *(f"optimizers.{file}" for file in files)}
    of_ranks = {"distributed.averaging", "distributed.quantization"}
    allowed = {"ngd": shared, "slamb": shared | of_ranks}
    assert seen - {name} <= allowed.get(name, set())


def test_no_text_below_cli_names_a_flag():
    """Who takes a part of this project into their own program has typed none."""
    flags = {*parser("images").names(), *parser("texts").names()}
    for name in TREES.keys() - NAME_FLAGS:
        if not 1 <= level_of(name) < LEVELS["cli"]:
            continue
        for node in ast.walk(TREES[name]):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named = flags & {*re.findall(r"--\w+(?:-\w+)*", node.value)}
                assert not named, f"{name}, line {node.lineno}: {named}"

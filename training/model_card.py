"""The card beside an exported file: what the model is, what it reached, and what nobody checked.

write_model_card(Path("model.pt2"), checkpoint, card)      # model.pt2.md
"""

from pathlib import Path

from errors import writing
from training.atomic_file import atomic_write_text
from training.card import Card
from training.checkpoint import Checkpoint
from training.epoch_report import against, describe_progress, what_chose

PIXELS = ("size", "channels", "mean", "std", "interpolation")  # how images are prepared
USE = {
    ".pt2": 'logits = torch.export.load("FILE").module()(inputs)',
    ".onnx": 'logits, = onnxruntime.InferenceSession("FILE").run(None, {"input": inputs})',
    ".safetensors": 'model.load_state_dict(safetensors.torch.load_file("FILE"))',
}
LIMITS = """\
## Limits

- The accuracy is that on rows like those it was measured on; no other data was tried.
- Nobody has checked the training data for rights, privacy or bias.
"""
ONE_LABEL = "- An input that belongs to no class gets one all the same.\n"
OWN = "## From who publishes it"  # a section that stays when the card is written anew
TO_BE_ADDED = """

- what it may be used for, and what not:
- where the training data comes from, and its licence:
- licence of this model:
"""


def write_model_card(file: Path, checkpoint: Checkpoint, card: Card) -> None:
    """Write a card in Markdown beside an exported file, and print its name.

    Raises:
        InputError: the card cannot be written.
    """
    path = file.with_name(f"{file.name}.md")
    with writing(str(path), "file"):
        former = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        added = former.partition(OWN)[2] or (f"\n\n{former}" if former else TO_BE_ADDED)
        limits = LIMITS if card.is_multilabel else LIMITS + ONE_LABEL
        use = f"```python\n{USE[file.suffix].replace('FILE', file.name)}\n```\n"
        lines = [f"# {file.name}", "", *_table(checkpoint, card), "", use, limits, OWN + added]
        page = "\n".join(lines).encode("utf-8", "backslashreplace")  # a class may be b"caf\xe9"
        atomic_write_text(path, page.decode("utf-8"))
    print(f"{path}: a model card; its last section is yours to write")


def _table(checkpoint: Checkpoint, card: Card) -> list[str]:
    """The facts that the checkpoint holds, as a table in Markdown."""
    progress, flags, data = checkpoint.progress, checkpoint.flags, checkpoint.metadata
    source, made = checkpoint.file.name, data["segments"][-1]
    known = card.export_settings()["metadata"]
    reached = f"{describe_progress(progress)} ({source}"
    if source == "best.pt" and flags["epochs"] > 1:
        reached += f", {what_chose(progress['best']['chosen_by'])}"
    rows = ", ".join(f"{split['rows']:,} {name}" for name, split in checkpoint.splits.items())
    if fold := flags.get("fold"):
        rows += f", fold {fold} of train held out"
    elif flags["val_fraction"] and "val" not in checkpoint.splits:
        rows += f", of train {flags['val_fraction']:g} held out"
    if flags["subset"] < 1:
        rows += f", of train {flags['subset']:g} used"
    if noise := flags.get("label_noise"):
        rows += f", labels made wrong: {noise}"
    weights = f", from weights of {Path(flags['weights']).name}" if flags.get("weights") else ""
    is_folder = card.arch.startswith("hf:/")  # of this machine, which is nobody's business
    arch = f"hf:{Path(card.arch).name}" if is_folder else card.arch
    facts = {
        "network": f"{arch}{weights}",
        "classes": ", ".join(card.classes),
        "input": known["input"],
        "images": ", ".join(f"{name} {known[name]}" for name in PIXELS if name in known),
        "output": known.get("output", "logits; their softmax is the probability of each class"),
        "data": f"{flags['dataset']}, rows: {rows}",
        "reached": f"{reached})",
        "beside": against(data.get("baseline"), progress["rows"]),
        "training": f"{flags['optimizer']} at {flags['lr']:g}, seed {flags['seed']}, on "
        f"{made['device']}, {made['precision']}",
        "code": f"{data['script']}.py, commit {made['commit']}, torch {made['torch']}",
    }
    cells = {name: " ".join(fact.split()).replace("|", "&#124;") for name, fact in facts.items()}
    return [
        "| | |",
        "| --- | --- |",
        *(f"| {name} | {cell} |" for name, cell in cells.items() if cell),
    ]

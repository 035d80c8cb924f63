"""What only the text script builds from flags: its own flags, data, model, predictions, export."""

import inspect
import math
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mixup
from cli import options
from cli.data import Data, Run, reading, report_baseline, use_rows
from cli.factory import global_batch_size, report_predictions
from cli.flag_parser import OFF, ON, Choice, below_one, flag, number, own, setting
from cli.settings import Settings
from distributed.agreement import once_a_node
from distributed.world import READ_SECONDS
from errors import InputError, in_one_line, refused_as
from input_pipeline import text_datasets, tokenization
from input_pipeline.baseline import text_baseline
from input_pipeline.csv_tables import ColumnChoice
from input_pipeline.naive_bayes import naive_bayes_scores
from input_pipeline.text_batches import PAD, TextDataset
from models import own_parts
from models.hugging_face import HF, Encoder, is_hf
from models.pretrained import SavedModel
from models.transformer import Transformer
from training.card import TextCard
from training.checkpoint import Checkpoint
from training.predictions import Sample

OURS = {"arch": ("transformer",)}  # what some flags are for
NEW = {"resume": OFF, "weights": OFF, **OURS}
OF_CSV = [{"dataset": ("csv",)}]


def architecture(text: str) -> str:
    """An argparse type: a value of --arch."""
    if text == "transformer" or is_hf(text) or own_parts.is_own(text):
        return text
    raise ArgumentTypeError(f"{text!r} is not transformer; did you mean {HF}{text}?")


FEWEST_STEPS, FEWEST_EPOCHS, MOST_EPOCHS = 250, 3, 40  # of a pretrained encoder, by default


@dataclass(frozen=True, kw_only=True)
class TextSettings(Settings):
    """What transformer_test.py can be told."""

    datasets, mixing = ["agnews", "headlines", "csv"], mixup.TEXT_KINDS
    fewest_steps, usual_batch_size = 2, 64
    defaults = {"optimizer": "adamw", "lr_schedule": "onecycle", "epochs": 4, "base_bs": 64}
    pretrained = {"batch_size": 8, "epochs": 0, "lr_schedule": "polynomial", "head": "random"}
    pretrained_lr = {"adamw": 5e-5, "ngd": 1e-3}
    frozen = {"head": "probe"}
    model_flags = ("arch", "max_len", "model_args")

    # fmt: off
    arch: str = flag(architecture, "transformer", "network: transformer; or hf:NAME or "
        "hf:FOLDER, an encoder of Hugging Face with its tokenizer; or MODULE:FUNCTION, which makes "
        "your own", metavar="NAME", common=True, group="texts")
    tokenizer: str = flag(Choice(tokenization.TOKENIZERS), "wordpiece",
        "how texts are split into tokens, learned on the training set", only_with=[NEW])
    vocab_size: int = flag(number(int, 300), 30_000, "most tokens that are told apart", metavar="N",
        only_with=[NEW])
    max_len: int = flag(number(int, 4), 128, "longest text, in tokens; the rest is cut off",
        metavar="TOKENS", common=True)
    text_column: Sequence[str] = flag(str, [], "columns of the texts of csv (default found by "
        "name, else all others)", nargs="+", metavar="COLUMN", only_with=OF_CSV, common=True)
    model_args: dict[str, Any] = flag(setting, {}, "width, depth, heads and mlp_width, or settings "
        "of your own network", owner="arch",
        parts={"transformer": own(Transformer, "width", "depth", "heads", "mlp_width")},
        group="Transformer")
    dropout: float = flag(below_one, 0.3, "share of embeddings and outputs of blocks that is "
        "dropped", metavar="F", only_with=[OURS])
    token_dropout: float = flag(below_one, 0.6, "share of the tokens that is hidden", metavar="F",
        only_with=[OURS])
    mix_at: str = flag(Choice(["pooled", "tokens"]), "pooled", "what --mixup mixes: what the "
        "classifier sees, or the embeddings of tokens", only_with=[{"mixup": ON}])
    prior: str = flag(Choice(["naive_bayes", "none"]), "naive_bayes", "scores of the tokens, "
        "counted on the training set, that are added to the logits", only_with=[OURS])
    # fmt: on


def with_epochs(settings: TextSettings, run: Run, data: Data) -> TextSettings:
    """The settings, with --epochs by the training rows where a pretrained encoder has none yet.

    With fewer than `FEWEST_STEPS` a new classifier has not learned what the rows say: of 200 rows
    ten epochs reach 1.5 points more than five, of 32 rows 40 epochs reach 20 more.
    """
    if settings.epochs:
        return settings
    rows = len(data.train)
    epochs = math.ceil(FEWEST_STEPS * global_batch_size(settings, run.world) / rows)
    epochs = min(max(epochs, FEWEST_EPOCHS), MOST_EPOCHS)
    if run.world.is_main:
        print(f"{epochs} epochs, as there are {rows} training samples (--epochs)", flush=True)
    warmup = options.usual_warmup(epochs) if settings.warmup is None else settings.warmup
    return replace(settings, epochs=epochs, warmup=warmup)


def load_data(settings: TextSettings, run: Run, saved: SavedModel | None = None) -> Data:
    """Training, validation and test texts, tokenized as those of the checkpoint were.

    Args:
        saved: as of `fine_tuning.read_saved_model`; its tokenizer is taken for a new run, without
            it one is trained on the training split.
    Raises:
        InputError: the data set is missing or broken.
    """
    splits, classes = once_a_node(
        run.world,
        lambda: text_datasets.read_text_splits(
            settings.dataset,
            settings.data_dir,
            choice=ColumnChoice(
                settings.label_column,
                tuple(settings.text_column),
                settings.label_separator,
                settings.group_column,
            ),
            trained=trained_columns(run.checkpoint),
            **reading(settings, run),
        ),
    )
    chosen, fingerprint = use_rows(settings, run, splits, classes)
    baseline = report_baseline(settings, run, chosen, text_baseline)
    encoder: Mapping[str, Any] = {}
    if run.checkpoint:
        tokenizer = tokenization.load_tokenizer(run.checkpoint.metadata["tokenizer"])
        encoder = run.checkpoint.metadata["encoder"]
    elif saved is not None:
        encoder = saved.encoder
        problem, advice = "holds no tokenizer", "; give a run of transformer_test.py"
        with in_one_line(f"--weights {settings.weights}: {problem}", advice):
            tokenizer = tokenization.load_tokenizer(saved.tokenizer)
    else:
        trained = ""
        if run.world.is_main:
            trained = tokenization.train_tokenizer(
                chosen["train"].texts, settings.tokenizer, vocab_size=settings.vocab_size
            ).to_str()
        with run.world.waiting_at_most(READ_SECONDS):
            tokenizer = tokenization.load_tokenizer(run.world.broadcast(trained))
    pad = encoder.get("pad", PAD)
    encode = partial(TextDataset, tokenizer=tokenizer, max_len=settings.max_len, pad=pad)
    sets = once_a_node(run.world, lambda: {name: encode(part) for name, part in chosen.items()})
    sets = {name: data.to(run.world.device) for name, data in sets.items()}
    prior = None
    is_ours = not encoder and not own_parts.is_own(settings.arch)
    if settings.prior == "naive_bayes" and is_ours:
        size = tokenizer.get_vocab_size()
        prior = naive_bayes_scores(
            sets["train"], size, classes=len(classes), without=sets.get("held_out")
        )
        if prior is None and run.checkpoint:
            prior = run.checkpoint.metadata["prior"]
        elif prior is None and run.world.is_main:
            print(f"no naive Bayes prior: {len(classes)} classes are too many for its table")
    metadata: dict[str, Any] = {"classes": classes, "data": fingerprint, "baseline": baseline}
    metadata |= {"tokenizer": tokenizer.to_str(), "max_len": settings.max_len, "pad": pad}
    columns = splits["train"].columns
    metadata |= {"columns": columns.texts, "label_column": columns.label}
    metadata |= {"encoder": encoder, "prior": prior}
    train, held_out = sets.pop("train"), sets.pop("held_out", None)
    shown = {name: chosen[name].show for name in sets}
    labels = train.labels.cpu()
    return Data(train, sets, metadata, labels, held_out, model_mixes=True, shown=shown)


def trained_columns(checkpoint: Checkpoint | None) -> ColumnChoice:
    """The names of a checkpoint's columns, but for those that flags choose now."""
    if not checkpoint or "text_column" in checkpoint.given:
        return ColumnChoice()
    metadata = checkpoint.metadata
    label = None if "label_column" in checkpoint.given else metadata["label_column"]
    return ColumnChoice(label, tuple(metadata["columns"]))


def create_model(settings: TextSettings, run: Run, data: Data) -> nn.Module:
    """The Transformer, or the encoder of --arch hf:NAME with random weights, on its device.

    Raises:
        InputError: --model_args do not go together, or the encoder does not fit the flags.
    """
    card = TextCard.read({**data.metadata, "flags": vars(settings)})
    dropout = {"dropout": settings.dropout, "token_dropout": settings.token_dropout}
    is_ours = not card.encoder and not own_parts.is_own(settings.arch)
    with refused_as("--model_args" if is_ours else f"--arch {settings.arch}"):
        model = card.create_model(mix_at=settings.mix_at, **dropout)
    mixes = "partner" in inspect.signature(model.forward).parameters
    if settings.mixup != "none" and not mixes:
        reason = "its forward takes no partner and weight, as that of Transformer does"
        raise InputError(
            f"--mixup {settings.mixup}: --arch {settings.arch} cannot mix, as {reason}"
        )
    if isinstance(model, Encoder):
        texts = card.prepare(["a " * settings.max_len, "a"], torch.device("cpu"))
        with refused_as(f"--max_len {texts.shape[1]}"):
            model.check(texts, mixed=False)
        with refused_as(f"--mix_at {settings.mix_at}"):
            model.check(texts, mixed=True)
    return model.to(run.world.device)


def predict(settings: TextSettings, run: Run, paths: Sequence[str]) -> None:
    """--predict: classify each line or row of files, and of the .txt files below folders."""
    lines: list[Sample] = []
    notes: list[str] = []
    trained = trained_columns(run.checkpoint)
    choice = ColumnChoice(texts=tuple(settings.text_column), separator=settings.label_separator)
    for path in paths:
        lines_of_files, notes_of_path = text_datasets.read_text_files(
            Path(path), choice, trained=trained
        )
        notes += notes_of_path
        for file, texts_of_file in lines_of_files.items():
            lines += [Sample(f"{file}:{number}", line) for number, line in texts_of_file.items()]
    texts = [line.text or "" for line in lines]
    report_predictions(settings, run, texts, lines, notes=notes)

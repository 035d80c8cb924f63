"""What only the text script builds from flags: its own flags, data, model, predictions, export."""

from argparse import ArgumentTypeError, Namespace
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cli.factory import Data, Run, choose_rows, report_baseline, report_predictions
from cli.flag_parser import OFF, ON, Choice, ScriptParser, below_one, number, own, setting
from distributed.agreement import once_a_node
from distributed.world import READ_SECONDS
from errors import InputError, refused_as
from input_pipeline import own_data, text_datasets, tokenization
from input_pipeline.baseline import text_baseline
from input_pipeline.csv_tables import ColumnChoice
from input_pipeline.naive_bayes import naive_bayes_scores
from input_pipeline.text_batches import PAD, TextDataset
from models import pretrained
from models.hugging_face import HF, Encoder
from models.pretrained import SavedModel
from models.transformer import Transformer
from training.card import TextCard
from training.checkpoint import Checkpoint
from training.predictions import Sample


# fmt: off
def add_flags(parser: ScriptParser) -> None:
    """Declare the flags of texts and of the Transformer."""
    parser.pretrained = {
        "batch_size": 8, "epochs": 5, "lr_schedule": "polynomial", "head": "random"
    }
    parser.frozen = {"head": "probe"}
    parser.pretrained_lr = {"adamw": 5e-5, "ngd": 1e-3}
    add = parser.group("texts")
    ours = {"arch": ("transformer",)}
    new, of_csv = {"resume": OFF, "weights": OFF, **ours}, [{"dataset": ("csv",)}]
    add("--arch", arch, "transformer", "network: transformer; or hf:NAME or hf:FOLDER, an encoder "
        "of Hugging Face with its tokenizer, whose default --lr is 2e-5 with adamw, 0.001 with "
        "ngd, and a tenth of the usual one with others", metavar="NAME", common=True)
    add("--tokenizer", Choice(tokenization.TOKENIZERS), "wordpiece",
        "how texts are split into tokens, learned on the training set", only_with=[new])
    add("--vocab_size", number(int, 300), 30_000, "most tokens that are told apart", metavar="N",
        only_with=[new])
    add("--max_len", number(int, 4), 128, "longest text, in tokens; the rest is cut off",
        metavar="TOKENS", common=True)
    add("--label_column", str, None, "column of the labels of csv, by name or number from 1 on "
        "(default found by name, else the first)", metavar="COLUMN", only_with=of_csv, common=True)
    add("--text_column", str, [], "columns of the texts of csv (default found by name, else all "
        "others)", nargs="+", metavar="COLUMN", only_with=of_csv, common=True)

    add = parser.group("Transformer")
    add("--model_args", setting, {}, "width, depth, heads and mlp_width",
        parts={"": own(Transformer, "width", "depth", "heads", "mlp_width")}, only_with=[ours])
    add("--dropout", below_one, 0.3, "share of embeddings and outputs of blocks that is dropped",
        metavar="F", only_with=[ours])
    add("--token_dropout", below_one, 0.5, "share of the tokens that is hidden", metavar="F",
        only_with=[ours])
    add("--mix_at", Choice(["pooled", "tokens"]), "pooled", "what --mixup mixes: what the "
        "classifier sees, or the embeddings of tokens", only_with=[{"mixup": ON}])
    add("--prior", Choice(["naive_bayes", "none"]), "naive_bayes", "scores of the tokens, counted "
        "on the training set, that are added to the logits", only_with=[ours])
# fmt: on


def arch(text: str) -> str:
    """An argparse type: a value of --arch."""
    if text == "transformer" or text.startswith(HF):
        return text
    raise ArgumentTypeError(f"{text!r} is not transformer; did you mean {HF}{text}?")


def load_data(args: Namespace, run: Run, saved: SavedModel | None = None) -> Data:
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
            args.dataset,
            args.data_dir,
            choice=ColumnChoice(args.label_column, tuple(args.text_column)),
            classes=run.checkpoint.classes if run.checkpoint else (),
            trained=trained_columns(run.checkpoint),
            enough=["test", "val"] * args.evaluate + ["train"] * bool(args.val_fraction),
        ),
    )
    chosen, fingerprint = choose_rows(args, run, splits, classes)
    baseline = report_baseline(args, run, chosen, text_baseline)
    encoder: Mapping[str, Any] = {}
    if run.checkpoint:
        tokenizer = tokenization.load_tokenizer(run.checkpoint.metadata["tokenizer"])
        encoder = run.checkpoint.metadata["encoder"]
    elif saved is not None:
        encoder = saved.encoder
        try:
            tokenizer = tokenization.load_tokenizer(saved.tokenizer)
        except Exception:  # the library raises nothing more special
            reason = "holds no tokenizer; give a run of transformer_test.py"
            raise InputError(f"--weights {args.weights}: {reason}") from None
    else:
        trained = ""
        if run.world.is_main:
            trained = tokenization.train_tokenizer(
                chosen["train"].texts, args.tokenizer, vocab_size=args.vocab_size
            ).to_str()
        with run.world.waiting_at_most(READ_SECONDS):
            tokenizer = tokenization.load_tokenizer(run.world.broadcast(trained))
    pad = encoder.get("pad", PAD)
    encode = partial(TextDataset, tokenizer=tokenizer, max_len=args.max_len, pad=pad)
    sets = once_a_node(run.world, lambda: {name: encode(part) for name, part in chosen.items()})
    sets = {name: data.to(run.world.device) for name, data in sets.items()}
    prior = None
    if args.prior == "naive_bayes" and not encoder:
        size = tokenizer.get_vocab_size()
        prior = naive_bayes_scores(
            sets["train"], size, classes=len(classes), without=sets.get("held_out")
        )
        if prior is None and run.checkpoint:
            prior = run.checkpoint.metadata["prior"]
        elif prior is None and run.world.is_main:
            print(f"no naive Bayes prior: {len(classes)} classes are too many for its table")
    metadata: dict[str, Any] = {"classes": classes, "data": fingerprint, "baseline": baseline}
    metadata |= {"tokenizer": tokenizer.to_str(), "max_len": args.max_len, "pad": pad}
    columns = splits["train"].columns
    metadata |= {"columns": columns.texts, "label_column": columns.label}
    metadata |= {"encoder": encoder, "prior": prior}
    train, held_out = sets.pop("train"), sets.pop("held_out", None)
    return Data(train, sets, metadata, train.labels.cpu(), held_out, model_mixes=True)


def trained_columns(checkpoint: Checkpoint | None) -> ColumnChoice:
    """The names of a checkpoint's columns, but for those that flags have changed."""
    if not checkpoint or "--text_column" in checkpoint.changed:
        return ColumnChoice()
    metadata = checkpoint.metadata
    label = None if "--label_column" in checkpoint.changed else metadata["label_column"]
    return ColumnChoice(label, tuple(metadata["columns"]))


def create_model(args: Namespace, run: Run, metadata: Mapping[str, Any]) -> nn.Module:
    """The Transformer, or the encoder of --arch hf:NAME with random weights, on its device.

    Raises:
        InputError: --model_args do not go together, or the encoder does not fit the flags.
    """
    card = TextCard.read({**metadata, "flags": vars(args)})
    dropout = {"dropout": args.dropout, "token_dropout": args.token_dropout}
    with refused_as("--model_args"):
        model = card.create_model(mix_at=args.mix_at, **dropout)
    if isinstance(model, Encoder):
        model.check(card.prepare(["a " * metadata["max_len"], "a"], torch.device("cpu")))
    if args.freeze and isinstance(model, Encoder):
        model.model.base_model.requires_grad_(False)
        pretrained.hold_frozen(model)
    elif args.freeze:
        pretrained.freeze_all_but_classifier(model)
    return model.to(run.world.device)


def predict(args: Namespace, run: Run) -> None:
    """Classify every line or row of the files of --predict, and of .txt files below its folders."""
    lines: list[Sample] = []
    notes: list[str] = []
    trained = trained_columns(run.checkpoint)
    for path in args.predict:
        lines_of_files, notes_of_path = text_datasets.read_text_files(
            Path(path), args.text_column, trained=trained
        )
        notes += notes_of_path
        for file, texts_of_file in lines_of_files.items():
            name = own_data.utf8_name(file)
            lines += [Sample(f"{name}:{number}", line) for number, line in texts_of_file.items()]
    texts = [line.text or "" for line in lines]
    report_predictions(args, run, texts, lines, notes=notes)

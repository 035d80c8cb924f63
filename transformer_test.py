"""Text classification: a Transformer encoder on AG News, the embedded headlines, or your own csv.

python transformer_test.py                                       # AG News, 50 epochs
python transformer_test.py --dataset headlines --epochs 10       # embedded data, seconds on a CPU
python transformer_test.py --dataset csv --data_dir my_texts     # train.csv and test.csv: label, text...
bash run_distributed.sh transformer_test.py --bs 256             # all GPUs of this node
python transformer_test.py --resume runs/my-run --predict lines.txt      # or --evaluate, --export model.pt2
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

import errors
import mixup
from cli import factory, flags, options
from distributed.world import init_world
from input_pipeline import naive_bayes, text_batches, text_datasets, tokenization
from models.transformer import Transformer
from training import evaluation
from training import export as exporting

SCRIPT = "transformer_test"


def parser() -> flags.Parser:
    """The shared flags and those of texts."""
    parser = flags.shared_parser(
        __doc__,
        datasets=["agnews", "headlines", "csv"],
        rates=flags.RATES | {"adamw": (1e-4, 0.05)},
        mixes=mixup.TEXT_KINDS,
        optimizer="adamw",
        lr_schedule="onecycle",
    )
    group = parser.add_argument_group("texts and model")
    add = group.add_argument
    add(
        "--tokenizer",
        choices=tokenization.TOKENIZERS,
        default="wordpiece",
        help="learnt from the training split (default %(default)s)",
    )
    add(
        "--vocab_size",
        type=flags.number(int, 300),
        default=30_000,
        help="tokens at most (default %(default)s)",
    )
    add(
        "--max_len",
        type=flags.number(int, 4),
        default=128,
        metavar="TOKENS",
        help="longest text (default %(default)s)",
    )
    add("--width", type=flags.count, default=128, help="of the encoder (default %(default)s)")
    add("--depth", type=flags.count, default=2, help="encoder blocks (default %(default)s)")
    add(
        "--heads",
        type=flags.count,
        default=4,
        help="attention heads; divides --width (default %(default)s)",
    )
    add(
        "--mlp_width",
        type=flags.count,
        default=512,
        help="of the feed-forward layers (default %(default)s)",
    )
    add(
        "--dropout",
        type=flags.below_one,
        default=0.3,
        help="on embeddings and residual branches (default %(default)s)",
    )
    add(
        "--token_dropout",
        type=flags.below_one,
        default=0.5,
        help="share of tokens hidden in training (default %(default)s)",
    )
    add(
        "--positions",
        choices=("learned", "sinusoidal"),
        default="learned",
        help="position embedding (default %(default)s)",
    )
    add(
        "--pooling",
        choices=("mean", "cls"),
        default="mean",
        help="of the last layer (default %(default)s)",
    )
    add(
        "--mix_at",
        choices=("pooled", "tokens"),
        default="pooled",
        help="of --mixup: what of a text is mixed (default pooled)",
    )
    add(
        "--prior",
        choices=("none", "naive_bayes"),
        default="none",
        help="token scores added to the logits (default none)",
    )
    return parser


def create_model(
    args: argparse.Namespace, metadata: dict[str, Any], run: factory.Run
) -> torch.nn.Module:
    """The model on its device."""
    if args.width % args.heads or args.width % 2:
        raise errors.InputError(
            f"--width {args.width}: must be even and divisible by --heads {args.heads}"
        )
    model = Transformer(
        tokenization.load_tokenizer(metadata["tokenizer"]).get_vocab_size(),
        len(metadata["classes"]),
        width=args.width,
        depth=args.depth,
        heads=args.heads,
        mlp_width=args.mlp_width,
        max_len=metadata["max_len"],
        dropout=args.dropout,
        token_dropout=args.token_dropout,
        positions=args.positions,
        pooling=args.pooling,
        prior=metadata["prior"],
        mix_at=args.mix_at,
    )
    return model.to(run.world.device)


def build_sets(
    args: argparse.Namespace, run: factory.Run, state: dict[str, Any] | None
) -> tuple[dict[str, text_batches.TextDataset], dict[str, Any]]:
    """Data sets by name ('train', 'val', 'test') and the header: classes and tokenizer."""
    with run.world.local_main_first():
        splits, classes = text_datasets.read_text_splits(args.dataset, args.data_dir)
    whole = splits.pop("train")
    for name, rows in factory.split_rows(torch.tensor(whole.labels), args).items():
        splits[name] = whole.take(rows.tolist())
    if state:
        tokenizer = tokenization.load_tokenizer(state["tokenizer"])
    else:
        learnt = (
            tokenization.train_tokenizer(
                splits["train"].texts, args.tokenizer, args.vocab_size
            ).to_str()
            if run.world.is_main
            else ""
        )
        tokenizer = tokenization.load_tokenizer(run.world.broadcast(learnt))
    sets = {
        name: text_batches.TextDataset(split, tokenizer, args.max_len, run.world.device)
        for name, split in splits.items()
    }
    prior = (
        naive_bayes.naive_bayes(sets["train"], tokenizer.get_vocab_size(), len(classes))
        if args.prior == "naive_bayes"
        else None
    )
    return sets, {
        "classes": classes,
        "tokenizer": tokenizer.to_str(),
        "max_len": args.max_len,
        "prior": prior,
    }


def predict(args: argparse.Namespace, run: factory.Run, state: dict[str, Any]) -> None:
    """Classify every line of the text files of --predict."""
    lines = [line for file in args.predict for line in text_datasets.read_lines(Path(file))]
    tokens = text_batches.encode_texts(
        lines, tokenization.load_tokenizer(state["tokenizer"]), state["max_len"]
    ).to(run.world.device)
    names = [line if len(line) <= 60 else line[:57] + "..." for line in lines]
    model = factory.load_weights(create_model(args, state, run), state)
    evaluation.print_predictions(model, tokens, names, state["classes"], args.batch_size)


def export(args: argparse.Namespace, run: factory.Run, state: dict[str, Any]) -> None:
    """Write the model of --export."""
    tokenizer = tokenization.load_tokenizer(state["tokenizer"])
    example = text_batches.encode_texts(
        ["Stocks rise after the bank's report", "Home team wins"], tokenizer, state["max_len"]
    )
    model = factory.load_weights(create_model(args, state, run), state)
    dynamic = {0: ("batch", exporting.LARGEST_BATCH), 1: ("length", state["max_len"])}
    difference = exporting.export(model, example, Path(args.export), dynamic)
    print(f"{args.export}: same probabilities as the model, to {difference:.1g}")


def main() -> None:
    args, state = options.parse(parser(), SCRIPT)
    with init_world(args.device) as world:
        run = factory.create_run(args, SCRIPT, world)
        if state and args.predict:
            return predict(args, run, state)
        if state and args.export:
            return export(args, run, state)
        sets, metadata = build_sets(args, run, state)
        if state and args.evaluate:
            model = factory.load_weights(create_model(args, metadata, run), state)
            return factory.evaluate_checkpoint(args, run, model, sets["test"], metadata["classes"])
        model = create_model(args, metadata, run)
        trainer = factory.trainer(
            args, run, model, sets.pop("train"), sets, metadata, model_mixes=True
        )
        if world.is_main:
            (run.folder / "tokenizer.json").write_text(metadata["tokenizer"])
        factory.report(run, trainer.fit(state), validated="val" in sets)


if __name__ == "__main__":
    sys.exit(errors.exit_code(main))

"""TODO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from input_pipeline import torchtext_tokenizer

SPECIALS = ["[PAD]", "[UNK]", "[CLS]"]  # ids 0, 1, 2


TOKENIZERS = ("wordpiece", "bpe", "torchtext")


AnyTokenizer = Tokenizer | torchtext_tokenizer.TorchtextTokenizer


def load_tokenizer(text: str) -> AnyTokenizer:
    """Undo to a tokenizer's `to_str`."""
    return (
        torchtext_tokenizer.TorchtextTokenizer.from_str(text)
        if text.startswith('{"torchtext"')
        else Tokenizer.from_str(text)
    )


def train_tokenizer(texts: Sequence[str], kind: str, vocab_size: int) -> AnyTokenizer:
    """A 'wordpiece' (arXiv:1609.08144), byte-level 'bpe' (arXiv:1508.07909) or 'torchtext' tokenizer, learnt from `texts` alone.

    Every encoding starts with [CLS]. Lower-cased, accents stripped. The same texts give the same tokenizer.
    """
    if kind == "torchtext":
        return torchtext_tokenizer.learn(texts, vocab_size, SPECIALS)
    normalizer = normalizers.Sequence(
        [normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()]
    )
    options: dict[str, Any] = {
        "vocab_size": vocab_size,
        "special_tokens": SPECIALS,
        "show_progress": False,
    }
    if kind == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        # The trainer numbers ##x in the order of a hash table, and numbers break ties: give each its number beforehand.
        letters = sorted(
            {
                letter
                for text in texts
                for letter in normalizer.normalize_str(text)
                if not letter.isspace()
            }
        )
        options["special_tokens"] = [*SPECIALS, *letters, *(f"##{letter}" for letter in letters)]
        trainer: trainers.Trainer = trainers.WordPieceTrainer(**options)
    else:
        tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            **options, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        )
    tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator(texts, trainer)
    if kind == "wordpiece":  # without the trainer's notion that letters are special
        learnt = Tokenizer(
            models.WordPiece(
                vocab=tokenizer.get_vocab(), unk_token="[UNK]", max_input_chars_per_word=100
            )
        )
        learnt.normalizer, learnt.pre_tokenizer, learnt.decoder = (
            normalizer,
            tokenizer.pre_tokenizer,
            tokenizer.decoder,
        )
        learnt.add_special_tokens(SPECIALS)
        tokenizer = learnt
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A", special_tokens=[("[CLS]", 2)]
    )
    return tokenizer

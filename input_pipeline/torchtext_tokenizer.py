"""`--tokenizer torchtext`: whole words, by torchtext's basic_english and vocabulary; of the stack in requirements-legacy.txt.

tokenizer = words.learn(texts, vocab_size=30_000, specials=["[PAD]", "[UNK]", "[CLS]"])
ids = tokenizer.encode_batch_fast(["Stocks rise"])[0].ids          # starts with [CLS]; words not learnt are [UNK]
"""

from __future__ import annotations

import importlib.util
import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from errors import InputError

INSTALL = "bash setup_venv.sh requirements-legacy.txt makes .venv-legacy, which has it"
UNKNOWN, CLS = 1, 2  # of the specials


def unavailable_reason() -> str:
    """Why torchtext cannot be used here, and how to get it; '' where it can."""
    if importlib.util.find_spec("torchtext") is None:
        return f"torchtext is not installed: {INSTALL}"
    try:
        load()
    except (
        OSError,
        ImportError,
        AttributeError,
    ) as error:  # OSError: its library was built for another torch
        return f"torchtext does not load ({str(error).splitlines()[0][:120]}): {INSTALL}"
    return ""


def load() -> Any:
    """torchtext without its notice that it is no longer developed."""
    import torchtext

    torchtext.disable_torchtext_deprecation_warning()
    import torchtext.data
    import torchtext.vocab

    return torchtext


class Encoding(NamedTuple):
    """Token ids of a text."""

    ids: list[int]


class TorchtextTokenizer:
    """What of `tokenizers.Tokenizer` the texts need, with whole words.

    Args:
        vocabulary: all words by id, the special ones first.
    """

    encode_special_tokens = True  # "[PAD]" in a text is text: basic_english lower-cases it

    def __init__(self, vocabulary: Sequence[str]) -> None:
        if reason := unavailable_reason():
            raise InputError(f"--tokenizer torchtext: {reason}; or use --tokenizer wordpiece")
        torchtext = load()
        self.split = torchtext.data.get_tokenizer("basic_english")
        self.vocab = torchtext.vocab.vocab(OrderedDict((word, 1) for word in vocabulary))
        self.vocab.set_default_index(UNKNOWN)

    @classmethod
    def from_str(cls, text: str) -> TorchtextTokenizer:
        """Undo to `to_str`."""
        return cls(json.loads(text)["torchtext"])

    def to_str(self) -> str:
        """As JSON."""
        return json.dumps({"torchtext": self.vocab.get_itos()})

    def get_vocab_size(self) -> int:
        return len(self.vocab)

    def encode(self, text: str) -> Encoding:
        """[CLS] and the words."""
        return Encoding([CLS, *self.vocab.lookup_indices(self.split(text))])

    def encode_batch_fast(self, texts: Sequence[str]) -> list[Encoding]:
        """`encode` of each."""
        return [self.encode(text) for text in texts]


def learn(texts: Sequence[str], vocab_size: int, specials: Sequence[str]) -> TorchtextTokenizer:
    """The most frequent words of `texts`, `vocab_size` with the special ones.

    Raises:
        InputError: torchtext is not here.
    """
    if reason := unavailable_reason():
        raise InputError(f"--tokenizer torchtext: {reason}; or use --tokenizer wordpiece")
    torchtext = load()
    split = torchtext.data.get_tokenizer("basic_english")
    learnt = torchtext.vocab.build_vocab_from_iterator(
        map(split, texts), specials=list(specials), max_tokens=vocab_size
    )
    return TorchtextTokenizer(learnt.get_itos())

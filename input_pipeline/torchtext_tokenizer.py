"""`--tokenizer torchtext`: whole words, with torchtext's basic_english tokenizer and vocabulary.

    tokenizer = train(texts, vocab_size=30_000, special_tokens=["[PAD]", "[UNK]", "[CLS]"])
    [found] = tokenizer.encode_batch_fast(["Stocks rise"])
    found.ids                                            # starts with [CLS]; rare words are [UNK]

torchtext belongs to the legacy stack of requirements-legacy.txt: it is no longer developed and does
not load beside a current torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace

from errors import in_one_line

INSTALL_HINT = "bash setup_venv.sh requirements-legacy.txt makes .venv-legacy, which has it"
UNKNOWN, CLS = 1, 2  # ids of two special tokens


class TorchtextTokenizer:
    """A tokenizer of whole words with the part of the interface of `tokenizers.Tokenizer` in use.

    Args:
        vocabulary: all tokens in the order of their ids, special tokens first.
    Raises:
        InputError: torchtext is not installed.
    """

    encode_special_tokens = True  # "[PAD]" in a text is ordinary text: basic_english lower-cases it

    def __init__(self, vocabulary: Sequence[str]) -> None:
        torchtext = _require_torchtext()
        self.split = torchtext.data.get_tokenizer("basic_english")
        self.ids = {word: number for number, word in enumerate(vocabulary)}

    @classmethod
    def from_str(cls, text: str) -> TorchtextTokenizer:
        return cls(json.loads(text)["torchtext"])

    def to_str(self) -> str:
        return json.dumps({"torchtext": list(self.ids)})

    def get_vocab_size(self) -> int:
        return len(self.ids)

    def encode_batch_fast(self, texts: Sequence[str]) -> list[SimpleNamespace]:
        words = ([self.ids.get(word, UNKNOWN) for word in self.split(text)] for text in texts)
        return [SimpleNamespace(ids=[CLS, *ids]) for ids in words]


def train(
    texts: Sequence[str], vocab_size: int, *, special_tokens: Sequence[str]
) -> TorchtextTokenizer:
    """Learn a vocabulary of the most frequent words of `texts`.

    Raises:
        InputError: torchtext is not installed.
    """
    torchtext = _require_torchtext()
    split = torchtext.data.get_tokenizer("basic_english")
    vocab = torchtext.vocab.build_vocab_from_iterator(
        map(split, texts), specials=list(special_tokens), max_tokens=vocab_size
    )
    return TorchtextTokenizer(vocab.get_itos())


def _require_torchtext() -> ModuleType:
    """Import torchtext, without its notice that it is no longer developed.

    Raises:
        InputError: it is not there, or is built for another torch; the message says what to do.
    """
    problem = "--tokenizer torchtext: torchtext does not load"
    with in_one_line(problem, f": {INSTALL_HINT}; or use --tokenizer wordpiece"):
        import torchtext

        torchtext.disable_torchtext_deprecation_warning()
        import torchtext.data
        import torchtext.vocab
    return torchtext

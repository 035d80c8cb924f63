"""Tokenizers, trained on the training split: WordPiece, byte-level BPE, or torchtext's whole words.

    tokenizer = train_tokenizer(train.texts, "wordpiece", vocab_size=30_000)
    ids = tokenizer.encode("Stocks rise").ids                   # starts with [CLS]
    same = load_tokenizer(tokenizer.to_str())                   # as a checkpoint stores it

Sources: WordPiece, Wu et al., arXiv:1609.08144; BPE, Sennrich et al., arXiv:1508.07909.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from input_pipeline import torchtext_tokenizer
from input_pipeline.torchtext_tokenizer import TorchtextTokenizer

TOKENIZERS = ("wordpiece", "bpe", "torchtext")
SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]"]  # ids 0, 1 and 2
LONGEST_WORD = 100  # characters; a longer one, as of a script without spaces, is cut
FEW_ACCENTS = 0.01  # of the words; in English about 0.001, in French 0.15, in Vietnamese 0.8
ACCENT = re.compile("[A-Za-z][\u0300-\u036f]")  # of a decomposed text

AnyTokenizer = Tokenizer | TorchtextTokenizer


def train_tokenizer(texts: Sequence[str], kind: str, *, vocab_size: int) -> AnyTokenizer:
    """Learn a tokenizer from `texts`; the same texts give the same tokenizer.

    Texts are lower-cased and composed (NFC). Accents of Latin letters are stripped where few words
    of the texts have one, as in English; other marks carry meaning. Every encoding starts with
    [CLS].

    Args:
        kind: one of `TOKENIZERS`.
        vocab_size: number of tokens at most, special tokens included.
    Raises:
        InputError: the kind is 'torchtext', which is not installed.
    """
    if kind == "torchtext":
        return torchtext_tokenizer.train(texts, vocab_size, special_tokens=SPECIAL_TOKENS)
    train = _train_wordpiece if kind == "wordpiece" else _train_byte_level_bpe
    tokenizer = train(texts, vocab_size)
    cls = ("[CLS]", SPECIAL_TOKENS.index("[CLS]"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A", special_tokens=[cls]
    )
    return tokenizer


def load_tokenizer(text: str) -> AnyTokenizer:
    """Restore a tokenizer from the string that its `to_str` returned."""
    if text.startswith('{"torchtext"'):
        return TorchtextTokenizer.from_str(text)
    return Tokenizer.from_str(text)


def _train_wordpiece(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """Train WordPiece so that the same texts always give the same vocabulary.

    The trainer of `tokenizers` breaks ties by token number, and numbers the continuations ##x in
    the order of a hash table, which differs from run to run. All letters and their continuations
    are therefore given to it as special tokens, which are numbered in the order given: a quarter of
    the vocabulary each at most, of the most frequent ones. The result is a new tokenizer with that
    vocabulary, in which letters are ordinary tokens.
    """
    normalizer = _normalizer(texts)
    counts = Counter(letter for text in texts for letter in normalizer.normalize_str(text))
    frequent = sorted(counts, key=lambda letter: (letter.isspace(), -counts[letter], letter))
    letters = sorted(each for each in frequent[: vocab_size // 4] if not each.isspace())
    rare = {ord(letter): " " for letter in frequent[vocab_size // 4 :]}
    continuations = [f"##{letter}" for letter in letters]
    trained = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    trained.normalizer = normalizer
    known = "".join(f"\\x{{{ord(letter):x}}}" for letter in letters)
    patterns = (f"[^{known}\\s]", f".{{1,{LONGEST_WORD}}}")  # an unknown letter hides no known one
    splits = [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in patterns]
    trained.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.BertPreTokenizer(), *splits])
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL_TOKENS, *letters, *continuations],
        show_progress=False,
    )
    words = (normalizer.normalize_str(text).translate(rare) for text in texts)
    trained.train_from_iterator(words, trainer)
    model = models.WordPiece(
        vocab=trained.get_vocab(), unk_token="[UNK]", max_input_chars_per_word=LONGEST_WORD
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = trained.pre_tokenizer
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return tokenizer


def _train_byte_level_bpe(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """Train byte-pair encoding over bytes, which knows no unknown characters."""
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.normalizer = _normalizer(texts)
    cut = pre_tokenizers.Split(Regex(f".{{1,{4 * LONGEST_WORD}}}"), behavior="isolated")  # bytes
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(), cut])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _normalizer(texts: Sequence[str]) -> normalizers.Normalizer:
    """Return a normaliser that lower-cases and composes, and strips accents where they are rare."""
    steps = [normalizers.NFD(), normalizers.Lowercase()]
    if accented_words(texts) <= FEW_ACCENTS:
        steps.append(normalizers.Replace(Regex(r"(?<=\p{Latin})\p{Mn}+"), ""))
    return normalizers.Sequence([*steps, normalizers.NFC()])


def accented_words(texts: Sequence[str]) -> float:
    """Return the fraction of words that have a Latin letter with an accent.

    >>> accented_words(["Café au lait", "the café"])
    0.4
    """
    num_words = num_accented = 0
    for text in texts:
        words = text.split()
        num_words += len(words)
        if not text.isascii():
            num_accented += sum(bool(ACCENT.search(unicodedata.normalize("NFD", w))) for w in words)
    return num_accented / max(1, num_words)

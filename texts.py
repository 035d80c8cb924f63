"""Text data sets: csv files to one flat integer tensor, the tokenizer, and batches of similar length.

splits, classes = read_splits("agnews", "data")          # {'train': Rows, 'test': Rows}
tokenizer = train_tokenizer(splits["train"].texts, "wordpiece", vocab_size=16_000)
train = TextSet(splits["train"], tokenizer, max_len=128, device=torch.device("cpu"))
"""

from __future__ import annotations

import csv
import html
import re
import urllib.request
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor

import words
from errors import InputError

SPECIALS = ["[PAD]", "[UNK]", "[CLS]"]  # ids 0, 1, 2
AGNEWS_CLASSES = ["World", "Sports", "Business", "Sci/Tech"]
AGNEWS_URL = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/"
AGNEWS_FILES = {  # rows of the official files, to notice a cut download
    "train.csv": 120_000,
    "test.csv": 7_600,
}
HEADLINES = Path(__file__).with_name("headlines.csv")
HEADLINES_TRAIN = 400  # the first rows; the others are the test set
PAD = 0
PAD_MULTIPLE = {"cpu": 1, "cuda": 4}  # GPU kernels, compiled ones and recorded steps want few lengths, and even ones

TAG = re.compile(r"</?[A-Za-z!][^<>]*>")
BARE = re.compile(r"(?<![&\w])(#\d{2,4}|quot|amp|lt|gt|nbsp|apos|mdash|ndash);")  # AG News lost the ampersand
URL = re.compile(r"(?:https?://|www\.)\S+")


@dataclass
class Rows:
    """Labels 0..classes-1 and cleaned texts of one split."""

    labels: list[int]
    texts: list[str]

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Sequence[int]) -> Rows:
        """The given rows, in that order."""
        return Rows([self.labels[i] for i in rows], [self.texts[i] for i in rows])


def clean(text: str) -> str:
    """Drop HTML tags, entities and URLs; fold white space.

    >>> clean('Oil &lt;b&gt;up&lt;/b&gt;  at www.example.com today')
    'Oil up at today'
    """
    text = BARE.sub(r"&\1;", text.replace("\\", " "))  # AG News has a backslash where a line ended
    return " ".join(URL.sub(" ", TAG.sub(" ", html.unescape(text))).split())


def read_splits(name: str, data_dir: str) -> tuple[dict[str, Rows], list[str]]:
    """The training and test rows of a data set, and the names of its classes.

    Args:
        name: 'agnews', 'headlines' (embedded), or 'csv' (train.csv and test.csv in `data_dir`: label, text...).
    Raises:
        InputError: a file is missing or broken; the message names file, row and remedy.
    """
    if name == "headlines":
        rows = read_csv(HEADLINES, columns=3)
        labels, classes = number_labels(rows, AGNEWS_CLASSES, HEADLINES)
        split = {"train": range(HEADLINES_TRAIN), "test": range(HEADLINES_TRAIN, len(rows))}
        every = Rows(labels, [clean(" ".join(row[1:])) for row in rows])
        return {part: every.take(numbers) for part, numbers in split.items()}, classes
    if name == "agnews":
        folder, columns, classes = Path(data_dir) / "ag_news_csv", 3, AGNEWS_CLASSES
        for file in AGNEWS_FILES:
            if not (folder / file).exists():
                download_agnews(folder, file)
    else:
        folder, columns, classes = Path(data_dir), 0, []
    splits = {}
    for part in ("train", "test"):
        path = folder / f"{part}.csv"
        rows = read_csv(path, columns)
        labels, classes = number_labels(rows, classes, path)
        splits[part] = Rows(labels, [clean(" ".join(row[1:])) for row in rows])
    return splits, classes


def read_csv(path: Path, columns: int = 0) -> list[list[str]]:
    """Rows of a csv file, each of the same number of columns (`columns`, or the first row's when 0; at least 2)."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = []
            for number, row in enumerate(csv.reader(file, strict=True), 1):
                columns = columns or max(2, len(row))
                if len(row) != columns:
                    raise InputError(
                        f"{path}, row {number}: {len(row)} columns, wanted {columns} (label, text...); mend or delete the row"
                    )
                rows.append(row)
    except FileNotFoundError:
        raise InputError(f"{path} is missing: put a csv file there with the columns label, text...") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} cannot be read as UTF-8 csv: {error}; fetch or export it again") from None
    if not rows:
        raise InputError(f"{path} is empty: it needs at least one row of label, text...")
    return rows


def number_labels(rows: list[list[str]], classes: list[str], path: Path) -> tuple[list[int], list[str]]:
    """Labels as 0..classes-1. AG News counts from 1; your own labels may be any words, numbered in sorted order.

    `classes` is empty for the training file of your own data: then it is learnt from the rows.
    """
    counted = classes == AGNEWS_CLASSES
    if not classes:
        classes = sorted({row[0].strip() for row in rows}, key=lambda name: (not name.isdigit(), name.zfill(12)))
        if len(classes) < 2:
            raise InputError(f"{path}: only one label, {classes[0]!r}; classification needs two or more")
    numbers = {str(i + 1) if counted else name: i for i, name in enumerate(classes)}
    labels = []
    for number, row in enumerate(rows, 1):
        label = numbers.get(row[0].strip())
        if label is None:
            known = ", ".join(list(numbers)[:10])
            raise InputError(f"{path}, row {number}: label {row[0][:40]!r} is out of range, wanted one of {known}")
        labels.append(label)
    return labels, classes


def download_agnews(folder: Path, file: str) -> None:
    """Fetch one AG News file with a progress bar and a row count; InputError says what to do without a network."""
    from tqdm import tqdm  # only a download needs it here

    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{file}.part"
    try:
        with urllib.request.urlopen(AGNEWS_URL + file, timeout=20) as response, open(part, "wb") as out:
            size = int(response.headers.get("Content-Length", 0)) or None
            with tqdm(total=size, unit="B", unit_scale=True, desc=file) as bar:
                while chunk := response.read(1 << 20):
                    out.write(chunk)
                    bar.update(len(chunk))
        if len(read_csv(part, 3)) != AGNEWS_FILES[file]:
            raise OSError(f"{file} does not have {AGNEWS_FILES[file]} rows")
        part.rename(folder / file)
    except (OSError, InputError) as error:
        part.unlink(missing_ok=True)
        raise InputError(
            f"{folder / file} is missing and could not be downloaded ({error}): fetch train.csv and test.csv of AG News "
            f"(class, title, description) and put them in {folder}, or run with --dataset headlines"
        ) from None


TOKENIZERS = ("wordpiece", "bpe", "torchtext")
AnyTokenizer = Tokenizer | words.Words


def load_tokenizer(text: str) -> AnyTokenizer:
    """Undo to a tokenizer's `to_str`."""
    return words.Words.from_str(text) if text.startswith('{"torchtext"') else Tokenizer.from_str(text)


def train_tokenizer(texts: Sequence[str], kind: str, vocab_size: int) -> AnyTokenizer:
    """A 'wordpiece' (arXiv:1609.08144), byte-level 'bpe' (arXiv:1508.07909) or 'torchtext' tokenizer, learnt from `texts` alone.

    Every encoding starts with [CLS]. Lower-cased, accents stripped. The same texts give the same tokenizer.
    """
    if kind == "torchtext":
        return words.learn(texts, vocab_size, SPECIALS)
    normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()])
    options: dict[str, Any] = {"vocab_size": vocab_size, "special_tokens": SPECIALS, "show_progress": False}
    if kind == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        # The trainer numbers ##x in the order of a hash table, and numbers break ties: give each its number beforehand.
        letters = sorted({letter for text in texts for letter in normalizer.normalize_str(text) if not letter.isspace()})
        options["special_tokens"] = [*SPECIALS, *letters, *(f"##{letter}" for letter in letters)]
        trainer: trainers.Trainer = trainers.WordPieceTrainer(**options)
    else:
        tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(**options, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator(texts, trainer)
    if kind == "wordpiece":  # without the trainer's notion that letters are special
        learnt = Tokenizer(models.WordPiece(vocab=tokenizer.get_vocab(), unk_token="[UNK]", max_input_chars_per_word=100))
        learnt.normalizer, learnt.pre_tokenizer, learnt.decoder = normalizer, tokenizer.pre_tokenizer, tokenizer.decoder
        learnt.add_special_tokens(SPECIALS)
        tokenizer = learnt
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 2)])
    return tokenizer


class TextSet:
    """A tokenised split: one flat tensor of token ids, resident on the device, and where each row starts.

    Args:
        rows: labels and texts.
        tokenizer: trained tokenizer; rows are encoded once, in parallel.
        max_len: tokens kept of a row, [CLS] included.
        device: where tokens and labels live.
    """

    def __init__(self, rows: Rows, tokenizer: AnyTokenizer, max_len: int, device: torch.device) -> None:
        tokenizer.encode_special_tokens = True  # "[PAD]" in a text is text
        self.max_len = max_len
        encodings = tokenizer.encode_batch_fast(rows.texts)
        ids = [encoding.ids[:max_len] for encoding in encodings]
        self.lengths = torch.tensor([len(row) for row in ids])
        self.starts = (self.lengths.cumsum(0) - self.lengths).to(device)
        self.flat = torch.tensor([token for row in ids for token in row], dtype=torch.int32, device=device)
        self.labels = torch.tensor(rows.labels, device=device)
        self._device_lengths = self.lengths.to(device)
        self.longest = int(self.lengths.max())
        self.device = device

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, plan: Sequence[Tensor], epoch: int | None = None) -> Generator[tuple[Tensor, Tensor]]:
        """(tokens (batch, length) int32, labels (batch,)) for each tensor of row numbers in `plan`.

        `length` is the longest row of the batch, on a GPU rounded up to a multiple of 4. `epoch` is not used: nothing is random.
        """
        for rows in plan:
            length = self.padded_length(rows)
            on_device = rows.to(self.device, non_blocking=True)
            yield self.gather(on_device, length), self.labels[on_device]

    def padded_length(self, rows: Tensor) -> int:
        """Of a batch of these rows."""
        multiple = PAD_MULTIPLE[self.device.type]
        return min(-(-int(self.lengths[rows].max()) // multiple) * multiple, self.max_len)

    def padding(self, plan: Sequence[Tensor]) -> float:
        """Padded tokens over real ones, of the batches of a plan."""
        return sum(self.padded_length(rows) * len(rows) for rows in plan) / sum(int(self.lengths[rows].sum()) for rows in plan) - 1

    def gather(self, rows: Tensor, length: int) -> Tensor:
        """Tokens of `rows` padded with 0 to `length`: (len(rows), length) int32."""
        column = torch.arange(length, device=self.device)
        beyond = column >= self._device_lengths.index_select(0, rows)[:, None]
        where = (self.starts.index_select(0, rows)[:, None] + column).clamp_(max=len(self.flat) - 1)
        return self.flat.index_select(0, where.flatten()).view(where.shape).masked_fill_(beyond, PAD)


def naive_bayes(data: TextSet, vocab_size: int, classes: int) -> Tensor:
    """Scores of each token for each class, counted on a training split: (vocab_size, classes) fp32.

    score(t, c) = (log p(t | c) - mean over c of log p(t | c)) * log((1 + rows) / (1 + df(t)))
    with p(t | c) from the rows of class c that hold t, one added (multinomial naive Bayes on binary counts, as in Wang
    and Manning, ACL 2012), and df(t) the rows that hold t. Special tokens score 0.
    """
    lengths, flat = data.lengths, data.flat.cpu().long()
    row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    held = torch.unique(row * vocab_size + flat)  # each (row, token) once
    counts = torch.zeros(vocab_size, classes, dtype=torch.float64)
    places = held % vocab_size, data.labels.cpu()[held // vocab_size]
    counts.index_put_(places, torch.ones(len(held), dtype=torch.float64), accumulate=True)
    logs = ((counts + 1) / (counts + 1).sum(0)).log()
    rarity = ((1 + len(lengths)) / (1 + counts.sum(1, keepdim=True))).log()
    scores = (logs - logs.mean(1, keepdim=True)) * rarity
    scores[: len(SPECIALS)] = 0
    return scores.float()


def encode(texts: Sequence[str], tokenizer: AnyTokenizer, max_len: int) -> Tensor:
    """Padded tokens of a few texts: (len(texts), length) int32; for predictions."""
    rows = Rows([0] * len(texts), [clean(text) for text in texts])
    data = TextSet(rows, tokenizer, max_len, torch.device("cpu"))
    return next(data.batches([torch.arange(len(rows))]))[0]


def read_lines(path: Path) -> list[str]:
    """The lines of a text file that are not blank."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as UTF-8 text ({error}); give text files with one text a line") from None
    if not lines:
        raise InputError(f"{path}: holds no text; give text files with one text a line")
    return lines

"""Texts: cleaning, tokenizers, batches, Naive Bayes scores, and the data sets."""

from __future__ import annotations

import hashlib
import io
import math
import unicodedata
from collections import Counter
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from conftest import each_of
from errors import InputError
from input_pipeline import text_datasets
from input_pipeline.naive_bayes import naive_bayes_scores
from input_pipeline.text_batches import TextDataset, encode_texts
from input_pipeline.text_datasets import TextSplit, clean_text, read_text_splits
from input_pipeline.tokenization import train_tokenizer

Headlines = tuple[dict[str, TextSplit], list[str]]
CPU = torch.device("cpu")
KINDS = pytest.mark.parametrize("kind", ["bpe", "wordpiece"])


@each_of(
    ("raw", "expected"),
    [
        ("Plain text, as it is.", "Plain text, as it is."),
        ("  white \t space\n folded ", "white space folded"),
        ("Oil <b>up</b>, gold<br/>down", "Oil up , gold down"),
        ('See <a href="http://x.org/a?b=1">here</a> now', "See here now"),
        ("AT&amp;T &quot;wins&quot; &#39;big&#39;", "AT&T \"wins\" 'big'"),
        ("more at https://example.com/a?b=c today", "more at today"),
        ("more at www.example.com today", "more at today"),
        ("cost: 5 < 6 and 7 > 3", "cost: 5 < 6 and 7 > 3"),
        ("half earnings\\news from", "half earnings news from"),  # a line ended at the backslash
        ("a \\$5 note", "a $5 note"),
        ("Today #39;s news", "Today 's news"),  # AG News lacks the ampersand of entities
        ("quot;Wait,quot; he said", '"Wait," he said'),
        ("", ""),
    ],
)
def test_clean_drops_tags_entities_and_addresses(raw: str, expected: str) -> None:
    assert clean_text(raw) == expected


@pytest.fixture(scope="module")
def headlines() -> Headlines:
    return read_text_splits("headlines", "")


def test_headlines_are_balanced_and_split(headlines: Headlines) -> None:
    splits, classes = headlines
    assert classes == ["World", "Sports", "Business", "Sci/Tech"]
    assert Counter(splits["train"].labels) == dict.fromkeys(range(4), 100)
    assert Counter(splits["test"].labels) == dict.fromkeys(range(4), 20)
    texts = [*splits["train"].texts, *splits["test"].texts]
    assert len(set(texts)) == 480  # no row occurs twice, and none in both splits


@pytest.fixture(scope="module", params=["bpe", "wordpiece"])
def tokenizer(request: pytest.FixtureRequest, headlines: Headlines) -> Tokenizer:
    return train_tokenizer(headlines[0]["train"].texts, request.param, vocab_size=1500)


def test_tokenizer_puts_cls_first_round_trips_and_ignores_case(
    tokenizer: Tokenizer, headlines: Headlines
) -> None:
    assert [tokenizer.token_to_id(token) for token in ("[PAD]", "[UNK]", "[CLS]")] == [0, 1, 2]
    assert 1000 < tokenizer.get_vocab_size() <= 1500
    again = Tokenizer.from_str(tokenizer.to_str())
    for text in [*headlines[0]["test"].texts, "", "Ünïcode 漢字 🙂"]:
        ids = tokenizer.encode(text).ids
        assert ids[0] == 2
        assert 2 not in ids[1:]
        assert 0 not in ids
        assert again.encode(text).ids == ids
    text = "the government said the market will rise"
    assert tokenizer.decode(tokenizer.encode(text).ids).strip() == text
    assert tokenizer.encode("Café MARKET").ids == tokenizer.encode("cafe market").ids


@KINDS
def test_marks_that_carry_meaning_are_kept_in_every_script(kind: str) -> None:
    """Words that differ in a mark alone differ; the two forms of one character do not."""
    pairs = {
        "Hindi": ("\u0915\u0940", "\u0915\u0947"),
        "Japanese": ("\u304b", "\u304c"),
        "Vietnamese": ("m\u00e1", "m\u1ea1"),
        "Arabic": ("\u0627", "\u0623"),
        "Russian": ("\u0438", "\u0439"),
        "French": ("ou", "o\u00f9"),
    }
    for language, words in pairs.items():
        texts = [f"{words[number % 2]} abc" for number in range(20)]
        tokenizer = train_tokenizer(texts, kind, vocab_size=400)
        first, second = (tokenizer.encode(word).ids for word in words)
        assert first != second, language
        assert 1 not in first + second, language  # no unknown token
        for word, ids in zip(words, (first, second)):
            assert tokenizer.encode(unicodedata.normalize("NFD", word)).ids == ids, language


@KINDS
def test_a_text_without_spaces_is_no_unknown_word(kind: str) -> None:
    """Many scripts have no spaces; a link within such a text ends where the script goes on."""
    texts = ["\u65e5\u672c\u8a9e\u306e\u6587" * 60, "\u4e2d\u6587\u7684\u53e5\u5b50" * 60]
    tokenizer = train_tokenizer(texts, kind, vocab_size=600)
    assert all(1 not in tokenizer.encode(text).ids for text in texts)
    assert clean_text("https://a.example/b?c=1\u3092\u898b\u308b") == "\u3092\u898b\u308b"


@KINDS
def test_text_that_names_a_special_token_is_only_text(kind: str) -> None:
    tokenizer = train_tokenizer(["pad and cls and text [ ] brackets"] * 9, kind, vocab_size=400)
    tokenizer = Tokenizer.from_str(tokenizer.to_str())  # as a checkpoint restores it
    tokens = encode_texts(["text [PAD] text [CLS] text"], tokenizer, max_len=64)[0]
    length = int((tokens != 0).nonzero().max()) + 1
    assert tokens[0] == 2
    assert not set(tokens[1:length].tolist()) & {0, 2}


def test_batches_hold_the_tokens_of_their_rows(tokenizer: Tokenizer, headlines: Headlines) -> None:
    rows = headlines[0]["train"].select_rows(range(101))
    row_batches = [*torch.randperm(101).split(13), torch.tensor([100]), torch.tensor([0, 0])]
    for max_len in (8, 128):
        data = TextDataset(rows, tokenizer, max_len=max_len).to(CPU)
        expected = [tokenizer.encode(text).ids[:max_len] for text in rows.texts]
        assert data.lengths.tolist() == [len(ids) for ids in expected]
        assert data.longest == max(map(len, expected)) <= max_len
        batches = data.batches(row_batches, epoch=0)
        for batch, (tokens, labels) in zip(row_batches, batches, strict=True):
            assert labels.tolist() == [rows.labels[i] for i in batch]
            longest = max(len(expected[i]) for i in batch)
            assert tokens.tolist() == [
                expected[i] + [0] * (longest - len(expected[i])) for i in batch
            ]


def test_padding_is_counted_and_lengths_on_gpus_are_multiples_of_four() -> None:
    data = TextDataset.__new__(TextDataset)
    data.lengths, data.max_len, data.device = torch.tensor([5, 9, 9, 30]), 31, CPU
    row_batches = [torch.tensor([0, 1]), torch.tensor([2, 3])]
    assert data.padding(row_batches) == pytest.approx((18 + 60) / 53 - 1)
    data.device = torch.device("cuda")
    assert [data.padded_length(rows) for rows in row_batches] == [12, 31]


def test_encode_texts_cleans_and_equals_the_data_set(tokenizer: Tokenizer) -> None:
    tokens = encode_texts(["Oil <b>up</b> today", ""], tokenizer, max_len=32)
    ids = tokenizer.encode("Oil up today").ids
    assert tokens[0, : len(ids)].tolist() == ids
    assert tokens[1].tolist() == [2] + [0] * (tokens.shape[1] - 1)


def test_a_text_file_is_utf8_and_line_breaks_alone_separate_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_bytes("one\x0cpage\u2028more\r\n\r\ntwo\u0085\n".encode())
    assert text_datasets.read_lines(path) == {1: "one\x0cpage\u2028more", 3: "two"}
    path.write_bytes("caf\xe9".encode("latin-1"))
    with pytest.raises(InputError, match="save it as UTF-8"):
        text_datasets.read_lines(path)


@pytest.mark.data
def test_ag_news_files_have_the_official_counts_and_checksum(data_dir: Path) -> None:
    folder = data_dir / "ag_news_csv"
    if not (folder / "train.csv").exists():
        pytest.skip(f"AG News is not below {data_dir}")
    splits, classes = read_text_splits("agnews", str(data_dir))
    assert classes == text_datasets.AGNEWS_CLASSES
    assert Counter(splits["test"].labels) == dict.fromkeys(range(4), 1900)
    counts = Counter(splits["train"].labels)
    complete, balanced_tenth = (dict.fromkeys(range(4), rows) for rows in (30_000, 3_000))
    assert counts in (complete, balanced_tenth)
    assert not any("<b>" in text or "http" in text for text in splits["test"].texts)
    checksum = hashlib.sha256((folder / "test.csv").read_bytes()).hexdigest()
    assert checksum == text_datasets.AGNEWS_FILES["test.csv"]


def test_naive_bayes_scores_equal_a_count_by_hand() -> None:
    rows = TextSplit([0, 0, 1], ["oil oil price", "oil", "cup price"])
    tokenizer = train_tokenizer(rows.texts, "wordpiece", vocab_size=400)
    size = tokenizer.get_vocab_size()
    data = TextDataset(rows, tokenizer, max_len=16).to(CPU)
    scores = naive_bayes_scores(data, size, classes=2).double()
    tokens_of_row = [set(tokenizer.encode(text).ids) for text in rows.texts]
    of_class = [tokens_of_row[:2], tokens_of_row[2:]]
    totals = [
        sum(1 + sum(token in row for row in group) for token in range(size)) for group in of_class
    ]
    for token in range(3, size):
        logs = [
            math.log((1 + sum(token in row for row in group)) / total)
            for group, total in zip(of_class, totals)
        ]
        rarity = math.log(4 / (1 + sum(token in row for row in tokens_of_row)))
        for label in (0, 1):
            assert scores[token, label] == pytest.approx(
                (logs[label] - sum(logs) / 2) * rarity, abs=1e-5
            )
    assert (scores[:3] == 0).all()
    assert scores[tokenizer.token_to_id("oil")].argmax() == 0
    assert scores[tokenizer.token_to_id("cup")].argmax() == 1


@KINDS
def test_the_same_texts_give_the_same_tokenizer(kind: str) -> None:
    lines = read_text_splits("headlines", "")[0]["train"].texts
    assert len({train_tokenizer(lines, kind, vocab_size=2000).to_str() for _ in range(4)}) == 1


def test_a_download_is_kept_only_with_the_official_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b'"1","A title","A description"\n'

    class Response(io.BytesIO):
        headers = {"Content-Length": str(len(content))}

    monkeypatch.setattr(text_datasets.urllib.request, "urlopen", lambda *_, **__: Response(content))
    monkeypatch.setitem(text_datasets.AGNEWS_FILES, "test.csv", hashlib.sha256(b"x").hexdigest())
    with pytest.raises(InputError, match="does not have the checksum of the official file"):
        text_datasets.download_agnews(tmp_path, "test.csv")
    assert list(tmp_path.iterdir()) == []
    checksum = hashlib.sha256(content).hexdigest()
    monkeypatch.setitem(text_datasets.AGNEWS_FILES, "test.csv", checksum)
    text_datasets.download_agnews(tmp_path, "test.csv")
    assert (tmp_path / "test.csv").read_bytes() == content

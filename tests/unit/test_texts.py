"""Texts: cleaning, tokenizers, batches, Naive Bayes scores, and the data sets."""

import unicodedata
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from sklearn.feature_extraction.text import TfidfTransformer
from sklearn.naive_bayes import MultinomialNB
from tokenizers import Tokenizer

from conftest import each_of, write
from errors import InputError
from input_pipeline import naive_bayes, text_datasets
from input_pipeline.naive_bayes import naive_bayes_scores
from input_pipeline.text_batches import TextDataset, encode_texts
from input_pipeline.text_datasets import TextSplit, clean_text, read_headlines
from input_pipeline.tokenization import train_tokenizer
from training.card import TextCard

CPU = torch.device("cpu")
KINDS = pytest.mark.parametrize("kind", ["bpe", "wordpiece"])


@each_of(
    ("raw", "expected"),
    [
        ("  white \t space\n folded ", "white space folded"),
        ("Oil <b>up</b>, gold<br/>down", "Oil up , gold down"),
        ('See <a href="http://x.org/a?b=1">here</a> now', "See here now"),
        ("AT&amp;T &quot;wins&quot; &#39;big&#39;", "AT&T \"wins\" 'big'"),
        ("more at https://example.com/a?b=c today", "more at today"),
        ("cost: 5 < 6 and 7 > 3", "cost: 5 < 6 and 7 > 3"),
        ("half earnings\\news from", "half earnings news from"),  # a line ended at the backslash
        ("a \\$5 note", "a $5 note"),
        ("fixes #1234; closes #99; 5 lt; 6", "fixes #1234; closes #99; 5 lt; 6"),
    ],
)
def test_clean_drops_tags_entities_and_addresses(raw, expected):
    assert clean_text(raw) == expected


@pytest.fixture(scope="module", params=["bpe", "wordpiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return train_tokenizer(read_headlines()["train"].texts, request.param, vocab_size=1500)


def test_entities_of_agnews_get_their_ampersands_again(tmp_path, tokenizer):
    write(tmp_path, a__csv='"1","Today #39;s news","quot;Wait,quot; he said"\n')
    read = text_datasets.read_agnews_file(tmp_path / "a.csv").texts[0]
    assert read == 'Today \'s news "Wait," he said'
    known = {"arch": "transformer", "model_args": {}, "encoder": {}, "prior": None}
    card = partial(TextCard, **known, classes="ab", tokenizer=tokenizer.to_str(), max_len=9, pad=0)
    for dataset, is_same in (("agnews", True), ("headlines", True), ("csv", False)):
        texts = card(dataset=dataset).prepare(["Today #39;s", "Today 's"], CPU)
        assert torch.equal(*texts) == is_same


def test_tokenizer_puts_cls_first_round_trips_and_ignores_case(tokenizer):
    assert [tokenizer.token_to_id(token) for token in ("[PAD]", "[UNK]", "[CLS]")] == [0, 1, 2]
    assert 1000 < tokenizer.get_vocab_size() <= 1500
    again = Tokenizer.from_str(tokenizer.to_str())
    for text in [*read_headlines()["test"].texts, "", "Ünïcode 漢字 🙂"]:
        ids = tokenizer.encode(text).ids
        assert ids[0] == 2
        assert 2 not in ids[1:]
        assert 0 not in ids
        assert again.encode(text).ids == ids
    text = "the government said the market will rise"
    assert tokenizer.decode(tokenizer.encode(text).ids).strip() == text
    assert tokenizer.encode("Café MARKET").ids == tokenizer.encode("cafe market").ids


@KINDS
def test_marks_that_carry_meaning_are_kept_in_every_script(kind):
    """Words that differ in a mark alone differ; the two forms of one character do not."""
    hindi, japanese, arabic = "\u0915\u0940 \u0915\u0947", "\u304b \u304c", "\u0627 \u0623"
    for pair in (hindi, japanese, arabic, "m\u00e1 m\u1ea1", "\u0438 \u0439", "ou o\u00f9"):
        words = pair.split()
        texts = [f"{words[number % 2]} abc" for number in range(20)]
        tokenizer = train_tokenizer(texts, kind, vocab_size=400)
        first, second = (tokenizer.encode(word).ids for word in words)
        assert first != second, pair
        assert 1 not in first + second, pair  # no unknown token
        for word, ids in zip(words, (first, second)):
            assert tokenizer.encode(unicodedata.normalize("NFD", word)).ids == ids, pair


@KINDS
def test_a_text_without_spaces_is_no_unknown_word(kind):
    """Many scripts have no spaces; a link within such a text ends where the script goes on."""
    texts = ["\u65e5\u672c\u8a9e\u306e\u6587" * 60, "\u4e2d\u6587\u7684\u53e5\u5b50" * 60]
    tokenizer = train_tokenizer(texts, kind, vocab_size=600)
    assert all(1 not in tokenizer.encode(text).ids for text in texts)
    with_unseen = tokenizer.encode(f"{texts[0]}\u732b{texts[1]}").ids
    assert with_unseen.count(1) == (kind == "wordpiece")
    assert len(train_tokenizer(["a" * 4000], kind, vocab_size=400).encode("a" * 4000).ids) > 10
    many = [" ".join(map(chr, range(0x4E00, 0x4E00 + 500))), *["words"] * 50]
    tokenizer = train_tokenizer(many, kind, vocab_size=400)
    assert tokenizer.get_vocab_size() <= 400
    assert len(tokenizer.encode("words", add_special_tokens=False).ids) == 1
    assert clean_text("https://a.example/b?c=1\u3092\u898b\u308b") == "\u3092\u898b\u308b"


@KINDS
def test_text_that_names_a_special_token_is_only_text(kind):
    tokenizer = train_tokenizer(["pad and cls and text [ ] brackets"] * 9, kind, vocab_size=400)
    tokenizer = Tokenizer.from_str(tokenizer.to_str())  # as a checkpoint restores it
    tokens = encode_texts(["text [PAD] text [CLS] text"], tokenizer, max_len=64)[0]
    length = int((tokens != 0).nonzero().max()) + 1
    assert tokens[0] == 2
    assert not set(tokens[1:length].tolist()) & {0, 2}


def test_batches_hold_the_tokens_of_their_rows(tokenizer):
    rows = read_headlines()["train"].select_rows(range(101))
    row_batches = [*torch.randperm(101).split(13), torch.tensor([100]), torch.tensor([0, 0])]
    for max_len in (8, 128):
        data = TextDataset(rows, tokenizer, max_len=max_len).to(CPU)
        expected = [tokenizer.encode(text).ids[:max_len] for text in rows.texts]
        assert data.lengths.tolist() == [len(ids) for ids in expected]
        assert max(data.lengths) == max(map(len, expected)) <= max_len
        batches = data.batches(row_batches, epoch=0)
        for batch, (tokens, labels) in zip(row_batches, batches, strict=True):
            assert labels.tolist() == [rows.labels[i] for i in batch]
            ids = [expected[i] for i in batch]
            longest = max(map(len, ids))
            assert tokens.tolist() == [row + [0] * (longest - len(row)) for row in ids]


def test_lengths_on_gpus_are_multiples_of_eight() -> None:
    data = TextDataset.__new__(TextDataset)
    data.lengths, data.max_len = torch.tensor([5, 9, 9, 30]), 31
    data.device = torch.device("cuda")
    row_batches = [torch.tensor([0, 1]), torch.tensor([2, 3])]
    assert [data.padded_length(rows) for rows in row_batches] == [16, 31]


def test_a_text_file_is_utf8_and_line_breaks_alone_separate_its_lines(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_bytes("one\x0cpage\u2028more\r\n\r\ntwo\u0085\n".encode())
    assert text_datasets.read_lines(path) == {1: "one\x0cpage\u2028more", 3: "two"}
    path.write_bytes("caf\xe9".encode("latin-1"))
    with pytest.raises(InputError, match="save it as UTF-8"):
        text_datasets.read_lines(path)


def test_naive_bayes_scores_equal_those_of_sklearn(monkeypatch):
    rows = TextSplit([0, 0, 1], ["oil oil price", "oil", "cup price"])
    tokenizer = train_tokenizer(rows.texts, "wordpiece", vocab_size=400)
    size = tokenizer.get_vocab_size()
    data = TextDataset(rows, tokenizer, max_len=16).to(CPU)
    few = naive_bayes_scores(data, size, classes=2)
    monkeypatch.setattr(naive_bayes, "FEW_ROWS", 2)
    scores = naive_bayes_scores(data, size, classes=2)
    torch.testing.assert_close(few, naive_bayes.FEW_ROWS_FACTOR * scores)
    ids = [tokenizer.encode(text).ids for text in rows.texts]
    has_token = np.array([[token in row for token in range(size)] for row in ids])
    logs = MultinomialNB().fit(has_token, rows.labels).feature_log_prob_
    rarity = TfidfTransformer().fit(has_token).idf_ - 1
    expected = ((logs - logs.mean(0)) * rarity).T
    np.testing.assert_allclose(scores[3:], expected[3:], atol=1e-5)
    assert (scores[:3] == 0).all()
    assert naive_bayes_scores(data, size, classes=10**6) is None
    splits = TextSplit([0], ["oil"]), TextSplit([0, 1], ["oil oil price", "cup price"])
    part, rest = (TextDataset(each, tokenizer, max_len=16).to(CPU) for each in splits)
    left = naive_bayes_scores(data, size, classes=2, without=part)
    torch.testing.assert_close(left, naive_bayes_scores(rest, size, classes=2))


@KINDS
def test_the_same_texts_give_the_same_tokenizer(kind):
    lines = read_headlines()["train"].texts
    assert len({train_tokenizer(lines, kind, vocab_size=2000).to_str() for _ in range(4)}) == 1


def test_a_download_is_compared_with_the_official_checksum(tmp_path, monkeypatch):
    """By torch, which keeps no other file."""
    monkeypatch.setattr(text_datasets.urllib.request, "urlopen", mock.Mock())
    load = mock.Mock(side_effect=RuntimeError("invalid hash value"))
    monkeypatch.setattr(torch.hub, "download_url_to_file", load)
    with pytest.raises(InputError, match="invalid hash value"):
        text_datasets.download_agnews(tmp_path, "test.csv")
    file = str(tmp_path / "test.csv"), text_datasets.AGNEWS_FILES["test.csv"]
    assert load.call_args.args[1:] == file

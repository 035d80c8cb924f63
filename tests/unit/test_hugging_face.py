"""--arch hf:NAME: encoders of Hugging Face Transformers, tiny ones with random weights."""

import json
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import BertWordPieceTokenizer

import ranks
from conftest import parsed, parser, run
from input_pipeline.text_batches import encode_texts
from input_pipeline.tokenization import load_tokenizer
from models import lora, pretrained
from models.activation_checkpointing import checkpoint_activations
from models.hugging_face import Encoder, read_encoder
from test_training import exported_metadata
from training import checkpoint, classifier
from tuning.target_script import TargetScript

hf = pytest.importorskip("transformers", reason="needs transformers: the extra [hf]")
BASE = "--dataset headlines --subset 0.4 --bs 16 --epochs 2 --threads 1 --precision fp32"
TEXTS = ["[CLS] Stocks fall", "The team won the final after extra time", "A planet"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A BERT; and an XLM-RoBERTa and a GPT-2, whose padding is 1 and added by the tokenizer."""
    folder = tmp_path_factory.mktemp("hf")
    words = BertWordPieceTokenizer()
    words.train(str(ranks.ROOT / "input_pipeline" / "headlines.csv"), 1000, show_progress=False)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    bert = hf.BertConfig(vocab_size=1000, intermediate_size=64, **sizes)
    hf.BertForMaskedLM(bert).save_pretrained(folder / "masked")  # has no pooling layer
    hf.BertModel(bert).save_pretrained(folder / "bert")
    for name in ("bert", "masked"):
        words.save_model(str(folder / name))
    inputs = {"model_input_names": ["input_ids", "attention_mask"], "pad_token": "[UNK]"}
    tokenizer = hf.AutoTokenizer.from_pretrained(folder / "bert", **inputs)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    sizes |= {"vocab_size": len(tokenizer), "initializer_range": 0.5}
    for kind, pad in ((hf.XLMRobertaConfig, 1), (hf.GPT2Config, None)):
        config = kind(**sizes, pad_token_id=pad, num_labels=4)
        model = hf.AutoModelForSequenceClassification.from_config(config)
        model.save_pretrained(folder / config.model_type)
        tokenizer.save_pretrained(folder / config.model_type)
    return {path.name: path for path in folder.iterdir()}


def load(folder: Path, mix_at: str = "pooled") -> tuple[Encoder, torch.Tensor]:
    """The encoder of a folder, and the tokens of `TEXTS`."""
    saved = read_encoder(f"hf:{folder}")
    model = Encoder(**saved.encoder, classes=4, mix_at=mix_at)
    model.load(f"hf:{folder}", [f"LABEL_{number}" for number in range(4)])
    tokenizer, pad = load_tokenizer(saved.tokenizer), saved.encoder["pad"]
    return model.eval(), encode_texts(TEXTS, tokenizer, max_len=8, pad=pad)


@torch.no_grad()
def test_logits_are_those_of_transformers_own_pipeline(folders):
    """Of texts of several lengths, one of which is cut, in a padded batch and alone."""
    for name in ("xlm-roberta", "gpt2"):
        model, tokens = load(folders[name])
        pipeline = hf.pipeline("text-classification", str(folders[name]), top_k=None)
        cut = {"truncation": True, "max_length": 8, "function_to_apply": "none"}
        found = [sorted(map(tuple, map(dict.values, f))) for f in pipeline(TEXTS[1:], **cut)]
        theirs = torch.tensor([[score for _, score in of_text] for of_text in found])
        short = tokens[2:, tokens[2] != 1]
        assert short.shape[1] < 8
        for mine in (model(tokens[1:]), torch.cat([model(tokens[1:2]), model(short)])):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        other = Encoder(**read_encoder(f"hf:{folders[name]}").encoder, classes=3).eval()
        line, _ = other.load(f"hf:{folders[name]}", ["LABEL_3", "new", "label_1"])
        assert "begin anew: new" in line
        torch.testing.assert_close(other(tokens[1:])[:, [2, 0]], model(tokens[1:])[:, [1, 3]])
        assert (tokens == tokens[1, 0]).sum() == 3  # "[CLS]" in a text is ordinary text


def test_mixing_and_recomputation(folders):
    partner, weight = torch.tensor([1, 2, 0]), torch.tensor([0.7, 0.7, 1.0])
    for mix_at in ("pooled", "tokens"):
        model, tokens = load(folders["xlm-roberta"], mix_at)
        with torch.no_grad():
            alone, mixed = model(tokens), model(tokens, partner, weight)
        torch.testing.assert_close(mixed[2], alone[2])
        assert not torch.allclose(mixed[1], alone[1], rtol=0.01)
        blended = torch.lerp(alone[partner], alone, weight[:, None])
        assert torch.allclose(mixed, blended, rtol=0.01) == (mix_at == "pooled")
    calls = []
    layer = model.model.base_model.encoder.layer[0].intermediate
    layer.register_forward_hook(lambda *_: calls.append(1))
    assert checkpoint_activations(model.train()) == 2
    model(tokens).sum().backward()
    assert len(calls) == 2, "a layer is computed again in the backward pass"


@pytest.mark.process
@pytest.mark.ranks
def test_two_ranks_resumed_and_used_without_the_folder(folders, here):
    copy = shutil.copytree(folders["bert"], here / "bert")
    base = f"{BASE} --arch hf:{copy} --max_len 12"
    for more, out in (("--lora 4", "low_rank"), ("--ngd --mixup mixup --mix_at tokens", "run")):
        words = f"{base} {more} --save_every 2 --keep 99 --out {out}"
        assert "classifier begins anew" in ranks.run(f"transformer_test.py {words}", here, 2)
        files = checkpoint.latest_files(here / out)
        found = {checkpoint.load(path).progress["step"]: path for path in files}
        if out == "run":
            shutil.rmtree(copy)
        ranks.run(f"transformer_test.py --resume {found[8]} --out {out}-resumed", here, 2)
        ranks.same_run(here / out, here / f"{out}-resumed", files=["last"])  # best is chosen anew
    (here / "lines.txt").write_text("\n".join(TEXTS))
    assert TEXTS[0] in run("texts", "--checkpoint run --predict lines.txt")
    assert len(pickle.loads(pickle.dumps(classifier.load("run"))).predict(TEXTS)) == 3
    tuned = run("texts", base, "--weights run --freeze --max_len 9 --out tuned")
    assert "weights of" in tuned
    first, second = ranks.weights(here / "run"), ranks.weights(here / "tuned")
    changed = {name for name in first if not torch.equal(first[name], second[name])}
    assert changed == {"model.classifier.weight", "model.classifier.bias"}
    assert exported_metadata("texts")["pad"] == 0


def test_lora_trains_what_it_adds_and_is_merged(folders, here):
    base = f"{BASE} --arch hf:{folders['bert']} --max_len 12 --lora 4 --keep 2"
    run("texts", base, "--out run")
    found, (_, tokens) = checkpoint.load(here / "run"), load(folders["bert"])
    first = hf.BertModel.from_pretrained(folders["bert"]).state_dict()
    state = found.state["model"]
    for name, value in state.items():
        name = name.replace(".base_layer", "").removeprefix("model.bert.")
        assert name not in first or torch.equal(value, first[name]), name
    before, head = checkpoint.load(here / "run/last-1.pt").state["model"], "model.classifier.weight"
    assert not torch.equal(state[head], before[head]), "the classifier is trained"
    loaded = classifier.load("run").model
    layered = Encoder(**found.metadata["encoder"], classes=len(found.classes)).eval()
    lora.add_adapters(layered, tokens, rank=4, classifier=pretrained.classifier_names(layered))
    layered.load_state_dict(state)
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens), layered(tokens))
        for name, value in layered.named_parameters():
            value.mul_("lora_B" not in name)  # without what was learned
        assert not torch.allclose(loaded(tokens), layered(tokens))
    other, tokens = load(folders["xlm-roberta"])  # whose head has two layers
    lora.add_adapters(other, tokens, rank=2, classifier=other.head_names())
    trained = {name for name, p in other.named_parameters() if p.requires_grad}
    layers = {name.rpartition(".")[0] for name in trained if "lora_" not in name}
    assert layers == {"model.classifier.dense", "model.classifier.out_proj"}
    again = run("texts", base, "--lora 0 --weights run --epochs 1 --out again")
    assert "weights of run" in again
    assert "anew" not in again


class ReadLayers(torch.nn.Module):
    """torch's layer with a fast path, and a layer whose weight is read."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        self.read, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.nn.functional.linear(self.layer(x).mean(1), self.read.weight))


def test_lora_is_given_to_layers_that_are_called_and_is_in_what_is_evaluated():
    model, x = ReadLayers(), torch.randn(4, 5, 8)
    lora.add_adapters(model, x, rank=2, classifier=("head.weight", "head.bias"))
    assert model.training
    given = {name.rpartition(".lora_")[0] for name in model.state_dict() if ".lora_" in name}
    assert given == {"layer.linear1", "layer.linear2"}
    for name, value in model.named_parameters():
        torch.nn.init.normal_(value) if ".lora_" in name else None
    plain = ReadLayers()
    plain.load_state_dict(lora.merged(model.state_dict()))
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), plain.eval()(x))


def test_what_does_not_fit_is_refused(folders, refused, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    config = shutil.copytree(folders["bert"], Path("small")) / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 1000', '"vocab_size": 1'))
    for flags, expected in (
        ("bert", "did you mean hf:bert?"),
        ("hf:no/such-model", "hf:no/such-model: cannot be loaded (Cannot find"),
        (f"hf:{folders['bert']} --max_len 600", "cannot take texts of that length"),
        (f"hf:{folders['gpt2']} --mixup mixup --mix_at tokens", "mixed embeddings; use pooled"),
        ("hf:small", "its tokenizer is not supported"),
        (f"hf:{folders['masked']} --freeze", "pooler.dense.weight: the weights lack them"),
    ):
        refused("texts", f"--arch {flags}", expected, base=BASE)
    monkeypatch.setitem(sys.modules, "transformers", None)
    refused("texts", "--arch hf:small", "pip install transformers", base=BASE)


def test_fewer_rows_have_more_epochs(folders, here):
    words = (
        f"--dataset headlines --arch hf:{folders['bert']} --threads 1 --precision fp32 --no-test"
    )
    words += " --val_fraction 0.1 --eval_every 99 --max_len 8"

    def flags(more: str) -> dict:
        run("texts", words, more, "--out run")
        found = json.loads(Path("run", "config.json").read_text())["flags"]
        shutil.rmtree("run")
        return found

    for more, epochs in (
        ("--bs 1 --subset 0.4", 3),  # 144 rows, 144 steps an epoch
        ("--bs 8 --subset 0.4", 14),
        ("--bs 8 --subset 0.04", 40),
        ("--bs 8 --subset 0.04 --epochs 1", 1),
    ):
        found = flags(more)
        assert (found["epochs"], found["warmup"]) == (epochs, pytest.approx(min(5, epochs / 10)))


def test_defaults_and_flags_without_effect():
    words = "--arch hf:any --prior naive_bayes --vocab_size 500"
    args = parsed("texts", words)
    assert (args.lr, args.usual_batch(1), args.head) == (5e-5, 8, "random")
    frozen, low_rank = parsed("texts", words, "--freeze"), parsed("texts", words, "--lora 4")
    assert (frozen.head, low_rank.lr) == ("probe", 5e-4)
    raced = [
        TargetScript.read("transformer_test.py", words.split()),
        TargetScript.read("resnet50_test.py", ["--weights", "DEFAULT", "--freeze"]),
    ]
    assert [script.flags({})["epochs"] for script in raced] == [5, 5], "those of pretrained weights"
    assert [script.usual("bs") for script in raced] == [8, 16]
    flags = parser("texts")
    lines = flags.unused(flags.given(words.split()), vars(args))
    assert ["--arch transformer" in line for line in lines] == [True, True]

"""--arch and --optimizer MODULE:NAME: a network and an optimizer of the user's own."""

import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import ranks
import resnet50_test
from cli import options
from conftest import SHORT, for_each, parser, run, write, write_images
from optimizer_cases import assert_same
from package.api import fit
from training import checkpoint
from training.classifier import load
from tuning import compare
from tuning.target_script import TargetScript

PAGE = ranks.ROOT / "docs" / "library.md"
BAG = """import torch
from torch import nn

class Bag(nn.Module):
    def __init__(self, classes, vocab_size, pad, width=8):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width, padding_idx=pad)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens):
        return self.head(self.embed(tokens).mean(1))

class Mixed(Bag):
    def forward(self, tokens, partner=None, weight=None):
        pooled = self.embed(tokens).mean(1)
        if weight is not None:
            pooled = torch.lerp(pooled[partner], pooled, weight[:, None])
        return self.head(pooled)
"""
WRONG = """from collections import deque
import torch

number = 3
def build(classes, width=2):
    if width % 2:
        raise KeyError("odd")
    return torch.nn.Flatten() if width else None
class Narrow(torch.nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.layer = torch.nn.Linear(3, classes)
    def forward(self, x):
        return self.layer(x)
class Viewing(torch.nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.layer, self.head = torch.nn.Conv2d(1, 4, 3), torch.nn.Linear(144, classes)
    def forward(self, x):
        return self.head(self.layer(x).view(-1, 144))
class Auxiliary(torch.nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.head = torch.nn.Linear(64, classes)
    def forward(self, x):
        logits = self.head(x.flatten(1))
        return (logits, logits) if self.training else logits
def many(groups, lr):
    return 3
class Closure(torch.optim.SGD):
    def step(self, closure):
        pass
class ObjectsInSettings(torch.optim.SGD):
    def __init__(self, groups, lr):
        super().__init__([{**group, "own": object} for group in groups], lr, momentum=0.9)
    def step(self):
        assert all(group["own"] is object for group in self.param_groups)
        super().step()
class ObjectsInState(torch.optim.SGD):
    def step(self):
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["last"] = deque([1.0])
class Wrapping(torch.optim.SGD):
    def state_dict(self):
        return {"inner": super().state_dict(), "names": {"a"}}
    def load_state_dict(self, state):
        assert state["names"] == {"a"}
        super().load_state_dict(state["inner"])
"""
OWN = f"--dataset digits --subset 0.1 {SHORT} --arch my_parts:build --model_args width=8"
OPTIMIZER = "--optimizer my_parts:Lion --lr 3e-3 --opt_args betas=0.9,0.95"


@pytest.fixture
def parts(here, monkeypatch):
    """The folder with my_parts.py, the example of the page, and other modules."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    [example] = [
        b for b in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if "Lion" in b
    ]
    files = {"my_parts": example, "texts": BAG, "wrong": WRONG, "broken": "import torch\n1 / 0\n"}
    yield write(here, **{f"{name}__py": text for name, text in files.items()})
    for name in files:
        sys.modules.pop(name, None)


def test_the_example_of_the_page_trains_and_is_used_as_any_network(parts):
    more = f"{OPTIMIZER} --epochs 2 --ema 0.9 --accumulate 2 --micro_bs 8 --keep 9"
    run("images", OWN, more, "--out whole")
    trained = checkpoint.load(parts / "whole")
    assert trained.state["model"]["0.weight"].shape == (8, 1, 3, 3), "width, and grey images"
    assert trained.state["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.95)
    run("images", "--resume whole/last-1.pt --out resumed")
    ranks.same_run(parts / "whole", parts / "resumed", files=["last"])
    with open(parts / "my_parts.py", "a") as file:
        file.write("# another version\n")
    sys.modules.pop("my_parts")
    console = run("images", "--resume whole/last-1.pt --out changed")
    assert re.search(r"own_code my_parts=(\w{7}) \(was my_parts=(?!\1)\w{7}\)", console)

    run("images", "--checkpoint whole --export model.safetensors")
    run("images", OWN, "--weights model.safetensors --freeze --lr 0.01 --out frozen")
    assert_same(ranks.weights(parts / "frozen")["0.weight"], trained.weights["0.weight"])

    write_images(parts / "photos", "ab", rows=4, size=8)
    flags = {"epochs": 1, "bs": 4, "image_size": 8, "arch": "my_parts:build", "out": "photos/run"}
    own = {"optimizer": "my_parts:Lion", "lr": 1e-3, "model_args": {"width": 4}}
    images = [torch.zeros(8, 8, 3, dtype=torch.uint8).numpy()]
    with ThreadPoolExecutor() as pool:  # signals reach the main thread alone
        found = pool.submit(fit, parts / "photos", **flags, **own).result().probabilities(images)
    assert_same(load("photos/run").probabilities(images), found)

    script = TargetScript.read("resnet50_test.py", f"{OWN} {OPTIMIZER}".split())
    script.check(script.arguments, processes=1)
    assert script.usual("lr") == 3e-3
    shared = TargetScript.read("resnet50_test.py", OWN.split())
    arms = compare.read_arms(
        shared, OWN.split(), flag="optimizer", values=["sgd", "my_parts:Lion@0.002", "ngd@1"]
    )
    assert [arm.rate for arm in arms] == [resnet50_test.LEARNING_RATES["sgd"], 2e-3, 1.0]
    words = ["--recipe", "tuned_resnet20"]
    shared = TargetScript.read("resnet50_test.py", words)
    arms = compare.read_arms(shared, words, flag="optimizer", values=["ngd", "sgd"])
    chosen = [arm.script.flags({}) for arm in arms]
    assert [flags["weight_decay"] is None for flags in chosen] == [False, True], "of NGD alone"


def test_what_torch_does_not_read_back_is_left_out_of_a_checkpoint(parts):
    words = f"{OWN} --lr 0.1 --epochs 2 --keep 9"
    run("images", words, "--optimizer wrong:ObjectsInSettings --out whole")
    run("images", "--resume whole/last-1.pt --out resumed")
    ranks.same_run(parts / "whole", parts / "resumed", files=["last"])
    run("images", words, "--optimizer wrong:Wrapping --out wrapped")
    run("images", "--resume wrapped/last-1.pt --out resumed2")
    ranks.same_run(parts / "wrapped", parts / "resumed2", files=["last"])
    for name, more in (("one", ""), ("local", "--sync local --local_steps 2")):
        console = run("images", words, "--optimizer wrong:ObjectsInState --out", name, more)
        assert console.count("warning: the state of ObjectsInState holds objects") == 1
        console = run("images", f"--resume {name}/last-1.pt --out again", code=2)
        assert "lacks the state of ObjectsInState" in console
        assert "all  " in run("images", f"--checkpoint {name} --evaluate")


def test_texts_and_several_ranks_take_own_parts(parts):
    words = f"--dataset headlines --subset 0.2 {SHORT} --model_args width=4"
    run("texts", words, "--arch texts:Bag --out bag")
    assert load("bag").predict(["Stocks rise"])[0] in load("bag").classes
    run("texts", words, "--arch texts:Mixed --mixup mixup --out mixed")
    texts = parser("texts")
    older = {**texts.defaults(), "arch": "hf:x", "model_args": {"width": 8}}
    assert options.restored_flags(older, texts)["model_args"] == {}, "they were kept and not used"
    for name, more in (("ddp", OPTIMIZER), ("fsdp", "--optimizer sgd --lr 0.1 --parallel fsdp")):
        ranks.run(f"resnet50_test.py {OWN} {more} --bs 16 --out {name}", parts, 2)
        assert ranks.weights(parts / name)["0.weight"].shape == (8, 1, 3, 3)


def test_what_is_wrong_with_a_part_is_said_in_a_line(parts, refused):
    base = {
        "images": f"--dataset digits --subset 0.1 {SHORT}",
        "texts": f"--dataset headlines {SHORT}",
    }
    cases = [
        ("images", "--arch no_such:build", "there is no module no_such"),
        ("images", "--arch broken:build", "broken.py, line 2"),
        ("images", "--arch my_parts:biuld", "did you mean build?"),
        ("images", "--arch wrong:number", "has no function or class 'number'"),
        ("images", "--arch my_parts:build --model_args widht=3", "keyword argument 'widht'"),
        ("images", "--arch resnet20 --model_args width=3", "--arch resnet20 has no such setting"),
        ("images", "--arch wrong:build --model_args width=3", "wrong.py, line 7"),
        ("images", "--arch wrong:build --model_args width=0", "NoneType"),
        ("images", "--arch wrong:build", "returned (2, 64) for two inputs in evaluation; logits"),
        ("images", "--arch wrong:Narrow", "failed to take an input of (2, 1, 8, 8)"),
        ("images", "--arch wrong:Viewing", ".flatten(1) takes what .view does not"),
        ("images", "--arch wrong:Auxiliary", "returned tuple for two inputs in training"),
        ("images", "--optimizer my_parts:Lion", "has no default rate; give --lr"),
        ("images", "--optimizer wrong:Closure --lr 1", "its step needs arguments"),
        ("images", "--optimizer wrong:many --lr 1", "makes no torch.optim.Optimizer"),
        ("images", "--optimizer torch.optim:LBFGS --lr 1", "failed to make (ValueError: LBFGS"),
        ("images", "--optimizer my_parts:Lion --lr 1 --backend cudagraph", "not supported with"),
        ("texts", "--arch texts:Bag --mixup mixup", "takes no partner and weight"),
    ]
    for_each(cases, lambda name, words, said: refused(name, words, said, base[name]))

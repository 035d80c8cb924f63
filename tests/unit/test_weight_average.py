"""The moving average of the weights: its formula, what is evaluated and kept, and its state."""

import re

import torch
from torch import nn

import ranks
from conftest import run
from training.weight_average import WeightAverage

FLAGS = "--dataset digits --arch resnet8 --bs 64 --lr 0.1 --epochs 2 --threads 1 --ema 0.9"


def test_it_is_the_average_of_the_formula_and_goes_on_from_its_state():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    average = WeightAverage(model, 0.6)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for step in range(1, 30):
        for p in model.parameters():
            nn.init.normal_(p)
        model(torch.randn(8, 3, dtype=torch.float64) * 3 + 1)  # BatchNorm's statistics
        average.update()
        decay = min(0.6, step / (step + 10)) if step > 1 else 0.0  # the first step is copied
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                expected[name] = decay * expected[name] + (1 - decay) * value
            else:
                expected[name] = value.clone()
        if step == 7:
            state, average = average.state_dict(), WeightAverage(model, 0.6)
            average.load_state_dict(state)
    for name, value in average.model.state_dict().items():
        torch.testing.assert_close(value, expected[name])
    assert not any(p.requires_grad for p in average.model.parameters())


def test_the_average_is_evaluated_kept_and_used(here):
    run("images", FLAGS, "--out run")
    run("images", FLAGS, "--ema 0 --out plain")
    state = torch.load("run/last.pt", weights_only=True)
    plain = torch.load("plain/last.pt", weights_only=True)
    assert all(torch.equal(p, q) for p, q in zip(state["model"].values(), plain["model"].values()))
    assert plain["average"] is None
    assert not torch.equal(state["average"]["weights"]["fc.weight"], state["model"]["fc.weight"])
    averaged, own = (ranks.metrics(here / name)[-1] for name in ("run", "plain"))
    assert averaged["train_loss"] == own["train_loss"]
    assert averaged["test_loss"] != own["test_loss"]
    report = run("images", "--checkpoint run --evaluate")
    assert re.search(rf"all +{100 * averaged['test_accuracy']:.2f} %", report)

    run("images", "--resume plain --ema 0.9 --epochs 3")
    state = torch.load("plain/last.pt", weights_only=True)
    assert state["average"]["steps"] == -(-1437 // 64)  # of the third epoch

"""A sharded checkpoint from a stranger runs no code: it is refused in one line."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from conftest import each_of
from distributed import sharded_checkpoint
from distributed.world import World
from errors import InputError
from test_checkpoint import Trap, state_of
from training import checkpoint


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """The folder of a sound sharded checkpoint of a linear layer."""
    model = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    sharded_checkpoint.save(tmp_path / "shards-1", model, optimizer, World())
    return tmp_path / "shards-1"


def refused_everywhere(folder: Path, message: str) -> None:
    """Both ways to read the folder end with an InputError."""
    with pytest.raises(InputError, match=message):
        sharded_checkpoint.load_whole_model(folder)
    model = nn.Linear(3, 4)
    with pytest.raises(InputError, match=message):
        sharded_checkpoint.load(folder, model, torch.optim.AdamW(model.parameters()), World())


def rewrite(folder: Path, change: Callable[[Any], None]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@each_of("place", ["planner_data", "storage_data", "whole"])
def test_code_in_the_description_does_not_run(place, shards, tmp_path):
    trap, sound = Trap(tmp_path / "sprung"), (shards / ".metadata").read_bytes()
    if place == "whole":
        (shards / ".metadata").write_bytes(pickle.dumps(trap))
    else:
        rewrite(shards, lambda metadata: setattr(metadata, place, {"x": trap}))
    refused_everywhere(shards, "which does not belong in a checkpoint")
    assert not (tmp_path / "sprung").exists()
    (shards / ".metadata").write_bytes(sound)


def test_an_entry_that_torch_would_unpickle_is_refused(shards):
    entry = {"model/weight": BytesStorageMetadata()}
    rewrite(shards, lambda metadata: metadata.state_dict_metadata.update(entry))
    refused_everywhere(shards, "BytesStorageMetadata, which does not belong")


@each_of("name", ["../elsewhere/__0_0.distcp", "/etc/passwd", "weights.bin"])
def test_a_file_outside_the_folder_is_refused(name, shards):
    def elsewhere(metadata: Any) -> None:
        index = next(iter(metadata.storage_data))
        part = metadata.storage_data[index]
        metadata.storage_data[index] = dataclasses.replace(part, relative_path=name)

    rewrite(shards, elsewhere)
    refused_everywhere(shards, "refers to a file")


@each_of("name", ["../elsewhere", "/tmp/shards-1", "shards-1/../../x", "shards-x"])
def test_a_folder_elsewhere_is_refused(name, tmp_path):
    checkpoint.save(tmp_path / "last.pt", {**state_of(1), "shards": name})
    with pytest.raises(InputError, match="not a name such as shards-1"):
        checkpoint.load(tmp_path / "last.pt")

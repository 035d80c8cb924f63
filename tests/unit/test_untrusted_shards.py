"""A sharded checkpoint from a stranger runs no code: it is refused in one line."""

from __future__ import annotations

import dataclasses
import pickle
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


def test_a_description_of_more_than_tensors_in_the_folder_is_refused(shards, tmp_path):
    """Code in it, an entry that torch would unpickle, and files outside."""
    trap, description = Trap(tmp_path / "sprung"), shards / ".metadata"
    sound, unpickled = description.read_bytes(), {"model/weight": BytesStorageMetadata()}

    def elsewhere(metadata: Any, name: str) -> None:
        index, part = next(iter(metadata.storage_data.items()))
        metadata.storage_data[index] = dataclasses.replace(part, relative_path=name)

    changes = [
        (lambda it: setattr(it, "planner_data", {"x": trap}), "does not belong in a checkpoint"),
        (lambda it: setattr(it, "storage_data", {"x": trap}), "does not belong in a checkpoint"),
        (lambda it: it.state_dict_metadata.update(unpickled), "BytesStorageMetadata, which does"),
        (lambda it: elsewhere(it, "../elsewhere/__0_0.distcp"), "refers to a file"),
        (lambda it: elsewhere(it, "/etc/passwd"), "refers to a file"),
        (lambda it: elsewhere(it, "weights.bin"), "refers to a file"),
    ]
    for change, message in changes:
        metadata = pickle.loads(sound)
        change(metadata)
        description.write_bytes(pickle.dumps(metadata))
        refused_everywhere(shards, message)
    description.write_bytes(pickle.dumps(trap))
    refused_everywhere(shards, "does not belong in a checkpoint")
    assert not (tmp_path / "sprung").exists()


@each_of("name", ["../elsewhere", "/tmp/shards-1", "shards-1/../../x", "shards-x"])
def test_a_folder_elsewhere_is_refused(name, tmp_path):
    checkpoint.save(tmp_path / "last.pt", {**state_of(1), "shards": name})
    with pytest.raises(InputError, match="not a name such as shards-1"):
        checkpoint.load(tmp_path / "last.pt")

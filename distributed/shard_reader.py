"""Reads a sharded checkpoint that may come from a stranger without running code from it.

    reader = ShardReader(folder)
    dcp.load(targets, storage_reader=reader)

torch writes the description of a sharded checkpoint, `.metadata`, as a pickle and reads it with
pickle.load, which runs whatever the file asks for; entries that are not tensors are unpickled in
the same way. Here the description may consist of torch's own classes alone, and of tensors.
"""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

SHARD_FILE = re.compile(r"__\d+_\d+\.distcp")
METADATA_CLASSES = (
    *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "TensorProperties"),
    *("ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"),
)
ALLOWED = {  # names that a description may use, by module; beside them the dtypes of torch
    "torch.distributed.checkpoint.metadata": METADATA_CLASSES,
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "pathlib": ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
    "collections": ("OrderedDict",),
}


class MetadataUnpickler(pickle.Unpickler):
    """Unpickles the classes of `ALLOWED` and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if name in ALLOWED.get(module, ()) or is_dtype:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"its description asks for {module}.{name}, which does not belong in a checkpoint"
        )


class ShardReader(FileSystemReader):
    """torch's reader of sharded checkpoints, for files that need not be trusted."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the description of the checkpoint: tensors in files of its own folder.

        Raises:
            pickle.UnpicklingError: it asks for another class or file.
        """
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata: Metadata = MetadataUnpickler(file).load()
        for part in metadata.storage_data.values():
            if not SHARD_FILE.fullmatch(str(part.relative_path)) or part.transform_descriptors:
                raise pickle.UnpicklingError(f"it refers to a file {str(part.relative_path)!r}")
        return metadata

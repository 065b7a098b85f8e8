"""Checkpoints of several processes: `torch.distributed.checkpoint` in a folder, written atomically.

All processes hold the tensors of the model and the optimizer, or shards of them; each writes a part of them.
Everything else belongs to rank 0. It is small, and is stored in one more tensor: the bytes of a file like that of a
single process.
"""

import io
import os
import pickle
import re
import shutil
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from dpquant_compile.errors import CheckpointError
from dpquant_compile.privacy.atomic_file import sync_folder
from dpquant_compile.privacy.distributed.world import World

__all__ = ["read_folder", "save_folder"]

_PLAIN = "plain"
_MARK = "\0tensor "  # marks a tensor in the plain part; the tensor's name follows


def save_folder(world: World, path: Path, plain: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Write a checkpoint: `plain` of rank 0, and nested `tensors`, equal on all processes or sharded over them.

    Ensures: `path` is a symlink to a folder beside it. It points to the old checkpoint until the new one is complete,
    then to the new one. All processes must see that folder.
    """
    parts: dict[str, Tensor] = {}
    nested = _without_tensors(tensors, "", parts)
    data = world.on_first("the small part of a checkpoint", lambda: _bytes_of({**plain, "tensors": nested}))
    parts[_PLAIN] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    folder = path.with_name(f".{path.name}.{world.on_first('the name of a checkpoint', lambda: uuid.uuid4().hex)}")
    with world.guarded("for the parts of a checkpoint"):
        save(parts, checkpoint_id=folder)  # returns when all processes are done
    world.on_first("the place of a checkpoint", lambda: _place(path, folder))


def read_folder(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The plain part and the nested tensors of a checkpoint; each process reads by itself, on any number of them.

    The folder's index is a pickle of torch's: read only checkpoints that you trust.
    """
    reader = _Reader(path)
    found = reader.read_metadata().state_dict_metadata
    parts = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in found.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(parts, storage_reader=reader, no_dist=True)
    plain: dict[str, Any] = torch.load(io.BytesIO(parts.pop(_PLAIN).numpy().tobytes()), weights_only=True)
    return plain, _with_tensors(plain.pop("tensors"), parts)


class _Plain(pickle.Unpickler):
    """Reads an index of torch's; refuses everything that could run code."""

    ALLOWED: ClassVar[dict[str, set[str]]] = {
        "torch.distributed.checkpoint.metadata": {
            *("Metadata MetadataIndex TensorStorageMetadata TensorProperties ChunkStorageMetadata".split()),
            *("BytesStorageMetadata StorageMeta _MEM_FORMAT_ENCODING".split()),
        },
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch.serialization": {"_get_layout"},
        "pathlib": {"Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
        "pathlib._local": {"PosixPath"},  # from Python 3.13 on
        "torch": {"Size"} | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    }

    def find_class(self, module: str, name: str) -> Any:
        if name not in self.ALLOWED.get(module, ()):
            raise CheckpointError(f"the index names {module}.{name}, which is not part of a checkpoint")
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            found: Metadata = _Plain(file).load()
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


def _bytes_of(state: Mapping[str, Any]) -> bytes:
    data = io.BytesIO()
    torch.save(dict(state), data)
    return data.getvalue()


def _without_tensors(value: Any, name: str, parts: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        assert name not in parts, name
        parts[name] = value.detach()
        return _MARK + name
    if isinstance(value, Mapping):
        return {key: _without_tensors(one, f"{name}.{key}".lstrip("."), parts) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_without_tensors(one, f"{name}.{i}".lstrip("."), parts) for i, one in enumerate(value))
    return value


def _with_tensors(value: Any, parts: Mapping[str, Tensor]) -> Any:
    if isinstance(value, str) and value.startswith(_MARK):
        return parts[value.removeprefix(_MARK)]
    if isinstance(value, dict):
        return {key: _with_tensors(one, parts) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_with_tensors(one, parts) for one in value)
    return value


def _place(path: Path, folder: Path) -> None:
    """Point `path` to a complete folder, in one step, and remove the folders it pointed to before."""
    sync_folder(folder)  # make its names durable before the old folder is removed
    link = path.with_name(f".{path.name}.link")
    link.unlink(missing_ok=True)
    link.symlink_to(folder.name)
    try:
        os.replace(link, path)
    except OSError as error:
        raise CheckpointError(f"{path} is in the way of the checkpoint: {error}. Fix: choose another path") from error
    sync_folder(path.parent)
    # Only folders of this path: `.a.b.<hex>` belongs to a checkpoint named a.b, not to one named a.
    ours = re.compile(re.escape(f".{path.name}.") + "[0-9a-f]{32}")
    for other in path.parent.iterdir():
        if other != folder and ours.fullmatch(other.name) and other.is_dir():
            shutil.rmtree(other, ignore_errors=True)  # the new one is in place; the next save retries what fails here

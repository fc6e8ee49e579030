"""State of all ranks in one checkpoint of torch.distributed.checkpoint (DCP), independent of the layout.

    exp_avg/vit.layers.0.mlp.fc1.weight    (64, 16)     rank 0 wrote rows [0, 32), rank 1 rows [32, 64)
    random/3                               bytes        what rank 3 draws next

A tensor is stored under its full shape, in the chunks (chunks.py) that the ranks held. Whoever reads takes
the elements of the chunks that it holds now. PyTorch's planner lets one rank write what several ranks hold,
and checks that the chunks fill the tensor.
"""

from __future__ import annotations

import io
import pickle
import re
import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from hpnb.hybrid.checkpoint.chunks import chunks_of
from hpnb.placement import Placement

# What may be in a value beside tensors, numbers and plain containers.
_SAFE: list[Any] = [Counter, OrderedDict, defaultdict]


@dataclass
class ShardedState:
    """What a rank holds of a state.

    Attributes:
        tensors: {key: (placement, shard)}.
        values: {key: bytes}, see `pack`. Of several values under one key, one is written.
    """

    tensors: dict[str, tuple[Placement, torch.Tensor]] = field(default_factory=dict)
    values: dict[str, bytes] = field(default_factory=dict)

    def update(self, other: ShardedState) -> None:
        self.tensors.update(other.tensors)
        self.values.update(other.values)


def pack(what: str, value: Any) -> bytes:
    """`value` as bytes that are safe to load.

    Args:
        what: its name in the error.

    Raises:
        ValueError: it holds objects of other classes than tensors, numbers, texts and containers of them.
    """
    stream = io.BytesIO()
    torch.save(value, stream)
    try:
        unpack(stream.getvalue())
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        thing = "an object of a class" if named is None else f"a {named[1].rpartition('.')[2]}"
        raise ValueError(
            f"{what} holds {thing}, which is not safe to load from a file; put tensors, numbers, texts, and "
            "lists and dicts of them there"
        ) from error
    return stream.getvalue()


def unpack(value: bytes) -> Any:
    """The value that was packed, with tensors on the CPU."""
    with torch.serialization.safe_globals(_SAFE):
        return torch.load(io.BytesIO(value), map_location="cpu", weights_only=True)


def write_state(state: ShardedState, folder: Path, group: dist.ProcessGroup) -> None:
    """Write the states of all ranks into `folder`. All ranks call it.

    Raises:
        RuntimeError: on all ranks, what failed on one.
    """
    # Nothing to copy ahead: what comes from a GPU has been copied, and CPU ranks need no context on one.
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)
    with _one_sentence():
        save({}, storage_writer=writer, planner=_SavePlanner(state), process_group=group)


class StateReader:
    """Reads such a folder.

    Attributes:
        shapes: {key of a tensor: its full shape}.
        dtypes: of them.
        values: keys of values.

    Raises:
        ValueError: it cannot be read.
    """

    def __init__(self, folder: Path, written_by: str) -> None:
        self._folder = folder
        try:
            self._metadata = FileSystemReader(folder).read_metadata()
        except Exception as error:  # a pickle of another version of PyTorch may fail in any way
            raise ValueError(
                f"{folder} cannot be read by PyTorch {torch.__version__} ({_first_line(error)}); it was "
                f"written by {written_by}"
            ) from error
        entries = self._metadata.state_dict_metadata
        tensors = {key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
        self.shapes = {key: tuple(entry.size) for key, entry in tensors.items()}
        self.dtypes = {key: entry.properties.dtype for key, entry in tensors.items()}
        self.values = [key for key in entries if key not in tensors]

    def read(
        self,
        tensors: Mapping[str, tuple[Placement, torch.Tensor]],
        values: Iterable[str],
        group: dist.ProcessGroup,
    ) -> dict[str, Any]:
        """Fill the tensors, {key: (placement, shard)}, and return the values by key. All ranks call it, each
        for what it needs."""
        planner = _LoadPlanner(tensors, values)
        with _one_sentence(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reader = FileSystemReader(self._folder)
            load({}, storage_reader=reader, planner=planner, process_group=group)
        return planner.loaded


class _SavePlanner(DefaultSavePlanner):
    def __init__(self, state: ShardedState) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._values = state.values
        self._chunks: dict[MetadataIndex, torch.Tensor] = {}
        self._items = [WriteItem(MetadataIndex(k), WriteItemType.BYTE_IO) for k in state.values]
        for key, (placement, shard) in state.tensors.items():
            for offsets, view in chunks_of(placement, shard.detach()):
                index = MetadataIndex(key, offsets)
                chunk = ChunkStorageMetadata(torch.Size(offsets), view.shape)
                data = TensorWriteData(chunk, TensorProperties(view.dtype), torch.Size(placement.shape))
                self._items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
                self._chunks[index] = view

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(list(self._items))
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._values[write_item.index.fqn])
        return self._chunks[write_item.index]


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, tensors: Mapping[str, tuple[Placement, torch.Tensor]], values: Iterable[str]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._tensors, self._values = tensors, list(values)
        self._chunks: dict[MetadataIndex, torch.Tensor] = {}
        self.loaded: dict[str, Any] = {}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        none = torch.Size([0])
        items = [
            ReadItem(LoadItemType.BYTE_IO, MetadataIndex(key), none, MetadataIndex(key), none, none)
            for key in self._values
        ]
        for key, (placement, shard) in self._tensors.items():
            stored = self.metadata.state_dict_metadata[key]
            assert isinstance(stored, TensorStorageMetadata)
            for offsets, view in chunks_of(placement, shard):
                self._chunks[MetadataIndex(key, offsets)] = view
                items += _overlaps(key, offsets, view.shape, stored.chunks)
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        view = self._chunks[read_item.dest_index]
        for dim, (start, size) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, start, size)
        return view

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.loaded[read_item.dest_index.fqn] = unpack(value.getvalue())


def _overlaps(
    key: str, start: tuple[int, ...], sizes: torch.Size, chunks: Iterable[ChunkStorageMetadata]
) -> list[ReadItem]:
    """What to read of each stored chunk for one that this rank holds."""
    items = []
    for chunk in chunks:
        low = [max(a, b) for a, b in zip(start, chunk.offsets, strict=True)]
        high = [
            min(a + n, b + m)
            for a, n, b, m in zip(start, sizes, chunk.offsets, chunk.sizes, strict=True)
        ]  # fmt: skip
        if all(a < b for a, b in zip(low, high, strict=True)):
            items.append(
                ReadItem(
                    LoadItemType.TENSOR,
                    MetadataIndex(key, start),
                    torch.Size(a - b for a, b in zip(low, start, strict=True)),
                    MetadataIndex(key, chunk.offsets),
                    torch.Size(a - b for a, b in zip(low, chunk.offsets, strict=True)),
                    torch.Size(b - a for a, b in zip(low, high, strict=True)),
                )
            )
    return items


@contextmanager
def _one_sentence() -> Iterator[None]:
    """PyTorch raises the stacks of all ranks, in a BaseException: raise the first rank's error instead."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        raise RuntimeError(f"rank {rank}: {_first_line(cause)}") from cause


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: " + str(error).strip().partition("\n")[0]

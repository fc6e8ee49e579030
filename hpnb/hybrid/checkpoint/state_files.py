"""State of all ranks in safetensors files and one index, independent of the layout.

    state/index.json                  {key: its full shape, its dtype, its chunks}, and where each value is
    state/rank-00000.safetensors      the chunks and values that rank 0 wrote
    state/rank-00001.safetensors

    exp_avg/vit.layers.0.mlp.fc1.weight    (64, 16)     rank 0 wrote rows [0, 32), rank 1 rows [32, 64)
    random/3                               bytes        what rank 3 draws next

A tensor is stored under its full shape, in the chunks (chunks.py) that the ranks held. Whoever reads takes
the elements of the chunks that it holds now. Of what several ranks hold, the first rank writes one copy.

Loading runs no code from these files: the index is JSON, tensors are safetensors, and a value is unpickled by
torch.load with weights_only, which knows tensors and plain containers.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open

from hpnb.hybrid.checkpoint.agreement import attempt, gather_objects
from hpnb.hybrid.checkpoint.chunks import Offsets, chunks_of
from hpnb.hybrid.checkpoint.write_files import DTYPES, WrittenFiles, write_bytes, write_safetensors
from hpnb.placement import Placement

INDEX = "index.json"
_FILE = re.compile(r"rank-\d{5}\.safetensors")

# What may be in a value beside tensors, numbers and plain containers.
_SAFE: list[Any] = [Counter, OrderedDict, defaultdict]


@dataclass
class ShardedState:
    """What a rank holds of a state: tensors, {key: (placement, shard)}, and values, {key: bytes by `pack`}.
    Of several values under one key, one is written."""

    tensors: dict[str, tuple[Placement, torch.Tensor]] = field(default_factory=dict)
    values: dict[str, bytes] = field(default_factory=dict)

    def update(self, other: ShardedState) -> None:
        self.tensors.update(other.tensors)
        self.values.update(other.values)


def pack(what: str, value: Any) -> bytes:
    """`value`, called `what` in errors, as bytes that are safe to load."""
    try:
        return _packed(value)
    except _NOT_PACKED as error:
        place, unsafe = _find_unsafe(value)
        instead = ""
        if isinstance(unsafe, np.ndarray | np.generic):
            thing = f"a numpy array {unsafe.shape}" if isinstance(unsafe, np.ndarray) else "a number of numpy"
            instead = ": torch.from_numpy(array) is one, or array.tolist()" if unsafe.shape else ": x.item()"
        elif callable(unsafe) and not isinstance(unsafe, type):
            thing = f"a function, {getattr(unsafe, '__name__', type(unsafe).__name__)}"
        else:
            thing = f"a {type(unsafe).__name__}"
        where = f" at {place}" if place else ""
        raise ValueError(
            f"{what} holds {thing}{where}, which is not safe to load from a file; put tensors, numbers, "
            f"texts, and lists and dicts of them there{instead}"
        ) from error


_NOT_PACKED = pickle.UnpicklingError, pickle.PicklingError, AttributeError, TypeError


def _packed(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    unpack(stream.getvalue())
    return stream.getvalue()


def _find_unsafe(value: Any, place: str = "") -> tuple[str, Any]:
    """(where in a container that cannot be packed, what) of the first thing in it that cannot."""
    if isinstance(value, list | tuple):
        inside = dict(enumerate(value))
    else:
        inside = dict(value) if isinstance(value, Mapping) else {}
    for key, child in inside.items():
        try:
            _packed(child)
        except _NOT_PACKED:
            return _find_unsafe(child, f"{place}[{key!r}]")
    return place, value


def unpack(value: bytes) -> Any:
    """The value that was packed, with tensors on the CPU."""
    with torch.serialization.safe_globals(_SAFE):
        return torch.load(io.BytesIO(value), map_location="cpu", weights_only=True)


# --- write -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _StoredTensor:
    """An entry of the index: the full shape, the dtype's name in torch, and the chunks, [(file, offsets,
    sizes)]. In the file a chunk is called "KEY @ OFFSETS"."""

    shape: tuple[int, ...]
    dtype: str
    chunks: list[tuple[str, Offsets, Offsets]]


def write_state(state: ShardedState, folder: Path, group: dist.ProcessGroup) -> WrittenFiles:
    """Write the states of all ranks into `folder`, which is made. All ranks call it; each returns the files
    that it wrote, by their names in `folder`."""
    views = {
        (key, offsets): view
        for key, (placement, shard) in state.tensors.items()
        for offsets, view in chunks_of(placement, shard.detach())
    }
    chunks = [(key, offsets, tuple(view.shape)) for (key, offsets), view in views.items()]
    full = {key: (placement.shape, _name(shard)) for key, (placement, shard) in state.tensors.items()}
    described = gather_objects((full, chunks, list(state.values)), group)
    rank = group.rank()
    tensors, values = attempt(lambda: _assign(described), group)
    file = _file_of(rank)
    to_write: dict[str, torch.Tensor] = {
        _chunk_name(key, offsets): views[key, offsets]
        for key, stored in tensors.items()
        for of_file, offsets, _ in stored.chunks
        if of_file == file
    }
    to_write |= {
        key: torch.frombuffer(bytearray(state.values[key]), dtype=torch.uint8)
        for key, of_file in values.items()
        if of_file == file
    }

    def write() -> WrittenFiles:
        folder.mkdir(parents=True, exist_ok=True)
        written = {file: write_safetensors(folder / file, to_write)}
        if rank == 0:
            index = {"tensors": {key: vars(stored) for key, stored in tensors.items()}, "values": values}
            written[INDEX] = write_bytes(folder / INDEX, json.dumps(index).encode())
        return written

    written: WrittenFiles = attempt(write, group)
    return written


def _assign(described: list[Any]) -> tuple[dict[str, _StoredTensor], dict[str, str]]:
    """What each rank writes: ({key: tensor}, {key of a value: file}). The same on all ranks."""
    tensors: dict[str, _StoredTensor] = {}
    values: dict[str, str] = {}
    known: set[tuple[str, Offsets]] = set()
    for rank, (full, chunks, keys) in enumerate(described):
        for key, (shape, dtype) in full.items():
            stored = tensors.setdefault(key, _StoredTensor(tuple(shape), dtype, []))
            if (stored.shape, stored.dtype) != (tuple(shape), dtype):
                before = f"{stored.dtype} {stored.shape} on a rank before it"
                raise ValueError(f"{key} is {dtype} {tuple(shape)} on rank {rank}, and {before}")
        for key, offsets, sizes in chunks:
            if (key, offsets) not in known:
                known.add((key, offsets))
                tensors[key].chunks.append((_file_of(rank), offsets, sizes))
        for key in keys:
            values.setdefault(key, _file_of(rank))
    for key, stored in tensors.items():
        if (elements := sum(prod(sizes) for _, _, sizes in stored.chunks)) != prod(stored.shape):
            raise ValueError(f"the ranks hold {elements} of the {prod(stored.shape)} elements of {key}")
    return tensors, values


def _file_of(rank: int) -> str:
    return f"rank-{rank:05}.safetensors"


def _chunk_name(key: str, offsets: Iterable[int]) -> str:
    return f"{key} @ {','.join(map(str, offsets))}"


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# --- read --------------------------------------------------------------------------------------------------


class StateReader:
    """Reads such a folder: `shapes` and `dtypes` are of the full tensors by key, `values` are the keys of
    values."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            self._tensors = {key: _parse(entry) for key, entry in index["tensors"].items()}
            self._values = {str(key): _checked_file(file) for key, file in index["values"].items()}
            self.dtypes = {key: _dtype(stored.dtype) for key, stored in self._tensors.items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{folder / INDEX} is no index of a state ({first_line(error)}); load another checkpoint"
            ) from error
        self.shapes = {key: stored.shape for key, stored in self._tensors.items()}
        self.values = list(self._values)

    def read(
        self,
        tensors: Mapping[str, tuple[Placement, torch.Tensor]],
        values: Iterable[str],
        group: dist.ProcessGroup,
    ) -> dict[str, Any]:
        """Fill the tensors, {key: (placement, shard)}, and return the values by key. All ranks call it, each
        for what it needs.
        """
        loaded: dict[str, Any] = attempt(lambda: self._read(tensors, values), group)
        return loaded

    @torch.no_grad()
    def _read(
        self, tensors: Mapping[str, tuple[Placement, torch.Tensor]], values: Iterable[str]
    ) -> dict[str, Any]:
        with ExitStack() as stack:
            opened: dict[str, Any] = {}

            def file(name: str) -> Any:
                if name not in opened:
                    opened[name] = stack.enter_context(safe_open(self.folder / name, "pt"))
                return opened[name]

            try:
                for key, (placement, shard) in tensors.items():
                    for offsets, view in chunks_of(placement, shard):
                        for stored_in, name, source, target in self._overlaps(key, offsets, view.shape):
                            self._check_dtype(key, name, file(stored_in))
                            if not source:
                                view.copy_(file(stored_in).get_tensor(name))
                            else:
                                view[target].copy_(file(stored_in).get_slice(name)[source])
                return {key: unpack(bytes(file(self._values[key]).get_tensor(key).numpy())) for key in values}
            except Exception as error:  # whatever readers make of bytes that anybody may have written
                raise ValueError(
                    f"{self.folder} cannot be read ({first_line(error)}); load another checkpoint"
                ) from error

    def _check_dtype(self, key: str, name: str, file: Any) -> None:
        """Raise ValueError if a chunk has another dtype than the index says: it would be converted."""
        expected, stored = self._tensors[key].dtype, file.get_slice(name).get_dtype()
        if stored != DTYPES[self.dtypes[key]]:
            raise ValueError(f"{key} is {stored}, and {expected} in the index")

    def _overlaps(
        self, key: str, offsets: Offsets, sizes: Iterable[int]
    ) -> Iterator[tuple[str, str, tuple[slice, ...], tuple[slice, ...]]]:
        """(file, name, where in the stored chunk, where in the wanted one) of what they have in common."""
        sizes = tuple(sizes)
        for file, stored_at, stored_sizes in self._tensors[key].chunks:
            low = [max(a, b) for a, b in zip(offsets, stored_at, strict=True)]
            ends = zip(offsets, sizes, stored_at, stored_sizes, strict=True)
            high = [min(a + n, b + m) for a, n, b, m in ends]
            if all(a < b for a, b in zip(low, high, strict=True)):
                source = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, stored_at, strict=True))
                target = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, offsets, strict=True))
                yield file, _chunk_name(key, stored_at), source, target


def _parse(entry: Any) -> _StoredTensor:
    """An entry of the index, with nothing taken for granted: somebody else may have written it."""
    shape = _sizes(entry["shape"])
    chunks = [(_checked_file(file), _sizes(at), _sizes(sizes)) for file, at, sizes in entry["chunks"]]
    if any(len(offsets) != len(shape) or len(sizes) != len(shape) for _, offsets, sizes in chunks):
        raise ValueError(f"a chunk of another number of dimensions than {shape}")
    if not _fill(shape, [(at, sizes) for _, at, sizes in chunks]):
        raise ValueError(f"chunks that do not fill {shape}")
    return _StoredTensor(shape, entry["dtype"], chunks)


def _fill(shape: Offsets, chunks: list[tuple[Offsets, Offsets]]) -> bool:
    """Whether chunks cover a tensor, each element once: within it, as many elements, and none in common."""
    ends = [tuple(a + n for a, n in zip(at, sizes, strict=True)) for at, sizes in chunks]
    if any(end > size for corner in ends for end, size in zip(corner, shape, strict=True)):
        return False
    if sum(prod(sizes) for _, sizes in chunks) != prod(shape):
        return False
    boxes = sorted((at, end) for (at, _), end in zip(chunks, ends, strict=True))
    for i, (low, high) in enumerate(boxes):
        for other_low, other_high in boxes[i + 1 :]:
            if shape and other_low[0] >= high[0]:
                break  # sorted by where they begin
            if all(a < d and b < c for a, b, c, d in zip(low, other_low, high, other_high, strict=True)):
                return False
    return True


def _sizes(numbers: Any) -> tuple[int, ...]:
    if not isinstance(numbers, list) or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"{str(numbers)[:80]} in place of a list of sizes")
    return tuple(numbers)


def _checked_file(name: Any) -> str:
    if not isinstance(name, str) or not _FILE.fullmatch(name):
        raise ValueError(f"{str(name)[:80]!r} in place of a file's name")
    return name


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        raise ValueError(f"{name!r} in place of a dtype")
    return dtype


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: " + str(error).strip().partition("\n")[0][:200]

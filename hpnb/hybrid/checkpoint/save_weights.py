"""The weights of a whole model in safetensors files, from ranks that have parts of it.

    model.safetensors                       or, where it is larger than a file may be,
    model-00001-of-00003.safetensors ...    and model.safetensors.index.json, which says where each weight is
    config.json ...                         of a model of transformers, so that from_pretrained opens it

Rank 0 puts weight after weight together (gather_weights.py) and writes a file when it is full, so it has
one file in memory at a time. The header of each file has the checksums of its weights, for whoever loads it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from hpnb.hybrid.checkpoint.agreement import agree
from hpnb.hybrid.checkpoint.gather_weights import Held, Part, held_by_all, put_together
from hpnb.hybrid.checkpoint.hf_names import describe, is_pretrained, quiet, twin
from hpnb.hybrid.checkpoint.weight_files import checksums

INDEX = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"
_UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}


def write(
    parts: Mapping[str, Part],
    folder: Path,
    kind: type[torch.nn.Module],
    config: Any,
    limit: int | None,
    group: dist.ProcessGroup,
) -> None:
    """Write the whole model into `folder`, which is there. All ranks call it; rank 0 writes.

    Args:
        kind, config: of the whole model.
        limit: bytes of a file, except that a weight is never split; None writes a single one.
    """
    held = held_by_all(parts, group)
    wide = _wider(held)
    if not is_pretrained(kind):
        files = {name: name for name, one in held.items() if one.home == name}
        _write_files(files, held, parts, wide, folder, limit, group, {})
        return
    config_dtype = next((wide(h.dtype) for h in held.values() if h.dtype.is_floating_point), torch.float32)
    looks = describe(kind, config, config_dtype, group)
    if looks.names is None:
        _write_converted(held, parts, wide, folder, twin(kind, config, config_dtype), limit, group)
        return
    files = {there: next(n for n in names if n in held) for there, names in looks.names.items()}
    _write_files(files, held, parts, wide, folder, limit, group, looks.files)


def _write_files(
    names: Mapping[str, str],
    held: Mapping[str, Held],
    parts: Mapping[str, Part],
    wide: Callable[[torch.dtype], torch.dtype],
    folder: Path,
    limit: int | None,
    group: dist.ProcessGroup,
    others: Mapping[str, bytes],
) -> None:
    sizes = {there: prod(held[name].shape) * wide(held[name].dtype).itemsize for there, name in names.items()}
    files = deal(sizes, limit)
    error: Exception | None = None
    for file, inside in files.items():
        found: dict[str, torch.Tensor] = {}
        for there in inside:  # also after an error: the others send what they have to send
            name = names[there]
            whole = put_together(held[name], parts.get(name), wide(held[name].dtype), group)
            if whole is not None and error is None:
                found[there] = whole
        if group.rank() == 0 and error is None:
            try:
                save_file(found, folder / file, metadata={"format": "pt", **checksums(found)})
            except Exception as raised:
                error = raised
    if group.rank() == 0 and error is None:
        others = {**others, **_index(files, sum(sizes.values()))}
        try:
            for file, content in others.items():
                (folder / file).write_bytes(content)
        except OSError as raised:
            error = raised
    agree(error, group)


def _index(files: Mapping[str, Sequence[str]], size: int) -> dict[str, bytes]:
    """The file that says where each weight is, if there are several."""
    if len(files) == 1:
        return {}
    table = {there: file for file, inside in files.items() for there in inside}
    told = {"metadata": {"total_size": size}, "weight_map": dict(sorted(table.items()))}
    return {INDEX: (json.dumps(told, indent=2) + "\n").encode()}


def _write_converted(
    held: Mapping[str, Held],
    parts: Mapping[str, Part],
    wide: Callable[[torch.dtype], torch.dtype],
    folder: Path,
    empty: Any,
    limit: int | None,
    group: dist.ProcessGroup,
) -> None:
    """A model whose weights are others on the disk: rank 0 gets all of it, and transformers converts it."""
    found: dict[str, torch.Tensor] = {}
    for name, one in held.items():
        whole = put_together(one, parts.get(name), wide(one.dtype), group)
        if whole is not None and name == one.home:
            found[name] = whole
    error: Exception | None = None
    if group.rank() == 0:
        try:
            with quiet():
                empty.save_pretrained(folder, state_dict=found, max_shard_size=limit or "1000TB")
        except Exception as raised:
            error = raised
    agree(error, group)


def _wider(held: Mapping[str, Held]) -> Callable[[torch.dtype], torch.dtype]:
    """In which dtype a weight is written: float32 for 16 bits, if there are masters at all."""
    mixed = any(part.is_master for one in held.values() for _, part in one.parts)

    def wide(dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if mixed and dtype.is_floating_point and dtype.itemsize == 2 else dtype

    return wide


def deal(sizes: Mapping[str, int], limit: int | None) -> dict[str, list[str]]:
    """{file: names of weights}: one after the other until a file is full."""
    dealt: list[list[str]] = [[]]
    full = 0
    for name, size in sizes.items():
        if limit is not None and dealt[-1] and full + size > limit:
            dealt.append([])
            full = 0
        dealt[-1].append(name)
        full += size
    if len(dealt) == 1:
        return {ONE_FILE: dealt[0]}
    return {f"model-{i:05}-of-{len(dealt):05}.safetensors": names for i, names in enumerate(dealt, 1)}


def size_of(text: int | str) -> int:
    """Bytes, from a number or what is written as "5GB", "500 MB" or "2GiB".

    Raises:
        ValueError: it is no size.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    unit = None if found is None else _UNITS.get(found[2].upper())
    if found is None or unit is None or (size := int(float(found[1]) * unit)) < 1:
        raise ValueError(f"size_per_shard={text!r} is no size; write it like '5GB' or '500MB', or as bytes")
    return size


def is_weights(name: str) -> bool:
    """Whether a file of this name holds weights, or says which file does."""
    return bool(
        re.fullmatch(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?", name)
    )

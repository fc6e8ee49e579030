"""Writes the weights of a full model into safetensors files, from ranks that each hold some shards of them.

    model.safetensors                       or, where it is larger than a file may be,
    model-00001-of-00003.safetensors ...    and model.safetensors.index.json, which says where each weight is
    config.json, generation_config.json     of a model of transformers, so that from_pretrained opens it

Rank 0 gathers weight after weight (gather_weights.py) and writes a file when it is full, so it has one file
in memory at a time. The header of each file has the checksums of its weights, which loading compares.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers.utils import GENERATION_CONFIG_NAME

from hpnb.hybrid.boosted_model import Boosted
from hpnb.hybrid.checkpoint.agreement import agree
from hpnb.hybrid.checkpoint.gather_weights import WeightShard, exchange_shards, gather_weight
from hpnb.hybrid.checkpoint.hf_names import empty_model, hf_format, is_pretrained, silence_transformers
from hpnb.hybrid.checkpoint.manifest import file_sum
from hpnb.hybrid.checkpoint.weight_files import checksums
from hpnb.hybrid.checkpoint.write_files import WrittenFiles, write_bytes, write_safetensors

INDEX = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"
_KB, _KIB = 10**3, 2**10
_UNITS = {"": 1, "KB": _KB, "MB": _KB**2, "GB": _KB**3, "TB": _KB**4,
          "KIB": _KIB, "MIB": _KIB**2, "GIB": _KIB**3}  # fmt: skip


class _FullWeights:
    """The weights of the full model by name, each gathered on rank 0 when it is asked for. With masters of
    any weight, all 16-bit weights are given in float32."""

    def __init__(self, shards: Mapping[str, WeightShard], group: dist.ProcessGroup) -> None:
        self._shards, self._group = shards, group
        self.weights = exchange_shards(shards, group)
        every_shard = (shard for weight in self.weights.values() for _, shard in weight.shards)
        self._has_masters = any(shard.is_master for shard in every_shard)
        self.error: Exception | None = None  # the first on this rank

    def dtype(self, name: str) -> torch.dtype:
        dtype = self.weights[name].dtype
        narrow = dtype.is_floating_point and dtype.itemsize == 2
        return torch.float32 if self._has_masters and narrow else dtype

    def num_bytes(self, name: str) -> int:
        return prod(self.weights[name].shape) * self.dtype(name).itemsize

    def is_tied(self, name: str) -> bool:
        """Whether it is another name of a weight that has one before."""
        return self.weights[name].first_name != name

    def gather(self, names: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """{key: weight} of {key: name} on rank 0; {} elsewhere, and after an error. All ranks call it for the
        same names in the same order, also after an error, because others wait for their messages."""
        gathered: dict[str, torch.Tensor] = {}
        for key, name in names.items():
            weight, shard = self.weights[name], self._shards.get(name)
            try:
                tensor = gather_weight(weight, shard, self.dtype(name), self._group)
            except Exception as error:
                self.error = self.error or error
            if self.error is not None:
                gathered.clear()  # there may be too little memory
            elif tensor is not None:
                gathered[key] = tensor
        return gathered


def write_weights(
    shards: Mapping[str, WeightShard],
    folder: Path,
    model: Boosted,
    limit: int | None,
    group: dist.ProcessGroup,
) -> WrittenFiles:
    """Write the full model into `folder`, which exists, and return the files that this rank wrote. All ranks
    call it; rank 0 writes. A file has so many bytes at most, except that a weight is never split."""
    full, kind, config = _FullWeights(shards, group), model.kind, model.full_config
    if not is_pretrained(kind):
        names = {name: name for name in full.weights if not full.is_tied(name)}
        return _write_files(names, full, folder, limit, group, {})
    floating = (name for name, weight in full.weights.items() if weight.dtype.is_floating_point)
    config_dtype = next((full.dtype(name) for name in floating), torch.float32)
    first_names = {name: weight.first_name for name, weight in full.weights.items()}
    on_disk, generation_file = hf_format(model, first_names, config_dtype, group), _generation_file(model)
    if on_disk.names is None:
        make_empty = partial(empty_model, kind, config, config_dtype)
        return _write_by_transformers(full, folder, make_empty, limit, group, generation_file)
    names = {name: next(n for n in tied if n in full.weights) for name, tied in on_disk.names.items()}
    return _write_files(names, full, folder, limit, group, on_disk.files | generation_file)


def _write_files(
    names: Mapping[str, str],
    full: _FullWeights,
    folder: Path,
    limit: int | None,
    group: dist.ProcessGroup,
    other_files: Mapping[str, bytes],
) -> WrittenFiles:
    """Write the weights, by {name on the disk: name in the model}."""
    sizes = {on_disk: full.num_bytes(name) for on_disk, name in names.items()}
    files = assign_files(sizes, limit)
    written: WrittenFiles = {}
    for file, in_file in files.items():
        tensors = full.gather({on_disk: names[on_disk] for on_disk in in_file})
        if group.rank() == 0 and full.error is None:
            try:
                metadata = {"format": "pt", **checksums(tensors)}
                written[file] = write_safetensors(folder / file, tensors, metadata)
            except Exception as error:
                full.error = error
    if group.rank() == 0 and full.error is None:
        try:
            for file, content in {**other_files, **_index_file(files, sum(sizes.values()))}.items():
                written[file] = write_bytes(folder / file, content)
        except OSError as error:
            full.error = error
    agree(full.error, group)
    return written


def _generation_file(model: Boosted) -> dict[str, bytes]:
    """How the model generates, also where transformers would refuse to save it: no training ends for that."""
    generation_config = getattr(model, "generation_config", None)
    if generation_config is None:
        return {}
    text: str = generation_config.to_json_string(keys_to_pop=["compile_config"])
    return {GENERATION_CONFIG_NAME: text.encode()}


def _index_file(files: Mapping[str, Sequence[str]], size: int) -> dict[str, bytes]:
    """The file that says where each weight is, if there are several."""
    if len(files) == 1:
        return {}
    table = {on_disk: file for file, in_file in files.items() for on_disk in in_file}
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(table.items()))}
    return {INDEX: (json.dumps(index, indent=2) + "\n").encode()}


def _write_by_transformers(
    full: _FullWeights,
    folder: Path,
    make_empty: Callable[[], Any],
    limit: int | None,
    group: dist.ProcessGroup,
    other_files: Mapping[str, bytes],
) -> WrittenFiles:
    """A model whose weights differ on the disk: rank 0 gathers all of it, and transformers converts it."""
    tensors = full.gather({name: name for name in full.weights if not full.is_tied(name)})
    written: WrittenFiles = {}
    if group.rank() == 0 and full.error is None:
        try:
            empty = make_empty()
            values = empty.state_dict(keep_vars=True)
            for name, weight in full.weights.items():  # tied by the user, and not by from_pretrained
                if full.is_tied(name) and values[name] is not values[weight.first_name]:
                    tensors[name] = tensors[weight.first_name].clone()
            with silence_transformers():
                empty.save_pretrained(folder, state_dict=tensors, max_shard_size=limit or "1000TB")
            for file, content in other_files.items():
                write_bytes(folder / file, content)
            written = {file.name: file_sum(file) for file in folder.iterdir()}
        except Exception as error:
            full.error = error
    agree(full.error, group)
    return written


def assign_files(sizes: Mapping[str, int], limit: int | None) -> dict[str, list[str]]:
    """{file: names of weights}: weights in order until a file is full."""
    files: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if limit is not None and files[-1] and filled + size > limit:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    if len(files) == 1:
        return {ONE_FILE: files[0]}
    return {f"model-{i:05}-of-{len(files):05}.safetensors": names for i, names in enumerate(files, 1)}


def parse_size(text: int | str) -> int:
    """Bytes, from a number or from text like "5GB", "500 MB" or "2GiB"."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    unit = None if match is None else _UNITS.get(match[2].upper())
    if match is None or unit is None or (size := int(float(match[1]) * unit)) < 1:
        raise ValueError(f"size_per_shard={text!r} is no size; write it like '5GB' or '500MB', or as bytes")
    return size


def is_weight_file(name: str) -> bool:
    """Whether a file of this name holds weights, or says which file does."""
    return bool(
        re.fullmatch(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?", name)
    )

"""Loads weights from files into the shards of a model that this rank holds.

    names     of weights on the disk are mapped to those in the model (hf_names.py)
    check     nothing missing, nothing unexpected, the same shapes
    read      each rank reads the chunks of its parameters, buffers and float32 masters into memory
    apply     only then they are copied into the model, which cannot fail

All ranks agree after each step but the last. So an error on any rank leaves every model as it was.

Files with names other than those that save_pretrained gives today (older files, or a model without its head)
are read by from_pretrained, which knows them. Then each rank reads all of the model.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpnb.hybrid.boosted_model import Boosted
from hpnb.hybrid.checkpoint.agreement import attempt, gather_objects
from hpnb.hybrid.checkpoint.chunks import chunks_of
from hpnb.hybrid.checkpoint.gather_weights import master_weights
from hpnb.hybrid.checkpoint.hf_names import HFFormat, hf_format, is_pretrained, silence_transformers
from hpnb.hybrid.checkpoint.weight_files import WeightFiles
from hpnb.placement import Placement, placement_of

_HINT = "load it into a model with its config and modules"
_PREFIXES = {"module.": "a DistributedDataParallel", "_orig_mod.": "torch.compile"}


@dataclass(frozen=True)
class _Target:
    """A tensor of the model to be filled, and its master, each with its placement. A tied weight has several
    names, and the file needs one of them."""

    names: tuple[str, ...]
    shards: tuple[tuple[Placement, torch.Tensor], ...]

    @property
    def first_names(self) -> dict[str, str]:
        """{name: the first name of the weight in the full model}."""
        first = self.shards[0][0].tied_to or self.names[0]
        return dict.fromkeys((*self.names, first), first)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.shards[0][0].shape


class WeightLoader:
    """Weights that are read and fit the model, until `apply` writes them into it. All ranks make it. It takes
    CPU memory for this rank's shards, in the dtypes of the files. Where the checksums of the files are
    verified already, those of the weights in them are not compared again."""

    def __init__(
        self, model: Boosted, path: Path, group: dist.ProcessGroup, is_verified: bool = False
    ) -> None:
        self._targets = _list_targets(model)
        by_rank = gather_objects([target.first_names for target in self._targets], group)
        known = {name: first for of_rank in by_rank for names in of_rank for name, first in names.items()}
        on_disk_format = None
        if is_pretrained(model.kind):
            on_disk_format = hf_format(model, known, torch.float32, group)
        files: WeightFiles = attempt(lambda: WeightFiles(path), group)
        with files:
            on_disk = attempt(lambda: _match_names(model, path, files, known, on_disk_format), group)
            if on_disk_format is not None:  # these keep the values that they have
                left_out = on_disk_format.left_out - on_disk.keys()
                self._targets = [target for target in self._targets if not left_out & set(target.names)]
            attempt(lambda: self._check(path, files, on_disk), group)
            if not is_verified:
                attempt(lambda: files.verify(group.rank(), group.size()), group)
            self._chunks: list[tuple[torch.Tensor, torch.Tensor]]
            self._chunks = attempt(lambda: self._read(path, files, on_disk), group)

    @torch.no_grad()
    def apply(self) -> None:
        """Write the weights into the model."""
        for view, values in self._chunks:
            view.copy_(values)

    def _check(self, path: Path, files: WeightFiles, on_disk: Mapping[str, str]) -> None:
        missing = [t.names[0] for t in self._targets if not any(name in on_disk for name in t.names)]
        if missing:
            raise ValueError(f"{path} lacks {_shorten(missing)}; {_HINT}")
        for target in self._targets:
            for name in _names_on_disk(target, on_disk):
                if (shape := files.shape(name)) != target.shape:
                    raise ValueError(
                        f"{path} has {name} of shape {shape}, and the model {target.shape}; {_HINT}"
                    )
                dtype = target.shards[0][1].dtype
                if files.is_floating_point(name) != dtype.is_floating_point:
                    what = "whole numbers" if dtype.is_floating_point else "fractions"
                    raise ValueError(f"{path} has {what} in {name}, and the model {dtype}; {_HINT}")

    def _read(
        self, path: Path, files: WeightFiles, on_disk: Mapping[str, str]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """[(a view of the model, its values)]; what a weight and its master have in common is read once."""
        chunks = []
        for target in self._targets:
            first, *others = _names_on_disk(target, on_disk)
            values: dict[tuple[tuple[int, ...], torch.Size], torch.Tensor] = {}
            for placement, tensor in target.shards:
                for offsets, view in chunks_of(placement, tensor):
                    if (offsets, view.shape) not in values:
                        chunk = values[offsets, view.shape] = files.read_chunk(first, offsets, view.shape)
                        for other in others:
                            if not _equal(files.read_chunk(other, offsets, view.shape), chunk):
                                raise ValueError(
                                    f"{path} has other values in {first} than in {other}, and in the model "
                                    "they are one weight; load it into a model in which they are not tied"
                                )
                    chunks.append((view, values[offsets, view.shape]))
        return chunks


def _names_on_disk(target: _Target, on_disk: Mapping[str, str]) -> list[str]:
    return list(dict.fromkeys(on_disk[name] for name in target.names if name in on_disk))


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b) or torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def _list_targets(model: Boosted) -> list[_Target]:
    masters = master_weights(model)
    names: dict[int, list[str]] = {}
    values: dict[int, torch.Tensor] = {}
    for name, value in model.module.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            names.setdefault(id(value), []).append(name)
            values[id(value)] = value
    targets = []
    for key, value in values.items():
        placement = placement_of(value, names[key][0])
        tied = [] if placement.tied_to is None else [placement.tied_to]  # to a weight of another rank
        shards = [(placement, value.detach())]
        if (master := masters.get(value)) is not None:
            shards.append((master[1], master[0].detach()))
        without_stages = tuple((where.without("pp"), tensor) for where, tensor in shards)
        targets.append(_Target((*names[key], *tied), without_stages))
    return targets


def _match_names(
    model: Boosted,
    path: Path,
    files: WeightFiles,
    known: Mapping[str, str],
    on_disk_format: HFFormat | None,
) -> Mapping[str, str]:
    """{name in the model: name on the disk}, from the names that are `known` on any rank, and of a model of
    transformers from those that a save gives them."""
    present = set(files.names())
    names = {name: name for name in known}
    if on_disk_format is not None:
        disk_names = on_disk_format.names or {}
        renamed = {name: on_disk for on_disk, tied in disk_names.items() for name in tied}
        if present == disk_names.keys():
            return renamed
        if on_disk_format.is_changed and present - known.keys():
            names = renamed
        elif path.is_dir() and present - known.keys():
            files.replace(_read_by_transformers(model, path))
            return {name: name for name in files.names()}
    if unexpected := sorted(present - set(names.values())):
        hint = _prefix_hint(unexpected, known) or _HINT
        raise ValueError(f"{path} has weights that the model has not: {_shorten(unexpected)}; {hint}")
    return {name: on_disk for name, on_disk in names.items() if on_disk in present}


def _prefix_hint(unexpected: list[str], known: Container[str]) -> str:
    """What to do if the names in a file are the model's after a prefix, as a wrapper around it puts it."""
    parts = unexpected[0].split(".")
    for prefix in (".".join(parts[:n]) + "." for n in range(1, len(parts))):
        if all(name.removeprefix(prefix) in known for name in unexpected):
            wrapper = _PREFIXES.get(prefix, "a wrapper")
            return (
                f"{prefix!r} in front of the model's names is the prefix of {wrapper}: load a file of {{name"
                f".removeprefix({prefix!r}): tensor for name, tensor in state.items()}}"
            )
    return ""


def _read_by_transformers(model: Boosted, path: Path) -> dict[str, torch.Tensor]:
    kind: Any = model.kind
    config = deepcopy(model.full_config)
    try:
        # The model is made on the CPU, on some ranks only: what it draws is no number of dropout's.
        with silence_transformers(), torch.random.fork_rng(devices=[]):
            loaded, report = kind.from_pretrained(
                path, config=config, dtype="auto", ignore_mismatched_sizes=True, output_loading_info=True,
                local_files_only=True,
            )  # fmt: skip
    except Exception as error:  # also of the model's __init__, which may be the user's
        kind_of_error = type(error).__name__
        raise ValueError(f"{path} cannot be read by from_pretrained ({kind_of_error}: {error})") from error
    for key, what in (
        ("missing_keys", "lacks"),
        ("mismatched_keys", "has other shapes of"),
        ("unexpected_keys", "has weights that the model has not:"),
    ):
        if wrong := sorted(str(name if isinstance(name, str) else name[0]) for name in report[key]):
            raise ValueError(f"{path} {what} {_shorten(wrong)}; {_HINT}")
    state: dict[str, torch.Tensor] = loaded.state_dict()
    return state


def _shorten(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

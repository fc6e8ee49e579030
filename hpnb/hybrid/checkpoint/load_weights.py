"""Weights from a disk into whatever part of a model this rank has.

    names     those on the disk to those in the model (hf_names.py)
    check     on all ranks, before anything is written: nothing missing, nothing unexpected, the same shapes
    fill      each parameter, buffer and float32 master by its boxes; nothing is sent

Files whose names are not those that save_pretrained gives today (older ones, or of the model without its
head) are left to from_pretrained, which knows them; then each rank reads all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpnb.hybrid.boosted_model import Boosted
from hpnb.hybrid.checkpoint.agreement import attempt, gathered
from hpnb.hybrid.checkpoint.chunks import boxes
from hpnb.hybrid.checkpoint.gather_weights import along_ranks, masters_of
from hpnb.hybrid.checkpoint.hf_names import describe, is_pretrained, quiet
from hpnb.hybrid.checkpoint.weight_files import Files, Loaded, Weights
from hpnb.placement import Placement, placement_of


@dataclass(frozen=True)
class _Wanted:
    """A tensor to be filled.

    Attributes:
        names: in the model; of a tied weight several, of which one is enough.
        into: tensors and their places: itself, and its master.
    """

    names: tuple[str, ...]
    into: tuple[tuple[Placement, torch.Tensor], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.into[0][0].shape


class Filling:
    """Weights that fit the model; a context, which closes their files. All ranks make it.

    Raises:
        FileNotFoundError, ValueError: what is there does not fit, in one sentence.
    """

    def __init__(self, model: Boosted, path: Path, group: dist.ProcessGroup) -> None:
        self._wanted = _wanted(model)
        known = [
            name
            for one in gathered([w.names for w in self._wanted], group)
            for names in one
            for name in names
        ]
        self._files: Files | None = None
        self._disk_names: dict[str, tuple[str, ...]] | None = None
        if is_pretrained(model.kind):
            self._disk_names = describe(model.kind, model.whole_config, torch.float32, group).names
        try:
            self._weights, self._at = attempt(lambda: self._open(model, path, set(known)), group)
            attempt(lambda: self._check(path), group)
            assert self._files is not None
            files = self._files
            attempt(lambda: files.verify(group.rank(), group.size()), group)
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Filling:
        return self

    def __exit__(self, *_: object) -> None:
        if self._files is not None:
            self._files.__exit__()

    @torch.no_grad()
    def fill(self) -> None:
        """Write the weights into the model."""
        for wanted in self._wanted:
            there = next(self._at[name] for name in wanted.names if name in self._at)
            for where, tensor in wanted.into:
                for start, view in boxes(where, tensor):
                    view.copy_(self._weights.box(there, start, view.shape))

    def _open(self, model: Boosted, path: Path, known: set[str]) -> tuple[Weights, Mapping[str, str]]:
        """The weights, and {name in the model: name on the disk}."""
        self._files = Files(path)
        there = set(self._files.names())
        if is_pretrained(model.kind):
            names = self._disk_names
            if names is not None and there == names.keys():
                return self._files, {name: on_disk for on_disk, tied in names.items() for name in tied}
            if path.is_dir() and not there <= known:
                return self._converted(model, path)
        if unexpected := sorted(there - known):
            raise ValueError(f"{path} has weights that the model has not: {_some(unexpected)}; {_OTHER}")
        return self._files, {name: name for name in there}

    def _converted(self, model: Boosted, path: Path) -> tuple[Weights, Mapping[str, str]]:
        kind: Any = model.kind
        config = deepcopy(model.whole_config)
        try:
            with quiet():
                made, told = kind.from_pretrained(
                    path, config=config, dtype="auto", ignore_mismatched_sizes=True, output_loading_info=True,
                    local_files_only=True,
                )  # fmt: skip
        except (OSError, RuntimeError) as error:
            raise ValueError(f"{path} cannot be read by from_pretrained ({error})") from error
        for key, what in (
            ("missing_keys", "lacks"),
            ("mismatched_keys", "has other shapes of"),
            ("unexpected_keys", "has weights that the model has not:"),
        ):
            if wrong := sorted(str(name if isinstance(name, str) else name[0]) for name in told[key]):
                raise ValueError(f"{path} {what} {_some(wrong)}; {_OTHER}")
        state = made.state_dict()
        return Loaded(state), {name: name for name in state}

    def _check(self, path: Path) -> None:
        missing = [w.names[0] for w in self._wanted if not any(name in self._at for name in w.names)]
        if missing:
            raise ValueError(f"{path} lacks {_some(missing)}; {_OTHER}")
        for wanted in self._wanted:
            there = next(self._at[name] for name in wanted.names if name in self._at)
            if (shape := tuple(self._weights.shape(there))) != wanted.shape:
                raise ValueError(
                    f"{path} has {there} of shape {shape}, and the model {wanted.shape}; {_OTHER}"
                )


_OTHER = "load it into a model with its config"


def _wanted(model: Boosted) -> list[_Wanted]:
    masters = masters_of(model)
    names: dict[int, list[str]] = {}
    values: dict[int, torch.Tensor] = {}
    for name, value in model.module.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            names.setdefault(id(value), []).append(name)
            values[id(value)] = value
    found = []
    for key, value in values.items():
        where = placement_of(value, names[key][0])
        tied = [] if where.tied_to is None else [where.tied_to]  # to a weight of another rank
        into = [(where, value.detach())]
        if (master := masters.get(value)) is not None:
            into.append((master[1], master[0].detach()))
        into = [(along_ranks(place), tensor) for place, tensor in into]
        found.append(_Wanted((*names[key], *tied), tuple(into)))
    return found


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

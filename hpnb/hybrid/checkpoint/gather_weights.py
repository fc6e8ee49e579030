"""What each rank has of a model's weights, and how rank 0 gets all of them, one after the other.

    every rank   tells which parts it has                                   names and placements alone
    for each weight
        holders  send their parts; of those that have the same, the first   from CPU to CPU
        rank 0   puts them together

Where 16-bit weights have float32 masters, these are what a rank has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from hpnb.data_parallel import ZeroOptimizer
from hpnb.hybrid.boosted_model import Boosted
from hpnb.hybrid.checkpoint.agreement import gathered
from hpnb.mesh import Axis
from hpnb.placement import Placement, placement_of
from hpnb.precision import Masters


@dataclass(frozen=True)
class Part:
    """What a rank has under one name.

    Attributes:
        where: in the whole tensor.
        home: the first name of a tied weight, else its own.
        is_master: whether it is a float32 master, or a piece of one.
        tensor: the part; None where only the rest is told.
    """

    where: Placement
    home: str
    dtype: torch.dtype
    is_master: bool
    tensor: torch.Tensor | None


# --- what a rank has ----------------------------------------------------------------------------------------


def masters_of(model: Boosted) -> dict[torch.Tensor, tuple[torch.Tensor, Placement] | None]:
    """{16-bit parameter: its master here, or this rank's piece of it}; None where another rank has it."""
    stepper = model.stepper()
    if stepper is None:
        return {}
    inner: Any = stepper.inner
    if isinstance(inner, ZeroOptimizer):
        if inner.masters is None:
            return {}
        found: dict[torch.Tensor, tuple[torch.Tensor, Placement] | None] = {}
        for p in inner.names:
            piece = inner.pieces.get(p)
            found[p] = None if piece is None else (inner.masters.of(piece), placement_of(piece))
        return found
    masters = Masters.attached_to(inner)
    if masters is None:
        return {}
    every = (p for group in inner.param_groups for p in group["params"])
    return {p: (masters.of(p), placement_of(p)) for p in every if masters.of(p) is not p}


def parts_of(model: Boosted, copied: Callable[[torch.Tensor, bool], torch.Tensor]) -> dict[str, Part]:
    """{name: part} of what this rank has of the state dict, masters in place of what they are masters of.

    Args:
        copied: what to do with each tensor; the flag says that it is a buffer, which a forward may change.
    """
    masters, found = masters_of(model), dict[str, Part]()
    homes, made = dict[int, str](), dict[int, torch.Tensor]()
    for name, value in model.module.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            continue
        where = placement_of(value, name)
        home = homes.setdefault(id(value), where.tied_to or name)
        if not speaks_for(where, model.axes):
            continue
        tensor: torch.Tensor = value
        is_master = value in masters
        if is_master:
            told = masters[value]
            if told is None:
                continue
            tensor, where = told
        if id(tensor) not in made:
            made[id(tensor)] = copied(tensor.detach(), not isinstance(value, torch.nn.Parameter))
        found[name] = Part(along_ranks(where), home, tensor.dtype, is_master, made[id(tensor)])
    return found


def speaks_for(where: Placement, axes: Sequence[Axis]) -> bool:
    """Whether this rank is the one to write its part, of those of a tensor-parallel group that have the same.

    Not all may: a bucket of ZeRO has matrices that tensor parallelism has cut unevenly beside vectors that it
    has not, so the cuts along dp fall elsewhere on each of its ranks, and parts of a vector would overlap.
    """
    return all(axis.rank == 0 or axis.name in ("dp", "pp") or axis.name in where.axes for axis in axes)


def along_ranks(where: Placement) -> Placement:
    """Without the pipeline, whose ranks have other parameters and not parts of the same."""
    return replace(where, cuts=tuple(cut for cut in where.cuts if cut.axis != "pp"))


# --- from all ranks to the first ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """Who sends what of one weight: [(rank, part)], which together are all of it."""

    home: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: list[tuple[int, Part]]


def held_by_all(parts: Mapping[str, Part], group: dist.ProcessGroup) -> dict[str, Held]:
    """Who has which weight, in the order of the model; the same on all ranks, which all call it.

    Raises:
        ValueError: parts that are not a whole.
    """
    everyone = gathered({name: replace(part, tensor=None) for name, part in parts.items()}, group)
    found: dict[str, Held] = {}
    for rank, theirs in enumerate(everyone):
        for name, part in theirs.items():
            held = found.setdefault(name, Held(part.home, part.where.shape, part.dtype, []))
            if all(part.where.cuts != other.where.cuts for _, other in held.parts):
                held.parts.append((rank, part))
    for name, held in found.items():
        there = sum(prod(part.where.local_shape) for _, part in held.parts)
        if there != prod(held.shape):
            raise ValueError(f"the ranks have {there} of the {prod(held.shape)} elements of {name}")
    return found


def put_together(
    held: Held, own: Part | None, dtype: torch.dtype, group: dist.ProcessGroup
) -> torch.Tensor | None:
    """The whole weight in the memory of rank 0's CPU, None elsewhere. The ranks that hold it call it, and
    rank 0."""
    me = group.rank()
    whole = torch.empty(held.shape, dtype=dtype) if me == 0 else None
    for rank, part in held.parts:
        shape = part.where.local_shape
        if prod(shape) == 0 or me not in (0, rank):
            continue
        if me == rank:
            assert own is not None
            assert own.tensor is not None
            mine = own.tensor.cpu().contiguous()
            if rank != 0:
                dist.send(mine, 0, group)
                continue
        else:
            mine = torch.empty(shape, dtype=part.dtype)
            dist.recv(mine, rank, group)
        assert whole is not None
        part.where.put(mine.view(shape), whole)
    return whole

"""Gathers a model's weights on rank 0, one after the other, from ranks that each hold some shards of them.

    all ranks         exchange which shards they hold          names and placements only
    for each weight
        its holders   send their shards to rank 0              CPU to CPU; of equal shards the first rank's
        rank 0        writes them into the full tensor

Where 16-bit weights have float32 masters, the masters are gathered instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from hpnb.caller_frame import warn_caller
from hpnb.data_parallel import ZeroOptimizer
from hpnb.hybrid.boosted_model import Boosted
from hpnb.hybrid.checkpoint.agreement import gather_objects
from hpnb.mesh import Axis
from hpnb.placement import Cut, Placement, placement_of
from hpnb.precision import Masters


@dataclass(frozen=True)
class WeightShard:
    """What a rank holds under one name, of a weight or of its float32 master.

    `first_name` is the first name of a tied weight, otherwise its only one; `tensor` is None in messages that
    only describe the shard."""

    placement: Placement
    first_name: str
    dtype: torch.dtype
    is_master: bool
    tensor: torch.Tensor | None


# --- the shards of this rank --------------------------------------------------------------------------------


def master_weights(model: Boosted) -> dict[torch.Tensor, tuple[torch.Tensor, Placement] | None]:
    """{16-bit parameter: this rank's shard of its master, and where it lies}; None if other ranks hold it."""
    boosted = model.optimizer_ref()
    if boosted is None:
        return {}
    inner: Any = boosted.inner
    if isinstance(inner, ZeroOptimizer):
        if inner.masters is None:
            return {}
        shards: dict[torch.Tensor, tuple[torch.Tensor, Placement] | None] = {}
        for p in inner.names:
            piece = inner.shards.get(p)
            shards[p] = None if piece is None else (inner.masters.of(piece), placement_of(piece))
        return shards
    masters = Masters.attached_to(inner)
    if masters is None:
        return {}
    parameters = (p for group in inner.param_groups for p in group["params"])
    return {p: (masters.of(p), placement_of(p)) for p in parameters if masters.of(p) is not p}


def weight_shards(
    model: Boosted, copy: Callable[[torch.Tensor, bool], torch.Tensor]
) -> dict[str, WeightShard]:
    """{name: shard} of the entries of the state dict that this rank writes; masters in place of their
    weights. `copy` is applied to each tensor; its second argument says whether a forward may change the
    tensor."""
    masters, shards = master_weights(model), dict[str, WeightShard]()
    first_names, copies = dict[int, str](), dict[int, torch.Tensor]()
    for name, value in model.module.state_dict(keep_vars=True).items():
        if name.rpartition(".")[2] == "_extra_state":
            warn_caller(
                f"{name} is not restored from a checkpoint, which has parameters and buffers alone; let the "
                "module keep it in a buffer, or pass it to booster.save as extra"
            )
        if not isinstance(value, torch.Tensor):
            continue
        placement = placement_of(value, name)
        first_name = first_names.setdefault(id(value), placement.tied_to or name)
        if not offers_shard(placement, model.axes):
            continue
        tensor: torch.Tensor = value
        is_master = value in masters
        if is_master:
            shard_of_master = masters[value]
            if shard_of_master is None:
                continue
            tensor, placement = shard_of_master
        if id(tensor) not in copies:
            copies[id(tensor)] = copy(tensor.detach(), not isinstance(value, torch.nn.Parameter))
        shards[name] = WeightShard(
            placement.without("pp"), first_name, tensor.dtype, is_master, copies[id(tensor)]
        )
    return shards


#   axis                    do its ranks hold equal shards                who offers them
#   tp and its parts, cp    of what is not sharded along it               the first rank
#   dp, edp                 without ZeRO                                  all; equal shards are taken once
#   dp.0, edp.0             always: they are replicas of shards           the first rank
#   dp.1, edp.1             no: ZeRO shards along this part               all
#   ep                      of all but experts                            all; equal shards are taken once
#   pp                      of tied weights that two stages hold          all; equal shards are taken once
_MAY_SHARD = ("dp", "dp_cp", "dp.1", "dp_cp.1", "edp", "edp.1", "ep", "pp")


def offers_shard(placement: Placement, axes: Sequence[Axis]) -> bool:
    """Whether this rank offers its shard to be written; rank 0 takes one of equal shards. Along an axis that
    is not in _MAY_SHARD, and along which the tensor is not sharded, only the first rank does.

    All could not: in a bucket of ZeRO with matrices that are sharded unevenly along tp and vectors that are
    not, the cuts along dp fall elsewhere on each rank of tp, and shards of a vector would overlap."""
    others = ("dp", "dp_cp") if "ep" in placement.axes else ("edp",)  # experts are replicated along edp alone
    asked = [axis for axis in axes if axis.name.partition(".")[0] not in others]
    return all(axis.rank == 0 or axis.name in _MAY_SHARD or axis.name in placement.axes for axis in asked)


# --- from all ranks to the first ----------------------------------------------------------------------------


@dataclass(frozen=True)
class ShardedWeight:
    """Which ranks send which shards of one weight: [(rank, shard)], which together fill it."""

    first_name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    shards: list[tuple[int, WeightShard]]


def exchange_shards(shards: Mapping[str, WeightShard], group: dist.ProcessGroup) -> dict[str, ShardedWeight]:
    """Which rank holds which shard, by name, in the order of the model. All ranks call it; the result is the
    same on all.
    """
    by_rank = gather_objects({name: replace(shard, tensor=None) for name, shard in shards.items()}, group)
    weights: dict[str, ShardedWeight] = {}
    known: set[tuple[str, tuple[Cut, ...]]] = set()
    for rank, of_rank in enumerate(by_rank):
        for name, shard in of_rank.items():
            new = ShardedWeight(shard.first_name, shard.placement.shape, shard.dtype, [])
            weight = weights.setdefault(name, new)
            if (name, shard.placement.cuts) not in known:
                known.add((name, shard.placement.cuts))
                weight.shards.append((rank, shard))
    for name, weight in weights.items():
        count = sum(prod(shard.placement.local_shape) for _, shard in weight.shards)
        if count != prod(weight.shape):
            raise ValueError(f"the ranks have {count} of the {prod(weight.shape)} elements of {name}")
    return weights


def gather_weight(
    weight: ShardedWeight, local: WeightShard | None, dtype: torch.dtype, group: dist.ProcessGroup
) -> torch.Tensor | None:
    """The full weight in CPU memory of rank 0, None elsewhere. Rank 0 and the ranks with shards call it. An
    error, as of too little memory for it, is raised after all messages, so that no rank waits for one."""
    this_rank, errors = group.rank(), list[Exception]()

    def attempt(make: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        try:
            return make()
        except Exception as error:
            errors.append(error)
            return None

    full = attempt(lambda: torch.empty(weight.shape, dtype=dtype)) if this_rank == 0 else None
    for rank, shard in weight.shards:
        shape = shard.placement.local_shape
        if prod(shape) == 0 or this_rank not in (0, rank):
            continue
        values = None
        if this_rank == rank:
            assert local is not None
            assert local.tensor is not None
            values = attempt(local.tensor.cpu().contiguous)
        if values is None:
            values = torch.empty(shape, dtype=shard.dtype)
        if this_rank != rank:
            dist.recv(values, rank, group)
        elif rank != 0:
            dist.send(values, 0, group)
        if full is not None:
            shard.placement.put(values.view(shape), full)
    if errors:
        raise errors[0]
    return full

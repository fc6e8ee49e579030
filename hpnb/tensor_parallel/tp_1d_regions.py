"""Where 1D tensor parallelism enters a region of sharded computation in a layer, and where it leaves it.

    attention, MLP          one region from the inputs of its columns to its row-parallel layer
    latent attention        q_a, kv_a | q_b, kv_b .. o    replicated before the columns
    experts                 hidden states and routing weights in, a sum over ranks out

`|` is the start of a region, and `q_b, kv_b .. o` are all layers from its columns to its row.
At a region's start the forward changes nothing and the backward sums over the ranks; at its end the other way
round. So replicated weights before a region get complete gradients, and those inside get partial gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from hpnb import comm
from hpnb.mesh import Axis
from hpnb.models import Role
from hpnb.tensor_parallel.mode import ModelToShard
from hpnb.tensor_parallel.module_hooks import change_output
from hpnb.tensor_parallel.parallel_region import ParallelRegion
from hpnb.tensor_parallel.sequence_parallel import SequenceSharding
from hpnb.tensor_parallel.tp_1d_linear import ColumnParallelLinear, RowParallelLinear


def is_sharded(role: Role) -> bool:
    return role.vocabulary is not None or role.cut_dim is not None


def find_regions(
    model: ModelToShard, paths: Sequence[str], sharding: SequenceSharding
) -> Iterator[ParallelRegion]:
    """The regions of the layers at `paths`, those of a block.

    A module with one row-parallel layer is one region. Where several rows stand side by side, as in a block
    that has no modules for its attention and its MLP, each row takes the columns that are defined before it.
    Columns without a row, as in a BERT whose output projection is in another module, are a region too.
    """
    layers_of: dict[str, list[ColumnParallelLinear | RowParallelLinear]] = {}
    for path in paths:
        layer = model.module.get_submodule(path)
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
            layers_of.setdefault(path.rpartition(".")[0], []).append(layer)
    for path, layers in layers_of.items():
        rows = [layer for layer in layers if isinstance(layer, RowParallelLinear)]
        if len(rows) == 1:
            layers = [*(layer for layer in layers if layer is not rows[0]), rows[0]]
        columns: list[ColumnParallelLinear] = []
        for layer in layers:
            if isinstance(layer, ColumnParallelLinear):
                columns.append(layer)
            elif columns:
                yield ParallelRegion(path, sharding, columns, layer)
                columns = []
        if columns:
            yield ParallelRegion(path, sharding, columns)


def sum_partial_outputs(module: nn.Module, roles: Mapping[str, Role], axis: Axis) -> None:
    """Sum the outputs of a module that computes with shards by itself, such as a layer of experts."""
    if not isinstance(module, RowParallelLinear) and any(role.kind == "row" for role in roles.values()):
        module.register_forward_pre_hook(partial(_replicate_inputs, axis), with_kwargs=True)
        change_output(module, lambda z: comm.all_reduce(z, axis))


def sum_partial_gradients(module: nn.Module, roles: Mapping[str, Role], axis: Axis) -> None:
    """Sum the gradients of a replicated layer's last outputs, which each rank uses for its heads alone."""
    num_partial = roles["weight"].partial_outputs if "weight" in roles else 0
    if num_partial:
        change_output(module, partial(_replicate_last, axis, num_partial))


def _replicate_inputs(axis: Axis, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Hidden states and the weights of experts: equal on all ranks, whose gradients are summed."""

    def replicate(x: Any) -> Any:
        return comm.replicate(x, axis) if isinstance(x, torch.Tensor) and x.requires_grad else x

    return tuple(map(replicate, args)), {name: replicate(x) for name, x in kwargs.items()}


def _replicate_last(axis: Axis, num_partial: int, x: torch.Tensor) -> torch.Tensor:
    first, last = x.split([x.size(-1) - num_partial, num_partial], -1)
    return torch.cat([first, comm.replicate(last, axis)], -1)

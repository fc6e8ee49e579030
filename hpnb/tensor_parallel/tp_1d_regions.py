"""Where 1D tensor parallelism enters a region of sharded computation in a layer, and where it leaves it.

    attention, MLP          one region from the module's input to its row-parallel layer
    latent attention        q_a, kv_a | q_b, kv_b .. o    each column starts a region, replicated before
    experts                 hidden states and routing weights in, a sum over ranks out

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
from hpnb.tensor_parallel.tp_1d_linear import ColumnParallelLinear, RowParallelLinear


def is_sharded(role: Role) -> bool:
    return role.vocabulary is not None or role.cut_dim is not None


def find_regions(
    model: ModelToShard, block: nn.Module, paths: Sequence[str], sharded_tokens: bool
) -> Iterator[tuple[nn.Module, list[ColumnParallelLinear | RowParallelLinear]]]:
    """(module, its column- and row-parallel layers in order) of each region of a block.

    A module with exactly one row-parallel layer and some columns is one region. Otherwise each column is a
    region by itself. So it is too if the module has replicated weights before its columns, as latent
    attention does: a region around them would give them partial gradients.
    """
    layers_of: dict[str, list[ColumnParallelLinear | RowParallelLinear]] = {}
    for path in paths:
        layer = model.module.get_submodule(path)
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
            layers_of.setdefault(path.rpartition(".")[0], []).append(layer)
    for parent, layers in layers_of.items():
        rows = [layer for layer in layers if isinstance(layer, RowParallelLinear)]
        columns = [layer for layer in layers if isinstance(layer, ColumnParallelLinear)]
        module = model.module.get_submodule(parent)
        has_replicated_inside = not sharded_tokens and any(
            not (role.sum_grads or is_sharded(role))
            for path in paths
            if f"{path}.".startswith(f"{parent}.") and model.module.get_submodule(path) not in layers
            for role in model.layers[path][1].values()
        )
        if len(rows) == 1 and columns and module is not block and not has_replicated_inside:
            yield module, layers
        else:
            for column in columns:
                yield column, [column]


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

"""A layer that tensor parallelism replaces must carry nothing that the new layer would not run.

    nn.Linear, Conv1D, nn.Embedding, nn.LayerNorm  ->  a layer that computes with this rank's shard

The new layer takes over the Parameters and the mathematics of these four classes. It does not call hooks of
the old module, nor the forward of a subclass, such as a linear layer with LoRA in it. Such hooks could not be
moved, because the new layer gets and gives shards. hpnb's hooks may be left behind: on a block that is itself
a linear layer they only give an empty batch a placeholder, which a linear layer does not need.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from transformers.pytorch_utils import Conv1D

from hpnb.mesh import Axis
from hpnb.ranks.current_rank import device as this_device
from hpnb.tensor_parallel.mode import ModelToShard, TensorParallelMode
from hpnb.user_hooks import is_users

_FORWARDS = {kind.forward for kind in (nn.Linear, Conv1D, nn.Embedding, nn.LayerNorm)}
# They compute what their base classes compute, by another function.
_SAME_AS_BASE = {
    "timm.layers.norm.LayerNorm",
    "timm.layers.norm.LayerNormFp32",
    "transformers.models.falcon.modeling_falcon.FalconLinear",
}
_HOOKS = {
    "_forward_pre_hooks": "a forward pre-hook",
    "_forward_hooks": "a forward hook",
    "_backward_pre_hooks": "a backward pre-hook",
    "_backward_hooks": "a backward hook",
    "_state_dict_pre_hooks": "a hook of its state dict",
    "_state_dict_hooks": "a hook of its state dict",
    "_load_state_dict_pre_hooks": "a hook of its state dict",
    "_load_state_dict_post_hooks": "a hook of its state dict",
}


def check_replaced_layers(model: ModelToShard, mode: TensorParallelMode, axis: Axis) -> None:
    """Raises ValueError on all ranks if a layer of one that will be replaced carries what would be lost."""
    if axis.size == 1:
        return
    sentence = next(_refusals(model, mode), None)
    carries_nothing = torch.tensor(int(sentence is None), device=this_device())
    dist.all_reduce(carries_nothing, dist.ReduceOp.MIN, group=axis.group)
    if sentence is None and not bool(carries_nothing):
        sentence = (
            f"on another rank of {axis.name}, a layer that tensor parallelism replaces has a hook or a "
            "forward that would be lost; that rank's error names it"
        )
    if sentence is not None:
        raise ValueError(sentence)


def _refusals(model: ModelToShard, mode: TensorParallelMode) -> Iterator[str]:
    for path, (_, roles) in model.layers.items():
        if not mode.replaces(roles):
            continue
        layer = model.module.get_submodule(path)
        if (hook := _hook_of(layer)) is not None:
            yield (
                f"{path} has {hook}, which would not be called, because tensor parallelism replaces this "
                f"{type(layer).__name__} by a layer that computes with a rank's shard: hook "
                f"{_module_around(path, model)} instead, which stays, or use a pipeline or ZeRO, which keep "
                "this layer"
            )
        elif (forward := _forward_of(layer)) is not None:
            yield (
                f"{path} has {forward}, which would not be called, because tensor parallelism replaces this "
                f"{type(layer).__name__} by a layer that multiplies by, or looks up, a rank's shard of its "
                "weight: keep an nn.Linear there and compute the rest in a module around it, whose other "
                "weights have roles too, or use a pipeline or ZeRO, which keep this layer"
            )


def _hook_of(layer: nn.Module) -> str | None:
    for attribute, name in _HOOKS.items():
        if any(map(is_users, getattr(layer, attribute, {}).values())):
            return name
    return None


def _forward_of(layer: nn.Module) -> str | None:
    if "forward" in vars(layer):
        return "another forward than its class"
    kind = type(layer)
    name = f"{kind.forward.__module__}.{kind.forward.__qualname__.removesuffix('.forward')}"
    is_scaled = hasattr(layer, "embed_scale") and name.startswith("transformers.")
    if kind.forward in _FORWARDS or name in _SAME_AS_BASE or is_scaled:
        return None
    return f"the forward of {name.rpartition('.')[2]}"


def _module_around(path: str, model: ModelToShard) -> str:
    """The block that contains it, else the module one level up."""
    for block in model.anatomy.blocks:
        if path.startswith(f"{block.name}."):
            return block.name
    return path.rpartition(".")[0] or f"the {type(model.module).__name__}"

"""A copy of a model's modules without parameters: the forward of its class runs, and its parts are put in.

copy_module(model, "", parts)       same classes, attributes and buffers; of a part numbers and words alone
"""

from __future__ import annotations

import inspect

import torch
from torch import nn
from transformers import PreTrainedConfig

_PLAIN = (int, float, str, bool, type(None), PreTrainedConfig, torch.dtype)


def copy_module(module: nn.Module, path: str, parts: frozenset[str], in_part: bool = False) -> nn.Module:
    """A module of the same class with the same attributes, and without parameters and hooks.

    Of a part only numbers and words are copied, as a forward may ask a layer for its type.
    """
    in_part = in_part or path in parts
    copied = type(module).__new__(type(module))
    fresh = vars(nn.Module())
    attributes = {
        name: value
        for name, value in vars(module).items()
        if name not in fresh
        and name not in ("forward", "_loss_function")
        and "hpnb" not in name
        and (not in_part or isinstance(value, _PLAIN))
    }
    vars(copied).update(fresh | attributes)
    if "gradient_checkpointing" in attributes:  # its function is not copied, and a shell keeps no activations
        vars(copied)["gradient_checkpointing"] = False
    for name in module._parameters:
        copied._parameters[name] = None
    for name, buffer in module._buffers.items():
        copied._buffers[name] = None if in_part else buffer
    # Not by an assignment, which a module that torch.compile has made passes on to its child.
    vars(copied)["_non_persistent_buffers_set"] = set(copied._buffers)
    for name, child in module._modules.items():
        inner = f"{path}.{name}" if path else name
        copied._modules[name] = None if child is None else copy_module(child, inner, parts, in_part)
    return copied


def place_of(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    parent, _, child = path.rpartition(".")
    return model.get_submodule(parent), child


def argument_names(*models: nn.Module) -> tuple[str, ...]:
    return tuple(
        dict.fromkeys(name for model in models for name in inspect.signature(model.forward).parameters)
    )

"""Activation checkpointing: the forward drops activations, and the backward recomputes them.

    "full"         a block keeps only its input, (B, s, h), and costs a third more FLOPs
    "attention"    softmax(q k^T) v keeps q, k and v, but nothing of (B, heads, s, s). Without a flash kernel
                   that is most of the memory, for a few per cent of the FLOPs. The function that runs twice
                   is the model's own, with its sinks, soft cap, window and mask

Dropout draws the same mask again, and a recomputation begins with the buffers of the forward that it repeats
(`recomputed_buffers.py`). Chen et al. 2016 (arXiv 1604.06174); Korthikanti et al. 2022 (arXiv
2205.05198), section 5.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel

from hpnb.data_parallel.fsdp_units import find_blocks
from hpnb.hybrid.recomputed_buffers import BufferSnapshots
from hpnb.mesh import Recomputation

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # a global of every file of transformers whose modules attend
_RECOMPUTES = "_hpnb_recomputes"  # an attribute of modules whose attention is recomputed: BufferSnapshots
_SWITCH = "gradient_checkpointing"  # an attribute of modules that transformers recomputes
_CHECKPOINT = "_gradient_checkpointing_func"  # and the one by which it does


def enable_recomputation(
    model: nn.Module, what: Recomputation, blocks: Sequence[nn.Module] | None = None
) -> None:
    """Let `model` recompute what `what` names, in place; "full" recomputes `blocks`, by default the
    model's."""
    if what == "attention":
        _recompute_attention(model)
        return
    if what == "full" and blocks is None and isinstance(model, PreTrainedModel):
        if not (model.supports_gradient_checkpointing and any(hasattr(m, _SWITCH) for m in model.modules())):
            raise ValueError(
                f"activation_checkpointing='full' cannot recompute the blocks of a {type(model).__name__}, "
                "which transformers does not allow; use 'attention', or leave activation_checkpointing out"
            )
        # The method is renamed on its way to transformers 6.
        new, old = "activation_checkpointing_enable", "gradient_checkpointing_enable"
        enable = getattr(model, new, None) or getattr(model, old)
        enable({"use_reentrant": False})
        for layer in (module for module in model.modules() if getattr(module, _SWITCH, False)):
            setattr(layer, _CHECKPOINT, partial(_checkpoint, BufferSnapshots(layer)))
    elif what == "full":
        for block in (find_blocks(model) or [model]) if blocks is None else blocks:
            # A partial, so that deepcopy follows it. Its __wrapped__ says which inputs the block takes.
            recomputed = partial(_run_recomputed, BufferSnapshots(block), block.forward)
            block.forward = update_wrapper(recomputed, block.forward, assigned=(), updated=())


def _run_recomputed(
    buffers: BufferSnapshots, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    if not buffers.block.training or not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return _checkpoint(buffers, partial(forward, **kwargs), *args)


def _checkpoint(buffers: BufferSnapshots, function: Callable[..., Any], /, *args: Any) -> Any:
    """Run `function` of modules in `buffers.block`, and again in the backward."""
    if torch.compiler.is_compiling():  # which recomputes inside of one graph, and changes buffers once
        return checkpoint(function, *args, use_reentrant=False)
    return checkpoint(function, *args, use_reentrant=False, context_fn=buffers.contexts)


def _recompute_attention(model: nn.Module) -> None:
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"activation_checkpointing='attention' finds no attention in a {type(model).__name__}, which is "
            "not a model of transformers; use 'full'"
        )
    namespaces = {kind: _namespaces(kind) for kind in {type(module) for module in model.modules()}}
    attentions = {module for module in model.modules() if namespaces[type(module)]}
    for submodel in (module for module in model.modules() if isinstance(module, PreTrainedModel)):
        inside = set(submodel.modules())
        attends = any("attention" in type(module).__name__.lower() for module in inside)
        if inside.isdisjoint(attentions) and (attends or submodel is model):
            raise ValueError(
                "activation_checkpointing='attention' cannot exchange the attention of a "
                f"{type(submodel).__name__}, which does not call transformers' attention interface, so "
                "nothing would be recomputed; use 'full'"
            )
    for attention in attentions:
        setattr(attention, _RECOMPUTES, BufferSnapshots(attention))
        for namespace in namespaces[type(attention)]:
            if not isinstance(namespace[_INTERFACE], _RecomputingInterface):
                namespace[_INTERFACE] = _RecomputingInterface(namespace[_INTERFACE])


class _RecomputingInterface(AttentionInterface):  # type: ignore[misc]
    """What the modules of one file of transformers look their attention function up in: the one that they
    would get anyway runs in a checkpoint if the module is marked with `_RECOMPUTES`.
    config._attn_implementation stays as it is, because masks and some models depend on it."""

    def __init__(self, before: AttentionInterface) -> None:
        super().__init__()
        self._before = before

    def __getitem__(self, key: str) -> Callable[..., Any]:
        function: Callable[..., Any] = self._before[key]
        return function

    def get_interface(self, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return partial(_attend, self._before.get_interface(attn_implementation, default))


def _attend(function: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """`function` of transformers: softmax(q k^T) v, where `args` begin with q, k, v (B, heads, s, head)."""
    buffers: BufferSnapshots | None = getattr(module, _RECOMPUTES, None)
    if buffers is None or not module.training or not torch.is_grad_enabled():
        return function(module, *args, **kwargs)
    return _checkpoint(buffers, partial(function, module, **kwargs), *args)


def _namespaces(kind: type[nn.Module]) -> tuple[dict[str, Any], ...]:
    """The globals of files in which methods of this class look up an attention function."""
    namespaces: dict[int, dict[str, Any]] = {}
    bases = [base for base in kind.__mro__ if base is not PreTrainedModel]  # that only reads its names
    for value in (value for base in bases for value in vars(base).values()):
        method = inspect.unwrap(value) if inspect.isfunction(value) else None
        if not inspect.isfunction(method) or _INTERFACE not in method.__code__.co_names:
            continue
        if _INTERFACE in method.__globals__:
            namespaces[id(method.__globals__)] = method.__globals__
    return tuple(namespaces.values())

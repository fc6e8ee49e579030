"""An empty batch, so that a rank without a share of the last batch can take part in every collective.

Ten samples over four ranks in batches of eight leave two for the last batch. Two ranks then have none, and
must still take part in every collective, with gradients of zero. PyTorch's layers can do this, but
transformers' attention folds heads by `view(0, s, -1, d)`, which has no answer for -1. So each block runs on
one sample of zeros instead, which is cut off again: nothing reaches the loss, and every gradient is exactly
0.

    (0, s, h) -> (1, s, h) -> block -> (1, s, h) -> (0, s, h)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from hpnb.models.model_anatomy import Anatomy


def accept_empty_batch(anatomy: Anatomy) -> None:
    """Let the blocks of a model run on hidden states of 0 samples. Other batches pass unchanged.

    The blocks get hooks; their classes and weights stay. `hpnb.models.vit` and `hpnb.models.gpt2` do it.
    """
    for block in anatomy.blocks:
        placeholder = _PlaceholderSample()
        block.module.register_forward_pre_hook(placeholder.before, with_kwargs=True)
        block.module.register_forward_hook(placeholder.after)


def drop_empty_mask(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Hook before a model's forward: drops an attention_mask of 0 samples, which GPT2Model cannot fold."""
    if not _is_empty(kwargs.get("attention_mask")):
        return None
    return args, kwargs | {"attention_mask": None}


class _PlaceholderSample:
    """Remembers, from before a block to after it, whether the block got a sample of zeros."""

    def __init__(self) -> None:
        self.added = False

    def before(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self.added = bool(args) and _is_empty(args[0])
        if not self.added:
            return None
        return tuple(_add_sample(x) for x in args), {name: _add_sample(x) for name, x in kwargs.items()}

    def after(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return tree_map(_without_samples, output) if self.added else None


def _without_samples(value: Any) -> Any:
    return value[:0] if isinstance(value, torch.Tensor) and value.dim() else value


def _is_empty(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.size(0) == 0


def _add_sample(value: Any) -> Any:
    """One sample of zeros if there is none; concatenated, so that a gradient finds its way back. Rotary
    tables come as (cos, sin), which have a dim of samples where position_ids have one."""
    if type(value) in (tuple, list):
        return type(value)(_add_sample(item) for item in value)
    if type(value) is dict:
        return {name: _add_sample(item) for name, item in value.items()}
    return torch.cat([value, value.new_zeros((1, *value.shape[1:]))]) if _is_empty(value) else value

"""A batch of no rows, so that a rank without a share of the last batch can keep step with the others.

Ten samples over four ranks in batches of eight leave two for the last batch: two ranks have none, and must
still take part in every collective, with gradients of zero. PyTorch's layers do this, but the attention of
transformers folds heads by `view(0, s, -1, d)`, which has no answer for -1. So a block is given one row of
zeros instead, and the row is cut off again: nothing reaches the loss, and every gradient is exactly zero.

    (0, s, h) -> (1, s, h) -> block -> (1, s, h) -> (0, s, h)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hpnb.models.model_anatomy import Anatomy


def accept_empty_batch(found: Anatomy) -> None:
    """Let the blocks of a model run on hidden states of 0 rows. Batches with rows pass as they are.

    The blocks get hooks; their classes and their weights stay as they are. `hpnb.models.vit` and
    `hpnb.models.gpt2` have done it.
    """
    for block in found.blocks:
        row = _PlaceholderSample()
        block.module.register_forward_pre_hook(row.before, with_kwargs=True)
        block.module.register_forward_hook(row.after)


def without_mask(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Hook before a model's forward: an attention_mask of 0 rows, which GPT2Model cannot fold, is let go."""
    if not _empty(kwargs.get("attention_mask")):
        return None
    return args, kwargs | {"attention_mask": None}


class _PlaceholderSample:
    """Remembers, from before a block to after it, whether it lent the block a row."""

    def __init__(self) -> None:
        self.lent = False

    def before(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self.lent = bool(args) and _empty(args[0])
        if not self.lent:
            return None
        return tuple(_lent(arg) for arg in args), {name: _lent(arg) for name, arg in kwargs.items()}

    def after(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return output[:0] if self.lent else None


def _empty(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.size(0) == 0


def _lent(value: Any) -> Any:
    """A row of zeros where there are none; joined on, so that a gradient finds its way back."""
    return torch.cat([value, value.new_zeros((1, *value.shape[1:]))]) if _empty(value) else value

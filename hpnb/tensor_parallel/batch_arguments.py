"""What a block or an attention of a grid gets beside hidden states, split to the samples of this rank.

    hidden states (b / r, s, h / w), mask (b, s)       ->    the same, mask (b / r, s)

A grid splits the batch in front of the first block, and masks come from the batch as the model got it. So an
argument with as many entries along its first dimension as the batch has samples is split, by position or by
name, in a tuple, list or dict too. All else stays, such as a mask (1, 1, s, s) or (s, s). Two kinds are
refused: what has fewer than 4 dimensions where a batch has as many samples as tokens or heads, because its
first one may count either, as in a bias (heads, s, s), and what needs a gradient, because each rank would
have a part of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from hpnb.tensor_parallel.activation_layout import ActivationLayout
from hpnb.tensor_parallel.module_hooks import tensors_of

# In transformers, the first dimension of these counts samples if there is more than one.
_OF_SAMPLES = ("attention_mask", "position_ids")


class BatchArguments:
    """The hooks of one block or attention.

    Args:
        path: its name in the model.
        layout: of the hidden states that it computes with.
        grid: such as "2d grid (2 x 2)".
        refuses_unclear: refuse an argument whose first dimension may count samples or tokens or heads. A
            block with attentions leaves it as it is, and they get it with more dimensions or refuse it.
        heads: how many heads its attentions have on all ranks together, and how many key-value heads.
    """

    def __init__(
        self,
        path: str,
        layout: ActivationLayout,
        grid: str,
        refuses_unclear: bool = True,
        heads: Collection[int] = (),
    ) -> None:
        self.path, self.layout, self.grid, self.refuses_unclear = path, layout, grid, refuses_unclear
        self.heads = heads

    def split(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before the forward: (arguments, arguments by name), with this rank's samples."""
        hidden = next(tensors_of(module, args, kwargs), None)
        if hidden is None:
            return args, kwargs
        by_name = {name: self._split(value, hidden, name) for name, value in kwargs.items()}
        return tuple(self._split(value, hidden) for value in args), by_name

    def refuse(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the forward of a block that has other samples between its columns and rows."""
        hidden = next(tensors_of(module, args, kwargs), None)
        for value in _tensors([*args, *kwargs.values()]):
            if hidden is not None and value.dim() and value.size(0) == self._batch_size(hidden):
                raise ValueError(
                    f"{self.path} gets a tensor of shape {tuple(value.shape)} beside hidden states, and a "
                    f"{self.grid} splits the {value.size(0)} samples: name the attentions that take it, "
                    "hpnb.models.register(.., attentions=..), or use mode '2d' or '2.5d', which split what a "
                    "block gets"
                )

    def check_output(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any
    ) -> None:
        """After the forward: hidden states of one sample broadcast with a mask of all, without an error."""
        hidden, output = next(tensors_of(module, args, kwargs), None), next(_tensors([outputs]), None)
        if hidden is None or output is None or not hidden.dim():
            return
        if output.shape == (self._batch_size(hidden), *hidden.shape[1:]):
            raise ValueError(
                f"{self.path} makes {tuple(output.shape)} of hidden states {tuple(hidden.shape)}, so it uses "
                f"something that has an entry for each of the {output.size(0)} samples, which a {self.grid} "
                "splits. Pass it as an argument that has the samples first: in 2d and 2.5d to the block, in "
                "3d to an attention that hpnb.models.register(.., attentions=..) names; or use mode='1d'"
            )

    def _batch_size(self, hidden: torch.Tensor) -> int:
        return hidden.size(0) * self.layout.batch_shards if hidden.dim() else 0

    def _split(self, value: Any, hidden: torch.Tensor, name: str = "") -> Any:
        if type(value) in (tuple, list):
            return type(value)(self._split(x, hidden) for x in value)
        if type(value) is dict:
            return {key: self._split(x, hidden) for key, x in value.items()}
        if not isinstance(value, torch.Tensor) or not value.dim() or value is hidden:
            return value
        samples, shape = self._batch_size(hidden), tuple(value.shape)
        if shape[0] != samples or (name == "position_ids" and len(shape) == 1):
            return value
        others = ["tokens"] * (samples in hidden.shape[1:-1]) + ["heads"] * (samples in self.heads)
        if others and len(shape) < (2 if name in _OF_SAMPLES else 4):
            if not self.refuses_unclear:
                return value
            ones = (1,) * (4 - len(shape))
            raise ValueError(
                f"{self.path} gets a tensor of shape {shape}, and a {self.grid} splits the {samples} "
                f"samples; there are {samples} {' and '.join(others)} too, so its first dimension may count "
                "either. Pass it with 4 dimensions, "
                f"{(samples, *ones, *shape[1:])} if it has an entry per sample and {(*ones, *shape)} if not, "
                "or use another number of samples"
            )
        if value.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{self.path} gets a tensor of shape {shape} that needs a gradient, and a {self.grid} splits "
                f"the {samples} samples, so each rank would have a part of the gradient; use mode='1d', or "
                "detach it"
            )
        return self.layout.narrow_batch(value)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple | list | dict):
            yield from _tensors(value)

"""The layers of 2D, 2.5D and 3D: linear layers of blocks, and the classifier behind them.

    linear       blocks of X times blocks of W: how is up to the grid (`summa_layers.py`, `cubic.py`)
    classifier   few outputs c, any number: W (c, h) is cut along h, so that each rank has part of a sum

        Z_i = sum_j X_ij W_j^T      all-reduce of (b / r, c) over the width, then gather the rows: (b, c)

q, k and v of an attention have the same X. Asked for the first, the grid computes all of them, for X has to
be sent around either way; asked for the others, it hands them out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn

from hpnb.comm import all_reduce, split
from hpnb.tensor_parallel.activation_layout import ActivationLayout
from hpnb.tensor_parallel.async_all_reduce import product
from hpnb.tensor_parallel.async_weight_grads import PendingWeightGrads, await_weight_grads
from hpnb.tensor_parallel.layernorm_grads import ReplicatedGradSum


class GridProduct(Protocol):
    """X W + b for each of some layers: (x, weights as stored, biases, transposed, sent) -> a y each."""

    def __call__(
        self,
        x: torch.Tensor,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        transposed: bool,
        sent: PendingWeightGrads | None,
    ) -> tuple[torch.Tensor, ...]: ...


class GridLinear(nn.Module):
    """Takes the place of an nn.Linear or a Conv1D, whose weight it keeps: (out, in), or (in, out) if
    `transposed`, of which this rank has a block."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, old: nn.Module, siblings: SharedInputLinears) -> None:
        super().__init__()
        self.register_parameter("weight", old.get_parameter("weight"))
        self.register_parameter("bias", getattr(old, "bias", None))
        self.train(old.training)
        self._siblings = siblings
        siblings.layers.append(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._siblings(self, x)

    def extra_repr(self) -> str:
        return f"block={tuple(self.weight.shape)}, bias={self.bias is not None}"


class SharedInputLinears:
    """Layers of one module that are asked for the same x, one after the other.

    Args:
        multiply: the product of this grid.
        shared: sums the gradients of their biases over the row shares.
        later: whether sums of their weights' gradients are left on their way while a block's backward runs.
    """

    def __init__(
        self, multiply: GridProduct, shared: ReplicatedGradSum, transposed: bool, later: bool
    ) -> None:
        self.layers: list[GridLinear] = []
        self._multiply, self._shared, self._transposed, self._later = multiply, shared, transposed, later
        self._weights: tuple[torch.Tensor, ...] = ()
        self._sent: PendingWeightGrads | None = None
        self._x: torch.Tensor | None = None
        self._results: dict[GridLinear, torch.Tensor] = {}

    def begin(self) -> None:
        """A block's forward begins."""
        self.end()
        if self._later:
            self._weights, self._sent = await_weight_grads([layer.weight for layer in self.layers])

    def end(self) -> None:
        self._weights, self._sent, self._x, self._results = (), None, None, {}

    def __call__(self, layer: GridLinear, x: torch.Tensor) -> torch.Tensor:
        if self._x is not x or layer not in self._results:
            weights = self._weights or [one.weight for one in self.layers]
            biases = [self._shared.used(one.bias) for one in self.layers]
            found = self._multiply(x, weights, biases, self._transposed, self._sent)
            self._x, self._results = x, dict(zip(self.layers, found, strict=True))
        y = self._results.pop(layer)
        if not self._results:
            self._x = None
        return y


class GridClassifier(nn.Module):
    """Takes the place of an nn.Linear with few outputs, whose weight is cut along its inputs already:
    (rows, ..., h of this rank) -> (b, ..., c), whole on all ranks. So another one may follow: it takes
    (b, ..., h) too.

    Args:
        shared: sums the weight's gradient over the row shares.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, old: nn.Module, transposed: bool, lies: ActivationLayout, shared: ReplicatedGradSum
    ) -> None:
        super().__init__()
        self.register_parameter("weight", old.get_parameter("weight"))
        self.register_parameter("bias", getattr(old, "bias", None))
        self.train(old.training)
        self._transposed, self._lies, self._shared = transposed, lies, shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        width = self._lies.width
        if x.size(-1) > self.weight.size(0 if self._transposed else 1):  # whole, and so are its rows
            z = all_reduce(product(split(x, width, -1), self.weight, None, self._transposed), width)
        else:
            weight = self._shared.used(self.weight)
            assert weight is not None
            part = product(x, weight, None, self._transposed)  # (rows, ..., c)
            z = self._lies.whole_rows(all_reduce(part, width))
        return z if self.bias is None else z + self.bias


class GridVocabHead(nn.Module):
    """Takes the place of an output layer with a logit a word, whose table is cut already:
    (rows, ..., h of this rank) -> (rows, ..., words of this rank).

    Args:
        multiply: (x, table, sent) -> logits.
        shared: sums the gradient of a bias over the row shares.
        later: as for SharedInputLinears.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        old: nn.Module,
        multiply: Callable[[torch.Tensor, torch.Tensor, PendingWeightGrads | None], torch.Tensor],
        shared: ReplicatedGradSum,
        later: bool,
    ) -> None:
        super().__init__()
        self.register_parameter("weight", old.get_parameter("weight"))
        self.register_parameter("bias", getattr(old, "bias", None))
        self.train(old.training)
        self._multiply, self._shared, self._later = multiply, shared, later

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (table,), sent = await_weight_grads([self.weight]) if self._later else ((self.weight,), None)
        z = self._multiply(x, table, sent)
        bias = self._shared.used(self.bias)
        return z if bias is None else z + bias

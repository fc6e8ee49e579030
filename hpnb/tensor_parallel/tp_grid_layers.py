"""The layers of 2D, 2.5D and 3D: linear layers of blocks, the output layer of a vocabulary, the classifier.

    linear       blocks of X times blocks of W, as the grid does it (`tp_2d_linear.py`, `tp_3d_matmul.py`)
    classifier   few outputs c, any number: W (c, h) is sharded along h, so that each rank has a summand

        Z_i = sum_j X_ij W_j^T      all-reduce of (b / r, c) over the hidden size, gather the batch: (b, c)

q, k and v of an attention have the same X. Asked for the first, the grid computes all of them, because X has
to be sent either way; asked for the others, it returns what it has.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from hpnb.comm import all_reduce, split
from hpnb.tensor_parallel.activation_layout import ActivationLayout
from hpnb.tensor_parallel.async_all_reduce import apply_linear
from hpnb.tensor_parallel.async_weight_grads import PendingWeightGrads, await_weight_grads
from hpnb.tensor_parallel.layernorm_grads import ReplicatedGradSum
from hpnb.tensor_parallel.parallel_region import version_of
from hpnb.tensor_parallel.sharded_linear import ShardedLayer

MatrixProduct = Callable[..., tuple[torch.Tensor, ...]]
"""X W + b for some layers: (x, weights, biases, transposed=, pending_grads=) -> a y each."""

LogitsProduct = Callable[..., torch.Tensor]
"""(x, this rank's shard of the embedding, pending_grads=) -> logits."""


class GridLinear(ShardedLayer):
    """A linear layer of a block; the weight is (out, in), or (in, out) if it is transposed."""

    def __init__(self, old: nn.Module, group: SharedInputLinears) -> None:
        super().__init__(old)
        self._group = group
        group.layers.append(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._group(self, x)


class SharedInputLinears:
    """Layers of one module that get the same x, one after the other.

    Args:
        grad_sum: sums the gradients of their biases over shards of the batch.
        defers_weight_grads: whether sums of their weights' gradients overlap the rest of a block's backward.
    """

    def __init__(
        self,
        multiply: MatrixProduct,
        grad_sum: ReplicatedGradSum,
        transposed: bool,
        defers_weight_grads: bool,
    ) -> None:
        self.layers: list[GridLinear] = []
        self._multiply, self.grad_sum, self._transposed = multiply, grad_sum, transposed
        self._defers_weight_grads = defers_weight_grads
        self._weights: tuple[torch.Tensor, ...] = ()
        self._pending_grads: PendingWeightGrads | None = None
        self._x: tuple[torch.Tensor, int, bool] | None = None  # with its version, and whether with gradients
        self._results: dict[GridLinear, torch.Tensor] = {}

    def begin(self) -> None:
        """A block's forward begins."""
        self.end()
        if self._defers_weight_grads:
            self._weights, self._pending_grads = await_weight_grads([layer.weight for layer in self.layers])

    def end(self) -> None:
        self._weights, self._pending_grads, self._x, self._results = (), None, None, {}

    def __call__(self, layer: GridLinear, x: torch.Tensor) -> torch.Tensor:
        version, with_grad = version_of(x), torch.is_grad_enabled()
        is_known = self._x is not None and self._x[0] is x and self._x[1:] == (version, with_grad)
        if not is_known or layer not in self._results:
            weights = self._weights or [member.weight for member in self.layers]
            biases = [self.grad_sum.weight(member.bias) for member in self.layers]
            ys = self._multiply(
                x, weights, biases, transposed=self._transposed, pending_grads=self._pending_grads
            )
            self._x, self._results = (x, version, with_grad), dict(zip(self.layers, ys, strict=True))
        y = self._results.pop(layer)
        if not self._results:
            self._x = None
        return y


class GridClassifier(ShardedLayer):
    """A layer with few outputs, whose weight is sharded along its inputs: (samples, ..., h of this rank) ->
    (b, ..., c), replicated on all ranks. So another one may follow: it takes (b, ..., h) too.

    `grad_sum` sums the weight's gradient over shards of the batch.
    """

    def __init__(
        self, old: nn.Module, transposed: bool, layout: ActivationLayout, grad_sum: ReplicatedGradSum
    ) -> None:
        super().__init__(old)
        self._transposed, self._layout, self._grad_sum = transposed, layout, grad_sum

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        axis = self._layout.hidden_axis
        if x.size(-1) > self.weight.size(0 if self._transposed else 1):  # all of h, and of the batch
            z = all_reduce(apply_linear(split(x, axis, -1), self.weight, None, self._transposed), axis)
        else:
            weight = self._grad_sum.weight(self.weight)
            assert weight is not None
            summand = apply_linear(x, weight, None, self._transposed)  # (samples, ..., c)
            z = self._layout.gather_batch(all_reduce(summand, axis))
        return z if self.bias is None else z + self.bias


class GridVocabHead(ShardedLayer):
    """An output layer with a logit per token of the vocabulary, whose embedding is sharded already:
    (samples, ..., h of this rank) -> (samples, ..., V of this rank).

    The other arguments are those of SharedInputLinears.
    """

    def __init__(
        self,
        old: nn.Module,
        multiply: LogitsProduct,
        grad_sum: ReplicatedGradSum,
        defers_weight_grads: bool,
    ) -> None:
        super().__init__(old)
        self._multiply, self._grad_sum = multiply, grad_sum
        self._defers_weight_grads = defers_weight_grads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        embedding: torch.Tensor = self.weight
        pending_grads: PendingWeightGrads | None = None
        if self._defers_weight_grads:
            (embedding,), pending_grads = await_weight_grads([self.weight])
        z = self._multiply(x, embedding, pending_grads=pending_grads)
        bias = self._grad_sum.weight(self.bias)
        return z if bias is None else z + bias

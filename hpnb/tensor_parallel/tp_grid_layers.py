"""The layers of 2D, 2.5D and 3D: linear layers of blocks, the output layer of a vocabulary, the classifier.

    linear       blocks of X times blocks of W, as the grid does it (`tp_2d_linear.py`, `tp_3d_matmul.py`)
    classifier   few outputs c, any number: W (c, h) is sharded along h, so that each rank has a summand

        Z_i = sum_j X_ij W_j^T      all-reduce of (b / r, c) over the hidden size, gather the batch: (b, c)

q, k and v of an attention have the same X. Asked for the first, the grid computes all of them, because X has
to be sent either way; asked for the others, it returns what it has. Which columns have the same X shows the
first forward: those of one module start together, and what was computed in vain is computed apart after that.
So k and v of a cross attention leave q, and `up` leaves q, k and v of a block that has them all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from hpnb.comm import all_reduce, split
from hpnb.tensor_parallel.activation_layout import ActivationLayout
from hpnb.tensor_parallel.async_all_reduce import apply_linear
from hpnb.tensor_parallel.async_weight_grads import PendingWeightGrads, await_weight_grads
from hpnb.tensor_parallel.parallel_region import version_of
from hpnb.tensor_parallel.replicated_grad_sum import ReplicatedGradSum
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
        group.add(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._group(self, x)


class SharedInputLinears:
    """Columns of one module, of which those that get the same x, one after the other, are one product.

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
        self.grad_sum, self._defers_weight_grads = grad_sum, defers_weight_grads
        self._multiply = partial(multiply, transposed=transposed)
        self._together: list[list[GridLinear]] = []  # layers that got the same x each time until now
        self._awaited: list[tuple[tuple[torch.Tensor, ...], PendingWeightGrads | None]] = []  # of each list
        self._x: tuple[torch.Tensor, int | None, bool] | None = None  # version, and whether with gradients
        self._results: dict[GridLinear, torch.Tensor] = {}  # of x, until a layer asks for its

    def add(self, layer: GridLinear) -> None:
        if not self._together:
            self._together.append([])
        self._together[0].append(layer)

    def begin(self) -> None:
        """A block's forward begins."""
        self._x, self._results = None, {}
        if self._defers_weight_grads:
            weights = ([layer.weight for layer in layers] for layers in self._together)
            self._awaited = [await_weight_grads(of_layers) for of_layers in weights]

    def end(self) -> None:
        """The forward is over. One that failed shows nothing of its inputs."""
        if sys.exception() is None:
            self._part_unused()
        self._x, self._results, self._awaited = None, {}, []

    def __call__(self, layer: GridLinear, x: torch.Tensor) -> torch.Tensor:
        version, with_grad = version_of(x), torch.is_grad_enabled()
        if version is None:  # it may change between two layers, and nobody would see it
            return self._compute([layer], x)[0]
        is_known = self._x is not None and self._x[0] is x and self._x[1:] == (version, with_grad)
        if not is_known or layer not in self._results:
            self._part_unused()
            layers = next(layers for layers in self._together if layer in layers)
            ys = self._compute(layers, x)
            self._x, self._results = (x, version, with_grad), dict(zip(layers, ys, strict=True))
        y = self._results.pop(layer)
        if not self._results:
            self._x = None
        return y

    def _compute(self, layers: list[GridLinear], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights: tuple[torch.Tensor, ...] = tuple(layer.weight for layer in layers)
        pending_grads: PendingWeightGrads | None = None
        if layers in self._together[: len(self._awaited)]:
            weights, pending_grads = self._awaited[self._together.index(layers)]
        biases = [self.grad_sum.weight(layer.bias) for layer in layers]
        return self._multiply(x, weights, biases, pending_grads=pending_grads)

    def _part_unused(self) -> None:
        """What nobody has asked for had another x. All ranks see that, because they run the same forward."""
        if unused := list(self._results):
            layers = next(layers for layers in self._together if unused[0] in layers)
            self._together.remove(layers)
            self._together += [[layer for layer in layers if layer not in unused], unused]
            self._awaited = []  # for the rest of this forward
        self._x, self._results = None, {}


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

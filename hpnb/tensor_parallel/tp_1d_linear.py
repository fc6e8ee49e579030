"""Column- and row-parallel linear layers: two matrices sharded so that nothing is sent between them.

    y = f(x A)      A = [A_1 | A_2 | ... | A_t]        rank r computes y_r = f(x A_r): its columns of y
    z = y B         B = [B_1 ; B_2 ; ... ; B_t]        and z_r = y_r B_r; z is the sum of all z_r

    forward     x replicated  ->  y_r  ->  z = all-reduce(z_r)
    backward    dz replicated ->  dy_r ->  dx = all-reduce(dx_r)

(Shoeybi et al. 2019, *Megatron-LM*, arXiv 1909.08053, section 3.) f must work on columns independently: a
GELU, or an attention whose heads are columns. A transformer block has two such pairs, and each is a region:
attention and MLP. For a batch of b sequences with s tokens of hidden size h,

    bytes that leave a rank, per block, forward and backward:   4 * 2 (t-1)/t * b s h * element size

The bias of a row-parallel layer is added once: by the first rank, in its matmul, before the sum. What is
sent at the start and the end of a region, also with sequence parallelism, is in `sequence_parallel.py`. How
the backward's all-reduce overlaps is in `async_all_reduce.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from hpnb.tensor_parallel.async_all_reduce import (
    NO_COMMUNICATION,
    ForwardWeights,
    apply_linear,
    enter_region,
    linear_deferring_weight_grad,
)
from hpnb.tensor_parallel.sequence_parallel import SequenceSharding


class _ParallelLinear(nn.Module):
    """A linear layer of which this rank has a shard. It replaces an nn.Linear or a Conv1D and takes
    over its Parameters; the weight is (out, in), or (in, out) if `transposed`.

    Attributes:
        forward_weights: the weights to compute with, which come from the node that begins the region.
            `ParallelRegion` sets them when the region's forward begins, and clears them when it ends. None
            outside of a region.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, old: nn.Module, transposed: bool, adds_bias: bool = True) -> None:
        super().__init__()
        self.transposed, self.adds_bias = transposed, adds_bias
        self.register_parameter("weight", old.get_parameter("weight"))
        self.register_parameter("bias", getattr(old, "bias", None))
        self.train(old.training)
        self.forward_weights: ForwardWeights | None = None

    def extra_repr(self) -> str:
        shape = tuple(self.weight.shape) if self.transposed else tuple(self.weight.shape[::-1])
        return f"in={shape[0]}, out={shape[1]}, bias={self.bias is not None}"


class ColumnParallelLinear(_ParallelLinear):
    """Some columns of A: (..., in) -> (..., out of this rank). It sends nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.forward_weights is not None:
            return linear_deferring_weight_grad(x, self.forward_weights)
        return apply_linear(x, self.weight, self.bias, self.transposed)


class RowParallelLinear(_ParallelLinear):
    """Some rows of B: (..., in of this rank) -> (..., out), summed over the ranks."""

    def __init__(self, old: nn.Module, transposed: bool, sharding: SequenceSharding) -> None:
        super().__init__(old, transposed, adds_bias=sharding.axis.rank == 0)
        self.sharding = sharding

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        weights = self.forward_weights
        if weights is None:  # the columns before it are regions by themselves, so it only ends one
            y, (weights,) = enter_region(y, [self], NO_COMMUNICATION)
        return linear_deferring_weight_grad(y, weights, self.sharding.region_exit())


class ParallelRegion:
    """A module that is a region, such as an attention or an MLP; or a column-parallel layer by itself.

    Attributes:
        layers: its column- and row-parallel layers, in the order of their use.
    """

    def __init__(
        self, sharding: SequenceSharding, layers: Iterable[ColumnParallelLinear | RowParallelLinear]
    ) -> None:
        self.sharding, self.layers = sharding, tuple(layers)

    def begin(self, x: torch.Tensor) -> torch.Tensor:
        """x as the region's forward takes it."""
        entered, weights = enter_region(x, self.layers, self.sharding.region_entry())
        for layer, forward_weights in zip(self.layers, weights, strict=True):
            layer.forward_weights = forward_weights
        return entered

    def end(self) -> None:
        for layer in self.layers:
            layer.forward_weights = None

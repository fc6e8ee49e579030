"""Column- and row-parallel linear layers: two matrices sharded so that nothing is sent between them.

    y = f(x A)      A = [A_1 | A_2 | ... | A_t]        rank r computes y_r = f(x A_r): its columns of y
    z = y B         B = [B_1 ; B_2 ; ... ; B_t]        and z_r = y_r B_r; z is the sum of all z_r

    forward     x replicated  ->  y_r  ->  z = all-reduce(z_r)
    backward    dz replicated ->  dy_r ->  dx = all-reduce(dx_r)

(Shoeybi et al. 2019, *Megatron-LM*, arXiv 1909.08053, section 3.) f must work on columns independently: a
GELU, or an attention whose heads are columns. A transformer block has two such pairs, and each is a region:
attention and MLP. For a batch of b sequences with s tokens of hidden size h,

    bytes that leave a rank, per block:   4 * 2 (t-1)/t * b s h * element size

because each of the two pairs has one all-reduce in the forward and one in the backward.

The bias of a row-parallel layer is added once: by the first rank, in its matmul, before the sum.

Where a column-parallel layer reads x, the backward must sum dx over the ranks. q, k and v of a self-attention
read the same x, so one sum of dq A_q^T + dk A_k^T + dv A_v^T does for all three. In a cross attention k and v
read another tensor, which needs a sum too. So the sum belongs to the tensor (`parallel_region.py`).

What is sent at the start and the end of a region, also with sequence parallelism, is in
`sequence_parallel.py`. How the backward's all-reduce overlaps is in `async_all_reduce.py`.
"""

from __future__ import annotations

import torch
from torch import nn

from hpnb.tensor_parallel.async_all_reduce import apply_linear, linear_deferring_weight_grad
from hpnb.tensor_parallel.parallel_region import ParallelLinear, enter_alone
from hpnb.tensor_parallel.sequence_parallel import SequenceSharding


class ColumnParallelLinear(ParallelLinear):
    """This rank's columns of A: (..., in) -> (..., out of this rank)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.region is None:
            return apply_linear(x, self.weight, self.bias, self.transposed)
        return linear_deferring_weight_grad(*self.region.enter(x, self))


class RowParallelLinear(ParallelLinear):
    """This rank's rows of B: (..., in of this rank) -> (..., out), summed over the ranks."""

    def __init__(self, old: nn.Module, transposed: bool, sharding: SequenceSharding) -> None:
        super().__init__(old, transposed, adds_bias=sharding.axis.rank == 0)
        self.sharding = sharding

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        weights = None if self.region is None else self.region.leave(self)
        if weights is None:
            y, weights = enter_alone(y, self)
        return linear_deferring_weight_grad(y, weights, self.sharding.region_exit())

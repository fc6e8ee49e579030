"""2D tensor parallelism of a whole model, on q x q ranks.

    hidden states (b, s, h)     batch down, hidden size across: (b / q, s, h / q)
    matrix (in, out)            in down, out across: (in / q, out / q)
    norm, bias                  across
    embedding (V, h)            vocabulary down, hidden size across; V need not divide
    logits (b, s, V)            batch down, vocabulary across

(Xu et al. 2021, arXiv 2104.05343.) Down is along a column of the grid, across along a row. Every matrix is
one SUMMA product (`summa.py`), whose input and output have the same layout, so the column- and row-parallel
layers of 1D do not differ here. Heads lie across, so an attention sends nothing. With n = b s h / q^2 values
of hidden states and w = h^2 / q^2 of a matrix (h, h) on a rank, a block with an MLP of 4 h sends from each
rank, forward and backward, in values,

    across     3 (q-1) (n + n + n + 4 n)                  inputs of qkv, o, up and down
    down       3 (q-1) * 12 w                             weights

and, of norms and biases, 2 (q-1)/q * 13 h/q down, and for each of two norms 2 (q-1)/q * b s / q times 2
float64 and 2 other numbers across. 1D on as many ranks p sends 4 * 2 (p-1)/p * b s h. Parameters, gradients
and activations are a p-th.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import isqrt

from torch import nn

from hpnb.mesh import Axis
from hpnb.models import Role
from hpnb.placement import Cut
from hpnb.split_sizes import split_sizes
from hpnb.tensor_parallel.activation_layout import ActivationLayout
from hpnb.tensor_parallel.split_heads import split_evenly, split_units
from hpnb.tensor_parallel.summa import SummaGrid
from hpnb.tensor_parallel.tp_2d_linear import linear_2d, logits_2d
from hpnb.tensor_parallel.tp_grid import GridMode
from hpnb.tensor_parallel.tp_grid_layers import LogitsProduct, MatrixProduct
from hpnb.tensor_parallel.vocab_embedding import VocabParallelEmbedding


class TensorParallel2D(GridMode):
    """q x q ranks, "tp.0" down and "tp.1" across. All ranks of the world make it at once."""

    name = "2d"
    defers_weight_grads = False

    def __init__(self, axis: Axis, depth: int = 1) -> None:
        super().__init__(axis)
        q = isqrt(axis.size // depth)
        self.axes = axis.split(q, q) if depth == 1 else axis.split(depth, q, q)
        *depth_axis, self.down, self.across = self.axes
        self.grid = SummaGrid(self.down, self.across, self.device, *depth_axis)
        layout = ActivationLayout(self.axes[:-1], self.across)
        self.hidden_layout = self.inner_layout = self.logits_layout = layout

    def describe(self) -> str:
        return f"2d grid ({self.down.size} x {self.across.size})"

    def extra_divisors(self, role: Role, shape: Sequence[int]) -> Iterator[tuple[str, int, int]]:
        yield from ()

    def matrix_cuts(self, role: Role, shape: Sequence[int]) -> tuple[Cut, ...]:
        assert role.in_dim is not None
        inputs = split_evenly(self.down, role.in_dim, shape[role.in_dim])
        if role.kind == "row":
            return inputs, split_evenly(self.across, role.out_dim, shape[role.out_dim])
        return inputs, split_units(self.across, role, role.out_dim, shape[role.out_dim])

    def embedding_cuts(self, vocab_dim: int, hidden_dim: int, shape: Sequence[int]) -> tuple[Cut, ...]:
        hidden = split_evenly(self.across, hidden_dim, shape[hidden_dim])
        return split_evenly(self.down, vocab_dim, shape[vocab_dim]), hidden

    def make_embedding(self, old: nn.Embedding, vocab_size: int) -> nn.Module:
        return VocabParallelEmbedding(old, vocab_size, self.down)

    def matrix_product(self, role: Role) -> MatrixProduct:
        return partial(linear_2d, grid=self.grid)

    def logits_product(self, vocab_size: int) -> LogitsProduct:
        return partial(logits_2d, grid=self.grid, vocab_sizes=split_sizes(vocab_size, self.grid.size))

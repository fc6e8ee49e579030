"""2D and 2.5D tensor parallelism of a whole model, on q x q or d x q x q ranks.

    hidden states (b, s, h)     rows over depth and down, width across: (b / (d q), s, h / q)
    matrix (in, out)            in down, out across: (in / q, out / q), equal on all depths
    norm, bias                  across
    table of words (V, h)       words down, width across; V need not divide
    logits (b, s, V)            rows over depth and down, words across

(Xu et al. 2021, arXiv 2104.05343; with depth, Wang et al. 2021, arXiv 2105.14500.) Down is along a column of
the grid, across along a row. Every matrix is one SUMMA product (`summa.py`), whose input and output lie
alike, so columns and rows of 1D do not differ here. Heads lie across, so an attention sends nothing. With
n = b s h / (d q^2) values of hidden states and w = h^2 / q^2 of a matrix (h, h) on a rank, a block with an
MLP of 4 h sends from each rank, forward and backward, in values,

    across     3 (q-1) (n + n + n + 4 n)                  inputs of qkv, o, up and down
    down       3 (q-1) * 12 w                             weights
    depth      2 (d-1)/d * 12 w                           gradients of weights

and, of norms and biases, 2 (q-1)/q * 13 h/q down and 2 (d-1)/d * 13 h/q over depth, and for each of two norms
2 (q-1)/q * b s / (d q) times 2 float64 and 2 other numbers across. 1D on as many ranks p sends
4 * 2 (p-1)/p * b s h. Activations are a p-th, parameters and gradients a q^2-th.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import isqrt

import torch
from torch import nn

from hpnb.mesh import Axis
from hpnb.models import Role
from hpnb.placement import Cut
from hpnb.split_sizes import split_sizes
from hpnb.tensor_parallel.activation_layout import ActivationLayout
from hpnb.tensor_parallel.async_weight_grads import PendingWeightGrads
from hpnb.tensor_parallel.mode import split_evenly, split_units
from hpnb.tensor_parallel.summa import SummaGrid
from hpnb.tensor_parallel.tp_2d_linear import linear, logits
from hpnb.tensor_parallel.tp_grid import GridMode
from hpnb.tensor_parallel.tp_grid_layers import GridProduct
from hpnb.tensor_parallel.vocab_embedding import VocabParallelEmbedding


class TensorParallel2D(GridMode):
    """q x q ranks, "tp.0" down and "tp.1" across; with a depth "tp.0" is that, "tp.1" down and "tp.2" across.

    All ranks of the world make it at once.

    Raises:
        ValueError: the axis has not d * q * q ranks.
    """

    def __init__(self, axis: Axis, depth: int = 1) -> None:
        super().__init__(axis)
        q = isqrt(axis.size // depth)
        self.axes = axis.split(depth, q, q) if depth > 1 else axis.split(q, q)
        *deep, self.down, self.across = self.axes
        self.name, self.depth, self.q = "2.5d" if depth > 1 else "2d", depth, q
        self.square = SummaGrid(self.down, self.across, self.device, deep[0] if deep else None)
        self.hidden = self.inner = self.logits = ActivationLayout((*deep, self.down), self.across)
        self.later = depth > 1

    def describe(self) -> str:
        grid = f"depth {self.depth} x {self.q} x {self.q}" if self.depth > 1 else f"{self.q} x {self.q}"
        return f"{self.name} grid ({grid})"

    def further(self, role: Role, shape: Sequence[int]) -> Iterator[tuple[str, int, int]]:
        yield from ()

    def matrix(self, role: Role, shape: Sequence[int]) -> tuple[Cut, ...]:
        assert role.in_dim is not None
        into = split_evenly(self.down, role.in_dim, shape[role.in_dim])
        if role.kind == "row":
            return into, split_evenly(self.across, role.out_dim, shape[role.out_dim])
        return into, split_units(self.across, role, role.out_dim, shape[role.out_dim])

    def table(self, words: int, width: int, shape: Sequence[int]) -> tuple[Cut, ...]:
        return split_evenly(self.down, words, shape[words]), split_evenly(self.across, width, shape[width])

    def embedding(self, old: nn.Embedding, words: int) -> nn.Module:
        return VocabParallelEmbedding(old, words, self.down)

    def multiply(self, role: Role) -> GridProduct:
        def summa(
            x: torch.Tensor,
            weights: Sequence[torch.Tensor],
            biases: Sequence[torch.Tensor | None],
            transposed: bool,
            sent: PendingWeightGrads | None,
        ) -> tuple[torch.Tensor, ...]:
            return linear(x, weights, biases, self.square, transposed, sent)

        return summa

    def multiply_words(
        self, words: int
    ) -> Callable[[torch.Tensor, torch.Tensor, PendingWeightGrads | None], torch.Tensor]:
        share = split_sizes(words, self.q)
        return lambda x, table, sent: logits(x, table, self.square, share, sent)

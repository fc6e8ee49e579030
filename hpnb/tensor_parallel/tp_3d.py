"""3D tensor parallelism of a whole model, on l x l x l ranks.

    "tp.0", "tp.1", "tp.2"      a, b, c
    hidden states (b, s, h)     rows over a, then c; width over b             (b / l^2, s, h / l)
    inside of a pair            rows over a, then b; width over c             b and c change places
    matrix (in, out)            in and out over the widths of its input and output, then once more over a
    norm, bias                  over the width
    table of words (V, h)       words over c, then a; width over b; V need not divide
    logits (b, s, V)            rows over a, then b; words over c

(Bian et al. 2021, "Maximizing parallelism in distributed training for huge neural networks", arXiv
2105.14450, section 3.) Each matrix is one product on the cube (`cubic.py`). Heads lie along c inside an
attention, whose rows are not those of the hidden states around it: it has the mask of its own rows. With
n = b s h / l^2 values of hidden states and w = h^2 / l^2 of a matrix (h, h), both as they are gathered, a
block with an MLP of 4 h sends from each rank, forward and backward, in values and units of (l-1)/l,

    along a     3 * 12 w                                weights
    along b     3 (n + 4 n) + 2 (3 n + 4 n)             inputs of o and down, outputs of qkv and up
    along c     3 (n + n)   + 2 (n + n)                 inputs of qkv and up, outputs of o and down

and, of norms and biases, 2 * 13 h/l along a, 2 * 7 h/l along b, 2 * 6 h/l along c, and for each of two norms
2 b s/l^2 times 2 float64 and 2 other numbers along b. Parameters, gradients and activations are an l^3-th.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from hpnb.comm import all_reduce
from hpnb.mesh import Axis
from hpnb.models import Role
from hpnb.placement import Cut
from hpnb.split_sizes import split_sizes
from hpnb.tensor_parallel.activation_layout import ActivationLayout
from hpnb.tensor_parallel.async_weight_grads import PendingWeightGrads
from hpnb.tensor_parallel.mode import split_evenly, split_units
from hpnb.tensor_parallel.tp_3d_matmul import MatmulAxes3D, linear
from hpnb.tensor_parallel.tp_grid import GridMode
from hpnb.tensor_parallel.tp_grid_layers import GridProduct
from hpnb.tensor_parallel.vocab_embedding import VocabParallelEmbedding


class TensorParallel3D(GridMode):
    """l x l x l ranks. All ranks of the world make it at once.

    Raises:
        ValueError: the axis has not l * l * l ranks.
    """

    name = "3d"
    later = True

    def __init__(self, axis: Axis) -> None:
        super().__init__(axis)
        self.side = round(axis.size ** (1 / 3))
        self.axes = self.a, self.b, self.c = axis.split(self.side, self.side, self.side)
        self.hidden = ActivationLayout((self.a, self.c), self.b)
        self.inner = self.logits = ActivationLayout((self.a, self.b), self.c)
        self.column = MatmulAxes3D(self.a, self.b, self.c, self.device)
        self.row = MatmulAxes3D(self.a, self.c, self.b, self.device)

    def describe(self) -> str:
        return f"3d grid ({self.side} x {self.side} x {self.side})"

    def again(self, role: Role) -> int:
        """The dim of a weight that is cut over a too: the first, whose parts lie end to end, if it can be."""
        return 0 if role.out_dim != 0 or role.fused == 1 else 1

    def further(self, role: Role, shape: Sequence[int]) -> Iterator[tuple[str, int, int]]:
        dim = self.again(role)
        yield ("outputs" if dim == role.out_dim else "inputs"), shape[dim], self.side**2

    def matrix(self, role: Role, shape: Sequence[int]) -> tuple[Cut, ...]:
        assert role.in_dim is not None
        at, to = (self.hidden, self.inner) if role.kind == "column" else (self.inner, self.hidden)
        into = split_evenly(at.width, role.in_dim, shape[role.in_dim])
        if role.kind == "row":
            out = split_evenly(to.width, role.out_dim, shape[role.out_dim])
        else:
            out = split_units(to.width, role, role.out_dim, shape[role.out_dim])
        dim = self.again(role)
        left = {role.in_dim: into.size, role.out_dim: out.size}[dim]
        return into, out, split_evenly(self.a, dim, left)

    def table(self, words: int, width: int, shape: Sequence[int]) -> tuple[Cut, ...]:
        outer = split_evenly(self.c, words, shape[words])
        inner = split_evenly(self.a, words, outer.size)
        return outer, inner, split_evenly(self.b, width, shape[width])

    def embedding(self, old: nn.Embedding, words: int) -> nn.Module:
        return VocabParallelEmbedding3D(old, words, self.c, self.a)

    def multiply(self, role: Role) -> GridProduct:
        cube, dim = self.column if role.kind == "column" else self.row, self.again(role)

        def product(
            x: torch.Tensor,
            weights: Sequence[torch.Tensor],
            biases: Sequence[torch.Tensor | None],
            transposed: bool,
            sent: PendingWeightGrads | None,
        ) -> tuple[torch.Tensor, ...]:
            return linear(x, weights, biases, cube, dim, transposed, sent)

        return product

    def multiply_words(
        self, words: int
    ) -> Callable[[torch.Tensor, torch.Tensor, PendingWeightGrads | None], torch.Tensor]:
        pieces = split_sizes(split_sizes(words, self.side)[self.c.rank], self.side)

        def product(x: torch.Tensor, table: torch.Tensor, sent: PendingWeightGrads | None) -> torch.Tensor:
            return linear(x, [table], [None], self.column, 0, False, sent, pieces)[0]

        return product


class VocabParallelEmbedding3D(VocabParallelEmbedding):
    """Words cut over one axis and, what is left, over another: ids (...) -> (..., h), equal on both."""

    def __init__(self, old: nn.Embedding, words: int, outer: Axis, inner: Axis) -> None:
        super().__init__(old, words, outer)
        share = split_sizes(self.own, inner.size)
        self.inner, self.first, self.own = inner, self.first + sum(share[: inner.rank]), share[inner.rank]
        padding = old.padding_idx
        here = padding is not None and self.first <= padding < self.first + self.own
        self.padding_idx = padding - self.first if padding is not None and here else None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        own = ids - self.first
        elsewhere = (own < 0) | (own >= self.own)
        if self.own:
            found = F.embedding(own.masked_fill(elsewhere, 0), self.weight, self.padding_idx)
            found = found.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        else:  # more ranks than words
            found = self.weight.sum() * self.weight.new_zeros((*ids.shape, self.weight.size(1)))
        return all_reduce(all_reduce(found, self.inner), self.axis)

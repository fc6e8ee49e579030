"""3D tensor parallelism of a whole model, on l x l x l ranks.

    "tp.0", "tp.1", "tp.2"      a, b, c
    hidden states (b, s, h)     batch over a, then c; hidden size over b      (b / l^2, s, h / l)
    inside of a region          batch over a, then b; hidden size over c      b and c change places
    matrix (in, out)            in and out over the axes of its input and output, then once more over a
    norm, bias                  over the axis of the hidden size
    embedding (V, h)            vocabulary over c, then a; hidden size over b; V need not divide
    logits (b, s, V)            batch over a, then b; vocabulary over c

(Bian et al. 2021, "Maximizing parallelism in distributed training for huge neural networks", arXiv
2105.14450, section 3.) Each matrix is one product on the cube (`tp_3d_matmul.py`). Heads lie along c inside
an attention, whose samples are not those of the hidden states around it, so it gets the mask of its samples.
With n = b s h / l^2 values of hidden states and w = h^2 / l^2 of a matrix (h, h), both as they are gathered,
a block with an MLP of 4 h sends from each rank, forward and backward, in values and units of (l-1)/l,

    along a     3 * 12 w                                weights
    along b     3 (n + 4 n) + 2 (3 n + 4 n)             inputs of o and down, outputs of qkv and up
    along c     3 (n + n)   + 2 (n + n)                 inputs of qkv and up, outputs of o and down

and, of norms and biases, 2 * 13 h/l along a, 2 * 7 h/l along b, 2 * 6 h/l along c, and for each of two norms
2 b s/l^2 times 2 float64 and 2 other numbers along b. Parameters, gradients and activations are an l^3-th.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from hpnb.mesh import Axis
from hpnb.models import Role
from hpnb.placement import Cut
from hpnb.split_sizes import split_sizes
from hpnb.tensor_parallel.activation_layout import ActivationLayout, before_and_after
from hpnb.tensor_parallel.split_heads import split_evenly, split_units
from hpnb.tensor_parallel.tp_3d_matmul import MatmulAxes3D, linear_3d
from hpnb.tensor_parallel.tp_grid import GridMode
from hpnb.tensor_parallel.tp_grid_layers import LogitsProduct, MatrixProduct
from hpnb.tensor_parallel.vocab_embedding import VocabParallelEmbedding


class TensorParallel3D(GridMode):
    """l x l x l ranks. All ranks of the world make it at once."""

    name = "3d"
    defers_weight_grads = True

    def __init__(self, axis: Axis) -> None:
        super().__init__(axis)
        self.side = round(axis.size ** (1 / 3))
        self.axes = self.a, self.b, self.c = axis.split(self.side, self.side, self.side)
        self.hidden_layout = ActivationLayout((self.a, self.c), self.b)
        self.inner_layout = self.logits_layout = ActivationLayout((self.a, self.b), self.c)
        self.column = MatmulAxes3D(self.a, self.b, self.c, self.device)
        self.row = MatmulAxes3D(self.a, self.c, self.b, self.device)

    def describe(self) -> str:
        return f"3d grid ({self.side} x {self.side} x {self.side})"

    def extra_divisors(self, role: Role, shape: Sequence[int]) -> Iterator[tuple[str, int, int]]:
        dim = _second_dim(role)
        yield ("outputs" if dim == role.out_dim else "inputs"), shape[dim], self.side**2

    def matrix_cuts(self, role: Role, shape: Sequence[int]) -> tuple[Cut, ...]:
        assert role.in_dim is not None
        before, after = before_and_after(role, self.hidden_layout, self.inner_layout)
        inputs = split_evenly(before.hidden_axis, role.in_dim, shape[role.in_dim])
        if role.kind == "row":
            outputs = split_evenly(after.hidden_axis, role.out_dim, shape[role.out_dim])
        else:
            outputs = split_units(after.hidden_axis, role, role.out_dim, shape[role.out_dim])
        dim = _second_dim(role)
        block_size = {role.in_dim: inputs.size, role.out_dim: outputs.size}[dim]
        return inputs, outputs, split_evenly(self.a, dim, block_size)

    def embedding_cuts(self, vocab_dim: int, hidden_dim: int, shape: Sequence[int]) -> tuple[Cut, ...]:
        outer = split_evenly(self.c, vocab_dim, shape[vocab_dim])
        inner = split_evenly(self.a, vocab_dim, outer.size)
        return outer, inner, split_evenly(self.b, hidden_dim, shape[hidden_dim])

    def make_embedding(self, old: nn.Embedding, vocab_size: int) -> nn.Module:
        return VocabParallelEmbedding(old, vocab_size, self.c, self.a)

    def matrix_product(self, role: Role) -> MatrixProduct:
        cube = self.column if role.kind == "column" else self.row
        return partial(linear_3d, cube=cube, dim=_second_dim(role))

    def logits_product(self, vocab_size: int) -> LogitsProduct:
        sizes = split_sizes(split_sizes(vocab_size, self.side)[self.c.rank], self.side)

        def multiply(x: torch.Tensor, embedding: torch.Tensor, **options: Any) -> torch.Tensor:
            return linear_3d(x, [embedding], [None], self.column, 0, False, sizes=sizes, **options)[0]

        return multiply


def _second_dim(role: Role) -> int:
    """The dim of a weight that is sharded over a too: dim 0, whose shards are contiguous, if it can be."""
    return 0 if role.out_dim != 0 or role.fused == 1 else 1

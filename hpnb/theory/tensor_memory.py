"""What a rank holds under tensor parallelism: its parameters, exactly, and the activations that a block
keeps.

Between forward and backward a block keeps the inputs of its matrices, norms and nonlinearities. For values of
2 bytes, attention that does not write its scores, and an MLP of 4 h, in units of b s h bytes,

                        one rank            1d              1d, tokens sharded   2d, 2.5d, 3d
    inputs of 2 norms   2 + 2               4               4/t                  4/p
    their outputs       2 + 2               4               4                    4/p
    q, k, v             6                   6/t             6/t                  6/p
    attention's output  2                   2/t             2/t                  2/p
    MLP, up and gelu    8 + 8               16/t            16/t                 16/p
                        32                  8 + 24/t        4 + 28/t             32/p

and two small terms: 4 bytes a head and token of attention, and 16 a token of the norms' statistics.
Korthikanti et al. 2022 (arXiv 2205.05198, section 4) have 34 + 5 a s/h, 10 + 24/t + 5 a s/(h t) and (34 + 5
a s/h)/t. The 2 more are the masks of two dropouts, a byte an element (`dropout=True` counts them); 5 a s/h
are scores, softmax and its mask. They also keep the column layers' inputs sharded along the tokens and gather
them a second time in the backward. Here they stay gathered, which takes 4 - 4/t more, and are gathered once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from hpnb.split_sizes import split_sizes
from hpnb.theory.tensor_layer import grid_sides
from hpnb.theory.transformer import Block


class Weight(Protocol):
    """What a parameter is, as `hpnb.models.Role` says it."""

    @property
    def kind(self) -> str: ...
    @property
    def out_dim(self) -> int: ...
    @property
    def in_dim(self) -> int | None: ...
    @property
    def bias(self) -> bool: ...
    @property
    def units(self) -> int: ...
    @property
    def fused(self) -> int: ...
    @property
    def vocabulary(self) -> int | None: ...
    @property
    def cut_dim(self) -> int | None: ...


# --- activations -----------------------------------------------------------------------------------


def activation_terms(
    block: Block,
    mode: str = "1d",
    ranks: int = 1,
    depth: int = 1,
    sequence_parallel: bool = False,
    *,
    dropout: bool = False,
    mlp_copies: int = 2,
) -> dict[str, float]:
    """{what: bytes} that one block keeps for its backward on a rank; if shards differ, on the first rank.

    Args:
        dropout: count a mask of one byte an element after either pair of matrices, as on a GPU.
        mlp_copies: of the MLP's inner values: 2 are what goes into gelu and what comes out. A gelu that is
            written out in Python, as GPT-2's gelu_new in transformers, keeps 5.

    Raises:
        ValueError: ranks that the mode cannot use.
    """
    sides = grid_sides(mode, ranks, depth, sequence_parallel)
    size, numbers = block.bytes_per_value, max(block.bytes_per_value, 4)  # statistics: float32 at least
    mlp, head = block.mlp_ratio * block.hidden, block.hidden // block.heads
    tokens, between, heads, width = float(block.batch * block.sequence), 0.0, float(block.heads), 1
    if mode == "1d":
        # tokens of a rank between two pairs of matrices
        between = float(split_sizes(block.batch * block.sequence, ranks)[0]) if sequence_parallel else tokens
        heads, inner = float(split_sizes(block.heads, ranks)[0]), float(split_sizes(mlp, ranks)[0])
    else:
        width = sides[-1]
        between = tokens = tokens * width / ranks  # rows are cut over all other axes
        heads, inner = heads / width, mlp / width
    h = block.hidden / width
    terms = {
        "norms' inputs": 2 * between * h * size,
        "norms' outputs": 2 * tokens * h * size,
        "q, k, v": 3 * tokens * heads * head * size,
        "attention's output": tokens * heads * head * size,
        "MLP": mlp_copies * tokens * inner * size,
        "attention's sums": tokens * heads * numbers,
        "norms' statistics": 4 * between * numbers,
    }
    return terms | ({"dropouts' masks": 2 * between * h} if dropout else {})


def activation_bytes(
    block: Block,
    mode: str = "1d",
    ranks: int = 1,
    depth: int = 1,
    sequence_parallel: bool = False,
    *,
    dropout: bool = False,
    mlp_copies: int = 2,
) -> float:
    """The sum of `activation_terms`."""
    return sum(
        activation_terms(
            block, mode, ranks, depth, sequence_parallel, dropout=dropout, mlp_copies=mlp_copies
        ).values()
    )


def published_activation_bytes(block: Block, ranks: int = 1, sequence_parallel: bool = False) -> float:
    """Korthikanti et al. 2022, section 4: 16-bit values, with dropout, and attention that writes its scores.

    s b h (34 + 5 a s/h) on one rank, s b h (10 + 24/t + 5 a s/(h t)) in 1D; a t-th of the first where tokens
    are cut.
    """
    sbh = block.sequence * block.batch * block.hidden
    scores = 5 * block.heads * block.sequence / block.hidden
    if sequence_parallel:
        return sbh * (34 + scores) / ranks
    return sbh * (10 + (24 + scores) / ranks)


# --- parameters ------------------------------------------------------------------------------------


def parameters_held(
    roles: Mapping[str, Weight],
    shapes: Mapping[str, Sequence[int]],
    mode: str,
    ranks: int,
    depth: int = 1,
) -> tuple[int, ...]:
    """Parameters on every rank of a model that `hpnb.tensor_parallel.parallelize` has sharded.

        model = hpnb.models.gpt2("1.5b", device="meta")
        shapes = {name: p.shape for name, p in model.named_parameters()}
        parameters_held(hpnb.models.roles(model), shapes, "2d", 16)

    The model has a head; one that returns hidden states replicates a pooler.

    Args:
        roles, shapes: of every unsharded parameter, by its name; a tied one counts once.

    Raises:
        ValueError: ranks that the mode cannot use. That sizes divide where they must is not checked.
    """
    sides = grid_sides(mode, ranks, depth)
    counts = []
    for rank in range(ranks):
        rest, place = rank, [0] * len(sides)
        for dim in reversed(range(len(sides))):
            rest, place[dim] = divmod(rest, sides[dim])
        counts.append(sum(_numel(roles[n], tuple(shape), mode, sides, place) for n, shape in shapes.items()))
    return tuple(counts)


def _numel(
    role: Weight, shape: tuple[int, ...], mode: str, sides: Sequence[int], place: Sequence[int]
) -> int:
    """Elements of one parameter on the rank at `place` of the grid."""
    left = list(shape)

    def cut(dim: int | None, along: int, units: int = 0) -> None:
        """Shard `dim`, by units, over the ranks along one dim of the grid."""
        if dim is not None and shape:
            count = units or left[dim]
            left[dim] = left[dim] // count * split_sizes(count, sides[along])[place[along]]

    if mode == "1d":
        if role.vocabulary is not None:
            cut(role.vocabulary, 0)
        elif role.cut_dim is not None:
            cut(role.cut_dim, 0, role.units)
        return math.prod(left)

    cube = mode == "3d"
    hidden, inner = (1, 2) if cube else (len(sides) - 1,) * 2  # along which widths are cut
    down = len(sides) - 2  # the rows of a 2D grid
    if role.vocabulary is not None:
        if role.bias:
            cut(0, inner)
        else:
            for along in (2, 0) if cube else (down,):
                cut(role.vocabulary, along)
            cut(role.out_dim if role.in_dim is None else role.in_dim, hidden)
    elif role.kind in ("column", "row"):
        into, out = (hidden, inner) if role.kind == "column" else (inner, hidden)
        cut(role.out_dim, out)
        if not role.bias:
            cut(role.in_dim, into if cube else down)
            if cube:
                cut(role.out_dim, 0)
    elif role.kind == "head":
        cut(role.in_dim, hidden)
    else:
        cut(role.out_dim, hidden)
    return math.prod(left)

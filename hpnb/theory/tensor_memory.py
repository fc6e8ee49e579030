"""The activations that a block keeps on one rank under tensor parallelism.

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

from hpnb.split_sizes import split_sizes
from hpnb.theory.activation_table import ActivationRow
from hpnb.theory.tensor_layer import grid_sides
from hpnb.theory.transformer import Block


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
    mlp, head = block.mlp, block.hidden // block.heads
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
    terms = activation_terms(
        block, mode, ranks, depth, sequence_parallel, dropout=dropout, mlp_copies=mlp_copies
    )
    return sum(terms.values())


def published_activation_bytes(block: Block, ranks: int = 1, sequence_parallel: bool = False) -> float:
    """Korthikanti et al. 2022, section 4, on one rank or in 1D: `ActivationRow.published`."""
    row = ActivationRow("tensor parallel", parallel=True, sequence=sequence_parallel)
    return row.published(block, ranks)

"""What a transformer block sends in every mode of tensor parallelism, its seconds, and which mode is
cheapest.

A block is four linear layers: qkv (h, 3h), projection (h, h), mlp up (h, 4h) and mlp down (4h, h). Of
M = b s tokens they send, in elements that leave each of p ranks, forward and backward (`tensor_layer.py` has
the layers one by one),

    1d     8 (p-1)/p M h                                              by tokens alone
    2d     3 (q-1)/q^2 (7 M h  +  12 h^2)                             inputs are h, h, h and 4 h wide: 7 h
    2.5d   3 (q-1)/q^2 (7 M h/d  +  12 h^2)  +  24 (d-1)/(d q^2) h^2
    3d     (l-1)/l^3 (39 M h  +  36 h^2)                              39 = 3 * 7 + 2 * (3 + 1 + 4 + 1)

1d sends the same however many ranks share the work. The grids send less and less, about p^(-1/2) in 2d and
p^(-2/3) in 3d, but weights too: that pays on many ranks, where M is not small beside h.

Norms and biases are vectors, and many messages. If the width is sharded, a norm all-reduces two numbers a
token each way. If rows are sharded, the gradients of norms and biases are summed, all of a block in one
message an axis; if 1d shards tokens (sequence parallelism), those of norms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpnb.theory.links import Link
from hpnb.theory.tensor_layer import (
    MODES,
    Collective,
    Kind,
    Messages,
    Phase,
    grid_sides,
    linear_sent,
    ranks_for,
    sent_collectives,
)
from hpnb.theory.transformer import Block


def block_sent(
    block: Block, mode: str, ranks: int, depth: int = 1, sequence_parallel: bool = False
) -> Messages:
    """All messages of a block's forward and backward, in a model between others of its kind.

    Args:
        block: of the batch over all ranks; its bytes_per_value are those of weights, values and gradients
        alike.
            If the width is sharded, norms send numbers of float32 at least, and of float64 in their forward.

    Raises:
        ValueError: ranks that the mode cannot use.
    """
    rows, mlp = block.batch * block.sequence, block.mlp
    if sequence_parallel:
        rows = ranks * -(-rows // ranks)  # padded to what divides
    size = block.bytes_per_value
    return shapes_sent(rows, block.hidden, mlp, mode, ranks, depth, sequence_parallel, size)


def shapes_sent(
    rows: float,
    hidden: float,
    mlp: float,
    mode: str,
    ranks: int,
    depth: int = 1,
    sequence_parallel: bool = False,
    bytes_per_value: int = 2,
) -> Messages:
    """`block_sent` of plain numbers: rows are tokens of the batch over all ranks, mlp the MLP's width."""
    sides = grid_sides(mode, ranks, depth, sequence_parallel)
    collectives: list[Collective] = []
    layers: tuple[tuple[str, float, float, Kind], ...] = (
        ("qkv", hidden, 3 * hidden, "column"),
        ("projection", hidden, hidden, "row"),
        ("mlp up", hidden, mlp, "column"),
        ("mlp down", mlp, hidden, "row"),
    )
    for layer, inputs, outputs, kind in layers:
        collectives += linear_sent(
            mode, rows, inputs, outputs, ranks, depth, kind=kind, layer=layer,
            sequence_parallel=sequence_parallel, bytes_per_value=bytes_per_value,
        ).collectives  # fmt: skip
    collectives += _norms(mode, rows, sides, bytes_per_value)
    collectives += _vectors(mode, hidden, mlp, sides, sequence_parallel, bytes_per_value)
    return sent_collectives(collectives)


def _norms(mode: str, rows: float, sides: tuple[int, ...], size: int) -> Iterator[Collective]:
    """Two norms: two numbers a token each way, along the width; in the forward they are of float64."""
    if mode == "1d":
        return
    along = 1 if mode == "3d" else len(sides) - 1
    tokens = rows * sides[along] / math.prod(sides)  # of a rank: rows are sharded along all other axes
    numbers: tuple[tuple[Phase, int], ...] = (("forward", 8), ("backward", max(size, 4)))
    for phase, of in numbers:
        yield Collective("norms", phase, "tokens", "all_reduce", along, sides[along], 2 * tokens * of, 2)


def _vectors(
    mode: str, hidden: float, mlp: float, sides: tuple[int, ...], sequence: bool, size: int
) -> Iterator[Collective]:
    """Gradients of what is replicated where rows or tokens are sharded: norms 4 h, biases 5 h + mlp."""
    outer, inner = 6 * hidden, 3 * hidden + mlp  # norms and row biases; column biases
    sums: list[tuple[int, float]] = []
    if mode == "1d":  # column biases are sharded, row biases meet the gradients of all tokens
        sums = [(0, 4 * hidden)] if sequence else []
    elif mode == "3d":
        side = sides[0]
        sums = [(0, outer / side), (2, outer / side), (0, inner / side), (1, inner / side)]
    else:
        sums = [(along, (outer + inner) / sides[-1]) for along in range(len(sides) - 1)]
    for along, values in sums:
        yield Collective("vectors", "backward", "weights", "all_reduce", along, sides[along], values * size)


# --- which mode ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockSeconds:
    """Seconds of one block, forward and backward, on a rank.

    Attributes:
        compute: matmuls at the full rate, shared evenly.
        communication: one message after the other.
    """

    compute: float
    communication: float

    @property
    def total(self) -> float:
        """Where nothing is hidden."""
        return self.compute + self.communication

    @property
    def least(self) -> float:
        """Where everything is hidden that can be: the longer of the two."""
        return max(self.compute, self.communication)


def block_seconds(
    block: Block,
    mode: str,
    ranks: int,
    link: Link,
    flop_rate: float,
    depth: int = 1,
    sequence_parallel: bool = False,
) -> BlockSeconds:
    """Seconds that a block computes and communicates.

    In "1d", with values of 2 bytes and large messages, the ratio of the two is

        (72 b s h^2 / p / FLOP/s) / (4 * 2 (p-1)/p b s h * 2 / (bytes/s))  =  4.5 h / ((p-1) rho)

    whatever the batch: `tp_compute_over_communication`, which adds attention.

    Args:
        link: as one rank sees it, of all axes of the grid alike.
        flop_rate: FLOP/s of a rank's matmuls, at the sizes that they are cut to.

    Raises:
        ValueError: a rate that is not above 0, or ranks that the mode cannot use.
    """
    if not flop_rate > 0:
        raise ValueError(f"flop_rate={flop_rate} FLOP/s gives no time; it must be above 0")
    sent = block_sent(block, mode, ranks, depth, sequence_parallel)
    return BlockSeconds(block.training_flops / ranks / flop_rate, sent.seconds(link))


def cheapest_modes(
    tokens: Sequence[float],
    hidden: Sequence[int],
    ranks: int,
    link: Link,
    depth: int = 1,
    *,
    modes: Sequence[str] | None = None,
    call: float = 0.0,
) -> tuple[tuple[str, ...], ...]:
    """The mode that communicates for the fewest seconds: rows are for `hidden`, columns for `tokens`. The
    MLP is 4 h wide, and values have 2 bytes.

    All modes compute the same FLOPs, so compute decides nothing. Of equals the first in MODES.

    Args:
        tokens: a rank's, of the batch over `ranks`.
        depth: of "2.5d", which is left out at 1: there it is "2d".
        modes: which to compare; by default all that can use so many ranks.
        call: seconds of a call whatever its size, besides the link's latency; see `Messages.seconds`.

    Raises:
        ValueError: none of the modes can use so many ranks.
    """
    deep = {mode: depth if mode == "2.5d" else 1 for mode in (MODES if modes is None else modes)}
    able = [m for m, d in deep.items() if ranks in ranks_for(m, ranks, d) and (m != "2.5d" or d > 1)]
    if not able:
        raise ValueError(f"none of {', '.join(deep) or 'no modes'} can use {ranks} ranks at depth {depth}")

    def seconds(mode: str, rows: float, h: int) -> float:
        return shapes_sent(rows, h, 4 * h, mode, ranks, deep[mode]).seconds(link, call)

    rows = []
    for h in hidden:
        least = {mode: seconds(mode, 0, h) for mode in able}
        slope = {mode: seconds(mode, 1, h) - least[mode] for mode in able}  # they are lines in the tokens
        rows.append(tuple(min(able, key=lambda m: least[m] + slope[m] * n * ranks) for n in tokens))
    return tuple(rows)

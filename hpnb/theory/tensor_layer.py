"""What 1D, 2D, 2.5D and 3D tensor parallelism send for one linear layer: every message, its op and its size.

M = b s rows of K inputs are multiplied by a matrix (K, N). Elements that leave each of p ranks, forward and
backward, counted as `hpnb.record.traffic` counts:

    1d     2 (p-1)/p M K    of a column layer, backward            ranks in a line
           2 (p-1)/p M N    of a row layer, forward
    2d     3 (q-1) (M K/q^2 + K N/q^2)                             q x q
    2.5d   3 (q-1) (M K/(d q^2) + K N/q^2) + 2 (d-1)/d K N/q^2     d x q x q
    3d     (l-1)/l (3 M K/l^2 + 3 K N/l^2 + 2 M N/l^2)             l x l x l

1d sums one activation (Shoeybi et al. 2019, arXiv 1909.08053, section 3); where that is sharded along the
tokens, an all-gather and a reduce-scatter send as much (Korthikanti et al. 2022, arXiv 2205.05198, section
4.2.2). 2d broadcasts q panels of X along a row and q of W down a column to have X W; then the same again,
with q reduces of each, to have dY W^T and X^T dY (SUMMA; Xu et al. 2021, Optimus, arXiv 2104.05343). 2.5d
does so on d layers of the grid, each with its share of the rows, and sums dW over them (Wang et al. 2021,
Tesseract, arXiv 2105.14500). 3d gathers X and W and scatters the sum Y; then gathers dY, W and X, and
scatters dX and dW (Bian et al. 2021, arXiv 2105.14450).

What goes by tokens grows with M, what goes by weights does not. `tensor_block.py` puts layers together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from hpnb.theory.communication import bytes_sent, collective_cost
from hpnb.theory.links import Link

MODES = ("1d", "2d", "2.5d", "3d")
Phase = Literal["forward", "backward"]
By = Literal["tokens", "weights"]
Kind = Literal["column", "row"]


@dataclass(frozen=True)
class Collective:
    """`count` calls of `op` over the `ranks` ranks along dim `along` of the grid.

    Attributes:
        layer: "qkv", "projection", "mlp up", "mlp down", "norms" or "vectors" (gradients of norms, biases).
        by: what its size grows with.
        nbytes: of one call, as in `bytes_sent`.
    """

    layer: str
    phase: Phase
    by: By
    op: str
    along: int
    ranks: int
    nbytes: float
    count: int = 1

    @property
    def bytes(self) -> float:
        """Bytes that leave a rank in all calls."""
        return self.count * bytes_sent(self.op, self.nbytes, self.ranks)

    def seconds(self, link: Link, call: float = 0.0) -> float:
        """Seconds of all calls, one after the other, each with `call` seconds of its own whatever its size.

        A ring, as `hpnb.theory.seconds` has it. A broadcast or a reduce is a chain of p-1 links that is kept
        full: (p-1) latency + n/B, since each link but the last passes all on.
        """
        if self.op in ("broadcast", "reduce"):
            steps, serial = self.ranks - 1, float(self.ranks)
        else:
            steps, serial = collective_cost(self.op, self.ranks)[:2]
        moving = serial * self.nbytes / self.ranks / link.bandwidth
        return self.count * (call + steps * link.latency + moving)


@dataclass(frozen=True)
class Messages:
    """What a rank sends, message by message; nothing if there is one rank."""

    collectives: tuple[Collective, ...]

    def bytes(
        self,
        phase: Phase | None = None,
        by: By | None = None,
        layer: str | None = None,
        along: int | None = None,
    ) -> float:
        """Bytes that leave a rank; with arguments, of those messages only."""
        wanted = {"phase": phase, "by": by, "layer": layer, "along": along}
        wanted = {name: value for name, value in wanted.items() if value is not None}
        return sum(c.bytes for c in self.collectives if all(getattr(c, n) == v for n, v in wanted.items()))

    @property
    def calls(self) -> int:
        return sum(c.count for c in self.collectives)

    def seconds(self, link: Link, call: float = 0.0) -> float:
        """One call after the other, none hidden behind compute.

        Args:
            call: seconds of a call whatever its size. Where launching costs more than hops, as on the GPUs of
                one host, let the link have no latency, and this be the time of a call with a few bytes.
        """
        return sum(c.seconds(link, call) for c in self.collectives)


# --- which ranks -----------------------------------------------------------------------------------


def grid_sides(mode: str, ranks: int, depth: int = 1, sequence_parallel: bool = False) -> tuple[int, ...]:
    """The sides of the grid that `ranks` ranks make, outermost first: (p,), (q, q), (d, q, q) or (l, l, l).

    At depth 1, "2.5d" is "2d": (q, q).

    Raises:
        ValueError: no such mode or option of it, or ranks that it cannot use, with the nearest that it can.
    """
    if sequence_parallel and mode != "1d":
        raise ValueError(f"mode {mode!r} shards every activation anyway; sequence_parallel goes with '1d'")
    near = ranks_for(mode, ranks, depth)
    if ranks not in near:
        form = {"2d": "q x q", "2.5d": f"{depth} x q x q", "3d": "l x l x l"}[mode]
        usable = " or ".join(map(str, near))
        raise ValueError(f"{mode} needs {form} ranks, which {ranks} is not; use {usable}")
    if mode == "1d":
        return (ranks,)
    if mode == "3d":
        return (round(ranks ** (1 / 3)),) * 3
    q = math.isqrt(ranks // depth)
    return (depth, q, q) if depth > 1 else (q, q)


def ranks_for(mode: str, ranks: int, depth: int = 1) -> tuple[int, ...]:
    """`ranks` itself if `mode` can use so many, else the nearest below (if there is one) and above.

    Raises:
        ValueError: no such mode, or a depth that it does not have.
    """
    if mode not in MODES:
        raise ValueError(f"no tensor-parallel mode {mode!r}; there are {', '.join(MODES)}")
    if ranks < 1 or depth < 1:
        raise ValueError(f"ranks={ranks} and depth={depth} must be counts; use 1 or more")
    if depth > 1 and mode != "2.5d":
        raise ValueError(f"mode {mode!r} has no depth; depth={depth} goes with '2.5d'")
    if mode == "1d":
        return (ranks,)
    power = 3 if mode == "3d" else 2
    able = [depth * n**power for n in range(1, math.isqrt(ranks) + 3)]
    below = [n for n in able if n <= ranks]
    if below and below[-1] == ranks:
        return (ranks,)
    return (*below[-1:], next(n for n in able if n > ranks))


# --- one linear layer ------------------------------------------------------------------------------


def linear_sent(
    mode: str,
    rows: float,
    inputs: float,
    outputs: float,
    ranks: int,
    depth: int = 1,
    *,
    kind: Kind = "column",
    sequence_parallel: bool = False,
    bytes_per_value: int = 2,
    layer: str = "linear",
) -> Messages:
    """Messages of X W, (rows, inputs) times (inputs, outputs), forward and backward.

    Layers with the same X, such as q, k and v, are one.

    Args:
        rows: tokens of the batch over all ranks, with the padding of sequence parallelism.
        kind: whether "1d" shards W by its columns or by its rows; which axes "3d" uses. The bytes of "2d" and
            "2.5d" do not depend on it.
        sequence_parallel: of "1d"; the grids shard every activation anyway.

    Raises:
        ValueError: ranks that the mode cannot use.
    """
    sides = grid_sides(mode, ranks, depth, sequence_parallel)
    collectives: Iterator[Collective]
    if mode == "1d":
        collectives = _line(rows * (inputs if kind == "column" else outputs), ranks, kind, sequence_parallel)
    elif mode == "3d":
        collectives = _cube(rows, inputs, outputs, sides[0], kind)
    else:
        collectives = _summa(rows, inputs, outputs, sides[-1], depth)
    return sent_collectives(replace(c, layer=layer, nbytes=c.nbytes * bytes_per_value) for c in collectives)


# Sizes below are in elements; `linear_sent` makes them bytes.


_BOTH: tuple[Phase, Phase] = ("forward", "backward")


def _line(values: float, p: int, kind: Kind, sequence: bool) -> Iterator[Collective]:
    into, out = _BOTH if kind == "column" else _BOTH[::-1]
    if sequence:
        yield Collective("", into, "tokens", "all_gather", 0, p, values)
        yield Collective("", out, "tokens", "reduce_scatter", 0, p, values)
    else:
        yield Collective("", out, "tokens", "all_reduce", 0, p, values)


def _summa(rows: float, inputs: float, outputs: float, q: int, depth: int) -> Iterator[Collective]:
    down, across = (1, 2) if depth > 1 else (0, 1)
    x, w = rows * inputs / (depth * q * q), inputs * outputs / (q * q)
    for phase in _BOTH:
        yield Collective("", phase, "tokens", "broadcast", across, q, x, q)
        yield Collective("", phase, "weights", "broadcast", down, q, w, q)
    yield Collective("", "backward", "tokens", "reduce", across, q, x, q)
    yield Collective("", "backward", "weights", "reduce", down, q, w, q)
    yield Collective("", "backward", "weights", "all_reduce", 0, depth, w)


def _cube(rows: float, inputs: float, outputs: float, side: int, kind: Kind) -> Iterator[Collective]:
    into, out = (1, 2) if kind == "column" else (2, 1)  # they change places at each layer
    x, w, y = (n / side**2 for n in (rows * inputs, inputs * outputs, rows * outputs))
    for phase in _BOTH:
        yield Collective("", phase, "tokens", "all_gather", out, side, x)
        yield Collective("", phase, "weights", "all_gather", 0, side, w)
    yield Collective("", "forward", "tokens", "reduce_scatter", into, side, y)
    yield Collective("", "backward", "tokens", "all_gather", into, side, y)
    yield Collective("", "backward", "tokens", "reduce_scatter", out, side, x)
    yield Collective("", "backward", "weights", "reduce_scatter", 0, side, w)


def sent_collectives(collectives: Iterable[Collective]) -> Messages:
    """The collectives that send something, that is over more than one rank."""
    return Messages(tuple(c for c in collectives if c.ranks > 1))

"""How much of the gradients' all-reduce a backward hides, and how much stays exposed.

    backward   ...  g9 g8 | g7 g6 g5 | g4 ...  g1 g0 |            bucket k is ready at r_k
    link              .   [ bucket 0 ][ bucket 1 ]. .[ last ]     and is sent after the buckets before it

    start_k = max(r_k, end_(k-1))       end_k = start_k + all-reduce of its bytes       exposed = end_last - T

T is the end of the backward. *Exposed* communication prolongs the step; the rest overlaps with computing. If
m equal buckets become ready at T/m, 2T/m, ... T, and one all-reduce takes c seconds,

    exposed = max(c, m c - (m-1) T/m)

In the first case computing is slower, and only the last bucket is exposed, because no backward is left to
hide it. In the second the link is slower, and it is busy from T/m on. For many buckets without latency, C = m
c seconds on the link become max(0, C - T): see `exposed_share`.

Source: Li et al. 2020, *PyTorch Distributed* (arXiv 2006.15704), section 3.2, for buckets and overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from hpnb.theory.communication import seconds
from hpnb.theory.links import Link


@dataclass(frozen=True)
class Overlap:
    """When the buckets were sent, in seconds since the backward began.

    Attributes:
        starts, ends: of the all-reduces, in order.
    """

    starts: tuple[float, ...]
    ends: tuple[float, ...]
    backward: float

    @property
    def exposed(self) -> float:
        """Seconds from the end of the backward to the end of the last all-reduce."""
        return max(0.0, self.ends[-1] - self.backward) if self.ends else 0.0


def overlap(
    ready: Sequence[float], nbytes: Sequence[float], ranks: int, link: Link, backward: float | None = None
) -> Overlap:
    """All-reduces of buckets that become ready one after the other, along one link.

    Args:
        ready: seconds at which every bucket is full. A bucket waits for those before it.
        nbytes: bytes of every bucket.
        backward: the end of the backward; by default the last bucket ends it.

    Raises:
        ValueError: as many times as sizes are needed.
    """
    if len(ready) != len(nbytes):
        raise ValueError(f"{len(ready)} times and {len(nbytes)} sizes; every bucket needs both")
    starts: list[float] = []
    ends: list[float] = []
    for full, size in zip(ready, nbytes, strict=True):
        starts.append(max(full, ends[-1]) if ends else full)
        ends.append(starts[-1] + seconds("all_reduce", size, ranks, link))
    last = max(ready, default=0.0)
    return Overlap(tuple(starts), tuple(ends), last if backward is None else backward)


def even_buckets(
    nbytes: float, bucket_bytes: float, backward: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(ready, sizes) of buckets that a backward fills at a constant rate; the last one may be smaller.

    Raises:
        ValueError: a size or a time that is not above 0.
    """
    if not (nbytes > 0 and bucket_bytes > 0 and backward > 0):
        raise ValueError(
            f"{nbytes} bytes in buckets of {bucket_bytes} over {backward} s; all three must be above 0"
        )
    full_buckets = int(nbytes / bucket_bytes)
    sizes = [float(bucket_bytes)] * full_buckets
    if (rest := nbytes - full_buckets * bucket_bytes) > 1e-9 * nbytes:
        sizes.append(rest)
    return tuple(backward * min(1.0, full / nbytes) for full in accumulate(sizes)), tuple(sizes)


def exposed_seconds(
    backward: float, nbytes: float, buckets: int, ranks: int, link: Link, op: str = "all_reduce"
) -> float:
    """max(c, m c - (m-1) T/m): exposed seconds of m equal buckets that become ready evenly over T seconds.

    Args:
        op: the collective of a bucket: "all_reduce", or "reduce_scatter" with ZeRO 1 and 2.
    """
    if buckets < 1:
        raise ValueError(f"buckets={buckets} is not a count; use 1 or more")
    return exposed_buckets(backward, seconds(op, nbytes / buckets, ranks, link), buckets)


def exposed_buckets(backward: float, bucket: float, buckets: int) -> float:
    """The same for buckets that take `bucket` seconds each."""
    return max(bucket, buckets * bucket - (buckets - 1) * backward / buckets)


def zero3_exposed_seconds(
    gather: float, scatter: float, forward: float, backward: float, blocks: int
) -> float:
    """Exposed seconds of ZeRO-3: 2 g + r + n (max(0, g - F) + max(0, g + r - B)).

    The first gather of the forward, the first of the backward and the last reduce-scatter have no computing
    to hide behind. Each of the n other blocks gathers behind the forward of one block, and gathers and
    reduce-scatters behind the backward of one.

    Args:
        gather, scatter: seconds of one block's all-gather and reduce-scatter, g and r.
        forward, backward: seconds of one block, F and B.
        blocks: n.
    """
    bare = max(0.0, gather - forward) + max(0.0, gather + scatter - backward)
    return 2 * gather + scatter + blocks * bare


def exposed_share(tokens_over_knee: float, overlapped: bool = True) -> float:
    """Share of a step (forward, backward, exposed) in which a rank only communicates, 0 to 1.

    With x = tokens / `dp_tokens_to_hide`, C seconds on the link, a backward of x C and a forward of x C / 2:

        reduced after the backward     1 / (1 + 3x/2)
        during it                      (1 - x) / (1 + x/2), and 0 from x = 1 on

    No latency, and buckets so small that the last one does not count.
    """
    x = tokens_over_knee
    if not x >= 0:
        raise ValueError(f"{x} times the knee is no number of tokens; use 0 or more")
    if not overlapped:
        return 1 / (1 + 1.5 * x)
    return max(0.0, (1 - x) / (1 + x / 2))

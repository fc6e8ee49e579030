"""What a collective costs: latency a message, plus bytes over bandwidth.

One message of n bytes takes alpha + n / B seconds (Hockney 1994). An algorithm that needs `steps` messages
one after another, `serial` bytes in all, on p ranks that can each send and receive at full rate, takes

    seconds = steps * alpha + serial / B                    equal shares at n = knee

    all_reduce, n bytes   steps          serial bytes
    naive                 2 (p-1)        2 (p-1) n          all through rank 0, one by one
    tree                  2 ceil(log2 p) 2 ceil(log2 p) n   binomial reduce, then broadcast
    ring                  2 (p-1)        2 (p-1)/p n        chunks of n/p go round twice
    halving-doubling      2 log2 p       2 (p-1)/p n        p a power of two

No all-reduce gets by with fewer bytes through its busiest rank than the ring (Patarasuk & Yuan 2009). Here
halving-doubling is never behind it; on real links it can be, since its partners are far apart and share
links, while a ring talks to its neighbours only. The time to add numbers is left out.

Sources: Hockney, Parallel Computing 20(3), 1994. Thakur, Rabenseifner & Gropp, Int. J. High Performance
Computing Applications 19(1), 2005. Patarasuk & Yuan, J. Parallel and Distributed Computing 69(2), 2009.
"""

from __future__ import annotations

from typing import NamedTuple

from hpnb.theory.links import Link

OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce",
       "gather", "scatter", "all_to_all", "send")  # fmt: skip
ALGORITHMS = ("naive", "tree", "ring", "halving-doubling")


class CollectiveCost(NamedTuple):
    """What one algorithm does. Bytes are counted in chunks of n/p, so that every entry is an integer."""

    steps: int  # messages that must follow one another
    serial: int  # chunks in those messages


def _costs(op: str, p: int) -> dict[str, CollectiveCost]:
    """Every algorithm for `op`; a ValueError where `op` or the number of ranks means nothing."""
    if op not in OPS:
        raise ValueError(f"no op {op!r}; there are {', '.join(OPS)}")
    if p < 1:
        raise ValueError(f"ranks={p} is not a count; use 1 or more")
    hub, log = p - 1, (p - 1).bit_length()  # partners of rank 0 in a star; rounds of a binomial tree
    # A reduce is a broadcast run backwards, a scatter a gather, a reduce-scatter an all-gather: same costs.
    to_all = {  # all_gather, reduce_scatter
        "naive": CollectiveCost(2 * hub, hub + hub * p),  # gather to rank 0, then broadcast
        "tree": CollectiveCost(2 * log, hub + log * p),  # the same along a tree
        "ring": CollectiveCost(hub, hub),
        "halving-doubling": CollectiveCost(log, hub),
    }
    one_tensor = {  # broadcast, reduce
        "naive": CollectiveCost(hub, hub * p),
        "tree": CollectiveCost(log, log * p),
        "ring": CollectiveCost(2 * hub, 2 * hub),  # p chunks follow each other down a chain
        "halving-doubling": CollectiveCost(2 * log, 2 * hub),  # scatter, then all_gather
    }
    slices = {  # gather, scatter
        "naive": CollectiveCost(hub, hub),
        "tree": CollectiveCost(log, hub),  # the last round carries half of all chunks
        "ring": CollectiveCost(hub, hub),  # a neighbour of the root passes on all
    }
    costs = {
        "all_reduce": {
            "naive": CollectiveCost(2 * hub, 2 * hub * p),
            "tree": CollectiveCost(2 * log, 2 * log * p),
            "ring": CollectiveCost(2 * hub, 2 * hub),
            "halving-doubling": CollectiveCost(2 * log, 2 * hub),
        },
        "all_gather": to_all,
        "reduce_scatter": to_all,
        "broadcast": one_tensor,
        "reduce": one_tensor,
        "gather": slices,
        "scatter": slices,
        "all_to_all": {"ring": CollectiveCost(hub, hub)},  # round k: to the rank k places on
        "send": {"ring": CollectiveCost(1, p)},  # to the next rank
    }[op]
    if p == 1 and op != "send":
        costs = dict.fromkeys(costs, CollectiveCost(0, 0))
    return costs


def collective_cost(op: str, ranks: int, algorithm: str = "ring") -> CollectiveCost:
    """What `algorithm` does for `op`."""
    costs = _costs(op, ranks)
    if algorithm not in costs:
        raise ValueError(f"{op} has no algorithm {algorithm!r}; it has {', '.join(costs)}")
    if algorithm == "halving-doubling" and ranks & (ranks - 1):
        above = 1 << ranks.bit_length()
        raise ValueError(
            f"halving-doubling pairs ranks at distances 1, 2, 4, ... and cannot pair {ranks}; "
            f"{above // 2} or {above} ranks would work"
        )
    return costs[algorithm]


def _check_bytes(nbytes: float) -> None:
    if not nbytes >= 0:
        raise ValueError(f"nbytes={nbytes} is not a size; use 0 or more")


def bytes_sent(op: str, nbytes: float, ranks: int) -> float:
    """Bytes that leave one rank, counted as a ring would move them, whatever algorithm ran.

        all_reduce 2 (p-1)/p n        send n        every other op (p-1)/p n

    n is the tensor for all_reduce, broadcast and reduce; the gathered result for all_gather and gather; the
    full input for reduce_scatter, scatter and all_to_all; the message for send. Divided by seconds this is
    nccl-tests' bus bandwidth (its doc/PERFORMANCE.md), but for broadcast and reduce: there it counts the n
    bytes of the busiest rank, and this the mean over ranks, since the end of a chain sends nothing.
    """
    _costs(op, ranks)  # checks the names
    _check_bytes(nbytes)
    if op == "send":
        return float(nbytes)
    return (2 if op == "all_reduce" else 1) * (ranks - 1) * nbytes / ranks


def steps(op: str, ranks: int, algorithm: str = "ring") -> int:
    """Messages that must follow one another."""
    return collective_cost(op, ranks, algorithm).steps


def seconds(op: str, nbytes: float, ranks: int, link: Link, algorithm: str = "ring") -> float:
    """steps * latency + serial bytes / bandwidth, in seconds; `nbytes` as in `bytes_sent`."""
    _check_bytes(nbytes)
    cost = collective_cost(op, ranks, algorithm)
    return cost.steps * link.latency + cost.serial * nbytes / ranks / link.bandwidth


def knee(ranks: int, link: Link, op: str = "all_reduce", algorithm: str = "ring") -> float:
    """Bytes at which latency and bandwidth cost the same; for a ring all_reduce p * latency * bandwidth.

    Below it the time hardly depends on the size, so merge messages; above it merging gains little.
    """
    cost = collective_cost(op, ranks, algorithm)
    if cost.serial == 0:
        raise ValueError(f"{op} on {ranks} rank moves nothing and has no knee; use 2 ranks or more")
    return cost.steps * link.latency * link.bandwidth * ranks / cost.serial


def cheapest(op: str, nbytes: float, ranks: int, link: Link) -> str:
    """The algorithm with the fewest seconds; of equals the first in ALGORITHMS."""
    power_of_two = ranks & (ranks - 1) == 0
    able = [name for name in _costs(op, ranks) if power_of_two or name != "halving-doubling"]
    return min(able, key=lambda name: seconds(op, nbytes, ranks, link, name))

"""When the all-gathers of ZeRO-3 arrive: a step on one rank, block by block.

    compute   .. [ 0 ][ 1 ][ 2 ][ 2' ][ 1' ][ 0' ]        uses: forwards 0 1 2, then backwards 2' 1' 0'
    gather    [0][ 1 ][ 2 ]     [ 1  ][ 0  ]              a gather starts when some use starts

A use starts when the previous one has ended. The gathers that it asks for queue on one link, and it computes
once its block has arrived. Then the block is freed, unless the next use is of the same block. A use that
waits for its block is a *stall*; only the first use cannot avoid it.

    starts   for every use the blocks whose gathers start with it: `starts[0] = [0, 1]`, `starts[1] = [2]`

Rajbhandari et al. 2020, *ZeRO* (arXiv 1910.02054), section 7.2.2; Zhao et al. 2023, *PyTorch FSDP*
(arXiv 2304.11277), section 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class GatherTimeline:
    """A simulated step: seconds, and bytes of gathered blocks.

    Attributes:
        starts, ends: of the computing of every use.
        gathers: (block, start, end) in order.
        most: the most bytes of gathered blocks at once, counted from the start of their gathers.
    """

    starts: tuple[float, ...]
    ends: tuple[float, ...]
    gathers: tuple[tuple[int, float, float], ...]
    most: float

    @property
    def stalls(self) -> tuple[float, ...]:
        """Seconds that every use waited for its block, including the first."""
        before = (0.0, *self.ends)
        return tuple(start - end for start, end in zip(self.starts, before, strict=False))

    @property
    def stall(self) -> float:
        """Seconds of waiting after the first use, which cannot help it."""
        return sum(self.stalls[1:])


def simulate_gathers(
    uses: Sequence[int],
    computing: Sequence[float],
    moving: Sequence[float],
    sizes: Sequence[float],
    starts: Sequence[Sequence[int]],
) -> GatherTimeline:
    """Simulate a step that gathers blocks as `starts` says.

    Args:
        uses: the block of every use, in order of time.
        computing: seconds of every use.
        moving: seconds of every block's all-gather.
        sizes: bytes of every gathered block.
        starts: for every use the blocks whose gathers start with it, in order.

    Raises:
        ValueError: a use computes with a block that was not gathered, or one is gathered twice.
    """
    if len(starts) != len(uses):
        raise ValueError(f"{len(starts)} lists of gathers for {len(uses)} uses; every use needs one")
    clock = link_free = gathered_bytes = most = 0.0
    arrivals: dict[int, float] = {}  # block -> when it has arrived
    began, ended, log = [], [], []
    for k, block in enumerate(uses):
        for other in starts[k]:
            if other in arrivals:
                raise ValueError(f"use {k} gathers block {other}, which is gathered already")
            begin = max(clock, link_free)
            link_free = arrivals[other] = begin + moving[other]
            log.append((other, begin, link_free))
            gathered_bytes += sizes[other]
            most = max(most, gathered_bytes)
        if block not in arrivals:
            raise ValueError(f"use {k} computes with block {block}, which is not gathered; gather it before")
        began.append(max(clock, arrivals[block]))
        clock = began[-1] + computing[k]
        ended.append(clock)
        if k + 1 == len(uses) or uses[k + 1] != block:
            del arrivals[block]
            gathered_bytes -= sizes[block]
    return GatherTimeline(tuple(began), tuple(ended), tuple(log), most)


def prefetch_plan(uses: Sequence[int], prefetch: int = 1) -> list[list[int]]:
    """`starts` that keeps `prefetch` gathers ahead of the computing, in the order of `uses`.

    A block that is still gathered is not gathered ahead, because it is freed first.
    """
    queue = [(k, block) for k, block in enumerate(uses) if k == 0 or uses[k - 1] != block]
    plan: list[list[int]] = [[] for _ in uses]
    ready: set[int] = set()
    for k, block in enumerate(uses):
        while queue and queue[0][1] not in ready and (queue[0][0] <= k or len(ready - {block}) < prefetch):
            plan[k].append(queue[0][1])
            ready.add(queue.pop(0)[1])
        if k + 1 == len(uses) or uses[k + 1] != block:
            ready.discard(block)
    return plan

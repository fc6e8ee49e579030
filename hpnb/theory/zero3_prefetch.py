"""When blocks that are gathered arrive: a step of ZeRO-3 on one rank, block by block.

    compute   .. [ 0 ][ 1 ][ 2 ][ 2' ][ 1' ][ 0' ]        uses: forwards 0 1 2, then backwards 2' 1' 0'
    gather    [0][ 1 ][ 2 ]     [ 1  ][ 0  ]              each asked for when some use begins

A use begins when the one before has ended, and what it asks for queues on one link; it computes once its own
block is whole. After it the block is freed, unless the next use is of the same block. A use that waits for
its block is a *stall*; the first cannot help it.

    starts   for each use the blocks whose gathers begin with it: `starts[0] = [0, 1]`, `starts[1] = [2]`

Rajbhandari et al. 2020, *ZeRO* (arXiv 1910.02054), section 7.2.2; Zhao et al. 2023, *PyTorch FSDP*
(arXiv 2304.11277), section 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class GatherTimeline:
    """What became of a plan. Seconds, and bytes of whole blocks.

    Attributes:
        starts, ends: of the computing of each use.
        gathers: (block, start, end) in order.
        most: the most bytes of whole blocks at once, from the start of their gathers on.
    """

    starts: tuple[float, ...]
    ends: tuple[float, ...]
    gathers: tuple[tuple[int, float, float], ...]
    most: float

    @property
    def stalls(self) -> tuple[float, ...]:
        """Seconds for which each use waited for its block, the first one's among them."""
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
    """Run a plan.

    Args:
        uses: the block of each use, in order of time.
        computing: seconds of each use.
        moving: seconds that a gather of each block takes.
        sizes: bytes of each block when it is whole.
        starts: for each use the blocks whose gathers begin when it begins, in order.

    Raises:
        ValueError: a plan that computes with a block that is not there, or gathers one that is.
    """
    if len(starts) != len(uses):
        raise ValueError(f"{len(starts)} lists of gathers for {len(uses)} uses; every use needs one")
    clock = link = held = most = 0.0
    there: dict[int, float] = {}  # block -> when it is whole
    began, ended, log = [], [], []
    for k, block in enumerate(uses):
        for other in starts[k]:
            if other in there:
                raise ValueError(f"use {k} gathers block {other}, which is whole already")
            begin = max(clock, link)
            link = there[other] = begin + moving[other]
            log.append((other, begin, link))
            held += sizes[other]
            most = max(most, held)
        if block not in there:
            raise ValueError(f"use {k} computes with block {block}, which is not whole: gather it before")
        began.append(max(clock, there[block]))
        clock = began[-1] + computing[k]
        ended.append(clock)
        if k + 1 == len(uses) or uses[k + 1] != block:
            del there[block]
            held -= sizes[block]
    return GatherTimeline(tuple(began), tuple(ended), tuple(log), most)


def prefetch_plan(uses: Sequence[int], prefetch: int = 1) -> list[list[int]]:
    """The plan that keeps `prefetch` gathers ahead of the computing, in the order of `uses`.

    A block that is still whole is not gathered ahead: it will be freed first.
    """
    queue = [(k, block) for k, block in enumerate(uses) if k == 0 or uses[k - 1] != block]
    plan: list[list[int]] = [[] for _ in uses]
    there: set[int] = set()
    for k, block in enumerate(uses):
        while queue and queue[0][1] not in there and (queue[0][0] <= k or len(there - {block}) < prefetch):
            plan[k].append(queue[0][1])
            there.add(queue.pop(0)[1])
        if k + 1 == len(uses) or uses[k + 1] != block:
            there.discard(block)
    return plan

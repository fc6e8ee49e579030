"""What a pipeline costs: the bubble, microbatches in flight, the slowest stage, and the best number of
microbatches.

p stages work on m microbatches, and one microbatch takes a stage t seconds forward and backward. The last
stage starts p - 1 forwards late, the first ends p - 1 backwards after it, and in between no stage is idle:

    step     (m + p - 1) t                      work     m t on every rank
    bubble   (p - 1) / (m + p - 1)              its share of ranks x time; with v chunks of t/v a rank,
             (p - 1) / (v m + p - 1)            the pipeline fills v times as fast

Stages that differ are paced by the slowest: the first microbatch walks through all, and the others come out
one slowest stage apart,

    step     sum of t_s + (m - 1) max t_s

More microbatches make the bubble smaller, and every kernel too. If a microbatch costs a stage c seconds
whatever its size, besides its share of the T seconds that one device takes for the batch,

    step     (m + p - 1) (T / (p m) + c)  =  T/p  +  (p - 1) T / (p m)  +  (m + p - 1) c
                                             ideal     bubble                small kernels

which is least at m = sqrt((p - 1) T / (p c)).

Sources: Huang et al. 2019 (GPipe, arXiv 1811.06965), Narayanan et al. 2021 (1F1B and interleaving, arXiv
2104.04473, section 2.2), Qi et al. 2024 (zero bubble, arXiv 2401.10241, table 1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def _check(**counts: float) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name}={count} is not a count; use 1 or more")


def bubble(ranks: int, microbatches: int, chunks: int = 1) -> float:
    """Idle share of ranks x makespan, (p-1)/(v m + p-1): gpipe, 1f1b, and interleaved with v chunks a rank.

    Equal stages, no transfer; of interleaved, m a multiple of p. One microbatch gives 1 - 1/p.
    """
    _check(ranks=ranks, microbatches=microbatches, chunks=chunks)
    return (ranks - 1) / (chunks * microbatches + ranks - 1)


def in_flight(name: str, ranks: int, microbatches: int, rank: int = 0) -> int:
    """Microbatches whose activations a rank holds at once: gpipe m, 1f1b p - r, zb-h1 p, zb-h2 2p - 1.

    Never more than there are. zb-v holds p as well, as 2p chunks of half a share.

    Raises:
        ValueError: a schedule without a closed form here, or no such rank.
    """
    _check(ranks=ranks, microbatches=microbatches)
    if not 0 <= rank < ranks:
        raise ValueError(f"rank={rank} is not among 0 to {ranks - 1}")
    most = {"gpipe": microbatches, "1f1b": ranks - rank, "zb-h1": ranks, "zb-h2": 2 * ranks - 1}
    if name not in most:
        raise ValueError(f"{name!r} has no closed form here; there are {', '.join(most)}")
    return min(most[name], microbatches)


def pipeline_seconds(stages: Sequence[float], microbatches: int) -> float:
    """Seconds of a step whose stages take these seconds a microbatch: their sum + (m-1) times the slowest.

    Exact for gpipe where one stage is the slowest of forward and backward alike. 1f1b takes as long where
    that is the last one, and a little less otherwise.

    Raises:
        ValueError: no stages.
    """
    _check(stages=len(stages), microbatches=microbatches)
    return sum(stages) + (microbatches - 1) * max(stages)


FILL = {"gpipe": 1.0, "1f1b": 1.0, "zb-h1": 1 / 3, "zb-v": 1 / 6, "dualpipe-v": 1 / 6}
"""{schedule: its filling and draining, over that of 1F1B, if F = I = W; of a V from 2 p microbatches on}"""
V_SHAPED = ("zb-v", "dualpipe-v")
"""Schedules whose ranks have two chunks, there and back, so that rank 0 has both ends of the model."""


def pipeline_parts(
    stages: Sequence[Mapping[str, float]],
    microbatches: int,
    schedule: str = "1f1b",
    chunks: int = 1,
    hop: float = 0.0,
) -> dict[str, float]:
    """{part: seconds} of a step through a pipeline, mean over its stages, and last the "bubble".

    `layout_step`, `cluster` and `plan_step` put their steps together here. A stage that takes t_s seconds a
    microbatch works for m t_s, so the mean of a part is m / p times its sum over the stages. The step takes

        span = sum of t_s + (m-1) max t_s + 2 (p-1) hops

    and what it takes beyond the mean work is the bubble. With v chunks a rank, filling and draining cost a
    v-th: (sum of t_s - max t_s) (1 - 1/v) less. ZB-H1 fills bubbles with weight gradients: 2/3 (p-1)/p sum of
    t_s less. ZB-V's two chunks leave half a chunk's forward of each other rank, and so do those of
    DualPipe-V: 5/6 less.

    Args:
        stages: {part: seconds} of one microbatch, forward and backward, for each stage.
        hop: seconds of one message between two stages.
    """
    if schedule not in FILL:
        raise ValueError(f"schedule={schedule!r} has no closed form here; use {', '.join(FILL)}")
    p, totals = len(stages), [sum(parts.values()) for parts in stages]
    span = pipeline_seconds(totals, microbatches) + 2 * (p - 1) * hop
    span -= (1 - 1 / chunks) * (sum(totals) - max(totals)) + (1 - FILL[schedule]) * (p - 1) / p * sum(totals)
    names = dict.fromkeys(name for parts in stages for name in parts)
    means = {name: microbatches * sum(parts.get(name, 0.0) for parts in stages) / p for name in names}
    return {**means, "bubble": max(span - sum(means.values()), 0.0) if p > 1 else 0.0}


def step_seconds(work: float, ranks: int, microbatches: int, extra: float = 0.0) -> float:
    """(m + p - 1)(T/(p m) + c), with T = `work` seconds of one device, c = `extra` a microbatch and stage."""
    _check(ranks=ranks, microbatches=microbatches)
    return (microbatches + ranks - 1) * (work / (ranks * microbatches) + extra)


def best_microbatches(work: float, ranks: int, extra: float) -> float:
    """sqrt((p-1) T / (p c)), where `step_seconds` is least: the bubble saved pays for the kernels lost.

    Not rounded; infinite if a microbatch costs nothing extra, 0 on one rank.
    """
    _check(ranks=ranks)
    if not (work >= 0 and extra >= 0):
        raise ValueError(f"{work} s of work and {extra} s extra: both must be 0 or more")
    if ranks == 1:
        return 0.0
    return math.sqrt((ranks - 1) * work / (ranks * extra)) if extra else math.inf

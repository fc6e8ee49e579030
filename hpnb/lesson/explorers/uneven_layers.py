"""The explorer of notebook 06: where to cut layers that are not equal, and what comes of it."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from hpnb.lesson.explorers.explorer import Explorer, explorer
from hpnb.lesson.explorers.knobs import Challenge, Choice, Slider
from hpnb.lesson.tables import number
from hpnb.pipeline_parallel import Costs, schedules
from hpnb.theory import loads

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLOCKS = 24
EMBEDDING = 0.1  # of a block
_CHUNKS = {"interleaved": 2, "breadth-first": 2, "zb-v": 2, "dualpipe-v": 2}
CUTS = ("uniform", "by parameters", "by time")


def uneven_layers() -> Explorer:
    """Notebook 06: a pipeline of 24 blocks and a head, by head cost, ranks, cut, microbatches and schedule.

    Times are in blocks: forward and backward of a block and a microbatch take 1, F, I and W a third each.
    """
    from hpnb import plot

    def draw(
        head: float, ranks: int, cut: str, microbatches: int, schedule: str, fast: bool
    ) -> tuple[Figure, str, dict[str, Any]]:
        chunks = _CHUNKS.get(schedule, 1)
        costs = [EMBEDDING] + [1.0] * BLOCKS + [head]
        counts = _counts(head, ranks * chunks, cut)
        each = [load / 3 for load in loads(costs, counts)]
        made = schedules.make(schedule, ranks * chunks, microbatches, chunks)
        tl = made.simulate(Costs(each, each, each))
        held = max(tl.peak_in_flight(rank) for rank in tl.ranks) / chunks
        work = [sum(3 * each[stage] for stage in made.stages_of(rank)) for rank in range(ranks)]
        figure = plot.skyline(
            costs,
            {cut: plot.Built(counts, tl)},
            ["embedding"] + ["block"] * BLOCKS + ["head"],
            text=not fast,
            unit="blocks",
            title=f"simulated · {schedule}, {ranks} ranks, {microbatches} microbatches, a head of "
            f"{number(head)} blocks, cut {cut}",
        )
        alt = (
            f"{BLOCKS} blocks and a head of {number(head)}, cut {cut} into {len(counts)} stages, "
            f"above the step by {schedule}: {100 * tl.bubble_fraction:.1f} % of it is idle."
        )
        devices = microbatches * sum(costs) / tl.makespan
        readings = {
            "step (blocks)": tl.makespan,
            "bubble (%)": 100 * tl.bubble_fraction,
            "fullest rank over the mean": max(work) * ranks / sum(work),
            "microbatches in flight": held,
            "as fast as so many devices": devices,
            "_as_asked": head >= 4.5 and ranks == 4 and microbatches <= 8,
        }
        return figure, alt, readings

    return explorer(
        draw,
        {
            "head": Slider(0.0, 8.0, 4.5, 0.1, unit="blocks"),
            "ranks": Slider(2, 8, 4),
            "cut": Choice(CUTS),
            "microbatches": Slider(1, 32, 8),
            "schedule": Choice(schedules.NAMES, "1f1b"),
        },
        Challenge(
            "a head of 4.5 blocks or more, 4 ranks, at most 8 microbatches: a bubble under 10 % with at most "
            "4.5 microbatches in flight.",
            lambda read: (
                bool(read["_as_asked"]) and read["bubble (%)"] < 10 and read["microbatches in flight"] <= 4.5
            ),
        ),
    )


@lru_cache(maxsize=512)
def _counts(head: float, stages: int, cut: str) -> tuple[int, ...]:
    """Layers of each stage. By parameters the table of words weighs the same at either end."""
    from hpnb.pipeline_parallel.partition import balanced

    if cut == "uniform":
        least, more = divmod(BLOCKS, stages)
        start = (stages - more) // 2  # those in the middle get one more
        counts = [least + (start <= stage < start + more) for stage in range(stages)]
        counts[0], counts[-1] = counts[0] + 1, counts[-1] + 1
        return tuple(counts)
    return balanced([head if cut == "by parameters" else EMBEDDING] + [1.0] * BLOCKS + [head], stages)

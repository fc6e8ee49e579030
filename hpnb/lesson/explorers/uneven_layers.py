"""The explorer of notebook 06: where to cut unequal layers, and what bubble follows."""

from __future__ import annotations

from functools import lru_cache

from hpnb.lesson.explorers.explorer import Challenge, Evaluation, Explorer, Picture
from hpnb.lesson.explorers.knobs import Choice, Knobs, Slider
from hpnb.lesson.tables import number
from hpnb.pipeline_parallel import Costs, schedules
from hpnb.theory import stage_loads

BLOCKS = 24
EMBEDDING = 0.1  # of a block
_CHUNKS = {"interleaved": 2, "breadth-first": 2, "zb-v": 2, "dualpipe-v": 2}

KNOBS: Knobs = {
    "head": Slider(0.0, 8.0, 4.5, 0.1, unit="blocks"),
    "ranks": Slider(2, 8, 4),
    "cut": Choice(("uniform", "by parameters", "by time"), "uniform"),
    "microbatches": Slider(1, 32, 8),
    "schedule": Choice(schedules.NAMES, "1f1b"),
}
ANSWER = {"cut": "by time", "schedule": "dualpipe-v"}
CHALLENGE = Challenge(
    "a head of 4.5 blocks or more, 4 ranks, at most 8 microbatches: a bubble under 10 % with at most "
    "4.5 microbatches in flight.",
    lambda at: (
        (at["head"] >= 4.5 and at["ranks"] == 4 and at["microbatches"] <= 8)
        and (at["bubble (%)"] < 10 and at["microbatches in flight"] <= 4.5)
    ),
)


def uneven_layers() -> Explorer:
    """Notebook 06: a pipeline of 24 blocks and a head, by head cost, ranks, cut, microbatches and schedule.

    Times are in blocks: forward and backward of a block and a microbatch take 1, F, I and W a third each.
    """
    trade = ("microbatches", "bubble (%)")
    return Explorer(KNOBS, _readings, CHALLENGE, ANSWER, trade, goal=10).display()


def _readings(head: float, ranks: int, cut: str, microbatches: int, schedule: str) -> Evaluation:
    chunks = _CHUNKS.get(schedule, 1)
    costs = [EMBEDDING] + [1.0] * BLOCKS + [head]
    counts = _layers_per_stage(head, ranks * chunks, cut)
    stage_costs = [load / 3 for load in stage_loads(costs, counts)]
    actions = schedules.make(schedule, ranks * chunks, microbatches, chunks)
    tl = actions.simulate(Costs(stage_costs, stage_costs, stage_costs))
    work = [sum(3 * stage_costs[stage] for stage in actions.stages_of(rank)) for rank in range(ranks)]
    bubble = 100 * tl.bubble_fraction
    in_flight = max(tl.peak_in_flight(rank) for rank in tl.ranks) / chunks
    readings = {
        "step (blocks)": tl.makespan,
        "bubble (%)": bubble,
        "fullest rank over the mean": max(work) * ranks / sum(work),
        "microbatches in flight": in_flight,
        "as fast as so many devices": microbatches * sum(costs) / tl.makespan,
    }

    def draw(fast: bool) -> Picture:
        from hpnb.lesson.figures import gpt2_pipeline

        figure = gpt2_pipeline.skyline(
            costs,
            {cut: gpt2_pipeline.PipelineCut(counts, tl)},
            ["embedding"] + ["block"] * BLOCKS + ["head"],
            text=not fast,
            unit="blocks",
            title=f"simulated · {schedule}, {ranks} ranks, {microbatches} microbatches, at most "
            f"{number(in_flight)} in flight, a head of {number(head)} blocks, cut {cut}",
        )
        return figure, (
            f"{BLOCKS} blocks and a head of {number(head)}, cut {cut} into {len(counts)} stages, "
            f"above the step by {schedule}: {bubble:.1f} % of it is idle."
        )

    return readings, draw


@lru_cache(maxsize=512)
def _layers_per_stage(head: float, stages: int, cut: str) -> tuple[int, ...]:
    """Layers of each stage. By parameters the embedding weighs as much as the head that shares its weight."""
    from hpnb.pipeline_parallel.partition import balanced

    if cut == "uniform":
        least, more = divmod(BLOCKS, stages)
        start = (stages - more) // 2  # stages in the middle get one block more
        counts = [least + (start <= stage < start + more) for stage in range(stages)]
        counts[0], counts[-1] = counts[0] + 1, counts[-1] + 1
        return tuple(counts)
    return balanced([head if cut == "by parameters" else EMBEDDING] + [1.0] * BLOCKS + [head], stages)

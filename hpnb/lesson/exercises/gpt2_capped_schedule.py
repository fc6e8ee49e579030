"""The last exercise of notebook 06: a schedule that beats 1F1B under a memory cap."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hpnb.lesson.exercises.checker import Finding, exercise
from hpnb.lesson.exercises.findings import keeps_to_cap
from hpnb.lesson.exercises.vit_pipeline_parallel import parse_schedule
from hpnb.pipeline_parallel import Costs, Schedule, schedules


@dataclass(frozen=True)
class CappedPipeline:
    """A pipeline of unequal stages, stage r on rank r, to be scheduled.

    Attributes:
        ranks, microbatches: p and m.
        costs: seconds of F, I and W of each stage.
        held: bytes that each stage holds of one microbatch, from its F to its W.
        cap: bytes that a rank may hold of all.
    """

    ranks: int
    microbatches: int
    costs: Costs
    held: tuple[float, ...]
    cap: float


_SLACK = 1.01
_A100_COSTS = Costs([29.718e-3] * 8, [29.444e-3] * 8, [19.927e-3] * 8, 0.527e-3)
TASKS = {
    "a GPT-2 of 16 blocks, recorded on a CPU": CappedPipeline(
        4, 8, Costs([16.2e-3, 19.1e-3, 16.9e-3, 13.1e-3], [18.8e-3, 16.1e-3, 16.5e-3, 11.3e-3],
                    [6.2e-3, 6.4e-3, 7.1e-3, 6.5e-3]), (9.2e6, 9.2e6, 9.2e6, 7.5e6), 37e6),
    "GPT-2 124M by its FLOPs, the head alone on rank 3": CappedPipeline(
        4, 8, Costs([4.0, 4.0, 4.0, 4.5], [4.0, 4.0, 4.0, 4.5], [4.0, 4.0, 4.0, 4.5]),
        (0.43e9, 0.43e9, 0.43e9, 1.24e9), 2.6e9),
    "6.2B, recorded on A100s, with room": CappedPipeline(8, 24, _A100_COSTS, (1.0e9,) * 8, 15.5e9),
    "the same, with room for 12": CappedPipeline(8, 24, _A100_COSTS, (1.0e9,) * 8, 12.5e9),
}  # fmt: skip


def family(task: CappedPipeline) -> list[Schedule]:
    """What fits of 1F1B and of twice its warm-up, with W as late as a rank's memory lets it be."""
    fitting = []
    for stretch in (1, 2):
        warmups = [stretch * (task.ranks - r) - stretch + 1 for r in range(task.ranks)]
        room = [int(task.cap // held) for held in task.held]
        if all(warmup <= most for warmup, most in zip(warmups, room, strict=True)):
            lags = [min(stretch * r, room[r] - warmups[r]) for r in range(task.ranks)]
            ranks = enumerate(zip(warmups, lags, strict=True))
            rows = [_rank_actions(r, warmup, lag, task.microbatches) for r, (warmup, lag) in ranks]
            fitting.append(Schedule(rows))
    return fitting


def _rank_actions(r: int, warmup: int, lag: int, m: int) -> list[str]:
    """`warmup` forwards, then I, W and F in turn, W `lag` microbatches behind I."""
    row = [f"{r}F{k}" for k in range(min(warmup, m))]
    for k in range(m):
        row.append(f"{r}I{k}")
        row += [f"{r}W{k - lag}"] * (k >= lag) + [f"{r}F{k + warmup}"] * (k + warmup < m)
    return row + [f"{r}W{k}" for k in range(max(0, m - lag), m)]


@exercise("06.4", "beat 1F1B under a cap", 30)
def beat_1f1b(plan: Callable[[CappedPipeline], Any]) -> Iterator[Finding]:
    for name, task in TASKS.items():
        schedule = parse_schedule(plan(task), task.ranks, task.microbatches, task.ranks, f"{name}: ")
        tl = schedule.simulate(task.costs)
        holds = [tl.peak_in_flight(r) * task.held[schedule.stages_of(r)[0]] for r in tl.ranks]
        worst = max(range(task.ranks), key=lambda r: holds[r])
        yield keeps_to_cap(f"{name}: rank {worst}", holds[worst], task.cap)
        usual = schedules.make("1f1b", task.ranks, task.microbatches).simulate(task.costs).makespan
        target = _SLACK * min(other.simulate(task.costs).makespan for other in family(task))
        bubble = 1 - (1 - tl.bubble_fraction) * tl.makespan / target  # the same work in the target's time
        text = f"{name}: {tl.makespan / usual:.3f} of 1F1B's step, target {target / usual:.3f}"
        text += f"; bubble {100 * tl.bubble_fraction:.1f} %, target {100 * bubble:.1f} %"
        yield Finding(tl.makespan <= target, text)

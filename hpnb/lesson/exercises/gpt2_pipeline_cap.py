"""The last exercise of notebook 06: a schedule that beats 1F1B under a cap, held to a family of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hpnb.lesson.exercises.checker import Exercise, Finding
from hpnb.lesson.exercises.vit_pipeline_parallel import _read as read
from hpnb.lesson.tables import number
from hpnb.pipeline_parallel import Costs, Schedule, schedules


@dataclass(frozen=True)
class Job:
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
JOBS = {
    "a GPT-2 of 16 blocks, recorded on a CPU": Job(
        4, 8, Costs([16.2e-3, 19.1e-3, 16.9e-3, 13.1e-3], [18.8e-3, 16.1e-3, 16.5e-3, 11.3e-3],
                    [6.2e-3, 6.4e-3, 7.1e-3, 6.5e-3]), (9.2e6, 9.2e6, 9.2e6, 7.5e6), 37e6),
    "GPT-2 124M by its FLOPs, the head alone on rank 3": Job(
        4, 8, Costs([4.0, 4.0, 4.0, 4.5], [4.0, 4.0, 4.0, 4.5], [4.0, 4.0, 4.0, 4.5]),
        (0.43e9, 0.43e9, 0.43e9, 1.24e9), 2.6e9),
    "6.2B, recorded on A100s, with room": Job(
        8, 24, Costs([29.718e-3] * 8, [29.444e-3] * 8, [19.927e-3] * 8, 0.527e-3), (1.0e9,) * 8, 15.5e9),
    "the same, with room for 12": Job(
        8, 24, Costs([29.718e-3] * 8, [29.444e-3] * 8, [19.927e-3] * 8, 0.527e-3), (1.0e9,) * 8, 12.5e9),
}  # fmt: skip


def family(job: Job) -> list[Schedule]:
    """What fits of 1F1B and of twice its warm-up, with W as late as a rank's memory lets it be."""
    found = []
    for stretch in (1, 2):
        ahead = [stretch * (job.ranks - r) - stretch + 1 for r in range(job.ranks)]
        room = [int(job.cap // held) for held in job.held]
        if all(a <= most for a, most in zip(ahead, room, strict=True)):
            lags = [min(stretch * r, room[r] - ahead[r]) for r in range(job.ranks)]
            found.append(Schedule([_row(r, a, lag, job.microbatches)
                                   for r, (a, lag) in enumerate(zip(ahead, lags, strict=True))]))  # fmt: skip
    return found


def _row(r: int, ahead: int, lag: int, m: int) -> list[str]:
    """`ahead` forwards, then I, W and F in turn, W `lag` microbatches behind I."""
    row = [f"{r}F{k}" for k in range(min(ahead, m))]
    for k in range(m):
        row.append(f"{r}I{k}")
        row += [f"{r}W{k - lag}"] * (k >= lag) + [f"{r}F{k + ahead}"] * (k + ahead < m)
    return row + [f"{r}W{k}" for k in range(max(0, m - lag), m)]


def _of(plan: Callable[[Job], Any], job: Job, ranks: int, microbatches: int) -> Any:
    return plan(job)


def _verify_beat(plan: Callable[[Job], Any]) -> Sequence[Finding]:
    findings = []
    for name, job in JOBS.items():
        mine, can = read(partial(_of, plan, job), job.ranks, job.microbatches, job.ranks)
        if mine is None:
            findings.append(Finding(False, f"{name}: {can.text}"))
            continue
        tl = mine.simulate(job.costs)
        holds = [tl.peak_in_flight(r) * job.held[mine.stages_of(r)[0]] for r in tl.ranks]
        worst = max(range(job.ranks), key=lambda r: holds[r])
        said = f"{name}: rank {worst} holds {number(holds[worst], 'B')}, at most {number(job.cap, 'B')}"
        findings.append(Finding(holds[worst] <= job.cap, said))
        usual = schedules.make("1f1b", job.ranks, job.microbatches).simulate(job.costs)
        target = _SLACK * min(each.simulate(job.costs).makespan for each in family(job))
        bubble = 1 - (1 - tl.bubble_fraction) * tl.makespan / target  # the same work in the target's time
        said = (
            f"{name}: {tl.makespan / usual.makespan:.3f} of 1F1B's step, target {target / usual.makespan:.3f}"
        )
        said += f"; bubble {100 * tl.bubble_fraction:.1f} %, target {100 * bubble:.1f} %"
        findings.append(Finding(tl.makespan <= target, said))
    return findings


beat = Exercise("06.5", "beat 1F1B under a cap", 30, _verify_beat)

"""Notebook 02: 1F1B, interleaving and weight gradients as lists; a record to diagnose; m under a cap."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hpnb.lesson.exercises.checker import Exercise, Finding
from hpnb.lesson.tables import number
from hpnb.pipeline_parallel import Action, Costs, Schedule, ScheduleError, schedules
from hpnb.record import Timeline
from hpnb.theory import LINKS, Link, seconds

Write = Callable[[int, int], Any]  # (ranks, microbatches) -> a list of actions a rank
_NEAR = 1e-9


# --- lists of actions ------------------------------------------------------------------------------


def _read(write: Write, ranks: int, microbatches: int, stages: int) -> tuple[Schedule | None, Finding]:
    """(what was written, if it can be run; whether it can)."""
    text = f"p={ranks}, m={microbatches}"
    rows = write(ranks, microbatches)
    try:
        _are_lists(rows)
        mine = Schedule(rows, "yours")
    except (TypeError, ValueError) as error:
        words = f"these are no lists of actions such as [['0F0', '0B0'], ['1F0', '1B0']]: {error}"
        return None, Finding(False, f"{text}: {words}")
    try:
        mine.check()
    except ScheduleError as error:
        words = f"{text}: rank {error.rank}, step {error.step}: {error.reason}"
        return None, Finding(False, f"{words}\n{error.grid}".strip())
    has = _size(mine.ranks, mine.stages, mine.microbatches)
    wanted = _size(ranks, stages, microbatches)
    if has != wanted:
        return None, Finding(False, f"{text}: it has {has}, and {wanted} are wanted")
    return mine, Finding(True, f"{text}: check() finds nothing")


def _are_lists(rows: Any) -> None:
    """Raises TypeError in words where `rows` is not a list a rank, of written actions."""
    if not isinstance(rows, (list, tuple)):
        raise TypeError(f"what is returned is of type {type(rows).__name__}, not a list")
    for rank, row in enumerate(rows):
        if not isinstance(row, (list, tuple, str)):
            raise TypeError(f"rank {rank} has one of type {type(row).__name__}, not a list")
        for action in row if not isinstance(row, str) else ():
            if not isinstance(action, (str, Action)):
                raise TypeError(f"rank {rank} has {action!r}, which is not written as '0F0' is")


def _size(ranks: int, stages: int, microbatches: int) -> str:
    counts = {"rank": ranks, "stage": stages, "microbatch": microbatches}
    ends = {"microbatch": "es"}
    each = [f"{n} {what}{ends.get(what, 's') * (n != 1)}" for what, n in counts.items()]
    return f"{each[0]}, {each[1]} and {each[2]}"


def _unit(chunks: int = 1) -> Costs:
    """F = I = W = 1 of a rank's share of a microbatch."""
    return Costs(1 / chunks, 1 / chunks, 1 / chunks)


def _units(text: str, tl: Timeline, target: float) -> Finding:
    work = (1 - tl.bubble_fraction) * tl.makespan  # of a rank, in the mean
    words = f"{tl.makespan:g} units, bubble {100 * tl.bubble_fraction:.1f} %"
    wanted = f"target {target:g} and {100 * (1 - work / target):.1f} %"
    return Finding(tl.makespan <= target + _NEAR, f"{text}: {words}, {wanted}")


def _in_flight(text: str, tl: Timeline, most: Sequence[int], what: str = "") -> Finding:
    held = [tl.peak_in_flight(rank) for rank in tl.ranks]
    words = f"in flight {', '.join(map(str, held))}{what}, at most {', '.join(map(str, most))}"
    return Finding(all(a <= b for a, b in zip(held, most, strict=True)), f"{text}: {words}")


def _verify_one_f_one_b(write: Write) -> Sequence[Finding]:
    findings = []
    for p, m in ((4, 8), (2, 6), (4, 2), (3, 1)):  # the last two below the warm-up
        mine, can = _read(write, p, m, p)
        findings.append(can)
        if mine is None:
            continue
        text, tl = f"p={p}, m={m}", mine.simulate(_unit())
        findings.append(_units(text, tl, 3 * (m + p - 1)))
        findings.append(_in_flight(text, tl, [min(p - r, m) for r in range(p)]))
    return findings


one_f_one_b = Exercise("02.1", "1F1B as lists", 20, _verify_one_f_one_b)


def _verify_interleave(write: Write) -> Sequence[Finding]:
    findings = []
    for p, m in ((4, 8), (2, 6)):
        mine, can = _read(write, p, m, 2 * p)
        findings.append(can)
        if mine is None:
            continue
        text, tl = f"p={p}, m={m}", mine.simulate(_unit(2))
        wrong = [stage for stage in range(2 * p) if mine.rank_of[stage] != stage % p]
        said = "stage s is on rank s mod p"
        if wrong:
            said = f"stage {wrong[0]} is on rank {mine.rank_of[wrong[0]]}, not on {wrong[0] % p}"
        findings.append(Finding(not wrong, f"{text}: {said}"))
        findings.append(_units(text, tl, 3 * (m + (p - 1) / 2)))
        most = [min(2 * (p - r - 1) + p + 1, 2 * m) for r in range(p)]
        findings.append(_in_flight(text, tl, most, " chunks"))
    return findings


interleave = Exercise("02.2", "interleave by two", 25, _verify_interleave)


def _verify_place_w(write: Write) -> Sequence[Finding]:
    findings = []
    for p, m in ((4, 8), (2, 6), (3, 5)):
        mine, can = _read(write, p, m, p)
        findings.append(can)
        if mine is None:
            continue
        text, tl = f"p={p}, m={m}", mine.simulate(_unit())
        whole = [str(a) for row in mine.actions for a in row if a.op == "B"]
        if whole:
            findings.append(Finding(False, f"{text}: {whole[0]} is not split into I and W"))
        findings.append(_units(text, tl, 3 * m + p - 1))
        findings.append(_in_flight(text, tl, [p] * p))
    return findings


place_w = Exercise("02.3", "place the weight gradients", 20, _verify_place_w)


# --- a record to diagnose --------------------------------------------------------------------------

HEAVY, WIRE, FEW = "heavy stage", "slow wire", "few microbatches"
_JITTER = 0.06


def record(case: str, seed: int) -> tuple[Timeline, tuple[str, int | None]]:
    """A 1F1B step with something wrong, each action up to 6 % off; (the record, what is wrong and where)."""
    draw = random.Random(seed)
    p = draw.choice((4, 6))
    m = p - 1 if case == FEW else 4 * p
    slow = draw.randrange(p) if case == HEAVY else None
    hop = 0.9e-3 if case == WIRE else 0.02e-3

    def duration(action: Action) -> float:
        each = 1e-3 if action.op == "F" else 2e-3
        return each * (1.6 if action.stage == slow else 1.0) * draw.uniform(1 - _JITTER, 1 + _JITTER)

    return schedules.make("1f1b", p, m).replay(duration, hop), (case, slow)


def _verify_diagnose(diagnose: Callable[[Timeline], Any]) -> Sequence[Finding]:
    findings = []
    for seed, case in enumerate((HEAVY, WIRE, FEW, FEW, WIRE, HEAVY), 1):
        tl, truth = record(case, seed)
        answer = diagnose(tl)
        answer = tuple(answer) if isinstance(answer, list) else answer
        shown = f"record {seed}, {len(tl.ranks)} ranks, bubble {100 * tl.bubble_fraction:.0f} %"
        findings.append(Finding(answer == truth, f"{shown}: it is {truth}, you say {answer!r}"))
    return findings


diagnosis = Exercise("02.4", "what is wrong with this step", 20, _verify_diagnose)


# --- m under a memory cap --------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A batch to be trained by 1F1B.

    Attributes:
        batch: samples of a step.
        ranks: of the pipeline, one stage each.
        forward: seconds of one sample's forward in one stage; the backward takes twice that.
        launch: seconds that an action takes besides, whatever its size.
        message: bytes of one sample between two stages.
        link: between them.
        held: bytes of one sample's activations in one stage.
        cap: bytes of activations that a rank may hold.
    """

    batch: int
    ranks: int
    forward: float
    launch: float
    message: float
    link: Link
    held: float
    cap: float


_SLACK = 1.01
_JOBS = {
    "launches that cost": Job(64, 4, 1e-3, 0.6e-3, 4e5, LINKS["NVLink 4"], 50e6, 8e9),
    "little memory": Job(64, 4, 1e-3, 2e-3, 4e5, LINKS["NVLink 4"], 50e6, 0.7e9),
    "a link with latency": Job(48, 6, 0.2e-3, 10e-6, 4e5, Link(1e-3, 2e9), 20e6, 8e9),
    "fewer than ranks": Job(24, 8, 1e-3, 12e-3, 4e5, LINKS["InfiniBand NDR"], 50e6, 1.3e9),
}


def _step(job: Job, m: int) -> float:
    b = job.batch // m
    hop = seconds("send", b * job.message, 2, job.link)
    costs = Costs(job.launch + b * job.forward, job.launch + 2 * b * job.forward, 0.0, hop)
    return schedules.make("1f1b", job.ranks, m).simulate(costs).makespan


def _holds(job: Job, m: int) -> float:
    held = schedules.make("1f1b", job.ranks, m).simulate().peak_in_flight(0)
    return held * (job.batch // m) * job.held


def _verify_choose(choose: Callable[[Job], Any]) -> Sequence[Finding]:
    findings = []
    for name, job in _JOBS.items():
        m = choose(job)
        if isinstance(m, bool) or not isinstance(m, int) or m < 1 or job.batch % m:
            findings.append(Finding(False, f"{name}: {m!r} does not divide a batch of {job.batch}"))
            continue
        holds = _holds(job, m)
        said = f"{name}: m={m}: rank 0 holds {number(holds, 'B')}, at most {number(job.cap, 'B')}"
        findings.append(Finding(holds <= job.cap, said))
        if holds > job.cap:
            continue  # it is compared with those that fit
        able = [k for k in range(1, job.batch + 1) if job.batch % k == 0 and _holds(job, k) <= job.cap]
        over = _step(job, m) / min(_step(job, k) for k in able)
        said = f"{name}: m={m}: a step of {number(_step(job, m), 's')}, {over:.2f} times the shortest"
        said += " of those that fit"
        findings.append(Finding(over <= _SLACK, said))
    return findings


choose = Exercise("02.5", "microbatches under a cap", 15, _verify_choose)

__all__ = ["Job", "choose", "diagnosis", "interleave", "one_f_one_b", "place_w", "record"]

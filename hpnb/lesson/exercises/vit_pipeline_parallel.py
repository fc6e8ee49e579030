"""Notebook 02: three schedules as lists, a timeline to diagnose, microbatches under a memory cap."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hpnb.lesson.exercises.checker import Finding, WrongAnswer, exercise
from hpnb.lesson.exercises.findings import diagnosis as diagnosis_exercise
from hpnb.lesson.exercises.findings import divisors, keeps_to_cap, nearly_shortest
from hpnb.lesson.exercises.stubs import is_blank
from hpnb.lesson.show import show
from hpnb.pipeline_parallel import Action, Costs, Schedule, ScheduleError, schedules
from hpnb.pipeline_parallel.simulate import replay
from hpnb.record import Timeline
from hpnb.theory import LINKS, Link, seconds

Write = Callable[[int, int], Any]  # (ranks, microbatches) -> a list of actions a rank
_ROUNDING = 1e-9


# --- lists of actions ------------------------------------------------------------------------------


def parse_schedule(rows: Any, ranks: int, microbatches: int, stages: int, case: str = "") -> Schedule:
    """The reader's schedule.

    Raises:
        WrongAnswer: it cannot be run, or is of another size; the words begin with `case`.
    """
    text = f"{case}p={ranks}, m={microbatches}"
    try:
        _check_types(rows)
        schedule = Schedule(rows, "yours")
    except (TypeError, ValueError) as error:
        example = "lists of actions such as [['0F0', '0B0'], ['1F0', '1B0']]"
        raise WrongAnswer(f"{text}: these are no {example}: {error}") from None
    try:
        schedule.check()
    except ScheduleError as error:
        problem = f"{text}: rank {error.rank}, step {error.step}: {error.reason}"
        raise WrongAnswer(f"{problem}\n{error.grid}".strip()) from None
    has = _describe_size(schedule.ranks, schedule.stages, schedule.microbatches)
    wanted = _describe_size(ranks, stages, microbatches)
    if has != wanted:
        raise WrongAnswer(f"{text}: it has {has}; write {wanted}")
    return schedule


def _check_types(rows: Any) -> None:
    """Raises TypeError in words where `rows` is not a list a rank, of written actions."""
    if not isinstance(rows, (list, tuple)):
        raise TypeError(f"what is returned is of type {type(rows).__name__}, not a list")
    for rank, row in enumerate(rows):
        if not isinstance(row, (list, tuple, str)):
            raise TypeError(f"rank {rank} has one of type {type(row).__name__}, not a list")
        for action in row if not isinstance(row, str) else ():
            if not isinstance(action, (str, Action)):
                raise TypeError(f"rank {rank} has {action!r}, which is not written as '0F0' is")


def _describe_size(ranks: int, stages: int, microbatches: int) -> str:
    counts = (("rank", ranks, "s"), ("stage", stages, "s"), ("microbatch", microbatches, "es"))
    parts = [f"{n} {what}{plural * (n != 1)}" for what, n, plural in counts]
    return f"{parts[0]}, {parts[1]} and {parts[2]}"


def _simulate(write: Write, p: int, m: int, chunks: int = 1) -> tuple[Schedule, Timeline]:
    """The reader's schedule and its simulation; F, I and W of a rank's layers take 1."""
    schedule = parse_schedule(write(p, m), p, m, chunks * p)
    return schedule, schedule.simulate(Costs(1 / chunks, 1 / chunks, 1 / chunks))


def _makespan(text: str, tl: Timeline, target: float) -> Finding:
    work = (1 - tl.bubble_fraction) * tl.makespan  # of a rank, in the mean
    measured = f"{tl.makespan:g} units, bubble {100 * tl.bubble_fraction:.1f} %"
    wanted = f"target {target:g} and {100 * (1 - work / target):.1f} %"
    return Finding(tl.makespan <= target + _ROUNDING, f"{text}: {measured}, {wanted}")


def _in_flight(text: str, tl: Timeline, most: Sequence[int], what: str = "") -> Finding:
    peaks = [tl.peak_in_flight(rank) for rank in tl.ranks]
    measured = f"in flight {', '.join(map(str, peaks))}{what}, at most {', '.join(map(str, most))}"
    return Finding(all(a <= b for a, b in zip(peaks, most, strict=True)), f"{text}: {measured}")


@exercise("02.1", "1F1B as lists", 20)
def one_f_one_b(write: Write) -> Iterator[Finding]:
    for p, m in ((4, 8), (2, 6), (4, 2), (3, 1)):  # the last two below the warm-up
        (_, tl), text = _simulate(write, p, m), f"p={p}, m={m}"
        yield Finding(True, f"{text}: check() finds nothing")
        yield _makespan(text, tl, 3 * (m + p - 1))
        yield _in_flight(text, tl, [min(p - r, m) for r in range(p)])


def draw_schedule(write: Write, p: int, m: int) -> None:
    """Draw the reader's lists as a timeline, with F = 1 and B = 2, as far as they can be run.

    Nothing is drawn for a stub, and where there is no action that could begin: the check says why.
    """
    if is_blank(write):
        return
    try:
        rows = write(p, m)
        _check_types(rows)
        schedule = Schedule(rows, "yours")
        tl = replay(schedule, Costs().seconds)
    except Exception:  # whatever a reader's function does
        return
    if not tl.events:
        return
    actions, runs = sum(map(len, schedule.actions)), len(tl.events)
    title = f"Your schedule, p = {p} and m = {m}"
    if runs < actions:
        title += f": it stops after {runs} of {actions} actions"
    show(tl, title=title, unit="units", in_flight=runs == actions)


@exercise("02.2", "interleave by two", 25)
def interleave(write: Write) -> Iterator[Finding]:
    for p, m in ((4, 8), (2, 6)):
        (schedule, tl), text = _simulate(write, p, m, chunks=2), f"p={p}, m={m}"
        yield Finding(True, f"{text}: check() finds nothing")
        wrong = [stage for stage in range(2 * p) if schedule.rank_of[stage] != stage % p]
        placed = "stage s is on rank s mod p"
        if wrong:
            placed = f"stage {wrong[0]} is on rank {schedule.rank_of[wrong[0]]}, not on {wrong[0] % p}"
        yield Finding(not wrong, f"{text}: {placed}")
        yield _makespan(text, tl, 3 * (m + (p - 1) / 2))
        yield _in_flight(text, tl, [min(2 * (p - r - 1) + p + 1, 2 * m) for r in range(p)], " chunks")


@exercise("02.3", "place the weight gradients", 20)
def place_w(write: Write) -> Iterator[Finding]:
    for p, m in ((4, 8), (2, 6), (3, 5)):
        (schedule, tl), text = _simulate(write, p, m), f"p={p}, m={m}"
        yield Finding(True, f"{text}: check() finds nothing")
        unsplit = [str(a) for row in schedule.actions for a in row if a.op == "B"]
        if unsplit:
            yield Finding(False, f"{text}: {unsplit[0]} is not split into I and W")
        yield _makespan(text, tl, 3 * m + p - 1)
        yield _in_flight(text, tl, [p] * p)


# --- a record to diagnose --------------------------------------------------------------------------

HEAVY, LINK, FEW = "heavy stage", "slow link", "few microbatches"
_JITTER = 0.06


def record(case: str, seed: int) -> tuple[Timeline, tuple[str, int | None]]:
    """(a 1F1B step with something wrong, what is wrong and where); each action's time varies by up to 6 %."""
    draw = random.Random(seed)
    p = draw.choice((4, 6))
    m = p - 1 if case == FEW else 4 * p
    slow = draw.randrange(p) if case == HEAVY else None

    def duration(action: Action) -> float:
        base = 1e-3 if action.op == "F" else 2e-3
        return base * (1.6 if action.stage == slow else 1.0) * draw.uniform(1 - _JITTER, 1 + _JITTER)

    hop = 0.9e-3 if case == LINK else 0.02e-3
    return schedules.make("1f1b", p, m).replay(duration, hop), (case, slow)


def _records() -> Iterator[tuple[str, Timeline, tuple[str, int | None]]]:
    for seed, case in enumerate((HEAVY, LINK, FEW, FEW, LINK, HEAVY), 1):
        tl, truth = record(case, seed)
        yield f"record {seed}, {len(tl.ranks)} ranks, bubble {100 * tl.bubble_fraction:.0f} %", tl, truth


diagnosis = diagnosis_exercise("02.4", "what is wrong with this step", 20, _records)


# --- m under a memory cap --------------------------------------------------------------------------


@dataclass(frozen=True)
class MicrobatchTask:
    """A batch to be trained by 1F1B.

    Attributes:
        batch: samples of a step.
        ranks: of the pipeline, one stage each.
        forward: seconds of one sample's forward in one stage; the backward takes twice that.
        launch: seconds that every action takes in addition, whatever its size.
        message_bytes: of one sample between two stages.
        link: between the ranks.
        activation_bytes: of one sample in one stage.
        memory_cap: bytes of activations for which a rank has memory.
    """

    batch: int
    ranks: int
    forward: float
    launch: float
    message_bytes: float
    link: Link
    activation_bytes: float
    memory_cap: float

    def step_seconds(self, m: int) -> float:
        """Of a step with m microbatches, by simulation."""
        b = self.batch // m
        hop = seconds("send", b * self.message_bytes, 2, self.link)
        costs = Costs(self.launch + b * self.forward, self.launch + 2 * b * self.forward, 0.0, hop)
        return schedules.make("1f1b", self.ranks, m).simulate(costs).makespan

    def peak_bytes(self, m: int) -> float:
        """Activations on rank 0."""
        in_flight = schedules.make("1f1b", self.ranks, m).simulate().peak_in_flight(0)
        return in_flight * (self.batch // m) * self.activation_bytes


_TASKS = {
    "launches that cost": MicrobatchTask(64, 4, 1e-3, 0.6e-3, 4e5, LINKS["NVLink 4"], 50e6, 8e9),
    "little memory": MicrobatchTask(64, 4, 1e-3, 2e-3, 4e5, LINKS["NVLink 4"], 50e6, 0.7e9),
    "a link with latency": MicrobatchTask(48, 6, 0.2e-3, 10e-6, 4e5, Link(1e-3, 2e9), 20e6, 8e9),
    "fewer than ranks": MicrobatchTask(24, 8, 1e-3, 12e-3, 4e5, LINKS["InfiniBand NDR"], 50e6, 1.3e9),
}


@exercise("02.5", "microbatches under a cap", 15)
def choose_microbatches(choose: Callable[[MicrobatchTask], Any]) -> Iterator[Finding]:
    for name, task in _TASKS.items():
        m = choose(task)
        if isinstance(m, bool) or not isinstance(m, int) or m < 1 or task.batch % m:
            raise WrongAnswer(f"{name}: {m!r} does not divide a batch of {task.batch}")
        memory = keeps_to_cap(f"{name}: m={m}: rank 0", task.peak_bytes(m), task.memory_cap)
        yield memory
        if not memory.ok:
            continue  # it is compared with those that fit
        fitting = [k for k in divisors(task.batch) if task.peak_bytes(k) <= task.memory_cap]
        yield nearly_shortest(f"{name}: m={m}", task.step_seconds(m), map(task.step_seconds, fitting))

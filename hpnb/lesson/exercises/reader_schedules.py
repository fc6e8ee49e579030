"""Schedules that one notebook has the reader write and later ones run, as plain data.

    lesson.keep_schedule("1f1b", one_f_one_b)                 # (p, m) -> p lists of actions; for many p and m
    lesson.reader_schedule("1f1b", ranks=4, microbatches=8)   # the reader's, or the library's where there is
    none

The file holds lists of written actions, "0F0 0B0", and never code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hpnb.lesson.exercises.stubs import is_blank
from hpnb.lesson.home import locked, read_json, write_json
from hpnb.pipeline_parallel import Schedule, schedules

FILE = "schedules.json"
RANKS = (2, 3, 4, 8)
MICROBATCHES = (*range(1, 17), 24, 32)
Write = Callable[[int, int], Sequence[Any]]


def keep_schedule(name: str, write: Write) -> int:
    """Remember what `write(p, m)` returns, for p in RANKS and m in MICROBATCHES; how many schedules that is.

    A schedule qualifies if it can be run, takes no longer than the library's of that name, and holds no more
    on any rank. If one does not qualify, nothing is written, and the file stays as it was. Prints a line.

    Args:
        name: of a schedule with one chunk a rank, such as "1f1b".
        write: the reader's; a stub is "not yet".
    """
    if is_blank(write):
        return 0
    rows: dict[str, list[str]] = {}
    for p, m in ((p, m) for p in RANKS for m in MICROBATCHES):
        schedule = _parse(write, p, m)
        if schedule is None or not _as_good(schedule, schedules.make(name, p, m)):
            count = f"{m} microbatch{'es' * (m != 1)}"
            print(f"not kept: your {name} for {p} ranks and {count} is not one yet")
            return 0
        rows[_key(p, m)] = [" ".join(map(str, row)) for row in schedule.actions]
    with locked():
        write_json(FILE, {**read_json(FILE), name: rows})
    ranks = ", ".join(map(str, RANKS))
    print(f"kept: your {name}, for {ranks} ranks and up to {MICROBATCHES[-1]} microbatches")
    return len(rows)


def reader_schedule(name: str, ranks: int, microbatches: int) -> Schedule:
    """The reader's schedule, called "your 1f1b", or the library's where there is none. Prints which."""
    try:
        schedule = Schedule(read_json(FILE)[name][_key(ranks, microbatches)], f"your {name}")
        schedule.check()
    except (KeyError, TypeError, ValueError, AttributeError):  # not there, or somebody has edited the file
        print(f"running the library's {name}: yours is not there")
        return schedules.make(name, ranks, microbatches)
    print(f"running your {name}")
    return schedule


def _key(ranks: int, microbatches: int) -> str:
    return f"{ranks}x{microbatches}"


def _parse(write: Write, ranks: int, microbatches: int) -> Schedule | None:
    """None where it is no schedule of that size."""
    try:
        schedule = Schedule(write(ranks, microbatches))
        schedule.check()
    except Exception:  # whatever a reader's function does
        return None
    return schedule if (schedule.ranks, schedule.microbatches) == (ranks, microbatches) else None


def _as_good(schedule: Schedule, other: Schedule) -> bool:
    if schedule.stages != other.stages:
        return False
    a, b = schedule.simulate(), other.simulate()
    return a.makespan <= b.makespan and all(a.peak_in_flight(r) <= b.peak_in_flight(r) for r in b.ranks)

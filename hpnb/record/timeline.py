"""What every rank did, and when: a Timeline is a frozen set of Events, whoever produced it.

A simulator predicts Events, an executor measures them, a replay recomputes them; all three give a
`Timeline`, and one plot draws it. `source` says which, and travels with the data into every title.

    makespan         last end - first start, over all ranks
    bubble_fraction  1 - work / (ranks * makespan)                    idle share of ranks x makespan
    bubble_rate      (span - work) / span of the rank with the longest span
                     the definition of Qi et al. 2023 (arXiv 2401.10241, tables 5 and 9)

The two differ because a rank that starts late or stops early is idle within the makespan, though not within
its span.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from hpnb.files import write_text

SCHEDULE_OPS = frozenset({"F", "I", "W", "B"})
COLLECTIVE_OPS = frozenset({"all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all",
                            "gather", "scatter", "barrier"})  # fmt: skip
COMMUNICATION_OPS = COLLECTIVE_OPS | {"communication", "send", "receive", "recv", "wait", "move"}
# "simulated", "measured" (where ranks share a GPU "measured by turns"), "replayed from measured CPU time", or
# "replayed from measured GPU time" with the name of the interconnect.
Source = str


@dataclass(frozen=True, slots=True)
class Event:
    """One thing one rank did, from `start` to `end`, in seconds.

    `op` is "F" forward, "I" input gradient, "W" weight gradient, "B" an unsplit backward, the name of a
    communication ("all_reduce", "send", ...), or any name of computing outside a schedule ("compute",
    "optimizer"). An event is communication if its op is in `COMMUNICATION_OPS`, or if it has the `axis` of
    the mesh it ran on, `bytes` that leave the rank, or a `group` of ranks that took part in it, itself
    included. All else is computing. `stage` and `microbatch` are -1 where they mean nothing.
    """

    rank: int
    stage: int
    op: str
    microbatch: int
    start: float
    end: float
    axis: str = ""
    bytes: float = 0.0
    group: tuple[int, ...] = ()

    @property
    def duration(self) -> float:
        return self.end - self.start

    @property
    def is_compute(self) -> bool:
        if self.op in SCHEDULE_OPS:
            return True
        return not (self.op in COMMUNICATION_OPS or self.axis or self.bytes or self.group)

    @property
    def label(self) -> str:
        """As a trace names it: "2F0" for an action of a schedule, else "optimizer", "loss, microbatch 3"."""
        if self.op in SCHEDULE_OPS and self.stage >= 0 and self.microbatch >= 0:
            return f"{self.stage}{self.op}{self.microbatch}"
        return self.op if self.microbatch < 0 else f"{self.op}, microbatch {self.microbatch}"


@dataclass(frozen=True)
class Timeline:
    """Events of all ranks on one clock, seconds; `source` says where they come from."""

    events: tuple[Event, ...]
    source: Source = "measured"

    def __post_init__(self) -> None:
        ordered = sorted(self.events, key=lambda e: (e.start, e.rank, e.end))
        object.__setattr__(self, "events", tuple(ordered))

    def __repr__(self) -> str:
        """In one line, because a step of a large pipeline has thousands of events."""
        what = f"{len(self.events)} events of {len(self.ranks)} ranks in {float(self.makespan):.4g} s"
        return f"<Timeline, {self.source}: {what}>"

    # --- all ranks --------------------------------------------------------------------------

    @cached_property
    def by_rank(self) -> dict[int, tuple[Event, ...]]:
        """{rank: its events in order of start}."""
        rows: dict[int, list[Event]] = defaultdict(list)
        for event in self.events:
            rows[event.rank].append(event)
        return {rank: tuple(rows[rank]) for rank in sorted(rows)}

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.by_rank)

    @property
    def start(self) -> float:
        return min((e.start for e in self.events), default=0.0)

    @property
    def end(self) -> float:
        return max((e.end for e in self.events), default=0.0)

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end, over all ranks."""
        return self.end - self.start

    def work(self, rank: int) -> float:
        """Seconds that `rank` spent computing. Communication is not work; a span in a span counts once."""
        seconds: float = 0  # an int, so that costs in fractions stay exact
        until = -math.inf
        for e in self.by_rank.get(rank, ()):
            if e.is_compute and e.end > until:
                seconds += e.duration if e.start >= until else e.end - until
                until = e.end
        return seconds

    def span(self, rank: int) -> float:
        """Seconds from the first start to the last end of the computing of `rank`."""
        compute = [e for e in self.by_rank.get(rank, ()) if e.is_compute]
        return max(e.end for e in compute) - min(e.start for e in compute) if compute else 0.0

    # --- bubbles ----------------------------------------------------------------------------

    @property
    def bubble_fraction(self) -> float:
        """Idle share of ranks x makespan: 0 is a full picture, 1 an empty one."""
        area = len(self.by_rank) * self.makespan
        return 1.0 - sum(self.work(rank) for rank in self.by_rank) / area if area else 0.0

    @property
    def bubble_rate(self) -> float:
        """(span - work) / span of the rank with the longest span, as the literature reports it."""
        if not self.by_rank:
            return 0.0
        rank = max(self.by_rank, key=self.span)
        span = self.span(rank)
        return (span - self.work(rank)) / span if span else 0.0

    # --- memory -----------------------------------------------------------------------------

    def in_flight(self, rank: int) -> list[tuple[float, int]]:
        """[(time, activations in flight from then on)] of `rank`, counted in chunks.

        A forward adds one at its start. It is freed at the end of the last action that needs it: W if the
        backward is split, else B.
        """
        steps: list[tuple[float, int]] = []
        for event in self.by_rank.get(rank, ()):
            if event.op == "F":
                steps.append((event.start, 1))
            elif event.op in ("W", "B"):
                steps.append((event.end, -1))
        in_flight, curve = 0, []
        for time, change in sorted(steps):  # at equal times the release comes first
            in_flight += change
            curve.append((time, in_flight))
        return curve

    def peak_in_flight(self, rank: int) -> int:
        """The most activations that `rank` has in flight at once, in chunks."""
        return max((count for _, count in self.in_flight(rank)), default=0)

    # --- other forms ------------------------------------------------------------------------

    def shifted(self, to: float = 0.0) -> Timeline:
        """The same events with the first start at `to`."""
        delta = to - self.start
        moved = (replace(e, start=e.start + delta, end=e.end + delta) for e in self.events)
        return Timeline(tuple(moved), self.source)

    def select(self, ops: Iterable[str]) -> Timeline:
        """Only the events with one of these ops."""
        wanted = frozenset(ops)
        return Timeline(tuple(e for e in self.events if e.op in wanted), self.source)

    def split_waits(self, op: str = "") -> Timeline:
        """Each collective as two events: "wait" until the last of its group has come, then "move".

        The k-th collective of a group is the same call on all of its ranks. A rank that comes last waits
        for nobody, so in a group with one slow rank that rank's collective is the shortest.

        Args:
            op: split only these, such as "all_reduce". One that names no group is then a call of all ranks.
        """
        calls: dict[tuple[object, ...], list[Event]] = defaultdict(list)
        seen: Counter[tuple[object, ...]] = Counter()
        kept = []
        for e in self.events:
            if e.op != op if op else len(e.group) < 2:
                kept.append(e)
                continue
            seen[e.rank, e.axis, e.group] += 1
            calls[e.axis, e.group, seen[e.rank, e.axis, e.group]].append(e)
        for call in calls.values():
            last = max(e.start for e in call)
            for e in call:
                met = min(last, e.end)
                kept.append(replace(e, op="wait", end=met, bytes=0.0))
                kept.append(replace(e, op="move", start=met))
        return Timeline(tuple(kept), self.source)

    def to_chrome_trace(self, path: str | Path) -> Path:
        """Write the Trace Event Format (JSON), which Perfetto and chrome://tracing open.

        A rank is a process; its compute and its communication along every axis are threads of it. Times
        are microseconds from the first start.
        """
        lanes = ["compute", *sorted({e.axis or "communication" for e in self.events if not e.is_compute})]
        zero = self.start
        trace: list[dict[str, object]] = []

        def name(what: str, rank: int, tid: int, **args: object) -> None:
            trace.append({"ph": "M", "pid": rank, "tid": tid, "name": what, "args": args})

        for rank in self.by_rank:
            name("process_name", rank, 0, name=f"rank {rank}")
            name("process_sort_index", rank, 0, sort_index=rank)
            for tid, lane in enumerate(lanes):
                name("thread_name", rank, tid, name=lane)
        for e in self.events:
            lane = "compute" if e.is_compute else e.axis or "communication"
            args = {"stage": e.stage, "microbatch": e.microbatch, "bytes": e.bytes, "source": self.source}
            trace.append({"ph": "X", "name": e.label, "cat": "compute" if e.is_compute else "communication",
                          "pid": e.rank, "tid": lanes.index(lane), "ts": (e.start - zero) * 1e6,
                          "dur": e.duration * 1e6, "args": args})  # fmt: skip
        path = Path(path)
        write_text(path, json.dumps({"traceEvents": trace, "displayTimeUnit": "ms"}))
        return path

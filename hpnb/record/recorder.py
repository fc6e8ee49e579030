"""Fills a Timeline: what this rank did and when, on a clock that all ranks share.

    with hpnb.record.timeline() as recorder:       # on every rank: it starts with a barrier
        with recorder.span("F", microbatch=0):
            ...
        comm.all_reduce(x, axis)                    # hpnb.comm reports itself
    picture = recorder.gather()                     # on every rank: the events of all

On a GPU a span is two CUDA events on the current stream, read after the block, so nothing waits for the
device while it is recorded. Without an active recorder a span of hpnb.comm costs about a microsecond.

Where ranks share a GPU they compute in turns while they are recorded (`hpnb.ranks.gpu_turns`). A span of
computing then lasts as long as it takes on an idle GPU, and ends wherever the rank communicates or waits. The
times between spans mean nothing there; `hpnb.theory.replay` puts the spans together as if each rank had a
GPU of its own.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from hpnb.ranks.current_rank import device, inside_rank, rank
from hpnb.ranks.gpu_turns import gpu_turns
from hpnb.record.timeline import Event, Timeline
from hpnb.record.traffic import ring_bytes

_active: Recorder | None = None
_nothing = nullcontext()


@dataclass(slots=True, eq=False)
class _Span:
    event: Event  # without its times
    start: torch.cuda.Event | float
    end: torch.cuda.Event | float | None = None  # None: it is open


class Recorder:
    """Collects spans of one rank. Made by `timeline()`.

    Args:
        aligned: meet all ranks now, for a common zero. Otherwise `align` does it, at any later time.
    """

    def __init__(self, aligned: bool = True) -> None:
        self._cuda = device().type == "cuda"
        self._turns = gpu_turns()
        self._spans: list[_Span] = []
        self._outer: Recorder | None = None  # in whose block this one records: it gets the same spans
        self._open: list[_Span] = []
        self._zero: torch.cuda.Event | float | None = None
        if aligned:
            self.align()

    @property
    def aligned(self) -> bool:
        """Whether there is a common zero."""
        return self._zero is not None

    def align(self, group: dist.ProcessGroup | None = None) -> None:
        """Take a common zero with all ranks (of `group`), which all call it. Times before it are negative."""
        self._zero = self._meet(group)

    @contextmanager
    def span(
        self,
        op: str = "compute",
        stage: int = -1,
        microbatch: int = -1,
        axis: str = "",
        nbytes: float = 0.0,
        group: Sequence[int] = (),
    ) -> Iterator[None]:
        """Record what happens inside as one Event. Times are of the device: seconds of its stream.

        It counts as computing, whatever `op` is called, unless it has an axis, bytes or a group, or is called
        as a communication is ("all_reduce", "send"; see `Event`).
        """
        event = Event(rank(), stage, op, microbatch, 0.0, 0.0, axis, nbytes, tuple(group))
        with self._turn(event):
            opened = _Span(event, self._now())
            self._open.append(opened)
            try:
                yield
            finally:
                self._open.remove(opened)
            opened.end = self._now()
            self._add(opened)

    def _turn(self, event: Event) -> AbstractContextManager[object]:
        """Where ranks share a GPU: alone on it to compute, and off it to communicate."""
        if self._turns is None:
            return nullcontext()
        return self._turns.turn() if event.is_compute else self.paused()

    def communications(self, since: int) -> list[Event]:
        """What was communicated since there were `since` spans: operations, bytes, groups, and no times."""
        return [span.event for span in self._spans[since:] if len(span.event.group) > 1]

    def num_spans(self) -> int:
        """How many spans there are: `events(since=num_spans)` is what is recorded from here on."""
        return len(self._spans)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside is no part of the open spans: every one of them becomes two."""
        with self._split_open(), nullcontext() if self._turns is None else self._turns.released():
            yield

    @contextmanager
    def _split_open(self) -> Iterator[None]:
        end, (opened, self._open) = self._now(), (self._open, [])
        for span in opened:
            self._add(_Span(span.event, span.start, end))
        try:
            with nullcontext() if self._outer is None else self._outer._split_open():
                yield
        finally:
            start, self._open = self._now(), opened
            for span in opened:
                span.start = start

    def _add(self, span: _Span) -> None:
        self._spans.append(span)
        if self._outer is not None:
            self._outer._add(span)

    @contextmanager
    def separate_compute(self) -> Iterator[None]:
        """What happens inside is computing, but no part of the open spans: it becomes a span of compute."""
        with self.paused(), self.span("compute"):
            yield

    def begin(self, event: Event) -> Callable[[], None]:
        """Start a span that ends when the result is called, be it on another thread or stream."""
        start = self._now()
        return lambda: self._add(_Span(event, start, self._now()))

    def events(self, since: int = 0, until: int | None = None) -> list[Event]:
        """This rank's events, seconds from the common zero. Waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()
        spans = self._spans[since:until]
        return [replace(s.event, start=self._seconds(s.start), end=self._seconds(s.end)) for s in spans]

    def gather(self) -> Timeline:
        """The Timeline of all ranks; every rank must call it, and every rank gets it."""
        events = self.events()
        source = "measured" if self._turns is None else "measured by turns"
        if not dist.is_initialized():
            return Timeline(tuple(events), source)
        by_rank: list[list[Event]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(by_rank, events)
        return Timeline(tuple(itertools.chain.from_iterable(by_rank)), source)

    def _meet(self, group: dist.ProcessGroup | None = None) -> torch.cuda.Event | float:
        """The zero of the clock: the moment after a barrier."""
        if self._cuda:
            for _ in range(2 if dist.is_initialized() else 0):  # the first waits for all ranks
                dist.all_reduce(torch.zeros(1, device=device()), group=group)
            zero = self._now()  # on the device's clock, when it has left the all-reduce
            torch.cuda.synchronize()
            return zero
        if dist.is_initialized():
            dist.barrier(group)
        now = [time.perf_counter()]
        if inside_rank():  # one machine has one monotonic clock: take the same zero on all ranks
            dist.broadcast_object_list(now, group=group, group_src=0)
        return now[0]

    def _now(self) -> torch.cuda.Event | float:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, when: torch.cuda.Event | float | None) -> float:
        if isinstance(when, float):
            assert isinstance(self._zero, float)
            return when - self._zero
        assert isinstance(self._zero, torch.cuda.Event)
        assert when is not None, "the span is over"
        return float(self._zero.elapsed_time(when)) / 1e3


@contextmanager
def timeline() -> Iterator[Recorder]:
    """Record spans, and every communication of hpnb.comm, until the block ends. Starts with a barrier.

    The sends of a pipeline are in it where each rank has a GPU. Elsewhere threads carry them, so they have no
    start and end of their own and a stage that waits for one looks idle; `record.traffic` counts them.

    A timeline inside another one's block records for both.

    >>> def work():
    ...     with hpnb.record.timeline() as recorder:
    ...         with recorder.span("compute"):
    ...             torch.ones(8) + 1
    ...     return [event.op for event in recorder.gather().events]
    >>> hpnb.launch(work, ranks=2, device="cpu")[0]
    ['compute', 'compute']
    """
    with recording(Recorder()) as recorder:
        yield recorder


@contextmanager
def recording(recorder: Recorder) -> Iterator[Recorder]:
    """Until the block ends `recorder` records, and whoever recorded before gets the same spans."""
    global _active
    previous, _active = _active, recorder
    if previous is not recorder:
        recorder._outer = previous
    try:
        with nullcontext() if recorder._turns is None else recorder._turns.taking():
            yield recorder
    finally:
        _active = previous


class _Notes(Recorder):
    """Notes what is communicated, without times."""

    def __init__(self) -> None:
        super().__init__(aligned=False)
        self._turns = None

    def _now(self) -> float:
        return 0.0


@contextmanager
def capturing() -> Iterator[Callable[[], list[Event]]]:
    """Around the capture of a CUDA graph: no recorder sees what happens inside, because nothing is launched
    and timing events must not become nodes of the graph. Gives a function that returns what was communicated,
    without times."""
    global _active
    notes = _Notes()
    previous, _active = _active, notes
    try:
        yield lambda: notes.communications(0)
    finally:
        _active = previous


def active_recorder() -> Recorder | None:
    return _active


def communication(
    op: str, axis: str, nbytes: float, group: Sequence[int], leaving: float | None = None
) -> AbstractContextManager[None]:
    """A span for one communication, if a recorder is active; `nbytes` as for `ring_bytes`, unless the bytes
    that leave this rank are known as `leaving`, as in an uneven all-to-all."""
    if _active is None:
        return _nothing
    leaving = ring_bytes(op, nbytes, len(group)) if leaving is None else leaving
    return _active.span(op, axis=axis, nbytes=leaving, group=group)


def begin_communication(op: str, axis: str, nbytes: float, group: Sequence[int]) -> Callable[[], None] | None:
    """A span for a background communication, if a recorder is active: call the result when it has ended."""
    if _active is None:
        return None
    leaving = ring_bytes(op, nbytes, len(group))
    return _active.begin(Event(rank(), -1, op, -1, 0.0, 0.0, axis, leaving, tuple(group)))


def separate_compute() -> AbstractContextManager[None]:
    """Inside, this rank computes for a communication: it packs, launches, copies results back."""
    return _nothing if _active is None else _active.separate_compute()


def waiting() -> AbstractContextManager[None]:
    """Inside, this rank waits for a communication: that is no part of the compute span being recorded."""
    return _nothing if _active is None else _active.paused()

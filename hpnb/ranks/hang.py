"""When is a call that takes long a hang? When no rank computes any more.

No limit fits all programs, so a call is judged by what its ranks do. A rank makes progress while the
processes of its group use the CPU, or while it prints. There is one exception: NCCL and CUDA may spin while
they wait, so a rank that has stood at one place of a collective (`waits.py`) does not count, whatever it
uses. On a GPU that is also a line that asks for a result, such as `.item()`. Once no rank has made progress
for `limit` seconds, the call hangs: ranks wait in collectives that do not match, or for a rank that was
stopped or sleeps. A rank that waits while another one computes is no hang.

A rank that has returned answers no collective any more. So where some ranks have returned and all the others
stand in collectives without using the CPU, nobody can end the call, and it hangs after `GRACE` seconds. One
rank that does anything else, be it slow, keeps the call going.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpnb.ranks import last_seen, waits
from hpnb.ranks.process_stat import all_processes

if TYPE_CHECKING:
    from hpnb.ranks.processes import RankProcesses

_LEAST_SHARE = 0.05  # of a core, which a rank that computes uses; noting where it is costs 0.01
_LEAST_SECONDS = 0.03  # the kernel counts in steps of 0.01
_CHECKS = 12  # in a limit
_FIRST_CHECK = 0.2  # seconds after the begin of a call
GRACE = 10.0  # seconds in which ranks wait for ones that have returned
_LOOK_EVERY = 1.0  # meanwhile
_STALE = 2.0  # seconds after which a rank that writes no notes is stopped, and not in a collective
_LONGEST_PERIOD = 10.0

CpuSeconds = Mapping[int, float] | None


class HangWatch:
    """Watches one call; `hangs` is asked again and again, and looks every `period` seconds."""

    def __init__(
        self,
        processes: RankProcesses,
        limit: float,
        cpu_seconds: Callable[[Sequence[int]], CpuSeconds] | None = None,
    ) -> None:
        self.limit = limit
        self.period = min(limit / _CHECKS, _LONGEST_PERIOD)
        self._processes = processes
        self._cpu_seconds = cpu_seconds or cpu_seconds_of_groups
        self._checked = self._progress = time.monotonic()
        # What was used before the first check, read a little later: most calls have ended by then.
        self._cpu: CpuSeconds = None
        self._cpu_at_progress: CpuSeconds = None
        self._is_first = True
        self._printed = processes.bytes_printed
        self._looked = -math.inf
        self._stood: tuple[float, Mapping[int, float]] | None = None  # since when, and the CPU time then

    def next_check(self, some_returned: bool = False) -> float:
        """When to ask again, in time.monotonic(); never if the limit is infinite."""
        if self.limit == math.inf:
            return math.inf
        period = min(self.period, _FIRST_CHECK) if self._is_first else self.period
        return min(self._checked + period, self._looked + _LOOK_EVERY if some_returned else math.inf)

    def note_progress(self) -> None:
        self._progress = time.monotonic()

    def hangs(self, waiting: Sequence[int]) -> bool:
        """Whether none of `waiting` has made progress for `limit` seconds."""
        now = time.monotonic()
        if now < self.next_check():
            return False
        cpu, printed = self._cpu_seconds(self._processes.pids), self._processes.bytes_printed
        if self._is_first:
            self._is_first, self._checked, self._cpu, self._cpu_at_progress = False, now, cpu, cpu
            return False
        if printed != self._printed or any(self._computes(rank, cpu, now) for rank in waiting):
            self._progress, self._cpu_at_progress = now, cpu
        self._checked, self._cpu, self._printed = now, cpu, printed
        return now - self._progress >= self.limit

    def left_waiting(self, waiting: Sequence[int]) -> bool:
        """Whether all of `waiting` have stood in collectives for `GRACE` seconds, or the limit if that is
        less. Asked while other ranks have returned."""
        now = time.monotonic()
        if self.limit == math.inf or now < self._looked + _LOOK_EVERY:
            return False
        self._looked = now
        notes = [last_seen.read(self._processes.pages[rank]) for rank in waiting]
        stand = all(waits.stands_in_collective(note) and note.age < _STALE for note in notes)
        cpu = self._cpu_seconds(self._processes.pids) if stand else None
        if cpu is None:
            self._stood = None
            return False
        since, before = self._stood or (now, cpu)
        pids = [self._processes.pids[rank] for rank in waiting]
        least = max(_LEAST_SHARE * (now - since), _LEAST_SECONDS)
        if any(cpu.get(pid, 0.0) - before.get(pid, 0.0) >= least for pid in pids):
            since, before = now, cpu  # a large tensor still travels between them
        self._stood = since, before
        return now - since >= min(GRACE, self.limit)

    def _computes(self, rank: int, cpu: CpuSeconds, now: float) -> bool:
        """Whether a rank has used the CPU, since the last check or since it was last seen to."""
        note = last_seen.read(self._processes.pages[rank])
        if waits.waits_for_others(note) and note.unchanged > self.period:
            return False
        pid = self._processes.pids[rank]
        for before, since in ((self._cpu, self._checked), (self._cpu_at_progress, self._progress)):
            if cpu is None or before is None:  # the system does not say what a process uses
                return True
            if cpu.get(pid, 0.0) - before.get(pid, 0.0) >= max(_LEAST_SHARE * (now - since), _LEAST_SECONDS):
                return True
        return False


def cpu_seconds_of_groups(leaders: Sequence[int]) -> dict[int, float] | None:
    """CPU seconds that each of these process groups has used, workers of a DataLoader included."""
    if not Path("/proc/self/stat").exists():
        return None
    seconds = dict.fromkeys(leaders, 0.0)
    for process in all_processes():
        if process.group in seconds:
            seconds[process.group] += process.cpu_seconds
    return seconds

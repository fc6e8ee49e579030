"""When is a call that takes long a hang? When no rank computes any more.

No limit fits all programs, so a call is judged by what its ranks do. A rank makes progress while the
processes of its group use the CPU, or while it prints. There is one exception: NCCL and CUDA may spin while
they wait, so a rank that has stood at one place of a collective does not count, whatever it uses. Once no
rank has made progress for `limit` seconds, the call hangs: ranks wait in collectives that do not match, or
for a rank that was stopped or sleeps. A rank that waits while another one computes is no hang.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from hpnb.ranks import errors, last_seen

_LEAST_SHARE = 0.05  # of a core, which a rank that computes uses; noting where it is costs 0.01
_LEAST_SECONDS = 0.03  # the kernel counts in steps of 0.01
_CHECKS = 12  # in a limit
_LONGEST_PERIOD = 10.0
_GROUP, _TIMES = 2, slice(11, 15)  # fields of /proc/PID/stat behind the name: group; user, system, children's


CpuSeconds = Mapping[int, float] | None


class RunningRanks(Protocol):
    """What is asked of the processes of a pool."""

    pids: list[int]
    pages: list[int]
    bytes_printed: int


class HangWatch:
    """Watches one call; `hangs` is asked again and again, every `period` seconds."""

    def __init__(
        self,
        processes: RunningRanks,
        limit: float,
        cpu_seconds: Callable[[Sequence[int]], CpuSeconds] | None = None,
    ) -> None:
        self.limit = limit
        self.period = min(limit / _CHECKS, _LONGEST_PERIOD)
        self._processes = processes
        self._cpu_seconds = cpu_seconds or cpu_seconds_of_groups
        self._checked = self._progress = time.monotonic()
        self._cpu = self._cpu_seconds(processes.pids) if limit < math.inf else None
        self._cpu_at_progress = self._cpu
        self._printed = processes.bytes_printed

    def next_check(self) -> float:
        """When to ask again, in time.monotonic(); never if the limit is infinite."""
        return self._checked + self.period if self.limit < math.inf else math.inf

    def note_progress(self) -> None:
        """A rank has answered."""
        self._progress = time.monotonic()

    def hangs(self, waiting: Sequence[int]) -> bool:
        """Whether none of `waiting` has made progress for `limit` seconds."""
        now = time.monotonic()
        if now < self.next_check():
            return False
        cpu, printed = self._cpu_seconds(self._processes.pids), self._processes.bytes_printed
        if printed != self._printed or any(self._computes(rank, cpu, now) for rank in waiting):
            self._progress, self._cpu_at_progress = now, cpu
        self._checked, self._cpu, self._printed = now, cpu, printed
        return now - self._progress >= self.limit

    def _computes(self, rank: int, cpu: CpuSeconds, now: float) -> bool:
        """Whether a rank has used the CPU, since the last check or since it was last seen to."""
        note = last_seen.read(self._processes.pages[rank])
        if errors.waits_for_others(note) and note.unchanged > self.period:
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
    ticks, seconds = os.sysconf("SC_CLK_TCK"), dict.fromkeys(leaders, 0.0)
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = entry.read_text().rsplit(")", 1)[1].split()
            if int(fields[_GROUP]) in seconds:
                seconds[int(fields[_GROUP])] += sum(map(int, fields[_TIMES])) / ticks
    return seconds

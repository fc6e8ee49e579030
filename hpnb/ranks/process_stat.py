"""What /proc says of the processes of this machine. There is nothing to read outside of Linux."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Fields of /proc/PID/stat behind the name: parent; group; user, system and children's ticks; start.
_PARENT, _GROUP, _TIMES, _STARTED = 1, 2, slice(11, 15), 19


class ProcessStat(NamedTuple):
    """`cpu_seconds` are those of its ended children too; `started` is in seconds since the boot."""

    pid: int
    parent: int
    group: int
    cpu_seconds: float
    started: float


def all_processes() -> Iterator[ProcessStat]:
    """All that run now."""
    ticks = os.sysconf("SC_CLK_TCK")
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it may end meanwhile
            fields = entry.read_text().rsplit(")", 1)[1].split()
            parent, group, started = (int(fields[i]) for i in (_PARENT, _GROUP, _STARTED))
            used = sum(map(int, fields[_TIMES])) / ticks
            yield ProcessStat(int(entry.parent.name), parent, group, used, started / ticks)

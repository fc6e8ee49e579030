"""Which run a checkpoint belongs to, and whether that run is still alive.

A process holds a lock (flock) on each folder that it has written, on the folder itself and not on a file in
it. The lock stays with the folder when it is renamed, and the kernel drops it when the process ends, however
it ends. So a locked folder belongs to a living process, and nothing has to be cleared up after a dead one.

File systems without such locks show no folder as locked; then whoever comes last replaces what is there.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hpnb.ranks.current_rank import inside_rank

_MAX_LOCKS = 32  # locks on the newest folders; each takes a descriptor
_locks: dict[tuple[int, int], int] = {}  # {(device, inode) of a folder: descriptor}, the oldest first


def run_name() -> str:
    """The run that this process belongs to: its host, a process, and when that process started. All pools
    that one notebook or script starts are one run, and so are the ranks that one torchrun starts."""
    pid = os.getpid()
    if inside_rank():  # forked from a server, which the notebook or script has started
        pid = int(_process_field(os.getppid(), _PARENT) or os.getppid())
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        pid = os.getppid()
    return f"{socket.gethostname()}:{pid}:{_process_field(pid, _STARTED) or 0}"


def describe_run(name: str) -> str:
    """A `run_name` for a message."""
    host, _, rest = name.partition(":")
    pid = rest.partition(":")[0]
    return f"process {pid} on {host}" if pid else name


_PARENT, _STARTED = 1, 19  # fields of /proc/PID/stat behind the name


def _process_field(pid: int, number: int) -> str | None:
    """None on systems without /proc."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[number]
    return None


def lock_folder(folder: Path) -> None:
    """Lock `folder` until `unlock_folder`, or until this process ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    _locks[_identity(folder)] = descriptor
    while len(_locks) > _MAX_LOCKS:
        os.close(_locks.pop(next(iter(_locks))))


def unlock_folder(folder: Path) -> None:
    """Give the lock back, if this process holds it."""
    with suppress(OSError):
        if (descriptor := _locks.pop(_identity(folder), None)) is not None:
            os.close(descriptor)


def is_locked_elsewhere(folder: Path) -> bool:
    """Whether another living process holds `folder`."""
    try:
        if _identity(folder) in _locks:
            return False
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """One process at a time looks at what is in `folder` and changes it; the others wait."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino

"""One run at a time trains in a folder of checkpoints.

The first rank holds a lock (flock) on the file .lock in the folder, which the kernel drops when the process
ends, however it ends. All pools of one notebook or script are one run (run_lock.py). File systems without
such locks refuse nobody.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from hpnb.hybrid.checkpoint.agreement import files_group, on_first_rank
from hpnb.hybrid.checkpoint.atomic import check_writable
from hpnb.hybrid.checkpoint.run_lock import describe_run, run_name
from hpnb.hybrid.training.resuming import disk_errors_of

LOCK = ".lock"
_held: dict[Path, int] = {}  # {file: descriptor}, of this process


class FolderLock:
    """The lock of `folder`, which is made if need be."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder.absolute() / LOCK
        self._has_locked = False

    def acquire(self) -> None:
        """Make sure that files can be written there, and that no other run does. All ranks call it."""
        on_first_rank(self._acquire, files_group())

    def release(self) -> None:
        """Let others have it, if this lock was the one to acquire it."""
        if self._has_locked:
            self._has_locked = False
            with suppress(OSError):
                self._file.unlink()  # while it is locked: whoever waits for it opens another one
            os.close(_held.pop(self._file))

    def _acquire(self) -> None:
        with disk_errors_of(self.folder):
            check_writable(self.folder)
        if self._file in _held:
            return
        while True:
            descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.read(descriptor, 300).decode(errors="replace")
                os.close(descriptor)
                if holder == run_name():
                    return
                raise ValueError(
                    f"another run trains in {self.folder} at this moment ({describe_run(holder)}); "
                    "give each run a folder of its own, or end that one"
                ) from None
            except OSError:
                pass  # a file system without locks
            if self._is_there(descriptor):
                break
            os.close(descriptor)  # its owner has just removed it
        with disk_errors_of(self._file):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, run_name().encode())
        _held[self._file] = descriptor
        self._has_locked = True

    def _is_there(self, descriptor: int) -> bool:
        """Whether the file is still the one that was opened."""
        try:
            return os.path.samestat(os.fstat(descriptor), self._file.stat())
        except FileNotFoundError:
            return False

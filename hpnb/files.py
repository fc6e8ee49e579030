"""Files that other processes may read at any moment: replaced in one step, changed by one process at a time.

    replace_file(path, write)     write beside `path`, force to the disk, rename: the old contents or the new
    locked(path)                  one process at a time; the others wait
    writable_home()               the folder of everything kept between runs:
                                  $HPNB_HOME, else $XDG_CACHE_HOME/hpnb, else ~/.cache/hpnb

A process that is killed while it writes leaves the old file as it was.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Replace `path` by what `write` writes into the file that it is given."""
    draft = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        write(draft)
        sync(draft)
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text`, in UTF-8."""
    replace_file(path, lambda draft: draft.write_text(text, encoding="utf-8"))


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of the file `path`, which is made if need be; other processes wait. It does not nest.

    Windows and some network file systems have no such locks. There nobody waits, and the last writer wins.
    """
    with path.open("w") as file:
        with suppress(OSError, ImportError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def writable_home() -> Path | None:
    """The folder of everything kept between runs, made if need be; None where it cannot be written."""
    with suppress(OSError, RuntimeError):  # RuntimeError: this user has no home
        if named := os.environ.get("HPNB_HOME"):
            folder = Path(named).expanduser().absolute()  # a notebook may change its working folder
        else:
            cache = os.environ.get("XDG_CACHE_HOME", "")
            folder = (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "hpnb"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    return None

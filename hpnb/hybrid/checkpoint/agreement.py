"""Ranks write and read files together: a process group for it, and agreement on errors.

A rank that fails alone would leave the others waiting in the next collective. So what may fail on one rank,
such as reading a file, runs inside `attempt`, after which either all ranks continue or all raise. Ctrl-C is
no such error: it ends this rank at once, and others wait until the launch or a timeout ends them.

The group is gloo's and has no other messages, so a save in the background does not meet those of training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from hpnb.hybrid.checkpoint.background_save import finish_running
from hpnb.hybrid.checkpoint.manifest import compare, find, manifest, verify
from hpnb.hybrid.checkpoint.write_files import WrittenFiles
from hpnb.ranks.process_group import new_group

_groups: WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]] = WeakKeyDictionary()


def cpu_group(name: str) -> dist.ProcessGroup:
    """A group of all ranks for messages among CPUs, made at the first call, in which all ranks join."""
    world = dist.group.WORLD
    assert world is not None, "a Booster has made a mesh"
    groups = _groups.setdefault(world, {})
    if name not in groups:
        groups[name] = new_group(None, name, backend="gloo")
    return groups[name]


def files_group() -> dist.ProcessGroup:
    """That for messages about files, after a save in the background that has messages in it."""
    finish_running()
    return cpu_group("files")


def gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """The values of all ranks, in order of rank."""
    if group.size() == 1:
        return [value]
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group)
    return values


def agree(error: BaseException | None, group: dist.ProcessGroup) -> None:
    """Continue if no rank has an error; otherwise all raise, each its own error or else the first rank's."""
    kind = next((kind for kind in (ValueError, OSError) if isinstance(error, kind)), RuntimeError)
    text = str(error) if kind is not RuntimeError else f"{type(error).__name__}: {error}"
    errors = gather_objects(None if error is None else (kind.__name__, text), group)
    if error is not None:
        raise error
    kinds = {"ValueError": ValueError, "OSError": OSError}
    for rank, described in enumerate(errors):
        if described is not None:
            name, text = described
            raise kinds.get(name, RuntimeError)(f"rank {rank}: {text}")


def attempt(work: Callable[[], Any], group: dist.ProcessGroup) -> Any:
    """The result of `work` on this rank, if it succeeds on all ranks; otherwise all raise. `work` itself
    sends nothing: where it fails before a message, other ranks would wait for that message."""
    result, error = None, None
    try:
        result = work()
    except Exception as raised:
        error = raised
    agree(error, group)
    return result


# --- folders that all ranks write (atomic.py) ---------------------------------------------------------------


def read_back(folder: Path, written: WrittenFiles, group: dist.ProcessGroup) -> WrittenFiles:
    """The files that all ranks wrote into `folder`, after the file system gave them back as they were
    written. All ranks call it, each with its files. `atomic.commit` forces them to the disk only later, so
    what is read here may be in memory: it notices files that vanished, were cut short or replaced, and not a
    bad disk.
    """
    by_rank = gather_objects(written, group)
    files = {name: file_sum for files in by_rank for name, file_sum in files.items()}
    attempt(lambda: compare(folder, files, group.rank(), group.size(), "; the save is given up"), group)
    return files


def on_first_rank(work: Callable[[], Any], group: dist.ProcessGroup) -> None:
    """Run `work` on the first rank; all ranks raise if it fails."""
    attempt(lambda: work() if group.rank() == 0 else None, group)


@contextmanager
def cleared_up(clear: Callable[[], None], group: dist.ProcessGroup) -> Iterator[None]:
    """After an error, which all ranks have, the first rank runs `clear`."""
    try:
        yield
    except BaseException:
        if group.rank() == 0:
            clear()
        raise


def verify_folder(path: Path, group: dist.ProcessGroup) -> tuple[Path, dict[str, Any]]:
    """The checkpoint at `path`, or the newest in it, and its manifest, after each rank has compared a part of
    the files with their checksums.
    """
    folder: Path = attempt(lambda: find(path), group)
    attempt(lambda: verify(folder, group.rank(), group.size()), group)
    return folder, attempt(lambda: manifest(folder), group)

"""Ranks write and read files together: a process group for it, and agreement on errors.

A rank that fails alone would leave the others waiting in the next collective. So whatever may fail on one
rank runs inside `attempt`, after which either all ranks continue or all raise.

The group is gloo's and has no other messages, so a save in the background does not meet those of training.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from hpnb.hybrid.checkpoint import atomic
from hpnb.ranks.process_group import new_group

_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def files_group() -> dist.ProcessGroup:
    """The group of all ranks for messages about files. All ranks call it at the same point."""
    world = dist.group.WORLD
    assert world is not None, "a Booster has made a mesh"
    if world not in _groups:
        _groups[world] = new_group(None, "files", backend="gloo")
    return _groups[world]


def gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """The values of all ranks, in order of rank."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group)
    return values


def agree(error: BaseException | None, group: dist.ProcessGroup) -> None:
    """Continue if no rank has an error; otherwise all raise, each its own error or else the first rank's."""
    errors = gather_objects(None if error is None else (type(error).__name__, str(error)), group)
    if error is not None:
        raise error
    for rank, described in enumerate(errors):
        if described is not None:
            name, text = described
            raise (ValueError if name == "ValueError" else RuntimeError)(f"rank {rank}: {text}")


def attempt(work: Callable[[], Any], group: dist.ProcessGroup) -> Any:
    """The result of `work` on this rank, if it succeeds on all ranks. `work` itself sends nothing."""
    result, error = None, None
    try:
        result = work()
    except Exception as raised:
        error = raised
    agree(error, group)
    return result


# --- a folder that appears in one step (atomic.py), written by all ranks ------------------------------------


def begin_folder(path: Path, group: dist.ProcessGroup, replaces: Collection[str] | None = None) -> None:
    """Make the folder that ranks write into before it becomes `path`."""
    attempt(lambda: atomic.begin(path, replaces) if group.rank() == 0 else None, group)


def complete_folder(
    path: Path,
    facts: Mapping[str, Any],
    group: dist.ProcessGroup,
    keep: int | None = None,
    carries: Callable[[str], bool] | None = None,
) -> None:
    """Seal the folder, in which all files are written, and rename it to `path`.

    Args:
        facts: further entries of its manifest.
        keep: how many of the newest such folders stay.
        carries: which of the files that are at `path` stay.
    """
    part, rank, size = atomic.part_of(path), group.rank(), group.size()
    listing = attempt(lambda: atomic.listing(part) if rank == 0 else None, group)
    names = gather_objects(listing, group)[0]
    checksums = attempt(lambda: {name: atomic.checksum(part / name) for name in names[rank::size]}, group)
    by_rank = gather_objects(checksums, group)

    def seal() -> None:
        if rank == 0:
            atomic.seal(part, {name: one for of_rank in by_rank for name, one in of_rank.items()}, facts)
            if carries is not None:
                atomic.carry_over(path, carries)
            atomic.commit(path)
            if keep is not None:
                atomic.keep_newest(path, keep)

    attempt(seal, group)


def verify_folder(path: Path, group: dist.ProcessGroup) -> tuple[Path, dict[str, Any]]:
    """The checkpoint at `path`, or the newest in it, and its manifest, after each rank has compared a part of
    the files with their checksums.

    Raises:
        FileNotFoundError, ValueError: there is none, or its files are not as they were written.
    """
    folder: Path = attempt(lambda: atomic.find(path), group)
    attempt(lambda: atomic.verify(folder, group.rank(), group.size()), group)
    return folder, attempt(lambda: atomic.manifest(folder), group)

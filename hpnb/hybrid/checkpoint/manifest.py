"""The manifest of a checkpoint: every file with its size and checksum, and a checksum of itself.

    {"kind": "hpnb checkpoint", "version": 2,
     "run": "node3:4711:88213", "order": 12,               which run saved it, after which others
     "files": {"state/index.json": [812, 3735928559]},     bytes and CRC-32, as they were written
     "checksum": 305419896}

A folder is complete if it has one, because it is written last. Which of several checkpoints is the newest
follows from `order`, a number that is one more than any beside it, and not from a clock, which may step back.

Somebody else may have written it, so its entries are checked before anything is done with them: a name that
leads out of the folder would let a save replace or remove any file.
"""

from __future__ import annotations

import json
import warnings
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from hpnb.files import write_text
from hpnb.hybrid.checkpoint.write_files import FileSum, WrittenFiles

MANIFEST = "manifest.json"
KIND, VERSION = "hpnb checkpoint", 2
_BLOCK = 1 << 22  # bytes of a file that are read at once
PART, OLD = ".part", ".old"
_LONGEST_NAME = 4096  # bytes, of a path on Linux


# --- a manifest --------------------------------------------------------------------------------------------


def seal(folder: Path, files: WrittenFiles, facts: Mapping[str, Any]) -> None:
    """Write the manifest, which makes `folder` complete, of the files in it and further `facts`."""
    content = {"kind": KIND, "version": VERSION, **facts, "files": {n: list(files[n]) for n in sorted(files)}}
    write_text(folder / MANIFEST, json.dumps({**content, "checksum": _checksum(content)}, indent=1))


def manifest(folder: Path) -> dict[str, Any]:
    """What `seal` wrote, once all that can be wrong with it has been checked."""
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if content["kind"] != KIND:
            raise KeyError(content["kind"])
        version = content["version"]
        if version != VERSION and "checksum" not in content:
            damaged = False
        else:
            damaged = content.pop("checksum") != _checksum(content)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{folder / MANIFEST} is not that of a checkpoint{_another(folder)}") from error
    if damaged:
        raise ValueError(f"{folder / MANIFEST} is damaged: its checksum differs{_another(folder)}")
    if version != VERSION:
        raise ValueError(
            f"{folder} has version {version} of the format, and this hpnb reads {VERSION}; load it with the "
            "hpnb that wrote it"
        )
    if (problem := _find_problem(content)) is not None:
        raise ValueError(f"{folder / MANIFEST} {problem}{_another(folder)}")
    return dict(content)


def _find_problem(content: Mapping[str, Any]) -> str | None:
    """What is wrong with the entries of a manifest, in words."""
    files, stale, order = content.get("files"), content.get("stale", []), content.get("order", 0)
    if not isinstance(files, dict) or not isinstance(stale, list) or type(order) is not int:
        return "has no table of files, or no order"
    for name in (*files, *stale):
        if not is_inside(name):
            return f"names {str(name)[:80]!r}, which is not a file in its folder"
    for name, file_sum in files.items():
        if not isinstance(file_sum, list) or [type(number) for number in file_sum] != [int, int]:
            return f"says of {name} {str(file_sum)[:80]}, and not its bytes and checksum"
    return None


def is_inside(name: object) -> bool:
    """Whether `name` is a relative path that stays below the folder that it is relative to."""
    if not isinstance(name, str) or not name or "\0" in name or len(name) > _LONGEST_NAME:
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def _checksum(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def file_sum(file: Path) -> FileSum:
    """(bytes, CRC-32) of a file on the disk."""
    size = crc = 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return size, crc


def verify(folder: Path, rank: int = 0, ranks: int = 1) -> None:
    """Compare the files of `folder` with its manifest: the sizes of all, and the checksums of this rank's
    share of them.
    """
    compare(folder, manifest(folder)["files"], rank, ranks, _another(folder))


def compare(
    folder: Path, files: Mapping[str, Iterable[int]], rank: int, ranks: int, advice: str = ""
) -> None:
    """The same with the files that are expected; `advice` ends the error message."""
    for number, (name, (size, crc)) in enumerate(files.items()):
        file = folder / name
        if not file.is_file():
            raise ValueError(f"{folder} lacks {name}, which was written there{advice}")
        if (bytes_there := file.stat().st_size) != size:
            raise ValueError(f"{file} has {bytes_there} bytes, and {size} were written{advice}")
        if number % ranks == rank and file_sum(file)[1] != crc:
            raise ValueError(f"{file} has other contents than were written{advice}")


# --- which folders are complete ----------------------------------------------------------------------------


def part_of(path: Path) -> Path:
    """Where `path` is written before it is complete."""
    return path.with_name(path.name + PART)


def old_of(path: Path) -> Path:
    """Where the folder that was at `path` is for the time of two renames."""
    return path.with_name(path.name + OLD)


def final_name(folder: Path) -> str:
    """The name of the checkpoint whose contents are in `folder`, without .part or .old."""
    return folder.name.removesuffix(PART).removesuffix(OLD)


def standing(path: Path) -> Path:
    """Where the contents of `path` are: elsewhere if a save was killed once it had sealed them, before they
    got that name."""
    part, old = part_of(path), old_of(path)
    if path.exists():
        return path
    if is_complete(part):
        return part
    return old if old.exists() else path


def is_complete(folder: Path) -> bool:
    """Whether it has a manifest."""
    return (folder / MANIFEST).is_file()


def complete_in(folder: Path) -> list[Path]:
    """The complete folders in `folder`, which need not exist, by name."""
    if not folder.is_dir():
        return []
    names = {final_name(child) for child in folder.iterdir() if child.is_dir()}
    return [there for name in sorted(names) if is_complete(there := standing(folder / name))]


def warn_of_unsealed(folder: Path) -> None:
    """Warn of what was a checkpoint in `folder` until its manifest was removed, or not copied: it is skipped.
    A save that is killed leaves no such folder."""
    for child in sorted(folder.iterdir()) if folder.is_dir() else ():
        if child.name == final_name(child) and (child / "state").is_dir() and not is_complete(child):
            warnings.warn(f"{child} is skipped, because it has no {MANIFEST}", stacklevel=3)


def order_of(folder: Path) -> int | None:
    """The number by which checkpoints are ordered; None if the manifest cannot be read."""
    try:
        return int(manifest(folder)["order"])
    except (ValueError, KeyError, TypeError):
        return None


def newest(folder: Path) -> Path | None:
    """The newest complete checkpoint in `folder`; None if there is none. The newest is that with the highest
    `order`, because names are the user's. With a damaged manifest in one, nobody can say which it is."""
    warn_of_unsealed(folder)
    orders = {checkpoint: order_of(checkpoint) for checkpoint in complete_in(folder)}
    readable = {checkpoint: order for checkpoint, order in orders.items() if order is not None}
    for checkpoint in orders.keys() - readable.keys():
        try:
            manifest(checkpoint)
        except ValueError as error:
            raise ValueError(f"which checkpoint in {folder} is the newest cannot be said: {error}") from error
    return max(readable, key=lambda checkpoint: (readable[checkpoint], checkpoint.name), default=None)


def find(path: Path) -> Path:
    """`path` itself if it is complete, else the newest in it by `order`, as `newest` says. A Trainer goes by
    steps (`resuming.find`)."""
    there = standing(path)
    if is_complete(there):
        return there
    if (inside := newest(there)) is not None:
        return inside
    what = f"is no complete checkpoint, because it has no {MANIFEST}" if there.is_dir() else "is not there"
    unfinished = [part_of(path), *sorted(there.glob("*" + PART))]
    if (part := next((folder for folder in unfinished if folder.is_dir()), None)) is not None:
        what += f", and {part} is from a save that did not finish (booster.wait() waits for one)"
    beside = _newest_readable(path.parent)
    hint = f"{beside} is one" if beside is not None else "give a folder that booster.save has written"
    raise FileNotFoundError(f"{path} {what}; {hint}")


def _newest_readable(folder: Path, but: Path | None = None) -> Path | None:
    orders = {checkpoint: order_of(checkpoint) for checkpoint in complete_in(folder) if checkpoint != but}
    readable = [(order, checkpoint) for checkpoint, order in orders.items() if order is not None]
    return max(readable)[1] if readable else None


def _another(folder: Path) -> str:
    """The nearest thing that would work, as the end of a sentence."""
    beside = _newest_readable(folder.parent, folder)
    return "; load another checkpoint" if beside is None else f"; {beside} is another one"

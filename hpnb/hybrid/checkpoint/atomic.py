"""Folders that appear whole: a save that is killed, at any moment, leaves the one before.

    step-500.part      written first: file after file, each forced to the disk, and the manifest last
    step-500.old       what was at step-500 before, for the time of two renames
    step-500           the new one, by a rename, which a file system does wholly or not at all

    killed while it is written        step-500 is as before; what is half written has no manifest
    killed between the two renames    there is no step-500, but step-500.part with a manifest: that is read
    killed after them                 step-500 is the new one, and .old is cleared away by the next save

The manifest lists every file with its size and checksum, so what was cut short or changed later is found
before anything is loaded from it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from hpnb.files import sync, write_text

MANIFEST = "manifest.json"
KIND, VERSION = "hpnb checkpoint", 1
_BLOCK = 1 << 22  # bytes of a file that are read at once
_PART, _OLD = ".part", ".old"

Told = dict[str, tuple[int, int]]  # {file: (bytes, checksum)}


# --- writing -----------------------------------------------------------------------------------------------


def begin(path: Path, replaces: Collection[str] | None = None) -> Path:
    """An empty folder to write into, which `commit` makes `path`.

    Args:
        replaces: what may be in a folder that is there and has no manifest; None is anything.

    Raises:
        ValueError: there is a file in the way, or a folder with something else.
    """
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file, and a folder is to be written; give another path")
    _recover(path)
    if replaces is not None and path.is_dir() and not is_complete(path):
        others = sorted(child.name for child in path.iterdir() if child.name not in replaces)
        if others:
            raise ValueError(
                f"{path} is a folder with {others[0]} in it, and no checkpoint that a new one may replace; "
                f"give one of its own, such as {path / 'step-1'}"
            )
    part = part_of(path)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    return part


def part_of(path: Path) -> Path:
    """Where `path` is written before it is complete."""
    return path.with_name(path.name + _PART)


def commit(path: Path) -> None:
    """Give what `begin` began its name, once all of it is on the disk; what had it before goes."""
    part, old = part_of(path), path.with_name(path.name + _OLD)
    for folder, _, files in os.walk(part):
        for file in files:
            sync(Path(folder, file))
        sync(Path(folder))
    if path.exists():
        os.rename(path, old)
    os.rename(part, path)
    sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def seal(folder: Path, told: Mapping[str, tuple[int, int]], more: Mapping[str, Any]) -> None:
    """Write the manifest: `folder` is complete."""
    files = {name: list(told[name]) for name in sorted(told)}
    content = {"kind": KIND, "version": VERSION, "saved": time.time_ns(), **more, "files": files}
    write_text(folder / MANIFEST, json.dumps(content, indent=1))


def carry_over(path: Path, carries: Callable[[str], bool]) -> None:
    """Let what is being written have what it lacks and `path` has, if it `carries` that name."""
    if not path.is_dir():
        return
    part = part_of(path)
    for there in path.iterdir():
        here = part / there.name
        if here.exists() or not carries(there.name):
            continue
        if there.is_dir():
            shutil.copytree(there, here, symlinks=True, copy_function=_link)
        else:
            _link(there, here)


def remove(folder: Path) -> None:
    """It loses its name first: what is half gone must not look complete."""
    part = part_of(folder)
    shutil.rmtree(part, ignore_errors=True)
    os.rename(folder, part)
    shutil.rmtree(part, ignore_errors=True)


def keep_newest(path: Path, count: int) -> None:
    """Of the complete folders beside `path` whose names differ from its in a number at the end, leave so many
    of those saved last; and nothing of what was killed while it saved or removed such a folder."""
    stem = re.sub(r"\d+$", "", path.name)

    def alike(pattern: str, suffix: str) -> list[Path]:
        found = [f.with_name(f.name.removesuffix(suffix)) for f in path.parent.glob(pattern)]
        return [f for f in found if re.sub(r"\d+$", "", f.name) == stem]

    for folder in alike(f"*{_OLD}", _OLD):
        _recover(folder)
    for folder in alike(f"*{_PART}", _PART):
        shutil.rmtree(part_of(folder), ignore_errors=True)
    for folder in sorted(filter(is_complete, alike("*", "")), key=_saved)[:-count]:
        remove(folder)


def _link(source: Any, target: Any) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a file system without links
        shutil.copy2(source, target, follow_symlinks=False)


def _recover(path: Path) -> None:
    """Clear up after a save that was killed."""
    old = path.with_name(path.name + _OLD)
    if old.exists():
        if not path.exists():
            os.rename(standing(path), path)
        shutil.rmtree(old, ignore_errors=True)


# --- reading -----------------------------------------------------------------------------------------------


def standing(path: Path) -> Path:
    """Where the contents of `path` are: elsewhere if a save was killed between its two renames."""
    part, old = part_of(path), path.with_name(path.name + _OLD)
    if path.exists() or not old.exists():
        return path
    return part if is_complete(part) else old


def is_complete(folder: Path) -> bool:
    """Whether it has a manifest."""
    return (folder / MANIFEST).is_file()


def complete_in(folder: Path) -> list[Path]:
    """The complete folders in `folder`, which need not be there, by name."""
    if not folder.is_dir():
        return []
    names = {
        child.name.removesuffix(_PART).removesuffix(_OLD) for child in folder.iterdir() if child.is_dir()
    }
    return [found for name in sorted(names) if is_complete(found := standing(folder / name))]


def newest(folder: Path) -> Path | None:
    """The complete folder in `folder` that was saved last."""
    return max(complete_in(folder), key=_saved, default=None)


def find(path: Path) -> Path:
    """`path` itself if it is complete, else the newest in it.

    Raises:
        FileNotFoundError: neither.
    """
    here = standing(path)
    if is_complete(here):
        return here
    inside = newest(here)
    if inside is None:
        what = f"is no complete checkpoint, for it has no {MANIFEST}" if here.is_dir() else "is not there"
        beside = newest(path.parent)
        hint = f"{beside} is one" if beside is not None else "give a folder that booster.save has written"
        raise FileNotFoundError(f"{path} {what}; {hint}")
    return inside


def manifest(folder: Path) -> dict[str, Any]:
    """What `seal` wrote.

    Raises:
        ValueError: it is no manifest, or that of another version.
    """
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        known = found["kind"] == KIND and isinstance(found["files"], dict)
    except (ValueError, TypeError, KeyError):
        known = False
    if not known:
        raise ValueError(f"{folder / MANIFEST} is not that of a checkpoint{_instead(folder)}")
    if found["version"] != VERSION:
        raise ValueError(
            f"{folder} has version {found['version']} of the format, and this hpnb reads {VERSION}; load it "
            "with the hpnb that wrote it"
        )
    return dict(found)


def listing(folder: Path) -> list[str]:
    """The files below `folder` but its manifest, by their paths in it; the largest first."""
    files = [f for f in folder.rglob("*") if f.is_file() and f != folder / MANIFEST]
    return [f.relative_to(folder).as_posix() for f in sorted(files, key=lambda f: (-f.stat().st_size, f))]


def checksum(file: Path) -> tuple[int, int]:
    """(bytes, CRC-32) of a file."""
    size = crc = 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return size, crc


def verify(folder: Path, share: int = 0, shares: int = 1) -> None:
    """Compare the files of one of so many shares with the manifest; sizes of all of them.

    Raises:
        ValueError: a file is missing, was cut short, or has other contents.
    """
    files = manifest(folder)["files"]
    for number, (name, (size, crc)) in enumerate(files.items()):
        file = folder / name
        if not file.is_file():
            raise ValueError(f"{folder} lacks {name}, which its manifest lists{_instead(folder)}")
        there = file.stat().st_size
        if there != size:
            raise ValueError(f"{file} has {there} bytes, and {size} were written{_instead(folder)}")
        if number % shares == share and checksum(file)[1] != crc:
            raise ValueError(f"{file} has other contents than were written{_instead(folder)}")


def _saved(folder: Path) -> tuple[int, str]:
    """When; 0 if that cannot be read."""
    try:
        return int(manifest(folder)["saved"]), folder.name
    except (ValueError, KeyError):
        return 0, folder.name


def _instead(folder: Path) -> str:
    """The nearest thing that would work."""
    others = [f for f in complete_in(folder.parent) if f != folder and _saved(f)[0]]
    return f"; {max(others, key=_saved)} is another one" if others else "; load another checkpoint"

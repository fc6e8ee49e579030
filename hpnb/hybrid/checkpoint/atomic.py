"""Folders that appear in one step: a save that is killed, at any moment, leaves the one before.

    step-500.part      written first: file after file, each forced to the disk, and the manifest last
    step-500.old       what was at step-500 before, for the time of two renames
    step-500           the new one, by a rename, which a file system does completely or not at all

    killed while it is written        step-500 is as before; what is half written has no manifest
    killed before the last rename     without a step-500, step-500.part is read, because it has a manifest
    killed after it                   step-500 is the new one, and .old is cleared away by the next save

A model that is saved into a folder with other files in it replaces its own files there and no others:

    folder/.hpnb-save-model/    written first, manifest last; read in place of the folder until it is gone
    folder/model.safetensors    then linked over the old one, file by file

Another living run's folders (run_lock.py) are neither replaced nor removed.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpnb.files import sync
from hpnb.hybrid.checkpoint import run_lock
from hpnb.hybrid.checkpoint.manifest import (
    MANIFEST,
    OLD,
    PART,
    complete_in,
    is_complete,
    manifest,
    old_of,
    order_of,
    part_of,
    seal,
    standing,
)
from hpnb.hybrid.checkpoint.write_files import WrittenFiles

# --- a folder that is replaced -----------------------------------------------------------------------------


def begin(path: Path, replaces: Collection[str] | None = None) -> Path:
    """An empty folder to write into, which `commit` renames to `path`. If there is a folder `path` without a
    manifest, it may have only what `replaces` names; None allows anything."""
    _make_folder(path.parent)
    _refuse_file(path)
    with run_lock.exclusive(path.parent):
        _recover(path)
        if replaces is not None and path.is_dir() and not is_complete(path):
            others = sorted(child.name for child in path.iterdir() if child.name not in replaces)
            if others:
                raise ValueError(
                    f"{path} is a folder with {others[0]} in it, and no checkpoint that a new one may "
                    f"replace; give one of its own, such as {path / 'step-1'}"
                )
        _refuse_of_another_run(path)
        return _empty(part_of(path))


def commit(path: Path, files: WrittenFiles, facts: Mapping[str, Any], keep: int | None = None) -> None:
    """Seal what `begin` began, of these `files` and with these `facts` in the manifest, and give it its name;
    what had the name before goes. So many of the newest folders stay whose names differ in a number at the
    end, whichever run has saved them, and those of other living runs."""
    part, old = part_of(path), old_of(path)
    _sync_files(part, files)
    with run_lock.exclusive(path.parent):
        order = 1 + max((order_of(folder) or 0 for folder in complete_in(path.parent)), default=0)
        seal(part, files, {"run": run_lock.run_name(), "order": order, **facts})
        sync(part)
        if path.exists():
            os.rename(path, old)
        os.rename(part, path)
        sync(path.parent)
        delete(old)
        if keep is not None:
            _keep_newest(path, keep)


def _keep_newest(path: Path, count: int) -> None:
    """Of the complete folders beside `path` that are named like it, leave so many of the newest, and those of
    other living runs; and nothing of a save that was killed."""
    stem = _stem(path.name)
    if stem is None:  # a name without a number is no series
        return

    def named_like_it(suffix: str) -> list[Path]:
        folders = [f.with_name(f.name.removesuffix(suffix)) for f in path.parent.glob(f"*{suffix}")]
        return [folder for folder in folders if _stem(folder.name) == stem]

    for folder in [*named_like_it(OLD), *named_like_it(PART)]:
        _recover(folder)
    for folder in named_like_it(PART):
        if not run_lock.is_locked_elsewhere(part_of(folder)):
            delete(part_of(folder))
    orders = {folder: order_of(folder) for folder in named_like_it("") if is_complete(folder)}
    readable = [(order, folder) for folder, order in orders.items() if order is not None]
    for _, folder in sorted(readable)[:-count]:
        if not _is_of_another_run(folder):
            remove(folder)


def _stem(name: str) -> str | None:
    """The name without the number at its end; None if it has none."""
    match = re.fullmatch(r"(.*?)\d+", name)
    return None if match is None else match[1]


def remove(folder: Path) -> None:
    """It loses its name first, so that no reader finds it while it goes."""
    part = part_of(folder)
    delete(part)
    os.rename(folder, part)
    delete(part)


def _recover(path: Path) -> None:
    """Clear up after a save that was killed: what stands for `path` gets its name."""
    there = standing(path)
    if there != path:
        os.rename(there, path)
    delete(old_of(path))


# --- files that are replaced in a folder -------------------------------------------------------------------


def draft_in(path: Path, name: str) -> Path:
    """Where files that are to be put into `path` are written first."""
    return path / f".hpnb-save-{name}"


def begin_update(path: Path, name: str) -> Path:
    """An empty folder in `path` to write into; `commit_update` moves its files to `path`. One save of a
    `name` may be under way in a folder."""
    _make_folder(path)
    draft = draft_in(path, name)
    with run_lock.exclusive(path):
        if is_complete(draft) and not run_lock.is_locked_elsewhere(draft):
            _publish(path, draft)  # whoever saved it was killed while it did
        return _empty(draft)


def commit_update(
    path: Path, name: str, files: WrittenFiles, facts: Mapping[str, Any], is_replaced: Callable[[str], bool]
) -> None:
    """Put what was written in place of what was there: files for which `is_replaced` and that were not
    written again are removed. Without further `facts` for the manifest, `path` gets none."""
    draft = draft_in(path, name)
    _sync_files(draft, files)
    with run_lock.exclusive(path):
        present = [file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()]
        stale = [name for name in present if is_replaced(name) and name not in files]
        about = {"run": run_lock.run_name(), "order": 0, "stale": stale, "keeps_manifest": bool(facts)}
        seal(draft, files, {**about, **facts})
        sync(draft)
        _publish(path, draft)


def reading_folder(path: Path, name: str) -> Path:
    """Where to read what was saved into `path` under that name."""
    draft = draft_in(path, name)
    return draft if is_complete(draft) else path


def _publish(path: Path, draft: Path) -> None:
    """Link the files of a complete draft into `path`; doing it twice does no harm."""
    content = manifest(draft)
    names = [*content["files"], *([MANIFEST] if content["keeps_manifest"] else [])]
    for name in names:
        target = path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        link = target.with_name(f".{target.name}.part")
        with suppress(FileNotFoundError):
            link.unlink()
        try:
            os.link(draft / name, link)
        except OSError:  # a file system without links
            shutil.copy2(draft / name, link)
        os.replace(link, target)
    for name in content["stale"]:
        with suppress(FileNotFoundError):
            (path / name).unlink()
    for folder in {path, *((path / name).parent for name in names)}:
        sync(folder)
    delete(draft)


# --- both --------------------------------------------------------------------------------------------------


def check_writable(folder: Path) -> None:
    """Make sure, before hours of training, that files can be written below `folder`, which is made."""
    _make_folder(folder)
    probe = folder / f".{os.getpid()}.probe"
    try:
        probe.write_bytes(b"hpnb")
    finally:
        with suppress(OSError):
            probe.unlink()


def _make_folder(path: Path) -> None:
    for folder in (path, *path.parents):
        _refuse_file(folder)
    path.mkdir(parents=True, exist_ok=True)


def _refuse_file(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file, and a folder is to be written; give another path")


def _empty(folder: Path) -> Path:
    """`folder`, made anew and locked."""
    if run_lock.is_locked_elsewhere(folder):
        raise ValueError(
            f"another process is writing {folder} at this moment; give each run a folder of its own"
        )
    delete(folder)
    folder.mkdir()
    run_lock.lock_folder(folder)
    return folder


def delete(folder: Path) -> None:
    """The manifest goes first: killed in the middle, what is left must not look complete."""
    if folder.exists():
        run_lock.unlock_folder(folder)
        with suppress(OSError):
            (folder / MANIFEST).unlink()
        shutil.rmtree(folder, ignore_errors=True)


def _sync_files(folder: Path, files: WrittenFiles) -> None:
    for name in files:
        sync(folder / name)
    for below in {(folder / name).parent for name in files}:
        sync(below)


def _is_of_another_run(folder: Path) -> bool:
    try:
        run = manifest(folder).get("run")
    except ValueError:
        run = None
    return run != run_lock.run_name() and run_lock.is_locked_elsewhere(folder)


def _refuse_of_another_run(path: Path) -> None:
    if is_complete(path) and _is_of_another_run(path):
        name = run_lock.describe_run(str(manifest(path).get("run")))
        raise ValueError(
            f"{path} was saved by another run that is still alive ({name}); give this run a folder of its "
            "own, or end that one"
        )

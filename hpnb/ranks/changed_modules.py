"""Modules that ranks have imported and that were edited or reloaded since.

A rank imports a module once, as a notebook does. So the caller compares every such module with its file and
with its own import before each call: what the notebook has reloaded the ranks reload, and what was edited and
not reloaded is named in a sentence. Modules of installed packages and of hpnb do not take part.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hpnb.ranks.errors import is_hpnb_file

_INSTALLED = tuple({sysconfig.get_path(key) + os.sep for key in ("stdlib", "platlib", "purelib")})


@dataclass(frozen=True)
class SourceFile:
    """A module's file as it was when the module was read from it."""

    path: str
    mtime: float
    size: int

    @property
    def has_changed(self) -> bool:
        """Whether it is another one now. A file that is gone counts as the same."""
        try:
            now = os.stat(self.path)
        except OSError:
            return False
        return (now.st_mtime, now.st_size) != (self.mtime, self.size)


# --- on a rank ----------------------------------------------------------------------------------------------

_read: dict[str, SourceFile] = {}  # modules that were imported since the last reply
_old_objects: dict[Any, Any] = {}  # what the versions before have defined, by weak references


def note_imports() -> None:
    """From now on note every module that this process reads from a file of the user's."""
    path_stats = importlib.machinery.SourceFileLoader.path_stats

    def noted(loader: importlib.machinery.SourceFileLoader, path: str) -> Mapping[str, float]:
        stats = path_stats(loader, path)  # just before the file is read, also by importlib.reload
        if not path.startswith(_INSTALLED) and not is_hpnb_file(path):
            _read[loader.name] = SourceFile(path, stats["mtime"], int(stats["size"]))
        return stats

    importlib.machinery.SourceFileLoader.path_stats = noted  # type: ignore[method-assign, assignment]


def take_imports() -> dict[str, SourceFile]:
    """The modules that were imported since this was last called."""
    imported = {name: file for name, file in _read.items() if name in sys.modules}
    _read.clear()
    return imported


def reload_modules(names: Iterable[str]) -> None:
    """Reload those of `names` that this rank has imported. Functions and instances that it has of them get
    the new code, as %autoreload does it."""
    for name in names:
        if name in sys.modules:
            from IPython.extensions.autoreload import superreload

            try:
                superreload(sys.modules[name], old_objects=_old_objects)
            except BaseException:
                _read.pop(name, None)  # the old code stays, so the caller asks again
                raise


# --- the caller's side --------------------------------------------------------------------------------------


class ImportedModules:
    """The modules that one rank has imported: their files as they were, and the caller's import of each."""

    def __init__(self) -> None:
        self._modules: dict[str, tuple[SourceFile, object]] = {}

    def note(self, imported: Mapping[str, SourceFile]) -> None:
        for name, file in imported.items():
            self._modules[name] = file, _import_of(name)

    def reloaded(self) -> dict[str, bool]:
        """Modules that the caller has reloaded since, and whether the file has changed."""
        names = {}
        for name, (file, before) in self._modules.items():
            now, changed = _import_of(name), file.has_changed
            if now is not None and now is not before and (changed or before is not None):
                names[name] = changed
        return names

    def outdated(self) -> dict[str, SourceFile]:
        """Modules whose file has changed since, and that the caller has not reloaded."""
        reloaded = self.reloaded()
        return {
            name: file
            for name, (file, _) in self._modules.items()
            if name not in reloaded and file.has_changed
        }


def modules_to_reload(ranks: Iterable[ImportedModules]) -> tuple[str, ...]:
    """What one of the ranks has to reload: edited modules first, as the others may import from them."""
    names: dict[str, bool] = {}
    for rank in ranks:
        names |= rank.reloaded()
    return tuple(sorted(names, key=lambda name: not names[name]))


def outdated_sentences(ranks: Iterable[ImportedModules], warned_of: set[tuple[str, float]]) -> Iterator[str]:
    """That ranks run the old code of a module, once after every edit; those are added to `warned_of`."""
    outdated: dict[str, SourceFile] = {}
    for rank in ranks:
        outdated |= rank.outdated()
    for name, file in outdated.items():
        edit = name, os.path.getmtime(file.path)
        if edit not in warned_of:
            warned_of.add(edit)
            remedy = f"importlib.reload({name})" if name in sys.modules else f"import {name}"
            yield (
                f"{os.path.basename(file.path)} has changed since the ranks imported {name}, and they still "
                f"run the old code; use {remedy} outside the ranks, and they reload it too"
            )


def _import_of(name: str) -> object:
    """What is another object after every import or reload of a module: its spec."""
    return getattr(sys.modules.get(name), "__spec__", None)

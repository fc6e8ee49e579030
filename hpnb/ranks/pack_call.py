"""One call as one pickle: the function, its arguments, and the globals that the ranks do not have yet.

It is a single pickle so that objects that belong together stay together: if a model is an argument and its
optimizer a global, the optimizer on the rank still has that model's parameters.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from hpnb.ranks import errors, serialize_function
from hpnb.ranks.caller_globals import KnownGlobals, Name, Namespaces, TableEntries, namespaces_by_value
from hpnb.ranks.errors import RankError
from hpnb.ranks.worker import Call

_LARGE = 1 << 20  # a captured value over 1 MB is worth a warning


@dataclass(frozen=True)
class SentGlobals:
    """What ranks have in addition once a call has arrived: globals with their values, numbers of modules and
    parameters, and entries of shared tables."""

    names: Mapping[Name, Any] = field(default_factory=dict)
    objects: frozenset[int] = frozenset()
    entries: TableEntries = field(default_factory=dict)


def pack_call(
    known: Sequence[KnownGlobals], namespace: dict[str, Any], names: set[str], content: dict[str, Any]
) -> tuple[Call, SentGlobals]:
    """Pickle a call; also returns which globals are sent with it.

    Args:
        known: what every rank has of the caller's globals.
        namespace: the caller's.
        names: globals that the function reads from it.
        content: {"fn", "args", "kwargs"} or {"cell", "filename"}.

    Raises:
        RankError: something does not pickle; says what.
        ValueError: the working directory is gone.
    """
    try:
        cwd = os.getcwd()
    except FileNotFoundError:
        raise ValueError("the current directory has been deleted; os.chdir to one that exists") from None
    namespaces = namespaces_by_value(namespace)
    by_value = {id(sys.modules["__main__"].__dict__): "__main__"}  # which another namespace may stand for
    by_value |= {id(values): module for module, values in namespaces.items()}
    caller = by_value[id(namespace)]
    named = {(caller, name) for name in names}
    shared = frozenset.intersection(*(frozenset(rank.objects) for rank in known))
    missing_entries: TableEntries = {}
    for rank in known:
        missing_entries |= rank.missing_entries()
    with _classes_by_value(namespace):
        entries = list(_dump_entries(missing_entries, by_value))
        for rank in known:
            for of_entry, _ in entries:
                rank.mark_inside(of_entry.names)
        again: set[Name] = set()
        for rank in known:
            again |= rank.reassigned(namespaces)
        try:
            missing, pickler, body = _pickle(known, namespaces, named | again, content, by_value, shared)
        except RankError:
            if not (lost := _unpicklable(again - named, namespaces, by_value)):
                raise
            names_of_lost = ", ".join(sorted(name for _, name in lost))
            warnings.warn(
                f"the new value of {names_of_lost} cannot be pickled, so the ranks keep the one before",
                stacklevel=5,
            )
            named |= again - lost
            missing, pickler, body = _pickle(known, namespaces, named, content, by_value, shared)
        if len(body) > _LARGE:
            values = {name: value for (_, name), value in missing.items()}
            _warn_of_large({**values, **_closure_values(content.get("fn"))}, by_value, len(known))
    sources, modules = dict(pickler.sources), set(pickler.modules)
    for of_entry, _ in entries:
        sources |= of_entry.sources
        modules |= of_entry.modules
    if "cell" in content:
        sources[content["filename"]] = content["cell"]
    path = tuple(map(str, sys.path))
    bodies = tuple(pickled for _, pickled in entries)
    call = Call(body, sources, tuple(sorted(modules)), cwd, path, dict(os.environ), entries=bodies)
    return call, SentGlobals(missing, frozenset(pickler.numbered), missing_entries)


def _pickle(
    known: Sequence[KnownGlobals],
    namespaces: Namespaces,
    names: set[Name],
    content: dict[str, Any],
    by_value: Mapping[int, str],
    shared: frozenset[int],
) -> tuple[dict[Name, Any], serialize_function.Pickler, bytes]:
    """The call with those of `names`, and of the globals that functions inside it read, that a rank lacks."""
    names = set(names)
    while True:
        missing = _missing_globals(known, names, namespaces)
        everything = {"names": missing, "end": serialize_function.EndOfNames(), **content}
        pickler, body = _dump(everything, by_value, shared)
        # Pickling shows which globals the functions inside arguments read.
        if not _missing_globals(known, names | pickler.names, namespaces).keys() - missing.keys():
            return missing, pickler, body
        for rank in known:
            rank.mark_inside(pickler.names - names)
        names |= pickler.names


def _missing_globals(
    known: Sequence[KnownGlobals], names: set[Name], namespaces: Namespaces
) -> dict[Name, Any]:
    missing: dict[Name, Any] = {}
    for rank in known:
        missing |= rank.missing(names, namespaces)
    return missing


def _unpicklable(names: set[Name], namespaces: Namespaces, by_value: Mapping[int, str]) -> set[Name]:
    unpicklable = set()
    for module, name in names:
        try:
            serialize_function.dumps(namespaces[module][name], by_value)
        except Exception:
            unpicklable.add((module, name))
    return unpicklable


def _dump(
    content: dict[str, Any], by_value: Mapping[int, str], shared: frozenset[int]
) -> tuple[serialize_function.Pickler, bytes]:
    try:
        return serialize_function.pickled(content, by_value, shared)
    except Exception as error:
        frames = [f for f in traceback.extract_stack() if not errors.is_hpnb_file(f.filename)]
        of_cell = "cell" in content  # whose caller is IPython
        where = "in the cell that uses it" if of_cell else "inside the function that runs there"
        stack = "" if of_cell else "".join(traceback.StackSummary.from_list(frames[-1:]).format())
        raise RankError(
            f"{_unpicklable_part(content, by_value)} cannot be pickled, so it cannot be sent to rank 0 or "
            f"any other ({type(error).__name__}: {error}); make it {where}",
            rank=0,
            traceback=errors.readable(stack),
            error=type(error).__name__,
        ) from None


def _dump_entries(
    entries: TableEntries, by_value: Mapping[int, str]
) -> Iterator[tuple[serialize_function.Pickler, bytes]]:
    """Every entry as a pickle of its own; without those that do not pickle, because a call that does not need
    them must not fail for them."""
    for where, value in entries.items():
        with contextlib.suppress(Exception):
            yield serialize_function.pickled((serialize_function.EndOfNames(), *where, value), by_value)


def _unpicklable_part(content: dict[str, Any], by_value: Mapping[int, str]) -> str:
    """Which part of a call does not pickle, in words."""
    fn = content.get("fn")
    parts: list[tuple[str, Any]] = [(f"argument {i}", a) for i, a in enumerate(content.get("args", ()))]
    parts += [(f"argument {name}", a) for name, a in content.get("kwargs", {}).items()]
    parts += [(f"the global {name}", value) for (_, name), value in content["names"].items()]
    parts += [(f"the captured variable {name}", value) for name, value in _closure_values(fn).items()]
    for what, value in parts:
        try:
            serialize_function.dumps(value, by_value)
        except Exception:
            return f"{what} (a {type(value).__name__})"
    return f"the function {getattr(fn, '__name__', fn)!r}"


def _closure_values(fn: Any) -> dict[str, Any]:
    values = {}
    for name, cell in zip(
        getattr(getattr(fn, "__code__", None), "co_freevars", ()),
        getattr(fn, "__closure__", None) or (),
        strict=False,
    ):
        with contextlib.suppress(ValueError):
            values[name] = cell.cell_contents
    return values


def _warn_of_large(values: dict[str, Any], by_value: Mapping[int, str], ranks: int) -> None:
    for name, value in values.items():
        size = len(serialize_function.dumps(value, by_value))
        if size > _LARGE:
            warnings.warn(
                f"{name!r} ({size / 1e6:.1f} MB) is captured and copied to all {ranks} ranks; "
                "make it inside the function, or pass it as an argument to say that you mean it",
                stacklevel=6,
            )


@contextlib.contextmanager
def _classes_by_value(namespace: dict[str, Any]) -> Iterator[None]:
    """Inside, classes of the caller's module are pickled by value, as its functions are."""
    module = sys.modules.get(namespace.get("__name__", ""))
    if module is None or module.__name__ == "__main__" or module.__dict__ is not namespace:
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)

"""One call as one pickle: the function, its arguments, and the names that the ranks lack.

All of it is a single pickle, so a model and the optimizer that holds its parameters, one an argument and
the other a global, are still one thing on the rank.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle

from hpnb.ranks import errors, serialize_function
from hpnb.ranks.caller_globals import Names
from hpnb.ranks.errors import RankError
from hpnb.ranks.worker import Call

_LARGE = 1 << 20  # a captured value over 1 MB is worth a warning


@dataclass(frozen=True)
class Sent:
    """What ranks know once a call has arrived: names, and numbers of modules and parameters."""

    names: frozenset[str] = frozenset()
    objects: frozenset[int] = frozenset()


def pack(
    known: Sequence[Names], space: dict[str, Any], names: set[str], content: dict[str, Any]
) -> tuple[Call, Sent]:
    """Pickle a call for ranks that know `known`, one a rank; also returns what goes with it.

    Args:
        known: what each rank has of the caller's names.
        space: the caller's namespace.
        names: globals that the function reads.
        content: {"fn", "args", "kwargs"} or {"cell", "filename"}.

    Raises:
        RankError: something does not pickle; says what.
        ValueError: the working directory is gone.
    """
    try:
        cwd = os.getcwd()
    except FileNotFoundError:
        raise ValueError("the current directory has been deleted; os.chdir to one that exists") from None
    spaces = frozenset({id(space), id(sys.modules["__main__"].__dict__)})
    names = set(names)
    shared = frozenset.intersection(*(frozenset(rank.objects) for rank in known))
    with _by_value(space):
        while True:
            wanted = _lacking(known, names, space)
            everything = {"names": wanted, "end": serialize_function.EndOfNames(), **content}
            pickler, body = _dump(everything, spaces, shared)
            # Functions that sit inside arguments show what they read only now.
            if not _lacking(known, names | pickler.names, space).keys() - wanted.keys():
                break
            for rank in known:
                rank.mark_inside(pickler.names - names)
            names |= pickler.names
        if len(body) > _LARGE:
            _warn_of_large({**wanted, **_closure(content.get("fn"))}, spaces, len(known))
    sources, modules = dict(pickler.sources), tuple(sorted(pickler.modules))
    if "cell" in content:
        sources[content["filename"]] = content["cell"]
    call = Call(body, sources, modules, cwd, tuple(map(str, sys.path)), dict(os.environ))
    return call, Sent(frozenset(wanted), frozenset(pickler.numbered))


def _lacking(known: Sequence[Names], names: set[str], space: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for rank in known:
        found |= rank.to_send(names, space)
    return found


def _dump(
    content: dict[str, Any], spaces: frozenset[int], shared: frozenset[int]
) -> tuple[serialize_function.Pickler, bytes]:
    file = io.BytesIO()
    pickler = serialize_function.Pickler(file, spaces, shared)
    try:
        pickler.dump(content)
    except Exception as error:
        here = [f for f in traceback.extract_stack() if not errors.is_own(f.filename)]
        raise RankError(
            f"{_culprit(content, spaces)} cannot be pickled, so it cannot be sent to rank 0 or any other "
            f"({type(error).__name__}: {error}); make it inside the function that runs there",
            rank=0,
            traceback=errors.readable("".join(traceback.StackSummary.from_list(here[-1:]).format())),
            error=type(error).__name__,
        ) from None
    return pickler, file.getvalue()


def _culprit(content: dict[str, Any], spaces: frozenset[int]) -> str:
    """Which part of a call does not pickle."""
    fn = content.get("fn")
    parts: list[tuple[str, Any]] = [(f"argument {i}", a) for i, a in enumerate(content.get("args", ()))]
    parts += [(f"argument {name}", a) for name, a in content.get("kwargs", {}).items()]
    parts += [(f"the global {name}", value) for name, value in content["names"].items()]
    parts += [(f"the captured variable {name}", value) for name, value in _closure(fn).items()]
    for what, value in parts:
        try:
            serialize_function.dumps(value, spaces)
        except Exception:
            return f"{what} (a {type(value).__name__})"
    return f"the function {getattr(fn, '__name__', fn)!r}"


def _closure(fn: Any) -> dict[str, Any]:
    found = {}
    for name, cell in zip(
        getattr(getattr(fn, "__code__", None), "co_freevars", ()),
        getattr(fn, "__closure__", None) or (),
        strict=False,
    ):
        with contextlib.suppress(ValueError):
            found[name] = cell.cell_contents
    return found


def _warn_of_large(values: dict[str, Any], spaces: frozenset[int], ranks: int) -> None:
    for name, value in values.items():
        size = len(serialize_function.dumps(value, spaces))
        if size > _LARGE:
            warnings.warn(
                f"{name!r} ({size / 1e6:.1f} MB) is captured and copied to each of {ranks} ranks; "
                "make it inside the function, or pass it as an argument if that is meant",
                stacklevel=6,
            )


@contextlib.contextmanager
def _by_value(space: dict[str, Any]) -> Iterator[None]:
    """Classes of the caller's module travel by value too, as its functions do."""
    module = sys.modules.get(space.get("__name__", ""))
    if module is None or module.__name__ == "__main__" or module.__dict__ is not space:
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)

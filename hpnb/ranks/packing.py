"""One call as one pickle: the function, its arguments, and the names that the ranks lack.

All of it is a single pickle, so a model and the optimizer that holds its parameters, one an argument and
the other a global, are still one thing on the rank.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import cloudpickle

from hpnb.ranks import travel
from hpnb.ranks.errors import RankError
from hpnb.ranks.worker import Call

_LARGE = 1 << 20  # a captured value over 1 MB is worth a warning


def pack(
    known: Sequence[travel.Names], space: dict[str, Any], names: set[str], content: dict[str, Any]
) -> Call:
    """Pickle a call for ranks that know `known`, one a rank, and take note of what they know from now on.

    Args:
        known: what each rank has of the caller's names.
        space: the caller's namespace.
        names: globals that the function reads.
        content: {"fn", "args", "kwargs"} or {"cell", "filename"}.

    Raises:
        RankError: something does not pickle; says what.
    """
    spaces = frozenset({id(space), id(sys.modules["__main__"].__dict__)})
    names = set(names)
    with _by_value(space):
        while True:
            wanted = _lacking(known, names, space)
            pickler, body = _dump({"names": wanted, **content}, spaces)
            # Functions that sit inside arguments show what they read only now.
            if not _lacking(known, names | pickler.names, space).keys() - wanted.keys():
                break
            for rank in known:
                rank.mark_inside(pickler.names - names)
            names |= pickler.names
        if len(body) > _LARGE:
            _warn_of_large({**wanted, **_closure(content.get("fn"))}, spaces, len(known))
    for rank in known:
        rank.mark(wanted, space)
    sources = dict(pickler.sources)
    if "cell" in content:
        sources[content["filename"]] = content["cell"]
    return Call(body, sources, os.getcwd(), tuple(sys.path), dict(os.environ))


def _lacking(known: Sequence[travel.Names], names: set[str], space: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for rank in known:
        found |= rank.to_send(names, space)
    return found


def _dump(content: dict[str, Any], spaces: frozenset[int]) -> tuple[travel.Pickler, bytes]:
    file = io.BytesIO()
    pickler = travel.Pickler(file, spaces)
    try:
        pickler.dump(content)
    except Exception as error:
        culprit = _culprit(content, spaces)
        raise RankError(
            f"{culprit} cannot be pickled, so it cannot be sent to rank 0 or any other "
            f"({type(error).__name__}: {error}); make it inside the function that runs there",
            rank=0,
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
            travel.dumps(value, spaces)
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
        size = len(travel.dumps(value, spaces))
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

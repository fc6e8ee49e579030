"""Which of the caller's names a call takes along.

The globals that a function reads are found in its bytecode, and in that of the functions it calls. A name
is sent when the rank lacks it, or when the caller has bound it anew since: `x = 2` is sent again,
`x.append(2)` is not, and neither is a name that is bound to the very object it was bound to before.
"""

from __future__ import annotations

import dis
import os
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_GLOBAL_OPS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "DELETE_GLOBAL", "DELETE_NAME"})
_ABSENT = object()
_OWN_TO_A_MODULE = frozenset({"__name__", "__doc__", "__package__", "__loader__", "__spec__", "__builtins__",
                              "__builtin__", "__dict__"})  # fmt: skip


def global_names(code: types.CodeType) -> set[str]:
    """Names that `code`, or code nested in it, reads from its globals before it binds them itself."""
    found: set[str] = set()
    bound: set[str] = set()
    for step in dis.get_instructions(code):
        if step.opname == "STORE_NAME" and step.argval not in found:
            bound.add(step.argval)  # a cell, or a class body
        elif step.opname in _GLOBAL_OPS and step.argval not in bound:
            found.add(step.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= global_names(constant)
    return found


def caller_space(frame_globals: dict[str, Any], fn: object = None) -> dict[str, Any]:
    """The namespace whose functions travel by value: __main__, or the module that calls.

    Where __main__'s function is launched by a module of helpers, that is __main__. A module that is
    installed or part of a package, hpnb among them, is imported by the ranks and travels by reference.
    """
    main = sys.modules["__main__"].__dict__
    if frame_globals is main or getattr(fn, "__globals__", None) is main:
        return main
    if frame_globals.get("__package__"):
        return main
    file = frame_globals.get("__file__")
    installed = tuple(sysconfig.get_path(key) for key in ("stdlib", "platlib", "purelib"))
    return main if file and os.path.abspath(file).startswith(installed) else frame_globals


class Names:
    """What the ranks of a pool know of the caller's names, so that only what changed is sent."""

    def __init__(self) -> None:
        self._sent: dict[str, Callable[[], object]] = {}  # name -> the object it was bound to
        self._inside: set[str] = set()  # names read by functions that sit inside other objects
        self.objects: set[int] = set()  # numbers of modules and parameters that came with names

    def to_send(self, names: Iterable[str], space: dict[str, Any]) -> dict[str, Any]:
        """Of `names`, and of what functions among their values read in turn, those the ranks lack."""
        wanted: dict[str, Any] = {}
        for name in _reachable({*names, *self._inside}, space):
            sent = self._sent.get(name)
            if sent is None or sent() is not space[name]:
                wanted[name] = space[name]
        return wanted

    def mark(self, names: Iterable[str], space: dict[str, Any]) -> None:
        """From now on the ranks have `names` as the caller has them bound at present."""
        for name in names:
            self._sent[name] = _reference(space.get(name, _ABSENT))

    def mark_inside(self, names: Iterable[str]) -> None:
        self._inside.update(names)


def _reachable(names: Iterable[str], space: dict[str, Any]) -> Iterator[str]:
    seen: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        if name in seen or name not in space or name in _OWN_TO_A_MODULE:
            continue
        seen.add(name)
        yield name
        for f in _functions_of(space[name]):
            if f.__globals__ is space:
                todo.extend(global_names(f.__code__))


def _functions_of(value: Any) -> Iterator[types.FunctionType]:
    if isinstance(value, types.FunctionType):
        yield value
        if isinstance(wrapped := getattr(value, "__wrapped__", None), types.FunctionType):
            yield wrapped
    elif isinstance(value, type):
        for member in vars(value).values():
            inner = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
            if isinstance(inner, types.FunctionType):
                yield inner


def _reference(value: object) -> Callable[[], object]:
    # Held weakly where Python allows it: a model that the caller lets go must not live on in here.
    try:
        weak = weakref.ref(value)
    except TypeError:
        return lambda: value
    return lambda: found if (found := weak()) is not None else _ABSENT

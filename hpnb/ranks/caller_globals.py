"""Which of the caller's globals are sent with a call.

The globals that a function reads stand in its bytecode, and in that of the functions it calls. A global is
sent if the rank does not have it, or if the caller has reassigned it since: `x = 2` is sent again,
`x.append(2)` is not, and neither is a name that is reassigned to the same object. A global that was sent once
is sent again after that even if the call does not name it, because a function on the rank may read it. The
same holds for an entry that the caller has put into a shared table of a module, such as a model that it has
registered.
"""

from __future__ import annotations

import contextlib
import dis
import os
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

_GLOBAL_OPS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "DELETE_GLOBAL", "DELETE_NAME"})
_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})  # argval: the offset that they jump to
_NEVER_FALL_THROUGH = frozenset({"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "RERAISE",
                                 "RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS"})  # fmt: skip
_ABSENT = object()
TableEntries = dict[tuple[str, str, Any], Any]  # {(module, name of a dictionary in it, key): value}
Name = tuple[str, str]  # (module, a global of it)
Namespaces = Mapping[str, dict[str, Any]]  # {module: its globals}
_OF_IPYTHON = frozenset({"exit", "quit", "get_ipython"})  # not sent: ranks have their own, which say why not
TORCH_DYNAMO = "torch._dynamo"
# Names whose use makes an optimizer of PyTorch.
_OPTIMIZES = frozenset({"optim", "Adam", "AdamW", "SGD", "HybridAdam", "ZeroOptimizer", "Booster", "Trainer"})
MODULE_ATTRIBUTES = frozenset({"__name__", "__doc__", "__package__", "__loader__", "__spec__",
                               "__builtins__", "__builtin__", "__dict__"})  # fmt: skip


def global_names(code: types.CodeType) -> set[str]:
    """Names that `code`, or code nested in it, may read from its globals before it has bound them itself.

    What only one branch of an `if` binds may be read after it. Loops are taken to run at least once, and
    handlers to run after all that stands before them.
    """
    read: set[str] = set()
    bound: frozenset[str] = frozenset()  # on every way to an instruction
    arrivals: dict[int, frozenset[str]] = {}  # offset: what is bound at all jumps to it
    falls_through = True
    for instruction in dis.get_instructions(code):
        arriving = arrivals.pop(instruction.offset, bound)
        bound = bound & arriving if falls_through else arriving
        name = instruction.argval
        if instruction.opname == "STORE_NAME":  # of a cell, or a class body
            bound |= {name}
        elif instruction.opname in _GLOBAL_OPS:
            read |= {name} - bound
        elif instruction.opcode in _JUMPS and instruction.opname != "FOR_ITER":
            arrivals[name] = arrivals.get(name, bound) & bound
        falls_through = instruction.opname not in _NEVER_FALL_THROUGH
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            read |= global_names(constant)
    return read


def modules_used(fn: object) -> set[str]:
    """Modules that `fn`, or a function that it calls by a global name, will import when it runs on a rank.

    The server imports them once, where every rank would import them again: a first optimizer imports
    torch._dynamo, which takes seconds, and names of hpnb are read when they are first used.
    """
    fn = getattr(fn, "__func__", fn)
    if not isinstance(fn, types.FunctionType):
        return set()
    namespace = fn.__globals__
    modules: set[str] = set()
    functions = [fn, *_closure_functions(fn)]
    names = {("", name) for name in global_names(fn.__code__)}
    for _, name in _reachable(names, {"": namespace}):
        functions += _functions_of(namespace[name])
    for code in _codes(f.__code__ for f in functions):
        if _OPTIMIZES & set(code.co_names):
            modules.add(TORCH_DYNAMO)
        previous: object = None
        for step in dis.get_instructions(code):
            if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and previous is sys.modules.get("hpnb"):
                modules.add(sys.modules["hpnb"]._MODULE_OF.get(step.argval, f"hpnb.{step.argval}"))
            previous = namespace.get(step.argval) if step.opname in _GLOBAL_OPS else None
    return modules


def _closure_functions(fn: types.FunctionType) -> Iterator[types.FunctionType]:
    for cell in fn.__closure__ or ():
        with contextlib.suppress(ValueError):
            yield from _functions_of(cell.cell_contents)


def _codes(codes: Iterable[types.CodeType]) -> Iterator[types.CodeType]:
    for code in codes:
        yield code
        yield from _codes(c for c in code.co_consts if isinstance(c, types.CodeType))


def caller_namespace(frame_globals: dict[str, Any], fn: object = None) -> dict[str, Any]:
    """The namespace whose functions are pickled by value: __main__, or the module that calls.

    If a module of helpers launches a function of __main__, that is __main__. A module that is installed or
    part of a package, such as hpnb, is imported by the ranks and pickled by reference.
    """
    main = sys.modules["__main__"].__dict__
    if frame_globals is main or getattr(fn, "__globals__", None) is main:
        return main
    if frame_globals.get("__package__"):
        return main
    file = frame_globals.get("__file__")
    installed = tuple(sysconfig.get_path(key) for key in ("stdlib", "platlib", "purelib"))
    return main if file and os.path.abspath(file).startswith(installed) else frame_globals


def namespaces_by_value(namespace: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """{module: its globals}, of those whose functions are pickled by value: __main__, and the caller's."""
    name = namespace.get("__name__") or "__main__"  # code that was given to exec may say that it is __main__
    return {"__main__": sys.modules["__main__"].__dict__, name: namespace}


# (module, name) of dictionaries whose entries are sent to ranks, and the keys that every process has anyway.
_shared_tables: dict[tuple[str, str], frozenset[Any]] = {}


def share_table(module: str, name: str, keys: Iterable[Any]) -> None:
    """From now on ranks get the entries that the caller puts into this dictionary, except for `keys`."""
    _shared_tables[module, name] = frozenset(keys)


class KnownGlobals:
    """What one rank has of the caller's globals, so that only what changed is sent."""

    def __init__(self) -> None:
        self._known: dict[Name, Callable[[], object]] = {}  # -> the object that the caller had bound
        self.copies: set[Name] = set()  # those that the caller has sent
        self._inside: set[Name] = set()  # names read by functions that sit inside other objects
        self.objects: set[int] = set()  # numbers of the modules and parameters among them
        self._entries: TableEntries = {}

    def missing(self, names: Iterable[Name], namespaces: Namespaces) -> dict[Name, Any]:
        """Those of `names`, and of the globals that functions among them read, which the rank lacks."""
        return {
            (module, name): namespaces[module][name]
            for module, name in _reachable({*names, *self._inside}, namespaces)
            if not self._is_known((module, name), namespaces[module][name])
        }

    def reassigned(self, namespaces: Namespaces) -> set[Name]:
        """Globals that the rank has a copy of, and that the caller has reassigned since."""
        return {
            (module, name)
            for module, name in self.copies
            if name in namespaces.get(module, ())
            and not self._is_known((module, name), namespaces[module][name])
        }

    def _is_known(self, name: Name, value: object) -> bool:
        known = self._known.get(name)
        return known is not None and known() is value

    def mark_sent(self, values: Mapping[Name, object]) -> None:
        """From now on the rank has copies of these globals. The caller may have reassigned some meanwhile."""
        for name, value in values.items():
            self._known[name] = _weak_reference(value)
        self.copies.update(values)

    def mark_assigned(self, names: Iterable[Name], namespaces: Namespaces) -> None:
        """The rank has assigned `names`: they stay as they are until the caller reassigns them."""
        for module, name in names:
            value = namespaces.get(module, {}).get(name, _ABSENT)
            self._known[module, name] = _weak_reference(value)

    def forget(self, names: Iterable[Name]) -> None:
        """The rank has deleted `names`: the caller's are sent again when they are used."""
        for name in names:
            self._known.pop(name, None)
            self.copies.discard(name)

    def missing_entries(self) -> TableEntries:
        """Entries of shared tables that the rank lacks, or that the caller has replaced since."""
        missing: TableEntries = {}
        for (module, name), keys in _shared_tables.items():
            for key, value in getattr(sys.modules[module], name).items():
                if key not in keys and self._entries.get((module, name, key), _ABSENT) is not value:
                    missing[module, name, key] = value
        return missing

    def mark_entries(self, entries: TableEntries) -> None:
        self._entries |= entries

    def mark_inside(self, names: Iterable[Name]) -> None:
        self._inside.update(names)


def _reachable(names: Iterable[Name], namespaces: Namespaces) -> Iterator[Name]:
    modules = {id(namespace): module for module, namespace in namespaces.items()}
    seen: set[Name] = set()
    todo = list(names)
    while todo:
        module, name = todo.pop()
        namespace = namespaces.get(module, {})
        if (module, name) in seen or name not in namespace or name in MODULE_ATTRIBUTES:
            continue
        seen.add((module, name))
        if name in _OF_IPYTHON and _is_ipythons(namespace[name]):
            continue
        yield module, name
        for f in _functions_of(namespace[name]):
            if id(f.__globals__) in modules:
                todo.extend((modules[id(f.__globals__)], read) for read in global_names(f.__code__))


def _is_ipythons(value: object) -> bool:
    of = type(getattr(value, "__self__", value)).__module__  # of the shell, for its method get_ipython
    return of.startswith(("IPython", "ipykernel"))


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


def _weak_reference(value: object) -> Callable[[], object]:
    # Weak if Python allows it: a model that the caller deletes must not be kept alive by this table.
    try:
        weak = weakref.ref(value)
    except TypeError:
        return lambda: value
    return lambda: alive if (alive := weak()) is not None else _ABSENT

"""How a function gets from a cell to a rank.

`spawn` imports the caller's main module again, and cannot see what a cell defined; so here functions,
lambdas, closures and classes travel by value. Two things make a rank feel like a second kernel:

    globals   A function of the caller arrives with the rank's own __main__ as its globals, so what one
              call binds there the next one finds.
    names     The globals that a function reads are found in its bytecode (and in the functions it calls).
              A name is sent when the rank lacks it, or when the caller has bound it anew since.

What the caller's module imported from elsewhere travels by reference, as pickle always does.
"""

from __future__ import annotations

import dis
import io
import itertools
import linecache
import os
import pickle
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import cloudpickle
import torch

from hpnb.ranks.here import inside_rank

_GLOBAL_OPS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "DELETE_GLOBAL", "DELETE_NAME"})
_ABSENT = object()


# --- pickling --------------------------------------------------------------------------------


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, with the caller's functions bound to the receiver's __main__ and tensors on the CPU.

    Args:
        spaces: ids of the global dictionaries whose functions travel by value.

    After `dump`, `names` holds the globals that the functions met on the way read, and `sources` the
    text of cells that they came from, so that the receiver can print source lines.
    """

    def __init__(self, file: io.BytesIO, spaces: frozenset[int] = frozenset()) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.spaces = spaces
        self.names: set[str] = set()
        self.sources: dict[str, str] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType) and id(obj.__globals__) in self.spaces:
            self.names |= global_names(obj.__code__)
            return _reduce_function(obj)
        if isinstance(obj, types.CodeType):
            self._keep_source(obj.co_filename)
        elif type(obj) in (torch.Tensor, torch.nn.Parameter) and _is_plain(obj):
            return _reduce_tensor(obj)
        elif isinstance(obj, type):
            return _reduce_class(obj, super().reducer_override)
        return super().reducer_override(obj)

    def _keep_source(self, filename: str) -> None:
        if filename not in self.sources and filename in linecache.cache and not os.path.exists(filename):
            self.sources[filename] = "".join(linecache.getlines(filename))


def dumps(obj: object, spaces: frozenset[int] = frozenset()) -> bytes:
    """Pickle `obj`; CUDA tensors arrive on the CPU, tensors with a graph arrive without it."""
    file = io.BytesIO()
    Pickler(file, spaces).dump(obj)
    return file.getvalue()


loads = pickle.loads


def main_space() -> frozenset[int]:
    """The globals of __main__ alone: what a rank uses to send results back."""
    return frozenset({id(sys.modules["__main__"].__dict__)})


def _reduce_function(f: types.FunctionType) -> tuple[Any, ...]:
    cells = f.__closure__ or ()
    made = (f.__code__, f.__name__, len(cells))
    state = {
        "qualname": f.__qualname__,
        "defaults": f.__defaults__,
        "kwdefaults": f.__kwdefaults__,
        "doc": f.__doc__,
        "dict": f.__dict__,
        "closure": [_contents(cell) for cell in cells],
    }
    # The state is filled in after the function exists, so a closure may refer to its own function.
    return _make_function, made, state, None, None, _fill_function


def _contents(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # a name of the enclosing function that is not bound yet
        return ()


def _make_function(code: types.CodeType, name: str, cells: int) -> types.FunctionType:
    closure = tuple(types.CellType() for _ in range(cells))
    return types.FunctionType(code, sys.modules["__main__"].__dict__, name, None, closure)


def _fill_function(f: types.FunctionType, state: dict[str, Any]) -> None:
    f.__module__ = "__main__"
    f.__qualname__, f.__doc__ = state["qualname"], state["doc"]
    f.__defaults__, f.__kwdefaults__ = state["defaults"], state["kwdefaults"]
    f.__dict__.update(state["dict"])
    for cell, value in zip(f.__closure__ or (), state["closure"], strict=True):
        if value:
            cell.cell_contents = value[0]


# A class that a rank got from the caller goes back as its number alone, so the caller finds its own class
# again, untouched, and isinstance holds. Numbers are the caller's; a rank only learns them.
_number_of: weakref.WeakKeyDictionary[type, int] = weakref.WeakKeyDictionary()
_class_of: weakref.WeakValueDictionary[int, type] = weakref.WeakValueDictionary()
_next_number = itertools.count(1)


def _reduce_class(cls: type, reduce: Callable[[type], Any]) -> Any:
    if inside_rank() and cls in _number_of:
        return _class_by_number, (_number_of[cls],)
    reduced = reduce(cls)
    if inside_rank() or not isinstance(reduced, tuple) or len(reduced) != 6:
        return reduced  # by reference, or a class that the rank made itself
    if cls not in _number_of:
        _number_of[cls] = next(_next_number)
        _class_of[_number_of[cls]] = cls
    build, made, state, _, _, fill = reduced
    return _make_class, (_number_of[cls], build, made), state, None, None, fill


def _class_by_number(number: int) -> type:
    return _class_of[number]


def _make_class(number: int, build: Callable[..., type], made: tuple[Any, ...]) -> type:
    cls = build(*made)
    _number_of[cls], _class_of[number] = number, cls
    return cls


def _is_plain(tensor: torch.Tensor) -> bool:
    dense = tensor.layout is torch.strided and not tensor.is_quantized
    return dense and tensor.device.type in ("cpu", "cuda")


def _reduce_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    data = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    raw = data.reshape(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b""
    keeps_grad = tensor.requires_grad and tensor.is_leaf  # a graph cannot leave its process
    return _make_tensor, (type(tensor), raw, tensor.dtype, tuple(tensor.shape), keeps_grad)


def _make_tensor(
    kind: type[torch.Tensor], raw: bytes, dtype: torch.dtype, shape: tuple[int, ...], grad: bool
) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    data = flat.reshape(shape)
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(data, requires_grad=grad)
    return data.requires_grad_() if grad else data


# --- names -----------------------------------------------------------------------------------


def global_names(code: types.CodeType) -> set[str]:
    """Names that `code`, or code nested in it, reads from its globals."""
    found = {step.argval for step in dis.get_instructions(code) if step.opname in _GLOBAL_OPS}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= global_names(constant)
    return found


def caller_space(frame_globals: dict[str, Any]) -> dict[str, Any]:
    """The namespace whose functions travel by value: the caller's module, or __main__.

    A module that is installed, or hpnb itself, is importable by the ranks and travels by reference.
    """
    main = sys.modules["__main__"].__dict__
    name, file = frame_globals.get("__name__", ""), frame_globals.get("__file__")
    if frame_globals is main or name.split(".")[0] == "hpnb":
        return main
    installed = tuple(sysconfig.get_path(key) for key in ("stdlib", "platlib", "purelib"))
    return main if file and os.path.abspath(file).startswith(installed) else frame_globals


class Names:
    """What the ranks of a pool know of the caller's names, so that only what changed is sent."""

    def __init__(self) -> None:
        self._sent: dict[str, Callable[[], object]] = {}  # name -> the object it was bound to
        self._inside: set[str] = set()  # names read by functions that sit inside other objects

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
        if name in seen or name not in space or name.startswith("__"):
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

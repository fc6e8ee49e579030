"""How a function gets from a cell to a rank: functions, lambdas, closures and classes are pickled by value.

`spawn` imports the caller's main module again and cannot see what a cell has defined, so cloudpickle is used.
A function of the caller's __main__ arrives with the rank's __main__ as its globals, so what one call assigns
there is there in the next. If another module calls, its functions have a namespace of their own on the rank.
`caller_globals.py` decides which of the caller's globals are sent. What the caller's module has imported is
pickled by reference, as usual.
"""

from __future__ import annotations

import builtins
import functools
import io
import itertools
import linecache
import os
import pickle
import sys
import types
import typing
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle
import torch

from hpnb.ranks.caller_globals import Name, global_names
from hpnb.ranks.current_rank import inside_rank

# --- pickling --------------------------------------------------------------------------------

_NO_MODULES: Mapping[int, str] = {}


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, with the caller's functions bound to the receiver's namespaces and tensors on the CPU.

    Args:
        by_value: {id of a module's globals: the module} of those whose functions are pickled by value.

    After `dump`, `names` are the globals that the pickled functions read, and `sources` is the text of the
    cells that they come from, so that the receiver can print source lines.
    """

    def __init__(
        self, file: io.BytesIO, by_value: Mapping[int, str] = _NO_MODULES, known: frozenset[int] = frozenset()
    ) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.by_value = by_value
        self.known = known  # numbers of the modules and parameters that the receiver has
        self.numbered: set[int] = set()  # and of those that this pickle brings
        self._in_names = True
        self.names: set[Name] = set()
        self.modules: set[str] = set()
        self.sources: dict[str, str] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType) and id(obj.__globals__) in self.by_value:
            module = self.by_value[id(obj.__globals__)]
            self.names |= {(module, name) for name in global_names(obj.__code__)}
            self.modules |= _submodules(obj)
            return _reduce_function(obj, module)
        if isinstance(obj, functools._lru_cache_wrapper) and self._is_by_value(obj.__wrapped__):
            return _make_cached, (obj.__wrapped__, obj.cache_parameters())
        if isinstance(obj, typing.NewType):
            return typing.NewType, (obj.__name__, obj.__supertype__)
        if isinstance(obj, EndOfNames):
            self._in_names = False
            return EndOfNames, ()
        if self._in_names and not inside_rank() and isinstance(obj, torch.nn.Module | torch.nn.Parameter):
            return self._reduce_shared(obj)
        if isinstance(obj, types.CodeType):
            self._add_source(obj.co_filename)
            return _make_code, (obj.co_filename, *self.dispatch_table[types.CodeType](obj))
        elif isinstance(obj, types.CellType):
            return types.CellType, (), _contents(obj) or None, None, None, _fill_cell
        elif type(obj) in (torch.Tensor, torch.nn.Parameter) and _is_plain(obj):
            return _reduce_tensor(obj)
        elif isinstance(obj, type):
            return _reduce_class(obj, super().reducer_override)
        return super().reducer_override(obj)

    def _reduce_shared(self, obj: torch.nn.Module | torch.nn.Parameter) -> Any:
        """A module or parameter among the globals: by value once, then as a reference to the rank's object.

        An optimizer that is sent in a later call than its model must have that model's parameters.
        """
        number = _number_object(obj)
        if number in self.known:
            return _object_by_number, (number,)
        if type(obj) is torch.nn.Parameter and _is_plain(obj):
            reduced: Any = _reduce_tensor(obj)
        else:
            reduced = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if not isinstance(reduced, tuple):
            return NotImplemented
        self.numbered.add(number)
        build, made, *rest = reduced
        return _make_object, (number, build, made), *rest

    def _is_by_value(self, f: object) -> bool:
        return isinstance(f, types.FunctionType) and id(f.__globals__) in self.by_value

    def _add_source(self, filename: str) -> None:
        if filename not in self.sources and filename in linecache.cache and not os.path.exists(filename):
            self.sources[filename] = "".join(linecache.getlines(filename))


def pickled(
    obj: object, by_value: Mapping[int, str] = _NO_MODULES, known: frozenset[int] = frozenset()
) -> tuple[Pickler, bytes]:
    """`obj` as a pickle; CUDA tensors arrive on the CPU, tensors with an autograd graph arrive without it."""
    file = io.BytesIO()
    pickler = Pickler(file, by_value, known)
    pickler.dump(obj)
    return pickler, file.getvalue()


def dumps(obj: object, by_value: Mapping[int, str] = _NO_MODULES) -> bytes:
    """The pickle of `pickled` alone."""
    return pickled(obj, by_value)[1]


loads = pickle.loads


_modules: dict[str, types.ModuleType] = {}  # a rank's: of the caller's modules other than __main__


def namespace_of(module: str) -> dict[str, Any]:
    """The globals of a module whose functions are pickled by value.

    On a rank they stand for the caller's: it has not imported the module, which would run its code again.
    """
    if module == "__main__" or not inside_rank():
        return vars(sys.modules.get(module, sys.modules["__main__"]))
    if module not in _modules:
        name = f"__main__.{module}"  # the rank may import the module itself as well, for another function
        _modules[module] = sys.modules[name] = types.ModuleType(name)
        vars(_modules[module])["__builtins__"] = builtins
    return vars(_modules[module])


def rank_namespaces() -> dict[str, dict[str, Any]]:
    """{module: its globals on this rank} of all modules whose functions came by value."""
    return {module: namespace_of(module) for module in ("__main__", *_modules)}


def _make_code(filename: str, build: Callable[..., types.CodeType], made: tuple[Any, ...]) -> types.CodeType:
    """Code with the name of its file or cell: cloudpickle 3.1.3 leaves that out, and tracebacks need it."""
    return build(*made).replace(co_filename=filename)


def _reduce_function(f: types.FunctionType, module: str) -> tuple[Any, ...]:
    made = (f.__code__, f.__name__, f.__closure__, module)
    state = {
        "qualname": f.__qualname__,
        "defaults": f.__defaults__,
        "kwdefaults": f.__kwdefaults__,
        "doc": f.__doc__,
        "annotations": _annotations(f),
        "dict": f.__dict__,
    }
    # The state is filled in after the function exists, so its defaults may refer to the function.
    return _make_function, made, state, None, None, _fill_function


def _annotations(f: types.FunctionType) -> dict[str, Any]:
    try:
        return dict(f.__annotations__)
    except Exception:  # from Python 3.14 on they are evaluated here, and may name what is not there
        return {}


def _submodules(f: types.FunctionType) -> set[str]:
    """`xml.dom.minidom` where the function knows `xml` and uses it as xml.dom.minidom: importing xml alone
    would not bring it along."""
    used = set(f.__code__.co_names)
    values = [f.__globals__.get(name) for name in global_names(f.__code__)]
    values += [value for cell in f.__closure__ or () for value in _contents(cell)]
    packages = [value for value in values if isinstance(value, types.ModuleType)]
    return {
        name
        for package in packages
        for name in list(sys.modules)
        if name.startswith(package.__name__ + ".") and used.issuperset(name.split(".")[1:])
    }


def _make_cached(f: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(f)


def _contents(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # a name of the enclosing function that is not bound yet
        return ()


def _fill_cell(cell: types.CellType, contents: tuple[Any, ...]) -> None:
    """The cell exists before its contents, because a closure may contain its function."""
    (cell.cell_contents,) = contents


def _make_function(
    code: types.CodeType, name: str, closure: tuple[types.CellType, ...] | None, module: str
) -> types.FunctionType:
    return types.FunctionType(code, namespace_of(module), name, None, closure)


def _fill_function(f: types.FunctionType, state: dict[str, Any]) -> None:
    f.__module__ = f.__globals__["__name__"]
    f.__qualname__, f.__doc__ = state["qualname"], state["doc"]
    f.__defaults__, f.__kwdefaults__ = state["defaults"], state["kwdefaults"]
    f.__annotations__ = state["annotations"]
    f.__dict__.update(state["dict"])


# A class that a rank got from the caller is sent back as its number alone, so the caller gets the class that
# it defined, and isinstance holds. The caller assigns the numbers.
_number_of: weakref.WeakKeyDictionary[type, int] = weakref.WeakKeyDictionary()
_class_of: dict[int, type] = {}  # strongly: a rank may give back an object of a class redefined since
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
    made = type(tensor), raw, tensor.dtype, tuple(tensor.shape), keeps_grad
    # `vars` is what the caller has set on it, as in `parameter.no_decay = True`.
    return _make_tensor, made, vars(tensor) or None, None, None, _set_attributes


def _make_tensor(
    kind: type[torch.Tensor], raw: bytes, dtype: torch.dtype, shape: tuple[int, ...], grad: bool
) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    data = flat.reshape(shape)
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(data, requires_grad=grad)
    return data.requires_grad_() if grad else data


def _set_attributes(tensor: torch.Tensor, attributes: dict[str, Any]) -> None:
    vars(tensor).update(attributes)


class EndOfNames:
    """Separates the globals of a call from its arguments, which are always pickled by value."""


_objects: dict[int, tuple[int, weakref.ref[Any]]] = {}  # the caller's: id -> number
_object_of: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # a rank's
_next_object = itertools.count(1)


def _number_object(obj: object) -> int:
    known = _objects.get(id(obj))
    if known is not None and known[1]() is obj:
        return known[0]
    key, number = id(obj), next(_next_object)
    _objects[key] = number, weakref.ref(obj, lambda _: _objects.pop(key, None))
    return number


def _make_object(number: int, build: Callable[..., Any], made: tuple[Any, ...]) -> Any:
    obj = build(*made)
    _object_of[number] = obj
    return obj


def _object_by_number(number: int) -> Any:
    if number not in _object_of:
        raise LookupError(
            "a global refers to a module or parameter that was sent before and that this rank has deleted; "
            "reassign the global that it belongs to, and both are sent"
        )
    return _object_of[number]

"""A table of a TOML file as a frozen dataclass: every key known, every value of its type, or one sentence.

read(Training, {"learning_rate": 1e-3, "epoch": 2}, "[training]")
ValueError: [training] has no epoch; did you mean epochs?
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

T = TypeVar("T")

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def read(kind: type[T], table: Mapping[str, Any], where: str) -> T:
    """`kind(**table)`, once all of it fits. Fields of `kind` without a default must be there.

    Args:
        kind: a dataclass; a field that is a dataclass itself is a table inside.
        where: what the table is called in errors, such as "[training]".

    Raises:
        ValueError: a key that is unknown or missing, a value of another type, or what `kind` refuses.
    """
    return kind(**checked(kind, table, where))


def checked(kind: type[Any], table: Mapping[str, Any], where: str, leave_out: Iterable[str] = ()) -> Any:
    """The arguments that `table` gives to the dataclass `kind`; fields in `leave_out` are no keys."""
    known = {f.name: f for f in fields(kind) if f.init and f.name not in set(leave_out)}
    hints = get_type_hints(kind)
    for name in table:
        if name not in known:
            raise ValueError(f"{where} has no {name}; {nearest(name, known)}")
    for name, field in known.items():
        if name not in table and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{where} lacks {name}: {told(hints[name])}")
    return {name: _value(hints[name], value, where, name) for name, value in table.items()}


def nearest(name: str, known: Iterable[str]) -> str:
    """Which name was probably meant, in words; what there is if none is near."""
    names = list(known)
    near = difflib.get_close_matches(name, names, 1, 0.6) or [n for n in names if n.startswith(f"{name}_")]
    if near:
        return f"did you mean {' or '.join(near)}?"
    shown = names if len(names) < 15 else [*names[:8], f"and {len(names) - 8} more"]
    return f"it takes {', '.join(shown)}"


def told(hint: Any) -> str:
    """A type in words."""
    words = list(dict.fromkeys(_words(hint)))
    return " or ".join(words) if len(words) < 3 else ", ".join(words[:-1]) + f" or {words[-1]}"


def _words(hint: Any) -> list[str]:
    """What may stand there."""
    if hint in _WORDS:
        return [_WORDS[hint]]
    if hint is torch.dtype:
        return ["the name of a dtype such as 'bfloat16'"]
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Literal:
        return [_shown(value) for value in inside]
    if origin in (Union, types.UnionType):
        return [word for one in inside if one is not type(None) for word in _words(one)]
    if origin is dict or is_dataclass(hint):
        return ["a table"]
    return [f"a list with {told(inside[0])} in each place"]


def _value(hint: Any, value: Any, where: str, name: str) -> Any:
    if isinstance(hint, type) and is_dataclass(hint) and isinstance(value, Mapping):
        return read(hint, value, f"[{name}]")
    found, fits = _fitted(hint, value)
    if not fits:
        raise ValueError(f"{where} {name} = {_shown(value)} is not {told(hint)}")
    return found


def _fitted(hint: Any, value: Any) -> tuple[Any, bool]:
    """(the value as `hint` has it, whether it fits)."""
    origin, inside = get_origin(hint), get_args(hint)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value), True
    if hint is torch.dtype:
        found = getattr(torch, value, None) if isinstance(value, str) else None
        return found, isinstance(found, torch.dtype)
    if origin is Literal:
        return value, any(value == one and type(value) is type(one) for one in inside)
    if origin in (Union, types.UnionType):
        for one in inside:
            found, fits = _fitted(one, value)
            if fits:
                return found, True
        return value, False
    if origin is dict:
        return value, isinstance(value, dict) and all(_fitted(inside[1], v)[1] for v in value.values())
    if hint is Any:
        return value, True
    if origin is not None and issubclass(origin, Sequence):
        return value, isinstance(value, list) and all(_fitted(inside[0], item)[1] for item in value)
    return value, type(value) is hint


def _shown(value: Any) -> str:
    """As TOML writes it, where that is short."""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)

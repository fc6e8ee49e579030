"""What pydantic finds wrong with a table of a TOML file, in one sentence that names key, value and remedy.

describe(error, known)    "[training] has no epoch; did you mean epochs?"
                          "[layout] tp_size = 2.0 should be a valid integer"
                          "[data] batch_size = 0 should be greater than or equal to 1"
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

STRICT = ConfigDict(extra="forbid", strict=True, frozen=True, arbitrary_types_allowed=True)


def read_fields(kind: type[Any], table: Any, where: str, leave_out: Iterable[str] = ()) -> dict[str, Any]:
    """The arguments that `table`, called `where` in errors, gives to the dataclass `kind`; fields in
    `leave_out` are no keys."""
    hints = get_type_hints(kind)
    keys: dict[str, Any] = {}
    for field in fields(kind):
        if field.init and field.name not in set(leave_out):
            is_required = field.default is MISSING and field.default_factory is MISSING
            keys[field.name] = (hints[field.name], ... if is_required else None)
    model: type[BaseModel] = create_model(kind.__name__, __config__=STRICT, **keys)
    try:
        return model.model_validate(table).model_dump(exclude_unset=True)
    except ValidationError as error:
        raise ValueError(describe(error, {where: list(keys)}, where)) from error


def describe(error: ValidationError, known: Mapping[str, list[str]], where: str = "") -> str:
    """One sentence about one of the things that are wrong in the table `where`, or in a file of tables;
    {table: its keys} are for what was probably meant."""
    # What is missing is often there under another name, so unknown names come first.
    order = {"extra_forbidden": 0, "model_type": 1, "missing": 2}
    problem = min(error.errors(), key=lambda problem: order.get(problem["type"], 3))
    context, value = problem.get("ctx", {}), _show(problem["input"])
    if "error" in context:  # a sentence of our own
        return str(context["error"])
    first, *rest = map(str, problem["loc"])
    if not where and not rest:
        return {
            "extra_forbidden": f"there is no table [{first}]; {nearest(first, known)}",
            "missing": f"the table [{first}] is missing; examples/vit.toml has one of each",
        }.get(problem["type"], f"{first} = {value} is not a table; write [{first}] and its keys below")
    table, key = (where, first) if where else (f"[{first}]", rest[0])
    if problem["type"] == "extra_forbidden":
        return f"{table} has no {key}; {nearest(key, known[where or first])}"
    if problem["type"] == "missing":
        return f"{table} lacks {key}, which has no default"
    message = str(problem["msg"]).replace("False", "false").replace("True", "true")
    return message.replace("Input", f"{table} {key} = {value}", 1)


def nearest(name: str, known: Iterable[str]) -> str:
    """Which name was probably meant, in words; what there is if none is near."""
    names = list(known)
    near = difflib.get_close_matches(name, names, 1, 0.6) or [n for n in names if n.startswith(f"{name}_")]
    if near:
        return f"did you mean {' or '.join(near)}?"
    shown = names if len(names) < 15 else [*names[:8], f"and {len(names) - 8} more"]
    return f"it takes {', '.join(shown)}"


def _show(value: Any) -> str:
    """As TOML writes it."""
    return str(value).lower() if isinstance(value, bool) else repr(value)

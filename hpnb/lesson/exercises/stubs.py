"""Is this a stub? An exercise that nobody has begun is not wrong, it is "not yet".

    def ring(x): ...                            does nothing
    def ring(x): raise NotImplementedError      says so when called, on a rank too
    def ring(x):                                does half, and holds a blank
        steps = ...
        return ...

The last kind shows in the bytecode, where `...` is returned or bound; `x[...]` is neither. NotImplemented
counts where it is returned.
"""

from __future__ import annotations

import dis
import traceback
import types
from collections.abc import Iterator
from functools import partial
from typing import Any

from hpnb.ranks import RankError

_BINDS = ("STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF")


def is_blank(solution: Any) -> bool:
    """Nothing there: None, `...`, a function that does nothing, or a collection with such a hole."""
    if solution is None or solution is Ellipsis or solution is NotImplemented:
        return True
    if isinstance(solution, dict):
        solution = list(solution.values())
    if isinstance(solution, (tuple, list)):
        parts = [part for part in solution if part is not None]  # a None among others may be an answer
        return (bool(solution) and not parts) or any(is_blank(part) for part in parts)
    return isinstance(solution, types.FunctionType) and _does_nothing(solution.__code__)


def has_blank(solution: Any) -> bool:
    """Whether code that did not pass still returns or binds a `...`: then it is unfinished, not wrong."""
    return any(_is_unfinished(code) for code in _codes(solution))


def raised_by_stub(error: BaseException) -> bool:
    """torch raises NotImplementedError too, for an operation that it lacks; a stub names it in its source."""
    if isinstance(error, RankError):
        # Where the source is unknown, only the name can be gone by.
        named = "raise NotImplementedError" in error.traceback or "    " not in error.traceback
        return error.error == "NotImplementedError" and named
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return isinstance(error, NotImplementedError) and "NotImplementedError" in frames[-1].f_code.co_names


def _does_nothing(code: types.CodeType) -> bool:
    """All it does is to return None, `...` or NotImplemented."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("RESUME", "NOP")]
    names = [step.opname for step in steps]
    if names[-1:] == ["RETURN_CONST"] and len(steps) == 1:  # Python 3.12 and 3.13
        return steps[0].argval is None or steps[0].argval is Ellipsis
    if names == ["LOAD_CONST", "RETURN_VALUE"]:
        return steps[0].argval is None or steps[0].argval is Ellipsis
    return names == ["LOAD_GLOBAL", "RETURN_VALUE"] and steps[0].argval == "NotImplemented"


def _is_unfinished(code: types.CodeType) -> bool:
    steps = list(dis.get_instructions(code))
    for step, after in zip(steps, steps[1:] + steps[-1:], strict=True):
        returned = step.opname == "RETURN_CONST" or after.opname == "RETURN_VALUE"
        if step.argval is Ellipsis and (returned or after.opname in _BINDS):
            return True
        # Operators such as __eq__ return NotImplemented in earnest.
        if step.argval == "NotImplemented" and returned and not code.co_name.startswith("__"):
            return True
    return False


def _codes(solution: Any) -> Iterator[types.CodeType]:
    """The code of functions, of those within them, and of the methods of classes and of objects."""
    if isinstance(solution, types.CodeType):
        yield solution
        for const in solution.co_consts:
            if isinstance(const, types.CodeType):
                yield from _codes(const)
    elif isinstance(solution, types.FunctionType):
        yield from _codes(solution.__code__)
    elif isinstance(solution, partial):
        yield from _codes(solution.func)
    elif isinstance(solution, dict):
        yield from _codes(list(solution.values()))
    elif isinstance(solution, (tuple, list)):
        for part in solution:
            yield from _codes(part)
    else:
        cls = solution if isinstance(solution, type) else type(solution)
        for value in vars(cls).values():
            if isinstance(value, types.FunctionType):
                yield from _codes(value.__code__)

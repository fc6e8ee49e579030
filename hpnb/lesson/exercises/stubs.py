"""Is this a stub? An exercise that nobody has begun is not wrong, it is "not yet".

def ring(x): ...                            does nothing
def ring(x): raise NotImplementedError      says so when called, on a rank too
"""

from __future__ import annotations

import dis
import traceback
import types
from typing import Any

from hpnb.ranks import RankError


def is_blank(solution: Any) -> bool:
    """Nothing there: None, `...`, a function that does nothing, or several of which one is blank."""
    if isinstance(solution, (tuple, list)):
        return any(map(is_blank, solution))
    if isinstance(solution, types.FunctionType):
        return _does_nothing(solution.__code__)
    return solution is None or solution is Ellipsis


def raised_by_stub(error: BaseException) -> bool:
    """torch raises NotImplementedError too, for an operation that it lacks; a stub names it in its source."""
    if isinstance(error, RankError):
        # Where the source is unknown, only the name can be gone by.
        named = "raise NotImplementedError" in error.traceback or "    " not in error.traceback
        return error.error == "NotImplementedError" and named
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return isinstance(error, NotImplementedError) and "NotImplementedError" in frames[-1].f_code.co_names


def _does_nothing(code: types.CodeType) -> bool:
    """All it does is to return None or `...`."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("RESUME", "NOP")]
    names = [step.opname for step in steps]
    if names not in (["LOAD_CONST", "RETURN_VALUE"], ["RETURN_CONST"]):  # the latter in Python 3.12 and 3.13
        return False
    return steps[0].argval is None or steps[0].argval is Ellipsis

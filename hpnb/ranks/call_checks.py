"""What `launch` and `Ranks` check before a call: limits, which ranks are meant, who started the process."""

from __future__ import annotations

import inspect
import math
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any


def wrong_members(chosen: Sequence[int], size: int) -> str:
    """Why a choice of ranks cannot be: one does not exist, is named twice, or none is named."""
    there = f"the ranks are 0 to {size - 1}" if size > 1 else "the only rank is 0"
    missing = [str(rank) for rank in chosen if rank not in range(size)]
    if len(missing) == 1:
        return f"rank {missing[0]} does not exist; {there}"
    if missing:
        return f"ranks {', '.join(missing)} do not exist; {there}"
    twice = next((rank for rank in chosen if list(chosen).count(rank) > 1), None)
    return f"no rank is named; {there}" if twice is None else f"rank {twice} is named twice; name it once"


def warn_under_torchrun(stacklevel: int) -> None:
    """Say once for all processes of torchrun that ranks which start here are not those of torchrun."""
    environ = os.environ
    if "TORCHELASTIC_RUN_ID" in environ and environ.get("RANK") == "0" and environ.get("WORLD_SIZE") != "1":
        warnings.warn(
            f"torchrun has started this program {environ.get('WORLD_SIZE')} times, and each now starts ranks "
            "of its own; to use torchrun's processes as ranks, call hpnb.launch_from_torch() instead",
            stacklevel=stacklevel,
        )


def refuse_limits(fn: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    """Raise TypeError for an argument of `Ranks` that is given to `run`, whose function does not take it."""
    options = ("timeout", "hang_timeout", "start_timeout", "ranks", "device")
    names = [name for name in options if name in kwargs]
    try:
        parameters = inspect.signature(fn).parameters if names else {}
    except (TypeError, ValueError):  # it has none, or is no function
        return
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in names:
        if not takes_all and name not in parameters:
            raise TypeError(
                f"run passes {name}={kwargs[name]!r} on to {getattr(fn, '__name__', fn)}, which does not "
                f"take it; for the ranks it is set when they start: hpnb.Ranks({name}={kwargs[name]!r})"
            )


def limit_in_seconds(name: str, limit: object) -> float:
    """A limit as a float; None is none."""
    if limit is None:
        return math.inf
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0:
        raise ValueError(f"{name}={limit!r}: give seconds, a number above 0, or None for no limit")
    return float(limit)

"""What the checks of notebooks 03 and 07 share: run on ranks of the CPU, compare with one process, say it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

import hpnb
from hpnb.lesson.exercises.checker import Finding
from hpnb.record import Message

EXACT = 1e-12  # relative norm, float64
_TIMEOUT = 20.0


class NotThat(Exception):
    """What a rank returned cannot be the answer. Raised, so that ranks that wait for this one end with it."""


def launched(run: Callable[..., Any], *args: Any, ranks: int) -> Any:
    """What all ranks found, or a Finding with the words of the one that gave up."""
    try:
        return hpnb.launch(run, *args, ranks=ranks, device="cpu", timeout=_TIMEOUT)
    except hpnb.RankError as error:
        if error.error != NotThat.__name__:
            raise
        return Finding(False, error.summary.partition(": ")[2])


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Numbers that are the same on all ranks, float64."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def off_by(apart: float) -> str:
    """A distance to one process's, in words."""
    return "equal" if apart < EXACT else f"off by {apart:.1e}"


def worst_of(distances: Sequence[float]) -> float:
    """The largest; NaN, which compares with nothing, is worse than any number."""
    return max(math.inf if math.isnan(apart) else apart for apart in distances)


def calls_of(messages: Sequence[Message]) -> str:
    """ "2 all_reduce", "1 all_gather and 1 reduce_scatter", "nothing"."""
    counts: dict[str, int] = {}
    for message in messages:
        counts[message.op] = counts.get(message.op, 0) + 1
    return " and ".join(f"{count} {op}" for op, count in counts.items()) or "nothing"

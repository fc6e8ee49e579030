"""What checks of several notebooks share: run on ranks of the CPU, compare with one process, report it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import hpnb
from hpnb.lesson.exercises.checker import Exercise, Finding, WrongAnswer
from hpnb.lesson.show import worst_of
from hpnb.lesson.tables import number
from hpnb.record import Message

EXACT = 1e-12  # relative norm, float64
TIMEOUT = 20.0  # seconds


def run_on_ranks(run: Callable[..., Any], *args: Any, ranks: int, case: str = "") -> list[Any]:
    """What each rank returned.

    Raises:
        WrongAnswer: a rank raised it; its words, after the `case`.
    """
    try:
        return hpnb.launch(run, *args, ranks=ranks, device="cpu", timeout=TIMEOUT)
    except hpnb.RankError as error:
        if error.error != WrongAnswer.__name__:
            raise
        words = error.summary.partition(": ")[2]
        raise WrongAnswer(f"{case}: {words}" if case else words) from None


def expect_tensor(value: Any, shape: Sequence[int], who: str) -> torch.Tensor:
    """`value`, if it is a tensor of that shape; else WrongAnswer, in words that begin with `who`."""
    wanted = tuple(shape)
    if not isinstance(value, torch.Tensor):
        raise WrongAnswer(f"{who} a {type(value).__name__}, and a tensor of shape {wanted} is wanted")
    if value.shape != torch.Size(wanted):
        raise WrongAnswer(f"{who} a tensor of shape {tuple(value.shape)}, and shape {wanted} is wanted")
    return value


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normally distributed float64 values that are the same on all ranks."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def off_by(distance: float) -> str:
    """A distance to one process's result, in words."""
    if distance < EXACT:
        return "equal"
    looks_like_rounding = distance < 1e-4
    return f"off by {distance:.1e}" + (" (in float64 rounding is 1e-16)" if looks_like_rounding else "")


def exact(distances: Iterable[float], text: str) -> Finding:
    """Whether the worst of the ranks' distances to one process is rounding."""
    worst = worst_of(distances)
    return Finding(worst < EXACT, f"{text} {off_by(worst)}")


@dataclass(frozen=True)
class ComparedRun:
    """What one rank saw of a forward and a backward.

    Attributes:
        distances: {what: relative distance to one process}.
        forward, backward: what was sent.
        measured: what else the check asks about, such as FLOPs over one process's.
    """

    distances: dict[str, float]
    forward: list[Message]
    backward: list[Message]
    measured: float


def exact_runs(runs: Sequence[ComparedRun], text: str) -> Iterator[Finding]:
    """Of each result, whether the worst of the ranks' distances to one process is rounding."""
    for what in runs[0].distances:
        yield exact((run.distances[what] for run in runs), f"{text}: {what}:")


def most_sent(runs: Sequence[ComparedRun], way: str) -> list[Message]:
    """In the "forward" or "backward", of the rank that sent most bytes, or as many in most calls."""
    return max((getattr(run, way) for run in runs), key=lambda messages: (bytes_of(messages), len(messages)))


def calls_of(messages: Sequence[Message]) -> str:
    """ "2 all_reduce", "1 all_gather and 1 reduce_scatter", "nothing"."""
    counts = Counter(message.op for message in messages)
    return " and ".join(f"{count} {op}" for op, count in counts.items()) or "nothing"


def bytes_of(messages: Sequence[Message]) -> float:
    return sum(message.bytes for message in messages)


def is_number(answer: Any) -> bool:
    return isinstance(answer, int | float) and not isinstance(answer, bool) and math.isfinite(answer)


def divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def keeps_to_cap(text: str, nbytes: float, cap: float) -> Finding:
    """Whether `nbytes` is at most `cap`; the text says who holds them."""
    return Finding(nbytes <= cap, f"{text} holds {number(nbytes, 'B')}, at most {number(cap, 'B')}")


def nearly_shortest(text: str, took: float, fitting: Iterable[float]) -> Finding:
    """Whether a step takes at most 1 % longer than the shortest of those that fit."""
    over = took / min(fitting)
    words = f"a step of {number(took, 's')}, {over:.2f} times the shortest of those that fit"
    return Finding(over <= 1.01, f"{text}: {words}")


def diagnosis(
    key: str, title: str, minutes: float, records: Callable[[], Iterable[tuple[str, Any, Any]]]
) -> Exercise:
    """An exercise that asks what is wrong with each record.

    Args:
        records: (what is said of a record, the record, what is wrong with it).
    """

    def verify(diagnose: Callable[[Any], Any]) -> Iterator[Finding]:
        for text, record, truth in records():
            answer = diagnose(record)
            answer = tuple(answer) if isinstance(answer, list) else answer
            yield Finding(answer == truth, f"{text}: it is {truth!r}, you say {answer!r}")

    return Exercise(key, title, minutes, verify)

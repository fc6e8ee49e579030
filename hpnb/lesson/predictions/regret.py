"""The reader's guesses of all notebooks, added up: what they would have cost.

A number that is 30 % off has a regret of 30 %, too high or too low; a ranking's regret is what its first
choice costs over the least. A guess that was not made has none, and is told apart. Guesses that were made
after the answer had been shown are marked, and not added up.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hpnb.lesson.predictions.outcome import Outcome, show
from hpnb.lesson.predictions.predict import outcomes
from hpnb.lesson.tables import number, table


@dataclass(frozen=True)
class Score:
    """Of one notebook, or of all: questions, guesses, how many held, and their regrets."""

    asked: int
    guessed: int
    held: int
    regrets: tuple[float, ...]

    @property
    def typical(self) -> float | None:
        """The median: one wild guess does not decide."""
        return statistics.median(self.regrets) if self.regrets else None


def score(told: Sequence[Outcome]) -> Score:
    """Of questions that were answered; a guess that came after the answer counts as none."""
    answered = [each for each in told if each.truth is not None]
    own = [each for each in answered if each.guess is not None and not each.seen]
    regrets = tuple(each.regret for each in own if each.regret is not None)
    return Score(len(answered), len(own), sum(bool(each.met) for each in own), regrets)


def display(told: Sequence[Outcome] | None = None) -> Score:
    """Show a row a notebook, the worst guess of each, and the sum; blank guesses are counted, not scored."""
    kept = outcomes() if told is None else tuple(told)
    notebooks = sorted({each.key.split(".")[0] for each in kept})
    rows = []
    for notebook in notebooks:
        own = [each for each in kept if each.key.startswith(f"{notebook}.")]
        rows.append((notebook, *_cells(score(own)), _worst(own)))
    whole = score(kept)
    rows.append(("all", *_cells(whole), _worst(kept)))
    blank = whole.asked - whole.guessed
    words = "You answered every question before you saw."
    if blank:
        words = f"{blank} of {whole.asked} questions have no guess of yours from before the answer."
    columns = ("notebook", "questions", "guessed", "held", "regret, median", "sum", "costliest guess")
    table(columns, rows, "your regret", words)
    return whole


def of_predictions(told: Sequence[Outcome] | None = None) -> list[Outcome]:
    """Questions that this series' own formulas got wrong, the worst first: a model outside 0.8 to 1.25, an
    identity that is none, a ranking with the wrong winner."""
    kept = outcomes() if told is None else told
    off = [each for each in kept if each.holds(each.predicted) is False]
    return sorted(off, key=lambda each: -abs(math.log(max(each.ratio or 1.0, 1e-9))))


def guess_of(key: str) -> str | None:
    """The first choice of the reader's guess at a ranking; None if there is none."""
    found = next((each.guess for each in outcomes() if each.key == key), None)
    return found[0] if isinstance(found, tuple) else None


def _cells(found: Score) -> tuple[str, ...]:
    if not found.regrets:
        return str(found.asked), str(found.guessed), str(found.held), "-", "-"
    median = number(100 * (found.typical or 0.0), "%")
    return (
        str(found.asked),
        str(found.guessed),
        str(found.held),
        median,
        number(100 * sum(found.regrets), "%"),
    )


def _worst(told: Sequence[Outcome]) -> str:
    own = [each for each in told if each.guess is not None and not each.seen and each.regret is not None]
    if not own:
        return "-"
    worst = max(own, key=lambda each: each.regret or 0.0)
    return f"{worst.key}: {show(worst.guess, worst.unit)} for {show(worst.truth, worst.unit)}"

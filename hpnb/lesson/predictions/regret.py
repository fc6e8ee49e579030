"""The reader's guesses of all notebooks, added up: what they would have cost.

A number that is 30 % off has a regret of 30 %, too high or too low; a ranking's regret is what its first
choice costs over the least. A missing guess has no regret, and is counted apart. Guesses that were made after
the answer had been shown are marked, and not added up.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hpnb.lesson.predictions.outcome import Outcome, answer_text
from hpnb.lesson.predictions.predict import outcomes
from hpnb.lesson.tables import number, table


@dataclass(frozen=True)
class GuessScore:
    """Of one notebook, or of all: questions, guesses, how many held, and their regrets."""

    asked: int
    guessed: int
    held: int
    regrets: tuple[float, ...]

    @property
    def typical(self) -> float | None:
        """The median: one wild guess does not decide."""
        return statistics.median(self.regrets) if self.regrets else None


def score(asked: Sequence[Outcome]) -> GuessScore:
    """Of questions that were answered; a guess that came after the answer counts as none."""
    answered = [outcome for outcome in asked if outcome.truth is not None]
    guessed = [outcome for outcome in answered if outcome.guess is not None and not outcome.seen]
    regrets = tuple(outcome.regret for outcome in guessed if outcome.regret is not None)
    return GuessScore(len(answered), len(guessed), sum(bool(outcome.met) for outcome in guessed), regrets)


def show_regret(asked: Sequence[Outcome] | None = None) -> GuessScore:
    """Show a row a notebook, its worst guess, and the sum; missing guesses are counted, not scored."""
    asked = outcomes() if asked is None else tuple(asked)
    rows = []
    for notebook in sorted({outcome.key.split(".")[0] for outcome in asked}):
        of_notebook = [outcome for outcome in asked if outcome.key.startswith(f"{notebook}.")]
        rows.append((notebook, *_cells(score(of_notebook)), _worst(of_notebook)))
    total = score(asked)
    rows.append(("all", *_cells(total), _worst(asked)))
    missing = total.asked - total.guessed
    note = "You answered every question before you saw."
    if missing:
        note = f"{missing} of {total.asked} questions have no guess of yours from before the answer."
    columns = ("notebook", "questions", "guessed", "held", "regret, median", "sum", "costliest guess")
    table(columns, rows, "your regret", note)
    return total


def wrong_predictions(asked: Sequence[Outcome] | None = None) -> list[Outcome]:
    """Questions that this series' own formulas got wrong, the worst first.

    That is a model outside 0.8 to 1.25, an identity that does not hold, or a ranking with the wrong winner.
    """
    asked = outcomes() if asked is None else asked
    wrong = [outcome for outcome in asked if outcome.holds(outcome.predicted) is False]
    return sorted(wrong, key=lambda outcome: -abs(math.log(max(outcome.ratio or 1.0, 1e-9))))


def guessed_choice(key: str) -> str | None:
    """The first choice of the reader's guess at a ranking; None if there is none."""
    guess = next((outcome.guess for outcome in outcomes() if outcome.key == key), None)
    return guess[0] if isinstance(guess, tuple) else None


def _cells(score: GuessScore) -> tuple[str, ...]:
    counts = (str(score.asked), str(score.guessed), str(score.held))
    if not score.regrets:
        return *counts, "-", "-"
    percent = (100 * (score.typical or 0.0), 100 * sum(score.regrets))
    return *counts, *(number(value, "%") for value in percent)


def _worst(asked: Sequence[Outcome]) -> str:
    scored = [o for o in asked if o.guess is not None and not o.seen and o.regret is not None]
    if not scored:
        return "-"
    worst = max(scored, key=lambda outcome: outcome.regret or 0.0)
    guess, truth = answer_text(worst.guess, worst.unit), answer_text(worst.truth, worst.unit)
    return f"{worst.key}: {guess} for {truth}"

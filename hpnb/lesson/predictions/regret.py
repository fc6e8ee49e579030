"""All questions of the series, added up: what the rule of thumb, the prediction and the reader's guess cost.

A number that is 30 % off has a regret of 30 %, too high or too low; a ranking's regret is what its first
choice costs over the least. A missing answer has no regret, and is counted apart. A guess that was made after
the answer had been shown counts as none.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hpnb.lesson.predictions.outcome import Outcome
from hpnb.lesson.predictions.predict import outcomes
from hpnb.lesson.tables import number, table
from hpnb.lesson.values import record

ANSWERS = {"rule of thumb": "rule_of_thumb", "prediction": "predicted", "your guess": "guess"}


@dataclass(frozen=True)
class Score:
    """Of one kind of answer: how many there are, how many are right, and their regrets."""

    answered: int
    right: int
    regrets: tuple[float, ...]

    @property
    def share(self) -> float:
        return self.right / self.answered if self.answered else 0.0

    @property
    def median(self) -> float | None:
        """One wild answer does not decide."""
        return statistics.median(self.regrets) if self.regrets else None


def score(asked: Sequence[Outcome], answer: str) -> Score:
    """Of one kind of answer, "rule_of_thumb", "predicted" or "guess"; all questions have their truth."""
    values = [(outcome, getattr(outcome, answer)) for outcome in asked]
    answered = [(o, v) for o, v in values if v is not None and not (answer == "guess" and o.seen)]
    regrets = [regret for o, v in answered if (regret := o.regret_of(v)) is not None]
    return Score(len(answered), sum(bool(o.holds(v)) for o, v in answered), tuple(regrets))


def show_regret(key: str) -> dict[str, Score]:
    """Show a row a notebook that ran and one for all, and return the scores of all by kind of answer.

    Args:
        key: under which to record, for the prose, key.questions, and key.rule-of-thumb.right, .answered and
            .median, and the same of the prediction.
    """
    asked = [outcome for outcome in outcomes() if outcome.truth is not None]
    notebooks = sorted({outcome.key.split(".")[0] for outcome in asked})
    groups = {name: [o for o in asked if o.key.startswith(f"{name}.")] for name in notebooks}
    rows = []
    for name, group in {**groups, "all": asked}.items():
        scores = [score(group, field) for field in ANSWERS.values()]
        rows.append((name, str(len(group)), *(cell for kind in scores for cell in _cells(kind))))
    heads = [f"{who}: {what}" for who in ANSWERS for what in ("held", "median regret")]
    total = {who: score(asked, field) for who, field in ANSWERS.items()}
    note = "Held: a number within a factor of 1.25, an identity that is exact, the best of a ranking."
    table(("notebook", "questions", *heads), rows, "what each kind of answer would have cost", note)
    record(f"{key}.questions", len(asked))
    for who, kind in total.items():
        if who != "your guess" and kind.median is not None:
            record(f"{key}.{who.replace(' ', '-')}", {"right": kind.right, "answered": kind.answered})
            record(f"{key}.{who.replace(' ', '-')}.median", 100 * kind.median, "%")
    return total


def _cells(score: Score) -> tuple[str, str]:
    if not score.answered:
        return "-", "-"
    median = "-" if score.median is None else number(100 * score.median, "%")
    return f"{score.right} of {score.answered}", median

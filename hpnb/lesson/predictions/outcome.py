"""A guess, a prediction and a truth, how they are judged, and the file that remembers them between notebooks.

    ratio = measured / predicted

An identity holds at exactly 1, a model from 0.8 to 1.25. A ranking is scored by its regret: what the first
choice costs over the least cost, less 1. The order of the others is reported, and costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Literal, cast

from pydantic import TypeAdapter

from hpnb.lesson.home import load, write_json
from hpnb.lesson.tables import number

Kind = Literal["identity", "model", "ranking"]
Answer = int | float | tuple[str, ...] | None
GOOD = (0.8, 1.25)  # as in hpnb.plot.compare
FILE = "predictions.json"
MISSING = "name the missing term"


@dataclass(frozen=True)
class Outcome:
    """One question, what the reader guessed, and what came out; None where nothing has yet.

    Attributes:
        key, question, kind, unit: as they were asked.
        guess, predicted, truth: numbers, or names with the best first.
        costs: of a ranking's choices.
        seen: the guess was made when the truth had already been shown.
        rule_of_thumb: the naive estimate, which stands in the place of a guess until there is one.
        truth_range: the least and the most that the truth may be; answers are then read against it.
    """

    key: str
    question: str
    kind: Kind = "model"
    unit: str = ""
    guess: Answer = None
    predicted: Answer = None
    truth: Answer = None
    costs: dict[str, float] | None = None
    seen: bool = False
    rule_of_thumb: Answer = None
    truth_range: tuple[int | float, int | float] | None = None

    def regret_of(self, value: Answer) -> float | None:
        """0 for a right answer, 0.3 for one that is 30 % off, too high or too low."""
        ratio = self._ratio(value)
        if ratio is None or ratio < 0:
            return None
        return max(ratio, 1 / ratio) - 1 if ratio else math.inf

    def holds(self, value: Answer) -> bool | None:
        """Whether `value` is right; None if it or the truth is None.

        An identity: equal, whole numbers exactly and others up to rounding. A model: a ratio in GOOD. A
        ranking: the best first.
        """
        if value is None or self.truth is None:
            return None
        ratio = self._ratio(value)
        if isinstance(value, tuple):
            return ratio == 1.0
        if self.kind == "identity":
            truth = cast(float, self.truth)
            if float(value).is_integer() and float(truth).is_integer():
                return value == truth
            return math.isclose(value, truth, rel_tol=1e-12)
        return ratio is not None and GOOD[0] <= ratio <= GOOD[1]

    def _ratio(self, value: Answer) -> float | None:
        """measured / `value`; of a ranking, cost of the first choice / least cost."""
        if value is None or self.truth is None:
            return None
        if isinstance(value, tuple):
            costs = self.costs or {}
            return costs[value[0]] / min(costs.values()) if value[0] in costs else None
        return ratio_of(value, cast(float, self.truth))


# --- judging -----------------------------------------------------------------------------------


def ratio_of(predicted: float, measured: float) -> float:
    """measured / predicted; 1 if both are 0, infinite if only the prediction is."""
    if predicted == 0:
        return 1.0 if measured == 0 else math.inf
    return measured / predicted


def ratio_text(ratio: float | None, kind: Kind = "model") -> str:
    """Two decimals where they say something; of an identity, as many as tell it from 1."""
    if ratio is None or math.isnan(ratio):
        return "-"
    if kind == "identity" and 0 < abs(ratio - 1) < 5e-3:
        return next((t for d in range(3, 13) if float(t := f"{ratio:.{d}f}") != 1), "1.00")
    return f"{ratio:.2f}" if 0.095 <= abs(ratio) < 100 else number(ratio)


def _missed_text(ratio: float) -> str:
    """As `ratio_text`, with as many decimals as show that the ratio lies outside GOOD."""
    low, high = GOOD
    if not low - 0.01 < ratio < high + 0.01:
        return ratio_text(ratio)
    texts = (f"{ratio:.{digits}f}" for digits in range(2, 17))
    return next((text for text in texts if not low <= float(text) <= high), ratio_text(ratio))


def answer_text(answer: Answer, unit: str = "") -> str:
    if answer is None:
        return "-"
    return " < ".join(answer) if isinstance(answer, tuple) else number(answer, unit)


def range_text(ends: tuple[float, float], unit: str = "") -> str:
    """The two ends of a range as a table holds them: "68 to 272 tokens"."""
    low, high = (number(end, unit) for end in ends)
    same_unit = unit and low.partition(" ")[2] == high.partition(" ")[2]
    return f"{low.partition(' ')[0] if same_unit else low} to {high}"


def reading_of(outcome: Outcome) -> str:
    """One line that says what came of the guess, and of the prediction."""
    parts = []
    if outcome.guess is not None:
        parts.append(_read(outcome, outcome.guess, "your guess"))
    elif outcome.rule_of_thumb is not None:
        parts.append(_read(outcome, outcome.rule_of_thumb, "the rule of thumb"))
    if outcome.predicted is not None:
        parts.append(_read(outcome, outcome.predicted, "the prediction"))
    return " ".join(f"{part[0].upper()}{part[1:]}." for part in parts)


def _read(outcome: Outcome, value: Answer, who: str) -> str:
    if isinstance(value, tuple):
        return _read_ranking(outcome, value, who)
    truth = cast(float, outcome.truth)
    ratio = ratio_of(cast(float, value), truth)
    right = outcome.holds(value)
    if outcome.kind == "identity":
        if right:
            return f"{who} is exact"
        gap = number(abs(truth - cast(float, value)), outcome.unit)
        return f"{who} is off by {gap}, and this question has one exact answer"
    if outcome.truth_range is not None:
        low, high = outcome.truth_range
        answer = cast(float, value)
        side = "below" if answer < low else "above" if answer > high else "within"
        if side != "within" and number(answer) in (number(low), number(high)):  # as printed beside it
            side = "at the end of"
        advice = f", so {MISSING}" if who == "the prediction" and side == "below" else ""
        return f"{who} lies {side} the range (ratio {ratio_text(ratio)}){advice}"
    if right:
        return f"{who} holds (ratio {ratio_text(ratio)})"
    # A guess has no terms. A prediction that is too low lacks one; a cost left out cannot make it too high.
    advice = f", so {MISSING}" if who == "the prediction" and ratio > 1 else ""
    return f"{who} is off: the answer is {_missed_text(ratio)} times that{advice}"


def _read_ranking(outcome: Outcome, order: tuple[str, ...], who: str) -> str:
    costs = outcome.costs or {}
    if strange := [name for name in order if name not in costs]:
        return f"{who} names {', '.join(strange)}, which is not among {', '.join(costs)}: it has no score"
    best = min(costs, key=lambda name: costs[name])
    regret = costs[order[0]] / costs[best] - 1
    text = f"{who} puts the best first"
    if regret:
        more = f"{number(100 * regret, '%')} more than"
        if regret > 10:  # nobody reads "16,400 % more"
            more = f"{number(1 + regret)} times as much as"
        text = f"{who} puts {order[0]} first, which costs {more} {best}"
    pairs = [(a, b) for a, b in combinations(order, 2) if costs[a] != costs[b]]  # a tie has no order
    right = sum(costs[a] < costs[b] for a, b in pairs)
    ties = math.comb(len(order), 2) - len(pairs)
    if pairs:
        verb = "is" if right == 1 else "are"
        text += f", and {right} of the {len(pairs)} pairs that it names {verb} in order"
    return text + (f"; {ties} more cost{'s' if ties == 1 else ''} the same either way" if ties else "")


# --- the file ----------------------------------------------------------------------------------


def read_outcomes() -> dict[str, Outcome]:
    return load(FILE, TypeAdapter(dict[str, Outcome]).validate_json, {})


def write_outcomes(outcomes: Mapping[str, Outcome]) -> None:
    write_json(FILE, {key: asdict(outcome) for key, outcome in outcomes.items()})

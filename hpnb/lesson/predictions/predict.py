"""The reader commits, then sees: `predict` records a guess, `reveal` draws it beside the truth.

    lesson.predict("00.ring-bytes", "What leaves a rank, of 4 in a ring, for 1 MB?", None, "B", "identity")
    lesson.reveal("00.ring-bytes", t.bytes["dp"], predicted=2 * 3 / 4 * 1e6)

A guess is never filled in for the reader; until there is one, a rule of thumb stands in its place. A guess
from an earlier run is shown as such, and one made after the truth had been shown is marked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import Any, SupportsFloat, cast, get_args

from hpnb.lesson.home import locked
from hpnb.lesson.predictions.outcome import (
    Answer,
    Kind,
    Outcome,
    answer_text,
    range_text,
    ratio_of,
    ratio_text,
    read_outcomes,
    reading_of,
    write_outcomes,
)
from hpnb.lesson.tables import number, plain, present, table
from hpnb.lesson.values import record

Guess = SupportsFloat | str | Iterable[Any] | None

_asked: dict[str, Outcome] = {}  # by this process: what lies in the file alone comes from an earlier one


def predict(
    key: str,
    question: str,
    guess: Guess = None,
    unit: str = "",
    kind: Kind = "model",
    rule_of_thumb: Guess | Callable[[], Guess] = None,
) -> None:
    """Ask `question` and record the reader's guess, if there is one.

    Args:
        key: notebook and name, such as "00.ring-bytes".
        guess: a number in `unit`; for a ranking, choices with the best first.
        kind: "identity" (exact), "model" (0.8 to 1.25 of it) or "ranking" (scored by regret).
        rule_of_thumb: the estimate that one would make without the page, or a function that computes it. It
            is shown, and called so, until there is a guess.

    Raises:
        ValueError: the guess is not of its kind.
    """
    if kind not in get_args(Kind):
        raise ValueError(f"kind={kind!r} is not one of {', '.join(get_args(Kind))}")
    answer = _answer(guess, kind, unit, "your guess")
    naive = rule_of_thumb() if callable(rule_of_thumb) else rule_of_thumb
    naive_answer = _answer(naive, kind, unit, "the rule of thumb")
    asked = Outcome(key, question, kind, unit, answer, rule_of_thumb=naive_answer)
    with locked():
        stored = read_outcomes()
        before = stored.get(key)
        if answer is not None:
            stored_outcome = asked
            if before is not None and before.truth is not None and (before.kind, before.unit) == (kind, unit):
                asked = replace(asked, seen=before.seen or before.guess != answer)
                stored_outcome = replace(before, question=question, guess=answer, seen=asked.seen)
            write_outcomes({**stored, key: stored_outcome})
    _asked[key] = asked
    if answer is None:
        status = "write your guess and run the cell again"
        if naive_answer is not None:
            status = f"rule of thumb: {answer_text(naive_answer, unit)}; {status}"
        if before is not None and before.guess is not None:
            status += f" (your earlier guess: {answer_text(before.guess, before.unit)})"
    else:
        status = f"your guess: {answer_text(answer, unit)}"
        status += ", made after the answer had been shown" if asked.seen else ""
    wanted = "one or more, best first" if kind == "ranking" else f"in {unit}" if unit else "a number"
    html = f"<p><b>Predict:</b> {_safe(question)} ({_safe(wanted)})<br>{_safe(status)}</p>"
    present(html, f"Predict: {question} ({wanted})\n  {status}")


def reveal(
    key: str,
    truth: SupportsFloat | Sequence[Any] | Mapping[Any, float],
    unit: str | None = None,
    predicted: SupportsFloat | Sequence[Any] | None = None,
    costs: Mapping[Any, float] | None = None,
    source: str = "measured",
    truth_range: tuple[float, float] | None = None,
) -> None:
    """Show the guess of `key` beside the prediction and the truth, read the row, and keep the outcome.

    Args:
        truth: a number in the unit of the question; for a ranking the choices in order, or {choice: cost}.
        unit: to be checked against the question's.
        predicted: what a formula or a simulation said.
        costs: what each choice of a ranking costs; the least is best.
        source: what the truth is: measured, simulated, replayed, counted or published.
        truth_range: (low, high) between which the truth of a model lies. It is shown, and the reading then
            says on which side of it an answer lies; scores go by the ratio as without it.

    Prose may tell {{key}}, {{key.predicted}} and {{key.rule-of-thumb}}; of a ranking, the winner.

    Raises:
        ValueError: nothing was asked under `key`, or the answer does not fit the question.
    """
    asked = _asked.get(key)
    if asked is None:
        raise ValueError(f"nothing was asked under {key!r} in this session: run the cell that predicts it")
    if unit is not None and unit != asked.unit:
        raise ValueError(f"{key} was asked in {asked.unit or 'no unit'} and is answered in {unit or 'none'}")
    if asked.kind == "ranking":
        asked = replace(asked, costs=_costs(key, truth if isinstance(truth, Mapping) else costs))
        truth = sorted(truth, key=truth.__getitem__) if isinstance(truth, Mapping) else truth
    done = replace(
        asked,
        truth=_answer(truth, asked.kind, asked.unit, "the truth"),
        predicted=_answer(predicted, asked.kind, asked.unit, "the prediction"),
        truth_range=None,
    )
    if truth_range is not None:
        low, high = map(plain, truth_range)
        if done.kind != "model" or not low <= cast(float, done.truth) <= high:
            raise ValueError(f"{key}: truth_range {low} to {high} must contain the truth of a model")
        done = replace(done, truth_range=(low, high))
    _asked[key] = done
    with locked():
        stored = read_outcomes()
        before = stored.get(key)
        if done.guess is not None or before is None or before.guess is None:
            write_outcomes({**stored, key: done})  # else what came of an earlier guess stays
    shown: dict[str, str] = {}
    if done.guess is not None:
        shown["your guess"] = answer_text(done.guess, done.unit)
    elif before is not None and before.guess is not None:
        shown["your earlier guess"] = answer_text(before.guess, before.unit)
    if done.guess is None and done.rule_of_thumb is not None:
        shown["rule of thumb"] = answer_text(done.rule_of_thumb, done.unit)
    if done.predicted is not None:
        shown["predicted"] = answer_text(done.predicted, done.unit)
    shown[source] = answer_text(done.truth, done.unit)
    if done.truth_range is not None:
        shown["range"] = range_text(done.truth_range, done.unit)
    regret = done.regret_of(done.guess)
    if done.kind == "ranking" and regret is not None:
        shown["your regret"] = number(100 * regret, "%")
    elif done.kind != "ranking":
        bases = {
            "predicted": done.predicted,
            "your guess": done.guess,
            "rule of thumb": done.rule_of_thumb,
        }
        if who := next((who for who, base in bases.items() if base is not None), ""):
            ratio = ratio_of(cast(float, bases[who]), cast(float, done.truth))
            exact = ratio == 1 and done.kind == "identity"  # of 0 to 0 there is no ratio
            shown[f"{source} / {who}"] = "exact" if exact else ratio_text(ratio, done.kind)
    table(tuple(shown), [tuple(shown.values())], done.question, reading_of(done))
    answers = {"": done.truth, ".predicted": done.predicted, ".rule-of-thumb": done.rule_of_thumb}
    for part, answer in answers.items():
        if answer is not None:
            record(key + part, answer[0] if isinstance(answer, tuple) else answer, done.unit)


def outcomes() -> tuple[Outcome, ...]:
    """Everything revealed or guessed so far, in all notebooks, by key."""
    return tuple(outcome for _, outcome in sorted(read_outcomes().items()))


def _answer(value: Any, kind: Kind, unit: str, who: str) -> Answer:
    """`value` as it is kept: a number, or for a ranking distinct names."""
    if value is None:
        return None
    if kind == "ranking":
        choices = [value] if isinstance(value, str | int) else value if isinstance(value, Iterable) else []
        names = tuple(map(str, choices))
        if not names or len(set(names)) < len(names):
            raise ValueError(f"{who} {value!r} is no ranking: list distinct choices, the best first")
        return names
    try:
        if isinstance(value, (str, bool)):
            raise TypeError
        answer = plain(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of many elements
        answer = math.nan
    if not math.isfinite(answer):
        raise ValueError(f"{who} {value!r} is not a number" + (f"; it is asked in {unit}" if unit else ""))
    if kind == "model" and answer <= 0 and who == "your guess":
        raise ValueError(f"{who} {value!r} cannot be compared by a ratio; it must be above 0")
    return answer


def _costs(key: str, costs: Mapping[Any, float] | None) -> dict[str, float]:
    scores = {str(name): float(cost) for name, cost in (costs or {}).items()}
    if not scores or not all(cost > 0 and math.isfinite(cost) for cost in scores.values()):
        raise ValueError(f"{key} is scored by what each choice costs, above 0: costs={{choice: cost}}")
    return scores


def _safe(text: str) -> str:
    return escape(text, quote=False)

"""Predicted beside measured, a row a quantity, and a verdict on each ratio.

    ratio = measured / predicted

An identity must be exactly 1; a model outside 0.8 to 1.25 lacks a term; a ranking asks who comes first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, SupportsFloat

from hpnb.lesson.predictions.outcome import GOOD, MISSING, Kind, holds, ratio_of, ratio_text
from hpnb.lesson.tables import number, plain, split_unit, table


class ComparedQuantity(NamedTuple):
    """One line of a comparison. The unit may also stand in the name: "step time (s)"."""

    quantity: str
    predicted: SupportsFloat | None
    measured: SupportsFloat
    unit: str = ""
    kind: Kind | None = None  # None: that of the comparison

    @property
    def ratio(self) -> float:
        return math.nan if self.predicted is None else ratio_of(plain(self.predicted), plain(self.measured))


def comparison(rows: Iterable[Sequence[Any]], kind: Kind = "model", title: str = "") -> list[float]:
    """Display `quantity | predicted | measured | ratio | verdict`; returns measured / predicted of each row.

    Args:
        rows: (quantity, predicted, measured), and where they differ from the rest a unit and a kind. A
            prediction may be None, and its ratio is then NaN. Of a ranking each row is a choice, and the
            numbers are its costs: the least is best.
    """
    compared = [ComparedQuantity(*row) for row in rows]
    lines, off = [], []
    for row in compared:
        name, unit = (row.quantity, row.unit) if row.unit else split_unit(row.quantity)
        verdict, good = _verdict(row, kind, compared)
        ratio = ratio_text(row.ratio, row.kind or kind)
        if not good:
            off.append(f"{name} ({ratio}, {verdict})")
        predicted = "-" if row.predicted is None else number(row.predicted, unit)
        lines.append((name, predicted, number(row.measured, unit), ratio, verdict))
    if kind == "ranking":
        note = _who_wins(compared)
    elif off:
        note = f"{len(off)} of {len(compared)} off: {'; '.join(off)}."
    elif all((row.kind or kind) == "identity" for row in compared):
        note = "Every ratio is exactly 1."
    else:
        note = f"Every ratio is as it should be: exact, or for a model {GOOD[0]} to {GOOD[1]}."
    table(("quantity", "predicted", "measured", "ratio", "verdict"), lines, title, note)
    return [row.ratio for row in compared]


def _verdict(row: ComparedQuantity, kind: Kind, rows: Sequence[ComparedQuantity]) -> tuple[str, bool]:
    """(what the table says, whether it is as it should be)."""
    kind = row.kind or kind
    if kind == "ranking":
        return f"place {1 + sum(plain(other.measured) < plain(row.measured) for other in rows)}", True
    if row.predicted is None:
        return "no prediction", True
    if holds(kind, plain(row.predicted), plain(row.measured)):
        return ("exact" if kind == "identity" else "ok"), True
    return ("not equal" if kind == "identity" else MISSING), False


def _who_wins(rows: Sequence[ComparedQuantity]) -> str:
    predicted = [row for row in rows if row.predicted is not None]
    if not predicted:
        return "Nothing was predicted."
    chosen = min(predicted, key=lambda row: plain(row.predicted or 0))
    best = min(rows, key=lambda row: plain(row.measured))
    regret = plain(chosen.measured) / plain(best.measured) - 1
    if regret == 0:
        return f"The predicted winner, {chosen.quantity}, wins."
    more = f"{number(100 * regret, '%')} more than {best.quantity}"
    return f"Predicted to win was {chosen.quantity}, which costs {more}."

"""The last exercise of notebook 07: what a layer keeps for its backward, held to the published formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpnb.lesson.exercises.checker import Exercise, Finding
from hpnb.lesson.tables import number
from hpnb.theory import ACTIVATION_ROWS, Block


@dataclass(frozen=True)
class Layer:
    """A transformer layer in 16 bits, and who shares it how.

    Attributes:
        s, b, h, a: tokens of a row, rows, width, heads.
        t: ranks that share it; 1 is no parallelism.
        sequence: whether tokens are cut between the pairs.
        recompute: "", "attention" or "full".
    """

    s: int
    b: int
    h: int
    a: int
    t: int = 1
    sequence: bool = False
    recompute: str = ""


_SHAPES = (Layer(1024, 1, 1600, 25), Layer(2048, 4, 12288, 96), Layer(8192, 2, 1024, 16))


def published(layer: Layer) -> float:
    """Bytes by the row of the table that fits.

    Raises:
        ValueError: there is no such row.
    """
    for row in ACTIVATION_ROWS:
        if (
            row.recompute == layer.recompute
            and row.parallel == (layer.t > 1)
            and row.sequence == layer.sequence
        ):
            return row.published(Block(layer.h, layer.a, layer.s, layer.b), layer.t)
    if layer.recompute == "full" and not layer.sequence:
        # In the table on one rank alone: a block keeps its input, which tensor parallelism leaves whole.
        whole = next(row for row in ACTIVATION_ROWS if row.recompute == "full")
        return whole.published(Block(layer.h, layer.a, layer.s, layer.b))
    raise ValueError(
        f"no row of the table has t={layer.t}, sequence={layer.sequence}, recompute={layer.recompute!r}; "
        "tokens are cut on 2 ranks or more, and never where blocks are computed again"
    )


def _verify_kept(kept: Callable[[Layer], Any]) -> Sequence[Finding]:
    findings = []
    for row in ACTIVATION_ROWS:
        wrong = []
        for shape in _SHAPES:
            ranks = (2, 5) if row.parallel else (1,)
            for t in ranks:
                layer = replace(shape, t=t, sequence=row.sequence, recompute=row.recompute)
                answer, wanted = kept(layer), published(layer)
                bad = isinstance(answer, bool) or not isinstance(answer, int | float)
                if bad or not math.isclose(answer, wanted, rel_tol=1e-9):
                    said = (
                        repr(answer)
                        if bad
                        else f"{number(answer, 'B')}, {answer / wanted:.3f} times the formula"
                    )
                    wrong.append(f"s {shape.s}, b {shape.b}, h {shape.h}, a {shape.a}, t {t}: {said}")
        text = f"{row.name}: " + (wrong[0] if wrong else "the published formula")
        findings.append(Finding(not wrong, text))
    return findings


kept = Exercise("07.5", "activation bytes", 15, _verify_kept)

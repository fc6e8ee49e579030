"""The last exercise of notebook 07: what a layer keeps for its backward, held to the published formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from hpnb.lesson.exercises.checker import Finding, exercise
from hpnb.lesson.exercises.findings import is_number
from hpnb.lesson.tables import number
from hpnb.theory import ACTIVATION_ROWS, Block


@dataclass(frozen=True)
class ShardedLayer:
    """A transformer layer in 16 bits, and how ranks share it.

    Attributes:
        s, b, h, a: sequence length, batch size, hidden size, heads.
        t: ranks that share it; 1 is no parallelism.
        sequence: whether tokens are sharded between the pairs of matrices.
        recompute: "", "attention" or "full".
    """

    s: int
    b: int
    h: int
    a: int
    t: int = 1
    sequence: bool = False
    recompute: str = ""


_SHAPES = (ShardedLayer(1024, 1, 1600, 25), ShardedLayer(2048, 4, 12288, 96), ShardedLayer(8192, 2, 1024, 16))


def published(layer: ShardedLayer) -> float:
    """Bytes by the row of the table that fits.

    Raises:
        ValueError: there is no such row.
    """
    block = Block(layer.h, layer.a, layer.s, layer.b)
    for row in ACTIVATION_ROWS:
        key = (row.recompute, row.parallel, row.sequence)
        if key == (layer.recompute, layer.t > 1, layer.sequence):
            return row.published(block, layer.t)
    if layer.recompute == "full" and not layer.sequence:
        # The table has it on one rank alone: a block keeps its input, which tensor parallelism replicates.
        return next(row for row in ACTIVATION_ROWS if row.recompute == "full").published(block)
    raise ValueError(
        f"no row of the table has t={layer.t}, sequence={layer.sequence}, recompute={layer.recompute!r}; "
        "tokens are sharded over 2 ranks or more, and not where blocks are recomputed"
    )


@exercise("07.5", "activation bytes", 15)
def activation_bytes(kept: Callable[[ShardedLayer], Any]) -> Iterator[Finding]:
    for row in ACTIVATION_ROWS:
        wrong = []
        for shape in _SHAPES:
            for t in (2, 5) if row.parallel else (1,):
                layer = replace(shape, t=t, sequence=row.sequence, recompute=row.recompute)
                answer, wanted = kept(layer), published(layer)
                if is_number(answer) and math.isclose(answer, wanted, rel_tol=1e-9):
                    continue
                answered = repr(answer)
                if is_number(answer):
                    answered = f"{number(answer, 'B')}, {answer / wanted:.3f} times the formula"
                wrong.append(f"s {shape.s}, b {shape.b}, h {shape.h}, a {shape.a}, t {t}: {answered}")
        yield Finding(not wrong, f"{row.name}: " + (wrong[0] if wrong else "the published formula"))

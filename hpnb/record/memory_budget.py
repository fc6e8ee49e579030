"""A budget of bytes, kept: whoever holds more is stopped by an OutOfBudget that says who survives.

    with hpnb.record.memory(model, optimizer, budget=24e9):
        step()                      # raises at the first operator after which more than that is held

A CPU with room to spare then fails where a small GPU would, at the same operator every time, and a large GPU
like a small one. What is compared is what the recorder counts: exact bytes of tensors on a CPU, what the
allocator has handed out on CUDA. A real device fails a little earlier, for its allocator cuts memory into
pieces that do not always fit, and later operators cannot use what is left between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from hpnb.record.memory_profile import CATEGORIES, MemorySample


@dataclass(frozen=True)
class Survivors:
    """Tensors of one category, shape and dtype that were held when the budget was passed.

    Attributes:
        nbytes: of all `count` of them; a view counts its whole storage.
    """

    category: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    nbytes: int

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape)) or "one number"
        return f"{self.count} x ({size}) {self.dtype}"


class OutOfBudget(MemoryError):
    """More was held than the budget allows.

    Attributes:
        budget: bytes.
        held: what was held, by category; its `total` is above the budget.
        operator: "after aten.addmm"; "before the first operator" where the states alone are too much.
        survivors: what was held, the largest first.
    """

    def __init__(
        self, budget: float, held: MemorySample, operator: str, survivors: Sequence[Survivors] = ()
    ) -> None:
        self.budget, self.held, self.operator = budget, held, operator
        self.survivors = tuple(survivors)
        parts = ", ".join(f"{name} {getattr(held, name):,}" for name in CATEGORIES if getattr(held, name))
        super().__init__(
            f"{held.total:,} bytes are held {operator}, {held.total - budget:,.0f} more than the budget of "
            f"{budget:,.0f}: {parts}"
        )

    def __reduce__(self) -> tuple[type[OutOfBudget], tuple[float, MemorySample, str, tuple[Survivors, ...]]]:
        return OutOfBudget, (self.budget, self.held, self.operator, self.survivors)


def group(kept: Sequence[tuple[str, tuple[int, ...], str, int]]) -> tuple[Survivors, ...]:
    """Tensors given as (category, shape, dtype, bytes), alike ones together, the most bytes first."""
    found: dict[tuple[str, tuple[int, ...], str], list[int]] = {}
    for category, shape, dtype, nbytes in kept:
        found.setdefault((category, shape, dtype), []).append(nbytes)
    rows = (Survivors(*key, len(sizes), sum(sizes)) for key, sizes in found.items())
    return tuple(sorted(rows, key=lambda row: (-row.nbytes, row.category, prod(row.shape))))

"""Run a program that may not fit, and show who holds the memory if it does not.

    results = lesson.run_if_it_fits(pool, train, 64)
    results is None         # it did not fit, and the page says who held what

A GPU that is full and a budget (`hpnb.record.memory(..., budget=...)`) that is exceeded are both readings for
the page, not errors. Any other failure is raised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import hpnb
from hpnb.lesson.tables import number, table
from hpnb.ranks.errors import OUT_OF_MEMORY, RankError
from hpnb.record import OutOfBudget

T = TypeVar("T")


def run_if_it_fits(pool: hpnb.Ranks, fn: Callable[..., T], *args: object, **kwargs: object) -> list[T] | None:
    """`pool.run(fn, *args, **kwargs)`, or None after a reading of memory.

    If only some ranks ran out of memory, the others were waiting for them, and the pool has ended
    (`pool.alive`).

    Raises:
        RankError: the call failed for another reason.
    """
    try:
        results = pool.run(fn, *args, **kwargs)
    except RankError as error:
        if error.error != OUT_OF_MEMORY:
            raise
        print(f"It does not fit. {error}")
        return None
    if (stopped := next((r for r in results if isinstance(r, OutOfBudget)), None)) is not None:
        survivors_table(stopped)
        return None
    return results


def survivors_table(stopped: OutOfBudget, side: int | None = None, most: int = 8) -> None:
    """Display what was alive when a budget was exceeded, the largest first.

    Args:
        side: only tensors that have a dimension of this size.
        most: rows.
    """
    chosen = [one for one in stopped.survivors if side is None or side in one.shape]
    rows = [(str(one), one.category, number(one.nbytes, "B")) for one in chosen[:most]]
    columns = ("largest tensors alive", "category", "bytes")
    table(columns, rows, f"out of budget {stopped.operator}", f"{stopped}.")

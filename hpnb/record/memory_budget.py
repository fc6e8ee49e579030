"""A memory budget: a step that needs more bytes is stopped by an OutOfBudget, which lists the live tensors.

    with hpnb.record.memory(model, optimizer, budget=24e9):
        step()                      # raises after the first operator that exceeds it

A CPU or a large GPU then fails where a small GPU would, at the same operator every time. The budget is
compared with what the recorder counts: exact bytes of tensors on a CPU, bytes that the allocator has handed
out on CUDA. A real device may fail a little earlier, because fragmentation leaves gaps that later operators
cannot use. With a budget that is an OutOfBudget as well, whose `device_full` is true.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from hpnb.record.memory_profile import CATEGORIES, MemorySample


@dataclass(frozen=True)
class Survivors:
    """Tensors of one category, shape and dtype that were alive when the budget was exceeded.

    Attributes:
        nbytes: of all `count` of them; a view counts all of its storage.
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
    """More bytes were in use than the budget allows, or the device was full before that.

    Attributes:
        budget: bytes.
        usage: bytes in use, by category; `usage.total` is above the budget, unless the device was full.
        operator: "after aten.addmm"; "before the first operator" if parameters and optimizer state are too
            much already; "before aten.addmm" if the device had no room for what the operator needs.
        survivors: the tensors that were alive, the largest first.
        device_full: whether the device had no room although the budget allowed more.
    """

    def __init__(
        self,
        budget: float,
        usage: MemorySample,
        operator: str,
        survivors: Sequence[Survivors] = (),
        device_full: bool = False,
    ) -> None:
        self.budget, self.usage, self.operator = budget, usage, operator
        self.survivors, self.device_full = tuple(survivors), device_full
        parts = ", ".join(f"{name} {getattr(usage, name):,}" for name in CATEGORIES if getattr(usage, name))
        limit = f"{usage.total - budget:,.0f} more than the budget of {budget:,.0f}"
        if device_full:
            limit = f"and the device has no room for more, although the budget is {budget:,.0f}"
        super().__init__(f"{usage.total:,} bytes are in use {operator}, {limit}: {parts}")

    def __reduce__(self) -> tuple[type[OutOfBudget], tuple[Any, ...]]:
        return OutOfBudget, (self.budget, self.usage, self.operator, self.survivors, self.device_full)


def group_survivors(tensors: Sequence[tuple[str, tuple[int, ...], str, int]]) -> tuple[Survivors, ...]:
    """Group tensors given as (category, shape, dtype, bytes), the group with the most bytes first."""
    sizes_by_kind: dict[tuple[str, tuple[int, ...], str], list[int]] = {}
    for category, shape, dtype, nbytes in tensors:
        sizes_by_kind.setdefault((category, shape, dtype), []).append(nbytes)
    groups = (Survivors(*kind, len(sizes), sum(sizes)) for kind, sizes in sizes_by_kind.items())
    return tuple(sorted(groups, key=lambda group: (-group.nbytes, group.category, prod(group.shape))))

"""Whether any rank asks to stop, which all ranks learn after the same step.

    step k       a rank asks, or not: a sum over all ranks begins, among CPUs
    step k + 1   it is complete long since; more than 0 stops all ranks here

So nobody waits, and no rank is left in a collective that the others never enter.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class StopVote:
    """A sum over all ranks of those that ask. All ranks call its methods in the same order."""

    def __init__(self) -> None:
        self._sum: torch.Tensor | None = None
        self._work: Any = None

    def begin(self, asks: bool) -> None:
        """Start to ask all ranks."""
        self._sum = torch.tensor([float(asks)])
        self._work = dist.all_reduce(self._sum, async_op=True)

    def result(self) -> bool:
        """Whether a rank asked when it was begun; False if it was not."""
        if self._work is None:
            return False
        self._work.wait()
        self._work = None
        assert self._sum is not None
        return bool(self._sum.item())

    def now(self, asks: bool) -> bool:
        """Whether a rank asks now, for which all ranks wait."""
        self.begin(asks)
        return self.result()

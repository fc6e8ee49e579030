"""Whether any rank asks to stop, which all ranks learn after the same step.

    step k       a rank asks, or not: a sum over all ranks begins, among CPUs
    step k + 1   it is complete long since; more than 0 stops all ranks here

So nobody waits, and no rank is left in a collective that the others never enter. Where steps take seconds, a
caller may wait for the sum in step k instead. All ranks have to do the same, so they learn with it whether a
step of any rank was slow.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from hpnb.ranks.process_group import new_group

_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def _cpu_group() -> dist.ProcessGroup:
    """The group of all ranks, or one like it among CPUs, if a program has joined them for GPUs alone."""
    world = dist.group.WORLD
    assert world is not None, "a Booster has made a mesh"
    if torch.device("cpu") in world._device_types:
        return world
    if world not in _groups:
        _groups[world] = new_group(None, "stop", backend="gloo")
    return _groups[world]


class StopVote:
    """A sum over all ranks of those that ask. All ranks call its methods in the same order.

    Attributes:
        slow: whether a rank said so in the last sum that was read, the same on all ranks; True before it.
    """

    def __init__(self) -> None:
        self.slow = True
        self._sum: torch.Tensor | None = None
        self._work: Any = None

    def begin(self, asks: bool, slow: bool = False) -> None:
        """Start to ask all ranks.

        Args:
            slow: whether the last step took so long here that the sum is to be waited for.
        """
        self._sum = torch.tensor([float(asks), float(slow)])
        self._work = dist.all_reduce(self._sum, group=_cpu_group(), async_op=True)

    def result(self) -> bool:
        """Whether a rank asked when it was begun; False if it was not."""
        if self._work is None:
            return False
        self._work.wait()
        self._work = None
        assert self._sum is not None
        asked, self.slow = (bool(count) for count in self._sum.tolist())
        return asked

    def now(self, asks: bool) -> bool:
        """Whether a rank asks now, for which all ranks wait."""
        self.begin(asks)
        return self.result()

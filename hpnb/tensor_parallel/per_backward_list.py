"""A list that nodes of a graph fill in a backward, and that a later node of the same backward empties.

A graph may run backward twice, and not always to its end:

    torch.autograd.grad(loss, h, retain_graph=True)      # fills lists in front of h, and stops at h
    loss.backward()                                      # must not read what the first one has left

So each backward has a separate list, by the number that autograd gives it. A backward that starts inside
another one, as in a hook, has another number, and so has one on another thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

import torch

from hpnb.gradients import after_backward

T = TypeVar("T")


class PerBackwardList(Generic[T]):
    """What the nodes of a backward note for a later one.

    Args:
        discard: called with the items that nobody has taken when their backward ends.
    """

    def __init__(self, discard: Callable[[list[T]], None] | None = None) -> None:
        self._discard = discard
        self._items: dict[int, list[T]] = {}

    def append(self, item: T) -> None:
        backward = torch._C._current_graph_task_id()
        if backward not in self._items:
            self._items[backward] = []
            after_backward(partial(self._end, backward))
        self._items[backward].append(item)

    def take(self) -> list[T]:
        """The items of the backward that runs; the list is empty afterwards."""
        return self._items.pop(torch._C._current_graph_task_id(), [])

    def _end(self, backward: int) -> None:
        items = self._items.pop(backward, [])
        if items and self._discard is not None:
            self._discard(items)

"""ZeRO-3's prefetch: which units' weights are gathered ahead, while another unit computes.

    forward     [ block 0 ][ block 1 ][ block 2 ]     units in the order of the last forward
    all-gather  0  [ 1 ]      [ 2 ]                   with num_ahead = 1
    backward    [ block 2 ][ block 1 ][ block 0 ]     the same order reversed
    all-gather  2  [ 1 ]      [ 0 ]

The order is learned from the last forward. If this forward visits units in another order, only the prefetch
misses: a unit that was not gathered ahead is gathered when it computes. All ranks run the same units, so they
make the same calls in the same order.
"""

from __future__ import annotations

from typing import Generic, TypeVar

U = TypeVar("U")


class PrefetchOrder(Generic[U]):
    """The order of a module's units, the root first.

    Args:
        num_ahead: how many units to gather ahead; 0 gathers each when it computes.
    """

    def __init__(self, num_ahead: int) -> None:
        self.num_ahead = num_ahead
        self._visited: list[U] = []  # in this forward
        self._order: list[U] = []  # in the last forward
        self._next_in_backward: dict[U, list[U]] = {}

    def start_forward(self) -> None:
        self._visited = []

    def next_in_forward(self, unit: U) -> list[U]:
        """The units to gather ahead while `unit` computes, which is the next one that this forward visits."""
        position = len(self._visited)
        self._visited.append(unit)
        if position < len(self._order) and self._order[position] is unit:
            return self._order[position + 1 : position + 1 + self.num_ahead]
        return []

    def next_in_backward(self, unit: U) -> list[U]:
        """The units to gather ahead while the backward of `unit` computes."""
        return self._next_in_backward.get(unit, [])

    def end_forward(self) -> None:
        """Learn the order of this forward, if it is another than the last one's."""
        if self._visited == self._order:
            return
        self._order, self._next_in_backward = self._visited, {}
        for position, unit in enumerate(self._order):
            # The root's backward comes first: it gathers the last units ahead.
            before = self._order[1:position] if position else self._order[1:]
            previous = [other for other in reversed(before) if other is not unit]
            self._next_in_backward[unit] = previous[: self.num_ahead]

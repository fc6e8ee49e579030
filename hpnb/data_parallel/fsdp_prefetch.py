"""ZeRO-3's prefetch: which units' weights are gathered ahead, while another unit computes.

    forward     [ block 0 ][ block 1 ][ block 2 ]     units in the order of the last forward
    all-gather  0  [ 1 ]      [ 2 ]                   with num_ahead = 1
    backward    [ block 2 ][ block 1 ][ block 0 ]     the same order reversed
    all-gather  2  [ 1 ]      [ 0 ]

Where a pipeline says which action comes next, the last block of an action has the first of the next one
gathered. With one stage a rank, 1F1B's steady state ends each action with the block that the next one begins
with, so that it stays and is not gathered again.

The order is learned from the last forward that began with the same block: a rank may have several stages of a
pipeline, which take turns and have different blocks. If this forward visits units in another order, only the
prefetch misses: a unit that was not gathered ahead is gathered when it computes. All ranks run the same
units, so they make the same calls in the same order.
"""

from __future__ import annotations

from typing import Generic, TypeVar

U = TypeVar("U")


class PrefetchOrder(Generic[U]):
    """The orders of a module's units, the root first.

    Args:
        num_ahead: how many units to gather ahead; 0 gathers each when it computes.
    """

    def __init__(self, num_ahead: int) -> None:
        self.num_ahead = num_ahead
        self._visited: list[U] = []  # in this forward
        self._orders: dict[U, list[U]] = {}  # in the last forwards, by the first unit after the root
        self._next_in_backward: dict[U, list[U]] = {}

    def start_forward(self) -> None:
        self._visited = []

    def visit(self, unit: U) -> list[U]:
        """Note that this forward visits `unit` now; return what to gather ahead."""
        position = len(self._visited)
        self._visited.append(unit)
        if position:
            order = self._orders.get(self._visited[1], [])
        else:  # the first block is known if it has always been the same one
            (order,) = self._orders.values() if len(self._orders) == 1 else [[]]
        if position < len(order) and order[position] is unit:
            return order[position + 1 : position + 1 + self.num_ahead]
        return []

    def next_in_backward(self, unit: U) -> list[U]:
        """The units to gather ahead while the backward of `unit` computes, which is not the root."""
        return self._next_in_backward.get(unit, [])

    def is_last_of_forward(self, unit: U) -> bool:
        """Whether `unit`, which this forward visits now, was the last one of the forward like it."""
        order = self._orders.get(self._visited[1], []) if len(self._visited) > 1 else []
        return len(order) == len(self._visited) and order[-1] is unit

    def is_last_of_backward(self, unit: U) -> bool:
        """Whether a forward began with `unit`, so that the backward ends with it."""
        return unit in self._orders

    def learn_order(self) -> list[U]:
        """Learn the order of this forward, which has ended.

        Returns:
            The last units, to gather ahead while the root's backward computes, which comes first.
        """
        units = self._visited[1:]
        if units and self._orders.get(units[0]) != self._visited:
            self._orders[units[0]] = self._visited
            for position, unit in enumerate(units):
                previous = [other for other in reversed(units[:position]) if other is not unit]
                self._next_in_backward[unit] = previous[: self.num_ahead]
        return units[::-1][: self.num_ahead]

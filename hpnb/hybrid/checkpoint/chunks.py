"""A rank's part of a tensor as boxes: a box begins somewhere in the whole tensor, and is a view of the part.

    whole (4, 6)                      a row cut along tp, then elements [4, 15) of what it left along dp
    . . . . . .      (rows 1 to 3)
    . . . . # #      (1, 4)  1 x 2    the end of a row
    # # # # # #      (2, 0)  1 x 6    whole rows
    # # # . . .      (3, 0)  1 x 3    the beginning of one

However often a parameter was cut, its part is a few such boxes. Whoever writes boxes needs nobody else's, and
whoever reads takes from other boxes what lies in its own: so a state passes from layout to layout in pieces,
and no rank ever has all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

import torch

from hpnb.placement import FLAT, Cut, Placement

Box = tuple[tuple[int, ...], torch.Tensor]  # where it begins in the whole; a view of the part, of its shape


def boxes(where: Placement, part: torch.Tensor) -> list[Box]:
    """The boxes of `part`, which has the shape `where.local_shape`; none if it is empty."""
    if part.numel() == 0:
        return []
    found: list[Box] = [((0,) * part.dim(), part)]
    for depth in reversed(range(len(where.cuts))):
        outer = replace(where, cuts=where.cuts[:depth]).local_shape
        found = [before for box in found for before in _before(box, where.cuts[depth], outer)]
    return found


def _before(box: Box, cut: Cut, outer: Sequence[int]) -> Iterator[Box]:
    """Where a box of what `cut` has left lies in what it has cut, which had the shape `outer`."""
    start, view = box
    if not outer and cut.dim != FLAT:  # a number has nothing to cut
        yield box
        return
    dim, passed = max(cut.dim, 0), 0
    low, high = start[dim], start[dim] + view.shape[dim]
    for first, last in cut.ranges:
        a, b = max(low, passed), min(high, passed + last - first)
        if a < b:
            piece, at = view.narrow(dim, a - low, b - a), first + a - passed
            if cut.dim == FLAT:
                yield from _folded(at, piece, outer)
            else:
                yield (*start[:dim], at, *start[dim + 1 :]), piece
        passed += last - first


def _folded(at: int, piece: torch.Tensor, shape: Sequence[int]) -> Iterator[Box]:
    """Elements (n,) from number `at` of a tensor of this shape."""
    done = 0
    for start, sizes in _runs(at, at + len(piece), shape):
        yield start, piece[done : done + prod(sizes)].view(sizes)
        done += prod(sizes)


def _runs(start: int, stop: int, shape: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Elements [start, stop) of a tensor, in the order of memory, as (begin, sizes) of boxes."""
    if not shape:
        yield (), ()
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    row = prod(shape[1:])
    first, before = divmod(start, row)
    last, after = divmod(stop, row)
    if first == last:  # within one row
        yield from _of_a_row(first, before, after, shape)
        return
    if before:
        yield from _of_a_row(first, before, row, shape)
        first += 1
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if after:
        yield from _of_a_row(last, 0, after, shape)


def _of_a_row(
    row: int, start: int, stop: int, shape: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for begin, sizes in _runs(start, stop, shape[1:]):
        yield (row, *begin), (1, *sizes)

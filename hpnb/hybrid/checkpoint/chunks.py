"""A rank's shard of a tensor as rectangular chunks, as torch.distributed.checkpoint stores them.

    full tensor (4, 6)            rows 1 to 3 along tp, then elements [4, 15) of those along dp
    . . . . . .
    . . . . # #                   offsets (1, 4), sizes (1, 2)      the end of a row
    # # # # # #                   offsets (2, 0), sizes (1, 6)      a full row
    # # # . . .                   offsets (3, 0), sizes (1, 3)      the beginning of a row

However often a parameter is cut, its shard is a few such chunks. A rank writes its own chunks, and reads from
any stored chunks the elements that overlap its own. So a state moves from layout to layout, and no rank ever
holds all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

import torch

from hpnb.placement import FLAT, Cut, Placement

Offsets = tuple[int, ...]
Chunk = tuple[Offsets, torch.Tensor]  # where it begins in the full tensor; a view of the shard, of its sizes


def chunks_of(placement: Placement, shard: torch.Tensor) -> list[Chunk]:
    """The chunks of `shard`, which has the shape `placement.local_shape`; none if it is empty."""
    if shard.numel() == 0:
        return []
    chunks: list[Chunk] = [((0,) * shard.dim(), shard)]
    for depth in reversed(range(len(placement.cuts))):
        outer_shape = replace(placement, cuts=placement.cuts[:depth]).local_shape
        cut = placement.cuts[depth]
        chunks = [before for chunk in chunks for before in _undo_cut(chunk, cut, outer_shape)]
    return chunks


def _undo_cut(chunk: Chunk, cut: Cut, outer_shape: Sequence[int]) -> Iterator[Chunk]:
    """Where a chunk of what `cut` has left lies in the tensor before it, which had the shape
    `outer_shape`."""
    offsets, view = chunk
    if not outer_shape and cut.dim != FLAT:  # a number has nothing to cut
        yield chunk
        return
    dim, passed = max(cut.dim, 0), 0
    low, high = offsets[dim], offsets[dim] + view.shape[dim]
    for first, last in cut.ranges:
        start, stop = max(low, passed), min(high, passed + last - first)
        if start < stop:
            part, offset = view.narrow(dim, start - low, stop - start), first + start - passed
            if cut.dim == FLAT:
                yield from _unflatten(offset, part, outer_shape)
            else:
                yield (*offsets[:dim], offset, *offsets[dim + 1 :]), part
        passed += last - first


def _unflatten(offset: int, elements: torch.Tensor, shape: Sequence[int]) -> Iterator[Chunk]:
    """The chunks of `elements` (n,), which begin at the flat `offset` of a tensor of this shape."""
    done = 0
    for offsets, sizes in _rectangles(offset, offset + len(elements), shape):
        yield offsets, elements[done : done + prod(sizes)].view(sizes)
        done += prod(sizes)


def _rectangles(start: int, stop: int, shape: Sequence[int]) -> Iterator[tuple[Offsets, Offsets]]:
    """Elements [start, stop) of a tensor, in the order of memory, as (offsets, sizes) of rectangles."""
    if not shape:
        yield (), ()
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    row_size = prod(shape[1:])
    first, before = divmod(start, row_size)
    last, after = divmod(stop, row_size)
    if first == last:  # within one row
        yield from _in_row(first, before, after, shape)
        return
    if before:
        yield from _in_row(first, before, row_size, shape)
        first += 1
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if after:
        yield from _in_row(last, 0, after, shape)


def _in_row(row: int, start: int, stop: int, shape: Sequence[int]) -> Iterator[tuple[Offsets, Offsets]]:
    for offsets, sizes in _rectangles(start, stop, shape[1:]):
        yield (row, *offsets), (1, *sizes)

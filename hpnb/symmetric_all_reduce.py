"""Sums over the GPUs of one machine by their copy engines.

    on rank r of t               flat is cut into t parts; every rank answers for one
    copy engines  part p -> p    for every p: now each rank has t versions of its part
    compute       sum them       in rank order, rounded once: the result is the same bits on every rank
    copy engines  sum -> all     now each rank has all sums

NCCL reduces with kernels, which hold multiprocessors as long as they run (24 of an H200's 132). A matmul that
is made for all of them and starts beside one has to wait with a part of itself until that is over: those of
GPT-2 XL that met an all-reduce of gradients took 817 in place of 440 us on two H200s. Here multiprocessors
are needed for the sum alone, which passes once over a t-th of the bytes, and for a copy at the end.

A rank's memory has slots of 2 t places. A message is written when its receiver has emptied the slot:

    slot    | version of rank 0 | ... | version of t-1 | sum of rank 0 | ... | sum of t-1 |
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import torch

from hpnb.mesh import Axis
from hpnb.record.traffic import sent
from hpnb.symmetric_memory import SymmetricMemory, have_one_gpu_each, open_symmetric_memory

PLACE = 2**23  # bytes of a part
SLOTS = 2
_EMPTY, _VERSION, _SUM = (SLOTS * what for what in range(3))  # channels, one a slot


class SymmetricAllReduce:
    """All-reduces along `axis`. All its ranks make it together, and call it in one order.

    Args:
        memory: that of all ranks, `bytes_needed(t)` on each.
    """

    def __init__(self, axis: Axis, memory: SymmetricMemory) -> None:
        self.axis, self._memory = axis, memory
        self._others = [place for place in range(axis.size) if place != axis.rank]
        self._turns = count()
        self._views: dict[tuple[object, ...], torch.Tensor] = {}  # messages come in few shapes

    def all_reduce(self, flat: torch.Tensor, average: bool = False) -> None:
        """Sum `flat` (n,) over the ranks, in place, on the current stream; or take the mean."""
        size = self.axis.size
        for piece in flat.split(size * (PLACE // flat.element_size())):
            self._reduce(piece.tensor_split(size), average)

    def _reduce(self, parts: Sequence[torch.Tensor], average: bool) -> None:
        memory, me, others = self._memory, self.axis.rank, self._others
        turn = next(self._turns)
        slot, own = turn % SLOTS, parts[me]
        for p in others:
            if turn >= SLOTS:
                memory.wait_signal(p, _EMPTY + slot)
            self._write(p, slot, me, parts[p])
            memory.put_signal(p, _VERSION + slot)
        versions = self._places(slot, own)
        versions[me].copy_(own)
        for p in others:
            memory.wait_signal(p, _VERSION + slot)
        (torch.mean if average else torch.sum)(versions, 0, out=own)
        for p in others:
            self._write(p, slot, self.axis.size + me, own)
            memory.put_signal(p, _SUM + slot)
        for p in others:
            memory.wait_signal(p, _SUM + slot)
            parts[p].copy_(self._place(me, slot, self.axis.size + p, parts[p]))
            memory.put_signal(p, _EMPTY + slot)

    def _write(self, rank: int, slot: int, place: int, part: torch.Tensor) -> None:
        self._place(rank, slot, place, part).copy_(part)
        sent(self.axis.name, part.nbytes, (self.axis.ranks[self.axis.rank], self.axis.ranks[rank]))

    def _place(self, rank: int, slot: int, place: int, like: torch.Tensor) -> torch.Tensor:
        """A place in a rank's memory, as long as `like`."""
        return self._view(rank, slot, place, like.dtype, (like.numel(),))

    def _places(self, slot: int, like: torch.Tensor) -> torch.Tensor:
        """This rank's versions, (t, n) for a part `like` (n,)."""
        every = (self.axis.size, PLACE // like.element_size())
        return self._view(self.axis.rank, slot, 0, like.dtype, every)[:, : like.numel()]

    def _view(
        self, rank: int, slot: int, place: int, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> torch.Tensor:
        key = (rank, slot, place, dtype, shape)
        if key not in self._views:
            start = (slot * 2 * self.axis.size + place) * (PLACE // dtype.itemsize)
            self._views[key] = self._memory.get_buffer(rank, shape, dtype, start)
        return self._views[key]


def bytes_needed(ranks: int) -> int:
    """Of every rank's memory."""
    return SLOTS * 2 * ranks * PLACE


def make_symmetric_all_reduce(axis: Axis, device: torch.device) -> SymmetricAllReduce | None:
    """For the GPUs of `axis`, if one machine has them and lets them; else None, on all ranks alike."""
    if device.type != "cuda" or axis.size == 1 or not have_one_gpu_each(axis, device):
        return None
    memory = open_symmetric_memory(axis, bytes_needed(axis.size), device)
    return None if memory is None else SymmetricAllReduce(axis, memory)


__all__ = ["PLACE", "SymmetricAllReduce", "bytes_needed", "make_symmetric_all_reduce"]

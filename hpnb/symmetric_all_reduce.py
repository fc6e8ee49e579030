"""An all-reduce over the GPUs of one node by their copy engines.

    on rank r of t               the flat tensor has t parts; rank p sums part p
    copy engines  part p -> p    for every p: now each rank has t versions of its part
    compute       sum them       in rank order, rounded once: the result is the same bits on every rank
    copy engines  sum -> all     now each rank has all sums

NCCL reduces with kernels, which hold multiprocessors as long as they run (24 of an H200's 132). A matmul that
is tuned for all of them and starts beside one has to wait with a part of its work until that is over: on two
H200s, the matmuls of GPT-2 XL that met an all-reduce of gradients took 817 instead of 440 us. Here
only the sum and a copy at the end need multiprocessors, and the sum passes once over a t-th of the bytes.

A rank's memory has slots of 2 t places. A rank writes a message once its receiver has emptied the slot:

    slot    | version of rank 0 | ... | version of t-1 | sum of rank 0 | ... | sum of t-1 |
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import torch

from hpnb.mesh import Axis
from hpnb.record.traffic import count_send
from hpnb.symmetric_memory import SymmetricMemory, open_symmetric_memory, share_a_node

PLACE = 2**23  # bytes of a part
SLOTS = 2
_EMPTY, _VERSION, _SUM = (SLOTS * kind for kind in range(3))  # first channel of a kind; one channel a slot


class SymmetricAllReduce:
    """All-reduces along `axis`. All its ranks construct it together, and call it in the same order.

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
        memory, rank, others = self._memory, self.axis.rank, self._others
        turn = next(self._turns)
        slot, part = turn % SLOTS, parts[rank]  # this rank sums `part`
        for p in others:
            if turn >= SLOTS:
                memory.wait_signal(p, _EMPTY + slot)
            self._write(p, slot, rank, parts[p])
            memory.put_signal(p, _VERSION + slot)
        versions = self._versions(slot, part)
        versions[rank].copy_(part)
        for p in others:
            memory.wait_signal(p, _VERSION + slot)
        (torch.mean if average else torch.sum)(versions, 0, out=part)
        for p in others:
            self._write(p, slot, self.axis.size + rank, part)
            memory.put_signal(p, _SUM + slot)
        for p in others:
            memory.wait_signal(p, _SUM + slot)
            parts[p].copy_(self._place(rank, slot, self.axis.size + p, parts[p]))
            memory.put_signal(p, _EMPTY + slot)

    def _write(self, rank: int, slot: int, place: int, part: torch.Tensor) -> None:
        self._place(rank, slot, place, part).copy_(part)
        count_send(self.axis.name, part.nbytes, (self.axis.ranks[self.axis.rank], self.axis.ranks[rank]))

    def _place(self, rank: int, slot: int, place: int, like: torch.Tensor) -> torch.Tensor:
        """A place in a rank's memory, as long as `like`."""
        return self._view(rank, slot, place, like.dtype, (like.numel(),))

    def _versions(self, slot: int, part: torch.Tensor) -> torch.Tensor:
        """All ranks' versions of this rank's `part` (n,): (t, n)."""
        places = (self.axis.size, PLACE // part.element_size())
        return self._view(self.axis.rank, slot, 0, part.dtype, places)[:, : part.numel()]

    def _view(
        self, rank: int, slot: int, place: int, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> torch.Tensor:
        key = (rank, slot, place, dtype, shape)
        if key not in self._views:
            start = (slot * 2 * self.axis.size + place) * (PLACE // dtype.itemsize)
            self._views[key] = self._memory.get_buffer(rank, shape, dtype, start)
        return self._views[key]


def bytes_needed(ranks: int) -> int:
    """Bytes of memory that each rank has to open."""
    return SLOTS * 2 * ranks * PLACE


def make_symmetric_all_reduce(axis: Axis, device: torch.device) -> SymmetricAllReduce | None:
    """An all-reduce for the GPUs of `axis`, where they are on one node and open their memory to each other;
    else None. All ranks get the same answer."""
    if device.type != "cuda" or axis.size == 1 or not share_a_node(axis, device):
        return None
    memory = open_symmetric_memory(axis, bytes_needed(axis.size), device)
    return None if memory is None else SymmetricAllReduce(axis, memory)

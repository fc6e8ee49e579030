"""Transfers between GPUs of one machine by their copy engines: no multiprocessor is taken from the matmuls.

    sender, on a stream of its own             receiver, on its compute stream
    wait for "free" of slot k mod n            wait for "arrived" of slot k mod n
    copy engine: y -> slot                     slot -> x
    signal "arrived"                           signal "free"

NCCL moves a message with kernels on both sides. They hold multiprocessors from when they are launched until
the other side has come, and a matmul beside them, made for all multiprocessors, takes up to a third longer.
Here every rank opens a few slots of its memory to the others (PyTorch's symmetric memory). They write into
them, and signals between GPUs say when: no host waits, and a stream only for what it needs.

Slots have one size, so all ranks must agree on it. The first step of a new shape therefore goes over process
groups (`transfers.GroupQueue`), and those after it through here.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hpnb.mesh import Axis
from hpnb.pipeline_parallel.transfers import Arrival, MessageQueue, Pair, Shape
from hpnb.record.recorder import begun
from hpnb.record.traffic import sent

SLOTS = 4  # messages that may lie in the receiver's memory, for each queue
_ALIGN = 512  # bytes: where the next tensor of a message may begin


class SymmetricTransfers:
    """Slots in the memory of every rank of `axis`. All its ranks make it, and ask it to `fit`, together.

    Attributes:
        queues: as `transfers.queues` gives them; none before `fit`, and none where it cannot be done.
    """

    def __init__(self, axis: Axis, pairs: Collection[Pair], device: torch.device) -> None:
        self.axis, self.device, self._pairs = axis, device, sorted(pairs)
        self.queues: dict[Pair, MessageQueue] = {}
        self._capacity = 0
        self._works = device.type == "cuda" and axis.size > 1 and _share_a_machine(axis, device)

    def fit(self, messages: Sequence[Sequence[Shape]]) -> None:
        """Make slots large enough for `messages`, which are those that this rank sends or receives."""
        if not self._works:
            return
        sizes: list[int] = [0] * self.axis.size
        dist.all_gather_object(sizes, max((_places(m)[1] for m in messages), default=0), self.axis.group)
        if max(sizes) <= self._capacity:
            return
        torch.cuda.synchronize()  # what lies in the slots of before has been taken
        self._capacity = max(sizes)
        memory = self._open()
        if memory is not None:
            self.queues = {pair: SymmetricQueue(self.axis, pair, memory, self._offset(pair), self._capacity)
                           for pair in self._pairs if self.axis.rank in pair}  # fmt: skip

    def _offset(self, pair: Pair) -> int:
        """Where the slots of a queue begin in its receiver's memory."""
        senders = [source for source, destination in self._pairs if destination == pair[1]]
        return senders.index(pair[0]) * SLOTS * self._capacity

    def _open(self) -> Any:
        """The memory of all ranks; None, on all of them, where one could not."""
        from torch.distributed import _symmetric_memory as symmetric

        most = max(sum(1 for _, to in self._pairs if to == place) for place in range(self.axis.size))
        memory, error = None, ""
        try:
            own = symmetric.empty(most * SLOTS * self._capacity, dtype=torch.uint8, device=self.device)
            memory = symmetric.rendezvous(own, self.axis.group)
        except RuntimeError as raised:
            error = str(raised)
        errors: list[str] = [""] * self.axis.size
        dist.all_gather_object(errors, error, self.axis.group)
        self._works = not any(errors)
        return memory if self._works else None


class SymmetricQueue:
    """Messages from one place of `axis` to another, in order; see `transfers.Queue`."""

    def __init__(self, axis: Axis, pair: Pair, memory: Any, offset: int, capacity: int) -> None:
        self.axis, self._pair, self._memory = axis, pair, memory
        self._offset, self._capacity = offset, capacity
        self._ranks = axis.ranks[pair[0]], axis.ranks[pair[1]]
        self._stream = torch.cuda.Stream(priority=-1)
        self._count = 0  # messages that have been sent, or taken
        self._posted = 0
        self._coming: deque[tuple[list[torch.Tensor], Sequence[Shape]]] = deque()
        self._views: dict[Any, torch.Tensor] = {}

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send them, once what was computed so far is done."""
        if not tensors:
            return
        slot, receiver = self._count % SLOTS, self._pair[1]
        views = self._slot(slot, [(t.shape, t.dtype) for t in tensors])
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if self._count >= SLOTS:
                self._memory.wait_signal(receiver, _free(slot))
            for tensor, view in zip(tensors, views, strict=True):
                ended = begun("send", self.axis.name, tensor.nbytes, self._ranks)
                view.copy_(tensor, non_blocking=True)
                sent(self.axis.name, tensor.nbytes, self._ranks)
                if ended is not None:
                    ended()
                tensor.record_stream(self._stream)
            self._memory.put_signal(receiver, _arrived(slot))
        self._count += 1

    def post(self, like: Sequence[Shape]) -> Arrival:
        """Tensors of these shapes and dtypes are coming."""
        tensors: list[torch.Tensor] = []
        if not like:
            return Arrival(tensors, lambda: None)
        self._posted += 1
        self._coming.append((tensors, like))
        number = self._posted
        return Arrival(tensors, lambda: self._take(number))

    def _take(self, number: int) -> None:
        """Take messages out of their slots, in the order in which they were sent, up to this one."""
        sender = self._pair[0]
        while self._count < number:
            slot, (tensors, like) = self._count % SLOTS, self._coming.popleft()
            self._memory.wait_signal(sender, _arrived(slot))
            tensors.extend(view.clone() for view in self._slot(slot, like))
            self._memory.put_signal(sender, _free(slot))
            self._count += 1

    def _slot(self, slot: int, like: Sequence[Shape]) -> list[torch.Tensor]:
        """The tensors of a message in the receiver's memory."""
        found = []
        for (shape, dtype), place in zip(like, _places(like)[0], strict=True):
            key = (slot, shape, dtype, place)
            if not shape.numel():  # a microbatch may have no rows
                self._views.setdefault(key, torch.empty(shape, dtype=dtype, device="cuda"))
            if key not in self._views:
                start = (self._offset + slot * self._capacity + place) // dtype.itemsize
                self._views[key] = self._memory.get_buffer(self._pair[1], shape, dtype, start)
            found.append(self._views[key])
        return found

    def tell(self, what: Any) -> None:
        raise RuntimeError("shapes are not known yet: this step has to go over process groups")

    def hear(self) -> Any:
        raise RuntimeError("shapes are not known yet: this step has to go over process groups")

    def flush(self) -> None:
        """Nothing is left to the host."""


def _arrived(slot: int) -> int:
    return slot


def _free(slot: int) -> int:
    return SLOTS + slot


def _places(like: Sequence[Shape]) -> tuple[list[int], int]:
    """Where in a slot each tensor begins, and how many bytes the message has."""
    places, end = [], 0
    for shape, dtype in like:
        places.append(end)
        end += -(-shape.numel() * dtype.itemsize // _ALIGN) * _ALIGN
    return places, end


def _share_a_machine(axis: Axis, device: torch.device) -> bool:
    """Whether all ranks are on one host, and their GPUs can write into each other's memory."""
    mine = (socket.gethostname(), device.index)
    everyone: list[tuple[str, int]] = [mine] * axis.size
    dist.all_gather_object(everyone, mine, axis.group)
    return len({host for host, _ in everyone}) == 1 and len({index for _, index in everyone}) == axis.size

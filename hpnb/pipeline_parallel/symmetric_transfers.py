"""Transfers between the GPUs of one node by their copy engines, which take no multiprocessor from matmuls.

    sender, on a separate stream               receiver, on its compute stream
    wait for "free" of slot k mod n            wait for "arrived" of slot k mod n
    copy engine: y -> slot                     slot -> x
    signal "arrived"                           signal "free"

NCCL moves a message with kernels on both sides. They hold multiprocessors from their launch until the other
side has come, and a matmul that runs beside them, tuned for all multiprocessors, takes up to a third longer.
Here every rank opens a few slots of its memory to the others (`hpnb.symmetric_memory`). They write into the
slots, and signals between GPUs say when: no process waits, and a stream waits only for what it needs.

All slots have one size, so all ranks must agree on it. The first step with a new shape therefore goes another
way (`step_queues.py`), and the later ones through here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hpnb.mesh import Axis
from hpnb.pipeline_parallel.transfers import MessageQueue, PendingReceive, Route, TensorSpec
from hpnb.record.recorder import begin_communication
from hpnb.record.traffic import count_send
from hpnb.symmetric_memory import SymmetricMemory, open_symmetric_memory, share_a_node

SLOTS = 4  # messages of one queue that may lie in the receiver's memory
_ALIGN = 512  # bytes: tensors of a message begin at multiples of it


class SymmetricTransfers:
    """Slots in the memory of every rank of `axis`. All its ranks construct it, and call `reserve`, together.

    Attributes:
        queues: as `transfers.make_queues` gives them. Empty before `reserve`, and where the GPUs cannot open
            slots that are large enough: then all messages have to go over process groups.
    """

    def __init__(self, axis: Axis, routes: Collection[Route], device: torch.device) -> None:
        self.axis, self.device, self._routes = axis, device, sorted(routes)
        self.queues: dict[Route, MessageQueue] = {}
        self._slot_bytes = 0
        self._available = device.type == "cuda" and axis.size > 1 and share_a_node(axis, device)

    def reserve(self, messages: Sequence[Sequence[TensorSpec]]) -> None:
        """Make the slots large enough for `messages`, the ones that this rank sends or receives."""
        if not self._available:
            return
        sizes: list[int] = [0] * self.axis.size
        needed = max((_message_layout(message)[1] for message in messages), default=0)
        dist.all_gather_object(sizes, needed, self.axis.group)
        if max(sizes) <= self._slot_bytes:
            return
        torch.cuda.synchronize()  # every message in the old slots has been taken
        self._slot_bytes = max(sizes)
        # The old queues go in any case: in slots that are too small one message would overwrite the next.
        old_queues, self.queues = self.queues, {}
        most_senders = max(len(self._senders_to(rank)) for rank in range(self.axis.size))
        memory = open_symmetric_memory(self.axis, most_senders * SLOTS * self._slot_bytes, self.device)
        del old_queues  # their memory was held until the new one was there
        if memory is None:
            self._available = False
            return
        for route in self._routes:
            if self.axis.rank in route:
                # Where the slots of this queue begin in its receiver's memory.
                offset = self._senders_to(route[1]).index(route[0]) * SLOTS * self._slot_bytes
                self.queues[route] = SymmetricQueue(self.axis, route, memory, offset, self._slot_bytes)

    def _senders_to(self, rank: int) -> list[int]:
        return [source for source, destination in self._routes if destination == rank]


class SymmetricQueue:
    """Messages from one rank of `axis` to another, in order; see `transfers.MessageQueue`.

    Args:
        offset: bytes before its slots in the receiver's memory.
    """

    def __init__(
        self, axis: Axis, route: Route, memory: SymmetricMemory, offset: int, slot_bytes: int
    ) -> None:
        self.axis, self._route, self._memory = axis, route, memory
        self._offset, self._slot_bytes = offset, slot_bytes
        self._ranks = axis.ranks[route[0]], axis.ranks[route[1]]
        self._stream = torch.cuda.Stream(priority=-1)
        self._count = 0  # messages sent so far, or taken
        self._posted = 0
        self._coming: deque[tuple[list[torch.Tensor], Sequence[TensorSpec]]] = deque()
        self._views: dict[Any, torch.Tensor] = {}

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        if not tensors:
            return
        slot, receiver = self._count % SLOTS, self._route[1]
        views = self._slot_views(slot, [(t.shape, t.dtype) for t in tensors])
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if self._count >= SLOTS:
                self._memory.wait_signal(receiver, _free(slot))
            for tensor, view in zip(tensors, views, strict=True):
                ended = begin_communication("send", self.axis.name, tensor.nbytes, self._ranks)
                view.copy_(tensor, non_blocking=True)
                count_send(self.axis.name, tensor.nbytes, self._ranks)
                if ended is not None:
                    ended()
                tensor.record_stream(self._stream)
            self._memory.put_signal(receiver, _arrived(slot))
        self._count += 1

    def post_receive(self, specs: Sequence[TensorSpec]) -> PendingReceive:
        tensors: list[torch.Tensor] = []
        if not specs:
            return PendingReceive(tensors, lambda: None)
        self._posted += 1
        self._coming.append((tensors, specs))
        number = self._posted
        return PendingReceive(tensors, lambda: self._take(number))

    def _take(self, number: int) -> None:
        """Copy messages out of their slots, in the order in which they were sent, up to this one."""
        sender = self._route[0]
        while self._count < number:
            slot, (tensors, specs) = self._count % SLOTS, self._coming.popleft()
            self._memory.wait_signal(sender, _arrived(slot))
            tensors.extend(view.clone() for view in self._slot_views(slot, specs))
            self._memory.put_signal(sender, _free(slot))
            self._count += 1

    def _slot_views(self, slot: int, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
        """The tensors of a message in the receiver's memory."""
        views = []
        for (shape, dtype), start in zip(specs, _message_layout(specs)[0], strict=True):
            key = (slot, shape, dtype, start)
            if not shape.numel():  # a microbatch may have no samples
                self._views.setdefault(key, torch.empty(shape, dtype=dtype, device="cuda"))
            if key not in self._views:
                elements = (self._offset + slot * self._slot_bytes + start) // dtype.itemsize
                self._views[key] = self._memory.get_buffer(self._route[1], shape, dtype, elements)
            views.append(self._views[key])
        return views

    def send_object(self, value: Any) -> None:
        raise RuntimeError("shapes are not known yet: this step has to go over process groups")

    def receive_object(self) -> Any:
        raise RuntimeError("shapes are not known yet: this step has to go over process groups")

    def flush(self) -> None:
        """Nothing is left for the process to wait for."""


def _arrived(slot: int) -> int:
    return slot


def _free(slot: int) -> int:
    return SLOTS + slot


def _message_layout(specs: Sequence[TensorSpec]) -> tuple[list[int], int]:
    """(the byte at which each tensor begins in a slot, bytes of the message)."""
    starts, end = [], 0
    for shape, dtype in specs:
        starts.append(end)
        end += -(-shape.numel() * dtype.itemsize // _ALIGN) * _ALIGN
    return starts, end

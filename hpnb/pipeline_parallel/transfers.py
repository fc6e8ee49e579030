"""Tensors from one rank of a pipeline to another, while both compute.

    send      starts when what was computed so far is done; the host goes on, and so does the compute
    post      says early where a tensor is to arrive, so that a send never waits for its receiver
    wait      what is computed from here on sees what has arrived

Each ordered pair of ranks is a queue of its own: messages arrive in the order in which they were sent, so a
receiver posts in the sender's order, whatever it needs first. On a GPU every queue has its own group and
stream. On one they share, a receive that was posted early would block whatever came behind it, and two ranks
that both do so would wait for each other. On a CPU gloo's threads carry them.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from hpnb.mesh import Axis
from hpnb.record.recorder import begun, waiting

Pair = tuple[int, int]  # places on the axis: from, to
Shape = tuple[torch.Size, torch.dtype]
CTAS = 4  # multiprocessors that a transfer over NCCL may use: more would be missing to the matmuls beside it
_FORTH, _BACK, _DATA = 1, 2, 3  # tags


class Arrival:
    """Tensors that are on their way here."""

    def __init__(self, tensors: Sequence[torch.Tensor], join: Callable[[], object]) -> None:
        self._tensors, self._join = tensors, join

    def wait(self) -> list[torch.Tensor]:
        """From here on they may be used."""
        with waiting():
            self._join()
        return list(self._tensors)


class HostMessages:
    """Small objects between the hosts at both ends of a queue, over gloo: where shapes are not known yet."""

    def __init__(self, axis: Axis, pair: Pair) -> None:
        self._group = axis.group
        self._source, self._destination = (axis.ranks[place] for place in pair)
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []

    def tell(self, what: Any) -> None:
        """From the source to the destination, which calls `hear`."""
        self._send(what, self._destination, _FORTH)

    def hear(self) -> Any:
        """What the source told; the host waits for it."""
        return self._receive(self._source, _FORTH)

    def tell_back(self, what: Any) -> None:
        """From the destination to the source, which calls `hear_back`."""
        self._send(what, self._source, _BACK)

    def hear_back(self) -> Any:
        return self._receive(self._destination, _BACK)

    def flush(self) -> None:
        """Wait until gloo has read what it sends."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _send(self, what: Any, to: int, tag: int) -> None:
        words = torch.frombuffer(bytearray(pickle.dumps(what)), dtype=torch.uint8)
        for tensor in (torch.tensor(words.numel()), words):
            work = dist.isend(tensor, to, self._group, tag)
            assert work is not None
            self._sent.append((work, tensor))

    def _receive(self, source: int, tag: int) -> Any:
        size = torch.zeros((), dtype=torch.long)
        dist.recv(size, source, self._group, tag)
        words = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(words, source, self._group, tag)
        with warnings.catch_warnings():  # PyTorch warns of a class that it uses itself
            warnings.simplefilter("ignore", FutureWarning)
            return pickle.loads(words.numpy().tobytes())


class MessageQueue(Protocol):
    """Messages from one place of an axis to another, in order."""

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send them, once what was computed so far is done."""

    def post(self, like: Sequence[Shape]) -> Arrival:
        """Make room for tensors of these shapes and dtypes, and let them arrive."""

    def tell(self, what: Any) -> None:
        """Send a small object from host to host; the other side calls `hear`."""

    def hear(self) -> Any:
        """What the other side told; the host waits for it."""

    def flush(self) -> None:
        """Wait for what the host has to wait for: that gloo has read what it sends."""


class GroupQueue(HostMessages):
    """A queue over a process group: NCCL's on GPUs, gloo's on CPUs."""

    def __init__(self, axis: Axis, pair: Pair, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(axis, pair)
        self.axis, self.group, self.device = axis, group, device
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        ranks = (self._source, self._destination)
        for tensor in (t.contiguous() for t in tensors if t.numel()):  # a microbatch may have no rows
            if self._stream is None:
                work = dist.isend(tensor, self._destination, self.group, _DATA)
                assert work is not None
                self._sent.append((work, tensor))  # gloo reads it until it has been sent
                continue
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                ended = begun("send", self.axis.name, tensor.nbytes, ranks)
                dist.send(tensor, self._destination, self.group)
                if ended is not None:
                    ended()
            tensor.record_stream(self._stream)

    def post(self, like: Sequence[Shape]) -> Arrival:
        tensors = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in like]
        if self._stream is None:
            full = [tensor for tensor in tensors if tensor.numel()]
            works = [dist.irecv(tensor, self._source, self.group, _DATA) for tensor in full]
            return Arrival(tensors, lambda: [work.wait() for work in works if work is not None])
        self._stream.wait_stream(torch.cuda.current_stream())  # whose memory this was until now
        with torch.cuda.stream(self._stream):
            for tensor in tensors:
                if tensor.numel():
                    dist.recv(tensor, self._source, self.group)
            arrived = self._stream.record_event()
        return Arrival(tensors, lambda: torch.cuda.current_stream().wait_event(arrived))


def queues(axis: Axis, pairs: Collection[Pair], device: torch.device) -> dict[Pair, MessageQueue]:
    """The queues of `pairs` that begin or end here. All ranks of the world call it with the same pairs."""
    if device.type != "cuda":
        return {pair: GroupQueue(axis, pair, axis.group, device) for pair in pairs if axis.rank in pair}
    groups = _groups(axis, tuple(sorted(pairs)), device)
    return {pair: GroupQueue(axis, pair, group, device) for pair, group in groups.items()}


# A group keeps memory on the GPU until the process group of all ranks goes: pipelines share them.
_made: WeakKeyDictionary[dist.ProcessGroup, dict[Any, dict[Pair, dist.ProcessGroup]]] = WeakKeyDictionary()


def _groups(axis: Axis, pairs: tuple[Pair, ...], device: torch.device) -> dict[Pair, dist.ProcessGroup]:
    """One group of two ranks for each pair that this rank is in.

    A new group is split off from that of all ranks, so everybody takes part each time: in rounds in which no
    rank is in two pairs, alone if it is in none.
    """
    world = dist.group.WORLD
    assert world is not None
    known = _made.setdefault(world, {})
    key = (axis.name, axis.ranks, pairs)
    if key not in known:
        mine: dict[Pair, dist.ProcessGroup] = {}
        for together in rounds(pairs):
            pair = next((pair for pair in together if axis.rank in pair), None)
            members = sorted(axis.ranks[place] for place in pair or (axis.rank,))
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            options.config.max_ctas = CTAS
            group = dist.new_group(members, backend="nccl", pg_options=options, group_desc=axis.name,
                                   use_local_synchronization=True)  # fmt: skip
            assert isinstance(group, dist.ProcessGroup), "every rank that asks is a member"
            if pair is not None:
                _first_message(axis, pair, group, device)
                mine[pair] = group
        known[key] = mine
    return known[key]


def rounds(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """`pairs` in as many rounds as it takes for nobody to be in two pairs of one."""
    found: list[list[Pair]] = []
    for pair in pairs:
        for together in found:
            if not any(place in other for place in pair for other in together):
                together.append(pair)
                break
        else:
            found.append([pair])
    return found


def _first_message(axis: Axis, pair: Pair, group: dist.ProcessGroup, device: torch.device) -> None:
    """NCCL connects two ranks at their first message, and the host waits for it: here nobody waits twice."""
    value = torch.zeros(1, device=device)
    if axis.rank == pair[0]:
        dist.send(value, axis.ranks[pair[1]], group)
    else:
        dist.recv(value, axis.ranks[pair[0]], group)
    torch.cuda.synchronize(device)

"""Tensors from one rank of a pipeline to another, while both compute.

    send           starts when the work launched so far is done; the process and its kernels go on
    post_receive   expects tensors early, so that no sender waits for its receiver
    wait           work launched from here on runs after the tensors have arrived

Each ordered pair of ranks, a route, has a queue. Messages arrive in the order in which they were sent, so a
receiver posts in the sender's order, whatever it needs first. Over NCCL every route has a group and a stream
for itself. If routes shared one, a receive that was posted early would block whatever came behind it, and two
ranks that both do so would wait for each other. On a CPU, and where ranks share a GPU, threads carry the
messages.
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
from hpnb.ranks.current_rank import collectives_on_streams
from hpnb.ranks.process_group import new_group
from hpnb.record.recorder import begin_communication, waiting

Route = tuple[int, int]  # ranks of the axis: source, destination
TensorSpec = tuple[torch.Size, torch.dtype]
CTAS = 4  # multiprocessors that a transfer over NCCL may use; the matmuls beside it need the others
_OBJECT, _TENSOR = 1, 2  # tags of messages


class PendingReceive:
    """Tensors that are on their way here."""

    def __init__(self, tensors: Sequence[torch.Tensor], wait: Callable[[], object]) -> None:
        self._tensors, self._wait = tensors, wait

    def wait(self) -> list[torch.Tensor]:
        """The tensors, once work launched from here on may read them."""
        with waiting():
            self._wait()
        return list(self._tensors)


class MessageQueue(Protocol):
    """Messages from one rank of an axis to another, in order."""

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send them as soon as the work launched so far is done."""

    def post_receive(self, specs: Sequence[TensorSpec]) -> PendingReceive:
        """Expect tensors of these shapes and dtypes, and let them arrive."""

    def send_object(self, value: Any) -> None:
        """Send a small object between the processes; the other side calls `receive_object`."""

    def receive_object(self) -> Any:
        """The object that the other side sent; this process waits for it."""

    def flush(self) -> None:
        """The step is over: wait until the tensors that were sent may be freed."""


class GroupQueue:
    """A queue over a process group, of whatever backend. Objects always travel over gloo.

    Over gloo every tensor that was sent stays here until `flush` at the end of the step. So on a CPU, and
    where ranks share a GPU, a step keeps the sent activations of all its microbatches, whatever the schedule
    has in flight, and memory that is measured there counts them.
    """

    def __init__(self, axis: Axis, route: Route, group: dist.ProcessGroup, device: torch.device) -> None:
        self.axis, self.group, self.device = axis, group, device
        self._source, self._destination = (axis.ranks[rank] for rank in route)
        self._sending: list[tuple[dist.Work, torch.Tensor]] = []
        self._stream = torch.cuda.Stream(device, priority=-1) if collectives_on_streams(device) else None

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        ranks = (self._source, self._destination)
        for tensor in (t.contiguous() for t in tensors if t.numel()):  # a microbatch may have no samples
            if self._stream is None:
                self._isend(tensor, self.group, _TENSOR)
                continue
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                ended = begin_communication("send", self.axis.name, tensor.nbytes, ranks)
                dist.send(tensor, self._destination, self.group)
                if ended is not None:
                    ended()
            tensor.record_stream(self._stream)

    def post_receive(self, specs: Sequence[TensorSpec]) -> PendingReceive:
        tensors = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in specs]
        nonempty = [tensor for tensor in tensors if tensor.numel()]
        if self._stream is None:
            works = [dist.irecv(tensor, self._source, self.group, _TENSOR) for tensor in nonempty]
            return PendingReceive(tensors, lambda: [work.wait() for work in works if work is not None])
        self._stream.wait_stream(torch.cuda.current_stream())  # which used this memory until now
        with torch.cuda.stream(self._stream):
            for tensor in nonempty:
                dist.recv(tensor, self._source, self.group)
            arrived = self._stream.record_event()
        return PendingReceive(tensors, lambda: torch.cuda.current_stream().wait_event(arrived))

    def send_object(self, value: Any) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        for tensor in (torch.tensor(data.numel()), data):
            self._isend(tensor, self.axis.group, _OBJECT)

    def receive_object(self) -> Any:
        size = torch.zeros((), dtype=torch.long)
        dist.recv(size, self._source, self.axis.group, _OBJECT)
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(data, self._source, self.axis.group, _OBJECT)
        with warnings.catch_warnings():  # PyTorch warns of a class that it uses itself
            warnings.simplefilter("ignore", FutureWarning)
            return pickle.loads(data.numpy().tobytes())

    def flush(self) -> None:
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()

    def _isend(self, tensor: torch.Tensor, group: dist.ProcessGroup, tag: int) -> None:
        work = dist.isend(tensor, self._destination, group, tag)
        assert work is not None
        self._sending.append((work, tensor))  # gloo reads it until it has been sent


class HostQueue(GroupQueue):
    """A queue between GPUs through the memory of their CPUs, over gloo: slow, and no kernel waits in it.

    The process waits for the work that it has launched when it sends, and for the message when it takes it.
    """

    def __init__(self, axis: Axis, route: Route, device: torch.device) -> None:
        super().__init__(axis, route, axis.group, torch.device("cpu"))
        self._gpu = device

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        super().send([tensor.to("cpu") for tensor in tensors])

    def post_receive(self, specs: Sequence[TensorSpec]) -> PendingReceive:
        coming, received = super().post_receive(specs), list[torch.Tensor]()
        return PendingReceive(received, lambda: received.extend(t.to(self._gpu) for t in coming.wait()))


def make_queues(axis: Axis, routes: Collection[Route], device: torch.device) -> dict[Route, MessageQueue]:
    """The queues of `routes` that begin or end here. All ranks of the world call it with the same routes."""
    if not collectives_on_streams(device):
        return {route: GroupQueue(axis, route, axis.group, device) for route in routes if axis.rank in route}
    groups = _route_groups(axis, tuple(sorted(routes)), device)
    return {route: GroupQueue(axis, route, group, device) for route, group in groups.items()}


# A group keeps memory on the GPU until the process group of all ranks goes, so pipelines share them.
_route_groups_of_world: WeakKeyDictionary[dist.ProcessGroup, dict[Any, dict[Route, dist.ProcessGroup]]]
_route_groups_of_world = WeakKeyDictionary()


def _route_groups(
    axis: Axis, routes: tuple[Route, ...], device: torch.device
) -> dict[Route, dist.ProcessGroup]:
    """One group of two ranks for each route that this rank is on.

    A new group is split off from that of all ranks, so every rank takes part each time. Routes without a
    common rank are made in one round; a rank that is on none of them makes a group alone.
    """
    world = dist.group.WORLD
    assert world is not None
    made = _route_groups_of_world.setdefault(world, {})
    key = (axis.name, axis.ranks, routes)
    if key not in made:
        groups: dict[Route, dist.ProcessGroup] = {}
        for disjoint in disjoint_rounds(routes):
            route = next((route for route in disjoint if axis.rank in route), None)
            members = sorted(axis.ranks[rank] for rank in route or (axis.rank,))
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            options.config.max_ctas = CTAS
            group = new_group(members, axis.name, backend="nccl", options=options)
            if route is not None:
                _connect(axis, route, group, device)
                groups[route] = group
        made[key] = groups
    return made[key]


def disjoint_rounds(routes: Sequence[Route]) -> list[list[Route]]:
    """`routes` in as few rounds as a greedy choice gives such that no rank is on two routes of a round."""
    rounds: list[list[Route]] = []
    for route in routes:
        for disjoint in rounds:
            if not any(rank in other for rank in route for other in disjoint):
                disjoint.append(route)
                break
        else:
            rounds.append([route])
    return rounds


def _connect(axis: Axis, route: Route, group: dist.ProcessGroup, device: torch.device) -> None:
    """Send one number: NCCL connects two ranks at their first message, and the process waits for that."""
    value = torch.zeros(1, device=device)
    if axis.rank == route[0]:
        dist.send(value, axis.ranks[route[1]], group)
    else:
        dist.recv(value, axis.ranks[route[0]], group)
    torch.cuda.synchronize(device)

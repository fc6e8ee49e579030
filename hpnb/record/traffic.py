"""How many bytes leave this rank, and in how many calls, along every axis of the mesh.

    with hpnb.record.traffic() as t:
        step()
    t.bytes["tp"], t.calls["tp"]

Every call of torch.distributed that this thread and its backward passes make inside is counted, be it hpnb's,
PyTorch's or yours; and what hpnb's pipelines write straight into another GPU's memory. Only hpnb's
comparisons of the first batches and of optimizers, which are made once, are left out.
Bytes are counted as a ring would move them, whatever algorithm the backend picks, so a count is the same
on every machine. With p ranks in the group and n bytes of the full tensor (the gathered result of a gather,
the input of a scatter),

    all-reduce                                        2 (p-1)/p n
    gather, all-gather, (reduce-)scatter,
    broadcast, reduce, all-to-all                       (p-1)/p n
    send                                                        n
    receive, barrier                                            0

Patarasuk & Yuan 2009 show that no algorithm for all-reduce moves fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from hpnb.ranks import shared_gpu_group
from hpnb.record.timeline import COLLECTIVE_OPS, Event


@dataclass(frozen=True, slots=True)
class Message:
    """One call as this rank made it: `bytes` leave the rank; `peer` is the other side of a send or receive,
    or the root of a broadcast, reduce, gather or scatter (a global rank), else -1; `group` are the ranks
    (global ones) that take part."""

    axis: str
    op: str
    bytes: float
    group: tuple[int, ...]
    peer: int = -1


class _Tally(dict[str, float]):
    """A count per axis; an axis that saw nothing counts 0."""

    def __missing__(self, key: str) -> float:
        return 0


@dataclass
class Traffic:
    """What left this rank: bytes and calls by axis, and the messages in order.

    The group of all ranks, which belongs to no axis, is counted under "world", and so is every group that was
    made without a description.
    """

    bytes: dict[str, float] = field(default_factory=_Tally)
    calls: dict[str, float] = field(default_factory=_Tally)
    messages: list[Message] = field(default_factory=list)

    @property
    def total(self) -> float:
        """Bytes over all axes."""
        return sum(self.bytes.values())

    def add(self, message: Message) -> None:
        self.bytes[message.axis] += message.bytes
        self.calls[message.axis] += 1
        self.messages.append(message)


@contextmanager
def traffic() -> Iterator[Traffic]:
    """Count the communication of this rank while the block runs, backward passes included.

    Counting looks at every operator, which slows the block down: do not time what you count.

    >>> def reduce():
    ...     axis = hpnb.Mesh(hpnb.Layout(tp=2)).tp
    ...     with hpnb.record.traffic() as t:
    ...         hpnb.comm.all_reduce(torch.ones(100), axis)
    ...     return t.calls["tp"], t.bytes["tp"]  # 2 (2-1)/2 x 400 bytes
    >>> hpnb.launch(reduce, ranks=2, device="cpu")
    [(1, 400.0), (1, 400.0)]
    """
    counted = Traffic()

    def observe(group: dist.ProcessGroup, op: str, nbytes: int, peer: int, leaving: float | None) -> None:
        if _uncounted:
            return
        ranks = tuple(dist.get_process_group_ranks(group))
        sent = ring_bytes(op, nbytes, len(ranks)) if leaving is None else leaving
        counted.add(Message(_axis(group), op, sent, ranks, ranks[peer] if peer >= 0 else -1))

    _counting.append(counted)
    shared_gpu_group.observers.append(observe)
    try:
        with _Counter(counted):
            yield counted
    finally:
        _counting.remove(counted)
        shared_gpu_group.observers.remove(observe)


_counting: list[Traffic] = []
_uncounted: list[bool] = []  # of hpnb, that are under way


@contextmanager
def uncounted() -> Iterator[None]:
    """What this process sends inside is a check that hpnb makes once, and no part of anybody's traffic."""
    _uncounted.append(True)
    try:
        yield
    finally:
        _uncounted.pop()


def count_send(axis: str, nbytes: float, group: tuple[int, int]) -> None:
    """Count a send that torch.distributed does not see, from the first rank of `group` to the second."""
    for counted in _counting:
        counted.add(Message(axis, "send", nbytes, group, group[1]))


def count_replay(events: Sequence[Event]) -> None:
    """Count what a CUDA graph has just sent, as its capture noted it (`recorder.capturing`), which does not
    know the root of a broadcast or a reduction."""
    for counted in _counting:
        for event in events:
            counted.add(Message(event.axis, event.op, event.bytes, event.group))


_KNOWN = COLLECTIVE_OPS | {"send", "receive", "recv"}


def ring_bytes(op: str, nbytes: float, ranks: int) -> float:
    """Bytes that leave one of `ranks` ranks in one call; the table above. `nbytes` are of the full tensor.

    Raises:
        ValueError: no operation of the table, fewer than 1 rank, or less than 0 bytes.
    """
    if op not in _KNOWN:
        raise ValueError(f"{op!r} is no communication; use {', '.join(sorted(_KNOWN))}")
    if not ranks >= 1:
        raise ValueError(f"{op} over ranks={ranks} sends nothing; use 1 rank or more")
    if not nbytes >= 0:
        raise ValueError(f"{op} of nbytes={nbytes} cannot be; use 0 bytes or more")
    if op == "send":
        return nbytes
    if op in ("receive", "recv", "barrier"):
        return 0.0
    once = (ranks - 1) * nbytes / ranks
    return 2 * once if op == "all_reduce" else once


# --- reading calls off the dispatcher ----------------------------------------------------------


def _size(value: Any) -> int:
    """Bytes of a tensor, or of all tensors in nested lists."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(_size(item) for item in value) if isinstance(value, list | tuple) else 0


Reader = Callable[[tuple[Any, ...], int], int]  # (arguments, ranks) -> bytes of the full tensor


def _of(index: int) -> Reader:
    return lambda args, ranks: _size(args[index])


def _times_ranks(index: int) -> Reader:
    return lambda args, ranks: _size(args[index]) * ranks


def _nothing(args: tuple[Any, ...], ranks: int) -> int:
    return 0


# operator -> (its name here, how to read the bytes of the full tensor off its arguments)
_ROOTED = ("broadcast", "reduce", "gather", "scatter")  # whose first number is the place of their root
_OPERATORS: dict[str, tuple[str, Reader]] = {
    "c10d::allreduce_": ("all_reduce", _of(0)),
    "c10d::allreduce_coalesced_": ("all_reduce", _of(0)),
    "c10d::allgather_": ("all_gather", _of(0)),
    "c10d::allgather_coalesced_": ("all_gather", _of(0)),
    "c10d::_allgather_base_": ("all_gather", _of(0)),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", _of(0)),
    "c10d::reduce_scatter_": ("reduce_scatter", _of(1)),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", _of(1)),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", _of(1)),
    "c10d::broadcast_": ("broadcast", _of(0)),
    "c10d::reduce_": ("reduce", _of(0)),
    "c10d::gather_": ("gather", _times_ranks(1)),
    "c10d::scatter_": ("scatter", _times_ranks(0)),
    "c10d::alltoall_base_": ("all_to_all", _of(1)),
    "c10d::alltoall_": ("all_to_all", _of(1)),
    "c10d::send": ("send", _of(0)),
    "c10d::recv_": ("receive", _of(0)),
    "c10d::recv_any_source_": ("receive", _of(0)),
    "c10d::barrier": ("barrier", _nothing),
    "_c10d_functional::all_reduce": ("all_reduce", _of(0)),
    "_c10d_functional::all_reduce_": ("all_reduce", _of(0)),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", _of(0)),
    "_c10d_functional::all_reduce_coalesced_": ("all_reduce", _of(0)),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", _times_ranks(0)),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", _times_ranks(0)),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", _times_ranks(0)),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", _of(0)),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce_scatter", _of(0)),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", _of(0)),
    "_c10d_functional::all_to_all_single": ("all_to_all", _of(0)),
    "_dtensor::shard_dim_alltoall": ("all_to_all", _of(0)),
    "_c10d_functional::broadcast": ("broadcast", _of(0)),
    "_c10d_functional::broadcast_": ("broadcast", _of(0)),
}
_SILENT = frozenset({"_c10d_functional::wait_tensor", "_c10d_functional::wait_tensors",
                     "_c10d_functional::_wrap_tensor_autograd", "c10d::check_for_nan"})  # fmt: skip


class _Counter(TorchDispatchMode):
    """Sees every operator of this thread, and of the backward passes that it starts."""

    def __init__(self, counted: Traffic) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counted = counted

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(is_traceable_wrapper_subclass_type(t) for t in types):
            return NotImplemented  # a DTensor's operator comes again, as those that it is made of
        # Read before the call: some backends resize or release arguments.
        if not _uncounted and func.namespace in ("c10d", "_c10d_functional", "_dtensor"):
            name = func._schema.name
            if name in _OPERATORS:
                self._count(name, (*args, *(kwargs or {}).values()))
            elif name not in _SILENT and "monitored" not in name:
                raise NotImplementedError(f"record.traffic cannot count {name}; please report it")
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        op, read_bytes = _OPERATORS[name]
        group = _group(name, args)
        ranks = tuple(dist.get_process_group_ranks(group))
        peer = -1
        to_one = op in ("send", "receive") and not name.endswith("any_source_")
        if to_one or (op in _ROOTED and name.startswith("c10d")):
            peer = ranks[next(a for a in args if isinstance(a, int))]
        sent = ring_bytes(op, read_bytes(args, len(ranks)), len(ranks))
        if op == "all_to_all" and (uneven := _leaving(name, args, dist.get_rank(group))) is not None:
            sent = uneven
        self.counted.add(Message(_axis(group), op, sent, ranks, peer))


def _leaving(name: str, args: tuple[Any, ...], me: int) -> float | None:
    """Bytes of an all-to-all that are not for this rank itself, where its parts differ in size."""
    if name == "c10d::alltoall_":
        return _size([part for rank, part in enumerate(args[1]) if rank != me])
    tensor, splits = (args[1], args[4]) if name == "c10d::alltoall_base_" else (args[0], args[2])
    if not isinstance(splits, list) or not splits:
        return None
    return float(_size(tensor) * (sum(splits) - splits[me]) / max(1, sum(splits)))


def _group(name: str, args: tuple[Any, ...]) -> dist.ProcessGroup:
    if name.startswith("_"):  # functional collectives name their group, last
        named = next(a for a in reversed(args) if isinstance(a, str))
        group: dist.ProcessGroup = _resolve_process_group(named)  # type: ignore[arg-type]
        return group
    for arg in args:
        if type(arg).__name__ == "ScriptObject" and "ProcessGroup" in arg._type().name():
            return dist.ProcessGroup.unbox(arg)
    raise RuntimeError(f"{name} has no process group among its arguments")


def _axis(group: dist.ProcessGroup) -> str:
    # A mesh gives its groups the name of their axis. PyTorch calls the group of all ranks "default_pg", and a
    # group that somebody made without a description "undefined".
    name = group.group_desc
    return "world" if name in ("default_pg", "undefined", "") else name

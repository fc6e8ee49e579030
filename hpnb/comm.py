"""Collectives that autograd understands, along one axis of a mesh.

A tensor on the ranks of an axis is *replicated* (equal on all), *sharded* (every rank has a slice of a dim),
or *partial* (the sum over the ranks is the value). Every function turns one kind into another, and its
backward turns the gradient back, so that every rank ends up with the gradient of the loss of all ranks:

    function         forward                     backward             of the gradient
    replicate        nothing                     all-reduce           partial    -> replicated
    all_reduce       partial -> replicated       nothing              replicated -> replicated
    gather           sharded -> replicated       slice                replicated -> sharded
    split            replicated -> sharded       all-gather           sharded    -> replicated
    all_gather       sharded -> used by all      reduce-scatter       partial    -> sharded
    reduce_scatter   partial -> sharded          all-gather           sharded    -> replicated
    all_to_all       sharded on i -> on j        all-to-all           sharded on j -> on i
    exchange_rows    rows to other ranks         rows back            to the ranks that sent the rows
    broadcast        of one rank -> replicated   reduce               partial    -> of that rank
    reduce           partial -> of one rank      broadcast            of that rank -> replicated
    send, receive    from rank i to rank j       receive, send        from rank j to rank i

The gradient of a partial tensor is that of each rank's summand, and it is replicated.

`replicate` and `all_reduce` are Megatron's f and g (Shoeybi et al. 2019, arXiv 1909.08053, section 3);
`all_gather` and `reduce_scatter` its g and g-bar of sequence parallelism (Korthikanti et al. 2022,
arXiv 2205.05198, section 4.2.2). `gather` and `all_gather` differ only in what comes after: if all
ranks compute the same with the result, the gradient is complete on every rank; if they use it differently,
their gradients must be summed.

Slices are as even as they can be (`split_sizes.py`): 25 heads over 4 ranks are 7, 6, 6 and 6. An uneven
gather pads to the largest slice and needs the total. On an axis of one rank every function returns its
argument, but `send` and `receive`, which raise ValueError: there is no other rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hpnb.mesh import Axis
from hpnb.overlapped_pair import wait_for
from hpnb.ranks.current_rank import device as this_device
from hpnb.record.recorder import communication
from hpnb.split_sizes import split_range as split_range
from hpnb.split_sizes import split_sizes as split_sizes

Communicate = Callable[[torch.Tensor], torch.Tensor]


# --- one kind of tensor into another ---------------------------------------------------------


def replicate(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Use a replicated tensor differently on each rank: forward nothing, backward all-reduce."""
    return _with_backward(x, axis, _same, partial(_sum, axis=axis))


def all_reduce(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Sum over the ranks of `axis`: forward all-reduce, backward nothing."""
    return _with_backward(x, axis, partial(_sum, axis=axis), _same)


def gather(x: torch.Tensor, axis: Axis, dim: int, total: int | None = None) -> torch.Tensor:
    """Concatenate the slices of `dim`, if all ranks compute the same with them: backward keeps one slice.

    Args:
        x: this rank's slice.
        total: the size of `dim` on all ranks together, if its slices are uneven.
    """
    gather_all = partial(gather_slices, axis=axis, dim=dim, sizes=_slice_sizes(x, axis, dim, total))
    return _with_backward(x, axis, gather_all, partial(_keep_slice, axis=axis, dim=dim))


def split(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Keep this rank's slice of a replicated tensor: backward gathers the slices of the gradient."""
    gather_all = partial(gather_slices, axis=axis, dim=dim, sizes=split_sizes(x.size(dim), axis.size))
    return _with_backward(x, axis, partial(_keep_slice, axis=axis, dim=dim), gather_all)


def all_gather(x: torch.Tensor, axis: Axis, dim: int, total: int | None = None) -> torch.Tensor:
    """Concatenate the slices of `dim`, if ranks use them differently: backward reduce-scatters."""
    gather_all = partial(gather_slices, axis=axis, dim=dim, sizes=_slice_sizes(x, axis, dim, total))
    return _with_backward(x, axis, gather_all, partial(sum_slices, axis=axis, dim=dim))


def reduce_scatter(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Sum over the ranks and keep this rank's slice of `dim`: backward all-gathers."""
    gather_all = partial(gather_slices, axis=axis, dim=dim, sizes=split_sizes(x.size(dim), axis.size))
    return _with_backward(x, axis, partial(sum_slices, axis=axis, dim=dim), gather_all)


def all_to_all(x: torch.Tensor, axis: Axis, split_dim: int, concat_dim: int) -> torch.Tensor:
    """From sharded on `concat_dim` to sharded on `split_dim`: backward goes the other way.

    Raises:
        ValueError: `split_dim` does not divide by the ranks.
    """
    if x.size(split_dim) % axis.size:
        raise ValueError(
            f"all_to_all cannot split dim {split_dim} of {tuple(x.shape)} over {axis.size} ranks; "
            f"its size must be a multiple of {axis.size}"
        )
    forward = partial(_exchange_slices, axis=axis, split_dim=split_dim, concat_dim=concat_dim)
    backward = partial(_exchange_slices, axis=axis, split_dim=concat_dim, concat_dim=split_dim)
    return _with_backward(x, axis, forward, backward)


def exchange_rows(
    rows: torch.Tensor, axis: Axis, sent: Sequence[int], received: Sequence[int]
) -> torch.Tensor:
    """Send `sent[r]` rows to each rank r and receive `received[r]` from it: backward goes the other way.

    Args:
        rows: (sum(sent), ...), in the order of the ranks.

    Inside of `hpnb.overlapped_pair` the other side computes until they have arrived.
    """
    forward = partial(_exchange_rows, axis=axis, sent=sent, received=received)
    backward = partial(_exchange_rows, axis=axis, sent=received, received=sent)
    return _with_backward(rows, axis, forward, backward)


def broadcast(x: torch.Tensor, axis: Axis, source: int = 0) -> torch.Tensor:
    """Copy the tensor of rank `source` of the axis to all its ranks: backward reduces to that rank."""
    copy, sum_to = partial(_copy, axis=axis, source=source), partial(_sum_to, axis=axis, to=source)
    return _with_backward(x, axis, copy, sum_to)


def reduce(x: torch.Tensor, axis: Axis, to: int = 0) -> torch.Tensor:
    """Sum on rank `to` of the axis, zeros elsewhere: backward broadcasts from it."""
    copy, sum_to = partial(_copy, axis=axis, source=to), partial(_sum_to, axis=axis, to=to)
    return _with_backward(x, axis, sum_to, copy)


# --- point to point --------------------------------------------------------------------------


def send(x: torch.Tensor, axis: Axis, to: int) -> torch.Tensor:
    """Send `x` to rank `to` of the axis. It returns a scalar 0, whose backward receives the gradient of `x`.

    The other side calls `receive` with the same shape and dtype.
    """
    _check_peer(axis, to)
    receive_gradient = partial(_receive, shape=x.shape, dtype=x.dtype, axis=axis, source=to)
    return _with_backward(x, None, partial(_send, axis=axis, to=to), receive_gradient)


def receive(
    shape: Sequence[int],
    axis: Axis,
    source: int,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    requires_grad: bool | None = None,
) -> torch.Tensor:
    """Receive a tensor from rank `source` of the axis; backward sends its gradient there.

    Args:
        dtype, device: of what is sent; by default PyTorch's default dtype, on this rank's device.
        requires_grad: whether the sender waits for a gradient, as it does if what it sends requires one; by
            default if the dtype can have one.
    """
    _check_peer(axis, source)
    start = torch.zeros((), dtype=dtype, device=this_device() if device is None else device)
    start.requires_grad_(start.dtype.is_floating_point if requires_grad is None else requires_grad)
    forward = partial(_receive, shape=tuple(shape), dtype=start.dtype, axis=axis, source=source)
    return _with_backward(start, None, forward, partial(_send, axis=axis, to=source))


def barrier(axis: Axis) -> None:
    """Wait until every rank of the axis is here."""
    with communication("barrier", axis.name, 0, axis.ranks):
        dist.barrier(axis.group)


# --- forward and backward --------------------------------------------------------------------


class _WithBackward(torch.autograd.Function):
    """One communication in the forward, another in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, communicate: Communicate, inverse: Communicate) -> torch.Tensor:
        ctx.communicate, ctx.inverse = communicate, inverse
        return communicate(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        # With a backward again, the other way round, so that second derivatives are right too.
        return _WithBackward.apply(grads[0], ctx.inverse, ctx.communicate), None, None


def _with_backward(
    x: torch.Tensor, axis: Axis | None, forward: Communicate, backward: Communicate
) -> torch.Tensor:
    if axis is not None and axis.size == 1:
        return x  # nothing to send, and nothing is copied
    result: torch.Tensor = _WithBackward.apply(x, forward, backward)
    return result


def with_backward(x: torch.Tensor, forward: Communicate, backward: Communicate) -> torch.Tensor:
    """`forward` of x. Its backward is `backward` of the gradient, which has `forward` as its backward."""
    return _with_backward(x, None, forward, backward)


# --- without autograd: one call of torch.distributed each -------------------------------------


def _same(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


def _sum(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    with communication("all_reduce", axis.name, x.nbytes, axis.ranks):
        dist.all_reduce(x, group=axis.group)
    return x


def _sum_to(x: torch.Tensor, axis: Axis, to: int) -> torch.Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    with communication("reduce", axis.name, x.nbytes, axis.ranks):
        dist.reduce(x, dst=axis.ranks[to], group=axis.group)
    return x if axis.rank == to else torch.zeros_like(x)


def _copy(x: torch.Tensor, axis: Axis, source: int) -> torch.Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    with communication("broadcast", axis.name, x.nbytes, axis.ranks):
        dist.broadcast(x, src=axis.ranks[source], group=axis.group)
    return x


def gather_slices(x: torch.Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    """Concatenate slices of `sizes` along `dim`, for autograd functions that have their backward already."""
    largest = max(sizes)
    rows = _pad(x.movedim(dim, 0), largest).contiguous()  # (largest, ...)
    gathered = rows.new_empty((axis.size * largest, *rows.shape[1:]))
    with communication("all_gather", axis.name, gathered.nbytes, axis.ranks):
        dist.all_gather_into_tensor(gathered, rows, group=axis.group)
    if min(sizes) < largest:
        slices = zip(gathered.split(largest), sizes, strict=True)
        gathered = torch.cat([padded[:size] for padded, size in slices])
    return _move_rows_to(gathered, dim)


def sum_slices(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Sum over the ranks and keep a slice of `dim`, for autograd functions that have their backward."""
    sizes = split_sizes(x.size(dim), axis.size)
    rows, largest = pad_slices(x.movedim(dim, 0), sizes).contiguous(), max(sizes)
    summed = rows.new_empty((largest, *rows.shape[1:]))
    with communication("reduce_scatter", axis.name, rows.nbytes, axis.ranks):
        dist.reduce_scatter_tensor(summed, rows, group=axis.group)
    if sizes[axis.rank] < largest:
        summed = summed[: sizes[axis.rank]].clone()
    return _move_rows_to(summed, dim)


def pad_slices(rows: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """The slices of `sizes`, each padded with zeros to the largest: (ranks * largest, ...)."""
    largest = max(sizes)
    if min(sizes) == largest:
        return rows
    return torch.cat([_pad(part, largest) for part in rows.split(list(sizes))])


def _keep_slice(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    start, stop = split_range(x.size(dim), axis.size, axis.rank)
    return x.narrow(dim, start, stop - start).clone()


def _exchange_slices(x: torch.Tensor, axis: Axis, split_dim: int, concat_dim: int) -> torch.Tensor:
    parts = torch.stack(x.chunk(axis.size, split_dim))  # (ranks, ...)
    received = torch.empty_like(parts)
    with communication("all_to_all", axis.name, parts.nbytes, axis.ranks):
        dist.all_to_all_single(received, parts, group=axis.group)
    return torch.cat(received.unbind(), concat_dim)


def _exchange_rows(
    rows: torch.Tensor, axis: Axis, sent: Sequence[int], received: Sequence[int]
) -> torch.Tensor:
    arrived, rows = rows.new_empty((sum(received), *rows.shape[1:])), rows.contiguous()
    leaving = (len(rows) - sent[axis.rank]) * (rows.nbytes // max(1, len(rows)))
    with communication("all_to_all", axis.name, rows.nbytes, axis.ranks, leaving):
        message = dist.all_to_all_single(
            arrived, rows, list(received), list(sent), group=axis.group, async_op=True
        )
        wait_for(message, leaving)
    return arrived


def _send(x: torch.Tensor, axis: Axis, to: int) -> torch.Tensor:
    x = x.contiguous()
    with communication("send", axis.name, x.nbytes, (axis.ranks[axis.rank], axis.ranks[to])):
        dist.send(x, dst=axis.ranks[to], group=axis.group)
    return x.new_zeros(())


def _receive(
    x: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, axis: Axis, source: int
) -> torch.Tensor:
    received = torch.empty(tuple(shape), dtype=dtype, device=x.device)
    with communication("receive", axis.name, received.nbytes, (axis.ranks[source], axis.ranks[axis.rank])):
        dist.recv(received, src=axis.ranks[source], group=axis.group)
    return received


def _move_rows_to(rows: torch.Tensor, dim: int) -> torch.Tensor:
    """`rows` with its first dim moved to `dim`: contiguous and no view, so it may be viewed and changed."""
    return rows if dim in (0, -rows.dim()) else rows.movedim(0, dim).contiguous()


def _pad(rows: torch.Tensor, size: int) -> torch.Tensor:
    missing = size - rows.size(0)
    return torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))]) if missing else rows


def _slice_sizes(x: torch.Tensor, axis: Axis, dim: int, total: int | None) -> tuple[int, ...]:
    sizes = split_sizes(x.size(dim) * axis.size if total is None else total, axis.size)
    if sizes[axis.rank] != x.size(dim):
        raise ValueError(
            f"rank {axis.rank} of axis {axis.name} holds {x.size(dim)} of dim {dim}, but an even split of "
            f"{total} over {axis.size} ranks gives it {sizes[axis.rank]}"
        )
    return sizes


def _check_peer(axis: Axis, peer: int) -> None:
    if not 0 <= peer < axis.size or peer == axis.rank:
        raise ValueError(
            f"rank {axis.rank} of axis {axis.name} has no peer {peer}; "
            f"its peers are 0 to {axis.size - 1} without itself"
        )

"""Collectives that autograd understands, along one axis of a mesh.

A tensor on the ranks of an axis is one of three things: *replicated* (equal on all), *sharded* (each has
a slice of a dim), or *partial* (their sum is the value). Every function turns one into another, and its
backward turns the gradient back, so that each rank ends up with the gradient of the whole loss:

    function         forward                     backward             of the gradient
    replicate        nothing                     all-reduce           partial    -> replicated
    all_reduce       partial -> replicated       nothing              replicated -> replicated
    gather           sharded -> replicated       slice                replicated -> sharded
    split            replicated -> sharded       all-gather           sharded    -> replicated
    all_gather       sharded -> used by all      reduce-scatter       partial    -> sharded
    reduce_scatter   partial -> sharded          all-gather           sharded    -> partial's
    all_to_all       sharded on i -> on j        all-to-all           sharded on j -> on i

`replicate` and `all_reduce` are Megatron's f and g (Shoeybi et al. 2019, arXiv 1909.08053, section 3);
`all_gather` and `reduce_scatter` its g and g-bar of sequence parallelism (Korthikanti et al. 2022,
arXiv 2205.05198, section 4.2.2). `gather` and `all_gather` differ only in what comes after: where all
ranks go on to compute the same, a gradient is complete already; where each uses the result in its own
way, the gradients must be summed.

Slices are as even as they can be (`split_sizes.py`): 25 heads over 4 ranks are 7, 6, 6 and 6. An uneven
gather pads to the largest slice and needs the total. On an axis of one rank every function returns its
argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hpnb.mesh import Axis
from hpnb.ranks.current_rank import device as this_device
from hpnb.record.recorder import communication
from hpnb.split_sizes import split_range as split_range
from hpnb.split_sizes import split_sizes as split_sizes

Raw = Callable[[torch.Tensor], torch.Tensor]


# --- one kind of tensor into another ---------------------------------------------------------


def replicate(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Use a replicated tensor differently on each rank: forward nothing, backward all-reduce."""
    return _pair(x, axis, _same, partial(_sum, axis=axis))


def all_reduce(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Sum over the ranks of `axis`: forward all-reduce, backward nothing."""
    return _pair(x, axis, partial(_sum, axis=axis), _same)


def gather(x: torch.Tensor, axis: Axis, dim: int, total: int | None = None) -> torch.Tensor:
    """Put the slices of `dim` together where all ranks go on alike: backward takes the own slice.

    Args:
        x: this rank's slice.
        total: the size of `dim` put together, if its slices are uneven.
    """
    sizes = _sizes(x, axis, dim, total)
    there, back = partial(gather_slices, axis=axis, dim=dim, sizes=sizes), partial(_slice, axis=axis, dim=dim)
    return _pair(x, axis, there, back)


def split(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Keep this rank's slice of a replicated tensor: backward gathers the slices of the gradient."""
    sizes = split_sizes(x.size(dim), axis.size)
    there, back = partial(_slice, axis=axis, dim=dim), partial(gather_slices, axis=axis, dim=dim, sizes=sizes)
    return _pair(x, axis, there, back)


def all_gather(x: torch.Tensor, axis: Axis, dim: int, total: int | None = None) -> torch.Tensor:
    """Put the slices of `dim` together where each rank uses them in its own way: backward reduce-scatters."""
    sizes = _sizes(x, axis, dim, total)
    there, back = (
        partial(gather_slices, axis=axis, dim=dim, sizes=sizes),
        partial(sum_slices, axis=axis, dim=dim),
    )
    return _pair(x, axis, there, back)


def reduce_scatter(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Sum over the ranks and keep this rank's slice of `dim`: backward all-gathers."""
    sizes = split_sizes(x.size(dim), axis.size)
    there, back = (
        partial(sum_slices, axis=axis, dim=dim),
        partial(gather_slices, axis=axis, dim=dim, sizes=sizes),
    )
    return _pair(x, axis, there, back)


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
    there = partial(_transpose, axis=axis, split_dim=split_dim, concat_dim=concat_dim)
    back = partial(_transpose, axis=axis, split_dim=concat_dim, concat_dim=split_dim)
    return _pair(x, axis, there, back)


def broadcast(x: torch.Tensor, axis: Axis, source: int = 0) -> torch.Tensor:
    """Give all ranks what `source` (a place on the axis) has: backward reduces to it."""
    return _pair(x, axis, partial(_copy, axis=axis, source=source), partial(_sum_to, axis=axis, to=source))


def reduce(x: torch.Tensor, axis: Axis, to: int = 0) -> torch.Tensor:
    """Sum on rank `to` of the axis, zeros elsewhere: backward broadcasts from it."""
    return _pair(x, axis, partial(_sum_to, axis=axis, to=to), partial(_copy, axis=axis, source=to))


# --- point to point --------------------------------------------------------------------------


def send(x: torch.Tensor, axis: Axis, to: int) -> torch.Tensor:
    """Send `x` to place `to` of the axis. Backward of what is returned (a scalar 0) receives its gradient.

    The other side calls `receive` with the same shape and dtype.
    """
    _check_peer(axis, to)
    there = partial(_send, axis=axis, to=to)
    back = partial(_receive_like, shape=x.shape, dtype=x.dtype, axis=axis, source=to)
    return _pair(x, None, there, back)


def receive(
    shape: Sequence[int],
    axis: Axis,
    source: int,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    requires_grad: bool | None = None,
) -> torch.Tensor:
    """Receive a tensor from place `source` of the axis; backward sends its gradient there.

    Args:
        dtype, device: of what is sent; by default PyTorch's default dtype, on this rank's device.
        requires_grad: whether the sender waits for a gradient, as it does if what it sends requires one; by
            default if the dtype can have one.
    """
    _check_peer(axis, source)
    start = torch.zeros((), dtype=dtype, device=this_device() if device is None else device)
    start.requires_grad_(start.dtype.is_floating_point if requires_grad is None else requires_grad)
    there = partial(_receive_like, shape=tuple(shape), dtype=start.dtype, axis=axis, source=source)
    return _pair(start, None, there, partial(_send, axis=axis, to=source))


def exchange(x: torch.Tensor, axis: Axis, shift: int = 1) -> torch.Tensor:
    """Send to the rank `shift` places on, and receive from the one `shift` places back, at once.

    All ranks call it with tensors of the same shape. Backward shifts the other way.
    """
    return _pair(x, axis, partial(_shift, axis=axis, by=shift), partial(_shift, axis=axis, by=-shift))


def barrier(axis: Axis) -> None:
    """Wait until every rank of the axis is here."""
    with communication("barrier", axis.name, 0, axis.ranks):
        dist.barrier(axis.group)


# --- forward and backward --------------------------------------------------------------------


class _Pair(torch.autograd.Function):
    """`there` in the forward, `back` in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: Raw, back: Raw) -> torch.Tensor:
        ctx.there, ctx.back = there, back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        # A conversion again, the other way round, so that second derivatives are right too.
        return _Pair.apply(grads[0], ctx.back, ctx.there), None, None


def _pair(x: torch.Tensor, axis: Axis | None, there: Raw, back: Raw) -> torch.Tensor:
    if axis is not None and axis.size == 1:
        return x  # alone on the axis there is nothing to say, and nothing is copied
    result: torch.Tensor = _Pair.apply(x, there, back)
    return result


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
    """Put slices of `sizes` together along `dim`, for functions with a backward of their own."""
    most = max(sizes)
    rows = _padded(x.movedim(dim, 0), most).contiguous()  # (most, ...)
    whole = rows.new_empty((axis.size * most, *rows.shape[1:]))
    with communication("all_gather", axis.name, whole.nbytes, axis.ranks):
        dist.all_gather_into_tensor(whole, rows, group=axis.group)
    if min(sizes) < most:
        whole = torch.cat([part[:n] for part, n in zip(whole.split(most), sizes, strict=True)])
    return _rows_at(whole, dim)


def sum_slices(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Sum over the ranks, and keep this rank's share of `dim`, for functions with a backward of their own."""
    sizes = split_sizes(x.size(dim), axis.size)
    most, rows = max(sizes), x.movedim(dim, 0)
    if min(sizes) < most:
        rows = torch.cat([_padded(part, most) for part in rows.split(sizes)])
    rows = rows.contiguous()  # (ranks * most, ...)
    mine = rows.new_empty((most, *rows.shape[1:]))
    with communication("reduce_scatter", axis.name, rows.nbytes, axis.ranks):
        dist.reduce_scatter_tensor(mine, rows, group=axis.group)
    if sizes[axis.rank] < most:
        mine = mine[: sizes[axis.rank]].clone()
    return _rows_at(mine, dim)


def _slice(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    sizes = split_sizes(x.size(dim), axis.size)
    return x.narrow(dim, sum(sizes[: axis.rank]), sizes[axis.rank]).clone()


def _transpose(x: torch.Tensor, axis: Axis, split_dim: int, concat_dim: int) -> torch.Tensor:
    parts = torch.stack(x.chunk(axis.size, split_dim))  # (ranks, ...)
    got = torch.empty_like(parts)
    with communication("all_to_all", axis.name, parts.nbytes, axis.ranks):
        dist.all_to_all_single(got, parts, group=axis.group)
    return torch.cat(got.unbind(), concat_dim)


def _send(x: torch.Tensor, axis: Axis, to: int) -> torch.Tensor:
    x = x.contiguous()
    with communication("send", axis.name, x.nbytes, (axis.ranks[axis.rank], axis.ranks[to])):
        dist.send(x, dst=axis.ranks[to], group=axis.group)
    return x.new_zeros(())


def _receive_like(
    x: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, axis: Axis, source: int
) -> torch.Tensor:
    got = torch.empty(tuple(shape), dtype=dtype, device=x.device)
    with communication("receive", axis.name, got.nbytes, (axis.ranks[source], axis.ranks[axis.rank])):
        dist.recv(got, src=axis.ranks[source], group=axis.group)
    return got


def _shift(x: torch.Tensor, axis: Axis, by: int) -> torch.Tensor:
    if by % axis.size == 0:
        return x.clone()
    x, got = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    to, source = axis.ranks[(axis.rank + by) % axis.size], axis.ranks[(axis.rank - by) % axis.size]
    with communication("send", axis.name, x.nbytes, axis.ranks):
        # Posted together, so a ring of blocking sends cannot wait for itself.
        both = [dist.P2POp(dist.isend, x, to, axis.group), dist.P2POp(dist.irecv, got, source, axis.group)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
    return got


def _rows_at(rows: torch.Tensor, dim: int) -> torch.Tensor:
    """`rows` with its first dim at `dim`: contiguous and no view, so it may be viewed and changed."""
    return rows if dim in (0, -rows.dim()) else rows.movedim(0, dim).contiguous()


def _padded(rows: torch.Tensor, size: int) -> torch.Tensor:
    missing = size - rows.size(0)
    return torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))]) if missing else rows


def _sizes(x: torch.Tensor, axis: Axis, dim: int, total: int | None) -> tuple[int, ...]:
    sizes = split_sizes(x.size(dim) * axis.size if total is None else total, axis.size)
    if sizes[axis.rank] != x.size(dim):
        raise ValueError(
            f"rank {axis.rank} of axis {axis.name} holds {x.size(dim)} of dim {dim}, but its share of "
            f"{total} over {axis.size} ranks is {sizes[axis.rank]}"
        )
    return sizes


def _check_peer(axis: Axis, peer: int) -> None:
    if not 0 <= peer < axis.size or peer == axis.rank:
        raise ValueError(
            f"rank {axis.rank} of axis {axis.name} cannot talk to {peer}; "
            f"its peers are 0 to {axis.size - 1} without itself"
        )

"""Replicas start equal: ranks of an axis check that they have the same tensors, and take rank 0's values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from hpnb.mesh import Axis
from hpnb.placement import placement_of

_MESSAGE_BYTES = 2**25  # above this a new message begins, because a message is a copy


def check_replicas(tensors: Mapping[str, torch.Tensor], axis: Axis, options: Mapping[str, object]) -> None:
    """Make sure that all ranks have the same tensors, except for their values, and the same options.

    Collectives are matched by their order alone, so ranks that differ would sum unrelated gradients or hang.

    Raises:
        ValueError: on every rank, with the first tensor or option that differs.
    """
    # Shapes are those in the full model: of what is sharded along this axis already, local shapes differ.
    described = [(n, placement_of(t, n).shape, str(t.dtype), t.requires_grad) for n, t in tensors.items()]
    messages: list[Any] = [None] * axis.size
    dist.all_gather_object(messages, (described, dict(options)), axis.group)
    first, first_options = messages[0]
    for rank, (other, other_options) in enumerate(messages):
        for a, b in zip_longest(first, other):
            if a != b:
                raise ValueError(
                    f"replicas differ along {axis.name}: rank 0 has {a} where rank {rank} has {b}, of "
                    f"{len(first)} and {len(other)} tensors; build and freeze the same model on every rank"
                )
        for name in {**first_options, **other_options}:
            if (a := first_options.get(name)) != (b := other_options.get(name)):
                raise ValueError(
                    f"{name}={a} on rank 0 of axis {axis.name}, and {name}={b} on rank {rank}; pass the same "
                    "on every rank"
                )


def broadcast(tensors: Sequence[torch.Tensor], axis: Axis) -> None:
    """Give all ranks of `axis` the values that its rank 0 has, many small tensors in one message."""
    if axis.size == 1:
        return
    by_kind: dict[tuple[torch.dtype, torch.device], list[list[torch.Tensor]]] = {}
    for tensor in tensors:
        groups = by_kind.setdefault((tensor.dtype, tensor.device), [[]])
        if sum(t.nbytes for t in groups[-1]) > _MESSAGE_BYTES:
            groups.append([])
        groups[-1].append(tensor.detach())
    for group in (group for groups in by_kind.values() for group in groups):
        message = torch.cat([tensor.reshape(-1) for tensor in group])
        dist.broadcast(message, src=axis.ranks[0], group=axis.group)
        if axis.rank:
            for tensor, values in zip(group, message.split([t.numel() for t in group]), strict=True):
                tensor.copy_(values.view(tensor.shape))

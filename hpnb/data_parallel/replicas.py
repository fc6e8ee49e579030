"""Replicas start equal: ranks of an axis check that they have the same tensors, and take rank 0's values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from hpnb.mesh import Axis
from hpnb.placement import placement_of

_MESSAGE_BYTES = 2**25  # above this a new message begins, because a message is a copy


def check_replicas(
    tensors: Mapping[str, torch.Tensor],
    axis: Axis,
    options: Mapping[str, object],
    replicas: Axis | None = None,
    refusal: str | None = None,
) -> None:
    """Make sure that all ranks have the same tensors, except for their values, and the same options.

    Collectives are matched by their order alone, so ranks that differ would sum unrelated gradients or hang.

    Args:
        replicas: HSDP's second axis, whose ranks must have the same too. What differs along one `axis` is
            known on its ranks only, so rank 0 of it sends that along `replicas`.
        refusal: why this rank cannot go on, perhaps this rank alone.

    Raises:
        ValueError: on every rank, with a rank's refusal or the first tensor or option that differs.
    """
    # Shapes are those in the full model: of what is sharded along this axis already, local shapes differ.
    described = [(n, placement_of(t, n).shape, str(t.dtype), t.requires_grad) for n, t in tensors.items()]
    in_grid = replicas is not None and replicas.size > 1
    report = _Report(described, dict(options), in_grid, refusal)
    reports: list[Any] = [None] * axis.size
    dist.all_gather_object(reports, report, axis.group)
    difference = _find_difference(reports, axis, in_grid)
    if replicas is not None and in_grid:
        if axis.rank == 0:
            lines: list[Any] = [None] * replicas.size
            dist.all_gather_object(lines, (report, difference), replicas.group)
            in_a_line = next((text for _, text in lines if text is not None), None)
            difference = in_a_line or _find_difference([other for other, _ in lines], replicas, in_grid)
        if all(other.in_grid for other in reports):  # otherwise a rank of this line does not wait for it
            answers: list[Any] = [None] * axis.size
            dist.all_gather_object(answers, difference, axis.group)
            difference = answers[0]
    if difference is not None:
        raise ValueError(difference)


@dataclass(frozen=True)
class _Report:
    """What a rank has: (name, shape, dtype, trained) of its tensors, its options, whether it has replicas,
    and why it cannot go on."""

    tensors: list[tuple[str, tuple[int, ...], str, bool]]
    options: dict[str, object]
    in_grid: bool
    refusal: str | None


def _find_difference(reports: Sequence[_Report], axis: Axis, in_grid: bool) -> str | None:
    """A rank's refusal, or else the first tensor or option in which ranks differ."""
    first = reports[0]
    # Ranks of other axes of this name read this too.
    which = f"; here {axis.name} is the axis of ranks {', '.join(map(str, axis.ranks))}" if in_grid else ""
    for rank, other in enumerate(reports):
        if other.refusal is not None:
            everywhere = all(report.refusal == other.refusal for report in reports)
            return other.refusal if everywhere else f"rank {rank} of axis {axis.name}: {other.refusal}{which}"
    for rank, other in enumerate(reports):
        for a, b in zip_longest(first.tensors, other.tensors):
            if a != b:
                return (
                    f"replicas differ along {axis.name}: rank 0 has {a} where rank {rank} has {b}, of "
                    f"{len(first.tensors)} and {len(other.tensors)} tensors; build and freeze the same model "
                    f"on every rank{which}"
                )
        for name in {**first.options, **other.options}:
            if (a := first.options.get(name)) != (b := other.options.get(name)):
                return (
                    f"{name}={a} on rank 0 of axis {axis.name}, and {name}={b} on rank {rank}; pass the same "
                    f"on every rank{which}"
                )
    return None


def broadcast(tensors: Sequence[torch.Tensor], axis: Axis) -> None:
    """Give all ranks of `axis` the values that its rank 0 has, many small tensors in one message."""
    if axis.size == 1:
        return
    by_kind: dict[tuple[torch.dtype, torch.device], list[list[torch.Tensor]]] = {}
    open_bytes = Counter[tuple[torch.dtype, torch.device]]()  # of the last group of each kind
    for tensor in tensors:
        kind = tensor.dtype, tensor.device
        groups = by_kind.setdefault(kind, [[]])
        if open_bytes[kind] > _MESSAGE_BYTES:
            groups.append([])
            open_bytes[kind] = 0
        groups[-1].append(tensor.detach())
        open_bytes[kind] += tensor.nbytes
    for group in (group for groups in by_kind.values() for group in groups):
        message = torch.cat([tensor.reshape(-1) for tensor in group])
        dist.broadcast(message, src=axis.ranks[0], group=axis.group)
        if axis.rank:
            for tensor, values in zip(group, message.split([t.numel() for t in group]), strict=True):
                tensor.copy_(values.view(tensor.shape))

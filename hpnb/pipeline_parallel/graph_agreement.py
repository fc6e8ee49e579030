"""Tensor-parallel ranks replay a graph together, or none of them does.

    rank 0    replay   replay   capture  eager                  REPLAY > CAPTURE > EAGER
    rank 1    replay   capture  capture  capture
    both      replay   capture  capture  eager                  the least of the two

NCCL asks for it: whether a collective is captured "must be uniform over all ranks", and launching a graph is
a collective of the ranks that captured it together (NCCL user guide, "Using NCCL with CUDA Graphs"). The
ranks of a group have the same stages, schedule and microbatches, so each usually comes to the same by itself.
But one of them alone may see moved weights or a failed capture, and the others cannot know. So in every step,
and again after captures, they do the least that any of them can do. That takes one message of a few numbers
among CPUs, which waits for no GPU. Every rank sends it in every training step, so none waits for it in vain.

A capture waits for no other rank either. By default NCCL exchanges the addresses of a graph's buffers in it,
and a rank whose capture fails would leave the others waiting. So hpnb sets NCCL_GRAPH_REGISTER=0 before ranks
join, unless it is set. NCCL_GRAPH_MIXING_SUPPORT has to stay at its default of 1, because steps with a new
shape run eagerly on the same communicator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpnb.mesh import Axis
from hpnb.record.traffic import uncounted

EAGER, CAPTURE, REPLAY = range(3)


class GraphAgreement:
    """What the ranks of some axes do together.

    Args:
        axes: along which the stages of this rank communicate, by collectives that are captured.
    """

    def __init__(self, axes: Iterable[Axis] = ()) -> None:
        self.axes = tuple(axis for axis in axes if axis.size > 1)

    def least(self, states: Sequence[int], kinds: Sequence[int]) -> list[int]:
        """The least state at each place over the ranks, and EAGER where they have different kinds. All of
        them call it, with equally many."""
        if not self.axes or not states:
            return list(states)
        numbers = torch.tensor([[*states], [*kinds], [-kind for kind in kinds]])
        with uncounted():
            for axis in self.axes:
                dist.all_reduce(numbers, dist.ReduceOp.MIN, group=axis.group)
        columns: list[list[int]] = numbers.t().tolist()
        return [state if kind == -negated else EAGER for state, kind, negated in columns]


def captured_axes(model: object) -> tuple[Axis, ...]:
    """The axes along which the stages of `model` communicate by kernels, so that a graph can have them: those
    of tensor parallelism, if its groups have NCCL, and gloo for the messages between CPUs."""
    if not isinstance(model, nn.Module):  # a Builder, whose layers are not there yet
        return ()
    unsplit: nn.Module = getattr(model, "_whole_model", model)
    modes = (getattr(module, "_hpnb_tensor_parallel", None) for module in unsplit.modules())
    mode: Any = next((mode for mode in modes if mode is not None), None)  # as `parallelize` leaves it there
    axes = tuple(axis for axis in (() if mode is None else mode.axes) if axis.size > 1)
    backends = [str(dist.get_backend_config(axis.group)) for axis in axes]
    return axes if all("cuda:nccl" in b and "cpu:gloo" in b for b in backends) else ()

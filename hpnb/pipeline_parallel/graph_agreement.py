"""Ranks that communicate within a stage replay a graph together, or none of them does.

    rank 0    replay   replay   capture  eager                  REPLAY > CAPTURE > EAGER
    rank 1    replay   capture  capture  capture
    both      replay   capture  capture  eager                  the least of the two

NCCL asks for it: whether a collective is captured "must be uniform over all ranks", and launching a graph is
a collective of the ranks that captured it together (NCCL user guide, "Using NCCL with CUDA Graphs"). These
are the ranks of tensor parallelism, and with ZeRO 3 those among which parameters are sharded. They have the
same stages and schedule, so each usually comes to the same by itself. But one of them alone may see moved
weights or a failed capture, or with ZeRO 3 a batch of another shape, and the others cannot know. So in every
step, and again after captures, they do the least that any of them can do, and replay only graphs that they
captured together. That takes one message of a few numbers among CPUs, which waits for no GPU. Every rank
sends it in every training step, so none waits for it in vain.

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

from hpnb.gradients import GradientSink
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

    def least(self, states: Sequence[int], kinds: Sequence[int], captures: Sequence[int] = ()) -> list[int]:
        """The least state at each place over the ranks, and EAGER where they have different kinds. All of
        them call it, with equally many.

        Args:
            captures: the numbers of the captures that made the graphs, or 0. Where all would REPLAY graphs of
                different captures, they do EAGER.
        """
        if not self.axes or not states:
            return list(states)
        captures = captures or [0] * len(states)
        rows = [kinds, [-kind for kind in kinds], captures, [-capture for capture in captures]]
        numbers = torch.tensor([[*states], *map(list, rows)])
        with uncounted():
            for axis in self.axes:
                dist.all_reduce(numbers, dist.ReduceOp.MIN, group=axis.group)
        columns: list[list[int]] = numbers.t().tolist()
        return [
            EAGER if kind != -kind_ or (state == REPLAY and capture != -capture_) else state
            for state, kind, kind_, capture, capture_ in columns
        ]


def captured_axes(model: object) -> tuple[Axis, ...]:
    """The axes along which the stages of `model` communicate by kernels, so that a graph can have them: those
    of tensor parallelism, if its groups have NCCL, and gloo for the messages between CPUs."""
    if not isinstance(model, nn.Module):  # a Builder, whose layers are not there yet
        return ()
    unsplit: nn.Module = getattr(model, "_whole_model", model)
    modes = (getattr(module, "_hpnb_tensor_parallel", None) for module in unsplit.modules())
    mode: Any = next((mode for mode in modes if mode is not None), None)  # as `parallelize` leaves it there
    axes = tuple(axis for axis in (() if mode is None else mode.axes) if axis.size > 1)
    return axes if all(map(has_nccl, axes)) else ()


def has_nccl(axis: Axis) -> bool:
    """Whether the group of `axis` has NCCL, whose kernels a graph can have, and gloo for messages of CPUs."""
    backends = str(dist.get_backend_config(axis.group))
    return "cuda:nccl" in backends and "cpu:gloo" in backends


def refused_by(sink: GradientSink | None, overlaps_pairs: bool, captured: Sequence[Axis]) -> str:
    """Why a pipeline with this gradient sink runs eagerly; empty if it need not.

    Args:
        captured: axes whose collectives are known to be captured.
    """
    if sink is not None and sink.shards_parameters:
        if sink.why_not_captured:
            return sink.why_not_captured
        for axis in sink.gather_axes:
            if axis.size > 1 and axis not in captured and not has_nccl(axis):
                return (
                    f"its parameters are sharded (ZeRO 3) along {axis.name}, and only a group with the "
                    "backends cpu:gloo,cuda:nccl gathers them in a graph"
                )
    if overlaps_pairs:
        return "forwards and backwards overlap in pairs, whose messages lie within the stages"
    return ""

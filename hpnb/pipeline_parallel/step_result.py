"""What a step of a pipeline gives: the loss on every rank, outputs where they are, and what ran when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from hpnb.mesh import Axis
from hpnb.pipeline_parallel import microbatches
from hpnb.pipeline_parallel.executor import StepExecution, contended
from hpnb.pipeline_parallel.schedule import Action, Schedule
from hpnb.pipeline_parallel.simulate import run as replay
from hpnb.record import Event, Timeline
from hpnb.record.recorder import Recorder


class PipelineStepResult:
    """Of `Pipeline.step`."""

    def __init__(
        self,
        axis: Axis,
        loss: Callable[[], torch.Tensor],
        done: StepExecution,
        schedule: Schedule,
        recorder: Recorder | None,
        spans: tuple[int, int],
    ) -> None:
        self._axis, self._loss, self._schedule, self._recorder = axis, loss, schedule, recorder
        self._outputs, self._cpu_seconds = done.outputs, done.cpu_seconds
        self._spans = spans
        self._timeline: Timeline | None = None

    @property
    def loss(self) -> torch.Tensor:
        """(), float64: the mean over the targets of all microbatches and replicas, on every rank."""
        return self._loss()

    @property
    def outputs(self) -> Any:
        """What the last stage gave, microbatches end to end; None on ranks that do not have it."""
        if not self._outputs:
            return None
        return microbatches.join_outputs([self._outputs[m] for m in sorted(self._outputs)])

    @property
    def timeline(self) -> Timeline:
        """What each rank of the axis did, and when; ranks are places on the axis. All of them must ask.

        On a GPU times are those of the device, on clocks that are aligned when this is asked for. On a CPU
        with fewer cores than ranks a wall clock would show who got a core: instead the schedule is replayed
        with the CPU time that each action took.

        Raises:
            RuntimeError: the step was not recorded.
        """
        if self._timeline is None:
            self._timeline = self._gather()
        return self._timeline

    def _gather(self) -> Timeline:
        if self._recorder is None:
            raise RuntimeError("this step was not recorded; call step(batch, record=True)")
        if not self._recorder.aligned:
            self._recorder.align(self._axis.group)
        mine = self._recorder.events(*self._spans), self._cpu_seconds
        everyone: list[tuple[list[Event], dict[Action, float]]] = [mine] * self._axis.size
        dist.all_gather_object(everyone, mine, self._axis.group)
        if contended():
            seconds = {action: cost for _, costs in everyone for action, cost in costs.items()}
            return replay(self._schedule, seconds.__getitem__, source="replayed from measured CPU time")
        place = {rank: i for i, rank in enumerate(self._axis.ranks)}
        events = (replace(e, rank=place[e.rank]) for events, _ in everyone for e in events)
        return Timeline(tuple(events)).shifted()

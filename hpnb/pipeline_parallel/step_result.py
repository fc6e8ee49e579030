"""The result of a pipeline step: the loss on every rank, outputs on the last stage's, and what ran when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from hpnb.mesh import Axis
from hpnb.pipeline_parallel import microbatches
from hpnb.pipeline_parallel.executor import StepExecutor, contended
from hpnb.pipeline_parallel.schedule import Action, Schedule
from hpnb.record import Event, Timeline
from hpnb.record.recorder import Recorder


class PipelineStepResult:
    """What `Pipeline.step` returns.

    Args:
        wait_for_loss: gives the loss, as soon as it has come from the rank of the last stage.
        spans: which of the recorder's marks are of this step, (first, end).
    """

    def __init__(
        self,
        axis: Axis,
        executor: StepExecutor,
        schedule: Schedule,
        wait_for_loss: Callable[[], torch.Tensor],
        recorder: Recorder | None,
        spans: tuple[int, int],
    ) -> None:
        self._axis, self._schedule, self._recorder, self._spans = axis, schedule, recorder, spans
        self._outputs, self._cpu_seconds = executor.outputs, executor.cpu_seconds
        self._wait_for_loss = wait_for_loss
        self._timeline: Timeline | None = None

    @property
    def loss(self) -> torch.Tensor:
        """(), float64: the mean over the targets of all microbatches and replicas, on every rank."""
        return self._wait_for_loss()

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
        recorded = self._recorder.events(*self._spans), self._cpu_seconds
        by_rank: list[tuple[list[Event], dict[Action, float]]] = [recorded] * self._axis.size
        dist.all_gather_object(by_rank, recorded, self._axis.group)
        if contended():
            seconds = {action: cost for _, costs in by_rank for action, cost in costs.items()}
            return self._schedule.replay(seconds.__getitem__, source="replayed from measured CPU time")
        place = {rank: i for i, rank in enumerate(self._axis.ranks)}
        events = (replace(e, rank=place[e.rank]) for events, _ in by_rank for e in events)
        return Timeline(tuple(events)).shifted()

"""The result of a pipeline step: the loss on every rank, outputs on the last stage's, and what ran when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from hpnb.mesh import Axis
from hpnb.overlapped_pair import Segments
from hpnb.pipeline_parallel import microbatches
from hpnb.pipeline_parallel.executor import StepExecutor
from hpnb.pipeline_parallel.overlapped_pairs import ExposedTime, exposed_time, overlapped_pairs
from hpnb.pipeline_parallel.schedule import Action, Schedule
from hpnb.record import Event, Timeline
from hpnb.record.recorder import Recorder
from hpnb.theory.links import REPLAY_LINK, Link
from hpnb.theory.replay import communication_seconds

# Of one rank: its events, seconds and communications by action, and bytes of its largest message.
_Recorded = tuple[list[Event], dict[Action, float], dict[Action, list[Event]], int]


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
        self._outputs, self._message_bytes = executor.outputs, executor.largest_message
        self._times, self._wait_for_loss = executor.times, wait_for_loss
        self._communications = executor.times.communications  # of all ranks, once they have been gathered
        self._timeline: Timeline | None = None
        self._costs: dict[Action, float] | None = None  # of all ranks

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
        """What each rank of the axis did, and when. All of them must ask.

        Ranks are those of the axis, 0 to p - 1, as in a simulation. With data parallelism every replica has a
        timeline of its own, so put its number into the name of a file:
        `timeline.to_chrome_trace(f"step-{mesh.dp.rank}.json")`.

        On a GPU times are those of the device, on clocks that are aligned when this is asked for. On a CPU
        with fewer cores than ranks a wall clock would show who got a core: instead the schedule is replayed
        with the CPU time that each action took. Where ranks share a GPU it is replayed with the GPU time that
        each action took alone, over the interconnect `hpnb.theory.REPLAY_LINK`; `replayed` takes another.

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
        events = self._recorder.events(*self._spans)
        recorded = events, self._times.seconds, self._communications, self._message_bytes
        by_rank: list[_Recorded] = [recorded] * self._axis.size
        dist.all_gather_object(by_rank, recorded, self._axis.group)
        self._message_bytes = max(nbytes for _, _, _, nbytes in by_rank)
        if any(costs for _, costs, _, _ in by_rank):
            self._costs = {action: cost for _, costs, _, _ in by_rank for action, cost in costs.items()}
            for _, _, communications, _ in by_rank:
                self._communications.update(communications)
            if self._times.shares_gpu:
                return self._replay(REPLAY_LINK)
            return self._schedule.replay(self._costs.__getitem__, source="replayed from measured CPU time")
        axis_rank = {rank: i for i, rank in enumerate(self._axis.ranks)}
        renumbered = (replace(e, rank=axis_rank[e.rank]) for events, _, _, _ in by_rank for e in events)
        return Timeline(tuple(renumbered)).shifted()

    def replayed(self, link: Link) -> Timeline:
        """The timeline with another interconnect, where ranks share a GPU or cores. All of them must ask.

        Raises:
            ValueError: every rank had a GPU or a core, so that the timeline is measured.
        """
        if self.timeline and self._costs is None:
            raise ValueError("this step was measured as it ran; hpnb.theory.replay takes its timeline")
        return self._replay(link)

    def _replay(self, link: Link) -> Timeline:
        assert self._costs is not None
        transfer = link.latency + self._message_bytes / link.bandwidth
        source = f"replayed from measured {'GPU' if self._times.shares_gpu else 'CPU'} time, {link.name}"

        def duration(action: Action) -> float:
            assert self._costs is not None
            within = self._communications.get(action, ())
            return self._costs[action] + sum(communication_seconds(event, link) for event in within)

        return self._schedule.replay(duration, transfer, source)

    def exposed_time(self, link: Link, overlapped: bool) -> ExposedTime:
        """How long the step takes, and waits for the messages of experts, replayed with the CPU time between
        these messages and with `link`. All ranks of the axis must ask.

        Args:
            overlapped: forwards and backwards in pairs, or one action after the other.

        Raises:
            ValueError: the step was not recorded, or ran on GPUs.
        """
        by_rank: list[dict[Action, Segments]] = [{} for _ in range(self._axis.size)]
        dist.all_gather_object(by_rank, self._times.segments, self._axis.group)
        segments = {action: times for of_rank in by_rank for action, times in of_rank.items()}
        if len(segments) < sum(map(len, self._schedule.actions)):
            raise ValueError(
                "no CPU time was recorded between the messages of this step: record it, on CPUs; on GPUs "
                "`timeline` is measured as the step ran"
            )
        schedule = self._schedule
        none = (frozenset[int](),) * schedule.ranks

        def seconds(nbytes: float) -> float:
            return link.latency + nbytes / link.bandwidth

        pairs = overlapped_pairs(schedule) if overlapped else none
        return exposed_time(schedule, pairs, segments, seconds, link.latency)

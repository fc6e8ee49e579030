"""How long each action of a recorded step takes.

    ranks with a GPU each         a span on the device's clock; nothing more
    more ranks than cores         also the CPU time of the action, since a wall clock shows who got a core
    ranks that share a GPU        also its GPU time, measured while the other ranks wait for their turn

`PipelineStepResult.timeline` replays the schedule with such times.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from hpnb.overlapped_pair import Segments, recording_segments
from hpnb.pipeline_parallel.schedule import Action
from hpnb.ranks.current_rank import device
from hpnb.ranks.gpu_turns import GpuTurns
from hpnb.record.recorder import Recorder
from hpnb.record.timeline import Event


class ActionTimes:
    """The times of one rank's actions in one step.

    Args:
        recorder: notes when each action ran; None measures nothing.

    Attributes:
        seconds: {action: its CPU time} where ranks share cores, {action: its GPU time, measured alone} where
            they share a GPU.
        communications: {action: what it communicated within its stage}, where ranks share a GPU.
        segments: {action: its CPU time between the messages of experts}.
    """

    def __init__(
        self, recorder: Recorder | None, gpu_turns: GpuTurns | None, more_ranks_than_cores: bool
    ) -> None:
        self._recorder, self._gpu_turns = recorder, gpu_turns
        self._more_ranks_than_cores = more_ranks_than_cores
        self.seconds: dict[Action, float] = {}
        self.communications: dict[Action, list[Event]] = {}
        self.segments: dict[Action, Segments] = {}

    @property
    def shares_gpu(self) -> bool:
        """Whether ranks share a GPU, so that their actions run one at a time."""
        return self._gpu_turns is not None

    def measure(self, action: Action) -> AbstractContextManager[None]:
        """Around what an action computes."""
        if self._recorder is None:
            return nullcontext()
        span = self._recorder.span(action.op, action.stage, action.microbatch)
        if self._gpu_turns is not None:
            return self._with_gpu_time(action, span)
        return span if device().type == "cuda" else self._with_cpu_time(action, span)

    @contextmanager
    def _with_gpu_time(self, action: Action, span: AbstractContextManager[None]) -> Iterator[None]:
        assert self._gpu_turns is not None
        assert self._recorder is not None
        since = self._recorder.num_spans()
        with self._gpu_turns.turn() as turn, span:
            yield
        self.seconds[action] = turn.seconds
        self.communications[action] = self._recorder.communications(since)

    @contextmanager
    def _with_cpu_time(self, action: Action, span: AbstractContextManager[None]) -> Iterator[None]:
        began = time.thread_time()
        with span, recording_segments(action, self.segments):
            yield
        if self._more_ranks_than_cores:
            self.seconds[action] = time.thread_time() - began

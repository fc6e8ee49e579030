"""Hooks that record who holds memory, and what runs when, in the steps that are asked for: it costs time."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from hpnb import record
from hpnb.hybrid.training.accumulation import uses_pipeline
from hpnb.hybrid.training.events import Hook
from hpnb.hybrid.training.run_state import TrainingState
from hpnb.pipeline_parallel.executor import contended
from hpnb.ranks.current_rank import rank


class MemoryHook(Hook):
    """Records who holds memory during some steps, which it slows down.

    Args:
        steps: which; the first is 0, and has no optimizer state before it. They count over resumes too: a
            warning says if a run goes on after all of them.

    Attributes:
        profiles: {step: MemoryProfile} of this rank.
        peaks: bytes at the highest peak of each rank, after an epoch; the largest is in the history.

    >>> hook = hpnb.MemoryHook(steps=(1,))  # pass it to hpnb.Trainer(..., hooks=[hook])
    >>> hook.profiles  # then {1: MemoryProfile}
    {}
    """

    figures = ("peak_bytes",)

    def __init__(self, steps: Sequence[int] = (1,)) -> None:
        self.steps = frozenset(steps)
        self.profiles: dict[int, record.MemoryProfile] = {}
        self.peaks: list[int] = []
        self._has_warned = False

    def before_fit(self, trainer: TrainingState) -> None:
        if self.steps and not self.profiles and not self._has_warned and max(self.steps) < trainer.step:
            self._has_warned = True
            warnings.warn(
                f"MemoryHook(steps={(*sorted(self.steps),)}) records nothing, because this run goes on with "
                f"step {trainer.step}; use steps=({trainer.step},)",
                stacklevel=2,
            )

    @contextmanager
    def around_step(self, trainer: TrainingState) -> Iterator[None]:
        step = trainer.step
        if step not in self.steps:
            yield
            return
        with record.memory(trainer.model, trainer.optimizer) as recorder:
            yield
        self.profiles[step] = recorder.profile()

    def after_epoch(self, trainer: TrainingState) -> None:
        if self.profiles:
            self.peaks = [0] * dist.get_world_size()
            dist.all_gather_object(self.peaks, max(p.peak for p in self.profiles.values()))
            trainer.history[-1]["peak_bytes"] = max(self.peaks)


class TimelineHook(Hook):
    """Records what every rank did, and when, in every n-th step.

    On a CPU with fewer cores than ranks clocks would show who got a core: there a pipeline's last batch is
    replayed from the CPU time of its actions, and ranks are places in this rank's pipeline.

    Args:
        every: n; the steps before the n-th warm up.
        path: a folder for traces that Perfetto opens.

    Attributes:
        timelines: {step: Timeline} of all ranks, on every rank; the first step is 0.

    >>> hook = hpnb.TimelineHook(every=50, path="traces")  # pass it to hpnb.Trainer(..., hooks=[hook])
    >>> hook.timelines  # then {49: Timeline, 99: ...}
    {}
    """

    def __init__(self, every: int, path: str | Path | None = None) -> None:
        if every < 1:
            raise ValueError(f"every={every} steps is not possible; use 1 or more")
        self.every, self.path = every, None if path is None else Path(path)
        self.timelines: dict[int, record.Timeline] = {}

    @contextmanager
    def around_step(self, trainer: TrainingState) -> Iterator[None]:
        step = trainer.step
        if (step + 1) % self.every:
            yield
            return
        with record.timeline() as recorder:
            trainer.records = True
            try:
                yield
            finally:
                trainer.records = False
        if contended() and uses_pipeline(trainer, trainer.batches[-1]):
            timeline = trainer.model.last_step.timeline
        else:
            timeline = recorder.gather().shifted()
        self.timelines[step] = timeline
        if self.path is not None and rank() == 0:
            self.path.mkdir(parents=True, exist_ok=True)
            timeline.to_chrome_trace(self.path / f"step-{step:08}.json")

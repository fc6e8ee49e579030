"""Says when the loss of a run stops being a number.

The run goes on, because in 16 bits a step that overflows is skipped, and a later loss may be finite.
Reading a loss waits for the GPU, so losses are kept and read twice a second.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from hpnb.hybrid.training.events import Hook
from hpnb.hybrid.training.run_state import TrainingState

_EVERY = 0.5  # seconds


class FiniteLossHook(Hook):
    """Says once, on the rank that shows progress, which step was the first whose loss is nan or infinite."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._losses: list[torch.Tensor] = []  # since the last look
        self._looked = 0.0
        self._has_said = False

    def after_step(self, trainer: TrainingState) -> None:
        if self._has_said or not trainer.role.shows or trainer.loss is None:
            return
        self._losses.append(trainer.loss.detach().clone())  # a replayed graph has one tensor for all steps
        if time.monotonic() - self._looked > _EVERY:
            self._look(trainer)

    def after_epoch(self, trainer: TrainingState) -> None:
        self._look(trainer)

    def _look(self, trainer: TrainingState) -> None:
        values = torch.stack(self._losses).tolist() if self._losses else []
        first = trainer.step - len(values) + 1
        self._losses, self._looked = [], time.monotonic()
        bad = next(((i, value) for i, value in enumerate(values) if not math.isfinite(value)), None)
        if bad is not None and not self._has_said:
            self._has_said = True
            self._say(
                f"warning: the loss of step {first + bad[0]} is {bad[1]}; if the next ones are too, the "
                "weights are lost: stop, and start anew or from an earlier checkpoint with a smaller "
                "learning_rate, a longer warm-up or max_norm = 1"
            )

"""The progress bar of an epoch: one for all ranks, where the loss is known. Under CI, where it would be pages
of log (the environment has CI), there is none.
"""

from __future__ import annotations

import os
import time
from typing import Any

from tqdm import tqdm

from hpnb.hybrid.training.run_state import TrainingState

_EVERY = 0.5  # seconds: reading a loss waits for the GPU


def wanted(shows: bool, asked: bool | None) -> bool:
    """Whether this rank has a bar: `shows` if it is the one, `asked` if somebody said so."""
    in_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    return shows and (not in_ci if asked is None else asked)


class Progress:
    """A bar of `steps` steps, `done` of which were done before; None if nobody knows how many."""

    def __init__(self, trainer: TrainingState, steps: int | None, done: int, show: bool) -> None:
        self._trainer = trainer
        label = f"epoch {trainer.epoch + 1}/{trainer.epochs}"
        self._bar: Any = tqdm(total=steps, initial=done, desc=label, unit="step", disable=not show)
        self._read = 0.0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def update(self) -> None:
        """One step further. Now and then it reads the loss."""
        if self._bar.disable:
            return
        loss, now = self._trainer.loss, time.monotonic()
        if loss is not None and (now - self._read > _EVERY or self._bar.n + 1 == self._bar.total):
            self._read = now
            self._bar.set_postfix(loss=f"{float(loss):.4g}", refresh=False)
        self._bar.update()

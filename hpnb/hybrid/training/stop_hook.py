"""Ctrl-C or SIGTERM in a training run: all ranks end the step, save, and exit. A second Ctrl-C ends it now.

Slurm and Kubernetes send SIGTERM some seconds before they kill, and torchrun passes it on to its ranks. All
ranks leave after the same step, the one after that in which one of them was asked (stop_vote.py). If steps
take more than a second, they leave after the step in which one was asked: the next could take too long.
"""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from hpnb.hybrid.training import resuming
from hpnb.hybrid.training.events import Hook
from hpnb.hybrid.training.run_state import TrainingState
from hpnb.hybrid.training.stop_vote import StopVote

SLOW_STEP = 1.0  # seconds, beside which waiting for the other ranks is nothing


class Stopped(SystemExit):
    """The run ended after a step, as it was asked to. A script that does not catch it exits with code 0, so
    that torchrun does not start the run again."""

    def __init__(self, message: str) -> None:
        super().__init__(0)
        self.message = message

    def __str__(self) -> str:
        return self.message


class StopHook(Hook):
    """Saves and raises `Stopped`, on every rank, once one of them was asked to stop.

    Args:
        path: where checkpoints lie; None saves nothing.
        keep: so many of the newest stay.
        flag: a file that asks to stop as soon as it is there, for ranks that get no Ctrl-C of their own; by
            default this process's SIGINT asks. Its SIGTERM always does.
    """

    priority: ClassVar[int] = 110  # after what else is saved

    def __init__(self, path: Path | None, keep: int = 2, flag: Path | None = None) -> None:
        self.path, self.keep, self.flag = path, keep, flag
        self._asked = False
        self._vote = StopVote()
        self._last = time.monotonic()  # when the step before has ended
        self._before: dict[int, Any] = {}  # {signal: its handler before this fit}

    def before_fit(self, trainer: TrainingState) -> None:
        self._last = time.monotonic()
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        numbers = [signal.SIGTERM] if self.flag is not None else [signal.SIGTERM, signal.SIGINT]
        self._before = {number: signal.signal(number, self._ask) for number in numbers}

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # the second one ends it

    def after_step(self, trainer: TrainingState) -> None:
        if self._vote.result():
            self._stop(trainer)
        asked = self._asked or (self.flag is not None and self.flag.exists())
        self._vote.begin(asked, slow=time.monotonic() - self._last > SLOW_STEP)
        if self._vote.slow and self._vote.result():  # slow in the vote before: all ranks do the same
            self._stop(trainer)
        self._last = time.monotonic()

    def _stop(self, trainer: TrainingState) -> None:
        self.release()
        trainer.booster.wait()
        if self.path is not None and not is_saved(self.path, trainer.step):
            resuming.save(trainer, self.path / f"step-{trainer.step:08}", self.keep)
        raise Stopped(f"stopped after step {trainer.step}")

    def after_fit(self, trainer: TrainingState) -> None:
        self._vote.result()
        self.release()

    def release(self) -> None:
        """Signals mean again what they meant before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


def is_saved(path: Path, step: int) -> bool:
    """Whether `path` has a complete checkpoint of this step."""
    return any(resuming.step_of(folder) == step for folder in resuming.saved(path))

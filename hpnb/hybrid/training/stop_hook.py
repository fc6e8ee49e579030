"""Ctrl-C or SIGTERM in a training run: all ranks end the step, save, and exit. A second Ctrl-C ends it now.

Slurm and Kubernetes send SIGTERM some seconds before they kill, and torchrun passes it on to its ranks.

    step k       somebody asked, or not: a sum over all ranks begins, among CPUs
    step k + 1   it is complete long since; more than 0 stops all ranks here, after the same step

So nobody waits, and no rank is left in a collective that the others never enter.
"""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from hpnb.hybrid.training import resuming
from hpnb.hybrid.training.events import Hook
from hpnb.hybrid.training.run_state import TrainingState


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
        self._sum: torch.Tensor | None = None
        self._work: Any = None
        self._before: dict[int, Any] = {}  # {signal: its handler before this fit}

    def before_fit(self, trainer: TrainingState) -> None:
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        numbers = [signal.SIGTERM] if self.flag is not None else [signal.SIGTERM, signal.SIGINT]
        self._before = {number: signal.signal(number, self._ask) for number in numbers}

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # the second one ends it

    def after_step(self, trainer: TrainingState) -> None:
        if self._agreed():
            self.release()
            trainer.booster.wait()
            if self.path is not None and not is_saved(self.path, trainer.step):
                resuming.save(trainer, self.path / f"step-{trainer.step:08}", self.keep)
            raise Stopped(f"stopped after step {trainer.step}")
        asked = self._asked or (self.flag is not None and self.flag.exists())
        self._sum = torch.tensor([float(asked)])
        self._work = dist.all_reduce(self._sum, async_op=True)

    def after_fit(self, trainer: TrainingState) -> None:
        self._agreed()
        self.release()

    def _agreed(self) -> bool:
        """What the step before has begun to ask."""
        if self._work is None:
            return False
        self._work.wait()
        self._work = None
        assert self._sum is not None
        return bool(self._sum.item())

    def release(self) -> None:
        """Signals mean again what they meant before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


def is_saved(path: Path, step: int) -> bool:
    """Whether `path` has a complete checkpoint of this step."""
    return any(resuming.step_of(folder) == step for folder in resuming.saved(path))

"""Ctrl-C or SIGTERM in a training run: all ranks end the step, save, and exit. A second Ctrl-C ends it now.

    step k       a rank asks, or not: a sum over all ranks begins, among CPUs
    step k + 1   the sum has arrived by now; if it is above 0, all ranks stop here

So nobody waits, and no rank is left in a collective that the others never enter. If steps take more than a
second, all ranks wait for the sum in step k instead: the next step could take too long. They also wait for
one before an evaluation, which may take long too, after each epoch, and at the end of the fit. Slurm and
Kubernetes send SIGTERM some seconds before they kill, and torchrun passes it on to its ranks, as hpnb.launch
does (ranks/stop_request.py).
"""

from __future__ import annotations

import signal
import threading
import time
import warnings
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from hpnb.hybrid.checkpoint.agreement import cpu_group
from hpnb.hybrid.training import resuming
from hpnb.hybrid.training.events import Hook
from hpnb.hybrid.training.run_state import TrainingState
from hpnb.ranks import stop_request
from hpnb.ranks.stop_request import Stopped as Stopped

SLOW_STEP = 1.0  # seconds, beside which waiting for the other ranks is nothing


class StopVote:
    """Counts over all ranks how many ask to stop. All ranks call its methods in the same order. `slow` says
    whether any rank was slow in the last count that was read, so it is the same on all ranks. It starts as
    True."""

    def __init__(self) -> None:
        self.slow = True
        self._sum: torch.Tensor | None = None
        self._work: Any = None

    def begin(self, asks: bool, slow: bool = False) -> None:
        """Start to ask all ranks. After a `slow` step here, the sum is to be waited for."""
        self._sum = torch.tensor([float(asks), float(slow)])
        world = dist.group.WORLD
        assert world is not None, "a Booster has made a mesh"
        takes_cpu = torch.device("cpu") in world._device_types  # not if a program has joined for GPUs alone
        group = world if takes_cpu else cpu_group("stop")
        self._work = dist.all_reduce(self._sum, group=group, async_op=True)

    def result(self) -> bool:
        """Whether a rank asked when it was begun; False if it was not."""
        if self._work is None:
            return False
        self._work.wait()
        self._work = None
        assert self._sum is not None
        asked, self.slow = (bool(count) for count in self._sum.tolist())
        return asked

    def now(self, asks: bool) -> bool:
        """Whether a rank asks now, for which all ranks wait. `slow` stays as it is."""
        self.begin(asks, self.slow)
        return self.result()


def started_file(flag: Path) -> Path:
    """The file beside a `flag` that is there once the steps have begun, so that who asks knows what ends."""
    return flag.with_name(f"{flag.name}-started")


class StopHook(Hook):
    """Saves and raises `Stopped`, on every rank, once one of them was asked to stop.

    A rank is asked by its own SIGINT and SIGTERM, as under torchrun, and by those of the program whose
    hpnb.launch or Ranks.run it is in. That program then exits with code 143 after a SIGTERM, and gets a
    RankInterrupt after Ctrl-C. With a handler of its own for a signal, it decides itself what that one does.
    Only while `fit` runs: before and after it, both signals end all ranks at once.

    Args:
        path: where checkpoints lie; None saves nothing.
        flag: a file that asks to stop as soon as it is there, in place of Ctrl-C and the program's SIGTERM;
            `hpnb train` has one. This process's SIGTERM always asks.
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
        self._asked, self._vote = False, StopVote()  # an earlier fit may have been stopped
        if self.flag is not None:
            started_file(self.flag).touch()
        else:
            stop_request.announce(saves=self.path is not None)
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
        self._vote.begin(self._is_asked(), slow=time.monotonic() - self._last > SLOW_STEP)
        if self._vote.slow and self._vote.result():  # slow in the vote before: all ranks do the same
            self._stop(trainer)
        self._last = time.monotonic()

    def stop_if_asked(self, trainer: TrainingState) -> None:
        """The same between two steps: all ranks call it, and wait for each other."""
        asked = self._vote.result()
        if self._vote.now(asked or self._is_asked()):
            self._stop(trainer)
        self._last = time.monotonic()

    def after_epoch(self, trainer: TrainingState) -> None:
        self.stop_if_asked(trainer)

    def after_fit(self, trainer: TrainingState) -> None:
        self.stop_if_asked(trainer)
        self.release()

    def _is_asked(self) -> bool:
        return self._asked or stop_request.is_asked() or (self.flag is not None and self.flag.exists())

    def _stop(self, trainer: TrainingState) -> None:
        self._restore_signals()
        stop_request.take()
        try:
            trainer.booster.wait()
        except Exception as error:  # which all ranks have; this is the last chance to save
            warnings.warn(f"an earlier checkpoint was not saved: {error}", stacklevel=2)
        if self.path is not None:
            saved = resuming.first_rank_finds(resuming.saved, self.path)
            if trainer.step not in map(resuming.step_of, saved):
                folder = self.path / f"step-{trainer.step:08}"
                with resuming.disk_errors_of(folder):
                    resuming.save(trainer, folder, self.keep)
        raise Stopped(f"stopped after step {trainer.step}")

    def release(self) -> None:
        """Signals mean again what they meant before."""
        self._restore_signals()
        if self.flag is None:
            stop_request.withdraw()

    def _restore_signals(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

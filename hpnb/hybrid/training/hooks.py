"""Hooks for a Trainer: the learning rate, a record of the epochs, checkpoints.

Metrics are in metrics.py, hooks that record steps in recording_hooks.py, and the events in events.py.
"""

from __future__ import annotations

import difflib
import inspect
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from hpnb.files import write_text
from hpnb.hybrid.training import resuming
from hpnb.hybrid.training.events import Hook
from hpnb.hybrid.training.folder_lock import FolderLock
from hpnb.hybrid.training.run_state import TrainingState


class LRSchedulerHook(Hook):
    """Steps the learning rate. A Trainer that is given an lr_scheduler has one, by step.

    A step that was skipped for an overflow counts: the schedule ends when the fit does.

    Args:
        scheduler: one whose step() needs no arguments; for ReduceLROnPlateau write a hook, as the error says.
        by: "step" of the optimizer, or "epoch"; a schedule made for epochs falls too fast by steps.

    Raises:
        ValueError: another `by`, or a scheduler whose step() needs a figure.

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    >>> scheduler = hpnb.CosineAnnealingWarmupLR(optimizer, total_steps=10)
    >>> hpnb.LRSchedulerHook(scheduler, by="epoch").by  # pass it to hpnb.Trainer(..., hooks=[...])
    'epoch'
    """

    priority = 20

    def __init__(self, scheduler: Any, by: Literal["step", "epoch"] = "step") -> None:
        if by not in ("step", "epoch"):
            raise ValueError(f"by={by!r} is no time to step; use 'step' or 'epoch'")
        if needed := _needed_by_step(scheduler):
            kind = type(scheduler).__name__
            raise ValueError(
                f"{kind}.step needs {' and '.join(needed)}, which neither a Trainer nor this hook gives it; "
                f"leave the {kind} out, and pass a hook of yours whose after_epoch(self, trainer) calls "
                'scheduler.step(trainer.history[-1]["eval_loss"]), or what else it needs. Its state_dict and '
                "load_state_dict may be those of the scheduler, for checkpoints"
            )
        self.scheduler, self.by = scheduler, by

    def after_step(self, trainer: TrainingState) -> None:
        if self.by == "step":
            self.scheduler.step()

    def after_epoch(self, trainer: TrainingState) -> None:
        if self.by == "epoch":
            self.scheduler.step()


class MetricsByEpochHook(Hook):
    """Prints a line an epoch, where the progress bar is, and keeps all of them in a file.

    Args:
        path: a JSON file: a list with a dict an epoch.
        show: print the line.
        on_error: what a failed write of the file does, as on a full disk: "stop" the fit, or "warn" and train
            on; the next epoch writes the list again.

    Attributes:
        history: the same list, on every rank.

    >>> hook = hpnb.MetricsByEpochHook("metrics.json", show=False)
    >>> hook.history  # filled by hpnb.Trainer(..., hooks=[hook])
    []
    """

    priority = 90

    def __init__(
        self,
        path: str | Path | None = None,
        show: bool = True,
        on_error: Literal["stop", "warn"] = "stop",
    ) -> None:
        _check_on_error(on_error)
        self.path, self.show, self.on_error = None if path is None else Path(path), show, on_error
        self.history: list[dict[str, Any]] = []

    def after_epoch(self, trainer: TrainingState) -> None:
        self.history = trainer.history
        if not trainer.role.shows:
            return
        if self.show:
            figures = "  ".join(f"{name} {_format(value)}" for name, value in self.history[-1].items())
            print(figures, flush=True)
        if self.path is not None:
            try:
                with resuming.disk_errors_of(self.path):
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    write_text(self.path, json.dumps(self.history, indent=1, default=float))
            except OSError as error:
                if self.on_error == "stop":
                    raise
                warnings.warn(f"training goes on without the metrics in a file: {error}", stacklevel=2)

    def table(self) -> str:
        """The history in columns; a dash where an epoch has no such figure."""
        names = list(dict.fromkeys(name for row in self.history for name in row))
        rows = [names, *([_format(row.get(name)) for name in names] for row in self.history)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(names))]
        lines = (
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
        )
        return "\n".join(lines)


class CheckpointHook(Hook):
    """Saves everything that `trainer.resume` needs, by booster.save.

    A folder appears when it is complete, and older ones go after that: a run that is killed while it saves
    goes on from the one before. During `fit`, no other run may save there. The states and averages of other
    hooks are saved too (`Hook.state_dict`, `Hook.saved_averages`).

    Args:
        path: holds "step-00000500" and so on, and "best-..."; every rank must see it.
        every: steps between two; None saves after each epoch. The end of a fit is saved as well.
        best: a name in the history, such as "eval_loss": the epoch with the best is kept as well, of several
            the first.
        mode: whether the "min" or the "max" is best; by default the least of what ends in "loss".
        keep: so many of the newest stay.
        background: write while training goes on; the fit ends when all is written.
        on_error: what a failed save does, as on a full disk: "stop" the fit, or "warn" and train on.

    >>> hook = hpnb.CheckpointHook("runs", every=500, best="eval_loss", keep=2)
    >>> hook.every  # pass it to hpnb.Trainer(..., hooks=[hook])
    500
    """

    priority = 100

    def __init__(
        self,
        path: str | Path,
        every: int | None = None,
        best: str | None = None,
        mode: Literal["min", "max"] | None = None,
        keep: int = 2,
        background: bool = False,
        on_error: Literal["stop", "warn"] = "stop",
    ) -> None:
        _check_on_error(on_error)
        if mode not in (None, "min", "max"):
            raise ValueError(f"mode={mode!r} is not known; use 'min' or 'max'")
        if every is not None and every < 1:
            raise ValueError(f"every={every} steps is not possible; use 1 or more, or None for each epoch")
        if keep < 1:
            raise ValueError(f"keep={keep} would keep no checkpoint; use 1 or more")
        self.path, self.every, self.best, self.keep = Path(path), every, best, keep
        self.background, self.on_error = background, on_error
        self._lock = FolderLock(self.path)
        self._saved_step = 0  # the last that is in the folder
        self._sign = 1 if (mode or ("min" if (best or "").endswith("loss") else "max")) == "min" else -1

    def before_fit(self, trainer: TrainingState) -> None:
        self._lock.acquire()
        if self.best is not None:
            self._check_best(trainer, self.best)
        saved = resuming.first_rank_finds(resuming.saved, self.path)
        if saved and resuming.step_of(saved[-1]) > trainer.step:
            raise ValueError(
                f"{self.path} has {saved[-1].name} already, and this run is at step {trainer.step}: resume "
                "from it, or save to another folder"
            )
        self._saved_step = trainer.step  # nothing is new yet

    def after_step(self, trainer: TrainingState) -> None:
        if self.every is not None and trainer.step % self.every == 0:
            self._save(trainer, "step")

    def after_epoch(self, trainer: TrainingState) -> None:
        if self.every is None and trainer.step > self._saved_step:
            self._save(trainer, "step")
        if self.best is not None and self._is_best(trainer, self.best):
            self._save(trainer, "best", keep=1)

    def after_fit(self, trainer: TrainingState) -> None:
        if trainer.step > self._saved_step:
            self._save(trainer, "step")
        self._report(trainer.booster.wait, self.path)

    def release(self) -> None:
        """Other runs may save there again."""
        self._lock.release()

    def _check_best(self, trainer: TrainingState, name: str) -> None:
        """Raise ValueError if no epoch will have a figure of this name."""
        names = [metric.name for metric in trainer.metrics]
        if trainer.evaluates:
            names += [f"eval_{metric.name}" for metric in trainer.metrics if metric.counts]
        names += ["lr", "seconds", *(name for hook in trainer.hooks for name in hook.figures)]
        events = ("after_epoch", "after_evaluate")
        is_extended = any(  # by hooks that may add figures to the history
            not type(hook).__module__.startswith("hpnb.") and getattr(type(hook), e) is not getattr(Hook, e)
            for hook in trainer.hooks for e in events
        )  # fmt: skip
        if name not in names and not is_extended:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]}?" if near else f"an epoch has {', '.join(names)}"
            if name.startswith("eval_") and not trainer.evaluates:
                hint = f"this fit does not evaluate; pass evaluate=..., or use one of {', '.join(names)}"
            raise ValueError(f"there is no {name!r} to be best in; {hint}")

    def _is_best(self, trainer: TrainingState, name: str) -> bool:
        row = trainer.history[-1]
        was_evaluated = any(figure.startswith("eval_") for figure in row)
        may_follow = name.startswith("eval_") and trainer.evaluates and not was_evaluated
        if row.get(name) is None and not may_follow:
            raise ValueError(f"there is no {name!r} to be best in; this epoch has {', '.join(row)}")
        before = [self._sign * r[name] for r in trainer.history[:-1] if r.get(name) is not None]
        before = [value for value in before if not math.isnan(value)]
        return row.get(name) is not None and self._sign * row[name] < min(before, default=math.inf)

    def _save(self, trainer: TrainingState, kind: str, keep: int | None = None) -> None:
        folder = self.path / f"{kind}-{trainer.step:08}"
        if self.background:
            self._report(trainer.booster.wait, self.path)  # how the save before ended
        is_saved = self._report(
            lambda: resuming.save(trainer, folder, keep or self.keep, self.background), folder
        )
        if is_saved and kind == "step":
            self._saved_step = trainer.step

    def _report(self, save: Callable[[], Any], path: Path) -> bool:
        """Save, and say whether that went well; an error, which all ranks have, is raised or is a warning."""
        try:
            with resuming.disk_errors_of(path):
                save()
        except Exception as error:
            if self.on_error == "stop":
                raise
            is_sentence = isinstance(error, ValueError | OSError | RuntimeError) and str(error)
            reason = str(error) if is_sentence else f"{type(error).__name__} {error}".rstrip()
            warnings.warn(
                f"a checkpoint in {self.path} was not saved, and training goes on: {reason}", stacklevel=2
            )
            return False
        return True


def _check_on_error(on_error: str) -> None:
    if on_error not in ("stop", "warn"):
        raise ValueError(f"on_error={on_error!r} is not known; use 'stop' or 'warn'")


def _needed_by_step(scheduler: Any) -> list[str]:
    """The arguments without a default that a scheduler's step takes."""
    if scheduler is None or not callable(getattr(scheduler, "step", None)):
        return []
    parameters = inspect.signature(scheduler.step).parameters.values()
    positional = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [p.name for p in parameters if p.default is p.empty and p.kind in positional]


def _format(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)

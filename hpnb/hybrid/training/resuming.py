"""A run on disk: everything that is needed to go on as if it had never ended.

step-00000500/      booster.save: weights, optimizer, learning rates, random states, averages of hooks,
                    and as its extra step and epoch, place in the data, history, sums of this epoch's
                    metrics, states of hooks
"""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpnb.hybrid.checkpoint import manifest
from hpnb.hybrid.checkpoint.agreement import attempt, files_group, gather_objects
from hpnb.hybrid.checkpoint.checkpoint import STATE, random_state, set_random_state
from hpnb.hybrid.checkpoint.state_files import StateReader
from hpnb.hybrid.training.run_state import TrainingState


def save(trainer: TrainingState, folder: Path, keep: int | None = None, background: bool = False) -> None:
    """Write a checkpoint; `folder` appears when it is complete, and so many of the newest of its kind stay.
    Every rank calls it."""
    group, loader = files_group(), trainer.loader
    sums = trainer.sums([metric for metric in trainer.metrics if metric.counts])
    # By itself, because the ranks of a stream exchange their places there.
    place = attempt(lambda: loader.state_dict() if hasattr(loader, "state_dict") else None, group)
    of_hooks, averages = attempt(lambda: (_hook_states(trainer), _averages(trainer)), group)
    trainer.booster.save(
        folder, trainer.model, trainer.optimizer, trainer.lr_scheduler,
        extra={**_state(trainer), "sums": sums, "hooks": of_hooks, "loader": place},
        keep=keep, background=background, averages=averages,
    )  # fmt: skip


@contextmanager
def disk_errors_of(path: Path) -> Iterator[None]:
    """An OSError inside says which path could not be written, and how much room its disk has."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{path} could not be written: {error}{_disk_facts(path)}") from error


def _disk_facts(path: Path) -> str:
    try:
        there = next(folder for folder in path.absolute().parents if folder.is_dir())
        facts = f"; its disk has {shutil.disk_usage(there).free / 1e6:,.1f} MB free"
        if newest := saved(there)[-1:]:
            size = sum(file.stat().st_size for file in newest[0].rglob("*") if file.is_file())
            facts += f", and {newest[0].name} takes {size / 1e6:,.1f} MB"
    except OSError:
        return ""
    return facts


def _averages(trainer: TrainingState) -> dict[str, Any]:
    """The averages of all hooks by name."""
    pairs = [pair for hook in trainer.hooks for pair in hook.saved_averages().items()]
    names = [name for name, _ in pairs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two hooks have an average called {twice!r}; give one of them another name")
    return dict(pairs)


def _hook_states(trainer: TrainingState) -> dict[str, dict[str, Any]]:
    """{class of a hook: its state}, of those that have one; a second one of a class is called "Ema 2"."""
    return {label: state for label, hook in _labels(trainer).items() if (state := hook.state_dict())}


def _labels(trainer: TrainingState) -> dict[str, Any]:
    labels: dict[str, Any] = {}
    for hook in trainer.hooks:
        kind = type(hook).__name__
        count = sum(type(other).__name__ == kind for other in labels.values())
        labels[f"{kind} {count + 1}" if count else kind] = hook
    return labels


def _load_hook_states(trainer: TrainingState, states: Mapping[str, dict[str, Any]], folder: Path) -> None:
    for label, hook in _labels(trainer).items():
        if label in states:
            hook.load_state_dict(states[label])
        elif hook.state_dict():
            warnings.warn(f"{folder} has no state of the hook {label}, which begins anew", stacklevel=4)


def _state(trainer: TrainingState) -> dict[str, Any]:
    """Where the run is, the same on every rank."""
    return {
        "step": trainer.step,
        "epoch": trainer.epoch,
        "done": trainer.steps_in_epoch,
        "lr": trainer.lr,
        "history": trainer.history,
        "facts": trainer.run_facts,
    }


def read_state(folder: Path) -> dict[str, Any]:
    """What `save` wrote of the run beside weights, optimizer and learning rates, without loading these. Every
    rank calls it.
    """
    group = files_group()
    stored = attempt(lambda: StateReader(folder / STATE), group)
    state: dict[str, Any] = stored.read({}, ["extra"], group)["extra"]
    return state


def ended_epoch(state: Mapping[str, Any]) -> bool:
    """Whether the run was saved at the end of an epoch."""
    return bool(state["history"]) and state["history"][-1]["epoch"] == state["epoch"] + 1


def load(trainer: TrainingState, folder: Path, restore_data: bool = True) -> None:
    """Take weights, optimizer and learning rates; `take_up` takes the rest. Every rank calls it.

    Without `restore_data` the epoch that was cut short begins anew, and so do its metrics.
    """
    parts = trainer.model, trainer.optimizer, trainer.lr_scheduler
    state = trainer.booster.load(folder, *parts, averages=_averages(trainer))
    _load_hook_states(trainer, state.get("hooks", {}), folder)
    trainer.step, trainer.epoch, trainer.lr = state["step"], state["epoch"], state["lr"]
    trainer.history[:] = state["history"]
    if not restore_data:
        state = {**state, "done": 0}
    # Set by the load if the layout is the same; what is drawn until the fit begins does not matter.
    trainer.loaded_state = {**state, "random": random_state()}


def take_up(trainer: TrainingState) -> None:
    """At the start of a fit: go to where the run was when it was saved, if it was resumed. The fit drops the
    loaded state once nothing can refuse to begin any more."""
    state = trainer.loaded_state
    trainer.steps_in_epoch, trainer.sums_before_resume = 0, {}
    if ended_epoch({"history": trainer.history, "epoch": trainer.epoch}):  # also if a fit was stopped there
        trainer.epoch += 1
        if state is not None:  # if the fit is refused now, the next one begins this epoch, too
            trainer.loaded_state = {**state, "done": 0}
    elif state is not None and state["done"]:
        if state["loader"] is None or not hasattr(trainer.loader, "load_state_dict"):
            raise ValueError(
                f"the run was saved after {state['done']} steps of epoch {trainer.epoch + 1}, and a "
                f"{type(trainer.loader).__name__} cannot go on from there; use plugin.prepare_dataloader, or "
                "let the epoch begin anew: trainer.resume(folder, restore_data=False)"
            )
        trainer.loader.load_state_dict(state["loader"])
        trainer.steps_in_epoch = state["done"]
        names = {metric.name for metric in trainer.metrics}
        trainer.sums_before_resume = {name: sums for name, sums in state["sums"].items() if name in names}
    if state is not None:
        set_random_state(state["random"])


def saved(path: Path, kind: str = "step") -> list[Path]:
    """The complete checkpoints in `path` that are called KIND-NUMBER, also one that a killed save has left
    under KIND-NUMBER.part or .old; other names are skipped. The newest, which is last, is that with the most
    steps: a run saves no step below one that is there, and a damaged manifest does not hide the number."""
    called = re.compile(rf"{re.escape(kind)}-\d+")
    complete = manifest.complete_in(path)
    return sorted((f for f in complete if called.fullmatch(manifest.final_name(f))), key=step_of)


def find(path: Path) -> Path | None:
    """`path` itself if it is a checkpoint, else that with the most steps in it whose manifest is sound. If a
    newer one is damaged or has none, all ranks warn, and the run goes on from an older one."""
    if manifest.is_complete(manifest.standing(path)):
        return path
    manifest.warn_of_unsealed(path)
    for folder in reversed(saved(path)):
        try:
            manifest.manifest(folder)
        except ValueError as error:
            warnings.warn(f"the run does not resume from {folder.name}: {error}", stacklevel=2)
        else:
            return folder
    return None


def first_rank_finds(look: Callable[[Path], Any], path: Path) -> Any:
    """What `look` returns for `path` on the first rank. All ranks call it and look, so that all of them warn,
    but where machines share files they may not see the same at the same time."""
    group = files_group()
    return gather_objects(attempt(lambda: look(path), group), group)[0]


def unfinished(path: Path) -> str | None:
    """The name of the newest folder in `path` that a killed save has left incomplete, or None."""
    called = re.compile(rf"step-\d+{re.escape(manifest.PART)}")
    parts = [f for f in path.glob(f"*{manifest.PART}") if called.fullmatch(f.name) and f.is_dir()]
    newest = max((f for f in parts if not manifest.is_complete(f)), key=step_of, default=None)
    return None if newest is None else newest.name


def step_of(folder: Path) -> int:
    return int(manifest.final_name(folder).rpartition("-")[2])

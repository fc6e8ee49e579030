"""`python -m hpnb train vit.toml`: a run file (run_file.py), trained on the ranks that are there.

vit/                 the folder of its checkpoints
  step-00000064/     what the run goes on from when it is started again
  history.json       a dict an epoch
  model/             at the end, a Hugging Face directory
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hpnb.hybrid.booster import Booster
from hpnb.hybrid.checkpoint.agreement import files_group, gather_objects, on_first_rank
from hpnb.hybrid.plugins import HybridParallelPlugin
from hpnb.hybrid.torchrun.launch_from_torch import launch_from_torch
from hpnb.hybrid.train_command.compare_runs import Difference, check_resumable, differences, run_facts
from hpnb.hybrid.train_command.run_file import RunFile, TrainingTable
from hpnb.hybrid.train_command.run_task import LimitedLoader, RunTask, make_task
from hpnb.hybrid.training import hooks, resuming
from hpnb.hybrid.training.events import Hook
from hpnb.hybrid.training.folder_lock import FolderLock
from hpnb.hybrid.training.hybrid_adam import HybridAdam
from hpnb.hybrid.training.lr_schedulers import CosineAnnealingWarmupLR, LinearWarmupLR
from hpnb.hybrid.training.metrics import ThroughputHook
from hpnb.hybrid.training.run_state import EpochRow, TrainingState
from hpnb.hybrid.training.stop_hook import StopHook, Stopped
from hpnb.hybrid.training.trainer import Trainer
from hpnb.models import decay_groups
from hpnb.ranks.current_rank import device, world_size

_LOSSES_EVERY = 0.5  # seconds
_HISTORY, _MODEL = "history.json", "model"


@dataclass(frozen=True)
class RunResult:
    """How a run went, the same on every rank: a dict an epoch, those before a resume included; what the last
    evaluation says, {} if the run was stopped; and the step of the checkpoint from which it went on, or None.
    """

    history: list[EpochRow] = field(default_factory=list)
    final: EpochRow = field(default_factory=dict)
    step: int = 0
    resumed: int | None = None
    stopped: bool = False


def train(file: RunFile, flag: Path | None = None, more: Sequence[Hook] = ()) -> RunResult:
    """Train what `file` says; every rank calls it. No other run may train in its folder meanwhile.

    Args:
        flag: a file that ends the run, with a checkpoint, once it is there; by default Ctrl-C does.
        more: hooks of the caller's.
    """
    launch_from_torch(seed=file.training.seed)
    file.check_ranks(world_size())
    lock = FolderLock(file.folder)
    lock.acquire()
    try:
        return _train(file, lock.folder, flag, more)
    finally:
        lock.release()


def _train(file: RunFile, folder: Path, flag: Path | None, more: Sequence[Hook]) -> RunResult:
    plugin, how, checkpoint = file.plugin(), file.training, file.checkpoint
    newest = _newest(folder) if checkpoint.resume else None
    unfinished = resuming.unfinished(folder) if checkpoint.resume and newest is None else None
    if checkpoint.resume and newest is None:
        _check_not_finished(folder)
    state = {} if newest is None else resuming.read_state(newest)
    task = make_task(file)
    loader = task.loader(plugin, file.data, 0, how.seed)
    facts = run_facts(file, plugin.dp_size)
    changed = differences(state.get("facts", {}), facts)
    anew = _why_anew(loader, state, changed)
    if anew is not None and checkpoint.allow_changes:
        state = {**state, "done": 0}
    epochs, total = _length(loader, how, state)
    if newest is not None and not checkpoint.allow_changes:
        check_resumable(changed, folder, state["step"], total)
        if anew is not None:
            raise ValueError(
                f"{newest} was saved inside epoch {state['epoch'] + 1}: {anew}; or pass --allow-changes to "
                "begin that epoch anew"
            )
    _check_space(folder, task, checkpoint.keep)
    lr = how.learning_rate
    if how.learning_rate_scaling == "data-parallel":
        lr = plugin.scaled_lr(lr)
    optimizer: Any = HybridAdam(decay_groups(task.model, how.weight_decay), lr=lr)
    schedule = _schedule(optimizer, how, lr, total, _warmup_steps(loader, how))
    about = _about(file, plugin, task, lr, total)
    booster = Booster(plugin=plugin)
    model, *_ = booster.boost(task.model, optimizer, None, loader, schedule)

    stop = StopHook(folder, checkpoint.keep, flag)
    saves = _SavesCutEpoch(
        folder, checkpoint.every, checkpoint.best, keep=checkpoint.keep, background=checkpoint.background,
        on_error=checkpoint.on_error,
    )  # fmt: skip
    saves.last_step = total
    recording = [
        *task.metrics,
        ThroughputHook("tokens" if file.data.name == "text" else "samples"),
        hooks.MetricsByEpochHook(folder / _HISTORY, on_error=checkpoint.on_error),
        _FiniteLossHook(_say),
    ]
    trainer = Trainer(booster, model, optimizer, None, schedule, [*recording, saves, stop, *more],
                      accumulation=how.accumulation)  # fmt: skip
    trainer.run_facts = facts
    say: Callable[[str], None] = _say if trainer.role.shows else _keep_quiet
    say(about)
    resumed = None if newest is None else _resume(trainer, newest, restore_data=anew is None)
    if resumed is not None:
        place = f"goes on from {newest}"
        if resumed >= total:
            _take_last_row(trainer, folder / _HISTORY)
            place = f"the run in {folder} is finished, and nothing is left to train"
        then = f"; epoch {trainer.epoch + 1} begins anew with the data as the file says now" if anew else ""
        say(f"{place}, after {resumed} of {total} steps{then}")
        for difference in changed:
            say(f"  changed: {difference}")
    if unfinished is not None:
        say(f"{folder / unfinished} is from a save that did not finish and is not used; starts at step 0")
    try:
        test = task.loader(plugin, file.data, 1)
        trainer.fit(loader, epochs, evaluate=test, evaluate_every=how.evaluate_every)
    except Stopped:
        say(f"stopped after {trainer.step} of {total} steps; the same command goes on from there")
        return RunResult(trainer.history, {}, trainer.step, resumed, stopped=True)
    final = trainer.evaluate(task.loader(plugin, file.data, 2))
    figures = "  ".join(f"{name} {value:.4g}" for name, value in final.items() if value is not None)
    say(f"final evaluation on {len(task.splits[2]):,} rows: {figures}")
    with resuming.disk_errors_of(folder / _MODEL):
        booster.save_model(model, folder / _MODEL)
        for processor in (task.tokenizer, task.image_processor):
            if processor is not None and trainer.role.shows:
                processor.save_pretrained(folder / _MODEL)
    say(f"the model is in {folder / 'model'}, which from_pretrained opens")
    return RunResult(trainer.history, final, trainer.step, resumed)


class _SavesCutEpoch(hooks.CheckpointHook):
    """Saves the last step of an epoch that ends early, because the run has no more steps, as a step in the
    middle of that epoch. A run with more steps then goes on with the batches that are left."""

    last_step: int = -1

    def after_step(self, trainer: TrainingState) -> None:
        super().after_step(trainer)
        loader: LimitedLoader = trainer.loader
        is_cut = trainer.step == self.last_step and len(loader) < loader.sampler.batches
        if is_cut and self._saved_step < trainer.step:
            self._save(trainer, "step")


class _FiniteLossHook(Hook):
    """Says once, on the rank that shows progress, which step was the first whose loss is nan or infinite.

    The run goes on, because in 16 bits a step that overflows is skipped, and a later loss may be finite.
    Reading a loss waits for the GPU, so losses are kept and read twice a second.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._losses: list[torch.Tensor] = []  # since the last look
        self._looked = 0.0
        self._has_said = False

    def after_step(self, trainer: TrainingState) -> None:
        if self._has_said or not trainer.role.shows or trainer.loss is None:
            return
        self._losses.append(trainer.loss.detach().clone())  # a replayed graph has one tensor for all steps
        if time.monotonic() - self._looked > _LOSSES_EVERY:
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


# --- how long, and how fast ---------------------------------------------------------------------------------


def _length(loader: LimitedLoader, how: TrainingTable, state: Mapping[str, Any]) -> tuple[int, int]:
    """(epochs, steps of the optimizer in all) of a run that goes on from `state`, which is empty at first.
    The last epoch of `loader` ends where the steps do."""
    an_epoch = math.ceil(len(loader) / how.accumulation)
    epoch = before = 0  # epochs that are complete, and their steps
    if state:
        is_over = resuming.ended_epoch(state)
        epoch, before = state["epoch"] + is_over, state["step"] - (0 if is_over else state["done"])
    if how.steps is None:
        assert how.epochs is not None
        return how.epochs, before + max(0, how.epochs - epoch) * an_epoch
    left = how.steps - before
    more = max(0, math.ceil(left / an_epoch))
    if more:
        loader.last = epoch + more - 1
        loader.batches = (left - (more - 1) * an_epoch) * how.accumulation
    return epoch + more, how.steps


def _check_space(folder: Path, task: RunTask, keep: int) -> None:
    """Raise OSError if a checkpoint does not fit on the disk: float32 weights and Adam's two moments. Every
    rank calls it."""
    size = 12 * sum(parameter.numel() for parameter in task.model.parameters())

    def check() -> None:
        free = shutil.disk_usage(folder).free
        if free < size:
            raise OSError(
                f"{folder} has {free / 1e6:,.1f} MB of free disk, and a checkpoint takes about "
                f"{size / 1e6:,.1f} MB, of which [checkpoint] keep = {keep} stay; make room, or set "
                "[checkpoint] dir to another disk"
            )

    on_first_rank(check, files_group())


def _warmup_steps(loader: LimitedLoader, how: TrainingTable) -> int:
    """Steps of the optimizer in which the rate rises; `warmup_epochs` counts full epochs."""
    batches = loader.sampler.batches  # also of an epoch that ends early
    return how.warmup_steps or round(how.warmup_epochs * math.ceil(batches / how.accumulation))


def _schedule(optimizer: Any, how: TrainingTable, lr: float, total: int, warmup_steps: int) -> Any:
    how.check_warmup(warmup_steps, total)
    if how.schedule == "linear":
        return LinearWarmupLR(optimizer, total, warmup_steps)
    return CosineAnnealingWarmupLR(
        optimizer, total, warmup_steps, eta_min=lr if how.schedule == "constant" else 0.0
    )


def _newest(folder: Path) -> Path | None:
    """The newest checkpoint, the same one on all ranks, which call it."""
    newest = resuming.find(folder)
    seen = gather_objects("none" if newest is None else newest.name, files_group())
    if other := next((name for name in seen if name != seen[0]), None):
        raise ValueError(
            f"in {folder} rank 0 sees {seen[0]} as the newest checkpoint, and rank {seen.index(other)} "
            f"{other}: all hosts must see the same files; set [checkpoint] dir to a folder that they share"
        )
    return newest


def _why_anew(loader: LimitedLoader, state: Mapping[str, Any], changed: Sequence[Difference]) -> str | None:
    """Why the epoch inside which `state` was saved cannot go on with the batches that were left; None if it
    can, or if no epoch was cut short."""
    if not state or not state["done"] or resuming.ended_epoch(state):
        return None
    try:
        copy(loader).load_state_dict(state["loader"])
    except ValueError as error:
        return str(error)
    return next((str(difference) for difference in changed if difference.key == "samples a step"), None)


def _resume(trainer: Trainer, checkpoint: Path, restore_data: bool) -> int:
    """Take up a checkpoint; the step it was saved at. Learning rates, decay and the length of the run are
    what the file says now, not what it said then."""
    schedule, groups = trainer.lr_scheduler, trainer.optimizer.param_groups
    names = ("total_steps", "warmup_steps", "base_lrs", "eta_min")
    said = {name: getattr(schedule, name) for name in names if hasattr(schedule, name)}
    decays = [group["weight_decay"] for group in groups]
    trainer.resume(checkpoint, restore_data=restore_data)
    vars(schedule).update(said)
    rates = [schedule.rate(schedule.last_epoch, float(base)) for base in schedule.base_lrs]
    for group, rate, decay in zip(trainer.optimizer.param_groups, rates, decays, strict=True):
        group["lr"], group["weight_decay"] = rate, decay
    return trainer.step


def _take_last_row(trainer: Trainer, path: Path) -> None:
    """A run that ended inside an epoch was saved before that epoch got its row. If `path` has the row, the
    epoch is over, and is not evaluated and written once more."""
    rows = resuming.first_rank_finds(_read_history, path)
    if rows and (rows[-1]["epoch"], rows[-1]["step"]) == (trainer.epoch + 1, trainer.step):
        trainer.history[:] = rows


def _read_history(path: Path) -> list[EpochRow]:
    """What `MetricsByEpochHook` has written, [] if that is not there or cannot be read."""
    try:
        rows: list[EpochRow] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return rows


def _check_not_finished(folder: Path) -> None:
    """Raise ValueError if a run that ended here has left a model and figures, and no checkpoint: a run from
    the start would write over both. Every rank calls it."""
    rows = resuming.first_rank_finds(lambda f: (f / _MODEL).exists() and _read_history(f / _HISTORY), folder)
    if rows:
        raise ValueError(
            f"the run in {folder} is finished, after {rows[-1]['step']} steps, and its checkpoints are gone: "
            f"another run would write over {_HISTORY} and {_MODEL}; set [checkpoint] dir to another folder, "
            "or move these two"
        )


# --- what is said -------------------------------------------------------------------------------------------


def _about(file: RunFile, plugin: HybridParallelPlugin, task: RunTask, lr: float, total: int) -> str:
    """Before the model is cut: what is trained, on what, and how it is laid out."""
    wanted, how, table = file.model, file.training, file.data
    count = sum(p.numel() for p in task.model.parameters())
    source = f"from {wanted.pretrained}" if wanted.pretrained else "from scratch"
    batch = table.batch_size * how.accumulation
    where = f"{world_size()} {'GPUs' if device().type == 'cuda' else 'CPU ranks'}"
    cp = f"cp {plugin.cp_size} x " if plugin.cp_size > 1 else ""
    layout = f"dp {plugin.dp_size} x pp {plugin.pp_size} x {cp}tp {plugin.tp_size}"
    return "\n".join(
        (
            f"{type(task.model).__name__}, {count:,} parameters {source}, {how.precision}",
            task.splits[0].describe(),
            f"{layout}, ZeRO {plugin.zero_stage}, on {where}",
            f"{total} steps of {batch} x {plugin.dp_size} samples, learning rate {lr:g}",
        )
    )


def _say(text: str) -> None:
    print(text, flush=True)


def _keep_quiet(text: str) -> None:
    pass

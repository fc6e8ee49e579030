"""Trainer: epochs of steps, on any layout, and hooks that hear of them (events.py).

A step takes `accumulation` batches, and its loss is the mean over all their targets (accumulation.py).
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from tqdm import tqdm

from hpnb.hybrid.boosted_optimizer import boosted_optimizer
from hpnb.hybrid.training import resuming
from hpnb.hybrid.training.accumulation import (
    Criterion,
    HookedCriterion,
    batches_on_all_ranks,
    set_epoch,
    span,
    uses_pipeline,
)
from hpnb.hybrid.training.events import Hook, Metric, checked_hooks
from hpnb.hybrid.training.hooks import CheckpointHook, LRSchedulerHook
from hpnb.hybrid.training.metrics import LossHook
from hpnb.hybrid.training.run_state import EpochRow, TrainingState
from hpnb.hybrid.training.stop_hook import StopHook, StopVote
from hpnb.pipeline_parallel.microbatches import to_device
from hpnb.ranks.current_rank import device

_LOSS_EVERY = 0.5  # seconds: reading a loss waits for the GPU


class Trainer(TrainingState):
    """Trains what `booster.boost` gave.

    Args:
        booster, model, optimizer, lr_scheduler: as they came out of boost.
        criterion: (outputs, inputs) -> the mean over the targets, or (sum, count); None is outputs.loss. At
            the end of an epoch, also in evaluation, a replica or a microbatch may have no samples. Then the
            criterion must return 0, as a sum over the outputs. drop_last=True leaves such batches out.
        hooks: see events.py. The Trainer adds a LossHook, with an lr_scheduler an LRSchedulerHook by step,
            and with a CheckpointHook a StopHook. After the first Ctrl-C or a SIGTERM during `fit`, a StopHook
            lets the step or the evaluation end, saves on all ranks and exits (stop_hook.py). The signal may
            also go to the program that called hpnb.launch or Ranks.run. A second Ctrl-C ends `fit` at once.
        accumulation: batches a step. Its loss is the mean over all their targets: a batch with more targets
            counts more. With (sum, count) it is the sum of all sums over the sum of all counts. accelerate,
            and a loop that divides each loss by the number of batches, weigh batches alike, which is the same
            where all have as many targets.
        causal: whether the target of a position is the next one; by default as the model says.
        display_progress: a bar for each epoch; by default unless the environment has CI.

    Attributes are those of `TrainingState`: step, epoch, history, loss, batches, role and so on.

    Raises:
        ValueError: a model that was not boosted, accumulation below 1, two metrics of one name, or two
            schedulers.
        TypeError: something among the hooks is none.

    >>> def fit():
    ...     plugin = hpnb.TorchDDPPlugin("fp32")
    ...     booster, model = hpnb.Booster(plugin=plugin), hpnb.models.vit("laptop", classes=3)
    ...     loader = plugin.prepare_dataloader(
    ...         hpnb.data.beans("train", size=16, image_size=32), 4, transform=hpnb.data.ImageTransform(32)
    ...     )
    ...     optimizer = hpnb.HybridAdam(model.parameters(), lr=1e-3)
    ...     model, optimizer, _, loader, _ = booster.boost(model, optimizer, dataloader=loader)
    ...     hooks = [hpnb.AccuracyHook()]
    ...     trainer = hpnb.Trainer(booster, model, optimizer, hooks=hooks, display_progress=False)
    ...     history = trainer.fit(loader, epochs=2)
    ...     return trainer.step, sorted(history[-1])
    >>> hpnb.launch(fit, ranks=2, device="cpu")[0]
    (4, ['accuracy', 'epoch', 'loss', 'lr', 'seconds', 'step'])
    """

    def __init__(
        self,
        booster: Any,
        model: nn.Module,
        optimizer: Optimizer,
        criterion: Criterion | None = None,
        lr_scheduler: Any = None,
        hooks: Hook | Sequence[Hook] = (),
        *,
        accumulation: int = 1,
        causal: bool | None = None,
        display_progress: bool | None = None,
    ) -> None:
        if not hasattr(model, "unwrap"):
            raise ValueError(f"this {type(model).__name__} is not boosted; pass what booster.boost returned")
        if accumulation < 1:
            raise ValueError(f"accumulation={accumulation} batches make no step; use 1 or more")
        hooks = checked_hooks(hooks)
        hook_schedulers = [hook.scheduler for hook in hooks if isinstance(hook, LRSchedulerHook)]
        other = lr_scheduler is not None and any(s is not lr_scheduler for s in hook_schedulers)
        if len(hook_schedulers) > 1 or other:
            what = "an lr_scheduler and an LRSchedulerHook of another" if other else "two LRSchedulerHooks"
            raise ValueError(
                f"{what}: a Trainer steps and saves one scheduler; pass one, such as a SequentialLR or "
                "ChainedScheduler of both"
            )
        super().__init__(
            booster,
            model,
            optimizer,
            hook_schedulers[0] if hook_schedulers else lr_scheduler,
            bool(model.causal if causal is None else causal),
        )
        self.accumulation = accumulation
        self._bar = shows_bar(self.role.shows, display_progress)
        default_hooks: list[Hook] = [] if any(isinstance(h, LossHook) for h in hooks) else [LossHook()]
        if lr_scheduler is not None and not hook_schedulers:
            default_hooks.append(LRSchedulerHook(lr_scheduler))
        saves = next((hook for hook in hooks if isinstance(hook, CheckpointHook)), None)
        if saves is not None and not any(isinstance(hook, StopHook) for hook in hooks):
            default_hooks.append(StopHook(saves.path, saves.keep))
        self.hooks = sorted([*default_hooks, *hooks], key=lambda hook: hook.priority)
        self.metrics = [hook for hook in self.hooks if isinstance(hook, Metric)]
        names = [metric.name for metric in self.metrics]
        if len(set(names)) < len(names):
            raise ValueError(f"metrics {', '.join(names)}: two have one name; give one of them name=...")
        self._criterion = HookedCriterion(criterion, self)
        self._vote = StopVote()

    # --- training ------------------------------------------------------------------------------------

    def fit(
        self, train_loader: Any, epochs: int, *, evaluate: Any = None, evaluate_every: int = 1
    ) -> list[EpochRow]:
        """Train until `epochs` epochs are done, those before a resume included. Returns the history.

        A hook that sets `trainer.should_stop = True`, on any rank, ends it after the next step, or after the
        epoch if it sets that in after_epoch. What the epoch has had until then is evaluated and gets its row,
        and another fit goes on with the epoch after it. Then `should_stop` is True on all ranks. No hook can
        take back that it was set.

        Args:
            train_loader: what `plugin.prepare_dataloader` gives, or any iterable. One without a length, or
                over an IterableDataset, ends on all ranks where it ends on one.
            evaluate: a loader to evaluate on after every `evaluate_every` epochs and after the last; its
                figures get "eval_" in front of their names.

        Raises:
            ValueError: numbers below 1; a loader that cannot take up where a resumed run was, has another
                length on another rank, gives ranks of one replica different batches, or has none in an epoch.
        """
        if min(epochs, evaluate_every) < 1:
            raise ValueError(f"epochs={epochs}, evaluate_every={evaluate_every}: both must be 1 or more")
        self.epochs, self.loader, self.evaluates = epochs, train_loader, evaluate is not None
        self._should_stop, self._vote = False, StopVote()
        resuming.take_up(self)
        try:
            self._fit(epochs, evaluate, evaluate_every)
        finally:
            for hook in self.hooks:  # locks and signal handlers end with the fit, also where it fails
                if isinstance(hook, CheckpointHook | StopHook):
                    hook.release()
        return self.history

    def _fit(self, epochs: int, evaluate: Any, evaluate_every: int) -> None:
        self._call_hooks("before_fit")
        self.loaded_state = None  # until here the fit may be refused, and a corrected one takes it up
        self.should_stop = self._vote.now(self.should_stop)
        while self.epoch < epochs and not self.should_stop:
            began, first, resumed = time.perf_counter(), self.step, self.steps_in_epoch > 0
            row = self._train_epoch()
            if self.step == first and not resumed:
                why = _why_empty(self.loader)
                raise ValueError(f"the loader gave no batch in epoch {self.epoch + 1} of {epochs}; {why}")
            is_last = self.epoch + 1 == epochs or self.should_stop
            if evaluate is not None and ((self.epoch + 1) % evaluate_every == 0 or is_last):
                for hook in self.hooks:
                    if isinstance(hook, StopHook):
                        hook.stop_if_asked(self)
                row.update({f"eval_{name}": value for name, value in self.evaluate(evaluate).items()})
            self.history.append({**row, "seconds": time.perf_counter() - began})
            self._call_hooks("after_epoch")
            self.epoch, self.steps_in_epoch, self.sums_before_resume = self.epoch + 1, 0, {}
            self.should_stop = self._vote.now(self.should_stop)
        self._call_hooks("after_fit")

    def _train_epoch(self) -> EpochRow:
        set_epoch(self.loader, self.epoch)
        self.model.train()
        for metric in self.metrics:
            metric.reset()
        self._call_hooks("before_epoch")
        count, batches = batches_on_all_ranks(self, self.loader)
        steps = None if count is None else math.ceil(count / self.accumulation)
        stops = False
        self._vote.begin(self.should_stop)  # as before_epoch has left it
        with _Progress(self, steps, self.steps_in_epoch, self._bar) as bar:
            while not stops and (group := list(islice(batches, self.accumulation))):
                self._step(group)
                bar.update()
                stops = self._vote.result()
                if not stops:
                    self._vote.begin(self.should_stop)
        self.should_stop = stops or self._vote.result()
        values = self._values(self.metrics)
        return {"epoch": self.epoch + 1, "step": self.step, "lr": self.lr, **values}

    def _step(self, batches: list[Any]) -> None:
        self.batches = batches
        self._call_hooks("before_step")
        with ExitStack() as around:
            for hook in self.hooks:
                around.enter_context(hook.around_step(self))
            self.optimizer.zero_grad()
            losses = []
            self._criterion.begin_step(batches)
            for i, batch in enumerate(batches):
                later = i + 1 < len(batches)
                self._criterion.begin_batch(i)
                with self.booster.no_sync(self.model, self.optimizer) if later else nullcontext():
                    losses.append(self._forward_backward(batch, i))
            self.loss = None if losses[0] is None else sum(losses[1:], losses[0])
            if (counted := self._criterion.finish_step()) is not None:
                boosted_optimizer(self.optimizer).gradient_factor, loss = counted
                self.loss = None if losses[0] is None else loss
            self.lr = float(self.optimizer.param_groups[0]["lr"])
            with span("compute"):
                self.optimizer.step()
        self.step, self.steps_in_epoch = self.step + 1, self.steps_in_epoch + 1
        self._call_hooks("after_step")

    def _forward_backward(self, batch: Any, number: int) -> Any:
        """Gradients of one batch are added. Returns its loss times its weight, where it is."""
        if uses_pipeline(self, batch):
            how = self.model, self._criterion, self.optimizer
            return self.booster.execute_pipeline(iter([batch]), *how, record=self.records)["loss"]
        batch = to_device(batch, device())
        with span("F", number):
            self._criterion.unsharded = batch
            outputs = self.model(**batch)
            loss = self._criterion(outputs, batch)
            self._criterion.check(outputs, batch, loss)
        with span("B", number):
            self.booster.backward(loss, self.optimizer)
        return loss[0].detach() / loss[1] if isinstance(loss, tuple) else loss.detach()

    # --- evaluation ----------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, loader: Any) -> EpochRow:
        """What the metrics say of all batches of `loader`, over all ranks; every rank calls it.

        It may be called in the middle of an epoch too: all is as before afterwards.
        """
        metrics = [metric for metric in self.metrics if metric.counts]
        before = [metric.totals for metric in metrics], self.sums_before_resume
        modules = {*self.model.modules(), self.model.unwrap()}  # a boosted model's root is no child of it
        modes = [(module, module.training) for module in modules]
        self.sums_before_resume = {}
        self._criterion.forget_step()
        self._call_hooks("before_evaluate")
        for metric in metrics:
            metric.reset()
        self.model.eval()
        try:
            for batch in batches_on_all_ranks(self, loader)[1]:
                if uses_pipeline(self, batch):
                    self.booster.execute_pipeline(iter([batch]), self.model, self._criterion)
                else:
                    batch = to_device(batch, device())
                    self._criterion.unsharded = batch
                    self._criterion(self.model(**batch), batch)
            values = self._values(metrics)
        finally:
            totals, self.sums_before_resume = before
            for module, mode in modes:
                module.training = mode
            for metric, total in zip(metrics, totals, strict=True):
                metric.totals = total
        self._call_hooks("after_evaluate")
        return values

    # --- hooks, and going on -------------------------------------------------------------------------

    def _call_hooks(self, event: str) -> None:
        for hook in self.hooks:
            getattr(hook, event)(self)

    def _values(self, metrics: Sequence[Metric]) -> EpochRow:
        sums = self.sums(metrics)
        return {metric.name: metric.value(sums[metric.name]) for metric in metrics}

    def resume(self, path: str | Path, missing_ok: bool = False, *, restore_data: bool = True) -> bool:
        """Take up a run that a CheckpointHook has saved; `fit` then goes on, in the middle of an epoch too.

        Args:
            path: a checkpoint, or the folder of them, of which it takes the newest.
            missing_ok: do nothing, and return False, if there is none. Of an incomplete one, all ranks warn.
            restore_data: go on after the batches that the epoch has had. With False, everything else is
                restored, and the loader starts that epoch anew.

        Raises:
            FileNotFoundError: there is none.
        """
        checkpoint = resuming.first_rank_finds(resuming.find, Path(path))
        if checkpoint is not None:
            resuming.load(self, checkpoint, restore_data)
            return True
        unfinished = resuming.first_rank_finds(resuming.unfinished, Path(path))
        if not missing_ok:
            left = "" if unfinished is None else f"; {unfinished} is from a save that did not finish"
            raise FileNotFoundError(f"{path} has no checkpoint: no folder step-... in it is complete{left}")
        if unfinished is not None:
            warnings.warn(
                f"{Path(path) / unfinished} is from a save that did not finish and is not used; the run "
                f"starts at step {self.step}",
                stacklevel=2,
            )
        return False


def shows_bar(shows: bool, asked: bool | None) -> bool:
    """Whether this rank has a bar: `shows` if it is the one, `asked` if somebody said so. Under CI (the
    environment has CI) bars would be pages of log."""
    in_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    return shows and (not in_ci if asked is None else asked)


class _Progress:
    """The bar of an epoch: `done` of its `steps` are done; None if nobody knows how many there are."""

    def __init__(self, trainer: TrainingState, steps: int | None, done: int, show: bool) -> None:
        self._trainer = trainer
        label = f"epoch {trainer.epoch + 1}/{trainer.epochs}"
        self._bar: Any = tqdm(total=steps, initial=done, desc=label, unit="step", disable=not show)
        self._read = 0.0

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def update(self) -> None:
        """One step further. Now and then it reads the loss."""
        if self._bar.disable:
            return
        loss, now = self._trainer.loss, time.monotonic()
        if loss is not None and (now - self._read > _LOSS_EVERY or self._bar.n + 1 == self._bar.total):
            self._read = now
            self._bar.set_postfix(loss=f"{float(loss):.4g}", refresh=False)
        self._bar.update()


def _why_empty(loader: Any) -> str:
    """What may be wrong with a loader that gives no batch."""
    if hasattr(loader, "__next__"):
        kind = type(loader).__name__
        return (
            f"a {kind} can be read once: pass a loader that can be read again every epoch, such as a list or "
            "a DataLoader"
        )
    if (dataset := getattr(loader, "dataset", None)) is None:
        return "it must give batches whenever it is read anew, in every epoch, as a list or a DataLoader does"
    return (
        f"its {type(dataset).__name__} gave no sample: look at its files and filters, and whether it can be "
        "read anew in every epoch"
    )

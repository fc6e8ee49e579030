"""Accumulation: a step's loss is the mean over all targets of its batches, however ragged or padded they are.

The mean of batch i enters it with

    weight_i = n_i / sum_j n_j            n_i: targets of batch i over all data-parallel ranks

which is 1 / batches where the batches are alike. The criterion applies the weight, and shows outputs and
losses to the hooks on the way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpnb.data import IterableLoader, Loader
from hpnb.data.batch_agreement import check_lengths, iterate_together
from hpnb.data.iterable_loader import is_iterable_dataset
from hpnb.hybrid.model_loss import loss_of_outputs
from hpnb.hybrid.training.run_state import TrainingState
from hpnb.pipeline_parallel.criterion_check import check_is_mean
from hpnb.pipeline_parallel.halves_check import warn_if_no_mean
from hpnb.pipeline_parallel.label_shift import ChangedMapping, ChangedTuple
from hpnb.pipeline_parallel.loss import call_criterion
from hpnb.pipeline_parallel.microbatches import count_targets
from hpnb.ranks.current_rank import device
from hpnb.record.recorder import active_recorder

Criterion = Callable[[Any, Any], Any]


class HookedCriterion:
    """A criterion, or the loss of the model, that shows outputs and losses to the hooks, and multiplies by
    the weight of the batch in its step; None is 1."""

    def __init__(self, criterion: Criterion | None, trainer: TrainingState) -> None:
        self.criterion, self._trainer = criterion or loss_of_outputs, trainer
        self.weight: torch.Tensor | None = None
        self.unsharded: Any = None  # the batch that the model gets, if it is not a pipeline

    def __call__(self, outputs: Any, inputs: Any) -> Any:
        inputs = self._of_outputs(inputs)
        result = call_criterion(self.criterion, outputs, inputs)
        value, count = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        if not isinstance(value, torch.Tensor) or value.dim():
            return result  # not a loss, which the backward will say
        if not isinstance(inputs, ChangedMapping | ChangedTuple):
            with torch.no_grad():
                self._show(outputs, inputs, value.detach(), count)
        if self.weight is None:
            return result
        weighted = value * self.weight.to(value.dtype)
        return weighted if count is None else (weighted, count)

    def check(self, outputs: Any, inputs: Any, loss: Any) -> None:
        """Look at the first loss of a model on several replicas, as a pipeline does (`criterion_check.py`);
        all of the unsharded batch."""
        model, trainer = self._trainer.model, self._trainer
        if isinstance(loss, tuple) or trainer.booster.plugin.mesh.dp_cp.size == 1:
            return
        if model.checks_mean_of(self):
            check_is_mean(loss, self._of_outputs(inputs), trainer.causal)
            function = partial(call_criterion, self.criterion)
            warn_if_no_mean(function, outputs, self._of_outputs(inputs), trainer.causal)

    def _show(self, outputs: Any, inputs: Any, value: torch.Tensor, count: Any) -> None:
        known = count_targets(inputs, self._trainer.causal) if count is None else count
        n = torch.as_tensor(known, dtype=torch.float64, device=value.device)
        # The mean over no targets is nan, and must not count.
        total = value.double() if count is not None else torch.where(n > 0, value.double() * n, 0.0)
        for hook in self._trainer.hooks:
            hook.on_outputs(self._trainer, outputs, inputs)
            hook.on_loss(self._trainer, total, n)

    def _of_outputs(self, inputs: Any) -> Any:
        """What the outputs are of: in a language model under context parallelism this rank's tokens, with
        labels shifted. A pipeline gives its criterion these; without one this gets the batch that the model
        shards, whose targets would count once a rank."""
        context = self._trainer.model.context
        if context is None or inputs is not self.unsharded:
            return inputs
        return context.inputs_of_outputs(inputs)


def batch_weights(
    batches: Sequence[Any], causal: bool, group: dist.ProcessGroup
) -> Sequence[torch.Tensor | None]:
    """The weight of each batch in its step, (); None is 1. Every rank of `group`, the data axis, calls it."""
    if len(batches) == 1:
        return [None]
    counts = [torch.as_tensor(count_targets(batch, causal)) for batch in batches]
    n = torch.stack([count.to(device(), torch.float64) for count in counts])  # (batches,)
    dist.all_reduce(n, group=group)
    return (n / n.sum().clamp(min=1)).unbind()


def uses_pipeline(trainer: TrainingState, batch: Any) -> bool:
    """Whether a batch goes through execute_pipeline: if the model is cut into stages, or if its forward does
    not take all entries of the batch by their names, the labels above all; execute_pipeline keeps those back.
    """
    if trainer.booster.plugin.pp_size > 1 or not isinstance(batch, Mapping):
        return True
    inner = trainer.model.unwrap()
    if isinstance(inner, nn.Sequential):
        return True
    taken = inspect.signature(inner.forward).parameters
    return not (any(p.kind is p.VAR_KEYWORD for p in taken.values()) or all(name in taken for name in batch))


def set_epoch(loader: Any, epoch: int) -> None:
    """Take the order of another epoch, from a loader or the sampler of one."""
    candidates: list[Any] = [loader, getattr(loader, "sampler", None)]
    for candidate in candidates:
        if hasattr(candidate, "set_epoch"):
            candidate.set_epoch(epoch)
            return


def batches_on_all_ranks(trainer: TrainingState, loader: Any) -> tuple[int | None, Iterator[Any]]:
    """(how many batches a loader has, or None, and these), as many on every rank; all of them call it."""
    if isinstance(loader, IterableLoader):
        return None, iter(loader)
    is_stream = is_iterable_dataset(getattr(loader, "dataset", None))
    length = None if is_stream else check_lengths(loader)
    if isinstance(loader, Loader):
        return length, iter(loader)
    return length, iterate_together(loader, trainer.booster.plugin.mesh.dp)


def span(op: str, microbatch: int = -1) -> AbstractContextManager[None]:
    """Part of the timeline, if somebody records one."""
    recorder = active_recorder()
    return nullcontext() if recorder is None else recorder.span(op, microbatch=microbatch)

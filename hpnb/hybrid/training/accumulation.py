"""Accumulation: a step's loss is the mean over all targets of its batches, however ragged or padded they are.

The mean of batch i enters it with

    weight_i = n_i / N                    n_i: targets of batch i over all data-parallel ranks; N: their sum

which is 1 / batches where the batches are alike. Within a batch the boosted model weighs its ranks; this file
weighs batches. A criterion that returns (sum, count) has counted
everything only after the last batch. So its backwards start from S_i / N, and optimizer.step() multiplies
gradients by a factor on their way:

    loss = sum_i S_i / C                  S_i: the sum that batch i returned; C: all counts of the step, over
         = (N / C) sum_i (S_i / N)        batches, microbatches and ranks; N / C: the factor

A pipeline divides the sum of batch i by n_i at once, because it expects each target to count 1, and corrects
gradients after their backward if it has counted something else (pipeline_parallel/loss.py). So it gets
weight_i S_i with n_i as its count, which needs no correction. Without that a Llama would not be exact in
float64: its norms compute in float32, and round a gradient differently if its scale is another one.

The criterion applies the weight, and shows outputs and losses to the hooks on the way.
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

from hpnb import comm
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
from hpnb.pipeline_parallel.microbatches_without_targets import microbatch_of
from hpnb.ranks.current_rank import device
from hpnb.record.recorder import active_recorder

Criterion = Callable[[Any, Any], Any]


class HookedCriterion:
    """A criterion, or the loss of the model, that shows outputs and losses to the hooks, and weighs the batch
    in its step.

    A step calls `begin_step`, `begin_batch` before each batch, and `finish_step`.
    """

    def __init__(self, criterion: Criterion | None, trainer: TrainingState) -> None:
        self.criterion, self._trainer = criterion or loss_of_outputs, trainer
        self.unsharded: Any = None  # the batch that the model gets, if it is not a pipeline
        self.forget_step()

    def forget_step(self) -> None:
        """Weigh nothing: the next batch belongs to no step, or is the only one of its step."""
        self._current_weight: torch.Tensor | None = None
        self._batch_weights: Sequence[torch.Tensor] = ()
        self._current_targets: torch.Tensor | None = None  # n_i, () in float64; 1 for a batch without targets
        self._batch_targets: Sequence[torch.Tensor] = ()
        self._step_targets: torch.Tensor | None = None  # N, () in float64
        self._microbatch_sums: list[torch.Tensor] = []  # (total, count) of each microbatch of the step
        self._returned_counts = False

    def begin_step(self, batches: Sequence[Any]) -> None:
        """Count the targets of the batches of a step. Every rank of the data axis calls it."""
        self.forget_step()
        if len(batches) == 1:
            return
        trainer = self._trainer
        # Context parallelism shifts labels when it shards a batch; these are not sharded yet.
        causal = trainer.causal or trainer.model.context is not None
        counts = [torch.as_tensor(count_targets(batch, causal)) for batch in batches]
        n = torch.stack([count.to(device(), torch.float64) for count in counts])  # (batches,)
        dist.all_reduce(n, group=trainer.booster.plugin.dp_group)
        self._step_targets = n.sum().clamp(min=1)
        self._batch_weights = (n / self._step_targets).unbind()
        self._batch_targets = n.clamp(min=1).unbind()

    def begin_batch(self, number: int) -> None:
        if self._batch_weights:
            self._current_weight, self._current_targets = (
                self._batch_weights[number],
                self._batch_targets[number],
            )

    @torch.no_grad()
    def finish_step(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(N / C, by which gradients are to be multiplied; the loss of the step), () in float64 each, if the
        criterion has returned (sum, count) for one of several batches; else None. All ranks call it."""
        plugin, model = self._trainer.booster.plugin, self._trainer.model
        piped = plugin.pp_size > 1
        if self._step_targets is None or not (model.takes_counts if piped else self._returned_counts):
            return None
        sums = self._step_targets.new_zeros(2)
        if plugin.stage_manager.is_last_stage():
            sums = comm.all_reduce(torch.stack(self._microbatch_sums).sum(0), plugin.mesh.dp_cp)
        if piped:
            sums = model.send_from_last_stage(sums)
        total, count = sums.unbind()
        # Steps that count nothing have gradients of 0, or what the user has put there.
        return torch.where(count != 0, self._step_targets / count, 1.0), total / count

    def __call__(self, outputs: Any, inputs: Any) -> Any:
        # What cannot be captured runs eagerly (`cuda_graphs.py`).
        if device().type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a Trainer's hooks see every loss, and a replay would call none of them")
        is_plain = inputs is self.unsharded
        inputs = self._of_outputs(inputs)
        result = call_criterion(self.criterion, outputs, inputs)
        value, count = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        if not isinstance(value, torch.Tensor) or value.dim():
            return result  # not a loss, which the backward will say
        if not isinstance(inputs, ChangedMapping | ChangedTuple):
            with torch.no_grad():
                self._show(outputs, inputs, value.detach(), count)
        if self._current_weight is None or self._step_targets is None or self._current_targets is None:
            return result
        if count is None:
            return value * self._current_weight.to(value.dtype)
        self._returned_counts = True
        ranks = self._trainer.booster.plugin.mesh.dp_cp.size
        if is_plain:  # all ranks together say that they have counted N
            return value, self._step_targets / ranks
        # All microbatches and ranks together say that they have counted n_i.
        weight = self._current_targets / self._step_targets
        return value * weight.to(value.dtype), self._current_targets / (
            ranks * self._trainer.model.num_microbatches
        )

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
        inputs = microbatch_of(inputs)
        known = count_targets(inputs, self._trainer.causal) if count is None else count
        n = torch.as_tensor(known, dtype=torch.float64, device=value.device)
        # The mean over no targets is nan, and must not count.
        total = value.double() if count is not None else torch.where(n > 0, value.double() * n, 0.0)
        if self._step_targets is not None:
            self._microbatch_sums.append(torch.stack([total, n]))
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

"""Pipeline parallelism: each rank has some stages of the model, and microbatches pass through them.

    pipe = hpnb.Pipeline(model, mesh.pp, schedules.make("1f1b", stages=4, microbatches=8), loss_fn)
    optimizer = torch.optim.AdamW(pipe.parameters())
    result = pipe.step(batch)                      # on every rank, with the same batch
    optimizer.step()

A rank keeps the layers of its stages and no others. The schedule says what it does and when; the loss and all
gradients are those of one process under every schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from copy import copy, deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpnb.background import Background
from hpnb.data.batch_agreement import check_same_batch
from hpnb.gradients import GradientSink, axes_of, divisor_of
from hpnb.mesh import Axis, Mesh, axis_of
from hpnb.meta_device import Unfilled
from hpnb.models.compare_parts import first_step_check
from hpnb.pipeline_parallel import microbatches
from hpnb.pipeline_parallel.boundary import KnownBoundaries, StepBoundaries
from hpnb.pipeline_parallel.cuda_graphs import StepGraphs, make_stage_graphs
from hpnb.pipeline_parallel.executor import StepExecutor
from hpnb.pipeline_parallel.grad_ready import Gradients, GradReady, take_over_reduction
from hpnb.pipeline_parallel.graph_agreement import captured_axes
from hpnb.pipeline_parallel.layers import Builder
from hpnb.pipeline_parallel.loss import BatchLoss, LossFunction, LossReduction, send_mean, share_reduction
from hpnb.pipeline_parallel.partition import How
from hpnb.pipeline_parallel.rank_schedule import RankSchedules, schedule_on
from hpnb.pipeline_parallel.schedule import Schedule
from hpnb.pipeline_parallel.split_backward import SplitBackward
from hpnb.pipeline_parallel.stages import Stages, build_stages
from hpnb.pipeline_parallel.step_messages import CORRECTION
from hpnb.pipeline_parallel.step_queues import StepQueues
from hpnb.pipeline_parallel.step_result import PipelineStepResult
from hpnb.pipeline_parallel.tied_weights import check_frozen_alike, tie_weights
from hpnb.ranks.current_rank import device as this_device
from hpnb.ranks.current_rank import note_raised
from hpnb.record.recorder import Recorder, active_recorder

MIN_FUSED_FLOPS = 1.4e11  # FLOPs: about 0.2 ms of an H200, and more than twice what Python takes for the call
SplitFunction = Callable[[Any, int], list[Any]]


class Pipeline:
    """Trains `model` over the ranks of `axis`, as `schedule` says.

    On a GPU, and under schedules that split backwards, the `forward` of this rank's Linear and convolution
    instances is replaced for good, so that weight gradients are added by hand (`split_backward.py`).

    Args:
        model: an nn.Sequential, a model that `hpnb.models` knows, or a `Builder`; the same on every rank. The
            layers of this rank move to `hpnb.device()` and keep their Parameter objects. The others are left
            alone, and are freed when the caller lets go of the model. What is on the meta device gets zeros,
            to be filled by `load_full_state_dict`. Or `Stages` of the schedule's, such as a `WholeModel`.
        axis: `mesh.pp`, or the mesh that has it; as many ranks as the schedule has.
        schedule: a schedule, or the name of one ("1f1b"), for 4 microbatches a rank, and 2 stages a rank if
            it interleaves. `pipe.schedule` may be set between steps, on every rank, to one with the same
            stages and messages between the same ranks, which splits backwards only if the first one does.
        loss_fn: (outputs, inputs) of one microbatch -> (sum, count), or a scalar, which is the mean over
            those targets of the microbatch that are not -100 (over its samples, if it has no entry of
            targets). Targets are the batch's entry "labels", "label", "targets" or "target", or the last of a
            tuple. If another entry of integers contains -100 and there is none of these, a mean over several
            microbatches or replicas is refused; a GPU looks only in evaluation and while `loss_reduction` is
            None. It is called on the rank of the last stage, with a microbatch of the batch as `inputs`. If
            all targets of a microbatch are -100, a function that returns means sees class 0 instead, so that
            a gradient of 0 does not become nan; a mean over anything else has to be finite. It may be set
            between steps, on every rank, and nothing learnt of the one before stays.
        gradients: who reduces gradients over the replicas of a data axis: a `DataParallel` of `pipe.module`,
            a `ZeroOptimizer` of its parameters, the `sink` of it if it is fully sharded, or a function that
            makes one of the module. It may be set later, and no longer listens to backwards itself. Buffers
            are not sent: each replica has batch statistics of its own.
        replicas: the data axis, over which targets are counted; by default those of `gradients`.
        cut: "uniform" over the blocks; balanced by "parameters", "flops" or measured "time"; or by hand, how
            many layers each stage gets.
        example: a batch, from which "flops" and "time" take a microbatch.
        causal: whether `loss_fn` shifts labels, so that the first of each sequence is no target; False for
            labels that are shifted already. By default as the model says. If a mean would get a wrong weight
            by this, two more calls of `loss_fn`, once, tell what it averages, and it is refused. The first
            training step refuses class weights, another ignore_index and reduction="sum" of a cross
            entropy (`criterion_check.py`), and calls `loss_fn` on some samples (`halves_check.py`).
        loss_reduction: what `loss_fn` returns: "mean", or "sum_and_count", which takes means too. By default
            the first training step decides for the later ones; a (sum, count) after a mean is refused then.
        cuda_graphs: capture each stage's forward and backward in the third training step with microbatches
            of one shape, and replay them from then on, so that small microbatches do not wait for Python.
            What cannot be captured runs as before, and a warning says why (`cuda_graphs.py`).

    Attributes:
        module: this rank's layers, as an nn.Module, with the whole model's names.
        stages: the numbers of this rank's stages.
        split: how a batch becomes microbatches, (batch, number) -> so many; it may be set.
        overlaps_pairs: whether a forward runs together with the backward after it, where neither needs the
            other, so that one computes while the all-to-all of the other travels (`overlapped_pairs.py`);
            False unless set. All ranks of a pipeline, and of the groups its stages send in, set it alike.
        loss_reduction: what `loss_fn` returns; None before the first training step. It may be set between
            steps, on every rank.
        loss_key: what `loss_fn` calls inside, if that may be another in every step; it may be set. Where it
            is another, CUDA graphs are captured anew.
        per_target: what each target counted in the last step where the loss function returns (sum, count), on
            the rank of the last stage; the next step begins with it. It may be set.

    Raises:
        ScheduleError: the schedule cannot be run.
        ValueError: the axis has another number of ranks, or the model cannot be cut so.
        TypeError: a model of which nobody knows the layers.

    >>> def step(x, y):
    ...     model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))
    ...     schedule = hpnb.pipeline_parallel.schedules.make("1f1b", stages=2, microbatches=2)
    ...     loss = lambda outputs, batch: torch.nn.functional.mse_loss(outputs, batch[1])
    ...     pipe = hpnb.Pipeline(model, hpnb.Mesh(hpnb.Layout(pp=2)).pp, schedule, loss)
    ...     return pipe.step((x, y)).loss.item() > 0, [name for name, _ in pipe.module.named_parameters()]
    >>> hpnb.launch(step, torch.ones(4, 2), torch.zeros(4, 1), ranks=2, device="cpu")
    [(True, ['0.weight', '0.bias']), (True, ['1.weight', '1.bias'])]
    """

    def __init__(
        self,
        model: nn.Module | Builder | Stages,
        axis: Axis | Mesh,
        schedule: Schedule | str,
        loss_fn: LossFunction,
        gradients: Gradients = None,
        *,
        replicas: Axis | None = None,
        cut: How = "uniform",
        example: Any = None,
        causal: bool | None = None,
        loss_reduction: LossReduction | None = None,
        cuda_graphs: bool = False,
    ) -> None:
        axis = axis_of(axis, "pp")
        schedule = schedule_on(axis, schedule)
        if loss_reduction not in (None, "mean", "sum_and_count"):
            raise ValueError(f"loss_reduction={loss_reduction!r} is not known; use 'mean' or 'sum_and_count'")
        self.axis, self.replicas = axis, replicas
        self._loss_fn, self._given_reduction, self.loss_reduction = loss_fn, loss_reduction, loss_reduction
        self.per_target: float | torch.Tensor = 1.0
        self.observed_reduction: LossReduction | None = None  # on the rank of the last stage
        self.checked_causal: bool | None = None  # the `causal` for which loss_fn was seen to agree
        self.checks_mean = True  # whether the next training step looks if a scalar of loss_fn is a mean
        self.split: SplitFunction = microbatches.split_batch
        self.overlaps_pairs = False
        self.loss_key: object = None
        self._device = this_device()
        self.stages = schedule.stages_of(axis.rank)
        # Before the model is partitioned. The check needs no communication, so rank 0 alone does it.
        checks = isinstance(model, nn.Module) and not isinstance(model, Stages) and dist.get_rank() == 0
        self._first_step_check = first_step_check(model) if checks else None  # type: ignore[arg-type]
        self._unfilled = Unfilled(model) if isinstance(model, nn.Module) else None
        self.module = build_stages(model, axis, schedule, cut, example)
        self.causal = bool(getattr(self.module, "causal", False)) if causal is None else causal
        self._queues = StepQueues(axis, schedule.queues, self._device)
        # Large matmuls of a GPU add to gradients themselves also where backwards are not split.
        patches_matmuls = schedule.splits or self._device.type == "cuda"
        self._split_backward = SplitBackward(
            self.module.modules() if patches_matmuls else (), 0.0 if schedule.splits else MIN_FUSED_FLOPS
        )
        self._graphs = make_stage_graphs(
            self.module, self._device, self._split_backward, cuda_graphs, captured_axes(model)
        )
        self._tied = tie_weights(self.module, self.module.tied, axis, schedule.rank_of)
        self._rank_schedules = RankSchedules(schedule, axis.rank)
        self._grad_ready = self._make_grad_ready()
        self._known_boundaries: KnownBoundaries = {}
        self._known_signatures = set[Hashable]()  # of microbatches that have been through all stages
        self._background = Background(axis, self._device)
        self._gradients: GradientSink | None = None
        self.gradients = gradients
        self._is_copy = False
        self._compares_batch = self._compares_tied = True  # in the first step

    def __deepcopy__(self, memo: dict[int, Any]) -> Pipeline:
        """A copy of the layers, for an average of weights (EMA). It can be gathered and saved, and cannot
        step, because the queues between the ranks belong to this pipeline."""
        copied = memo[id(self)] = copy(self)
        copied.module, copied._is_copy = deepcopy(self.module, memo), True
        return copied

    # --- a step ------------------------------------------------------------------------------------------

    def step(
        self,
        batch: Any,
        *,
        forward_only: bool = False,
        scale: float | torch.Tensor = 1.0,
        reduce: bool = True,
        return_outputs: bool = True,
        record: bool = True,
    ) -> PipelineStepResult:
        """Forward and backward of a batch; gradients are added to .grad, weights are left alone.

        Every rank of the axis calls it with the same batch; those of another replica with theirs.

        Args:
            batch: a mapping, tensor or tuple of tensors with a row a sample, on any device. Each layer that
                looks at the inputs sees the microbatch's rows of it.
            forward_only: no backward, and no gradients: for evaluation, with `pipe.eval()`.
            scale: gradients are those of the loss times this (a loss scaler's; on accumulation 1/steps).
            reduce: False accumulates: nothing is summed over the replicas.
            return_outputs: keep the last stage's outputs, on its rank. Logits of a language model are large.
            record: note when each action ran, for `result.timeline`.

        Raises:
            ValueError: fewer samples than microbatches, or tensors of unequally many rows; at the first step,
            another batch on another rank, or a registered model whose parts do not compute what its forward
            does.
        """
        self._check_before_step(batch)
        batch = microbatches.to_device(batch, self._device)
        if self._compares_batch:
            check_same_batch(batch, self.axis)
            self._compares_batch = False
        trains = not forward_only
        overlaps = trains and self.overlaps_pairs
        rank_schedule = self._rank_schedules.train if trains else self._rank_schedules.forward_only
        rank_of_last_stage = self.schedule.rank_of[self.schedule.stages - 1]
        inputs = self.split(batch, self.schedule.microbatches)
        if trains:
            self._grad_ready.check_hook_owner(self.schedule.microbatches)
        if trains and self._compares_tied:
            check_frozen_alike(self.module, self.module.tied, self._tied)
            self._compares_tied = False
        loss = self._make_loss(inputs, scale, trains) if self.is_last_stage else None
        recorder = (active_recorder() or Recorder(aligned=False)) if record else None
        since = recorder.num_spans() if recorder is not None else 0
        # All ranks decide the same here, because it follows from the batch, the mode and the steps before.
        kind = self._device.type
        mode = forward_only, torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        signatures = [(mode, signature) for signature in microbatches.signatures(inputs)]
        shapes_known = self._known_signatures.issuperset(signatures)
        # Until the first step has shown what loss_fn returns, send a correction; for a mean it is 1.
        sends_correction = trains and self.loss_reduction != "mean"
        if trains:
            self._grad_ready.begin(reduce, sends_correction)
        try:
            graphs = StepGraphs()
            if self._graphs is not None and trains:
                graphs = self._graphs.begin_step(
                    rank_schedule, inputs, signatures, self._known_boundaries, (self.loss_fn, self.loss_key),
                    return_outputs, self._gradients, self.overlaps_pairs,
                )  # fmt: skip
            self._grad_ready.use_static_grads(graphs.static_grads)
            executor = StepExecutor(
                rank_schedule=rank_schedule,
                run_stage=self.module,
                microbatches=inputs,
                queues=self._queues.choose(trains, shapes_known),
                boundaries=StepBoundaries(self._known_boundaries, signatures),
                split_backward=self._split_backward,
                loss=loss,
                sends_correction=sends_correction,
                grad_ready=self._grad_ready if trains else None,
                recorder=recorder,
                keep_outputs=return_outputs,
                overlapped_positions=rank_schedule.overlapped_positions if overlaps else frozenset(),
                graphs=graphs,
            )
            with graphs.running():
                executor.run()
            until = recorder.num_spans() if recorder is not None else since
            if trains and self.loss_reduction is None:
                self.loss_reduction = share_reduction(loss, self.axis, rank_of_last_stage)
            if not shapes_known:
                self._known_signatures.update(signatures)
                boundaries = self._known_boundaries.values()
                self._queues.reserve([(*boundary.specs, CORRECTION) for boundary in boundaries])
        except BaseException as error:
            note_raised(error)
            # Gradients are as before. Messages stay in the queues, so this pipeline is not used again.
            self._split_backward.drop()
            if trains:
                self._grad_ready.drop()
            raise
        if self._graphs is not None and trains:
            self._graphs.end_step(graphs)
        self.checks_mean = self.checks_mean and not trains
        if loss is not None:
            self.checked_causal = self.causal if loss.shift_checked else self.checked_causal
            self.observed_reduction = loss.observed_reduction if trains else self.observed_reduction
            if loss.counted_per_target is not None:
                self.per_target = loss.counted_per_target
        wait_for_loss = send_mean(loss, self._background, rank_of_last_stage, self._device)
        return PipelineStepResult(
            self.axis, executor, rank_schedule.schedule, wait_for_loss, recorder, (since, until)
        )

    @property
    def is_last_stage(self) -> bool:
        """Whether one of this rank's stages is the last, where the loss is computed and outputs are kept."""
        return self.schedule.stages - 1 in self.stages

    def forget(self, keeps_gradients: bool = False) -> None:
        """Learn anew what is trained and what passes between stages: after parameters were frozen or thawed,
        on every rank. CUDA graphs are captured anew. `gradients` becomes None: make the reducer of gradients
        anew as well, and set it; or keep it, if all that is trained was so when it and this were made."""
        if self._graphs is not None:
            self._graphs.forget()
        self._known_boundaries.clear()
        self._known_signatures.clear()
        self._compares_tied = True
        if not keeps_gradients:
            self._grad_ready = self._make_grad_ready()
            self.gradients = None

    # --- what may change between steps ----------------------------------------------------------------------

    @property
    def schedule(self) -> Schedule:
        """What the next step follows."""
        return self._rank_schedules.schedule

    @schedule.setter
    def schedule(self, other: Schedule) -> None:
        self._rank_schedules.follow(other)
        self._grad_ready.follow(self._rank_schedules.train.actions)

    @property
    def loss_fn(self) -> LossFunction:
        """What the next step calls."""
        return self._loss_fn

    @loss_fn.setter
    def loss_fn(self, other: LossFunction) -> None:
        self._loss_fn = other
        self.loss_reduction, self.per_target = self._given_reduction, 1.0
        self.observed_reduction = None
        self.checked_causal, self.checks_mean = None, True

    # --- the module --------------------------------------------------------------------------------------

    @property
    def gradients(self) -> GradientSink | None:
        """Who reduces gradients over the replicas, if somebody does."""
        return self._gradients

    @gradients.setter
    def gradients(self, reducer: Gradients) -> None:
        self._gradients = take_over_reduction(reducer, self.module)
        self._grad_ready.set_sink(self._gradients)

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's."""
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's, under their names in the whole model."""
        return self.module.named_parameters()

    def train(self, mode: bool = True) -> Pipeline:
        self.module.train(mode)
        return self

    def eval(self) -> Pipeline:
        return self.train(False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.module.zero_grad(set_to_none)

    # --- inside ------------------------------------------------------------------------------------------

    def _make_grad_ready(self) -> GradReady:
        by_stage = {stage: self.module.trained(stage) for stage in self.stages}
        return GradReady(self._rank_schedules.train.actions, by_stage, self._tied)

    def _check_before_step(self, batch: Any) -> None:
        if self._is_copy:
            raise RuntimeError("a copy of a pipeline cannot step; load its weights into another pipeline")
        if self._unfilled is not None:
            self._unfilled.check(self.parameters())
            self._unfilled = None
        if self._first_step_check is not None:
            self._first_step_check.run(batch)
            self._first_step_check = None

    def _make_loss(self, inputs: list[Any], scale: float | torch.Tensor, trains: bool) -> BatchLoss:
        sink = self._gradients
        return BatchLoss(
            self.loss_fn,
            inputs,
            self._device,
            reduction=self.loss_reduction if trains else None,
            observed=self.observed_reduction,
            causal=self.causal,
            replicas=axes_of(sink) if self.replicas is None else (self.replicas,),
            scale=scale * divisor_of(sink),
            per_target=1.0 if self.loss_reduction == "mean" else self.per_target,
            checks_shift=self.checked_causal is not self.causal,
            checks_mean=trains and self.checks_mean,
        )

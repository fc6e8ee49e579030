"""Pipeline parallelism: each rank has some stages of the model, and microbatches walk through them.

    pipe = hpnb.Pipeline(model, mesh.pp, schedules.make("1f1b", stages=4, microbatches=8), loss_fn)
    optimizer = torch.optim.AdamW(pipe.parameters())
    result = pipe.step(batch)                      # on every rank, with the same batch
    optimizer.step()

A rank keeps its own layers and nothing of the others'. What it does, and when, is the schedule's business:
the loss and all gradients are those of one process, whatever the schedule.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from hpnb.background import Background
from hpnb.gradients import GradientSink, reduced_by
from hpnb.mesh import Axis
from hpnb.pipeline_parallel import microbatches
from hpnb.pipeline_parallel.executor import Known, StepExecution
from hpnb.pipeline_parallel.grad_ready import Gradients, GradReady, sink_of
from hpnb.pipeline_parallel.layers import Builder
from hpnb.pipeline_parallel.loss import Loss, LossFunction
from hpnb.pipeline_parallel.partition import How
from hpnb.pipeline_parallel.rank_schedule import RankSchedules
from hpnb.pipeline_parallel.schedule import Schedule
from hpnb.pipeline_parallel.split_backward import SplitBackward
from hpnb.pipeline_parallel.stages import Stages, build_stages
from hpnb.pipeline_parallel.step_result import PipelineStepResult
from hpnb.pipeline_parallel.symmetric_transfers import SymmetricTransfers
from hpnb.pipeline_parallel.tied_weights import tie_weights
from hpnb.pipeline_parallel.transfers import make_queues
from hpnb.ranks.current_rank import device as this_device
from hpnb.record.recorder import Recorder, active, recording

FUSED = 1.4e11  # FLOPs: about 0.2 ms of an H200, and more than twice what Python takes for the call
_CORRECTION = ((torch.Size(), torch.float64),)
Split = Callable[[Any, int], list[Any]]


class Pipeline:
    """Trains `model` over the ranks of `axis`, as `schedule` says.

    Args:
        model: an nn.Sequential, a model that `hpnb.models` knows, or a `Builder`; the same on every rank. Its
            layers here move to `hpnb.device()`, with their Parameter objects; the others are left alone, and
            are freed when the caller lets go of the model. What is on the meta device gets zeros, to be
            filled by `load_full_state_dict`. Or `Stages` of the schedule's, such as a `Whole`.
        axis: the pipeline axis, `mesh.pp`; as many ranks as the schedule has.
        schedule: is checked here. `pipe.schedule` may be set between steps, on every rank: to another of the
            same name and stages, for another number of microbatches.
        loss_fn: (outputs, inputs) of one microbatch -> (sum, count), or a scalar, which is the mean over
            those targets of the microbatch that are not -100 (over its samples, if it has none). It is called
            on the rank of the last stage. `inputs` are a microbatch of the batch, as it was given. It may be
            set between steps, on every rank.
        gradients: who reduces gradients over the replicas of a data axis: a `DataParallel` of `pipe.module`,
            a `ZeroOptimizer` of its parameters, the `sink` of it if it is fully sharded, or a function that
            makes one of the module. It may be set later, and no longer listens to backwards itself. Buffers
            are not sent: each replica has batch statistics of its own.
        replicas: the data axis, over which targets are counted; by default that of `gradients`.
        cut: "uniform" over the blocks; balanced by "parameters", "flops" or measured "time"; or by hand, how
            many layers each stage gets.
        example: a batch, from which "flops" and "time" take a microbatch.
        causal: whether the target of a position is that of the next one. By default as the model says.

    Attributes:
        module: this rank's layers, as an nn.Module, with the whole model's names.
        stages: the numbers of this rank's stages.
        split: how a batch becomes microbatches, (batch, number) -> so many; it may be set.
        per_target: what a loss function that counts for itself counts for each target, as the last step has
            found, on the rank of the last stage; the next one begins with it. It may be set.

    Raises:
        ScheduleError: the schedule cannot be run.
        ValueError: the axis has another number of ranks, or the model cannot be cut so.
        TypeError: a model of which nobody knows the layers.
    """

    def __init__(
        self,
        model: nn.Module | Builder | Stages,
        axis: Axis,
        schedule: Schedule,
        loss_fn: LossFunction,
        gradients: Gradients = None,
        *,
        replicas: Axis | None = None,
        cut: How = "uniform",
        example: Any = None,
        causal: bool | None = None,
    ) -> None:
        schedule.check()
        if schedule.ranks != axis.size:
            raise ValueError(
                f"{schedule.name} with {schedule.stages} stages is for {schedule.ranks} ranks, and axis "
                f"{axis.name} has {axis.size}; make it with stages={axis.size * schedule.chunks}"
            )
        self.axis, self._loss_fn, self.replicas = axis, loss_fn, replicas
        self.split: Split = microbatches.split_batch
        self._device = this_device()
        self.stages = schedule.stages_of(axis.rank)
        self.module = build_stages(model, axis, schedule, cut, example)
        self.causal = bool(getattr(self.module, "causal", False)) if causal is None else causal
        pairs = sorted(schedule.queues)
        self._queues = make_queues(axis, pairs, self._device)
        # Where nothing is split, large matmuls still add to gradients themselves (see `split_backward`).
        fuses = schedule.splits or self._device.type == "cuda"
        self._split = SplitBackward(self.module.modules() if fuses else (), 0.0 if schedule.splits else FUSED)
        self._ties = tie_weights(self.module, axis, schedule.rank_of)
        self._plans = RankSchedules(schedule, axis.rank)
        self._completion = self._complete()
        self._peers = SymmetricTransfers(axis, pairs, self._device)
        self._known: Known = {}
        self._seen: set[Any] = set()  # signatures of microbatches, of all stages
        self._background = Background(axis, self._device)
        self._corrects: bool | None = None
        self.per_target: float | torch.Tensor = 1.0
        self._gradients: GradientSink | None = None
        self.gradients = gradients

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
            ValueError: fewer samples than microbatches, or tensors of unequally many rows.
        """
        plan = self._plans.forwards if forward_only else self._plans.train
        inputs = self.split(microbatches.to_device(batch, self._device), self.schedule.microbatches)
        if not forward_only:
            self._check_sink()
        loss = self._loss(inputs, scale) if self.is_last_stage else None
        recorder = (active() or Recorder(aligned=False)) if record else None
        since = recorder.marks() if recorder is not None else 0
        completion = None if forward_only else self._completion
        # All ranks find the same here: the batch, the mode and the steps before decide it.
        mode = forward_only, torch.is_autocast_enabled(self._device.type)
        signatures = [(mode, one) for one in microbatches.signatures(inputs)]
        new = not self._seen.issuperset(signatures) or (completion is not None and self._corrects is None)
        run = StepExecution(
            plan, self.module, self._queues if new else self._peers.queues or self._queues,
            inputs, signatures, self._known, loss, self._corrects, completion, self._split, recorder,
            return_outputs,
        )  # fmt: skip
        if completion is not None:
            completion.begin(reduce, self._corrects is not False)
        try:
            with (
                torch.set_grad_enabled(not forward_only),
                recording(recorder) if recorder else nullcontext(),
                _no_collection(),
            ):
                run.run()
                if completion is not None:
                    completion.finish()
                    self._corrects = run.corrects
            until = recorder.marks() if recorder is not None else since
            if new:
                self._seen.update(signatures)
                self._peers.reserve([made.shapes + _CORRECTION for made in self._known.values()])
        except BaseException:
            self._split.drop()
            if completion is not None:
                completion.drop()
            raise
        value = loss.mean() if loss is not None else None
        if loss is not None and loss.counted is not None:
            self.per_target = loss.counted
        return PipelineStepResult(self.axis, self._share(value), run, plan.schedule, recorder, (since, until))

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the last stage: there are the loss function and the outputs."""
        return self.schedule.stages - 1 in self.stages

    def forget(self) -> None:
        """Learn anew what is trained and what passes between stages: after parameters were frozen or thawed,
        on every rank. Whoever reduces gradients is to be made and set anew as well."""
        self._known.clear()
        self._seen.clear()
        self._completion = self._complete()
        self.gradients = None

    # --- what may be another in the next step -------------------------------------------------------------

    @property
    def schedule(self) -> Schedule:
        """What the next step follows."""
        return self._plans.schedule

    @schedule.setter
    def schedule(self, other: Schedule) -> None:
        self._plans.follow(other)
        self._completion.follow(self._plans.train.row)

    @property
    def loss_fn(self) -> LossFunction:
        """What the next step calls."""
        return self._loss_fn

    @loss_fn.setter
    def loss_fn(self, other: LossFunction) -> None:
        self._loss_fn = other
        self._corrects, self.per_target = None, 1.0  # it may count for itself, and something else

    # --- the module --------------------------------------------------------------------------------------

    @property
    def gradients(self) -> GradientSink | None:
        """Who reduces gradients over the replicas, if somebody does."""
        return self._gradients

    @gradients.setter
    def gradients(self, given: Gradients) -> None:
        self._gradients = sink_of(given, self.module)
        self._completion.set_sink(self._gradients)

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

    def _complete(self) -> GradReady:
        held = {stage: self.module.trained(stage) for stage in self.stages}
        return GradReady(self._plans.train.row, held, self._ties)

    def _loss(self, inputs: list[Any], scale: float | torch.Tensor) -> Loss:
        sink = self._gradients
        replicas = self.replicas or (sink.axis if sink is not None else None)
        scale = scale * (sink.axis.size if sink is not None and sink.average else 1)  # the sink divides
        return Loss(self.loss_fn, inputs, self._device, self.causal, replicas, scale, self.per_target)

    def _check_sink(self) -> None:
        """Whoever reduces at the end of every backward would reduce every microbatch's."""
        one = self._completion.every[:1]  # they are claimed together
        if self._gradients is None and one and (other := reduced_by(one[0])) is not None:
            raise ValueError(
                f"a {type(other).__name__} reduces these gradients after every backward, and there are "
                f"{self.schedule.microbatches} in a step: set pipe.gradients to it"
            )

    def _share(self, value: torch.Tensor | None) -> Callable[[], torch.Tensor]:
        """Give the loss to all ranks, beside whatever else they do; the result waits for it."""
        loss = torch.zeros((), dtype=torch.float64, device=self._device) if value is None else value
        last = self.schedule.rank_of[self.schedule.stages - 1]
        pending = self._background.broadcast(loss, last)

        def read() -> torch.Tensor:
            pending.wait()
            return loss

        return read


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python looks for garbage after the step: in the middle of it one rank would keep all others waiting."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()

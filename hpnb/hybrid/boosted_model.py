"""One rank's part of a model on any layout: what `Booster.boost` returns.

    without a pipeline   outputs = model(**batch); booster.backward(outputs.loss, optimizer)
    with or without one  booster.execute_pipeline(data_iter, model, criterion, optimizer)

Both reduce gradients once a step. The hooks that a plain backward needs are off in `execute_pipeline`.
"""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from hpnb import comm, data_parallel
from hpnb.context_parallel import ContextParallel
from hpnb.data.batch_agreement import check_same_batch
from hpnb.data_parallel import DataParallel
from hpnb.expert_parallel import ExpertParallel, SelectionBias
from hpnb.hybrid.agree_on_microbatches import agree_on_microbatches
from hpnb.hybrid.checkpoint.model_outline import ModelOutline
from hpnb.hybrid.global_loss import Weigher, loss_weighted, with_lazy_loss
from hpnb.hybrid.model_loss import ModelLoss, inputs_of_forward, loss_of_outputs
from hpnb.hybrid.packed_texts import CacheSwitch, PackingWarning
from hpnb.hybrid.plugins import HybridParallelPlugin
from hpnb.hybrid.refuse_full_model import criterion_of_stages, refuse_forward, refuse_of_full_model
from hpnb.hybrid.sharded_terms import refuse_sharded_terms
from hpnb.hybrid.torch_clipping import refuse_clipping
from hpnb.mesh import Axis
from hpnb.meta_device import Unfilled
from hpnb.pipeline_parallel import Pipeline
from hpnb.pipeline_parallel.empty_batch_error import explaining_empty_batch
from hpnb.pipeline_parallel.loss import LossReduction, call_criterion
from hpnb.pipeline_parallel.microbatches import (
    TARGET_NAMES,
    batch_size,
    count_targets,
    split_batch,
    to_device,
)
from hpnb.pipeline_parallel.stages import WholeModel
from hpnb.pipeline_parallel.step_result import PipelineStepResult
from hpnb.ranks.current_rank import device as this_device

Criterion = Callable[[Any, Any], Any]


class Boosted(nn.Module):
    """Wraps this rank's part of a model. Its parameters keep the names that they have in the full model.

    Args:
        module: the model, or this rank's `Stages` of it.
        axes: along which parameters may be sharded: ZeRO's, pp, those of tensor and expert parallelism.
        pipe: the pipeline, if there is one; otherwise `run` makes one with a single stage.
        replica: the DataParallel that reduces gradients during a plain backward, if there is one.
        model_loss: the loss that the model computes from labels, where it can be computed outside of it.
        causal: whether its targets are its inputs, shifted by one.
        kind, config, generation_config, outline: of the full model, with which it is saved.

    Attributes:
        last_step: the result of the last `execute_pipeline`, with its timeline if it was recorded.
        loss_reduction: what criteria return, "mean" or "sum_and_count"; by default as in the first step that
            trains. It may be set on every rank: "sum_and_count" takes both.
        optimizer_ref: gives the `BoostedOptimizer` that steps it, or None.
    """

    module: nn.Module
    _replica: DataParallel | None

    def __init__(
        self,
        module: nn.Module,
        plugin: HybridParallelPlugin,
        axes: Sequence[Axis],
        *,
        pipe: Pipeline | None,
        replica: DataParallel | None,
        model_loss: ModelLoss | None,
        causal: bool,
        context: ContextParallel | None = None,
        experts: ExpertParallel | None = None,
        selection_bias: SelectionBias | None = None,
        kind: type[nn.Module],
        config: Any,
        generation_config: Any = None,
        outline: ModelOutline | None = None,
        unfilled: Unfilled | None = None,
    ) -> None:
        super().__init__()
        self.__dict__.update(module=module, _replica=replica)  # not as children, which prefix their names
        for table in ("_parameters", "_buffers", "_modules"):
            setattr(self, table, getattr(module, table))
        self.training = module.training
        self.plugin, self.axes, self.causal = plugin, tuple(axes), causal
        self.context, self.experts, self.selection_bias = context, experts, selection_bias
        self.kind, self.full_config, self.outline, self._unfilled = kind, config, outline, unfilled
        if generation_config is not None:
            self.generation_config = generation_config
        self.last_step: PipelineStepResult | None = None
        self._model_loss, self.weigher, self._device = model_loss, Weigher(plugin.mesh.dp_cp), this_device()
        self._cache = CacheSwitch(module)
        self.packing_warning = PackingWarning(causal or context is not None, config)
        self._pipe, self._syncs = pipe, True
        self._frees_other_stages, self._compares_batch = pipe is not None, True  # in the first step
        self._takes = list(inspect.signature(module.forward).parameters)
        self._trained = [p for p in module.parameters() if p.requires_grad]
        self._criterion: Criterion | None = None
        self._checked_criteria: set[object] = set()
        self.loss_reduction: LossReduction | None = None
        if pipe is not None:
            pipe.loss_fn = self._loss
        self.optimizer_ref: Callable[[], Any] = lambda: None
        self._resumed_per_target: torch.Tensor | None = None

    # --- a module ----------------------------------------------------------------------------------------

    def unwrap(self) -> nn.Module:
        """The model, cut in place; with a pipeline, this rank's stages of it."""
        return self.module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if (module := self.__dict__.get("module")) is None:
                raise
            refuse_of_full_model(name, self.kind, self.plugin, module)
            return getattr(module, name)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """This rank's parameters.

        Raises:
            RuntimeError: PyTorch's clip_grad_norm_ reads them, and would clip wrongly (`torch_clipping.py`).
        """
        refuse_clipping(self.plugin, sys._getframe(1))  # a generator: the frame that reads, not the caller's
        yield from super().parameters(recurse)

    def train(self, mode: bool = True) -> Boosted:
        self.training = mode
        self.module.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """This rank's shards under the full model's names. `booster.save_model` puts them together."""
        state: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        return state

    # --- without a pipeline ------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs. `.loss` is the mean over the targets of all data-parallel ranks, and every
        tensor has the gradient that this rank contributes to it (`global_loss.py`). All ranks call it.
        Targets are "labels" that are not -100 (a causal model's shifted ones), or samples if there are none.

        A language model makes no key-value cache in training, and outside of it only with use_cache=True. So
        texts that `position_ids` pack into one sequence stay separated (`packed_texts.py`).

        Raises:
            RuntimeError: the model is cut into stages, called by a DistributedDataParallel, or by the
                criterion of another model that is cut into stages.
            ValueError: at the first forward, another batch on another rank of tensor or context parallelism.
            TypeError: outputs in which hpnb finds no tensors.
        """
        refuse_forward(self.module)
        self._check_filled()
        self._compare_first_batch((args, kwargs))
        batch = self._prepare_batch(args, self._takes), self._prepare_batch(kwargs)
        (args, kwargs), share = self.weigher.enter(batch, self.training)
        kwargs = {**kwargs, **self._cache.arguments(kwargs, self.training, len(args))}
        self._broadcast_buffers()
        takes_labels = self._model_loss is not None and kwargs.get("return_dict", True)
        labels = kwargs.get("labels") if takes_labels else None
        computing = self.plugin.policy.computing(self.module, self._device)
        with computing, explaining_empty_batch("model", (args, kwargs)):
            runs = self._replica or self.module
            if labels is None or self._model_loss is None:
                outputs = runs(*args, **kwargs)
            else:
                outputs = runs(*args, **{name: v for name, v in kwargs.items() if name != "labels"})
                outputs = type(outputs)(loss=self._model_loss(outputs, labels), **dict(outputs.items()))
        named = any(name in kwargs for name in TARGET_NAMES) or not args
        return self.weigher(outputs, self._count_targets(kwargs if named else args), share)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero what ZeRO 1 and 2 have in their shards, too."""
        super().zero_grad(set_to_none)
        if self.plugin.zero_stage in (1, 2) and (optimizer := self.optimizer_ref()) is not None:
            optimizer.zero_grad(set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `Booster.no_sync`."""
        before, self._syncs = self._syncs, False
        try:
            with self._hooks_off():
                yield
        finally:
            self._syncs = before

    def _hooks_off(self) -> AbstractContextManager[None]:
        """No hook reduces gradients."""
        if (replica := self._replica) is not None:
            return replica.no_sync()
        if self.plugin.zero_stage == 3 and self.plugin.pp_size == 1:
            return data_parallel.no_sync(self.module)
        return nullcontext()

    # --- a batch in microbatches -------------------------------------------------------------------------

    def run(
        self,
        batch: Any,
        criterion: Criterion | None,
        *,
        trains: bool,
        scale: float = 1.0,
        keep: bool = False,
        record: bool = False,
        causal: bool | None = None,
    ) -> PipelineStepResult:
        """Forward, and backward if it `trains`, of a batch by the plugin's schedule. All ranks call it.

        Args:
            criterion: as for `Booster.execute_pipeline`; None is the model's own loss.
            scale: gradients are those of the loss times this.
            causal: of the `Pipeline`; None as the model says.
        """
        self._check_filled()
        self._free_other_stages()
        batch = to_device(batch, self._device)
        self._compare_first_batch(batch)
        batch = self._prepare_batch(batch)
        pipe = self._pipe or self._make_single_stage_pipe()
        pipe.split = partial(split_batch, allow_empty=True, multiple=self.plugin.row_multiple)
        local = self.plugin.microbatches(batch_size(batch))
        agreed = agree_on_microbatches(self.plugin, self.full_config, local, self._device)
        pipe.schedule = self.plugin.schedule(agreed)
        criterion = criterion or loss_of_outputs
        pipe.causal = pipe.module.causal if causal is None else causal
        before, now = (getattr(f, "__code__", f) for f in (self._criterion, criterion))
        if now is not before:
            pipe.checked_causal = pipe.observed_reduction = None
        pipe.checks_mean = trains and self.checks_mean_of(criterion)
        vars(self)["_criterion"] = pipe.loss_key = criterion  # by vars(): a criterion is no child
        if self.loss_reduction is not None:
            pipe.loss_reduction = self.loss_reduction
        if self._resumed_per_target is not None:
            pipe.per_target, self._resumed_per_target = self._resumed_per_target, None
        if trains:
            self._broadcast_buffers()
        computing = self.plugin.policy.computing(self.module, self._device)
        with computing, self._hooks_off(), loss_weighted(), criterion_of_stages(self.plugin.pp_size):
            self.last_step = pipe.step(
                batch, forward_only=not trains, scale=scale, reduce=self._syncs, return_outputs=keep,
                record=record,
            )  # fmt: skip
        return self.last_step

    def forget(self) -> None:
        """Learn anew, in the next step, which outputs of pipeline stages need gradients: all ranks call it
        after parameters were frozen or thawed between two steps. CUDA graphs are captured anew."""
        if self._pipe is not None:
            self._pipe.forget(keeps_gradients=True)

    def checks_mean_of(self, criterion: Criterion) -> bool:
        """Whether a training step is to look if scalars of `criterion` are means (`criterion_check.py`): the
        first one with it, unless it is the model's loss. Asking counts as looking."""
        criterion = getattr(criterion, "criterion", criterion)  # what a HookedCriterion calls
        while isinstance(criterion, partial):
            criterion = criterion.func
        code = getattr(criterion, "__code__", type(criterion))
        if criterion is loss_of_outputs or code in self._checked_criteria:
            return False
        self._checked_criteria.add(code)
        return True

    @property
    def num_microbatches(self) -> int:
        """Of the `run` that runs, or was the last."""
        assert self._pipe is not None
        return self._pipe.schedule.microbatches

    @property
    def takes_counts(self) -> bool:
        """Whether criteria may return (sum, count), as all ranks know after the first step that trains."""
        return self._pipe is not None and self._pipe.loss_reduction == "sum_and_count"

    def send_from_last_stage(self, x: torch.Tensor) -> torch.Tensor:
        """On all ranks of a pipeline what the rank with the last stage has. All of them call it."""
        assert self._pipe is not None
        schedule = self._pipe.schedule
        return comm.broadcast(x, self.plugin.mesh.pp, schedule.rank_of[schedule.stages - 1])

    @property
    def per_target(self) -> float | torch.Tensor:
        """What a criterion that counts for itself counts per target; the next step starts from it."""
        if self._resumed_per_target is not None:
            return self._resumed_per_target
        return 1.0 if self._pipe is None else self._pipe.per_target

    @per_target.setter
    def per_target(self, value: torch.Tensor) -> None:
        self._resumed_per_target = value.to(self._device)

    def _free_other_stages(self) -> None:
        """Free other ranks' blocks, once, before the first step: 0.30 GB of a GPT-2 with 24 blocks. A block
        whose forward is replaced, as by `compile_blocks`, refers to itself: only the collector frees it."""
        if self._frees_other_stages:
            self._frees_other_stages = False
            gc.collect()

    def _make_single_stage_pipe(self) -> Pipeline:
        """A pipeline with the full model as its only stage."""
        module, mesh = self.module, self.plugin.mesh
        of_replica = None if self._replica is None else self._replica.sink
        sink = data_parallel.sink(module) if self.plugin.zero_stage == 3 else of_replica
        reducer: Any = None if sink is None else SimpleNamespace(sink=sink)  # its hooks stay
        no_cache = lambda kwargs: self._cache.arguments(kwargs, self.training)  # noqa: E731
        takes = inputs_of_forward(module, self._model_loss)
        stage = WholeModel(module, takes, self.causal, no_cache, self._trained)
        self._pipe = Pipeline(
            stage, mesh.pp, self.plugin.schedule(1), self._loss, reducer, replicas=mesh.dp_cp,
            cuda_graphs=self.plugin.enable_cuda_graphs and self._device.type == "cuda",  # boost has warned
        )  # fmt: skip
        return self._pipe

    def _loss(self, outputs: Any, inputs: Any) -> Any:
        assert self._criterion is not None
        if self._model_loss is not None and isinstance(inputs, Mapping) and "labels" in inputs:
            model_loss, labels = self._model_loss, inputs["labels"]
            outputs = with_lazy_loss(outputs, lambda lazy: model_loss(lazy, labels))
        loss = call_criterion(self._criterion, outputs, inputs)
        assert self._pipe is not None
        has_shards = self.plugin.zero_stage == 3 or self.plugin.ep_size > 1
        if self._pipe.checks_mean and has_shards and self.plugin.mesh.dp_cp.size > 1:
            refuse_sharded_terms(loss, outputs)
        return loss

    def _check_filled(self) -> None:
        """Refuse a model that came on the meta device and was not filled, at its first forward."""
        if self._unfilled is not None:
            self._unfilled.check(self.module.parameters())
        self._unfilled = None

    def _compare_first_batch(self, batch: Any) -> None:
        """Refuse different batches along tp and cp, once. Along pp the pipeline does it."""
        if self._compares_batch:
            check_same_batch(batch, self.plugin.mesh.cp, self.plugin.mesh.tp)
            self._compares_batch = False

    def _prepare_batch(self, batch: Any, takes: Sequence[str] = ()) -> Any:
        """The batch on this rank's device, with inputs in the dtype of the weights. A tuple has an input and
        targets, or the arguments of a forward that `takes` these names."""
        dtype = self.plugin.policy.weights

        def cast(x: Any) -> Any:
            return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

        self.packing_warning.look_at(batch)
        batch = to_device(batch, self._device)
        if self.context is not None and batch:
            if not isinstance(batch, Mapping):
                raise ValueError(
                    "context parallelism takes a batch by names: model(**batch) with input_ids, or "
                    "pixel_values of a ViT"
                )
            batch = self.context.shard_batch(batch)
        if isinstance(batch, Mapping):
            return {n: value if n in TARGET_NAMES else tree_map(cast, value) for n, value in batch.items()}
        if isinstance(batch, tuple | list):
            kept = {i for i, n in enumerate(takes) if n in TARGET_NAMES} if takes else {*range(1, len(batch))}
            return tuple(value if i in kept else tree_map(cast, value) for i, value in enumerate(batch))
        return cast(batch)

    def _count_targets(self, inputs: Any) -> torch.Tensor:
        """(), float64: this rank's targets."""
        count = count_targets(inputs, self.causal)
        if isinstance(count, torch.Tensor):
            return count.to(self._device, torch.float64)
        return torch.full((), count, dtype=torch.float64, device=self._device)  # a copy would wait

    @torch.no_grad()
    def _broadcast_buffers(self) -> None:
        """Give all replicas the first's buffers, such as a norm's running statistics."""
        replicas = self.plugin.mesh.dp_cp
        if replicas.size > 1 and self.plugin.broadcast_buffers and self.training and self._syncs:
            data_parallel.broadcast(list(self.module.buffers()), replicas)

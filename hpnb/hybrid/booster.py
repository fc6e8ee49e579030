"""Booster: an ordinary training program, on any layout.

    booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(tp_size=2, pp_size=2, num_microbatches=4))
    model, optimizer, _, _, scheduler = booster.boost(model, optimizer, lr_scheduler=scheduler)
    batches = iter(loader)
    for _ in range(len(loader)):
        optimizer.zero_grad()
        result = booster.execute_pipeline(batches, model, criterion, optimizer)
        optimizer.step()
        scheduler.step()

Loss, gradients and weights are those of one process with the full batch. The order in which the strategies
are applied is in parallelize_model.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from hpnb import comm
from hpnb.data.batch_agreement import check_lengths
from hpnb.hybrid.boosted_model import Boosted
from hpnb.hybrid.boosted_optimizer import boosted_optimizer
from hpnb.hybrid.booster_files import BoosterFiles, boosted_model
from hpnb.hybrid.checkpoint.agreement import gather_objects
from hpnb.hybrid.global_loss import loss_weighted, mean_share
from hpnb.hybrid.parallelize_model import Model, parallelize_model
from hpnb.hybrid.plugins import HybridParallelPlugin
from hpnb.hybrid.presets import TorchDDPPlugin
from hpnb.hybrid.same_groups import check_same_groups
from hpnb.mesh import Axis
from hpnb.pipeline_parallel.criterion_check import check_backward
from hpnb.pipeline_parallel.stages import Stages
from hpnb.placement import placement_of
from hpnb.precision import policy
from hpnb.ranks.current_rank import note_raised

Criterion = Callable[[Any, Any], Any]
Boost = tuple[Boosted, Any, Any, Any, Any]


class Booster(BoosterFiles):
    """Parallelizes models as `plugin` says, and runs their steps. Every rank makes one.

    Args:
        plugin: by default `TorchDDPPlugin()`.
        mixed_precision: the precision of the default plugin, and of a TorchDDPPlugin that was given none.
            Another plugin has one already, which mixed_precision must equal.

    Raises:
        TypeError: `plugin` is not a HybridParallelPlugin.
        ValueError: another precision than that of the plugin.

    >>> def step(batch):
    ...     booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(tp_size=2, precision="fp32"))
    ...     model = hpnb.models.vit("laptop", classes=3)
    ...     optimizer = hpnb.HybridAdam(model.parameters(), lr=1e-3)
    ...     model, optimizer, *_ = booster.boost(model, optimizer)
    ...     booster.backward(model(**batch).loss, optimizer)
    ...     optimizer.step()
    ...     return optimizer.last_step.stepped
    >>> batch = {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.arange(4) % 3}
    >>> hpnb.launch(step, batch, ranks=2, device="cpu")
    [True, True]
    """

    def __init__(
        self,
        plugin: HybridParallelPlugin | None = None,
        mixed_precision: str | torch.dtype | None = None,
    ) -> None:
        if not isinstance(plugin, HybridParallelPlugin | None):
            name = plugin.__name__ if isinstance(plugin, type) else "TorchDDPPlugin"
            given = f"precision={plugin!r}" if isinstance(plugin, str | torch.dtype) else ".."
            raise TypeError(f"plugin={plugin!r} is no plugin; use Booster(plugin=hpnb.{name}({given}))")
        plugin = TorchDDPPlugin() if plugin is None else plugin
        if mixed_precision is not None and isinstance(plugin, TorchDDPPlugin):
            plugin.set_default_precision(mixed_precision)
        if mixed_precision is not None and policy(mixed_precision) != plugin.policy:
            raise ValueError(
                f"mixed_precision={mixed_precision!r} beside a plugin with precision={plugin.precision!r}: "
                "leave mixed_precision out, and give the plugin the precision"
            )
        self.plugin = plugin
        super().__init__()
        if dist.is_initialized():
            self.plugin.connect()

    def boost(
        self,
        model: Model,
        optimizer: Optimizer | None = None,
        criterion: Criterion | None = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
        *,
        verbose: bool = False,
    ) -> Boost:
        """Parallelize `model`, in place, and let `optimizer` step this rank's parameters. All ranks call it.
        Gradients from before are dropped.

        Args:
            model: an nn.Module, the same on all ranks; on the meta device it gets zeros, to be filled by
                `load_model` or in another way before the first step. A pipeline needs an nn.Sequential, a
                model that `hpnb.models` knows, or a `hpnb.pipeline_parallel.Builder`; tensor parallelism one
                that `hpnb.models` knows.
            optimizer: of the model's parameters, for a Builder of `builder.parameters()`. It keeps its class,
                and `.last_step` says what a step did: whether it stepped, and the norm before clipping.
            criterion: (outputs, inputs) -> a scalar, the mean over this rank's targets, or (sum, count).
            dataloader: see `plugin.prepare_dataloader`.
            lr_scheduler: of `optimizer`.
            verbose: print on the first rank which parameters each pipeline stage has, and warn of packed
                texts that a plain model would not keep apart, as the boosted one does.

        Returns:
            The five in that order; what is None stays None.

        Raises:
            ValueError, TypeError: a model, optimizer or scheduler that does not fit, or a DataLoader of
                another length or an optimizer with another learning rate on another rank, in one sentence.
        """
        if lr_scheduler is not None and getattr(lr_scheduler, "optimizer", optimizer) is not optimizer:
            raise ValueError("lr_scheduler is of another optimizer; make it of the one that is boosted")
        self._warn_if_not_split(dataloader)
        if isinstance(optimizer, Optimizer):
            check_same_groups(optimizer)
        if optimizer is not None:
            self._warn_of_batch_statistics(model)
        measures = self.plugin.cut in ("flops", "time") and self.plugin.pp_size > 1
        example = _example(dataloader) if measures else None
        boosted = parallelize_model(self.plugin, model, optimizer, example)
        boosted.packing_warning.enabled = verbose
        if verbose:
            description = _describe_stages(boosted.unwrap(), self.plugin.mesh.pp)
            if dist.get_rank() == 0:
                print(description, flush=True)
        return boosted, optimizer, criterion, dataloader, lr_scheduler

    # --- steps -------------------------------------------------------------------------------------------

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Criterion | None = None,
        optimizer: Optimizer | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
        *,
        record: bool = False,
        causal: bool | None = None,
    ) -> dict[str, Any]:
        """Forward and backward of the next batch, microbatch by microbatch; also without a pipeline.

        All ranks call it, those of one pipeline and of one tensor-parallel group with the same batch.
        Gradients are added to those that are there; `optimizer.step()` and `zero_grad()` are the caller's.

        Args:
            data_iter: gives batches: mappings, or tuples, of tensors with a row a sample, on any device.
            criterion: (outputs, inputs) of a microbatch -> a scalar, the mean over its targets that are not
                -100 (see `causal`; samples if there are none), or (sum, count). None is
                `outputs.loss`. Targets are the batch's entry "labels", "label", "targets" or "target", or the
                last of a tuple; with targets under another name, return (sum, count). So do class weights
                and another ignore_index, whose means are over something else:
                `(F.cross_entropy(logits, labels, weight=w, reduction="sum"), w[labels].sum())`. The first
                training step refuses these and sums, and warns of other values that are no such mean, for
                which it calls the criterion on up to 8 samples of a microbatch again. Two tasks with
                different counts need a ratio in the batch (docs/library.md, "All of it"). With ZeRO 3 it may
                use weights through the outputs alone, and not, say, their norm; with ep_size above 1 experts.
                Where a replica or a microbatch has no samples, it must return 0, as a sum over the outputs.
            optimizer: None runs forward alone, for evaluation, without gradients.
            return_outputs: return the outputs of the full batch.
            record: record when each action ran, for `model.last_step.timeline`.
            causal: whether the criterion shifts labels, so that the first of each sequence is no target;
                False for labels that are shifted already. By default as the model does. A mean over other
                targets is refused where microbatches would get wrong weights.

        Returns:
            {"loss": (), float64, the mean over the targets of all data-parallel ranks, "outputs": ...}; None
            where it was not asked for, and on ranks that do not have the last stage.

        Raises:
            StopIteration: no batch is left.
            TypeError: a loader or a batch instead of an iterator.
            ValueError: at the first step, another batch on another rank of the same replica, or a criterion
                that uses weights of which ZeRO 3 or expert parallelism leaves a rank a shard.
        """
        boosted = boosted_model(model)
        stepped_by = None if optimizer is None else boosted_optimizer(optimizer)
        scaler = None if stepped_by is None else stepped_by.scaler
        result = boosted.run(
            _next_batch(data_iter),
            criterion,
            trains=optimizer is not None,
            scale=1.0 if scaler is None else scaler.scale,
            keep=return_outputs,
            record=record,
            causal=causal,
        )
        if stepped_by is not None:
            stepped_by.end_backward()
        loss = result.loss  # reading it may wait for other ranks, so every rank does
        here = self.plugin.stage_manager.is_last_stage()
        return {
            "loss": loss if return_loss and here else None,
            "outputs": result.outputs if return_outputs else None,
        }

    def backward(self, loss: torch.Tensor | tuple[torch.Tensor, Any], optimizer: Optimizer) -> None:
        """Backward of a loss without a pipeline: gradients become those of the mean over all ranks' targets.

        Args:
            loss: a scalar that is made of the boosted model's outputs: `outputs.loss`, a mean over this
                rank's targets, and whatever is linear in these, such as the mean over several accumulated
                batches. A term made of parameters alone counts once, but one of experts that ep_size shards
                counts by this rank's share: use weight_decay for their norm.
                Or (sum over this rank's targets, count).
                A scalar is weighted by the targets that the model's forward received as "labels", "label",
                "targets" or "target". If forward received none of these, it counts samples. So if the number
                of targets that are not -100 differs between ranks, the mean of `F.cross_entropy` gives exact
                gradients only if forward received the labels; otherwise pass (sum, count). So do for class
                weights and another ignore_index. If the cross entropy is PyTorch's, the first step on several
                ranks refuses these as a scalar, and reduction="sum", and warns where other than the counted
                targets are not -100, or where something has multiplied a loss that it would refuse.

        Raises:
            RuntimeError: the model is partitioned into stages.
            ValueError: at the first step, a cross entropy that is no mean over the targets that are counted.
        """
        boosted = boosted_optimizer(optimizer)
        if self.plugin.pp_size > 1:
            raise RuntimeError(
                f"with pp_size={self.plugin.pp_size} a backward is part of booster.execute_pipeline"
            )
        scale = 1.0 if boosted.scaler is None else boosted.scaler.scale
        share = mean_share(self.plugin.mesh.dp_cp)  # also for (sum, count): it ends this loss's forwards
        if not isinstance(loss, tuple):
            # This method stands for all criteria of losses that are passed to it.
            if self.plugin.mesh.dp_cp.size > 1 and boosted.model.checks_mean_of(self.backward):
                try:
                    check_backward(loss, boosted.model.weigher.take_counts())
                except ValueError as error:
                    note_raised(error)
                    raise
            loss = _wide(loss)
            if share is None or self.plugin.zero_stage == 3:  # a term made of shards is on no other rank
                (loss * scale).backward()
            else:
                factor = torch.as_tensor(share * scale, dtype=loss.dtype, device=loss.device)
                with loss_weighted(share):
                    (loss * factor).backward()
            boosted.end_backward()
            return
        total, count = _wide(loss[0]), loss[1]
        count_of_all = torch.as_tensor(count, dtype=torch.float64).to(total.device)
        count_of_all = comm.all_reduce(count_of_all.detach(), self.plugin.mesh.dp_cp)
        with loss_weighted():
            count_of_all = torch.where(count_of_all != 0, count_of_all, 1.0)  # nothing is counted: 0, not nan
            total.backward((scale / count_of_all).to(total.dtype))
        boosted.end_backward()

    def no_sync(self, model: nn.Module, optimizer: Optimizer | None = None) -> AbstractContextManager[None]:
        """Accumulate: backwards and execute_pipeline inside add to this rank's gradients and send nothing.

        Each adds the gradient of its batch's mean, so that the sum is not the mean over all batches.
        `Trainer(accumulation=...)` weighs batches by their targets, or by what the criterion counts. In your
        loop `booster.backward((sum, count), optimizer)` does so if `count` is that of all batches.
        """
        return boosted_model(model).no_sync()

    # --- inside ------------------------------------------------------------------------------------------

    def _warn_if_not_split(self, dataloader: Any) -> None:
        """Warn about a DataLoader of PyTorch that gives all ranks the same samples, or some twice, and refuse
        lengths that differ between ranks."""
        if not isinstance(dataloader, DataLoader):
            return
        is_stream = isinstance(dataloader.dataset, IterableDataset)
        if not is_stream:
            check_lengths(dataloader)
        if self.plugin.dp_size == 1:
            return
        sampler = _sampler_of(dataloader)
        if isinstance(sampler, DistributedSampler) and not sampler.drop_last:
            samples = len(sampler.dataset)  # type: ignore[arg-type]
            if samples < sampler.total_size:
                warnings.warn(
                    f"the DistributedSampler of this DataLoader gives {sampler.total_size - samples} of "
                    f"{samples} samples twice, so that ranks have equally many, and they count twice in "
                    "losses and metrics; plugin.prepare_dataloader(dataset, batch_size) gives each once",
                    stacklevel=3,
                )
        if is_stream or isinstance(sampler, RandomSampler | SequentialSampler):
            warnings.warn(
                f"this DataLoader gives each of the {self.plugin.dp_size} data-parallel ranks all samples, "
                "unless its dataset is split; plugin.prepare_dataloader(dataset, batch_size) does it",
                stacklevel=3,
            )

    def _warn_of_batch_statistics(self, model: Model) -> None:
        """Warn about a BatchNorm, whose outputs depend on how the batch is split."""
        plugin = self.plugin
        microbatches = (
            plugin.pp_size > 1 or plugin.num_microbatches not in (None, 1) or plugin.microbatch_size
        )
        if not isinstance(model, nn.Module) or not (plugin.dp_size > 1 or microbatches):
            return
        synced = () if microbatches else nn.SyncBatchNorm
        norms = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
        norms = [name for name in norms if not isinstance(model.get_submodule(name), synced)]
        if norms:
            what = f"{norms[0]} and {len(norms) - 1} more take" if len(norms) > 1 else f"{norms[0]} takes"
            warnings.warn(
                f"{what} mean and variance of a rank's microbatch, so training is not that of one process. "
                "GroupNorm does not depend on the layout; without microbatches "
                "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) averages over the ranks",
                stacklevel=3,
            )


def _sampler_of(dataloader: DataLoader[Any]) -> Any:
    """What chooses the samples: a batch sampler of one's own, which may split them, or a sampler."""
    batches = dataloader.batch_sampler
    if batches is None:
        return dataloader.sampler
    return batches.sampler if type(batches) is BatchSampler else batches


def _next_batch(data_iter: Any) -> Any:
    if not hasattr(data_iter, "__next__"):
        raise TypeError(
            f"execute_pipeline takes an iterator of batches, not a {type(data_iter).__name__}: pass "
            "iter(loader) of a loader, made once an epoch, or iter([batch]) of one batch"
        )
    try:
        return next(data_iter)
    except StopIteration:
        raise StopIteration(
            f"the {type(data_iter).__name__} has no batch left in this epoch: call "
            "loader.set_epoch(epoch + 1) and pass a new iter(loader), as after a booster.load of the end of "
            "an epoch; if it never gave one, its dataset has no samples"
        ) from None


def _example(dataloader: Any) -> Any:
    """The next batch of `dataloader`, to measure layers with; the loader stays where it is."""
    if dataloader is None:
        raise ValueError("cut='flops' and 'time' measure layers with a batch: pass dataloader to boost")
    state = dataloader.state_dict() if hasattr(dataloader, "state_dict") else None
    batch = next(iter(dataloader))
    if state is not None:
        dataloader.load_state_dict(state)
    return batch


def _describe_stages(module: nn.Module, pp: Axis) -> str:
    """The trained parameters of all stages, of which every rank of `pp` passes its part; all of them call it.
    They count in full, also where tensor parallelism or ZeRO shards them.

        stage 0 of 2 on pipeline rank 0: transformer.wte.weight to transformer.h.1.mlp.c_proj.bias, ...
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    stages = {0: [p for p in names if p.requires_grad]}
    if isinstance(module, Stages):
        stages = {stage: module.trained(stage) for stage in module.numbers}
    here = [
        (stage, pp.rank, [names[p] for p in parameters], sum(prod(placement_of(p).shape) for p in parameters))
        for stage, parameters in stages.items()
    ]
    lines = sorted(line for of_rank in gather_objects(here, pp.group) for line in of_rank)
    return "\n".join(
        f"stage {stage} of {len(lines)} on pipeline rank {rank}: "
        + (f"{of_stage[0]} to {of_stage[-1]}, {count:,} parameters" if of_stage else "no trained parameters")
        for stage, rank, of_stage, count in lines
    )


def _wide(loss: torch.Tensor) -> torch.Tensor:
    return loss.to(torch.promote_types(loss.dtype, torch.float32))

"""What a Trainer needs to know of its rank, and of each loss: who speaks for all, and how much counts.

The ranks of the last stage have outputs and losses, and those of a tensor-parallel group have the same ones.
So the first of each such group speaks, and sums over those that speak are sums over the data axis.

A step's loss is the mean over all targets of its batches, so the mean of batch i enters it with

    weight_i = n_i / sum_j n_j            n_i: targets of batch i over all data-parallel ranks

which is 1 / batches where they are alike, and exact where they are ragged or padded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from hpnb.models import anatomy
from hpnb.pipeline_parallel.microbatches import count_targets
from hpnb.ranks.current_rank import device
from hpnb.record.recorder import active_recorder

if TYPE_CHECKING:
    from hpnb.hybrid.training.trainer import Trainer

Criterion = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Place:
    """Which rank this is.

    Attributes:
        speaks: whether what it has of losses and outputs counts.
        shows: whether it is the one, of those that speak, that shows a progress bar.
        layout: sizes of dp, pp and tp.
    """

    speaks: bool
    shows: bool
    layout: list[int]

    @classmethod
    def of(cls, plugin: Any) -> Place:
        speaks = plugin.stage_manager.is_last_stage() and dist.get_rank(plugin.tp_group) == 0
        shows = speaks and dist.get_rank(plugin.dp_group) == 0
        groups = plugin.dp_group, plugin.pp_group, plugin.tp_group
        return cls(speaks, shows, [dist.get_world_size(group) for group in groups])

    def add_up(self, local: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks that speak, on every rank; all of them call it."""
        total = local.clone() if self.speaks else torch.zeros_like(local)
        dist.all_reduce(total)
        return total


class Watched:
    """A criterion that shows outputs and losses to the hooks, and gives a batch its weight.

    Attributes:
        weight: (), of the batch in its step; None is 1.
    """

    def __init__(self, criterion: Criterion | None, trainer: Trainer) -> None:
        self._criterion, self._trainer = criterion or _own_loss, trainer
        self.weight: torch.Tensor | None = None

    def __call__(self, outputs: Any, inputs: Any) -> Any:
        found = self._criterion(outputs, inputs)
        value, count = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        if not isinstance(value, torch.Tensor) or value.dim():
            return found  # no loss: whoever starts the backward says so
        with torch.no_grad():
            self._show(outputs, inputs, value.detach(), count)
        if self.weight is None:
            return found
        weighted = value * self.weight.to(value.dtype)
        return weighted if count is None else (weighted, count)

    def _show(self, outputs: Any, inputs: Any, value: torch.Tensor, count: Any) -> None:
        known = count_targets(inputs, self._trainer.causal) if count is None else count
        n = torch.as_tensor(known, dtype=torch.float64, device=value.device)
        # The mean over no targets is nan; it counts nothing.
        total = value.double() if count is not None else torch.where(n > 0, value.double() * n, 0.0)
        for hook in self._trainer.hooks:
            hook.on_outputs(self._trainer, outputs, inputs)
            hook.on_loss(self._trainer, total, n)


def is_causal(model: Any) -> bool:
    """Whether the targets of a boosted model are its inputs, shifted by one."""
    inner = model.unwrap()
    for one in (model, inner):
        if isinstance(said := getattr(one, "causal", None), bool):
            return said
    try:
        return anatomy(inner).causal
    except (TypeError, ValueError):  # a model that hpnb does not know
        return False


def weights(batches: Sequence[Any], causal: bool, group: dist.ProcessGroup) -> Sequence[torch.Tensor | None]:
    """Of each batch in its step, (); None is 1. Every rank of `group`, the data axis, calls it."""
    if len(batches) == 1:
        return [None]
    counts = [torch.as_tensor(count_targets(batch, causal)) for batch in batches]
    n = torch.stack([count.to(device(), torch.float64) for count in counts])  # (batches,)
    dist.all_reduce(n, group=group)
    return (n / n.sum().clamp(min=1)).unbind()


def pipelines(trainer: Trainer, batch: Any) -> bool:
    """Whether a batch goes through execute_pipeline: if the model is cut into stages, or if its forward does
    not take all entries of the batch by their names, the labels above all; execute_pipeline keeps those back.
    """
    if trainer.booster.plugin.pp_size > 1 or not isinstance(batch, Mapping):
        return True
    inner = trainer.model.unwrap()
    if isinstance(inner, nn.Sequential):
        return True
    taken = inspect.signature(inner.forward).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in taken.values()) or all(name in taken for name in batch)
    return not takes_all


def set_epoch(loader: Any, epoch: int) -> None:
    """Take the order of another epoch, from a loader or the sampler of one."""
    takes = next(
        (one for one in (loader, getattr(loader, "sampler", None)) if hasattr(one, "set_epoch")), None
    )
    if takes is not None:
        takes.set_epoch(epoch)


def span(op: str, microbatch: int = -1) -> AbstractContextManager[None]:
    """Part of the timeline, if somebody records one."""
    recorder = active_recorder()
    return nullcontext() if recorder is None else recorder.span(op, microbatch=microbatch)


def _own_loss(outputs: Any, inputs: Any) -> Any:
    return outputs.loss

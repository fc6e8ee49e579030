"""The state of a training run, which the Trainer keeps and its hooks read.

It is apart from the Trainer, so that hooks, metrics, resuming and the progress bar can be written without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

EpochRow = dict[str, Any]  # the figures of one epoch by name


@dataclass(frozen=True)
class RankRole:
    """What this rank does for all of them.

    The ranks of the last stage have outputs and losses, and those of a tensor-parallel group have the same
    ones. So the first of each such group `reports`, and a sum over those that report is one over the data
    axis, and over cp, whose ranks have different tokens. The first of these `shows` a progress bar."""

    reports: bool
    shows: bool

    @classmethod
    def of(cls, plugin: Any) -> RankRole:
        reports = plugin.stage_manager.is_last_stage() and dist.get_rank(plugin.tp_group) == 0
        shows = reports and dist.get_rank(plugin.dp_group) == 0 and plugin.mesh.cp.rank == 0
        return cls(reports, shows)

    def add_up(self, local: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks that report, on every rank; all of them call it."""
        total = local.clone() if self.reports else torch.zeros_like(local)
        dist.all_reduce(total)
        return total


class TrainingState:
    """A run as its hooks see it.

    Attributes:
        booster, model, optimizer, lr_scheduler: as they came out of boost.
        role: what this rank does for all.
        causal: whether the target of a position is the next one.
        hooks, metrics: in the order of their calls.
        step, epoch, epochs: optimizer steps done, the epoch that runs, from 0, and how many there will be.
        steps_in_epoch: optimizer steps done in this epoch.
        history: a row an epoch: epoch (from 1), step, lr, what metrics and evaluations say, and seconds.
        loss: of the last step; None on ranks that do not have it. It is the mean over the targets of all
            ranks in a pipeline, for the loss that the model computes, and for (sum, count) over several
            batches. Without a pipeline, other criteria give the mean over this rank's targets.
        lr: of the last step.
        batches: of the last step, as the loader gave them.
        loader: of the fit that runs.
        evaluates, records: whether this fit evaluates, and whether this step is recorded.
        should_stop: a hook sets it to end the fit, on any rank; after the fit all ranks have it. It stays
            True until the next fit: setting it to False takes nothing back. See `Trainer.fit`.
        sums_before_resume: the metrics' sums of this epoch from before a resume.
        loaded_state: a loaded state that the next fit takes up.
        run_facts: about the run, which checkpoints keep as they are: numbers, texts, lists and dicts of them.
    """

    hooks: Sequence[Any]
    metrics: Sequence[Any]

    def __init__(self, booster: Any, model: Any, optimizer: Any, lr_scheduler: Any, causal: bool) -> None:
        self.booster, self.model, self.optimizer = booster, model, optimizer
        self.lr_scheduler, self.causal = lr_scheduler, causal
        self.role = RankRole.of(booster.plugin)
        self.step = self.epoch = self.epochs = self.steps_in_epoch = 0
        self.loss: Any = None
        self.lr = float(optimizer.param_groups[0]["lr"])
        self.history: list[EpochRow] = []
        self.batches: list[Any] = []
        self.loader: Any = None
        self.evaluates = self.records = self._should_stop = False
        self.sums_before_resume: dict[str, list[float]] = {}
        self.loaded_state: dict[str, Any] | None = None
        self.run_facts: dict[str, Any] = {}

    @property
    def should_stop(self) -> bool:
        return self._should_stop

    @should_stop.setter
    def should_stop(self, stops: bool) -> None:
        # A hook that assigns what it alone thinks must not cancel a stop that another one has asked for.
        self._should_stop = self._should_stop or bool(stops)

    def sums(self, metrics: Sequence[Any]) -> dict[str, list[float]]:
        """The sums of each metric over all ranks, with those from before a resume. Waits for the device."""
        local = torch.cat([metric.sums() for metric in metrics])
        numbers = self.role.add_up(local).split([metric.size for metric in metrics])
        sums = {metric.name: part.tolist() for metric, part in zip(metrics, numbers, strict=True)}
        for name, earlier in self.sums_before_resume.items():
            sums[name] = [a + b for a, b in zip(sums[name], earlier, strict=True)]
        return sums

"""One training run in legs: each leg trains on another layout, from where the last one stopped."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hpnb
from hpnb.hybrid.training import hooks


@dataclass(frozen=True)
class TrainingLeg:
    """What a rank saw of a leg.

    Attributes:
        losses, lrs, rows: of each step of this leg; rows are those of all ranks together. Losses are empty on
            ranks that have none.
        last: the last epoch's row of the history.
    """

    losses: tuple[float, ...]
    lrs: tuple[float, ...]
    rows: tuple[int, ...]
    last: dict[str, Any]


def train_leg(
    plugin: Any,
    model: Any,
    loaders: tuple[Any, Any],
    lr: float,
    weight_decay: float,
    epochs: int,
    metrics: list[hooks.Hook],
    folder: str = "",
    until: int | None = None,
    evaluate_every: int = 1,
    log_folder: str = "",
) -> TrainingLeg:
    """Train with AdamW and a cosine of a tenth warm-up. Every rank calls it.

    Args:
        loaders: of training and of test data.
        lr: the highest; it rises over a tenth of the steps and falls along a cosine.
        epochs: of the whole run.
        metrics: further hooks.
        folder: of the checkpoint to continue from; "" for none.
        until: the last epoch of this leg; by default of the run.
        log_folder: for a log of losses; "" for none.
    """
    torch.set_num_threads(1)  # tensors are small, and threads that wait for each other take others' cores
    train, test = loaders
    booster = hpnb.Booster(plugin=plugin)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)
    total = epochs * len(train)
    scheduler: Any = hpnb.CosineAnnealingWarmupLR(optimizer, total, warmup_steps=total // 10)
    model, optimizer, _, _, scheduler = booster.boost(model, optimizer, None, None, scheduler)
    log = StepLog(log_folder)
    trainer = hpnb.Trainer(
        booster, model, optimizer, None, scheduler, [log, *metrics], display_progress=False
    )
    if folder:
        trainer.resume(folder, missing_ok=True)
    history = trainer.fit(train, until or epochs, evaluate=test, evaluate_every=evaluate_every)
    return TrainingLeg(tuple(log.losses), tuple(log.lrs), tuple(log.rows), dict(history[-1]))


class StepLog(hooks.Hook):
    """Keeps loss, learning rate and rows of each step, and writes losses to a file that survives the rank."""

    def __init__(self, folder: str = "") -> None:
        self.losses: list[float] = []
        self.lrs: list[float] = []
        self.rows: list[int] = []
        self.path = Path(folder) / "log.jsonl" if folder else None

    def after_step(self, trainer: Any) -> None:
        rows = sum(len(batch["labels"]) for batch in trainer.batches) * trainer.booster.plugin.dp_size
        self.lrs.append(trainer.lr)
        self.rows.append(rows)
        if trainer.loss is None:
            return
        self.losses.append(float(trainer.loss))
        if self.path is not None and trainer.role.shows:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([trainer.step, self.losses[-1]]) + "\n")


class KillRankHook(hooks.Hook):
    """Kills one rank after a step, as a machine that goes away does: no exception, no cleanup."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, trainer: Any) -> None:
        if trainer.step == self.step:
            dist.barrier()  # so that the rank that keeps the log has written this step
            if hpnb.rank() == min(5, hpnb.world_size() - 1):
                os.kill(os.getpid(), signal.SIGKILL)


def read_log(folder: str) -> dict[int, float]:
    """{step: loss} as a run wrote it before it ended, however that was."""
    lines = (Path(folder) / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return {int(step): float(loss) for step, loss in map(json.loads, lines)}


def with_losses(legs: Iterable[TrainingLeg]) -> TrainingLeg:
    """Of what all ranks returned, the leg of a rank that has the losses."""
    return max(legs, key=lambda leg: len(leg.losses))

"""What notebook 08 trains: a GPT-2 that tells paraphrases apart, on any layout, killed if it is asked to.

    recipe = finetuned.recipe()                                  MRPC, a small GPT-2, a byte-level BPE
    pool.run(finetuned.leg, recipe, {"tp_size": 2}, ...)         on a rank: train, and evaluate
    hpnb.launch(finetuned.leg, recipe, knobs, folder=run, dies_at=14, ranks=8)       RankError

The batch is the whole one's, whatever the layout: a rank along dp has a share of it.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hpnb
from hpnb.hybrid.training import hooks
from hpnb.models import GPT2Size

WORDS = 1009


@dataclass(frozen=True)
class Recipe:
    """What is trained, whatever the layout.

    Attributes:
        size, merges: the model, in float64, and the byte-level BPE of its words.
        train, test: pairs of sentences.
        alone: rows of a step that one process was tuned for, with
        lr: the highest learning rate; it rises over a tenth of the steps and falls along a cosine.
        epochs: of the whole run.
        max_norm: to which gradients are clipped.
    """

    size: GPT2Size
    merges: tuple[tuple[str, str], ...]
    train: Any
    test: Any
    alone: int = 24
    lr: float = 2e-3
    epochs: int = 2
    max_norm: float = 1.0


def recipe(pairs: int = 960, test: int = 408) -> Recipe:
    """Of so many pairs of MRPC, or of its stand-in, and a GPT-2 of two blocks."""
    train = hpnb.data.mrpc("train", pairs)
    texts = (f"{row['sentence1']}\n{row['sentence2']}" for row in train)
    merges = tuple(hpnb.data.train_merges(texts, WORDS))
    size = GPT2Size(hidden=40, layers=2, heads=5, mlp=160, vocab_size=WORDS, length=128)
    return Recipe(size, merges, train, hpnb.data.mrpc("validation", test))


@dataclass(frozen=True)
class Leg:
    """What a rank saw of a run.

    Attributes:
        losses, lrs, rows: of each step that this call made; rows are those of all ranks together.
        last: the last epoch's row of the history.
    """

    losses: tuple[float, ...]
    lrs: tuple[float, ...]
    rows: tuple[int, ...]
    last: dict[str, Any]


def leg(
    recipe: Recipe,
    knobs: Mapping[str, Any],
    scale: float | None = None,
    until: int | None = None,
    folder: str = "",
    every: int = 10,
    dies_at: int = 0,
) -> Leg:
    """Train on the layout that `knobs` say, from where `folder` has left off. Every rank calls it.

    Args:
        knobs: of `hpnb.HybridParallelPlugin`.
        scale: of the learning rate; by default the data-parallel size, by which a step has more rows.
        until: the last epoch; by default all of them.
        folder: for checkpoints, every so many steps, and a log of losses; "" for none.
        dies_at: the step after which rank 5, or the last one, is killed.
    """
    torch.set_num_threads(1)  # tensors are small, and threads that wait for each other take others' cores
    tokenizer = hpnb.data.bpe_tokenizer(recipe.merges, recipe.size.vocab_size)
    collate = hpnb.data.collate_pairs(tokenizer, recipe.size.length)
    plugin = hpnb.HybridParallelPlugin(precision="fp64", max_norm=recipe.max_norm, seed=0, **knobs)
    booster = hpnb.Booster(plugin=plugin)
    model: Any = hpnb.models.gpt2(recipe.size, classes=2, dtype=torch.float64)
    rate = recipe.lr * (plugin.dp_size if scale is None else scale)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    deal = plugin.prepare_dataloader
    train = deal(recipe.train, recipe.alone, shuffle=True, drop_last=True, collate_fn=collate)
    test = deal(recipe.test, 136 // plugin.dp_size, collate_fn=collate)
    total = recipe.epochs * len(train)
    scheduler = hpnb.CosineAnnealingWarmupLR(optimizer, total, warmup_steps=total // 10)
    model, optimizer, _, _, scheduler = booster.boost(model, optimizer, None, None, scheduler)
    log = Log(folder)
    told: list[hooks.Hook] = [log, hooks.AccuracyHook(), hooks.F1Hook()]
    told += [hooks.CheckpointHook(folder, every)] if folder else []
    told += [Killer(dies_at)] if dies_at else []
    trainer = hpnb.Trainer(booster, model, optimizer, None, scheduler, told, display_progress=False)
    if folder:
        trainer.resume(folder, missing_ok=True)
    end = recipe.epochs if until is None else until
    history = trainer.fit(train, end, evaluate=test, evaluate_every=recipe.epochs)
    return Leg(tuple(log.losses), tuple(log.lrs), tuple(log.rows), dict(history[-1]))


class Log(hooks.Hook):
    """Keeps what a step had, and writes losses to a file that survives it."""

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
        if self.path is not None and trainer.place.shows:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([trainer.step, self.losses[-1]]) + "\n")


class Killer(hooks.Hook):
    """Kills one rank after a step, as a machine that goes away does: no exception, no farewell."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, trainer: Any) -> None:
        if trainer.step == self.step:
            dist.barrier()  # so that whoever keeps the log has written this step
            if hpnb.rank() == min(5, hpnb.world_size() - 1):
                os.kill(os.getpid(), signal.SIGKILL)


def logged(folder: str) -> dict[int, float]:
    """{step: loss} as a run wrote it before it ended, however that was."""
    lines = (Path(folder) / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return {int(step): float(loss) for step, loss in map(json.loads, lines)}


def curve(found: list[Leg]) -> Leg:
    """Of what all ranks returned: that of one which has the loss."""
    return max(found, key=lambda each: len(each.losses))


def majority(data: Any) -> float:
    """What always saying the commoner answer gets right."""
    labels = [row["label"] for row in data]
    return max(labels.count(0), labels.count(1)) / len(labels)

"""What notebook 08 trains: a GPT-2 that recognises paraphrases, on any layout, killed if it is asked to.

    recipe = paraphrases.training_recipe()                        MRPC, a small GPT-2, a byte-level BPE
    pool.run(paraphrases.train_leg, recipe, {"tp_size": 2}, ...)         on a rank: train, and evaluate
    hpnb.launch(paraphrases.train_leg, recipe, knobs, folder=run, dies_at=14, ranks=8)       RankError

The batch is the same whatever the layout: a rank along dp has its share of the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

import hpnb
from hpnb.hybrid.training import hooks
from hpnb.lesson.programs import training_legs
from hpnb.lesson.programs.training_legs import KillRankHook, TrainingLeg, read_log, with_losses
from hpnb.models import GPT2Size

__all__ = ["read_log", "with_losses"]

VOCAB_SIZE = 1009


@dataclass(frozen=True)
class ParaphraseRecipe:
    """What is trained, whatever the layout.

    Attributes:
        size, merges: the model, in float64, and the byte-level BPE of its vocabulary.
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


def training_recipe(pairs: int = 960, test: int = 408) -> ParaphraseRecipe:
    """So many pairs of MRPC, or of its stand-in, and a GPT-2 of two blocks."""
    train = hpnb.data.mrpc("train", pairs)
    texts = (f"{row['sentence1']}\n{row['sentence2']}" for row in train)
    merges = tuple(hpnb.data.train_merges(texts, VOCAB_SIZE))
    size = GPT2Size(hidden=40, layers=2, heads=5, mlp=160, vocab_size=VOCAB_SIZE, length=128)
    return ParaphraseRecipe(size, merges, train, hpnb.data.mrpc("validation", test))


def train_leg(
    recipe: ParaphraseRecipe,
    knobs: Mapping[str, Any],
    scale: float | None = None,
    until: int | None = None,
    folder: str = "",
    every: int = 10,
    dies_at: int = 0,
) -> TrainingLeg:
    """Train on the layout that `knobs` say, from where `folder` has left off. Every rank calls it.

    Args:
        knobs: of `hpnb.HybridParallelPlugin`.
        scale: of the learning rate; by default the data-parallel size, by which a step has more rows.
        until: the last epoch; by default all of them.
        folder: for checkpoints, every so many steps, and a log of losses; "" for none.
        dies_at: the step after which rank 5, or the last one, is killed.
    """
    tokenizer = hpnb.data.bpe_tokenizer(recipe.merges, recipe.size.vocab_size)
    collate = hpnb.data.collate_pairs(tokenizer, recipe.size.length)
    plugin = hpnb.HybridParallelPlugin(precision="fp64", max_norm=recipe.max_norm, seed=0, **knobs)
    model = hpnb.models.gpt2(recipe.size, classes=2, dtype=torch.float64)
    load = plugin.prepare_dataloader
    train = load(recipe.train, recipe.alone, shuffle=True, drop_last=True, collate_fn=collate)
    test = load(recipe.test, 136 // plugin.dp_size, collate_fn=collate)
    metrics: list[hooks.Hook] = [hooks.AccuracyHook(), hooks.F1Hook()]
    metrics += [hooks.CheckpointHook(folder, every)] if folder else []
    metrics += [KillRankHook(dies_at)] if dies_at else []
    lr = recipe.lr * (plugin.dp_size if scale is None else scale)
    return training_legs.train_leg(
        plugin, model, (train, test), lr, 0.01, recipe.epochs, metrics, folder, until, recipe.epochs, folder
    )


def majority_accuracy(data: Any) -> float:
    """The accuracy of always giving the commoner answer."""
    labels = [row["label"] for row in data]
    return max(labels.count(0), labels.count(1)) / len(labels)

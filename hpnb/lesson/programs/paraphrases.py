"""What notebook 08 fine-tunes: a GPT-2 that recognises paraphrases, and hooks that log its run and kill it.

recipe = paraphrases.training_recipe()       pretrained GPT-2 and MRPC where both are at hand, on a GPU
model, collate = recipe.build()              the same on every rank
"""

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
from hpnb.data import Dataset
from hpnb.models import GPT2Size

VOCAB_SIZE = 1009
SMALL = GPT2Size(hidden=40, layers=2, heads=5, mlp=160, vocab_size=VOCAB_SIZE, length=128)


@dataclass(frozen=True)
class ParaphraseRecipe:
    """What is trained, whatever the layout: pairs of sentences, for so many epochs.

    Attributes:
        weights: name or folder of pretrained weights; "" trains `SMALL` from scratch, in float64.
        merges: the byte-level BPE of `SMALL`.
        batch, lr: samples of a step that one process was tuned for, with the highest learning rate.
    """

    train: Dataset
    test: Dataset
    weights: str = ""
    merges: tuple[tuple[str, str], ...] = ()
    batch: int = 24
    lr: float = 2e-3
    epochs: int = 2

    @property
    def precision(self) -> str:
        return "auto" if self.weights else "fp64"

    @property
    def majority(self) -> float:
        """The accuracy of always giving the commoner answer."""
        labels = [pair["label"] for pair in self.test]
        return max(labels.count(0), labels.count(1)) / len(labels)

    def build(self) -> tuple[Any, Any]:
        """(model, collate function) on this rank; the same weights on all."""
        if self.weights:
            model = hpnb.models.gpt2(classes=2, pretrained=self.weights)
            tokenizer = _pretrained_tokenizer(self.weights)
            model.config.pad_token_id = tokenizer.pad_token_id
            return model, hpnb.data.collate_pairs(tokenizer, 128)
        model = hpnb.models.gpt2(SMALL, classes=2, dtype=torch.float64)
        tokenizer = hpnb.data.bpe_tokenizer(self.merges, SMALL.vocab_size)
        return model, hpnb.data.collate_pairs(tokenizer, SMALL.length)

    @property
    def data(self) -> str:
        """What it is trained on, in a plain phrase for the page's banner."""
        count, source = f"{len(self.train):,}", self.train.source
        if source.kind == "generated":
            return f"{count} generated pairs of sentences, instead of MRPC, which is not on this machine"
        return f"{count} pairs of sentences of {source.name}"

    def __str__(self) -> str:
        pairs = f"{len(self.train):,} pairs of {self.train.source.name}"
        if self.train.source.kind == "generated":
            pairs = f"{len(self.train):,} composed pairs"
        if self.weights:
            return f"pretrained {Path(self.weights).name}, fine-tuned on {pairs}"
        return f"a small GPT-2, trained from scratch on {pairs}"


def training_recipe(
    pairs: int = 720, test: int = 408, weights: str = "gpt2", device: str = "cpu"
) -> ParaphraseRecipe:
    """Fine-tuning of `weights` on MRPC if both are on this machine, with a GPU; else a small stand-in."""
    train = hpnb.data.mrpc("train")
    if device == "cuda" and train.source.kind == "real" and _at_hand(weights):
        return ParaphraseRecipe(train, hpnb.data.mrpc("validation"), weights, batch=16, lr=2e-5)
    train, evaluated = (_composed(*which) for which in (("train", pairs), ("validation", test)))
    texts = (f"{pair['sentence1']}\n{pair['sentence2']}" for pair in train)
    merges = tuple(hpnb.data.train_merges(texts, VOCAB_SIZE))
    return ParaphraseRecipe(train, evaluated, "", merges)


def _composed(split: str, pairs: int) -> Dataset:
    """Pairs of a split in a list, because every rank reads each of them several times."""
    data = hpnb.data.mrpc(split, pairs)
    return Dataset([*data], data.source, data.classes, data.noun)


def _at_hand(weights: str) -> bool:
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(weights, local_files_only=True)
        _pretrained_tokenizer(weights)
    except (OSError, ValueError):
        return False
    return True


def _pretrained_tokenizer(weights: str) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(weights, local_files_only=True)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


class StepLog(hpnb.Hook):
    """Keeps loss, learning rate and samples of each step of all replicas, and writes losses to a file that
    survives the rank. Losses are empty on ranks without them.
    """

    def __init__(self, folder: str = "") -> None:
        self.losses: list[float] = []
        self.lrs: list[float] = []
        self.samples: list[int] = []
        self.path = Path(folder) / "log.jsonl" if folder else None

    def after_step(self, trainer: Any) -> None:
        local = sum(len(batch["labels"]) for batch in trainer.batches)
        self.samples.append(local * trainer.booster.plugin.dp_size)
        self.lrs.append(trainer.lr)
        if trainer.loss is None:
            return
        self.losses.append(float(trainer.loss))
        if self.path is not None and trainer.role.shows:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([trainer.step, self.losses[-1]]) + "\n")

    def result(self, history: Iterable[dict[str, Any]]) -> LoggedRun:
        return LoggedRun(tuple(self.losses), max(self.lrs), self.samples[0], dict(list(history)[-1]))


@dataclass(frozen=True)
class LoggedRun:
    """What a rank reports of a run: losses of each step, if it has them, the highest learning rate, samples
    of a step on all replicas, and the last epoch's row of the history.
    """

    losses: tuple[float, ...]
    lr: float
    samples: int
    last: dict[str, Any]

    @property
    def thirds(self) -> list[float]:
        """Mean losses of the first, the second and the last third of the steps."""
        third = len(self.losses) // 3
        return [sum(self.losses[i * third : (i + 1) * third]) / third for i in range(3)]


def with_losses(ranks: Iterable[LoggedRun]) -> LoggedRun:
    """Of what all ranks returned, that of one with losses."""
    return max(ranks, key=lambda run: len(run.losses))


class KillRankHook(hpnb.Hook):
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

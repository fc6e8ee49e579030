"""Notebook 08: another layout for a run, the worst prediction, three budgets, unknown runs."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import hpnb
from hpnb.lesson.exercises.checker import Exercise, Finding
from hpnb.lesson.exercises.gpt2_hybrid_layouts import Job, Row, able, choose, job, tables, within, worst
from hpnb.mesh import Layout
from hpnb.models import GPT2Size

_TIMEOUT = 120.0
_TINY = GPT2Size(hidden=20, layers=2, heads=5, mlp=40, vocab_size=61, length=16)
_BASE, _ROWS = 2e-3, 8  # what one process was tuned for: learning rate, rows of a step


# --- a run that changes layout -----------------------------------------------------------------------


@dataclass
class Run:
    """A run on one layout, boosted, on a rank.

    Attributes:
        booster, model, optimizer, scheduler, loader: the loader's batches are of 8 rows over all ranks.
    """

    booster: Any
    model: Any
    optimizer: Any
    scheduler: Any
    loader: Any

    def train(self, steps: int) -> list[float]:
        """So many steps; the loss of each, on ranks that have it."""
        losses = []
        for _, batch in zip(range(steps), self.loader, strict=False):  # takes no batch too many
            self.optimizer.zero_grad()
            found = self.booster.execute_pipeline(iter([batch]), self.model, None, self.optimizer)
            self.optimizer.step()
            self.scheduler.step()
            if found["loss"] is not None:
                losses.append(float(found["loss"]))
        return losses


class Rows:
    """Rows of words with a class, the same wherever they are asked for."""

    def __init__(self, count: int = 64) -> None:
        draw = torch.Generator().manual_seed(5)
        self.words = torch.randint(0, _TINY.vocab_size - 1, (count, 8), generator=draw)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Any]:
        words = self.words[index]
        return {"input_ids": words, "labels": int(words[0] > words[1]), "number": index}


def start(knobs: Mapping[str, Any], rate: float = _BASE, rows: int = _ROWS, seed: int = 0) -> Run:
    """A fresh run. Every rank calls it.

    Args:
        knobs: of `hpnb.HybridParallelPlugin`.
        rows: of a step, over all ranks.
    """
    torch.set_num_threads(1)
    plugin = hpnb.HybridParallelPlugin(precision="fp64", seed=0, **knobs)
    booster = hpnb.Booster(plugin=plugin)
    model: Any = hpnb.models.gpt2(_TINY, classes=2, dtype=torch.float64, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    scheduler = hpnb.CosineAnnealingWarmupLR(optimizer, 12, warmup_steps=2)
    loader = plugin.prepare_dataloader(Rows(), rows // plugin.dp_size, shuffle=True, collate_fn=_together)
    model, optimizer, _, _, scheduler = booster.boost(model, optimizer, None, None, scheduler)
    return Run(booster, model, optimizer, scheduler, loader)


def _together(items: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    words = torch.stack([item["input_ids"] for item in items])
    return {"input_ids": words, "labels": torch.tensor([item["labels"] for item in items])}


def _first(save: Callable[[Run, str], Any], folder: str, knobs: Mapping[str, Any]) -> list[float]:
    run = start(knobs)
    losses = run.train(3)
    if save(run, folder) is ...:
        raise NotImplementedError
    return losses


def _second(resume: Callable[[Run, str], Any], folder: str, knobs: Mapping[str, Any]) -> list[float]:
    run = start(knobs, seed=1)  # so that weights which are not loaded are others
    if resume(run, folder) is ...:
        raise NotImplementedError
    return run.train(4)


_MOVES: tuple[tuple[str, dict[str, Any], str, dict[str, Any]], ...] = (
    ("dp 2", {}, "pp 2", {"pp_size": 2, "num_microbatches": 2}),
    ("tp 2", {"tp_size": 2}, "dp 2, ZeRO 1", {"zero_stage": 1}),
)


def _verify_moved(both: Mapping[str, Callable[[Run, str], Any]]) -> Sequence[Finding]:
    alone = hpnb.launch(_whole, ranks=1, device="cpu", timeout=_TIMEOUT)[0]
    findings = []
    with hpnb.Ranks(2, device="cpu", timeout=_TIMEOUT) as pool:
        for before, one, after, other in _MOVES:
            with tempfile.TemporaryDirectory() as folder:
                legs = [
                    pool.run(_first, both["save"], f"{folder}/run", one),
                    pool.run(_second, both["resume"], f"{folder}/run", other),
                ]
            losses = [loss for leg in legs for loss in max(leg, key=len)]
            findings.append(_equal(f"{before} to {after}, losses of 3 + 4 steps", losses, alone))
    return findings


def _equal(what: str, losses: Sequence[float], alone: Sequence[float]) -> Finding:
    if len(losses) != len(alone):
        return Finding(False, f"{what}: there are {len(losses)}, and {len(alone)} of one process")
    gaps = [abs(a - b) / b for a, b in zip(losses, alone, strict=True)]
    where = next((i for i, gap in enumerate(gaps) if not gap <= 1e-6), None)
    if where is None:
        return Finding(True, f"{what}: equal to one process's to {max(gaps):.0e}")
    return Finding(False, f"{what}: step {where + 1} is off by {gaps[where]:.0e} ({_hint(where)})")


_HINTS = {  # an update shows in the loss of the step after it
    3: "the first after the move: weights, or the samples",
    4: "the second: momenta, or the learning rate",
}


def _hint(step: int) -> str:
    return _HINTS.get(step, "before the move" if step < 3 else "later: the learning rate")


def _whole() -> list[float]:
    return start({}).train(7)


moved = Exercise("08.1", "resume on another layout", 20, _verify_moved)


# --- unknown runs -------------------------------------------------------------------------------------

RIGHT, RATE, MOMENTA, SAMPLES = "right", "learning rate", "momenta", "samples"
_BREAK = 5  # steps before the run was resumed


@dataclass(frozen=True)
class Record:
    """What instruments say of a run of ten steps that was resumed after the fifth.

    Attributes:
        layout: of the run.
        alone: (rows of a step, learning rate) that one process was tuned for.
        losses, rows, rates: of each step; rows over all ranks.
        samples: of each step, the numbers of its rows.
        moved: of each step, how far rank 0's weights went (with tp its part of them), over its learning
            rate; a norm.
        resumed: how many steps there were before.
    """

    layout: Layout
    alone: tuple[int, float]
    losses: tuple[float, ...]
    rows: tuple[int, ...]
    rates: tuple[float, ...]
    samples: tuple[frozenset[int], ...]
    moved: tuple[float, ...]
    resumed: int = _BREAK


def records() -> list[tuple[Record, str]]:
    """On two ranks: a record of each fault on tp 2, of the run that is right on dp 2, and its name."""
    return [(_recorded(fault), fault) for fault in (RATE, RIGHT, SAMPLES, MOMENTA)]


def _recorded(fault: str) -> Record:
    plugin = hpnb.HybridParallelPlugin(precision="fp64", seed=0, tp_size=1 if fault == RIGHT else 2)
    scale = hpnb.world_size() if fault == RATE else plugin.dp_size
    rows = _ROWS * plugin.dp_size
    booster = hpnb.Booster(plugin=plugin)
    model: Any = hpnb.models.gpt2(_TINY, classes=2, dtype=torch.float64)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=_BASE * scale, weight_decay=0.0)
    data = Rows(12 * rows)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(2)).tolist()
    model, optimizer, *_ = booster.boost(model, optimizer)
    losses, moved, samples = [], [], []
    for step in range(2 * _BREAK):
        if step == _BREAK and fault == MOMENTA:
            for state in optimizer.state.values():
                for value in state.values():
                    value.zero_()
        place = step - _BREAK if step >= _BREAK and fault == SAMPLES else step
        numbers = order[place * rows : (place + 1) * rows]
        mine = numbers[plugin.mesh.dp.rank :: plugin.dp_size]
        batch = _together([data[i] for i in mine])
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        found = booster.execute_pipeline(iter([batch]), model, None, optimizer)
        optimizer.step()
        losses.append(float(found["loss"]))
        samples.append(frozenset(numbers))
        moved.append(_moved(model, before) / (_BASE * scale))
    layout = Layout(dp=plugin.dp_size, tp=plugin.tp_size)
    return Record(
        layout, (_ROWS, _BASE), tuple(losses), (rows,) * len(losses), (_BASE * scale,) * len(losses),
        tuple(samples), tuple(moved),
    )  # fmt: skip


def _moved(model: nn.Module, before: Sequence[torch.Tensor]) -> float:
    """How far the weights that this rank has went, a norm."""
    pairs = zip(model.parameters(), before, strict=True)
    return math.sqrt(sum(float((p.detach() - old).square().sum()) for p, old in pairs))


def _verify_diagnose(diagnose: Callable[[Record], Any]) -> Sequence[Finding]:
    findings = []
    for count, (record, truth) in enumerate(
        hpnb.launch(records, ranks=2, device="cpu", timeout=_TIMEOUT)[0], 1
    ):
        answer = diagnose(record)
        fell = f"record {count}, {record.layout}, loss {record.losses[0]:.2f} to {record.losses[-1]:.2f}"
        findings.append(Finding(answer == truth, f"{fell}: it is {truth!r}, you say {answer!r}"))
    return findings


diagnose = Exercise("08.4", "unknown runs", 15, _verify_diagnose)

__all__ = [
    "Job",
    "Record",
    "Row",
    "Run",
    "able",
    "choose",
    "diagnose",
    "job",
    "moved",
    "start",
    "tables",
    "within",
    "worst",
]

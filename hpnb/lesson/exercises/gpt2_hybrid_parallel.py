"""Notebook 08: another layout for a run, the worst prediction, three budgets, unknown runs."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import hpnb
from hpnb.lesson.exercises.checker import Finding, exercise
from hpnb.lesson.exercises.findings import diagnosis as diagnosis_exercise
from hpnb.lesson.exercises.gpt2_layout_choice import BudgetedTask, LayoutRow, choose_layout, worst_prediction
from hpnb.mesh import Layout
from hpnb.models import GPT2Size

__all__ = ["BudgetedTask", "LayoutRow", "choose_layout", "worst_prediction"]

_TIMEOUT = 120.0
_TINY = GPT2Size(hidden=20, layers=2, heads=5, mlp=40, vocab_size=61, length=16)
_LR, _ROWS = 2e-3, 8  # what one process was tuned for: learning rate, rows of a step


# --- a run that changes layout -----------------------------------------------------------------------


@dataclass
class BoostedRun:
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
            outputs = self.booster.execute_pipeline(iter([batch]), self.model, None, self.optimizer)
            self.optimizer.step()
            self.scheduler.step()
            if outputs["loss"] is not None:
                losses.append(float(outputs["loss"]))
        return losses


class LabelledTokens:
    """Rows of tokens with a class, the same wherever they are asked for."""

    def __init__(self, count: int = 64) -> None:
        generator = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(0, _TINY.vocab_size - 1, (count, 8), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = self.tokens[index]
        return {"input_ids": tokens, "labels": int(tokens[0] > tokens[1]), "number": index}


def _collate(items: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    ids = torch.stack([item["input_ids"] for item in items])
    return {"input_ids": ids, "labels": torch.tensor([item["labels"] for item in items])}


def start(knobs: Mapping[str, Any], seed: int = 0) -> BoostedRun:
    """A fresh run. Every rank calls it.

    Args:
        knobs: of `hpnb.HybridParallelPlugin`.
        seed: of the weights.
    """
    torch.set_num_threads(1)
    plugin = hpnb.HybridParallelPlugin(precision="fp64", seed=0, **knobs)
    booster = hpnb.Booster(plugin=plugin)
    model: Any = hpnb.models.gpt2(_TINY, classes=2, dtype=torch.float64, seed=seed)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=_LR)
    scheduler: Any = hpnb.CosineAnnealingWarmupLR(optimizer, 12, warmup_steps=2)
    rows = _ROWS // plugin.dp_size
    loader = plugin.prepare_dataloader(LabelledTokens(), rows, shuffle=True, collate_fn=_collate)
    model, optimizer, _, _, scheduler = booster.boost(model, optimizer, None, None, scheduler)
    return BoostedRun(booster, model, optimizer, scheduler, loader)


def _train_and_save(
    save: Callable[[BoostedRun, str], Any], folder: str, knobs: Mapping[str, Any]
) -> list[float]:
    run = start(knobs)
    losses = run.train(3)
    if save(run, folder) is ...:
        raise NotImplementedError
    return losses


def _resume_and_train(
    resume: Callable[[BoostedRun, str], Any], folder: str, knobs: Mapping[str, Any]
) -> list[float]:
    run = start(knobs, seed=1)  # so that weights which are not loaded are different
    if resume(run, folder) is ...:
        raise NotImplementedError
    return run.train(4)


def _serial_losses() -> list[float]:
    return start({}).train(7)


_MOVES: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("dp 2 to pp 2", {}, {"pp_size": 2, "num_microbatches": 2}),
    ("tp 2 to dp 2, ZeRO 1", {"tp_size": 2}, {"zero_stage": 1}),
)


@exercise("08.1", "resume on another layout", 20)
def resume_elsewhere(answer: Mapping[str, Callable[[BoostedRun, str], Any]]) -> Iterator[Finding]:
    serial = hpnb.launch(_serial_losses, ranks=1, device="cpu", timeout=_TIMEOUT)[0]
    with hpnb.Ranks(2, device="cpu", timeout=_TIMEOUT) as pool:
        for move, before, after in _MOVES:
            with tempfile.TemporaryDirectory() as folder:
                legs = [
                    pool.run(_train_and_save, answer["save"], f"{folder}/run", before),
                    pool.run(_resume_and_train, answer["resume"], f"{folder}/run", after),
                ]
            losses = [loss for leg in legs for loss in max(leg, key=len)]
            yield compare_losses(f"{move}, losses of 3 + 4 steps", losses, serial)


def compare_losses(text: str, losses: Sequence[float], serial: Sequence[float]) -> Finding:
    """Whether losses are one process's; if not, from which step on, and what that suggests."""
    if len(losses) != len(serial):
        return Finding(False, f"{text}: there are {len(losses)}, and {len(serial)} of one process")
    gaps = [abs(a - b) / b for a, b in zip(losses, serial, strict=True)]
    step = next((i for i, gap in enumerate(gaps) if not gap <= 1e-6), None)
    if step is None:
        return Finding(True, f"{text}: equal to one process's to {max(gaps):.0e}")
    return Finding(False, f"{text}: step {step + 1} is off by {gaps[step]:.0e} ({_hint(step)})")


def _hint(step: int) -> str:
    hints = {  # an update shows in the loss of the step after it
        3: "the first after the move: weights, or the samples",
        4: "the second: momenta, or the learning rate",
    }
    return hints.get(step, "before the move" if step < 3 else "later: the learning rate")


# --- unknown runs -------------------------------------------------------------------------------------

RIGHT, RATE, MOMENTA, SAMPLES = "right", "learning rate", "momenta", "samples"
_BREAK = 5  # steps before the run was resumed


@dataclass(frozen=True)
class ResumedRecord:
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


def records() -> list[tuple[ResumedRecord, str]]:
    """On two ranks: a record of each fault on tp 2, of the run that is right on dp 2, and its name."""
    return [(_record(fault), fault) for fault in (RATE, RIGHT, SAMPLES, MOMENTA)]


def _record(fault: str) -> ResumedRecord:
    plugin = hpnb.HybridParallelPlugin(precision="fp64", seed=0, tp_size=1 if fault == RIGHT else 2)
    lr = _LR * (hpnb.world_size() if fault == RATE else plugin.dp_size)
    rows = _ROWS * plugin.dp_size
    booster = hpnb.Booster(plugin=plugin)
    model: Any = hpnb.models.gpt2(_TINY, classes=2, dtype=torch.float64)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    data = LabelledTokens(12 * rows)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(2)).tolist()
    model, optimizer, *_ = booster.boost(model, optimizer)
    losses, moved, samples = [], [], []
    for step in range(2 * _BREAK):
        if step == _BREAK and fault == MOMENTA:
            for state in optimizer.state.values():
                for value in state.values():
                    value.zero_()
        first = rows * (step - _BREAK if step >= _BREAK and fault == SAMPLES else step)
        numbers = order[first : first + rows]
        batch = _collate([data[i] for i in numbers[plugin.mesh.dp.rank :: plugin.dp_size]])
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        outputs = booster.execute_pipeline(iter([batch]), model, None, optimizer)
        optimizer.step()
        losses.append(float(outputs["loss"]))
        samples.append(frozenset(numbers))
        moved.append(weights_moved(model, before) / lr)
    layout, steps = Layout(dp=plugin.dp_size, tp=plugin.tp_size), len(losses)
    return ResumedRecord(
        layout, (_ROWS, _LR), tuple(losses), (rows,) * steps, (lr,) * steps, tuple(samples), tuple(moved)
    )


def weights_moved(model: nn.Module, before: Sequence[torch.Tensor]) -> float:
    """How far the weights that this rank has went, a norm."""
    pairs = zip(model.parameters(), before, strict=True)
    return math.sqrt(sum(float((p.detach() - old).square().sum()) for p, old in pairs))


def _described() -> Iterator[tuple[str, ResumedRecord, str]]:
    results = hpnb.launch(records, ranks=2, device="cpu", timeout=_TIMEOUT)[0]
    for count, (record, truth) in enumerate(results, 1):
        fell = f"loss {record.losses[0]:.2f} to {record.losses[-1]:.2f}"
        yield f"record {count}, {record.layout}, {fell}", record, truth


diagnose = diagnosis_exercise("08.4", "unknown runs", 15, _described)

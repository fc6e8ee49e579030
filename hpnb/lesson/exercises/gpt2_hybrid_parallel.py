"""Notebook 08: another layout for a run, the worst prediction, three budgets, unknown runs."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import hpnb
from hpnb import theory
from hpnb.lesson.checks import Exercise, Finding
from hpnb.lesson.tables import number
from hpnb.mesh import Layout
from hpnb.models import GPT2_SIZES, GPT2Size
from hpnb.theory import WIRES, LayerCost, LayoutPlan, LayoutTask

_TIMEOUT = 120.0
_TINY = GPT2Size(hidden=20, layers=2, heads=5, mlp=40, vocabulary=61, length=16)
_BASE, _ROWS = 2e-3, 8  # what one process was tuned for: learning rate, rows of a step


# --- a layout under three budgets -------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """GPT-2 XL, to be trained with as few GPU seconds a step as three budgets allow.

    Attributes:
        ranks: so many there are; a plan may leave some out.
        memory: bytes of a device.
        deadline: seconds that a step may take.
        rows: of a whole batch, of 1,024 tokens each.
        task: what a step of it computes, sends and steps, as `theory.layout_parts` takes it.
    """

    ranks: int
    memory: float
    deadline: float
    rows: int
    task: LayoutTask

    def seconds(self, plan: LayoutPlan) -> float:
        """Of a step, by `theory.layout_parts`."""
        return sum(theory.layout_parts(self.task, plan).values())

    def held(self, plan: LayoutPlan) -> float:
        """Bytes of the fullest rank, by `theory.layout_memory`."""
        return theory.layout_memory(self.task, plan)

    def refused(self, plan: LayoutPlan) -> str | None:
        """Why the plan cannot be run; None if it can."""
        return self.task.refused(plan)


def job(ranks: int, memory: float, deadline: float, rows: int, host: int = 8, between: str = "") -> Job:
    """Of GPT-2 XL at 400 TFLOP/s a rank; a layer's kernels take 0.1 ms a microbatch whatever its rows."""
    size = GPT2_SIZES["1.5b"]
    block, rate = size.block(), 400e12
    head = LayerCost(1e-4, 6 * size.length * size.hidden * size.vocabulary / rate)
    each = LayerCost(1e-4, block.training_flops / rate)
    task = LayoutTask(
        block, size.layers, size.vocabulary, rows, each, head, 28 / 3e12, WIRES["NVLink 4"],
        WIRES[between] if between else None, host,
    )  # fmt: skip
    return Job(ranks, memory, deadline, rows, task)


_JOBS = {
    "8 ranks of 80 GB": job(8, 80e9, 0.5, 64),
    "16 ranks of 16 GB": job(16, 16e9, 0.7, 64),
    "32 ranks of 24 GB in hosts of 8, Ethernet between": job(32, 24e9, 0.35, 64, 8, "Ethernet 100 Gb"),
}


def able(given: Job) -> list[LayoutPlan]:
    """Every plan within the three budgets."""
    found = []
    sizes = [n for n in range(1, given.ranks + 1) if given.ranks % n == 0]
    for dp in sizes:
        for pp in sizes:
            for tp in (t for t in sizes if dp * pp * t <= given.ranks):
                counts = [m for m in range(1, given.rows + 1) if given.rows % (dp * m) == 0]
                for m in counts if pp > 1 else [1]:
                    for zero in (0, 1, 2, 3) if dp > 1 else (0,):
                        plan = LayoutPlan(dp, pp, tp, m, zero)
                        if given.refused(plan) is None and within(given, plan):
                            found.append(plan)
    return found


def within(given: Job, plan: LayoutPlan) -> bool:
    """Whether a plan keeps to all three budgets."""
    fits = plan.ranks <= given.ranks and given.held(plan) <= given.memory
    return fits and given.seconds(plan) <= given.deadline


def _verify_choose(choose: Callable[[Job], Any]) -> Sequence[Finding]:
    findings = []
    for name, given in _JOBS.items():
        plan = choose(given)
        if not isinstance(plan, LayoutPlan):
            findings.append(Finding(False, f"{name}: {plan!r} is no LayoutPlan"))
            continue
        if (why := given.refused(plan)) is not None:
            findings.append(Finding(False, f"{name}: {plan}, m {plan.microbatches}: {why}"))
            continue
        said = (f"{name}: {plan}, m {plan.microbatches}, {plan.ranks} ranks, "
                f"{number(given.held(plan), 'B')}, {number(given.seconds(plan), 's')}")  # fmt: skip
        broken = [
            words
            for good, words in (
                (plan.ranks <= given.ranks, f"more than {given.ranks} ranks"),
                (given.held(plan) <= given.memory, f"more than {number(given.memory, 'B')}"),
                (given.seconds(plan) <= given.deadline, f"longer than {number(given.deadline, 's')}"),
            )
            if not good
        ]
        if broken:
            findings.append(Finding(False, f"{said}: {', '.join(broken)}"))
            continue
        least = min(each.ranks * given.seconds(each) for each in able(given))
        regret = plan.ranks * given.seconds(plan) / least - 1
        findings.append(Finding(regret <= 0.05, f"{said}: regret {100 * regret:.1f} %, at most 5 %"))
    return findings


choose = Exercise("08.3", "choose under three budgets", 20, _verify_choose)


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
        self.words = torch.randint(0, _TINY.vocabulary - 1, (count, 8), generator=draw)

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


# --- the worst prediction ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A layout: seconds of each part of its step, predicted and measured, mean over the ranks."""

    plan: LayoutPlan
    predicted: Mapping[str, float]
    measured: Mapping[str, float]


NORMS, KERNELS, STAGES, WIRE = "norms", "kernels", "stages", "wire"


def tables() -> list[tuple[str, list[Row], str]]:
    """Four tables, each of a machine that has one thing more than the prediction: (words, rows, what)."""
    plain = job(4, 80e9, 9.0, 32)
    slow = theory.Wire(8 * WIRES["NVLink 4"].latency, WIRES["NVLink 4"].bandwidth / 8)
    task = plain.task
    machines: dict[str, Callable[[LayoutPlan], Mapping[str, float]]] = {
        WIRE: lambda plan: theory.layout_parts(replace(task, inside=slow), plan),
        KERNELS: lambda plan: theory.layout_parts(
            replace(task, each=replace(task.each, fixed=12 * task.each.fixed)), plan
        ),
        STAGES: lambda plan: _with_bubble(theory.layout_parts(task, plan), plan, 0.9),
        NORMS: lambda plan: _with_norms(theory.layout_parts(task, plan), plan),
    }
    found: list[tuple[str, list[Row], str]] = []
    plans = theory.layout_plans(task, 4, 2)
    for cause, machine in machines.items():
        rows = []
        for plan in plans:
            seen = dict(machine(plan))
            seen["optimizer"] *= 1.6  # a large ratio of a part that hardly counts
            rows.append(Row(plan, theory.layout_parts(task, plan), seen))
        found.append((f"table {len(found) + 1}", rows, cause))
    return found


def _with_norms(parts: Mapping[str, float], plan: LayoutPlan) -> dict[str, float]:
    return {**parts, "computing": parts["computing"] * (1 + 0.35 * (plan.tp - 1))}


def _with_bubble(parts: Mapping[str, float], plan: LayoutPlan, more: float) -> dict[str, float]:
    extra = more * parts["computing"] * (plan.pp - 1) / plan.pp
    return {**parts, "bubble": parts["bubble"] + extra}


def _off(row: Row) -> float:
    ratio = sum(row.measured.values()) / sum(row.predicted.values())
    return max(ratio, 1 / ratio)


def _verify_worst(explain: Callable[[Sequence[Row]], Any]) -> Sequence[Finding]:
    findings = []
    for name, rows, cause in tables():
        worst = max(rows, key=_off)
        part = max(worst.measured, key=lambda p: abs(worst.measured[p] - worst.predicted[p]))
        right = (str(worst.plan), part, cause)
        answer = explain(rows)
        good = isinstance(answer, tuple) and tuple(map(str, answer)) == right
        said = f"{name}: {worst.plan} takes {_off(worst):.2f} times what was predicted"
        findings.append(Finding(good, f"{said}: it is {right}, you say {answer!r}"))
    return findings


worst = Exercise("08.2", "explain the worst prediction", 20, _verify_worst)


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

__all__ = ["Job", "Record", "Row", "Run", "able", "choose", "diagnose", "job", "moved", "start", "worst"]

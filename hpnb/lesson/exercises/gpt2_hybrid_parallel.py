"""Notebook 08: the worst prediction, three budgets, a loop that survives, unknown runs."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

import hpnb
from hpnb import theory
from hpnb.lesson.exercises.checker import Finding, WrongAnswer, exercise
from hpnb.lesson.exercises.findings import diagnosis, divisors
from hpnb.lesson.programs.layout_tasks import gpt2_xl_task
from hpnb.lesson.tables import number
from hpnb.mesh import Layout, ParallelLayout
from hpnb.models import GPT2Size
from hpnb.theory import LINKS, LayoutTask

_TIMEOUT = 120.0
_TINY = GPT2Size(hidden=20, layers=2, heads=5, mlp=40, vocab_size=61, length=16)
_LR, _SAMPLES = 2e-3, 8  # what one process was tuned for: learning rate, samples of a step
_STEPS, _EVERY = 12, 2  # of the run that is killed, and between two saves


# --- a run that is killed and changes layout -----------------------------------------------------------


class Killed(Exception):
    """What the check raises in the middle of a run, on every rank."""


@dataclass
class BoostedRun:
    """A run on one layout, boosted, on a rank.

    Attributes:
        booster, model, optimizer, scheduler, loader: the loader's batches are of 8 samples over all ranks.
        losses: of the steps so far, on ranks that have them.
        killed_after: steps after which `step` raises; 0 is never.
    """

    booster: Any
    model: Any
    optimizer: Any
    scheduler: Any
    loader: Any
    killed_after: int = 0
    losses: list[float] = field(default_factory=list)
    num_steps: int = 0

    def step(self, batch: Mapping[str, torch.Tensor]) -> None:
        self.optimizer.zero_grad()
        outputs = self.booster.execute_pipeline(iter([batch]), self.model, None, self.optimizer)
        self.optimizer.step()
        self.scheduler.step()
        self.num_steps += 1
        if outputs["loss"] is not None:
            self.losses.append(float(outputs["loss"]))
        if self.num_steps == self.killed_after:
            raise Killed


class LabelledTokens:
    """Sequences of tokens with a class, the same wherever they are asked for."""

    def __init__(self, count: int = 64) -> None:
        generator = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(0, _TINY.vocab_size - 1, (count, 8), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = self.tokens[index]
        return {"input_ids": tokens, "labels": int(tokens[0] > tokens[1])}


def start(knobs: Mapping[str, Any], seed: int = 0, killed_after: int = 0) -> BoostedRun:
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
    scheduler: Any = hpnb.CosineAnnealingWarmupLR(optimizer, _STEPS, warmup_steps=2)
    samples = _SAMPLES // plugin.dp_size
    loader = plugin.prepare_dataloader(LabelledTokens(), samples, shuffle=True)
    model, optimizer, _, _, scheduler = booster.boost(model, optimizer, None, None, scheduler)
    return BoostedRun(booster, model, optimizer, scheduler, loader, killed_after)


Train = Callable[[BoostedRun, str, int, int], Any]


def _train_leg(train: Train, folder: str, knobs: Mapping[str, Any], killed_after: int) -> list[float]:
    seed = 0 if killed_after else 1  # so that weights which are not loaded are different
    run = start(knobs, seed, killed_after)
    with suppress(Killed):
        train(run, folder, _STEPS, _EVERY)
    return run.losses


def serial_losses() -> list[float]:
    """Of one process that nobody kills."""
    run = start({})
    for epoch in range(-(-_STEPS // len(run.loader))):
        run.loader.set_epoch(epoch)
        for batch in run.loader:
            run.step(batch)
    return run.losses[:_STEPS]


_MOVES: tuple[tuple[str, dict[str, Any], dict[str, Any], int], ...] = (
    ("dp 2 to pp 2", {}, {"pp_size": 2, "num_microbatches": 2}, 5),
    ("tp 2 to dp 2, ZeRO 1", {"tp_size": 2}, {"zero_stage": 1}, 9),  # saved where an epoch ends
)


@exercise("08.3", "a loop that survives", 25)
def surviving_loop(train: Train) -> Iterator[Finding]:
    serial = hpnb.launch(serial_losses, ranks=1, device="cpu", timeout=_TIMEOUT)[0]
    with hpnb.Ranks(2, device="cpu", timeout=_TIMEOUT) as pool:
        for move, before, after, killed_after in _MOVES:
            with tempfile.TemporaryDirectory() as folder:
                legs = [
                    max(pool.run(_train_leg, train, folder, knobs, killed), key=len)
                    for knobs, killed in ((before, killed_after), (after, 0))
                ]
            saved = killed_after // _EVERY * _EVERY
            text = f"{move}, killed after step {killed_after}"
            if len(legs[0]) != killed_after:
                yield Finding(False, f"{text}: the first leg has {len(legs[0])} steps")
            elif len(legs[1]) != _STEPS - saved:
                wanted = f"step {saved} was saved, so {_STEPS - saved} steps are left"
                yield Finding(False, f"{text}: {wanted}, and the second leg has {len(legs[1])}")
            else:
                yield compare_losses(text, legs[0][:saved] + legs[1], serial, saved)


def compare_losses(text: str, losses: Sequence[float], serial: Sequence[float], saved: int) -> Finding:
    """Whether losses are one process's; if not, from which step on, and what that suggests."""
    gaps = [abs(a - b) / b for a, b in zip(losses, serial, strict=True)]
    step = next((i for i, gap in enumerate(gaps) if not gap <= 1e-6), None)
    if step is None:
        return Finding(True, f"{text}: all {len(losses)} losses are one process's, to {max(gaps):.0e}")
    return Finding(False, f"{text}: step {step + 1} is off by {gaps[step]:.0e} ({_hint(step - saved)})")


def _hint(steps: int) -> str:
    """What is off so many steps after the resume; an update shows in the loss of the step after it."""
    hints = {0: "the first after the resume: weights, or the samples",
             1: "the second: moments, or the learning rate"}  # fmt: skip
    return hints.get(steps, "before the resume" if steps < 0 else "later: the learning rate, or the epoch")


# --- unknown runs -------------------------------------------------------------------------------------

RIGHT, RATE, MOMENTS, SAMPLES = "right", "learning rate", "moments", "samples"
_BREAK = 5  # steps before the run was resumed


@dataclass(frozen=True)
class ResumedRecord:
    """What instruments say of a run of ten steps that was resumed after the fifth.

    Attributes:
        layout: of the run.
        alone: (samples of a step, learning rate) that one process was tuned for, with Adam.
        losses, batch_sizes, rates: of each step; batch sizes over all ranks.
        samples: of each step, the numbers of its samples.
        moved: of each step, how far rank 0's weights went (with tp its part of them), over its learning
            rate; a norm.
        resumed: how many steps there were before.
    """

    layout: Layout
    alone: tuple[int, float]
    losses: tuple[float, ...]
    batch_sizes: tuple[int, ...]
    rates: tuple[float, ...]
    samples: tuple[frozenset[int], ...]
    moved: tuple[float, ...]
    resumed: int = _BREAK


def records() -> list[tuple[ResumedRecord, str]]:
    """On two ranks: a record of each fault on tp 2, of the run that is right on dp 2, and its name."""
    return [(_record(fault), fault) for fault in (RATE, RIGHT, SAMPLES, MOMENTS)]


def _record(fault: str) -> ResumedRecord:
    plugin = hpnb.HybridParallelPlugin(precision="fp64", seed=0, tp_size=1 if fault == RIGHT else 2)
    lr = _LR * math.sqrt(hpnb.world_size() if fault == RATE else plugin.dp_size)  # as AdamW wants it
    batch_size = _SAMPLES * plugin.dp_size
    booster = hpnb.Booster(plugin=plugin)
    model: Any = hpnb.models.gpt2(_TINY, classes=2, dtype=torch.float64)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    data = LabelledTokens(12 * batch_size)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(2)).tolist()
    model, optimizer, *_ = booster.boost(model, optimizer)
    losses, moved, samples = [], [], []
    for step in range(2 * _BREAK):
        if step == _BREAK and fault == MOMENTS:
            for state in optimizer.state.values():
                for value in state.values():
                    value.zero_()
        first = batch_size * (step - _BREAK if step >= _BREAK and fault == SAMPLES else step)
        numbers = order[first : first + batch_size]
        batch = default_collate([data[i] for i in numbers[plugin.mesh.dp.rank :: plugin.dp_size]])
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        outputs = booster.execute_pipeline(iter([batch]), model, None, optimizer)
        optimizer.step()
        losses.append(float(outputs["loss"]))
        samples.append(frozenset(numbers))
        moved.append(weights_moved(model, before) / lr)
    layout, steps = Layout(dp=plugin.dp_size, tp=plugin.tp_size), len(losses)
    same = ((batch_size,) * steps, (lr,) * steps)
    return ResumedRecord(layout, (_SAMPLES, _LR), tuple(losses), *same, tuple(samples), tuple(moved))


def weights_moved(model: nn.Module, before: Sequence[torch.Tensor]) -> float:
    """How far the weights that this rank has went, a norm."""
    pairs = zip(model.parameters(), before, strict=True)
    return math.sqrt(sum(float((p.detach() - old).square().sum()) for p, old in pairs))


def _described() -> Iterator[tuple[str, ResumedRecord, str]]:
    results = hpnb.launch(records, ranks=2, device="cpu", timeout=_TIMEOUT)[0]
    for count, (record, truth) in enumerate(results, 1):
        fell = f"loss {record.losses[0]:.2f} to {record.losses[-1]:.2f}"
        yield f"record {count}, {record.layout}, {fell}", record, truth


diagnose = diagnosis("08.4", "unknown runs", 15, _described)


# --- a layout under three budgets -------------------------------------------------------------------


@dataclass(frozen=True)
class BudgetedTask:
    """GPT-2 XL, to be trained with as few GPU seconds a step as three budgets allow.

    Attributes:
        ranks: so many there are; a layout may leave some out.
        memory: bytes of a GPU.
        deadline: seconds that a step may take.
        samples: of a batch, of 1,024 tokens each.
        task: as `theory.layout_parts` takes it.
    """

    ranks: int
    memory: float
    deadline: float
    samples: int
    task: LayoutTask

    def seconds(self, plan: ParallelLayout) -> float:
        """Of a step, by `theory.layout_parts`."""
        return sum(theory.layout_parts(self.task, plan).values())

    def peak_bytes(self, plan: ParallelLayout) -> float:
        """Bytes of the fullest rank, by `theory.layout_memory`."""
        return theory.layout_memory(self.task, plan)

    def refusal(self, plan: ParallelLayout) -> str | None:
        """Why the layout cannot be run; None if it can."""
        return self.task.refusal(plan)

    def gpu_seconds(self, plan: ParallelLayout) -> float:
        return plan.world_size * self.seconds(plan)

    def exceeded(self, plan: ParallelLayout) -> list[str]:
        limits = (
            (plan.world_size <= self.ranks, f"more than {self.ranks} ranks"),
            (self.peak_bytes(plan) <= self.memory, f"more than {number(self.memory, 'B')}"),
            (self.seconds(plan) <= self.deadline, f"longer than {number(self.deadline, 's')}"),
        )
        return [text for kept, text in limits if not kept]


_BATCH = 64
_NVLINK, _ETHERNET = gpt2_xl_task(_BATCH), gpt2_xl_task(_BATCH, "Ethernet 100 Gb")
TASKS = {
    "8 ranks of 80 GB": BudgetedTask(8, 80e9, 0.5, _BATCH, _NVLINK),
    "16 ranks of 16 GB": BudgetedTask(16, 16e9, 0.7, _BATCH, _NVLINK),
    "32 ranks of 24 GB on nodes of 8, Ethernet between": BudgetedTask(32, 24e9, 0.35, _BATCH, _ETHERNET),
}


def fitting_layouts(task: BudgetedTask) -> list[ParallelLayout]:
    sizes, layouts = divisors(task.ranks), []
    cubes = [(dp, pp, tp) for dp in sizes for pp in sizes for tp in sizes if dp * pp * tp <= task.ranks]
    for dp, pp, tp in cubes:
        counts = [m for m in range(1, task.samples + 1) if task.samples % (dp * m) == 0] if pp > 1 else [1]
        for m in counts:
            for zero in (0, 1, 2, 3) if dp > 1 else (0,):
                plan = ParallelLayout(dp, pp, tp, m, zero)
                if task.refusal(plan) is None and not task.exceeded(plan):
                    layouts.append(plan)
    return layouts


@exercise("08.2", "choose under three budgets", 20)
def choose_layout(choose: Callable[[BudgetedTask], Any]) -> Iterator[Finding]:
    for name, task in TASKS.items():
        plan = choose(task)
        if not isinstance(plan, ParallelLayout):
            raise WrongAnswer(f"{name}: {plan!r} is no ParallelLayout")
        text = f"{name}: {plan}, m {task.task.microbatches(plan)}"
        if (why := task.refusal(plan)) is not None:
            yield Finding(False, f"{text}: {why}")
            continue
        peak, seconds = number(task.peak_bytes(plan), "B"), number(task.seconds(plan), "s")
        text += f", {plan.world_size} ranks, {peak}, {seconds}"
        if exceeded := task.exceeded(plan):
            yield Finding(False, f"{text}: {', '.join(exceeded)}")
            continue
        regret = task.gpu_seconds(plan) / min(map(task.gpu_seconds, fitting_layouts(task))) - 1
        yield Finding(regret <= 0.05, f"{text}: regret {100 * regret:.1f} %, at most 5 %")


# --- the worst prediction ---------------------------------------------------------------------------


@dataclass(frozen=True)
class LayoutRow:
    """A layout: seconds of each part of its step, predicted and measured, mean over the ranks."""

    plan: ParallelLayout
    predicted: Mapping[str, float]
    measured: Mapping[str, float]

    @property
    def off(self) -> float:
        """How many times too long or too short the step is, at least 1."""
        ratio = sum(self.measured.values()) / sum(self.predicted.values())
        return max(ratio, 1 / ratio)


NORMS, KERNELS, STAGES, LINK = "norms", "kernels", "stages", "link"


def tables() -> list[tuple[str, list[LayoutRow], str]]:
    """Four tables, each of a machine that has one thing more than the prediction: (name, rows, what)."""
    task = gpt2_xl_task(32)
    nvlink = LINKS["NVLink 4"]
    slow = replace(task, inside=theory.Link(8 * nvlink.latency, nvlink.bandwidth / 8))
    late = replace(task, block_cost=replace(task.block_cost, fixed=12 * task.block_cost.fixed))
    machines: dict[str, Callable[[ParallelLayout], dict[str, float]]] = {
        LINK: lambda plan: dict(theory.layout_parts(slow, plan)),
        KERNELS: lambda plan: dict(theory.layout_parts(late, plan)),
        STAGES: lambda plan: _uneven_stages(theory.layout_parts(task, plan), plan),
        NORMS: lambda plan: _replicated_norms(theory.layout_parts(task, plan), plan),
    }
    results = []
    for count, (cause, machine) in enumerate(machines.items(), 1):
        rows = []
        for plan in theory.task_layouts(task, 4, 2):
            measured = machine(plan)
            measured["optimizer"] *= 1.6  # a large ratio of a part that hardly counts
            rows.append(LayoutRow(plan, theory.layout_parts(task, plan), measured))
        results.append((f"table {count}", rows, cause))
    return results


def _replicated_norms(parts: Mapping[str, float], plan: ParallelLayout) -> dict[str, float]:
    return {**parts, "computing": parts["computing"] * (1 + 0.35 * (plan.tp - 1))}


def _uneven_stages(parts: Mapping[str, float], plan: ParallelLayout) -> dict[str, float]:
    extra = 0.9 * parts["computing"] * (plan.pp - 1) / plan.pp
    return {**parts, "bubble": parts["bubble"] + extra}


@exercise("08.1", "explain the worst prediction", 20)
def worst_prediction(explain: Callable[[list[LayoutRow]], Any]) -> Iterator[Finding]:
    for name, rows, cause in tables():
        worst = max(rows, key=lambda row: row.off)
        part = max(worst.measured, key=lambda p: abs(worst.measured[p] - worst.predicted[p]))
        right, answer = (str(worst.plan), part, cause), explain(rows)
        good = isinstance(answer, tuple) and tuple(map(str, answer)) == right
        text = f"{name}: {worst.plan} takes {worst.off:.2f} times what was predicted"
        yield Finding(good, f"{text}: it is {right}, you say {answer!r}")

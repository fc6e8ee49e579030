"""Two exercises of notebook 08 that are arithmetic: a layout under three budgets, the worst prediction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpnb import theory
from hpnb.lesson.exercises.checker import Exercise, Finding
from hpnb.lesson.tables import number
from hpnb.mesh import ParallelLayout
from hpnb.models import GPT2_SIZES
from hpnb.theory import LINKS, LayerCost, LayoutTask

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

    def seconds(self, plan: ParallelLayout) -> float:
        """Of a step, by `theory.layout_parts`."""
        return sum(theory.layout_parts(self.task, plan).values())

    def held(self, plan: ParallelLayout) -> float:
        """Bytes of the fullest rank, by `theory.layout_memory`."""
        return theory.layout_memory(self.task, plan)

    def refused(self, plan: ParallelLayout) -> str | None:
        """Why the plan cannot be run; None if it can."""
        return self.task.refusal(plan)


def job(ranks: int, memory: float, deadline: float, rows: int, host: int = 8, between: str = "") -> Job:
    """Of GPT-2 XL at 400 TFLOP/s a rank; a layer's kernels take 0.1 ms a microbatch whatever its rows."""
    size = GPT2_SIZES["1.5b"]
    block, rate = size.block(), 400e12
    head = LayerCost(1e-4, 6 * size.length * size.hidden * size.vocab_size / rate)
    each = LayerCost(1e-4, block.training_flops / rate)
    task = LayoutTask(
        block, size.layers, size.vocab_size, rows, each, head, 28 / 3e12, LINKS["NVLink 4"],
        LINKS[between] if between else None, host,
    )  # fmt: skip
    return Job(ranks, memory, deadline, rows, task)


_JOBS = {
    "8 ranks of 80 GB": job(8, 80e9, 0.5, 64),
    "16 ranks of 16 GB": job(16, 16e9, 0.7, 64),
    "32 ranks of 24 GB in hosts of 8, Ethernet between": job(32, 24e9, 0.35, 64, 8, "Ethernet 100 Gb"),
}


def able(given: Job) -> list[ParallelLayout]:
    """Every plan within the three budgets."""
    found = []
    sizes = [n for n in range(1, given.ranks + 1) if given.ranks % n == 0]
    for dp in sizes:
        for pp in sizes:
            for tp in (t for t in sizes if dp * pp * t <= given.ranks):
                counts = [m for m in range(1, given.rows + 1) if given.rows % (dp * m) == 0]
                for m in counts if pp > 1 else [1]:
                    for zero in (0, 1, 2, 3) if dp > 1 else (0,):
                        plan = ParallelLayout(dp, pp, tp, m, zero)
                        if given.refused(plan) is None and within(given, plan):
                            found.append(plan)
    return found


def within(given: Job, plan: ParallelLayout) -> bool:
    """Whether a plan keeps to all three budgets."""
    fits = plan.world_size <= given.ranks and given.held(plan) <= given.memory
    return fits and given.seconds(plan) <= given.deadline


def _verify_choose(choose: Callable[[Job], Any]) -> Sequence[Finding]:
    findings = []
    for name, given in _JOBS.items():
        plan = choose(given)
        if not isinstance(plan, ParallelLayout):
            findings.append(Finding(False, f"{name}: {plan!r} is no ParallelLayout"))
            continue
        if (why := given.refused(plan)) is not None:
            findings.append(Finding(False, f"{name}: {plan}, m {given.task.microbatches(plan)}: {why}"))
            continue
        said = (f"{name}: {plan}, m {given.task.microbatches(plan)}, {plan.world_size} ranks, "
                f"{number(given.held(plan), 'B')}, {number(given.seconds(plan), 's')}")  # fmt: skip
        broken = [
            words
            for good, words in (
                (plan.world_size <= given.ranks, f"more than {given.ranks} ranks"),
                (given.held(plan) <= given.memory, f"more than {number(given.memory, 'B')}"),
                (given.seconds(plan) <= given.deadline, f"longer than {number(given.deadline, 's')}"),
            )
            if not good
        ]
        if broken:
            findings.append(Finding(False, f"{said}: {', '.join(broken)}"))
            continue
        least = min(each.world_size * given.seconds(each) for each in able(given))
        regret = plan.world_size * given.seconds(plan) / least - 1
        findings.append(Finding(regret <= 0.05, f"{said}: regret {100 * regret:.1f} %, at most 5 %"))
    return findings


choose = Exercise("08.3", "choose under three budgets", 20, _verify_choose)


# --- the worst prediction ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A layout: seconds of each part of its step, predicted and measured, mean over the ranks."""

    plan: ParallelLayout
    predicted: Mapping[str, float]
    measured: Mapping[str, float]


NORMS, KERNELS, STAGES, WIRE = "norms", "kernels", "stages", "wire"


def tables() -> list[tuple[str, list[Row], str]]:
    """Four tables, each of a machine that has one thing more than the prediction: (words, rows, what)."""
    plain = job(4, 80e9, 9.0, 32)
    slow = theory.Link(8 * LINKS["NVLink 4"].latency, LINKS["NVLink 4"].bandwidth / 8)
    task = plain.task
    machines: dict[str, Callable[[ParallelLayout], Mapping[str, float]]] = {
        WIRE: lambda plan: theory.layout_parts(replace(task, inside=slow), plan),
        KERNELS: lambda plan: theory.layout_parts(
            replace(task, block_cost=replace(task.block_cost, fixed=12 * task.block_cost.fixed)), plan
        ),
        STAGES: lambda plan: _with_bubble(theory.layout_parts(task, plan), plan, 0.9),
        NORMS: lambda plan: _with_norms(theory.layout_parts(task, plan), plan),
    }
    found: list[tuple[str, list[Row], str]] = []
    plans = theory.task_layouts(task, 4, 2)
    for cause, machine in machines.items():
        rows = []
        for plan in plans:
            seen = dict(machine(plan))
            seen["optimizer"] *= 1.6  # a large ratio of a part that hardly counts
            rows.append(Row(plan, theory.layout_parts(task, plan), seen))
        found.append((f"table {len(found) + 1}", rows, cause))
    return found


def _with_norms(parts: Mapping[str, float], plan: ParallelLayout) -> dict[str, float]:
    return {**parts, "computing": parts["computing"] * (1 + 0.35 * (plan.tp - 1))}


def _with_bubble(parts: Mapping[str, float], plan: ParallelLayout, more: float) -> dict[str, float]:
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

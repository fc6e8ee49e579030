"""Two exercises of notebook 08 that are arithmetic: a layout under three budgets, the worst prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hpnb import theory
from hpnb.lesson.exercises.checker import Finding, WrongAnswer, exercise
from hpnb.lesson.exercises.findings import divisors
from hpnb.lesson.programs.layout_tasks import gpt2_xl_task
from hpnb.lesson.tables import number
from hpnb.mesh import ParallelLayout
from hpnb.theory import LINKS, LayoutTask

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


_SAMPLES = 64
_NVLINK, _ETHERNET = gpt2_xl_task(_SAMPLES), gpt2_xl_task(_SAMPLES, "Ethernet 100 Gb")
TASKS = {
    "8 ranks of 80 GB": BudgetedTask(8, 80e9, 0.5, _SAMPLES, _NVLINK),
    "16 ranks of 16 GB": BudgetedTask(16, 16e9, 0.7, _SAMPLES, _NVLINK),
    "32 ranks of 24 GB on nodes of 8, Ethernet between": BudgetedTask(32, 24e9, 0.35, _SAMPLES, _ETHERNET),
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

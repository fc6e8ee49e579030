"""Which layouts there are for a task, which of them fit, and how fast they are: one pass, no GPU needed."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from math import gcd
from typing import Any

from tqdm import tqdm

from hpnb.hybrid.plan_command.layout_code import layout_code
from hpnb.mesh import ParallelLayout, Recomputation
from hpnb.theory.plan_memory import USABLE, plan_memory
from hpnb.theory.plan_step import mfu, plan_parts
from hpnb.theory.plan_task import PlanTask, refusal
from hpnb.theory.planner import divide_ranks

CHUNKS = (2, 3, 4, 5, 6, 8)
LEAST_TOKENS = 2048  # of a sample on a rank of cp, in layouts that the search tries
MOST_GPUS = 1 << 20  # where the search for a number of GPUs that would do ends
NO_MEMORY = "out of memory"
# measured / predicted of the better predicted of two zero-bubble runs (`--check`): by less than this the
# search does not prefer such a schedule.
ZERO_BUBBLE_ERROR = 1.26
RECOMPUTATIONS: tuple[Recomputation, ...] = (False, "full")


@dataclass(frozen=True)
class Plan:
    """A layout with its predictions: {part: seconds} of a step, and {category: bytes} of the fullest rank."""

    layout: ParallelLayout
    parts: dict[str, float]
    memory: dict[str, float]
    tokens_per_second: float
    mfu: float

    @property
    def step(self) -> float:
        """Seconds."""
        return sum(self.parts.values())

    @property
    def zero_bubble(self) -> bool:
        return self.layout.pp > 1 and self.layout.schedule.startswith("zb")

    @property
    def ranked_by(self) -> float:
        """Seconds by which plans are compared."""
        return _digits(self.step * (ZERO_BUBBLE_ERROR if self.zero_bubble else 1.0))

    @property
    def bytes(self) -> float:
        return sum(self.memory.values())

    @property
    def code(self) -> str:
        return layout_code(self.layout)


@dataclass
class Search:
    """What a search saw: plans that fit, the fastest first, and how many were refused, by reason."""

    plans: list[Plan] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    seen: int = 0
    smallest: tuple[float, ParallelLayout] | None = None

    def best(self, count: int, variants: bool = False) -> list[Plan]:
        """The fastest; unless `variants`, of the same sizes and ZeRO stage only the fastest, and of layouts
        with the same times (ZeRO 1 and 2) only the first, which takes the least memory."""
        chosen: dict[object, Plan] = {}
        seen: set[tuple[float, ...]] = set()
        for plan in self.plans:
            one, times = plan.layout, tuple(_digits(seconds) for seconds in plan.parts.values())
            if variants:
                chosen[plan.code] = plan
            elif times not in seen:
                chosen.setdefault((one.dp, one.pp, one.cp, one.tp, one.ep, one.zero_stage), plan)
            seen.add(times)
            if len(chosen) == count:
                break
        return list(chosen.values())


def usable_bytes(task: PlanTask) -> float:
    return USABLE * task.cluster.memory


def make_plan(task: PlanTask, layout: ParallelLayout, memory: dict[str, float] | None = None) -> Plan:
    """Predict one layout; its memory, if that is not known."""
    parts = plan_parts(task, layout)
    step = sum(parts.values())
    return Plan(layout, parts, memory or plan_memory(task, layout), task.tokens / step, mfu(task, step))


def candidates(task: PlanTask) -> Iterator[ParallelLayout]:
    """Every dp x pp x cp x tp with every ep, microbatch, ZeRO stage and recomputation.

    Schedules are 1f1b, zb-h1, zb-v, interleaved in `CHUNKS`, and dualpipe-v where there is ep. A batch that
    dp does not divide gives one candidate a schedule, so that its refusal is counted.
    """
    for sizes in candidate_sizes(task):
        samples, rest = divmod(task.batch, sizes.dp)
        microbatches = [1] if rest else divisors(samples)
        schedules = [("1f1b", 1)]
        if sizes.pp > 1:
            schedules += [("zb-h1", 1), ("zb-v", 1), *(("interleaved", v) for v in CHUNKS)]
            schedules += [("dualpipe-v", 1)] * (sizes.ep > 1)  # which overlaps messages of experts
        for b in microbatches:
            for schedule, chunks in schedules:
                shape = replace(sizes, microbatch_size=b, schedule=schedule, chunks=chunks)
                if refusal(task, shape) is not None:
                    yield shape
                    continue
                stages = range(1 if sizes.dp * sizes.cp == 1 else 4)
                shards_tokens = sizes.tp > 1 and task.model.allows_sequence_parallel
                for zero_stage, recomputation in product(stages, RECOMPUTATIONS):
                    for sequence_parallel in (False, True)[: 1 + shards_tokens]:
                        yield replace(
                            shape, zero_stage=zero_stage, recomputation=recomputation,
                            sequence_parallel=sequence_parallel,
                        )  # fmt: skip


def candidate_sizes(task: PlanTask) -> Iterator[ParallelLayout]:
    """Every dp x pp x cp x tp with every ep. Of cp only sizes that leave a rank `LEAST_TOKENS`."""
    for outer in divide_ranks(task.cluster.gpus):
        for cp in divisors(outer.dp):
            if cp > 1 and task.sequence < LEAST_TOKENS * cp:
                continue
            for ep in divisors(gcd(outer.dp, task.model.experts or 1)):
                sizes = replace(outer, dp=outer.dp // cp, cp=cp, ep=ep)
                yield sizes
                if cp > 1 and task.model.heads // sizes.tp >= cp:
                    yield replace(sizes, context_parallel="ulysses")


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def search(task: PlanTask, progress: bool = True) -> Search:
    """Predict all candidates. A bar appears where it takes longer than two seconds, on a terminal alone.

    Of layouts that are as fast, the first has the fewest microbatches, since what one costs beyond its work
    is not all predicted, and then the least memory. Zero-bubble schedules take longer than predicted, so
    their steps count as `ZERO_BUBBLE_ERROR` times as long.
    """
    result, limit = Search(), usable_bytes(task)
    silent = not (progress and sys.stderr.isatty())
    for layout in tqdm(candidates(task), "layouts", unit="", delay=2, leave=False, disable=silent):
        result.seen += 1
        if (why := refusal(task, layout)) is not None:
            result.refused[why[0]] += 1
            continue
        memory = plan_memory(task, layout)
        total = sum(memory.values())
        if result.smallest is None or total < result.smallest[0]:
            result.smallest = (total, layout)
        if total > limit:
            result.refused[NO_MEMORY] += 1
            continue
        result.plans.append(make_plan(task, layout, memory))
    result.plans.sort(key=lambda plan: (plan.ranked_by, task.microbatches(plan.layout), plan.bytes))
    return result


def _digits(seconds: float) -> float:
    """To six digits: sums of the same parts may differ in the last."""
    return float(f"{seconds:.6g}")


# --- what would work ---------------------------------------------------------------------------------


def least_memory(task: PlanTask) -> tuple[float, ParallelLayout] | None:
    """(bytes, layout) of the smallest with ZeRO 3, recomputation, and one microbatch or one sample each."""
    sizes = []
    for one, size in product(candidate_sizes(task), (1, None)):
        layout = replace(
            one,
            microbatch_size=size or max(1, task.batch // one.dp),
            zero_stage=0 if one.dp * one.cp == 1 else 3,
            recomputation="full",
            sequence_parallel=one.tp > 1 and task.model.allows_sequence_parallel,
        )
        if refusal(task, layout) is None:
            sizes.append((sum(plan_memory(task, layout).values()), layout))
    return min(sizes, key=lambda pair: pair[0], default=None)


def gpus_that_fit(task: PlanTask) -> tuple[int, int] | None:
    """(GPUs, batch) of the next cluster, twice as large each time, on which something fits."""
    gpus, node = task.cluster.gpus, task.cluster.host
    while (gpus := 2 * gpus) <= MOST_GPUS:
        host = min(gpus, max(node, 8)) if task.cluster.gpus <= node else node
        batch = -(-task.batch // gpus) * gpus if task.batch < gpus else task.batch
        larger = replace(task, batch=batch, cluster=replace(task.cluster, gpus=gpus, host=host))
        least = least_memory(larger)
        if least is not None and least[0] <= usable_bytes(task):
            return gpus, batch
    return None


def why_nothing(task: PlanTask, result: Search) -> str:
    """One sentence with the numbers, and the nearest that would work."""
    model, gpus, limit = task.model, task.cluster.gpus, usable_bytes(task) / 1e9
    if result.smallest is None:
        near = [n for n in (task.batch // gpus * gpus, (task.batch // gpus + 1) * gpus) if n]
        return (
            f"no layout of {gpus} GPUs can run a batch of {task.batch} of {model.name} "
            f"({model.blocks} blocks, {model.kv_heads} key-value heads); "
            f"a batch of {' or '.join(map(str, near))} can be split"
        )
    total, layout = result.smallest
    words = (
        f"nothing fits: the smallest of {result.seen:,} layouts of {model.name} on "
        f"{gpus} GPU{'s' * (gpus > 1)}, "
        f"{layout_code(layout)}, takes {total / 1e9:.1f} GB of the {limit:.1f} GB that a GPU has to use"
    )
    if (more := gpus_that_fit(task)) is None:
        return f"{words}; a shorter sequence than {task.sequence} tokens or a larger GPU would help"
    batch = "" if more[1] == task.batch else f" with a batch of {more[1]}"
    return f"{words}; {more[0]} GPUs would do{batch}"


def nearest_that_fits(task: PlanTask, layout: ParallelLayout) -> str:
    """What to change of a layout that does not fit, the smallest change first."""
    limit = usable_bytes(task)
    changes: list[tuple[str, dict[str, Any]]] = [
        (f"{n} sample{'s' * (n > 1)} a microbatch", {"microbatch_size": n, "num_microbatches": None})
        for n in range(task.microbatch_size(layout) - 1, 0, -1)
    ]
    if layout.dp * layout.cp > 1:
        changes += [(f"ZeRO {n}", {"zero_stage": n}) for n in range(layout.zero_stage + 1, 4)]
    if not layout.recomputation:
        changes += [("recomputation", {"recomputation": "full"})]
    least: dict[str, Any] = {"microbatch_size": 1, "num_microbatches": None, "recomputation": "full"}
    changes += [("one sample a microbatch with recomputation", least)]
    if layout.dp * layout.cp > 1:
        changes += [("ZeRO 3 with recomputation and one sample a microbatch", {**least, "zero_stage": 3})]
    for words, change in changes:
        other = replace(layout, **change)
        if refusal(task, other) is None and sum(plan_memory(task, other).values()) <= limit:
            return f"{words} would fit ({layout_code(other)})"
    if (least_layout := least_memory(task)) is not None and least_layout[0] <= limit:
        return f"{layout_code(least_layout[1])} would fit"
    more = gpus_that_fit(task)
    return f"{more[0]} GPUs would do" if more else "no number of GPUs would do; use shorter sequences"

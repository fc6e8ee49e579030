"""What `hpnb plan` prints: a table of the best layouts, why others were refused, and JSON of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpnb.hybrid.plan_command.layout_code import layout_code
from hpnb.hybrid.plan_command.search import ZERO_BUBBLE_ERROR, Plan, Search, usable_bytes
from hpnb.mesh import ParallelLayout
from hpnb.record.memory_profile import MemoryProfile
from hpnb.theory.datasheets import GPU
from hpnb.theory.plan_bytes import plan_bytes
from hpnb.theory.plan_memory import MEMORY_PARTS
from hpnb.theory.plan_step import PLAN_PARTS, last_rank
from hpnb.theory.plan_task import PlanTask

_MEMORY = {
    "parameters": "weights",
    "gradients": "grads",
    "optimizer": "optim",
    "activations": "activ",
    "temporary": "temp",
}
_LAYOUT_FIELDS = ("dp", "pp", "cp", "context_parallel", "tp", "ep", "zero_stage", "schedule", "chunks",
                  "recomputation", "sequence_parallel")  # fmt: skip
_TIMES = {"memory": "memory traffic"}  # what parts of a step are called here, if not by their names


def format_report(task: PlanTask, gpu: GPU, result: Search, plans: Sequence[Plan]) -> str:
    cluster, model = task.cluster, task.model
    nodes = -(-cluster.gpus // cluster.host)
    active = f" ({_count(model.active_parameters)} of a token)" if model.experts else ""
    return "\n".join(
        [
            f"{model.name}: {_count(model.parameters)} parameters{active}, batch {task.batch} x "
            f"{task.sequence} tokens, {gpu.dtype}; "
            f"{cluster.gpus} x {gpu.name} on {nodes} node{'s' if nodes > 1 else ''}, "
            f"{usable_bytes(task) / 1e9:.1f} of {cluster.memory / 1e9:.0f} GB usable",
            "",
            *_time_table(task, plans),
            "",
            *_memory_table(plans),
            "",
            refused_sentence(result) if result.seen > 1 else bytes_sentence(task, plans[0].layout),
            *assumptions(task, gpu, plans),
        ]
    )


def _count(parameters: float) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M")):
        if parameters >= size:
            return f"{parameters / size:.3f} {unit}"
    return f"{parameters:,.0f}"


def _time_table(task: PlanTask, plans: Sequence[Plan]) -> list[str]:
    shown = [part for part in PLAN_PARTS if any(plan.parts[part] >= 5e-5 for plan in plans)]
    unit = "tokens/s" if task.model.causal else "images/s"
    parts_head = [_TIMES.get(part, part) for part in shown]
    head = ["", "layout", "m", "step ms", *parts_head, unit, "MFU", "behind the best"]
    rows = [head]
    for i, plan in enumerate(plans, 1):
        speed = plan.tokens_per_second / (1 if task.model.causal else task.sequence)
        parts = [f"{1e3 * plan.parts[part]:,.1f}" for part in shown]
        rows.append(
            [str(i), plan.code, str(task.microbatches(plan.layout)), f"{1e3 * plan.step:,.1f}", *parts,
             f"{speed:,.0f}", f"{100 * plan.mfu:.1f} %", lag(plans[0], plan)]
        )  # fmt: skip
    return _align(rows, left=(1, len(head) - 1))


def lag(best: Plan, plan: Plan) -> str:
    """What a plan takes longer than the best, and in which part most of it."""
    behind = plan.step - best.step
    if behind < 0 and plan.zero_bubble:
        return f"{100 * behind / best.step:+.1f} %, within the error of zero-bubble schedules"
    if behind <= 0:
        return ""
    part = max(plan.parts, key=lambda name: plan.parts[name] - best.parts[name])
    more = plan.parts[part] - best.parts[part]
    return f"+{100 * behind / best.step:.1f} %: {_TIMES.get(part, part)} +{1e3 * more:,.1f} ms"


def _memory_table(plans: Sequence[Plan]) -> list[str]:
    size, unit = _unit_of(max(plan.bytes for plan in plans))
    rows = [["", "layout", f"{unit} of the fullest rank", *_MEMORY.values()]]
    for i, plan in enumerate(plans, 1):
        parts = [f"{plan.memory[name] / size:.1f}" for name in _MEMORY]
        rows.append([str(i), plan.code, f"{plan.bytes / size:.1f}", *parts])
    return _align(rows, left=(1,))


def _unit_of(largest: float) -> tuple[float, str]:
    """In what a table prints its bytes."""
    return (1e9, "GB") if largest >= 1e9 else (1e6, "MB")


def _align(rows: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def refused_sentence(result: Search) -> str:
    """How many layouts fit, and how many were refused for which reason."""
    reasons = ", ".join(f"{count:,} ({reason})" for reason, count in result.refused.most_common())
    refused = f"; refused were {reasons}" if reasons else ""
    return f"Of {result.seen:,} layouts {len(result.plans):,} fit{refused}."


def assumptions(task: PlanTask, gpu: GPU, plans: Sequence[Plan]) -> list[str]:
    """What of the printed numbers was not measured, or was measured to be wrong."""
    lines = []
    if any(plan.zero_bubble for plan in plans):
        lines.append(
            f"Zero-bubble schedules took {ZERO_BUBBLE_ERROR:g} times the predicted step or more where they "
            "were measured (--check), so they stand behind what they beat by less."
        )
    if gpu.name == "measured" and task.cluster.gpus > task.cluster.host:
        lines.append(
            f"The network between nodes was not measured: {network_words(gpu)} are assumed for each of "
            f"{task.cluster.cards} cards of a node."
        )
    return lines


def network_words(gpu: GPU) -> str:
    bandwidth = f"{gpu.network_share:.0%} of {gpu.network / 1e9:g} GB/s"
    return f"{bandwidth} and {gpu.network_latency * 1e6:g} us a message"


def bytes_sentence(task: PlanTask, layout: ParallelLayout) -> str:
    """What a rank sends, by axis."""
    sent = [f"{axis} {nbytes / 1e9:,.2f} GB" for axis, nbytes in plan_bytes(task, layout).items() if nbytes]
    return f"A rank sends in a step: {', '.join(sent) or 'nothing'}."


def as_json(task: PlanTask, gpu: GPU, result: Search, plans: Sequence[Plan]) -> dict[str, Any]:
    return {
        "model": task.model.name,
        "parameters": task.model.parameters,
        "gpu": gpu.name,
        "gpus": task.cluster.gpus,
        "batch": task.batch,
        "sequence": task.sequence,
        "imbalance": task.imbalance,
        "mtp_modules": task.model.mtp_modules,
        "usable_bytes": usable_bytes(task),
        "seen": result.seen,
        "refused": dict(result.refused),
        "plans": [plan_json(task, plan) for plan in plans],
    }


def plan_json(task: PlanTask, plan: Plan) -> dict[str, Any]:
    layout = plan.layout
    return {
        "layout": plan.code,
        **{name: getattr(layout, name) for name in _LAYOUT_FIELDS},
        "microbatches": task.microbatches(layout),
        "microbatch_size": task.microbatch_size(layout),
        "seconds": plan.step,
        "parts": plan.parts,
        "bytes": plan.bytes,
        "memory": plan.memory,
        "bytes_sent": plan_bytes(task, layout),
        "tokens_per_second": plan.tokens_per_second,
        "mfu": plan.mfu,
    }


# --- one rank ----------------------------------------------------------------------------------------


def format_rank(
    task: PlanTask, layout: ParallelLayout, rank: int, profile: MemoryProfile, predicted: Mapping[str, float]
) -> str:
    """The memory of one rank, counted on its real code and predicted, by category."""
    peak = profile.at_peak
    size, unit = _unit_of(max(peak.total, sum(predicted.values())))
    stage = layout.coordinates(rank)["pp"]
    lines = [
        f"{task.model.name} as {layout_code(layout)}, rank {rank} of {layout.world_size}: pipeline rank "
        f"{stage} of {layout.pp}, with a batch of {task.batch} x {task.sequence} tokens",
        "", f"{f'{unit} at the peak':16}{'counted':>10}{'predicted':>12}",
    ]  # fmt: skip
    for name in MEMORY_PARTS:
        lines.append(f"{name:16}{getattr(peak, name) / size:10.3f}{predicted[name] / size:12.3f}")
    lines += [
        f"{'all':16}{peak.total / size:10.3f}{sum(predicted.values()) / size:12.3f}", "",
        "Counted: every tensor of the second step, by the rank's own code on tensors without values. Buffers",
        "of communication are temporary. What a GPU's allocator, kernels and NCCL keep is not counted.",
        "Predicted: the formulas by which `hpnb plan` chooses, at their own fullest moment, for blocks that",
        "are not compiled.", *_why_counts_differ(task, layout, stage),
    ]  # fmt: skip
    return "\n".join(lines)


def _why_counts_differ(task: PlanTask, layout: ParallelLayout, stage: int) -> list[str]:
    """What a rank on a CPU keeps, and the formulas have elsewhere or not at all."""
    lines = []
    if layout.tp > 1 and stage == last_rank(layout) and not task.loss_chunk:
        lines += [
            "The loss of a sharded vocabulary keeps its softmax in float32. The formulas have values of "
            f"{task.value_bytes} bytes",
            "in its place, and the rest as temporary.",
        ]
    if layout.pp > 1:
        lines += [
            "On a CPU the messages of a pipeline stay until the step ends, those of all microbatches. The",
            "formulas are for GPUs, where they are freed once they are sent.",
        ]
    if layout.schedule.startswith("zb"):
        lines += [
            "Under a zero-bubble schedule the formulas have as many microbatches in flight on every rank as",
            "there are ranks in the pipeline. A late one has fewer at its peak.",
        ]
    return lines


def as_json_of_rank(
    task: PlanTask, layout: ParallelLayout, rank: int, profile: MemoryProfile, predicted: Mapping[str, float]
) -> dict[str, Any]:
    """The same as data, in bytes."""
    counted = {name: getattr(profile.at_peak, name) for name in MEMORY_PARTS}
    return {
        "model": task.model.name, "layout": layout_code(layout), "rank": rank, "ranks": layout.world_size,
        "batch": task.batch, "sequence": task.sequence, "counted": counted, "predicted": dict(predicted),
    }  # fmt: skip

"""Predictions beside what was measured: by others, on up to 6,144 GPUs, and by this library's benchmarks.

`published.py` has what others measured, and which rows are fitted. The second table is no test of all
constants: several were fitted to its rows, as `hpnb.theory.plan_step` lists. GPT-2 XL on one H200, and
pipelines under 1f1b and zb-v on two, are among them.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpnb.hybrid.plan_command.layout_code import layout_code
from hpnb.hybrid.plan_command.published import GROUPS, ComparedRow, summarize
from hpnb.hybrid.plan_command.read_model import CLASSES, shape_of_gpt2, shape_of_vit
from hpnb.hybrid.plan_command.run_lines import LOSS_CHUNK
from hpnb.mesh import ParallelLayout
from hpnb.models import GPT2_SIZES, SIZES
from hpnb.theory.datasheets import find_gpu
from hpnb.theory.plan_memory import plan_memory
from hpnb.theory.plan_step import plan_parts
from hpnb.theory.plan_task import PlanTask
from hpnb.theory.published_runs import MEGATRON, MEGATRON_CORE, PublishedRun

RESULTS = Path(__file__).parents[2] / "bench" / "results"
_XL = replace(GPT2_SIZES["1.5b"], heads=20)  # as the benchmarks have it
_MODELS = {
    "gpt2-xl": shape_of_gpt2("gpt2-xl", _XL),
    "vit-l16": shape_of_vit("vit-l16", SIZES["l16"], CLASSES),
}
_CHUNKS = {"hpnb interleaved": 2, "hpnb interleaved in 4 chunks": 4}


@dataclass(frozen=True)
class Comparison:
    """One run: its step in seconds, and bytes of the fullest rank, predicted and measured."""

    name: str
    layout: str
    predicted: float
    measured: float
    predicted_bytes: float
    measured_bytes: float | None

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured

    @property
    def memory_ratio(self) -> float | None:
        return self.predicted_bytes / self.measured_bytes if self.measured_bytes else None


def published(runs: Iterable[PublishedRun] = (*MEGATRON, *MEGATRON_CORE)) -> list[ComparedRow]:
    """Narayanan et al. 2021, table 1, and Megatron-Core's weak scaling on H100s."""
    groups = {group.name: {row.name: row for row in group.compare()} for group in GROUPS[:3]}
    names = ((run.name, "Megatron-LM 2021" if run in MEGATRON else "Megatron-Core") for run in runs)
    return [groups[group][name] for name, group in names]


def benchmarks(folder: Path = RESULTS) -> list[Comparison]:
    """This library's committed results: of each model, number of GPUs and layout the newest."""
    newest: dict[tuple[str, str, str], Comparison] = {}
    for path in sorted(folder.glob("2*.json")):
        run = json.loads(path.read_text(encoding="utf-8"))
        if "microbatches" in run["title"]:  # so many and so small ones that launches limit the step
            continue
        for name, result in run["layouts"].items():
            if run["what"] in _MODELS:
                gpu = run["device"].split()[1]  # "NVIDIA H100 80GB HBM3"
                for comparison in _compare_result(run["what"], gpu, name, result):
                    newest[run["what"], comparison.name, comparison.layout] = comparison
    return list(newest.values())


def _compare_result(what: str, gpu: str, name: str, result: dict[str, Any]) -> Iterator[Comparison]:
    model, gpus = _MODELS[what], result["ranks"]
    batch = result["units"] // (model.positions if model.causal else 1)
    cluster = find_gpu(gpu).cluster(gpus)
    task = PlanTask(model, cluster, batch, model.positions, LOSS_CHUNK if model.causal else 0)
    sizes: dict[str, Any] = {axis: int(n) for axis, n in re.findall(r"(dp|pp|tp)(\d+)", name)}
    if match := re.fullmatch(r"zero([123])", name):
        sizes = {"dp": gpus, "zero_stage": int(match[1])}
    for entry in result["entries"]:
        times = [t for wave in result["waves"] for t in wave.get(entry["name"]) or []]
        if not entry["ours"] or not times:
            continue
        layout = ParallelLayout(**sizes, sequence_parallel="sequence parallel" in entry["name"])
        layout = replace(layout, num_microbatches=4 * layout.pp if layout.pp > 1 else 1)
        if chunks := _CHUNKS.get(entry["name"]):
            layout = replace(layout, schedule="interleaved", chunks=chunks)
        if entry["name"] == "hpnb zb-v":
            layout = replace(layout, schedule="zb-v")
        yield Comparison(
            f"{what}, {gpus} x {gpu}", f"{name}: {entry['name']}", sum(plan_parts(task, layout).values()),
            statistics.median(times), sum(plan_memory(task, layout).values()), entry["peak"],
        )  # fmt: skip


def regrets(rows: Iterable[Comparison]) -> dict[str, float]:
    """{race: what the layout that is predicted to be fastest takes longer than the fastest}, as a share."""
    races: dict[str, list[Comparison]] = {}
    for row in rows:
        races.setdefault(row.name, []).append(row)
    return {
        name: min(race, key=lambda row: row.predicted).measured / min(row.measured for row in race) - 1
        for name, race in races.items()
        if len(race) > 1
    }


def format_check() -> str:
    """Both tables, and where predictions are off."""
    lines = [
        "predicted / measured step; of each program that others wrote, the row with a star is fitted",
        "",
    ]
    others = [(group, group.compare()) for group in GROUPS]
    rows = benchmarks()
    wide = max(len(f"{row.name}  {row.layout}") for row in rows)
    for group, compared in others:
        for known in compared:
            name = f"{known.group} {known.name}  {layout_code(known.layout)}".ljust(wide)
            ratio = f"{known.predicted:7.3f} / {known.published:7.3f} s = {known.ratio:.2f}"
            lines.append(f"{name}  {ratio}{' *' if known.fitted else ''}")
        lines += [f"    {summarize(compared)}; {group.source}", ""]
    for row in rows:
        memory = ""
        if row.measured_bytes:
            gigabytes = f"{row.predicted_bytes / 1e9:5.1f} / {row.measured_bytes / 1e9:5.1f} GB"
            memory = f"   {gigabytes} = {row.memory_ratio:.2f}"
        name = f"{row.name}  {row.layout}".ljust(wide)
        lines.append(f"{name}  {row.predicted:7.3f} / {row.measured:7.3f} s = {row.ratio:.2f}{memory}")
    costs = ", ".join(f"{name} {regret:.1%}" for name, regret in regrets(rows).items())
    lines += ["", f"The layout predicted to be fastest takes longer than the fastest by: {costs}."]
    return "\n".join([*lines, "", *_WHY])


_WHY = (
    "Larger matmuls reach more of the peak than small ones, and the model has one share for all: of each",
    "program the small models are under-predicted, and the large ones over-predicted. Megatron-Core and",
    "Llama 3 do not name microbatches and chunks; the fastest that fit are assumed.",
    "Published runs name no memory. States are those of Rajbhandari et al. 2020, table 1, and activations",
    "those of Korthikanti et al. 2022, table 2, exactly; both are formulas.",
    "Zero-bubble schedules are under-predicted most. A block whose backward is split is not compiled as one,",
    "and the two zb-v runs took 3.0 and 3.1 ms a block and microbatch, although a block of GPT-2 XL has 1.6",
    "times the work: the CPU's launches limit them. Less is compiled between matmuls today than in these",
    "runs, so nothing is fitted to them, and `hpnb plan` prefers no such schedule by less than this error.",
    "Small pipelines are under-predicted, too: of a ViT-L/16 on 2 H200s, in microbatches of 32 images, the",
    "prediction was 0.72 to 0.75 of the measured step. Such a step is limited by what the CPU launches and",
    "by stages that wait for each other, of which the model knows 1 ms an action.",
    "Memory of pipelines is under-predicted by up to 9 %: the benchmarks give the first stage one block",
    "more than the uniform split, and the last stage less, and a GPT-2's ranks still kept the weights of",
    "other stages' blocks, which they no longer do.",
)

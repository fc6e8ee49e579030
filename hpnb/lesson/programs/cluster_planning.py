"""What notebook 09 plans with: a planner fitted to one published run, clusters by name, benchmarked runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

from hpnb.hybrid.plan_command.read_model import shape_of_gpt2
from hpnb.hybrid.plan_command.run_lines import LOSS_CHUNK
from hpnb.mesh import ParallelLayout
from hpnb.models import GPT2_SIZES
from hpnb.theory import Link
from hpnb.theory.cluster import Cluster, GPTRun, calibrated, cluster_memory, cluster_parts, tflops
from hpnb.theory.datasheets import find_gpu
from hpnb.theory.plan_step import plan_parts
from hpnb.theory.plan_task import PlanTask
from hpnb.theory.planner import cluster_layouts, fastest
from hpnb.theory.published_runs import DGX_A100, DGX_H100, MEGATRON

HDR, ETHERNET = DGX_A100.between, Link(30e-6, 12.5e9, "Ethernet 100 Gb")
FAST, SLOW = "HDR, one NIC per GPU", "Ethernet 100 Gb, one NIC per node"
NETWORKS = {FAST: (HDR, 1.0), "Ethernet 100 Gb, one NIC per GPU": (ETHERNET, 1.0), SLOW: (ETHERNET, 0.0)}
"""{name: (NIC, NICs for each GPU; 0 is one for a node)}"""

MODELS = {known.name: known.run for known in MEGATRON}
FIELDS = {"matmuls": "share", "memory": "memory_bandwidth", "inside": "inside", "between": "between"}
"""{what can be half as fast: its field of a Cluster; of a link its bandwidth}"""


@lru_cache(maxsize=1)
def fitted_cluster() -> Cluster:
    """DGX A100s whose matmuls reach the share of the peak that explains the smallest published run."""
    known = MEGATRON[0]
    return calibrated(replace(DGX_A100, gpus=known.gpus), known.run, known.plan, known.tflops)


def cluster(gpus: int, network: str = FAST, node: int = 8, memory: float = 80e9) -> Cluster:
    """The fitted cluster with so many GPUs in nodes of `node`, and a network of NETWORKS.

    Raises:
        ValueError: no such network.
    """
    if network not in NETWORKS:
        raise ValueError(f"no network {network!r}; there are {', '.join(NETWORKS)}")
    nic, per_gpu = NETWORKS[network]
    cards = round(per_gpu * node) or 1
    return replace(fitted_cluster(), gpus=gpus, host=node, between=nic, cards=cards, memory=memory)


def halve_field(nodes: Cluster, field: str) -> Cluster:
    """A cluster with half of one number: a rate, or the bandwidth of a link."""
    value: Any = getattr(nodes, field)
    half: Any = replace(value, bandwidth=value.bandwidth / 2) if isinstance(value, Link) else value / 2
    return replace(nodes, **{field: half})


def double_latency(nodes: Cluster, field: str) -> Cluster:
    """A cluster with twice the latency of one link."""
    link: Link = getattr(nodes, field)
    return replace(nodes, **{field: replace(link, latency=2 * link.latency)})  # type: ignore[arg-type]


def double_latencies(
    fitted: Cluster, planned: Cluster, run: GPTRun, plan: ParallelLayout
) -> dict[str, float]:
    """What the latencies matter, each doubled alone, in %: the worst "error" of `fitted` on the ten published
    runs of MEGATRON, and how much "longer" a step of `plan` takes on `planned`, at most."""
    errors, longer = [], []
    for what in ("inside", "between"):
        late, slow = (double_latency(nodes, what) for nodes in (fitted, planned))
        for known in MEGATRON:
            reached = tflops(known.run, replace(late, gpus=known.gpus), known.plan)
            errors.append(100 * abs(known.tflops / reached - 1))
        steps = [sum(cluster_parts(run, nodes, plan).values()) for nodes in (planned, slow)]
        longer.append(100 * (steps[1] / steps[0] - 1))
    return {"error": max(errors), "longer": max(longer)}


def best_layouts(
    models: Sequence[str], sizes: Sequence[int] = (32, 128, 512, 2048)
) -> dict[str, dict[str, str]]:
    """{"32 GPUs": {model: "dp x pp x tp: MFU", or "too large"}}, with the batch of the published run.

    MFU is the share of the peak that a step's model FLOPs reach, recomputed ones left out.
    """
    table: dict[str, dict[str, str]] = {}
    for gpus, model in product(sizes, models):
        nodes, run = cluster(gpus), MODELS[model]
        layouts = cluster_layouts(run, nodes)
        plan = fastest(run, nodes, layouts)
        seconds = sum(cluster_parts(run, nodes, plan).values())
        used = replace(run, recompute=False).flops / seconds / gpus / nodes.peak
        fits = cluster_memory(run, plan) <= nodes.memory
        words = f"{plan.dp} x {plan.pp} x {plan.tp}: {100 * used:.0f} %" if fits else "too large"
        table.setdefault(f"{gpus:,} GPUs", {})[model] = words
    return table


class BenchmarkedRun(NamedTuple):
    """A layout of GPT-2 XL on H200s, in TFLOP/s a GPU: the page's planner, `hpnb plan`, and measured."""

    plan: ParallelLayout
    forty_lines: float
    plan_command: float
    measured: float


def benchmarked_runs() -> dict[str, BenchmarkedRun]:
    """The layouts of two H200s; the page's planner is fitted to one GPU. Measured is hpnb's fastest program.

    Raises:
        ValueError: no results of one GPU are kept.
    """
    from hpnb.bench import result_files  # imports transformers, which planning needs not

    newest = result_files.newest(result_files.read())
    results = next((r for r in newest if (r.what, r.ranks) == ("gpt2-xl", 2)), None)
    if results is None or "one" not in results.layouts:
        raise ValueError("the package keeps no results of GPT-2 XL on one and two GPUs to be predicted")
    two_gpus = GPTRun(1600, 48, 20, 32, 1024, 50257, recompute=False, fused_attention=True)
    one_gpu = replace(two_gpus, batch=16)
    chunks = ParallelLayout(pp=2, microbatch_size=4, chunks=4, schedule="interleaved")
    layouts = {
        "dp2": ParallelLayout(2, microbatch_size=16),
        "zero1": ParallelLayout(2, microbatch_size=16, zero_stage=1),
        "tp2": ParallelLayout(tp=2, microbatch_size=32),
        "pp2": chunks,
    }
    measured = {
        name: programs.tflops(best.name)
        for name, programs in results.layouts.items()
        if (best := programs.fastest(True))
    }
    h200 = replace(DGX_H100, memory=141e9, memory_bandwidth=4.8e12, gpus=1)
    base = calibrated(h200, one_gpu, ParallelLayout(microbatch_size=16), measured["one"])
    shape = shape_of_gpt2("gpt2-xl", replace(GPT2_SIZES["1.5b"], heads=20))
    task = PlanTask(shape, find_gpu("h200").cluster(2), 32, 1024, LOSS_CHUNK)
    return {
        name: BenchmarkedRun(
            layout,
            tflops(two_gpus, replace(base, gpus=2), layout),
            two_gpus.flops / sum(plan_parts(task, replace(layout, sequence_parallel=layout.tp > 1)).values())
            / 2e12,
            measured[name],
        )
        for name, layout in layouts.items()
        if name in measured
    }  # fmt: skip

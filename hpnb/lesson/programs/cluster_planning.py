"""What notebook 09 plans with: clusters by name, a fitted planner, benchmarked runs, numbers halved.

fitted_cluster()         DGX A100s whose matmul rate explains one published run cluster(512)
so many of these GPUs, with another network if one is named benchmarked_runs()       {layout: predicted
and measured} of GPT-2 XL, as `python -m hpnb.bench` measured it halve_each_number(...)   how much slower
each step gets when one number of the cluster is halved
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from hpnb.bench import result_files
from hpnb.mesh import ParallelLayout
from hpnb.theory import Link
from hpnb.theory.cluster import Cluster, GPTRun, calibrated, cluster_parts, tflops
from hpnb.theory.published_runs import DGX_A100, DGX_H100, MEGATRON, PublishedRun

HDR, ETHERNET = DGX_A100.between, Link(30e-6, 12.5e9, "Ethernet 100 Gb")
NETWORKS = {
    "HDR, a card a GPU": (HDR, 1.0),
    "Ethernet 100 Gb, a card a GPU": (ETHERNET, 1.0),
    "Ethernet 100 Gb, a card a host": (ETHERNET, 0.0),
}
"""{name: (card, cards for each GPU; 0 is one for a host)}"""

MODELS = {published.name: published.run for published in MEGATRON}
# H200: datasheet of the GPU; hosts like DGX H100's
HGX_H200 = replace(DGX_H100, memory=141e9, memory_bandwidth=4.8e12)


@lru_cache(maxsize=16)
def fitted_cluster(row: int = 0, mistaken: bool = False) -> Cluster:
    """DGX A100s whose matmuls reach the share of the peak that explains one published run.

    Args:
        row: of the published table.
        mistaken: the cluster is `without_hosts`, and fitted as such.
    """
    published = MEGATRON[row]
    nodes = replace(DGX_A100, gpus=published.gpus)
    if mistaken:
        nodes = without_hosts(nodes)
    return calibrated(nodes, published.run, published.plan, published.tflops)


def cluster(
    gpus: int, network: str = "HDR, a card a GPU", host: int = 8, memory: float = 80e9, mistaken: bool = False
) -> Cluster:
    """The fitted cluster with so many GPUs in hosts of `host`, and a network of NETWORKS.

    Args:
        mistaken: as the mistaken planner sees it.

    Raises:
        ValueError: no such network.
    """
    if network not in NETWORKS:
        raise ValueError(f"no network {network!r}; there are {', '.join(NETWORKS)}")
    card, cards_per_gpu = NETWORKS[network]
    cards = round(cards_per_gpu * host) or 1
    base = fitted_cluster(mistaken=mistaken)
    chosen = replace(base, gpus=gpus, host=host, between=card, cards=cards, memory=memory)
    return without_hosts(chosen) if mistaken else chosen


def without_hosts(nodes: Cluster) -> Cluster:
    """The mistake: every GPU reaches every other one as fast as those of its own host."""
    return replace(nodes, between=nodes.inside, cards=nodes.host)


def published_over_predicted(row: int = 0, mistaken: bool = False) -> dict[str, float]:
    """{published run: published TFLOP/s over predicted}, the planner fitted to one row."""
    base = fitted_cluster(row, mistaken)
    return {published.name: published.tflops / predicted_tflops(published, base) for published in MEGATRON}


def predicted_tflops(published: PublishedRun, base: Cluster) -> float:
    """TFLOP/s a GPU of a published run on its number of GPUs."""
    return tflops(published.run, replace(base, gpus=published.gpus), published.plan)


# --- this library's benchmarked runs ------------------------------------------------------------------


class BenchmarkedRun(NamedTuple):
    """A layout of GPT-2 XL on two GPUs: TFLOP/s a GPU, no FLOPs recomputed; bubbles of a pipeline."""

    plan: ParallelLayout
    predicted: float
    measured: float
    bubbles: tuple[float, float]  # predicted, measured


def benchmarked_runs() -> dict[str, BenchmarkedRun]:
    """{layout: predicted beside measured} of two H200s; the planner is fitted to the first, of one GPU.

    Measured are the newest results that this package keeps, of hpnb's fastest program in each layout.

    Raises:
        ValueError: no results of one GPU are kept.
    """
    newest = result_files.newest(result_files.read())
    results = next((r for r in newest if (r.what, r.ranks) == ("gpt2-xl", 2)), None)
    if results is None or "one" not in results.layouts:
        raise ValueError("the package keeps no results of GPT-2 XL on one and two GPUs to be predicted")
    two_gpus = GPTRun(1600, 48, 20, 32, 1024, 50257, recompute=False, fused_attention=True)
    one_gpu = replace(two_gpus, batch=16)
    plans = {
        "one": (one_gpu, ParallelLayout(microbatch_size=16)),
        "dp2": (two_gpus, ParallelLayout(2, microbatch_size=16)),
        "zero1": (two_gpus, ParallelLayout(2, microbatch_size=16, zero_stage=1)),
        "tp2": (two_gpus, ParallelLayout(tp=2, microbatch_size=32)),
        "pp2": (two_gpus, ParallelLayout(pp=2, microbatch_size=4, chunks=4)),
    }
    fastest = {name: best for name, programs in results.layouts.items() if (best := programs.fastest(True))}
    measured = {name: results.layouts[name].tflops(best.name) for name, best in fastest.items()}
    base = calibrated(replace(HGX_H200, gpus=1), *plans["one"], measured["one"])
    runs = {}
    for name, (run, plan) in plans.items():
        if name in fastest:
            nodes = replace(base, gpus=plan.world_size)
            parts = cluster_parts(run, nodes, plan)
            bubble = fastest[name].bubble
            bubbles = (parts["bubble"] / sum(parts.values()), bubble[0] if bubble else 0.0)
            runs[name] = BenchmarkedRun(plan, tflops(run, nodes, plan), measured[name], bubbles)
    return runs


# --- what a number is worth --------------------------------------------------------------------------

_NUMBERS = {
    "share of peak": "share",
    "memory bandwidth": "memory_bandwidth",
    "link inside a host": "inside",
    "network between hosts": "between",
}


def halve_each_number(
    jobs: Mapping[str, tuple[GPTRun, Cluster, ParallelLayout]],
) -> dict[str, dict[str, float]]:
    """{number: {job: its step with that number halved, over its step}}, each number by itself."""
    slowdowns: dict[str, dict[str, float]] = {number: {} for number in _NUMBERS}
    for number, field in _NUMBERS.items():
        for job, (run, nodes, plan) in jobs.items():
            slower = halve_field(nodes, field)
            slow, step = (sum(cluster_parts(run, which, plan).values()) for which in (slower, nodes))
            slowdowns[number][job] = slow / step
    return slowdowns


def halve_field(nodes: Cluster, field: str) -> Cluster:
    """A cluster with half of one number: a rate, or the bandwidth of a link."""
    value: Any = getattr(nodes, field)
    half: Any = replace(value, bandwidth=value.bandwidth / 2) if isinstance(value, Link) else value / 2
    return replace(nodes, **{field: half})

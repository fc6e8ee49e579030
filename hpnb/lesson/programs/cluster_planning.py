"""What notebook 09 plans with: clusters by name, a fitted planner, this library's own runs, numbers halved.

planned.fitted()         DGX A100s whose matmuls reach what one published row says
planned.cluster(512)     so many of these, with another network if one is named
planned.own_runs()       {layout: (plan, TFLOP/s)} of GPT-2 XL as `python -m hpnb.bench` measured it
planned.halved(...)      what each number of a cluster is worth: halved, what becomes of each step?
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

MODELS = {one.name: one.run for one in MEGATRON}
# H200: datasheet of the GPU; hosts like DGX H100's
HGX_H200 = replace(DGX_H100, memory=141e9, memory_bandwidth=4.8e12)


@lru_cache(maxsize=16)
def fitted(row: int = 0, mistaken: bool = False) -> Cluster:
    """DGX A100s; matmuls reach the share of the peak that explains the published row of that number.

    Args:
        mistaken: all is `borderless`, and fitted as such.
    """
    one = MEGATRON[row]
    given = replace(DGX_A100, gpus=one.gpus)
    return calibrated(borderless(given) if mistaken else given, one.run, one.plan, one.tflops)


def cluster(
    gpus: int, network: str = "HDR, a card a GPU", host: int = 8, memory: float = 80e9, mistaken: bool = False
) -> Cluster:
    """`fitted`, of so many GPUs in hosts of `host`, with a network of NETWORKS; or what the mistaken planner
    takes that for.

    Raises:
        ValueError: no such network.
    """
    if network not in NETWORKS:
        raise ValueError(f"no network {network!r}; there are {', '.join(NETWORKS)}")
    card, each = NETWORKS[network]
    cards = round(each * host) or 1
    base = fitted(mistaken=mistaken)
    given = replace(base, gpus=gpus, host=host, between=card, cards=cards, memory=memory)
    return borderless(given) if mistaken else given


def borderless(given: Cluster) -> Cluster:
    """The mistake: every GPU reaches every other one as it reaches those of its own host."""
    return replace(given, between=given.inside, cards=given.host)


def ratios(row: int = 0, mistaken: bool = False) -> dict[str, float]:
    """{row's name: published over predicted}, the planner fitted to one row."""
    base = fitted(row, mistaken)
    return {one.name: one.tflops / predicted(one, base) for one in MEGATRON}


def predicted(one: PublishedRun, base: Cluster) -> float:
    """TFLOP/s a GPU of a published run on its own number of GPUs."""
    return tflops(one.run, replace(base, gpus=one.gpus), one.plan)


# --- this library's own runs -------------------------------------------------------------------------


class OwnRun(NamedTuple):
    """A layout of GPT-2 XL on two GPUs: TFLOP/s a GPU, no FLOPs recomputed; idle shares of a pipeline."""

    plan: ParallelLayout
    predicted: float
    measured: float
    bubbles: tuple[float, float]  # predicted, measured


def own_runs() -> dict[str, OwnRun]:
    """{layout: predicted beside measured} of two H200s; the planner is fitted to the first, of one GPU.

    Measured are the newest results that this package keeps, of hpnb's fastest program in each layout.

    Raises:
        ValueError: no results of one GPU are kept.
    """
    found = next(
        (r for r in result_files.newest(result_files.read()) if (r.what, r.ranks) == ("gpt2-xl", 2)), None
    )
    if found is None or "one" not in found.layouts:
        raise ValueError("the package keeps no results of GPT-2 XL on one and two GPUs to be predicted")
    whole = GPTRun(1600, 48, 20, 32, 1024, 50257, recompute=False, fused_attention=True)
    half = replace(whole, batch=16)
    plans = {
        "one": (half, ParallelLayout(microbatch_size=16)),
        "dp2": (whole, ParallelLayout(2, microbatch_size=16)),
        "zero1": (whole, ParallelLayout(2, microbatch_size=16, zero_stage=1)),
        "tp2": (whole, ParallelLayout(tp=2, microbatch_size=32)),
        "pp2": (whole, ParallelLayout(pp=2, microbatch_size=4, chunks=4)),
    }
    fastest = {name: best for name, each in found.layouts.items() if (best := each.fastest(True))}
    measured = {name: found.layouts[name].tflops(best.name) for name, best in fastest.items()}
    base = calibrated(replace(HGX_H200, gpus=1), *plans["one"], measured["one"])
    runs = {}
    for name, (run, plan) in plans.items():
        if name in fastest:
            given = replace(base, gpus=plan.world_size)
            parts = cluster_parts(run, given, plan)
            idle = fastest[name].bubble
            bubbles = (parts["bubble"] / sum(parts.values()), idle[0] if idle else 0.0)
            runs[name] = OwnRun(plan, tflops(run, given, plan), measured[name], bubbles)
    return runs


# --- what a number is worth --------------------------------------------------------------------------

_NUMBERS = {
    "share of peak": "share",
    "memory bandwidth": "memory_bandwidth",
    "link inside a host": "inside",
    "network between hosts": "between",
}


def halved(jobs: Mapping[str, tuple[GPTRun, Cluster, ParallelLayout]]) -> dict[str, dict[str, float]]:
    """{number: {job: its step with that number halved, over its step}}, each number by itself."""
    found: dict[str, dict[str, float]] = {}
    for words, name in _NUMBERS.items():
        found[words] = {}
        for job, (run, given, plan) in jobs.items():
            value: Any = getattr(given, name)
            link = isinstance(value, Link)
            half: Any = replace(value, bandwidth=value.bandwidth / 2) if link else value / 2
            less = replace(given, **{name: half})
            slow, step = (sum(cluster_parts(run, one, plan).values()) for one in (less, given))
            found[words][job] = slow / step
    return found

"""Which layout is best: all that a model and a machine allow, and the fastest of those that fit.

    layouts = cluster_layouts(run, cluster)      # every dp x pp x tp of the cluster's GPUs that can be run
    fastest(run, cluster, layouts)               # the shortest step among those that fit

`cluster.py` predicts a step from datasheets, `layout_step.py` from what one rank alone takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from hpnb.mesh import ParallelLayout
from hpnb.theory.cluster import Cluster, GPTRun, cluster_memory, cluster_parts, refusal
from hpnb.theory.layout_step import LayoutTask


def divide_ranks(ranks: int) -> Iterator[ParallelLayout]:
    """Every dp x pp x tp of `ranks` ranks, the largest dp and then the smallest pp first."""
    for dp in (n for n in range(ranks, 0, -1) if ranks % n == 0):
        inner = ranks // dp
        for pp in (n for n in range(1, inner + 1) if inner % n == 0):
            yield ParallelLayout(dp, pp, inner // pp)


def task_layouts(
    task: LayoutTask, ranks: int, microbatch_size: int, zero_stages: Sequence[int] = (0,)
) -> list[ParallelLayout]:
    """All layouts of `ranks` ranks for the task, with microbatches of `microbatch_size` in pipelines."""
    layouts = []
    for sizes in divide_ranks(ranks):
        m = max(1, task.batch // sizes.dp // microbatch_size) if sizes.pp > 1 else 1
        layouts += [replace(sizes, num_microbatches=m, zero_stage=stage) for stage in zero_stages]
    return [layout for layout in layouts if task.refusal(layout) is None]


def cluster_layouts(run: GPTRun, cluster: Cluster, zero_stage: int = 0) -> list[ParallelLayout]:
    """All layouts of the cluster, memory aside: microbatches of one sample, any number of chunks."""
    layouts = []
    for sizes in divide_ranks(cluster.gpus):
        if sizes.pp <= run.layers and sizes.tp <= run.heads:
            one_chunk = replace(sizes, microbatch_size=1, zero_stage=zero_stage)
            layouts.append(one_chunk)
            layouts += [
                replace(one_chunk, schedule="interleaved", chunks=v)
                for v in range(2, run.layers // sizes.pp + 1)
            ]
    return [layout for layout in layouts if refusal(run, cluster, layout) is None]


def fastest(run: GPTRun, cluster: Cluster, layouts: Iterable[ParallelLayout]) -> ParallelLayout:
    """The layout with the shortest step, of those that fit; of all where none does.

    Raises:
        ValueError: no layouts, or one that cannot be run.
    """
    candidates = list(layouts)
    fitting = [layout for layout in candidates if cluster_memory(run, layout) <= cluster.memory]
    return min(fitting or candidates, key=lambda layout: sum(cluster_parts(run, cluster, layout).values()))


def best_by_cut(run: GPTRun, cluster: Cluster, zero_stage: int = 0) -> dict[tuple[int, int], ParallelLayout]:
    """{(pp, tp): the layout with its best number of chunks}, as `fastest` chooses."""
    by_cut: dict[tuple[int, int], list[ParallelLayout]] = {}
    for layout in cluster_layouts(run, cluster, zero_stage):
        by_cut.setdefault((layout.pp, layout.tp), []).append(layout)
    return {cut: fastest(run, cluster, layouts) for cut, layouts in by_cut.items()}


def best_layout(run: GPTRun, cluster: Cluster, zero_stage: int = 0) -> ParallelLayout:
    """The fastest layout that fits.

    Raises:
        ValueError: none fits, with the memory of the smallest.
    """
    layouts = cluster_layouts(run, cluster, zero_stage)
    least = min((cluster_memory(run, layout) for layout in layouts), default=None)
    if least is None or least > cluster.memory:
        why = "none can be run" if least is None else f"the smallest takes {least / 1e9:.0f} GB"
        raise ValueError(f"no layout of {cluster.gpus} GPUs fits {cluster.memory / 1e9:.0f} GB: {why}")
    return fastest(run, cluster, layouts)

"""The explorer of notebook 09: a map of layouts of a thousand GPUs, by model, nodes, network and batch."""

from __future__ import annotations

from dataclasses import replace

from hpnb.lesson.explorers.explorer import Challenge, Evaluation, Explorer, Picture
from hpnb.lesson.explorers.knobs import Choice, Knobs
from hpnb.lesson.programs import cluster_planning
from hpnb.lesson.tables import number
from hpnb.theory.cluster import cluster_memory, cluster_parts
from hpnb.theory.planner import best_by_cut, fastest

_MEMORY = 80e9  # bytes of an A100

KNOBS: Knobs = {
    "model": Choice(tuple(cluster_planning.MODELS), "145.6B"),
    "gpus": Choice((64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096), 2048),
    "node": Choice((4, 8, 16, 32), 8),
    "network": Choice(tuple(cluster_planning.NETWORKS), cluster_planning.SLOW),
    "batch": Choice((256, 512, 768, 1024, 1536, 2048, 2304, 3072, 4608, 9216), 512),
    "recompute": Choice(("yes", "no"), "yes"),
    "zero": Choice((0, 1), 0),
}
ANSWER = {"batch": 2304, "recompute": "no"}
CHALLENGE = Challenge(
    "145.6B on 2,048 GPUs in nodes of 8 with one Ethernet NIC each, at most 2,304 samples a step: it "
    "fits, and model FLOPs use 35 % of the peak or more.",
    lambda at: (
        (at["model"], at["gpus"], at["node"], at["network"]) == ("145.6B", 2048, 8, cluster_planning.SLOW)
        and (at["batch"] <= 2304 and at["memory (B)"] <= _MEMORY and at["MFU (%)"] >= 35)
    ),
)


def cluster_layouts() -> Explorer:
    """Notebook 09: seconds of a step over tp and pp for a published model on A100s; the fastest that fits.

    MFU counts the FLOPs of one forward and one backward, without what is recomputed.
    """
    return Explorer(KNOBS, _readings, CHALLENGE, ANSWER, trade=("batch", "MFU (%)"), goal=35).display()


def _readings(
    model: str, gpus: int, node: int, network: str, batch: int, recompute: str, zero: int
) -> Evaluation:
    run = replace(cluster_planning.MODELS[model], batch=batch, recompute=recompute == "yes")
    cluster = cluster_planning.cluster(gpus, network, node, _MEMORY)
    plans = best_by_cut(run, cluster, zero)
    if not plans:
        raise ValueError(f"{batch} samples and {gpus} GPUs: no layout of {model} can be run")
    best = fastest(run, cluster, plans.values())
    parts, memory = cluster_parts(run, cluster, best), cluster_memory(run, best)
    step = sum(parts.values())
    useful_flops = replace(run, recompute=False).flops
    readings = {
        "layout": str(best),
        "step (s)": step,
        **{f"{part} (%)": 100 * parts[part] / step for part in ("tp", "bubble", "pp", "dp")},
        "memory (B)": memory,
        "MFU (%)": 100 * useful_flops / step / gpus / cluster.peak,
    }

    def draw(fast: bool) -> Picture:
        from hpnb.lesson.figures import plan_at_scale

        steps = {
            cut: (sum(cluster_parts(run, cluster, plan).values()), cluster_memory(run, plan) <= _MEMORY)
            for cut, plan in plans.items()
        }
        title = f"predicted · seconds of a step: {model}, {gpus:,} A100s, {network}"
        setting = f"{batch:,} samples a step, {'' if run.recompute else 'no '}recomputation, ZeRO {zero}"
        figure = plan_at_scale.layout_map(steps, node, title, setting, text=not fast)
        which = "the fastest that fits" if memory <= _MEMORY else "nothing fits, the fastest"
        alt = f"A map over tp and pp of {len(plans)} layouts; {which} is {best}, {number(step, 's')} a step."
        return figure, alt

    return readings, draw

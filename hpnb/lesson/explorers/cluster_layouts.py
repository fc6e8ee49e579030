"""The explorer of notebook 09: a map of layouts of a thousand GPUs, by model, hosts, network and batch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hpnb.lesson.explorers.explorer import Explorer, explorer
from hpnb.lesson.explorers.knobs import Challenge, Choice
from hpnb.lesson.programs import cluster_planning
from hpnb.lesson.tables import number
from hpnb.theory.cluster import cluster_memory, cluster_parts
from hpnb.theory.planner import best_by_cut, fastest

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def cluster_layouts() -> Explorer:
    """Notebook 09: seconds of a step over tp and pp for a published model on A100s; the fastest that fits.

    Utilisation counts the FLOPs of one forward and one backward, whatever is computed again.
    """
    from hpnb import plot

    def draw(
        model: str, gpus: int, host: int, network: str, batch: int, recompute: str, zero: int, fast: bool
    ) -> tuple[Figure, str, dict[str, Any]]:
        run = replace(cluster_planning.MODELS[model], batch=batch, recompute=recompute == "yes")
        given = cluster_planning.cluster(gpus, network, host)
        plans = best_by_cut(run, given, zero)
        if not plans:
            raise ValueError(f"{batch} rows and {gpus} GPUs: no layout of {model} can be run")
        step = {cut: sum(cluster_parts(run, given, plan).values()) for cut, plan in plans.items()}
        held = {cut: cluster_memory(run, plan) for cut, plan in plans.items()}
        best = fastest(run, given, plans.values())
        cut = (best.pp, best.tp)
        fits, parts = held[cut] <= given.memory, cluster_parts(run, given, best)
        figure = plot.layout_map(
            {at: (step[at], held[at] <= given.memory) for at in plans},
            host,
            title=f"predicted · seconds: {model}, {gpus:,} A100s, {network}",
            text=not fast,
        )
        useful = replace(run, recompute=False).flops
        which = "the fastest that fits" if fits else "nothing fits, the fastest"
        alt = f"A map over tp and pp of {len(plans)} layouts; {which} is {best}, "
        alt += f"{number(step[cut], 's')} a step."
        readings = {
            "layout": str(best),
            "step (s)": step[cut],
            **{f"{part} (%)": 100 * parts[part] / step[cut] for part in ("tp", "bubble", "pp", "dp")},
            "memory (B)": held[cut],
            "FLOP utilisation (%)": 100 * useful / step[cut] / gpus / given.peak,
            "_as_asked": (model, gpus, host, network) == ("145.6B", 2048, 8, "Ethernet 100 Gb, a card a host")
            and batch <= 2304,
            "_fits": fits,
        }
        return figure, alt, readings

    return explorer(
        draw,
        {
            "model": Choice(tuple(cluster_planning.MODELS), "145.6B"),
            "gpus": Choice((64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096), 2048),
            "host": Choice((4, 8, 16, 32), 8),
            "network": Choice(tuple(cluster_planning.NETWORKS), "Ethernet 100 Gb, a card a host"),
            "batch": Choice((256, 512, 768, 1024, 1536, 2048, 2304, 3072, 4608, 9216), 512),
            "recompute": Choice(("yes", "no"), "yes"),
            "zero": Choice((0, 1), 0),
        },
        Challenge(
            "145.6B on 2,048 GPUs in hosts of 8 with one Ethernet card each, at most 2,304 rows a step: it "
            "fits, with a FLOP utilisation of 35 % or more.",
            lambda read: (
                bool(read["_as_asked"]) and bool(read["_fits"]) and read["FLOP utilisation (%)"] >= 35
            ),
        ),
    )

"""The explorer of notebook 08: layouts of so many ranks by memory and speed, and the one that is chosen."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from hpnb.lesson.explorers.explorer import Explorer, explorer
from hpnb.lesson.explorers.knobs import Challenge, Choice, Slider
from hpnb.lesson.tables import number
from hpnb.mesh import ParallelLayout
from hpnb.models import GPT2_SIZES
from hpnb.theory import LINKS, LayerCost, LayoutTask, layout_memory, layout_parts, task_layouts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS, HOST, RATE, BETWEEN = 128, 8, 400e12, "Ethernet 100 Gb"
MOST = 128  # ranks


def xl() -> LayoutTask:
    """GPT-2 XL, 128 rows of 1,024 tokens, 400 TFLOP/s a rank, hosts of 8 with NVLink, Ethernet between; a
    layer's kernels take 0.1 ms a microbatch, whatever its rows."""
    size = GPT2_SIZES["1.5b"]
    block = size.block()
    head = LayerCost(1e-4, 6 * size.length * size.hidden * size.vocab_size / RATE)
    each = LayerCost(1e-4, block.training_flops / RATE)
    between = LINKS[BETWEEN]
    return LayoutTask(
        block, size.layers, size.vocab_size, ROWS, each, head, 28 / 3e12, LINKS["NVLink 4"], between, HOST
    )


@lru_cache(maxsize=64)
def _others(ranks: int) -> dict[str, tuple[float, float]]:
    """{layout: (bytes, tokens/s)} of all layouts without ZeRO and with stage 1, microbatches of two rows."""
    task = xl()
    return {
        str(plan): (layout_memory(task, plan), task.tokens / sum(layout_parts(task, plan).values()))
        for plan in task_layouts(task, ranks, 2, (0, 1))
    }


def layout_choice() -> Explorer:
    """Notebook 08: choose a layout of GPT-2 XL by dp, pp, tp, microbatches, ZeRO and a device's memory."""
    from hpnb import plot

    def draw(
        dp: int, pp: int, tp: int, microbatches: int, zero: int, cap: float, fast: bool
    ) -> tuple[Figure, str, dict[str, Any]]:
        plan, task = ParallelLayout(dp, pp, tp, microbatches if pp > 1 else 1, zero), xl()
        if not 2 <= plan.world_size <= MOST:
            raise ValueError(f"{plan.world_size} ranks; use 2 to {MOST}")
        if (why := task.refusal(plan)) is not None:
            raise ValueError(f"{plan}: {why}")
        parts, held = layout_parts(task, plan), layout_memory(task, plan)
        step = sum(parts.values())
        name = f"{plan}, m {task.microbatches(plan)}"
        points = {**_others(plan.world_size), name: (held, task.tokens / step)}
        fits = held <= cap * 1e9
        figure = plot.choices(
            points,
            chosen={name: "" if fits else "does not fit"},
            capacity=cap * 1e9,
            title=f"predicted · GPT-2 XL on {plan.world_size} ranks in hosts of {HOST}: "
            "layouts to choose from",
            text=not fast,
            labels=("predicted", ""),
        )
        alt = (
            f"Layouts of {plan.world_size} ranks by memory and tokens a second; {name} "
            f"holds {number(held, 'B')} and takes {number(step, 's')} a step."
        )
        readings = {
            "step (s)": step,
            **{f"{part} (%)": 100 * parts[part] / step for part in parts if part != "optimizer"},
            "memory (B)": held,
            "FLOP utilisation (%)": 100 * task.flops / step / plan.world_size / RATE,
            "_ranks": plan.world_size,
            "_cap": cap,
            "_fits": fits,
        }
        return figure, alt, readings

    sizes = (1, 2, 4, 8, 16, 32, 64)
    return explorer(
        draw,
        {
            "dp": Choice(sizes, 32),  # opens on replicas across Ethernet
            "pp": Choice((1, 2, 4, 8, 16), 1),
            "tp": Choice((1, 2, 4, 8, 16), 1),
            "microbatches": Choice((1, 2, 4, 8, 16, 32, 64), 8),
            "zero": Choice((0, 1, 2, 3), 0),
            "cap": Slider(12, 80, 40, 4, unit="GB"),
        },
        Challenge(
            "32 ranks or more, devices of 16 GB: it fits, with a FLOP utilisation of 45 % or more.",
            lambda read: (
                read["_ranks"] >= 32
                and read["_cap"] <= 16
                and bool(read["_fits"])
                and read["FLOP utilisation (%)"] >= 45
            ),
        ),
    )

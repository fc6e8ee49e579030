"""The explorer of notebook 08: layouts of GPT-2 XL by memory and speed, and the one that the knobs choose."""

from __future__ import annotations

from functools import lru_cache

from hpnb.lesson.explorers.explorer import Challenge, Evaluation, Explorer, Picture
from hpnb.lesson.explorers.knobs import Choice, Knobs, Slider
from hpnb.lesson.programs.layout_tasks import NODE, RATE, gpt2_xl_task
from hpnb.lesson.tables import number
from hpnb.mesh import ParallelLayout
from hpnb.theory import layout_memory, layout_parts, task_layouts

SAMPLES, BETWEEN = 128, "Ethernet 100 Gb"
GOAL = 45  # % of the assumed FLOP/s
MAX_RANKS, _PAIR = 128, 2  # samples of a microbatch of the layouts that the knobs did not choose
_SIZES = (1, 2, 4, 8, 16)

KNOBS: Knobs = {
    "dp": Choice((*_SIZES, 32, 64), 32),  # the first one has replicas across Ethernet
    "pp": Choice(_SIZES, 1),
    "tp": Choice(_SIZES, 1),
    "microbatches": Choice((*_SIZES, 32, 64), 8),
    "zero": Choice((0, 1, 2, 3), 0),
    "cap": Slider(12, 80, 40, 4, unit="GB"),
}
ANSWER = {"dp": 4, "pp": 2, "tp": 4, "microbatches": 4, "zero": 1, "cap": 16}
CHALLENGE = Challenge(
    f"32 ranks or more, GPUs of 16 GB: it fits, with a FLOP utilisation of {GOAL} % or more.",
    lambda at: (
        (at["dp"] * at["pp"] * at["tp"] >= 32 and at["cap"] <= 16)
        and (at["memory (B)"] <= at["cap"] * 1e9 and at["FLOP utilisation (%)"] >= GOAL)
    ),
)


def layout_choice() -> Explorer:
    """Notebook 08: choose a layout of GPT-2 XL by dp, pp, tp, microbatches, ZeRO and a GPU's memory."""
    title = "predicted · FLOP utilisation of GPT-2 XL over dp; ranks grow with it"
    return Explorer(
        KNOBS,
        _readings,
        CHALLENGE,
        ANSWER,
        trade=("dp", "FLOP utilisation (%)"),
        goal=GOAL,
        trade_title=title,
    ).display()


@lru_cache(maxsize=64)
def _other_layouts(ranks: int) -> dict[str, tuple[float, float]]:
    """{layout: (bytes, tokens/s)} of all layouts with ZeRO stages 0 and 1, microbatches of two samples."""
    task = gpt2_xl_task(SAMPLES, BETWEEN)
    return {
        str(plan): (layout_memory(task, plan), task.tokens / sum(layout_parts(task, plan).values()))
        for plan in task_layouts(task, ranks, _PAIR, (0, 1))
    }


def _readings(dp: int, pp: int, tp: int, microbatches: int, zero: int, cap: float) -> Evaluation:
    plan = ParallelLayout(dp, pp, tp, microbatches if pp > 1 else 1, zero)
    task, ranks = gpt2_xl_task(SAMPLES, BETWEEN), plan.world_size
    if not 2 <= ranks <= MAX_RANKS:
        raise ValueError(f"{ranks} ranks; use 2 to {MAX_RANKS}")
    if (why := task.refusal(plan)) is not None:
        raise ValueError(f"{plan}: {why}")
    parts, memory = layout_parts(task, plan), layout_memory(task, plan)
    step = sum(parts.values())
    readings = {
        "step (s)": step,
        **{f"{part} (%)": 100 * parts[part] / step for part in parts if part != "optimizer"},
        "memory (B)": memory,
        "FLOP utilisation (%)": 100 * task.flops / step / ranks / RATE,
    }

    def draw(fast: bool) -> Picture:
        from hpnb.lesson.figures import gpt2_hybrid

        m = task.microbatches(plan)
        name = f"{plan}, {m} microbatch{'es' if m > 1 else ''} of {SAMPLES // dp // m}"
        figure = gpt2_hybrid.choices(
            {**_other_layouts(ranks), name: (memory, task.tokens / step)},
            chosen={name: "chosen" if memory <= cap * 1e9 else "chosen, does not fit"},
            capacity=cap * 1e9,
            title=f"predicted · GPT-2 XL on {ranks} ranks, nodes of {NODE}",
            text=not fast,
            labels=(f"predicted; with stages, microbatches of {_PAIR} unless named", ""),
            goal=(GOAL / 100 * ranks * RATE * task.tokens / task.flops, f"{GOAL} % FLOP utilisation"),
        )
        return figure, (
            f"Layouts of {ranks} ranks by memory and tokens a second; {name} holds "
            f"{number(memory, 'B')} and takes {number(step, 's')} a step."
        )

    return readings, draw

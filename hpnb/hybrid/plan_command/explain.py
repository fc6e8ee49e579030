"""One layout as one picture: when each pipeline rank computes, and what its memory holds at the peak."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hpnb.hybrid.plan_command.search import Plan, usable_bytes
from hpnb.pipeline_parallel import Costs
from hpnb.pipeline_parallel.schedules import make
from hpnb.plot import CATEGORY, STYLE, new_figure
from hpnb.plot.canvas import WIDTH, Key, panel_title
from hpnb.plot.grammar import styles_of
from hpnb.plot.lanes import Lanes, draw
from hpnb.record import Event, Timeline
from hpnb.theory.pipeline import V_SHAPED
from hpnb.theory.plan_memory import MEMORY_PARTS, rank_memory
from hpnb.theory.plan_step import plan_parts, stage_seconds
from hpnb.theory.plan_task import PlanTask

MOST_RANKS, MOST_MICROBATCHES = 16, 32  # that can be read
_LEFT, _RIGHT = 0.9, 0.6


def plan_timeline(task: PlanTask, plan: Plan) -> Timeline:
    """The simulated step of one pipeline, with the exposed gradients and the optimizer at its end. Of more
    than `MOST_MICROBATCHES` only so many are drawn, with chunks in groups of p."""
    layout, p, v = plan.layout, plan.layout.pp, plan.layout.chunks_per_rank
    drawn = max(p, MOST_MICROBATCHES // p * p)
    m = min(task.microbatches(layout), drawn)
    per_rank = [sum(stage.values()) / v for stage in stage_seconds(task, layout)]
    order = [*range(p), *reversed(range(p))] if layout.schedule in V_SHAPED else list(range(p)) * v
    stages = [per_rank[rank] for rank in order]
    forwards = 2 if layout.recomputation else 1  # a backward recomputes the forward first
    unit = [seconds / (forwards + 2) for seconds in stages]
    costs = Costs(unit, [forwards * one for one in unit], unit)
    timeline = make(layout.schedule, p * v, m, v).simulate(costs)
    parts = plan_parts(task, layout)
    events = list(timeline.events)
    for rank in timeline.ranks:
        end = timeline.end
        if parts["exposed dp"]:
            op = "all_reduce" if layout.zero_stage == 0 else "reduce_scatter"
            events.append(Event(rank, -1, op, -1, end, end + parts["exposed dp"], "dp"))
            end += parts["exposed dp"]
        events.append(Event(rank, -1, "optimizer step", -1, end, end + parts["optimizer"]))
    return replace(timeline, events=tuple(events))


def draw_plan(task: PlanTask, plan: Plan) -> Figure:
    """Timeline above memory."""
    timeline = plan_timeline(task, plan)
    ranks = tuple(timeline.ranks)[:MOST_RANKS]
    timeline = replace(timeline, events=tuple(e for e in timeline.events if e.rank in ranks))
    lanes = Lanes(ranks, ("dp",) if plan.parts["exposed dp"] else ())
    styles = styles_of(timeline.events)
    keys = [Key(style, "box") for style in (*styles.values(), STYLE["idle"], *CATEGORY.values())]
    m, drawn = task.microbatches(plan.layout), 1 + max(e.microbatch for e in timeline.events)
    fig, (upper, lower) = new_figure(
        [lanes.height, 0.26 * len(ranks) + 0.1],
        title=f"{task.model.name} in {plan.code} on {task.cluster.gpus} GPUs: predicted "
        f"{1e3 * plan.step:,.0f} ms a step, {100 * plan.mfu:.0f} % MFU, {plan.bytes / 1e9:.1f} GB",
        legend=keys, left=_LEFT, right=_RIGHT, gap=0.85, head=0.3,
    )  # fmt: skip
    scale, unit = (1.0, "s") if timeline.makespan >= 2 else (1e-3, "ms")
    inch = (WIDTH - _LEFT - _RIGHT) / (timeline.makespan / scale)
    labels = {rank: f"pp {rank}" for rank in ranks}
    shown = "" if drawn == m else f", the first {drawn} of {m} microbatches"
    inside = [f"{axis} {1e3 * plan.parts[axis]:,.0f} ms" for axis in ("tp", "cp", "ep") if plan.parts[axis]]
    messages = f"; of it messages inside blocks: {', '.join(inside)}" if inside else ""
    panel_title(upper, f"predicted time of one pipeline{shown}{messages}")
    draw(upper, timeline, lanes, labels, scale=scale, inch=inch, text=True, exposed=False, styles=styles)
    upper.set_xlim(0, timeline.makespan / scale)
    upper.set_xlabel(f"time ({unit})")
    _draw_memory(lower, task, plan, ranks)
    return fig


def _draw_memory(ax: Axes, task: PlanTask, plan: Plan, ranks: tuple[int, ...]) -> None:
    """A bar a pipeline rank, by category, with what a GPU has to use as a dashed line."""
    panel_title(ax, "predicted memory at the peak")
    usable = usable_bytes(task) / 1e9
    longest = usable
    for row, rank in enumerate(ranks):
        memory, start = rank_memory(task, plan.layout, rank), 0.0
        for name in MEMORY_PARTS:
            style, wide = CATEGORY[name], memory[name] / 1e9
            ax.barh(row, wide, 0.7, start, color=style.color, edgecolor=style.edge, hatch=style.hatch or None,
                    linewidth=0)  # fmt: skip
            start += wide
        ax.annotate(f"{start:.1f}", (start, row), (4, 0), "data", "offset points", va="center", size=8)
        longest = max(longest, start)
    ax.axvline(usable, color="black", linestyle="--", linewidth=1.2)
    ax.set_ylim(len(ranks) - 0.5, -0.5)
    ax.set_xlim(0, 1.04 * longest)
    ax.set_yticks(range(len(ranks)), [f"pp {rank}" for rank in ranks])
    ax.set_xlabel(f"GB; the dashed line is the {usable:.1f} GB that a GPU has to use")


def check_picture(path: str) -> None:
    """Raise ValueError if no picture can be written there."""
    if Path(path).suffix not in (".png", ".svg"):
        raise ValueError(f"--picture {path} is neither .png nor .svg; use plan.png")
    if not (folder := Path(path).absolute().parent).is_dir():
        raise ValueError(f"--picture {path}: there is no folder {folder}")

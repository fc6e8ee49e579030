"""hpnb's programs: what a user writes, a plugin for the layout and a Booster, with everything switched on."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import hpnb
from hpnb.bench.layouts import Shape
from hpnb.bench.program import Candidate, Program
from hpnb.bench.tasks import BatchFeed, Task
from hpnb.pipeline_parallel import Costs

_REPEATS = 3  # steps that are recorded, of which the median one counts
_SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {"pp_style": "1f1b"},
    "interleaved": {"pp_style": "interleaved", "num_model_chunks": 2},
    "interleaved in 4 chunks": {"pp_style": "interleaved", "num_model_chunks": 4},
    "zb-v": {"pp_style": "zb-v", "num_model_chunks": 2},
    "zb-h1": {"pp_style": "zb-h1"},
}


def candidates(shape: Shape) -> list[Candidate]:
    """What hpnb enters for a layout; several where the best is not known beforehand."""
    ways: list[tuple[str, dict[str, Any], bool]] = [("", {}, False)]
    if shape.kind == "dp":
        ways.append((" by copy engines", {"ddp_copy_engines": True}, True))
    if shape.tp > 1:
        ways = [(", sequence parallel", {"enable_sequence_parallelism": True}, False), ("", {}, shape.pp > 1)]
    if shape.pp > 1:
        seldom = {"zb-h1"} if shape.kind == "pp" else {"zb-h1", "zb-v", "interleaved"}
        ways = [
            (f" {schedule}{name}", {**how, **knobs}, extra or schedule in seldom)
            for schedule, how in _SCHEDULES.items()
            for name, knobs, extra in ways
        ]
    return [Candidate(f"hpnb{name}", partial(build, knobs), extra=extra) for name, knobs, extra in ways]


def build(knobs: dict[str, Any], task: Task, shape: Shape, backwards: bool = False) -> Program:
    """hpnb's program.

    Args:
        knobs: of the plugin, in addition to what the layout says.
        backwards: rows of a batch in the opposite order.
    """
    parts = task.parts(shape)
    chunks = knobs.get("num_model_chunks", 1)
    plugin = hpnb.HybridParallelPlugin(
        tp_size=shape.tp,
        pp_size=shape.pp,
        zero_stage=shape.zero,
        precision="bf16" if task.bits == 16 else "fp32",
        num_microbatches=parts,
        enable_all_optimization=True,
        loss_chunk=task.loss_chunk,
        gradient_as_bucket_view=True,
        cut=task.cut(shape.pp * chunks) if shape.pp > 1 else "uniform",
        **knobs,
    )
    booster = hpnb.Booster(plugin=plugin)
    made: Any = task.build()
    model, optimizer, *_ = booster.boost(made, torch.optim.AdamW(made.parameters(), lr=task.lr))
    del made
    feed = BatchFeed(task, plugin.mesh.dp.rank, shape.dp, backwards)
    seen: list[torch.Tensor] = []

    def microbatches(record: bool = False) -> None:
        optimizer.zero_grad()
        booster.execute_pipeline(iter([feed.batch]), model, None, optimizer, record=record)
        optimizer.step()

    def whole() -> None:
        optimizer.zero_grad()
        loss = model(**feed.batch).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        seen[:] = [loss.detach()]

    def loss() -> float:
        if parts == 1 and shape.pp == 1:
            return float(seen[0])
        assert model.last_step is not None
        return float(model.last_step.loss)

    def bubble() -> tuple[float, float]:
        timelines = []
        for _ in range(_REPEATS):
            microbatches(record=True)
            assert model.last_step is not None
            timelines.append(model.last_step.timeline.select("FIWB"))
        tl = sorted(timelines, key=lambda one: one.makespan)[_REPEATS // 2]
        simulated = plugin.schedule(parts).simulate(Costs.measured(tl))
        return tl.bubble_fraction, simulated.bubble_fraction

    def replicas() -> list[torch.Tensor]:
        return list(model.parameters()) if shape.dp > 1 and shape.zero < 3 else []

    group = plugin.mesh.dp.group if shape.dp > 1 else None
    steps = microbatches if shape.pp > 1 or parts > 1 else whole
    return Program(steps, loss, feed, bubble if shape.pp > 1 else None, replicas, group)

"""hpnb's programs: what a user writes, a plugin for the layout and a Booster, with everything switched on."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import hpnb
from hpnb.bench.layouts import kind_of
from hpnb.bench.program import Candidate, Program
from hpnb.bench.tasks import BatchFeed, TrainingTask
from hpnb.mesh import ParallelLayout
from hpnb.pipeline_parallel import Costs

_REPEATS = 3  # steps that are recorded, of which the median one counts
_SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {"pp_style": "1f1b", "num_model_chunks": 1},
    "interleaved": {"pp_style": "interleaved", "num_model_chunks": 2},
    "interleaved in 4 chunks": {"pp_style": "interleaved", "num_model_chunks": 4},
    "zb-v": {"pp_style": "zb-v", "num_model_chunks": 2},
    "zb-h1": {"pp_style": "zb-h1", "num_model_chunks": 1},
}


def candidates(layout: ParallelLayout) -> list[Candidate]:
    """What hpnb enters for a layout; several where the best is not known beforehand."""
    ways: list[tuple[str, dict[str, Any], bool]] = [("", {}, False)]
    if kind_of(layout) == "dp":
        ways.append((" by copy engines", {"ddp_copy_engines": True}, True))
    if layout.tp > 1:
        ways = [
            (", sequence parallel", {"enable_sequence_parallelism": True}, False),
            ("", {}, layout.pp > 1),
        ]
    if layout.pp > 1:
        seldom = {"zb-h1"} if kind_of(layout) == "pp" else {"zb-h1", "zb-v", "interleaved"}
        ways = [
            (f" {schedule}{name}", {**how, **knobs}, extra or schedule in seldom)
            for schedule, how in _SCHEDULES.items()
            for name, knobs, extra in ways
        ]
        if layout.tp == 1 and layout.zero_stage < 3:
            graphs = {"enable_cuda_graphs": True}
            ways += [
                (f"{name}, CUDA graphs", {**knobs, **graphs}, extra or knobs["num_model_chunks"] == 2)
                for name, knobs, extra in ways
                if knobs["pp_style"] in ("1f1b", "interleaved")
            ]
    return [Candidate(f"hpnb{name}", partial(build, knobs), extra=extra) for name, knobs, extra in ways]


def build(knobs: dict[str, Any], task: TrainingTask, layout: ParallelLayout) -> Program:
    """hpnb's program; `knobs` are of the plugin, in addition to what the layout says."""
    num_microbatches = task.count_microbatches(layout)
    chunks = knobs["num_model_chunks"] if layout.pp > 1 else 1
    plugin = hpnb.HybridParallelPlugin(
        tp_size=layout.tp,
        pp_size=layout.pp,
        zero_stage=layout.zero_stage,
        precision={16: "bf16", 32: "fp32", 64: "fp64"}[task.bits],
        num_microbatches=num_microbatches,
        enable_all_optimization=True,
        loss_chunk=task.loss_chunk,
        gradient_as_bucket_view=True,
        cut=task.split_layers(layout.pp * chunks) if layout.pp > 1 else "uniform",
        **knobs,
    )
    booster = hpnb.Booster(plugin=plugin)
    full_model: Any = task.build()
    adam = torch.optim.AdamW(full_model.parameters(), lr=task.lr)
    model, optimizer, *_ = booster.boost(full_model, adam)
    del full_model
    feed = BatchFeed(task, plugin.mesh.dp.rank, layout.dp)
    last_loss: list[torch.Tensor] = []

    def step_microbatches(record: bool = False) -> None:
        optimizer.zero_grad()
        booster.execute_pipeline(iter([feed.batch]), model, None, optimizer, record=record)
        optimizer.step()

    def step_batch() -> None:
        optimizer.zero_grad()
        loss = model(**feed.batch).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        last_loss[:] = [loss.detach()]

    def loss() -> float:
        if num_microbatches == 1 and layout.pp == 1:
            return float(last_loss[0])
        assert model.last_step is not None
        return float(model.last_step.loss)

    def bubble() -> tuple[float, float]:
        timelines = []
        for _ in range(_REPEATS):
            step_microbatches(record=True)
            assert model.last_step is not None
            timelines.append(model.last_step.timeline.select("FIWB"))
        tl = sorted(timelines, key=lambda one: one.makespan)[_REPEATS // 2]
        simulated = plugin.schedule(num_microbatches).simulate(Costs.measured(tl))
        return tl.bubble_fraction, simulated.bubble_fraction

    def replicas() -> list[torch.Tensor]:
        return list(model.parameters()) if layout.dp > 1 and layout.zero_stage < 3 else []

    group = plugin.mesh.dp.group if layout.dp > 1 else None
    step = step_microbatches if layout.pp > 1 or num_microbatches > 1 else step_batch
    return Program(step, loss, feed, bubble if layout.pp > 1 else None, replicas, group)

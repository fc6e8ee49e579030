"""Steps that wait for Python: small microbatches, launched kernel by kernel and as CUDA graphs.

    python -m hpnb.bench launch-bound

    torch, a loop           forward and backward of every microbatch, and nothing else
    torch, one graph        the same loop as one CUDA graph: what is left when nothing is launched from Python
    torch DDP               on one rank: its hooks, without messages; so is hpnb DataParallel
    hpnb Pipeline           one stage, eager and with cuda_graphs=True

A step is the forward and backward of a batch, without an optimizer, which is the same for all. Programs take
turns on one GPU (harness.py), and ratios are of steps that followed one another. Memory is what PyTorch has
reserved, since a graph's memory counts as free while it does not run; every program is alone then.

With several stages, ranks that share one GPU compute one at a time ("measured by turns"), and the step is
replayed from what each action took alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hpnb
from hpnb import Layout, Mesh
from hpnb.bench import torch_data_parallel, torch_precision, worker
from hpnb.bench.harness import LayoutBenchmark, RankPools, rank_pools, say_indented
from hpnb.bench.pipeline import make_pipeline
from hpnb.bench.program import Candidate, Program
from hpnb.bench.results import LayoutResult
from hpnb.bench.tables import NOT_TIMED
from hpnb.bench.tasks import BatchFeed, TrainingTask, cast_inputs
from hpnb.mesh import ParallelLayout
from hpnb.models import GPT2_SIZES, SIZES

MICROBATCHES = 8
LOOP, ONE_GRAPH, EAGER, GRAPHS = "torch, a loop", "torch, one graph", "hpnb Pipeline", "hpnb Pipeline, graphs"
DATA_PARALLEL, DDP = "hpnb DataParallel", "torch DDP"
STAGES = (2, 4)
RECORDED_STEPS = 7  # of ranks that share a GPU


def usual_tasks(device: str) -> list[TrainingTask]:
    """Small microbatches of GPT-2 and ViT, and one that is large enough for an eager step."""

    def task(what: str, size: Any, samples: int) -> TrainingTask:
        bits = 16 if device == "cuda" else 32
        name = f"{what}, {MICROBATCHES} x {samples}"
        return TrainingTask(name, size, MICROBATCHES * samples, samples, bits, microbatches=MICROBATCHES)

    if device == "cpu":
        return [task("laptop GPT-2", replace(GPT2_SIZES["laptop"], length=16), 1)]
    gpt2 = replace(GPT2_SIZES["124m"], length=512)
    return [task("GPT-2 124M", gpt2, 1), task("ViT-B/16", SIZES["b16"], 4), task("GPT-2 124M", gpt2, 16)]


# --- the programs ----------------------------------------------------------------------------------------


class _NoUpdate:
    """In place of an optimizer, which is the same for all."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def zero_grad(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def step(self) -> None:
        pass


def _build(task: TrainingTask) -> Any:
    model = task.build().to(task.dtype)
    torch_precision.use_loss(model, "no")
    return model


def _loop(wrap: Callable[[nn.Module], Any], task: TrainingTask, layout: ParallelLayout) -> Program:
    """The loop over microbatches, of a model or of what wraps it."""
    model = wrap(_build(task))
    return torch_data_parallel.accumulating(task, layout, model, _NoUpdate(model), model)


def _one_graph(task: TrainingTask, layout: ParallelLayout) -> Program:
    if hpnb.device().type != "cuda":
        raise ValueError("a CUDA graph needs a GPU")
    model, feed = _build(task), BatchFeed(task)

    def split() -> list[dict[str, torch.Tensor]]:
        return [cast_inputs(part, task.dtype) for part in feed.split(task.microbatches)]

    static = [{name: value.clone() for name, value in part.items()} for part in split()]
    tensors = [value for part in static for value in part.values()]
    losses: list[torch.Tensor] = []

    def accumulate() -> None:
        losses.clear()
        for part in static:
            loss = model(**part).loss
            (loss / len(static)).backward()
            losses.append(loss.detach())

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            accumulate()
    torch.cuda.current_stream().wait_stream(side)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch._foreach_zero_(grads)
        accumulate()

    def step() -> None:
        torch._foreach_copy_(tensors, [value for part in split() for value in part.values()])
        graph.replay()

    return Program(step, lambda: float(torch.stack(losses).float().mean()), feed)


def _pipeline(graphs: bool, task: TrainingTask, layout: ParallelLayout) -> Program:
    pipe, feed = make_pipeline(task, Mesh(Layout(pp=layout.pp)).pp, "1f1b", cuda_graphs=graphs)
    results: list[Any] = []

    def step() -> None:
        pipe.zero_grad()
        batch = cast_inputs(feed.batch, task.dtype)
        results[:] = [pipe.step(batch, return_outputs=False, record=False)]

    return Program(step, lambda: float(results[0].loss), feed)


def _as_it_is(model: nn.Module) -> nn.Module:
    return model


def _wrap_data_parallel(model: nn.Module) -> nn.Module:
    return hpnb.DataParallel(model, Mesh(Layout(dp=1)).dp)


def _wrap_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def candidates() -> list[Candidate]:
    return [
        Candidate(GRAPHS, partial(_pipeline, True)),
        Candidate(EAGER, partial(_pipeline, False)),
        Candidate(DATA_PARALLEL, partial(_loop, _wrap_data_parallel)),
        Candidate(DDP, partial(_loop, _wrap_ddp)),
        Candidate(LOOP, partial(_loop, _as_it_is)),
        Candidate(ONE_GRAPH, _one_graph),
    ]


# --- what runs on the ranks ------------------------------------------------------------------------------


def measure_reserved(task: TrainingTask, name: str) -> int:
    """Bytes that PyTorch reserves at most in a step of this program alone."""
    worker.drop()
    before = torch.cuda.memory_reserved()
    build = {one.name: one.build for one in candidates()}[name]
    program = build(task, ParallelLayout())
    worker.take_steps(program, worker.WARM_UP)
    with worker.free_memory():
        pass
    torch.cuda.reset_peak_memory_stats()
    program.step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_reserved() - before


def measure_stages(task: TrainingTask, graphs: bool) -> tuple[float, str]:
    """(seconds of the median step, where they come from) of as many stages as there are ranks."""
    axis = Mesh(Layout(pp=hpnb.world_size())).pp
    pipe, feed = make_pipeline(task, axis, "1f1b", cuda_graphs=graphs)
    seconds, source = [], ""
    for step in range(4 + RECORDED_STEPS):
        pipe.zero_grad()
        result = pipe.step(cast_inputs(feed.batch, task.dtype), return_outputs=False)
        timeline = result.timeline
        if step >= 4:
            seconds.append(timeline.makespan)
            source = timeline.source
    return statistics.median(seconds), source


# --- the tables ------------------------------------------------------------------------------------------


def run(rounds: int, device: str, stages: Sequence[int] | None, tasks: Sequence[str] | None) -> None:
    """Measure, and print the tables, each as soon as it is there.

    Args:
        tasks: names, or parts of them; all if there are none. Pipelines of several stages run the first.

    Raises:
        ValueError: no task has such a name.
    """
    device = hpnb.ranks.choose_device(device, 1).device
    known = usual_tasks(device)
    chosen = [task for task in known if not tasks or any(name in task.what for name in tasks)]
    if not chosen:
        raise ValueError(f"no task has a name with {' or '.join(tasks or ())}; there are "
                         + "; ".join(task.what for task in known))  # fmt: skip
    with rank_pools(device, 600.0) as pools:
        for task in chosen:
            result = LayoutBenchmark(
                pools, task, task.what, ParallelLayout(), candidates(), rounds, traces=None, say=say_indented
            ).run()
            print(*table(task, result, _reserved(pools, task, result)), sep="\n", end="\n\n", flush=True)
    for count in stages or STAGES:
        print(*_stage_lines(known[0], device, count), sep="\n", end="\n\n", flush=True)


def table(task: TrainingTask, result: LayoutResult, reserved: dict[str, int]) -> list[str]:
    """A row a program: its step, and how long that is beside the loop and beside one graph."""
    lines = [task.title, f"{'':24}{'step':>12}{'of the loop':>26}{'of one graph':>26}{'reserved':>12}"]
    for entry in result.entries:
        seconds = result.seconds(entry.name)
        if entry.failed or seconds is None:
            lines.append(f"{entry.name:24}{entry.failed or NOT_TIMED}")
            continue
        beside = [_times_as_long(result, entry.name, other) for other in (LOOP, ONE_GRAPH)]
        memory = f"{reserved[entry.name] / 2**30:.2f} GiB" if entry.name in reserved else "-"
        lines.append(f"{entry.name:24}{seconds * 1e3:9.2f} ms{beside[0]:>26}{beside[1]:>26}{memory:>12}")
    return lines


def _times_as_long(result: LayoutResult, name: str, other: str) -> str:
    ratio = result.ratio(other, name)  # of speeds, so the other's over this one's
    return "-" if ratio is None or name == other else f"{ratio[0]:.3f} [{ratio[1]:.3f}, {ratio[2]:.3f}]"


def _reserved(pools: RankPools, task: TrainingTask, result: LayoutResult) -> dict[str, int]:
    if pools.device != "cuda":
        return {}
    ran = [entry.name for entry in result.entries if not entry.failed]
    return {name: pools.get(1).run(measure_reserved, task, name)[0] for name in ran}


def _stage_lines(task: TrainingTask, device: str, stages: int) -> list[str]:
    with hpnb.Ranks(stages, device=device, timeout=600.0) as pool:
        eager, source = pool.run(measure_stages, task, False)[0]
        graphs, _ = pool.run(measure_stages, task, True)[0]
    title = f"{task.what}, {stages} stages, 1f1b, {source}"
    return [
        title,
        f"eager {eager * 1e3:.2f} ms, CUDA graphs {graphs * 1e3:.2f} ms: {graphs / eager:.3f} of eager",
    ]

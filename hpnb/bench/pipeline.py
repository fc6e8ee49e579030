"""A training step over a pipeline: hpnb beside torch.distributed.pipelining, in one run.

    python -m hpnb.bench pipeline --ranks 4 --pairs 15          step times, beside torch's schedules
    python -m hpnb.bench pipeline --ranks 4 --bubbles           bubbles, measured and simulated

    hpnb 1f1b           beside   Schedule1F1B
    hpnb zb-h1          beside   Schedule1F1B                 none in torch; the same peak in flight
    hpnb interleaved    beside   ScheduleInterleaved1F1B      2 chunks a rank
    hpnb zb-v           beside   ScheduleZBVZeroBubble        2 chunks a rank, V-shaped

Both of a pair have the same layers in the same stages, the same microbatches and the same AdamW, and take
turns on the same ranks (harness.py). Stages are not compiled; of PyTorch's, the
loss of a GPT-2 is, in which it is ahead. On a CPU a small ViT in float32; on GPUs ViT-L/16
and a GPT-2 of 1.3B parameters in bf16. The bubble of a step is measured from the device's own times, and
simulated with the medians of the same step's actions, without transfers. GPipe holds the activations of all
microbatches until their backwards; where they do not fit, its microbatches are smaller (`GPIPE_SHARE`), and
the table's title says so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

import hpnb
from hpnb import Axis, Layout, Mesh
from hpnb.bench import torch_pipeline
from hpnb.bench.harness import print_contest, rank_pools
from hpnb.bench.program import Candidate, Program
from hpnb.bench.results import quartiles
from hpnb.bench.tasks import BatchFeed, TrainingTask, cast_inputs
from hpnb.bench.torch_precision import adamw, causal_loss, class_loss
from hpnb.bench.worker import free_memory, time_step
from hpnb.mesh import ParallelLayout
from hpnb.models import GPT2_SIZES, SIZES, GPT2Size
from hpnb.pipeline_parallel import Costs, schedules
from hpnb.pipeline_parallel.step_result import PipelineStepResult

CONTESTS = {"1f1b": ("Schedule1F1B", 1), "zb-h1": ("Schedule1F1B", 1),
            "interleaved": ("ScheduleInterleaved1F1B", 2), "zb-v": ("ScheduleZBVZeroBubble", 2)}  # fmt: skip
SWEEP = (4, 8, 16, 32)  # microbatches, for bubbles
BUBBLES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-v": 2}  # chunks a rank
GPIPE_SHARE = {"ViT-L/16": 0.5}  # of a microbatch, so that `SWEEP` fits into
GPIPE_MEMORY = 4 * 140e9  # bytes of all ranks together


def tasks(device: str, microbatches: int, size: float = 1) -> list[TrainingTask]:
    """What is trained on this kind of device; a microbatch is `size` times the usual one."""

    def task(what: str, model: Any, usual: int, bits: int) -> TrainingTask:
        samples = max(1, int(usual * size))
        return TrainingTask(what, model, microbatches * samples, samples, bits, microbatches=microbatches)

    if device == "cpu":
        return [task("laptop ViT", SIZES["laptop"], 4, 32)]
    gpt2 = replace(GPT2_SIZES["1.5b"], hidden=2048, layers=24, heads=16, mlp=8192)
    return [task("ViT-L/16", SIZES["l16"], 128, 16), task("GPT-2 1.3B", gpt2, 4, 16)]


# --- the programs ----------------------------------------------------------------------------------------


def candidates(contest: str) -> list[Candidate]:
    """hpnb's schedule of that name, and torch's beside it."""
    schedule, chunks = CONTESTS[contest]
    theirs = partial(torch_pipeline.pipelined, schedule, chunks, "ddp", "no", False)
    return [Candidate(f"hpnb {contest}", partial(_hpnb, contest)), Candidate(f"torch {schedule}", theirs)]


def _hpnb(name: str, task: TrainingTask, layout: ParallelLayout) -> Program:
    pipe, feed = make_pipeline(task, Mesh(Layout(pp=layout.pp)).pp, name)
    optimizer = adamw(pipe.parameters(), task.lr)
    last: list[PipelineStepResult] = []

    def step() -> None:
        optimizer.zero_grad()
        last[:] = [pipe.step(cast_inputs(feed.batch, task.dtype), return_outputs=False)]
        optimizer.step()

    return Program(step, lambda: float(last[0].loss), feed)


def make_pipeline(
    task: TrainingTask, axis: Axis, name: str, model: nn.Module | None = None, cuda_graphs: bool = False
) -> tuple[hpnb.Pipeline, BatchFeed]:
    """hpnb's with the schedule `name`, of `model` or a new one, and batches for it."""
    chunks = {**BUBBLES, **{key: n for key, (_, n) in CONTESTS.items()}}[name]
    schedule = schedules.make(name, axis.size * chunks, task.microbatches, chunks)
    model = task.build().to(task.dtype) if model is None else model
    cut = task.split_layers(schedule.stages)
    return hpnb.Pipeline(model, axis, schedule, _loss, cut=cut, cuda_graphs=cuda_graphs), BatchFeed(task)


def _loss(outputs: Any, batch: Any) -> torch.Tensor:
    logits = getattr(outputs, "logits", outputs)
    return (causal_loss if "input_ids" in batch else class_loss)(logits=logits, labels=batch["labels"])


def run(
    ranks: int, rounds: int, device: str, contest: Sequence[str] | None, microbatches: Sequence[int] | None,
    size: float, bubbles: bool,
) -> None:  # fmt: skip
    """Print the tables, each as soon as it is there.

    Args:
        contest: of `CONTESTS`; by default all of them.
        microbatches: numbers of them, by default 8, and `SWEEP` for bubbles.
        size: of a microbatch, times the usual one.
        bubbles: measured and simulated ones instead.
    """
    if bubbles:
        print_bubbles(ranks, device, microbatches or SWEEP, size)
        return
    choice = hpnb.ranks.choose_device(device, ranks)
    layout = ParallelLayout(pp=choice.ranks)
    with rank_pools(choice.device, 600.0) as pools:
        by_count = [tasks(choice.device, m, size) for m in microbatches or (8,)]
        for of_one_model in zip(*by_count, strict=True):
            for one, task in itertools.product(contest or CONTESTS, of_one_model):
                name = f"{one}, {task.microbatches} microbatches"
                print_contest(pools, task, name, layout, candidates(one), rounds)


# --- bubbles ---------------------------------------------------------------------------------------------


def gpipe_share(name: str, task: TrainingTask, memory: float = GPIPE_MEMORY) -> float:
    """The share of a microbatch that the schedule of that name gets.

    Args:
        memory: bytes of all ranks together; a power of two less for GPipe where they are fewer.
    """
    if name != "gpipe":
        return 1.0
    halvings = max(0, math.ceil(math.log2(GPIPE_MEMORY / memory)))
    return GPIPE_SHARE.get(task.what, 1.0) * 0.5**halvings


def total_memory() -> float:
    """Bytes of the GPUs of all ranks, taken to be alike. On a CPU, GPipe has what it needs."""
    if hpnb.device().type == "cpu":
        return GPIPE_MEMORY
    return float(torch.cuda.get_device_properties(hpnb.device()).total_memory) * hpnb.world_size()


def measure_bubbles(place: int, sweep: Sequence[int], size: float) -> list[tuple[Any, ...]]:
    """On a rank, of the model at that place of `tasks`: rows of (schedule, microbatches, and what
    `_bubble` returns)."""
    kind, axis = hpnb.device().type, Mesh(Layout(pp=hpnb.world_size())).pp
    rows = []
    with free_memory():
        first = tasks(kind, 1, size)[place]
        model = first.build().to(first.dtype)
        for name, m in itertools.product(BUBBLES, sweep):
            task = tasks(kind, m, size * gpipe_share(name, first, total_memory()))[place]
            with free_memory():  # else a step would search for memory that another schedule has cut up
                pipe, feed = make_pipeline(task, axis, name, model)
                rows.append((name, m, *_bubble(pipe, cast_inputs(feed.batch, task.dtype))))
                del pipe
        del model
    return rows


def _bubble(pipe: hpnb.Pipeline, batch: Any, repeats: int = 3) -> tuple[float, ...]:
    """Of the median step: measured and simulated bubble, its seconds and those simulated."""

    def step() -> Any:
        pipe.zero_grad()
        return pipe.step(batch, return_outputs=False)

    step(), step(), step()
    timelines = [step().timeline.select("FIWB") for _ in range(repeats)]
    tl = sorted(timelines, key=lambda one: one.makespan)[repeats // 2]
    simulated = pipe.schedule.simulate(Costs.measured(tl))
    return tl.bubble_fraction, simulated.bubble_fraction, tl.makespan, simulated.makespan


def measure_recording(place: int, size: float, microbatches: int, pairs: int) -> list[float]:
    """On a rank: how many times as long a recorded step takes as one that is not, pair by pair."""
    axis = Mesh(Layout(pp=hpnb.world_size())).pp
    with free_memory():
        task = tasks(hpnb.device().type, microbatches, size)[place]
        pipe, feed = make_pipeline(task, axis, "1f1b")
        step = partial(pipe.step, cast_inputs(feed.batch, task.dtype), return_outputs=False)
        step(), step()
        ratios = []
        for pair in range(pairs):
            seconds = {record: time_step(partial(step, record=record))
                       for record in ((True, False) if pair % 2 else (False, True))}  # fmt: skip
            ratios.append(seconds[True] / seconds[False])
        del pipe, step
    return ratios


def bubble_title(task: TrainingTask, memory: float = GPIPE_MEMORY) -> str:
    """The task's name, and GPipe's share of a microbatch where it is not 1."""
    share = gpipe_share("gpipe", task, memory)
    unit = "sequences" if isinstance(task.size, GPT2Size) else "images"
    name = f"{task.what}, microbatches of {task.rows} {unit}"
    return name if share == 1 else f"{name} (gpipe: {share:g} of that)"


def print_bubbles(ranks: int, device: str, sweep: Sequence[int], size: float) -> None:
    """Print the table: measured beside simulated."""
    choice = hpnb.ranks.choose_device(device, ranks)
    with hpnb.Ranks(choice.ranks, device=choice.device, timeout=600.0) as pool:
        memory = pool.run(total_memory)[0]
        for place, task in enumerate(tasks(choice.device, 1, size)):
            rows = pool.run(measure_bubbles, place, sweep, size)[0]
            print(f"{bubble_title(task, memory)}: {choice.ranks} ranks on {choice.device}; the bubble of "
                  "a step of m microbatches, and the difference in points")  # fmt: skip
            print(f"{'':14}m   measured simulated  points       step  simulated")
            for name, m, measured, simulated, seconds, simulated_seconds in rows:
                print(f"{name:12} {m:3d} {100 * measured:8.1f} % {100 * simulated:7.1f} % "
                      f"{100 * (measured - simulated):+7.1f} {seconds * 1e3:7.1f} ms "
                      f"{simulated_seconds * 1e3:7.1f} ms")  # fmt: skip
            median, low, high = quartiles(pool.run(measure_recording, place, size, 8, 15)[0])
            ratio = f"{median:.3f} [{low:.3f}, {high:.3f}]"
            print(
                f"a step that is recorded takes {ratio} of one that is not (1f1b, 8 microbatches)\n",
                flush=True,
            )

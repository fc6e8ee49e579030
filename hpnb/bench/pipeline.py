"""A training step over a pipeline: hpnb beside torch.distributed.pipelining, in one run.

    python -m hpnb.bench pipeline --ranks 4 --pairs 15          step times, beside torch's schedules
    python -m hpnb.bench pipeline --ranks 4 --bubbles           bubbles, measured and simulated

    hpnb 1f1b           beside   Schedule1F1B
    hpnb zb-h1          beside   Schedule1F1B                 none in torch; the same peak in flight
    hpnb interleaved    beside   ScheduleInterleaved1F1B      2 chunks a rank
    hpnb zb-v           beside   ScheduleZBVZeroBubble        2 chunks a rank, V-shaped

Both of a pair have the same layers in the same stages, the same microbatches and the same fused AdamW, live
on the same ranks and take turns; half of the turns are with one of them built first. A step is timed from a
barrier to the last rank's end. On a CPU a small ViT in float32; on GPUs ViT-L/16 and a stack of GPT blocks in
bf16. The bubble of a step is measured from the device's own times, and simulated with the medians of the same
step's actions; what is simulated knows no transfers. GPipe holds all microbatches until their backwards;
where they do not fit, its are smaller (`Task.held_all`), and the table's title says so.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import pipelining

import hpnb
from hpnb import Axis, Layout, Mesh
from hpnb.bench.harness import Measured, Step, nothing_left, pair_table, take_turns, timed
from hpnb.bench.report import Row
from hpnb.pipeline_parallel import Costs, schedules
from hpnb.pipeline_parallel.layers import layers
from hpnb.pipeline_parallel.partition import cut
from hpnb.pipeline_parallel.stages import Stages

CONTESTS = {"1f1b": ("Schedule1F1B", 1), "zb-h1": ("Schedule1F1B", 1),
            "interleaved": ("ScheduleInterleaved1F1B", 2), "zb-v": ("ScheduleZBVZeroBubble", 2)}  # fmt: skip
SWEEP = (4, 8, 16, 32)  # microbatches, for bubbles
BUBBLES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-v": 2}  # chunks a rank
_ADAM: dict[str, Any] = {"lr": 1e-4, "fused": True}


@dataclass(frozen=True)
class Task:
    """A model, and batches of so many microbatches for it: (what goes in, targets).

    `held_all` is the share of a microbatch for a schedule that holds all of them, so that `SWEEP` fits.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    enter: str  # the name of what goes in
    dtype: torch.dtype
    held_all: float = 1.0


def tasks(device: torch.device, size: float = 1) -> list[Task]:
    """What is trained on this kind of device; a microbatch is `size` times the usual one."""
    if device.type == "cpu":
        n = max(1, int(4 * size))
        return [Task(f"laptop ViT, float32, microbatches of {n}", _vit("laptop"), _images(n, 32),
                     "pixel_values", torch.float32)]  # fmt: skip
    n, b = max(1, int(128 * size)), max(1, int(4 * size))
    return [
        Task(f"ViT-L/16, bf16, microbatches of {n} images", _vit("l16"), _images(n, 224), "pixel_values",
             torch.bfloat16, held_all=0.5),
        Task(f"24 GPT blocks of 2048, bf16, microbatches of {b} x 1024", _gpt, _tokens(b), "input_ids",
             torch.bfloat16),
    ]  # fmt: skip


# --- the candidates --------------------------------------------------------------------------------------


def _hpnb(task: Task, axis: Axis, name: str, microbatches: int) -> Step:
    pipe, batch = pipeline(task, axis, name, microbatches)
    optimizer = torch.optim.AdamW(pipe.parameters(), **_ADAM)

    def step() -> None:
        optimizer.zero_grad()
        pipe.step(batch, return_outputs=False)
        optimizer.step()

    return step


def pipeline(
    task: Task, axis: Axis, name: str, microbatches: int, model: nn.Module | None = None
) -> tuple[hpnb.Pipeline, dict[str, torch.Tensor]]:
    """hpnb's, of `model` or a new one, and a batch for it."""
    chunks = {**BUBBLES, **{key: n for key, (_, n) in CONTESTS.items()}}[name]
    schedule = schedules.make(name, axis.size * chunks, microbatches, chunks)
    pipe = hpnb.Pipeline(
        task.build().to(task.dtype), axis, schedule, lambda out, one: _loss(out, one["labels"])
    )
    entered, targets = task.batch(microbatches)
    return pipe, {task.enter: _cast(entered, task.dtype), "labels": targets}


def _torch(task: Task, axis: Axis, name: str, microbatches: int) -> Step:
    kind, chunks = CONTESTS[name]
    ours = schedules.make(name, axis.size * chunks, microbatches, chunks)
    dealt = cut(layers(task.build().to(task.dtype)), ours.stages)
    mine = ours.stages_of(axis.rank)
    device = hpnb.device()
    held = [pipelining.PipelineStage(_Stage(Stages([dealt[i]], [0], device), task.enter, i == 0), i,
                                     ours.stages, device, group=axis.group) for i in mine]  # fmt: skip
    kinds: Any = getattr(pipelining, kind)
    schedule = kinds(held if chunks > 1 else held[0], microbatches, loss_fn=_loss)
    optimizer = torch.optim.AdamW([p for stage in held for p in stage.submod.parameters()], **_ADAM)
    entered, targets = task.batch(microbatches)
    args = (_cast(entered, task.dtype),) if 0 in mine else ()
    kwargs = {"target": targets} if ours.stages - 1 in mine else {}

    def step() -> None:
        optimizer.zero_grad()
        schedule.step(*args, **kwargs, return_outputs=False)  # as hpnb: nobody keeps the logits
        optimizer.step()

    return step


class _Stage(nn.Module):
    """The same layers, as torch's stages are called: with a tensor, for a tensor."""

    def __init__(self, stages: Stages, enter: str, first: bool) -> None:
        super().__init__()
        self.stages, self.enter, self.first = stages, enter, first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.stages(0, None, {self.enter: x}) if self.first else self.stages(0, x, {})
        found: torch.Tensor = getattr(given, "logits", given)
        return found


def _loss(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    logits = getattr(outputs, "logits", outputs)
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())


# --- measuring -------------------------------------------------------------------------------------------


def measure(
    contest: str, place: int, pairs: int, microbatches: int, size: float, torch_first: bool
) -> tuple[str, list[Measured]]:
    """On a rank: (the task, what was measured of hpnb's, and of torch's)."""
    axis, task = Mesh(Layout(pp=hpnb.world_size())).pp, tasks(hpnb.device(), size)[place]
    with nothing_left():
        makers = [partial(make, task, axis, contest, microbatches) for make in (_hpnb, _torch)]
        return task.name, take_turns(makers, pairs, torch_first)


def run(
    ranks: int, pairs: int, device: str, contests: Sequence[str], microbatches: Sequence[int], size: float
) -> None:
    """Print the tables, each as soon as it is there."""
    choice = hpnb.ranks.choose_device(device, ranks)
    with hpnb.Ranks(choice.ranks, device=choice.device, timeout=600.0) as pool:
        for place in range(len(tasks(torch.device(choice.device)))):
            for contest, m in itertools.product(contests, microbatches):
                name, first = pool.run(measure, contest, place, pairs - pairs // 2, m, size, False)[0]
                _, second = pool.run(measure, contest, place, pairs // 2, m, size, True)[0]
                measured = [a + b for a, b in zip(first, second, strict=True)]
                title = f"{name}, {m} of them: {choice.ranks} ranks on {choice.device}, {pairs} pairs"
                held = " (peak in flight as 1f1b)" if contest == "zb-h1" else ""
                names = (f"hpnb {contest}{held}", f"torch {CONTESTS[contest][0]}")
                print(pair_table(title, names, measured), end="\n\n", flush=True)


# --- bubbles ---------------------------------------------------------------------------------------------


def task_for(name: str, device: torch.device, place: int, size: float) -> Task:
    """The task under the schedule of that name: smaller for GPipe where `Task.held_all` is below 1."""
    task = tasks(device, size)[place]
    return tasks(device, size * task.held_all)[place] if name == "gpipe" else task


def bubble(place: int, sweep: Sequence[int], size: float) -> list[tuple[Any, ...]]:
    """On a rank: rows of (schedule, microbatches, ...) and what `_bubble` gives."""
    device, axis = hpnb.device(), Mesh(Layout(pp=hpnb.world_size())).pp
    rows = []
    with nothing_left():
        whole = tasks(device, size)[place]
        model = whole.build().to(whole.dtype)
        for name, m in itertools.product(BUBBLES, sweep):
            task = task_for(name, device, place, size)
            with nothing_left():  # memory that another schedule has cut up would be sought for in a step
                rows.append((name, m, *_bubble(*pipeline(task, axis, name, m, model))))
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


def recording(place: int, size: float, microbatches: int, pairs: int) -> list[float]:
    """On a rank: how many times as long a recorded step takes as one that is not, pair by pair."""
    device, axis = hpnb.device(), Mesh(Layout(pp=hpnb.world_size())).pp
    with nothing_left():
        pipe, batch = pipeline(tasks(device, size)[place], axis, "1f1b", microbatches)
        step = partial(pipe.step, batch, return_outputs=False)
        step(), step()
        ratios = []
        for turn in range(pairs):
            took = {record: timed(partial(step, record=record))
                    for record in ((True, False) if turn % 2 else (False, True))}  # fmt: skip
            ratios.append(took[True] / took[False])
        del pipe, step
    return ratios


def bubble_title(task: Task) -> str:
    """The task's name, and GPipe's share of a microbatch where it is not 1."""
    return task.name if task.held_all == 1 else f"{task.name} (gpipe: {task.held_all:g} of that)"


def bubbles(ranks: int, device: str, sweep: Sequence[int], size: float) -> None:
    """Print the table: measured beside simulated."""
    choice = hpnb.ranks.choose_device(device, ranks)
    with hpnb.Ranks(choice.ranks, device=choice.device, timeout=600.0) as pool:
        for place, task in enumerate(tasks(torch.device(choice.device), size)):
            rows = pool.run(bubble, place, sweep, size)[0]
            print(f"{bubble_title(task)}: {choice.ranks} ranks on {choice.device}")
            print(f"{'':14}m   measured simulated  points       step  simulated")
            for name, m, seen, told, took, would in rows:
                print(f"{name:12} {m:3d} {100 * seen:8.1f} % {100 * told:7.1f} % {100 * (seen - told):+7.1f} "
                      f"{took * 1e3:7.1f} ms {would * 1e3:7.1f} ms")  # fmt: skip
            pairs = Row("", tuple(pool.run(recording, place, size, 8, 15)[0]))
            low, high = pairs.quartiles
            print(f"recorded over not recorded, 1f1b, m 8: {pairs.median:.3f} [{low:.3f}, {high:.3f}]\n",
                  flush=True)  # fmt: skip


# --- models ----------------------------------------------------------------------------------------------


def _vit(size: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        """Drawn on the device, which takes no time."""
        model: nn.Module = hpnb.models.vit(size, classes=10, device="meta").to_empty(device=hpnb.device())
        with torch.no_grad():
            for name, role in hpnb.models.roles(model).items():
                parameter = model.get_parameter(name)
                if role.kind == "norm" and not role.bias:
                    parameter.fill_(1.0)
                else:
                    parameter.normal_(std=0.02)
        return model.train()

    return build


def _images(count: int, side: int) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    def batch(m: int) -> tuple[torch.Tensor, torch.Tensor]:
        where = hpnb.device()
        return torch.randn(m * count, 3, side, side, device=where), torch.arange(m * count, device=where) % 10

    return batch


_VOCABULARY = 50304  # GPT-2's 50,257 words, padded so that the head's rows are aligned


class _Embedding(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(_VOCABULARY, hidden), nn.Embedding(1024, hidden)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.words(ids) + self.places.weight[: ids.size(1)]  # (B, s, h)
        return found


class _Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): (B, s, h) in and out."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, heads, s, h / heads)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        found: torch.Tensor = x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))
        return found


class _Head(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.words = nn.LayerNorm(hidden), nn.Linear(hidden, _VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.words(self.norm(x)).flatten(0, 1)  # (B s, words)
        return found


def _gpt(hidden: int = 2048, blocks: int = 24, heads: int = 16) -> nn.Module:
    torch.manual_seed(0)
    with hpnb.device():
        found = [_Block(hidden, heads) for _ in range(blocks)]
        return nn.Sequential(_Embedding(hidden), *found, _Head(hidden))


def _tokens(count: int) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    def batch(m: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.randint(0, _VOCABULARY, (m * count, 1024), device=hpnb.device())
        return ids, ids.roll(-1, 1)

    return batch


def _cast(entered: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return entered.to(dtype) if entered.is_floating_point() else entered

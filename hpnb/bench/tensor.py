"""A training step whose every matrix is shared by all ranks: hpnb beside torch's own program, in one run.

    python -m hpnb.bench tensor --ranks 4 --rounds 15

    1d        hpnb, columns and rows
    1d-sp     hpnb, columns and rows, tokens cut between them
    2d        hpnb, q x q ranks
    torch     parallelize_module with ColwiseParallel and RowwiseParallel
    torch-sp  the same with SequenceParallel                        torch_tensor_parallel.py has both plans

All have the same model class, initial weights, batch and fused AdamW, and live on the same ranks. A round
is one step of each, and the next round begins with another one; half of the rounds are with the last one
built first. A step is timed from a barrier to the last rank's end. What counts is the ratio within each
round. On a CPU a small ViT in float32; on GPUs ViT-L/16 and a GPT-2 of 1.5B parameters in bf16, of 20 heads
where the original has 25, which torch's plan cannot share among 4 ranks (`--heads 25` measures hpnb alone).
Before a clock counts, the losses of the first steps are compared: all compute the same model.

Bytes are those that leave a rank in one step, counted as `hpnb.record.traffic` does. Memory is the most
that a candidate has allocated in a step: weights, gradients and optimizer states too. Both are of the rank
with most.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

import hpnb
from hpnb import Axis, Layout, Mesh
from hpnb.bench import torch_tensor_parallel
from hpnb.bench.harness import WARM_UP, Step, nothing_left, timed
from hpnb.bench.profile_step import profiled
from hpnb.bench.report import Row
from hpnb.bench.tensor_task import MODELS, Task, task
from hpnb.models import GPT2Size

_ADAM: dict[str, Any] = {"lr": 1e-4, "fused": True}
_TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4, torch.float64: 1e-10}  # of the first loss


# --- the candidates --------------------------------------------------------------------------------------


def _hpnb(mode: str, sequence: bool, task: Task, axis: Axis) -> Step:
    model = hpnb.tensor_parallel.parallelize(task.build(), axis, mode, sequence)
    return _step(model, [{"params": list(model.parameters())}], task, by_words=False)


def _torch(sequence: bool, task: Task, axis: Axis) -> Step:
    model = torch_tensor_parallel.parallelize(task.build(), axis, sequence)
    return _step(model, torch_tensor_parallel.groups(model), task, by_words=isinstance(task.size, GPT2Size))


def _step(model: nn.Module, groups: list[dict[str, Any]], task: Task, by_words: bool) -> Step:
    optimizer, batch = torch.optim.AdamW(groups, **_ADAM), task.batch()

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        with loss_parallel() if by_words else nullcontext():
            loss: torch.Tensor = model(**batch).loss
            loss.backward()
        optimizer.step()
        return loss.detach()

    return step


CANDIDATES: dict[str, tuple[str, Callable[[Task, Axis], Step]]] = {
    "1d": ("hpnb 1d", partial(_hpnb, "1d", False)),
    "1d-sp": ("hpnb 1d, sequence parallel", partial(_hpnb, "1d", True)),
    "2d": ("hpnb 2d", partial(_hpnb, "2d", False)),
    "torch": ("torch", partial(_torch, False)),
    "torch-sp": ("torch, SequenceParallel", partial(_torch, True)),
}


# --- measuring -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """What one rank saw of one candidate.

    Attributes:
        seconds: of its steps, one a round.
        sent: bytes that leave this rank in a step.
        peak: the most bytes that it has allocated in a step, of the GPU; 0 without one.
        losses: of its first steps.
    """

    seconds: tuple[float, ...]
    sent: float
    peak: int
    losses: tuple[float, ...]


@dataclass(frozen=True)
class Found:
    """By candidate: what was measured, or why it was left out; and profiles, as text."""

    measured: dict[str, Measured] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    profiles: tuple[str, ...] = ()


def measure(task: Task, names: Sequence[str], rounds: int, last_first: bool, traces: str | None) -> Found:
    """On a rank: every candidate takes one step a round, and another one begins each time.

    Raises:
        RuntimeError: losses of the same weights and the same batch that are not the same.
    """
    axis, left_out = Mesh(Layout(tp=hpnb.world_size())).tp, {}
    steps: dict[str, Step] = {}
    losses, peaks, sent = {}, {}, {}
    with nothing_left():
        for name in reversed(names) if last_first else names:
            begun = _begin(partial(CANDIDATES[name][1], task, axis))
            if isinstance(begun, str):
                left_out[name] = begun
            else:
                steps[name], losses[name], peaks[name] = begun
        steps = {name: steps[name] for name in names if name in steps}
        apart(task, losses)
        for name, step in steps.items():
            with hpnb.record.traffic() as t:
                step()
            sent[name] = t.total
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        turn = list(steps)
        for _ in range(rounds):
            for name in turn:
                seconds[name].append(timed(steps[name]))
            turn.append(turn.pop(0))
        measured = {n: Measured(tuple(seconds[n]), sent[n], peaks[n], losses[n]) for n in steps}
        profiles = _profiles(task, steps, measured, Path(traces)) if traces else ()
        steps.clear()
    return Found(measured, left_out, profiles)


def _begin(build: Callable[[], Step]) -> tuple[Step, tuple[float, ...], int] | str:
    """(a candidate that is warm, losses of its first steps, its peak of memory), or why it cannot be."""
    with nothing_left():
        before = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
    try:  # all ranks are refused, or none
        step: Any = build()
        losses = [_number(step())]
    except ValueError as refused:
        return str(refused)
    losses += [_number(step()) for _ in range(WARM_UP - 1)]
    if not torch.cuda.is_initialized():
        return step, tuple(losses), 0
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return step, tuple(losses), torch.cuda.max_memory_allocated() - before


def _number(loss: Any) -> float:
    return float(loss.full_tensor()) if isinstance(loss, DTensor) else float(loss)


def apart(task: Task, losses: Mapping[str, Sequence[float]]) -> float:
    """How far the losses of the first steps are apart at most, over the first loss.

    Raises:
        RuntimeError: the first ones, which have the same weights, are too far apart.
    """
    first = {name: all_of[0] for name, all_of in losses.items()}
    if not first:
        return 0.0
    scale = statistics.median(first.values())
    if not max(first.values()) - min(first.values()) <= _TOLERANCE[task.dtype] * scale:
        told = ", ".join(f"{name} {loss:.6f}" for name, loss in first.items())
        raise RuntimeError(f"these compute different models: the same weights have the losses {told}")
    steps = zip(*losses.values(), strict=True)
    return float(max(max(step) - min(step) for step in steps) / scale)


def _profiles(
    task: Task, steps: Mapping[str, Step], measured: Mapping[str, Measured], folder: Path
) -> tuple[str, ...]:
    """The fastest of hpnb's, and of torch's."""
    found = []
    for kind in ("hpnb", "torch"):
        if mine := [name for name in steps if CANDIDATES[name][0].startswith(kind)]:
            name = min(mine, key=lambda one: statistics.median(measured[one].seconds))
            path = folder / f"{task.model}-{name}.json" if hpnb.rank() == 0 else None
            found.append(profiled(CANDIDATES[name][0], steps[name], path))
    return tuple(found)


# --- the table -------------------------------------------------------------------------------------------


def run(
    ranks: int,
    rounds: int,
    device: str = "auto",
    models: Sequence[str] = (),
    batch: int | None = None,
    heads: int | None = None,
    names: Sequence[str] = tuple(CANDIDATES),
    traces: str | None = None,
) -> None:
    """Print the tables, each as soon as it is there.

    Args:
        models: of `MODELS`; by default all of them on GPUs, and the ViT on a CPU.
        traces: a folder for Chrome traces of one step of hpnb's fastest and one of torch's.

    Raises:
        ValueError: no rounds, no batch, or heads that do not fit.
    """
    if rounds < 1:
        raise ValueError(f"rounds={rounds} measures nothing; use 1 or more")
    choice = hpnb.ranks.choose_device(device, ranks)
    with hpnb.Ranks(choice.ranks, device=choice.device, timeout=600.0) as pool:
        for model in models or MODELS[choice.device]:
            of = task(torch.device(choice.device), model, batch, heads)
            halves = [pool.run(measure, of, names, rounds - rounds // 2, False, traces)]
            if rounds > 1:
                halves.append(pool.run(measure, of, names, rounds // 2, True, None))
            title = f"{of.name}: {choice.ranks} ranks on {choice.device}, {rounds} rounds"
            print(report(title, of, halves), end="\n\n", flush=True)


def report(title: str, task: Task, halves: Sequence[Sequence[Found]]) -> str:
    """The table, and what was left out, as text.

    Args:
        halves: of the rounds, what each rank found.
    """
    first = halves[0][0]
    rows = {
        name: Row(CANDIDATES[name][0], sum((half[0].measured[name].seconds for half in halves), ()))
        for name in first.measured
    }
    torchs = (name for name in rows if CANDIDATES[name][0].startswith("torch"))
    theirs = sorted(torchs, key=lambda name: rows[name].median)
    rivals = [*theirs[:1], *(name for name in theirs[1:] if name == "torch-sp")]
    notes = {"torch-sp": torch_tensor_parallel.note(task.size, len(halves[0]))}
    names = {name: row.name + notes.get(name, "") for name, row in rows.items()}
    width = max(map(len, names.values()), default=0)
    heads = [f"{'':{width}} {'median':>11} {'quartiles':>20}"]
    heads += [f" {'over ' + rows[name].name:>30}" for name in rivals]
    lines = [title, "".join([*heads, f" {'leaves a rank':>14} {'peak':>10}"])]
    for name, row in rows.items():
        every = [found.measured[name] for half in halves for found in half]
        low, high = row.quartiles
        line = f"{names[name]:{width}} {row.median * 1e3:8.2f} ms {low * 1e3:8.2f} to {high * 1e3:8.2f}"
        for rival in rivals:
            ratio = Row("", tuple(a / b for a, b in zip(row.seconds, rows[rival].seconds, strict=True)))
            low, high = ratio.quartiles
            line += f" {f'{ratio.median:.3f} [{low:.3f}, {high:.3f}]':>30}"
        peak = max(m.peak for m in every)
        line += f" {max(m.sent for m in every) / 2**20:10.1f} MiB"
        lines.append(line + (f" {peak / 2**30:6.2f} GiB" if peak else f" {'-':>10}"))
    far = max(apart(task, {n: m.losses for n, m in one.measured.items()}) for half in halves for one in half)
    lines.append(f"losses of the first {WARM_UP} steps differ by {far:.1e} of the first one at most")
    lines += [f"left out: {CANDIDATES[name][0]}: {why}" for name, why in first.left_out.items()]
    lines += [f"\n{text}" for text in first.profiles]
    return "\n".join(lines)

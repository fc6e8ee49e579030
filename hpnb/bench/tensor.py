"""A training step whose every matrix is sharded over all ranks: hpnb beside torch's own program, in one run.

    python -m hpnb.bench tensor --ranks 4 --rounds 15

    1d        hpnb, columns and rows
    1d-sp     hpnb, columns and rows, tokens sharded between them
    2d        hpnb, q x q ranks
    torch     parallelize_module with ColwiseParallel and RowwiseParallel
    torch-sp  the same with SequenceParallel                  torch_tensor_parallel.py has both plans

All have the same model class, initial weights, batch and fused AdamW, and take turns on the same ranks
(harness.py). On a CPU a small ViT in float32; on GPUs ViT-L/16 and a GPT-2 of 1.5B parameters in bf16. That
GPT-2 has 20 heads where the original has 25, which torch's plan cannot shard over 4 ranks (`--heads 25`
measures hpnb alone). The losses of the first steps are compared before a clock counts, because all must
compute the same model.

The table says how many bytes leave a rank in one step, counted as `hpnb.record.traffic` does, and the most
bytes that a candidate has allocated in a step, with weights, gradients and optimizer state. Both are of the
rank with most.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import loss_parallel

import hpnb
from hpnb import Axis, Layout, Mesh
from hpnb.bench import torch_tensor_parallel
from hpnb.bench.harness import (
    WARM_UP,
    Comparison,
    Measurement,
    Step,
    compare,
    compare_both_orders,
    samples_of,
    time_step,
)
from hpnb.bench.profile_step import profile_step
from hpnb.bench.tasks import BatchFeed, TrainingTask, cast_inputs
from hpnb.models import GPT2_SIZES, SIZES, GPT2Size

MODELS = {"cuda": ("vit", "gpt2"), "cpu": ("vit",)}  # by the kind of device, if none is asked for
_ADAM: dict[str, Any] = {"lr": 1e-4, "fused": True}
_TOLERANCE = {16: 2e-2, 32: 1e-4, 64: 1e-10}  # of the first loss, by bits


def make_task(device: str, model: str, batch: int | None = None, heads: int | None = None) -> TrainingTask:
    """What is trained on this kind of device, "cpu" or "cuda".

    Args:
        model: "vit" or "gpt2".
        batch: images or sequences of a step, over all ranks; None is the usual number.
        heads: of a GPT-2, if not the usual number.

    Raises:
        ValueError: no batch, or heads that do not fit.
    """
    if batch is not None and batch < 1:
        raise ValueError(f"batch={batch} is no batch; use 1 or more")
    gpu = device != "cpu"
    bits = 16 if gpu else 32
    if model == "vit":
        count = batch or (64 if gpu else 16)
        return TrainingTask(model, SIZES["l16" if gpu else "laptop"], count, count, bits)
    size = replace(GPT2_SIZES["1.5b" if gpu else "laptop"], heads=heads or (20 if gpu else 4))
    count = batch or (8 if gpu else 4)
    return TrainingTask(model, size, count, count, bits)


# --- the candidates --------------------------------------------------------------------------------------


def _hpnb(mode: str, sequence: bool, task: TrainingTask, axis: Axis) -> Step:
    model = hpnb.tensor_parallel.parallelize(task.build().to(task.dtype), axis, mode, sequence)
    return _step(model, [{"params": list(model.parameters())}], task, split_vocab=False)


def _torch(sequence: bool, task: TrainingTask, axis: Axis) -> Step:
    model = torch_tensor_parallel.parallelize(task.build().to(task.dtype), axis, sequence)
    groups = torch_tensor_parallel.groups(model)
    return _step(model, groups, task, split_vocab=isinstance(task.size, GPT2Size))


def _step(model: nn.Module, groups: list[dict[str, Any]], task: TrainingTask, split_vocab: bool) -> Step:
    optimizer, batch = torch.optim.AdamW(groups, **_ADAM), cast_inputs(BatchFeed(task).batch, task.dtype)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        with loss_parallel() if split_vocab else nullcontext():
            loss: torch.Tensor = model(**batch).loss
            loss.backward()
        optimizer.step()
        return loss.detach()

    return step


CANDIDATES: dict[str, tuple[str, Callable[[TrainingTask, Axis], Step]]] = {
    "1d": ("hpnb 1d", partial(_hpnb, "1d", False)),
    "1d-sp": ("hpnb 1d, sequence parallel", partial(_hpnb, "1d", True)),
    "2d": ("hpnb 2d", partial(_hpnb, "2d", False)),
    "torch": ("torch", partial(_torch, False)),
    "torch-sp": ("torch, SequenceParallel", partial(_torch, True)),
}


# --- measuring -------------------------------------------------------------------------------------------


def measure(
    rounds: int, last_first: bool, task: TrainingTask, names: Sequence[str], folder: str | None
) -> Comparison:
    """On a rank: the candidates take turns.

    Args:
        folder: for Chrome traces of one step of hpnb's fastest and one of torch's, if not last_first.

    Raises:
        RuntimeError: losses of the same weights and the same batch that are not the same.
    """
    axis = Mesh(Layout(tp=hpnb.world_size())).tp

    def profile(steps: Mapping[str, Step], measured: Mapping[str, Measurement]) -> tuple[str, ...]:
        texts = []
        for side in ("hpnb", "torch") if folder is not None and not last_first else ():
            if of_side := [name for name in steps if CANDIDATES[name][0].startswith(side)]:
                name = min(of_side, key=lambda one: statistics.median(measured[one].seconds))
                path = Path(str(folder), f"{task.what}-{name}.json") if hpnb.rank() == 0 else None
                texts.append(profile_step(CANDIDATES[name][0], partial(time_step, steps[name]), path))
        return tuple(texts)

    builders = {name: partial(CANDIDATES[name][1], task, axis) for name in names}
    check = partial(compare_losses, task)
    return compare(builders, rounds, last_first, count_bytes=True, check=check, profile=profile)


def compare_losses(task: TrainingTask, losses: Mapping[str, Sequence[float]]) -> float:
    """How much the losses of the first steps differ at most, over the first loss.

    Raises:
        RuntimeError: the first ones, which have the same weights, differ too much.
    """
    first = {name: of_steps[0] for name, of_steps in losses.items()}
    if not first:
        return 0.0
    scale = statistics.median(first.values())
    if not max(first.values()) - min(first.values()) <= _TOLERANCE[task.bits] * scale:
        values = ", ".join(f"{name} {loss:.6f}" for name, loss in first.items())
        raise RuntimeError(f"these compute different models: the same weights have the losses {values}")
    steps = zip(*losses.values(), strict=True)
    return float(max(max(step) - min(step) for step in steps) / scale)


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
    choice = hpnb.ranks.choose_device(device, ranks)
    of_models = [make_task(choice.device, model, batch, heads) for model in models or MODELS[choice.device]]
    with hpnb.Ranks(choice.ranks, device=choice.device, timeout=600.0) as pool:
        for task in of_models:
            halves = compare_both_orders(pool, measure, rounds, task, names, traces)
            title = f"{task.title}: {choice.ranks} ranks on {choice.device}, {rounds} rounds"
            print(report(title, task, halves), end="\n\n", flush=True)


def report(title: str, task: TrainingTask, halves: Sequence[Sequence[Comparison]]) -> str:
    """The table, and what was left out, as text.

    Args:
        halves: of the rounds, what each rank measured.
    """
    first, rows = halves[0][0], samples_of(halves)
    torch_rows = (name for name in rows if CANDIDATES[name][0].startswith("torch"))
    by_speed = sorted(torch_rows, key=lambda name: rows[name].median)
    rivals = [*by_speed[:1], *(name for name in by_speed[1:] if name == "torch-sp")]
    titles = {name: CANDIDATES[name][0] for name in rows}
    if "torch-sp" in titles:
        titles["torch-sp"] += torch_tensor_parallel.note(task.size, len(halves[0]))
    width = max(map(len, titles.values()), default=0)
    heads = [f"{'':{width}} {'median':>11} {'quartiles':>20}"]
    heads += [f" {'over ' + CANDIDATES[name][0]:>30}" for name in rivals]
    lines = [title, "".join([*heads, f" {'leaves a rank':>14} {'peak':>10}"])]
    for name, row in rows.items():
        low, high = row.quartiles
        line = f"{titles[name]:{width}} {row.median * 1e3:8.2f} ms {low * 1e3:8.2f} to {high * 1e3:8.2f}"
        line += "".join(f" {row.over(rows[rival])!s:>30}" for rival in rivals)
        on_ranks = [comparison.measured[name] for half in halves for comparison in half]
        peak = max(m.peak for m in on_ranks)
        line += f" {max(m.sent for m in on_ranks) / 2**20:10.1f} MiB"
        lines.append(line + (f" {peak / 2**30:6.2f} GiB" if peak else f" {'-':>10}"))
    of_ranks = [{n: m.losses for n, m in one.measured.items()} for half in halves for one in half]
    difference = max(compare_losses(task, losses) for losses in of_ranks)
    lines.append(f"losses of the first {WARM_UP} steps differ by {difference:.1e} of the first one at most")
    lines += [f"left out: {CANDIDATES[name][0]}: {why}" for name, why in first.left_out.items()]
    lines += [f"\n{text}" for text in first.profiles]
    return "\n".join(lines)

"""One training step with replicas or shards: hpnb beside torch's own, in one run.

    python -m hpnb.bench data-parallel --ranks 2 --pairs 15

    hpnb.DataParallel    beside    DistributedDataParallel
    hpnb.ZeroOptimizer   beside    ZeroRedundancyOptimizer in DistributedDataParallel   (ZeRO stage 1)
    hpnb.fully_shard     beside    torch.distributed.fsdp.fully_shard, FSDP2            (ZeRO stage 3)

Both of a pair have the same model, batch, precision and AdamW, and take turns on the same ranks (harness.py).
On a CPU a small ViT in float32; on GPUs ViT-L/16 and a GPT-2 of 0.35B parameters in bf16 (ZeRO stage 3 from
float32 shards). A small batch shows what the CPU costs, a large one (`--batch 4`) what the GPU does. On GPUs
the table also says by how much memory rises in a step above what is held between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import hpnb
from hpnb import Axis, Layout, Mesh
from hpnb.bench.harness import Comparison, Step, compare, compare_both_orders, pair_table
from hpnb.bench.tasks import BatchFeed, TrainingTask, cast_inputs
from hpnb.bench.torch_precision import blocks
from hpnb.models import GPT2_SIZES, SIZES


def tasks(device: str, ranks: int, batch: int = 1) -> list[TrainingTask]:
    """What is trained on this kind of device; a rank's batch is `batch` times the smallest."""
    if device == "cpu":
        return [TrainingTask("laptop ViT", SIZES["laptop"], 16 * batch * ranks, 16 * batch, 32)]
    images, sequences = 64 * batch, 8 * batch
    return [
        TrainingTask("ViT-L/16", SIZES["l16"], images * ranks, images, 16),
        TrainingTask("GPT-2 0.35B", GPT2_SIZES["355m"], sequences * ranks, sequences, 16),
    ]


# --- the programs ----------------------------------------------------------------------------------


def _replicas_hpnb(task: TrainingTask, axis: Axis) -> Step:
    module = task.build().to(task.dtype)
    return _step(hpnb.DataParallel(module, axis), _adam(module), task, axis)


def _replicas_torch(task: TrainingTask, axis: Axis) -> Step:
    module = task.build().to(task.dtype)
    return _step(_ddp(module, axis), _adam(module), task, axis)


def _stage_1_hpnb(task: TrainingTask, axis: Axis) -> Step:
    module = task.build().to(task.dtype)
    optimizer = hpnb.ZeroOptimizer(module.parameters(), torch.optim.AdamW, axis, stage=1, **_ADAM)
    return _step(module, optimizer, task, axis)


def _stage_1_torch(task: TrainingTask, axis: Axis) -> Step:
    module = task.build().to(task.dtype)
    optimizer = ZeroRedundancyOptimizer(
        module.parameters(), torch.optim.AdamW, process_group=axis.group,
        parameters_as_bucket_view=True, **_ADAM,  # else each parameter is a message of its own
    )  # fmt: skip
    return _step(_ddp(module, axis), optimizer, task, axis)


def _stage_3_hpnb(task: TrainingTask, axis: Axis) -> Step:
    module = task.build()
    hpnb.fully_shard(module, axis, dtype=task.dtype)
    return _step(module, _adam(module), task, axis)


def _stage_3_torch(task: TrainingTask, axis: Axis) -> Step:
    module = task.build()
    mesh = dist.device_mesh.DeviceMesh.from_group(axis.group, hpnb.device().type)
    policy = MixedPrecisionPolicy(param_dtype=task.dtype)
    for block in blocks(module):
        fsdp2(block, mesh=mesh, mp_policy=policy)
    fsdp2(module, mesh=mesh, mp_policy=policy)
    return _step(module, _adam(module), task, axis)


CONTESTS: dict[str, dict[str, Callable[[TrainingTask, Axis], Step]]] = {
    "replicas": {"hpnb.DataParallel": _replicas_hpnb, "torch DDP": _replicas_torch},
    "stage 1": {"hpnb.ZeroOptimizer": _stage_1_hpnb, "torch DDP + ZeroRedundancyOptimizer": _stage_1_torch},
    "stage 3": {"hpnb.fully_shard": _stage_3_hpnb, "torch FSDP2": _stage_3_torch},
}
_ADAM: dict[str, Any] = {"lr": 1e-4, "fused": True}


def _adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), **_ADAM)


def _ddp(module: nn.Module, axis: Axis) -> nn.Module:
    return DistributedDataParallel(module, gradient_as_bucket_view=True, process_group=axis.group)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, task: TrainingTask, axis: Axis) -> Step:
    batch = cast_inputs(BatchFeed(task, axis.rank, axis.size).batch, task.dtype)  # as FSDP2 casts them

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(**batch).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


# --- measuring -------------------------------------------------------------------------------------


def measure(rounds: int, last_first: bool, contest: str, task: TrainingTask) -> Comparison:
    """On a rank: hpnb's program and torch's take turns."""
    axis = Mesh(Layout(dp=hpnb.world_size())).dp
    builders = {name: partial(build, task, axis) for name, build in CONTESTS[contest].items()}
    return compare(builders, rounds, last_first)


def run(
    ranks: int, pairs: int, device: str = "auto", contests: Sequence[str] = tuple(CONTESTS), batch: int = 1
) -> str:
    """The tables, as text."""
    choice = hpnb.ranks.choose_device(device, ranks)
    tables = []
    with hpnb.Ranks(choice.ranks, device=choice.device, timeout=600.0) as pool:
        for task in tasks(choice.device, choice.ranks, batch):
            for contest in contests:
                halves = compare_both_orders(pool, measure, pairs, contest, task)
                title = f"{task.title}: {choice.ranks} ranks on {choice.device}, {pairs} pairs of steps"
                tables.append(pair_table(title, halves))
    return "\n\n".join(tables)

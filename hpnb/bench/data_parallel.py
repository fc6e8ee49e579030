"""One training step with replicas or shards: hpnb beside torch's own, in one run.

    python -m hpnb.bench data-parallel --ranks 2 --pairs 15

    hpnb.DataParallel    beside    DistributedDataParallel
    hpnb.ZeroOptimizer   beside    ZeroRedundancyOptimizer in DistributedDataParallel   (stage 1)
    hpnb.fully_shard     beside    torch.distributed.fsdp.fully_shard, FSDP2            (stage 3)

Both of a pair have the same model, batch, precision and AdamW, live on the same ranks, and take turns, so a
busy moment falls on both. Half of the turns are with one of them built first and half with the other, since
who gets memory first can be slower by a percent. A step is timed from a barrier to the last rank's end. On
a CPU a small ViT in float32; on GPUs ViT-L/16 and a GPT-2 of 0.35B parameters in bf16 (of stage 3 from
float32 shards). A small batch shows what the host costs, a large one (`--batch 4`) what the GPU does. On
GPUs the table also says by how much memory rises in a step above what is held between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from hpnb.bench.harness import Measured, Step, nothing_left, pair_table, take_turns


@dataclass(frozen=True)
class Task:
    """A model and its batch, built anew for each candidate; `units` are what is gathered and freed as one."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], dict[str, torch.Tensor]]
    units: Callable[[nn.Module], nn.ModuleList]
    dtype: torch.dtype


def tasks(device: torch.device, batch: int = 1) -> list[Task]:
    """What is trained on this kind of device; a rank's batch is `batch` times the smallest."""
    f32, bf16 = torch.float32, torch.bfloat16
    if device.type == "cpu":
        n = 16 * batch
        return [Task(f"laptop ViT, float32, {n} images", _vit("laptop"), _images(n, 32), _blocks, f32)]
    n, m = 64 * batch, 8 * batch
    return [
        Task(f"ViT-L/16, bf16, {n} images a rank", _vit("l16"), _images(n, 224), _blocks, bf16),
        Task(f"GPT-2 0.35B, bf16, {m} x 1024 tokens a rank", _gpt2, _tokens(m, 1024), _blocks, bf16),
    ]


# --- the candidates --------------------------------------------------------------------------------


def _replicas_hpnb(task: Task, axis: Axis) -> Step:
    module = task.build().to(task.dtype)
    return _step(hpnb.DataParallel(module, axis), _adam(module), task)


def _replicas_torch(task: Task, axis: Axis) -> Step:
    module = task.build().to(task.dtype)
    return _step(_ddp(module, axis), _adam(module), task)


def _stage_1_hpnb(task: Task, axis: Axis) -> Step:
    module = task.build().to(task.dtype)
    optimizer = hpnb.ZeroOptimizer(module.parameters(), torch.optim.AdamW, axis, stage=1, **_ADAM)
    return _step(module, optimizer, task)


def _stage_1_torch(task: Task, axis: Axis) -> Step:
    module = task.build().to(task.dtype)
    optimizer = ZeroRedundancyOptimizer(
        module.parameters(), torch.optim.AdamW, process_group=axis.group,
        parameters_as_bucket_view=True, **_ADAM,  # else each parameter is a message of its own
    )  # fmt: skip
    return _step(_ddp(module, axis), optimizer, task)


def _stage_3_hpnb(task: Task, axis: Axis) -> Step:
    module = task.build()
    hpnb.fully_shard(module, axis, dtype=task.dtype)
    return _step(module, _adam(module), task)


def _stage_3_torch(task: Task, axis: Axis) -> Step:
    module = task.build()
    mesh = dist.device_mesh.DeviceMesh.from_group(axis.group, hpnb.device().type)
    policy = MixedPrecisionPolicy(param_dtype=task.dtype)
    for unit in task.units(module):
        fsdp2(unit, mesh=mesh, mp_policy=policy)
    fsdp2(module, mesh=mesh, mp_policy=policy)
    return _step(module, _adam(module), task)


Candidate = Callable[[Task, Axis], Step]
CONTESTS: dict[str, tuple[Candidate, Candidate]] = {
    "replicas": (_replicas_hpnb, _replicas_torch),
    "stage 1": (_stage_1_hpnb, _stage_1_torch),
    "stage 3": (_stage_3_hpnb, _stage_3_torch),
}
NAMES = {
    "replicas": ("hpnb.DataParallel", "torch DDP"),
    "stage 1": ("hpnb.ZeroOptimizer", "torch DDP + ZeroRedundancyOptimizer"),
    "stage 3": ("hpnb.fully_shard", "torch FSDP2"),
}
_ADAM: dict[str, Any] = {"lr": 1e-4, "fused": True}


def _adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), **_ADAM)


def _ddp(module: nn.Module, axis: Axis) -> nn.Module:
    return DistributedDataParallel(module, gradient_as_bucket_view=True, process_group=axis.group)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, task: Task) -> Step:
    batch = task.batch()
    # Inputs in the dtype of the compute, as FSDP2 casts them.
    batch = {k: v.to(task.dtype) if v.is_floating_point() else v for k, v in batch.items()}

    def step() -> None:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()

    return step


# --- measuring -------------------------------------------------------------------------------------


def measure(
    contest: str, place: int, pairs: int, batch: int, torch_first: bool
) -> tuple[str, list[Measured]]:
    """On a rank: (the task, what was measured of hpnb's, and of torch's)."""
    axis, task = Mesh(Layout(dp=hpnb.world_size())).dp, tasks(hpnb.device(), batch)[place]
    with nothing_left():
        found = take_turns([partial(make, task, axis) for make in CONTESTS[contest]], pairs, torch_first)
    return task.name, found


def run(
    ranks: int,
    pairs: int,
    device: str = "auto",
    contests: Sequence[str] = tuple(CONTESTS),
    batch: int = 1,
) -> str:
    """The tables, as text."""
    choice = hpnb.ranks.choose_device(device, ranks)
    found = []
    with hpnb.Ranks(choice.ranks, device=choice.device, timeout=600.0) as pool:
        for place in range(len(tasks(torch.device(choice.device)))):
            for contest in contests:
                name, first = pool.run(measure, contest, place, pairs - pairs // 2, batch, False)[0]
                _, second = pool.run(measure, contest, place, pairs // 2, batch, True)[0]
                measured = [a + b for a, b in zip(first, second, strict=True)]
                title = f"{name}: {choice.ranks} ranks on {choice.device}, {pairs} pairs of steps"
                found.append(pair_table(title, NAMES[contest], measured))
    return "\n\n".join(found)


# --- models ----------------------------------------------------------------------------------------


def _vit(size: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model: nn.Module = hpnb.models.vit(size, classes=10, device=hpnb.device())
        return model.train()

    return build


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": 1024, "n_layer": 24, "n_head": 16}
    config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    with hpnb.device():
        model: nn.Module = GPT2LMHeadModel(config)
    return model.train()


def _images(count: int, side: int) -> Callable[[], dict[str, torch.Tensor]]:
    return lambda: {
        "pixel_values": torch.randn(count, 3, side, side, device=hpnb.device()),
        "labels": torch.zeros(count, dtype=torch.long, device=hpnb.device()),
    }


def _tokens(count: int, length: int) -> Callable[[], dict[str, torch.Tensor]]:
    def batch() -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 50257, (count, length), device=hpnb.device())
        return {"input_ids": ids, "labels": ids}

    return batch


def _blocks(module: nn.Module) -> nn.ModuleList:
    return next(m for m in module.modules() if isinstance(m, nn.ModuleList))

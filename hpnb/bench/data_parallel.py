"""One training step with replicas or shards: hpnb beside torch's own, in one run.

    python -m hpnb.bench data-parallel --ranks 2 --pairs 15

    hpnb.DataParallel    beside    DistributedDataParallel
    hpnb.ZeroOptimizer   beside    ZeroRedundancyOptimizer in DistributedDataParallel   (ZeRO stage 1)
    hpnb.fully_shard     beside    torch.distributed.fsdp.fully_shard, FSDP2            (ZeRO stage 3)

Both of a pair have the same model, batch, precision and AdamW, and take turns on the same ranks (harness.py).
Models are not compiled. On a CPU a small ViT in float32; on GPUs ViT-L/16 and a GPT-2 of 0.35B parameters in
bf16, with float32 master weights in both programs of a pair (`PRECISIONS`, which the output repeats). A small
batch shows what the CPU costs, a large one (`--batch 4`) what the GPU does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

import hpnb
from hpnb import Layout, Mesh
from hpnb.bench import torch_precision
from hpnb.bench.harness import print_contest, rank_pools
from hpnb.bench.program import Candidate, Program
from hpnb.bench.tasks import TrainingTask
from hpnb.bench.torch_data_parallel import accumulating, fsdp, replicas
from hpnb.mesh import ParallelLayout
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


def _hpnb(zero_stage: int, task: TrainingTask, layout: ParallelLayout) -> Program:
    """hpnb's replicas, with a sharded optimizer (ZeRO stage 1) or themselves sharded (3)."""
    axis, model = Mesh(Layout(dp=layout.dp)).dp, task.build()
    torch_precision.use_loss(model, "no")
    runs: Any = model
    optimizer: torch_precision.OptimizerLike
    if zero_stage == 3:
        hpnb.fully_shard(model, axis, dtype=task.dtype)
        optimizer = torch_precision.adamw(model.parameters(), task.lr)
    else:
        model.to(task.dtype)
        if zero_stage == 1:
            adamw: Any = torch.optim.AdamW
            optimizer = hpnb.ZeroOptimizer(model.parameters(), adamw, axis, stage=1, lr=task.lr, fused=True)
        else:
            runs = hpnb.DataParallel(model, axis)
            optimizer = torch_precision.adamw(model.parameters(), task.lr)
    return accumulating(task, layout, runs, optimizer)


CONTESTS = {
    "replicas": [
        Candidate("hpnb.DataParallel", partial(_hpnb, 0)),
        Candidate("torch DDP", partial(replicas, "no")),
    ],
    "zero1": [
        Candidate("hpnb.ZeroOptimizer", partial(_hpnb, 1)),
        Candidate("torch DDP + ZeroRedundancyOptimizer", partial(replicas, "no", zero_1=True)),
    ],
    "zero3": [
        Candidate("hpnb.fully_shard", partial(_hpnb, 3)),
        Candidate("torch FSDP2", partial(fsdp, "no", True, True)),
    ],
}


# Of both programs of a pair, on GPUs.
PRECISIONS = {
    "replicas": "bf16 weights and gradients; AdamW updates float32 master weights",
    "zero1": "bf16 weights and gradients; AdamW updates float32 master weights, sharded",
    "zero3": "float32 shards, which AdamW updates; gathered as bf16",
}


def run(ranks: int, rounds: int, device: str, contest: Sequence[str] | None, batch: int) -> None:
    """Print the tables, each as soon as it is there."""
    choice = hpnb.ranks.choose_device(device, ranks)
    with rank_pools(choice.device, 600.0) as pools:
        for task in tasks(choice.device, choice.ranks, batch):
            for name in contest or CONTESTS:
                precision = PRECISIONS[name] if task.bits == 16 else "float32 throughout"
                print(f"{name}, both programs: {precision}", flush=True)
                print_contest(pools, task, name, ParallelLayout(dp=choice.ranks), CONTESTS[name], rounds)

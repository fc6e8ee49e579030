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
measures hpnb alone). A candidate whose first losses differ from those of hpnb's best has failed, because all
must compute the same model.

The table says how many bytes leave a rank in one step, counted as `hpnb.record.traffic` does, and the most
bytes that a candidate has allocated in a step, with weights, gradients and optimizer state. Both are of the
rank with most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import hpnb
from hpnb import Layout, Mesh
from hpnb.bench import torch_precision
from hpnb.bench.harness import print_contest, rank_pools
from hpnb.bench.program import Candidate, Program
from hpnb.bench.tasks import TrainingTask
from hpnb.bench.torch_data_parallel import accumulating
from hpnb.bench.torch_tensor_parallel import note, tensor_parallel
from hpnb.mesh import ParallelLayout
from hpnb.models import GPT2_SIZES, SIZES

MODELS = {"cuda": ("vit", "gpt2"), "cpu": ("vit",)}  # by the kind of device, if none is asked for


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


def candidates(task: TrainingTask, ranks: int) -> dict[str, Candidate]:
    return {
        "1d": Candidate("hpnb 1d", partial(_hpnb, "1d", False)),
        "1d-sp": Candidate("hpnb 1d, sequence parallel", partial(_hpnb, "1d", True)),
        "2d": Candidate("hpnb 2d", partial(_hpnb, "2d", False)),
        "torch": Candidate("torch", partial(tensor_parallel, "no", False)),
        "torch-sp": Candidate(
            f"torch, SequenceParallel{note(task.size, ranks)}", partial(tensor_parallel, "no", True)
        ),
    }


def _hpnb(mode: str, sequence: bool, task: TrainingTask, layout: ParallelLayout) -> Program:
    axis = Mesh(Layout(tp=layout.tp)).tp
    model = hpnb.tensor_parallel.parallelize(task.build().to(task.dtype), axis, mode, sequence)
    return accumulating(task, layout, model, torch_precision.adamw(model.parameters(), task.lr))


# --- measuring -------------------------------------------------------------------------------------------


def run(
    ranks: int,
    rounds: int,
    device: str,
    model: Sequence[str] | None = None,
    batch: int | None = None,
    heads: int | None = None,
    candidate: Sequence[str] | None = None,
    profile: str | None = None,
) -> None:
    """Print the tables, each as soon as it is there.

    Args:
        model: of `MODELS`; by default all of them on GPUs, and the ViT on a CPU.
        profile: a folder for Chrome traces of one step of hpnb's fastest and one of torch's.

    Raises:
        ValueError: no batch, or heads that do not fit.
    """
    choice = hpnb.ranks.choose_device(device, ranks)
    layout = ParallelLayout(tp=choice.ranks)
    of_models = [make_task(choice.device, name, batch, heads) for name in model or MODELS[choice.device]]
    with rank_pools(choice.device, 600.0) as pools:
        for task in of_models:
            known = candidates(task, choice.ranks)
            chosen = [known[name] for name in candidate or known]
            print_contest(
                pools, task, f"tp{choice.ranks}", layout, chosen, rounds, traces=profile, count_bytes=True
            )

"""A run file for `python -m hpnb train`, and the lines that start it under torchrun and Slurm."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpnb.files import write_text
from hpnb.hybrid.plan_command.search import Plan
from hpnb.mesh import ParallelLayout
from hpnb.models import GPT2Size, ViTSize
from hpnb.theory.datasheets import GPU
from hpnb.theory.plan_task import PlanTask

LOSS_CHUNK = 4096  # tokens at a time of a GPT-2's loss, as the plan assumes and the run file says


def run_file(task: PlanTask, gpu: GPU, plan: Plan, size: str | GPT2Size | ViTSize) -> str:
    """The text of a run file. The model's `size` is as `read_size` gives it."""
    layout, causal = plan.layout, task.model.causal
    m, samples = task.microbatches(layout), task.batch // layout.dp
    model = [f'family = "{"gpt2" if causal else "vit"}"', f"size = {_size(size)}"]
    model += [f"length = {task.sequence}"] * causal
    side = size.image if isinstance(size, ViTSize) else 224
    data = 'name = "text"' if causal else f'name = "beans"\nimage_size = {side}'
    lines = [f"{name} = {json.dumps(value)}" for name, value in plugin_options(task, plan.layout).items()]
    accumulation = m if layout.pp == 1 else 1
    return "\n".join(
        [
            f"# {plan.code} on {task.cluster.gpus} x {gpu.name}: predicted {1e3 * plan.step:,.0f} ms a step, "
            f"{plan.bytes / 1e9:.1f} GB on the fullest rank",
            "", "[model]", *model,
            "", "[data]", data, f"batch_size = {samples // accumulation}",
            "", "[layout]", *lines,
            "", "[training]", "steps = 1000", "learning_rate = 3e-4", "warmup_steps = 100",
            "max_norm = 1.0", f'precision = "{gpu.dtype}"', f"accumulation = {accumulation}", "",
        ]
    )  # fmt: skip


def _size(size: str | GPT2Size | ViTSize) -> str:
    """A name, or a table of numbers."""
    if isinstance(size, str):
        return f'"{size}"'
    return "{ " + ", ".join(f"{name} = {number}" for name, number in asdict(size).items()) + " }"


def plugin_options(task: PlanTask, layout: ParallelLayout) -> dict[str, Any]:
    """Of the HybridParallelPlugin."""
    options: dict[str, Any] = {"tp_size": layout.tp, "pp_size": layout.pp, "zero_stage": layout.zero_stage}
    if layout.cp > 1:
        options |= {"cp_size": layout.cp, "context_parallel": layout.context_parallel}
    if layout.ep > 1:
        options["ep_size"] = layout.ep
    if layout.pp > 1:
        options |= {"pp_style": layout.schedule, "num_model_chunks": layout.chunks}
        options["num_microbatches"] = task.microbatches(layout)
    if layout.recomputation:
        options["activation_checkpointing"] = layout.recomputation
    if layout.sequence_parallel:
        options["enable_sequence_parallelism"] = True
    options["enable_all_optimization"] = True
    if task.loss_chunk and layout.cp == 1:
        options["loss_chunk"] = task.loss_chunk
    return options


def no_run_file(task: PlanTask, gpu: GPU, plan: Plan) -> str:
    """What to do where `hpnb train` does not build the model."""
    options = {**plugin_options(task, plan.layout), "precision": gpu.dtype}
    listed = ", ".join(f"{name}={value!r}" for name, value in options.items())
    m = 1 if plan.layout.pp > 1 else task.microbatches(plan.layout)
    return (
        f"hpnb train builds GPT-2 and ViT, not {task.model.name}, so there is no run file for {plan.code}; "
        f"in a program of your own, boost the model with hpnb.HybridParallelPlugin({listed})"
        + (f" and accumulate {m} batches a step" if m > 1 else "")
    )


def write_run_file(path: str, task: PlanTask, gpu: GPU, plan: Plan, size: str | GPT2Size | ViTSize) -> None:
    """Write it, and read it as `hpnb train` does, which may refuse it."""
    from hpnb.hybrid.train_command.run_file import load  # imports transformers, which planning needs not

    write_text(Path(path), run_file(task, gpu, plan, size))
    load(path).check_ranks(task.cluster.gpus)


def launch_lines(task: PlanTask, file: str = "run.toml") -> list[str]:
    """For torchrun on every node, and for Slurm."""
    host = task.cluster.host
    nodes = task.cluster.gpus // host
    program = f"-m hpnb train {file}"
    if nodes == 1:
        torchrun = f"torchrun --standalone --nproc-per-node {host} {program}"
        return [torchrun, f"srun --nodes 1 --ntasks 1 --gpus-per-node {host} {torchrun}"]
    torchrun = f"torchrun --nnodes {nodes} --nproc-per-node {host} --rdzv-backend c10d"
    return [
        f"{torchrun} --rdzv-endpoint FIRST_NODE:29500 {program}",
        f"srun --nodes {nodes} --ntasks-per-node 1 --gpus-per-node {host} {torchrun} "
        f"--rdzv-id $SLURM_JOB_ID --rdzv-endpoint $(scontrol show hostnames | head -n 1):29500 {program}",
    ]

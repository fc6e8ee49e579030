"""A run file for `python -m hpnb train`, and the lines that start it under torchrun and Slurm."""

from __future__ import annotations

from pathlib import Path

from hpnb.files import write_text
from hpnb.hybrid.plan_command.read_model import GPT2_NAMES, VIT_NAMES
from hpnb.hybrid.plan_command.search import Plan
from hpnb.hybrid.train_command.run_file import load
from hpnb.theory.datasheets import GPU
from hpnb.theory.plan_step import PlanTask

LOSS_CHUNK = 4096  # tokens at a time of a GPT-2's loss, as the plan assumes and the run file says


def run_file(task: PlanTask, gpu: GPU, plan: Plan) -> str:
    """The text of a run file.

    Raises:
        ValueError: a model that `hpnb train` does not build.
    """
    name, layout = task.model.name, plan.layout
    if name not in (*GPT2_NAMES, *VIT_NAMES):
        raise ValueError(
            f"hpnb train builds {', '.join((*GPT2_NAMES, *VIT_NAMES))}, not {name}; register the model "
            "(hpnb.models.register) and give HybridParallelPlugin the layout"
        )
    causal, m, samples = task.model.causal, task.microbatches(layout), task.batch // layout.dp
    model = f'family = "gpt2"\nsize = "{GPT2_NAMES[name]}"\nlength = {task.sequence}' if causal else (
        f'family = "vit"\nsize = "{VIT_NAMES[name]}"'
    )  # fmt: skip
    data = 'name = "text"' if causal else 'name = "beans"\nimage_size = 224'
    lines = [f"tp_size = {layout.tp}", f"pp_size = {layout.pp}", f"zero_stage = {layout.zero_stage}"]
    if layout.pp > 1:
        lines += [f'pp_style = "{layout.schedule}"', f"num_model_chunks = {layout.chunks}"]
        lines += [f"num_microbatches = {m}"]
    lines += ['activation_checkpointing = "full"'] * (layout.recomputation == "full")
    lines += ["enable_sequence_parallelism = true"] * layout.sequence_parallel
    lines += ["enable_all_optimization = true"]
    lines += [f"loss_chunk = {task.loss_chunk}"] * bool(task.loss_chunk)
    accumulation = m if layout.pp == 1 else 1
    return "\n".join(
        [
            f"# {plan.code} on {task.cluster.gpus} x {gpu.name}: predicted {1e3 * plan.step:,.0f} ms a step, "
            f"{plan.bytes / 1e9:.1f} GB on the fullest rank",
            "", "[model]", model,
            "", "[data]", data, f"batch_size = {samples // accumulation}",
            "", "[layout]", *lines,
            "", "[training]", "steps = 1000", "learning_rate = 3e-4", "warmup_steps = 100",
            "max_norm = 1.0", f'precision = "{gpu.dtype}"', f"accumulation = {accumulation}", "",
        ]
    )  # fmt: skip


def write_run_file(path: str, task: PlanTask, gpu: GPU, plan: Plan) -> None:
    """Write it, and read it as `hpnb train` does.

    Raises:
        ValueError, OSError: it cannot be written, or `hpnb train` would refuse it.
    """
    write_text(Path(path), run_file(task, gpu, plan))
    load(path).check_ranks(task.cluster.gpus)


def launch_lines(task: PlanTask, file: str = "run.toml") -> list[str]:
    """For torchrun on every node, and for Slurm."""
    host = task.cluster.host
    nodes = task.cluster.gpus // host
    program = f"-m hpnb train {file}"
    if nodes == 1:
        return [
            f"torchrun --standalone --nproc-per-node {host} {program}",
            f"srun --nodes 1 --ntasks 1 --gpus-per-node {host} "
            f"torchrun --standalone --nproc-per-node {host} {program}",
        ]
    rest = f"--nproc-per-node {host} --rdzv-backend c10d"
    return [
        f"torchrun --nnodes {nodes} {rest} --rdzv-endpoint FIRST_NODE:29500 {program}",
        f"srun --nodes {nodes} --ntasks-per-node 1 --gpus-per-node {host} torchrun --nnodes {nodes} {rest} "
        f"--rdzv-id $SLURM_JOB_ID --rdzv-endpoint $(scontrol show hostnames | head -n 1):29500 {program}",
    ]

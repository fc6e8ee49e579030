"""`python -m hpnb plan`: will it fit, how fast, which layout, and why.

0      planned
2      what was asked for cannot be planned, nothing fits, or the plan cannot be written as a run file; one
       sentence says what would work
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from hpnb.hybrid.plan_command.layout_code import layout_code, parse_layout_code
from hpnb.hybrid.plan_command.read_model import mtp_sentence, read_model, read_size
from hpnb.hybrid.plan_command.report import as_json, format_report
from hpnb.hybrid.plan_command.run_lines import LOSS_CHUNK, launch_lines, no_run_file, write_run_file
from hpnb.hybrid.plan_command.search import (
    Plan,
    Search,
    make_plan,
    nearest_that_fits,
    search,
    usable_bytes,
    why_nothing,
)
from hpnb.mesh import ParallelLayout
from hpnb.theory.datasheets import GPU, GPUS, find_gpu
from hpnb.theory.model_shape import ModelShape
from hpnb.theory.plan_task import PlanTask, refusal

REFUSED = 2
LONGEST_BY_DEFAULT = 4096  # tokens of a sample, where a model can take more


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="gpt2, gpt2-xl, vit-l16, ...; or of transformers: "
                        "a config.json, its folder, a name in the local cache")  # fmt: skip
    parser.add_argument("--gpus", "--of", type=_at_least_one,
                        help="of the cluster; by default 8, or those of --layout")  # fmt: skip
    parser.add_argument("--gpu", default="h100", help=f"{', '.join(GPUS)}, measured; by default h100")
    parser.add_argument("--per-node", type=int, help="GPUs of a node, by default as usually sold")
    parser.add_argument("--batch", type=int, help="samples of a step, over all GPUs; by default 8 a GPU")
    parser.add_argument("--sequence", type=int, help="tokens of a sample; by default at most 4096")
    parser.add_argument("--imbalance", type=float, default=1.0,
                        help="tokens of the fullest rank of ep, over the mean; by default 1")  # fmt: skip
    parser.add_argument("--mtp", action="store_true", help="count the modules of multi-token prediction that "
                        "num_nextn_predict_layers names, as DeepSeek-V3 was trained")  # fmt: skip
    parser.add_argument("--top", type=_at_least_one, help="layouts to print, by default 10")
    parser.add_argument("--variants", action="store_true",
                        help="print all variants of the same sizes and ZeRO stage, too")  # fmt: skip
    parser.add_argument("--explain", metavar="LAYOUT",
                        help="draw one layout: its number in the table, or as dp8-tp2-zero1-mb2")  # fmt: skip
    parser.add_argument("--picture", metavar="FILE", help=".png or .svg of --explain, by default plan.png; "
                        "without --explain, of the best layout")  # fmt: skip
    parser.add_argument("--rank", type=int, help="run this rank of --layout alone, with its real code on "
                        "tensors without values, and count its memory")  # fmt: skip
    parser.add_argument("--layout", help="of --rank, as dp16-pp8-tp8-zero1-1f1b-mb1")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--run-file", metavar="FILE", help="write the best layout, or that of --explain, "
                        "as a file for hpnb train")  # fmt: skip
    parser.add_argument("--measure", action="store_true", help="measure this machine for --gpu measured")
    parser.add_argument("--check", action="store_true",
                        help="compare predictions with published and with measured runs")  # fmt: skip
    parser.add_argument("--published", action="store_true",
                        help="compare predictions with published runs, in Markdown")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Plan what the options of `add_arguments` say. Returns the exit code."""
    try:
        if options.published:
            from hpnb.hybrid.plan_command.published import published_table

            print(published_table(), end="")
            return 0
        if options.check:
            from hpnb.hybrid.plan_command.check import format_check

            print(format_check())
            return 0
        if options.measure:
            from hpnb.hybrid.plan_command.measure import format_card, measure_gpu

            print(format_card(measure_gpu()))
            return 0
        if options.rank is not None or options.layout is not None:
            return _plan_rank(options)
        return _plan(options)
    except BrokenPipeError:  # as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"hpnb plan: {error}", file=sys.stderr, flush=True)
        return REFUSED


def make_task(
    model: ModelShape,
    gpu: GPU,
    gpus: int,
    batch: int | None,
    sequence: int | None,
    per_node: int | None = None,
    imbalance: float = 1.0,
) -> PlanTask:
    """The task that the options describe."""
    batch = 8 * gpus if batch is None else batch
    sequence = min(model.positions, LONGEST_BY_DEFAULT) if sequence is None else sequence
    if batch < 1 or sequence < 1:
        raise ValueError(f"a batch of {batch} samples of {sequence} tokens trains nothing; use 1 or more")
    if not model.causal and sequence != model.positions:
        raise ValueError(f"an image of {model.name} has {model.positions} tokens; leave --sequence out")
    if sequence > model.positions:
        raise ValueError(
            f"{model.name} has {model.positions} positions, fewer than the {sequence} tokens of --sequence; "
            f"use {model.positions} or fewer"
        )
    if not 1 <= imbalance <= max(1, model.experts):
        raise ValueError(
            f"--imbalance {imbalance:g}: the fullest rank has 1 to {max(1, model.experts)} times the mean of "
            f"{model.name}, which has {model.experts or 'no'} experts"
        )
    chunk = LOSS_CHUNK if model.causal and model.norm_bias else 0  # a GPT-2
    return PlanTask(model, gpu.cluster(gpus, per_node), batch, sequence, chunk, imbalance=imbalance)


def _plan(options: argparse.Namespace) -> int:
    if options.model is None:
        raise ValueError("plan needs a model, as `hpnb plan gpt2-xl --gpus 8 --gpu h100`")
    if options.picture:
        from hpnb.hybrid.plan_command.explain import check_picture

        check_picture(options.picture)
    task, gpu = _task_and_gpu(options)
    chosen: Plan | None = None
    explain = options.explain or ("1" if options.picture else "")
    by_number = explain.isdigit()
    top = options.top or 10
    if explain and not by_number:
        chosen = _named_plan(task, explain)
        plans, result = [chosen], Search([chosen], seen=1)
        if options.top is not None:  # beside the best
            result = search(task)
            plans = [plan for plan in result.best(top, options.variants) if plan.code != chosen.code]
            plans = sorted([*plans[:top], chosen], key=lambda plan: plan.ranked_by)
    else:
        result = search(task)
        if not result.plans:
            raise ValueError(why_nothing(task, result))
        plans = result.best(top, options.variants)
        if by_number:
            if not 1 <= int(explain) <= len(plans):
                raise ValueError(f"--explain {explain}: the table has layouts 1 to {len(plans)}")
            chosen = plans[int(explain) - 1]
    best, size = chosen or plans[0], read_size(options.model)
    if options.json:
        print(json.dumps(as_json(task, gpu, result, plans), indent=1))
    else:
        print(format_report(task, gpu, result, plans))
    if chosen is not None:
        from hpnb.hybrid.plan_command.explain import draw_plan

        draw_plan(task, chosen).savefig(picture := options.picture or "plan.png")
        if not options.json:
            print(f"\nTimeline and memory of {chosen.code}: {picture}")
    without = [no_run_file(task, gpu, best), mtp_sentence(options.model, task.model)] if size is None else []
    said = "; ".join(filter(None, without))
    if options.run_file:
        if size is None:
            raise ValueError(f"{options.run_file} is not written: {said}")
        write_run_file(options.run_file, task, gpu, best, size)
    if not options.json and size is None:
        print(f"\n{said}")
    elif not options.json:
        print(f"\nTo start {best.code} with its run file, under torchrun on every node, or under Slurm:")
        for line in launch_lines(task, options.run_file or "run.toml"):
            print(f"    {line}")
    return 0


def _plan_rank(options: argparse.Namespace) -> int:
    if options.model is None or options.rank is None or options.layout is None:
        raise ValueError(
            "one rank takes a model, its layout and its number, as "
            "`hpnb plan gpt2-xl --layout dp16-pp8-tp8-zero1-1f1b-mb1 --rank 37`"
        )
    from hpnb.hybrid.plan_command.logical_rank import plan_rank
    from hpnb.hybrid.plan_command.report import as_json_of_rank, format_rank
    from hpnb.theory.plan_memory import rank_memory

    layout = parse_layout_code(options.layout)
    options.gpus = layout.world_size if options.gpus is None else options.gpus
    if not 0 <= options.rank < layout.world_size:
        raise ValueError(
            f"--rank {options.rank}: {options.layout} has {layout.world_size} ranks, 0 to "
            f"{layout.world_size - 1}"
        )
    task, gpu = _task_and_gpu(options)
    if task.model.experts:
        raise ValueError(
            f"--rank takes models without experts: where {task.model.name} sends a token depends on values, "
            f"which one rank alone does not have; --explain {options.layout} predicts the fullest rank"
        )
    _check_layout(task, options.layout, layout)
    profile = plan_rank(options.model, task, layout, gpu.dtype, options.rank)
    # A rank alone runs a CPU's kernels.
    predicted = rank_memory(task, layout, layout.coordinates(options.rank)["pp"], compiled=False)
    if options.json:
        print(json.dumps(as_json_of_rank(task, layout, options.rank, profile, predicted), indent=1))
    else:
        print(format_rank(task, layout, options.rank, profile, predicted))
        if sentence := mtp_sentence(options.model, task.model):
            print(sentence)
    return 0


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number of 1 or more")
    return int(text)


def _task_and_gpu(options: argparse.Namespace) -> tuple[PlanTask, GPU]:
    if options.gpu == "measured":
        from hpnb.hybrid.plan_command.measure import measured_gpu

        gpu = measured_gpu()
    else:
        gpu = find_gpu(options.gpu)
    model = read_model(options.model, options.mtp)
    gpus = 8 if options.gpus is None else options.gpus
    return make_task(
        model, gpu, gpus, options.batch, options.sequence, options.per_node, options.imbalance
    ), gpu


def _named_plan(task: PlanTask, code: str) -> Plan:
    """The plan of a layout by its word; what does not fit is refused with what would."""
    layout = parse_layout_code(code)
    _check_layout(task, code, layout)
    plan = make_plan(task, layout)
    if plan.bytes > usable_bytes(task):
        raise ValueError(
            f"{layout_code(layout)} takes {plan.bytes / 1e9:.1f} GB of the {usable_bytes(task) / 1e9:.1f} GB "
            f"that a GPU has to use; {nearest_that_fits(task, layout)}"
        )
    return plan


def _check_layout(task: PlanTask, code: str, layout: ParallelLayout) -> None:
    if layout.world_size != task.cluster.gpus:
        inner = layout.world_size // layout.dp
        near = f"; dp{task.cluster.gpus // inner} would fit them" if task.cluster.gpus % inner == 0 else ""
        raise ValueError(
            f"{code} is for {layout.world_size} GPUs, and there are {task.cluster.gpus}{near}; or use "
            f"--gpus {layout.world_size}"
        )
    if (why := refusal(task, layout)) is not None:
        raise ValueError(f"{code}: {why[1]}")

"""Which options cannot be combined, and why: one table that `HybridParallelPlugin` checks before ranks run.

A row is (what, why, find): `find(options)` is the sentence with the numbers at hand, or None. Everything that
is in no row composes: data x pipeline x tensor parallelism of every mode x sequence parallelism x ZeRO 0 to 3
x every schedule x every precision x accumulation x clipping x activation checkpointing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from hpnb.hybrid.plugin_options import PluginOptions
from hpnb.pipeline_parallel import schedules


@dataclass(frozen=True)
class Refusal:
    """One row. `find` takes the options and returns what is wrong and what would work, or None."""

    what: str
    why: str
    find: Callable[[PluginOptions], str | None]


def _check_schedule(o: PluginOptions) -> str | None:
    microbatches = o.num_microbatches if o.pp_size > 1 and o.num_microbatches else o.least_microbatches
    try:
        schedules.make(o.pp_style, o.pp_size * o.chunks, microbatches, o.chunks)
    except ValueError as error:
        return f"pp_style={o.pp_style!r}, pp_size={o.pp_size}, num_model_chunks={o.num_model_chunks}: {error}"
    return None


def _check_grid(o: PluginOptions) -> str | None:
    if o.tp_mode == "1d" and o.tp_depth == 1:
        return None
    from hpnb.tensor_parallel.mode import check_ranks

    if o.tp_depth > 1 and o.tp_mode != "2.5d":
        return f"tp_depth={o.tp_depth} goes with tp_mode='2.5d', not {o.tp_mode!r}"
    try:
        check_ranks(o.tp_mode, o.tp_size, o.tp_depth)
    except ValueError as error:
        return f"tp_size={o.tp_size}: {error}"
    return None


def _check_only_1d(option: str, o: PluginOptions) -> str | None:
    if not getattr(o, option) or o.tp_mode == "1d":
        return None
    return f"leave {option} out with tp_mode={o.tp_mode!r}, or use tp_mode='1d'"


def _check_measured_cut(o: PluginOptions) -> str | None:
    sizes = {"tp_size": o.tp_size, "cp_size": o.cp_size, "ep_size": o.ep_size}
    over = [f"{name}={size}" for name, size in sizes.items() if size > 1]
    if o.cut not in ("flops", "time") or not over or o.pp_size == 1:
        return None
    return f"use cut='parameters' with {over[0]}, or say how many layers each stage gets"


def _check_zero_options(o: PluginOptions) -> str | None:
    if o.zero_stage:
        return None
    switches = {"cpu_offload": o.cpu_offload, "communication_dtype": o.communication_dtype is not None}
    if names := [name for name, on in switches.items() if on]:
        return f"{' and '.join(names)} go with zero_stage=1, 2 or 3"
    return None


def _check_zero_replicas(o: PluginOptions) -> str | None:
    if o.zero_replicas == 1 or o.zero_stage == 3:
        return None
    return f"use zero_stage=3 with zero_replicas={o.zero_replicas}, not {o.zero_stage}"


def _check_context_parallelism(o: PluginOptions) -> str | None:
    if o.cp_size == 1:
        return None
    at = f"with cp_size={o.cp_size}"
    if o.tp_mode != "1d":
        return f"use tp_mode='1d' {at}, not {o.tp_mode!r}"
    if o.activation_checkpointing == "attention":
        return f"use activation_checkpointing='full' {at}"
    if o.enable_jit_fused:
        return f"leave enable_jit_fused out {at}"
    if o.loss_chunk:
        return f"leave loss_chunk out {at}"
    return None


def _check_expert_parallelism(o: PluginOptions) -> str | None:
    if o.ep_size == 1 and not o.selection_bias_rate:
        return None
    at = f"with ep_size={o.ep_size}" if o.ep_size > 1 else f"with selection_bias_rate={o.selection_bias_rate}"
    if o.tp_mode != "1d":
        return f"use tp_mode='1d' {at}, not {o.tp_mode!r}"
    if o.enable_jit_fused:
        return f"leave enable_jit_fused out {at}"
    return None


REFUSED: tuple[Refusal, ...] = (
    Refusal(
        "a pp_style whose definition does not allow the stages, chunks or microbatches",
        "1f1b, gpipe, zb-h1 and zb-h2 have one chunk a rank, zb-v and dualpipe-v two; dualpipe-v needs two "
        "microbatches a rank",
        _check_schedule,
    ),
    Refusal(
        "a tp_mode on a number of ranks that is not of its form",
        "2d needs q x q, 2.5d depth x q x q, 3d l x l x l",
        _check_grid,
    ),
    Refusal(
        "enable_sequence_parallelism with tp_mode 2d, 2.5d or 3d",
        "a grid cuts every activation over all its ranks already",
        partial(_check_only_1d, "enable_sequence_parallelism"),
    ),
    Refusal(
        "loss_chunk with tp_mode 2d, 2.5d or 3d",
        "a grid's logits are sums over ranks, made as they are cut",
        partial(_check_only_1d, "loss_chunk"),
    ),
    Refusal(
        "cut='flops' or 'time' with tensor, context or expert parallelism",
        "one rank measures for all, and the layers of one rank alone do not run",
        _check_measured_cut,
    ),
    Refusal(
        "context parallelism with a grid, a compiled block, a chunked loss or a recomputed attention",
        "attention sends messages, and the labels are shifted before the loss",
        _check_context_parallelism,
    ),
    Refusal(
        "expert parallelism with a grid or a compiled block",
        "a block of experts sends messages",
        _check_expert_parallelism,
    ),
    Refusal(
        "zero_replicas with a zero_stage below 3",
        "parameters are replicated on all ranks of dp already",
        _check_zero_replicas,
    ),
    Refusal(
        "cpu_offload or communication_dtype without ZeRO",
        "replicas sum whole gradients, as they are and where they are",
        _check_zero_options,
    ),
)

"""What cannot compose, and why: one table, which `HybridParallelPlugin` goes through before any rank runs.

A row is (what, why, found): `found(plugin)` is the sentence with the numbers at hand, or None. Whatever
stands in no row composes: data x pipeline x tensor parallelism of every mode x sequence parallelism x ZeRO 0
to 3 x every schedule x every precision x accumulation x clipping x activation checkpointing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpnb.pipeline_parallel import schedules

if TYPE_CHECKING:
    from hpnb.hybrid.plugins import HybridParallelPlugin


@dataclass(frozen=True)
class Refusal:
    """One row.

    Attributes:
        what, why: as a table shows them.
        found: of a plugin, what is wrong and what would work; None if nothing is.
    """

    what: str
    why: str
    found: Callable[[HybridParallelPlugin], str | None]


def _schedule(p: HybridParallelPlugin) -> str | None:
    given = p.num_microbatches if p.pp_size > 1 and p.num_microbatches else p.least_microbatches
    try:
        schedules.make(p.pp_style, p.pp_size * p.chunks, given, p.chunks)
    except ValueError as error:
        return f"pp_style={p.pp_style!r}, pp_size={p.pp_size}, num_model_chunks={p.num_model_chunks}: {error}"
    return None


def _grid(p: HybridParallelPlugin) -> str | None:
    if p.tp_mode == "1d" and p.tp_depth == 1:
        return None
    from hpnb.tensor_parallel.modes import NAMES, check_ranks

    if p.tp_mode not in NAMES:
        return f"tp_mode={p.tp_mode!r} is no mode; use {', '.join(NAMES)}"
    if p.tp_depth > 1 and p.tp_mode != "2.5d":
        return f"tp_depth={p.tp_depth} goes with tp_mode='2.5d', not {p.tp_mode!r}"
    try:
        check_ranks(p.tp_mode, p.tp_size, p.tp_depth)
    except ValueError as error:
        return f"tp_size={p.tp_size}: {error}"
    return None


def _sequence(p: HybridParallelPlugin) -> str | None:
    if not p.enable_sequence_parallelism or p.tp_mode == "1d":
        return None
    return f"leave enable_sequence_parallelism out with tp_mode={p.tp_mode!r}, or use tp_mode='1d'"


def _chunked(p: HybridParallelPlugin) -> str | None:
    if not p.loss_chunk or p.tp_mode == "1d":
        return None
    return f"leave loss_chunk out with tp_mode={p.tp_mode!r}, or use tp_mode='1d'"


def _measured(p: HybridParallelPlugin) -> str | None:
    if p.cut not in ("flops", "time") or p.tp_size == 1 or p.pp_size == 1:
        return None
    return f"use cut='parameters' with tp_size={p.tp_size}, or say how many layers each stage gets"


def _replicated(p: HybridParallelPlugin) -> str | None:
    if p.zero_stage:
        return None
    given = {"cpu_offload": p.cpu_offload, "communication_dtype": p.communication_dtype is not None}
    if names := [name for name, on in given.items() if on]:
        return f"{' and '.join(names)} go with zero_stage=1, 2 or 3"
    return None


REFUSED: tuple[Refusal, ...] = (
    Refusal(
        "a pp_style whose definition does not allow the stages, chunks or microbatches",
        "1f1b, gpipe, zb-h1 and zb-h2 have one chunk a rank, zb-v and dualpipe-v two; dualpipe-v needs two "
        "microbatches a rank",
        _schedule,
    ),
    Refusal(
        "a tp_mode on a number of ranks that is not of its form",
        "2d needs q x q, 2.5d depth x q x q, 3d l x l x l",
        _grid,
    ),
    Refusal(
        "enable_sequence_parallelism with tp_mode 2d, 2.5d or 3d",
        "a grid cuts every activation over all its ranks already",
        _sequence,
    ),
    Refusal(
        "loss_chunk with tp_mode 2d, 2.5d or 3d",
        "a grid's logits are sums over ranks, made as they are cut",
        _chunked,
    ),
    Refusal(
        "cut='flops' or 'time' with tensor parallelism",
        "one rank measures for all, and the layers of one rank alone do not run",
        _measured,
    ),
    Refusal(
        "cpu_offload or communication_dtype without ZeRO",
        "replicas sum whole gradients, as they are and where they are",
        _replicated,
    ),
)

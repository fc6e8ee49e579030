"""What notebook 05 predicts for a step of a GPT-2 under each ZeRO stage, in seconds and bytes, by `theory`.

    predict_memory(SIZE, 2, torch.float32, ZeroConfig(3), ranks=2).peak       bytes of a rank
    predict_parts(SIZE, torch.float32, ZeroConfig(3), card, alone, 25.0)      seconds by part

gpt2_zero.py measures the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hpnb import theory
from hpnb.lesson.machine_card import MachineCard
from hpnb.lesson.values import record
from hpnb.models import GPT2Size
from hpnb.record import Event, Timeline
from hpnb.theory import Link, StepMemory

CPU_MEMORY_RATE = 100e9  # bytes/s, of which Adam moves 28 a parameter
BANDWIDTHS = [10 ** (9 + k / 48) for k in range(3 * 48 + 1)]  # bytes/s, 48 a decade: 1 GB/s to 1 TB/s


@dataclass(frozen=True)
class ZeroConfig:
    """How states and activations are kept.

    Attributes:
        stage: of ZeRO; 0 is plain data parallelism.
        recompute: blocks that are recomputed in the backward; -1 is all of them.
        offload: shards are in CPU memory (ZeRO stage 1 or higher, on a GPU).
    """

    stage: int = 0
    recompute: int = 0
    offload: bool = False

    def __str__(self) -> str:
        words = [f"ZeRO-{self.stage}"]
        if self.recompute:
            words.append("recompute" if self.recompute < 0 else f"recompute {self.recompute}")
        return " + ".join([*words, *(["offload"] if self.offload else [])])

    def recomputed_blocks(self, size: GPT2Size) -> int:
        return size.layers if self.recompute < 0 else self.recompute


def predict_memory(
    size: GPT2Size,
    rows: int,
    dtype: torch.dtype,
    config: ZeroConfig,
    ranks: int,
    bucket_mb: float = 25.0,
    workspace: float = 0.0,
) -> StepMemory:
    """What a step holds at its fullest on each of `ranks` ranks, by `theory.step_memory`.

    Args:
        workspace: bytes that a GPU holds at every moment beside tensors (`device_timing.matmul_workspace`).
    """
    block = size.block(rows, None, dtype.itemsize)
    step = theory.step_memory(
        block, size.layers, size.vocab_size, size.length, ranks, config.stage,
        recompute=config.recomputed_blocks(size), offload=config.offload, bucket_bytes=bucket_mb * 2**20,
    )  # fmt: skip
    return StepMemory(tuple(replace(m, temporary=m.temporary + workspace) for m in step.moments))


def predict_memories(
    size: GPT2Size,
    rows: int,
    dtype: torch.dtype,
    configs: Iterable[ZeroConfig],
    ranks: int,
    bucket_mb: float = 25.0,
    workspace: float = 0.0,
) -> dict[ZeroConfig, StepMemory]:
    """{configuration: what `predict_memory` says of it}."""
    return {c: predict_memory(size, rows, dtype, c, ranks, bucket_mb, workspace) for c in configs}


def _step_seconds(
    size: GPT2Size,
    dtype: torch.dtype,
    config: ZeroConfig,
    alone: tuple[float, float, float],
    ranks: int,
    link: Link,
    bucket_mb: float,
    **options: Any,
) -> Mapping[str, float]:
    block = dtype.itemsize * size.block().parameters
    return theory.zero_step_seconds(
        *alone, block_bytes=block, root_bytes=dtype.itemsize * size.parameters() - size.layers * block,
        layers=size.layers, ranks=ranks, stage=config.stage, link=link, bucket_bytes=bucket_mb * 2**20,
        **options,
    )  # fmt: skip


def communication_parts(
    size: GPT2Size,
    dtype: torch.dtype,
    config: ZeroConfig,
    alone: tuple[float, float],
    ranks: int,
    link: Link,
    bucket_mb: float,
    overlap: bool = True,
) -> dict[str, float]:
    """{"exposed": .., "exposed after the update": ..} of a step, predicted for `link`.

    Args:
        alone: seconds of forward and backward, recomputation included.
        overlap: see `theory.zero_step_seconds`.
    """
    seconds = _step_seconds(size, dtype, config, (*alone, 0.0), ranks, link, bucket_mb, overlap=overlap)
    nbytes = dtype.itemsize * size.parameters()
    after = theory.seconds("all_gather", nbytes, ranks, link) if config.stage in (1, 2) else 0.0
    return {"exposed": max(0.0, seconds["exposed"] - after), "exposed after the update": after}


def predict_parts(
    size: GPT2Size,
    dtype: torch.dtype,
    config: ZeroConfig,
    card: MachineCard,
    alone: tuple[float, float, float],
    bucket_mb: float,
    cpu_link: float = 25e9,
) -> dict[str, float]:
    """The parts of a `StepMeasurement` from what one rank alone takes and the card's link.

    Args:
        alone: what `time_serial_step` returned.
        cpu_link: bytes/s between GPU and CPU, for what is offloaded.
    """
    forward, backward, update = alone
    backward += forward * config.recomputed_blocks(size) / size.layers
    share = 1 / card.ranks if config.stage else 1.0
    exposed = communication_parts(
        size, dtype, config, (forward, backward), card.ranks, card.link, bucket_mb, card.device == "cuda"
    )
    parts = {"forward": forward, "backward": backward, "update": update * share, **exposed}
    if config.offload:
        moved = dtype.itemsize * size.parameters() * share * (4 if config.stage == 3 else 2)
        parts["update"] = 28.0 * size.parameters() * share / CPU_MEMORY_RATE
        parts["exposed"] += moved / cpu_link
    return parts


def price_of_bytes(
    peaks: Mapping[ZeroConfig, float], spread: Mapping[ZeroConfig, tuple[float, float, float]]
) -> dict[str, Mapping[str, float]]:
    """Columns of a table: bytes that a change of configuration saves, and seconds that it adds to a step.

    Args:
        peaks: bytes of every configuration.
        spread: seconds of its fastest, its median and its slowest step.

    Returns:
        {heading: {"ZeRO-0 to ZeRO-3": number}}; seconds are differences of medians, and ranges of two
        configurations overlap if some step of the one that saves was as fast as one of the other.
    """
    sharded = [(ZeroConfig(0), ZeroConfig(stage)) for stage in (1, 2, 3)]
    recomputed = [(ZeroConfig(stage), ZeroConfig(stage, -1)) for stage in (0, 3)]
    offloaded = [(ZeroConfig(3, -1), ZeroConfig(3, -1, offload=True))]
    saved, added, price, overlap = {}, {}, {}, {}
    for before, after in (*sharded, *recomputed, *offloaded):
        if after in peaks:
            name = f"{before} to {after}"
            saved[name] = peaks[before] - peaks[after]
            added[name] = spread[after][1] - spread[before][1]
            price[name] = added[name] / (saved[name] / 1e9)
            overlap[name] = spread[after][0] <= spread[before][2]
    return {"saved (B)": saved, "added (s)": added, "added a saved GB (s)": price, "ranges overlap": overlap}


def exposed_seconds(
    size: GPT2Size,
    dtype: torch.dtype,
    stage: int,
    alone: tuple[float, float, float],
    ranks: int,
    bandwidth: float,
    bucket_mb: float,
) -> float:
    """Exposed communication of a ZeRO stage on a link of `bandwidth` bytes/s, whose latency is left out."""
    link = Link(0.0, bandwidth)
    return sum(
        communication_parts(size, dtype, ZeroConfig(stage), alone[:2], ranks, link, bucket_mb).values()
    )


def exposed_by_bandwidth(
    size: GPT2Size,
    rows: int,
    stage: int,
    ranks: int,
    bandwidths: Sequence[float] = BANDWIDTHS,
    flops: float = 400e12,
) -> list[float]:
    """`exposed_seconds` in bfloat16 for each bandwidth, on GPUs that compute `flops` a second.

    A backward takes twice its forward, and buckets have 25 MB.
    """
    forward = size.layers * size.block(rows).forward_flops / flops
    alone = forward, 2 * forward, 0.0
    return [exposed_seconds(size, torch.bfloat16, stage, alone, ranks, b, 25.0) for b in bandwidths]


def gather_bandwidth(size: GPT2Size, rows: int, ranks: int, flops: float = 400e12) -> float:
    """Bytes/s at which an all-gather of a block's bfloat16 weights takes as long as the block's forward."""
    block = size.block(rows)
    return 2 * block.parameters * (ranks - 1) / ranks * flops / block.forward_flops


def record_links(bandwidths: Sequence[float], exposed: Mapping[str, Sequence[float]], fast: float) -> None:
    """Record under 05.link bytes/s at which ZeRO-3 begins to expose less than ZeRO-2, "crossing", and ZeRO-2
    to expose over 5 % more than ZeRO-0, "apart".

    Args:
        exposed: {ZeRO stage: seconds at each bandwidth}, of the stages 0, 2 and 3.
        fast: what `gather_bandwidth` returned.
    """
    rows = list(zip(bandwidths, *exposed.values(), strict=True))
    crossing = next(bandwidth for bandwidth, _, two, three in rows if two > three)
    apart = next(bandwidth for bandwidth, zero, two, _ in rows if two > 1.05 * zero)
    record("05.link", {"crossing": crossing, "apart": apart, "fast": fast}, "B/s")


def record_prices(size: GPT2Size, rows: int, ranks: int, link: Link, flops: float = 400e12) -> None:
    """Record under 05.xl-price what sharding, recomputation and offloading save and add: simulated, in
    bfloat16.

    ZeRO-3 in place of ZeRO-0, ZeRO-3 with and without recomputation, and the optimizer state of one GPU in
    CPU memory, over 25 GB/s each way.
    """
    forward = size.layers * size.block(rows).forward_flops / flops
    alone = forward, 2 * forward, 0.0
    stored, sharded, recomputed = (
        predict_memory(size, rows, torch.bfloat16, c, ranks).peak
        for c in (ZeroConfig(0), ZeroConfig(3), ZeroConfig(3, -1))
    )
    zero_0, zero_3 = (
        exposed_seconds(size, torch.bfloat16, z, alone, ranks, link.bandwidth, 25.0) for z in (0, 3)
    )
    parameters = size.parameters()
    offloaded = 4 * parameters / 25e9 + 28 * parameters / CPU_MEMORY_RATE
    prices = {
        "shard": (stored - sharded, zero_3 - zero_0),
        "recompute": (sharded - recomputed, forward),
        "offload": (12 * parameters, offloaded),
    }
    for name, (saved, added) in prices.items():
        record(f"05.xl-price.{name}.saved", saved, "B")
        record(f"05.xl-price.{name}", {"added": added, "each": added / (saved / 1e9)}, "s")


def gather_timeline(gathers: theory.GatherTimeline, uses: Sequence[int], ranks: int) -> Timeline:
    """A simulated step of ZeRO stage 3 on one of its ranks: computing above all-gathers."""
    half, group = len(uses) // 2, tuple(range(ranks))
    spans = zip(uses, gathers.starts, gathers.ends, strict=True)
    events = [Event(0, u, "F" if k < half else "B", -1, a, b) for k, (u, a, b) in enumerate(spans)]
    events += [Event(0, u, "all_gather", -1, a, b, "dp", 0.0, group) for u, a, b in gathers.gathers]
    return Timeline(tuple(events), "simulated")

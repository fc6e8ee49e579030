"""What notebook 05 predicts for a step of a GPT-2 under each ZeRO stage, by `theory`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from hpnb import theory
from hpnb.lesson.machine_card import MachineCard
from hpnb.lesson.programs.layer_times import ranges_overlap
from hpnb.lesson.values import record
from hpnb.models import GPT2Size
from hpnb.record import Event, Timeline
from hpnb.theory import Link, StepMemory

CPU_MEMORY_RATE = 100e9  # bytes/s, of which Adam moves 28 a parameter
CPU_LINK = 25e9  # bytes/s each way between GPU and CPU, for what is offloaded
FLOPS = 400e12  # FLOP/s of a GPU in simulated steps
BANDWIDTHS = [10 ** (9 + k / 48) for k in range(3 * 48 + 1)]  # bytes/s, 48 a decade: 1 GB/s to 1 TB/s


@dataclass(frozen=True)
class ZeroConfig:
    """How states and activations are kept: the ZeRO stage, where 0 is plain data parallelism; how many blocks
    are recomputed in the backward, -1 for all; whether shards are in CPU memory (stage 1 or higher, on a
    GPU).
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
    """What a step holds at its fullest on each of `ranks` ranks, by `theory.step_memory`; `workspace` is what
    `device_timing.matmul_workspace` returns.
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
    bucket_mb: float,
    workspace: float,
) -> dict[ZeroConfig, StepMemory]:
    """{configuration: what `predict_memory` says of it}."""
    return {c: predict_memory(size, rows, dtype, c, ranks, bucket_mb, workspace) for c in configs}


def communication_parts(
    size: GPT2Size,
    dtype: torch.dtype,
    config: ZeroConfig,
    without_messages: tuple[float, float],
    ranks: int,
    link: Link,
    bucket_mb: float,
    overlap: bool = True,
) -> dict[str, float]:
    """{"exposed": .., "exposed after the update": ..} of a step, predicted for `link`.

    `without_messages` has seconds of forward and backward, recomputation included.
    """
    block, nbytes = dtype.itemsize * size.block().parameters, dtype.itemsize * size.parameters()
    seconds = theory.zero_step_seconds(
        *without_messages, 0.0, block_bytes=block, root_bytes=nbytes - size.layers * block,
        layers=size.layers, ranks=ranks, stage=config.stage, link=link, bucket_bytes=bucket_mb * 2**20,
        overlap=overlap,
    )  # fmt: skip
    after = theory.seconds("all_gather", nbytes, ranks, link) if config.stage in (1, 2) else 0.0
    return {"exposed": max(0.0, seconds["exposed"] - after), "exposed after the update": after}


def predict_parts(
    size: GPT2Size,
    dtype: torch.dtype,
    config: ZeroConfig,
    card: MachineCard,
    without_messages: tuple[float, float, float],
    bucket_mb: float,
) -> dict[str, float]:
    """The parts of a `StepMeasurement` from the card's link and from `without_messages`, which
    `time_serial_step` returned.
    """
    forward, backward, update = without_messages
    backward += forward * config.recomputed_blocks(size) / size.layers
    share = 1 / card.ranks if config.stage else 1.0
    exposed = communication_parts(
        size, dtype, config, (forward, backward), card.ranks, card.link, bucket_mb, card.device == "cuda"
    )
    parts = {"forward": forward, "backward": backward, "update": update * share, **exposed}
    if config.offload:
        offload = offload_seconds(size, dtype, config.stage, card.ranks)
        parts["update"] = offload["update"]
        parts["exposed"] += offload["transfers"]
    return parts


def offload_seconds(size: GPT2Size, dtype: torch.dtype, stage: int, ranks: int) -> dict[str, float]:
    """Seconds of the "transfers" and of the "update" of a step with shards in CPU memory, at assumed rates.

    Gradients go down once, and weights come up once, or twice with ZeRO-3.
    """
    parameters = size.parameters() / (ranks if stage else 1)
    transfers = 3 if stage == 3 else 2
    return {
        "transfers": transfers * dtype.itemsize * parameters / CPU_LINK,
        "update": 28.0 * parameters / CPU_MEMORY_RATE,
    }


def price_of_bytes(
    peaks: Mapping[ZeroConfig, float], spread: Mapping[ZeroConfig, tuple[float, float, float]]
) -> dict[str, Mapping[str, float]]:
    """Columns of a table, a row such as "ZeRO-0 to ZeRO-3": bytes that a change saves, seconds that it adds.

    Seconds are differences of medians. Ranges of two configurations overlap if each has a step that was as
    fast as one of the other. `spread` has the fastest, the median and the slowest step.
    """
    sharded = [(ZeroConfig(0), ZeroConfig(stage)) for stage in (1, 2, 3)]
    recomputed = [(ZeroConfig(stage), ZeroConfig(stage, -1)) for stage in (0, 3)]
    offloaded = [(ZeroConfig(3, -1), ZeroConfig(3, -1, offload=True))]
    saved, added, price, overlaps = {}, {}, {}, {}
    for before, after in (*sharded, *recomputed, *offloaded):
        if after in peaks:
            name = f"{before} to {after}"
            saved[name] = peaks[before] - peaks[after]
            added[name] = spread[after][1] - spread[before][1]
            price[name] = added[name] / (saved[name] / 1e9)
            overlaps[name] = ranges_overlap(spread[after], spread[before])
    return {"saved (B)": saved, "added (s)": added, "added a saved GB (s)": price, "ranges overlap": overlaps}


def exposed_seconds(
    size: GPT2Size,
    dtype: torch.dtype,
    stage: int,
    without_messages: tuple[float, float, float],
    ranks: int,
    bandwidth: float,
    bucket_mb: float,
) -> float:
    """Exposed communication of a ZeRO stage on a link of `bandwidth` bytes/s, whose latency is left out."""
    link = Link(0.0, bandwidth)
    return sum(
        communication_parts(
            size, dtype, ZeroConfig(stage), without_messages[:2], ranks, link, bucket_mb
        ).values()
    )


def exposed_by_bandwidth(size: GPT2Size, rows: int, stage: int, ranks: int) -> list[float]:
    """`exposed_seconds` in bfloat16 for each of BANDWIDTHS.

    A backward takes twice its forward, and buckets have 25 MB.
    """
    forward = size.layers * size.block(rows).forward_flops / FLOPS
    step = forward, 2 * forward, 0.0
    return [exposed_seconds(size, torch.bfloat16, stage, step, ranks, b, 25.0) for b in BANDWIDTHS]


def gather_bandwidth(size: GPT2Size, rows: int, ranks: int) -> float:
    """Bytes/s at which an all-gather of a block's bfloat16 weights takes as long as the block's forward."""
    block = size.block(rows)
    return 2 * block.parameters * (ranks - 1) / ranks * FLOPS / block.forward_flops


def record_links(bandwidths: Sequence[float], exposed: Mapping[str, Sequence[float]], fast: float) -> None:
    """Record under 05.link bytes/s at which ZeRO-3 begins to expose less than ZeRO-2, "crossing", and ZeRO-2
    to expose over 5 % more than ZeRO-0, "apart"; and `fast`, what `gather_bandwidth` returned.
    """
    rows = list(zip(bandwidths, *exposed.values(), strict=True))
    crossing = next(bandwidth for bandwidth, _, two, three in rows if two > three)
    apart = next(bandwidth for bandwidth, zero, two, _ in rows if two > 1.05 * zero)
    record("05.link", {"crossing": crossing, "apart": apart, "fast": fast}, "B/s")


def record_prices(size: GPT2Size, rows: int, ranks: int, link: Link) -> None:
    """Record under 05.xl-price what three ways to save memory save and add, simulated in bfloat16.

    They are ZeRO-3 instead of ZeRO-0, recomputation, and the optimizer state in CPU memory. 05.xl-offload has
    seconds of the "transfers" and the "update" of a step that offloads with ZeRO-3 on four ranks.
    """
    forward = size.layers * size.block(rows).forward_flops / FLOPS
    step = forward, 2 * forward, 0.0
    stored, sharded, recomputed = (
        predict_memory(size, rows, torch.bfloat16, c, ranks).peak
        for c in (ZeroConfig(0), ZeroConfig(3), ZeroConfig(3, -1))
    )
    zero_0, zero_3 = (
        exposed_seconds(size, torch.bfloat16, z, step, ranks, link.bandwidth, 25.0) for z in (0, 3)
    )
    parameters = size.parameters()
    offloaded = 4 * parameters / CPU_LINK + 28 * parameters / CPU_MEMORY_RATE
    prices = {
        "shard": (stored - sharded, zero_3 - zero_0),
        "recompute": (sharded - recomputed, forward),
        "offload": (12 * parameters, offloaded),
    }
    for name, (saved, added) in prices.items():
        record(f"05.xl-price.{name}.saved", saved, "B")
        record(f"05.xl-price.{name}", {"added": added, "each": added / (saved / 1e9)}, "s")
    record("05.xl-offload", offload_seconds(size, torch.bfloat16, 3, 4), "s")


def gather_timeline(gathers: theory.GatherTimeline, uses: Sequence[int], ranks: int) -> Timeline:
    """A simulated step of ZeRO stage 3 on one of its ranks: computing above all-gathers."""
    half, group = len(uses) // 2, tuple(range(ranks))
    spans = zip(uses, gathers.starts, gathers.ends, strict=True)
    events = [Event(0, u, "F" if k < half else "B", -1, a, b) for k, (u, a, b) in enumerate(spans)]
    events += [Event(0, u, "all_gather", -1, a, b, "dp", 0.0, group) for u, a, b in gathers.gathers]
    return Timeline(tuple(events), "simulated")

"""The explorer of notebook 03: one transformer block in each mode of tensor parallelism."""

from __future__ import annotations

import math
from collections.abc import Iterable

from hpnb.lesson.explorers.explorer import Challenge, Evaluation, Explorer, Picture
from hpnb.lesson.explorers.knobs import Choice, Knobs
from hpnb.lesson.tables import number
from hpnb.record import Event, Timeline
from hpnb.theory import (
    LINKS,
    Block,
    Collective,
    Link,
    activation_bytes,
    block_seconds,
    block_sent,
    grid_sides,
)

_RATE = 400e12  # FLOP/s of a rank
_STATE_BYTES = 16.0  # of a parameter's weight, gradient and optimizer state
_MATMULS = {"qkv": ("qkv",), "projection": ("scores", "weighted values", "projection")}
_BEFORE_MATMUL = ("all_gather", "broadcast")  # sums follow it

KNOBS: Knobs = {
    "mode": Choice(("1d", "1d+sp", "2d", "2.5d", "3d"), "2d"),
    "ranks": Choice((2, 4, 8, 16, 32, 64), 16),
    "hidden": Choice((1024, 2048, 4096, 8192, 12288, 16384), 8192),
    "sequence": Choice((256, 1024, 2048, 8192), 2048),
    "batch": Choice((1, 2, 4, 8, 16, 32, 64), 16),
    "link": Choice(tuple(LINKS), "NVLink 4"),
}
ANSWER = {"mode": "2d", "ranks": 16, "sequence": 8192, "batch": 8, "link": "InfiniBand NDR"}
CHALLENGE = Challenge(
    "16 ranks or more on InfiniBand NDR, a width of 8,192 or less: computing at least 0.4 times as "
    "long as sending, with at most 2 GB of states and activations of the block on a rank.",
    lambda at: (
        (at["ranks"] >= 16 and at["link"] == "InfiniBand NDR" and at["hidden"] <= 8192)
        and (at["compute / sending"] >= 0.4 and at["kept and states (B)"] <= 2e9)
    ),
)


def tensor_modes() -> Explorer:
    """Notebook 03: one block in each mode of tensor parallelism, by ranks, width, tokens and link.

    Every message waits for the matmul before it: nothing overlaps. 400 TFLOP/s a rank, values of 2 bytes.
    """
    names = "2d on NVLink 4, s = 2,048", "2d on InfiniBand NDR, s = 8,192"
    trade = "batch", "compute / sending"
    return Explorer(KNOBS, mode_readings, CHALLENGE, ANSWER, trade, names, goal=0.4).display()


def mode_readings(mode: str, ranks: int, hidden: int, sequence: int, batch: int, link: str) -> Evaluation:
    block = Block(hidden, hidden // 128, sequence, batch)
    grid_mode, sequence_parallel = mode.removesuffix("+sp"), mode.endswith("+sp")
    depth = _depth(mode, ranks)
    shape = (grid_mode, ranks, depth, sequence_parallel)
    kept = activation_bytes(block, *shape)
    kept += _STATE_BYTES * block.parameters * (depth if grid_mode == "2.5d" else 1) / ranks
    kept_by_1d = activation_bytes(block, "1d", ranks) + _STATE_BYTES * block.parameters / ranks
    took = block_seconds(block, grid_mode, ranks, LINKS[link], _RATE, depth, sequence_parallel)
    one_dimension = block_seconds(block, "1d", ranks, LINKS[link], _RATE)
    readings = {
        "block (s)": took.total,
        "compute / sending": took.compute / took.communication,
        "sent (B)": block_sent(block, *shape).bytes(),
        "kept and states (B)": kept,
        "ρ (FLOP/B)": f"{_RATE / LINKS[link].bandwidth:,.0f}",
    }

    def draw(fast: bool) -> Picture:
        from hpnb import plot

        sides = " x ".join(map(str, grid_sides(grid_mode, ranks, depth)))
        timelines = [block_timeline(block, mode, ranks, LINKS[link])]
        names = [f"{mode}, {sides} ranks: {_costs_in_words(kept, took.communication)}"]
        if mode != "1d":
            timelines.append(block_timeline(block, "1d", ranks, LINKS[link]))
            names.append(f"1d: {_costs_in_words(kept_by_1d, one_dimension.communication)}")
        figure = plot.timeline(
            *timelines,
            names=names,
            bubble=None,
            text=not fast,
            axis_labels={0: "each rank"},
            title=f"h = {hidden:,}, {batch} x {sequence:,} tokens, {ranks} ranks on {link}",
        )
        return figure, (
            f"A block by {mode} over {ranks} ranks on {link}"
            + (", above the same by 1d" if mode != "1d" else "")
            + f": computing takes {number(took.compute, 's')}, messages {number(took.communication, 's')}."
        )

    return readings, draw


def _costs_in_words(kept: float, communication: float) -> str:
    """The heading of a timeline: bytes of activations and states of a rank, seconds of messages."""
    return f"keeps {number(kept, 'B')} a rank, sends for {number(communication, 's')}"


def _depth(mode: str, ranks: int) -> int:
    """Layers of a 2.5D grid: the fewest above one that leave a square."""
    if mode != "2.5d":
        return 1
    depths = (d for d in range(2, ranks) if ranks % d == 0 and math.isqrt(ranks // d) ** 2 == ranks // d)
    return next(depths, 2)


def block_timeline(block: Block, mode: str, ranks: int, link: Link) -> Timeline:
    """One rank's block: the messages of each layer before and after its matmuls, nothing overlapped."""
    grid_mode = mode.removesuffix("+sp")
    sent = block_sent(block, grid_mode, ranks, _depth(mode, ranks), mode != grid_mode)
    flops: dict[str, int] = {m.name: m.flops for m in block.matmuls}
    events: list[Event] = []
    clock = 0.0

    def send(collectives: Iterable[Collective]) -> None:
        nonlocal clock
        for collective in collectives:
            end = clock + collective.seconds(link)
            events.append(Event(0, -1, collective.op, -1, clock, end, "tp", collective.bytes))
            clock = end

    for phase, op, factor in (("forward", "F", 1), ("backward", "B", 2)):
        order = ("qkv", "projection", "mlp up", "mlp down")
        for layer in order if phase == "forward" else order[::-1]:
            of_layer = [c for c in sent.collectives if (c.layer, c.phase) == (layer, phase)]
            send(c for c in of_layer if c.op in _BEFORE_MATMUL)
            work = factor * sum(flops[name] for name in _MATMULS.get(layer, (layer,)))
            events.append(Event(0, -1, op, -1, clock, clock + work / ranks / _RATE))
            clock = events[-1].end
            send(c for c in of_layer if c.op not in _BEFORE_MATMUL)
        send(c for c in sent.collectives if c.phase == phase and c.layer in ("norms", "vectors"))
    return Timeline(tuple(events), "simulated")

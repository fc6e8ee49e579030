"""The explorers of the series: a formula, its knobs, and a challenge. One function a notebook."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hpnb.lesson.explorers.activation_memory import kept_by_rank as kept_by_rank
from hpnb.lesson.explorers.cluster_layouts import cluster_layouts as cluster_layouts
from hpnb.lesson.explorers.explorer import Explorer, explorer
from hpnb.lesson.explorers.knobs import Challenge, Choice, Slider
from hpnb.lesson.explorers.layout_choice import layout_choice as layout_choice
from hpnb.lesson.explorers.layouts_on_hosts import layouts_on_hosts as layouts_on_hosts
from hpnb.lesson.explorers.sharded_step import sharded_step as sharded_step
from hpnb.lesson.explorers.uneven_layers import uneven_layers as uneven_layers
from hpnb.lesson.programs.step_timing import Backward
from hpnb.lesson.tables import number
from hpnb.pipeline_parallel import Costs, schedules
from hpnb.record import Event, Timeline
from hpnb.theory import (
    ALGORITHMS,
    LINKS,
    Block,
    Collective,
    Link,
    activation_bytes,
    block_seconds,
    block_sent,
    cheapest,
    even_buckets,
    grid_sides,
    seconds,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SIZES = tuple(10 ** (k / 4) for k in range(8, 37))  # 100 B to 1 GB


def all_reduce_cost() -> Explorer:
    """Notebook 00: how long an all-reduce takes, by ranks, bytes, latency, bandwidth and algorithm."""
    from hpnb import plot

    def draw(
        ranks: int, kilobytes: float, latency: float, bandwidth: float, algorithm: str, fast: bool
    ) -> tuple[Figure, str, dict[str, Any]]:
        wire = Link(latency * 1e-6, bandwidth * 1e9)
        able = [a for a in ALGORITHMS if a != "halving-doubling" or ranks & (ranks - 1) == 0]
        curves = {a: [seconds("all_reduce", n, ranks, wire, a) for n in _SIZES] for a in able}
        took = seconds("all_reduce", kilobytes * 1e3, ranks, wire, algorithm)
        best = cheapest("all_reduce", kilobytes * 1e3, ranks, wire)
        figure = plot.costs(
            [kilobytes * 1e3],
            [took],
            more={a: (_SIZES, times) for a, times in curves.items()},
            title=f"simulated · all-reduce over {ranks} ranks, {latency:.3g} µs, {bandwidth:.3g} GB/s",
            label=f"{algorithm}, {number(kilobytes * 1e3, 'B')}",
            text=not fast,
        )
        alt = (
            f"Seconds against bytes of an all-reduce over {ranks} ranks, one line for each of "
            f"{', '.join(able)}; at {number(kilobytes * 1e3, 'B')} {algorithm} takes {number(took, 's')}."
        )
        readings = {
            "time (s)": took,
            "fastest": best,
            "of it latency (%)": 100 * seconds("all_reduce", 0.0, ranks, wire, algorithm) / took,
            "_as_asked": ranks == 64 and 90 <= kilobytes <= 110 and latency >= 10 and bandwidth <= 12.5,
        }
        return figure, alt, readings

    return explorer(
        draw,
        {
            "ranks": Slider(2, 64, 8, 1),
            "kilobytes": Slider(0.1, 1e6, 100.0, log=True, unit="kB"),
            "latency": Slider(1.0, 100.0, 10.0, log=True, unit="µs"),
            "bandwidth": Slider(0.1, 500.0, 12.5, log=True, unit="GB/s"),
            "algorithm": Choice(ALGORITHMS, "ring"),
        },
        Challenge(
            "64 ranks, 100 kB, 10 µs and 12.5 GB/s or worse: under 200 µs.",
            lambda read: bool(read["_as_asked"]) and read["time (s)"] < 200e-6,
        ),
    )


_VIT_L = 303_304_707  # parameters of ViT-L/16 with 3 classes


def overlapped_backward() -> Explorer:
    """Notebook 01: a ViT-L/16 whose 16-bit gradients travel during the backward.

    By bucket, tokens, matmul rate, wire and ranks. The backward makes gradients at a constant rate. The knob
    is the most that a bucket may hold, in MiB (2^20 bytes), which `DataParallel(bucket_mb=)` means too; the
    gradients are dealt into as few equal buckets as that allows.
    """
    from hpnb import plot

    def draw(
        bucket: float, tokens: int, matmul: float, wire: str, ranks: int, fast: bool
    ) -> tuple[Figure, str, dict[str, Any]]:
        computing = 4 * tokens * _VIT_L / (matmul * 1e12)  # seconds of the backward
        count = math.ceil(2 * _VIT_L / (bucket * 2**20))
        ready, sizes = even_buckets(2 * _VIT_L, 2 * _VIT_L / count, computing)
        forward = computing / 2
        step = Backward(forward, forward + computing, tuple(forward + at for at in ready), sizes)
        tl, bare = step.on(LINKS[wire], ranks), step.share(LINKS[wire], ranks)
        dealt = f"{count} buckets of {number(sizes[0] / 2**20, 'MiB')}" if count > 1 else "one bucket"
        figure = plot.timeline(
            tl,
            exposed=True,
            bubble=None,
            text=not fast,
            axis_labels={0: "each rank"},
            title=f"ViT-L/16, {ranks} ranks on {wire}, {tokens:,} tokens a rank at {number(matmul)} TFLOP/s, "
            f"{dealt}",
        )
        alt = (
            f"Forward and backward of one rank above the all-reduces of {dealt}; "
            f"{100 * bare:.1f} % of the step is exposed communication."
        )
        each = seconds("all_reduce", sizes[0], ranks, LINKS[wire])
        readings = {
            "step (s)": tl.makespan,
            "exposed (%)": 100 * bare,
            "a bucket's all-reduce (s)": each,
            "of it latency (%)": 100 * seconds("all_reduce", 0.0, ranks, LINKS[wire]) / each,
            "ρ (FLOP/B)": f"{matmul * 1e12 / LINKS[wire].bandwidth:,.0f}",
            "_as_asked": (ranks, wire, matmul) == (64, "Ethernet 100 Gb", 400) and tokens <= 50_000,
        }
        return figure, alt, readings

    return explorer(
        draw,
        {
            "bucket": Slider(5.0, 1000.0, 25.0, log=True, unit="MiB"),
            "tokens": Slider(1_000, 100_000, 10_000, 1_000),
            "matmul": Slider(50.0, 1000.0, 400.0, log=True, unit="TFLOP/s"),
            "wire": Choice(tuple(LINKS), "Ethernet 100 Gb"),
            "ranks": Slider(2, 128, 64, 1),
        },
        Challenge(
            "64 ranks on Ethernet 100 Gb, 400 TFLOP/s, at most 50,000 tokens a rank: under 6.5 % exposed.",
            lambda read: bool(read["_as_asked"]) and read["exposed (%)"] < 6.5,
        ),
    )


_CHUNKS = {"zb-v": 2, "dualpipe-v": 2, "interleaved": 0, "breadth-first": 0}  # 0: as many as one likes


def pipeline_bubble() -> Explorer:
    """Notebook 02: who is idle, by schedule, ranks, microbatches, chunks, F : I : W and transfer.

    Times are in forwards: a rank's whole share of the forward of one microbatch is 1, however many chunks it
    comes in.
    """
    from hpnb import plot

    def draw(
        schedule: str,
        ranks: int,
        microbatches: int,
        chunks: int,
        input_grad: float,
        weight_grad: float,
        transfer: float,
        fast: bool,
    ) -> tuple[Figure, str, dict[str, Any]]:
        v = _CHUNKS.get(schedule, 1) or chunks
        made = schedules.make(schedule, ranks * v, microbatches, v)
        tl = made.simulate(Costs(1 / v, input_grad / v, weight_grad / v, transfer))
        held = max(tl.peak_in_flight(rank) for rank in tl.ranks) / v
        share, rate = 100 * tl.bubble_fraction, 100 * tl.bubble_rate
        pieces = "" if v == 1 else f", {v} chunks a rank"
        figure = plot.timeline(
            tl,
            in_flight=True,
            bubble=None,
            text=not fast,
            unit="forwards",
            title=f"{schedule}, {ranks} ranks, {microbatches} microbatches{pieces}: bubble {share:.1f} % of "
            f"ranks × makespan, {rate:.1f} % of the longest rank's span",
        )
        alt = (
            f"{schedule} on {ranks} ranks and {microbatches} microbatches: {share:.1f} % of ranks times "
            f"makespan is idle, and some rank holds {number(held)} microbatches at once."
        )
        readings = {
            "step (forwards)": tl.makespan,
            "bubble (%)": share,
            "of the longest span (%)": rate,
            "microbatches in flight": held,
            "messages": sum(map(len, made.queues.values())),
            "_as_asked": ranks == 4
            and microbatches <= 12
            and input_grad == weight_grad == 1.0
            and transfer >= 0.1,
        }
        return figure, alt, readings

    return explorer(
        draw,
        {
            "schedule": Choice(schedules.NAMES, "zb-h2"),  # opens on the one that leans
            "ranks": Slider(2, 8, 4),
            "microbatches": Slider(1, 32, 8),
            "chunks": Slider(1, 4, 2),
            "input_grad": Slider(0.2, 2.0, 1.0, 0.1),
            "weight_grad": Slider(0.2, 2.0, 1.0, 0.1),
            "transfer": Slider(0.0, 1.0, 0.1, 0.05),
        },
        Challenge(
            "4 ranks, at most 12 microbatches, F = I = W, a transfer of 0.1 forwards or more: a bubble under "
            "11 % of ranks × makespan with at most 80 messages and at most 6 microbatches in flight.",
            lambda read: (
                bool(read["_as_asked"])
                and read["bubble (%)"] < 11
                and read["messages"] <= 80
                and read["microbatches in flight"] <= 6
            ),
        ),
    )


_RATE = 400e12  # FLOP/s of a rank
_LAYERS = {"qkv": ("qkv",), "projection": ("scores", "weighted values", "projection")}
_BEFORE = ("all_gather", "broadcast")  # what a product needs; sums follow it


def tensor_modes() -> Explorer:
    """Notebook 03: one block in each mode of tensor parallelism, by ranks, width, tokens and link.

    Every message is in line with the products: nothing is hidden. 400 TFLOP/s a rank, values of 2 bytes.
    """
    from hpnb import plot

    def draw(
        mode: str, ranks: int, hidden: int, sequence: int, batch: int, link: str, fast: bool
    ) -> tuple[Figure, str, dict[str, Any]]:
        block = Block(hidden, hidden // 128, sequence, batch)
        tl, grid = _in_line(block, mode, ranks, LINKS[link])
        pictures, names = [tl], [f"{mode}, {grid} ranks"]
        if mode != "1d":
            pictures.append(_in_line(block, "1d", ranks, LINKS[link])[0])
            names.append("1d")
        depth, plain = _depth(mode, ranks), mode.removesuffix("+sp")
        sent = block_sent(block, plain, ranks, depth, mode != plain)
        kept = activation_bytes(block, plain, ranks, depth, mode != plain)
        copies = depth if plain == "2.5d" else 1
        states = 16.0 * block.parameters * copies / ranks
        took = block_seconds(block, plain, ranks, LINKS[link], _RATE, depth, mode != plain)
        figure = plot.timeline(
            *pictures,
            names=names,
            bubble=None,
            exposed=True,
            text=not fast,
            axis_labels={0: "each rank"},
            title=f"one block of {hidden:,}, {batch} x {sequence:,} tokens, over {ranks} ranks on {link}",
        )
        ratio = took.compute / took.communication
        alt = (
            f"A block by {mode} over {ranks} ranks on {link}"
            + (", above the same by 1d" if mode != "1d" else "")
            + f": computing takes {number(took.compute, 's')}, messages {number(took.communication, 's')}."
        )
        readings = {
            "block (s)": took.total,
            "computing over sending": ratio,
            "sent (B)": sent.bytes(),
            "kept and states (B)": kept + states,
            "ρ (FLOP/B)": f"{_RATE / LINKS[link].bandwidth:,.0f}",
            "_as_asked": ranks >= 16 and link == "InfiniBand NDR" and hidden <= 8192,
        }
        return figure, alt, readings

    return explorer(
        draw,
        {
            "mode": Choice(("1d", "1d+sp", "2d", "2.5d", "3d"), "2d"),
            "ranks": Choice((2, 4, 8, 16, 32, 64), 16),
            "hidden": Choice((1024, 2048, 4096, 8192, 12288, 16384), 8192),
            "sequence": Choice((256, 1024, 2048, 8192), 2048),
            "batch": Choice((1, 2, 4, 8, 16, 32, 64), 16),
            "link": Choice(tuple(LINKS), "NVLink 4"),
        },
        Challenge(
            "16 ranks or more on InfiniBand NDR, a width of 8,192 or less: computing at least 0.4 times as "
            "long as sending, with at most 2 GB of states and activations of the block on a rank.",
            lambda read: (
                bool(read["_as_asked"])
                and read["computing over sending"] >= 0.4
                and read["kept and states (B)"] <= 2e9
            ),
        ),
    )


def _depth(mode: str, ranks: int) -> int:
    """Layers of a 2.5D grid: the fewest above one that leave a square."""
    if mode != "2.5d":
        return 1
    return next(
        (d for d in range(2, ranks) if ranks % d == 0 and math.isqrt(ranks // d) ** 2 == ranks // d), 2
    )


def _in_line(block: Block, mode: str, ranks: int, wire: Link) -> tuple[Timeline, str]:
    """(one rank's block, each layer's messages around its product; the sides of the grid)."""
    plain, depth = mode.removesuffix("+sp"), _depth(mode, ranks)
    sent = block_sent(block, plain, ranks, depth, mode != plain)
    flops: dict[str, int] = {m.name: m.flops for m in block.matmuls}
    events: list[Event] = []
    clock = 0.0

    def send(found: Iterable[Collective]) -> None:
        nonlocal clock
        for each in found:
            end = clock + each.seconds(wire)
            events.append(Event(0, -1, each.op, -1, clock, end, "tp", each.bytes))
            clock = end

    for phase, op, factor in (("forward", "F", 1), ("backward", "B", 2)):
        order = ("qkv", "projection", "mlp up", "mlp down")
        for layer in order if phase == "forward" else order[::-1]:
            own = [c for c in sent.collectives if (c.layer, c.phase) == (layer, phase)]
            send(c for c in own if c.op in _BEFORE)
            work = factor * sum(flops[name] for name in _LAYERS.get(layer, (layer,)))
            events.append(Event(0, -1, op, -1, clock, clock + work / ranks / _RATE))
            clock = events[-1].end
            send(c for c in own if c.op not in _BEFORE)
        rest = [c for c in sent.collectives if c.phase == phase and c.layer in ("norms", "vectors")]
        send(rest)
    return Timeline(tuple(events), "simulated"), " x ".join(map(str, grid_sides(plain, ranks, depth)))

"""A figure must draw what its data says: extents, colours, words and units are read back from the artists.

pytest tests/test_plot.py
"""

from __future__ import annotations

import base64
import io
import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from PIL import Image

from hpnb import plot, record
from hpnb.lesson.figures.grid_steps import summa_steps
from hpnb.lesson.figures.ranks_and_collectives import (
    compare_moves,
    costs,
    find_straggler,
    tensors,
    time_by_part,
    waits,
)
from hpnb.lesson.figures.vit_data_parallel import (
    DURING,
    FOR_MESSAGES,
    spread_columns,
    states,
    step_ratios,
    versions,
)
from hpnb.lesson.figures.vit_pipeline import u_curve
from hpnb.lesson.figures.vit_tensor import FOOT, cheapest_mode, find_cliff, gradient_cliff
from hpnb.lesson.programs.step_timing import Spread
from hpnb.mesh import Layout
from hpnb.plot.bars import Bar, BarPanel, bars
from hpnb.plot.canvas import boxes, new_figure
from hpnb.plot.curves import CurvePanel, Look, Series, curves, looks
from hpnb.plot.grammar import AXIS, CARD, CATEGORY, STYLE, ink_on
from hpnb.plot.lanes import exposed_parts
from hpnb.plot.memory import MOST_POINTS, thin
from hpnb.plot.standings import OURS, Standing, StandingGroup, StandingPanel
from hpnb.plot.units import byte_count, bytes_unit, number, seconds, time_unit
from hpnb.record import CATEGORIES, Event, MemoryProfile, MemorySample, Message, Timeline, ring_bytes

MS = 1e-3


# --- data, and ways to read a figure back ------------------------------------------------------


def one_f_one_b(stages: int, microbatches: int, backward: str = "B", source: str = "simulated") -> Timeline:
    """1F1B with F = 1 ms and B = 2 ms (or I = W = 1 ms), as soon as its inputs are there."""
    done: dict[tuple[str, int, int], float] = {}
    queues = []
    for rank in range(stages):
        warm = min(stages - rank - 1, microbatches)
        order = [("F", i) for i in range(warm)]
        for i in range(microbatches - warm):
            order += [("F", warm + i), ("B", i)]
        queues.append(order + [("B", i) for i in range(microbatches - warm, microbatches)])
    clock, events = [0.0] * stages, []
    while any(queues):
        for rank, queue in enumerate(queues):
            if not queue:
                continue
            op, i = queue[0]
            needs = ("F", rank - 1, i) if op == "F" else ("B", rank + 1, i)
            if 0 <= needs[1] < stages and needs not in done:
                continue
            start = max(clock[rank], done.get(needs, 0.0))
            parts = ["F"] if op == "F" else ["I", "W"] if backward == "I" else ["B", ""]
            end = start + len(parts) * MS
            if parts == ["I", "W"]:
                events += [
                    Event(rank, rank, "I", i, start, start + MS),
                    Event(rank, rank, "W", i, start + MS, end),
                ]
            else:
                events.append(Event(rank, rank, op, i, start, end))
            clock[rank] = done[op, rank, i] = end
            queue.pop(0)
    return Timeline(tuple(events), source)


def talking(source: str = "measured") -> Timeline:
    """Rank 0 computes 10 s to 14 s and 15 s to 16 s, and reduces 13 s to 16.5 s; rank 1 sends besides."""
    return Timeline(
        (
            Event(0, -1, "compute", -1, 10.0, 14.0),
            Event(0, -1, "compute", -1, 15.0, 16.0),
            Event(0, -1, "all_reduce", -1, 13.0, 16.5, "dp"),
            Event(1, -1, "compute", -1, 10.0, 18.0),
            Event(1, -1, "send", -1, 11.0, 12.0, "pp"),
        ),
        source,
    )


def bucketed(count: int, pause: float = 0.0) -> Timeline:
    """A backward of 100 ms, and from 60 ms on buckets one after the other for 100 ms, on 2 ranks."""
    events = []
    for rank in range(2):
        events.append(Event(rank, -1, "B", -1, 0.0, 100 * MS))
        for k in range(count):
            start, end = (60 + 100 * k / count) * MS, (60 + 100 * (k + 1 - pause) / count) * MS
            events.append(Event(rank, -1, "all_reduce", -1, start, end, "dp"))
    return Timeline(tuple(events))


def profile(rank: int = 0, device: str = "cpu") -> MemoryProfile:
    rows = [(0.0, 0), (0.01, 300), (0.03, 700), (0.04, 100)]
    made = (MemorySample(5.0 + t, 400_000, 0, 800_000, a * 1000, 5000) for t, a in rows)
    return MemoryProfile(tuple(made), rank, device)


def errors(layers: int, fault: str) -> dict[str, dict[str, float]]:
    """A ViT's modules from the loss down, right to rounding, and wrong from `fault` on; the first is 0."""
    attention = ("attention.o_proj", "attention.q_proj")
    inside = ("mlp.fc2", "mlp.fc1", "layernorm_after", *attention, "layernorm_before")
    modules = ["classifier", "vit.layernorm"]
    modules += [f"vit.layers.{i}.{name}" for i in reversed(range(layers)) for name in inside]
    modules.append("vit.embeddings.patch_embeddings.projection")
    right = {module: i % 3 * 1e-16 for i, module in enumerate(modules)}
    at = modules.index(fault)
    return {"right": right, "left out": right | dict.fromkeys(modules[at:], 0.3)}


# 1d below 100 tokens a rank, 3d above, 2d where hidden is 4,096
MAP = (
    [2.0**k for k in range(4, 13)],
    [256.0, 1024.0, 4096.0],
    [["1d" if k < 7 else "3d" for k in range(4, 13)]] * 2 + [["2d"] * 9],
)


def summa(q: int) -> list[list[Message]]:
    """What each of q x q ranks does for X W: panel t of X comes from column t, panel t of W from row t."""
    every = []
    for rank in range(q * q):
        i, j = divmod(rank, q)
        row, column = tuple(i * q + n for n in range(q)), tuple(n * q + j for n in range(q))
        every.append([
            Message(axis, "broadcast", ring_bytes("broadcast", n, q), group, group[t])
            for t in range(q)
            for axis, n, group in (("tp.1", 1200.0, row), ("tp.0", 600.0, column))
        ])  # fmt: skip
    return every


def find(ax: Axes, label: str) -> Artist:
    (found,) = [artist for artist in ax.findobj() if artist.get_label() == label]
    return found


def extents(ax: Axes, label: str) -> np.ndarray:
    """(n, 4): left, right, top, bottom of each rectangle of one op."""
    artist = find(ax, label)
    assert isinstance(artist, PolyCollection)
    corners = [path.vertices for path in artist.get_paths()]
    return np.array([[c[:, 0].min(), c[:, 0].max(), c[:, 1].min(), c[:, 1].max()] for c in corners])


def words(fig: Figure) -> list[str]:
    fig.canvas.draw()
    return [t.get_text() for t in fig.findobj(Text) if t.get_visible() and t.get_text()]


def said(fig: Figure) -> str:
    return "\n".join(words(fig))


def pixels(data: bytes) -> set[str]:
    image = Image.open(io.BytesIO(data)).convert("RGB")
    return {to_hex(np.array(rgb) / 255).upper() for _, rgb in image.getcolors(1 << 20)}


def straggling(slow: float = 8.0) -> Timeline:
    """Four ranks compute 20 ms, rank 2 takes `slow` ms more; the all-reduce moves for 5 ms after the last."""
    events = []
    for rank in range(4):
        arrive = 20.0 + (slow if rank == 2 else 0.0)
        events.append(Event(rank, -1, "compute", -1, 0.0, arrive * MS))
        events.append(Event(rank, -1, "all_reduce", -1, arrive * MS, (25.0 + slow) * MS, "dp"))
    return Timeline(tuple(events))


SIZES = [2.0**k for k in range(6, 27)]
TIMES = [3e-5 + n / 8e9 for n in SIZES]
KEPT = {
    "stage 0, all of it": {"parameters": 2e6, "gradients": 2e6, "optimizer": 12e6},
    "stage 3": {"parameters": 5e5, "gradients": 5e5, "optimizer": 3e6},
}
RACE = StandingGroup(
    "dp2xtp2",
    (
        Standing("ours of a name that is longer than its bar", 194.0, "28% of it", ours=True),
        Standing("another of a name that is longer than its bar", 73.5, "2.677 [2.576, 2.750]"),
        Standing("one", 500.0, "0.968 [0.963, 0.987]"),
    ),
    ceiling=690.0,
)


def spreads(ratios: Mapping[float, float]) -> dict[float, Spread]:
    return {tokens: Spread(ratio, 0.9 * ratio, 1.1 * ratio) for tokens, ratio in ratios.items()}


FIGURES: dict[str, Callable[[], Figure]] = {
    "timeline": lambda: plot.timeline(
        one_f_one_b(4, 8),
        one_f_one_b(4, 8, "I", "replayed from measured CPU time"),
        in_flight=True,
        title="1F1B",
    ),
    "lanes": lambda: plot.timeline(talking(), exposed=True, axis_labels={0: "dp 0 pp 0", 1: "dp 0 pp 1"}),
    "two shares": lambda: plot.timeline(  # whose titles need several lines
        one_f_one_b(4, 8, "I", "replayed from measured GPU time, NVLink 4 at 298 GB/s"),
        one_f_one_b(4, 8),
        exposed=True,
        bubble="rate",
        in_flight=True,
        names=("measured", "predicted"),
        title="One step",
    ),
    "many buckets": lambda: plot.timeline(bucketed(390), bucketed(25), exposed=True, bubble=None),
    "memory": lambda: plot.memory(*(profile(r) for r in range(4)), capacity=3e6, title="One step"),
    "mesh": lambda: plot.mesh(Layout(2, 2, 4), hosts_of=8),
    "stacked mesh": lambda: plot.mesh(Layout(2, 4, 8), hosts_of=8),
    "compare": lambda: plot.compare(
        {"a longer name": 1.0, "b": 1234567.0}, {"a longer name": 2.0, "b": 1e6}, "ms"
    ),
    "costs": lambda: costs(SIZES, TIMES, (SIZES, TIMES), 240e3, {"tree": (SIZES, TIMES)}),
    "waits": lambda: waits(straggling()),
    "tensors": lambda: tensors([[1, 2, 3], [], [4]], [[10], [1234.5], [7]], title="gather"),
    "step ratios": lambda: step_ratios(
        spreads({200: 3.0, 800: 1.8, 6400: 1.1}),
        spreads({200: 2.8, 800: 1.6, 6400: 1.05}),
        700.0,
        {"law: free from": 600.0, "measured: free from": 6400.0},
    ),
    "gradient cliff": lambda: gradient_cliff(errors(3, "vit.layers.1.mlp.fc1")),
    "long gradient cliff": lambda: gradient_cliff(errors(9, "vit.layers.7.attention.o_proj")),
    "cheapest mode": lambda: cheapest_mode(*MAP, title="T"),
    "grid steps": lambda: summa_steps(summa(3), (3, 3), "T"),
    "drift": lambda: plot.drift(
        {"agreed": [1.1, 0.9, 0.8], "alone": [1.1, 0.95, 0.8]},
        {"agreed": [0.0, 0.0, 0.0], "alone": [0.0, 1e-3, 2e-2]},
        [2],
        "rank 1 overflows",
    ),
    "states": lambda: states(KEPT, KEPT),
    "u curve": lambda: u_curve(
        [1, 2, 4, 8, 16, 32, 64],
        {
            "ideal": [0.1] * 7,
            "small kernels": [0.01 * k for k in range(7)],
            "bubble": [0.3 / 2**k for k in range(7)],
            "host wait": [0.0] * 5 + [0.05, 0.2],
        },
        [0.1 + 0.01 * k + 0.3 / 2**k for k in range(7)],
    ),
    "standings": lambda: plot.standings(
        [
            StandingPanel("A", (RACE, StandingGroup("alone", (Standing("nobody", None),))), ("its sizes",)),
            StandingPanel("B", (RACE,)),
        ],
        "TFLOP/s",
        "speed over it",
        caption="C",
    ),
    "states of long names": lambda: states(
        *2 * [{f"{i}: {kept}": KEPT["stage 3"] for i, kept in enumerate(("optimizer", "weights as well"))}]
    ),
}


# --- the grammar and the card ------------------------------------------------------------------


def test_the_names_are_the_functions() -> None:
    for name in plot.__all__:
        assert name in ("AXIS", "CATEGORY", "STYLE") or callable(getattr(plot, name)), name


def test_the_grammar_tells_things_apart_by_more_than_colour() -> None:
    assert tuple(CATEGORY) == CATEGORIES
    assert set(AXIS) == {"dp", "pp", "cp", "tp"}
    for group, same in (([*"FIWB", "compute", "idle"], STYLE), (list(CATEGORY), CATEGORY)):
        assert len({same[name].color for name in group}) == len(group)
        hatched = [same[name].hatch for name in group if same[name].hatch]
        assert len(set(hatched)) == len(hatched) >= 4
    assert len({style.line for style in AXIS.values()}) == len(AXIS)
    assert (
        len({(s.color, s.hatch) for op, s in STYLE.items() if op not in ("communication", "move")})
        == len(STYLE) - 2
    )


def ticks_beyond_limits(ax: Axes) -> Iterator[Text]:
    for axis, (labels, limits) in enumerate(
        ((ax.get_xticklabels(), ax.get_xlim()), (ax.get_yticklabels(), ax.get_ylim()))
    ):
        yield from (t for t in labels if not min(limits) <= t.get_position()[axis] <= max(limits))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", FIGURES)
def test_no_words_leave_the_card_or_meet(name: str) -> None:
    fig = FIGURES[name]()
    fig.canvas.draw()
    seen = [t for t in fig.findobj(Text) if t.get_visible() and t.get_text().strip()]
    at = [t.get_window_extent() for t in seen if t.axes is None or t.axes.get_visible()]
    ticks = {id(t) for ax in fig.axes for t in (*ax.get_xticklabels(), *ax.get_yticklabels())}
    beyond = {id(t) for ax in fig.axes for t in ticks_beyond_limits(ax)}  # which are not drawn
    whole = fig.bbox
    for text, box in zip(seen, at, strict=True):
        if id(text) in beyond:
            continue
        assert whole.x0 < box.x0 < box.x1 < whole.x1, text
        assert whole.y0 < box.y0 < box.y1 < whole.y1, text
    drawn = [(t, b) for t, b in zip(seen, at, strict=True) if id(t) not in ticks]
    for (one, a), (two, b) in itertools.combinations(drawn, 2):
        wide, tall = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert min(wide, tall) < 1.5, (one, two)


def test_a_card_is_opaque_bordered_and_700_pixels_wide() -> None:
    fig = plot.timeline(one_f_one_b(2, 2))
    image = Image.open(io.BytesIO(plot.png(fig, scale=1.0, small=False)))
    assert fig.get_facecolor() == (1.0, 1.0, 1.0, 1.0)
    assert image.mode == "RGB"
    assert image.width == 700
    assert image.getpixel((20, 5)) == (255, 255, 255)
    assert image.getpixel((0, image.height // 2)) != (255, 255, 255)


def test_nothing_touches_pyplot() -> None:
    for file in Path(plot.__file__).parent.glob("*.py"):
        assert "pyplot" not in file.read_text(encoding="utf-8"), file.name


def test_a_legend_takes_the_lines_it_needs() -> None:
    from hpnb.plot.canvas import Key

    keys = [Key(style) for style in STYLE.values()]
    short, _ = new_figure([1.0], legend=keys[:2])
    tall, _ = new_figure([1.0], legend=keys)
    assert tall.get_figheight() > short.get_figheight() + 0.4
    for x in (t.get_window_extent().x1 for t in tall.texts):
        assert x < tall.bbox.x1


def test_boxes_are_one_artist() -> None:
    _, (ax,) = new_figure([1.0])
    found = boxes(ax, [(0, 0, 1, 1), (2, 0, 3, 1)], STYLE["I"], name="I")
    assert len(found.get_paths()) == 2
    assert extents(ax, "I").tolist() == [[0, 1, 0, 1], [2, 5, 0, 1]]
    assert found.get_hatch() == STYLE["I"].hatch


def test_units() -> None:
    assert [time_unit(t)[1] for t in (2.0, 2e-3, 2e-6, 2e-9, 0.0)] == ["s", "ms", "µs", "ns", "s"]
    assert [bytes_unit(n)[1] for n in (2e12, 2e9, 2e6, 2e3, 2)] == ["TB", "GB", "MB", "kB", "B"]
    assert [number(x) for x in (0, 1.2345, 12.345, 123.45, 999.7, 1234.5, 5e-5, 2e7)] == [
        "0", "1.23", "12.3", "123", "1,000", "1,234", "5e-05", "2e+07",
    ]  # fmt: skip
    assert seconds(0.0012345) == "1.23 ms"
    assert byte_count(1_230_000) == "1.23 MB"
    assert byte_count(512) == "512 B"
    assert ink_on("#FFFFFF") == "#000000"
    assert ink_on("#004488") == "#FFFFFF"


# --- timeline ----------------------------------------------------------------------------------


def test_a_rectangle_an_event_where_the_event_was() -> None:
    tl = one_f_one_b(4, 8)
    ax = plot.timeline(tl).axes[0]
    for op in "FB":
        events = [e for e in tl.events if e.op == op]
        events.sort(key=lambda e: e.rank)
        drawn = extents(ax, op)
        assert len(drawn) == 32
        np.testing.assert_allclose(drawn[:, 0], [e.start * 1e3 for e in events], atol=1e-9)
        np.testing.assert_allclose(drawn[:, 1], [e.end * 1e3 for e in events], atol=1e-9)
        assert [row for row, _ in itertools.groupby(drawn[:, 2])] == sorted(set(drawn[:, 2]))
        assert to_hex(find(ax, op).get_facecolor()[0]).upper() == STYLE[op].color
        assert find(ax, op).get_hatch() == (STYLE[op].hatch or None)
    assert ax.get_ylim()[0] > ax.get_ylim()[1]  # rank 0 on top
    idle = extents(ax, "idle")
    assert len(idle) == 4
    np.testing.assert_allclose(idle[:, :2], [[0.0, 33.0]] * 4)
    assert sorted(t.get_text() for t in ax.texts if t.get_text().isdigit()) == sorted("01234567" * 8)


def test_a_number_is_left_out_where_it_does_not_fit() -> None:
    short = Timeline((Event(0, 0, "F", 7, 0.0, 1.0), Event(0, 0, "B", 7, 1.0, 900.0)), "simulated")
    assert [t.get_text() for t in plot.timeline(short).axes[0].texts if t.get_text().isdigit()] == ["7"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("source", ["simulated", "replayed from measured CPU time", "measured"])
def test_the_title_names_the_source_and_the_bubble(source: str) -> None:
    tl = one_f_one_b(4, 8, source=source)
    assert f"{source} · bubble 27.3 % of ranks × makespan" in words(plot.timeline(tl))
    late = talking(source)  # rank 1 is never idle in its own span
    assert f"{source} · bubble 18.8 % of ranks × makespan" in words(plot.timeline(late))
    assert f"{source} · bubble 0.0 % of the longest rank's span" in words(plot.timeline(late, bubble="rate"))
    assert source in words(plot.timeline(tl, bubble=None))
    assert "33.0 ms" in words(plot.timeline(tl))


def test_timelines_share_one_axis_from_their_own_starts() -> None:
    first, late = one_f_one_b(2, 2), one_f_one_b(2, 4, source="measured").shifted(7.0)
    fig = plot.timeline(first, late, names=["predicted", "run"], title="Both")
    above, below = fig.axes
    assert above.get_xlim() == below.get_xlim() == pytest.approx((0.0, late.makespan * 1e3))
    assert extents(below, "F")[:, 0].min() == pytest.approx(0.0)
    assert extents(above, "idle")[:, 1].max() == pytest.approx(first.makespan * 1e3)
    assert "predicted · simulated · bubble" in said(fig)
    assert "run · measured · bubble" in said(fig)
    assert "Both" in words(fig)
    assert above.get_position().y0 > below.get_position().y1


def test_a_recorder_is_no_timeline() -> None:
    with record.timeline() as recorder, pytest.raises(TypeError, match=r"Recorder.*recorder\.gather\(\)"):
        plot.timeline(recorder)  # type: ignore[arg-type]


def test_the_unit_follows_the_makespan() -> None:
    for factor, unit in ((1.0, "ms"), (1e-3, "µs"), (1e3, "s")):
        events = tuple(Event(0, 0, "F", 0, 0.0, 5 * MS * factor) for _ in range(1))
        assert f"time ({unit})" in words(plot.timeline(Timeline(events)))
    assert "time (forwards)" in words(plot.timeline(talking(), unit="forwards"))


def test_communication_has_a_lane_for_each_axis_beneath_its_rank() -> None:
    fig = plot.timeline(talking(), axis_labels={1: "the second"})
    ax = fig.axes[0]
    compute, reduce, send = extents(ax, "compute"), extents(ax, "all_reduce"), extents(ax, "send")
    np.testing.assert_allclose(reduce[0, :2], [3.0, 6.5])
    np.testing.assert_allclose(send[0, :2], [1.0, 2.0])
    assert compute[0, 3] <= reduce[0, 2] < reduce[0, 3] <= compute[2, 2]  # between rank 0 and rank 1
    assert compute[2, 3] < send[0, 2]
    assert reduce[0, 3] - reduce[0, 2] < 0.5 * (compute[0, 3] - compute[0, 2])
    lanes = [
        c
        for c in ax.collections
        if to_hex(c.get_edgecolor()[0]).upper() in (AXIS["dp"].color, AXIS["pp"].color)
    ]
    assert len(lanes) == 2
    assert {"rank 0", "the second", "dp", "pp", "dp lane", "pp lane", "all-reduce", "send"} <= set(words(fig))


def test_exposed_is_what_no_computing_hides() -> None:
    tl = talking()
    assert [(a, b) for _, a, b in exposed_parts(tl.by_rank[0])] == [(14.0, 15.0), (16.0, 16.5)]
    assert exposed_parts(tl.by_rank[1]) == []
    twice = [Event(0, -1, "send", -1, 0.0, 2.0, "pp"), Event(0, -1, "recv", -1, 1.0, 3.0, "pp")]
    assert sum(b - a for _, a, b in exposed_parts(twice)) == pytest.approx(3.0)
    fig = plot.timeline(tl, exposed=True)
    np.testing.assert_allclose(extents(fig.axes[0], "exposed")[:, :2], [[4.0, 5.0], [6.0, 6.5]])
    assert "bubble 18.8 % and exposed communication 9.4 % of ranks × makespan" in said(fig)
    assert "exposed communication: not overlapped by this rank's compute" in words(fig)


@pytest.mark.parametrize("seed", range(20))
def test_exposed_parts_cover_each_idle_moment_of_a_message_once(seed: int) -> None:
    draw = random.Random(seed)
    events = []
    for _ in range(draw.randint(1, 14)):
        start = draw.randint(0, 20)
        times = float(start), float(start + draw.randint(1, 6))
        computes = draw.random() < 0.5
        events.append(Event(0, 0, "F", 0, *times) if computes else Event(0, -1, "send", -1, *times, "pp"))
    busy = {t for e in events if e.is_compute for t in range(int(e.start), int(e.end))}
    talking = {t for e in events if not e.is_compute for t in range(int(e.start), int(e.end))}
    parts = [(a, b) for _, a, b in exposed_parts(events)]
    assert all(a < b for a, b in parts)
    assert sorted(t for a, b in parts for t in range(int(a), int(b))) == sorted(talking - busy)


def test_bars_without_rows_and_rows_without_bars_are_refused() -> None:
    with pytest.raises(ValueError, match="no rows to draw"):
        bars([BarPanel({})], STYLE, title="")
    with pytest.raises(ValueError, match="row 'second' has no bars"):
        bars([BarPanel({"first": [Bar({"F": 1.0})], "second": []})], STYLE, title="")
    bars([BarPanel({"first": [Bar({"F": 1.0})]}, named=False)], STYLE, title="")


@pytest.mark.parametrize(("count", "pause"), [(25, 0.0), (390, 0.0), (390, 0.3)])
def test_exposed_parts_that_touch_are_hatched_as_one(count: int, pause: float) -> None:
    tl = bucketed(count, pause)
    fig = plot.timeline(tl, exposed=True, bubble=None)
    end = max(e.end for e in tl.events) / MS
    np.testing.assert_allclose(extents(fig.axes[0], "exposed")[:, :2], [[100.0, end]] * 2, atol=0.1)
    assert len(extents(fig.axes[0], "all_reduce")) == 2 * count
    bare = sum(b - a for _, a, b in exposed_parts(tl.by_rank[0]))  # the pauses do not count
    assert bare == pytest.approx(0.06 * (1 - pause), rel=0.02)
    assert f"exposed communication {100 * bare / tl.makespan:.1f} %" in said(fig)


def test_exposed_parts_stay_apart_where_the_eye_sees_a_gap_or_another_axis() -> None:
    apart = extents(plot.timeline(bucketed(10, 0.3), exposed=True).axes[0], "exposed")
    assert len(apart) == 2 * 6
    np.testing.assert_allclose(apart[1:6, 0] - apart[:5, 1], 3.0)
    two = (Event(0, -1, "send", -1, 0.0, 1.0, "pp"), Event(0, -1, "all_reduce", -1, 1.0, 2.0, "dp"))
    drawn = extents(plot.timeline(Timeline(two), exposed=True).axes[0], "exposed")
    assert drawn[:, :2].tolist() == [[1.0, 2.0], [0.0, 1.0]]
    assert drawn[0, 2] < drawn[1, 2]  # dp above pp


def test_in_flight_draws_the_steps_and_writes_the_peaks() -> None:
    tl = one_f_one_b(4, 8)
    fig = plot.timeline(tl, in_flight=True)
    assert len(fig.axes) == 2
    curves = [path.vertices for path in find(fig.axes[1], "in flight").get_paths()]
    heights = [curve[:, 1].max() - curve[:, 1].min() for curve in curves]
    np.testing.assert_allclose(np.array(heights) / heights[0], [1.0, 0.75, 0.5, 0.25])
    assert [w for w in words(fig) if w.startswith("peak")] == ["peak 4", "peak 3", "peak 2", "peak 1"]
    held = curves[0][(curves[0][:, 0] > 3.1) & (curves[0][:, 0] < 23.9), 1]
    assert len(held) > 5
    assert len(set(held)) == 1  # one let go as the next is taken leaves no notch
    assert len(plot.timeline(talking(), in_flight=True).axes) == 1  # no forward, no strip
    assert "activations in flight (microbatches)" in words(fig)
    assert "activations in flight (chunks)" not in words(fig)
    two = [Event(0, stage, "F", 0, stage * MS, (stage + 1) * MS) for stage in (0, 2)]
    fig = plot.timeline(Timeline(tuple(two), "simulated"), in_flight=True)
    assert "activations in flight (chunks)" in words(fig)


def test_a_later_chunk_is_paler() -> None:
    events = [Event(0, stage, "F", 0, stage * MS, (stage + 1) * MS) for stage in (0, 2)]
    fig = plot.timeline(Timeline((*events, Event(0, -1, "compute", -1, 3 * MS, 4 * MS)), "simulated"))
    first, second = find(fig.axes[0], "F").get_facecolor()
    assert to_hex(first).upper() == STYLE["F"].color
    assert (second[:3] > first[:3]).all()
    assert to_hex(find(fig.axes[0], "compute").get_facecolor()[0]).upper() == STYLE["compute"].color
    assert "paler: a later chunk" in words(fig)
    blocks = [replace(e, microbatch=-1) for e in events]  # of a sharded model, which has no microbatches
    assert "paler: a later block" in words(plot.timeline(Timeline(tuple(blocks), "simulated")))


def test_spans_with_names_of_their_own_are_in_the_compute_lane() -> None:
    named = [Event(0, -1, op, -1, k * MS, (k + 1) * MS) for k, op in enumerate(("load", "my forward"))]
    fig = plot.timeline(Timeline((*named, Event(0, -1, "all_reduce", -1, 2 * MS, 3 * MS, "dp"))))
    ax = fig.axes[0]
    (load,), (mine,) = (find(ax, op).get_facecolor() for op in ("load", "my forward"))
    tops = [extents(ax, op)[0, 2] for op in ("load", "my forward", "all_reduce")]
    assert tops[0] == tops[1] < tops[2]
    assert to_hex(mine) != to_hex(load) != to_hex(find(ax, "all_reduce").get_facecolor()[0])
    assert {"load", "my forward", "all-reduce"} <= set(words(fig))
    assert find(ax, "load").get_hatch() != find(ax, "my forward").get_hatch()


def test_the_fast_mode_drops_numbers_and_hatches_only() -> None:
    tl = one_f_one_b(4, 8)
    ax = plot.timeline(tl, text=False).axes[0]
    assert not [t for t in ax.texts if t.get_text().isdigit()]
    assert all(c.get_hatch() is None for c in ax.collections)
    np.testing.assert_allclose(extents(ax, "B"), extents(plot.timeline(tl).axes[0], "B"))


def test_unit_costs_beside_seconds_are_refused() -> None:
    measured, units = one_f_one_b(2, 4), Timeline((Event(0, 0, "F", 0, 0.0, 14.0),), "simulated")
    with pytest.raises(ValueError, match=r"14 s.*Costs\.measured"):
        plot.timeline(units, measured)
    plot.timeline(Timeline((Event(0, 0, "F", 0, 0.0, 0.1),), "simulated"), measured)


def test_a_timeline_that_cannot_be_drawn_says_why() -> None:
    with pytest.raises(ValueError, match="without events"):
        plot.timeline(Timeline(()))
    with pytest.raises(ValueError, match="2 names for 1 timelines"):
        plot.timeline(one_f_one_b(2, 2), names=["a", "b"])
    with pytest.raises(ValueError, match="'both' is no definition"):
        plot.timeline(one_f_one_b(2, 2), bubble="both")


# --- memory ------------------------------------------------------------------------------------


def test_memory_is_stacked_by_category_with_its_peak() -> None:
    fig = plot.memory(profile(), profile(3, "cuda"), capacity=3e6)
    assert len(fig.axes) == 2
    ax = fig.axes[0]
    tops = {}
    for name in ("parameters", "optimizer", "activations", "temporary"):
        band = find(ax, name)
        assert to_hex(band.get_facecolor()[0]).upper() == CATEGORY[name].color
        tops[name] = max(path.vertices[:, 1].max() for path in band.get_paths())
    assert tops == pytest.approx(
        {"parameters": 0.4, "optimizer": 1.2, "activations": 1.9, "temporary": 1.905}
    )
    assert not [a for a in ax.findobj() if a.get_label() == "gradients"]  # nothing held, nothing drawn
    assert [w for w in words(fig) if w.startswith("peak")] == ["peak 1.91 MB"] * 2 or "peak 1.90 MB" in said(
        fig
    )
    assert find(ax, "capacity").get_ydata()[0] == pytest.approx(3.0)
    assert {"memory (MB)", "time (ms)", "capacity 3.00 MB"} <= set(words(fig))
    assert "rank 0 · measured, exact tensor bytes (CPU)" in words(fig)
    assert "rank 3 · measured, allocator's bytes (CUDA)" in words(fig)
    (marker,) = [line for line in ax.lines if line.get_marker() == "v"]
    assert (marker.get_xdata()[0], marker.get_ydata()[0]) == pytest.approx((30.0, 1.905))


def test_memory_steps_and_does_not_slope() -> None:
    path = find(plot.memory(profile()).axes[0], "activations").get_paths()[0].vertices
    ys = path[np.isclose(path[:, 0], 30.0), 1]
    assert {0.3, 0.7} <= set(np.round(ys - 1.2, 6))  # both heights at the one instant


def test_thinning_keeps_every_peak() -> None:
    total = np.zeros(100_000)
    total[[3, 54_321, 99_990]] = [5.0, 9.0, 7.0]
    kept = thin(total)
    assert len(kept) <= MOST_POINTS
    assert {0, 3, 54_321, 99_990, 99_999} <= set(kept)
    assert (np.diff(kept) > 0).all()
    assert thin(total[:10]).tolist() == list(range(10))
    with pytest.raises(ValueError, match="without samples"):
        plot.memory(MemoryProfile(()))


# --- mesh --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout",
    [Layout(2, 2, 2), Layout(2, 2, 4), Layout(dp=4), Layout(1, 2, 3), Layout(2, 2, 2, ("tp", "pp", "dp"))],
)
def test_a_mesh_has_a_cell_a_rank_and_a_link_between_neighbours(layout: Layout) -> None:
    fig = plot.mesh(layout)
    ax = fig.axes[0]
    centres = []
    for rank in range(layout.world_size):
        box = find(ax, f"rank {rank}").get_bbox()
        inside = [t for t in ax.texts if box.contains(*t.get_position())]
        told = sorted(t.get_text() for t in inside)
        wanted = [f"{axis} {i}" for axis, i in layout.coordinates(rank).items()]
        assert told in (sorted([*wanted, f"rank {rank}"]), sorted([*wanted, str(rank)]))
        centres.append((box.y0, box.x0))
    assert centres == sorted(centres)  # ranks read like text
    for axis in AXIS:
        lines = [line for line in ax.lines if line.get_label() == axis]
        size = getattr(layout, axis)
        assert len(lines) == layout.world_size // size * (size - 1)
        assert all(line.get_color() == AXIS[axis].color for line in lines)
    assert f"{layout} · {layout.world_size} ranks" in said(fig)


def test_a_link_joins_two_ranks_of_one_group() -> None:
    layout = Layout(2, 2, 4)
    ax = plot.mesh(layout, hosts_of=8).axes[0]
    cells = {rank: find(ax, f"rank {rank}").get_bbox() for rank in range(16)}

    def cell_at(x: float, y: float) -> int:
        touched = [
            r for r, b in cells.items() if b.x0 - 1e-6 <= x <= b.x1 + 1e-6 and b.y0 - 1e-6 <= y <= b.y1 + 1e-6
        ]
        assert len(touched) == 1
        return touched[0]

    for axis in AXIS:
        pairs = set()
        for line in (line for line in ax.lines if line.get_label() == axis):
            (x0, *_, x1), (y0, *_, y1) = line.get_xdata(), line.get_ydata()
            pairs.add((cell_at(x0, y0), cell_at(x1, y1)))
        assert pairs == {pair for group in layout.groups(axis) for pair in itertools.pairwise(group)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("layout", "hosts_of", "borders"), [
    (Layout(2, 2, 2), 4, 2), (Layout(2, 2, 2), 2, 4), (Layout(2, 2, 2), 8, 1), (Layout(1, 2, 3), 4, 3),
    (Layout(2, 4, 8), 8, 8),
])  # fmt: skip
def test_a_host_border_holds_its_ranks_and_no_other(layout: Layout, hosts_of: int, borders: int) -> None:
    ax = plot.mesh(layout, hosts_of=hosts_of).axes[0]
    hosts = [p for p in ax.patches if str(p.get_label()).startswith("host")]
    assert len(hosts) == borders
    for host in hosts:
        first = int(str(host.get_label()).split()[1]) * hosts_of
        box = host.get_bbox()
        inside = set()
        for rank in range(layout.world_size):
            cell = find(ax, f"rank {rank}").get_bbox()
            if box.contains((cell.x0 + cell.x1) / 2, (cell.y0 + cell.y1) / 2):
                inside.add(rank)
        assert inside
        assert inside <= set(range(first, first + hosts_of))


def test_a_mesh_that_fits_no_page_is_refused() -> None:
    with pytest.raises(ValueError, match="hosts_of=0"):
        plot.mesh(Layout(2), hosts_of=0)
    with pytest.raises(ValueError, match="1024 ranks"):
        plot.mesh(Layout(8, 16, 8))
    with pytest.raises(ValueError, match="32 of them in a row"):
        plot.mesh(Layout(dp=32))
    with pytest.raises(TypeError, match=r"draws a layout, not 8, a int; use plot\.mesh\(hpnb\.Layout"):
        plot.mesh(8)  # type: ignore[arg-type]


def test_losses_by_layout_may_be_a_dict_and_a_loss_that_is_none_is_named() -> None:
    (ax,) = plot.by_layout({"dp": [1.0, 2.0], "pp": [3.0]}).axes
    assert [list(line.get_ydata()) for line in ax.get_lines()[:2]] == [[1.0, 2.0], [2.0, 3.0]]
    with pytest.raises(TypeError, match=r"loss 2 of pp is None, a NoneType; plot\.by_layout takes a number"):
        plot.by_layout([("pp", [1.0, None])])  # type: ignore[list-item]


# --- the builders ------------------------------------------------------------------------------


def test_bars_lie_end_to_end_with_ticks_and_words() -> None:
    rows = {
        "a": [Bar({"F": 2.0, "B": 1.0}, hollow=True), Bar({"F": 3.0, "B": 0.5}, words="said")],
        "b": [Bar({"B": 4.0}, ticks=[1.0, 5.0])],
    }
    fig = bars([BarPanel(rows, "s", "took ({unit})", inside="length")], STYLE, title="T", caption="C")
    ax = fig.axes[0]
    np.testing.assert_allclose(extents(ax, "predicted F")[:, :2], [[0, 2]])
    np.testing.assert_allclose(extents(ax, "predicted B")[:, :2], [[2, 3]])
    np.testing.assert_allclose(extents(ax, "F")[:, :2], [[0, 3]])
    np.testing.assert_allclose(extents(ax, "B")[:, :2], [[3, 3.5], [0, 4]])
    assert extents(ax, "predicted F")[0, 3] <= extents(ax, "F")[0, 2]  # predicted above measured
    assert to_hex(find(ax, "predicted F").get_facecolor()[0]).upper() == CARD
    assert [find(ax, f"tick {k}").get_xdata()[0] for k in (0, 1)] == [1.0, 5.0]
    assert {"said", "4.00", "3.00", "took (s)", "T", "C", "a", "b"} <= set(words(fig))
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b"]
    assert ax.yaxis_inverted()
    short = bars([BarPanel({"a": [Bar({"F": 9.0})]}, reach=3.0)], STYLE, title="").axes[0]
    assert short.get_xlim()[1] == pytest.approx(1.04 * 3)
    quick = bars([BarPanel(rows)], STYLE, title="", text=False)
    assert "said" not in words(quick)
    assert find(quick.axes[0], "B").get_hatch() is None


def test_a_part_without_a_look_is_named() -> None:
    with pytest.raises(ValueError, match="no part 'lunch'"):
        bars([BarPanel({"a": [Bar({"lunch": 1.0})]})], STYLE, title="")


def test_curves_tell_lines_dots_and_hollow_dots_apart() -> None:
    look = looks(["a", "b"])
    x = [1.0, 10.0]
    series = [
        Series("a", x, [1.0, 2.0], look["a"], label="law"),
        Series("a", x, [1.0, 2.1], look["a"], "dots", "measured"),
        Series("b", x, [3.0, 4.0], look["b"], "hollow", "predicted"),
    ]
    fig = curves([CurvePanel(series, "y", "x", title="panel", xlabel="x")], title="T")
    ax = fig.axes[0]
    law, measured, predicted = (find(ax, name) for name in ("law", "measured", "predicted"))
    assert list(measured.get_ydata()) == [1.0, 2.1]
    assert (law.get_linestyle(), measured.get_linestyle()) == ("-", "None")
    assert predicted.get_markerfacecolor() == "none"  # hides nothing, and is not hidden
    assert predicted.get_zorder() > measured.get_zorder()
    assert predicted.get_markersize() > measured.get_markersize()
    assert measured.get_marker() != predicted.get_marker()
    assert law.get_color() != predicted.get_color()
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "linear")
    assert {"a", "b", "panel", "T", "x", "y"} <= set(words(fig))
    one, two = (artist for artist in fig.artists if isinstance(artist, Line2D))
    assert (one.get_marker(), one.get_linestyle()) == ("o", "-")  # a line with its dots
    assert (two.get_marker(), two.get_linestyle(), two.get_markerfacecolor()) == ("s", "None", "none")


def test_ticks_of_logarithmic_axes_have_no_exponents() -> None:
    """10 to the power of 3 is three pixels of a page that is 700 wide."""
    for low, high, say in ((5.0, 2000.0, ["10", "100", "1,000"]), (0.02, 3.0, ["0.1", "1"])):
        line = Series("run", [low, high], [low, high], Look("#000000"))
        fig = curves([CurvePanel([line], log="xy")], title="")
        fig.canvas.draw()
        for axis in (fig.axes[0].xaxis, fig.axes[0].yaxis):
            ticks = zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=True)
            assert [label.get_text() for at, label in ticks if low <= at <= high] == say
    narrow = Series("run", [2.0, 4.0], [1.0, 2.0], Look("#000000"))
    fig = curves([CurvePanel([narrow], log="x")], title="")
    fig.canvas.draw()
    shown = [label.get_text() for label in fig.axes[0].xaxis.get_minorticklabels()]
    assert {"2", "3", "4"} <= set(shown)  # less than a decade, so powers of ten say nothing


@pytest.mark.parametrize(
    ("x", "y", "says"),
    [
        ([1.0], [1.0, 2.0], "1 x and 2 y"),
        ([], [], "0 x"),
        ([0.0], [1.0], "logarithm"),
        ([1.0], [float("inf")], "finite"),
    ],
)
def test_curves_that_cannot_be_drawn_name_the_series(x: list[float], y: list[float], says: str) -> None:
    with pytest.raises(ValueError, match=f"run .*{says}"):
        curves([CurvePanel([Series("run", x, y, Look("#000000"))], log="x")], title="")


# --- figures that several pages share -----------------------------------------------------------


def test_likely_mistakes_with_compare_and_memory_get_a_sentence() -> None:
    nan = float("nan")
    for arguments, sentence in (
        (([1, 2], [1, 2]), "predicted is a list; plot.compare takes {name: value}"),
        ((1.0, 2.0), "predicted is a float"),
        (({"a": 1}, {"a": None}), "measured['a'] is a NoneType, None; it must be one number"),
        (({"a": 1}, {"a": "2"}), "measured['a'] is a str"),
        (({"a": 1}, {"a": nan}), "measured['a'] is nan; it must be a finite number"),
        (({0: 1}, {"x": 1}), "only one has 0, x"),
    ):
        with pytest.raises((TypeError, ValueError), match=re.escape(sentence)):
            plot.compare(*arguments)  # type: ignore[arg-type]
    model = torch.nn.Linear(2, 2)
    with record.memory(model) as recorder:
        model(torch.ones(1, 2)).sum().backward()
    profile = recorder.profile()
    for given, options, sentence in (
        ([profile], {}, "not a list; give it one argument a profile"),
        (recorder, {}, "not a MemoryRecorder; give it recorder.profile()"),
        (Timeline(()), {}, "not a Timeline"),
        (profile, {"capacity": "80GB"}, "capacity='80GB' must be bytes"),
        (profile, {"capacity": -1}, "capacity=-1"),
    ):
        with pytest.raises((TypeError, ValueError), match=re.escape(sentence)):
            plot.memory(given, **options)  # type: ignore[arg-type]


def test_compare_draws_pairs_and_writes_ratios() -> None:
    predicted = {"bubble": 20.0, "bytes": 4.0, "new": 0.0}
    measured = {"bubble": 21.0, "bytes": 6.0, "new": 1.0}
    fig = plot.compare(predicted, measured, "ms", "T")
    ax = fig.axes[0]
    assert list(extents(ax, "predicted measured")[:, 1]) == list(predicted.values())
    assert list(extents(ax, "measured")[:, 1]) == list(measured.values())
    ratios = {t.get_text(): t for t in ax.texts if t.get_text().startswith(("×", "no"))}
    assert list(ratios) == ["× 1.05", "× 1.50", "no ratio"]
    assert ratios["× 1.05"].get_color() != ratios["× 1.50"].get_color()  # outside 0.8 to 1.25
    assert {"ms", "20.0", "21.0", "bubble"} <= set(words(fig))
    with pytest.raises(ValueError, match="only one has b"):
        plot.compare({"a": 1.0}, {"a": 1.0, "b": 2.0})


def test_drift_draws_equal_replicas_at_the_foot() -> None:
    losses = {"agreed": [1.0, 0.5, 0.4], "alone": [1.0, 0.6, 0.4]}
    fig = plot.drift(losses, {"agreed": [0.0, 0.0, 0.0], "alone": [0.0, 1e-3, 1e-2]}, [2], "overflow")
    above, below = fig.axes
    assert list(find(above, "loss alone").get_ydata()) == losses["alone"]
    assert list(find(above, "loss alone").get_xdata()) == [1, 2, 3]
    foot = below.get_ylim()[0]
    assert list(find(below, "distance agreed").get_ydata()) == [foot] * 3
    assert list(find(below, "distance alone").get_ydata()) == [foot, 1e-3, 1e-2]
    assert (below.get_yscale(), above.get_yscale()) == ("log", "linear")
    assert {"overflow", "0: equal bit for bit", "0"} <= set(words(fig))
    rules = [line for ax in fig.axes for line in ax.lines if line.get_label() == "mark"]
    assert [line.get_xdata()[0] for line in rules] == [2, 2]
    assert rules[0].get_zorder() < find(above, "loss alone").get_zorder()
    bare = plot.drift({"a": [1.0]}, {"a": [1e-3]}, [], "overflow")
    assert {"0: equal bit for bit", "overflow"} & set(words(bare)) == set()
    for distances in ({"b": [1.0]}, {"a": [1.0, 2.0]}, {"a": [-1.0]}):
        with pytest.raises(ValueError, match="distance"):
            plot.drift({"a": [1.0]}, distances)


# --- figures of single pages ---------------------------------------------------------------------


def test_costs_are_logarithmic_with_fit_and_knee() -> None:
    sizes, times = [1e3, 1e5, 1e7], [3e-5, 5e-5, 1.3e-3]
    fig = costs(sizes, times, fit=(sizes, times), knee=240e3, more={"tree": (sizes, times)})
    ax = fig.axes[0]
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    points = find(ax, "measured")
    assert (list(points.get_xdata()), list(points.get_ydata())) == (sizes, times)
    assert find(ax, "fit").get_linestyle() == "-"
    assert find(ax, "knee").get_xdata()[0] == 240e3
    assert {"knee 240 kB", "100 kB", "1 ms", "size of the tensor", "tree"} <= set(words(fig))
    places = {t.get_text(): t.get_window_extent() for t in ax.texts}
    knee = ax.transData.transform((240e3, 1e-3))[0]
    assert places["latency-bound"].x1 < knee < places["bandwidth-bound"].x0
    assert "measured" not in words(costs((), (), more={"ring": (sizes, times)}))


def test_waits_split_a_collective_where_the_last_rank_arrives() -> None:
    spent = time_by_part(straggling().split_waits("all_reduce"))
    assert spent[0] == pytest.approx({"compute": 20 * MS, "wait": 8 * MS, "move": 5 * MS})
    assert spent[2] == pytest.approx({"compute": 28 * MS, "wait": 0.0, "move": 5 * MS})
    twice = Timeline((*straggling().events, *straggling().shifted(1.0).events))  # the k-th meets the k-th
    assert time_by_part(twice.split_waits("all_reduce"))[0]["wait"] == pytest.approx(16 * MS)
    assert time_by_part(twice.split_waits("all_reduce"), 2)[0]["wait"] == pytest.approx(8 * MS)
    uneven = [(0.0, 1.0, "F"), (1.0, 4.0, "B"), (4.0, 5.0, "all_reduce"), (5.0, 7.0, "F"), (7.0, 13.0, "B"),
              (13.0, 14.0, "all_reduce")]  # fmt: skip
    events = (
        Event(rank, -1, op, -1, a, b, "dp" * (op == "all_reduce")) for a, b, op in uneven for rank in (0, 1)
    )
    of_steps = time_by_part(Timeline(tuple(events)).split_waits("all_reduce"), 2)
    assert of_steps[0] == pytest.approx({"compute": 6.0, "wait": 0.0, "move": 1.0})  # of 4 and 8


def test_waits_name_the_rank_that_waits_least() -> None:
    fig = waits(straggling())
    ax = fig.axes[0]
    np.testing.assert_allclose(extents(ax, "wait")[0, :2], [20.0, 28.0])
    (mark,) = [t for t in ax.texts if "waits least" in t.get_text()]
    assert mark.xy[1] == pytest.approx(2)
    assert "Rank 2 waits least, 0 ms, because it computes longest, 28.0 ms." in said(fig).replace("\n", " ")
    assert said(waits(straggling().split_waits("all_reduce"))) == said(fig)
    assert find_straggler(time_by_part(straggling(0.5).split_waits("all_reduce")))[0] is None
    assert "waits least" not in said(waits(straggling(0.5)))
    late = {0: {"compute": 9.0, "wait": 5.0, "move": 1.0}, 1: {"compute": 4.0, "wait": 0.0, "move": 1.0}}
    assert find_straggler(late)[0] == 1


def test_moves_after_a_pause_are_compared_step_by_step() -> None:
    def moving(*seconds: float) -> Timeline:  # rank 1 arrives last
        return Timeline(
            tuple(
                Event(rank, -1, "all_reduce", -1, 10.0 * step + rank, 10.0 * step + 1 + move, "dp")
                for step, move in enumerate(seconds)
                for rank in (0, 1)
            )
        )

    once, slow = moving(1, 2, 3, 4, 5), moving(6, 7, 8, 2.5, 9)
    assert compare_moves(once, slow) == {
        "longer": 22,
        "pairs": 25,
        "words": "noise could explain that, so this run cannot tell whether the pause matters",
    }
    assert compare_moves(once, moving(6, 7, 8, 3.5, 9))["words"].endswith("the pause are longer")  # type: ignore[union-attr]
    assert compare_moves(moving(6, 7, 8, 3.5, 9), once)["words"].endswith("shorter")  # type: ignore[union-attr]
    same = moving(2, 2, 2, 2, 2)
    assert "cannot tell" in str(compare_moves(same, same)["words"])  # a tie is neither longer nor shorter


def test_a_number_keeps_its_colour_across_a_collective() -> None:
    fig = tensors([[1, 2, 3], [], []], [[1], [2], [3]], title="scatter")
    before, after = fig.axes
    colors = [find(before, f"before 0 {i}").get_facecolor() for i in range(3)]
    assert colors == [find(after, f"after {i} 0").get_facecolor() for i in range(3)]
    assert len(set(colors)) == 3
    assert [t.get_text() for t in after.texts[:3]] == ["1", "2", "3"]
    assert len([a for a in before.findobj() if a.get_label() == "empty"]) == 2


def test_steps_stand_beside_the_law_and_where_both_are_free() -> None:
    during = spreads({100: 2.0, 1000: 1.3, 4000: 1.05})
    fig = step_ratios(during, during, 500.0, {"law from": 400.0, "measured from": 4000.0})
    ax = fig.axes[0]
    assert list(find(ax, f"measured {DURING}").get_ydata()) == [2.0, 1.3, 1.05]
    law = dict(zip(*find(ax, f"law {DURING}").get_data(), strict=True))
    assert all(ratio == 1.0 for x, ratio in law.items() if x >= 500)
    assert all(
        ratio == pytest.approx(1 + (1 - x / 500) / (1.5 * x / 500)) for x, ratio in law.items() if x < 500
    )
    assert find(ax, "law from").get_xdata()[0] == 400.0
    assert find(ax, "measured from").get_xdata()[0] == 4000.0
    assert {"free below 1.1", "law from 400 tokens", "measured from 4,000 tokens"} <= set(words(fig))
    bars = [c for c in ax.collections if isinstance(c, LineCollection)]
    ends = sorted(segment[end, 1] for bar in bars for segment in bar.get_segments() for end in (0, 1))
    assert ends == pytest.approx(sorted(2 * [end for r in during.values() for end in (r.low, r.high)]))
    assert "measured from" not in " ".join(words(step_ratios(during, {}, 500.0, {"measured from": None})))


@pytest.mark.parametrize(
    ("tokens", "labels"),
    [
        ([100.0, 12800.0], ["100", "12,800"]),
        ([100.0, 110.0, 1e4], ["100", "1,000", "10,000"]),
    ],
)
def test_tokens_are_marked_at_the_sizes_or_at_powers_of_ten_where_the_labels_fit(
    tokens: list[float], labels: list[str]
) -> None:
    during = spreads(dict.fromkeys(tokens, 1.5))
    fig = step_ratios({}, during, math.sqrt(tokens[0] * tokens[-1]), {})
    fig.canvas.draw()
    low, high = fig.axes[0].get_xlim()
    labels_drawn = fig.axes[0].get_xticklabels()
    shown = [t for t in labels_drawn if t.get_text() and low <= t.get_position()[0] <= high]
    assert [t.get_text() for t in shown] == labels
    extent = [t.get_window_extent() for t in shown]
    assert all(a.x1 + 5 < b.x0 for a, b in itertools.pairwise(extent))


def test_versions_are_titled_by_their_verdict_and_name_the_work_for_messages() -> None:
    rank_0 = (Event(0, -1, "B", -1, 0.0, 1.0), Event(0, -1, "compute", -1, 1.0, 2.0))
    rank_1 = (Event(1, -1, "B", -1, 0.0, 1.0), Event(1, -1, "B", -1, 1.5, 2.0))
    runs = {"B": Timeline(rank_0), "C": Timeline(rank_0 + rank_1)}
    faster, slower, open_ = Spread(0.9, 0.8, 0.95), Spread(1.2, 1.1, 1.3), Spread(1.2, 0.9, 1.3)
    fig = versions(runs, faster, faster)
    assert "Buckets save time, and overlap saves more" in words(fig)
    assert FOR_MESSAGES in words(fig)
    assert "compute" not in words(fig)
    last = (Event(0, -1, "all_reduce", -1, 1.0, 2.0, "dp"), Event(0, -1, "B", -1, 2.0, 2.1))  # unpacks
    fig = versions({"B": Timeline((*rank_0[:1], *last))}, faster, faster)
    assert len(find(fig.axes[0], "B").get_paths()) == len(find(fig.axes[0], FOR_MESSAGES).get_paths()) == 1
    assert any("costs time" in w for w in words(versions(runs, faster, slower)))
    assert any("cannot tell" in w for w in words(versions(runs, faster, open_)))
    for buckets, verdict in ((slower, "slower"), (open_, "cannot tell")):
        title = f"The verdict on buckets: {verdict}; on overlap: faster"
        assert title in words(versions(runs, buckets, faster))
    columns = spread_columns({"after": {1088: Spread(1.2, 1.1, 1.3)}})
    assert columns == {"after": {"1,088 tokens": 1.2}, "after: range": {"1,088 tokens": "1.10 to 1.30"}}


def test_states_are_stacked_predicted_over_measured() -> None:
    measured = {name: {c: 1.1 * n for c, n in parts.items()} for name, parts in KEPT.items()}
    ax = states(KEPT, measured, "T").axes[0]
    hollow, filled = extents(ax, "predicted optimizer")[1], extents(ax, "optimizer")[1]  # of stage 3
    assert hollow[:2] == pytest.approx([1.0, 4.0])  # in MB, behind parameters and gradients
    assert filled[:2] == pytest.approx([1.1, 4.4])
    assert hollow[3] <= filled[2]
    assert {"16.0", "4.40", "bytes on one rank (MB)"} <= {t.get_text() for t in ax.texts} | {ax.get_xlabel()}
    with pytest.raises(ValueError, match="no part 'weights'"):
        states({"a": {"weights": 1.0}}, {"a": {}})


def test_a_u_curve_stacks_its_parts_and_marks_the_least() -> None:
    parts = {"bubble": [3 * MS, MS, MS], "ideal": [MS, MS, MS], "small kernels": [0.0, MS, 3 * MS]}
    fig = u_curve([1, 4, 16], parts, [4 * MS, 2 * MS, 6 * MS], title="T", source="replayed")
    ax = fig.axes[0]
    ideal, kernels, bubble = (extents(ax, name) for name in ("ideal", "small kernels", "bubble"))
    assert [list(box) for box in ideal[:, 2:]] == [[0.0, 1.0]] * 3  # ms
    assert [list(box) for box in kernels[:, 2:]] == [[1.0, 2.0], [1.0, 4.0]]  # none of 0
    assert [list(box) for box in bubble[:, 2:]] == [[1.0, 4.0], [2.0, 3.0], [4.0, 5.0]]
    formula = find(ax, "formula; T and c from the work at m = 1 and 16")
    assert list(formula.get_ydata()) == pytest.approx([4.0, 2.0, 6.0])
    heads = {"replayed step (ms)", "number of microbatches"}
    assert {"4.00", "3.00", "5.00", "1", "4", "16"} | heads <= set(words(fig))
    bold = [t.get_text() for t in fig.findobj(Text) if t.get_weight() == "bold" and t.get_text() != "T"]
    assert sorted(bold) == ["3.00", "4"]
    parts["host wait"] = [0.0, 0.0, 2 * MS]
    fig = u_curve([1, 4, 16], parts, [4 * MS, 2 * MS, 6 * MS])
    assert [list(box) for box in extents(fig.axes[0], "host wait")[:, 2:]] == [pytest.approx([5.0, 7.0])]


def test_a_gradient_cliff_stands_where_the_fault_is() -> None:
    runs = errors(3, "vit.layers.1.mlp.fc1")
    fig = gradient_cliff(runs)
    ax = fig.axes[0]
    assert ax.get_yscale() == "log"
    assert ax.get_ylim()[0] < FOOT < 1 < ax.get_ylim()[1]
    right, wrong = find(ax, "right").get_ydata(), find(ax, "left out").get_ydata()
    at = list(runs["right"]).index("vit.layers.1.mlp.fc1")
    assert list(right) == [max(e, FOOT) for e in runs["right"].values()]  # 0 stands at the foot
    assert (list(wrong[:at]), set(wrong[at:])) == (list(right[:at]), {0.3})
    marks = [line for line in ax.lines if line.get_label() == "cliff"]
    assert [line.get_xdata()[0] for line in marks] == [at - 0.5]
    names = [t.get_text() for t in ax.get_xticklabels()]
    assert names[:4] == ["classifier", "vit.layernorm", "mlp.fc2", "mlp.fc1"]
    assert names[-1] == "projection"  # as much of a long name as fits
    assert {"wrong from layer 1, mlp.fc1 on", "layer 2", "layer 1", "layer 0", "0", "1"} <= set(words(fig))
    assert (find_cliff(runs["right"]), find_cliff(runs["left out"])) == (None, "vit.layers.1.mlp.fc1")
    assert find_cliff({"a": 1e-10, "b": 1e-3}) == "b"
    broken = gradient_cliff({"broken": {"classifier": 0.0, "vit.layers.0.mlp.fc1": math.inf}})
    assert "wrong from layer 0, mlp.fc1 on" in {t.get_text() for t in broken.axes[0].texts}


def test_a_gradient_cliff_without_a_fault_has_no_mark_and_of_many_modules_no_names() -> None:
    runs = errors(9, "vit.layernorm")
    fig = gradient_cliff({"right": runs["right"]})
    assert "cliff" not in {line.get_label() for line in fig.axes[0].lines}
    told = words(fig)
    assert not [t for t in told if t.startswith("wrong") or t == "mlp.fc1"]
    assert {f"layer {i}" for i in range(9)} <= set(told)
    assert "wrong from vit.layernorm on" in words(gradient_cliff(runs))


def test_the_cheapest_mode_is_a_map() -> None:
    fig = cheapest_mode(*MAP)
    ax = fig.axes[0]
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    edge = 2**6.5  # between 64 and 128 tokens
    areas = {mode: extents(ax, f"area {mode}") for mode in ("1d", "2d", "3d")}
    assert [len(cells) for cells in areas.values()] == [6, 9, 12]
    assert areas["1d"][:, 1].max() == pytest.approx(edge)
    assert areas["3d"][:, 0].min() == pytest.approx(edge)
    assert areas["2d"][:, 2].min() == pytest.approx(2048)
    for mode in areas:
        (name,) = [t for t in ax.texts if t.get_text() == mode.upper()]
        (x, y), cells = name.get_position(), areas[mode]
        assert any(a < x < b and c < y < d for a, b, c, d in cells), mode  # it stands in its own region
    assert {"tokens a rank", "1,024"} <= set(words(fig))


def test_a_small_region_is_named_in_the_legend() -> None:
    sizes = [float(k) for k in range(1, 11)]
    modes = [["1d"] * 10 for _ in range(10)]
    modes[0][0] = "3d"
    fig = cheapest_mode(sizes, sizes, modes)
    assert "3D predicted" in words(fig)
    assert [t.get_text() for t in fig.axes[0].texts] == ["1D"]


def test_grid_steps_show_the_root_of_every_panel() -> None:
    fig = summa_steps(summa(3), (3, 3), "T")
    assert len(fig.axes) == 3
    for t, ax in enumerate(fig.axes):
        labels = {artist.get_label() for artist in ax.findobj()}
        for i in range(3):
            row, column = tuple(3 * i + n for n in range(3)), tuple(3 * n + i for n in range(3))
            across = find(ax, f"broadcast tp.1 {row} root {row[t]}")
            down = find(ax, f"broadcast tp.0 {column} root {column[t]}")
            assert isinstance(across, Line2D)
            assert isinstance(down, Line2D)
            assert len(set(across.get_ydata())) == len(set(down.get_xdata())) == 1
            assert across.get_color() != down.get_color()
        filled = [n for n in range(9) if to_hex(find(ax, f"rank {n}").get_facecolor()).upper() != CARD]
        assert filled == [n for n in range(9) if n // 3 == t or n % 3 == t]
        assert [n for n in range(9) if f"half {n}" in labels] == [4 * t]  # it is the root of both
        heads = Counter(line.get_marker() for line in ax.lines if line.get_marker() not in ("", "None"))
        wanted = {"o": 6, ">": 3 * (2 - t), "v": 3 * (2 - t), "<": 3 * t, "^": 3 * t}
        assert heads == Counter(wanted)
        assert [t.get_text() for t in ax.texts if t.get_text().isdigit()] == [str(n) for n in range(9)]
    told = words(fig)
    assert {"step 0", "step 1", "step 2", "T"} <= set(told)
    assert {"x across: broadcast", "W down: broadcast"} <= set(told)
    assert told.count("1.20 kB a rank, mean") == 3  # 2/3 of 1200 + 600


def test_standings_draw_a_bar_a_row_under_one_scale() -> None:
    fig = FIGURES["standings"]()
    above, below = fig.axes
    assert above.get_xlim() == below.get_xlim()
    for bar in RACE.bars:
        for ax in fig.axes:
            drawn = find(ax, f"dp2xtp2, {bar.name}")
            assert drawn.get_width() == bar.value
            assert (to_hex(drawn.get_facecolor()).upper() == OURS.color) == bar.ours
    assert list(find(below, "dp2xtp2, ceiling").get_xdata()) == [690.0, 690.0]
    tops = [find(below, f"dp2xtp2, {bar.name}").get_y() for bar in RACE.bars]
    assert tops == sorted(tops)
    assert below.yaxis_inverted()
    assert {"A", "its sizes", "nobody", "28% of it", "194", "73.5", "TFLOP/s", "C"} <= set(words(fig))
    beside = {t.get_text(): t.xy[0] for t in above.texts if t.get_text().endswith("than its bar")}
    assert sorted(beside.values()) == [0.0, 194.0]  # ours is dark, and its name stands behind it
    alone = StandingPanel("a", (StandingGroup("g", (Standing("b", 1.0),)),))
    assert "ceiling" not in words(plot.standings([alone]))


# --- show --------------------------------------------------------------------------------------


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    InteractiveShell.clear_instance()
    yield InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    InteractiveShell.clear_instance()


@pytest.mark.parametrize("alt", ["", "  \n"])
def test_a_figure_without_alt_text_is_refused(alt: str) -> None:
    with pytest.raises(ValueError, match="needs alt text"):
        plot.show(plot.timeline(one_f_one_b(2, 2)), alt)


def test_outside_a_notebook_show_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    assert plot.show(plot.timeline(one_f_one_b(2, 2)), "alt") is None
    assert capsys.readouterr() == ("", "")


def test_a_notebook_gets_one_bundle_with_escaped_alt(shell: object) -> None:
    from IPython.utils.capture import capture_output

    alt = '4 ranks: "B" < 2 & F\'s'
    fig = plot.timeline(one_f_one_b(4, 8))
    with capture_output() as caught:
        assert plot.show(fig, alt) is None
    (output,) = caught.outputs
    assert set(output.data) == {"text/html", "image/png", "text/plain"}
    assert output.data["text/plain"] == alt
    html = output.data["text/html"]
    assert 'alt="4 ranks: &quot;B&quot; &lt; 2 &amp; F&#x27;s"' in html
    assert 'width="700"' in html
    assert "max-width:100%" in html
    assert f"data:image/png;base64,{output.data['image/png']}" in html
    assert base64.b64decode(output.data["image/png"])[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_value_of_a_cell_is_a_picture_without_pyplot(shell: Any) -> None:
    """A fresh kernel has no formatter for a Figure, until somebody imports pyplot."""
    fig = plot.timeline(one_f_one_b(4, 8), one_f_one_b(4, 8, source="measured"), title="Two & more")
    data, _ = shell.display_formatter.format(fig)
    assert base64.b64decode(data["image/png"])[:8] == b"\x89PNG\r\n\x1a\n"
    alt = data["text/plain"]
    assert re.fullmatch(r"A figure: Two & more; simulated · bubble .*; measured · bubble .*", alt)
    assert f'alt="{escape(alt)}"' in data["text/html"]


def test_alt_text_is_by_default_the_titles(shell: object) -> None:
    from IPython.utils.capture import capture_output

    with capture_output() as caught:
        plot.show(plot.memory(profile()))
        plot.show(Figure())
    first, second = (output.data["text/plain"] for output in caught.outputs)
    assert re.match(r"A figure: .{10}", first)
    assert second == "A figure of 0 axes"


def test_a_picture_is_small_sharp_and_keeps_the_grammar_s_colours() -> None:
    fig = plot.timeline(one_f_one_b(4, 8, "I"))
    data = plot.png(fig)
    assert len(data) < 40_000
    assert len(data) < 0.6 * len(plot.png(fig, small=False))
    assert Image.open(io.BytesIO(data)).width == 1120  # 1.6 device pixels a CSS pixel
    assert {STYLE[op].color for op in "FIW"} | {CARD} <= pixels(data)
    assert fig.dpi == 100  # left as it was
    assert Image.open(io.BytesIO(data)).info == {}
    assert Image.open(io.BytesIO(plot.png(fig, text={"Source": "a run"}))).info == {"Source": "a run"}
    every = (*STYLE.values(), *AXIS.values(), *CATEGORY.values())
    panel = BarPanel({str(i): [Bar({str(i): 1.0})] for i in range(len(every))})
    all_bars = bars([panel], {str(i): style for i, style in enumerate(every)}, title="all", keys=[])
    page = np.array([to_rgb(color) for color in pixels(plot.png(all_bars))])
    for style in every:  # even on a page that has them all
        assert np.linalg.norm(page - to_rgb(style.color), axis=1).min() < 0.1, style

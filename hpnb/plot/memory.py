"""Where the bytes are: categories stacked over time, one panel a rank, the peak marked.

    height of a band = bytes of one category
    top of the pile  = bytes that the rank holds

Thousands of samples become as many as there are pixels: every run keeps its maximum, so no peak is lost.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from hpnb.plot.canvas import TEXT, Key, new_figure, panel_title
from hpnb.plot.grammar import ALARM, CATEGORY, INK, OpStyle
from hpnb.plot.units import byte_count, bytes_unit, time_unit
from hpnb.record import MemoryProfile, MemoryRecorder

MOST_POINTS = 2000  # more than there are pixels
CAPACITY = OpStyle(ALARM, "", "capacity", "--")
DEVICES = {"cpu": "measured, exact tensor bytes (CPU)", "cuda": "measured, allocator's bytes (CUDA)"}


def memory(
    profile: MemoryProfile,
    *more: MemoryProfile,
    capacity: float | None = None,
    title: str | None = None,
) -> Figure:
    """Draw what each rank holds over time; all panels share both axes.

    Args:
        profile, *more: one a panel.
        capacity: bytes of the device, drawn as a line.
        title: a headline above everything.

    Raises:
        ValueError: a profile without samples, or a capacity that is not above 0.
        TypeError: something else than profiles.

    >>> with hpnb.record.memory(model := torch.nn.Linear(8, 8)) as recorder:
    ...     model(torch.ones(2, 8)).sum().backward()
    >>> hpnb.plot.memory(recorder.profile(), capacity=4096).savefig("memory.png")
    """
    profiles = (profile, *more)
    if wrong := [p for p in profiles if not isinstance(p, MemoryProfile)]:
        kind, remedy = type(wrong[0]).__name__, "what recorder.profile() of record.memory returns"
        if isinstance(wrong[0], MemoryRecorder):
            remedy = "recorder.profile(), after its block"
        elif isinstance(wrong[0], list | tuple):
            remedy = "one argument a profile, as in plot.memory(*profiles)"
        raise TypeError(f"plot.memory draws MemoryProfiles, not a {kind}; give it {remedy}")
    if capacity is not None and (isinstance(capacity, str) or not 0 < capacity < math.inf):
        raise ValueError(f"capacity={capacity!r} must be bytes, a number above 0, such as 80e9 for 80 GB")
    if not all(p.samples for p in profiles):
        raise ValueError("a MemoryProfile without samples cannot be drawn; record at least one step")
    columns = 1 if len(profiles) <= 3 else 2
    rows = -(-len(profiles) // columns)
    top = max(max(p.peak for p in profiles), capacity or 0.0, 1.0)
    first = min(p.samples[0].time for p in profiles)
    longest = max(p.samples[-1].time for p in profiles) - first
    size, unit = bytes_unit(top)
    scale, clock = time_unit(longest)
    categories = [name for name in CATEGORY if any(p.peak_of(name) for p in profiles)]
    keys = [Key(CATEGORY[name]) for name in reversed(categories)]
    if capacity is not None:
        keys.append(Key(CAPACITY, "line", f"capacity {byte_count(capacity)}"))
    tall = {1: 2.4, 2: 1.8}.get(rows, 1.5)
    fig, axes = new_figure(
        [tall] * rows,
        title=title or "",
        legend=keys,
        columns=columns,
        left=0.72,
        gap=0.42,
        between=0.4,
        head=0.28,
    )
    for ax, one in zip(axes, profiles, strict=False):
        draw_bands(ax, one, categories, first, scale, size)
        early = one.at_peak.time - first < (one.samples[-1].time - first) / 2
        ax.annotate(f"peak {byte_count(one.peak)}", ((one.at_peak.time - first) / scale, one.peak / size),
                    (7 if early else -7, 5), "data", "offset points", size=TEXT, weight="bold", color=INK,
                    ha="left" if early else "right")  # fmt: skip
        panel_title(ax, f"rank {one.rank} · {DEVICES.get(one.device, f'measured ({one.device})')}")
        if capacity is not None:
            draw_capacity(ax, capacity, size)
        ax.set_xlim(0, longest / scale or 1.0)
        ax.set_ylim(0, top / size * 1.18)
    for i, ax in enumerate(axes):
        ax.set_visible(i < len(profiles))
        ax.tick_params(labelbottom=i + columns >= len(profiles), labelleft=i % columns == 0)
        if i % columns == 0:
            ax.set_ylabel(f"memory ({unit})")
        if i + columns >= len(profiles):
            ax.set_xlabel(f"time ({clock})")
    return fig


def thin(total: NDArray[np.float64], most: int = MOST_POINTS) -> NDArray[np.intp]:
    """Indices of at most `most` samples: the largest total of each equal run, and the first and last."""
    if len(total) <= most:
        return np.arange(len(total))
    cuts = np.linspace(0, len(total), most - 1, dtype=int)  # most - 2 runs
    kept = [a + int(np.argmax(total[a:b])) for a, b in itertools.pairwise(cuts)]
    return np.unique([0, *kept, len(total) - 1])


def draw_bands(
    ax: Axes,
    profile: MemoryProfile,
    categories: Sequence[str],
    first: float,
    scale: float,
    size: float,
    most: int = MOST_POINTS,
) -> None:
    """Bytes in units of `size`, stacked by category over seconds since `first` in units of `scale`."""
    kept = thin(np.array([s.total for s in profile.samples], dtype=float), most)
    samples = [profile.samples[i] for i in kept]
    time = np.array([(s.time - first) / scale for s in samples])
    base = np.zeros(len(samples))
    for name in categories:
        style = CATEGORY[name]
        top = base + np.array([getattr(s, name) / size for s in samples])
        band = ax.fill_between(time, base, top, step="post", facecolor=style.color, edgecolor=style.edge,
                               hatch=style.hatch or None, linewidth=0.0)  # fmt: skip
        band.set_label(name)
        base = top
    ax.step(time, base, where="post", color=INK, linewidth=0.9)
    x, y = (profile.at_peak.time - first) / scale, profile.peak / size
    ax.plot([x], [y], marker="v", markersize=6, color=INK, clip_on=False, zorder=5)


def draw_capacity(ax: Axes, capacity: float, size: float) -> None:
    """The bytes of a device as a dashed line across."""
    line = ax.axhline(capacity / size, color=CAPACITY.color, linestyle=CAPACITY.line, linewidth=1.5)
    line.set_label("capacity")

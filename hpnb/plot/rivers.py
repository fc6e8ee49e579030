"""Memory over time, one small panel for each way of keeping it, against one capacity.

    height of a band = bytes of one category        dashed line = what a device holds

All panels share the axis of bytes; each has a clock of its own, for what is recorded is slowed down.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hpnb.plot.canvas import SMALL, Key, new_figure, panel_title
from hpnb.plot.grammar import ALARM, CATEGORY, INK
from hpnb.plot.memory import CAPACITY, thin
from hpnb.plot.units import byte_count, bytes_unit, time_unit
from hpnb.record import MemoryProfile

POINTS = 700  # of a panel: as many as it has pixels


def rivers(
    profiles: Mapping[str, MemoryProfile], capacity: float | None = None, title: str | None = None
) -> Figure:
    """Draw one panel a profile, two beside each other.

    Args:
        profiles: {name of the panel: what one rank held}.
        capacity: bytes, drawn through all panels; a peak above it is marked.

    Raises:
        ValueError: nothing to draw, or a profile without samples.
    """
    if not profiles or not all(p.samples for p in profiles.values()):
        empty = ", ".join(name for name, p in profiles.items() if not p.samples)
        raise ValueError(f"a profile needs samples to be drawn: {empty or 'there is no profile'}")
    top = max(*(p.peak for p in profiles.values()), capacity or 0.0, 1.0)
    size, unit = bytes_unit(top)
    held = [name for name in CATEGORY if any(p.peak_of(name) for p in profiles.values())]
    keys = [Key(CATEGORY[name]) for name in reversed(held)]
    if capacity is not None:
        keys.append(Key(CAPACITY, "line", f"budget {byte_count(capacity)}"))
    rows = -(-len(profiles) // 2)
    heading = title if title is not None else "who holds memory during a step"
    fig, axes = new_figure([1.5] * rows, title=heading, legend=keys, columns=2 if len(profiles) > 1 else 1,
                           left=0.62, gap=0.72, between=0.3, head=0.3)  # fmt: skip
    for ax, (name, profile) in zip(axes, profiles.items(), strict=False):
        _panel(ax, name, profile, held, size, capacity)
        ax.set_ylim(0, top / size * 1.12)
    for i, ax in enumerate(axes):
        ax.set_visible(i < len(profiles))
        ax.tick_params(labelleft=i % 2 == 0)
        if i % 2 == 0:
            ax.set_ylabel(f"memory ({unit})")
    return fig


def _panel(
    ax: Axes, name: str, profile: MemoryProfile, held: list[str], size: float, capacity: float | None
) -> None:
    kept = thin(np.array([s.total for s in profile.samples], dtype=float), POINTS)
    samples = [profile.samples[i] for i in kept]
    first = profile.samples[0].time
    scale, clock = time_unit(profile.samples[-1].time - first)
    time = np.array([(s.time - first) / scale for s in samples])
    base = np.zeros(len(samples))
    for category in held:
        style = CATEGORY[category]
        over = base + np.array([getattr(s, category) / size for s in samples])
        band = ax.fill_between(time, base, over, step="post", facecolor=style.color, edgecolor=style.edge,
                               hatch=style.hatch or None, linewidth=0.0)  # fmt: skip
        band.set_label(f"{category} {name}")
        base = over
    ax.step(time, base, where="post", color=INK, linewidth=0.8)
    ax.set_xlim(0, time[-1] or 1.0)
    ax.set_xlabel(f"time ({clock})", labelpad=1)
    over_it = capacity is not None and profile.peak > capacity
    if capacity is not None:
        line = ax.axhline(capacity / size, color=CAPACITY.color, linestyle=CAPACITY.line, linewidth=1.4)
        line.set_label("budget")
    x = (profile.at_peak.time - first) / scale
    ax.plot([x], [profile.peak / size], marker="v", markersize=5.5, clip_on=False, zorder=5,
            color=ALARM if over_it else INK)  # fmt: skip
    panel_title(ax, name)
    ax.annotate(byte_count(profile.peak), (1, 1), (0, 4), "axes fraction", "offset points", ha="right",
                size=SMALL, weight="bold", color=ALARM if over_it else INK)  # fmt: skip

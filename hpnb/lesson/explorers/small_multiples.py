"""An explorer on a page without widgets: the opening setting, the trade-off over one knob, and the answer.

Three pictures stacked as one figure. The middle one draws a reading over the stops of a knob, once with the
other knobs as they open and once as the answer has them.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hpnb.lesson.explorers.knobs import Slider
from hpnb.lesson.tables import split_unit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hpnb.lesson.explorers.knobs import Choice

MOST_STOPS = 32
_SCALE, _HEADING = 1.6, 0.3  # device pixels a CSS pixel, as plot.png has it; inches a line
_COLUMNS = 70  # of a heading


def stack(pictures: Sequence[tuple[str, Figure]]) -> Figure:
    """The figures beneath each other, each under its heading."""
    from matplotlib.figure import Figure
    from PIL import Image

    from hpnb import plot
    from hpnb.plot.canvas import TEXT, WIDTH
    from hpnb.plot.grammar import CARD, DPI, INK

    sizes = [figure.get_size_inches() for _, figure in pictures]
    headings = [textwrap.wrap(heading, _COLUMNS) for heading, _ in pictures]
    total = sum(tall for _, tall in sizes) + _HEADING * sum(map(len, headings))
    stacked = Figure(figsize=(WIDTH, total), dpi=DPI, facecolor=CARD)
    y = total
    for (_, figure), lines, (wide, tall) in zip(pictures, headings, sizes, strict=True):
        y -= _HEADING * len(lines)
        heading = "\n".join(lines)
        stacked.text(0.15 / WIDTH, (y + 0.08) / total, heading, size=TEXT + 1, weight="bold", color=INK)
        y -= tall
        ax = stacked.add_axes((0.0, y / total, wide / WIDTH, tall / total))
        pixels = Image.open(io.BytesIO(plot.png(figure, scale=_SCALE, small=False)))
        ax.imshow(np.asarray(pixels), aspect="auto", interpolation="nearest")
        ax.set_axis_off()
    return stacked


def trade_off(
    read: Callable[..., Mapping[str, Any]],
    knob: str,
    control: Slider | Choice,
    reading: str,
    settings: Mapping[str, Mapping[str, Any]],
    goal: float | None = None,
    title: str = "",
    names_of_looks: Sequence[str] = (),
) -> Figure:
    """`reading` over the stops of a knob, a curve for each of the `settings` of the others.

    With a `goal`, a line at it, on a logarithmic axis where values are far apart. A curve looks as it does in
    a picture with the curves `names_of_looks`.
    """
    from hpnb.plot.canvas import Key
    from hpnb.plot.curves import CurvePanel, Series, curves, looks, set_ticks, write_values
    from hpnb.plot.grammar import INK, OpStyle
    from hpnb.plot.units import byte_count

    slider = isinstance(control, Slider)
    stops = list(control.stops if isinstance(control, Slider) else control.options)
    shown = [*stops[:: -(-len(stops) // MOST_STOPS)], *(setting[knob] for setting in settings.values())]
    stops = [stop for stop in stops if stop in shown]  # the settings themselves are points of the curve
    look, series = looks([*names_of_looks, *settings]), []
    names = any(isinstance(stop, str) for stop in stops)  # no order among them, so no line
    for i, (name, setting) in enumerate(settings.items()):
        beside = 0.2 * (i - (len(settings) - 1) / 2) if names else 0.0  # equal values would cover each other
        points = []
        for place, stop in enumerate(stops):
            try:
                points.append((stop if slider else place + beside, read(**{**setting, knob: stop})[reading]))
            except ValueError:  # not at this setting
                continue
        if points:
            x, y = zip(*points, strict=True)
            series.append(Series(name, x, y, look[name], "dots" if names else "line and dots"))
    label, unit = split_unit(reading)
    words = f"{label} ({unit})" if unit else label
    log = "x" if isinstance(control, Slider) and control.log else ""
    values = [] if goal is None else [goal, *(y for curve in series for y in curve.y)]
    apart = bool(values) and min(values) > 0 and max(values) > 1.25 * min(values)
    log += "y" if apart else ""
    of_knob = f" ({control.unit})" if isinstance(control, Slider) and control.unit else ""
    panel = CurvePanel(series, ylabel=words, xlabel=knob.replace("_", " ") + of_knob, log=log, height=1.7)  # type: ignore[arg-type]
    wanted = "" if goal is None else f"goal: {goal:g} {unit}".rstrip()
    keys = [Key(OpStyle(INK, "", "", ":"), "line", wanted)] if goal is not None else []
    figure = curves([panel], title=title or f"{label} over {knob.replace('_', ' ')}", more_keys=keys)
    if goal is not None:
        figure.axes[0].axhline(goal, color=INK, linestyle=":", linewidth=1.4, label="goal")
    if apart:
        low, high = min(values), max(values)
        ticks = [step * 10.0**k for k in range(-6, 9) for step in (1, 2, 5)]
        ticks = [tick for tick in ticks if low / 2 <= tick <= high * 2]
        set_ticks(figure.axes[0].yaxis, ticks, "{:g}".format)
        figure.axes[0].set_ylim(low / 1.3, high * 1.3)
    if unit == "B":
        figure.axes[0].set_ylabel("")  # the title says it
        figure.axes[0].yaxis.set_major_formatter(lambda value, _: byte_count(value))
    for curve, offset in zip(series if names else (), (7, -7), strict=False):
        write_values(figure.axes[0], curve.x, curve.y, [f"{y:.2f}" for y in curve.y], offset=offset)
        for text in figure.axes[0].texts[-len(curve.y) :]:
            text.set_color(curve.look.color)  # where dots coincide
    if names:
        figure.axes[0].margins(y=0.25)
    if not slider:
        figure.axes[0].set_xticks(range(len(stops)), [str(stop) for stop in stops])
    return figure

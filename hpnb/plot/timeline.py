"""Who computes what, when: one row a rank, one rectangle an event.

Simulated, replayed and measured timelines pass through this one function, and the title above a panel
says which it is and which bubble it counts:

    bubble="fraction"   idle share of ranks x makespan
    bubble="rate"       idle share of the longest rank's span
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from matplotlib.figure import Figure

from hpnb.plot.canvas import LINE, WIDTH, Key, new_figure, panel_title, text_inches, title_lines
from hpnb.plot.grammar import AXIS, STYLE, OpStyle, axis_style, styles_of
from hpnb.plot.lanes import EXPOSED, STRIP, Lanes, chunks, draw, draw_in_flight, exposed_parts
from hpnb.plot.units import number, time_unit
from hpnb.record import Timeline

Bubble = Literal["fraction", "rate"]
MOST_UNEQUAL = 100  # of two timelines on one axis: beyond it the short one is a line


def timeline(
    tl: Timeline,
    *more: Timeline,
    in_flight: bool = False,
    exposed: bool = False,
    axis_labels: Mapping[int, str] | None = None,
    names: Sequence[str] = (),
    title: str | None = None,
    bubble: Bubble | None = "fraction",
    text: bool = True,
    unit: str | None = None,
) -> Figure:
    """Draw timelines above each other on one axis of time, starting with their first events.

    Args:
        tl, *more: from the top down, such as predicted above measured.
        in_flight: add a strip of the activations that a rank holds, counted in chunks.
        exposed: hatch the parts of communication during which a rank computes nothing; parts that touch on
            the page are hatched as one. The title counts them exactly.
        axis_labels: {rank: words} in place of "rank 0", such as "pp 1 tp 0".
        names: what every timeline is, before its source.
        title: a headline above everything.
        bubble: which definition the panel titles count; None leaves it out.
        text: False drops microbatch numbers and hatches, for a picture that moves with a slider.
        unit: for abstract times, the name of one second ("forwards"); None picks s, ms or µs.

    Raises:
        ValueError: a timeline without events, more names than timelines, or timelines of too different
            lengths, as of unit costs beside seconds.

    >>> schedule = hpnb.pipeline_parallel.schedules.make("1f1b", stages=2, microbatches=4)
    >>> hpnb.plot.timeline(schedule.simulate()).savefig("timeline.png")
    """
    pictures = (tl, *more)
    for picture in pictures:
        if not isinstance(picture, Timeline):
            raise TypeError(
                f"a {type(picture).__name__} is no Timeline; recorder.gather() makes one of what all ranks "
                "recorded, and schedule.simulate(costs) of a schedule"
            )
    if not all(p.events for p in pictures):
        raise ValueError("a Timeline without events cannot be drawn; record or simulate at least one step")
    if names and len(names) != len(pictures):
        raise ValueError(f"{len(names)} names for {len(pictures)} timelines; give as many, or none")
    if bubble not in ("fraction", "rate", None):
        raise ValueError(f'bubble={bubble!r} is no definition; use "fraction", "rate" or None')
    shortest, longest = (pick(p.makespan for p in pictures) for pick in (min, max))
    if shortest and longest > MOST_UNEQUAL * shortest:
        raise ValueError(
            f"timelines of {shortest:.3g} s and {longest:.3g} s cannot share an axis, where the short one "
            "would not be seen: simulate with the seconds of the measured one, Costs.measured(..), or draw "
            "them apart"
        )
    scale, unit = (1.0, unit) if unit else time_unit(longest)
    axes_used = _axes(pictures)
    styles = styles_of(event for picture in pictures for event in picture.events)
    rows = [Lanes(p.ranks, axes_used) for p in pictures]
    strips = [in_flight and any(e.op == "F" for e in p.events) for p in pictures]

    labels = {rank: f"rank {rank}" for p in pictures for rank in p.ranks} | dict(axis_labels or {})
    left = 0.3 + max(text_inches(words) for words in labels.values())
    right = STRIP if any(strips) else 0.2
    lengths = [f"{number(picture.makespan / scale)} {unit}" for picture in pictures]
    titles = [
        title_lines(
            " · ".join([*names[i : i + 1], describe(picture, bubble, exposed)]), words, WIDTH - left - right
        )
        for i, (picture, words) in enumerate(zip(pictures, lengths, strict=True))
    ]
    heights, heads = [], []
    for lane, strip, lines in zip(rows, strips, titles, strict=True):
        heights += [lane.height, lane.strip_height] if strip else [lane.height]
        heads += [LINE * (len(lines) - 1), 0.0] if strip else [LINE * (len(lines) - 1)]
    fig, axes = new_figure(
        heights, title=title or "", legend=_legend(pictures, styles, text, exposed and text), left=left,
        right=right, gap=[0.33 + head for head in heads[1:]], head=0.27 + heads[0],
    )  # fmt: skip
    inch = (WIDTH - left - right) / (longest / scale or 1.0)  # inches of one unit of time
    panels = iter(axes)
    for i, (picture, lane, strip) in enumerate(zip(pictures, rows, strips, strict=True)):
        ax = next(panels)
        panel_title(ax, "\n".join(titles[i]), lengths[i])
        draw(ax, picture, lane, labels, scale=scale, inch=inch, text=text, exposed=exposed, styles=styles)
        if strip:
            draw_in_flight(next(panels), picture, labels, scale=scale)
    for ax in axes:
        ax.set_xlim(0, longest / scale or 1.0)
        ax.tick_params(labelbottom=ax is axes[-1])
        ax.xaxis.set_visible(text or ax is axes[-1])  # ticks are slow to draw
    axes[-1].set_xlabel(f"time ({unit})")
    return fig


def describe(tl: Timeline, bubble: Bubble | None = "fraction", exposed: bool = False) -> str:
    """What a title must say: "simulated · bubble 27.3 % of ranks × makespan"."""
    shares = []
    if bubble == "fraction":
        shares.append(f"bubble {100 * tl.bubble_fraction:.1f} %")
    if exposed:
        bare = sum(end - start for rank in tl.ranks for _, start, end in exposed_parts(tl.by_rank[rank]))
        area = len(tl.ranks) * tl.makespan
        shares.append(f"exposed communication {100 * bare / area if area else 0.0:.1f} %")
    words: list[str] = [tl.source]
    if bubble == "rate":
        words.append(f"bubble {100 * tl.bubble_rate:.1f} % of the longest rank's span")
    if shares:
        words.append(f"{' and '.join(shares)} of ranks × makespan")
    return " · ".join(words)


def _axes(pictures: Sequence[Timeline]) -> tuple[str, ...]:
    """Mesh axes that communicate, one lane each; dp, pp, tp first, what has no axis last."""
    used = {e.axis for p in pictures for e in p.events if not e.is_compute}
    known = [axis for axis in AXIS if axis in used]
    return (*known, *sorted((axis for axis in used if axis not in AXIS), key=lambda axis: (not axis, axis)))


def _legend(
    pictures: Sequence[Timeline], styles: Mapping[str, OpStyle], hatch: bool, exposed: bool
) -> list[Key]:
    kind: Literal["box", "flat"] = "box" if hatch else "flat"
    keys = [Key(style, kind) for style in styles.values()] + [Key(STYLE["idle"], kind)]
    if any(len(chunks(p.by_rank[rank])) > 1 for p in pictures for rank in p.ranks):
        microbatches = any(e.microbatch >= 0 for p in pictures for e in p.events)  # else blocks in one pass
        keys.append(Key(STYLE["F"], "words", f"paler: a later {'chunk' if microbatches else 'block'}"))
    keys += [Key(axis_style(axis), "line", f"{axis} lane") for axis in _axes(pictures) if axis]
    return [*keys, Key(EXPOSED, "hatch")] if exposed else keys

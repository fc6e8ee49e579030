"""Notebook 07: parts of what a rank keeps, bytes of a loss, and which rank drops what."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray

from hpnb.plot.bars import Bar, BarPanel, bars
from hpnb.plot.canvas import SMALL, TEXT, Key, new_figure, text_inches
from hpnb.plot.curves import CurvePanel, Look, Series, curves, log_ticks, looks, rule
from hpnb.plot.grammar import ALARM, CARD, INK, RULE, SERIES, SOFT, OpStyle
from hpnb.plot.units import byte_count
from hpnb.theory import gathered_logits_bytes, sharded_loss_bytes
from hpnb.theory.activation_table import SCORES

PARTS = (
    OpStyle("#44539A", "", ""),
    OpStyle("#88CCEE", "//", ""),
    OpStyle("#DDCC77", "..", ""),
    OpStyle("#CC6677", "\\\\", ""),
    OpStyle("#BBBBBB", "xx", ""),
)  # none is an operation's
MARKS = {"GPT-2": 50_257, "Llama 3": 128_256}  # vocabularies


def stacked(
    rows: Mapping[str, Mapping[str, float]],
    ticks: Mapping[str, float] | None = None,
    limit: float | None = None,
    reach: float | None = None,
    chosen: str = "",
    title: str = "",
    text: bool = True,
) -> Figure:
    """A bar a row, each made of parts, with a tick where something else says that it should end.

    Args:
        rows: {row: {part: bytes}}, at most five parts in all; a part may be missing.
        ticks: {row: where a tick stands}, of what was measured.
        limit: a line across all rows.
        reach: the most that is drawn; longer bars run out of the picture, with their number.
    """
    names = dict.fromkeys(part for parts in rows.values() for part in parts)
    look = {name: OpStyle(PARTS[i].color, PARTS[i].hatch, name) for i, name in enumerate(names)}
    ends = [*(sum(parts.values()) for parts in rows.values()), *(ticks or {}).values(), limit or 0.0]
    stacks = {row: [Bar(parts, ticks=[ticks[row]] if row in (ticks or {}) else ())] if ticks else [Bar(parts)]
              for row, parts in rows.items()}  # fmt: skip
    panel = BarPanel(stacks, "B", reach=min(max(ends), reach or max(ends)), row_inches=0.36)
    keys = [Key(OpStyle(INK, "", "measured"), "line")] if ticks else []
    if limit is not None:
        keys.append(Key(OpStyle(ALARM, "", f"limit of {byte_count(limit)}", "--"), "line"))
    left = 0.3 + max(text_inches(line, TEXT, "bold") for row in rows for line in row.split("\n"))
    fig = bars([panel], look, title=title, more_keys=keys, left=left, text=text)
    (ax,) = fig.axes
    if limit is not None:
        ax.axvline(limit / panel.scale, color=ALARM, linestyle="--", linewidth=1.6)
        for number in (text for text in ax.texts if isinstance(text, Annotation)):
            _keep_on_its_side(number, limit / panel.scale)
    for label in ax.get_yticklabels():
        label.set_fontweight("bold" if label.get_text() == chosen else "normal")
    fig.set_label(f"Lengths of bars in {ax.get_xlabel()}")
    return fig


def _keep_on_its_side(number: Annotation, limit: float) -> None:
    """Write the number of a bar that ends a little before the limit inside the bar.

    To the right of the line it would read as being over the limit.
    """
    ax, end = number.axes, number.xy[0]
    assert ax is not None
    wide = text_inches(number.get_text(), SMALL) + 5 / 72
    inch = (ax.get_xlim()[1] - ax.get_xlim()[0]) / (ax.get_position().width * ax.figure.get_size_inches()[0])  # type: ignore[union-attr]
    if end <= limit < end + wide * inch:
        number.set(position=(-3, 0), ha="right", zorder=7)
        number.set_bbox({"facecolor": CARD, "edgecolor": "none", "pad": 1.0})


def kept_by_layer(parts: Mapping[str, Mapping[str, float]], measured: Mapping[str, float]) -> Figure:
    """`stacked` for a layer's activations, predicted in `parts`, with ticks where they were `measured`.

    The title says that scores are the largest part if they are wherever a rank keeps some.
    """
    keeping = [row for row in parts.values() if row[SCORES] > 0]
    largest = bool(keeping) and all(row[SCORES] == max(row.values()) for row in keeping)
    title = "Where scores are kept, they are the largest part" if largest else "Activations of a layer"
    return stacked(parts, measured, title=title)


def loss_bytes(counted: Mapping[int, Sequence[float]], ranks: int) -> Figure:
    """Bytes that a loss sends per token over the vocabulary size: gathered logits, or three reductions.

    Lines are predicted, dots are `counted`, {vocabulary size: (bytes of gathering, bytes of reducing)}. The
    title says whether reducing sends the same bytes for every vocabulary, and fewer than gathering.
    """
    reduced, fewer = {row[1] for row in counted.values()}, all(row[1] < row[0] for row in counted.values())
    title = "Bytes that a loss sends, over the vocabulary size"
    if len(reduced) == 1 and fewer:
        title = "Three reductions send the same few bytes for every vocabulary"
    sizes = [
        round(min(counted) * 2 ** (k / 2))
        for k in range(2 * math.ceil(math.log2(max(counted) / min(counted))) + 2)
    ]
    predicted = {
        "gather the logits": [gathered_logits_bytes(1, size, ranks) for size in sizes],
        "three reductions": [sharded_loss_bytes(1, ranks)] * len(sizes),
    }
    look = looks(predicted)
    series = [Series(way, sizes, values, look[way]) for way, values in predicted.items()]
    for k, way in enumerate(predicted):
        dots = [row[k] for row in counted.values()]
        series.append(Series(way, [*counted], dots, look[way], "dots", f"{way}, counted"))
    panel = CurvePanel(series, "bytes per token that leave a rank", "xy", xlabel="vocabulary size",
                       title="lines: predicted, marks: counted")  # fmt: skip
    fig = curves([panel], title=title, left=0.85, head=0.3)
    (ax,) = fig.axes
    values = [value for way in predicted.values() for value in way]
    ax.set(xlim=(sizes[0] / 1.2, sizes[-1] * 1.2), ylim=(min(values) / 3, max(values) * 2))
    for name, size in MARKS.items():
        rule(ax, size, "vocabulary", width=1.0)
        ax.text(size, 1.02, name, size=SMALL, color=INK, ha="center", transform=ax.get_xaxis_transform())
    fig.set_label("Marked vocabularies: " + ", ".join(f"{name}'s {size:,}" for name, size in MARKS.items()))
    log_ticks(ax.xaxis, lambda x: f"{x:,.0f}")
    log_ticks(ax.yaxis, byte_count)
    return fig


def _streams_title(losses: Mapping[str, Sequence[float]], distances: Mapping[str, Sequence[float]]) -> str:
    least_fall = min(loss[0] - loss[-1] for loss in losses.values())
    apart = max(max(step) - min(step) for step in zip(*losses.values(), strict=True))
    alike = least_fall > 0 and apart < 0.1 * least_fall
    faults = [series[-1] for series in distances.values() if max(series) > 0]
    seen = 0 < len(faults) < len(distances) and min(faults) > 0.1
    stream = "the residual stream gives the fault away"
    if alike:
        return f"All losses fall alike; {stream}" if seen else "All losses fall alike"
    return f"{stream[0].upper()}{stream[1:]}" if seen else "Losses, and distances between residual streams"


def losses_and_streams(
    losses: Mapping[str, Sequence[float]], distances: Mapping[str, Sequence[float]]
) -> Figure:
    """Losses of the first run of each policy, above the distances between its ranks' residual streams.

    The title says "alike" if all losses fall and never differ by more than a tenth of the smallest fall. It
    says that the residual stream "gives the fault away" if some policy's distances are 0 throughout, and
    every other policy's last one is over 0.1.
    """
    look = dict(zip(losses, (Look(*SERIES[k]) for k in (0, 1, 3)), strict=False))  # dash-dots look solid
    words = {
        "training loss, first of three runs": losses,
        "relative distance between the residual streams of first and last rank": distances,
    }
    panels = [
        CurvePanel(
            [
                Series(run, range(1, len(y) + 1), y, look[run], label=f"{head.partition(',')[0]}, {run},")
                for run, y in by_run.items()
            ],
            height=1.35, title=head, xlabel="step" if by_run is distances else "",
        )
        for head, by_run in words.items()
    ]  # fmt: skip
    fig = curves(panels, title=_streams_title(losses, distances))
    upper, lower = fig.axes
    upper.tick_params(labelbottom=False)
    lower.set_ylim(bottom=0)
    for ax in fig.axes:
        ax.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    for line in lower.get_lines():
        line.set_clip_on(False)
    return fig


SHOWN = 24  # elements each way
_COLORS = ("#F1F3F5", CARD, INK)  # not computed, kept, dropped
_APART = ("#F1F3F5", CARD, "#882255")


@dataclass(frozen=True)
class MaskPair:
    """What two ranks drop of one activation, and the ranks between them: (n, m) each, 1 where an element is
    dropped, 0 where kept, -1 where not computed. All must be equal if `alike`; if not, no two ranks may be.
    """

    first: ArrayLike
    second: ArrayLike
    alike: bool
    between: Sequence[ArrayLike] = ()

    @classmethod
    def of_ranks(cls, masks: Sequence[ArrayLike], alike: bool) -> MaskPair:
        """The first and the last of all ranks' masks, with those between."""
        first, *between, last = masks
        return cls(first, last, alike, between)

    @property
    def differ(self) -> float:
        """The share of elements, of those that both have, that one of the two drops alone."""
        return _differing_share(self.first, self.second)

    @property
    def right(self) -> bool:
        """Whether each pair of ranks is as it should be, not only the two that are drawn."""
        pairs = combinations((self.first, *self.between, self.second), 2)
        return all((_differing_share(a, b) == 0) == self.alike for a, b in pairs)


def mask_pairs(masks: Sequence[Mapping[str, ArrayLike]], alike: Mapping[str, bool]) -> dict[str, MaskPair]:
    """{place: `MaskPair.of_ranks`} of each rank's {place: its mask}."""
    return {place: MaskPair.of_ranks([rank[place] for rank in masks], same) for place, same in alike.items()}


def _differing_share(first: ArrayLike, second: ArrayLike) -> float:
    a, b = np.asarray(first), np.asarray(second)
    if a.shape != b.shape:
        return 1.0
    shared = (a >= 0) & (b >= 0)
    return float((a != b)[shared].mean())


def dropped(
    runs: Mapping[str, Sequence[MaskPair]],
    places: Sequence[str],
    ranks: tuple[str, str] = ("rank 0", "rank 1"),
) -> Figure:
    """Dropout masks as bitmaps: for each place what rank 0 drops, what rank 1 drops, and their XOR.

    Black is dropped. An XOR is empty where two ranks agree, and half full where they draw independently with
    p = 1/2. One has a red frame if any two ranks are not as they should be. A corner of SHOWN x SHOWN
    elements is drawn. `runs` has masks for each of the places, under names such as "one seed, tokens
    sharded". The title names the policies, before the comma, of which no run has a red frame.
    """
    keys = [Key(OpStyle(_COLORS[2], "", "dropped")), Key(OpStyle(_APART[2], "", "dropped by one rank alone")),
            Key(OpStyle(ALARM, "", "not as it should be"), "hollow")]  # fmt: skip
    columns = 3 * len(places)
    side = (7.0 - 1.15 - 0.15 - 0.1 * (columns - 1)) / columns
    fig, axes = new_figure([side] * len(runs), title=_masks_title(runs), legend=keys,
                           columns=columns, left=1.15, right=0.15, bottom=0.28, gap=0.3,
                           head=0.5, between=0.1)  # fmt: skip
    for row, (name, pairs) in enumerate(runs.items()):
        row_axes = axes[row * columns : (row + 1) * columns]
        row_axes[0].annotate(name.replace(", ", ",\n"), (0, 0.5), (-7, 0), "axes fraction", "offset points",
                             size=TEXT, color=INK, ha="right", va="center")  # fmt: skip
        for k, (place, pair) in enumerate(zip(places, pairs, strict=True)):
            a, b = (np.asarray(mask)[:SHOWN, :SHOWN] for mask in (pair.first, pair.second))
            apart = np.where((a < 0) | (b < 0), -1, a != b)
            three = row_axes[3 * k : 3 * k + 3]
            for ax, values, colors in zip(three, (a, b, apart), (_COLORS, _COLORS, _APART), strict=True):
                _bitmap(ax, values, colors)
            if row == 0:
                for ax, words in zip(three, (*ranks, "XOR"), strict=True):
                    ax.annotate(words, (0.5, 1), (0, 3), "axes fraction", "offset points", size=SMALL,
                                color=SOFT, ha="center")  # fmt: skip
                three[0].annotate(
                    place, (0, 1), (0, 16), "axes fraction", "offset points", size=TEXT, color=INK
                )
            _judge(three[2], pair)
    said = [f"{name}: {', '.join(map(_verdict, pairs))}" for name, pairs in runs.items()]
    fig.set_label("XOR of " + " and ".join(places) + ". " + "; ".join(said))
    return fig


def _masks_title(runs: Mapping[str, Sequence[MaskPair]]) -> str:
    right: dict[str, bool] = {}
    for name, pairs in runs.items():
        policy = name.partition(",")[0]
        right[policy] = right.get(policy, True) and all(pair.right for pair in pairs)
    names = [policy for policy, follows in right.items() if follows]
    if len(names) == len(right):
        return "Every policy gives the masks that the layout wants"
    only = f"Only with {' and '.join(names)}" if names else "With no policy"
    return f"{only} are all masks as the layout wants"


def _bitmap(ax: Axes, values: NDArray[np.generic], colors: Sequence[str]) -> None:
    ax.imshow(
        values, cmap=ListedColormap(list(colors)), vmin=-1, vmax=1, interpolation="nearest", aspect="auto"
    )
    ax.set(xticks=[], yticks=[])
    for spine in ax.spines.values():
        spine.set(visible=True, color=RULE, linewidth=0.8)


def _verdict(pair: MaskPair) -> str:
    return f"{100 * pair.differ:.0f} % differ" if pair.differ else "equal"


def _judge(ax: Axes, pair: MaskPair) -> None:
    """How many differ, beneath the XOR; a frame where that is wrong."""
    ax.set_xlabel(
        _verdict(pair).removesuffix(" differ"), size=SMALL, color=INK if pair.right else ALARM, labelpad=2
    )
    if not pair.right:
        ax.xaxis.label.set_fontweight("bold")
        for spine in ax.spines.values():
            spine.set(color=ALARM, linewidth=2.2)

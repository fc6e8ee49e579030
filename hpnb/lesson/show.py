"""`lesson.show`: one way to show what was recorded. The cell says what, the finding is the title.

    show(measured, title="GPipe holds 8 microbatches")                  # Timelines, MemoryProfiles: a figure
    show({"predicted": simulated, "run": measured}, in_flight=True)     # the same, named
    show(predicted=steps, measured=ran, unit="s", title="dp wins")      # {row: number}: a table with ratio
    show(counted={"sent (B)": 4e6, "kept (B)": 1e6})                    # rows with units of their own
    show(Parity({"by hand": {"loss": 0.0, "weights": 3e-16}}))          # distances from one process
    show(error); show(out_of_budget); show(traffic); show(figure); show(function)

Alt texts are made from the data. `key="04.race"` also records all numbers of a table for the prose, as
04.race.dp.measured.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpnb.lesson.predictions.outcome import ratio_of, ratio_text
from hpnb.lesson.tables import cell_text, number, present, split_unit, survivors_table, table
from hpnb.lesson.values import flatten, record, slug
from hpnb.ranks import RankError
from hpnb.record import MemoryProfile, OutOfBudget, Timeline
from hpnb.record.traffic import Traffic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Where a number comes from, in the order of a table's columns. The ratio divides the last by the first.
SOURCES = ("rule_of_thumb", "predicted", "simulated", "replayed", "counted", "measured", "published")


def worst_of(distances: Iterable[float]) -> float:
    """The largest; NaN, which compares with nothing, is worse than any number."""
    return max(math.inf if math.isnan(distance) else distance for distance in distances)


@dataclass(frozen=True)
class Parity:
    """Relative distances from what one process computes, ||a - b|| / ||b||.

    Attributes:
        distances: {way: {quantity: distance}}; `worst_of` takes one such mapping from every rank.
        tolerance: what rounding may explain.
    """

    distances: Mapping[str, Mapping[str, float]]
    tolerance: float = 1e-12

    @classmethod
    def worst_of(cls, ranks: Sequence[Mapping[str, Mapping[str, float]]], tolerance: float = 1e-12) -> Parity:
        """The largest distance over the ranks, entry by entry."""
        worst = {
            way: {what: worst_of(rank[way][what] for rank in ranks) for what in row}
            for way, row in ranks[0].items()
        }
        return cls(worst, tolerance)

    @property
    def worst(self) -> float:
        return worst_of(distance for row in self.distances.values() for distance in row.values())

    @property
    def equal(self) -> bool:
        """Whether every distance is within the tolerance; False for NaN."""
        return self.worst <= self.tolerance


def show(
    *records: Any,
    title: str = "",
    note: str = "",
    key: str = "",
    unit: str = "",
    columns: Mapping[str, Mapping[Any, Any]] | None = None,
    **options: Any,
) -> None:
    """Display recorded objects as a figure or a table.

    Args:
        records: several of one kind, or {name: record}; or none, and numbers as options.
        title: the finding, in a sentence.
        note: one sentence beneath a table.
        key: under which to record a table's numbers for the prose; for timelines and profiles, theirs.
        unit: of the numbers of a table whose row or column does not name one, as in "idle (%)"; or the unit
            of time of timelines that are not in seconds, such as "forwards".
        columns: more columns of a table, {head: {row: number or words}}, after the ratio.
        options: {row: number} for any of predicted, simulated, replayed, counted, measured, published and
            rule_of_thumb; otherwise options of `hpnb.plot.timeline` or `hpnb.plot.memory`.

    Raises:
        TypeError: there is no way to show this.
    """
    if not records:
        numbers = {source: options.pop(source) for source in SOURCES if source in options}
        if options or not (numbers or columns):
            known = ", ".join(SOURCES)
            raise TypeError(f"show() has numbers from {known}, not from {', '.join(options) or 'nowhere'}")
        return _measurements(numbers, dict(columns or {}), title, note, key, unit)
    names: tuple[str, ...] = ()
    if len(records) == 1 and isinstance(records[0], Mapping):
        names, records = tuple(map(str, records[0])), tuple(records[0].values())
    for shows, display in _DISPLAYS:
        if records and all(map(shows, records)):
            if key:
                for name, one in zip(names or [""] * len(records), records, strict=True):
                    record(f"{key}.{slug(name)}" if name else key, one)
            return display(records, names, title, note, {**options, "unit": unit} if unit else options)
    kinds = ", ".join(sorted({type(one).__name__ for one in records})) or "nothing"
    raise TypeError(f"show() cannot show {kinds}; give numbers as show(predicted=..., measured=...)")


# --- numbers ---------------------------------------------------------------------------------------


def _measurements(
    numbers: dict[str, Mapping[Any, Any]],
    more: dict[str, Mapping[Any, Any]],
    title: str,
    note: str,
    key: str,
    unit: str,
) -> None:
    """A row a name, a column a source, and the ratio of the last source to the first."""
    everything = {**numbers, **more}
    rows = list(dict.fromkeys(name for column in everything.values() for name in column))
    if key:
        for name in rows:
            for head, column in everything.items():
                if column.get(name) is not None:
                    row_unit = split_unit(str(name))[1]
                    item_unit = (row_unit or unit) if head in numbers else (split_unit(head)[1] or row_unit)
                    record(f"{key}.{slug(name)}.{slug(head)}", column[name], item_unit)
    heads = [head.replace("_", " ") for head in numbers]
    ratios = {}
    if len(numbers) > 1:
        first, *others = numbers
        for name in rows:
            results = [
                column[name] for column in map(numbers.__getitem__, others) if column.get(name) is not None
            ]
            if results and numbers[first].get(name) is not None:
                ratio = ratio_of(float(numbers[first][name]), float(results[-1]))
                ratios[name] = "exact" if ratio == 1 else ratio_text(ratio, "identity")
        heads.append(
            f"{others[-1].replace('_', ' ')} / {first.replace('_', ' ')}" if len(others) == 1 else "ratio"
        )
    lines = []
    for name in rows:
        label, row_unit = split_unit(str(name))
        cells = [cell_text(column.get(name), row_unit or unit) for column in numbers.values()]
        cells += [ratios.get(name, "-")] if len(numbers) > 1 else []
        cells += [
            cell_text(column.get(name), split_unit(head)[1] or row_unit) for head, column in more.items()
        ]
        lines.append((label, *cells))
    table(("", *heads, *(split_unit(head)[0] for head in more)), lines, title, note)


def _parity(records: Sequence[Parity], names: Sequence[str], title: str, note: str, _: Any) -> None:
    for one in records:
        heads = list(dict.fromkeys(what for row in one.distances.values() for what in row))
        lines = [
            (way, *("equal" if row.get(h) == 0 else f"{row[h]:.0e}" if h in row else "-" for h in heads))
            for way, row in one.distances.items()
        ]
        verdict = f"The largest distance is {one.worst:.0e}; rounding explains up to {one.tolerance:.0e}."
        table(("relative distance from one process", *heads), lines, title, note or verdict)


def _traffic(records: Sequence[Traffic], names: Sequence[str], title: str, note: str, _: Any) -> None:
    rows = names or [f"rank {i}" for i in range(len(records))]
    axes = list(dict.fromkeys(axis for one in records for axis in one.bytes))
    lines = [
        (
            name,
            *(
                f"{number(one.bytes.get(a, 0), 'B')} in {number(int(one.calls.get(a, 0)))} calls"
                for a in axes
            ),
        )
        for name, one in zip(rows, records, strict=True)
    ]
    table(("leaves the rank, counted", *axes), lines, title, note)


def _stuck(records: Sequence[RankError], names: Sequence[str], title: str, note: str, _: Any) -> None:
    for error in records:
        rows = [(f"rank {rank}", _waiting_line(stack)) for rank, stack in sorted(error.stacks.items())]
        table(("", "waits in"), rows, title or error.summary, note)


def _waiting_line(stack: str) -> str:
    """The reader's innermost line in a stack, else the innermost of all."""
    frames: list[tuple[str, str]] = re.findall(r"^  (Cell In|File)[^\n]*\n    (.+)", stack, re.MULTILINE)
    cells = [line for where, line in frames if where == "Cell In"]
    return (cells or [line for _, line in frames] or ["-"])[-1].strip()


def _survivors(records: Sequence[OutOfBudget], names: Sequence[str], title: str, note: str, _: Any) -> None:
    for error in records:
        survivors_table(error, title=title, note=note)


def _source(
    records: Sequence[Callable[..., Any]], names: Sequence[str], title: str, note: str, _: Any
) -> None:
    from html import escape

    for function in records:
        source = inspect.getsource(function)
        present(f"<pre>{escape(source)}</pre>", source)


# --- figures ---------------------------------------------------------------------------------------


def _timelines(records: Sequence[Timeline], names: Sequence[str], title: str, _: str, options: Any) -> None:
    from hpnb import plot

    figure = plot.timeline(*records, names=names, title=title or None, **options)
    parts = []
    for name, one in zip(names or [""] * len(records), records, strict=True):
        at = {part: item.text() for part, item in flatten("00.x", one).items()}
        text = f"{name}, {one.source}: " if name else f"{one.source}: "
        makespan = f"{number(one.makespan)} {unit}" if (unit := options.get("unit")) else at["00.x.makespan"]
        text += f"{len(one.ranks)} ranks, {makespan}"
        text += f", bubble {at['00.x.bubble']}" if options.get("bubble", "fraction") else ""
        parts.append(
            text + (f", at most {at['00.x.in-flight']} in flight" if options.get("in_flight") else "")
        )
    plot.show(figure, alt=_sentences(title, *parts))


def _profiles(
    records: Sequence[MemoryProfile], names: Sequence[str], title: str, _: str, options: Any
) -> None:
    from hpnb import plot

    parts = []
    for one, name in zip(records, names or [f"rank {one.rank}" for one in records], strict=True):
        share = 100 * one.at_peak.activations / one.peak if one.peak else 0.0
        parts.append(f"{name} peaks at {number(one.peak, 'B')}, {share:.0f} % of it activations")
    plot.show(
        plot.memory(*records, title=title or None, **options),
        alt=_sentences("Memory over time", title, *parts),
    )


def _figures(records: Sequence[Figure], names: Sequence[str], title: str, _: str, options: Any) -> None:
    from hpnb import plot

    for figure in records:
        plot.show(figure, alt=options.get("alt") or _sentences(title, describe(figure)))


def describe(figure: Figure) -> str:
    """A figure in words: title, axes, where each series begins and ends, bars, and the figure's own label."""
    bold = [text for text in figure.texts if text.get_fontweight() == "bold"]
    parts = [" ".join(text.get_text() for text in bold)]
    for ax in figure.axes:
        if not ax.get_visible():
            continue
        heads = [text.get_text() for text in ax.texts if text.get_position() == (0, 4)]
        described = heads[:1]  # the panel's title
        if ax.get_ylabel() and ax.get_xlabel():
            described.insert(0, f"{ax.get_ylabel()} over {ax.get_xlabel()}".replace("\n", " "))
        ticks = zip(ax.get_yticks(), ax.get_yticklabels(), strict=False)  # labels may be hidden
        zero = next((y for y, tick in ticks if y > 0 and tick.get_text() == "0"), 0.0)  # of a log axis
        for line in ax.get_lines() if ax.axison else ():  # without axes, places say nothing
            x, y, label = line.get_xdata(), line.get_ydata(), str(line.get_label())
            if len(x) == 1 and not label.startswith(("_", "tick")):  # type: ignore[arg-type]
                described.append(f"{label} at {_short(x[0])}, {_short(y[0])}")  # type: ignore[index]
            if len(x) > 2 and not label.startswith(("_", "tick")):  # type: ignore[arg-type]
                first, last = (_short(0 if end == zero else end) for end in (y[0], y[-1]))  # type: ignore[index]
                described.append(f"{label} goes from {first} to {last}")
        rows = [tick.get_text() for tick in ax.get_yticklabels()]
        if list(ax.get_yticks()) != [*range(len(rows))] and all(map(_is_number, rows)):  # a scale
            rows = []
        ends: dict[str, list[str]] = {}
        for note in ax.texts:  # a bar's length stands at its end
            xy = getattr(note, "xy", None)
            if xy is None or xy in ((0, 1), (1, 1)) or not 0 <= round(xy[1]) < len(rows):
                continue
            places = getattr(note, "xycoords", "data")
            if (places[1] if isinstance(places, tuple) else places) == "axes fraction":  # at no row
                continue
            if rows[round(xy[1])] and note.get_text():
                ends.setdefault(rows[round(xy[1])], []).append(note.get_text())
        described += [f"{name} {', '.join(texts)}" for name, texts in ends.items()]
        parts.append("; ".join(described))
    return _sentences(*parts, str(figure.get_label()))


def _is_number(label: str) -> bool:
    """Whether a tick's label is a number or empty, and not the name of a row."""
    return not label or label.lstrip("\N{MINUS SIGN}").replace(",", "").replace(".", "", 1).isdecimal()


def _short(value: Any) -> str:
    return f"{float(value):.3g}"


def _sentences(*parts: str) -> str:
    return " ".join(f"{part.strip().rstrip('.')}." for part in parts if part.strip())


def _is_figure(one: Any) -> bool:
    """Whether it is a matplotlib Figure, without importing matplotlib before something is drawn."""
    return hasattr(one, "axes") and hasattr(one, "get_figwidth")


_DISPLAYS: tuple[tuple[Callable[[Any], bool], Callable[[Any, Sequence[str], str, str, Any], None]], ...] = (
    (lambda one: isinstance(one, Timeline), _timelines),
    (lambda one: isinstance(one, MemoryProfile), _profiles),
    (lambda one: isinstance(one, Traffic), _traffic),
    (lambda one: isinstance(one, Parity), _parity),
    (lambda one: isinstance(one, RankError), _stuck),
    (lambda one: isinstance(one, OutOfBudget), _survivors),
    (_is_figure, _figures),
    (callable, _source),
)

"""One row for each layout that ran, whichever notebook ran it: what was predicted, what was measured.

    ledger.add("01", hpnb.Layout(dp=4), "vit", {"sent (B)": (786432, 786432), "step (s)": (0.012, 0.013)})

Running a layout again on the same machine replaces its row. Kept as JSON lines; 08 reads them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import SupportsFloat

from pydantic import TypeAdapter

from hpnb.lesson.home import load, locked, save
from hpnb.lesson.predictions.outcome import ratio_of, ratio_text
from hpnb.lesson.tables import number, plain, split_unit, table
from hpnb.mesh import Layout

FILE = "ledger.jsonl"
Pair = tuple[int | float | None, int | float | None]  # predicted, measured


@dataclass(frozen=True)
class LedgerEntry:
    """One layout that ran. `quantities` is {name with its unit: (predicted, measured)}."""

    notebook: str
    layout: str
    model: str
    quantities: dict[str, Pair]
    machine: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.notebook, self.layout, self.model, self.machine


def add(
    notebook: str,
    layout: Layout | str,
    model: str,
    quantities: Mapping[str, tuple[SupportsFloat | None, SupportsFloat | None]],
    machine: str = "",
) -> None:
    """Write one row; it takes the place of one of the same notebook, layout, model and machine.

    Args:
        notebook: such as "01".
        quantities: {"step (s)": (predicted, measured)}; None for what was not predicted or measured.
        machine: a name of the kind of machine, or a digest of it.
    """
    pairs = {name: (_plain(p), _plain(m)) for name, (p, m) in quantities.items()}
    row = LedgerEntry(notebook, str(layout), model, pairs, machine)
    with locked():
        entries = {entry.key: entry for entry in rows()}
        entries[row.key] = row
        lines = (json.dumps(asdict(entry), ensure_ascii=False) for entry in entries.values())
        save(FILE, "".join(line + "\n" for line in lines))


def rows() -> tuple[LedgerEntry, ...]:
    """All rows, by notebook, then in the order in which they were first added."""
    entry = TypeAdapter(LedgerEntry)
    stored: tuple[LedgerEntry, ...] = load(
        FILE, lambda text: tuple(map(entry.validate_json, text.splitlines())), ()
    )
    return tuple(sorted(stored, key=lambda row: row.notebook))


def show(notebook: str = "") -> None:
    """Display a row a layout, of all notebooks or of one, such as "01"; a cell holds what was measured, and
    measured / predicted."""
    entries = [row for row in rows() if notebook in ("", row.notebook)]
    names = list(dict.fromkeys(name for row in entries for name in row.quantities))
    machines = len({row.machine for row in entries}) > 1
    columns = ["notebook", "layout", "model", *(split_unit(name)[0] for name in names)]
    lines = []
    for row in entries:
        cells = [_cell(row.quantities.get(name), split_unit(name)[1]) for name in names]
        lines.append([row.notebook, row.layout, row.model, *cells] + [row.machine] * machines)
    note = "Measured, and in brackets measured / predicted." if entries else "No layout has run yet."
    table(columns + ["machine"] * machines, lines, "ledger", note)


def _plain(value: SupportsFloat | None) -> float | None:
    return None if value is None else plain(value)


def _cell(pair: Pair | None, unit: str) -> str:
    if pair is None or pair == (None, None):
        return "-"
    predicted, measured = pair
    if measured is None:
        return f"{number(predicted or 0.0, unit)} predicted"
    text = number(measured, unit)
    return text if predicted is None else f"{text} ({ratio_text(ratio_of(predicted, measured))})"

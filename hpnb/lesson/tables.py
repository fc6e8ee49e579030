"""Numbers and small tables as a page shows them: three digits, one unit, readable in light and dark.

A quantity may carry its unit in its name, as an axis does: "step time (s)".
"""

from __future__ import annotations

import math
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from numbers import Integral
from typing import Any, SupportsFloat, cast

from hpnb.record import OutOfBudget

Cell = str | SupportsFloat | None

_LARGE = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_SMALL = ((1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))
_PREFIXED = dict.fromkeys(("B", "B/s", "FLOP", "FLOP/s", "bit", "bit/s", "Hz"), _LARGE) | {"s": _SMALL}
_PAGE, _WRAP = 110, 40  # columns of a page of text, and of a cell where a row would be wider


def number(value: SupportsFloat, unit: str = "") -> str:
    """`value` with three significant digits and its unit: number(0.00123, "s") is "1.23 ms".

    Bytes, FLOPs, bits, hertz and seconds take the prefix that fits (a kB is 1000 B); in any other unit
    the value stays as it is. Counts are shown in full.
    """
    plain = float(value)
    if not math.isfinite(plain):
        text = "unknown" if math.isnan(plain) else "∞" if plain > 0 else "-∞"
        return f"{text} {unit}".rstrip()
    is_count = isinstance(value, Integral) or unit in ("B", "FLOP", "bit")  # counts, even when held as floats
    size, prefix = 1.0, ""
    if unit in _PREFIXED and plain:
        steps = _PREFIXED[unit]
        # 999.6 would be shown as 1000, so it already takes the next prefix.
        size, prefix = next((step for step in steps if abs(plain) >= step[0] * 0.9995), steps[-1])
    scaled = plain / size
    text = f"{round(scaled):,}" if is_count and size == 1.0 and scaled.is_integer() else _three(scaled)
    return f"{text} {prefix}{unit}".rstrip()


def cell_text(value: Cell, unit: str = "") -> str:
    """As a table holds it: a number through `number`, "yes" or "no", a string as it is, None as a dash."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else number(value, unit)


def plain(value: SupportsFloat) -> float:
    """A Python number: of a tensor, an array of one, a count. Whole numbers stay exact."""
    return int(cast(Any, value)) if isinstance(value, Integral) else float(value)


def split_unit(name: str) -> tuple[str, str]:
    """("step time", "s") of "step time (s)"; the unit is empty where there is none."""
    match = re.fullmatch(r"(.+?) \(([^()\s]+)\)", name)
    return (match[1], match[2]) if match else (name, "")


def table(columns: Sequence[str], rows: Iterable[Sequence[Cell]], title: str = "", note: str = "") -> None:
    """Display rows under columns: HTML in a notebook, aligned text elsewhere.

    Args:
        columns: headings; leave all of them empty for a table without a heading.
        rows: of cells, see `cell_text`.
        title: above the table.
        note: a sentence beneath it.

    Raises:
        ValueError: a row has not as many cells as there are columns.
    """
    cells = [[cell_text(cell) for cell in row] for row in rows]
    for row in cells:
        if len(row) != len(columns):
            raise ValueError(f"a row has {len(row)} cells for {len(columns)} columns: {row}")
    right = [_is_numeric([row[k] for row in cells]) for k in range(len(columns))]
    present(_html(columns, cells, right, title, note), _text(columns, cells, right, title, note))


def survivors_table(stopped: OutOfBudget, side: int | None = None, title: str = "", note: str = "") -> None:
    """Display what was alive when a budget was exceeded or the device was full, the largest first.

    Args:
        side: only tensors that have a dimension of this size; the head of the column says so.
        title, note: by default what was exceeded where, and by how much.
    """
    chosen = [one for one in stopped.survivors if side is None or side in one.shape]
    rows = [(str(one), one.category, number(one.nbytes, "B")) for one in chosen[:8]]
    some = "largest tensors alive" if side is None else f"largest tensors alive with a side of {side}"
    heading = f"out of {'memory' if stopped.device_full else 'budget'} {stopped.operator}"
    table((some, "category", "bytes"), rows, title or heading, note or f"{stopped}.")


def present(html: str, text: str, payload: Mapping[str, Any] | None = None) -> None:
    """Display both forms of one thing in IPython, which picks; print the text where there is no IPython.

    Args:
        payload: travels in the output's metadata["hpnb"], for the command that commits the page.
    """
    if not display({"text/html": html, "text/plain": text}, payload):
        print(text)


def display(forms: Mapping[str, Any], payload: Mapping[str, Any] | None = None) -> bool:
    """Display {MIME type: one thing in that form} where there is IPython; whether there is. See `present`."""
    ipython = sys.modules.get("IPython")
    if ipython is None or ipython.get_ipython() is None:
        return False
    metadata = {"hpnb": dict(payload)} if payload else {}
    ipython.display.display(dict(forms), metadata=metadata, raw=True)
    return True


def _three(value: float) -> str:
    if value == 0:
        return "0"
    if not 1e-3 <= abs(value) < 1e12:
        return f"{value:.3g}"
    if abs(value) >= 999.5:
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:#.3g}".rstrip(".")


def _is_numeric(column: Sequence[str]) -> bool:
    """A column of numbers lines up on the right; a dash says nothing either way."""
    numbers = [cell for cell in column if cell not in ("", "-")]
    return bool(numbers) and all(re.match(r"[-+×]? ?[\d∞]", cell) for cell in numbers)


def _html(
    columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool], title: str, note: str
) -> str:
    # Alignment twice: JupyterLab sets every cell to the right, and GitHub drops styles. No colours: a page
    # brings its own, for light and for dark.
    def cell(tag: str, words: str, k: int) -> str:
        side = "right" if right[k] else "left"
        style = f"text-align:{side};vertical-align:top"
        return f'<{tag} align="{side}" style="{style}">{escape(words, quote=False)}</{tag}>'

    def line(tag: str, words: Sequence[str]) -> str:
        return "<tr>" + "".join(cell(tag, text, k) for k, text in enumerate(words)) + "</tr>"

    parts = [f"<p><b>{escape(title, quote=False)}</b></p>"] if title else []
    parts.append('<table style="margin-left:0;table-layout:auto">')
    if any(columns):
        parts.append(f"<thead>{line('th', columns)}</thead>")
    parts.append("<tbody>" + "".join(line("td", row) for row in rows) + "</tbody></table>")
    if note:
        parts.append(f"<p>{escape(note, quote=False)}</p>")
    return "\n".join(parts)


def _text(
    columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool], title: str, note: str
) -> str:
    wide = max((sum(len(cell) + 2 for cell in row) for row in rows), default=0)
    body = [[textwrap.wrap(cell, _WRAP if wide > _PAGE else _PAGE) or [""] for cell in row] for row in rows]
    widths = [max(len(name), *(len(p) for row in body for p in row[k]), 0) for k, name in enumerate(columns)]

    def line(words: Sequence[str]) -> str:
        filled = zip(words, widths, right, strict=True)
        return "  ".join(word.rjust(wide) if r else word.ljust(wide) for word, wide, r in filled).rstrip()

    lines = [title] if title else []
    if any(columns):
        lines += [line(columns), "  ".join("-" * wide for wide in widths)]
    for row in body:
        for k in range(max(map(len, row), default=0)):
            lines.append(line([parts[k] if k < len(parts) else "" for parts in row]))
    if note:
        lines += textwrap.wrap(note, _PAGE)
    return "\n".join(lines)

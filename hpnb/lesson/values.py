"""What a page's run records: numbers for its prose, and claims that the page makes.

    lesson.record("04.step", seconds, "s")             # prose: The step took {{04.step}}.
    lesson.record("04.sent", {"dp": 1e6, "tp": 4e6})   # prose: tp sends {{04.sent.tp:,.0f}} bytes
    lesson.claim("tp sends more than dp", (4e6, ">", 1e6))

The command that runs a page collects both from the outputs and stores them in the notebook's metadata
(hpnb/lesson/pages). When a reader runs the page, its prose keeps the committed run's numbers, and the cell
says where this machine differs: "04.step here: 412 ms; on the page: 304 ms".
"""

from __future__ import annotations

import json
import operator
import os
import re
from collections.abc import Mapping
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any, NamedTuple, SupportsFloat

from hpnb.lesson.tables import cell_text, display, number, plain, present
from hpnb.record import MemoryProfile, Timeline
from hpnb.record.traffic import Traffic

WRITING = "HPNB_WRITES_PAGE"  # while a page is run to be committed: the first two letters of its name, "04"
NUMBER_IN_PROSE = re.compile(r'<data[\s#]+value="(?P<key>[^"]+)">(?P<text>[^<]*)</data>')
_KEY = re.compile(r"\d\d\.[a-z0-9_.+-]+")
_RELATIONS = {"<": operator.lt, "<=": operator.le, "==": operator.eq, ">": operator.gt, ">=": operator.ge}


class Value(NamedTuple):
    """A recorded number with its unit, or a recorded name."""

    value: float | str
    unit: str = ""

    def text(self, spec: str = "") -> str:
        """As prose has it; a format `spec` is applied to the bare value: "{{04.step:.2f}} seconds"."""
        if spec:
            return format(self.value, spec)
        return self.value if isinstance(self.value, str) else number(self.value, self.unit)


def record(key: str, value: Any, unit: str = "") -> None:
    """Record `value` for the prose of the page, under "page.name".

    Args:
        value: a number, a name, a truth ("yes" or "no"), a mapping of them (key.name), or a Timeline
            (.makespan .bubble .in-flight), MemoryProfile (.peak and each category) or Traffic (each axis,
            .total).

    Raises:
        ValueError: the key does not begin with two digits and a dot; or, while a page is run to be committed,
            not with this page's number.
        TypeError: the value is none of these.
    """
    values = flatten(key, value, unit)
    if writing_page():
        page = os.environ[WRITING]
        if page.isdigit() and key[:2] != page:
            raise ValueError(f"{key} is a key of another page than {page}; use {page}{key[2:]}")
        payload = {"values": {name: list(item) for name, item in values.items()}}
        display({"text/plain": ""}, payload)  # an empty output, which the command that commits takes out
        return
    committed = _page(key[:2])
    lines = [
        f"{name} here: {item.text()}; on the page: {committed.values[name].text()}"
        for name, item in values.items()
        if name in committed.in_prose and committed.differs(name, item)
    ]
    if lines:
        lines[-1] += f" ({committed.hardware})"
        present("<p>" + "<br>".join(escape(line, quote=False) for line in lines) + "</p>", "\n".join(lines))


def claim(
    statement: str,
    condition: bool | tuple[SupportsFloat, str, SupportsFloat],
    otherwise: str = "",
    unit: str = "",
) -> None:
    """State what the page's run shows, and check it: on another machine it may fail, and the output says so.

    Nothing is raised where it fails. The command that runs a page writes it all the same, names the claims
    that failed and exits with status 1, and so does its --check; such a page is not to be committed.

    Args:
        condition: a truth, or better two numbers and a relation, which are shown: (4, "<", 8).
        otherwise: why a reader's machine may show something else.
        unit: of the two numbers, such as "s" or "B".
    """
    numbers, holds, shown = None, condition, ""
    if isinstance(condition, tuple):
        left, relation, right = condition
        if relation not in _RELATIONS:
            raise ValueError(f"relation {relation!r} is not one of {', '.join(_RELATIONS)}")
        a, b = plain(left), plain(right)
        numbers, holds = [a, relation, b], _RELATIONS[relation](a, b)
        shown = f" ({number(a, unit)} {relation} {number(b, unit)})"
    holds = bool(holds)
    text = f"✓ {statement}{shown}"
    if not holds:
        why = otherwise or "Other sizes, links and clocks than the page's can turn this around."
        text = f"✗ Not in this run: {statement}{shown.replace('(', '(not ')}. {why}"
    payload = {"claims": {statement: {"holds": holds, "numbers": numbers}}} if writing_page() else None
    present(f"<p>{escape(text, quote=False)}</p>", text, payload)


def flatten(key: str, value: Any, unit: str = "") -> dict[str, Value]:
    """{key.name: value} of everything in `value` that prose can have."""
    if not _KEY.fullmatch(key):
        raise ValueError(f'{key!r} is no key; write the page and a name in small letters, such as "04.step"')
    if isinstance(value, Timeline):
        flight = max(value.peak_in_flight(rank) for rank in value.ranks)
        parts = {"makespan": (value.makespan, "s"), "bubble": (100 * value.bubble_fraction, "%")}
        return flatten(key, {**parts, "in-flight": flight})
    if isinstance(value, MemoryProfile):
        kinds = ("parameters", "gradients", "optimizer", "activations", "temporary")
        return flatten(key, {"peak": value.peak, **{k: value.peak_of(k) for k in kinds}}, "B")
    if isinstance(value, Traffic):
        return flatten(key, {**value.bytes, "total": value.total}, "B")
    if isinstance(value, Mapping):
        items = (flatten(f"{key}.{slug(name)}", item, unit) for name, item in value.items())
        return {name: item for part in items for name, item in part.items()}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], str):
        value, unit = value
    if isinstance(value, bool):
        return {key: Value(cell_text(value))}
    return {key: Value(value if isinstance(value, str) else plain(value), unit)}


def slug(name: object) -> str:
    """A row's name as part of a key: "dp 2 x tp 2" is "dp-2-x-tp-2"; a unit in brackets is left out."""
    text = re.sub(r" \([^()\s]+\)$", "", str(name)).lower()
    return re.sub(r"[^a-z0-9_.+]+", "-", text).strip("-")


def writing_page() -> bool:
    return bool(os.environ.get(WRITING))


class _CommittedPage(NamedTuple):
    values: Mapping[str, Value]
    in_prose: frozenset[str]  # keys in its prose
    hardware: str

    def differs(self, name: str, item: Value) -> bool:
        """Whether the page recorded something else under `name`."""
        return name in self.values and self.values[name].text() != item.text()


@lru_cache(maxsize=16)
def _page(number: str) -> _CommittedPage:
    """What the notebook of that number in the current folder was committed with; empty if there is none."""
    for path in sorted(Path().glob(f"{number}_*.ipynb")):
        try:
            nb = json.loads(path.read_text(encoding="utf-8"))
            mark = nb["metadata"]["hpnb"]
            prose = "".join(
                "".join(cell["source"]) for cell in nb["cells"] if cell["cell_type"] == "markdown"
            )
        except (OSError, ValueError, KeyError, TypeError):
            continue
        keys = frozenset(match["key"].partition(":")[0] for match in NUMBER_IN_PROSE.finditer(prose))
        return _CommittedPage(committed_values(mark), keys, mark.get("hardware", ""))
    return _CommittedPage({}, frozenset(), "")


def committed_values(mark: Mapping[str, Any]) -> dict[str, Value]:
    return {name: Value(*item) for name, item in mark.get("values", {}).items()}

"""The numbers that a page's prose tells are written by its run, in the text and in the notebook.

    The step took {{04.step}}.                                       as the author writes it
    The step took <data value="04.step">304 ms</data>.               as the tool leaves it: reads "304 ms"

The name is a key of `lesson.record`, of this page or of another; ":.2f" after it formats the bare number.
HTML's <data> element is invisible on GitHub and in JupyterLab, may begin a line, and survives jupytext and
editing by hand: the next fill corrects what stands in it. `python -m hpnb.lesson.pages.committed` fills after
a run, and with --pair without one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from hpnb.lesson.values import NUMBER_IN_PROSE, Value, committed_values

_PLACE = re.compile(r"\{\{(?P<new>\d\d\.[^{}\s]+)\}\}|" + NUMBER_IN_PROSE.pattern)


def fill(text: str, values: Mapping[str, Value]) -> str:
    """`text` with every number that is recorded in `values` as it is there; others stay."""

    def written(match: re.Match[str]) -> str:
        place = match["new"] or match["key"]
        key, _, spec = place.partition(":")
        if key not in values:
            return match[0]
        return f'<data value="{place}">{_markup(values[key], spec)}</data>'

    return _PLACE.sub(written, text)


def differences(text: str, values: Mapping[str, Value]) -> list[str]:
    """The numbers in `text` that no run recorded, or that are not what it recorded, in words."""
    problems = []
    for match in _PLACE.finditer(text):
        place = match["new"] or match["key"]
        key, _, spec = place.partition(":")
        if key not in values:
            problems.append(f"{key} stands in the prose, and no cell records it")
        elif match["new"] or match["text"] != _markup(values[key], spec):
            in_prose = match["text"] or "not filled in"
            problems.append(f"{place} is {values[key].text(spec)} in the run and {in_prose} in the prose")
    return problems


def _markup(value: Value, spec: str) -> str:
    """The text of `value` in HTML, where a "<" would end the place that the next fill looks for."""
    return escape(value.text(spec), quote=False)


def values_beside(path: Path) -> dict[str, Value]:
    """What the committed pages in the folder of `path` recorded, all together."""
    values: dict[str, Value] = {}
    for file in sorted(path.parent.glob("[0-9]*.ipynb")):
        mark = json.loads(file.read_text(encoding="utf-8"))["metadata"].get("hpnb", {})
        values |= {f"{file.name[:2]}.hardware": Value(mark.get("hardware", "")), **committed_values(mark)}
    return values


def take_out(nb: Any) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """(values, claims) that the outputs of `nb` carry, removed from them; empty outputs go with them.

    A claim that is made several times holds if it holds each time.

    Raises:
        ValueError: a key was recorded twice, with different values.
    """
    values: dict[str, list[Any]] = {}
    claims: dict[str, Any] = {}
    for cell in nb.cells:
        if cell.cell_type != "code":
            continue
        for output in cell.outputs:
            payload = output.get("metadata", {}).pop("hpnb", {})
            for key, item in payload.get("values", {}).items():
                if values.setdefault(key, item) != item:
                    first, second = (Value(*recorded).text() for recorded in (values[key], item))
                    raise ValueError(f"{key} is recorded twice, as {first} and as {second}; use two keys")
            for statement, result in payload.get("claims", {}).items():
                if claims.setdefault(statement, result)["holds"]:
                    claims[statement] = result
        cell.outputs = [out for out in cell.outputs if out.get("data") != {"text/plain": ""}]
    return values, claims


def broken_claims(claims: Mapping[str, Any]) -> list[str]:
    return [f"the run does not support: {claim}" for claim, result in claims.items() if not result["holds"]]

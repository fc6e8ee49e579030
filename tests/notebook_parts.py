"""A notebook's parts, as its rules and the proof of its exercises need them: cells, headings, exercises."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from typing import Any

DETAILS = re.compile(r"<details\b.*?</details>", re.DOTALL | re.IGNORECASE)
EXERCISE = re.compile(r"Exercise (\d+): \S")
_FENCE = re.compile(r"^(```|~~~).*?^\1[^\n]*$", re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^(#{1,6})\s+(.+?)\s*#*$", re.MULTILINE)
_PYTHON = re.compile(r"^```(?:python|py)\s*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_SOLUTION = re.compile(r"<summary>[^<]*solution", re.IGNORECASE)


@dataclass(frozen=True)
class Exercise:
    """The cells from an exercise's heading to the next heading of its level or above."""

    number: int
    cells: list[Any]

    @property
    def text(self) -> str:
        return "\n".join(cell.source for cell in self.cells if cell.cell_type == "markdown")

    @property
    def solution(self) -> str | None:
        """The code in the fold whose summary says Solution."""
        folds = [fold for fold in DETAILS.findall(self.text) if _SOLUTION.search(fold)]
        code = [fence for fold in folds for fence in _PYTHON.findall(fold)]
        return "\n".join(code) or None

    def tagged(self, kind: str) -> list[Any]:
        """Code cells tagged `kind`-N."""
        tag = f"{kind}-{self.number}"
        return [cell for cell in self.cells if cell.cell_type == "code" and tag in tags(cell)]


def tags(cell: Any) -> list[str]:
    return list(cell.metadata.get("tags", []))


def code_cells(nb: Any) -> list[Any]:
    return [cell for cell in nb.cells if cell.cell_type == "code"]


def headings(nb: Any) -> list[tuple[int, int, str]]:
    """(cell, level, text) of every heading that is neither folded away nor a comment in code."""
    return [
        (i, len(marks), text)
        for i, cell in enumerate(nb.cells)
        if cell.cell_type == "markdown"
        for marks, text in _HEADING.findall(_FENCE.sub("", DETAILS.sub("", cell.source)))
    ]


def exercises(nb: Any) -> list[Exercise]:
    found = []
    for i, level, text in headings(nb):
        if level == 3 and (match := EXERCISE.match(text)):
            end = min((j for j, other, _ in headings(nb) if j > i and other <= 3), default=len(nb.cells))
            found.append(Exercise(int(match[1]), nb.cells[i:end]))
    return found


def outputs(nb: Any) -> Iterator[tuple[int, Any]]:
    """(number of the code cell from 1, output)."""
    for number, cell in enumerate(code_cells(nb), 1):
        for output in cell.outputs:
            yield number, output


def code_lines(source: str) -> int:
    lines = (line.strip() for line in source.splitlines())
    return sum(1 for line in lines if line and not line.startswith("#"))


def is_figure(output: Any) -> bool:
    data = output.get("data", {})
    return any(kind.startswith("image/") for kind in data) or "<img" in data.get("text/html", "")


def alts(html: str) -> list[str]:
    """The alt text of each <img>, "" where there is none."""
    images = _Images()
    images.feed(html)
    return images.found


class _Images(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "img":
            self.found.append((dict(attrs).get("alt") or "").strip())

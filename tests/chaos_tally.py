"""What the chaos suite counts: each fault is tried, and has one of four outcomes.

    unharmed    the run went on, or the load gave exactly what was saved
    named       an error within 15 s that says which rank, file, parameter or action is at fault
    lost        what was saved cannot be loaded any more, or a process, descriptor or file stays behind
    wrong       other numbers, without a word; foreign code was run; or a hang, or an error that names nothing

With --slow, the counts of every part are kept in build/chaos/, and all of them are shown in build/chaos.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest

SECONDS = 15.0
_BUILD = Path(__file__).parents[1] / "build"
_COLUMNS = ("tried", "unharmed", "named", "lost", "wrong")


@dataclass
class Count:
    """The outcomes of one kind of fault."""

    tried: int = 0
    unharmed: int = 0
    named: int = 0
    lost: int = 0
    wrong: int = 0
    slowest: float = 0.0  # seconds until the caller knew
    left: str = ""  # what is left behind


@dataclass
class Tally:
    """The counts of one part of the suite, by kind of fault."""

    part: str
    counts: dict[str, Count] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, kind: str, outcome: str, seconds: float = 0.0, text: str = "", left: str = "") -> None:
        """One fault was tried.

        Args:
            outcome: one of unharmed, named, lost and wrong.
            text: what happened, for the message of a test that fails.
            left: what is left behind.
        """
        if outcome == "named" and seconds > SECONDS:
            outcome, text = "wrong", f"named after {seconds:.1f} s only: {text}"
        count = self.counts.setdefault(kind, Count())
        count.tried += 1
        setattr(count, outcome, getattr(count, outcome) + 1)
        count.slowest = max(count.slowest, seconds)
        count.left = left or count.left
        if outcome in ("lost", "wrong"):
            self.problems.append(f"{outcome}: {kind}: {text}")

    def check(self) -> None:
        """Fail if anything is lost or wrong."""
        problems, self.problems = self.problems, []
        assert not problems, f"{len(problems)} of {self.part}:\n" + "\n".join(problems[:20])


@contextmanager
def tally(part: str, request: pytest.FixtureRequest) -> Iterator[Tally]:
    """A tally that is written to build/ at the end of a --slow run."""
    made = Tally(part)
    yield made
    if request.config.getoption("--slow") and made.counts:
        folder = _BUILD / "chaos"
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{part}.json"
        before = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**before, **{kind: asdict(c) for kind, c in made.counts.items()}}))
        (_BUILD / "chaos.md").write_text(table(folder))


def table(folder: Path) -> str:
    """All parts as a table in Markdown, with their sums."""
    head = ("part", "kind of fault", *_COLUMNS, "slowest (s)", "left behind")
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    total = Count()
    for file in sorted(folder.glob("*.json")):
        for kind, values in json.loads(file.read_text()).items():
            count = Count(**values)
            for name in _COLUMNS:
                setattr(total, name, getattr(total, name) + getattr(count, name))
            lines.append(_line(file.stem, kind, count))
    return "\n".join([*lines, _line("**all**", "", total)]) + "\n"


def _line(part: str, kind: str, count: Count) -> str:
    numbers = " | ".join(str(getattr(count, name)) for name in _COLUMNS)
    return f"| {part} | {kind} | {numbers} | {count.slowest:.1f} | {count.left or 'nothing'} |"

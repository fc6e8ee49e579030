"""What went wrong while the loss looked healthy, and what showed it: a row for each silent failure.

Every notebook that hides a fault adds its row when the reader has found it; the table grows to the end.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from pydantic import TypeAdapter

from hpnb.lesson.home import load, locked, write_json
from hpnb.lesson.tables import table

FILE = "field_guide.json"


@dataclass(frozen=True)
class FieldGuideEntry:
    """A fault as it is met: first the symptom, then the instrument that finds it, last the cause."""

    symptom: str
    instrument: str
    cause: str
    notebook: str


def add(symptom: str, instrument: str, cause: str, notebook: str) -> None:
    """Write one row; it takes the place of the one with the same notebook and symptom."""
    with locked():
        entries = {(entry.notebook, entry.symptom): entry for entry in rows()}
        entries[notebook, symptom] = FieldGuideEntry(symptom, instrument, cause, notebook)
        write_json(FILE, [asdict(entry) for entry in entries.values()])


def rows() -> tuple[FieldGuideEntry, ...]:
    """All rows, by notebook, then in the order in which they were first added."""
    stored: tuple[FieldGuideEntry, ...] = load(
        FILE, TypeAdapter(tuple[FieldGuideEntry, ...]).validate_json, ()
    )
    return tuple(sorted(stored, key=lambda row: row.notebook))


def show(notebook: str = "") -> None:
    """Display the guide as it stands, or only the rows of one `notebook`, such as "01"."""
    lines = [(row.symptom, row.instrument, row.cause, row.notebook)
             for row in rows() if notebook in ("", row.notebook)]  # fmt: skip
    note = "" if lines else "No fault has been found yet."
    table(("symptom", "instrument", "cause", "notebook"), lines, "field guide", note)

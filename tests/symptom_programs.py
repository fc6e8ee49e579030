"""The programs of docs/symptoms.md: read, repaired, run, and their output written back into the page.

python tests/symptom_programs.py        # runs all programs and writes what they print
"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rank_pools import RankPools

import hpnb

PAGE = Path(__file__).parents[1] / "docs" / "symptoms.md"
_FAULT = re.compile(r"^( *)\S.*?  # fix: (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Symptom:
    """One section of the page; `preamble` is the code that all programs start with."""

    number: int
    title: str
    text: str
    preamble: str

    @property
    def program(self) -> str:
        (program,) = re.findall(r"```python\n(.*?)```", self.text, re.DOTALL)
        return program

    @property
    def repaired(self) -> str:
        """The program with the line that its comment gives instead of the fault."""
        repaired, count = _FAULT.subn(r"\1\2", self.program)
        assert count == 1, f"{self.title}: {count} lines end in # fix:"
        return repaired

    @property
    def printed(self) -> str:
        """What the page says that the program prints."""
        (printed,) = re.findall(r"```text\n(.*?)```", self.text, re.DOTALL)
        return printed


def read_symptoms() -> list[Symptom]:
    preface, *sections = re.split(r"^(?=## \d+\. )", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    (preamble,) = re.findall(r"```python\n(.*?)```", preface, re.DOTALL)
    return [
        Symptom(number, text.splitlines()[0].partition(". ")[2], text, preamble)
        for number, text in enumerate(sections, 1)
    ]


def run_program(code: str, pools: RankPools, folder: Path) -> str:
    """What `code` prints, run in `folder`. Its launches without a limit run on ranks that are there."""
    launch = hpnb.launch

    def on_shared_ranks(fn: Any, *args: Any, ranks: int, device: str, **limits: Any) -> list[Any]:
        return (
            launch(fn, *args, ranks=ranks, device=device, **limits) if limits else pools[ranks].run(fn, *args)
        )

    output = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(output):
        hpnb.launch = on_shared_ranks
        try:
            exec(compile(code, "symptom.py", "exec"), {"__name__": "__main__"})
        finally:
            hpnb.launch = launch
    return output.getvalue()


def write_outputs() -> None:
    page, pools = PAGE.read_text(encoding="utf-8"), RankPools()
    with tempfile.TemporaryDirectory() as folder:
        for symptom in read_symptoms():
            subfolders = [Path(tempfile.mkdtemp(dir=folder)) for _ in range(2)]
            printed = run_program(symptom.preamble + symptom.program, pools, subfolders[0])
            print(f"{symptom.number}. {symptom.title}\n{printed}\nrepaired:", flush=True)
            print(run_program(symptom.preamble + symptom.repaired, pools, subfolders[1]), flush=True)
            filled = symptom.text.replace(f"```text\n{symptom.printed}", f"```text\n{printed}")
            page = page.replace(symptom.text, filled)
        pools.close()
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    write_outputs()

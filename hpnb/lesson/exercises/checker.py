"""Exercise checks: run what the reader wrote against an oracle, and say what is off.

    @exercise("00.1", "a ring all-reduce", 20)
    def ring(answer):                                       # what the reader wrote
        for ranks in (2, 3, 4):                             # the cases
            yield Finding(answer(ranks) == right(ranks), f"{ranks} ranks: ...")

`check` prints the findings and never raises for what the reader wrote: an exception in it is a finding with
its own last lines, and ends the check. A stub is "not yet": a function that does nothing, or that raises
NotImplementedError (on a rank too).
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hpnb.lesson.exercises.stubs import is_blank, raised_by_stub
from hpnb.ranks import RankError
from hpnb.ranks.errors import folded, readable

_TRACEBACK_LINES = 12
_LESSON_FOLDER = str(Path(__file__).parents[1])  # frames in here are not the reader's


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; `text` is a sentence with the numbers in it."""

    ok: bool
    text: str


class WrongAnswer(Exception):
    """What was returned cannot be the answer: the check ends, and so do ranks that wait for this one."""


Verify = Callable[[Any], Iterable[Finding]]


@dataclass(frozen=True)
class Exercise:
    """What is asked of the reader.

    Attributes:
        key: notebook and number, such as "00.1".
        title: as in its heading.
        minutes: a time budget.
        verify: what the reader wrote -> findings; it may raise what that raises.
    """

    key: str
    title: str
    minutes: float
    verify: Verify


def exercise(key: str, title: str, minutes: float) -> Callable[[Verify], Exercise]:
    return lambda verify: Exercise(key, title, minutes, verify)


@dataclass(frozen=True)
class Verdict:
    """How a check ended. "not yet" is a stub, "failed" is an attempt."""

    status: Literal["passed", "failed", "not yet"]
    findings: tuple[Finding, ...] = ()

    def _ipython_display_(self) -> None:
        """Nothing: `check` has printed it."""


def check(exercise: Exercise, solution: Any) -> Verdict:
    """Verify `solution`, and print each finding and a closing line.

    Args:
        solution: the reader's function or object, or a tuple of several.

    Raises:
        KeyboardInterrupt: the reader has seen enough.
    """
    verdict = _verdict(exercise, solution)
    for finding in verdict.findings:
        mark = "✓" if finding.ok else "✗"
        print(f"{mark} " + finding.text.strip().replace("\n", "\n  "))
    if verdict.status == "passed":
        closing = "passed"
    elif verdict.status == "not yet":
        closing = f"yours to write, in about {exercise.minutes:g} minutes; then run this cell"
    else:
        off = sum(not finding.ok for finding in verdict.findings)
        closing = f"{off} of {len(verdict.findings)} off"
    print(f"Exercise {exercise.key}, {exercise.title}: {closing}")
    return verdict


def _verdict(exercise: Exercise, solution: Any) -> Verdict:
    if is_blank(solution):
        return Verdict("not yet")
    findings: list[Finding] = []
    try:
        for finding in exercise.verify(solution):
            findings.append(finding)
    except KeyboardInterrupt:  # RankInterrupt too, which is also a RankError
        raise
    except WrongAnswer as error:
        findings.append(Finding(False, str(error)))
    except (Exception, SystemExit) as error:
        if raised_by_stub(error):
            return Verdict("not yet")
        findings.append(Finding(False, _describe(error)))
    if not findings:
        raise ValueError(f"exercise {exercise.key} verified nothing, so nothing can pass it")
    passed = all(finding.ok for finding in findings)
    return Verdict("passed" if passed else "failed", tuple(findings))


# --- what the reader's code raised -----------------------------------------------------------------


def _describe(error: BaseException) -> str:
    """What was raised, and the last lines of its traceback without the frames of this package."""
    if isinstance(error, RankError):
        return f"{error.summary}\n{_last_lines(folded(error.traceback))}"
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_LESSON_FOLDER):
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames, chain=False))
    summary = traceback.format_exception_only(type(error), error)[-1].strip()
    return f"it raised {summary}\n{_last_lines(folded(readable(text)))}"


def _last_lines(text: str) -> str:
    lines = [line for line in text.rstrip().splitlines() if not re.match(r"Traceback \(most", line)]
    return "\n".join(["  ..."] * (len(lines) > _TRACEBACK_LINES) + lines[-_TRACEBACK_LINES:])

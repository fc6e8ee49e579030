"""One operation of a pipeline, and the error of a schedule that cannot be run.

    F   forward                          needs the activation of the stage before
    I   gradient of the stage's input    needs the gradient from the stage after, and F of this stage
    W   gradient of its weights          needs I of this stage
    B   both at once

An action is written stage-op-microbatch: 2F0 is the forward of microbatch 0 on stage 2.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast

Op = Literal["F", "I", "W", "B"]
_WRITTEN = re.compile(r"(\d+)([FIWB])(\d+)")


@dataclass(frozen=True, slots=True)
class Action:
    """One operation of a stage on one microbatch."""

    stage: int
    op: Op
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"

    @classmethod
    def parse(cls, written: str) -> Action:
        """ "2F0" -> Action(2, "F", 0).

        Raises:
            ValueError: anything else.
        """
        match = _WRITTEN.fullmatch(written.strip())
        if match is None:
            raise ValueError(
                f"{written!r} is no action; write stage, F, I, W or B, and microbatch, such as 2F0"
            )
        return cls(int(match[1]), cast(Op, match[2]), int(match[3]))


class ScheduleError(ValueError):
    """A schedule that cannot be run: at `.rank`, in `.step` of its list, for `.reason`; `.grid` shows it."""

    def __init__(self, rank: int, step: int, reason: str, grid: str = "") -> None:
        super().__init__(f"rank {rank}, step {step}: {reason}" + (f"\n{grid}" if grid else ""))
        self.rank, self.step, self.reason, self.grid = rank, step, reason, grid

    def __reduce__(self) -> tuple[type[ScheduleError], tuple[object, ...]]:
        return ScheduleError, (self.rank, self.step, self.reason, self.grid)

"""The knobs of an explorer: plain data that makes its own widget.

A Slider has stops, and its widget offers just these. A widget over a range would round the first value to a
stop of its own, and the picture would not be the one at the value that the page names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hpnb.lesson.tables import number


@dataclass(frozen=True)
class Slider:
    """A number from `low` to `high`; an integer if low, high and value are.

    Args:
        value: where it starts; always a stop, as low and high are.
        step: between stops, by default 1. On a logarithmic slider it is of the exponent of 10, by default
            0.1: 1, 1.3, 1.6, 2, 2.5, 3.2, 4, ...
        log: stops at equal ratios.
        unit: of the numbers, for `lesson.number`.
    """

    low: float
    high: float
    value: float
    step: float | None = None
    log: bool = False
    unit: str = ""

    @cached_property
    def stops(self) -> tuple[float, ...]:
        """Where it can stand, in order."""
        if self.log:
            step = self.step or 0.1
            # Counted from 1, so that powers of ten are stops; two digits tell those in between apart.
            first = math.ceil(math.log10(self.low) / step - 1e-9)
            last = math.floor(math.log10(self.high) / step + 1e-9)
            digits = 2 if self.step is None else 6
            stops = [float(f"{10 ** (k * step):.{digits}g}") for k in range(first, last + 1)]
        else:
            step = self.step or 1
            count = int((self.high - self.low) / step + 1e-9)
            stops = [float(f"{self.low + k * step:.10g}") for k in range(count + 1)]
        ends = (self.low, self.value, self.high)
        if all(isinstance(value, int) for value in ends):
            stops = [round(stop) for stop in stops]
        inside = {stop for stop in stops if self.low <= stop <= self.high}
        return tuple(sorted(inside | {*ends}))

    def control(self, name: str) -> Any:
        import ipywidgets

        options = [(number(stop, self.unit), stop) for stop in self.stops]
        return ipywidgets.SelectionSlider(options=options, value=self.value, **_style(name))


@dataclass(frozen=True)
class Choice:
    """One of `options`; `value` is where it starts."""

    options: Sequence[Any]
    value: Any

    def control(self, name: str) -> Any:
        import ipywidgets

        options = [(str(option), option) for option in self.options]
        return ipywidgets.Dropdown(options=options, value=self.value, **_style(name))


Knobs = Mapping[str, Slider | Choice]


def _style(name: str) -> dict[str, Any]:
    style, layout = {"description_width": "initial"}, {"width": "330px"}
    return {"description": name.replace("_", " "), "style": style, "layout": layout}

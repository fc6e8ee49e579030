"""The knobs of an explorer: plain data that makes its own widget.

A Slider has stops, and its widget offers just these. A widget over a range would round the first value to a
stop of its own, and the picture would not be the one at the value that the page names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hpnb.lesson.tables import number

MAX_STOPS = 1000


@dataclass(frozen=True)
class Slider:
    """A number from `low` to `high`; an integer if low, high and value are (and step, where it is not log).

    Args:
        value: where it starts; always a stop, as low and high are.
        step: between stops, by default 1 for integers and else a hundredth of the way. On a logarithmic
            slider it is of the exponent of 10, by default 0.1: 1, 1.3, 1.6, 2, 2.5, 3.2, 4, ...
        log: stops at equal ratios.
        unit: of the numbers, for `lesson.number`.
    """

    low: float
    high: float
    value: float
    step: float | None = None
    log: bool = False
    unit: str = ""

    def __post_init__(self) -> None:
        if not self.low < self.high or (self.log and self.low <= 0):
            above = ", and above 0 to be logarithmic" if self.log else ""
            raise ValueError(f"Slider({self.low}, {self.high}): low must be less than high{above}")
        if not (self._step > 0 and (self._ends[1] - self._ends[0]) / self._step <= MAX_STOPS):
            raise ValueError(f"Slider step={self._step:g} must be above 0 and give at most {MAX_STOPS} stops")
        self.nearest("a Slider", self.value)

    @property
    def is_integer(self) -> bool:
        steps = () if self.step is None or self.log else (self.step,)
        return all(isinstance(value, int) for value in (self.low, self.high, self.value, *steps))

    @property
    def _ends(self) -> tuple[float, float]:
        return (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)

    @property
    def _step(self) -> float:
        if self.step is not None:
            return self.step
        return 0.1 if self.log else 1 if self.is_integer else (self.high - self.low) / 100

    @cached_property
    def stops(self) -> tuple[float, ...]:
        """Where it can stand, in order."""
        (low, high), step = self._ends, self._step
        if self.log:
            # Counted from 1, so that powers of ten are stops; two digits tell those in between apart.
            first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
            digits = 2 if self.step is None else 6
            stops = [float(f"{10 ** (k * step):.{digits}g}") for k in range(first, last + 1)]
        else:
            stops = [float(f"{low + k * step:.10g}") for k in range(int((high - low) / step + 1e-9) + 1)]
        if self.is_integer:
            stops = [round(stop) for stop in stops]
        inside = {stop for stop in stops if self.low <= stop <= self.high}
        return tuple(sorted(inside | {self.low, self.value, self.high}))

    def nearest(self, name: str, value: Any) -> float:
        """The stop that is nearest to `value`. Raises ValueError if it does not go that far."""
        if isinstance(value, (bool, str)) or not self.low <= value <= self.high:
            ends = f"{number(self.low, self.unit)} to {number(self.high, self.unit)}"
            raise ValueError(f"{name} goes from {ends}, not to {value!r}")
        scale: Callable[[float], float] = math.log if self.log else float
        return min(self.stops, key=lambda stop: abs(scale(stop) - scale(value)))

    def control(self, name: str) -> Any:
        import ipywidgets

        options = [(number(stop, self.unit), stop) for stop in self.stops]
        return ipywidgets.SelectionSlider(options=options, value=self.value, **_style(name))


@dataclass(frozen=True)
class Choice:
    """One of `options`; `value` is where it starts, by default the first."""

    options: Sequence[Any]
    value: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", tuple(self.options))
        if not self.options:
            raise ValueError("a Choice needs options")
        if self.value is None:
            object.__setattr__(self, "value", self.options[0])
        self.nearest("a Choice", self.value)

    def nearest(self, name: str, value: Any) -> Any:
        """`value` itself. Raises ValueError if it is no option."""
        if value not in self.options:
            raise ValueError(f"{name} is one of {', '.join(map(str, self.options))}, not {value!r}")
        return value

    def control(self, name: str) -> Any:
        import ipywidgets

        options = [(str(option), option) for option in self.options]
        return ipywidgets.Dropdown(options=options, value=self.value, **_style(name))


Knobs = Mapping[str, Slider | Choice]


def _style(name: str) -> dict[str, Any]:
    style, layout = {"description_width": "initial"}, {"width": "330px"}
    return {"description": name.replace("_", " "), "style": style, "layout": layout}

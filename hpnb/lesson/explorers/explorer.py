"""A formula with knobs: move one, and the picture, its readings and the challenge follow.

    Explorer({"p": Slider(2, 8, 4), "schedule": Choice(["gpipe", "1f1b"], "gpipe")}, readings,
             Challenge("bubble under 10 %", lambda at: at["bubble (%)"] < 10), answer={"schedule": "1f1b"},
             trade=("p", "bubble (%)")).display()

`readings(**values)` evaluates the formula at one setting of the knobs. It returns `({name: value}, draw)`,
and `draw(fast)` makes the picture with its alt text. While a knob moves the picture is coarse (fast=True);
when the knob rests, the full one follows. A page without widgets shows the opening setting, a trade-off and
an answer to the challenge, one above the other.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from hpnb.lesson.explorers.knobs import Knobs
from hpnb.lesson.tables import cell_text, display, split_unit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Picture = tuple["Figure", str]  # with its alt text
Draw = Callable[[bool], Picture]  # of fast
Evaluation = tuple[Mapping[str, Any], Draw]  # readings, and how to draw them
REST_SECONDS = 0.25  # without a move, after which the full picture is drawn
_SCREEN_READER_ONLY = "position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)"


@dataclass(frozen=True)
class Challenge:
    """What to reach with the knobs. `met` judges one mapping of {knob: value} and {reading: value}."""

    text: str
    met: Callable[[Mapping[str, Any]], bool]


class Explorer:
    """Controls, a picture and two lines of text as one widget.

    Args:
        knobs: {argument of `readings`: Slider or Choice}.
        readings: as above; units stand in the names, "bubble (%)". Under 100 ms with a fast picture.
        challenge: judged at every setting.
        answer: {knob: value} of a setting that meets the challenge; other knobs as they open.
        trade: (knob, reading) that show what the challenge trades.
        trade_names: of its two curves: the other knobs as they open, and as the answer has them.
        goal: of the challenge, for that reading; its axis is logarithmic if values are far apart.
        trade_title: of that picture, where "reading over knob" is not enough.
        trade_looks: names of all curves of the main picture, so that the same name looks the same in both.

    Attributes:
        readings: what was read at the present setting.
        solved: whether the challenge has been met at some setting.
        controls: {knob: its widget}.
        image, reading, status: the widgets of the picture, its readings and the challenge.
        widget: all of them.

    Raises:
        ValueError: the formula cannot be evaluated at the first setting.
    """

    def __init__(
        self,
        knobs: Knobs,
        readings: Callable[..., Evaluation],
        challenge: Challenge,
        answer: Mapping[str, Any],
        trade: tuple[str, str],
        trade_names: tuple[str, str] = ("as it opens", "with the answer's other knobs"),
        goal: float | None = None,
        trade_title: str = "",
        trade_looks: Sequence[str] = (),
    ) -> None:
        import ipywidgets

        self.readings: Mapping[str, Any] = {}
        self.solved = False
        self.challenge, self.answer, self.trade = challenge, answer, trade
        self._trade_names, self._goal = trade_names, goal
        self._trade_title, self._trade_looks = trade_title, trade_looks
        self._evaluate, self._knobs = readings, knobs
        self._later: asyncio.TimerHandle | None = None
        self._lock = threading.Lock()  # newer kernels handle widgets in a thread of their own
        self.controls = {name: knob.control(name) for name, knob in knobs.items()}
        self.image = ipywidgets.Image(format="png", layout={"max_width": "100%"})
        self.reading, self.status = ipywidgets.HTML(), ipywidgets.HTML()
        controls = ipywidgets.Box(list(self.controls.values()), layout={"flex_flow": "row wrap"})
        self.widget = ipywidgets.VBox([controls, self.image, self.reading, self.status])
        self._first_picture = self._redraw_or_raise(fast=False)
        for control in self.controls.values():
            control.observe(self._moved, names="value")

    def display(self) -> Explorer:
        """Show the widget in a notebook, and the figure for pages without widgets."""
        from hpnb import plot

        names = ", ".join(name.replace("_", " ") for name in self._knobs)
        words = f"An explorer; its knobs are {names}. Run the notebook to move them."
        if display({**self.widget._repr_mimebundle_(), "text/plain": words}):
            plot.show(*self.static_figure())
        return self

    def static_figure(self) -> Picture:
        """The opening setting, the trade-off and the answer in one figure, with its alt text."""
        from hpnb.lesson.explorers import small_multiples

        opening, alt = self._first_picture
        start = {name: knob.value for name, knob in self._knobs.items()}
        setting = {**start, **self.answer}
        answer, answer_alt = self._evaluate(**setting)[1](False)
        moved = ", ".join(f"{name.replace('_', ' ')} {cell_text(v)}" for name, v in self.answer.items())
        knob, reading = self.trade
        places = dict(zip(self._trade_names, (start, setting), strict=True))
        middle = small_multiples.trade_off(
            self.read, knob, self._knobs[knob], reading, places, self._goal,
            self._trade_title, self._trade_looks,
        )  # fmt: skip
        pictures = [
            ("It opens here", opening),
            (f"What changes with {knob.replace('_', ' ')}", middle),
            (f"An answer to the challenge: {moved}", answer),
        ]
        words = f"As it opens: {alt} Answer, {moved}: {answer_alt}"
        return small_multiples.stack(pictures), words

    def read(self, **values: Any) -> dict[str, Any]:
        """{knob: value} and {reading: value} with some knobs elsewhere. Nothing is drawn, no knob moves."""
        setting = {**self.values, **values}
        return {**setting, **self._evaluate(**setting)[0]}

    @property
    def values(self) -> dict[str, Any]:
        """{knob: where it stands}."""
        return {name: control.value for name, control in self.controls.items()}

    def _ipython_display_(self) -> None:
        """Nothing: `display` has shown it."""

    def _moved(self, _: object) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # without an event loop nothing can be drawn later
            self._redraw(fast=False)
            return
        if self._later is not None:
            self._later.cancel()
        self._redraw(fast=True)
        self._later = loop.call_later(REST_SECONDS, self._redraw, False)

    def _redraw(self, fast: bool) -> None:
        """Draw; an error becomes one sentence under the last good picture."""
        try:
            self._redraw_or_raise(fast)
        except Exception as error:
            message = str(error).strip().partition("\n")[0]
            if not isinstance(error, ValueError) or not message:
                message = f"{type(error).__name__}: {message}"
            self.reading.value = f"<div>Not at this setting: {escape(message)}</div>"
            self.status.value = self._challenge_line(met=False)

    def _redraw_or_raise(self, fast: bool) -> Picture:
        from hpnb import plot

        with self._lock:
            readings, draw = self._evaluate(**self.values)
            figure, alt = draw(fast)
            met = self.challenge.met({**self.values, **readings})
            self.readings = readings
            self.solved = self.solved or met
            self.image.layout.width = f"{round(figure.get_figwidth() * 100)}px"  # whatever its resolution
            self.image.value = plot.png(figure, scale=1.0, small=False) if fast else plot.png(figure)
            self.reading.value = _reading_line(self.readings, alt)
            self.status.value = self._challenge_line(met)
        return figure, alt

    def _challenge_line(self, met: bool) -> str:
        before = " (but met before)" if self.solved and not met else ""
        text = escape(self.challenge.text.strip().removesuffix("."))
        return f"<div>Challenge: {text}: <b>{'met' if met else 'open'}</b>{before}</div>"


def _reading_line(readings: Mapping[str, Any], alt: str) -> str:
    """Readings to see, and the alt text to hear: an Image widget has no place for it."""
    parts = []
    for name, value in readings.items():
        label, unit = split_unit(name)
        parts.append(f"{escape(label)} <b>{escape(cell_text(value, unit))}</b>")
    return f'<div>{" · ".join(parts)}<span style="{_SCREEN_READER_ONLY}">{escape(alt)}</span></div>'

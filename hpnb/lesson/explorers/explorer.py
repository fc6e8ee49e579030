"""A formula with knobs: move one, and the picture, its readings and the challenge follow.

    lesson.explorer(draw, {"p": Slider(2, 8, 4), "schedule": Choice(["gpipe", "1f1b"])},
                    Challenge("bubble under 10 %", lambda readings: readings["bubble (%)"] < 10))

`draw(**values, fast)` gives (figure, alt text, readings). While a knob moves it is called with fast=True and
its picture is coarse; when the knob rests, the full one follows. A page that cannot move shows the figure
at the first setting beneath.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from hpnb.lesson.explorers.knobs import Challenge, Choice, Slider
from hpnb.lesson.tables import number, split_unit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draw = Callable[..., tuple["Figure", str, Mapping[str, Any]]]
REST = 0.25  # seconds without a move after which the full picture is drawn
_UNSEEN = "position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)"


class Explorer:
    """Controls, a picture and two lines of text as one widget.

    Attributes:
        readings: what `draw` read at the present setting.
        solved: whether the challenge has been met at some setting.
        widget: all of it, as ipywidgets.
    """

    def __init__(
        self, draw: Draw, knobs: Mapping[str, Slider | Choice], challenge: Challenge | None = None
    ) -> None:
        import ipywidgets

        self.readings: dict[str, Any] = {}
        self.solved = False
        self._draw, self._knobs, self._challenge = draw, dict(knobs), challenge
        self._quiet, self._later = False, None  # type: bool, asyncio.TimerHandle | None
        self._lock = threading.Lock()  # newer kernels handle widgets in a thread of their own
        self._controls = {name: knob.control(name) for name, knob in self._knobs.items()}
        self._image = ipywidgets.Image(format="png", layout={"max_width": "100%"})
        self._reading, self._status = ipywidgets.HTML(), ipywidgets.HTML()
        controls = ipywidgets.Box(list(self._controls.values()), layout={"flex_flow": "row wrap"})
        lines = [self._reading] + [self._status] * (challenge is not None)
        self.widget = ipywidgets.VBox([controls, self._image, *lines])
        self.first = self._redraw_or_raise(fast=False)  # an error at the first setting is the author's
        for control in self._controls.values():
            control.observe(self._moved, names="value")

    def set(self, **values: Any) -> None:
        """Move knobs as a reader would, each to its nearest stop, and draw the full picture once.

        Raises:
            ValueError: there is no such knob, or it does not go there.
        """
        stops = {}
        for name, value in values.items():
            if name not in self._knobs:
                raise ValueError(f"no knob {name!r}; there are {', '.join(self._knobs)}")
            stops[name] = self._knobs[name].nearest(name, value)
        self._quiet = True
        try:
            for name, value in stops.items():
                self._controls[name].value = value
        finally:
            self._quiet = False
        self._redraw(fast=False)

    @property
    def values(self) -> dict[str, Any]:
        """{knob: where it stands}."""
        return {name: control.value for name, control in self._controls.items()}

    @property
    def png(self) -> bytes:
        """The picture at hand."""
        return bytes(self._image.value)

    @property
    def reading(self) -> str:
        """The line under the picture, as HTML."""
        return str(self._reading.value)

    @property
    def status(self) -> str:
        """The line of the challenge, as HTML; empty without one."""
        return str(self._status.value)

    def _ipython_display_(self) -> None:
        """Nothing: `explorer` has shown it."""

    def _moved(self, _: object) -> None:
        if self._quiet:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # no loop to come back from
            self._redraw(fast=False)
            return
        if self._later is not None:
            self._later.cancel()
        self._redraw(fast=True)
        self._later = loop.call_later(REST, self._redraw, False)

    def _redraw(self, fast: bool) -> None:
        """Draw; what goes wrong is one sentence under the last good picture."""
        try:
            self._redraw_or_raise(fast)
        except Exception as error:
            words = str(error).strip().partition("\n")[0]
            if not isinstance(error, ValueError) or not words:
                words = f"{type(error).__name__}: {words}"
            self._reading.value = f"<div>Not at this setting: {escape(words)}</div>"
            if self._challenge is not None:
                self._status.value = self._judged("not yet")

    def _redraw_or_raise(self, fast: bool) -> tuple[Figure, str]:
        from hpnb import plot

        with self._lock:
            figure, alt, readings = self._draw(**self.values, fast=fast)
            png = plot.png(figure, scale=1.0, small=False) if fast else plot.png(figure)
            met = self._challenge is not None and bool(self._challenge.met(dict(readings)))
            self.readings = dict(readings)
            self.solved = self.solved or met
            self._image.layout.width = f"{round(figure.get_figwidth() * 100)}px"  # whatever its resolution
            self._image.value = png
            self._reading.value = _line(self.readings, alt)
            if self._challenge is not None:
                self._status.value = self._judged("met" if met else "not yet")
        return figure, alt

    def _judged(self, status: str) -> str:
        text = self._challenge.text.strip().removesuffix(".") if self._challenge is not None else ""
        before = " (but met before)" if status != "met" and self.solved else ""
        return f"<div>Challenge: {escape(text)}: <b>{status}</b>{before}</div>"


def explorer(
    draw: Draw,
    knobs: Mapping[str, Slider | Choice],
    challenge: Challenge | None = None,
    static: bool = True,
) -> Explorer:
    """Display knobs over a picture that follows them.

    Args:
        draw: draw(**values, fast) -> (figure, alt text, {reading: value}); units stand in the names of
            readings, "bubble (%)". Under 100 ms when fast.
        knobs: {argument of draw: Slider or Choice}.
        challenge: judged at every setting.
        static: also show the figure at the first setting, for pages that cannot move.
    """
    shown = Explorer(draw, knobs, challenge)
    ipython = sys.modules.get("IPython")
    if ipython is not None and ipython.get_ipython() is not None:
        from hpnb import plot

        # In place of the widget's own words, which list its parts: a page without widgets shows these.
        view = dict(shown.widget._repr_mimebundle_())
        names = ", ".join(name.replace("_", " ") for name in knobs)
        view["text/plain"] = f"An explorer; its knobs are {names}. Run the notebook to move them."
        ipython.display.display(view, raw=True)
        if static:
            plot.show(*shown.first)
    return shown


def _line(readings: Mapping[str, Any], alt: str) -> str:
    """Readings to see, and the alt text to hear: an Image widget has no place for it."""
    parts = []
    for name, value in readings.items():
        if name.startswith("_"):  # for the challenge, not for the eye
            continue
        label, unit = split_unit(name)
        text = value if isinstance(value, str) else ("no", "yes")[value] if isinstance(value, bool) else (
            number(value, unit)
        )  # fmt: skip
        parts.append(f"{escape(label)} <b>{escape(text)}</b>")
    return f'<div>{" · ".join(parts)}<span style="{_UNSEEN}">{escape(alt)}</span></div>'

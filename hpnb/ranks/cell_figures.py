"""Figures of a `%%ranks` cell: one rank draws them, and the notebook shows them as pictures, as its own.

`figure_backend.py` makes plt.show() call `keep_open_figures`, which also runs when a cell ends, as IPython's
own backend does. A figure that is the value of the last line is kept by `keep_value`.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any

_BACKEND = "module://hpnb.ranks.figure_backend"


class _Cell:
    draws = False  # whether this rank draws; the others close their figures
    chose_backend = False
    pictures: tuple[bytes, ...] = ()


def begin_cell(draws: bool) -> None:
    """A cell begins on this rank, which `draws` its figures, or closes them."""
    _Cell.draws, _Cell.pictures = draws, ()
    os.environ["MPLBACKEND"] = _BACKEND  # the caller's may need a notebook, or a screen
    if not _Cell.chose_backend and (matplotlib := sys.modules.get("matplotlib")) is not None:
        matplotlib.use(_BACKEND)
    _Cell.chose_backend = "matplotlib" in sys.modules  # from now on it is the cells' choice


def keep_open_figures(*_: Any, **__: Any) -> None:
    """Draw all figures of pyplot that are open, and close them."""
    if (pyplot := sys.modules.get("matplotlib.pyplot")) is None:
        return
    for number in pyplot.get_fignums():
        _draw(pyplot.figure(number))
    pyplot.close("all")


def keep_value(value: object) -> bool:
    """Whether `value` is a figure and this rank draws, which it then has done."""
    figures = sys.modules.get("matplotlib.figure")
    if not _Cell.draws or figures is None or not isinstance(value, figures.Figure):
        return False
    _draw(value)
    if (pyplot := sys.modules.get("matplotlib.pyplot")) is not None:
        pyplot.close(value)  # or the end of the cell would draw it once more
    return True


def take_pictures() -> tuple[bytes, ...]:
    """The PNGs that the cell has drawn so far."""
    pictures, _Cell.pictures = _Cell.pictures, ()
    return pictures


def _draw(figure: Any) -> None:
    if _Cell.draws:
        png = io.BytesIO()
        figure.savefig(png, format="png", bbox_inches="tight")
        _Cell.pictures += (png.getvalue(),)

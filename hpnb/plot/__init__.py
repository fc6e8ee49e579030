"""Figures over records, in one visual grammar; every function returns a matplotlib Figure.

A notebook shows the figure that is the last line of a cell; `show(fig, alt)` shows one from any other line.

Two builders draw most of them: `hpnb.plot.bars` (lying bars made of parts) and `hpnb.plot.curves` (series
over x). Here is what several pages share; a figure of one page lies in `hpnb.lesson.figures`.

`hpnb.plot.timeline` is the function, although a submodule has the same name: a name imported from a submodule
replaces the submodule that importing it had bound here.
"""

from hpnb.plot.canvas import new_figure
from hpnb.plot.compare import compare
from hpnb.plot.grammar import AXIS, CATEGORY, STYLE, OpStyle
from hpnb.plot.memory import memory
from hpnb.plot.mesh import mesh
from hpnb.plot.show import png, show
from hpnb.plot.standings import standings
from hpnb.plot.timeline import timeline
from hpnb.plot.training import by_layout, drift, expert_loads

__all__ = [
    "AXIS",
    "CATEGORY",
    "STYLE",
    "OpStyle",
    "by_layout",
    "compare",
    "drift",
    "expert_loads",
    "memory",
    "mesh",
    "new_figure",
    "png",
    "show",
    "standings",
    "timeline",
]

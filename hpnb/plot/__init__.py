"""Figures over records, in one visual grammar; every function returns a matplotlib Figure.

`hpnb.plot.timeline` is the function, though a submodule has the same name: a name imported from a
submodule replaces the submodule that importing it had bound here.
"""

from hpnb.plot.canvas import new_figure
from hpnb.plot.cheapest_mode import cheapest_mode
from hpnb.plot.compare import compare
from hpnb.plot.costs import costs
from hpnb.plot.drift import drift
from hpnb.plot.exposure import exposure
from hpnb.plot.gradient_cliff import cliff, gradient_cliff
from hpnb.plot.grammar import AXIS, CATEGORY, STYLE, OpStyle
from hpnb.plot.grid_steps import grid_steps
from hpnb.plot.memory import memory
from hpnb.plot.mesh import mesh
from hpnb.plot.notation import notation
from hpnb.plot.show import png, show
from hpnb.plot.states import states
from hpnb.plot.tensors import tensors
from hpnb.plot.timeline import timeline
from hpnb.plot.u_curve import u_curve
from hpnb.plot.waits import waits

__all__ = [
    "AXIS",
    "CATEGORY",
    "STYLE",
    "OpStyle",
    "cheapest_mode",
    "cliff",
    "compare",
    "costs",
    "drift",
    "exposure",
    "gradient_cliff",
    "grid_steps",
    "memory",
    "mesh",
    "new_figure",
    "notation",
    "png",
    "show",
    "states",
    "tensors",
    "timeline",
    "u_curve",
    "waits",
]

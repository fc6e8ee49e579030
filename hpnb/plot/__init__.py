"""Figures over records, in one visual grammar; every function returns a matplotlib Figure.

`hpnb.plot.timeline` is the function, though a submodule has the same name: a name imported from a
submodule replaces the submodule that importing it had bound here.
"""

from hpnb.plot.canvas import new_figure
from hpnb.plot.compare import compare
from hpnb.plot.costs import costs
from hpnb.plot.drift import drift
from hpnb.plot.exposure import exposure
from hpnb.plot.grammar import AXIS, CATEGORY, STYLE, OpStyle
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
    "compare",
    "costs",
    "drift",
    "exposure",
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

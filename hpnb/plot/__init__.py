"""Figures over records, in one visual grammar; every function returns a matplotlib Figure.

`hpnb.plot.timeline` is the function, though a submodule has the same name: a name imported from a
submodule replaces the submodule that importing it had bound here.
"""

from hpnb.plot.atlas import atlas
from hpnb.plot.batch_wall import batch_wall
from hpnb.plot.by_layout import by_layout
from hpnb.plot.calibration import calibration
from hpnb.plot.canvas import new_figure
from hpnb.plot.cheapest_mode import cheapest_mode
from hpnb.plot.choices import choices, frontier_of
from hpnb.plot.compare import compare
from hpnb.plot.costs import costs
from hpnb.plot.drift import drift
from hpnb.plot.dropped import Masks, dropped
from hpnb.plot.exposure import exposure
from hpnb.plot.frontier import frontier
from hpnb.plot.goodput import goodput
from hpnb.plot.gradient_cliff import cliff, gradient_cliff
from hpnb.plot.grammar import AXIS, CATEGORY, STYLE, OpStyle
from hpnb.plot.grid_steps import grid_steps
from hpnb.plot.last_cut import last_cut
from hpnb.plot.layout_map import layout_map
from hpnb.plot.memory import memory
from hpnb.plot.mesh import mesh
from hpnb.plot.notation import notation
from hpnb.plot.rivers import rivers
from hpnb.plot.show import png, show
from hpnb.plot.skyline import Built, skyline
from hpnb.plot.slow_wire import slow_wire
from hpnb.plot.stacked import stacked
from hpnb.plot.standings import standings
from hpnb.plot.states import states
from hpnb.plot.step_bill import step_bill
from hpnb.plot.tensors import tensors
from hpnb.plot.timeline import timeline
from hpnb.plot.u_curve import u_curve
from hpnb.plot.vocabulary import vocabulary
from hpnb.plot.waits import waits
from hpnb.plot.waterfall import waterfall

__all__ = [
    "AXIS",
    "CATEGORY",
    "STYLE",
    "Built",
    "Masks",
    "OpStyle",
    "atlas",
    "batch_wall",
    "by_layout",
    "calibration",
    "cheapest_mode",
    "choices",
    "cliff",
    "compare",
    "costs",
    "drift",
    "dropped",
    "exposure",
    "frontier",
    "frontier_of",
    "goodput",
    "gradient_cliff",
    "grid_steps",
    "last_cut",
    "layout_map",
    "memory",
    "mesh",
    "new_figure",
    "notation",
    "png",
    "rivers",
    "show",
    "skyline",
    "slow_wire",
    "stacked",
    "standings",
    "states",
    "step_bill",
    "tensors",
    "timeline",
    "u_curve",
    "vocabulary",
    "waits",
    "waterfall",
]

"""The explorer of notebook 04: a layout and the order of its axes on hosts, its traffic and its step."""

from __future__ import annotations

from itertools import permutations
from typing import TYPE_CHECKING, Any

from hpnb.lesson.explorers.explorer import Explorer, explorer
from hpnb.lesson.explorers.knobs import Challenge, Choice
from hpnb.lesson.programs import host_traffic
from hpnb.lesson.tables import number
from hpnb.mesh import AXES, Layout
from hpnb.theory import LINKS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ORDERS = tuple(" > ".join(order) for order in permutations(AXES))
MOST = 64  # ranks: more squares could not be told apart
_LAYERS, _HIDDEN, _TOKENS, _MICROBATCHES, _RATE = 32, 4096, 500_000, 16, 400e12


def layouts_on_hosts() -> Explorer:
    """Notebook 04: which axis crosses a host's border, by sizes, order, host and both links.

    A transformer of 32 blocks of 4,096 (6.4e9 parameters), 500,000 tokens a step, 16 microbatches where there
    is a pipeline, 400 TFLOP/s a rank; `host_traffic.Job` says how a step is counted.
    """
    from hpnb import plot

    def draw(
        dp: int, pp: int, tp: int, order: str, host: int, inside: str, between: str, fast: bool
    ) -> tuple[Figure, str, dict[str, Any]]:
        layout = Layout(dp, pp, tp, tuple(order.split(" > ")))
        if not 2 <= layout.world_size <= MOST:
            raise ValueError(f"{dp} x {pp} x {tp} are {layout.world_size} ranks; 2 to {MOST} can be drawn")
        job = host_traffic.Job(
            _LAYERS, _HIDDEN, _TOKENS, _MICROBATCHES, _RATE, host, LINKS[inside], LINKS[between]
        )
        sent, parts = job.sent(layout), job.seconds(layout)
        usual = Layout(dp, pp, tp)
        there = host_traffic.along(layout, sent)
        names = {
            f"yours: {order}": there,
            f"the default: {' > '.join(AXES)}": host_traffic.along(usual, sent),
        }
        step, over = sum(parts.values()), host_traffic.crossing(there, host)
        figure = plot.atlas(
            names,
            host,
            parts,
            title=f"simulated · dp {dp} x pp {pp} x tp {tp}, {layout.world_size} ranks in hosts of {host}; "
            f"the bar is of {order}",
            text=not fast,
        )
        alt = (
            f"Senders by receivers for dp {dp} x pp {pp} x tp {tp} nested {order}, beside the default order, "
            f"in hosts of {host}; {number(over, 'B')} cross a border, and a step takes {number(step, 's')}."
        )
        readings = {
            "step (s)": step,
            "over computing": step / parts["compute"],
            "over the border, mean of a rank (B)": over / layout.world_size,
            "states (B)": job.states(layout),
            "_as_asked": layout.world_size == 32
            and host == 8
            and (inside, between) == ("NVLink 4", "Ethernet 100 Gb"),
        }
        return figure, alt, readings

    return explorer(
        draw,
        {
            "dp": Choice((1, 2, 4, 8, 16, 32), 4),
            "pp": Choice((1, 2, 4, 8, 16), 2),
            "tp": Choice((1, 2, 4, 8, 16), 4),
            "order": Choice(ORDERS, "tp > pp > dp"),  # opens on tp across the border
            "host": Choice((1, 2, 4, 8, 16), 8),
            "inside": Choice(tuple(LINKS), "NVLink 4"),
            "between": Choice(tuple(LINKS), "Ethernet 100 Gb"),
        },
        Challenge(
            "32 ranks in hosts of 8, NVLink 4 inside and Ethernet 100 Gb between, at most 16 GB of states on "
            "a rank: a step of at most 1.3 times its computing.",
            lambda read: (
                bool(read["_as_asked"]) and read["states (B)"] <= 16e9 and read["over computing"] <= 1.3
            ),
        ),
    )

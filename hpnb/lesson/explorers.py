"""The explorers of the series: a formula, its knobs, and a challenge. One function a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpnb.lesson.explorer import Explorer, explorer
from hpnb.lesson.knobs import Challenge, Choice, Slider
from hpnb.lesson.tables import number
from hpnb.theory import ALGORITHMS, Wire, cheapest, seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SIZES = tuple(10 ** (k / 4) for k in range(8, 37))  # 100 B to 1 GB


def all_reduce_cost() -> Explorer:
    """Notebook 00: how long an all-reduce takes, by ranks, bytes, latency, bandwidth and algorithm."""
    from hpnb import plot

    def draw(
        ranks: int, kilobytes: float, latency: float, bandwidth: float, algorithm: str, fast: bool
    ) -> tuple[Figure, str, dict[str, Any]]:
        wire = Wire(latency * 1e-6, bandwidth * 1e9)
        able = [a for a in ALGORITHMS if a != "halving-doubling" or ranks & (ranks - 1) == 0]
        curves = {a: [seconds("all_reduce", n, ranks, wire, a) for n in _SIZES] for a in able}
        took = seconds("all_reduce", kilobytes * 1e3, ranks, wire, algorithm)
        best = cheapest("all_reduce", kilobytes * 1e3, ranks, wire)
        figure = plot.costs(
            [kilobytes * 1e3],
            [took],
            more={a: (_SIZES, times) for a, times in curves.items()},
            title=f"simulated · all-reduce over {ranks} ranks, {latency:.3g} µs, {bandwidth:.3g} GB/s",
            label=f"{algorithm}, {number(kilobytes * 1e3, 'B')}",
            text=not fast,
        )
        alt = (
            f"Seconds against bytes of an all-reduce over {ranks} ranks, one line for each of "
            f"{', '.join(able)}; at {number(kilobytes * 1e3, 'B')} {algorithm} takes {number(took, 's')}."
        )
        readings = {
            "time (s)": took,
            "fastest": best,
            "of it latency (%)": 100 * seconds("all_reduce", 0.0, ranks, wire, algorithm) / took,
            "_as_asked": ranks == 64 and 90 <= kilobytes <= 110 and latency >= 10 and bandwidth <= 12.5,
        }
        return figure, alt, readings

    return explorer(
        draw,
        {
            "ranks": Slider(2, 64, 8, 1),
            "kilobytes": Slider(0.1, 1e6, 100.0, log=True, unit="kB"),
            "latency": Slider(1.0, 100.0, 10.0, log=True, unit="µs"),
            "bandwidth": Slider(0.1, 500.0, 12.5, log=True, unit="GB/s"),
            "algorithm": Choice(ALGORITHMS, "ring"),
        },
        Challenge(
            "64 ranks, 100 kB, 10 µs and 12.5 GB/s or worse: under 200 µs.",
            lambda read: bool(read["_as_asked"]) and read["time (s)"] < 200e-6,
        ),
    )

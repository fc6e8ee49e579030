"""The explorer of notebook 00: how long an all-reduce takes, by ranks, bytes, latency and bandwidth."""

from __future__ import annotations

from hpnb.lesson.explorers.explorer import Challenge, Evaluation, Explorer, Picture
from hpnb.lesson.explorers.knobs import Choice, Knobs, Slider
from hpnb.lesson.tables import number
from hpnb.theory import ALGORITHMS, Link, cheapest, seconds

_SIZES = tuple(10 ** (k / 4) for k in range(8, 37))  # 100 B to 1 GB

KNOBS: Knobs = {
    "ranks": Choice((2, 4, 8, 16, 32, 64), 8),  # powers of two, as halving-doubling needs them
    "kilobytes": Slider(0.1, 1e6, 100.0, log=True, unit="kB"),
    "latency": Slider(1.0, 100.0, 10.0, log=True, unit="µs"),
    "bandwidth": Slider(0.1, 500.0, 12.5, log=True, unit="GB/s"),
    "algorithm": Choice(ALGORITHMS, "ring"),
}
ANSWER = {"ranks": 64, "algorithm": "halving-doubling"}
CHALLENGE = Challenge(
    "64 ranks, 100 kB, 10 µs and 12.5 GB/s or worse: under 200 µs.",
    lambda at: (
        (at["ranks"] == 64 and 90 <= at["kilobytes"] <= 110 and at["latency"] >= 10)
        and (at["bandwidth"] <= 12.5 and at["time (µs)"] < 200)
    ),
)


def all_reduce_cost() -> Explorer:
    """Notebook 00: how long an all-reduce takes, by ranks, bytes, latency, bandwidth and algorithm."""
    return Explorer(
        KNOBS,
        _readings,
        CHALLENGE,
        ANSWER,
        trade=("ranks", "time (µs)"),
        trade_names=("ring", "halving-doubling"),
        goal=200.0,
        trade_title="simulated · 100 kB, 10 µs, 12.5 GB/s: time over ranks",
        trade_looks=ALGORITHMS,
    ).display()


def _readings(ranks: int, kilobytes: float, latency: float, bandwidth: float, algorithm: str) -> Evaluation:
    link, nbytes = Link(latency * 1e-6, bandwidth * 1e9), kilobytes * 1e3
    took = seconds("all_reduce", nbytes, ranks, link, algorithm)
    readings = {
        "time (µs)": 1e6 * took,
        "fastest": cheapest("all_reduce", nbytes, ranks, link),
        "of it latency (%)": 100 * seconds("all_reduce", 0.0, ranks, link, algorithm) / took,
    }

    def draw(fast: bool) -> Picture:
        from hpnb.lesson.figures import ranks_and_collectives

        curves = {a: (_SIZES, [seconds("all_reduce", n, ranks, link, a) for n in _SIZES]) for a in ALGORITHMS}
        figure = ranks_and_collectives.costs(
            [nbytes],
            [took],
            more=curves,
            title=f"simulated · all-reduce over {ranks} ranks, {latency:.3g} µs, {bandwidth:.3g} GB/s",
            label=f"at the knobs: {algorithm}, {number(nbytes, 'B')}",
            text=not fast,
        )
        return figure, (
            f"Seconds against bytes of an all-reduce over {ranks} ranks, one line for each of "
            f"{', '.join(ALGORITHMS)}; at {number(nbytes, 'B')} {algorithm} takes {number(took, 's')}."
        )

    return readings, draw

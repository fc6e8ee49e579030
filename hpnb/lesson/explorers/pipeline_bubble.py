"""The explorer of notebook 02: the bubble of every schedule, by ranks, microbatches, chunks and costs."""

from __future__ import annotations

from hpnb.lesson.explorers.explorer import Challenge, Evaluation, Explorer, Picture
from hpnb.lesson.explorers.knobs import Choice, Knobs, Slider
from hpnb.lesson.tables import number
from hpnb.pipeline_parallel import Costs, schedules

_FIXED_CHUNKS = {"zb-v": 2, "dualpipe-v": 2}
_ANY_CHUNKS = ("interleaved", "breadth-first")

SHARE = "bubble of ranks × makespan (%)"

KNOBS: Knobs = {
    "schedule": Choice(schedules.NAMES, "zb-h2"),  # the first one has the longest warm-up
    "ranks": Slider(2, 8, 4),
    "microbatches": Slider(1, 32, 8),
    "chunks": Slider(1, 4, 2),
    "input_grad": Slider(0.2, 2.0, 1.0, 0.1),
    "weight_grad": Slider(0.2, 2.0, 1.0, 0.1),
    "transfer": Slider(0.0, 1.0, 0.1, 0.05),
}
ANSWER = {"schedule": "zb-h1", "microbatches": 12}
CHALLENGE = Challenge(
    "4 ranks, at most 12 microbatches, F = I = W, a transfer of 0.1 forwards or more: a bubble under "
    "11 % of ranks × makespan with at most 80 messages and at most 6 microbatches in flight.",
    lambda at: (
        (at["ranks"] == 4 and at["microbatches"] <= 12 and at["transfer"] >= 0.1)
        and (at["input_grad"] == at["weight_grad"] == 1.0 and at[SHARE] < 11)
        and (at["messages"] <= 80 and at["microbatches in flight"] <= 6)
    ),
)


def pipeline_bubble() -> Explorer:
    """Notebook 02: the bubble, by schedule, ranks, microbatches, chunks, F : I : W and transfer.

    The unit of time is a forward: one microbatch through all of a rank's layers, however many chunks they are
    split into.
    """
    names = "zb-h2, as it opens", "zb-h1, the answer"
    return Explorer(KNOBS, _readings, CHALLENGE, ANSWER, ("microbatches", SHARE), names, goal=11).display()


def _readings(
    schedule: str,
    ranks: int,
    microbatches: int,
    chunks: int,
    input_grad: float,
    weight_grad: float,
    transfer: float,
) -> Evaluation:
    v = chunks if schedule in _ANY_CHUNKS else _FIXED_CHUNKS.get(schedule, 1)
    actions = schedules.make(schedule, ranks * v, microbatches, v)
    tl = actions.simulate(Costs(1 / v, input_grad / v, weight_grad / v, transfer))
    in_flight = max(tl.peak_in_flight(rank) for rank in tl.ranks) / v
    bubble, rate = 100 * tl.bubble_fraction, 100 * tl.bubble_rate
    readings = {
        "step (forwards)": tl.makespan,
        SHARE: bubble,
        "of the longest span (%)": rate,
        "microbatches in flight": in_flight,
        "messages": sum(map(len, actions.queues.values())),
    }

    def draw(fast: bool) -> Picture:
        from hpnb import plot

        fits = microbatches <= 10  # numbers of two digits do not fit
        pieces = "" if v == 1 else f", {v} chunks a rank"
        figure = plot.timeline(
            tl,
            in_flight=fits,
            bubble=None,
            text=not fast and fits,
            unit="forwards",
            title=f"{schedule}, {ranks} ranks, {microbatches} microbatches{pieces}: bubble {bubble:.1f} % of "
            f"ranks × makespan, {rate:.1f} % of the longest rank's span",
        )
        return figure, (
            f"{schedule} on {ranks} ranks and {microbatches} microbatches: {bubble:.1f} % of ranks times "
            f"makespan is idle, and some rank holds {number(in_flight)} microbatches at once."
        )

    return readings, draw

"""What page 00 alone puts into words."""

from __future__ import annotations

from hpnb.lesson.figures.ranks_and_collectives import (
    compare_moves,
    compare_times,
    describe_arrivals,
    describe_calls,
)
from hpnb.lesson.machine_card import MachineCard
from hpnb.record import Event, Timeline


def test_arrivals_and_moves_are_put_into_words() -> None:
    def moving(*seconds: float) -> Timeline:  # rank 1 arrives last, and in the last step rank 0
        return Timeline(
            tuple(
                Event(rank, -1, "all_reduce", -1, 10.0 * step + late, 10.0 * step + 1 + move, "dp")
                for step, move in enumerate(seconds)
                for rank, late in ((0, 0.5 if step < len(seconds) - 1 else 1.0), (1, 0.75))
            )
        )

    once, slow = moving(1, 2, 3, 4, 5), moving(6, 7, 8, 9, 10)
    assert describe_arrivals(once, 1.0, 2.0) == {"last": "rank 1 in 4 of 5 steps", "wait-is": "shorter than"}
    longer = [compare_moves(once, slow, *cause)["words"] for cause in ((), ("the late rank",))]
    assert longer == [f"in this run moves after the {cause} are longer" for cause in ("pause", "late rank")]
    assert compare_moves(once, once, "the late rank")["words"].endswith(
        "cannot tell whether the late rank matters"
    )
    said = [compare_times(seconds, 2.0) for seconds in (1.7, 2.1, 2.3)]
    assert said == ["shorter than", "about as long as", "longer than"]


def test_a_hundred_calls_are_bound_by_their_starts_or_not() -> None:
    cards = {device: MachineCard("", device, 2, 0.25, 1.0, 1.0, "", (), ()) for device in ("cpu", "cuda")}
    runs = ((24.0, "cuda"), (5.0, "cuda"), (25.0, "cpu"))
    predicted, measured = {"1": 1.0, "100": 50.0}, {"1": 2.0, "100": 25.0}
    said = [describe_calls(predicted, measured, started, cards[device]) for started, device in runs]
    quotients = {"call": (0.25, "s"), "latency": (0.5, "s")}
    assert all(quotients.items() <= one.items() for one in said)
    assert {one["than"] for one in said} == {"shorter than"}
    bound, unbound, on_cpu = (str(one["started"]) for one in said)
    assert "so here starting calls, not the link, sets the time" in bound
    assert "starting calls does not set the time here" in unbound
    assert "cannot time its start" in on_cpu

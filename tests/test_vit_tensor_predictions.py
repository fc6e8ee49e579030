"""What page 03 says of a prediction: where a run differs from it, and what its pictures mark."""

from __future__ import annotations

import pytest

from hpnb import lesson, theory
from hpnb.lesson.explorers.small_multiples import trade_off
from hpnb.lesson.programs.vit_tensor_predictions import latencies_of_modes, slower_than_predicted
from hpnb.models import ViTSize
from hpnb.record import Event, Timeline


def test_a_run_is_compared_with_its_matmuls_its_bytes_and_its_latencies() -> None:
    block = ViTSize(hidden=16, layers=1, heads=2, mlp=64, patch=8, image=32).block(4, 4)
    card = lesson.MachineCard("a machine", "cpu", 2, 1e-4, 1e9, 1e11, "float32", (1,), (1.0,))
    matmuls, nbytes = block.training_flops / 2 / 1e11, theory.block_sent(block, "1d", 2).bytes() / 1e9
    sums = nbytes + 4 * 2 * 1e-4  # four all-reduces of two steps
    events = []
    for rank in (0, 1):
        start = 0.0
        for op, seconds in (("F", matmuls), ("I", matmuls), ("W", matmuls), ("all_reduce", 2 * sums)):
            events.append(Event(rank, -1, op, -1, start, start + seconds, "tp" if op == "all_reduce" else ""))
            start += seconds
    factors = slower_than_predicted(Timeline(tuple(events)), block, card)
    assert factors == {
        "compute": pytest.approx(3.0), "latency": pytest.approx(sums / nbytes), "sums": pytest.approx(2.0),
    }  # fmt: skip


def test_a_broadcast_takes_a_chain_of_latencies_and_norm_gradients_one_all_reduce() -> None:
    assert latencies_of_modes(64, {"2.5d": 4})["1d"] == 4 * 2 * 63
    assert latencies_of_modes(64, {"2.5d": 4})["2d"] > 9 * latencies_of_modes(64, {})["3d"]
    latency = theory.Link(1.0, float("inf"))
    one = theory.Block(1024, 8, 1024, 1)
    sharded, plain = (theory.block_sent(one, "1d", 4, 1, sp).seconds(latency) for sp in (True, False))
    assert sharded - plain == theory.seconds("all_reduce", 0, 4, latency)


def test_the_goal_of_a_challenge_is_drawn_on_a_logarithmic_axis() -> None:
    shown = lesson.explorers.tensor_modes()
    what = shown.read, "batch", shown._knobs["batch"], "compute / sending", {"as it opens": shown.values}
    (ax,) = trade_off(*what, 0.4).axes
    (line,) = (line for line in ax.lines if line.get_label() == "goal")
    assert list(line.get_ydata()) == [0.4, 0.4]
    assert ax.get_yscale() == "log"
    (ax,) = trade_off(*what).axes
    assert ax.get_yscale() == "linear"
    assert "goal" not in [line.get_label() for line in ax.lines]

"""What page 03 says of a prediction: where a run differs from it, and what its pictures mark."""

from __future__ import annotations

import pytest

from hpnb import lesson, theory
from hpnb.lesson.explorers.small_multiples import trade_off
from hpnb.lesson.programs import vit_tensor_predictions as predictions
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
        "computing": pytest.approx(3.0),
        "latency of all-reduces": pytest.approx(sums / nbytes),
        "waiting and the rest": pytest.approx(2.0),
    }


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


def test_a_time_that_grows_less_than_its_size_is_constant_in_part() -> None:
    assert predictions.constant_share(8.0, 8) == 0
    assert predictions.constant_share(4.5, 8) == 0.5  # 1 = 0.5 + 0.5, and 4.5 = 0.5 + 8 * 0.5
    assert predictions.constant_share(0.9, 8) == 1


def card_of(ranks: int, latency: float) -> lesson.MachineCard:
    return lesson.MachineCard("a machine", "cuda", ranks, latency, 1e9, 1e11, "float32", (1,), (1.0,))


def test_a_race_is_put_in_words_either_way() -> None:
    slower, faster = {"1d": 1.0, "1d+sp": 1.5, "2d": 2.0}, {"1d": 1.0, "1d+sp": 0.75, "2d": 0.5}
    assert predictions.difference(slower) == "500 ms more"
    assert predictions.difference(faster) == "250 ms less"
    words = {
        (True, False): "2D sends more bytes than 1D, and takes 2.00 s against 1.00 s",
        (True, True): "2D sends fewer bytes than 1D, but takes 2.00 s against 1.00 s",
        (False, True): "2D sends fewer bytes than 1D, and takes 500 ms against 1.00 s",
        (False, False): "2D sends more bytes than 1D, but takes 500 ms against 1.00 s",
    }
    for (is_slower, fewer_bytes), said in words.items():
        sent = 0.9 if fewer_bytes else 1.1
        assert predictions.grid_in_words(slower if is_slower else faster, sent) == said
    near = "2D sends about as many bytes as 1D, and takes 2.00 s against 1.00 s"
    assert {predictions.grid_in_words(slower, sent) for sent in (0.97, 1.03)} == {near}
    assert predictions.more_or_less(-0.002) == "2.00 ms less"
    assert predictions.alphas_in_words(card_of(4, 1e-5), card_of(4, 1e-5)) == "10.0 µs, as on the page's card"
    two = predictions.alphas_in_words(card_of(2, 1e-5), card_of(4, 2e-5))
    assert two == "20.0 µs, against 10.0 µs with 2"


def test_a_formula_and_a_run_may_judge_a_link_differently() -> None:
    slow = {"computing": 3.8, "latency of all-reduces": 1.2, "waiting and the rest": 1.3}
    fast = {**slow, "waiting and the rest": 0.5}
    verdict = predictions.verdict
    assert verdict(2.0, 1.0, slow) == (
        "Both the formula and the run say that the interconnect is fast enough (r at least 1)."
    )
    said = (
        "The formula says that the interconnect is too slow (r below 1),"
        " and the run says that it is fast enough (r at least 1)."
    )
    assert verdict(0.7, 1.7, slow) == (
        f"{said} The link was not faster."
        " The run's r is larger because computing took 3.80 times as long as its matrix products alone would."
    )
    assert verdict(0.7, 1.7, fast).startswith(f"{said} The run's r is larger because communication took less")
    assert verdict(1.7, 0.7, slow).endswith("communication took longer than its bytes alone.")


def test_words_say_whether_tokens_set_the_time() -> None:
    assert predictions.growth_title({"1d": 1.04, "2d": 0.95}).endswith("hardly longer")
    assert predictions.growth_title({"1d": 4.0, "2d": 0.95}).endswith("less than 8 times as long")
    assert predictions.growth_title({"1d": 8.1, "2d": 2.5}).endswith("take 2.50 to 8.10 times as long")
    assert predictions.constant_in_words({"1d": 4.5, "2d": 0.95}, 8) == (
        "Then the constant is 50 % of 1D's time with few tokens."
        " 2D took no longer, so it shows no part proportional to the tokens."
    )
    assert "no part" in predictions.constant_in_words({"1d": 1.0, "2d": 0.95}, 8)
    assert "100 % of 2D's time" in predictions.constant_in_words({"1d": 4.5, "2d": 1.001}, 8)
    assert "waits for the host" in predictions.computing_in_words(1.0, 1.1, 8)
    assert "about 10 % of this time" in predictions.computing_in_words(1.0, 5.0, 9)
    assert "no constant part" in predictions.computing_in_words(1.0, 8.0, 8)

"""Notebook 06: layers timed one by one, repeats in turn, a weight with two copies, what its checks say."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

import hpnb
from hpnb import comm, lesson, theory
from hpnb.lesson.exercises import gpt2_pipeline_parallel as exercises
from hpnb.lesson.figures import gpt2_pipeline as figures
from hpnb.lesson.programs import device_timing, gpt2_pipeline, layer_times, tied_weights
from hpnb.lesson.programs.layer_times import LayerTimes
from hpnb.models import GPT2_SIZES, GPT2Size
from hpnb.pipeline_parallel import schedules
from hpnb.pipeline_parallel.partition import balanced

pytestmark = pytest.mark.usefixtures("launches_on_a_pool")

SMALL = GPT2Size(hidden=16, layers=4, heads=2, mlp=32, vocab_size=101, length=8)
FLAT = LayerTimes(("embedding", "block", "block", "head"), (0.1, 1.0, 1.2, 2.0), (0.1, 2.0, 2.2, 4.0), 1.5)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPNB_HOME", str(tmp_path / "home"))


# --- theory ------------------------------------------------------------------------------------------------


def test_a_head_in_blocks_is_the_closed_form() -> None:
    for size, blocks in (("124m", 4.46), ("355m", 3.51), ("774m", 2.89), ("1.5b", 2.37)):
        shape = GPT2_SIZES[size]
        found = theory.head_in_blocks(shape.block(3), shape.vocab_size)
        assert found == pytest.approx(shape.vocab_size / (12 * shape.hidden + 2 * shape.length))
        assert found == pytest.approx(blocks, abs=0.005)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: theory.head_in_blocks(SMALL.block(), 0), "vocab_size=0"),
        (lambda: theory.stage_loads([1.0, 2.0], (1, 2)), r"\[1, 2\] adds up to 3, and there are 2 layers"),
        (lambda: theory.even_split(2, 3), "2 blocks cannot be split over 3 stages"),
    ],
)
def test_bad_numbers_get_a_sentence(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


# --- the skyline -------------------------------------------------------------------------------------------


def test_a_skyline_knows_its_head_and_smooths_its_blocks() -> None:
    assert FLAT.block == pytest.approx(3.2)
    assert FLAT.head == pytest.approx(1.875)
    assert FLAT.smooth == pytest.approx([0.2, 3.2, 3.2, 6.0])
    costs = FLAT.stage_costs((2, 2))
    assert costs.forward == pytest.approx((1.2, 3.1))  # both blocks at their median
    assert costs.input_grad == costs.weight_grad == pytest.approx((1.1, 3.05))
    seconds = theory.pipeline_seconds([3.4, 9.2], 3)
    assert FLAT.bubble((2, 2), 3) == pytest.approx(1 - 3 * (3.4 + 9.2) / (2 * seconds))
    assert FLAT.best_speedup() == pytest.approx(12.6 / 6.0)
    step = FLAT.step(schedules.make("gpipe", 2, 3), (2, 2))
    assert step.makespan == pytest.approx(theory.pipeline_seconds([3.4, 9.2], 3))


def run_all(run: gpt2_pipeline.PartitionedSchedule) -> tuple[LayerTimes, float, dict[str, list[float]]]:
    times = layer_times.time_layers(SMALL, 2, torch.float32, repeats=3)
    peak = gpt2_pipeline.peak_activations(SMALL, 4, torch.float32, run)
    a = torch.randn(200, 200)
    calls = {"short": lambda: a @ a, "long": lambda: [a @ a for _ in range(50)]}
    return times, peak, gpt2_pipeline.time_in_turn(calls, repeats=3)


def test_layers_and_calls_are_timed_on_ranks() -> None:
    with hpnb.Ranks(2, device="cpu", timeout=120) as pool:
        results = pool.run(run_all, (schedules.make("1f1b", 2, 2), (5, 1)))
    times, _, seconds = results[0]
    assert times.kinds == ("embedding", *("block",) * 4, "head")
    assert all(cost > 0 for cost in times.costs)
    assert 0 < times.loss < times.costs[-1]
    assert all(peak > 0 for _, peak, _ in results)
    assert [len(repeats) for repeats in seconds.values()] == [3, 3]
    assert all(repeats == sorted(repeats) for repeats in seconds.values())
    assert seconds["long"][1] > seconds["short"][1]


def measure_on_busy_cores(cores: int) -> list[int]:
    hpnb.ranks.usable_cores = lambda: cores
    layer_times.contended = lambda: True
    measured: list[int] = []

    def measure() -> int:
        measured.append(hpnb.rank())
        return hpnb.rank()

    return [layer_times.on_busy_cores(measure), *measured]


def test_no_more_ranks_measure_than_there_are_cores() -> None:
    assert hpnb.launch(measure_on_busy_cores, 2, ranks=3, device="cpu") == [[0, 0], [0, 1], [0]]


def peaks_on_a_cpu(run: gpt2_pipeline.PartitionedSchedule) -> tuple[float, float, int]:
    (schedule, counts), batch = run, device_timing.random_tokens(SMALL, 6)
    model = hpnb.models.gpt2(SMALL)
    pipe = hpnb.Pipeline(model, device_timing.all_ranks("pp"), schedule, layer_times.token_loss, cut=counts)
    pipe.step(batch, return_outputs=False, record=False)
    with hpnb.record.memory(pipe.module) as recorder:
        pipe.step(batch, return_outputs=False, record=False)
    peak = max(now.activations + now.temporary for now in recorder.profile().samples)
    drawn = device_timing.timing_gpt2(SMALL, torch.float32)
    drawn.lm_head.weight.data.zero_()  # what comes next starts from drawn weights again
    left = int(device_timing.timing_gpt2(SMALL, torch.float32).lm_head.weight.count_nonzero())
    return gpt2_pipeline.peak_activations(SMALL, 6, torch.float32, run), peak, left


def test_the_first_and_the_last_rank_measure_the_peak_on_a_cpu() -> None:
    run = schedules.make("1f1b", 3, 3), (2, 2, 2)
    first, between, last = hpnb.launch(peaks_on_a_cpu, run, ranks=3, device="cpu")
    assert first[0] == pytest.approx(first[1], rel=0.02)
    assert last[0] == pytest.approx(last[1], rel=0.02)
    assert math.isnan(between[0])
    assert all(left > 0 for _, _, left in (first, between, last))


def repeats_of(*makespans: float) -> gpt2_pipeline.StepRepeats:
    made = schedules.make("1f1b", 2, 2)
    unit = made.simulate(hpnb.pipeline_parallel.Costs()).makespan
    scales = [makespan / unit for makespan in makespans]
    steps = [made.simulate(hpnb.pipeline_parallel.Costs(s, s, s)) for s in scales]
    return gpt2_pipeline.StepRepeats(steps)


def test_repeats_that_overlap_are_no_finding() -> None:
    fast, close, slow = repeats_of(3, 1, 2), repeats_of(2.5, 4, 5), repeats_of(7, 8, 9)
    assert fast.seconds == pytest.approx([1, 2, 3])
    assert (fast.fastest, fast.median.makespan, fast.slowest) == pytest.approx((1, 2, 3))
    assert fast.overlaps(close)
    assert not fast.overlaps(slow)
    assert gpt2_pipeline.fastest_of({"slow": slow, "close": close, "fast": fast}) == ["fast", "close"]
    assert layer_times.spread_words([1, 3], [3, 4]) == "within the spread of the repeats"
    assert layer_times.spread_words([4, 5], [1, 3]) == "beyond the spread of the repeats"
    runs = {"slow": slow, "close": close, "fast": fast}
    assert gpt2_pipeline.fastest_in_words(runs)["others"] == "the repeats of close overlap with its own"
    assert gpt2_pipeline.range_columns(runs)["slowest (s)"]["slow"] == slow.slowest
    compared = gpt2_pipeline.compare(runs, {"slow": 6.0, "fast": 2.0}, "slow", "fast")
    assert (compared["simulated"], compared["spread"]) == (3.0, "beyond the spread of the repeats")
    assert "cannot tell" in gpt2_pipeline.cuts_in_words(True, compared)
    words = gpt2_pipeline.cuts_in_words(False, {"run": 1.04, "spread": compared["spread"]})
    assert (
        words
        == "the step cut by FLOPs takes 1.04 times as long, a difference beyond the spread of the repeats"
    )
    words = gpt2_pipeline.schedules_in_words(runs, "fast")
    assert "fast" not in words
    assert words["slow"].endswith("the spread of the repeats")
    assert words["decided"] == "2 of the 3"
    assert gpt2_pipeline.ratio_range({"a": 3.0, "b": 2.0}, {"a": 2.0, "b": 4.0}) == {
        "least": 0.5,
        "most": 1.5,
    }


def test_the_best_number_beside_the_head_is_compared_with_the_cut_by_time() -> None:
    fast, close, slow = repeats_of(3, 1, 2), repeats_of(2.5, 4, 5), repeats_of(7, 8, 9)
    words = gpt2_pipeline.last_cut_in_words({4: slow, 5: fast, 6: close, 9: slow}, 6)
    assert (words["first"], words["most"]) == ("5", 9)
    assert words["by"] == pytest.approx(7 / 3)
    assert "takes 2.00 times as long, a difference within" in str(words["by-time"])
    words = gpt2_pipeline.last_cut_in_words({4: fast, 9: slow}, 4)
    assert words["first"] == "4, the fewest that ran"
    assert words["by-time"] == "The cut by time leaves the same number"


def test_an_order_is_claimed_only_where_repeats_decide_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: dict[str, str] = {}
    monkeypatch.setattr(gpt2_pipeline, "record", lambda key, value: recorded.update({key: value}))
    gpt2_pipeline.claim_order("a is faster", [1, 2], [3, 4])
    gpt2_pipeline.claim_order("b is faster", [3, 4], [1, 2])
    gpt2_pipeline.claim_order("c is faster", [1, 3], [2, 4])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "✓ a is faster (2 < 3)"
    assert lines[1].startswith("✗ Not in this run: b is faster (not 4 < 1)")
    assert lines[2] == "Not decided whether c is faster: the repeats overlap"
    fast, close, slow = repeats_of(3, 1, 2), repeats_of(2.5, 4, 5), repeats_of(7, 8, 9)
    runs = {"fast": fast, "close": close, "slow": slow}
    gpt2_pipeline.claim_faster(runs, "fast", "slow")
    gpt2_pipeline.claim_less_idle(runs, "fast", "slow")  # scaled steps have one bubble
    gpt2_pipeline.claim_faster(runs, "fast", "close")
    gpt2_pipeline.claim_order("c is less", [3], [1], key="06.order.c")
    assert recorded == {
        "06.order.fast-faster-than-slow": "all repeats agree",
        "06.order.fast-less-idle-than-slow": "the repeats overlap, so this run doesn't decide that",
        "06.order.fast-faster-than-close": "the repeats overlap, so this run doesn't decide that",
        "06.order.c": "all repeats say the opposite",
    }
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == '✓ every repeat of "fast" is faster than "slow" (3.00 s < 7.00 s)'
    undecided = 'Not decided whether every repeat of "fast" {} "{}": the repeats overlap'
    assert lines[1:3] == [
        undecided.format("has a smaller bubble than", "slow"),
        undecided.format("is faster than", "close"),
    ]
    assert "doesn't decide" in str(gpt2_pipeline.faster(runs, "fast", "close")["sure"])
    words = gpt2_pipeline.faster(runs, "fast", "slow")
    sure = "all of its repeats are faster than all of the slow cut's"
    assert words == {"gain": pytest.approx(4.0), "sure": sure}
    assert str(gpt2_pipeline.faster(runs, "slow", "fast")["sure"]).startswith("all of its repeats are slower")


def test_bubbles_have_a_column_for_the_lowest_and_the_highest_repeat() -> None:
    made, costs = schedules.make("1f1b", 2, 2), hpnb.pipeline_parallel.Costs
    steps = [made.simulate(costs([1.0, last], 1.0, 1.0)) for last in (1.0, 5.0, 2.0)]
    columns = gpt2_pipeline.bubble_columns({"1f1b": gpt2_pipeline.StepRepeats(steps)})
    shares = [100 * step.bubble_fraction for step in steps]
    assert columns["of the median step (%)"]["1f1b"] == pytest.approx(shares[2])
    assert columns["lowest (%)"]["1f1b"] == pytest.approx(min(shares))
    assert columns["highest (%)"]["1f1b"] == pytest.approx(max(shares))


def test_values_beside_a_base_are_lower_or_higher() -> None:
    assert gpt2_pipeline.beside(5.28, a=5.1, b=5.3) == {"a": "0.18 lower", "b": "0.02 higher"}
    close = {"a": "less than 0.01 lower", "b": "less than 0.01 higher", "c": "no higher"}
    assert gpt2_pipeline.beside(5.28, a=5.279, b=5.281, c=5.28) == close


def test_unequal_ranks_leave_a_bubble_with_endless_microbatches() -> None:
    words = gpt2_pipeline.unequal_ranks("measured", {"rank 0": 1.0, "rank 1": 1.0, "rank 2": 2.0})
    assert words["slower"] == pytest.approx(2.0)
    assert words["endless"][0] == pytest.approx(100 / 3)
    padded = FLAT.padded([3.0, 3.0], [1.0, 2.0])
    assert padded["gain"] == pytest.approx(2.0)
    assert padded["head"][0] == pytest.approx((4.5 / 2 + 1.5) / 3.2)
    assert padded["spread"] == "beyond the spread of the repeats"


def end_times(blocks: int, embedding: float, head: float) -> LayerTimes:
    """Blocks of one second, a third of it forward, and these seconds at the ends."""
    costs = (embedding, *[1.0] * blocks, head)
    kinds = ("embedding", *["block"] * blocks, "head")
    return LayerTimes(kinds, tuple(c / 3 for c in costs), tuple(2 * c / 3 for c in costs), 0.0)


def test_the_slowest_stages_of_a_cut_by_flops_are_never_shorter_than_by_time() -> None:
    columns, worst = gpt2_pipeline.slowest_stages([0.0, 1, 1, 1, 1, 2], end_times(4, 0.0, 1.0), range(2, 4))
    assert columns["sum of layers, by time (s)"] == pytest.approx({"2 ranks": 3.0, "3 ranks": 2.0})
    assert columns["sum of layers, by flops (s)"]["3 ranks"] == pytest.approx(2.0)
    assert (worst["excess"], worst["ends"], worst["word"]) == (0.0, 1.0, "overrate")
    assert worst["ratio"] == max(columns["ratio"].values())


@pytest.mark.parametrize("head", [1.0, 1.3, 4.0, 6.0])
@pytest.mark.parametrize("by_flops", [2.4, 4.9])
def test_a_cut_by_flops_loses_at_most_what_they_misjudge(head: float, by_flops: float) -> None:
    times = end_times(12, 0.1, head)
    flops = [0.0, *[7.0] * 12, 7.0 * by_flops]
    _, worst = gpt2_pipeline.slowest_stages(flops, times, range(2, 9))
    assert worst["head"] == pytest.approx(abs(by_flops - head))
    assert worst["ends"] == pytest.approx(abs(by_flops - head) + 0.1)
    assert worst["word"] == ("overrate" if by_flops > head else "underrate")
    assert worst["excess"] <= worst["ends"]
    assert times.misjudged(by_flops) == pytest.approx(abs(head / by_flops - 1))


def test_blocks_of_an_equal_stage_include_the_head() -> None:
    assert end_times(12, 0.0, 4.0).chunks_in_words(8)["equal"] == pytest.approx(2.0)


@pytest.mark.parametrize("head", [0.3, 1.3, 6.0])
def test_the_last_cut_slides_to_a_number_of_blocks_that_is_clearly_too_large(head: float) -> None:
    blocks, schedule = 48, schedules.make("1f1b", 4, 8)
    times = end_times(blocks, 0.1, head)
    marked = {12: (13, 12, 12, 13), 9: (14, 13, 13, 10)}
    slid = gpt2_pipeline.slide_last_cut(times, schedule, marked)
    assert marked.items() <= slid.items()
    assert list(slid) == sorted(slid)
    assert len(slid) <= 10
    assert all(sum(counts) == blocks + 2 and counts[-1] == beside + 1 for beside, counts in slid.items())
    seconds = [times.step(schedule, counts).makespan for counts in slid.values()]
    assert seconds[-1] >= 1.6 * min(seconds)


def share_weights_of_a_model() -> tuple[bool, bool, bool]:
    model = device_timing.timing_gpt2(SMALL, torch.float32)
    copy = gpt2_pipeline.share_weights(model)
    ids = device_timing.random_tokens(SMALL, 2)["input_ids"]
    copy(input_ids=ids, labels=ids).loss.backward()
    pairs = list(zip(model.parameters(), copy.parameters(), strict=True))
    return (
        all(a is not b and a.data_ptr() == b.data_ptr() for a, b in pairs),
        copy.lm_head.weight is copy.transformer.wte.weight,
        all(a.grad is None and b.grad is not None for a, b in pairs),
    )


def test_copies_share_weights_and_have_gradients_of_their_own() -> None:
    assert hpnb.launch(share_weights_of_a_model, ranks=1, device="cpu") == [(True, True, True)]


def test_memory_columns_count_a_microbatch_on_one_of_two_stages_as_half() -> None:
    costs = hpnb.pipeline_parallel.Costs(1.0, 2.0, 1.0)
    chunks = {"1f1b": 1, "interleaved": 2}
    steps = {name: schedules.make(name, 4 * v, 8, v).simulate(costs) for name, v in chunks.items()}
    peaks = {name: [1.0, 2.0, 3.0, 4.0] for name in chunks}
    columns = gpt2_pipeline.memory_columns(peaks, steps, chunks)
    assert columns["kept on rank 3 (B)"] == {"1f1b": 4.0, "interleaved": 4.0}
    assert columns["in flight on rank 0"] == {"1f1b": 4.0, "interleaved": 5.5}


def test_w_over_i_leaves_out_schedules_that_do_not_split_the_backward() -> None:
    costs = hpnb.pipeline_parallel.Costs(1.0, 2.0, 1.0)
    steps = {name: schedules.make(name, 2, 4).simulate(costs) for name in ("1f1b", "zb-h1")}
    assert gpt2_pipeline.w_over_i(steps) == {"zb-h1": pytest.approx(0.5)}


def test_seconds_per_rank_are_the_mean_over_ranks() -> None:
    step = schedules.make("zb-h1", 2, 4).simulate(hpnb.pipeline_parallel.Costs([1.0, 3.0], 2.0, 1.0))
    assert gpt2_pipeline.seconds_per_rank({"zb-h1": step}, "F") == {"zb-h1": pytest.approx(8.0)}
    assert gpt2_pipeline.seconds_per_rank({"zb-h1": step}, "FW") == {"zb-h1": pytest.approx(12.0)}


def test_the_ledger_gets_a_row_for_each_schedule() -> None:
    step = repeats_of(2.0).median
    gpt2_pipeline.add_to_ledger("a GPT-2", {"1f1b": 1.0, "zb-h1": 1.5}, {"1f1b": step, "zb-h1": step})
    rows = [row for row in lesson.ledger.rows() if row.notebook == "06"]
    assert [row.model for row in rows] == ["a GPT-2, 1f1b", "a GPT-2, zb-h1"]
    assert rows[1].quantities["step (s)"] == (1.5, pytest.approx(2.0))


def test_a_gpt2_that_is_drawn_on_its_device_has_one_table() -> None:
    model: Any = device_timing.random_gpt2(SMALL, torch.float32, torch.device("cpu"))
    assert model.lm_head.weight is model.transformer.wte.weight
    assert 0.015 < model.transformer.wte.weight.std() < 0.025
    norm = model.transformer.ln_f
    assert bool((norm.weight == 1).all())
    assert bool((norm.bias == 0).all())
    words = device_timing.random_tokens(SMALL, 3)
    assert torch.isfinite(layer_times.token_loss(model(words["input_ids"]), words))


def train_tied(tied: bool) -> tuple[list[float], float, tuple[float, float]]:
    axis = hpnb.Mesh(hpnb.Layout(pp=2)).pp
    model: Any = exercises.tiny(tied=tied)
    table = model.transformer.wte.weight
    pipe = hpnb.Pipeline(model, axis, schedules.make("1f1b", 2, 2), layer_times.token_loss)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
    log = [tied_weights.tied_distance(pipe, axis, table.shape)]
    batch = exercises.tiny_batch(4, 0)
    for _ in range(2):
        pipe.step(batch)
        optimizer.step()
        optimizer.zero_grad()
        log.append(tied_weights.tied_distance(pipe, axis, table.shape))
    trained = pipe.step(batch, forward_only=True).loss.item()
    state = hpnb.pipeline_parallel.full_state_dict(pipe.module, axis)
    return log, trained, tied_weights.loaded_losses(state, exercises.tiny(), batch)


def test_copies_diverge_unless_they_are_tied_and_a_checkpoint_shows_it() -> None:
    with hpnb.Ranks(2, device="cpu", timeout=60) as pool:
        for log, trained, loaded in pool.run(train_tied, True):
            assert log == [0.0, 0.0, 0.0]
            assert loaded == pytest.approx((trained, trained), rel=1e-12)
        for log, trained, loaded in pool.run(train_tied, False):
            assert log[0] == 0.0 < log[1] < log[2]
            assert min(abs(trained - loss) for loss in loaded) > 1e-3


# --- pictures ----------------------------------------------------------------------------------------------


def built(counts: Sequence[int], costs: Sequence[float]) -> figures.PipelineCut:
    each = [load / 3 for load in theory.stage_loads(costs, counts)]
    made = schedules.make("1f1b", len(counts), 4)
    return figures.PipelineCut(counts, made.simulate(hpnb.pipeline_parallel.Costs(each, each, each)))


def test_a_skyline_draws_its_layers_its_cuts_and_its_loss() -> None:
    costs = [0.2, 1.0, 1.0, 1.0, 3.0]
    cuts = {"uniform": built((3, 2), costs), "even": built((4, 1), costs)}
    kinds = ["embedding", "block", "block", "block", "head"]
    fig = figures.skyline(costs, cuts, kinds, loss=1.0, unit="blocks")
    above = fig.axes[0]
    found = {c.get_label(): c for c in above.collections}
    tops = [path.vertices[:, 1].max() for path in found["block"].get_paths()]
    assert tops == pytest.approx([1.0] * 3)
    assert found["head"].get_paths()[0].vertices[:, 1].max() == pytest.approx(2.0)
    assert found["loss"].get_paths()[0].vertices[:, 1].max() == pytest.approx(3.0)
    lines = [c for ax in (fig.axes[0], fig.axes[2]) for c in ax.collections if len(c.get_paths()) == 1]
    at = [c.get_paths()[0].vertices[0, 0] for c in lines if type(c).__name__ == "LineCollection"]
    assert at == [3.0, 4.0]
    texts = [t.get_text() for t in above.texts]
    assert "2.20" in texts
    assert "4.00" in texts
    heavy = next(t for t in above.texts if t.get_text() == "4.00")
    assert heavy.get_weight() == "bold"
    bold = {t.get_text() for ax in fig.axes[::2] for t in ax.texts if t.get_weight() == "bold"}
    assert bold == {"4.00", "3.20"}  # each cut's largest
    assert fig.texts[0].get_text() == "The even cut leaves fewer blocks beside the head: 0, not 1"
    same = {"by flops": cuts["even"], "by time": cuts["even"]}
    fig = figures.skyline(costs, same, kinds, unit="blocks")
    assert fig.texts[0].get_text() == "Blocks beside the head: by flops 0, by time 0"
    fig = figures.skyline(costs, {"uniform": cuts["uniform"], "by time": cuts["even"]}, kinds, unit="blocks")
    assert fig.texts[0].get_text() == "The cut by time leaves fewer blocks beside the head: 0, not 1"


def test_the_last_cut_shows_every_repeat_and_who_cuts_where() -> None:
    runs = {0: [3.0, 3.4, 3.1], 1: [2.0, 2.2], 2: [4.0]}
    fig = figures.last_cut(runs, [3.1, 2.2, 3.9], {"uniform": 2, "time": 1, "far": 7})
    (ax,) = fig.axes
    texts = {t.get_text() for t in ax.texts}
    assert {"uniform", "time"} <= texts
    assert "far" not in texts
    lines = {line.get_label(): list(line.get_ydata()) for line in ax.get_lines()}
    assert lines["measured, median"] == pytest.approx([3.1, 2.2, 4.0])  # of two, the later
    assert lines["each repeat"] == [3.0, 3.4, 3.1, 2.0, 2.2, 4.0]


@pytest.mark.parametrize(
    ("loss", "summed", "apart", "title"),
    [
        (4.0, 0.0, 0.6, "Both losses fall; unsummed copies diverge"),
        (6.0, 0.0, 0.6, "Unsummed copies diverge"),
        (4.0, 0.0, 0.05, "Both losses fall"),
        (4.0, 0.1, 0.6, "Both losses fall"),
        (6.0, 0.1, 0.6, "Losses, and the distance between the two copies"),
    ],
)
def test_the_title_of_tied_copies_follows_the_run(
    loss: float, summed: float, apart: float, title: str
) -> None:
    losses = {"summed": [5.0, 4.0], "never summed": [5.0, loss]}
    distances = {"summed": [0.0, summed], "never summed": [0.1, apart]}
    assert figures.copies_of_a_tied_weight(losses, distances).texts[0].get_text() == title


@pytest.mark.parametrize(
    ("runs", "title"),
    [
        ({0: [2.0, 2.2], 3: [1.0, 1.1], 9: [1.2, 1.9]}, "Too many blocks beside the head slow every repeat"),
        ({0: [2.0, 2.2], 3: [1.0, 1.3], 9: [1.2, 1.9]},
         "Repeats with 9 and with 3 blocks beside the head overlap"),
        ({0: [2.0, 2.2], 9: [1.2, 1.9]}, "By the median, the most blocks beside the head, 9, are fastest"),
    ],
)  # fmt: skip
def test_the_title_of_the_last_cut_follows_its_repeats(runs: dict[int, list[float]], title: str) -> None:
    assert figures.last_cut(runs, [1.0] * len(runs)).texts[0].get_text() == title


def test_labels_of_neighbouring_cuts_do_not_overlap() -> None:
    runs = {blocks: [1.0 + blocks, 1.1 + blocks] for blocks in (3, 6, 7, 10, 11, 12, 20)}
    marks = {"uniform": 12, "by flops": 10, "by time": 6}
    fig = figures.last_cut(runs, [1.0] * len(runs), marks)
    fig.canvas.draw()
    boxes = [text.get_window_extent() for text in fig.axes[0].texts if text.get_text() in marks]
    assert len(boxes) == 3
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))


# --- exercises ---------------------------------------------------------------------------------------------


def off(exercise: lesson.Exercise, answer: Any) -> list[str]:
    return [finding.text for finding in lesson.check(exercise, answer).findings if not finding.ok]


def test_the_library_cuts_as_well_as_exhaustive_search() -> None:
    for costs, stages in exercises.partition_cases():
        best = exercises.exhaustive(costs, stages)
        assert max(theory.stage_loads(costs, balanced(costs, stages))) == pytest.approx(best)
        if len(costs) > 1 and stages == 2:
            ends = [max(sum(costs[:k]), sum(costs[k:])) for k in range(1, len(costs))]
            assert min(ends) == best


def slow(costs: list[float], stages: int) -> Any:
    """Exhaustive search: right, and never done with 86 million cuts."""
    n = len(costs)
    found: list[tuple[float, list[int]]] = []
    for inner in combinations(range(1, n), stages - 1):
        counts = [b - a for a, b in zip((0, *inner), (*inner, n), strict=True)]
        found = [min([*found, (max(theory.stage_loads(costs, counts)), counts)])]
    return found[0][1]


def everywhere(weight: Any, axis: Any) -> Any:
    """Sums over all ranks, those in the middle with zeros."""
    value = torch.zeros(37, 12, dtype=torch.float64) if weight is None else weight.data
    first = comm.broadcast(value.clone(), axis)
    if weight is not None:
        weight.data.copy_(first)

    def add() -> None:
        mine = torch.zeros_like(value) if weight is None else weight.grad
        whole = comm.all_reduce(mine, axis)
        if weight is not None:
            weight.grad.copy_(whole)

    return add


@pytest.mark.parametrize(
    ("exercise", "answer", "words"),
    [
        (exercises.partition, lambda costs, stages: [len(costs)], "stages of at least one layer are wanted"),
        (exercises.partition, lambda costs, stages: 3, "3 is no list of 4 whole numbers"),
        (exercises.partition, slow, "86 million|85,900,584 cuts are possible of: not done after"),
        (
            exercises.tied_weight,
            everywhere,
            "3 ranks, three steps: add.. sends .* at most 3.55 kB, 0 B, 3.55 kB",
        ),
        (exercises.tied_weight, lambda weight, axis: 3, "got a int from tie, and a function `add` is wanted"),
        (exercises.tied_weight, lambda weight, axis: lambda: None, "the two copies are off by"),
        (exercises.token_mean, lambda outputs, inputs: outputs.logits.mean(), "and .sum, count. is wanted"),
        (
            exercises.token_mean,
            lambda outputs, inputs: (layer_times.token_loss(outputs, inputs), 1),
            "ragged rows .11 and 5 targets.: beside one process the loss is off by",
        ),
    ],
)
@pytest.mark.sampled(2)
def test_what_an_answer_lacks_is_said_in_numbers(
    exercise: lesson.Exercise, answer: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exercises, "TIMEOUT", 20.0 if answer is not slow else 1.5)
    found = off(exercise, answer)
    assert any(re.search(words, text) for text in found), found


def test_no_schedule_of_the_library_beats_1f1b_under_every_cap() -> None:
    for name in ("1f1b", "zb-h1", "zb-h2"):
        answer = [
            off(
                exercises.beat_1f1b,
                lambda job, name=name: schedules.make(name, job.ranks, job.microbatches).actions,
            )
        ]
        assert answer[0], name
    for job in exercises.TASKS.values():
        fits = exercises.family(job)
        assert fits
        for schedule in fits:
            schedule.check()
            tl = schedule.simulate(job.costs)
            assert all(tl.peak_in_flight(r) * job.microbatch_bytes[r] <= job.cap for r in tl.ranks)
        usual = schedules.make("1f1b", job.ranks, job.microbatches).simulate(job.costs).makespan
        assert min(each.simulate(job.costs).makespan for each in fits) < 0.95 * usual

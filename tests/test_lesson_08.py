"""Notebook 08: a step predicted and replayed, its figures, answers added up, what its checks say."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hpnb
from hpnb import ParallelLayout, lesson, theory
from hpnb.data.beans_cifar10_mrpc import GeneratedSamples
from hpnb.lesson.exercises import gpt2_hybrid_parallel as exercises
from hpnb.lesson.figures import gpt2_hybrid as figures
from hpnb.lesson.predictions import regret
from hpnb.lesson.predictions.outcome import Outcome, write_outcomes
from hpnb.lesson.programs import gpt2_hybrid, gpt2_hybrid_words, paraphrases, rank_rates, step_breakdown
from hpnb.models import GPT2Size
from hpnb.pipeline_parallel import Costs, schedules
from hpnb.record import Event, Timeline
from hpnb.theory import LayerCost, LayoutTask, Link, layout_bytes, layout_memory, layout_parts

pytestmark = pytest.mark.usefixtures("launches_on_a_pool")

SMALL = GPT2Size(hidden=20, layers=4, heads=5, mlp=80, vocab_size=101, length=16)
FREE = Link(0.0, 1e30)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPNB_HOME", str(tmp_path / "home"))


def task(**other: Any) -> LayoutTask:
    """Four equal blocks, ends that cost nothing, a free link; samples of 16 tokens."""
    known = {
        "block": SMALL.block(1, None, 4), "layers": 4, "vocab_size": 101, "batch": 8, "optimizer_cost": 0.0,
        "block_cost": LayerCost(0.0, 1.0), "ends_cost": LayerCost(0.0, 0.0), "inside": FREE,
    }  # fmt: skip
    return LayoutTask(**{**known, **other})


# --- a step, predicted -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan", [ParallelLayout(4), ParallelLayout(2, 1, 2), ParallelLayout(1, 1, 4), ParallelLayout(1, 4, 1, 8)]
)
def test_what_divides_evenly_takes_a_rank_its_share(plan: ParallelLayout) -> None:
    parts = layout_parts(task(), plan)
    assert parts["computing"] == pytest.approx(8 * 4 / 4)
    assert [parts["exposed tp"], parts["exposed dp"]] == pytest.approx([0, 0], abs=1e-20)


@pytest.mark.parametrize(("style", "share"), [("1f1b", 1.0), ("zb-h1", 1 / 3)])
def test_the_bubble_is_the_simulators(style: str, share: float) -> None:
    parts = layout_parts(task(), ParallelLayout(1, 4, 1, 8, schedule=style))
    schedule = schedules.make(style, 4, 8)
    tl = schedule.simulate(Costs(1 / 3, 1 / 3, 1 / 3))
    assert parts["bubble"] == pytest.approx(3 * share)
    assert sum(parts.values()) == pytest.approx(tl.makespan)


def test_a_heavy_head_idles_the_others() -> None:
    even, heavy = (
        layout_parts(task(ends_cost=LayerCost(0.0, each)), ParallelLayout(1, 4, 1, 8)) for each in (0.0, 2.0)
    )
    assert heavy["computing"] == pytest.approx(even["computing"] + 8 * 2 / 4)
    assert heavy["bubble"] == pytest.approx(4 + 2 + 7 * 3 - heavy["computing"])  # sum + 7 largest, less work


def test_a_fixed_cost_is_paid_for_each_microbatch() -> None:
    each = LayerCost(0.5, 1.0)
    few, many = (layout_parts(task(block_cost=each), ParallelLayout(1, 4, 1, m))["computing"] for m in (2, 8))
    assert many - few == pytest.approx(6 * 0.5)


def test_bytes_and_memory_are_what_is_recorded() -> None:
    """On two ranks, each axis alone; bytes exactly, memory as a model."""
    samples = 8
    made = task(batch=samples)
    plans = [ParallelLayout(2), ParallelLayout(2, zero_stage=3), ParallelLayout(1, 2, 1, 4),
             ParallelLayout(tp=2), ParallelLayout(tp=2, sequence_parallel=True),
             ParallelLayout(tp=2, recomputation="full"),
             ParallelLayout(1, 2, 1, 4, schedule="interleaved", chunks=2),
             ParallelLayout(cp=2), ParallelLayout(cp=2, context_parallel="ulysses")]  # fmt: skip
    with hpnb.Ranks(2, device="cpu") as pool:
        for plan in plans:
            ran = gpt2_hybrid.run_layout(pool, SMALL, samples, torch.float32, plan, FREE, repeats=1)
            exact = ran.bytes / layout_bytes(made, plan)
            # norms are whole on ranks of tp; shares of odd sizes are padded
            loose = 4e-2 if plan.tp == 2 else 2e-3 if plan.zero_stage else 1e-9
            assert exact == pytest.approx(1.0, abs=loose), plan
            assert 0.8 < ran.peak / layout_memory(made, plan) < 1.2, plan
            assert all(took >= 0 for took in ran.parts.values())
            assert ran.seconds == pytest.approx(sum(ran.parts.values()))
            assert (ran.parts["bubble"] > 0) == (plan.pp > 1) or ran.source == "measured"
            slow = ran.parts_on(Link(0.0, 1e4))
            assert [slow["exposed tp"] > 0, slow["exposed cp"] > 0] == [plan.tp > 1, plan.cp > 1]
            assert len(ran.losses) == 3
            assert [record.peak > 0 for record in ran.records] == [True, plan.pp == 2], plan


CONTEXT = GPT2Size(hidden=24, layers=4, heads=4, mlp=96, vocab_size=101, length=16)
CONTEXT_PLANS = (
    ParallelLayout(2, cp=2), ParallelLayout(1, 2, 1, 4, cp=2), ParallelLayout(2, cp=2, recomputation="full"),
    ParallelLayout(1, 1, 2, cp=2, context_parallel="ulysses"), ParallelLayout(2, cp=2, zero_stage=1),
)  # fmt: skip


@pytest.mark.slow  # cp alone is above
def test_layouts_with_cp_have_the_losses_bytes_and_messages_that_are_predicted() -> None:
    link = Link(1e-5, 1e9)
    made = task(block=CONTEXT.block(1, None, 4), inside=link)
    with hpnb.Ranks(4, device="cpu") as pool:
        runs = {
            str(plan): gpt2_hybrid.run_layout(pool, CONTEXT, 8, torch.float32, plan, link, repeats=1)
            for plan in (ParallelLayout(4), *CONTEXT_PLANS)
        }
    apart, _, tolerance = gpt2_hybrid_words.losses_apart(runs, torch.float32)
    for losses in ([math.nan, 1.0, 1.0], [1.0, math.nan, 1.0]):
        strange: Any = {
            name: SimpleNamespace(losses=[2.0, loss]) for name, loss in zip("abc", losses, strict=True)
        }
        far, _, limit = gpt2_hybrid_words.losses_apart(strange, torch.float32)
        assert not far < limit
    assert apart < tolerance
    assert gpt2_hybrid_words.exposed_cp(runs).keys() == {"ring", "ulysses"}
    for name, ran in runs.items():
        plan = ran.layout
        loose = 1e-2 if plan.tp > 1 else 1e-3 if plan.zero_stage else 1e-9  # norms are whole on ranks of tp
        assert ran.bytes / layout_bytes(made, plan) == pytest.approx(1.0, abs=loose), name
        assert 0.8 < ran.peak / layout_memory(made, plan) < 1.2, name
        if ran.source == "replayed":
            expected = layout_parts(made, plan)["exposed cp"]
            assert ran.parts["exposed cp"] == pytest.approx(expected), name
            assert (expected > 0) == (plan.cp > 1)


def test_cp_is_replicas_and_messages_of_attention() -> None:
    """As many tokens a rank as with dp, and gradients over as many ranks; a ring sends keys and values."""
    link = Link(0.0, 1e6)
    made = task(block=CONTEXT.block(1, None, 4), inside=link, optimizer_cost=1e-3)
    alone, ring = (layout_parts(made, plan) for plan in (ParallelLayout(4, zero_stage=1), CONTEXT_PLANS[-1]))
    assert {part: ring[part] for part in ring if part != "exposed cp"} == pytest.approx(
        {part: alone[part] for part in alone if part != "exposed cp"}
    )
    keys_and_values = 2 * 4 * (16 / 2) * 24 * 4  # of four samples, half of the tokens; 4 bytes a value
    assert ring["exposed cp"] == pytest.approx(4 * 3 * keys_and_values / 1e6)  # there, and twice back
    again = layout_parts(made, replace(CONTEXT_PLANS[-1], recomputation="full"))
    assert again["exposed cp"] == pytest.approx(4 * 4 * keys_and_values / 1e6)
    ulysses = layout_parts(made, ParallelLayout(2, cp=2, context_parallel="ulysses"))
    assert ulysses["exposed cp"] == pytest.approx(4 * 8 * keys_and_values / 2 / 2 / 1e6)


def test_the_loss_and_earlier_microbatches_take_memory() -> None:
    """In 16 bits a logit takes 2 bytes, and 4 for each copy in float32. Gradients outlive microbatches."""
    made, vocab = task(block=SMALL.block(1, None, 2)), 1_000_000
    for t, copies in ((1, 3), (2, 2)):
        plan = ParallelLayout(tp=t)
        less, more = (layout_memory(replace(made, vocab_size=n * vocab), plan) for n in (1, 2))
        states, loss = (2 + 12) * SMALL.hidden, (2 + 4 * copies) * made.tokens
        assert more - less == pytest.approx(vocab * (states + loss) / t)
    # 1F1B's first stage of two holds two microbatches: with two there is no gradient yet, with four there is
    two, four = (replace(made, batch=m) for m in (2, 4))
    stage = 2 * made.block.parameters + (101 + 16) * SMALL.hidden
    more = layout_memory(four, ParallelLayout(1, 2, 1, 4)) - layout_memory(two, ParallelLayout(1, 2, 1, 2))
    assert 0 < more <= 2 * stage


def count_timed_collectives() -> tuple[int, int]:
    """Of four collectives along two axes, those that are timed along tp; the same after the block."""
    mesh = hpnb.Mesh(ParallelLayout(dp=2, tp=2))
    with gpt2_hybrid._timed_collectives(mesh.tp) as spent:
        for axis in (mesh.dp, mesh.tp, mesh.dp, mesh.tp):
            hpnb.comm.all_reduce(torch.ones(4), axis)
    timed = len(spent)
    hpnb.comm.all_reduce(torch.ones(4), mesh.tp)
    return timed, len(spent)


def test_collectives_of_tp_are_timed_and_what_tp_does_not_divide() -> None:
    with hpnb.Ranks(4, device="cpu") as pool:
        assert pool.run(count_timed_collectives) == [(2, 2)] * 4
        sharded = {"sequence_parallel": True}
        one, both, sp = (
            gpt2_hybrid.time_undivided(pool, SMALL, 8, torch.float32, plan)
            for plan in (ParallelLayout(4), ParallelLayout(2, 1, 2), ParallelLayout(2, 1, 2, **sharded))
        )
    assert one["norms"] == sp["norms"] == 0.0
    assert math.isfinite(both["norms"])


class OneRank:
    """In the place of a pool: this process."""

    def run(self, work: Callable[..., Any], *args: Any) -> list[Any]:
        return [work(*args)]


class CountedWork(TorchDispatchMode):
    """A clock that a call's launch moves by 1, a matmul by its multiplications, and a norm by its values."""

    seconds = 1.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.seconds += args[0].numel() * args[1].shape[1]
        if func is torch.ops.aten.native_layer_norm.default:
            self.seconds += args[0].numel()
        return func(*args, **(kwargs or {}))


def test_launches_hardly_count_in_what_tp_does_not_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in the time of a block already, with tp and without."""

    def count(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
        counted = {}
        for name, call in calls.items():
            with CountedWork() as work:
                call()
            counted[name] = [work.seconds]
        return counted

    monkeypatch.setattr(rank_rates, "seconds_in_turn", count)
    plan = ParallelLayout(2, 1, 2)  # four samples and four blocks a rank, two norms in a block
    pool: Any = OneRank()
    took = rank_rates.time_undivided(pool, SMALL, 8, torch.float32, plan)
    assert took["norms"] == 4 * 2 * (4 * SMALL.length * SMALL.hidden) / 2
    assert took["thin matmuls"] == 4 * (1 - 1 / 2)  # the first product of a row is launched, others overlap


def test_recomputation_chunks_and_calls_are_priced() -> None:
    full = layout_parts(task(), ParallelLayout(2, recomputation="full"))["computing"]
    assert full == pytest.approx(4 / 3 * layout_parts(task(), ParallelLayout(2))["computing"])
    one, two = (
        layout_parts(task(), ParallelLayout(1, 2, 1, 8, schedule=name, chunks=v))["bubble"]
        for name, v in (("1f1b", 1), ("interleaved", 2))
    )
    assert two == pytest.approx(one / 2)
    calls = layout_parts(task(call_cost=0.5), ParallelLayout(1, 1, 4))["computing"]
    assert calls == pytest.approx(8 + 0.5 * (4 * 4 + 2))
    less = layout_memory(task(), ParallelLayout(2, recomputation="full"))
    assert less < layout_memory(task(), ParallelLayout(2))


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (ParallelLayout(schedule="zb-v"), "zb-v with 2 chunks"),
        (ParallelLayout(tp=4, tp_mode="2d"), "tp_mode='2d'"),
        (ParallelLayout(3), "batch of 8 .* 3 pipelines"),
        (ParallelLayout(1, 8, 1, 8), "4 blocks of 5 heads"),
        (ParallelLayout(1, 2, 1, 8, 1), "dp=1"),
        (ParallelLayout(2, 2, 1, 4, 3), "ZeRO 3"),
        (ParallelLayout(recomputation="attention"), "recomputation='attention'"),
        (ParallelLayout(2, ep=2), "ep=2"),
        (ParallelLayout(cp=3), "16 tokens cannot be split into 6"),
        (ParallelLayout(tp=2, cp=4, context_parallel="ulysses"), "each of 4 ranks a head"),
        (ParallelLayout(cp=2, context_parallel="all-gather"), "all-gather"),
        (ParallelLayout(1, 2, 1, 1, schedule="interleaved", chunks=2), "multiple of 2 microbatches"),
    ],
)
def test_layouts_that_cannot_be_predicted_are_refused(layout: ParallelLayout, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        layout_parts(task(), layout)


def test_layouts_of_four_ranks() -> None:
    found = theory.task_layouts(task(), 4, 2, (0, 1))
    assert {str(plan) for plan in found} == {
        "dp 4", "dp 4, ZeRO 1", "dp 2 x tp 2", "dp 2 x tp 2, ZeRO 1", "dp 2 x pp 2", "dp 2 x pp 2, ZeRO 1",
        "tp 4", "pp 2 x tp 2", "pp 4",
    }  # fmt: skip
    assert {plan.num_microbatches for plan in found if plan.pp == 4} == {4}


# --- a step, taken apart -----------------------------------------------------------------------------


def test_parts_of_a_recorded_step_add_up() -> None:
    """Two ranks: what computing does not cover is tp's, then dp's, then idle."""
    events = (
        Event(0, 0, "F", 0, 0.0, 2.0),
        Event(0, -1, "all_reduce", -1, 2.0, 3.0, "tp", 8.0, (0, 1)),
        Event(0, 0, "B", 0, 3.0, 6.0),
        Event(0, -1, "all_reduce", -1, 5.0, 8.0, "dp", 8.0, (0, 2)),
        Event(0, -1, "optimizer", -1, 9.0, 10.0),
        Event(1, 0, "F", 0, 1.0, 2.0),
        Event(1, 0, "B", 0, 2.0, 6.0),
        Event(1, -1, "compute", -1, 6.0, 7.0),
    )
    parts = step_breakdown.split_step(Timeline(events))
    expected = {"computing": 5.0, "exposed tp": 0.5, "exposed cp": 0.0, "exposed dp": 1.5, "optimizer": 0.5}
    assert parts == pytest.approx({**expected, "bubble": 2.5})
    axes = {"tp": "cp", "dp": "dp_cp"}  # gradients are summed along dp and cp together
    along_cp = Timeline(tuple(replace(event, axis=axes.get(event.axis, "")) for event in events))
    moved = {"exposed tp": 0.0, "exposed cp": 0.5, "bubble": 2.5}
    assert step_breakdown.split_step(along_cp) == pytest.approx(expected | moved)


def test_layouts_that_differ_by_less_than_repeats_are_tied() -> None:
    def run(*steps: float) -> Any:
        schedule, layout = schedules.make("1f1b", 1, 1), ParallelLayout()
        actions = [dict.fromkeys(schedule.actions[0], took / 2) for took in steps]
        record = step_breakdown.RankRecord({"pp": 0}, actions=actions, optimizer=[0.0] * len(steps))
        return gpt2_hybrid.LayoutRun(layout, [record], schedule, FREE, 0.0, 0.0)

    runs = {"a": run(9.5, 10.5), "b": run(11.0, 11.0), "c": run(20.0, 20.0)}
    assert runs["a"].seconds_of_repeats == pytest.approx([9.5, 10.5])
    took = {name: one.seconds for name, one in runs.items()}
    judged = gpt2_hybrid_words.ties(runs, took, ["b", "c", "a"])
    assert judged["spread"] == (pytest.approx(100 / 9.5), "%")
    assert judged["first"] == "the first 2 layouts are tied"
    assert (judged["decided"], judged["order"]) == (2, 1)  # b and c; not a and c, and a and b are tied
    assert judged["alone"] == "The first one, yes"  # b is tied with a, which is the fastest
    assert gpt2_hybrid_words.ties(runs, took, ["c", "a", "b"])["alone"] == "Not here"
    runs["a"] = run(10.0, 10.0)
    assert gpt2_hybrid_words.ties(runs, took, ["a", "b", "c"])["first"] == "no layout is tied with the first"
    assert gpt2_hybrid_words.fit_in_words(["a", "c"], ["a", "b"]) == "the predicted ones without b and with c"
    assert gpt2_hybrid_words.fit_in_words(["b", "a"], ["a", "b"]) == "the predicted ones"


def test_what_a_race_decides_is_put_into_words() -> None:
    names = {"1 x": "dp 8", "0.1 x": "dp 8", "0.01 x": "dp 8"}
    costs = dict.fromkeys(names, 0.0)
    same = {"fastest, replayed": names, "fastest, predicted": names, "prediction costs (%)": costs}
    words = gpt2_hybrid_words.links_in_words(same)
    assert words == "On all three links dp 8 is fastest, and it is predicted to be"
    other = same | {"fastest, replayed": names | {"0.01 x": "pp 8"}}
    assert "pp 8 with a hundredth. All three" in gpt2_hybrid_words.links_in_words(other)
    wrong = other | {"prediction costs (%)": costs | {"0.01 x": 50.0}}
    assert gpt2_hybrid_words.links_in_words(wrong).endswith("lose up to 50.0 %")
    took = {"dp 8": 1.0, "tp 8": 1.5}
    assert gpt2_hybrid_words.choice_in_words("dp 8", "dp 8", took) == "chose it, too"
    assert gpt2_hybrid_words.choice_in_words("tp 8", "dp 8", took) == "chose tp 8, which takes 50.0 % longer"


def test_misses_are_those_of_layouts_with_tp_with_cp_and_with_neither() -> None:
    schedule = schedules.make("1f1b", 1, 1)
    layouts = {"a": ParallelLayout(8), "b": ParallelLayout(4), "t": ParallelLayout(tp=2, cp=4),
               "c": ParallelLayout(cp=8)}  # fmt: skip
    runs = {n: gpt2_hybrid.LayoutRun(one, [], schedule, FREE, 0.0, 0.0) for n, one in layouts.items()}
    took = {"a": 1.0, "b": 3.0, "t": 4.0, "c": 5.0}
    misses = gpt2_hybrid_words.misses_by_axis(runs, took, dict.fromkeys(layouts, 2.0))
    assert misses == {
        "with-tp.least": 2, "with-tp.most": 2, "neither.least": 0.5, "neither.most": 1.5,
        "with-cp.least": 2.5, "with-cp.most": 2.5,
    }  # fmt: skip


def test_a_measured_step_on_another_link_is_replayed() -> None:
    """So the table's column says so, though the run itself was measured."""
    events = (
        Event(0, 0, "F", 0, 0.0, 1.0),
        Event(0, 0, "B", 0, 1.0, 2.0),
        Event(0, -1, "optimizer", -1, 2.0, 3.0),
    )
    record = step_breakdown.RankRecord({"pp": 0}, timelines=[Timeline(events)])
    run = gpt2_hybrid.LayoutRun(ParallelLayout(), [record], schedules.make("1f1b", 1, 1), FREE, 0.0, 0.0)
    assert run.source == "measured"
    table = gpt2_hybrid_words.replay_on_links({"1 rank": run}, task(), (1, 0.1), {})
    assert list(table) == ["fastest, replayed", "fastest, predicted", "prediction costs (%)"]


def test_titles_follow_what_the_run_recorded() -> None:
    def idle(*stages: list[tuple[float, float]]) -> str:
        events = [
            Event(r, r, "F", k, *span) for r, spans in enumerate(stages) for k, span in enumerate(spans)
        ]
        return gpt2_hybrid_words.idle_in_words(Timeline(tuple(events)))

    assert (
        idle([(0, 4), (8, 10)], [(1, 9)])
        == "Stage 0 idles most inside the step, stage 1 idles most at its ends"
    )
    assert idle([(0, 5), (5, 10)], [(0, 1), (9, 10)]).startswith(
        "Stage 0 hardly idles, stage 1 idles most in"
    )
    resumed = gpt2_hybrid_words.resumed_in_words
    assert resumed([1.0, 2.0], [1.0, 2.0, 3.0]).startswith("Resumed: all 2 losses")
    assert resumed([1.0, 2.5], [1.0, 2.0, 3.0]).startswith("Resumed: 1 of 2 losses")


# --- figures -----------------------------------------------------------------------------------------


def test_a_waterfall_ends_where_its_parts_do() -> None:
    measured = {
        "dp 2": {"computing": 0.02, "exposed dp": 0.01},
        "tp 2": {"computing": 0.02, "exposed tp": 0.03},
    }
    fig = figures.waterfall(measured, {"tp 2": {"computing": 0.03, "exposed tp": 0.03}})
    (exposed,) = (c.get_paths() for c in fig.axes[0].collections if c.get_label() == "exposed tp")
    x = exposed[0].vertices[:, 0]
    assert (x.min(), x.max()) == pytest.approx((20, 50))
    ticks = [line.get_xdata()[0] for line in fig.axes[0].lines]
    assert max(ticks) == pytest.approx(60)
    assert any("a part of 0 s has none" in text.get_text() for text in fig.texts)
    with pytest.raises(ValueError, match="waiting"):
        figures.waterfall({"dp 2": {"waiting": 1.0}})


def test_a_killed_run_shows_its_save_and_its_kill() -> None:
    losses = [3.0, 2.0, 1.5, 1.2]
    fig = figures.resumed([("saved", losses[:2]), ("resumed", losses[2:])], losses[2:3], losses, "resumed")
    (cross,) = (line for line in fig.axes[0].lines if line.get_label() == "killed")
    assert (cross.get_xdata()[0], cross.get_ydata()[0]) == (3, 1.5)
    words = " ".join(text.get_text() for text in fig.axes[0].texts)
    assert "saved after step 2" in words
    assert "killed after step 3,\n1 steps lost" in words


def test_the_axis_of_speed_begins_near_the_slowest_and_not_below_0() -> None:
    far = {"a": (1.0, 80.0), "b": (2.0, 100.0)}
    assert figures.choices(far).axes[0].get_ylim()[0] == pytest.approx(76.0)
    near = {"a": (1.0, 1.0), "b": (2.0, 100.0)}
    assert figures.choices(near).axes[0].get_ylim()[0] == 0.0
    assert "CPU time" in gpt2_hybrid_words.clock_in_words("cpu")
    assert "GPU" in gpt2_hybrid_words.clock_in_words("cuda")


def test_a_frontier_has_what_nobody_beats() -> None:
    points = {"a": (1.0, 1.0), "b": (2.0, 3.0), "c": (3.0, 2.0), "d": (4.0, 4.0), "e": (2.0, 2.0)}
    assert figures.frontier_of(points) == ["a", "b", "d"]
    fig = figures.choices(points, points, {"b": "yours"}, capacity=3.5)
    (ring,) = (line for line in fig.axes[0].lines if line.get_label() == "chosen: b")
    assert (ring.get_xdata()[0], ring.get_ydata()[0]) == (2.0, 3.0)
    (stair,) = (line for line in fig.axes[0].lines if line.get_label() == "_frontier")
    corners = [(1, 1), (2, 1), (2, 3), (4, 3), (4, 4)]
    assert set(zip(*stair.get_data(), strict=True)) == set(corners)


CROWD = {  # {layout: (bytes, tokens a second)}, in a crowd as of the page's layouts
    "dp 2 x pp 4, zb-h1": (24.4, 10.29), "dp 2 x pp 4, interleaved, 2 chunks": (24.7, 10.1),
    "dp 2 x pp 4": (24.5, 9.29), "dp 4 x pp 2, ZeRO 1": (25.1, 9.03), "pp 8": (20.2, 8.67),
    "dp 4 x tp 2": (32.1, 8.09), "dp 2 x tp 4, ZeRO 1, sequence parallel": (24.6, 4.39),
}  # fmt: skip
AHEAD = {
    "dp 2 x pp 4, zb-h1": (26.6, 10.86), "dp 2 x pp 4, interleaved, 2 chunks": (23.5, 10.0),
    "dp 2 x pp 4": (23.5, 8.44), "dp 4 x pp 2, ZeRO 1": (24.2, 8.51), "pp 8": (19.3, 7.63),
    "dp 4 x tp 2": (32.1, 9.7), "dp 2 x tp 4, ZeRO 1, sequence parallel": (25.0, 5.67),
}  # fmt: skip


def crossing(first: Any, second: Any) -> bool:
    (a, b), (c, d) = first, second

    def side(p: Any, q: Any, r: Any) -> float:
        return float((q[0] - p[0]) * (r[1] - p[1]) - (q[1] - p[1]) * (r[0] - p[0]))

    return side(a, b, c) * side(a, b, d) < 0 and side(c, d, a) * side(c, d, b) < 0


def test_names_of_a_crowd_stand_beside_their_dots_and_their_lines_do_not_cross() -> None:
    fig = figures.choices(CROWD, AHEAD, {"pp 8": "fits", "dp 2 x pp 4, zb-h1": "fastest"}, capacity=21.3)
    (ax,) = fig.axes
    fig.canvas.draw()
    boxes = {
        gid.removeprefix("name of "): text.get_window_extent()
        for text in ax.texts
        if (gid := text.get_gid() or "").startswith("name of ")
    }
    assert boxes.keys() == CROWD.keys()
    at, ahead = (
        {name: ax.transData.transform(point) for name, point in side.items()} for side in (CROWD, AHEAD)
    )
    starts = {tuple(point): name for name, point in CROWD.items()}
    lines = {
        starts[tuple(ends[0])]: ax.transData.transform(ends)
        for line in ax.lines
        if line.get_linewidth() == 0.7 and (ends := line.get_xydata()) is not None
    }
    assert lines  # the crowd has no room for all names
    for one, other in itertools.combinations(CROWD, 2):
        assert not boxes[one].overlaps(boxes[other]), (one, other)
        if one in lines and other in lines:
            assert not crossing(lines[one], lines[other]), (one, other)

    def gap(name: str, point: Any) -> float:
        box = boxes[name]
        return math.dist(point, (np.clip(point[0], box.x0, box.x1), np.clip(point[1], box.y0, box.y1)))

    for name in boxes:
        nearest = min(gap(name, side[n]) for side in (at, ahead) for n in CROWD if n != name)
        if name in lines:
            assert gap(name, lines[name][1]) < 8  # pixels: it leads to the words
            assert nearest > 8
        else:
            assert gap(name, at[name]) < nearest


def test_a_prediction_has_its_name_beside_its_own_dot() -> None:
    worst = "dp 2 x pp 4, zb-h1"
    fig = figures.choices(CROWD, AHEAD, {"pp 8": "fits"}, 21.3, named_predictions=[worst])
    (ax,) = fig.axes
    fig.canvas.draw()
    (text,) = (text for text in ax.texts if text.get_gid() == f"name of {worst}, predicted")
    assert text.get_text().replace("\n", " ") == f"{worst}, predicted"
    box = text.get_window_extent()

    def gap(point: Any) -> float:
        x, y = ax.transData.transform(point)
        return math.dist((x, y), (np.clip(x, box.x0, box.x1), np.clip(y, box.y0, box.y1)))

    others = [*CROWD.values(), *(point for name, point in AHEAD.items() if name != worst)]
    assert gap(AHEAD[worst]) < min(map(gap, others))


# --- regret ------------------------------------------------------------------------------------------


def test_regret_of_rules_of_thumb_predictions_and_guesses() -> None:
    costs = {"x": 1.2, "y": 1.0}
    told = [
        Outcome("01.a", "?", "model", guess=2.0, predicted=3.0, truth=3.0, rule_of_thumb=6.0),
        Outcome("01.b", "?", "ranking", guess=("x",), predicted=("y",), truth=("y", "x"), costs=costs),
        Outcome("02.a", "?", "model", guess=None, predicted=1.0, truth=2.0),
        Outcome("02.b", "?", "identity", guess=4.0, predicted=4.0, truth=4.0, seen=True),
        Outcome("08.a", "?", "model", guess=1.0),
    ]
    write_outcomes({outcome.key: outcome for outcome in told})
    score = regret.show_regret("08.regret")
    guess, predicted, rule = score["your guess"], score["prediction"], score["rule of thumb"]
    assert (guess.answered, guess.right) == (2, 0)
    assert sorted(guess.regrets) == pytest.approx([0.2, 0.5])
    assert (predicted.answered, predicted.right, predicted.median) == (4, 3, 0.0)
    assert (rule.answered, rule.regrets) == (1, pytest.approx((1.0,)))
    write_outcomes({})
    assert regret.show_regret("08.regret")["your guess"].median is None


# --- a run, killed -----------------------------------------------------------------------------------


def fine_tune(recipe: Any, folder: str, hooks: Any = ()) -> Any:
    plugin = hpnb.HybridParallelPlugin(precision=recipe.precision, seed=0)
    model, collate = recipe.build()
    train = plugin.prepare_dataloader(recipe.train, recipe.batch, collate_fn=collate)
    adam: Any = torch.optim.AdamW(model.parameters(), lr=recipe.lr)
    booster = hpnb.Booster(plugin=plugin)
    model, adam, *_ = booster.boost(model, adam)
    log = paraphrases.StepLog(folder)
    trainer = hpnb.Trainer(booster, model, adam, hooks=[log, *hooks], display_progress=False)
    if folder:
        trainer.resume(folder, missing_ok=True)
    return log.result(trainer.fit(train, recipe.epochs))


def test_a_rank_is_killed_and_the_run_goes_on(tmp_path: Path) -> None:
    recipe, folder = paraphrases.training_recipe(pairs=96, test=16), str(tmp_path)
    assert "trained from scratch on" in str(recipe)
    assert recipe.data == "96 generated pairs of sentences, instead of MRPC, which is not on this machine"
    hooks = [hpnb.CheckpointHook(folder, 2), paraphrases.KillRankHook(3)]
    with pytest.raises(hpnb.RankError, match="killed by SIGKILL"):
        hpnb.launch(fine_tune, recipe, folder, hooks, ranks=2, device="cpu")
    before = paraphrases.read_log(folder)
    with hpnb.Ranks(2, device="cpu") as pool:
        after = paraphrases.with_losses(pool.run(fine_tune, recipe, folder))
        whole = paraphrases.with_losses(pool.run(fine_tune, recipe, ""))
    assert list(before) == [1, 2, 3]
    assert list(before.values()) == list(whole.losses[:3])
    assert after.losses == whole.losses[2:]
    assert (whole.samples, whole.lr) == (48, recipe.lr)
    assert len(whole.thirds) == 3


def test_pairs_of_a_recipe_are_composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = paraphrases.training_recipe(pairs=12, test=8)
    monkeypatch.setattr(GeneratedSamples, "__getitem__", None)
    assert list(recipe.train) == list(recipe.train)
    assert (len(recipe.train), len(recipe.test), recipe.train.source.name) == (12, 8, "MRPC")


def test_pretrained_weights_are_fine_tuned_where_they_are(tmp_path: Path) -> None:
    recipe = paraphrases.training_recipe(pairs=16, test=16)
    hpnb.models.gpt2(paraphrases.SMALL, seed=3).save_pretrained(tmp_path)
    hpnb.data.bpe_tokenizer(recipe.merges, paraphrases.VOCAB_SIZE).save_pretrained(tmp_path)
    assert paraphrases._at_hand(str(tmp_path))
    assert not paraphrases._at_hand(str(tmp_path / "nothing"))
    real = replace(recipe, weights=str(tmp_path))
    assert (real.precision, str(real)[:10]) == ("auto", "pretrained")
    model, collate = real.build()
    expected = hpnb.models.gpt2(paraphrases.SMALL, seed=3).transformer.h[0].attn.c_attn.weight
    assert torch.equal(model.transformer.h[0].attn.c_attn.weight, expected)
    batch = collate([recipe.train[i] for i in range(4)])
    assert model(**batch).loss.isfinite()


# --- exercises ---------------------------------------------------------------------------------------


def test_planted_tables_differ_in_what_is_to_be_said() -> None:
    causes = [cause for _, _, cause in exercises.tables()]
    assert sorted(causes) == ["kernels", "link", "norms", "stages"]


def test_three_jobs_want_three_plans() -> None:
    best = []
    for task in exercises.TASKS.values():
        layouts = exercises.fitting_layouts(task)
        best.append(str(min(layouts, key=task.gpu_seconds)))
        assert not any(task.exceeded(layout) for layout in layouts)
    assert len(set(best)) == 3


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ([1.0, 1.0, 9.0, 1.0, 1.0], "step 3 is off by .* .before the resume."),
        ([1.0, 1.0, 1.0, 9.0, 1.0], "step 4 is off by .* weights, or the samples"),
        ([1.0, 1.0, 1.0, 1.0, 9.0], "step 5 is off by .* moments, or the learning rate"),
    ],
)
def test_a_loss_that_is_off_gets_a_hint(losses: list[float], words: str) -> None:
    found = exercises.compare_losses("losses", losses, [1.0] * 5, saved=3)
    assert not found.ok
    assert re.search(words, found.text)


def test_how_far_weights_went_is_a_norm() -> None:
    model = torch.nn.Linear(2, 1)
    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        model.weight += torch.tensor([[3.0, 0.0]])
        model.bias += 4.0
    assert exercises.weights_moved(model, before) == pytest.approx(5.0)


def statuses(findings: Iterable[lesson.Finding]) -> list[bool]:
    return [finding.ok for finding in findings]


def test_choices_are_judged() -> None:
    def replicas(job: exercises.BudgetedTask) -> ParallelLayout:
        return ParallelLayout(job.ranks)

    found = lesson.check(exercises.choose_layout, replicas).findings
    assert statuses(found) == [False, False, False] or statuses(found)[1:] == [False, False]
    assert "more than 16" in found[1].text
    assert statuses(lesson.check(exercises.choose_layout, lambda job: "dp 8").findings) == [False]

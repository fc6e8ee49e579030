"""Notebook 10: its figures, and what it runs on ranks."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import hpnb
from hpnb import theory
from hpnb.context_parallel import BlockAttention, Ring, parallelize
from hpnb.lesson.exercises.long_contexts import BlockStream
from hpnb.lesson.figures import long_contexts as figures
from hpnb.lesson.programs import context_replay, long_contexts
from hpnb.theory.context import Attention


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPNB_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def two() -> Any:
    with hpnb.Ranks(2, device="cpu", timeout=60) as pool:
        yield pool


# --- figures -----------------------------------------------------------------------------------------


def test_work_is_counted_in_visible_pairs() -> None:
    assert figures.work_per_rank([0, 0, 1, 1]) == [3, 7]
    assert figures.work_per_rank([0, 1, 1, 0]) == [5, 5]
    figure = figures.causal_work({"contiguous": [0, 0, 1, 1], "zigzag": [0, 1, 1, 0]}, title="t")
    assert figure.get_label() == (
        "contiguous: ranks 0 to 1 work on 3, 7 pairs; zigzag: ranks 0 to 1 work on 5, 5 pairs"
    )


def test_a_ring_is_told_step_by_step() -> None:
    figure = figures.ring_steps([[(0, 0.5), (1, 0.0)], [(1, 0.5), (0, 1.0)]])
    assert "Rank 0: step 0, keys of rank 0, 50 % visible; step 1, keys of rank 1, 0 % visible." in str(
        figure.get_label()
    )
    hatched = [patch for patch in figure.axes[0].patches if getattr(patch, "get_hatch", str)()]
    assert len(hatched) == 1


def test_rows_without_a_gradient_have_a_cross_and_no_dot() -> None:
    figure = figures.losses_and_rows({"a": [2.0, 1.0], "b": [2.0, 1.5]}, {"a": [0.1, 0.2], "b": [0.1, 0.0]})
    assert figure.get_label() == "a: 2 of 2 rows get a gradient; b: 1 of 2 rows get a gradient"
    points = [list(line.get_xdata()) for line in figure.axes[1].get_lines()]  # type: ignore[arg-type]
    assert points == [[0, 1], [0], [], [1]]  # dots, then crosses
    ax = figure.axes[1]
    place = ax.transData.transform((0, min(ax.get_yticks())))
    crosses = max(np.max(line.get_ydata(), initial=0.0) for line in ax.get_lines()[2:])
    assert ax.transAxes.inverted().transform(place)[1] > crosses  # they stand below the smallest tick


def test_exposed_times_have_lines_dots_and_round_ticks() -> None:
    lines = {"ring": [1e-3, 2e-4, 1e-3], "Ulysses": [1e-3, 2e-3, 4e-3]}
    figure = figures.exposed_times([256, 512, 1024], lines, {"ring": [1e-3]}, [512])
    (ax,) = figure.axes
    assert [len(line.get_xdata()) for line in ax.get_lines()] == [3, 3, 1]  # type: ignore[arg-type]
    assert [ax.xaxis.get_major_formatter()(x) for x in ax.get_xticks()] == ["256", "512", "1,024"]


def test_exposed_times_show_the_quartiles_of_each_way_beside_each_other() -> None:
    lines = {"ring": [1e-3, 2e-3], "Ulysses": [1e-3, 2e-3]}
    bars = {"ring": [(5e-4, 2e-3)], "Ulysses": [(9e-4, 1e-3)]}
    figure = figures.exposed_times([256, 512], lines, {way: [1e-3] for way in lines}, [512], bars)
    paths = [path for collection in figure.axes[0].collections for path in collection.get_paths()]
    drawn = [np.asarray(path.vertices).tolist() for path in paths]
    assert [(low[1], high[1]) for low, high in drawn] == [(5e-4, 2e-3), (9e-4, 1e-3)]
    dots = [float(np.asarray(line.get_xdata())[0]) for line in figure.axes[0].get_lines()[2:]]
    assert [low[0] for low, _ in drawn] == dots
    assert dots[0] < dots[1]
    assert "quartiles" in {text.get_text() for text in figure.texts}


def test_the_crossings_that_the_page_tells_are_those_of_its_explorer() -> None:
    explorer = importlib.import_module("hpnb.lesson.explorers.ring_or_ulysses")

    def less_exposed(tokens: int, kv_heads: int) -> str:
        ways, _ = explorer.exposed(8 * tokens, 32, kv_heads, 8, "InfiniBand NDR")
        return str(min(ways, key=lambda way: ways[way]))

    assert [less_exposed(tokens, 32) for tokens in (17_000, 18_000)] == ["Ulysses", "ring"]
    assert [less_exposed(tokens, 8) for tokens in (2_500, 3_000)] == ["Ulysses", "ring"]
    for kv_heads in (32, 8):
        first = explorer.ring_exposes_less_from(32, kv_heads, 8, "InfiniBand NDR")
        assert [less_exposed(tokens, kv_heads) for tokens in (first - 1, first)] == ["Ulysses", "ring"]
    assert explorer.ring_exposes_less_from(2, 2, 8, "InfiniBand NDR") == 1  # Ulysses needs 8 heads


def test_packed_all_to_alls_send_the_same_bytes_in_half_the_messages() -> None:
    shape, latency, bandwidth = Attention(64, 8, 8, 16, 1, 4), theory.Link(1.0, 1e30), theory.Link(0.0, 1.0)
    one_by_one = theory.context.ulysses_exposed
    assert long_contexts.packed_exposed(shape, 4, latency) == one_by_one(shape, 4, latency).total / 2
    assert long_contexts.packed_exposed(shape, 4, bandwidth) == one_by_one(shape, 4, bandwidth).total


def test_the_prose_names_the_winner_at_each_length_and_admits_close_races() -> None:
    seconds = {"ring": [1.0, 4.0, 4.0], "Ulysses": [2.0, 3.0, 9.0], "Ulysses, packed": [3.0, 5.0, 3.9]}
    words = long_contexts.wins_in_words(seconds, [1000, 2000, 4000])
    assert words == (
        "packed Ulysses exposes less than the ring at 4,000 tokens, and unpacked Ulysses at 2,000"
    )
    alone = long_contexts.wins_in_words({"ring": [1.0], "Ulysses": [1.1], "Ulysses, packed": [1.1]}, [64])
    assert alone == "the ring exposes least at every length"


def test_the_largest_gap_has_its_step() -> None:
    assert long_contexts.largest_gap([3.0, 2.0, 1.0], [3.0, 2.5, 1.25]) == {"most": 0.5, "step": 2}


def test_the_prose_says_from_where_a_step_covers_its_message() -> None:
    def words(*computing: float) -> str:
        parts = [{"computing of a forward step": took, "message of a ring": 1.0} for took in computing]
        runs = [long_contexts.Replayed(0.0, 0.0, 0.0, 0.0, 0.0, part, {}) for part in parts]
        return long_contexts.covers_in_words(runs, [1000, 2000, 4000])

    assert words(2, 2, 2) == "at every length"
    assert words(0, 0, 0) == "at none of these lengths"
    assert words(0, 2, 2) == "from 2,000 tokens on"
    assert words(2, 0, 2) == "at 1,000 and 4,000 tokens"


def test_the_prose_says_where_bars_touch() -> None:
    def words(*rings: tuple[float, float]) -> str:
        runs = [long_contexts.Replayed(0.0, 0.0, 0.0, 0.0, 0.0, {}, {},
                                       {"ring": ring, "Ulysses, packed": (2.0, 3.0)})
                for ring in rings]  # fmt: skip
        return long_contexts.touching_in_words(runs, [1000, 2000][: len(runs)])

    assert words((0.0, 1.9), (3.1, 4.0)) == "The bars of the two touch at no length"
    assert "at 2,000 tokens; there, this run can't say" in words((0.0, 1.9), (0.0, 2.0))
    assert "at every length, so" in words((2.1, 2.2), (3.0, 4.0))


def test_what_computing_covers_leaves_the_last_message_aside() -> None:
    def covered(ring: float) -> float:
        return long_contexts.Replayed(ring, 0.0, 0.0, 9.0, 1.0, {}, {}).covered

    assert [covered(ring) for ring in (9.0, 5.0, 1.0)] == [0.0, 0.5, 1.0]


# --- on ranks ----------------------------------------------------------------------------------------


def compare(alone: bool) -> long_contexts.Compared:
    axis = long_contexts.context_axis()
    places = torch.arange(8).chunk(axis.size)[axis.rank]

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if not alone:
            k, v = (hpnb.comm.all_gather(part, axis, 2) for part in (k, v))
        mask = places[:, None] >= (places if alone else torch.arange(8))
        return F.scaled_dot_product_attention(q, k, v, mask)

    return long_contexts.compare_with_full(layer, long_contexts.random_qkv(8), places, axis)


def test_an_attention_that_sees_its_own_rank_only_is_far_off(two: Any) -> None:
    right, wrong = two.run(compare, False), two.run(compare, True)
    assert max(max(found.distances.values()) for found in right) < 1e-12
    assert {found.sent.forward for found in right} == {2 * 8 * 8 * 16 * 8 / 2}  # k and v, gathered
    assert all(min(found.distances.values()) > 0.1 for found in wrong)  # on each rank that of the worst
    assert {found.sent.total for found in wrong} == {0}


def test_replayed_times_are_put_together_from_what_was_timed(two: Any) -> None:
    shapes = [Attention(64, 2, 2, 8, 1, 4), Attention(512, 2, 2, 8, 1, 4)]
    replayed = two.run(long_contexts.replay_exposed, shapes, torch.float32, theory.Link(1.0, 1.0))[0]
    for times in replayed:
        assert 0 < times.ring <= times.messages < 1.0  # measured, so the link was not asked
        assert 0 < times.ulysses < 1.0
        assert 0 < times.packed < 1.0
        assert times.parts["computing of a backward step"] > 0
        assert times.parts["all-to-all"] == pytest.approx(times.ulysses / 8)
        assert times.parts["message of a ring"] == pytest.approx(times.messages / 3)
        assert times.last == pytest.approx(times.messages / 3)  # of two ranks: k and v, twice, and gradients
        assert times.timed
        medians = {"ring": times.ring, "Ulysses": times.ulysses, "Ulysses, packed": times.packed}
        for way, (low, high) in times.quartiles.items():
            assert low < medians.pop(way) < high  # of rounds on the clock, no two are equal
        assert not medians
    assert long_contexts.source_in_words(times) == "computing and messages were timed"


def ring_by_steps(qkv: tuple[torch.Tensor, ...], dout: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """Output and gradients of q, k and v of all tokens, put together from the steps of all ranks."""
    q, k, v = qkv
    results = [torch.zeros_like(x) for x in (q, q, k, v)]
    alone = hpnb.mesh.Axis("cp", ranks, 0, cast("Any", None), tuple(range(ranks)))
    rings = [Ring.of(replace(alone, rank=rank), q.size(2) // ranks, zigzag=True) for rank in range(ranks)]
    places = [ring.places(q.device) for ring in rings]
    for ring, here in zip(rings, places, strict=True):
        local, seed = q[:, :, here], dout[:, :, here]
        out, lse = torch.zeros_like(local), torch.full(local.shape[:3], -torch.inf, dtype=q.dtype)
        attention, dq = BlockAttention(local, k, v, q.size(-1) ** -0.5), torch.zeros_like(local)
        steps = []
        for source, there in enumerate(places):
            block, sent = (torch.stack([x[:, :, there] for x in pair]) for pair in (qkv[1:], results[2:]))
            steps.append(
                context_replay.RingStep(ring, attention, source, local, block, seed, out, lse, dq, sent)
            )
        for step in steps:
            step.forward()
        for step, there in zip(steps, places, strict=True):
            for total, gradient in zip(results[2:], step.backward(out), strict=True):
                total[:, :, there] = gradient  # the sum so far goes on to the next rank
        results[0][:, :, here], results[1][:, :, here] = out, dq
    return results


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_timed_steps_of_a_ring_compute_what_the_ring_does(kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, 32, 8) for heads in (4, kv_heads, kv_heads, 4)]
    *qkv, dout = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    q, k, v = (x.clone().requires_grad_() for x in qkv)
    right = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    wanted = [right, *torch.autograd.grad(right, (q, k, v), dout)]
    torch.testing.assert_close(ring_by_steps(tuple(qkv), dout, 4), wanted, rtol=1e-12, atol=1e-12)


def merges_and_adds() -> list[bool]:
    """Whether the timed forward changes lse and the timed backward dq."""
    shape = Attention(64, 4, 4, 8, 1, 4)
    calls = context_replay._step_calls(shape, long_contexts.context_axis(), torch.float32)
    step = cast("Any", calls["forward"]).__self__
    before = step.lse.clone(), step.dq.clone()
    calls["forward"]()
    calls["backward"]()
    return [not torch.equal(a, b) for a, b in zip(before, (step.lse, step.dq), strict=True)]


def test_the_steps_that_are_timed_merge_and_add_gradients(two: Any) -> None:
    assert two.run(merges_and_adds) == [[True, True]] * 2


def reload(restart: bool) -> float:
    torch.manual_seed(0)
    model = hpnb.models.gpt2("laptop")
    context = parallelize(model, long_contexts.context_axis(), "ring")
    ids = torch.arange(32).reshape(1, 32)
    batch = {"input_ids": ids, "labels": ids}
    shard = context.shard_batch(batch)
    if restart:
        del shard["position_ids"]
    return long_contexts.reloaded_distance(model, context, batch, shard)


def test_a_model_with_positions_that_restart_is_another_one_when_it_is_loaded(two: Any) -> None:
    assert max(two.run(reload, False)) < 1e-5
    assert max(two.run(reload, True)) > 1e-4


def test_a_stream_counts_the_blocks_that_are_held() -> None:
    k = torch.zeros(1, 6, 2)
    stream = BlockStream(k, k, torch.ones(3, 6, dtype=torch.bool), (2, 2, 2))
    for _ in stream.blocks():
        pass
    assert stream.most_alive == 2  # the loop's variable still holds the last one
    held = BlockStream(k, k, stream.mask, (2, 2, 2))
    assert len(list(held.blocks())) == held.most_alive == 3


def test_words_say_where_the_card_names_another_winner_than_the_replay() -> None:
    lengths = [1000, 2000, 4000]
    card = {"ring": [1.0, 2.0, 1.0], "Ulysses, packed": [1.5, 1.5, 1.5]}

    def words(*rings: float, spread: float = 0.0) -> str:
        runs = [long_contexts.Replayed(ring, 9.0, 1.5, 0.0, 0.0, {}, True,
                                       {"ring": (ring - spread, ring), "Ulysses, packed": (1.5, 1.6)})
                for ring in rings]  # fmt: skip
        return long_contexts.winners_in_words(card, runs, lengths)

    assert words(1.0, 2.0, 1.0) == (
        "In the replay packed Ulysses wins at 2,000 tokens, and the ring wins at 1,000 and 4,000 tokens,"
        " as the card predicts"
    )
    assert words(1.0, 1.0, 1.0) == (
        "In the replay the ring wins at every length. So the card names the wrong winner at 2,000 tokens"
    )
    assert words(2.0, 2.0, 2.0) == (
        "In the replay packed Ulysses wins at every length."
        " So the card names the wrong winner at 1,000 and 4,000 tokens"
    )
    close = "In the replay the ring wins at all other lengths, as the card predicts"
    assert words(1.0, 2.0, 1.0, spread=0.5) == close  # at 2,000 tokens bars touch
    assert words(2.0, 2.0, 2.0, spread=0.5).startswith("So it can't judge")


def test_a_title_counts_lengths_at_which_the_ring_exposes_least() -> None:
    seconds = {"ring": [1.0, 2.0], "Ulysses": [3.0, 3.0], "Ulysses, packed": [1.5, 1.5]}
    words = long_contexts.least_exposed_in_words(seconds)
    assert words == "In the replay's medians, the ring exposes least at 1 of 2 lengths"
    least = long_contexts.least_exposed_in_words({**seconds, "ring": [1.0, 1.0]})
    assert least == "In the replay's medians, the ring exposes least at every length"

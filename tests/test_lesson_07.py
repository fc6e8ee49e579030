"""Notebook 07: heads and vocabularies that do not divide, masks; its figures and checks."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import hpnb
from hpnb import comm, lesson, theory
from hpnb.lesson.exercises import gpt2_tensor_parallel as exercises
from hpnb.lesson.figures import gpt2_tensor as figures
from hpnb.lesson.programs import dropout_masks, gpt2_tensor, layer_memory, vit_tensor
from hpnb.models import GPT2_SIZES, GPT2Size
from hpnb.theory import Block

TINY = GPT2Size(hidden=20, layers=2, heads=5, mlp=80, vocab_size=37, length=12)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPNB_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def three() -> Any:
    with hpnb.Ranks(3, device="cpu", timeout=60) as pool:
        yield pool


# --- theory ------------------------------------------------------------------------------------------------


def test_a_block_takes_as_long_as_the_page_says() -> None:
    block = GPT2_SIZES["1.5b"].block()
    told = {2: (1.04, 1.016), 3: (1.08, 1.032), 4: (1.12, 1.048), 5: (1.0, 1.0), 8: (1.28, 1.111)}
    for t, (attention, whole) in told.items():
        assert theory.imbalance(25, t) == pytest.approx(attention)
        assert theory.block_imbalance(block, t) == pytest.approx(whole, abs=5e-4)
        h, s = block.hidden, block.sequence
        assert theory.block_imbalance(block, t) == pytest.approx(
            1 + (2 * h + s) / (6 * h + s) * (attention - 1)
        )
    assert theory.recomputed_share(block, "attention") == pytest.approx(0.032, abs=5e-4)
    assert theory.recomputed_share(block, "full") == pytest.approx(1 / 3)
    assert theory.recomputed_share(block, "") == 0


@pytest.mark.parametrize("row", theory.ACTIVATION_ROWS, ids=lambda row: row.name)
def test_parts_of_what_is_kept_add_up_to_the_published_formula(row: theory.ActivationRow) -> None:
    block = Block(160, 10, 96, 2)
    for t in (1, 2, 5):
        assert sum(theory.activation_parts(row, block, t).values()) == pytest.approx(row.published(block, t))
    uneven, even = (sum(theory.activation_parts(row, block, 4, even).values()) for even in (False, True))
    assert uneven > even if row.parallel else uneven == even


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: theory.imbalance(3, 4), "3 units cannot be sharded over 4 ranks; use 1 to 3"),
        (lambda: theory.sequence_bytes("tree", 8, 8, 2), "no way 'tree'; there are Megatron, Ulysses, ring"),
    ],
)
def test_bad_numbers_get_a_sentence(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


# --- on ranks ----------------------------------------------------------------------------------------------


def test_bytes_around_blocks_are_those_predicted(three: hpnb.Ranks) -> None:
    sent = three.run(gpt2_tensor.bytes_around_blocks, TINY, 2, torch.float32)
    assert set(sent) == {theory.vocabulary_bytes(TINY.block(2, bytes_per_value=4), 3)}


def gathered_attention(
    x: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, heads: int, axis: Any
) -> torch.Tensor:
    """All tokens on every rank, and this rank's of the result."""
    y = gpt2_tensor.attention(comm.gather(x, axis, 0) @ qkv, heads) @ out
    return comm.split(y, axis, 0)


def wrong_beyond_rank_0(*given: Any) -> torch.Tensor:
    return gathered_attention(*given) + (given[-1].rank > 0)


def compared() -> list[tuple[float, float]]:
    axis = vit_tensor.tensor_axis()
    x, qkv, out = (gpt2_tensor.random_values(*shape) for shape in ((6, 4), (4, 12), (4, 4)))
    layers = (gathered_attention, wrong_beyond_rank_0)
    return [gpt2_tensor.compare_with_serial(layer, x, qkv, out, 2, axis) for layer in layers]


def test_attentions_are_compared_over_all_ranks(three: hpnb.Ranks) -> None:
    for (right, sent), (wrong, _) in three.run(compared):
        assert right < 1e-12
        assert sent == 2 * theory.bytes_sent("all_gather", 6 * 4 * 8, 3)
        assert wrong > 0.1  # on every rank, though the first has the right tokens


def test_a_sharded_gpt2_trains_like_one_process(three: hpnb.Ranks) -> None:
    ids = torch.randint(509, (2, 16), generator=torch.Generator().manual_seed(0))
    for distances in three.run(gpt2_tensor.compare_gpt2, ids):
        assert max(distances.values()) < 1e-12


def test_a_fullest_rank_is_nearer_to_the_formula_or_to_1() -> None:
    apart, close = {"6": [1.0, 1.1], "7": [1.2, 1.3]}, {"6": [1.0, 1.2], "7": [1.1, 1.3]}
    assert "doesn't decide" in gpt2_tensor.nearer_in_words(1.1, 1.12, close)
    assert "nearer to the formula" in gpt2_tensor.nearer_in_words(1.1, 1.12, apart)
    assert "nearer to 1:" in gpt2_tensor.nearer_in_words(1.02, 1.12, apart)


def test_ranks_of_the_cpu_are_those_at_hand_if_as_many(three: hpnb.Ranks) -> None:
    assert gpt2_tensor.cpu_ranks(three, 3) is three
    with gpt2_tensor.cpu_ranks(three, 2) as two:
        assert (two.size, two.choice.device) == (2, "cpu")


def test_a_ring_sends_keys_and_values_twice_and_gradients_once() -> None:
    sent = {way: gpt2_tensor.attention_bytes(way, 64, 192, 4, 8) for way in ("megatron", "ulysses", "ring")}
    unit = 3 / 4 * 64 * 192 * 8
    assert sent == pytest.approx({"megatron": 4 * unit, "ulysses": 2 * unit, "ring": 6 * unit})
    assert gpt2_tensor.least_and_most(sent) == "Fewest bytes of activations by Ulysses, most by the ring"
    on_two = {way: gpt2_tensor.attention_bytes(way, 64, 192, 2, 8) for way in ("megatron", "ulysses")}
    title = gpt2_tensor.least_and_most({**on_two, "ring": 0.0})
    assert title == "Fewest bytes of activations by the ring, most by Megatron's method and Ulysses"


@pytest.mark.parametrize("row", theory.ACTIVATION_ROWS[1:4], ids=lambda row: row.name)
def test_a_layer_keeps_what_is_predicted_where_heads_do_not_divide(
    three: hpnb.Ranks, row: theory.ActivationRow
) -> None:
    size = replace(TINY, hidden=80, mlp=320, length=48)  # 2, 2 and 1 heads
    measured = three.run(layer_memory.kept_bytes, size, 2, row)[0]
    parts = layer_memory.predicted_parts(row, size.block(2), 3, "cpu")
    assert measured == pytest.approx(sum(parts.values()), rel=0.01)
    assert measured > 1.1 * row.published(size.block(2), 3)


def test_recomputed_flops_are_counted() -> None:
    found = gpt2_tensor.recompute_shares(TINY, 2)
    assert found["full"][1] == pytest.approx(found["full"][0])
    predicted, counted = found["attention"]
    assert counted == pytest.approx(predicted / 2)  # the product with v is not needed for its backward


# --- masks -------------------------------------------------------------------------------------------------


def mask_distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """Share of the elements that one of two masks drops and the other keeps."""
    computed = (first >= 0) & (second >= 0)
    return float((first != second)[computed].double().mean())


def recorded_distances(three: hpnb.Ranks, policy: str, sequence: bool = False) -> dict[str, float]:
    first, *_, last = three.run(dropout_masks.record_masks, policy, 0.5, sequence)
    return {place: mask_distance(first[place][:40], last[place][:40]) for place in dropout_masks.PLACES}


def test_only_rank_states_draw_by_the_layout(three: hpnb.Ranks) -> None:
    half = pytest.approx(0.5, abs=0.1)
    assert recorded_distances(three, "rank states") == {"attention": half, "MLP": 0.0}
    assert recorded_distances(three, "rank states", sequence=True) == {"attention": half, "MLP": half}
    assert recorded_distances(three, "a seed each") == {"attention": half, "MLP": half}
    # 2 heads drew more than 1.
    assert recorded_distances(three, "one seed") == {"attention": 0.0, "MLP": half}


# --- figures -----------------------------------------------------------------------------


def test_an_xor_that_is_not_as_it_should_be_is_framed() -> None:
    a, b = [[0, 1], [1, -1]], [[0, 1], [0, -1]]
    assert figures.MaskPair(a, a, True).right
    assert figures.MaskPair(a, b, False).differ == pytest.approx(1 / 3)
    c = [[1, 1], [1, -1]]
    assert figures.MaskPair.of_ranks([a, b, c], False).right
    assert not figures.MaskPair.of_ranks([a, b, b], False).right  # the last two agree
    assert not figures.MaskPair.of_ranks([a, b, b, c], False).right  # so do the two between
    assert not figures.MaskPair.of_ranks([a, b, a], True).right
    placed = figures.mask_pairs([{"x": a, "y": b}, {"x": a, "y": c}], {"x": True, "y": True})
    assert [pair.right for pair in placed.values()] == [True, False]
    assert figures.MaskPair.of_ranks([a, [[0, 1]]], False).right  # unequal numbers of tokens
    pairs = [figures.MaskPair(a, a, True), figures.MaskPair(a, b, True)]
    fig = figures.dropped({"one": pairs}, ["here", "there"])
    assert [ax.get_xlabel() for ax in fig.axes] == ["", "", "equal", "", "", "33 %"]
    assert [ax.xaxis.label.get_fontweight() for ax in fig.axes][-1] == "bold"
    assert len(fig.axes) == 6


def test_bars_stack_and_ticks_stand_where_they_should() -> None:
    rows = {"a": {"x": 1e6, "y": 2e6}, "b": {"y": 5e5}}
    fig = figures.stacked(rows, {"a": 3.1e6}, limit=2e6, chosen="b")
    (ax,) = fig.axes
    found = {each.get_label(): each for each in ax.collections}
    ends = [path.vertices[:, 0].max() for path in found["y"].get_paths()]
    assert ends == pytest.approx([3.0, 0.5])  # MB
    ticks = [line.get_xdata()[0] for line in ax.get_lines() if line.get_label() == "tick 0"]
    assert ticks == pytest.approx([3.1])
    assert [label.get_fontweight() for label in ax.get_yticklabels()] == ["normal", "bold"]
    assert ax.get_xlim()[1] == pytest.approx(1.04 * 3.1)
    assert figures.stacked(rows, reach=1e6).axes[0].get_xlim()[1] == pytest.approx(1.04)


def test_vocabularies_are_drawn_on_two_logarithmic_axes() -> None:
    fig = figures.loss_bytes({500: (1500.0, 18.0, 0.0), 128_256: (384_768.0, 18.0, 0.0)}, 4)
    (ax,) = fig.axes
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert {"GPT-2", "Llama 3"} <= {t.get_text() for t in ax.texts}
    assert ax.get_ylabel() == "bytes per token that leave a rank"
    gathered, *_ = ax.get_lines()
    assert gathered.get_xdata()[-1] > 128_256


def test_the_title_of_loss_bytes_follows_the_counts() -> None:
    for reduced, title in (
        (18.0, "Three reductions send the same few bytes for every vocabulary"),
        (19.0, "Bytes that a loss sends, over the vocabulary size"),
    ):
        counted = {500: (1500.0, 18.0), 128_256: (384_768.0, reduced)}
        assert figures.loss_bytes(counted, 4).texts[0].get_text() == title
    dear = {500: (15.0, 18.0), 128_256: (384_768.0, 18.0)}
    assert (
        figures.loss_bytes(dear, 4).texts[0].get_text() == "Bytes that a loss sends, over the vocabulary size"
    )


def test_the_title_of_masks_names_the_policies_that_are_right() -> None:
    mask, other = [[0, 1]], [[1, 0]]
    right, wrong = (figures.MaskPair(mask, b, True) for b in (mask, other))

    def title(**runs: figures.MaskPair) -> str:
        named = {name.replace("_", ", "): [pair] for name, pair in runs.items()}
        return figures.dropped(named, ["here"]).texts[0].get_text()

    assert title(one=wrong, states=right, states_sharded=right) == (
        "Only with states are all masks as the layout wants"
    )
    assert title(one=wrong, states=right, states_sharded=wrong) == (
        "With no policy are all masks as the layout wants"
    )
    assert title(one=right, states=right) == "Every policy gives the masks that the layout wants"


def test_the_title_of_a_layer_says_whether_scores_are_largest() -> None:
    rows = {
        "plain": {"inside the pairs": 3e6, "scores": 5e6},
        "recomputed": {"inside the pairs": 3e6, "scores": 0},
    }
    kept = {"plain": 8e6, "recomputed": 3e6}
    fig = figures.kept_by_layer(rows, kept)
    assert fig.texts[0].get_text() == "Where scores are kept, they are the largest part"
    rows["plain"]["scores"] = 2e6
    assert figures.kept_by_layer(rows, kept).texts[0].get_text() == "Activations of a layer"


def test_equal_streams_lie_on_the_axis() -> None:
    runs = {"rank states": [0.0, 0.0], "one seed": [0.3, 0.2]}
    _, lower = figures.losses_and_streams({name: [2.0, 1.0] for name in runs}, runs).axes
    assert lower.get_ylim()[0] == 0
    assert not any(line.get_clip_on() for line in lower.get_lines()[:2])  # a line at 0 shows whole


def test_the_title_of_losses_and_streams_follows_both() -> None:
    fall, rise, slow = [6.0, 5.0], [6.0, 6.5], [6.0, 5.2]
    equal, apart, near = [0.0, 0.0], [0.3, 0.2], [0.3, 0.01]
    stream = "the residual stream gives the fault away"
    for loss, distance, title in (
        (fall, apart, f"All losses fall alike; {stream}"),
        (fall, near, "All losses fall alike"),
        (fall, equal, "All losses fall alike"),
        (rise, apart, f"T{stream[1:]}"),
        (slow, apart, f"T{stream[1:]}"),
        (slow, equal, "Losses, and distances between residual streams"),
    ):
        losses, distances = {"a": fall, "b": loss}, {"a": equal, "b": distance}
        assert figures.losses_and_streams(losses, distances).texts[0].get_text() == title
    everywhere = figures.losses_and_streams({"a": slow, "b": rise}, {"a": apart, "b": apart})
    assert everywhere.texts[0].get_text().startswith("Losses, and")


# --- exercises ---------------------------------------------------------------------------------------------


def off(exercise: lesson.Exercise, answer: Any) -> list[str]:
    return [finding.text for finding in lesson.check(exercise, answer).findings if not finding.ok]


def fused(qkv: Any, bias: Any, out: Any, heads: int, axis: Any) -> Any:
    """Q | K | V sharded as one matrix."""
    d, mine = out.size(0) // heads, comm.split_sizes(heads, axis.size)
    first = d * sum(mine[: axis.rank])
    width = d * mine[axis.rank]
    return (
        qkv[:, 3 * first : 3 * (first + width)],
        bias[3 * first : 3 * (first + width)],
        out[first : first + width],
    )


def gathered(logits: Any, targets: Any, first: int, axis: Any) -> Any:
    whole = comm.gather(logits, axis, 1, total=37)
    return F.cross_entropy(whole, targets, ignore_index=-100, reduction="sum"), (targets != -100).sum()


def overflowing(logits: Any, targets: Any, first: int, axis: Any) -> Any:
    counts, own = targets != -100, targets - first
    here = counts & (own >= 0) & (own < logits.size(1))
    z = torch.where(here, logits.gather(1, own.where(here, 0)[:, None])[:, 0], 0.0)
    S = comm.all_reduce(logits.exp().sum(1), axis)
    return torch.where(counts, S.log() - comm.all_reduce(z, axis), 0.0).sum(), counts.sum()


def chatty(logits: Any, targets: Any, first: int, axis: Any) -> Any:
    """The last rank alone sends more."""
    if axis.rank == axis.size - 1:
        dist.send(torch.zeros(1000, dtype=torch.uint8), axis.ranks[0], axis.group)
    elif axis.rank == 0:
        dist.recv(torch.zeros(1000, dtype=torch.uint8), axis.ranks[-1], axis.group)
    return overflowing(logits, targets, first, axis)


def silent(logits: Any, targets: Any, first: int, axis: Any) -> Any:
    return logits.sum(), (targets != -100).sum()


def sums(base: int, where: Any, site: Any, step: int) -> int:
    """Site 1 on rank 0 draws as site 0 on rank 1 of a sharded site, and step 1 as the next site."""
    return base + step + int(site.index) + 100 * int(where.dp) + (int(where.tp) if site.sharded else 0)


def seeded_by_sum(base: int, where: Any, site: Any, step: int) -> int:
    """Base 1 begins where base 0 stands after a step."""
    tp = where.tp if site.sharded else 9
    return 10**6 * (base + step) + 1000 * int(site.index) + 10 * int(where.dp) + int(tp) * 100


def one_pair(record: Any) -> str:
    """Ranks 0 and 1 alone."""
    for place, found in record.masks.items():
        equal = bool((found[:, 0] == found[:, 1]).all())
        if (found[0] == found[1]).all():
            return "repeats"
        if equal == record.sharded[place]:
            return "agrees" if equal else "differs"
    return "right"


counter = itertools.count()


@pytest.mark.parametrize(
    ("exercise", "answer", "words"),
    [
        (exercises.split_heads, fused, "12 heads over 2 ranks: the output beside one process's is off by"),
        (exercises.split_heads, lambda *_: 3, "returned int, and .columns, their bias, rows. are wanted"),
        (exercises.split_heads, lambda *given: given[:3], "the ranks have .12, 12., 24 in all"),
        (exercises.vocab_parallel_loss, gathered, "2 ranks: 912 B leave a rank for 6 tokens, at most 144 B"),
        (exercises.vocab_parallel_loss, overflowing, "2 ranks, some are -100: the sum: off by"),
        (exercises.vocab_parallel_loss, chatty, "2 ranks: 1.10 kB leave a rank for 6 tokens, at most 144 B"),
        (exercises.vocab_parallel_loss, silent, "2 ranks: nothing leaves a rank, and no rank has all logits"),
        (exercises.vocab_parallel_loss, lambda logits, *_: logits.sum(), "Tensor, and .sum, count. is"),
        (exercises.vocab_parallel_loss, lambda logits, *_: (logits, 1), "shape .6, 1[0-9]., with a gradient"),
        (exercises.read_masks, one_pair, "record 5, .*it is 'agrees'"),
        (exercises.seed_policy, lambda base, where, site, step: next(counter), "called twice it says 0 and"),
        (exercises.seed_policy, lambda base, where, site, step: -1, "it returned -1, and a generator takes"),
        (exercises.seed_policy, lambda base, where, site, step: base, "sharded along tp: .* of masks do not"),
        (exercises.seed_policy, sums, "other sites and steps, on any ranks: .* of masks do not"),
        (exercises.seed_policy, seeded_by_sum, "another base seed, .* do not, such as seeds 0 and 1, "
         ".dp 0, tp 0, site 0, step 1. and .dp 0, tp 0, site 0, step 0."),
        (exercises.activation_bytes, lambda layer: "34", "s 1024, b 1, h 1600, a 25, t 1: '34'"),
        (exercises.activation_bytes, lambda layer: 34.0 * layer.s * layer.b * layer.h, "0.298 times"),
    ],
)  # fmt: skip
@pytest.mark.sampled(4)
def test_what_an_answer_lacks_is_said_in_numbers(exercise: lesson.Exercise, answer: Any, words: str) -> None:
    found = off(exercise, answer)
    assert any(re.search(words, text) for text in found), found


def test_a_policy_that_lacks_nothing_but_the_base_is_told_so() -> None:
    assert len(off(exercises.seed_policy, seeded_by_sum)) == 1


def test_the_table_has_no_row_for_every_layer() -> None:
    whole = exercises.ShardedLayer(1024, 1, 1600, 25)
    again = replace(whole, t=4, recompute="full")
    assert exercises.published(again) == 2 * 1024 * 1600  # an input, whole on each of t ranks
    cut = {"sequence": True}
    for none in (replace(whole, **cut), replace(again, **cut), replace(whole, recompute="some")):
        with pytest.raises(ValueError, match="no row of the table has t="):
            exercises.published(none)


def test_records_of_masks_differ_only_in_what_is_wrong() -> None:
    truths = [truth for truth, *_ in exercises.RECORDS]
    assert set(truths) == {exercises.RIGHT, exercises.DIFFERS, exercises.AGREES, exercises.REPEATS}
    for _, seeds, sequence in exercises.RECORDS:
        record = exercises.record_of(seeds, sequence)
        assert record.sharded["attention"]
        assert record.sharded["MLP"] == sequence
        for found in record.masks.values():
            assert found.shape[:2] == (3, 4)
            assert 0.05 < float(found.double().mean()) < 0.15


def largest() -> float:
    m = torch.tensor([float(hpnb.rank())])
    dist.all_reduce(m, dist.ReduceOp.MAX)
    return float(m)


def test_max_is_counted_as_a_reduction(three: hpnb.Ranks) -> None:
    """The check of exercise 2 counts calls: this is one of its three."""

    def counted() -> list[str]:
        with hpnb.record.traffic() as t:
            largest()
        return [message.op for message in t.messages]

    assert three.run(counted) == [["all_reduce"]] * 3


def test_the_fullest_rank_over_the_mean_has_a_range() -> None:
    low, high = gpt2_tensor.fullest_range([7, 6, 6, 6], {"6 heads": [5.0, 6.0], "7 heads": [7.0, 8.0]})
    assert low == pytest.approx(7 * 4 / (7 + 3 * 6))
    assert high == pytest.approx(8 * 4 / (8 + 3 * 5))
    assert gpt2_tensor.fullest_range([5, 5], {"5 heads": [1.0, 2.0]}) == (1.0, 1.0)

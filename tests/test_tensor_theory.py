"""hpnb.theory on tensor parallelism: closed forms and limits by hand, and what real ranks send and keep.

pytest tests/test_tensor_theory.py
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

import hpnb
from hpnb import models, theory
from hpnb.mesh import Layout, Mesh
from hpnb.models import GPT2Size, ViTSize
from hpnb.theory import Block, Link

H, HEADS, MLP, ROWS, TOKENS = 24, 6, 96, 8, 17
BLOCK = Block(H, HEADS, TOKENS, ROWS, MLP // H, bytes_per_value=4)


# --- one layer, by hand ----------------------------------------------------------------------------


def test_one_dimension_sums_an_activation() -> None:
    # 4 ranks, 10 rows of 6 inputs and 8 outputs, 2 bytes: 2 * 3/4 of 120 bytes in, of 160 bytes out
    sent = theory.linear_sent("1d", 10, 6, 8, 4)
    assert (sent.bytes("forward"), sent.bytes("backward"), sent.calls) == (0, 180, 1)
    row = theory.linear_sent("1d", 10, 6, 8, 4, kind="row")
    assert (row.bytes("forward"), row.bytes("backward")) == (240, 0)


@pytest.mark.parametrize("kind", ["column", "row"])
def test_tokens_that_are_cut_send_as_much(kind: Any) -> None:
    plain = theory.linear_sent("1d", 10, 6, 8, 4, kind=kind)
    cut = theory.linear_sent("1d", 10, 6, 8, 4, kind=kind, sequence_parallel=True)
    assert cut.bytes() == plain.bytes()
    assert cut.bytes("forward") == cut.bytes("backward") == plain.bytes() / 2
    assert {c.op for c in cut.collectives} == {"all_gather", "reduce_scatter"}


def test_two_dimensions_broadcast_panels() -> None:
    # 3 x 3 ranks: blocks of X 18 values, of W 8, 1 byte; 3 panels of each, thrice, 2/3 of which leave a rank
    sent = theory.linear_sent("2d", 27, 6, 12, 9, bytes_per_value=1)
    assert sent.bytes(by="tokens") == sent.bytes(along=1) == 3 * 3 * 2 / 3 * 18
    assert sent.bytes(by="weights") == sent.bytes(along=0) == 3 * 3 * 2 / 3 * 8
    assert sent.bytes("backward") == 2 * sent.bytes("forward")
    ops = Counter({(c.phase, c.op): 0 for c in sent.collectives})
    for c in sent.collectives:
        ops[c.phase, c.op] += c.count
    assert ops == {("forward", "broadcast"): 6, ("backward", "broadcast"): 6, ("backward", "reduce"): 6}


def test_depth_shares_rows_and_sums_weights() -> None:
    flat, deep = theory.linear_sent("2d", 24, 6, 12, 4), theory.linear_sent("2.5d", 24, 6, 12, 12, 3)
    assert deep.bytes(by="tokens") == flat.bytes(by="tokens") / 3
    assert deep.bytes(by="weights", along=1) == flat.bytes(by="weights")
    assert deep.bytes(along=0) == 2 * 2 / 3 * (6 * 12 / 4) * 2  # an all-reduce of a block over 3 depths


def test_three_dimensions_gather_and_scatter() -> None:
    # 2 x 2 x 2 ranks: gathered blocks of X 12, W 12 and Y 16 values, 1 byte, half of which leaves a rank
    sent = theory.linear_sent("3d", 8, 6, 8, 8, bytes_per_value=1)
    assert (sent.bytes(along=2), sent.bytes(along=0), sent.bytes(along=1)) == (18, 18, 16)
    row = theory.linear_sent("3d", 8, 6, 8, 8, kind="row", bytes_per_value=1)  # directions change places
    assert (row.bytes(along=1), row.bytes(along=0), row.bytes(along=2)) == (18, 18, 16)
    assert sent.calls == 8


@pytest.mark.parametrize("mode", ["1d", "2d", "2.5d", "3d"])
def test_one_rank_sends_nothing(mode: str) -> None:
    for sequence_parallel in (False, True) if mode == "1d" else (False,):
        sent = theory.block_sent(BLOCK, mode, 1, sequence_parallel=sequence_parallel)
        assert (sent.bytes(), sent.calls, sent.seconds(Link(1.0, 1.0))) == (0, 0, 0)
    assert theory.linear_sent(mode, 10, 6, 8, 1).bytes() == 0


def test_depth_one_is_two_dimensions() -> None:
    assert theory.linear_sent("2.5d", 24, 6, 12, 9) == theory.linear_sent("2d", 24, 6, 12, 9)
    assert theory.block_sent(BLOCK, "2.5d", 4) == theory.block_sent(BLOCK, "2d", 4)


# --- one block, in closed form ---------------------------------------------------------------------

LINEARS = ("qkv", "projection", "mlp up", "mlp down")


@pytest.mark.parametrize(
    ("hidden", "rows", "side", "depth"), [(24, 136, 2, 2), (768, 1e5, 4, 3), (96, 12, 3, 5)]
)
def test_a_block_in_closed_form(hidden: int, rows: float, side: int, depth: int) -> None:
    def linears(mode: str, ranks: int, deep: int = 1) -> float:
        sent = theory.shapes_sent(rows, hidden, 4 * hidden, mode, ranks, deep, bytes_per_value=1)
        return sum(sent.bytes(layer=layer) for layer in LINEARS)

    mh, hh, q, p, d = rows * hidden, hidden**2, side, side**2, depth
    assert linears("1d", p) == pytest.approx(8 * (p - 1) / p * mh)
    assert linears("2d", p) == pytest.approx(3 * (q - 1) / p * (7 * mh + 12 * hh))
    wanted = 3 * (q - 1) / p * (7 * mh / d + 12 * hh) + 24 * (d - 1) / (d * p) * hh
    assert linears("2.5d", d * p, d) == pytest.approx(wanted)
    assert linears("3d", q**3) == pytest.approx((q - 1) / q**3 * (39 * mh + 36 * hh))


def test_more_ranks_send_less_in_a_grid_and_not_in_a_line() -> None:
    def tokens(mode: str, ranks: int) -> float:
        return theory.shapes_sent(1e6, 512, 2048, mode, ranks).bytes(by="tokens")

    assert tokens("1d", 4096) / tokens("1d", 64) == pytest.approx(1, abs=0.02)
    assert tokens("2d", 4096) / tokens("2d", 64) == pytest.approx(8**-1, rel=0.15)
    assert tokens("3d", 4096) / tokens("3d", 64) == pytest.approx(16**-1, rel=0.3)


# --- which ranks -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "ranks", "depth", "near"),
    [
        ("1d", 7, 1, (7,)),
        ("2d", 6, 1, (4, 9)),
        ("2d", 16, 1, (16,)),
        ("2.5d", 10, 2, (8, 18)),
        ("2.5d", 12, 3, (12,)),
        ("2.5d", 2, 4, (4,)),
        ("3d", 26, 1, (8, 27)),
        ("3d", 1000, 1, (1000,)),
        ("3d", 2, 1, (1, 8)),
    ],
)
def test_the_nearest_ranks_that_work(mode: str, ranks: int, depth: int, near: tuple[int, ...]) -> None:
    assert theory.ranks_for(mode, ranks, depth) == near
    if ranks in near:
        assert math.prod(theory.grid_sides(mode, ranks, depth)) == ranks
    else:
        with pytest.raises(ValueError, match=f"which {ranks} is not; use {' or '.join(map(str, near))}"):
            theory.grid_sides(mode, ranks, depth)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: theory.ranks_for("4d", 4), "no tensor-parallel mode '4d'; there are 1d, 2d, 2.5d, 3d"),
        (lambda: theory.ranks_for("2d", 0), "ranks=0 and depth=1 must be counts"),
        (lambda: theory.ranks_for("2d", 8, 2), "mode '2d' has no depth; depth=2 goes with '2.5d'"),
        (lambda: theory.activation_bytes(BLOCK, "2d", 4, 1, True), "sequence_parallel goes with '1d'"),
        (lambda: theory.block_sent(BLOCK, "3d", 8, 1, True), "mode '3d' shards every activation"),
        (lambda: theory.block_seconds(BLOCK, "1d", 2, Link(0, 1), 0), "flop_rate=0 FLOP/s gives no time"),
        (lambda: theory.cheapest_modes([1], [8], 6, Link(0, 1), modes=["2d"]), "none of 2d can use 6 ranks"),
    ],
)
def test_refusals(call: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()


# --- seconds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_one_dimension_computes_4_5_h_over_what_it_sends(ranks: int) -> None:
    block, link, flop_rate = Block(1024, 16, 197, 32), Link(0.0, 1e11), 5e13
    found = theory.block_seconds(block, "1d", ranks, link, flop_rate)
    rho = flop_rate / link.bandwidth
    wanted = theory.tp_compute_over_communication(1024, ranks, rho, 197)
    assert found.compute / found.communication == pytest.approx(wanted)
    assert wanted == pytest.approx(4.5 * 1024 / ((ranks - 1) * rho), rel=0.04)
    assert (found.total, found.least) == (
        found.compute + found.communication,
        max(found.compute, found.communication),
    )


def test_seconds_are_hops_calls_and_bytes() -> None:
    sent = theory.block_sent(BLOCK, "1d", 4)  # 4 all-reduces
    n = ROWS * TOKENS * H * 4
    assert sent.seconds(Link(1.0, math.inf)) == 4 * 2 * 3
    assert sent.seconds(Link(0.0, math.inf), call=1.0) == sent.calls == 4
    assert sent.seconds(Link(0.0, 1.0)) == sent.bytes() == 4 * 2 * 3 / 4 * n
    one = theory.seconds("all_reduce", n, 4, Link(1e-3, 1e6))
    assert sent.seconds(Link(1e-3, 1e6)) == pytest.approx(4 * one)


def test_a_panel_passes_each_link_of_a_chain_once() -> None:
    (panels, *_) = theory.linear_sent("2d", 27, 6, 12, 9, bytes_per_value=1).collectives
    assert (panels.op, panels.count, panels.nbytes) == ("broadcast", 3, 18)
    assert panels.seconds(Link(1.0, 1.0)) == 3 * (2 * 1 + 18)  # 2 hops, then 18 bytes at 1 byte a second


def test_the_cheapest_mode_is_that_with_the_fewest_seconds() -> None:
    tokens, hidden, link = [1.0, 32.0, 512.0, 8192.0, 65536.0], [64, 512, 4096], Link(0.0, 1e11)
    found = theory.cheapest_modes(tokens, hidden, 64, link, depth=4, call=1e-5)
    for h, row in zip(hidden, found, strict=True):
        for n, mode in zip(tokens, row, strict=True):
            seconds = {
                m: theory.shapes_sent(64 * n, h, 4 * h, m, 64, d).seconds(link, 1e-5)
                for m, d in (("1d", 1), ("2d", 1), ("2.5d", 4), ("3d", 1))
            }
            assert seconds[mode] == pytest.approx(min(seconds.values()), rel=1e-9)
    assert {mode for row in found for mode in row} >= {"1d", "2.5d", "3d"}
    assert found[0][0] == "1d"  # few calls win where there is little to send
    alone = theory.cheapest_modes(tokens, hidden, 6, link)  # 6 ranks make no grid
    assert {mode for row in alone for mode in row} == {"1d"}
    assert theory.cheapest_modes([1.0], [64], 4, link, modes=["2d"]) == (("2d",),)


# --- what is kept ----------------------------------------------------------------------------------


def test_activations_by_hand_and_as_published() -> None:
    block = Block(1600, 25, 1024, 8)
    sbh, tokens = 1024 * 8 * 1600, 1024 * 8
    small = 4 * 25 * tokens, 16 * tokens  # sums of attention, statistics of norms
    kept, published = theory.activation_bytes, theory.published_activation_bytes
    scores = 5 * 25 * 1024 / 1600 * sbh
    assert kept(block) == 32 * sbh + sum(small)
    assert published(block) == 34 * sbh + scores
    assert published(block) - kept(block, dropout=True) == scores - sum(small)
    for t in (5, 25):
        own = scores / t - small[0] / t - small[1]
        assert kept(block, "1d", t) == pytest.approx((8 + 24 / t) * sbh + small[0] / t + small[1])
        assert published(block, t) - kept(block, "1d", t, dropout=True) == pytest.approx(own)
    even = replace(block, heads=16)
    for t in (2, 8):
        cut = kept(even, "1d", t, sequence_parallel=True)
        assert cut == pytest.approx((4 + 28 / t) * sbh + (4 * 16 + 16) * tokens / t)
    assert kept(even, "2d", 16) == pytest.approx(2 * sbh + 4 * 16 * tokens / 16 + 16 * tokens / 4)
    assert kept(block, mlp_copies=5) - kept(block) == 3 * 8 * sbh
    assert sum(theory.activation_terms(block).values()) == kept(block)


# --- real ranks ------------------------------------------------------------------------------------


@dataclass
class Seen:
    """Of one rank and one model: messages, and bytes kept for the backward."""

    messages: Counter[tuple[str, str, float]]
    kept: int


def build(kind: str, layers: int, meta: bool = False) -> nn.Module:
    where = "meta" if meta else None
    model: nn.Module
    if kind == "vit":
        size = ViTSize(hidden=H, layers=layers, heads=HEADS, mlp=MLP, patch=8, image=32)
        model = models.vit(size, classes=5, device=where)
    else:
        shape = GPT2Size(hidden=H, layers=layers, heads=HEADS, mlp=MLP, vocab_size=53, length=TOKENS)
        model = models.gpt2(shape, device=where)
    return model


def observe(kind: str, layers: int, ranks: int, options: dict[str, Any]) -> Seen:
    """A forward and backward; groups of `ranks` ranks do the same side by side."""
    torch.set_num_threads(1)
    axis = Mesh(Layout(dp=hpnb.world_size() // ranks, tp=ranks)).tp
    model = hpnb.tensor_parallel.parallelize(build(kind, layers), axis, **options)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept.setdefault(x.untyped_storage().data_ptr(), x.untyped_storage())
        return x

    g = torch.Generator().manual_seed(3)
    if kind == "vit":
        batch = {"pixel_values": torch.randn(ROWS, 3, 32, 32, generator=g), "labels": torch.arange(ROWS) % 5}
    else:
        ids = torch.randint(0, 53, (ROWS, TOKENS), generator=g)
        batch = {"input_ids": ids, "labels": ids}
    with hpnb.record.traffic() as traffic:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss = model(**batch).loss
        nbytes = sum(storage.nbytes() for pointer, storage in kept.items() if pointer not in own)
        loss.backward()
    found = Counter((m.axis, m.op, m.bytes) for m in traffic.messages)
    return Seen(found, nbytes)


@pytest.fixture(scope="module")
def eight() -> Iterator[hpnb.Ranks]:
    with hpnb.Ranks(8, device="cpu", timeout=120) as pool:
        yield pool


WAYS = [
    (1, {}),
    (2, {}),
    (2, {"sequence_parallel": True}),
    (4, {}),
    (4, {"sequence_parallel": True}),
    (4, {"mode": "2d"}),
    (4, {"mode": "2.5d", "depth": 1}),
    (8, {"mode": "2.5d", "depth": 2}),
    (8, {"mode": "3d"}),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["vit", "gpt2"])
@pytest.mark.parametrize(("ranks", "options"), WAYS)
def test_a_block_sends_and_keeps_what_is_predicted(
    eight: hpnb.Ranks, kind: str, ranks: int, options: dict[str, Any]
) -> None:
    mode, depth = options.get("mode", "1d"), options.get("depth", 1)
    how = mode, ranks, depth, options.get("sequence_parallel", False)
    short, long = (eight.run(observe, kind, layers, ranks, options)[:ranks] for layers in (1, 2))
    sent = theory.block_sent(BLOCK, *how)
    wanted: Counter[tuple[str, str, float]] = Counter()
    for c in sent.collectives:
        wanted["tp" if mode == "1d" else f"tp.{c.along}", c.op, c.bytes / c.count] += c.count
    for one, two in zip(short, long, strict=True):  # what the second block adds is a block's
        assert two.messages - one.messages == wanted
        assert sum(n * b for (*_, b), n in wanted.items()) == pytest.approx(sent.bytes())
    copies = 2 if kind == "vit" else 5  # transformers writes GPT-2's gelu out in Python
    assert long[0].kept - short[0].kept == theory.activation_bytes(BLOCK, *how, mlp_copies=copies)

"""`hpnb.theory.context`: its bytes are those that rings and Ulysses send, its times follow from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hpnb
from hpnb.context_parallel import (
    Ring,
    Visibility,
    all_gather_attention,
    ring_attention,
    ulysses_attention,
)
from hpnb.theory import Link, context
from hpnb.theory.context import Attention, BothWays

DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


def count_bytes(shape: Attention, mode: str) -> tuple[float, float]:
    """What this rank sends in forward and backward."""
    axis = hpnb.Mesh(hpnb.Layout(cp=hpnb.world_size())).cp
    local, visible = shape.sequence // axis.size, Visibility(causal=True)
    sizes = [(shape.batch, heads, local, shape.head_size) for heads in (shape.heads, *2 * [shape.kv_heads])]
    q, k, v = (torch.randn(size).to(DTYPES[shape.bytes_per_value]).requires_grad_() for size in sizes)
    with hpnb.record.traffic() as traffic:
        if mode != "ulysses":
            attend = ring_attention if mode == "ring" else all_gather_attention
            out = attend(q, k, v, Ring.of(axis, local, zigzag=True), visible, 0.5)
        else:
            out = ulysses_attention(q, k, v, axis, visible, 0.5)
        forward = traffic.total
        out.backward(torch.ones_like(out))
        return forward, traffic.total - forward


@pytest.fixture(scope="module")
def pools() -> Any:
    with hpnb.Ranks(2, device="cpu", timeout=60) as two, hpnb.Ranks(3, device="cpu", timeout=60) as three:
        yield {2: two, 3: three}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "shape",
    [
        Attention(24, 6, 6, 4, 2, 8),
        Attention(24, 12, 6, 4, 1, 4),  # grouped queries, whose groups divide
        Attention(12, 6, 1, 4, 1, 4),  # they don't: Ulysses repeats them
        Attention(12, 12, 2, 4, 1, 4),  # to 6 for 3 ranks
        Attention(12, 5, 5, 4, 1, 8),  # heads that don't divide: Ulysses pads them
        Attention(12, 6, 3, 8, 1, 2),  # gradients of 16-bit keys travel in float32
    ],
)
def test_bytes_are_those_that_are_sent(pools: Any, ranks: int, shape: Attention) -> None:
    predictions = {
        "ring": context.ring_bytes, "all-gather": context.ring_bytes, "ulysses": context.ulysses_bytes,
    }  # fmt: skip
    for mode, predict in predictions.items():
        for counted in pools[ranks].run(count_bytes, shape, mode):
            assert counted == pytest.approx(predict(shape, ranks))


def test_flops_are_those_of_a_visible_pair() -> None:
    shape = Attention(3, 2, 1, 5, 7)
    forward, backward = context.attention_flops(shape)
    assert forward == 7 * 2 * (1 + 2 + 3) * 4 * 5
    assert backward == 2.5 * forward
    assert context.ring_step_seconds(shape, 3, 10.0) == pytest.approx((forward / 90, backward / 90))


def test_the_forward_is_free_from_the_tokens_that_theory_says() -> None:
    rate, ranks, link = 4e14, 8, Link(0.0, 5e10)
    shape = Attention(1 << 17, 32, 8)
    tokens = context.tokens_to_overlap(shape, rate, link)
    assert tokens == pytest.approx(2 * 8000 * 8 / 32)
    for factor, free in ((0.99, False), (1.01, True)):
        near = Attention(round(factor * tokens * ranks), 32, 8)
        step = context.ring_step_seconds(near, ranks, rate)
        exposed = context.ring_exposed(near, ranks, link, step)
        assert (exposed.forward == 0) == free


def test_without_computing_all_messages_are_exposed_and_with_much_only_the_last() -> None:
    shape, ranks, link = Attention(4096, 8, 8), 4, Link(1e-5, 1e9)
    sent = context.ring_bytes(shape, ranks)
    nothing = context.ring_exposed(shape, ranks, link, BothWays(0.0, 0.0))
    assert nothing.forward == pytest.approx(3 * 1e-5 + sent.forward / 1e9)
    assert nothing.backward == pytest.approx(6 * 1e-5 + sent.backward / 1e9)
    gradients = (sent.backward - sent.forward) / 3
    much = context.ring_exposed(shape, ranks, link, BothWays(1.0, 1.0))
    assert much.forward == 0
    assert much.backward == pytest.approx(1e-5 + gradients / 1e9)
    gathered = context.all_gather_exposed(shape, ranks, link)  # three messages of three steps
    assert gathered.total == pytest.approx(3 * 3 * 1e-5 + context.ring_bytes(shape, ranks).total / 1e9)
    ulysses = context.ulysses_exposed(shape, ranks, link)
    assert ulysses.total == pytest.approx(2 * 4 * 3 * 1e-5 + context.ulysses_bytes(shape, ranks).total / 1e9)


def test_one_rank_sends_nothing() -> None:
    shape, link = Attention(64, 4, 4), Link(1.0, 1.0)
    assert context.ring_bytes(shape, 1).total == context.ulysses_bytes(shape, 1).total == 0
    assert context.ring_exposed(shape, 1, link, BothWays(0.0, 0.0)).total == 0
    assert context.ulysses_exposed(shape, 1, link).total == 0


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(ValueError, match="each of 8 ranks a head, and there are 4; use a ring"):
        context.ulysses_bytes(Attention(64, 4, 4), 8)
    with pytest.raises(ValueError, match="6 heads do not divide into groups of 4 kv_heads"):
        Attention(64, 6, 4)
    with pytest.raises(ValueError, match="every size has to be 1 or more"):
        Attention(0, 6, 6)

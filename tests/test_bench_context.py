"""`python -m hpnb.bench context`: equal outputs, counted bytes, and what PyTorch's does on this device."""

from __future__ import annotations

import pytest

import hpnb
from hpnb.bench import context
from hpnb.bench.results import LayoutResult, ProgramResult


def test_a_small_contest_on_cpus(capsys: pytest.CaptureFixture[str]) -> None:
    size = context.Size(64, heads=4, kv_heads=2, head_dim=8)
    result = context.compare(2, 1, "cpu", size)
    candidates = {one.name: one for one in result.entries}
    for name in ("hpnb ring", "hpnb all-gather", "hpnb ulysses"):
        assert not candidates[name].failed
        assert len(result.waves[0][name]) == 1
        assert result.ratio(name, context.IDEAL)
        assert candidates[name].distance < 1e-5
    block = 2 * 2 * 8 * 32 * 4  # keys and values of 2 heads of 8, 32 tokens a rank, 4 bytes
    assert candidates["hpnb ring"].sent == 3 * block  # forward 1, backward 2
    assert candidates["hpnb all-gather"].sent == candidates["hpnb ring"].sent
    assert candidates["hpnb ring"].sent_rank == 0  # both send as much
    queries = 4 * 8 * 32 * 4
    assert candidates["hpnb ulysses"].sent == 2 * (2 * queries + block) / 2  # half of q, k, v, out, twice
    torch_public = candidates[context.TORCH]
    assert torch_public.failed.startswith("does not run here: ") or torch_public.distance < 1e-5
    assert result.flops == 7 * 4 * 64**2 * 8
    printed = capsys.readouterr().out
    assert "64 tokens, 4 heads of 8 on 2 key-value heads, 2 ranks" in printed
    assert "of the ideal" in printed


def largest_of_ranks() -> list[tuple[float, int]]:
    by_rank = [[1.0, 3.0], [5.0, 2.0], [0.0, 0.0]]
    return [context._largest(values[hpnb.rank()]) for values in by_rank]


def test_bytes_are_those_of_the_rank_that_sends_most_and_it_is_named() -> None:
    assert hpnb.launch(largest_of_ranks, ranks=2, device="cpu") == [[(3.0, 1), (5.0, 0), (0.0, 0)]] * 2
    entries = (
        ProgramResult("hpnb ring", True, sent=3e6, sent_rank=1),
        ProgramResult(context.IDEAL, False),
    )
    waves = ({"hpnb ring": [1.0], context.IDEAL: [1.0]},)
    result = LayoutResult("cp2", 2, "tokens", 64, 8e12, 0.0, entries, waves)
    _, head, ring, ideal = context.table(result, context.Size(64)).splitlines()
    assert " most sent by a rank " in head
    assert " 3.0 MB (rank 1) " in ring
    assert "rank" not in ideal


def test_a_length_that_cannot_be_split_is_refused() -> None:
    with pytest.raises(ValueError, match=r"length=70 cannot be split into 4 equal chunks .*; use 72"):
        context.compare(2, 1, "cpu", context.Size(70))

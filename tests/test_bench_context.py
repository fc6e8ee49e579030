"""`python -m hpnb.bench context`: equal outputs, counted bytes, and what PyTorch's does on this device."""

from __future__ import annotations

import pytest

from hpnb.bench import context


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
    queries = 4 * 8 * 32 * 4
    assert candidates["hpnb ulysses"].sent == 2 * (2 * queries + block) / 2  # half of q, k, v, out, twice
    torch_public = candidates[context.TORCH]
    assert torch_public.failed.startswith("does not run here: ") or torch_public.distance < 1e-5
    assert result.flops == 7 * 4 * 64**2 * 8
    printed = capsys.readouterr().out
    assert "64 tokens, 4 heads of 8 on 2 key-value heads, 2 ranks" in printed
    assert "of the ideal" in printed


def test_a_length_that_cannot_be_split_is_refused() -> None:
    with pytest.raises(ValueError, match=r"length=70 cannot be split into 4 equal chunks .*; use 72"):
        context.compare(2, 1, "cpu", context.Size(70))

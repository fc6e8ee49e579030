"""Turns on a GPU that ranks share: two ranks of one lock, with CUDA replaced by clocks that stand still."""

from __future__ import annotations

import fcntl
import types
from typing import Any

import pytest
import torch

from hpnb.ranks.gpu_turns import GpuTurns


class _Event:
    def __init__(self, **_: Any) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, _: _Event) -> float:
        return 1000.0


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> tuple[GpuTurns, GpuTurns]:
    """Of two ranks."""
    properties = types.SimpleNamespace(uuid=f"test-{tmp_path.name}")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    device = torch.device("cuda", 0)
    return GpuTurns(device), GpuTurns(device)


def is_free(turns: GpuTurns) -> bool:
    """Whether this rank could compute now."""
    try:
        fcntl.flock(turns._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(turns._file, fcntl.LOCK_UN)
    return True


def test_a_turn_that_is_interrupted_is_free_for_others(turns: tuple[GpuTurns, GpuTurns]) -> None:
    mine, other = turns
    with mine.turn() as turn:
        assert not is_free(other)
        with mine.turn() as part:
            assert part is turn
        with mine.released():
            assert is_free(other)
        assert not is_free(other)
    assert is_free(other)
    assert turn.seconds == 2.0  # two parts


def test_computing_inside_an_interruption_takes_a_turn_of_its_own(turns: tuple[GpuTurns, GpuTurns]) -> None:
    """Weight gradients beside an all-reduce: without one they were timed while other ranks computed."""
    mine, other = turns
    with mine.turn() as turn:
        with mine.released():
            with mine.turn() as inner:
                assert inner is not turn
                assert not is_free(other)
                with mine.released():
                    assert is_free(other)
                assert not is_free(other)
            assert is_free(other)
        assert not is_free(other)
        with mine.turn() as part:
            assert part is turn
    assert is_free(other)
    assert (turn.seconds, inner.seconds) == (2.0, 2.0)

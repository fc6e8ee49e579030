"""Output of ranks, changed modules and `Work` objects, without ranks."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from hpnb.ranks import changed_modules
from hpnb.ranks.changed_modules import ImportedModules, SourceFile
from hpnb.ranks.copy_thread import CopyThread
from hpnb.ranks.output import _RankTerminal


def seconds_for_a_line_of(chunks: int) -> float:
    terminal, begun = _RankTerminal(), time.process_time()
    for _ in range(chunks):
        terminal.feed(b"x" * 65536)
    assert len(terminal.rest()) == chunks * 65536
    return time.process_time() - begun


def test_a_long_line_without_an_end_is_read_in_linear_time() -> None:
    assert seconds_for_a_line_of(320) < 12 * seconds_for_a_line_of(64)


def test_many_edited_modules_are_compared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules, looks = ImportedModules(), []
    names = [f"edited_{i}" for i in range(50)]
    for name in names:
        (tmp_path / f"{name}.py").write_text("edited")
    modules.note({name: SourceFile(str(tmp_path / f"{name}.py"), 0.0, 1) for name in names})
    monkeypatch.setattr(changed_modules, "_import_of", looks.append)
    assert modules.outdated().keys() == set(names)
    assert len(looks) == len(names)


def test_a_copy_that_fails_is_no_success_and_a_wait_ends_in_time() -> None:
    thread = CopyThread("copies", torch.device("cpu"))

    def fail() -> None:
        raise ValueError("no room")

    failed = thread.do(fail, [])
    with pytest.raises(ValueError, match="no room"):
        failed.wait()
    assert failed.is_completed()
    assert not failed.is_success()
    slow = thread.do(lambda: time.sleep(0.5), [torch.ones(1)])
    with pytest.raises(RuntimeError, match=r"has not ended within 0\.1 s"):
        slow.wait(timedelta(seconds=0.1))
    assert not slow.is_success()
    assert slow.wait(timedelta(seconds=60))
    assert slow.is_success()

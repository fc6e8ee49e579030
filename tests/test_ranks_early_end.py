"""A call that something else ends early leaves nothing that a later call could take for its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hpnb
from hpnb.ranks import hang
from hpnb.ranks.current_rank import finish_before_return
from hpnb.ranks.worker import Done


def first() -> str:
    time.sleep(1)
    return "first"


def second() -> str:
    return "second"


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def raise_in_a_handler(ranks: hpnb.Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(*_: object) -> None:
        raise TimeoutError("alarm")

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(TimeoutError, match="alarm"):
            ranks.run(first)
    finally:
        signal.signal(signal.SIGALRM, before)


def interrupt_between_send_and_wait(ranks: hpnb.Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def watch(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(hang.HangWatch, "__init__", watch)
    with pytest.raises(hpnb.RankInterrupt):
        ranks.run(first)


def interrupt_twice(ranks: hpnb.Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def notes() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ranks._processes, "notes", notes)
    threading.Timer(0.3, interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        ranks.run(first)


@pytest.mark.parametrize("end", [raise_in_a_handler, interrupt_between_send_and_wait, interrupt_twice])
def test_ranks_end_with_a_call_that_ends_early(end: Callable[..., None], monkeypatch: Any) -> None:
    """The next call returned what the earlier one had computed."""
    with hpnb.Ranks(2, device="cpu", timeout=30) as ranks:
        end(ranks, monkeypatch)
        monkeypatch.undo()
        assert not ranks.alive
        with pytest.raises(RuntimeError, match="these ranks have ended"):
            ranks.run(second)


def test_a_reply_to_an_earlier_call_is_not_this_calls() -> None:
    with hpnb.Ranks(2, device="cpu", timeout=30) as ranks:
        poll, stale = ranks._processes.inboxes[0].read, Done(b"", call=0)
        ranks._processes.inboxes[0].read = lambda sock: ([stale, *(got := poll(sock))[0]], got[1])  # type: ignore
        assert ranks.run(second) == ["second", "second"]


def test_what_the_caller_cannot_encode_ends_no_call() -> None:
    program = "import hpnb; print(hpnb.launch(lambda: print('caf\\u00e9'), ranks=1, device='cpu'))"
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, env=environ, timeout=120)
    assert done.stdout.split(b"\n")[:2] == [b"[rank 0] caf\\xe9", b"[None]"], done.stderr.decode()


# --- ranks that stay after a failure ------------------------------------------------------------

KEPT: list[Any] = []


def raise_at_different_steps(kind: str) -> None:
    for step in range(3):
        if step == 2 - hpnb.rank():
            raise ValueError("bad batch")
        if kind == "no message":
            continue
        value = torch.full((1,), float(step))
        if hpnb.rank() == 0:
            KEPT.append((value, dist.isend(value, 1)))
        else:
            dist.recv(value, 0)


@pytest.mark.parametrize("kind", ["no message", "message"])
def test_ranks_that_raise_at_one_line_in_different_steps_stay_only_in_step(kind: str) -> None:
    """The next call received the message of an earlier step."""
    with hpnb.Ranks(2, device="cpu", timeout=30) as ranks:
        with pytest.raises(hpnb.RankError, match="bad batch"):
            ranks.run(raise_at_different_steps, kind)
        assert ranks.alive == (kind == "no message")


def begin_work_and_raise() -> None:
    finish_before_return(lambda: print("finished", flush=True))
    raise ValueError


@pytest.mark.parametrize("pool", [True, False])
def test_work_of_a_call_that_raises_is_finished_with_it(
    pool: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """It ran at the end of the next call, and in a launch never."""
    if not pool:
        with pytest.raises(hpnb.RankError):
            hpnb.launch(begin_work_and_raise, ranks=2, device="cpu")
        assert sorted(capfd.readouterr().out.splitlines()) == ["[rank 0] finished", "[rank 1] finished"]
        return
    with hpnb.Ranks(2, device="cpu", timeout=30) as ranks:
        with pytest.raises(hpnb.RankError):
            ranks.run(begin_work_and_raise)
        assert sorted(capfd.readouterr().out.splitlines()) == ["[rank 0] finished", "[rank 1] finished"]
        ranks.run(second)
        assert capfd.readouterr().out == ""

"""Ctrl-C and SIGTERM to the program that runs ranks: a rank that wants to save first gets to know of them.

    rank        announce(...)                      while a fit with a StopHook runs
    caller                        Ctrl-C           it asks the ranks, and goes on to wait for them
    rank        is_asked() is True; the step ends, all ranks save, take(), raise Stopped

Ranks are in sessions of their own, so no signal of a terminal reaches them. What is said here lies on the
page of memory that each rank shares with the caller (last_seen.py). Where no rank has announced anything, a
signal means what it means without this file, and so does a second Ctrl-C.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

from hpnb.ranks.errors import RankError, RankInterrupt
from hpnb.ranks.last_seen import STOP

_ENDS, _ASKED, _TAKEN = STOP, STOP + 1, STOP + 2  # bytes of the page; the rank writes the first and third
_STOPS, _SAVES = 1, 2  # what a rank announces

_page: mmap.mmap | None = None  # of this rank


class Stopped(SystemExit):
    """The run ended after a step, as it was asked to. A script that does not catch it exits with code 0, so
    that torchrun does not start the run again."""

    def __init__(self, message: str) -> None:
        super().__init__(0)
        self.message = message

    def __str__(self) -> str:
        return self.message


# --- the rank's side; nothing happens in other processes, such as those of torchrun -------------------------


def use_page(page: mmap.mmap) -> None:
    """This process is the rank of this page."""
    global _page
    _page = page


def announce(saves: bool) -> None:
    """From now on this rank ends by itself when it is asked to, and `saves` before that."""
    _write(_ENDS, _SAVES if saves else _STOPS)


def withdraw() -> None:
    """It does not look any more."""
    _write(_ENDS, 0)


def is_asked() -> bool:
    """Whether the caller asks this rank to stop."""
    return _page is not None and _page[_ASKED] != 0


def take() -> None:
    """This rank does what it was asked for."""
    _write(_TAKEN, 1)
    _write(_ASKED, 0)


def _write(place: int, value: int) -> None:
    if _page is not None:
        _page[place] = value


# --- the caller's side --------------------------------------------------------------------------------------


class PassedSignals:
    """Around the wait for a call: the first Ctrl-C and each SIGTERM go to ranks that have announced that they
    stop by themselves.

    Handlers that the program has set stay, and it is asked nothing then.

    Attributes:
        number: the first signal that the ranks were asked to stop by; None if there was none.
        was_taken: afterwards, whether a rank has stopped a fit in this call.
    """

    def __init__(self, pages: Sequence[int]) -> None:
        self.number: int | None = None
        self.was_taken = False
        self._pages = pages
        self._interrupted = False
        self._before: dict[int, Any] = {}  # {signal: its handler before this call}

    def __enter__(self) -> PassedSignals:
        for page in self._pages:
            os.pwrite(page, bytes(2), _ASKED)  # of an earlier call
        if threading.current_thread() is threading.main_thread():
            usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
            for number, handler in usual.items():
                if signal.getsignal(number) is handler:
                    self._before[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
        self.was_taken = any(_read(page, _TAKEN) for page in self._pages)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        ends = max(_read(page, _ENDS) for page in self._pages)
        if not ends or (number == signal.SIGINT and self._interrupted):
            as_usual(number)
        self._interrupted = self._interrupted or number == signal.SIGINT
        for page in self._pages:
            os.pwrite(page, b"\1", _ASKED)
        if self.number is None or number == signal.SIGINT:
            saves = ", with a checkpoint" if ends == _SAVES else ""
            again = "; a second Ctrl-C or interrupt ends it at once" if number == signal.SIGINT else ""
            with contextlib.suppress(RuntimeError):  # the signal came in the middle of another line
                print(
                    f"\nhpnb: the fit stops after this step, the next one or this evaluation{saves}{again}",
                    file=sys.stderr,
                    flush=True,
                )
        self.number = self.number or number


def as_usual(number: int) -> None:
    """What the signal does to a program that has no handler for it."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def leave_stopped(number: int, error: RankError) -> NoReturn:
    """The ranks have raised `error`, a Stopped, after this signal: the program ends too, unless it catches
    that."""
    said = error.summary.partition(f"{Stopped.__name__}: ")[2]
    if number == signal.SIGINT:
        raise RankInterrupt(f"interrupted; {said}", rank=error.rank, error="interrupted")
    print(f"hpnb: {said}", file=sys.stderr, flush=True)
    raise SystemExit(128 + number)


def _read(page: int, place: int) -> int:
    return os.pread(page, 1, place)[0]

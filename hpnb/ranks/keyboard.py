"""Ranks have no keyboard: what waits for one says so, in place of an error about the end of a file."""

from __future__ import annotations

import builtins
import sys
from typing import NoReturn


def refuse_keyboard(rank: int) -> None:
    """Make input() and breakpoint() of this rank raise a sentence."""

    def no_input(prompt: object = "") -> NoReturn:
        raise EOFError(
            f"input({str(prompt)!r}) on rank {rank}: ranks have no keyboard; ask before they run, and pass "
            "the answer on"
        )

    def no_breakpoint(*_: object, **__: object) -> NoReturn:
        raise RuntimeError(
            f"breakpoint() on rank {rank}: ranks have no keyboard; print what you want to see, or call the "
            "function without ranks, where pdb works: hpnb.rank() is 0 there and hpnb.world_size() 1"
        )

    builtins.input = no_input
    sys.breakpointhook = no_breakpoint

"""Ranks have no keyboard and no IPython: what asks for one of them says so in a sentence."""

from __future__ import annotations

import builtins
import sys
from typing import NoReturn


def refuse_keyboard(rank: int) -> None:
    """Make input(), breakpoint(), exit(), quit() and get_ipython() of this rank raise a sentence."""

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

    def no_exit(*_: object) -> NoReturn:
        raise SystemExit(
            f"exit() on rank {rank}: it would end one rank, and the others would wait for it; leave the cell "
            "with its last line, or raise an error, which ends it on all ranks"
        )

    def no_ipython() -> NoReturn:
        raise NameError(  # by which libraries see that there is no IPython
            f"get_ipython() on rank {rank}: ranks have no IPython; call it in a cell without %%ranks"
        )

    for name, refuse in {"exit": no_exit, "quit": no_exit, "get_ipython": no_ipython}.items():
        setattr(builtins, name, refuse)
    builtins.input = no_input
    sys.breakpointhook = no_breakpoint

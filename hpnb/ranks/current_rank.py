"""This process's rank, world size and device, inside hpnb's ranks and under torchrun.

Also: is this process a rank, and is it the kernel of a notebook?
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hpnb.ranks.notebook import in_notebook as in_notebook


@dataclass
class _CurrentRank:
    """Set once by a rank's process when it starts; stays None in the caller's process."""

    rank: int | None = None
    world_size: int = 1
    device: torch.device | None = None
    shares_gpu: bool = False
    ranks_on_gpu: int = 1
    raised: str = ""  # in this call, by hpnb, whether or not the caller's function has caught it


current = _CurrentRank()
_when_call_returns: list[Callable[[], None]] = []


def inside_rank() -> bool:
    """True in a process that hpnb started (and in what such a process forks)."""
    return current.rank is not None


def finish_before_return(work: Callable[[], None]) -> None:
    """Let `work` run on this rank before the call or the cell that it is in has returned; what it raises is
    raised there. Outside hpnb's ranks, where nothing returns, it does not run."""
    if inside_rank():
        _when_call_returns.append(work)


def finish_call() -> None:
    """The function or the cell has returned: run what `finish_before_return` was given."""
    while _when_call_returns:
        _when_call_returns.pop(0)()


def note_raised(error: BaseException) -> None:
    """`error` leaves hpnb. If the function that is called catches it, other ranks may wait for this one, and
    what is said of them names it."""
    lines = str(error).splitlines() or [""]
    current.raised = f"{type(error).__name__}: {lines[0][:500]}".removesuffix(": ")


def rank() -> int:
    """This process's rank: 0 to world_size - 1; 0 outside any ranks.

    >>> hpnb.launch(lambda: hpnb.rank(), ranks=2, device="cpu")
    [0, 1]
    """
    if current.rank is not None:
        return current.rank
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def world_size() -> int:
    """How many ranks there are; 1 outside any ranks.

    >>> hpnb.launch(lambda: hpnb.world_size(), ranks=2, device="cpu")
    [2, 2]
    """
    if current.rank is not None:
        return current.world_size
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def collectives_on_streams(where: torch.device) -> bool:
    """Whether collectives of tensors on `where` are work of a GPU's streams, as NCCL's are. Over gloo, and
    where ranks share a GPU, threads of the process do them."""
    return where.type == "cuda" and not current.shares_gpu


def device() -> torch.device:
    """The device of this rank. Outside any ranks: this process's GPU if it has one, else the CPU.

    >>> hpnb.launch(lambda: str(hpnb.device()), ranks=2, device="cpu")
    ['cpu', 'cpu']
    """
    if current.device is not None:
        return current.device
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    return torch.device("cpu")

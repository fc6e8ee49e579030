"""Who of all ranks speaks, and who waits: a DistCoordinator.

    coordinator = hpnb.DistCoordinator()              # after launch_from_torch, or inside hpnb.launch
    coordinator.print_on_master("once, not once a rank")
    with coordinator.priority_execution():            # rank 0 downloads, then the others find the files
        dataset = download()

It asks torch.distributed, and keeps nothing of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch.distributed as dist

P = ParamSpec("P")
R = TypeVar("R")


class DistCoordinator:
    """This rank among all of them, or among those of `group` where a method takes one.

    Attributes:
        rank, world_size: over all machines.
        local_rank: on this machine.

    Raises:
        RuntimeError: no ranks are running.

    >>> hpnb.launch(lambda: hpnb.DistCoordinator().is_master(), ranks=2, device="cpu")
    [True, False]
    """

    def __init__(self) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "a DistCoordinator needs running ranks: call hpnb.launch_from_torch() first, or make it "
                "inside a function given to hpnb.launch"
            )
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))

    def is_master(self, group: dist.ProcessGroup | None = None) -> bool:
        """Whether this is the first rank."""
        return dist.get_rank(group) == 0

    def is_node_master(self) -> bool:
        """Whether this is the first rank of its machine."""
        return self.local_rank == 0

    def is_last_process(self, group: dist.ProcessGroup | None = None) -> bool:
        """Whether this is the last rank."""
        return dist.get_rank(group) == dist.get_world_size(group) - 1

    def print_on_master(self, msg: str, group: dist.ProcessGroup | None = None) -> None:
        if self.is_master(group):
            print(msg, flush=True)

    def print_on_node_master(self, msg: str) -> None:
        if self.is_node_master():
            print(msg, flush=True)

    def block_all(self, group: dist.ProcessGroup | None = None) -> None:
        """Wait until every rank is here."""
        dist.barrier(group)

    @contextmanager
    def priority_execution(
        self, executor_rank: int = 0, group: dist.ProcessGroup | None = None
    ) -> Iterator[None]:
        """One rank runs the block, and then the others do. If it raises, they are let go all the same.

        Args:
            executor_rank: its place in the group.

        Raises:
            ValueError: the group has no such place.
        """
        size = dist.get_world_size(group)
        if not 0 <= executor_rank < size:
            raise ValueError(f"executor_rank={executor_rank} is not among {size} ranks; use 0 to {size - 1}")
        first = dist.get_rank(group) == executor_rank
        if not first:
            self.block_all(group)
        try:
            yield
        finally:
            if first:
                self.block_all(group)

    def on_master_only(
        self, group: dist.ProcessGroup | None = None
    ) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
        """Make a function do nothing, and return None, except on the first rank.

        @coordinator.on_master_only()
        def log(line): ...
        """
        speaks = self.is_master(group)

        def only(function: Callable[P, R]) -> Callable[P, R | None]:
            @wraps(function)
            def guarded(*args: P.args, **kwargs: P.kwargs) -> R | None:
                return function(*args, **kwargs) if speaks else None

            return guarded

        return only

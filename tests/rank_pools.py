"""Pools of ranks that the tests of a file share: one a world size, started when first used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import hpnb
from hpnb.ranks.pool import Ranks as _Ranks
from hpnb.ranks.pool import launch as _launch

_LIMITS = {"hang_timeout", "start_timeout"}


def gpu_ranks() -> int:
    """How many ranks a test on GPUs starts: one a GPU, and at most 4; on a single GPU 4, which share it."""
    gpus = torch.cuda.device_count()
    return min(4, gpus) if gpus > 1 else 4


class RankPools:
    """`pools[n]` is a pool of n ranks. If its ranks failed in a test, the next test gets a new one."""

    def __init__(self, timeout: float = 60, device: str = "cpu") -> None:
        self.timeout, self.device = timeout, device
        self._pools: dict[int, hpnb.Ranks] = {}

    def __getitem__(self, ranks: int) -> hpnb.Ranks:
        if ranks not in self._pools or not self._pools[ranks].alive:
            self._pools[ranks] = _Ranks(ranks, device=self.device, timeout=self.timeout)
        return self._pools[ranks]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()

    def launch(
        self, fn: Callable[..., Any], *args: Any, ranks: int = 0, device: str = "auto", **given: Any
    ) -> list[Any]:
        """hpnb.launch, on a pool: new ranks take a tenth of a second each until they are warm.

        For functions that leave nothing behind on a rank. New ranks it has to be where a call sets a limit.
        """
        timeout = given.pop("timeout", self.timeout)
        if (
            device != "cpu"
            or not ranks
            or timeout < self.timeout
            or {"hang_timeout", "start_timeout"} & {*given}
        ):
            return _launch(fn, *args, ranks=ranks or None, device=device, timeout=timeout, **given)
        return self[ranks].run(fn, *args, **given)

    @contextmanager
    def open(self, ranks: int = 0, device: str = "auto", **given: Any) -> Iterator[hpnb.Ranks]:
        """`with hpnb.Ranks(...)`, in the same way."""
        timeout = given.pop("timeout", self.timeout)
        if device != "cpu" or not ranks or timeout < self.timeout or given:
            with _Ranks(ranks or None, device, timeout, **given) as pool:
                yield pool
        else:
            yield self[ranks]

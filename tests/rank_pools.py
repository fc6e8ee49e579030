"""Pools of ranks that the tests of a file share: one a world size, started when first used."""

from __future__ import annotations

import torch

import hpnb


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
            self._pools[ranks] = hpnb.Ranks(ranks, device=self.device, timeout=self.timeout)
        return self._pools[ranks]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()

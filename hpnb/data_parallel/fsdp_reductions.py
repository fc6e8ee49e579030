"""ZeRO-3's reductions, while the backward goes on: each FlatParam's ends when the next one's begins.

    backward          [ block 2 ][ block 1 ][ block 0 ]
    reduce-scatter               [    2    ][    1    ][ 0 ]
    with replicas, all-reduce               [    2    ][ 1 ][ 0 ]
    .grad of shards                                   2    1    0

So besides the gradients that autograd makes in the running block, one flat gradient in flight is in memory.
A pipeline says itself when a gradient is final (`count_ready`), since every microbatch adds to it. Then a
FlatParam is reduced when all its gradients are final: in the last backward of its stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from hpnb.data_parallel.flat_params import FlatParam
from hpnb.record.recorder import communication

Used = Mapping[FlatParam, Sequence[bool]]  # for each parameter, whether any rank has a gradient of it


class Reductions:
    """The reductions that are in flight. Every rank starts the same ones in the same order.

    Attributes:
        ended: FlatParams whose reduction has ended in this backward, or in this step of a pipeline.
    """

    def __init__(self) -> None:
        self._scattering: list[FlatParam] = []
        self._summing: list[FlatParam] = []  # over the ranks that hold the same shard
        self._num_ready = Counter[FlatParam]()
        self.ended: list[FlatParam] = []

    def count_ready(self, flat: FlatParam) -> bool:
        """One more gradient of `flat` is final. Whether all are."""
        self._num_ready[flat] += 1
        return self._num_ready[flat] == flat.num_trained

    def start(self, flat: FlatParam, used: Used | None = None) -> None:
        """End the reduction before this one, and start to reduce-scatter the gradients of `flat`."""
        self._advance(used)
        flat.reduce_scatter()
        self._scattering.append(flat)

    def _advance(self, used: Used | None) -> None:
        """Wait for what is in flight. What is scattered goes on to the replicas, if there are any."""
        scattered, self._scattering = self._scattering, []
        complete, self._summing = self._summing, []
        for flat in scattered:
            if flat.has_replicas:
                flat.sum_over_replicas()
                self._summing.append(flat)
            else:
                complete.append(flat)
        for flat in complete:
            flat.finish_reduction(None if used is None else used[flat])
            self.ended.append(flat)

    def finish(self, used: Used | None = None) -> None:
        """End all of them: shards have their gradients."""
        while self._scattering or self._summing:
            self._advance(used)

    def forget(self) -> None:
        """Another backward, or another step of a pipeline, begins."""
        self._num_ready.clear()
        self.ended.clear()

    def drop(self, undo: bool) -> None:
        """Forget them. `FlatParam.drop_gradients` waits for their messages.

        Args:
            undo: forget gradients of shards, too, that this step has made.
        """
        for flat in self.ended if undo else ():
            flat.drop_new_gradients()
        self._scattering.clear()
        self._summing.clear()
        self.forget()


def find_used(flat_params: Sequence[FlatParam], device: torch.device) -> dict[FlatParam, list[bool]]:
    """For each parameter whether any rank has a gradient of it, of FlatParams that are trained.

    One message an axis goes to the ranks that hold shards of the same parameters. Experts have fewer of them.
    """
    used: dict[FlatParam, list[bool]] = {flat: [] for flat in flat_params if flat.num_trained}
    for axes in dict.fromkeys(flat.axes for flat in used):
        members = [flat for flat in used if flat.axes == axes]
        flags = [p.grad is not None for flat in members for p in flat.unsharded_params]
        counts = torch.tensor(flags, dtype=torch.int32).to(device)
        for axis in axes:
            if axis.size > 1:
                with communication("all_reduce", axis.name, counts.nbytes, axis.ranks):
                    dist.all_reduce(counts, group=axis.group)
        anywhere = iter(counts.tolist())
        for flat in members:
            used[flat] = [next(anywhere) > 0 for _ in flat.unsharded_params]
    return used

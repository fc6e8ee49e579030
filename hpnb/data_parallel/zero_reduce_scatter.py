"""The side of a ZeroOptimizer that backwards see: a gradient is ready, its bucket is sent, pieces get sums.

    backward   ...  g9 g8 | g7 g6 g5 | g4 g3 ...      bucket 0 is full at the first bar
    wire            [ bucket 0 ][ bucket 1  ][ ...    a reduce-scatter each, in one order on all ranks
    finish          wait; piece.grad is this rank's part of each sum

Who says `ready` and `finish`? Hooks of its own, or a DataParallel around the same parameters. Who reduces?
This sink; or, for stage 1 on a DataParallel, the sink that was there before (`below`), and pieces then see
parts of its sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn

from hpnb.background import Background
from hpnb.data_parallel.ddp import DataParallel
from hpnb.data_parallel.reducer import Reducer, about_unused, used_nowhere
from hpnb.data_parallel.zero_bucket import ZeroBucket
from hpnb.gradients import GradientSink, after_backward, attach, claim
from hpnb.mesh import Axis

UNDER_WAY = 2  # buckets of whole gradients that stage 2 has on the wire at once
Self = TypeVar("Self", bound="ZeroReduceScatter")


class ZeroReduceScatter:
    """Reduces the gradients of `names` into the pieces of `buckets`.

    Args:
        names: {parameter: what to call it}.
        buckets: they hold each parameter once, in the order in which they are sent.
        offload: sums are copied to the CPU.
    """

    def __init__(
        self,
        names: Mapping[nn.Parameter, str],
        buckets: Sequence[ZeroBucket],
        axis: Axis,
        stage: int,
        *,
        average: bool,
        overlap: bool,
        find_unused: bool,
        offload: bool,
    ) -> None:
        self.names, self.buckets, self.axis, self.stage = dict(names), list(buckets), axis, stage
        self.average, self.overlap, self.find_unused, self.offload = average, overlap, find_unused, offload
        self.below: GradientSink | None = None  # who reduces, where whole gradients stay with DataParallel
        self._bucket_of = {id(p): i for i, b in enumerate(self.buckets) for p in b.parameters}
        self._background = {d: Background(axis, d) for d in {b.flat.device: None for b in self.buckets}}
        self._sync = True
        self._fresh = True  # whether the next gradients replace those of pieces
        self._finished = False  # whether a backward has been reduced since the last step
        self._reset()

    def _reset(self) -> None:
        self._queued = False  # whether this backward's end is being waited for
        self._missing = [len(bucket.parameters) for bucket in self.buckets]
        self._ready: set[int] = set()  # ids of parameters
        self._sent = 0

    # --- who says so ------------------------------------------------------------------------------

    def _attach(self, replica: DataParallel | None, leave: bool) -> None:
        """Listen to the parameters; or be told by `replica`, and `leave` the reduction to its sink."""
        if replica is None:
            self._hooks = attach(self.names, self._grown)
            claim(self.names, self)
            return
        self._hooks = []
        if leave:
            self.below = replica.sink
        else:
            assert isinstance(replica.sink, Reducer)
            self.average, self.overlap = replica.sink.average, replica.sink.overlap
            self.find_unused = replica.sink.find_unused
            if any(p.grad is not None for p in self.names):
                raise ValueError(
                    "there are gradients already, in the memory of a DataParallel whose reduction is to be "
                    "taken over: call zero_grad() before the ZeroOptimizer is made"
                )
        replica.sink = self

    def detach(self: Self) -> Self:
        """Leave it to others to say when a gradient is `ready`, and when a backward is to `finish`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        claim(self.names, None)
        return self

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate: backwards inside add to this rank's gradients and send nothing."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def _grown(self, parameter: nn.Parameter) -> None:
        if not self._sync:
            return
        if not self._queued:
            self._queued = True
            after_backward(self.finish)
        self.ready(parameter)

    # --- the sink ---------------------------------------------------------------------------------

    def ready(self, parameter: nn.Parameter) -> None:
        """Count a gradient; send every bucket whose turn has come."""
        if not self._sync:
            return
        if self.below is not None:
            self.below.ready(parameter)
            return
        number = self._bucket_of.get(id(parameter))  # a tensor's own hash is slow
        if number is None:
            raise ValueError(
                f"a gradient of shape {tuple(parameter.shape)} is to be reduced, but it is none of the "
                f"{len(self.names)} parameters of this ZeroOptimizer; give it all that the module trains"
            )
        if id(parameter) in self._ready:
            raise RuntimeError(
                f"the gradient of {self.names[parameter]} was ready twice in one backward; with "
                "checkpoints, use_reentrant=False"
            )
        self._ready.add(id(parameter))
        self._missing[number] -= 1
        while self.overlap and self._sent < len(self.buckets) and not self._missing[self._sent]:
            self._send()

    @torch.no_grad()
    def finish(self) -> None:
        """Send what is left, wait for all, and give pieces their gradients.

        Raises:
            RuntimeError: parameters without a gradient (unless `find_unused_parameters`), by name.
        """
        if not self._sync:
            return
        self._finished = True
        if self.below is not None:
            self.below.finish()
            self._cut_gradients()
            return
        silent = [p for p in self.names if id(p) not in self._ready and p.grad is None]
        frozen = frozenset(p for p in silent if not p.requires_grad)  # since it was made
        unused = [p for p in silent if p not in frozen]
        try:
            if unused and not self.find_unused:
                raise RuntimeError(about_unused([self.names[p] for p in unused], len(self.names)))
            while self._sent < len(self.buckets):
                self._send()
            nowhere = used_nowhere(list(self.names), unused, self.axis) if self.find_unused else frozenset()
            nowhere |= frozen
            for bucket in self.buckets:
                bucket.collect()
            self._wait_for_copies()
            for bucket in self.buckets:
                bucket.hand_out(nowhere)
            self._fresh = False
        finally:
            for bucket in self.buckets:
                bucket.drop()
            self._reset()

    def drop(self) -> None:
        """Forget what a backward that failed has left behind."""
        if self.below is not None:
            self.below.drop()
        for bucket in self.buckets:
            bucket.drop()
        self._reset()

    @torch.no_grad()
    def _send(self) -> None:
        if self.stage == 2 and self._sent >= UNDER_WAY:
            self.buckets[self._sent - UNDER_WAY].collect()
        bucket = self.buckets[self._sent]
        bucket.start(self._background[bucket.flat.device], self.average, self._fresh)
        self._sent += 1

    def _cut_gradients(self) -> None:
        for bucket in self.buckets:
            bucket.cut_gradients()

    def _wait_for_copies(self) -> None:
        """The host is about to read what a GPU writes."""
        if self.offload:
            for device in self._background:
                if device.type == "cuda":
                    torch.cuda.current_stream(device).synchronize()

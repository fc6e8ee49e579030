"""ZeRO 1 and 2 during the backward: each bucket of gradients is reduce-scattered as soon as it is full.

    backward         ...  g9 g8 | g7 g6 g5 | g4 g3 ...      bucket 0 is full at the first bar
    reduce-scatter        [ bucket 0 ][ bucket 1  ][ ...    in one order on all ranks
    finish           wait; shard.grad is this rank's part of each sum

Who is the hook owner and which sink sums (`hpnb.gradients`) depends on whether a DataParallel wraps the same
parameters:

    DataParallel             hook owner      who sums
    none                     this class      this class
    made after               DataParallel    this class
    made before, stage 2     DataParallel    this class
    made before, stage 1     DataParallel    the sink that DataParallel had, which is the `reducing_sink` here

In the last case `ready` and `finish` are passed on, and gradients of shards are slices of the reduced ones.
That sink is a Reducer, or an earlier ZeroOptimizer of other parameters, which passes on to it. With
cpu_offload or a communication_dtype, stage 1 reduces by itself, as stage 2 does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from hpnb.background import Background
from hpnb.data_parallel.buckets import count_expected
from hpnb.data_parallel.ddp import DataParallel
from hpnb.data_parallel.reducer import Reducer, agree_on_unused, unused_message
from hpnb.data_parallel.zero_bucket import ZeroBucket
from hpnb.gradients import GradientSink, HookOwner, hook_gradients, set_hook_owner
from hpnb.mesh import Axis

MAX_REDUCING = 2  # buckets of full gradients that ZeRO 2 reduces at once


class ZeroReduceScatter(HookOwner, GradientSink):
    """Reduces the gradients of `names` into the shards of `buckets`.

    `ZeroOptimizer` inherits it. A step there sets `_replace_gradients`, and zero_grad sets it to its argument
    set_to_none. Both clear `_finished`. A step is refused while `_in_backward`.

    Args:
        buckets: they hold each parameter once, in the order in which they are reduced.
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
        overlap_communication: bool,
        find_unused_parameters: bool,
        offload: bool,
    ) -> None:
        self.names, self.buckets, self.axis, self.stage = dict(names), list(buckets), axis, stage
        self.average, self.overlap_communication = average, overlap_communication
        self.find_unused_parameters, self.offload = find_unused_parameters, offload
        self.reducing_sink: GradientSink | None = None
        self._bucket_of = {id(p): i for i, b in enumerate(self.buckets) for p in b.parameters}
        kinds = {(b.flat.device, b.axis.name): b.axis for b in self.buckets}
        self._background = {kind: Background(along, kind[0]) for kind, along in kinds.items()}
        self._replace_gradients = True  # the next gradients replace those of shards
        self._finished = False  # whether `reducing_sink` has reduced a backward since the last step
        self._start_backward()

    def _start_backward(self) -> None:
        self._in_backward = False  # `ready` sets it too, whoever is the hook owner
        self._missing = [len(bucket.parameters) for bucket in self.buckets]
        self._ready: set[int] = set()  # ids of parameters
        self._num_sent = 0

    # --- who calls `ready` and `finish` -----------------------------------------------------------

    def _connect(self, ddp: DataParallel | None, ddp_reduces: bool) -> None:
        """Hook the parameters; or become the sink of `ddp`, and maybe leave the reduction to its Reducer."""
        if ddp is None:
            self._hooks = hook_gradients(self.names, self._on_gradient)
            set_hook_owner(self.names, self)
            return
        self._hooks = []
        if ddp_reduces:
            self.reducing_sink = ddp.sink
        else:
            assert isinstance(ddp.sink, Reducer)
            self.overlap_communication = ddp.sink.overlap_communication
            self.find_unused_parameters = ddp.sink.find_unused_parameters
            if any(p.grad is not None for p in self.names):
                raise ValueError(
                    "there are gradients already, in the memory of a DataParallel whose reduction is to be "
                    "taken over: call zero_grad() before the ZeroOptimizer is made"
                )
        ddp.sink = self

    def hand_over(self) -> GradientSink:
        """Remove the hooks. From now on others call `ready` and `finish`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        set_hook_owner(self.names, None)
        return self

    def _call_begin(self) -> None:
        self.begin_backward()

    def _call_ready(self, parameter: nn.Parameter) -> None:
        self.ready(parameter)

    def _call_finish(self) -> None:
        self.finish()

    # --- the sink ---------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        if self.reducing_sink is not None:
            self.reducing_sink.begin_backward()
        else:
            self._missing = [count_expected(bucket.parameters) for bucket in self.buckets]

    def before_accumulation(self, parameter: nn.Parameter) -> None:
        """Pass it on, if DataParallel's Reducer reduces. Otherwise reduced gradients are on shards, and
        backwards do not add to those."""
        if self.reducing_sink is not None:
            self.reducing_sink.before_accumulation(parameter)

    def ready(self, parameter: nn.Parameter) -> None:
        """Count a gradient, and reduce every bucket whose turn has come."""
        if not self._sync:
            return
        self._in_backward = True
        if self.reducing_sink is not None:
            self.reducing_sink.ready(parameter)
            return
        number = self._bucket_of.get(id(parameter))  # by id, because a tensor's hash is slow
        if number is None:
            raise ValueError(
                f"a gradient of shape {tuple(parameter.shape)} is to be reduced, but it is none of the "
                f"{len(self.names)} parameters of this ZeroOptimizer; give it all that the module trains"
            )
        if id(parameter) in self._ready:
            raise RuntimeError(
                f"the gradient of {self.names[parameter]} was ready twice: after a backward that raised call "
                "zero_grad(), which forgets what that one has left; with checkpoints, use_reentrant=False"
            )
        self._ready.add(id(parameter))
        self._missing[number] -= 1
        if self.overlap_communication:
            while self._num_sent < len(self.buckets) and not self._missing[self._num_sent]:
                self._send()

    @torch.no_grad()
    def finish(self) -> None:
        """Reduce what is left, wait for all, and give shards their gradients."""
        if not self._sync:
            return
        if self.reducing_sink is not None:
            self._in_backward = self._finished = False
            self.reducing_sink.finish()
            self._finished = True
            self._slice_gradients()
            return
        silent = [p for p in self.names if id(p) not in self._ready and p.grad is None]
        frozen = frozenset(p for p in silent if not p.requires_grad)  # since it was made
        unused = [p for p in silent if p not in frozen]
        try:
            if unused and not self.find_unused_parameters:
                raise RuntimeError(unused_message([self.names[p] for p in unused], len(self.names)))
            while self._num_sent < len(self.buckets):
                self._send()
            without_grad = frozen
            if self.find_unused_parameters:
                without_grad |= self._find_unused_everywhere(unused)
            for bucket in self.buckets:
                bucket.wait_for_reduction()
            self._wait_for_copies()
            for bucket in self.buckets:
                bucket.assign_gradients(without_grad)
            self._replace_gradients = False
        finally:
            for bucket in self.buckets:
                bucket.drop_gradients()
            self._start_backward()

    def drop(self) -> None:
        """Forget gradients that have not been reduced, after a zero_grad or a backward that failed."""
        if self.reducing_sink is not None:
            self.reducing_sink.drop()
        for bucket in self.buckets:
            bucket.drop_gradients()
        self._start_backward()

    def _find_unused_everywhere(self, unused: Sequence[nn.Parameter]) -> frozenset[nn.Parameter]:
        """Parameters that no rank with a replica of them has used; experts have fewer replicas."""
        replicas: dict[str, tuple[Axis, list[nn.Parameter]]] = {}
        for bucket in self.buckets:
            replicas.setdefault(bucket.axis.name, (bucket.axis, []))[1].extend(bucket.parameters)
        sets = [agree_on_unused(parameters, unused, axis) for axis, parameters in replicas.values()]
        return frozenset[nn.Parameter]().union(*sets)

    @torch.no_grad()
    def _send(self) -> None:
        if self.stage == 2 and self._num_sent >= MAX_REDUCING:
            self.buckets[self._num_sent - MAX_REDUCING].wait_for_reduction()
        bucket = self.buckets[self._num_sent]
        bucket.start_reduction(self._background_of(bucket), self.average, replace=self._replace_gradients)
        self._num_sent += 1

    def _background_of(self, bucket: ZeroBucket) -> Background:
        return self._background[bucket.flat.device, bucket.axis.name]

    def _slice_gradients(self) -> None:
        for bucket in self.buckets:
            bucket.slice_gradients()

    def _wait_for_copies(self) -> None:
        """Wait until the CPU may read what a GPU has written."""
        if self.offload:
            for device, _ in self._background:
                if device.type == "cuda":
                    torch.cuda.current_stream(device).synchronize()

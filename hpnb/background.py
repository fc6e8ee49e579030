"""Collectives that run while this rank computes.

    pending = background.all_reduce(flat)        # starts when what was computed so far is done
    ...                                          # compute on
    pending.wait()                               # what is computed from here on sees the result

    compute       [ block 3 ][ block 2 ][ block 1 ]. . wait . .
    collectives              [ bucket 0 ][ bucket 1 ]

On a GPU they run on a separate stream of high priority, because a collective needs few multiprocessors, but
needs them at once on all ranks. `wait` makes the compute stream wait, not the CPU. On a CPU, and where ranks
share a GPU, they run in threads, and `wait` blocks. Calls along one axis run in the order in which they were
made, which must be the same on all ranks. Do not touch the tensors before `wait`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from hpnb.mesh import Axis
from hpnb.ranks.current_rank import collectives_on_streams
from hpnb.record.recorder import begin_communication, waiting
from hpnb.symmetric_all_reduce import make_symmetric_all_reduce

LARGE = 2**20  # bytes: below, copy engines with their many signals take longer than one kernel of NCCL


class Pending:
    """A collective that is running."""

    def __init__(self, block: Callable[[], object] | None = None) -> None:
        self._block = block  # waits; None once that has been done

    def wait(self) -> None:
        """Wait until the result may be used. A second call does nothing."""
        if self._block is not None:
            wait_all([self])


def wait_all(pending: Iterable[Pending]) -> None:
    """Wait for all. A recorder sees one wait. `hpnb.ranks.waits` knows a rank that waits by this function."""
    with waiting():
        for collective in pending:
            if collective._block is not None:
                collective._block()
                collective._block = None


class Background:
    """Starts collectives along `axis` for tensors on `device`.

    Args:
        copy_engines: on GPUs of one node large all-reduces use their copy engines
            (`hpnb.symmetric_all_reduce`). All ranks ask for it alike.

    Attributes:
        copies: sums by copy engines; None if NCCL or gloo does.
        averages: whether the backend divides by the number of ranks (NCCL does). Otherwise scale while
            filling the buffer, which costs nothing in a copy that is made anyway.
    """

    def __init__(self, axis: Axis, device: torch.device, copy_engines: bool = False) -> None:
        self.axis = axis
        self._stream = torch.cuda.Stream(device, priority=-1) if collectives_on_streams(device) else None
        self.averages = self._stream is not None
        self.copies = make_symmetric_all_reduce(axis, device) if copy_engines else None

    def __deepcopy__(self, _: dict[int, object]) -> Background:
        """Itself: the copy of a model communicates on the same stream."""
        return self

    def all_reduce(self, flat: torch.Tensor, average: bool = False) -> Pending:
        """Sum `flat` over the ranks, in place; `average` divides by their number."""
        copies = self.copies if flat.nbytes >= LARGE else None
        if copies is not None:
            return self._start("all_reduce", flat.nbytes, lambda _: copies.all_reduce(flat, average))
        op = self._op(average)
        return self._start(
            "all_reduce", flat.nbytes, lambda wait: dist.all_reduce(flat, op, self.axis.group, not wait)
        )

    def reduce_scatter(self, shard: torch.Tensor, flat: torch.Tensor, average: bool = False) -> Pending:
        """Sum `flat` (ranks * n,) over the ranks, and write this rank's n elements to `shard` (n,)."""
        op = self._op(average)
        return self._start(
            "reduce_scatter",
            flat.nbytes,
            lambda wait: dist.reduce_scatter_tensor(shard, flat, op, self.axis.group, not wait),
            alone=lambda: shard.copy_(flat),
        )

    def all_gather(self, flat: torch.Tensor, shard: torch.Tensor) -> Pending:
        """Write the ranks' `shard`s (n,) end to end to `flat` (ranks * n,). `shard` may be a view of it."""
        return self._start(
            "all_gather",
            flat.nbytes,
            lambda wait: dist.all_gather_into_tensor(flat, shard, self.axis.group, not wait),
            alone=lambda: flat.copy_(shard),
        )

    def broadcast(self, tensor: torch.Tensor, source: int) -> Pending:
        """Copy the tensor of the axis's rank `source` to all ranks, in place."""
        first = self.axis.ranks[source]
        if self._stream is not None:
            tensor.record_stream(self._stream)  # the caller may never wait
        return self._start(
            "broadcast", tensor.nbytes, lambda wait: dist.broadcast(tensor, first, self.axis.group, not wait)
        )

    def _op(self, average: bool) -> dist.ReduceOp.RedOpType:
        if average and not self.averages and self.axis.size > 1:
            raise ValueError("gloo does not average: scale the tensor by 1/ranks, and sum")
        return dist.ReduceOp.AVG if average else dist.ReduceOp.SUM

    def _start(
        self,
        op: str,
        nbytes: int,
        call: Callable[[bool], dist.Work | None],
        alone: Callable[[], object] = lambda: None,
    ) -> Pending:
        if self.axis.size == 1:
            alone()
            return Pending()
        if self._stream is None:
            ended = begin_communication(op, self.axis.name, nbytes, self.axis.ranks)
            work = call(False)
            assert work is not None
            return Pending(work.wait if ended is None else _until(work, ended))
        # Faster than `with torch.cuda.stream(...)`, in which PyTorch looks through its environment: twice a
        # bucket, a sixth of the bucket's CPU time under a profiler.
        there, index = self._stream, self._stream.device_index
        here = torch.cuda.current_stream(index)
        there.wait_stream(here)
        torch.cuda.set_stream(there)
        try:
            ended = begin_communication(op, self.axis.name, nbytes, self.axis.ranks)
            call(True)  # only this stream waits
            if ended is not None:
                ended()
            done = there.record_event()
        finally:
            torch.cuda.set_stream(here)
        return Pending(lambda: torch.cuda.current_stream(index).wait_event(done))


def _until(work: dist.Work, ended: Callable[[], None]) -> Callable[[], object]:
    """A function that waits for `work`, and for `ended`, which the thread that did the work may call."""
    try:
        return work.get_future().then(lambda _: ended()).wait
    except RuntimeError:  # gloo's reduce-scatter has no future: its end is when the wait returns

        def block() -> None:
            work.wait()
            ended()

        return block

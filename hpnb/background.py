"""Collectives that run while this rank computes.

    pending = background.all_reduce(flat)        # starts when what was computed so far is done
    ...                                          # compute on
    pending.wait()                               # what is computed from here on sees the result

    compute   [ block 3 ][ block 2 ][ block 1 ]. . wait . .
    wire                 [ bucket 0 ][ bucket 1 ]

On a GPU they have a stream of their own, of high priority: a collective needs few multiprocessors, but needs
them at once, on all ranks. `wait` makes the compute stream wait, not the host. On a CPU gloo's threads carry
them, and `wait` makes the host wait. Calls along one axis run in the order in which they were made, which
must be the same on all ranks. The tensors belong to the collective until `wait`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from hpnb.mesh import Axis
from hpnb.record.recorder import begun, waiting
from hpnb.symmetric_all_reduce import make_symmetric_all_reduce

LARGE = 2**20  # bytes: below, a message of many signals takes longer than one kernel of NCCL


class Pending:
    """A collective that is under way."""

    def __init__(self, join: Callable[[], object] | None = None) -> None:
        self._join = join

    def wait(self) -> None:
        """From here on the result may be used. A second call does nothing."""
        if self._join is not None:
            with waiting():
                self._join()
            self._join = None


def wait_all(pending: Iterable[Pending]) -> None:
    """Wait for one after the other; for a recorder it is one wait."""
    with waiting():
        for each in pending:
            if each._join is not None:
                each._join()
                each._join = None


class Background:
    """Starts collectives along `axis` for tensors on `device`.

    Args:
        copy_engines: on GPUs of one machine large all-reduces go by their copy engines
            (`hpnb.symmetric_all_reduce`). All ranks ask for it alike.

    Attributes:
        copies: what sums by copy engines; None where NCCL or gloo does.
        averages: whether the backend divides by the number of ranks on the way (NCCL does). Otherwise whoever
            fills the buffer scales it, which costs nothing in the copy that it makes anyway.
    """

    def __init__(self, axis: Axis, device: torch.device, copy_engines: bool = False) -> None:
        self.axis = axis
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
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

    def reduce_scatter(self, share: torch.Tensor, flat: torch.Tensor, average: bool = False) -> Pending:
        """Sum `flat` (ranks * n,) over the ranks, and leave this rank's n of it in `share` (n,)."""
        op = self._op(average)
        return self._start(
            "reduce_scatter",
            flat.nbytes,
            lambda wait: dist.reduce_scatter_tensor(share, flat, op, self.axis.group, not wait),
            alone=lambda: share.copy_(flat),
        )

    def all_gather(self, flat: torch.Tensor, share: torch.Tensor) -> Pending:
        """Put the ranks' `share`s (n,) end to end into `flat` (ranks * n,); `share` may lie in it."""
        return self._start(
            "all_gather",
            flat.nbytes,
            lambda wait: dist.all_gather_into_tensor(flat, share, self.axis.group, not wait),
            alone=lambda: flat.copy_(share),
        )

    def broadcast(self, tensor: torch.Tensor, source: int) -> Pending:
        """Give all ranks what place `source` of the axis has, in place."""
        first = self.axis.ranks[source]
        if self._stream is not None:
            tensor.record_stream(self._stream)  # nobody may ever wait for it
        return self._start(
            "broadcast", tensor.nbytes, lambda wait: dist.broadcast(tensor, first, self.axis.group, not wait)
        )

    def _op(self, average: bool) -> dist.ReduceOp.RedOpType:
        if average and not self.averages and self.axis.size > 1:
            raise ValueError("gloo does not average: scale by 1/ranks what is given to it, and sum")
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
            ended = begun(op, self.axis.name, nbytes, self.axis.ranks)
            work = call(False)
            assert work is not None
            return Pending(work.wait if ended is None else _until(work, ended))
        # `torch.cuda.stream` asks for the stream of no device in particular, for which PyTorch looks through
        # its environment: twice a bucket, a sixth of its host time under a profiler.
        there, index = self._stream, self._stream.device_index
        here = torch.cuda.current_stream(index)
        there.wait_stream(here)
        torch.cuda.set_stream(there)
        try:
            ended = begun(op, self.axis.name, nbytes, self.axis.ranks)
            call(True)  # "waits" means that this stream does, and nobody else
            if ended is not None:
                ended()
            done = there.record_event()
        finally:
            torch.cuda.set_stream(here)
        return Pending(lambda: torch.cuda.current_stream(index).wait_event(done))


def _until(work: dist.Work, ended: Callable[[], None]) -> Callable[[], object]:
    """Waits for `work`, and for `ended` to have been called then, be it by the thread that did the work."""
    try:
        return work.get_future().then(lambda _: ended()).wait
    except RuntimeError:  # gloo's reduce-scatter has no future: take the time when it has been waited for

        def join() -> None:
            work.wait()
            ended()

        return join


__all__ = ["Background", "Pending", "wait_all"]

"""The process group of ranks that share GPUs: NCCL refuses two ranks on one GPU, so they copy instead.

Every rank opens a buffer to the others (`gpu_buffers.py`). A message goes through it in chunks
(`shared_gpu_copies.py`):

    send         chunk -> buffer, then a signal     | the buffer is free again: a signal
    receive      wait for the signal, buffer -> chunk, signal that the buffer is free

    collective   every rank: chunk -> buffer, barrier, read what it needs from all buffers

Threads do the work, one for the collectives of a group and one for each direction to each other rank, in the
order of the calls, as in NCCL. `Work.wait` blocks the process until the result is there.

Tensors on the CPU, and the few collectives that are not here, go to gloo.
"""

# torch declares neither the methods of gloo nor the names that its own functions call.
# mypy: disable-error-code="attr-defined, override, assignment, no-any-return"

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

from hpnb.ranks.copy_thread import CopyThread, GlooWork
from hpnb.ranks.current_rank import current
from hpnb.ranks.devices import SHARED_GPU_BACKEND as BACKEND
from hpnb.ranks.shared_gpu_copies import PairChunks, SharedChunks, Signals, as_row, combine_of

# Who counts messages (`hpnb.record.traffic`). Those of NCCL and gloo can be seen in torch's dispatcher, which
# is not asked here. Arguments: the group, the operation, bytes of the full tensor, the peer or root in the
# group or -1, and for an uneven all-to-all the bytes that leave this rank.
Observer = Callable[["SharedGpuGroup", str, int, int, float | None], None]
observers: list[Observer] = []


class SharedGpuGroup(dist.ProcessGroup):
    """A group of ranks of one machine that share its GPUs.

    Args:
        store, rank, size, timeout: as torch.distributed gives them to every backend.
        device: of this rank.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, device: torch.device) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._device = rank, size, device
        self._gloo: Any = ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        for kind in ("cpu", "cuda"):
            self._register_backend(torch.device(kind), dist.ProcessGroup.BackendType.GLOO, self._gloo)
        signals = Signals(self._gloo, rank, size)
        self._collectives = CopyThread("hpnb collectives", device)
        self._shared = SharedChunks(signals, self._collectives, device)
        self._pairs = PairChunks(signals, device)

    def getBackendName(self) -> str:
        return BACKEND

    # --- collectives -------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        self._report("all_reduce", tensors)
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        if not self._carries(tensors[0]) or combine_of(op) is None:
            return GlooWork(self._gloo.allreduce(tensors, opts or dist.AllreduceOptions()))
        (tensor,) = tensors
        return self._collectives.do(lambda: self._all_reduce(tensor, op), tensors)

    def _all_reduce(self, tensor: torch.Tensor, op: Any) -> None:
        with as_row(tensor) as flat:
            for part in self._shared.split(flat.numel(), flat.element_size()):
                self._shared.share(flat[part])
                self._shared.combine(flat[part], 0, op)

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        self._report("reduce", tensors, opts.rootRank)
        if not self._carries(tensors[0]) or combine_of(opts.reduceOp) is None:
            return GlooWork(self._gloo.reduce(tensors, opts))
        (tensor,) = tensors

        def run() -> None:
            with as_row(tensor) as flat:
                for part in self._shared.split(flat.numel(), flat.element_size()):
                    self._shared.share(flat[part])
                    if opts.rootRank == self._rank:
                        self._shared.combine(flat[part], 0, opts.reduceOp)

        return self._collectives.do(run, tensors)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        self._report("broadcast", tensors, opts.rootRank)
        if not self._carries(tensors[0]):
            return GlooWork(self._gloo.broadcast(tensors, opts))
        (tensor,) = tensors

        def run() -> None:
            with as_row(tensor) as flat:
                for part in self._shared.split(flat.numel(), flat.element_size()):
                    if opts.rootRank == self._rank:
                        self._shared.share(flat[part])
                    else:
                        self._shared.share()
                        self._shared.read(flat[part], opts.rootRank)

        return self._collectives.do(run, tensors)

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> dist.Work:
        self._report("all_gather", [output])
        if not self._carries(tensor):
            return GlooWork(self._gloo._allgather_base(output, tensor, opts or dist.AllgatherOptions()))
        return self._collectives.do(
            lambda: self._all_gather(list(output.view(-1).chunk(self._size)), tensor), [output]
        )

    def allgather(
        self, outputs: list[list[torch.Tensor]], tensors: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        self._report("all_gather", outputs[0])
        if not self._carries(tensors[0]):
            return GlooWork(self._gloo.allgather(outputs, tensors, opts or dist.AllgatherOptions()))
        return self._collectives.do(lambda: self._all_gather(outputs[0], tensors[0]), outputs[0])

    def _all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        flat = tensor.contiguous().view(-1)
        rows = [torch.empty_like(flat) if not row.is_contiguous() else row.view(-1) for row in outputs]
        for part in self._shared.split(flat.numel(), flat.element_size()):
            self._shared.share(flat[part])
            for source, row in enumerate(rows):
                self._shared.read(row[part], source)
        for row, output in zip(rows, outputs, strict=True):
            if not output.is_contiguous():
                output.copy_(row.view_as(output))

    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> dist.Work:
        self._report("reduce_scatter", [tensor])
        if not self._carries(tensor) or combine_of(opts.reduceOp) is None:
            return GlooWork(self._gloo._reduce_scatter_base(output, tensor, opts))

        def run() -> None:
            rows = tensor.contiguous().view(self._size, -1)
            with as_row(output) as flat:
                for part in self._shared.split(flat.numel(), flat.element_size(), self._size):
                    self._shared.share(*(row[part] for row in rows))
                    self._shared.combine(flat[part], self._rank * flat[part].nbytes, opts.reduceOp)

        return self._collectives.do(run, [output])

    def alltoall_base(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> dist.Work:
        leaving = None
        if input_sizes:
            leaving = tensor.nbytes * (sum(input_sizes) - input_sizes[self._rank]) / max(1, sum(input_sizes))
        self._report("all_to_all", [tensor], leaving=leaving)
        if not self._carries(tensor) or output_sizes or input_sizes:
            opts = opts or dist.AllToAllOptions()
            return GlooWork(self._gloo.alltoall_base(output, tensor, output_sizes, input_sizes, opts))

        def run() -> None:
            rows = tensor.contiguous().view(self._size, -1)
            with as_row(output) as flat:
                received = flat.view(self._size, -1)
                for part in self._shared.split(received.size(1), flat.element_size(), self._size):
                    self._shared.share(*(row[part] for row in rows))
                    for source, row in enumerate(received):
                        self._shared.read(row[part], source, self._rank * row[part].nbytes)

        return self._collectives.do(run, [output])

    # torch 2.13 and newer call these three by other names.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        return [self.allreduce([tensor], opts) for tensor in tensors][-1]

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], tensors: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        pairs = zip(outputs, tensors, strict=True)
        return [self._allgather_base(output, tensor, opts) for output, tensor in pairs][-1]

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], tensors: list[torch.Tensor], opts: Any
    ) -> dist.Work:
        pairs = zip(outputs, tensors, strict=True)
        return [self._reduce_scatter_base(output, tensor, opts) for output, tensor in pairs][-1]

    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def barrier(self, opts: Any = None) -> dist.Work:
        self._report("barrier", [])
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        options = dist.BarrierOptions()
        options.device = torch.device("cpu")
        return GlooWork(self._gloo.barrier(options))

    def gather(self, outputs: Any, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        self._report("gather", tensors * self._size, opts.rootRank)
        return GlooWork(self._gloo.gather(outputs, tensors, opts))

    def scatter(self, outputs: list[torch.Tensor], tensors: Any, opts: Any) -> dist.Work:
        self._report("scatter", outputs * self._size, opts.rootRank)
        return GlooWork(self._gloo.scatter(outputs, tensors, opts))

    def reduce_scatter(self, outputs: list[torch.Tensor], tensors: Any, opts: Any) -> dist.Work:
        self._report("reduce_scatter", tensors[0])
        return GlooWork(self._gloo.reduce_scatter(outputs, tensors, opts))

    def alltoall(self, outputs: list[torch.Tensor], tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        leaving = sum(tensor.nbytes for rank, tensor in enumerate(tensors) if rank != self._rank)
        self._report("all_to_all", tensors, leaving=float(leaving))
        return GlooWork(self._gloo.alltoall(outputs, tensors, opts))

    def _report(
        self, op: str, tensors: Sequence[torch.Tensor], peer: int = -1, leaving: float | None = None
    ) -> None:
        for observe in observers:
            observe(self, op, sum(tensor.nbytes for tensor in tensors), peer, leaving)

    # --- point to point ----------------------------------------------------------------------------------

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> dist.Work:
        self._report("send", tensors, peer)
        (tensor,) = tensors
        if not self._carries(tensor):
            return GlooWork(self._gloo.send(tensors, peer, tag))

        return self._pairs.thread("send", peer).do(lambda: self._pairs.send(tensor, peer), tensors)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> dist.Work:
        self._report("receive", tensors, peer)
        (tensor,) = tensors
        if not self._carries(tensor):
            return GlooWork(self._gloo.recv(tensors, peer, tag))

        thread = self._pairs.thread("receive", peer)
        return thread.do(lambda: self._pairs.receive(tensor, peer), tensors, peer)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> dist.Work:
        if self._carries(tensors[0]):
            raise ValueError("ranks that share a GPU receive from a named rank: recv(tensor, src=...)")
        return GlooWork(self._gloo.recv_anysource(tensors, tag))

    def _carries(self, tensor: torch.Tensor) -> bool:
        """Whether this tensor goes through the buffers; all others go to gloo."""
        return tensor.device == self._device


def share_gpu() -> None:
    """Share this rank's GPU, `current.device`, with others: before the process group of all ranks is made.

    On the CPU, where tests do so, the same group copies through the host's memory.
    """
    assert current.device is not None, "ranks know their device before they share it"
    current.shares_gpu = current.device.type == "cuda"
    register_backend()


def register_backend() -> None:
    """Make "hpnb_shared_gpu" known to torch.distributed in this process."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _make_group, devices=["cpu", "cuda"])


def _make_group(store: Any, rank: int, size: int, timeout: timedelta) -> SharedGpuGroup:
    assert current.device is not None, "ranks know their device before they meet"
    return SharedGpuGroup(store, rank, size, timeout, current.device)

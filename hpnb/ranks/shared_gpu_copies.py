"""What ranks that share GPUs copy, chunk by chunk, through buffers that they open to each other.

    Signals       short messages over gloo between the processes: "the chunk is there", "it has been read"
    SharedChunks  a buffer of every rank that all others read: what collectives are made of
    PairChunks    a buffer of two ranks in each direction: what send and receive are made of

Nothing spins on the GPU: a kernel that waited there for another rank would keep that rank from computing. So
a thread waits for the signal and then copies (`copy_thread.py`).
"""

# torch declares neither the methods of gloo nor the names that its own functions call.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from hpnb.ranks.copy_thread import CopyThread
from hpnb.ranks.gpu_buffers import SharedBuffers, unlisted_memory
from hpnb.ranks.gpu_turns import gpu_turns

CHUNK = 8 << 20  # bytes; SharedChunks has room for two, so that writing waits for nobody's reading
BARRIER, SENT, READ, OFFER, PAIR_OFFER = (((1 << 28) + i) for i in range(5))  # gloo's tags of signals
_OFFER_BYTES = 512
Combine = Callable[[torch.Tensor, torch.Tensor], object]  # changes the first tensor
_COMBINE: tuple[tuple[Any, Combine], ...] = (
    (dist.ReduceOp.SUM, torch.Tensor.add_),
    (dist.ReduceOp.AVG, torch.Tensor.add_),
    (dist.ReduceOp.PRODUCT, torch.Tensor.mul_),
    (dist.ReduceOp.MIN, lambda a, b: torch.minimum(a, b, out=a)),
    (dist.ReduceOp.MAX, lambda a, b: torch.maximum(a, b, out=a)),
)


class Signals:
    """Short messages between the ranks of a group.

    Args:
        gloo: the group's process group on CPUs.
        rank, size: of this process in the group.
    """

    def __init__(self, gloo: Any, rank: int, size: int) -> None:
        self._gloo = gloo
        self.rank, self.size = rank, size
        self.peers = [peer for peer in range(size) if peer != rank]
        self._last: dict[tuple[int, int], dist.Work] = {}  # (peer, tag): the last signal

    def post(self, text: bytes, peer: int, tag: int) -> dist.Work:
        message = bytearray(text.ljust(_message_bytes(tag)))
        return self._gloo.send([torch.frombuffer(message, dtype=torch.uint8)], peer, tag)  # type: ignore[no-any-return]

    def take(self, peer: int, tag: int) -> bytes:
        """Wait for the next message of `peer` with this tag."""
        message = torch.empty(_message_bytes(tag), dtype=torch.uint8)
        self._gloo.recv([message], peer, tag).wait()
        return message.numpy().tobytes().rstrip()

    def send(self, peer: int, tag: int) -> None:
        """Signal without waiting for the peer, although gloo sends only when it asks for the signal. It has
        asked for the one before by now, because the two sides of a buffer go on in turns."""
        if before := self._last.get((peer, tag)):
            before.wait()
        self._last[peer, tag] = self.post(b"", peer, tag)

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.all_gather(b"", BARRIER)

    def all_gather(self, text: bytes, tag: int) -> list[bytes]:
        """The texts of all ranks, in order of rank."""
        sent = [self.post(text, peer, tag) for peer in self.peers]
        texts = [text if peer == self.rank else self.take(peer, tag) for peer in range(self.size)]
        for work in sent:
            work.wait()
        return texts


class SharedChunks:
    """The buffer of every rank that all others read, and what collectives do with it.

    The methods are called on `thread`, by all ranks in the same order.
    """

    def __init__(self, signals: Signals, thread: CopyThread, device: torch.device) -> None:
        self._signals, self._thread, self._device = signals, thread, device
        self.buffers: SharedBuffers | None = None  # made when first used
        self._half = 0  # of the buffer, where the chunk of this round lies

    def split(self, row_elements: int, element_size: int, rows: int = 1) -> Iterator[slice]:
        """Slices of a row such that those of all `rows` rows fit a chunk."""
        if self.buffers is None:
            signals = self._signals
            self.buffers = SharedBuffers(
                signals.rank, lambda text: signals.all_gather(text, OFFER), 2 * CHUNK, self._device
            )
        return _parts(row_elements, element_size, CHUNK // rows)

    def share(self, *tensors: torch.Tensor) -> None:
        """Copy tensors one after the other to this rank's buffer, and wait until all ranks have done so.

        Rounds use the halves of the buffer in turn: who writes a half has passed the barrier of the round in
        between, so all others have read what was there.
        """
        assert self.buffers is not None
        self._half = 1 - self._half
        offset = self._half * CHUNK
        if tensors:
            with copies_done(self._thread):
                for tensor in tensors:
                    buffer = self.buffers.tensors[self._signals.rank]
                    _view(buffer, offset, tensor).copy_(tensor, non_blocking=True)
                    offset += tensor.nbytes
        self._signals.barrier()

    def read(self, tensor: torch.Tensor, source: int, offset: int = 0) -> None:
        """Copy what rank `source` has shared, from `offset` bytes on."""
        with copies_done(self._thread):
            tensor.copy_(self._shared_by(source, offset, tensor), non_blocking=True)

    def combine(self, tensor: torch.Tensor, offset: int, op: Any) -> None:
        """Write the sum (or another op) of what all ranks have shared. All ranks sum in the same order, so
        they get the same bits; 16 bits are summed in 32."""
        narrow = tensor.dtype in (torch.float16, torch.bfloat16)
        wide = torch.float32 if narrow else tensor.dtype
        with _scratch_lock, copies_done(self._thread):
            total, other = (t[: tensor.numel() * wide.itemsize].view(wide) for t in _scratch(self._device))
            combine = combine_of(op)
            assert combine is not None
            total.copy_(self._shared_by(0, offset, tensor), non_blocking=True)
            for source in range(1, self._signals.size):
                other.copy_(self._shared_by(source, offset, tensor), non_blocking=True)
                combine(total, other)
            if op == dist.ReduceOp.AVG:
                total.div_(self._signals.size, rounding_mode=None if wide.is_floating_point else "floor")
            tensor.copy_(total)

    def _shared_by(self, source: int, offset: int, like: torch.Tensor) -> torch.Tensor:
        assert self.buffers is not None
        return _view(self.buffers.tensors[source], self._half * CHUNK + offset, like)


class PairChunks:
    """The buffers between this rank and each other one, a thread for each direction."""

    def __init__(self, signals: Signals, device: torch.device) -> None:
        self._signals, self._device = signals, device
        self._threads: dict[tuple[str, int], CopyThread] = {}  # ("send" or "receive", peer)
        self._buffers: dict[int, SharedBuffers] = {}
        self._locks = [threading.Lock() for _ in range(signals.size)]
        self._unread: set[int] = set()  # peers that may still read what was sent to them last

    def thread(self, direction: str, peer: int) -> CopyThread:
        key = direction, peer
        if key not in self._threads:
            self._threads[key] = CopyThread(f"hpnb {direction} {peer}", self._device)
        return self._threads[key]

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        """Copy chunk after chunk to the buffer; called on the thread of this direction."""
        buffer = self._opened(peer).tensors[self._signals.rank > peer]
        flat = tensor.contiguous().view(-1)
        for part in _parts(flat.numel(), flat.element_size(), CHUNK):
            if peer in self._unread:
                self._signals.take(peer, READ)
            with copies_done(self.thread("send", peer)):
                _view(buffer, 0, flat[part]).copy_(flat[part], non_blocking=True)
            self._unread.add(peer)
            self._signals.send(peer, SENT)

    def receive(self, tensor: torch.Tensor, peer: int) -> None:
        """Copy chunk after chunk from the buffer; called on the thread of this direction."""
        buffer = self._opened(peer).tensors[self._signals.rank < peer]
        with as_row(tensor) as flat:
            for part in _parts(flat.numel(), flat.element_size(), CHUNK):
                self._signals.take(peer, SENT)
                with copies_done(self.thread("receive", peer)):
                    flat[part].copy_(_view(buffer, 0, flat[part]), non_blocking=True)
                self._signals.send(peer, READ)

    def _opened(self, peer: int) -> SharedBuffers:
        """The buffers of the lower rank of the two, and of the higher: each sends through its own."""
        signals = self._signals

        def exchange(text: bytes) -> list[bytes]:
            sent = signals.post(text, peer, PAIR_OFFER)
            received = signals.take(peer, PAIR_OFFER)
            sent.wait()
            return [text, received] if signals.rank < peer else [received, text]

        with self._locks[peer]:
            if peer not in self._buffers:
                self._buffers[peer] = SharedBuffers(int(signals.rank > peer), exchange, CHUNK, self._device)
            return self._buffers[peer]


@contextmanager
def copies_done(thread: CopyThread) -> Iterator[None]:
    """Copy inside: in a turn on the GPU if turns are taken, and done when the block ends."""
    turns = gpu_turns()
    with nullcontext() if turns is None else turns.for_copy():
        yield
        thread.wait_for_copies()


def combine_of(op: Any) -> Combine | None:
    """What adds (multiplies, ...) one tensor to another, or None for an op that gloo has to do."""
    return next((combine for known, combine in _COMBINE if op == known), None)  # a ReduceOp has no hash


_scratch_lock = threading.Lock()


@cache
def _scratch(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a chunk of a sum is computed: twice a chunk each, for sums of 16 bits in 32."""
    return unlisted_memory(2 * CHUNK, device), unlisted_memory(2 * CHUNK, device)


def _message_bytes(tag: int) -> int:
    return _OFFER_BYTES if tag in (OFFER, PAIR_OFFER) else 1


def _parts(elements: int, element_size: int, nbytes: int) -> Iterator[slice]:
    """Slices of at most `nbytes` bytes, one after the other."""
    step = max(1, nbytes // element_size)
    return (slice(start, min(start + step, elements)) for start in range(0, elements, step))


def _view(buffer: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """The buffer from `offset` bytes on, as a tensor of the shape and dtype of `like`."""
    return buffer[offset : offset + like.nbytes].view(like.dtype).view(like.shape)


@contextmanager
def as_row(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor's elements in one row, to read and to write."""
    row = tensor.contiguous().view(-1)
    yield row
    if not tensor.is_contiguous():
        tensor.copy_(row.view(tensor.shape))

"""Bytes that this process sends over its TCP connections, as the operating system counts them.

What is counted is what the process hands to its connections: tensors, and the headers that gloo puts before
its messages. The headers of TCP and IP come on top, and so does what TCP must send twice. Linux alone counts
by connection; elsewhere `bytes` is NaN. Other transports (NVLink, InfiniBand, shared memory) are not seen.
"""

from __future__ import annotations

import math
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hpnb.ranks.forkserver import start_ahead

start_ahead("torch._dynamo")  # else each rank of notebook 00 imports it for its first sends: two seconds

# Where the kernel's `struct tcp_info` (linux/tcp.h) has what we need: 64 bits, but for the queue's 32.
_NOT_SENT, _SENT, _RETRANSMITTED = 144, 200, 208
_SIZE = 216


@dataclass
class TcpTraffic:
    """`bytes` that were sent in the block; NaN where the system does not count them."""

    bytes: float = math.nan


@contextmanager
def tcp_traffic() -> Iterator[TcpTraffic]:
    """Count what this process sends while the block runs, over connections that exist when it begins."""
    traffic, before = TcpTraffic(), sent_bytes()
    yield traffic
    traffic.bytes = sent_bytes() - before


def sent_bytes() -> float:
    """Bytes that this process has handed to its open TCP connections so far; NaN where nobody counts them."""
    if not hasattr(socket, "TCP_INFO") or not os.path.isdir("/proc/self/fd"):
        return math.nan
    counts = [
        count for name in os.listdir("/proc/self/fd") if (count := _sent_through(int(name))) is not None
    ]
    return float(sum(counts)) if counts else math.nan


def _sent_through(descriptor: int) -> int | None:
    """Bytes handed to one TCP connection; None if the descriptor is none, or the kernel does not say."""
    try:
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
            return None
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except OSError:  # closed meanwhile, or no TCP
        return None
    if len(info) < _SIZE:
        return None
    (queued,) = struct.unpack_from("I", info, _NOT_SENT)
    sent, retransmitted = struct.unpack_from("QQ", info, _SENT)
    return int(sent - retransmitted + queued)

"""Bytes that a process sends over TCP, as the operating system counts them."""

from __future__ import annotations

import math
import socket
import sys

import pytest
import torch
import torch.distributed as dist

import hpnb
from hpnb.lesson.programs.tcp_traffic import sent_bytes, tcp_traffic

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts by connection")


@linux
def test_what_is_written_to_a_connection_is_counted_on_its_own_side() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as client:
            connection, _ = server.accept()
            with connection, tcp_traffic() as tcp:
                client.sendall(b"x" * 10_000)  # nobody reads: some of it may still be queued
            assert tcp.bytes == 10_000


@linux
def test_what_is_no_tcp_connection_does_not_count() -> None:
    left, right = socket.socketpair()
    with left, right, socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()), tcp_traffic() as tcp:
            left.sendall(b"x" * 100)
    assert tcp.bytes == 0


@linux
@pytest.mark.parametrize("ranks", [2, 3])
def test_an_all_reduce_sends_what_a_ring_sends_and_headers(ranks: int) -> None:
    def measure() -> float:
        x = torch.ones(300_000)
        dist.all_reduce(x)
        with tcp_traffic() as tcp:
            dist.all_reduce(x)
        return tcp.bytes

    ring = hpnb.record.ring_bytes("all_reduce", 4 * 300_000, ranks)
    for sent in hpnb.launch(measure, ranks=ranks, device="cpu"):
        assert ring < sent < 1.01 * ring


def test_a_system_that_does_not_count_gives_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "TCP_INFO", raising=False)
    assert math.isnan(sent_bytes())
    with tcp_traffic() as tcp:
        pass
    assert math.isnan(tcp.bytes)

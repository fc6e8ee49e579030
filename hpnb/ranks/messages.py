"""Messages between processes: a length, then a pickle, over a Unix socket."""

from __future__ import annotations

import pickle
import socket
import struct
from typing import Any

_HEADER = struct.Struct("!Q")


def send_message(sock: socket.socket, message: object) -> None:
    """Send one message, waiting as long as the socket's timeout allows."""
    body = message if isinstance(message, bytes) else pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    sock.sendall(_HEADER.pack(len(body)))
    sock.sendall(body)


def receive_message(sock: socket.socket) -> Any:
    """Wait for one message.

    Raises:
        EOFError: the other side is gone.
    """
    (size,) = _HEADER.unpack(_exactly(sock, _HEADER.size))
    return pickle.loads(_exactly(sock, size))


def _exactly(sock: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view.nbytes:
        try:
            got = sock.recv_into(view)
        except ConnectionError:
            got = 0
        if not got:
            raise EOFError("the other side closed the connection")
        view = view[got:]
    return data


class Inbox:
    """Puts messages together from what a socket has so far, without ever waiting for the rest."""

    def __init__(self) -> None:
        self._data = bytearray()

    def read(self, sock: socket.socket) -> tuple[list[Any], bool]:
        """(complete messages that have arrived, False once the other side is gone). `sock` must not block."""
        alive = True
        try:
            while chunk := sock.recv(1 << 20):
                self._data += chunk
            alive = False
        except (BlockingIOError, InterruptedError):
            pass
        except ConnectionError:
            alive = False
        messages = []
        while len(self._data) >= _HEADER.size:
            (size,) = _HEADER.unpack_from(self._data)
            if len(self._data) < _HEADER.size + size:
                break
            messages.append(pickle.loads(memoryview(self._data)[_HEADER.size : _HEADER.size + size]))
            del self._data[: _HEADER.size + size]
        return messages, alive

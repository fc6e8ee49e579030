"""The processes of a pool as the caller holds them: sockets, pipes and pages. Knows how to talk, not what."""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from hpnb.ranks import last_seen, wire
from hpnb.ranks.devices import DeviceChoice
from hpnb.ranks.forkserver import ForkServer, server
from hpnb.ranks.output import Output
from hpnb.ranks.worker import Done, Failed, Spec

_GOODBYE = 3.0  # seconds that ranks have to leave on their own


@dataclass
class Processes:
    """Sockets, pipes and pages of the ranks of a pool. Knows how to talk, not what is said."""

    server: ForkServer
    store: TCPStore | None
    pids: list[int]
    controls: list[socket.socket]
    outputs: list[int]
    pages: list[int]
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    inboxes: list[wire.Inbox] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)
    stopped: bool = False

    @classmethod
    def start(cls, choice: DeviceChoice) -> Processes:
        store = _local_store()
        controls, outputs, pages, given = [], [], [], []
        for _ in range(choice.ranks):
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            read_end, write_end = os.pipe()
            os.set_blocking(read_end, False)
            page = last_seen.new_page()
            controls.append(ours)
            outputs.append(read_end)
            pages.append(page)
            given.append((theirs.detach(), write_end, page))
        try:
            specs = [
                Spec(r, choice.ranks, choice.device, choice.backend, choice.threads, store.port, os.getpid())
                for r in range(choice.ranks)
            ]
            at = server()
            pids = at.spawn([asdict(spec) for spec in specs], given)
        finally:
            for theirs_fd, write_end, _ in given:
                os.close(theirs_fd)
                os.close(write_end)
        made = cls(at, store, pids, controls, outputs, pages)
        for rank in range(choice.ranks):
            made.inboxes.append(wire.Inbox())
            made.selector.register(controls[rank], selectors.EVENT_READ, ("control", rank))
            made.selector.register(outputs[rank], selectors.EVENT_READ, ("output", rank))
        return made

    def send(self, ranks: Sequence[int], message: object, timeout: float) -> None:
        """One pickle for all; waits at most `timeout` for a rank to take it."""
        body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for rank in ranks:
            self.controls[rank].settimeout(timeout)
            # One that is gone shows as such when its answer is awaited.
            with contextlib.suppress(BrokenPipeError, ConnectionError, TimeoutError):
                wire.send(self.controls[rank], body)
            self.controls[rank].setblocking(False)

    def poll(self, seconds: float, output: Output) -> list[tuple[int, Done | Failed | None]]:
        """Wait at most `seconds` for something to happen; replies that came, None for a rank that is gone."""
        found: list[tuple[int, Done | Failed | None]] = []
        for key, _ in self.selector.select(max(0.0, seconds)):
            kind, rank = key.data
            if kind == "output":
                self._show(rank, output)
                continue
            messages, alive = self.inboxes[rank].read(self.controls[rank])
            for message in messages:
                self._show(rank, output)  # what was printed before the answer belongs before it
                found.append((rank, message))
            if not alive:
                self.selector.unregister(self.controls[rank])
                self.gone.add(rank)
                if not messages:
                    found.append((rank, None))
        return found

    def _show(self, rank: int, output: Output) -> None:
        try:
            while data := os.read(self.outputs[rank], 1 << 16):
                output.feed(rank, data)
            self.selector.unregister(self.outputs[rank])  # end of file: every writer is gone
        except (BlockingIOError, KeyError):
            pass

    def drain(self, output: Output) -> None:
        """Show what is in the pipes already."""
        if not self.stopped:
            for rank in range(len(self.pids)):
                self._show(rank, output)

    def notes(self) -> dict[int, last_seen.Note]:
        return {rank: last_seen.read(page) for rank, page in enumerate(self.pages)}

    def exit_codes(self, ranks: Sequence[int]) -> dict[int, int | None]:
        """Exit codes of ranks that are gone; the kernel may need a moment to tell."""
        deadline = time.monotonic() + 2.0
        while True:
            codes = self.server.exit_codes([self.pids[r] for r in ranks])
            if None not in codes.values() or time.monotonic() > deadline:
                return {r: codes.get(self.pids[r]) for r in ranks}
            time.sleep(0.01)

    def dismiss(self) -> None:
        """Ask all ranks to leave, and wait a little."""
        left = [r for r in range(len(self.pids)) if r not in self.gone]
        self.send(left, None, 1.0)  # what is no Call ends a rank's loop
        deadline = time.monotonic() + _GOODBYE
        for rank in left:
            sock = self.controls[rank]
            with contextlib.suppress(OSError):
                sock.settimeout(max(0.01, deadline - time.monotonic()))
                while sock.recv(1 << 16):
                    pass

    def stop(self) -> None:
        """Kill what is left and let go of every descriptor."""
        if self.stopped:
            return
        self.stopped = True
        with contextlib.suppress(RuntimeError):  # a server that is gone has killed them already
            self.server.kill(self.pids)
        self.selector.close()
        for sock in self.controls:
            sock.close()
        for fd in (*self.outputs, *self.pages):
            os.close(fd)
        self.store = None


def _local_store() -> TCPStore:
    """Where ranks find each other: a free port of the loopback, chosen by the kernel."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    port = listener.getsockname()[1]
    return TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )

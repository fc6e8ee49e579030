"""The caller's side of a pool's processes: their sockets, pipes and pages, whatever the messages say."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import selectors
import signal
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from hpnb.ranks import last_seen
from hpnb.ranks.devices import DeviceChoice
from hpnb.ranks.forkserver import ForkServer, server
from hpnb.ranks.messages import Inbox, send_message
from hpnb.ranks.output import Output
from hpnb.ranks.process_stat import all_processes
from hpnb.ranks.worker import Call, Done, Failed, RankSpec

_GOODBYE = 3.0  # seconds that ranks have to leave on their own
_ANSWER_LIMIT = 1.0  # seconds that a rank has to say where it is; one that is stopped never does
_LONGEST_WAIT = 3600.0  # seconds; some systems refuse more
_CHUNK = 1 << 16  # bytes, as much as a pipe holds


def _seconds_since_boot() -> float:
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _in_groups_of(leaders: Sequence[int], since: float) -> list[int]:
    """Processes in the process groups of these ranks. Those that started before the ranks are strangers, who
    have got a number that was free again."""
    return [p.pid for p in all_processes() if p.group in leaders and p.started > since - 1]


@dataclass
class RankProcesses:
    """Sockets, pipes and pages of the ranks of a pool."""

    server: ForkServer
    store: TCPStore | None
    pids: list[int]
    controls: list[socket.socket]
    outputs: list[int]
    pages: list[int]
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    inboxes: list[Inbox] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)
    bytes_printed: int = 0
    calls: int = 0  # how many were sent
    stopped: bool = False
    started: float = field(default_factory=_seconds_since_boot)

    @classmethod
    def start(cls, choice: DeviceChoice, modules: Iterable[str], limit: float) -> RankProcesses:
        """Fork the ranks in `limit` seconds, once the server has imported `modules`."""
        store = _local_store()
        fork_server = server(limit)
        controls: list[socket.socket] = []
        outputs: list[int] = []
        pages: list[int] = []
        inherited: list[list[int]] = []  # of each rank its socket and its end of the pipe
        where = (choice.device, choice.gpus, choice.backend, choice.threads, store.port, dict(os.environ))
        specs = [RankSpec(rank, choice.ranks, *where) for rank in range(choice.ranks)]
        try:
            for _ in range(choice.ranks):  # which may run out of descriptors
                control, rank_control = socket.socketpair()
                controls.append(control)
                control.setblocking(False)
                inherited.append([rank_control.detach()])
                read_end, write_end = os.pipe()
                outputs.append(read_end)
                inherited[-1].append(write_end)
                os.set_blocking(read_end, False)
                pages.append(last_seen.new_page())
            descriptors = [[*ends, page] for ends, page in zip(inherited, pages, strict=True)]
            pids = fork_server.spawn([asdict(spec) for spec in specs], descriptors, modules, limit)
        except BaseException:
            _close(controls, outputs, pages)
            raise
        finally:
            for fd in (fd for fds in inherited for fd in fds):
                os.close(fd)
        processes = cls(fork_server, store, pids, controls, outputs, pages)
        for rank in range(choice.ranks):
            processes.inboxes.append(Inbox())
            processes.selector.register(controls[rank], selectors.EVENT_READ, ("control", rank))
            processes.selector.register(outputs[rank], selectors.EVENT_READ, ("output", rank))
        return processes

    def send(self, ranks: Sequence[int], message: object, timeout: float) -> None:
        """One pickle for all; waits at most `timeout` for the ranks to take it.

        From now on `poll` drops replies to earlier calls.
        """
        if isinstance(message, Call):
            self.calls += 1
            message = replace(message, number=self.calls)
        body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        deadline = time.monotonic() + timeout
        for rank in ranks:
            self.controls[rank].settimeout(min(max(0.001, deadline - time.monotonic()), _LONGEST_WAIT))
            # A rank that is gone, or does not read, is noticed while its reply is awaited.
            with contextlib.suppress(BrokenPipeError, ConnectionError, TimeoutError):
                send_message(self.controls[rank], body)
            self.controls[rank].setblocking(False)

    def poll(self, seconds: float, output: Output) -> list[tuple[int, Done | Failed | None]]:
        """Wait at most `seconds` for something to happen; replies that came, None for a rank that is gone."""
        replies: list[tuple[int, Done | Failed | None]] = []
        output.show_held_warnings()
        for key, _ in self.selector.select(min(max(0.0, seconds), output.soonest, _LONGEST_WAIT)):
            kind, rank = key.data
            if kind == "output":
                self._show(rank, output, _CHUNK)  # a rank that floods must not starve the others
                continue
            messages, alive = self.inboxes[rank].read(self.controls[rank])
            for message in messages:
                self._show(rank, output)  # what was printed before the reply belongs before it
                if message.call == self.calls:
                    replies.append((rank, message))
            if not alive:
                self.selector.unregister(self.controls[rank])
                self.gone.add(rank)
                replies.append((rank, None))
        return replies

    def _show(self, rank: int, output: Output, most: int = 64 * _CHUNK) -> None:
        try:
            while most > 0 and (data := os.read(self.outputs[rank], _CHUNK)):
                output.feed(rank, data)
                self.bytes_printed += len(data)
                most -= len(data)
            if most > 0:
                self.selector.unregister(self.outputs[rank])  # end of file: every writer is gone
        except (BlockingIOError, KeyError):
            pass

    def drain(self, output: Output) -> None:
        """Show what is in the pipes already."""
        if not self.stopped:
            for rank in range(len(self.pids)):
                self._show(rank, output)

    def last_notes(self) -> dict[int, last_seen.Note]:
        """What every rank has noted last; a rank that computes in C notes nothing until it is back."""
        return {rank: last_seen.read(page) for rank, page in enumerate(self.pages)}

    def notes(self) -> dict[int, last_seen.Note]:
        """Where every rank was last seen; one that has not written notes lately is asked by a signal."""
        notes = self.last_notes()
        silent = [r for r, note in notes.items() if note.age > 5 * last_seen.PERIOD and r not in self.gone]
        for rank in silent:
            last_seen.clear_answer(self.pages[rank])
        if silent:
            self.server.signal([self.pids[rank] for rank in silent], last_seen.SIGNAL)
        deadline = time.monotonic() + _ANSWER_LIMIT
        while silent and time.monotonic() < deadline:
            time.sleep(0.02)
            answers = {rank: last_seen.read_answer(self.pages[rank]) for rank in silent}
            for rank, answer in answers.items():
                if answer is not None:
                    notes[rank] = replace(notes[rank], age=answer.age, threads=answer.threads)
            silent = [rank for rank in silent if answers[rank] is None]
        return notes

    def exit_codes(self, ranks: Sequence[int]) -> dict[int, int | None]:
        """Exit codes of ranks that are gone; the kernel may need a moment."""
        deadline = time.monotonic() + 2.0
        while True:
            try:
                codes = self.server.exit_codes([self.pids[r] for r in ranks])
            except RuntimeError:  # the server is gone or stuck; what the ranks have noted is reported without
                return dict.fromkeys(ranks)
            if None not in codes.values() or time.monotonic() > deadline:
                return {r: codes.get(self.pids[r]) for r in ranks}
            time.sleep(0.01)

    @property
    def _started_here(self) -> bool:
        # A fork of the caller has a copy of everything here, but must not stop the ranks.
        return self.server.pid == os.getpid()

    def dismiss(self) -> None:
        """Ask all ranks to leave, and wait a little."""
        if not self._started_here:
            return
        remaining = [r for r in range(len(self.pids)) if r not in self.gone]
        self.send(remaining, None, 1.0)  # what is no Call ends a rank's loop
        deadline = time.monotonic() + _GOODBYE
        for rank in remaining:
            sock = self.controls[rank]
            with contextlib.suppress(OSError):
                sock.settimeout(max(0.01, deadline - time.monotonic()))
                while sock.recv(1 << 16):
                    pass

    def stop(self) -> None:
        """Kill the ranks that remain and close every descriptor."""
        if self.stopped:
            return
        self.stopped = True
        try:
            if self._started_here:
                self._kill()
        finally:  # also after a second Ctrl-C, because nobody calls this again
            self.selector.close()
            _close(self.controls, self.outputs, self.pages)
            if not self._started_here:  # its destructor waits for a thread that a fork does not have
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.store))
            self.store = None

    def _kill(self) -> None:
        try:
            self.server.kill(self.pids)
        except RuntimeError:  # the server is gone and its ranks have died with it; or it is stuck
            if not self.server.alive():
                for pid in _in_groups_of(self.pids, self.started):
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)


def _close(controls: Sequence[socket.socket], outputs: Sequence[int], pages: Sequence[int]) -> None:
    for sock in controls:
        sock.close()
    for fd in (*outputs, *pages):
        os.close(fd)


def _local_store() -> TCPStore:
    """Where ranks find each other: a free port of the loopback, chosen by the kernel."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    port = listener.getsockname()[1]
    return TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )

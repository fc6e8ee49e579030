"""`launch` and `Ranks`: the caller's side of a cell that runs on several processes.

    launch(fn, ranks=4)             four processes for one call
    with Ranks(4) as ranks:         four processes that stay, with their state
        ranks.run(fn)

A call sends the same pickle to every rank, then waits: it shows what the ranks print and collects one result
per rank. At the first failure it collects every rank's stack, stops the ranks and raises one RankError.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hpnb.ranks import errors, last_seen, serialize_function
from hpnb.ranks.caller_globals import KnownGlobals, caller_namespace, global_names
from hpnb.ranks.current_rank import current, inside_rank
from hpnb.ranks.devices import DeviceChoice, choose_device, default_ranks
from hpnb.ranks.errors import RankError, RankInterrupt
from hpnb.ranks.output import Output
from hpnb.ranks.pack_call import SentGlobals, pack_call
from hpnb.ranks.processes import RankProcesses
from hpnb.ranks.worker import Done, Failed

T = TypeVar("T")

_NOTHING = SentGlobals()

_GRACE = 0.5  # seconds after a first failure in which others may report theirs
_START_TIMEOUT = 120.0
_AT_ONCE = 0.2  # seconds within which errors of others are put down to a death


def launch(
    fn: Callable[..., T],
    *args: Any,
    ranks: int | None = None,
    device: str = "auto",
    timeout: float = 300.0,
    **kwargs: Any,
) -> list[T]:
    """Run `fn(*args, **kwargs)` on `ranks` processes that talk to each other; one result per rank.

    Inside `fn` a process group is up, and `hpnb.rank()`, `hpnb.world_size()` and `hpnb.device()` answer.
    Tensors, as arguments and as results, arrive on the CPU and without a graph.

    Args:
        ranks: how many processes; by default one a GPU, or 4 on a CPU.
        device: "auto" (NCCL if there are GPUs enough, else gloo on the CPU), "cpu" or "cuda".
        timeout: seconds after which the call fails.

    Raises:
        RankError: a rank raised, died or hung, or something could not be pickled.
        ValueError: ranks or device cannot be had here, or this is already a rank.
    """
    namespace = caller_namespace(sys._getframe(1).f_globals, fn)
    with Ranks(ranks, device, timeout) as pool:
        return pool._run(namespace, pool.members, fn, args, kwargs)


class Ranks:
    """RankProcesses that stay, with their state, until closed.

    Args:
        ranks, device, timeout: as for `launch`; the timeout is for every call.

    Globals that a call assigns are there in the next call. After a failure the ranks are stopped, because
    some may be in the middle of a collective; they stay only if all of them failed in the same way at the
    same line.
    """

    def __init__(self, ranks: int | None = None, device: str = "auto", timeout: float = 300.0) -> None:
        if inside_rank():
            raise ValueError(
                f"rank {current.rank} of {current.world_size} cannot start ranks of its own; "
                "call hpnb.launch from outside, or make a smaller group with hpnb.Mesh"
            )
        _check_timeout(timeout)
        self.choice: DeviceChoice = choose_device(device, default_ranks() if ranks is None else ranks)
        self.timeout = timeout
        self.members = tuple(range(self.choice.ranks))
        self._globals = [KnownGlobals() for _ in self.members]
        self._lock = threading.Lock()
        self._processes = RankProcesses.start(self.choice)
        # Dropped without being closed, or at exit: nothing stays behind.
        self._finalizer = weakref.finalize(self, self._processes.stop)
        self._ended: str | None = None
        self._died: dict[int, float] = {}  # rank -> time.monotonic()
        try:
            self._collect(self.members, time.monotonic() + max(timeout, _START_TIMEOUT), "start")
        except BaseException:
            self._finalizer()  # ranks that failed alike would stay otherwise, with nobody to call them
            raise

    @property
    def size(self) -> int:
        return self.choice.ranks

    @property
    def alive(self) -> bool:
        """True while calls can be made."""
        return self._ended is None

    def run(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> list[T]:
        """Run `fn(*args, **kwargs)` on every rank; one result a rank. Raises as `launch` does."""
        namespace = caller_namespace(sys._getframe(1).f_globals, fn)
        return self._run(namespace, self.members, fn, args, kwargs)

    def run_cell(
        self,
        text: str,
        filename: str = "<cell>",
        members: Sequence[int] | None = None,
        timeout: float | None = None,
        wanted: bool = True,
    ) -> list[Any]:
        """Execute source text in the __main__ of `members` (default: all).

        Returns:
            The value of its last line, one a rank, if it is `wanted`; it then has to pickle.
        """
        code = compile(text, filename, "exec", dont_inherit=True)  # a SyntaxError is the caller's
        if timeout is not None:
            _check_timeout(timeout)
        content: dict[str, Any] = {"cell": text, "filename": filename, "wanted": wanted}
        names = global_names(code)
        namespace = sys.modules["__main__"].__dict__
        return self._send_and_collect(namespace, names, content, self._checked(members), timeout)

    def close(self) -> None:
        """Let the ranks leave. They have a few seconds, then they are killed."""
        if self._ended is None:
            self._ended = "it was closed"
            self._processes.dismiss()
        self._finalizer()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{self.choice}>" if self.alive else f"<{self.size} ranks, ended: {self._ended}>"

    # --- one call ---------------------------------------------------------------------------

    def _run(
        self,
        namespace: dict[str, Any],
        members: Sequence[int],
        fn: Callable[..., T],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> list[T]:
        if not callable(fn):
            raise TypeError(f"a function is needed, to run on every rank, not a {type(fn).__name__}: {fn!r}")
        by_value = isinstance(fn, types.FunctionType) and fn.__globals__ is namespace
        names = global_names(fn.__code__) if by_value else set()
        content = {"fn": fn, "args": args, "kwargs": kwargs}
        return self._send_and_collect(namespace, names, content, members, None)

    def _send_and_collect(
        self,
        namespace: dict[str, Any],
        names: set[str],
        content: dict[str, Any],
        members: Sequence[int],
        timeout: float | None,
    ) -> list[Any]:
        with self._lock:
            if self._ended is not None:
                raise RuntimeError(f"these ranks have ended ({self._ended}); start new ones with hpnb.Ranks")
            limit = self.timeout if timeout is None else timeout
            call, sent = pack_call([self._globals[r] for r in members], namespace, names, content)
            deadline = time.monotonic() + limit
            try:
                self._processes.send(members, call, limit)
            except KeyboardInterrupt:
                raise self._interrupted(members, {}) from None
            return self._collect(members, deadline, f"{limit:g} s", namespace, sent)

    def _collect(
        self,
        members: Sequence[int],
        deadline: float,
        limit: str,
        namespace: dict[str, Any] | None = None,
        sent: SentGlobals = _NOTHING,
    ) -> list[Any]:
        """Show output and wait until every member has answered; raise if one did not answer well."""
        processes, output = self._processes, Output()
        # None: died. A rank that is not called counts too, because the process group dies with it.
        replies: dict[int, Done | Failed | None] = dict.fromkeys(processes.gone)
        failed_at: float | None = time.monotonic() if replies else None
        try:
            while waiting := [r for r in members if r not in replies]:
                now = time.monotonic()
                until = deadline if failed_at is None else min(deadline, failed_at + _GRACE)
                if now >= until:
                    break
                for rank, reply in processes.poll(until - now, output):
                    replies.setdefault(rank, reply)  # a rank that has failed may die of it: the first counts
                    if reply is None:
                        self._died.setdefault(rank, time.monotonic())
                    if reply is None or isinstance(reply, Failed):
                        failed_at = failed_at or time.monotonic()
            self._learn_names(replies, namespace, sent)
            if waiting or failed_at is not None:
                raise self._failure(members, replies, limit)
        except KeyboardInterrupt:
            raise self._interrupted(members, replies) from None
        finally:
            processes.drain(output)
            output.finish()
        return [self._loaded(m, reply) for m in members if isinstance(reply := replies[m], Done)]

    def _loaded(self, rank: int, reply: Done) -> Any:
        try:
            return serialize_function.loads(reply.result)
        except Exception as error:
            summary = f"the result of rank {rank} cannot be unpickled here ({type(error).__name__}: {error})"
            raise RankError(summary, rank=rank, error=type(error).__name__) from error

    def _learn_names(
        self, replies: dict[int, Done | Failed | None], namespace: dict[str, Any] | None, sent: SentGlobals
    ) -> None:
        for rank, reply in replies.items():
            if reply is None or namespace is None:
                continue
            if isinstance(reply, Done) or reply.took_names:
                self._globals[rank].mark_sent(sent.names, namespace)
                self._globals[rank].objects |= sent.objects
            # A name that a rank has assigned stays the rank's until the caller reassigns it.
            self._globals[rank].mark_sent(reply.new_names, namespace)

    # --- when it does not end well ------------------------------------------------------------

    def _failure(
        self, members: Sequence[int], replies: dict[int, Done | Failed | None], limit: str
    ) -> RankError:
        processes, of = self._processes, f"of {self.size}"
        waiting = [r for r in members if r not in replies]
        dead = [r for r, reply in replies.items() if reply is None]
        raised = {r: reply for r, reply in replies.items() if isinstance(reply, Failed)}
        # Other ranks fail because one dies, at about that time; one that raised well before had another
        # reason.
        first = min((reply.time for reply in raised.values()), default=math.inf)
        dead = [r for r in dead if self._died.get(r, 0.0) - first < _AT_ONCE]
        notes = processes.notes()
        stacks = self._stacks(members, replies, notes)
        if dead:
            rank, codes = dead[0], processes.exit_codes(dead)
            summary, error = f"rank {rank} {of} {errors.exit_reason(codes[rank])}", "died"
            text = errors.stack_text(notes[rank]) or "  (it ended before it could note where it was)\n"
            text = "  (last seen here)\n" + text
        elif raised:
            rank = min(raised, key=lambda r: raised[r].time)
            summary, error = f"rank {rank} {of} raised {raised[rank].summary}", raised[rank].error
            text = errors.readable(raised[rank].traceback)
        else:
            rank = _to_blame(waiting, notes)
            who = f"rank {waiting[0]}" if len(waiting) == 1 else f"ranks {', '.join(map(str, waiting))}"
            summary, error = f"no answer from {who} {of} within {limit}", "timed out"
            if len(waiting) < len(members):
                summary += ", though the others have returned"
            elif all(errors.waits_for_others(notes[r]) for r in waiting):
                summary += ": all of them wait for others, in calls that do not match"
            else:
                summary += f": rank {rank} was still at work"
            text = stacks[rank]
        in_step = len(raised) == len(members) and len({reply.place for reply in raised.values()}) == 1
        if not in_step:
            self._stop(summary)
        return RankError(summary, rank=rank, traceback=text, stacks=stacks, error=error)

    def _interrupted(
        self, members: Sequence[int], replies: dict[int, Done | Failed | None]
    ) -> RankInterrupt:
        notes = self._processes.notes()
        stacks = self._stacks(members, replies, notes)
        rank = _to_blame([r for r in members if r not in replies] or list(members), notes)
        self._stop("it was interrupted")
        summary = f"interrupted; the {self.size} ranks were stopped, and their state is gone"
        text = stacks.get(rank, "")
        return RankInterrupt(summary, rank=rank, traceback=text, stacks=stacks, error="interrupted")

    def _stacks(
        self,
        members: Sequence[int],
        replies: dict[int, Done | Failed | None],
        notes: dict[int, last_seen.Note],
    ) -> dict[int, str]:
        stacks = {}
        for rank in self.members:
            reply = replies.get(rank, notes[rank])
            if isinstance(reply, Failed):
                stacks[rank] = errors.readable(reply.traceback)
            elif isinstance(reply, Done):
                stacks[rank] = "  (has returned, and waits for the next call)\n"
            elif rank not in members:
                stacks[rank] = "  (was not called)\n"
            elif isinstance(reply, last_seen.Note):
                stacks[rank] = errors.stack_text(reply) or "  (no Python code of yours is running)\n"
        return stacks

    def _stop(self, why: str) -> None:
        self._ended = why
        self._finalizer()

    def _checked(self, members: Sequence[int] | None) -> tuple[int, ...]:
        chosen = self.members if members is None else tuple(members)
        if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(self.members):
            raise ValueError(f"ranks {list(chosen)} are not distinct members of 0 to {self.size - 1}")
        return chosen


def _to_blame(waiting: Sequence[int], notes: dict[int, last_seen.Note]) -> int:
    """Of the ranks that did not answer, the first that does not wait for another rank."""
    busy = [rank for rank in waiting if not errors.waits_for_others(notes[rank])]
    return (busy or list(waiting))[0]


def _check_timeout(timeout: object) -> None:
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise ValueError(f"timeout={timeout!r}: give the seconds that a call may take, a number above 0")

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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch.distributed as dist

from hpnb.ranks import errors, serialize_function
from hpnb.ranks.call_checks import limit_in_seconds, refuse_limits, warn_under_torchrun, wrong_members
from hpnb.ranks.caller_globals import (
    KnownGlobals,
    caller_namespace,
    global_names,
    modules_used,
    namespaces_by_value,
)
from hpnb.ranks.cell_syntax import FLAGS
from hpnb.ranks.changed_modules import ImportedModules, modules_to_reload, outdated_sentences
from hpnb.ranks.current_rank import current, inside_rank
from hpnb.ranks.devices import DeviceChoice, choose_device, default_ranks
from hpnb.ranks.errors import RankError, RankInterrupt
from hpnb.ranks.failed_call import FailedCall, TooLong, did_not_start, hung, timed_out
from hpnb.ranks.forkserver import START_TIMEOUT
from hpnb.ranks.hang import HangWatch
from hpnb.ranks.output import Output, show_figures
from hpnb.ranks.pack_call import SentGlobals, pack_call
from hpnb.ranks.processes import RankProcesses
from hpnb.ranks.worker import Done, Failed

T = TypeVar("T")

_NOTHING = SentGlobals()

_GRACE = 0.5  # seconds after a first failure in which others may report theirs
_GRACE_OF_LOST = 5.0  # the same, if a rank has only lost a connection: another one has failed
HANG_TIMEOUT = 300.0
_LONG_GRACE = 5.0  # the same if they still compute, and their state would be lost
_LOOK_EVERY = 0.1
_MEETING = 3.0  # seconds in which ranks that are in step meet


def launch(
    fn: Callable[..., T],
    *args: Any,
    ranks: int | None = None,
    device: str = "auto",
    timeout: float | None = None,
    hang_timeout: float | None = HANG_TIMEOUT,
    start_timeout: float | None = START_TIMEOUT,
    **kwargs: Any,
) -> list[T]:
    """Run `fn(*args, **kwargs)` on `ranks` processes that talk to each other; one result per rank.

    Inside `fn` a process group is up, and `hpnb.rank()`, `hpnb.world_size()` and `hpnb.device()` answer.
    Tensors, as arguments and as results, arrive on the CPU and without a graph.

    Args:
        ranks: how many processes; by default one a GPU, or 4 on a CPU.
        device: "auto" (the GPUs, which ranks share if there are too few; the CPU if there are none), "cpu" or
            "cuda".
        timeout: seconds after which the call fails, however busy the ranks are; None: no limit.
        hang_timeout: seconds after which the call fails if no rank has computed or printed anything in them;
            None: never. A rank may wait for another one that computes for as long as it takes.
        start_timeout: seconds that the processes have to import and to find each other; None: no limit.

    Raises:
        RankError: a rank raised, died or hung, or something could not be pickled.
        RuntimeError: the process that starts ranks does not answer within `start_timeout`.
        ValueError: ranks or device cannot be had here, or this is already a rank.

    >>> hpnb.launch(lambda scale: scale * hpnb.rank(), 10, ranks=2, device="cpu")
    [0, 10]
    """
    namespace = caller_namespace(sys._getframe(1).f_globals, fn)
    limits = timeout, hang_timeout, start_timeout
    with Ranks(ranks, device, *limits, _imports=modules_used(fn), _one_call=True) as pool:
        return pool._run(namespace, pool.members, fn, args, kwargs)


class Ranks:
    """Ranks that stay, with their state, until closed.

    Args:
        ranks, device, timeout, hang_timeout, start_timeout: as for `launch`; the first two limits are for
            every call.

    Globals that a call assigns are there in the next call, also if some ranks have raised and the others have
    finished. Ranks are stopped if one dies or hangs, or if some raise while others wait for them. Ctrl-C, or
    a notebook's interrupt, ends the call with a RankInterrupt that says where each rank was, and the ranks
    with their state: save what must stay, and start new ones.

    >>> with hpnb.Ranks(2, device="cpu") as ranks:
    ...     ranks.run(lambda: hpnb.rank())
    [0, 1]
    """

    def __init__(
        self,
        ranks: int | None = None,
        device: str = "auto",
        timeout: float | None = None,
        hang_timeout: float | None = HANG_TIMEOUT,
        start_timeout: float | None = START_TIMEOUT,
        *,
        _imports: Iterable[str] = (),
        _one_call: bool = False,
    ) -> None:
        if inside_rank():
            raise ValueError(
                f"rank {current.rank} of {current.world_size} cannot start ranks of its own; "
                "call hpnb.launch from outside, or make a smaller group with hpnb.Mesh"
            )
        warn_under_torchrun(stacklevel=4 if _one_call else 3)
        limit = limit_in_seconds("timeout", timeout)
        self.hang_timeout = limit_in_seconds("hang_timeout", hang_timeout)
        start_limit = limit_in_seconds("start_timeout", start_timeout)
        self.choice: DeviceChoice = choose_device(device, default_ranks() if ranks is None else ranks)
        self.timeout = limit
        self.members = tuple(range(self.choice.ranks))
        self._globals = [KnownGlobals() for _ in self.members]
        self._imported = [ImportedModules() for _ in self.members]
        self._edits_warned_of: set[tuple[str, float]] = set()  # modules, and the time of the edit
        self._lock = threading.Lock()
        self._processes = RankProcesses.start(self.choice, _imports, start_limit)
        # Dropped without being closed, or at exit: nothing stays behind.
        self._finalizer = weakref.finalize(self, self._processes.stop)
        self._ended: str | None = None
        self._one_call = _one_call
        self.assigned: dict[str, None] = {}  # names that calls have assigned on ranks, the latest last
        self.sent: dict[str, None] = {}  # names of which ranks have got the caller's value, the latest last
        self._died: dict[int, float] = {}  # rank -> time.monotonic()
        try:
            self._collect(self.members, start_limit, math.inf, starts=True)
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
        """Run `fn(*args, **kwargs)` on every rank; one result a rank. Raises as `launch` does.

        All keywords are those of `fn`, so limits such as `timeout` are set in `Ranks(..., timeout=40)`.
        """
        refuse_limits(fn, kwargs)
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
            The value of its last line, one a rank, if it is `wanted`; it then has to pickle. Figures of the
            first of the members are shown as pictures.
        """
        code = compile(text, filename, "exec", FLAGS, dont_inherit=True)  # a SyntaxError is the caller's
        if timeout is not None:
            limit_in_seconds("timeout", timeout)
        content: dict[str, Any] = {"cell": text, "filename": filename, "wanted": wanted}
        content["draws"] = min(self._checked(members))
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
            imported = [self._imported[r] for r in members]
            for sentence in outdated_sentences(imported, self._edits_warned_of):
                print(sentence, file=sys.stderr)
            call = replace(call, reloads=modules_to_reload(imported))
            begun = time.monotonic()
            self.sent |= dict.fromkeys(sorted(name for _, name in sent.names))
            try:
                self._processes.send(members, call, min(limit, self.hang_timeout))
            except KeyboardInterrupt:
                raise self._interrupted(members, {}) from None
            return self._collect(members, limit, self.hang_timeout, namespace, sent, begun=begun)

    def _collect(
        self,
        members: Sequence[int],
        limit: float,
        hang_limit: float,
        namespace: dict[str, Any] | None = None,
        sent: SentGlobals = _NOTHING,
        *,
        begun: float | None = None,
        starts: bool = False,
    ) -> list[Any]:
        """Show output and wait until every member has answered; raise if one did not answer well."""
        processes, output = self._processes, Output(min(members, default=None))
        deadline = (time.monotonic() if begun is None else begun) + limit
        watch, hangs = HangWatch(processes, hang_limit), False
        # None: died. A rank that is not called counts too, because the process group dies with it.
        replies: dict[int, Done | Failed | None] = dict.fromkeys(processes.gone)
        failed_at: float | None = time.monotonic() if replies else None
        try:
            while waiting := [r for r in members if r not in replies]:
                now = time.monotonic()
                until = deadline if failed_at is None else min(deadline, failed_at + _grace(replies))
                some_returned = failed_at is None and len(waiting) < len(members)
                hangs = failed_at is None and watch.hangs(waiting)
                hangs = hangs or (some_returned and watch.left_waiting(waiting))
                if hangs or now >= deadline or (now >= until and not self._will_answer(waiting, now - until)):
                    break
                soon = max(until, now + _LOOK_EVERY)
                for rank, reply in processes.poll(min(soon, watch.next_check(some_returned)) - now, output):
                    watch.note_progress()
                    replies.setdefault(rank, reply)  # a rank that has failed may die of it: the first counts
                    if reply is None:
                        self._died.setdefault(rank, time.monotonic())
                    if reply is None or isinstance(reply, Failed):
                        failed_at = failed_at or time.monotonic()
            self._learn_names(replies, namespace, sent)
            if waiting or failed_at is not None:
                too_long = hung(hang_limit) if hangs else did_not_start(limit) if starts else timed_out(limit)
                raise self._failure(members, replies, too_long)
        except KeyboardInterrupt:
            raise self._interrupted(members, replies) from None
        finally:
            processes.drain(output)
            output.finish()
        done = {m: reply for m in members if isinstance(reply := replies[m], Done)}
        for rank, reply in done.items():
            show_figures(rank, reply.figures)
        return [self._loaded(rank, reply) for rank, reply in done.items()]

    def _loaded(self, rank: int, reply: Done) -> Any:
        try:
            return serialize_function.loads(reply.result)
        except Exception as error:
            summary = f"the result of rank {rank} cannot be unpickled here ({type(error).__name__}: {error})"
            raise RankError(summary, rank=rank, error=type(error).__name__) from error

    def _learn_names(
        self, replies: dict[int, Done | Failed | None], namespace: dict[str, Any] | None, sent: SentGlobals
    ) -> None:
        if namespace is None:
            return
        namespaces = namespaces_by_value(namespace)
        for rank, reply in replies.items():
            if reply is None:
                continue
            if isinstance(reply, Done) or reply.took_names:
                self._globals[rank].mark_sent(sent.names, namespaces)
                self._globals[rank].objects |= sent.objects
                self._globals[rank].mark_entries(sent.entries)
            # A name that a rank has assigned stays the rank's until the caller reassigns it.
            self._globals[rank].mark_assigned(reply.new_names, namespaces)
            self._imported[rank].note(reply.imported)
            self.assigned |= dict.fromkeys(sorted(name for _, name in reply.new_names))

    # --- when it does not end well ------------------------------------------------------------

    def _failure(
        self, members: Sequence[int], replies: dict[int, Done | Failed | None], too_long: TooLong
    ) -> RankError:
        notes = self._processes.notes()
        died = [rank for rank, reply in replies.items() if reply is None]
        exit_codes = self._processes.exit_codes(died) if died else {}
        failure = FailedCall(self.size, members, replies, notes, self._died, exit_codes)
        error = failure.error(too_long)
        blocked = failure.dead or failure.waiting
        if blocked or not (failure.all_raised_alike or self._in_step()):
            self._stop(error.summary)
            if self.assigned and not self._one_call:
                error.summary += "; the ranks were stopped, and the variables that they had assigned are gone"
        return error

    def _will_answer(self, waiting: Sequence[int], seconds: float) -> bool:
        """Whether ranks may still finish a call that has failed on others, and keep their state."""
        if self._one_call or seconds > _LONG_GRACE or self._processes.gone:
            return False
        notes = self._processes.last_notes()
        return not any(errors.waits_for_others(notes[rank]) for rank in waiting)

    def _in_step(self) -> bool:
        """Whether the ranks still meet in a collective, though some have raised and others have not.

        The others have finished the call, so nobody waits for anybody. But a rank that has left out a
        collective that others did not wait for (the source of a broadcast) would miss the next one as well.
        """
        if self._one_call or self._processes.gone:
            return False
        call, _ = pack_call(self._globals, {}, set(), {"fn": dist.barrier, "args": (), "kwargs": {}})
        self._processes.send(self.members, call, _MEETING)
        met: set[int] = set()
        deadline, output = time.monotonic() + _MEETING, Output()
        while len(met) < self.size and time.monotonic() < deadline:
            replies = self._processes.poll(deadline - time.monotonic(), output)
            met |= {rank for rank, reply in replies if isinstance(reply, Done)}
            if any(not isinstance(reply, Done) for _, reply in replies):
                return False
        return len(met) == self.size

    def _interrupted(self, members: Sequence[int], replies: dict[int, Done | Failed | None]) -> RankInterrupt:
        error = FailedCall(self.size, members, replies, self._processes.notes()).interrupted()
        self._stop("it was interrupted")
        return error

    def _stop(self, why: str) -> None:
        self._ended = why
        self._finalizer()

    def _checked(self, members: Sequence[int] | None) -> tuple[int, ...]:
        chosen = self.members if members is None else tuple(members)
        if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(self.members):
            raise ValueError(wrong_members(chosen, self.size))
        return chosen


def _grace(replies: dict[int, Done | Failed | None]) -> float:
    """Seconds after a first failure in which others may report theirs."""
    failures = [reply for reply in replies.values() if not isinstance(reply, Done)]
    only_lost = all(reply is not None and errors.tells_of_lost_rank(reply.summary) for reply in failures)
    return _GRACE_OF_LOST if only_lost else _GRACE

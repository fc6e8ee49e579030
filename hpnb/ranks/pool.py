"""`launch` and `Ranks`: the caller's side of a cell that runs on several processes.

    launch(fn, ranks=4)             four processes for one call
    with Ranks(4) as ranks:         four processes that stay, with their state
        ranks.run(fn)

A call sends the same pickle to every rank, then waits: it shows what the ranks print and collects one result
per rank. After a failure it gives the others a moment to report theirs, collects every rank's stack, and
raises one RankError. Ranks that nobody waits for and that are still in step stay; others are stopped.
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

from hpnb.ranks import serialize_function, waits
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
from hpnb.ranks.failed_call import FailedCall, Replies, TooLong, did_not_start, grace, hung, timed_out
from hpnb.ranks.forkserver import START_TIMEOUT
from hpnb.ranks.hang import HangWatch
from hpnb.ranks.in_step import are_in_step, finish_begun_work
from hpnb.ranks.output import Output, show_figures
from hpnb.ranks.pack_call import SentGlobals, pack_call
from hpnb.ranks.processes import RankProcesses
from hpnb.ranks.stop_request import PassedSignals, Stopped, as_usual, leave_stopped
from hpnb.ranks.worker import Call, Done, Failed

T = TypeVar("T")

_NOTHING = SentGlobals()

HANG_TIMEOUT = 300.0
_GRACE_OF_STATE = 5.0  # more seconds for ranks that still compute, and whose state would be lost
_LOOK_EVERY = 0.1


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
        ranks: how many processes; by default one a GPU, or 4 where there are fewer than 2 GPUs.
        device: "auto" (the GPUs, which ranks share if there are too few; the CPU if there are none), "cpu" or
            "cuda".
        timeout: seconds after which the call fails, however busy the ranks are; None: no limit.
        hang_timeout: seconds after which the call fails if no rank has computed or printed anything in them,
            10 s where all that have not returned wait for ranks that have; None: never. A rank may wait for
            another one that computes for as long as it takes.
        start_timeout: seconds that each of three steps may take: the process that starts ranks answers, it
            imports and forks, the ranks find each other. None: no limit.

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
    finished within 5 seconds. Ranks are stopped if one dies or hangs, if some raise while others wait for
    them or compute for longer, and if they have raised after different communications. Ctrl-C, or a
    notebook's interrupt, ends the call with a RankInterrupt that says where each rank was, and the ranks with
    their state: save what must stay, and start new ones. While a Trainer with a CheckpointHook fits, the
    first one lets it save and stop, after which the ranks stay. An exception of a signal handler ends the
    ranks too.

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
            self._exchange(self.members, None, start_limit, math.inf)
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
        chosen = self._checked(members)
        content = {"cell": text, "filename": filename, "wanted": wanted, "draws": min(chosen)}
        namespace = sys.modules["__main__"].__dict__
        return self._send_and_collect(namespace, global_names(code), content, chosen, timeout)

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
            self.sent |= dict.fromkeys(sorted(name for _, name in sent.names))
            return self._exchange(members, call, limit, self.hang_timeout, namespace, sent)

    def _exchange(
        self,
        members: Sequence[int],
        call: Call | None,
        limit: float,
        hang_limit: float,
        namespace: dict[str, Any] | None = None,
        sent: SentGlobals = _NOTHING,
    ) -> list[Any]:
        """Send a call, or none when the ranks start, and return one result per member.

        Whatever else ends it early, such as Ctrl-C or an exception of a signal handler, ends the ranks too:
        they would go on with a call that nobody waits for, and the next call would wait for it.
        """
        begun = time.monotonic()
        # None: died. A rank that is not called counts too, because the process group dies with it.
        replies: Replies = dict.fromkeys(self._processes.gone)
        try:
            if call is not None:
                self._processes.send(members, call, min(limit, hang_limit))
            with PassedSignals(self._processes.pages) as passed:
                hangs = self._collect(members, replies, begun + limit, hang_limit)
            self._learn_names(replies, namespace, sent)
            if not all(isinstance(replies.get(rank), Done) for rank in {*members, *replies}):
                if_silent = did_not_start(limit) if call is None else timed_out(limit)
                error = self._failure(members, replies, hung(hang_limit) if hangs else if_silent)
                if passed.number is not None and error.error == Stopped.__name__:
                    leave_stopped(passed.number, error)
                raise error
            if passed.number is not None and not passed.was_taken:  # no rank has looked any more
                as_usual(passed.number)
        except RankError:
            raise
        except BaseException as error:
            if self._ended is not None or not isinstance(error, KeyboardInterrupt):
                self._stop(f"{type(error).__name__} ended a call early")
                raise
            raise self._interrupted(members, replies) from None
        done = {rank: reply for rank in members if isinstance(reply := replies[rank], Done)}
        for rank, reply in done.items():
            show_figures(rank, reply.figures)
        return [self._loaded(rank, reply) for rank, reply in done.items()]

    def _collect(self, members: Sequence[int], replies: Replies, deadline: float, hang_limit: float) -> bool:
        """Show output and add to `replies` until every member has answered, or it is clear that one will not;
        whether that is because the call hangs."""
        processes, output = self._processes, Output(min(members, default=None))
        watch, hangs = HangWatch(processes, hang_limit), False
        failed_at: float | None = time.monotonic() if replies else None
        try:
            while waiting := [rank for rank in members if rank not in replies]:
                now = time.monotonic()
                give_up_at = deadline if failed_at is None else min(deadline, failed_at + grace(replies))
                some_returned = failed_at is None and len(waiting) < len(members)
                hangs = failed_at is None and watch.hangs(waiting)
                hangs = hangs or (some_returned and watch.left_waiting(waiting))
                late = now - give_up_at
                if hangs or now >= deadline or (late >= 0 and not self._will_answer(waiting, late)):
                    break
                wake_at = max(give_up_at, now + _LOOK_EVERY)
                if failed_at is None:
                    wake_at = min(wake_at, watch.next_check(some_returned))
                for rank, reply in processes.poll(wake_at - now, output):
                    watch.note_progress()
                    replies.setdefault(rank, reply)  # a rank that has failed may die of it: the first counts
                    if reply is None:
                        self._died.setdefault(rank, time.monotonic())
                    if reply is None or isinstance(reply, Failed):
                        failed_at = failed_at or time.monotonic()
        finally:
            processes.drain(output)
            output.finish()
        return hangs

    def _loaded(self, rank: int, reply: Done) -> Any:
        try:
            return serialize_function.loads(reply.result)
        except Exception as error:
            summary = f"the result of rank {rank} cannot be unpickled here ({type(error).__name__}: {error})"
            raise RankError(summary, rank=rank, error=type(error).__name__) from error

    def _learn_names(self, replies: Replies, namespace: dict[str, Any] | None, sent: SentGlobals) -> None:
        if namespace is None:
            return
        namespaces = namespaces_by_value(namespace)
        for rank, reply in replies.items():
            if reply is None:
                continue
            if isinstance(reply, Done) or reply.took_names:
                self._globals[rank].mark_sent(sent.names)
                self._globals[rank].objects |= sent.objects
                self._globals[rank].mark_entries(sent.entries)
            # A name that a rank has assigned stays the rank's until the caller reassigns it.
            self._globals[rank].mark_assigned(reply.new_names, namespaces)
            self._globals[rank].forget(reply.deleted_names)
            self._imported[rank].note(reply.imported)
            self.assigned |= dict.fromkeys(sorted(name for _, name in reply.new_names))

    # --- when it does not end well ------------------------------------------------------------

    def _failure(self, members: Sequence[int], replies: Replies, if_silent: TooLong) -> RankError:
        notes = self._processes.notes()
        died = [rank for rank, reply in replies.items() if reply is None]
        exit_codes = self._processes.exit_codes(died) if died else {}
        failure = FailedCall(self.size, members, replies, notes, self._died, exit_codes)
        error = failure.error(if_silent)
        if failure.died_first or failure.waiting or not self._may_stay(failure):
            self._stop(error.summary)
            if self.assigned and not self._one_call:
                error.summary += "; the ranks were stopped, and the variables that they had assigned are gone"
        return error

    def _may_stay(self, failure: FailedCall) -> bool:
        """Whether ranks that have all answered can take another call, or leave by themselves."""
        if self._one_call:
            return failure.all_raised_alike and finish_begun_work(self._processes, self._globals)
        return are_in_step(self._processes, self._globals)

    def _will_answer(self, waiting: Sequence[int], seconds: float) -> bool:
        """Whether ranks may still finish a call that has failed on others, and keep their state."""
        if self._one_call or seconds > _GRACE_OF_STATE or self._processes.gone:
            return False
        notes = self._processes.last_notes()
        return not any(waits.waits_for_others(notes[rank]) for rank in waiting)

    def _interrupted(self, members: Sequence[int], replies: Replies) -> RankInterrupt:
        self._ended = "it was interrupted"  # at once: a second Ctrl-C may be on its way
        try:
            return FailedCall(self.size, members, replies, self._processes.notes()).interrupted()
        finally:
            self._finalizer()

    def _stop(self, why: str) -> None:
        self._ended = why
        self._finalizer()

    def _checked(self, members: Sequence[int] | None) -> tuple[int, ...]:
        chosen = self.members if members is None else tuple(members)
        if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(self.members):
            raise ValueError(wrong_members(chosen, self.size))
        return chosen

"""What a failed call was about: which rank is to blame, where every rank was, and the sentence for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hpnb.ranks import errors, last_seen, waits
from hpnb.ranks.errors import RankError, RankInterrupt
from hpnb.ranks.worker import Done, Failed

_AT_ONCE = 0.2  # seconds within which errors of others are put down to a death
_GRACE = 0.5  # seconds after a first failure in which others may report theirs
_GRACE_OF_LOST = 5.0  # the same, if a rank has only lost a connection: another one has failed

Replies = dict[int, Done | Failed | None]  # of the ranks that have answered; None for one that died


def grace(replies: Replies) -> float:
    """Seconds after a first failure in which others may report theirs."""
    failures = [reply for reply in replies.values() if not isinstance(reply, Done)]
    only_lost = all(reply is not None and errors.tells_of_lost_rank(reply.summary) for reply in failures)
    return _GRACE_OF_LOST if only_lost else _GRACE


@dataclass(frozen=True)
class FailedCall:
    """What is known of a call when it has failed.

    Args:
        size: ranks of the pool.
        members: the ranks that were called.
        replies: what each rank has answered; None for one that died.
        notes: where each rank was last seen.
        died_at: {rank: time.monotonic() of its death}.
        exit_codes: {rank: how its process ended}, of those that died.
    """

    size: int
    members: Sequence[int]
    replies: Mapping[int, Done | Failed | None]
    notes: Mapping[int, last_seen.Note]
    died_at: Mapping[int, float] = field(default_factory=dict)
    exit_codes: Mapping[int, int | None] = field(default_factory=dict)

    @property
    def waiting(self) -> list[int]:
        return [rank for rank in self.members if rank not in self.replies]

    @property
    def raised(self) -> dict[int, Failed]:
        return {rank: reply for rank, reply in self.replies.items() if isinstance(reply, Failed)}

    @property
    def causes(self) -> dict[int, Failed]:
        """Ranks that raised, and not because they lost the connection to another rank."""
        return {r: reply for r, reply in self.raised.items() if not errors.tells_of_lost_rank(reply.summary)}

    @property
    def died_first(self) -> list[int]:
        """Ranks that died before anything else went wrong.

        Other ranks fail because one dies, at about that time; one that raised well before had another
        reason, unless it says itself that another rank is gone: on a busy machine a death is noticed late.
        """
        first = min((reply.time for reply in self.causes.values()), default=math.inf)
        died = [rank for rank, reply in self.replies.items() if reply is None]
        return [rank for rank in died if self.died_at.get(rank, 0.0) - first < _AT_ONCE]

    @property
    def all_raised_alike(self) -> bool:
        """Whether all members raised at one line of code, in a loop perhaps at different steps."""
        places = {reply.place for reply in self.raised.values()}
        return not self.died_first and len(places) == 1 and len(self.raised) == len(self.members)

    def error(self, if_silent: TooLong) -> RankError:
        """The error to raise; `if_silent` is the sentence for ranks that only gave no answer."""
        died_first, raised, stacks = self.died_first, self.raised, self.stacks()
        if died_first:
            rank = died_first[0]
            summary = f"rank {rank} of {self.size} {errors.exit_reason(self.exit_codes[rank])}"
            text = errors.stack_text(self.notes[rank]) or "  (it ended before it could note where it was)\n"
            return RankError(
                summary, rank=rank, traceback="  (last seen here)\n" + text, stacks=stacks, error="died"
            )
        if raised:
            rank = min(self.causes or raised, key=lambda r: raised[r].time)
            summary = f"rank {rank} of {self.size} raised {raised[rank].summary}"
            text = errors.readable(raised[rank].traceback)
            return RankError(summary, rank=rank, traceback=text, stacks=stacks, error=raised[rank].error)
        rank = self._at_work(self.waiting)[0]
        caught = self._caught()
        if if_silent.kind == "hung" and self._left_waiting:
            if_silent = left_waiting(caught)
        elif caught:
            if_silent = replace(if_silent, advice=f". {caught}{if_silent.advice}")
        summary = if_silent.sentence.format(ranks=self._names(self.waiting)) + self._what_they_do()
        return RankError(
            summary + if_silent.advice, rank=rank, traceback=stacks[rank], stacks=stacks, error=if_silent.kind
        )

    def interrupted(self) -> RankInterrupt:
        stacks = self.stacks()
        rank = self._at_work(self.waiting or list(self.members))[0]
        summary = f"interrupted; the {self.size} ranks were stopped, and their state is gone"
        text = stacks.get(rank, "")
        return RankInterrupt(summary, rank=rank, traceback=text, stacks=stacks, error="interrupted")

    def stacks(self) -> dict[int, str]:
        """{rank: where it is}, for all that are alive or have raised."""
        stacks = {}
        for rank in range(self.size):
            reply = self.replies.get(rank, self.notes[rank])
            if isinstance(reply, Failed):
                stacks[rank] = errors.readable(reply.traceback)
            elif isinstance(reply, Done):
                stacks[rank] = "  (has returned, and waits for the next call)\n"
            elif rank not in self.members:
                stacks[rank] = "  (was not called)\n"
            elif isinstance(reply, last_seen.Note):
                stacks[rank] = errors.stack_text(reply) or "  (no Python code of yours is running)\n"
        return stacks

    @property
    def _left_waiting(self) -> bool:
        """Whether all that have not answered wait for others, of which some have returned."""
        returned = any(isinstance(reply, Done) for reply in self.replies.values())
        return returned and all(waits.waits_for_others(self.notes[rank]) for rank in self.waiting)

    def _caught(self) -> str:
        """What ranks have raised in this call, though they went on; empty if nothing."""
        parts = [
            f"rank {rank} raised {self.notes[rank].raised}"
            for rank in self.members
            if self.notes[rank].raised and not isinstance(self.replies.get(rank), Failed)
        ]
        if len(parts) in (0, len(self.members)):  # where all have, nobody waits because of that
            return ""
        text = "; ".join(parts)
        return f"{text[0].upper()}{text[1:]} (the function caught it: raise it again, so that all ranks stop)"

    def _what_they_do(self) -> str:
        if len(self.waiting) < len(self.members):
            return ", though the others have returned"
        if all(waits.waits_for_others(self.notes[rank]) for rank in self.waiting):
            return ": all of them wait for others, in calls that do not match"
        busy = self._at_work(self.waiting)
        if len(busy) == 1:
            return f": rank {busy[0]} was still at work"
        who = "all of them" if busy == self.waiting else f"ranks {', '.join(map(str, busy))}"
        return f": {who} were still at work"

    def _at_work(self, ranks: Sequence[int]) -> list[int]:
        """Those of these ranks that do not wait for another rank; all, if each of them does."""
        busy = [rank for rank in ranks if not waits.waits_for_others(self.notes[rank])]
        return busy or list(ranks)

    def _names(self, ranks: Sequence[int]) -> str:
        text = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        return f"{text} of {self.size}"


@dataclass(frozen=True)
class TooLong:
    """How a limit is reported: a sentence with {ranks} in it, the kind of error, and what to do."""

    sentence: str
    kind: str
    advice: str = ""


def did_not_start(seconds: float) -> TooLong:
    advice = f". If they need more time, pass start_timeout={2 * seconds:g} or None"
    return TooLong(f"{{ranks}} did not start within {seconds:g} s", "timed out", advice)


def hung(seconds: float) -> TooLong:
    advice = f". If they had reason to wait, pass hang_timeout={2 * seconds:g} or None"
    return TooLong(
        f"no answer from {{ranks}}, and none of them has computed for {seconds:g} s", "hung", advice
    )


def left_waiting(caught: str = "") -> TooLong:
    """`caught`: what is known of why the others have made fewer calls."""
    caught = caught or (
        "The others have made fewer calls: if their loop over a loader ended earlier, use one "
        "that gives every rank as many batches: hpnb.data.Loader(dataset, batch_size, mesh.dp), or with a "
        "Booster plugin.prepare_dataloader(dataset, batch_size)"
    )
    advice = f", so nobody answers. {caught}"
    return TooLong("no answer from {ranks}, in a collective", "hung", advice)


def timed_out(seconds: float) -> TooLong:
    advice = f". If they need more time, pass timeout={2 * seconds:g}, or timeout=None for no limit"
    return TooLong(f"no answer from {{ranks}} within {seconds:g} s", "timed out", advice)

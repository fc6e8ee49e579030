"""The schedules of the literature. Each is one short function that writes the list of one rank.

F is the forward of a microbatch through a stage, I the gradient of the stage's input, W the gradient of its
weights. B is I and W at once, an unsplit backward.

A list is written as words without microbatches, "F F B F B B": the k-th F is the forward of microbatch k, and
so on. With several chunks on a rank, F0 and F1 are forwards of its first and its second: here the number is
the chunk, not the microbatch as in a written action 2F0. A bare W is the weight gradient that has waited
longest. `_number_words` turns the words into actions.

Read `one_f_one_b` first. Every rank has a warm-up of forwards, a steady state of one forward and one backward
in turn, and a cool-down of backwards; the schedules differ in how long the warm-up is, and in what fills it.

Patterns are written for as many microbatches as they need. The actions of microbatches that do not exist are
then dropped: a schedule that runs also runs without some of its microbatches.

With p ranks, rank r, m microbatches, v chunks per rank, and F, I, W the costs of all of a rank's stages:

    name            idle time of the rank with the longest span     activations kept, in microbatches
                                                                    through all chunks of the rank
    gpipe           (p-1)(F+I+W)                                    m
    1f1b            (p-1)(F+I+W)                                    p - r
    interleaved     (p-1)(F+I+W)/v                                  p + (p-1)/v at most
    breadth-first   (p-1)(F+I+W)/v                                  m
    zb-h1           (p-1)(F+I-W)     if W <= F                      p
    zb-h2           (p-1)(F+I-2W)    if W <= F                      2p - 1
    zb-v            0                if F = I = W                   p
    dualpipe-v      (p-1)(F+I-W)/2   if about equal                 p + 1/2

Idle time is counted between the rank's first start and last end, and never below 0. The formulas hold without
transfer times and for m large enough (interleaved: a multiple of p).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import cast

from hpnb.pipeline_parallel.schedule import Action, Op, Schedule


def make(name: str, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The schedule of that name.

    Args:
        name: one of `NAMES`, in small letters or capitals.
        stages: stages of the pipeline, so there are stages // chunks ranks.
        microbatches: 1 or more; "dualpipe-v" needs at least two per rank.
        chunks: stages per rank. "interleaved" and "breadth-first" give them to the ranks in turn, stage s to
            rank s % ranks. "zb-v" and "dualpipe-v" have two, laid out as a V: rank r has stages r and
            2 * ranks - 1 - r, so rank 0 has both ends.

    Raises:
        ValueError: arguments that the schedule does not allow; the message names some that it does.

    >>> schedules.make("1f1b", stages=4, microbatches=8).simulate().bubble_fraction  # 3/11
    0.2727...
    """
    if not isinstance(name, str) or name.lower() not in _MAKERS:
        raise ValueError(f"there is no schedule {name!r}; choose one of {', '.join(NAMES)}")
    name = name.lower()
    for what, value in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{what}={value!r} must be a whole number, 1 or more")
    if name in _ONE_CHUNK and chunks != 1:
        raise ValueError(
            f"{name} has one chunk a rank: use chunks=1, not {chunks}; interleaved and breadth-first take any"
        )
    if name in _V_SHAPED and chunks != 2:
        raise ValueError(f"{name} has two chunks a rank, there and back: use chunks=2, not {chunks}")
    if stages % chunks:
        below = stages // chunks * chunks
        nearest = f"{below} or {below + chunks}" if below else f"{chunks}"
        raise ValueError(f"{stages} stages cannot be split into {chunks} a rank; use {nearest} stages")
    num_ranks = stages // chunks
    if name == "dualpipe-v" and microbatches < 2 * num_ranks:
        raise ValueError(
            f"dualpipe-v on {num_ranks} ranks needs two microbatches a rank: use {2 * num_ranks} or more, "
            f"not {microbatches}; zb-v takes any number"
        )
    lists = []
    for index in range(num_ranks):
        v_shape = (index, 2 * num_ranks - 1 - index)
        in_turn = tuple(range(index, stages, num_ranks))
        rank = PipelineRank(num_ranks, index, microbatches, v_shape if name in _V_SHAPED else in_turn)
        lists.append(_MAKERS[name](rank))
    return Schedule(lists, name)


@dataclass(frozen=True)
class PipelineRank:
    """The rank whose list is written.

    Attributes:
        stages: the numbers of its stages; chunk c is stage `stages[c]`.
    """

    num_ranks: int
    index: int
    num_microbatches: int
    stages: tuple[int, ...]

    @property
    def ranks_after(self) -> int:
        return self.num_ranks - self.index - 1


# --- one chunk per rank ----------------------------------------------------------------------------


def gpipe(rank: PipelineRank) -> Iterator[Action]:
    """All forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965)."""
    return _number_words("F " * rank.num_microbatches + "B " * rank.num_microbatches, rank)


def one_f_one_b(rank: PipelineRank) -> Iterator[Action]:
    """One forward, one backward in turn (Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1).

                      warm-up   steady state          cool-down
        rank 0 of 4   F F F     F . . . B F B F B ... B . B . B
        rank 3 of 4   . . .     F B F B F B ...

    A rank warms up with one forward for each rank after it: its first backward can only come when the last
    rank has sent one back. The steady state begins with a forward, so rank r of p has at most p - r
    microbatches in flight. A step takes as long as with gpipe.
    """
    num_warmup_microbatches = min(rank.ranks_after, rank.num_microbatches)
    num_steady_microbatches = rank.num_microbatches - num_warmup_microbatches
    warmup = "F " * num_warmup_microbatches
    steady = "F B " * num_steady_microbatches
    cooldown = "B " * num_warmup_microbatches
    return _number_words(warmup + steady + cooldown, rank)


def zb_h1(rank: PipelineRank) -> Iterator[Action]:
    """1F1B with W delayed, so that the cool-down has W to compute (Qi et al. 2024, arXiv 2401.10241, 2.1).

    On rank r, W runs r microbatches after I. So rank r keeps r microbatches more than in 1F1B, and every rank
    keeps p, as rank 0 does there.
    """
    return _zero_bubble(rank, num_warmup_microbatches=rank.ranks_after + 1, num_delayed=rank.index)


def zb_h2(rank: PipelineRank) -> Iterator[Action]:
    """A warm-up so long that no rank ever waits (Qi et al. 2024, arXiv 2401.10241, 2.2).

    No idle time at all if F = I = W, for nearly twice the activations.
    """
    return _zero_bubble(rank, num_warmup_microbatches=2 * rank.ranks_after + 1, num_delayed=2 * rank.index)


def _zero_bubble(rank: PipelineRank, num_warmup_microbatches: int, num_delayed: int) -> Iterator[Action]:
    """A warm-up of forwards, then I, W and F in turn, with W `num_delayed` microbatches behind I.

    The steady unit is I W F where that of 1F1B is F B, so for the same order the warm-up has one F more.
    Together, warm-up and steady state write more F than there are microbatches. `_number_words` drops the
    surplus, which is at the end. What is left of the last units, I and W, is the cool-down.
    """
    num_microbatches = max(rank.num_microbatches, num_delayed)
    warmup = "F " * num_warmup_microbatches
    steady = "I F " * num_delayed + "I W F " * (num_microbatches - num_delayed)
    return _number_words(warmup + steady + "W " * num_delayed, rank)


# --- any number of chunks per rank, given to the ranks in turn --------------------------------------


def interleaved(rank: PipelineRank) -> Iterator[Action]:
    """1F1B over v chunks, p microbatches at a time (arXiv 2104.04473, section 2.2.2).

        microbatch   0 1 2 3 0 1 2 3 4 5 6 7 4 5 6 7       p = 4, v = 2: the order of the forwards;
        chunk        0 0 0 0 1 1 1 1 0 0 0 0 1 1 1 1       backwards the same, chunk 1 before chunk 0

    Filling the pipeline takes the time of one chunk per rank instead of v; the price is v times as many
    messages. The last group of microbatches may be smaller than p.
    """
    p, v = rank.num_ranks, len(rank.stages)
    if v == 1:
        return one_f_one_b(rank)
    groups = -(-rank.num_microbatches // p)
    chunks = groups * [chunk for chunk in range(v) for _ in range(p)]
    forwards = [f"F{chunk}" for chunk in chunks]
    backwards = [f"B{v - 1 - chunk}" for chunk in chunks]
    # A microbatch meets its last chunk after p forwards through each chunk before. From there it passes every
    # later rank twice, as a forward and as a backward, and this rank does one more forward in each of these
    # times. The steady state begins with a forward.
    num_warmup = min(2 * rank.ranks_after + (v - 1) * p, len(forwards))
    num_steady = len(forwards) - num_warmup
    steady = [word for pair in zip(forwards[num_warmup:], backwards, strict=False) for word in pair]
    return _number_words(" ".join([*forwards[:num_warmup], *steady, *backwards[num_steady:]]), rank)


def breadth_first(rank: PipelineRank) -> Iterator[Action]:
    """All microbatches through one chunk, then through the next (Lamy-Poirier 2023, arXiv 2211.05953).

    A step takes as long as with interleaved. What happens once per chunk, such as gathering its weights or
    reducing its gradients, overlaps with all of the chunk's microbatches.
    """
    m, chunks = rank.num_microbatches, range(len(rank.stages))
    forwards = "".join(f"F{chunk} " * m for chunk in chunks)
    backwards = "".join(f"B{chunk} " * m for chunk in reversed(chunks))
    return _number_words(forwards + backwards, rank)


# --- two chunks per rank, there and back -----------------------------------------------------------
#
#     rank     0 1 2 3        The turn is on one rank, and so are both ends: the backward of a microbatch
#     stage    0 1 2 3        starts where its forward did, and all ranks fill up evenly.
#              7 6 5 4


def zb_v(rank: PipelineRank) -> Iterator[Action]:
    """As little idle time as zb-h2, as few activations as zb-h1 (ZB-V of Qi et al., arXiv 2401.10241)."""
    p, r = rank.num_ranks, rank.index
    num_microbatches = max(rank.num_microbatches, 2 * p - 1)
    words = (
        "F0 " * (2 * (p - r) - 1)  # warm-up: towards the turn, until the first microbatch comes back
        + "F1 F0 " * r  # both ways
        + "F1 I1 W " * (p - r)  # backwards start at the end of the V, which is on rank 0
        + "F0 I0 W F1 I1 W " * (num_microbatches - 2 * p + r + 1)  # steady state
        + "I0 W F1 I1 W " * (p - r - 1)  # cool-down: no F0 is left, the last F1 are on their way to rank 0
        + "I0 I1 " * r  # gradients first, because other ranks wait for them
        + "I0 W " * (p - r)  # one W for each I again, the one that has waited longest
        + "W " * (2 * r)  # what is left of those that have waited
    )
    return _number_words(words, rank)


def dualpipe_v(rank: PipelineRank) -> Iterator[Action]:
    """One direction of DualPipe (DeepSeek-AI 2024, arXiv 2412.19437, section 3.2.1), folded into a V.

    The steady state pairs an F0 with a B1, and an F1 with a B0, so that the kernels of one can overlap the
    messages of the other. They do where stages send tokens to experts (`overlapped_pairs.py`). Elsewhere a
    rank does F, then B, and a pair takes the time of both. Then half of zb-h1's idle time is left if F, I and
    W are about equal, and zb-v leaves less: overlapped pairs are the reason to use this schedule.
    """
    p, r, m = rank.num_ranks, rank.index, rank.num_microbatches
    # The last backwards, of chunk 1 and chunk 0 in turn: r + 1 are not split, and r + 1 are.
    turn_to_split = [f"{'B' if k <= r else 'I'}{1 - k % 2}" for k in range(2 * r + 2)]
    words = (
        "F0 " * (2 * (p - r - 1))  # warm-up: towards the turn
        + "F0 F1 " * (r + 1)  # both ways
        + "I1 W F1 " * (p - r - 1)  # backwards start at the end of the V, which is on rank 0
        + "F0 B1 F1 B0 " * (m - 2 * p + r + 1)  # steady state: two pairs
        + "B1 F1 B0 " * (p - r - 1)  # cool-down: no F0 is left
        + " ".join(turn_to_split)
        + " W I0" * (p - r - 1)  # weight gradients fill the gaps
        + " W" * (r + 1)
    )
    return _number_words(words, rank)


# --- from words to actions -------------------------------------------------------------------------


def _number_words(words: str, rank: PipelineRank) -> Iterator[Action]:
    """Number words such as F, I1 and W, and leave out the microbatches that do not exist."""
    next_microbatch: dict[tuple[str, int], int] = defaultdict(int)  # by "forward" or "backward", and stage
    waiting: deque[Action] = deque()  # weight gradients whose I is done
    for word in words.split():
        if word == "W":
            action = waiting.popleft()
        else:
            op, stage = cast(Op, word[0]), rank.stages[int(word[1:] or 0)]
            kind = "forward" if op == "F" else "backward"
            action = Action(stage, op, next_microbatch[kind, stage])
            next_microbatch[kind, stage] += 1
            if op == "I":
                waiting.append(Action(stage, "W", action.microbatch))
        if action.microbatch < rank.num_microbatches:
            yield action


def default_chunks(name: str) -> int:
    """The fewest `chunks` that `name` allows and that do not make it 1F1B or GPipe under another name."""
    return 1 if name.lower() in _ONE_CHUNK else 2


_MAKERS: dict[str, Callable[[PipelineRank], Iterable[Action]]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "breadth-first": breadth_first,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "dualpipe-v": dualpipe_v,
}
NAMES = tuple(_MAKERS)
_ONE_CHUNK = ("gpipe", "1f1b", "zb-h1", "zb-h2")
_V_SHAPED = ("zb-v", "dualpipe-v")

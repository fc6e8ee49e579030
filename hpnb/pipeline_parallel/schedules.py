"""The schedules of the literature, each from a few words a rank.

A rank's list is written as words without numbers, "F F B F B B": the k-th F is the forward of the k-th
microbatch, and so on. With two chunks on a rank, F0 and F1 are forwards of its first and its second. A bare W
is the weight gradient that has waited longest. Numbering the words gives the list.

Some patterns need more microbatches than there are. They are made with as many as they need, and those that
do not exist are then left out: what is left keeps its order, so if the whole can be run, so can the rest.

With p ranks, rank r, m microbatches, v chunks a rank, and F, I, W the costs of a rank's whole share:

    name            the longest rank's idle time        activations held, in whole shares
    gpipe           (p-1)(F+I+W)                        m
    1f1b            (p-1)(F+I+W)                        p - r
    interleaved     (p-1)(F+I+W)/v                      p + (p-1)/v at most
    breadth-first   (p-1)(F+I+W)/v                      m
    zb-h1           (p-1)(F+I-W)                        p
    zb-h2           (p-1)(F+I-2W)                       2p - 1
    zb-v            0                if F = I = W       p
    dualpipe-v      (p-1)(F+I-W)/2   if about equal     p + 1/2

Idle time is counted between the rank's own first start and last end, and never below 0; it holds without
transfer and for m large enough (interleaved: a multiple of p).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import cast

from hpnb.pipeline_parallel.schedule import Action, Op, Schedule


def make(name: str, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The schedule of that name.

    Args:
        name: one of `NAMES`.
        stages: of the whole pipeline, so there are stages // chunks ranks.
        microbatches: 1 or more; "dualpipe-v" needs two a rank.
        chunks: stages a rank. "interleaved" and "breadth-first" deal them out in turn, stage s to rank
            s % ranks. "zb-v" and "dualpipe-v" have two, laid out as a V: rank r has stages r and
            2 * ranks - 1 - r, so rank 0 has both ends.

    Raises:
        ValueError: what the definition does not allow, with what would do.
    """
    if name not in _MAKERS:
        raise ValueError(f"there is no schedule {name!r}; choose one of {', '.join(NAMES)}")
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
        raise ValueError(f"stages={stages} cannot be dealt out {chunks} to a rank; use {nearest} stages")
    ranks = stages // chunks
    if name == "dualpipe-v" and microbatches < 2 * ranks:
        raise ValueError(
            f"dualpipe-v on {ranks} ranks needs two microbatches a rank: use {2 * ranks} or more, not "
            f"{microbatches}; zb-v takes any number"
        )
    rows = []
    for rank in range(ranks):
        mine = [rank, 2 * ranks - 1 - rank] if name in _V_SHAPED else range(rank, stages, ranks)
        rows.append(_MAKERS[name](ranks, rank, microbatches, mine))
    return Schedule(rows, name)


# A maker gives the list of rank r of p, for m microbatches, with `mine` the stages of that rank.


# --- one chunk a rank ------------------------------------------------------------------------------


def gpipe(p: int, r: int, m: int, mine: Sequence[int]) -> Iterator[Action]:
    """All forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965)."""
    return _number("F " * m + "B " * m, mine, m)


def one_f_one_b(p: int, r: int, m: int, mine: Sequence[int]) -> Iterator[Action]:
    """A backward as soon as there can be one (Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1).

        rank 0 of 4   F F F F       B F B F B F B   B   B   B
        rank 3              F B F B F B F B F B ...

    As long as gpipe, and never more than p - r activations.
    """
    warmup = min(p - r - 1, m)
    return _number("F " * warmup + "F B " * (m - warmup) + "B " * warmup, mine, m)


def zb_h1(p: int, r: int, m: int, mine: Sequence[int]) -> Iterator[Action]:
    """Weight gradients wait until the rank has nothing better to do (Qi et al. 2024, arXiv 2401.10241, 2.1).

    1F1B, with W on rank r lagging r microbatches behind I: the activations that those hold are the ones that
    rank 0 holds and rank r does not.
    """
    return _zero_bubble(p - r, r, m, mine)


def zb_h2(p: int, r: int, m: int, mine: Sequence[int]) -> Iterator[Action]:
    """Forwards enough to start with that nobody ever waits (Qi et al. 2024, arXiv 2401.10241, 2.2).

    Not idle at all if F = I = W, for nearly twice the activations.
    """
    return _zero_bubble(2 * (p - r) - 1, 2 * r, m, mine)


def _zero_bubble(ahead: int, lag: int, m: int, mine: Sequence[int]) -> Iterator[Action]:
    """`ahead` forwards, then I, W and F in turn, W `lag` microbatches behind I."""
    full = max(m, lag)
    steady = "I F " * lag + "I W F " * (full - lag)
    return _number("F " * ahead + steady + "W " * lag, mine, m)


# --- any number of chunks a rank, dealt out in turn ------------------------------------------------


def interleaved(p: int, r: int, m: int, mine: Sequence[int]) -> Iterator[Action]:
    """1F1B over v chunks, p microbatches at a time (arXiv 2104.04473, section 2.2.2).

        microbatch   0 1 2 3 0 1 2 3 4 5 6 7 4 5 6 7       p = 4, v = 2: the order of the forwards;
        chunk        0 0 0 0 1 1 1 1 0 0 0 0 1 1 1 1       backwards the same, chunk 1 before chunk 0

    To fill the pipeline takes a chunk's time a rank, not v; the price is v times as many messages. The last
    group of microbatches may be smaller than p.
    """
    v = len(mine)
    if v == 1:
        return one_f_one_b(p, r, m, mine)
    full = -(-m // p) * p
    order = [(c, g + k) for g in range(0, full, p) for c in range(v) for k in range(p)]
    forward = [Action(mine[c], "F", k) for c, k in order]
    backward = [Action(mine[v - 1 - c], "B", k) for c, k in order]
    warmup = min(2 * (p - r - 1) + (v - 1) * p, full * v)
    steady = (a for pair in zip(forward[warmup:], backward, strict=False) for a in pair)
    row = [*forward[:warmup], *steady, *backward[full * v - warmup :]]
    return (a for a in row if a.microbatch < m)


def breadth_first(p: int, r: int, m: int, mine: Sequence[int]) -> Iterator[Action]:
    """All microbatches through one chunk, then through the next (Lamy-Poirier 2023, arXiv 2211.05953).

    As short as interleaved, and what happens once a chunk (gathering its weights, reducing its gradients) has
    all of the chunk's microbatches to hide behind.
    """
    yield from (Action(stage, "F", k) for stage in mine for k in range(m))
    yield from (Action(stage, "B", k) for stage in reversed(mine) for k in range(m))


# --- two chunks a rank, there and back -------------------------------------------------------------
#
#     rank     0 1 2 3        The turn is on one rank, and so are both ends: the backward of a microbatch
#     stage    0 1 2 3        starts where its forward did, and all ranks fill up evenly.
#              7 6 5 4


def zb_v(p: int, r: int, m: int, mine: Sequence[int]) -> Iterator[Action]:
    """As little idle as zb-h2, as few activations as zb-h1 (ZB-V of Qi et al., arXiv 2401.10241)."""
    full = max(m, 2 * p - 1)
    words = (
        "F0 " * (2 * (p - r) - 1)  # go down until the first comes back up,
        + "F1 F0 " * r  # meet it,
        + "F1 I1 W " * (p - r)  # and send it back as a gradient
        + "F0 I0 W F1 I1 W " * (full - 2 * p + r + 1)
        + "I0 W F1 I1 W " * (p - r - 1)  # the last forwards are on their way up,
        + "I0 I1 " * r  # the last gradients first of all,
        + "I0 W " * (p - r)  # and what has waited fills the gaps
        + "W " * (2 * r)
    )
    return _number(words, mine, m)


def dualpipe_v(p: int, r: int, m: int, mine: Sequence[int]) -> Iterator[Action]:
    """DualPipe (DeepSeek-AI 2024, arXiv 2412.19437, section 3.2.1) cut in half: one direction, folded.

    It pairs an F0 with a B1 and an F1 with a B0, for kernels of the one to hide messages of the other. Here a
    rank does one action after the other, F before B, and a pair takes the time of both. Then half of zb-h1's
    idle time is left where F, I and W are about equal, and what it has over zb-v is the pairs.
    """
    last = [f"{op}{chunk}" for op in "BI" for chunk in (1, 0) * (r + 1)]
    half = r + 1  # of the last backwards; the later half is split
    words = (
        "F0 " * (2 * (p - r - 1))
        + "F0 F1 " * (r + 1)
        + "I1 W F1 " * (p - r - 1)
        + "F0 B1 F1 B0 " * (m - 2 * p + r + 1)
        + "B1 F1 B0 " * (p - r - 1)
        + " ".join(last[:half] + last[-half:])
        + " W I0" * (p - r - 1)
        + " W" * (r + 1)
    )
    return _number(words, mine, m)


# --- words -----------------------------------------------------------------------------------------


def _number(words: str, mine: Sequence[int], m: int) -> Iterator[Action]:
    """Words such as F, I1 and W, numbered; microbatches from m on do not exist."""
    count: dict[tuple[bool, int], int] = defaultdict(int)
    waiting: deque[Action] = deque()
    for word in words.split():
        if word == "W":
            action = waiting.popleft()
        else:
            op, stage = cast(Op, word[0]), mine[int(word[1:] or 0)]
            action = Action(stage, op, count[op == "F", stage])
            count[op == "F", stage] += 1
            if op == "I":
                waiting.append(Action(stage, "W", action.microbatch))
        if action.microbatch < m:
            yield action


_MAKERS: dict[str, Callable[[int, int, int, Sequence[int]], Iterable[Action]]] = {
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

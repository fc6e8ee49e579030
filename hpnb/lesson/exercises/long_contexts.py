"""Notebook 10: a softmax over a stream of blocks, the bytes of a ring's backward, a balanced assignment."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import hpnb
from hpnb.context_parallel import Ring, Visibility, ring_attention
from hpnb.lesson.exercises.checker import Finding, WrongAnswer, exercise
from hpnb.lesson.exercises.findings import exact, expect_tensor, is_number, normal, run_on_ranks
from hpnb.lesson.programs.long_contexts import context_axis
from hpnb.lesson.programs.step_timing import relative_distance
from hpnb.lesson.tables import number

# --- a softmax over a stream of blocks ----------------------------------------------------------------

_QUERIES, _HEADS, _WIDTH = 6, 2, 4
_STREAMS = {  # {what is special: (keys of each block, size of the scores, keys that no query sees)}
    "one block": ((6,), 1.0, 0),
    "blocks of 3, 1 and 8 keys": ((3, 1, 8), 1.0, 0),
    "scores in the ten thousands": ((4, 4, 4), 1e4, 0),
    "a first block that no query sees": ((3, 5, 4), 1.0, 3),
}


@dataclass
class BlockStream:
    """Blocks (k, v, mask), made one after the other, and how many were alive at once at most."""

    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor
    sizes: Sequence[int]
    most_alive: int = 0

    def blocks(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        alive: list[weakref.ref[torch.Tensor]] = []
        first = 0
        for size in self.sizes:
            keys = slice(first, first + size)
            first += size
            k = self.k[:, keys].clone()
            alive.append(weakref.ref(k))
            self.most_alive = max(self.most_alive, sum(ref() is not None for ref in alive))
            v = self.v[:, keys].clone()
            block = k, v, self.mask[:, keys].clone()
            del k, v
            yield block
            del block


@exercise("10.1", "a softmax over a stream of blocks", 20)
def online_softmax(attend: Callable[..., Any]) -> Iterator[Finding]:
    for what, (sizes, scale, unseen) in _STREAMS.items():
        keys = sum(sizes)
        q, k, v = (normal(_HEADS, n, _WIDTH, seed=i) for i, n in enumerate((_QUERIES, keys, keys)))
        q = scale * q
        mask = normal(_QUERIES, keys, seed=9) > -0.5
        mask[:, -1] = True  # every query sees something
        mask[:, :unseen] = False
        scores = (q @ k.mT / _WIDTH**0.5).masked_fill(~mask, -torch.inf)
        stream = BlockStream(k, v, mask, sizes)
        out = expect_tensor(attend(q.clone(), stream.blocks()), q.shape, f"{what}: it returned")
        yield exact([relative_distance([out], [scores.softmax(-1) @ v])], f"{what}: the output is")
        text = f"{what}: at most {stream.most_alive} blocks of {len(sizes)} were in memory at once, target 2"
        yield Finding(stream.most_alive <= 2, text)


# --- bytes of a backward ------------------------------------------------------------------------------

_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


@dataclass(frozen=True)
class RingJob:
    """One ring attention.

    Attributes:
        p: ranks.
        b, s: sequences, and tokens of each on all ranks together.
        heads, kv_heads, d: heads of queries, of keys and values, and the values of one.
        w: bytes of a value.
    """

    p: int
    b: int
    s: int
    heads: int
    kv_heads: int
    d: int
    w: int


_JOBS = (
    RingJob(2, 1, 16, 4, 4, 8, 4), RingJob(3, 2, 12, 4, 4, 8, 8), RingJob(3, 1, 24, 8, 2, 4, 4),
    RingJob(3, 1, 12, 4, 1, 8, 2),
)  # fmt: skip


def _count_backward(job: RingJob) -> float:
    """Bytes that this rank sends in the backward."""
    axis, local = context_axis(), job.s // job.p
    shapes = [(job.b, heads, local, job.d) for heads in (job.heads, job.kv_heads, job.kv_heads)]
    q, k, v = (normal(*shape).to(_DTYPES[job.w]).requires_grad_() for shape in shapes)
    out = ring_attention(q, k, v, Ring.of(axis, local, zigzag=True), Visibility(causal=True), 0.5)
    with hpnb.record.traffic() as traffic:
        out.backward(torch.ones_like(out))
    return float(traffic.total)


@exercise("10.2", "the backward's bytes", 15)
def backward_bytes(sent: Callable[[RingJob], Any]) -> Iterator[Finding]:
    for job in _JOBS:
        answer = sent(job)
        text = f"{job.p} ranks, {job.b} x {job.s} tokens, {job.heads} heads, {job.kv_heads} kv heads, "
        text += f"{job.w} bytes a value"
        if not is_number(answer):
            raise WrongAnswer(f"{text}: you say {answer!r}, and a number of bytes is wanted")
        counted = run_on_ranks(_count_backward, job, ranks=job.p)
        right = abs(answer - counted[0]) < 0.5
        text += f": you say {number(answer, 'B')}"
        yield Finding(right, text + (", as counted" if right else f"; counted are {number(counted[0], 'B')}"))
    alone = sent(RingJob(1, 1, 16, 4, 4, 8, 4))
    yield Finding(alone == 0, f"one rank: you say {alone!r}, and nothing is sent")


# --- a balanced assignment ----------------------------------------------------------------------------

_CHUNKS = ((4, 2), (8, 4), (6, 2), (9, 3), (12, 4), (16, 4), (15, 3), (24, 8))


@exercise("10.3", "a balanced assignment", 25)
def balanced_assignment(assign: Callable[[int, int], Any]) -> Iterator[Finding]:
    for chunks, ranks in _CHUNKS:
        shards = assign(chunks, ranks)
        text = f"{chunks} chunks on {ranks} ranks"
        try:
            lists = [[int(chunk) for chunk in shard] for shard in shards]
        except TypeError:
            wanted = "a list of chunks for each rank is wanted"
            raise WrongAnswer(f"{text}: it returned {shards!r}; {wanted}") from None
        listed = sorted(chunk for shard in lists for chunk in shard)
        if len(lists) != ranks or listed != list(range(chunks)):
            raise WrongAnswer(f"{text}: {lists} doesn't have each chunk on one of {ranks} ranks")
        counts = {len(shard) for shard in lists}
        if counts != {chunks // ranks}:
            raise WrongAnswer(f"{text}: {lists} should have {chunks // ranks} chunks on each rank")
        work = [sum(chunk + 0.5 for chunk in shard) for shard in lists]
        gap = max(work) - min(work)
        yield Finding(gap <= 1, f"{text}: work from {min(work):g} to {max(work):g}, {gap:g} apart, at most 1")

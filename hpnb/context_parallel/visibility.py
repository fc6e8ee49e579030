r"""Which keys a query sees, and so which blocks of queries and keys an attention computes.

    zigzag, cp = 2, causal            keys of rank 0     keys of rank 1
                                      0 1   6 7          2 3   4 5
    queries of rank 0     0 1         \\    .            .     .          \\  a triangle
                          6 7         all   \\           all   all        .   nothing
    queries of rank 1     2 3         all   .            \\    .
                          4 5         all   .            all   \\

A fused kernel computes a triangle or a block in which all see all. So neighbouring blocks are joined: this
rank's own four become one triangle, and two that see all become one.

Packed texts are intervals, so their blocks are of these two kinds as well: the tokens of a text that are in
one chunk see each other as a triangle, and all see all those of the same text in a chunk before.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch

from hpnb.context_parallel.shard_sequence import Chunk

MOST_RUNS = 256  # more texts than that are masked: so many kernels would take longer


class Run(NamedTuple):
    """Neighbouring queries of one text: rows [first, stop) of these samples, whose text begins at `start`."""

    samples: slice
    first: int
    stop: int
    start: int


@dataclass(frozen=True)
class Visibility:
    """Which keys a query sees.

    Args:
        causal: only those that do not come after it.
        window: only so many before it, itself included; None is all.
        starts: (B, s_q) of this rank's queries: where the text of each begins, if texts are packed.
        length: tokens of the sequence without the padding at its end, which no query sees.
    """

    causal: bool
    window: int | None = None
    starts: torch.Tensor | None = None
    length: int | None = None

    def without_padding(self, keys: Chunk) -> Chunk:
        """The same keys, except those that are padding."""
        stop = keys.stop if self.length is None else min(keys.stop, self.length)
        return Chunk(keys.start, stop - keys.start)

    def sees_nothing(self, queries: Chunk, keys: Chunk) -> bool:
        after = self.causal and keys.start >= queries.stop
        before = self.window is not None and queries.start - (keys.stop - 1) >= self.window
        return after or before or (self.length is not None and keys.start >= self.length)

    @cached_property
    def runs(self) -> tuple[Run, ...] | None:
        """The runs of packed texts; None if texts are not packed, are too many, or see other limits too."""
        if self.starts is None or not self.causal or self.window is not None or self.length is not None:
            return None
        if bool((self.starts == self.starts[:1]).all()):
            borders = [(slice(None), self.starts[0])]
        else:
            borders = [(slice(i, i + 1), row) for i, row in enumerate(self.starts)]
        runs = []
        for samples, row in borders:
            texts, counts = (x.tolist() for x in row.unique_consecutive(return_counts=True))
            stops = itertools.accumulate(counts)
            runs += [
                Run(samples, stop - count, stop, text)
                for text, count, stop in zip(texts, counts, stops, strict=True)
            ]
        return tuple(runs) if len(runs) <= MOST_RUNS else None

    def is_triangle(self, queries: Chunk, keys: Chunk) -> bool:
        """Whether query i sees the keys up to i and no other condition matters."""
        fits = self.window is None or queries.size <= self.window
        return self.causal and queries == keys and fits and self.starts is None

    def mask(self, queries: Chunk, keys: Chunk, rows: slice, device: torch.device) -> torch.Tensor | None:
        """True where a query sees a key, (B or 1, 1, 1, s_q, s_k); None if all see all.

        Args:
            rows: of `starts` that are these queries'.
        """
        key = torch.arange(keys.start, keys.stop, device=device)  # (s_k,)
        query = torch.arange(queries.start, queries.stop, device=device).unsqueeze(1)  # (s_q, 1)
        conditions = []
        if self.causal and keys.stop > queries.start + 1:
            conditions.append(key <= query)
        if self.window is not None and queries.stop - 1 - keys.start >= self.window:
            conditions.append(query - key < self.window)
        if self.starts is not None:
            conditions.append(key >= self.starts[:, rows].unsqueeze(-1))  # (B, s_q, s_k)
        if not conditions:
            return None
        mask = conditions[0]
        for condition in conditions[1:]:
            mask = mask & condition
        return mask[:, None, None] if mask.dim() == 3 else mask[None, None, None]


@dataclass(frozen=True)
class Pair:
    """Queries of this rank and keys of a block: their rows in the shards, and who sees whom.

    Attributes:
        mask: True where a query sees a key; None if all see all, or as `is_triangle` says.
        is_triangle: query i sees the keys up to i.
    """

    queries: slice
    keys: slice
    mask: torch.Tensor | None
    is_triangle: bool = False
    samples: slice = field(default_factory=lambda: slice(None))

    @property
    def sees_all(self) -> bool:
        return self.mask is None and not self.is_triangle


def find_pairs(
    here: tuple[Chunk, ...],
    there: tuple[Chunk, ...],
    visible: Visibility,
    device: torch.device,
    fused: bool = False,
) -> list[Pair]:
    """Chunks of queries with chunks of keys, where they see any.

    Args:
        here, there: the chunks of the queries and of the keys, in ascending order.
        fused: join them to few large pairs, for a kernel that needs no mask where one is a triangle.
    """
    span = Chunk(here[0].start, here[-1].stop - here[0].start)
    if fused and here == there and visible.is_triangle(span, span):  # of all chunks together
        local = slice(0, sum(chunk.size for chunk in here))
        return [Pair(local, local, None, is_triangle=True)]
    pairs: list[Pair] = []
    for queries, rows in _with_slices(here):
        for keys, columns in _with_slices(there):
            pairs += _pairs_of_chunks(queries, rows, keys, columns, visible, device, fused)
    return _join(_join(pairs, "keys"), "queries") if fused else pairs


def find_pairs_with_all(
    here: tuple[Chunk, ...], length: int, visible: Visibility, device: torch.device, fused: bool = False
) -> list[Pair]:
    """Chunks of queries with the keys of a whole sequence, which lie in its order.

    Of each chunk those are a block before it, which a window shortens, a triangle, and what comes after.
    """
    pairs: list[Pair] = []
    for queries, rows in _with_slices(here):
        first = 0 if visible.window is None else max(0, queries.start - visible.window + 1)
        before, after = Chunk(first, queries.start - first), Chunk(queries.stop, length - queries.stop)
        for keys in (before, queries, after):
            columns = slice(keys.start, keys.stop)
            if keys.size:
                pairs += _pairs_of_chunks(queries, rows, keys, columns, visible, device, fused)
    return _join(pairs, "keys") if fused else pairs


def _pairs_of_chunks(
    queries: Chunk, rows: slice, keys: Chunk, columns: slice, visible: Visibility, device: torch.device,
    fused: bool,
) -> Iterator[Pair]:  # fmt: skip
    """A chunk of queries with a chunk of keys, which is the same one or has no token in common with it.

    Args:
        rows, columns: where they lie in the shards.
    """
    if visible.sees_nothing(queries, keys):
        return
    keys = visible.without_padding(keys)
    columns = slice(columns.start, columns.start + keys.size)
    if fused and visible.runs is not None:
        yield from _pairs_of_texts(visible.runs, queries, rows, keys, columns)
        return
    is_triangle = fused and visible.is_triangle(queries, keys)
    mask = None if is_triangle else visible.mask(queries, keys, rows, device)
    yield Pair(rows, columns, mask, is_triangle)


def _pairs_of_texts(
    runs: tuple[Run, ...], queries: Chunk, rows: slice, keys: Chunk, columns: slice
) -> Iterator[Pair]:
    """The pairs of a chunk of queries with itself or an earlier chunk of keys, where texts are packed."""
    for run in runs:
        first, stop = max(run.first, rows.start), min(run.stop, rows.stop)
        if first >= stop:
            continue
        to_column = columns.start - keys.start  # from a place in the sequence
        last = keys.stop
        if keys == queries:
            last = queries.start + first - rows.start  # the place of the run's first query
            triangle = slice(last + to_column, last + stop - first + to_column)
            yield Pair(slice(first, stop), triangle, None, is_triangle=True, samples=run.samples)
        if (begin := max(keys.start, run.start)) < last:
            seen = slice(begin + to_column, last + to_column)
            yield Pair(slice(first, stop), seen, None, samples=run.samples)


def _with_slices(chunks: tuple[Chunk, ...]) -> list[tuple[Chunk, slice]]:
    """Each chunk, and where its tokens are in the shard."""
    stops = itertools.accumulate(chunk.size for chunk in chunks)
    return [(chunk, slice(stop - chunk.size, stop)) for chunk, stop in zip(chunks, stops, strict=True)]


def _join(pairs: list[Pair], along: Literal["queries", "keys"]) -> list[Pair]:
    """The same, with neighbours along one dim as one pair where all queries see all keys."""
    joined: list[Pair] = []
    for pair in pairs:
        last = joined[-1] if joined else pair
        if joined and last.sees_all and pair.sees_all and last.samples == pair.samples:
            if along == "keys" and last.queries == pair.queries and last.keys.stop == pair.keys.start:
                joined[-1] = replace(last, keys=slice(last.keys.start, pair.keys.stop))
                continue
            if along == "queries" and last.keys == pair.keys and last.queries.stop == pair.queries.start:
                joined[-1] = replace(last, queries=slice(last.queries.start, pair.queries.stop))
                continue
        joined.append(pair)
    return joined

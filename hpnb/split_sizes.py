"""How n things are split over p ranks as evenly as they can be: the first ranks get one more.

    split_sizes(25, 4)        (7, 6, 6, 6)        25 heads over 4 tensor-parallel ranks
    split_range(25, 4, 1)     (7, 13)             rank 1 has heads 7 to 12

Every even split in hpnb follows this rule: attention heads, the columns of a weight, the vocabulary, the
tokens of sequence parallelism, the samples of a global batch and of its microbatches.
"""

from __future__ import annotations


def split_sizes(total: int, ranks: int) -> tuple[int, ...]:
    """How many of `total` things each of `ranks` ranks gets. Ranks beyond `total` get 0."""
    smallest, larger_ranks = divmod(total, ranks)
    return tuple(smallest + (rank < larger_ranks) for rank in range(ranks))


def split_range(total: int, ranks: int, rank: int) -> tuple[int, int]:
    """(start, stop): which of `total` things rank `rank` gets."""
    sizes = split_sizes(total, ranks)
    start = sum(sizes[:rank])
    return start, start + sizes[rank]

"""What layers that are not equal cost a pipeline: a heavy head, and a weight with two homes.

A block of an MLP 4 h wide computes 24 h^2 + 4 s h FLOPs a token forward, the logits of V words 2 h V. So the
head weighs

    a = V / (12 h + 2 s)                               blocks: 4.5 in GPT-2's 124M, 2.4 in its 1.5B

With L blocks dealt out evenly to p stages the last one also has the head, and it sets the pace. Against equal
stages, which few layers can only come near,

    (L/p + a) / ((L + a)/p)  =  1 + a (p-1)/(L + a)

is how much longer a step with many microbatches takes. Deeper models lose less, longer pipelines more.

A table of V words of h numbers that is both embedding and head is on the first rank and on the last. Each
computes a gradient of all of it, and once a step the two are added up: an all-reduce of V h numbers between
two ranks, V h from each of them. As many numbers cross one cut, one way, for V tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from hpnb.theory.communication import bytes_sent
from hpnb.theory.transformer import Block


def head_in_blocks(block: Block, vocab_size: int) -> float:
    """FLOPs of the logits of `vocab_size` tokens, in those of `block`; products alone.

    Raises:
        ValueError: a vocabulary below 1.
    """
    if vocab_size < 1:
        raise ValueError(f"vocab_size={vocab_size} is no number of tokens; use 1 or more")
    return 2 * block.batch * block.sequence * block.hidden * vocab_size / block.forward_flops


def uniform_over_even(blocks: int, head: float, stages: int) -> float:
    """1 + a (p-1)/(L + a): the pace of blocks dealt out evenly, over that of equal stages.

    Args:
        head: in blocks.
        stages: p; they divide the blocks, or the ratio lies a little off.

    Raises:
        ValueError: fewer blocks than stages, or a negative head.
    """
    if not 1 <= stages <= blocks or head < 0:
        raise ValueError(f"{blocks} blocks and a head of {head} on {stages} stages: a block each is needed")
    return 1 + head * (stages - 1) / (blocks + head)


def tie_bytes(vocab_size: int, hidden: int, bytes_per_value: int, homes: int = 2) -> float:
    """Bytes that all homes of a tied table together send a step: one all-reduce of its gradient."""
    return homes * bytes_sent("all_reduce", vocab_size * hidden * bytes_per_value, homes)


def even(blocks: int, stages: int) -> tuple[int, ...]:
    """`blocks` dealt out to `stages` as evenly as can be, the first ones one more.

    Raises:
        ValueError: no stages, or fewer blocks than stages.
    """
    if not 1 <= stages <= blocks:
        raise ValueError(f"{blocks} blocks cannot be dealt out to {stages} stages, one or more to each")
    return tuple(blocks // stages + (stage < blocks % stages) for stage in range(stages))


def loads(costs: Sequence[float], counts: Sequence[int]) -> list[float]:
    """What each stage costs, if stage i has counts[i] of the layers, in order.

    Raises:
        ValueError: the counts are not as many layers as there are, or one is negative.
    """
    if sum(counts) != len(costs) or min(counts, default=0) < 0:
        raise ValueError(f"{list(counts)} adds up to {sum(counts)}, and there are {len(costs)} layers")
    ends = list(accumulate(counts, initial=0))
    return [sum(costs[start:end]) for start, end in pairwise(ends)]

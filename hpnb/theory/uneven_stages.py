"""What unequal layers cost a pipeline: a heavy head, and a weight that two stages share.

A block with an MLP of 4 h computes 24 h^2 + 4 s h FLOPs a token forward, and the logits of a vocabulary of V
take 2 h V. So in units of blocks the head weighs

    a = V / (12 h + 2 s)                               4.5 blocks in GPT-2's 124M, 2.4 in its 1.5B

If L blocks are split evenly over p stages, the last stage has the head as well and sets the pace. A step of
many microbatches then takes

    (L/p + a) / ((L + a)/p)  =  1 + a (p-1)/(L + a)

times as long as with equal stages, which few layers can only approach. Deeper models lose less, longer
pipelines more.

A table of V tokens and h numbers that is both embedding and head lies on the first and on the last stage.
Either computes a gradient of all of it, and once a step the two are summed: an all-reduce of V h numbers
between two ranks, in which either sends V h. As many numbers cross one cut, one way, for V tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from hpnb.split_sizes import split_sizes
from hpnb.theory.transformer import Block


def head_in_blocks(block: Block, vocab_size: int) -> float:
    """FLOPs of the logits of `vocab_size` tokens, in units of `block`; matmuls only.

    Raises:
        ValueError: a vocabulary below 1.
    """
    if vocab_size < 1:
        raise ValueError(f"vocab_size={vocab_size} is no number of tokens; use 1 or more")
    return 2 * block.batch * block.sequence * block.hidden * vocab_size / block.forward_flops


def even_split(blocks: int, stages: int) -> tuple[int, ...]:
    """`blocks` split over `stages` as evenly as possible; the first stages have one more.

    Raises:
        ValueError: no stages, or fewer blocks than stages.
    """
    if not 1 <= stages <= blocks:
        raise ValueError(f"{blocks} blocks cannot be split over {stages} stages; use at most {blocks}")
    return split_sizes(blocks, stages)


def stage_loads(costs: Sequence[float], counts: Sequence[int]) -> list[float]:
    """The cost of every stage, if stage i has counts[i] of the layers, in order.

    Raises:
        ValueError: the counts are not as many layers as there are, or one is negative.
    """
    if sum(counts) != len(costs) or min(counts, default=0) < 0:
        raise ValueError(f"{list(counts)} adds up to {sum(counts)}, and there are {len(costs)} layers")
    ends = list(accumulate(counts, initial=0))
    return [sum(costs[start:end]) for start, end in pairwise(ends)]

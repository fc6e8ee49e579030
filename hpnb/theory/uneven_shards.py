"""Heads and vocabularies that do not divide by the ranks: what the fullest rank computes, keeps and sends.

Heads. Of a heads on t ranks the fullest rank has ceil(a/t), and the others wait for it. Attention is 8 h^2 +
4 s h of the 24 h^2 + 4 s h FLOPs of a block and token, so a block takes

    1 + (2 h + s)/(6 h + s) (t ceil(a/t)/a - 1)              times as long as one whose heads divide

For 25 heads on 4 ranks that is 1.05 (h = 1600, s = 1024). What attention keeps grows by t ceil(a/t)/a.

Vocabulary. For a loss of n tokens whose logits are sharded t ways (Shoeybi et al. 2019, arXiv 1909.08053):

    gather the logits      (t-1)/t V n                       numbers that leave a rank
    three reductions       2 (t-1)/t 3 n                     whatever V: V/6 times fewer

Around the blocks a sharded vocabulary also reduces the embedded tokens (forward) and the head's input
gradient (backward), b s h numbers in either.

Tokens. One attention whose tokens are sharded, forward and backward, for x of n h numbers:

    Megatron   4 (t-1)/t n h     x gathered for this rank's heads, their sum scattered   (arXiv 2205.05198)
    Ulysses    8 (t-1)/t^2 n h   q, k, v and output from sharded tokens to sharded heads (arXiv 2309.14509)
    ring       4 (t-1)/t n h     k and v go round, their gradients go back               (arXiv 2310.01889)
"""

from __future__ import annotations

from hpnb.split_sizes import split_sizes
from hpnb.theory.activation_table import ActivationRow, Recompute
from hpnb.theory.communication import bytes_sent
from hpnb.theory.transformer import Block

SEQUENCE_WAYS = ("Megatron", "Ulysses", "ring")


def imbalance(units: int, ranks: int) -> float:
    """t ceil(a/t)/a: what the fullest of t ranks has, over an even share; 1 if t divides a.

    Raises:
        ValueError: fewer units than ranks.
    """
    if not 1 <= ranks <= units:
        raise ValueError(f"{units} units cannot be sharded over {ranks} ranks; use 1 to {units} ranks")
    return ranks * split_sizes(units, ranks)[0] / units


def attention_share(block: Block) -> float:
    """The share of a block's FLOPs that is sharded by heads: qkv, scores, weighted values, projection."""
    by_name = {matmul.name: matmul.flops for matmul in block.matmuls}
    return 1 - (by_name["mlp up"] + by_name["mlp down"]) / block.forward_flops


def block_imbalance(block: Block, ranks: int) -> float:
    """The fullest rank's time for a block, over that with heads that divide; matmuls only."""
    return 1 + attention_share(block) * (imbalance(block.heads, ranks) - 1)


def activation_parts(row: ActivationRow, block: Block, ranks: int = 1, even: bool = True) -> dict[str, float]:
    """{what: bytes} of activations that a layer keeps on a rank: the published formula in its three parts.

    Args:
        even: False gives what the first rank keeps, which has the most heads.
    """
    uneven = row.parallel and not even
    return row.parts(block, ranks, imbalance(block.heads, ranks) if uneven else 1.0)


def recomputed_share(block: Block, recompute: Recompute) -> float:
    """Recomputed FLOPs, over those of forward and backward; matmuls only."""
    if not recompute:
        return 0.0
    scores = 4 * block.batch * block.sequence**2 * block.hidden
    recomputed = {"full": block.forward_flops, "attention": scores}
    return recomputed[recompute] / block.training_flops


def gathered_logits_bytes(tokens: int, vocab_size: int, ranks: int, bytes_per_value: int = 4) -> float:
    """Bytes that leave a rank if the logits of `tokens` are gathered; uneven shards are padded."""
    padded = ranks * split_sizes(vocab_size, ranks)[0]
    return bytes_sent("all_gather", tokens * padded * bytes_per_value, ranks)


def sharded_loss_bytes(tokens: int, ranks: int, bytes_per_value: int = 4) -> float:
    """Bytes that leave a rank for a loss of `tokens` by three reductions; the backward sends nothing."""
    return 3 * bytes_sent("all_reduce", tokens * bytes_per_value, ranks)


def vocabulary_bytes(block: Block, ranks: int) -> float:
    """Bytes that leave a rank in a step because the vocabulary is sharded: embedding, head and loss.

    Args:
        block: of the model; the loss is of b s positions, in float32 at least.
    """
    tokens = block.batch * block.sequence
    once = bytes_sent("all_reduce", tokens * block.hidden * block.bytes_per_value, ranks)
    return 2 * once + sharded_loss_bytes(tokens, ranks, max(4, block.bytes_per_value))


def sequence_bytes(way: str, tokens: int, hidden: int, ranks: int, bytes_per_value: int = 2) -> float:
    """Bytes that leave a rank in forward and backward of one attention whose tokens are sharded.

    Gradients of weights that every rank holds (Ulysses, ring) are not counted. A ring sends keys, values and
    their gradients once each here, all in `bytes_per_value`. hpnb's ring sends keys and values a second time
    in the backward, and gradients in float32 or wider: twice as much in 16 bits (`context.ring_bytes`).

    Raises:
        ValueError: another way.
    """
    if way not in SEQUENCE_WAYS:
        raise ValueError(f"no way {way!r}; there are {', '.join(SEQUENCE_WAYS)}")
    activation = tokens * hidden * bytes_per_value
    calls = {"Megatron": ("all_gather", 4, activation), "Ulysses": ("all_to_all", 8, activation / ranks),
             "ring": ("send", 4 * (ranks - 1), activation / ranks)}  # fmt: skip
    op, count, nbytes = calls[way]
    return count * bytes_sent(op, nbytes, ranks)

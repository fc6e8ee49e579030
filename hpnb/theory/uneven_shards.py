"""What refuses to divide: heads, words, and what the ranks of one axis keep and send because of it.

Heads. a heads over t ranks: the fullest has ceil(a/t), and the others wait for it. Of the 24 h^2 + 4 s h
FLOPs of a block and token, attention has 8 h^2 + 4 s h, so a block takes

    1 + (2 h + s)/(6 h + s) (t ceil(a/t)/a - 1)              times as long as one that divides

which is 1.05 for 25 heads over 4 ranks (h = 1600, s = 1024). What attention keeps grows by t ceil(a/t)/a.

Words. A loss of n tokens from logits that are cut over t ranks (Shoeybi et al. 2019, arXiv 1909.08053):

    gather the logits      (t-1)/t V n                       numbers that leave a rank
    three reductions       2 (t-1)/t 3 n                     whatever V: a V/6 of it

Around the blocks a cut vocabulary also sums the looked-up words (forward) and the head's input gradient
(backward), b s h numbers each.

Tokens. One attention between cut tokens, forward and backward, x of n h numbers:

    Megatron   4 (t-1)/t n h     x gathered for this rank's heads, their sum scattered   (arXiv 2205.05198)
    Ulysses    8 (t-1)/t^2 n h   q, k, v and the output from cut tokens to cut heads     (arXiv 2309.14509)
    ring       4 (t-1)/t n h     k and v go round, their gradients go back               (arXiv 2310.01889)
"""

from __future__ import annotations

from hpnb.split_sizes import split_sizes
from hpnb.theory.activation_table import ActivationRow, Recompute
from hpnb.theory.communication import bytes_sent
from hpnb.theory.transformer import Block

SEQUENCE_WAYS = ("Megatron", "Ulysses", "ring")
BETWEEN, INSIDE, SCORES = "norms, dropouts, inputs of columns", "inside the pairs", "scores"


def over_even(units: int, ranks: int) -> float:
    """t ceil(a/t)/a: what the fullest of t ranks has over an even share; 1 where t divides a.

    Raises:
        ValueError: fewer units than ranks.
    """
    if not 1 <= ranks <= units:
        raise ValueError(f"{units} units cannot be dealt out to {ranks} ranks; use 1 to {units}")
    return ranks * split_sizes(units, ranks)[0] / units


def attention_share(block: Block) -> float:
    """Of a block's FLOPs, those that are dealt out by heads: qkv, scores, weighted values, projection."""
    by_name = {matmul.name: matmul.flops for matmul in block.matmuls}
    return 1 - (by_name["mlp up"] + by_name["mlp down"]) / block.forward_flops


def block_over_even(block: Block, ranks: int) -> float:
    """How much longer the fullest rank computes a block than it would if heads divided; products alone."""
    return 1 + attention_share(block) * (over_even(block.heads, ranks) - 1)


def kept_parts(row: ActivationRow, block: Block, ranks: int = 1, even: bool = True) -> dict[str, float]:
    """{what: bytes} that a layer keeps on a rank: the published formula in its three parts.

    Args:
        even: False gives what the first rank keeps, which has the most heads.
    """
    t = ranks if row.parallel else 1
    sbh = float(block.sequence * block.batch * block.hidden)
    if row.recompute == "full":
        return {BETWEEN: 2 * sbh, INSIDE: 0.0, SCORES: 0.0}
    more = 1.0 if even else over_even(block.heads, t)
    scores = 0.0 if row.recompute else 5 * block.heads * block.sequence / block.hidden * sbh
    return {
        BETWEEN: 10 * sbh / (t if row.sequence else 1),
        INSIDE: (16 + 8 * more) * sbh / t,  # of the 24, attention has q, k, v and its output
        SCORES: scores * more / t,
    }


def recomputed_share(block: Block, recompute: Recompute) -> float:
    """FLOPs that are computed a second time, over those of forward and backward; products alone."""
    if not recompute:
        return 0.0
    again = {"full": block.forward_flops, "attention": 4 * block.batch * block.sequence**2 * block.hidden}
    return again[recompute] / block.training_flops


def gathered_sent(tokens: int, vocab_size: int, ranks: int, bytes_per_value: int = 4) -> float:
    """Bytes that leave a rank if the logits of `tokens` are put together; uneven shares are padded."""
    padded = ranks * split_sizes(vocab_size, ranks)[0]
    return bytes_sent("all_gather", tokens * padded * bytes_per_value, ranks)


def loss_sent(tokens: int, ranks: int, bytes_per_value: int = 4) -> float:
    """Bytes that leave a rank for a loss of `tokens` in three reductions; the backward sends nothing."""
    return 3 * bytes_sent("all_reduce", tokens * bytes_per_value, ranks)


def vocabulary_sent(block: Block, ranks: int) -> float:
    """Bytes that leave a rank in a step because words are cut: looked up, head and loss.

    Args:
        block: of the model; the loss is of b s positions, in float32 at least.
    """
    tokens = block.batch * block.sequence
    once = bytes_sent("all_reduce", tokens * block.hidden * block.bytes_per_value, ranks)
    return 2 * once + loss_sent(tokens, ranks, max(4, block.bytes_per_value))


def sequence_sent(way: str, tokens: int, hidden: int, ranks: int, bytes_per_value: int = 2) -> float:
    """Bytes that leave a rank in forward and backward of one attention between cut tokens.

    Gradients of weights that are whole on every rank (Ulysses, ring) are not counted.

    Raises:
        ValueError: another way.
    """
    if way not in SEQUENCE_WAYS:
        raise ValueError(f"no way {way!r}; there are {', '.join(SEQUENCE_WAYS)}")
    whole = tokens * hidden * bytes_per_value
    calls = {"Megatron": ("all_gather", 4, whole), "Ulysses": ("all_to_all", 8, whole / ranks),
             "ring": ("send", 4 * (ranks - 1), whole / ranks)}  # fmt: skip
    op, count, nbytes = calls[way]
    return count * bytes_sent(op, nbytes, ranks)

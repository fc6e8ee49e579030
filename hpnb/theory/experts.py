"""What a mixture of experts sends: every token goes to k of E feed-forward layers, sharded over the ranks of
an axis.

A rank sends its tokens to the ranks that hold their experts, and the results come back: two all-to-alls
forward, and two more for the gradients. For n tokens of h values, w bytes a value, and even routing

    4 (p-1)/p k n h w        bytes leave a rank in forward and backward of one layer

where n counts the tokens of one rank. If tp sharded the layer over the same ranks, every rank would reduce
the tokens of all of them: 4 (p-1)/p (p n) h w bytes, p/k times as many. A rank computes 48 k n h^2 FLOPs for
k n tokens through 8 h^2 weights, so with 2-byte values computing over sending is 6 h p / ((p-1) rho),
whatever k and E are. That is p/k times what the same layer has under tp.

Under dualpipe-v a forward and a backward of two microbatches run as a pair: one computes while messages of
the other travel. With L layers in a chunk each has 2 L messages of t seconds, and computing falls evenly
between them, in segments of a seconds forward and b backward:

    compute    [ F ][  B  ][ F ]...[  B  ][ F ]...      a pair waits 2 L (max(0, t - a) + max(0, t - b))
    messages        [~ F ~][~ B ~~][~ F ~][~ B ~~]

While p ranks fill and drain, forwards and backwards run alone: of the 2 m forwards of the mean rank's two
chunks (5 p - 1) / 2, whose messages nothing hides.

Lepikhin et al. 2020 (GShard, arXiv 2006.16668); Fedus et al. 2021 (Switch, arXiv 2101.03961).
"""

from __future__ import annotations

from hpnb.theory.communication import bytes_sent


def experts_sent(tokens: float, hidden: int, ranks: int, chosen: int = 1, bytes_per_value: int = 2) -> float:
    """Bytes that leave a rank in forward and backward of one layer of experts.

    Args:
        tokens: of one rank.
        chosen: experts of every token, k.

    Raises:
        ValueError: no experts are chosen.
    """
    if chosen < 1:
        raise ValueError(f"chosen={chosen}: a token goes to 1 expert or more")
    return 4 * bytes_sent("all_to_all", chosen * tokens * hidden * bytes_per_value, ranks)


def rows_sent(there: int, back: int, hidden: int, bytes_per_value: int = 2) -> float:
    """Bytes that leave a rank in forward and backward of one layer of experts, however uneven the routing is.

        2 (there + back) h w        there: dispatch, and the gradient of combine
                                    back: combine, and the gradient of dispatch

    Args:
        there: rows that this rank sends to the experts of other ranks.
        back: rows that it receives for its own experts, whose results it returns.
    """
    return float(2 * (there + back) * hidden * bytes_per_value)


def paired_share(ranks: int, microbatches: int) -> float:
    """Share of the forwards of dualpipe-v that run beside a backward, mean over the ranks."""
    return max(0.0, 1 - (5 * ranks - 1) / (4 * microbatches))


def exposed_messages(forward: float, backward: float, message: float, layers: float, paired: float) -> float:
    """Seconds that a layer of experts waits for its four messages under dualpipe-v, forward and backward.

    Args:
        forward, backward: seconds in which a block computes.
        message: seconds of one dispatch or combine.
        layers: blocks of a chunk.
        paired: share of forwards and backwards that run in pairs, as `paired_share` gives it.
    """
    segments = (layers * seconds / (2 * layers + 1) for seconds in (forward, backward))
    waits = sum(max(0.0, message - segment) for segment in segments)
    return paired * 2 * waits + (1 - paired) * 4 * message

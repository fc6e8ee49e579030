"""What experts send: a token goes to k of E feed-forward layers, which are dealt out to the ranks of an axis.

Each rank sends its tokens to whoever has their experts, and the results come back: two all-to-alls forward,
and two for the gradients. Of n tokens of h values, w bytes each, with even routing

    4 (p-1)/p k n h w        bytes leave a rank in forward and backward of one layer

where n are the rank's own tokens. Were one such layer cut by tp over the same ranks, each would sum the
tokens of all, 4 (p-1)/p (p n) h w bytes: p/k times as many. Of k n tokens through 8 h^2 weights a rank
computes 48 k n h^2 FLOPs, so with values of 2 bytes computing over sending is 6 h p / ((p-1) rho), whatever
k and E are, and p times what it is for the same layer under tp.
Lepikhin et al. 2020 (GShard, arXiv 2006.16668); Fedus et al. 2021 (Switch, arXiv 2101.03961).
"""

from __future__ import annotations

from hpnb.theory.communication import bytes_sent


def experts_sent(tokens: float, hidden: int, ranks: int, chosen: int = 1, bytes_per_value: int = 2) -> float:
    """Bytes that leave a rank in forward and backward of one layer of experts.

    Args:
        tokens: of one rank.
        chosen: experts that each token goes to, k.

    Raises:
        ValueError: no experts are chosen.
    """
    if chosen < 1:
        raise ValueError(f"chosen={chosen}: a token goes to 1 expert or more")
    return 4 * bytes_sent("all_to_all", chosen * tokens * hidden * bytes_per_value, ranks)

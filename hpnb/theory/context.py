"""Context parallelism: what its three ways send for one attention, and what of it is exposed.

A batch of b sequences of s tokens has H heads of d values for queries and G heads for keys and values, in w
bytes a value. Its tokens are sharded over p ranks, in a zigzag for a causal ring. Bytes that leave a rank:

    ring        forward   (p-1) 2 b (s/p) G d w                          keys and values, p - 1 times
                backward  the same, and (p-1) 2 b (s/p) G d max(w, 4)    their gradients, in float32 or wider
    all-gather  the same  in one all-gather, one more and a reduce-scatter
    Ulysses     forward   (p-1)/p 2 b (s/p) (H + G) d w                  q, k, v and the output, all-to-all
                backward  the same                                       their gradients

For Ulysses, keys and values are repeated where p does not divide G, to lcm(G, p) heads; and where p does not
divide H, all are repeated and padded to the next multiple of p.

A ring step computes with one block of keys while the next one travels. Of 4 d FLOPs a query and key forward,
half of all pairs visible, a step has 2 b H d (s/p)^2 and sends 2 b (s/p) G d w bytes. An image has no causal
mask and twice the FLOPs, with the same bytes. So the forward of a text sends for free beyond

    s/p = w rho G/H tokens a rank,      rho = FLOP/s over bytes/s                  (`tokens_to_overlap`)

and that of an image beyond half of it.

The backward computes 10 d FLOPs a pair: scores once more, and four gradients. Nothing overlaps with its last
message, which brings the gradients home. No message of the all-gather or of Ulysses overlaps. This is what
`hpnb.context_parallel` does. Liu et al. 2023 (arXiv 2310.01889); Jacobs et al. 2023 (arXiv 2309.14509).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from hpnb.theory.communication import bytes_sent, seconds
from hpnb.theory.links import Link

_FORWARD, _BACKWARD = 4, 10  # FLOPs a query, key and value of a head: two matmuls, five matmuls


@dataclass(frozen=True)
class Attention:
    """An attention over full sequences.

    Attributes:
        sequence: tokens of a sequence, on all ranks together.
        heads, kv_heads: of queries, and of keys and values.
        head_size: values of a head, the mean where those of a key and of a value differ.
        batch: sequences.
        bytes_per_value: of q, k and v.
        causal: a token attends to those before it alone; False for images.

    Raises:
        ValueError: a size below 1, or heads that are no multiple of kv_heads.
    """

    sequence: int
    heads: int
    kv_heads: int
    head_size: float = 128
    batch: int = 1
    bytes_per_value: int = 2
    causal: bool = True

    def __post_init__(self) -> None:
        if min(self.sequence, self.heads, self.kv_heads, self.head_size, self.batch) < 1:
            raise ValueError(f"{self}: every size has to be 1 or more")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads do not divide into groups of {self.kv_heads} kv_heads")


class BothWays(NamedTuple):
    """The same quantity of the forward and of the backward."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


# --- bytes ---------------------------------------------------------------------------------------------


def ring_bytes(attention: Attention, ranks: int) -> BothWays:
    """Bytes that leave a rank for a ring, and where all ranks gather all keys and values."""
    blocks, gradients = _block_bytes(attention, ranks)
    return BothWays((ranks - 1) * blocks, (ranks - 1) * (blocks + gradients))


def ulysses_bytes(attention: Attention, ranks: int) -> BothWays:
    """Bytes that leave a rank for Ulysses.

    Raises:
        ValueError: more ranks than heads.
    """
    once = sum(bytes_sent("all_to_all", nbytes, ranks) for nbytes in _exchanged_bytes(attention, ranks))
    return BothWays(once, once)


# --- seconds -------------------------------------------------------------------------------------------


def attention_flops(attention: Attention) -> BothWays:
    """FLOPs on all ranks together, of the pairs that a causal mask leaves, if there is one."""
    keys = (attention.sequence + 1) / 2 if attention.causal else attention.sequence  # of the mean query
    pairs = attention.batch * attention.heads * attention.sequence * keys
    return BothWays(_FORWARD * attention.head_size * pairs, _BACKWARD * attention.head_size * pairs)


def ring_step_seconds(attention: Attention, ranks: int, rate: float) -> BothWays:
    """Seconds in which a rank computes with one block of keys, in a zigzag if causal, at `rate` FLOP/s."""
    forward, backward = attention_flops(attention)
    return BothWays(forward / ranks**2 / rate, backward / ranks**2 / rate)


def tokens_to_overlap(attention: Attention, rate: float, link: Link) -> float:
    """Tokens a rank from which the ring's forward hides what it sends; latency is left out."""
    per_byte = rate / link.bandwidth
    visible = 1 if attention.causal else 2
    return attention.bytes_per_value * per_byte * attention.kv_heads / attention.heads / visible


def ring_exposed(attention: Attention, ranks: int, link: Link, step: BothWays) -> BothWays:
    """Seconds by which a ring's messages prolong an attention.

    Args:
        step: seconds of computing with one block of keys: predicted (`ring_step_seconds`) or measured.
    """
    if ranks == 1:
        return BothWays(0.0, 0.0)
    blocks, gradients = (seconds("send", n, ranks, link) for n in _block_bytes(attention, ranks))
    forward = (ranks - 1) * max(0.0, blocks - step.forward)
    backward = gradients  # the last message brings the gradients home, and nothing is left to compute
    for k in range(ranks):  # gradients travel one rank behind their keys
        sent = blocks * (k < ranks - 1) + gradients * (k > 1)
        backward += max(0.0, sent - step.backward)
    return BothWays(forward, backward)


def all_gather_exposed(attention: Attention, ranks: int, link: Link) -> BothWays:
    """Seconds by which the messages prolong an attention: all of their time."""
    blocks, gradients = (ranks * nbytes for nbytes in _block_bytes(attention, ranks))
    gather = seconds("all_gather", blocks, ranks, link)
    return BothWays(gather, gather + seconds("reduce_scatter", gradients, ranks, link))


def ulysses_exposed(attention: Attention, ranks: int, link: Link) -> BothWays:
    """Seconds by which the all-to-alls prolong an attention: all of their time.

    Raises:
        ValueError: more ranks than heads.
    """
    exchanged = _exchanged_bytes(attention, ranks)
    once = sum(seconds("all_to_all", nbytes, ranks, link) for nbytes in exchanged)
    return BothWays(once, once)


# --- what one message holds ----------------------------------------------------------------------------


def _block_bytes(attention: Attention, ranks: int) -> tuple[float, float]:
    """Bytes of a rank's keys and values, and of the gradients of such a block."""
    tokens = attention.batch * attention.sequence / ranks
    values = 2 * tokens * attention.kv_heads * attention.head_size
    return values * attention.bytes_per_value, values * max(4, attention.bytes_per_value)


def _exchanged_bytes(attention: Attention, ranks: int) -> tuple[float, ...]:
    """Bytes of a rank's q, k, v and output, with the heads that Ulysses repeats and pads."""
    heads, kv_heads = attention.heads, attention.kv_heads
    if heads < ranks:
        raise ValueError(f"Ulysses gives each of {ranks} ranks a head, and there are {heads}; use a ring")
    kv_heads = heads if heads % ranks else math.lcm(kv_heads, ranks)
    tokens = attention.batch * attention.sequence / ranks
    per_head = tokens * attention.head_size * attention.bytes_per_value
    q, kv = (per_head * (count + -count % ranks) for count in (heads, kv_heads))
    return q, kv, kv, q

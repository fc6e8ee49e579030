"""What notebook 10 replays: a ring's step and each message are timed alone, and `theory.context` puts them
together.

Every rank calls `replay_exposed`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

import hpnb
from hpnb import comm, theory
from hpnb.context_parallel import BlockAttention, Ring, Visibility
from hpnb.context_parallel.ring import add_gradients, merge_pair
from hpnb.context_parallel.visibility import Pair
from hpnb.lesson.machine_card import MachineCard
from hpnb.lesson.programs.layer_times import seconds_in_turn
from hpnb.lesson.programs.step_timing import rounds_in_turn
from hpnb.mesh import Axis
from hpnb.ranks import choose_device
from hpnb.theory.context import Attention, BothWays

_ROUNDS = 9  # of each timed part
_NOTHING, _FOREVER = BothWays(0.0, 0.0), BothWays(math.inf, math.inf)  # seconds of a step


def context_axis() -> Axis:
    """All ranks, along the context axis."""
    return hpnb.Mesh(hpnb.Layout(cp=hpnb.world_size())).cp


@dataclass(frozen=True)
class Replayed:
    """Exposed seconds of one attention, forward and backward, put together from what was timed alone.

    Attributes:
        packed: of Ulysses, with q, k and v in one all-to-all.
        messages: of the ring, seconds of all its messages, exposed or not.
        last: of the ring's last message, which brings gradients home and is always exposed.
        parts: what this was put together from, named as in `predict_parts`.
        timed: whether messages were timed, and do not take what the card says.
        quartiles: {way: (low, high)} of exposed seconds: low with the lower quartile of the messages' rounds
            and the upper quartile of the computing's, high the other way round.
    """

    ring: float
    ulysses: float
    packed: float
    messages: float
    last: float
    parts: dict[str, float]
    timed: bool
    quartiles: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def covered(self) -> float:
        """The share of the ring's messages, the last one aside, that computing covers."""
        others = self.messages - self.last
        return 1 - (self.ring - self.last) / others if others else 0.0


def packed_exposed(shape: Attention, ranks: int, link: theory.Link) -> float:
    """Predicted exposed seconds of Ulysses, forward and backward, with q, k and v in one all-to-all."""
    sent = theory.context.ulysses_bytes(shape, ranks).total
    return 4 * (ranks - 1) * link.latency + sent / link.bandwidth


def predict_parts(shape: Attention, ranks: int, card: MachineCard) -> dict[str, float]:
    """Predicted seconds of a ring step's computing, of one message of a ring, and of the all-to-all of q."""
    block = theory.context.ring_bytes(shape, ranks).forward / (ranks - 1)
    exchanges = theory.context.ulysses_exposed(shape, ranks, card.link).total
    computing = theory.context.ring_step_seconds(shape, ranks, card.matmul)
    return _parts(computing, theory.seconds("send", block, ranks, card.link), exchanges / 8)


def _parts(step: BothWays, message: float, exchange: float) -> dict[str, float]:
    return {"computing of a forward step": step.forward, "computing of a backward step": step.backward,
            "message of a ring": message, "all-to-all": exchange}  # fmt: skip


def replay_exposed(shapes: Sequence[Attention], dtype: torch.dtype, link: theory.Link) -> list[Replayed]:
    """For each shape: a ring step's computing and each message are timed alone, and `theory.context` puts
    them together. Ranks that share a GPU can't time messages; these take what `link` says.
    """
    axis = context_axis()
    assumed = choose_device("auto", axis.size).shares_gpus
    calls = {(i, way): call for i, shape in enumerate(shapes)
             for way, call in _step_calls(shape, axis, dtype).items()}  # fmt: skip
    computing = seconds_in_turn(calls, repeats=_ROUNDS)
    sending = {} if assumed else rounds_in_turn(
        {f"{i} {way}": call for i, shape in enumerate(shapes)
         for way, call in _message_calls(shape, axis, dtype).items()}, repeats=_ROUNDS
    )  # fmt: skip
    replayed = []
    for i, shape in enumerate(shapes):
        steps = [
            BothWays(forward, backward)
            for forward, backward in zip(
                *(_quartiles(computing[i, way]) for way in ("forward", "backward")), strict=True
            )
        ]
        block = theory.context.ring_bytes(shape, axis.size).forward / (axis.size - 1)
        links = [link] * 3
        ulysses = [theory.context.ulysses_exposed(shape, axis.size, link).total] * 3
        packed = [packed_exposed(shape, axis.size, link)] * 3
        if not assumed:
            links = [theory.Link(0.0, block / took) for took in _quartiles(sending[f"{i} ring"])]
            ulysses, packed = (
                [2 * took for took in _quartiles(sending[f"{i} {way}"])] for way in ("ulysses", "packed")
            )  # twice: the backward sends messages of the same sizes
        low, ring, high = (
            theory.context.ring_exposed(shape, axis.size, over, step).total
            for over, step in zip(links, reversed(steps), strict=True)
        )
        message = theory.seconds("send", block, axis.size, links[1])
        parts = _parts(steps[1], message, ulysses[1] / 8)
        messages, last = (
            theory.context.ring_exposed(shape, axis.size, links[1], computed).total
            for computed in (_NOTHING, _FOREVER)
        )
        quartiles = {"ring": (low, high), "Ulysses": (ulysses[0], ulysses[2]),
                     "Ulysses, packed": (packed[0], packed[2])}  # fmt: skip
        replayed.append(Replayed(ring, ulysses[1], packed[1], messages, last, parts, not assumed, quartiles))
    return replayed


def _quartiles(rounds: Sequence[float]) -> list[float]:
    """The lower quartile, the median and the upper quartile."""
    return statistics.quantiles(rounds, n=4, method="inclusive")


@dataclass(frozen=True)
class RingStep:
    """What this rank of a ring computes while messages travel, with the functions of `ring_attention`.

    Attributes:
        source: the rank that the block's keys and values come from.
        q, dout, dq: this rank's queries and the gradients of its output and of q so far, (B, H, s / cp, d).
        block, sent: keys and values, and their gradient so far, which the rank before has sent,
            (2, B, H_kv, s / cp, d).
        out, lse: of the keys so far, (B, H, s / cp, d) and (B, H, s / cp); as dq and sent, float32 or wider.
    """

    ring: Ring
    attention: BlockAttention
    source: int
    q: torch.Tensor
    block: torch.Tensor
    dout: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    sent: torch.Tensor

    def forward(self) -> None:
        """Merge the attention to the block into out and lse."""
        for pair in self._pairs():
            merge_pair(self.attention, pair, self.q, self.block, self.out, self.lse)

    def backward(self, output: torch.Tensor) -> torch.Tensor:
        """Add to dq, and return the block's gradient so far, given the output (B, H, s / cp, d)."""
        inputs, local = (self.dout, self.q, self.block, output, self.lse), torch.zeros_like(self.sent)
        for pair in self._pairs():
            add_gradients(self.attention, pair, *inputs, self.dq, local)
        return local + self.sent

    def _pairs(self) -> list[Pair]:
        fused = self.attention.kernel is not None
        return self.ring.pairs(self.source, Visibility(causal=True), self.q.device, fused)


def _step_calls(shape: Attention, axis: Axis, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """{"forward" or "backward": a ring step with the keys of the rank before}."""
    local = shape.sequence // axis.size
    wide = torch.promote_types(dtype, torch.float32)
    q, k, v, dout = (
        torch.randn(1, shape.heads, local, int(shape.head_size), device=hpnb.device(), dtype=dtype)
        for _ in range(4)
    )
    block, lse = torch.stack([k, v]), q.new_full(q.shape[:3], -torch.inf, dtype=wide)
    out, dq, sent = (torch.zeros_like(x, dtype=wide) for x in (q, q, block))
    attention, before = BlockAttention(q, k, v, shape.head_size**-0.5), (axis.rank - 1) % axis.size
    ring = Ring.of(axis, local, zigzag=True)
    step = RingStep(ring, attention, before, q, block, dout, out, lse, dq, sent)
    step.forward()
    output = out.to(dtype)
    return {"forward": step.forward, "backward": lambda: step.backward(output)}


def _message_calls(shape: Attention, axis: Axis, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """{"ring": one block goes on, "ulysses": the all-to-alls of a forward, "packed": q, k and v in one}."""
    local = shape.sequence // axis.size
    ring = Ring.of(axis, local, zigzag=True)
    q = torch.randn(1, shape.heads, local, int(shape.head_size), device=hpnb.device(), dtype=dtype)
    block = torch.stack([q, q])

    def ulysses() -> None:
        for _ in "qkv":
            exchanged = comm.all_to_all(q, axis, 1, 2)
        comm.all_to_all(exchanged, axis, 2, 1)

    def packed() -> None:
        exchanged = comm.all_to_all(torch.cat([q, q, q]), axis, 1, 2)
        comm.all_to_all(exchanged[:1], axis, 2, 1)

    return {"ring": lambda: ring.pass_on(block)(), "ulysses": ulysses, "packed": packed}

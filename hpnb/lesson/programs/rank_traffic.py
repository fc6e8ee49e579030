"""Layouts on nodes: who sends to whom, what is sent between nodes, and how long a step would take.

`hpnb.record.traffic` knows what left a rank and who took part. A send goes to its peer. In a collective a
rank passes everything to the next rank of its group, and the last one to the first: that is the ring in which
the bytes are counted. Two ranks have no other way; with more, a library may take another, and then these
pairs are the ring's and not the network's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpnb.mesh import AXES, Layout
from hpnb.record import Message
from hpnb.theory import Link, bytes_sent, exposed_seconds, seconds

RankTraffic = dict[tuple[int, int], dict[str, float]]
"""{(sender, receiver): {axis: bytes}}"""


def recorded_traffic(messages: Sequence[Sequence[Message]], least: float = 0.0) -> RankTraffic:
    """Bytes from rank to rank, by axis; those of a collective go along its ring.

    `messages` are `Traffic.messages` of each rank, 0 up; those of fewer than `least` bytes are left out.
    """
    traffic: RankTraffic = {}
    for rank, sent in enumerate(messages):
        for m in sent:
            if m.bytes < max(least, 1e-9):
                continue
            to = m.peer if m.op == "send" else m.group[(m.group.index(rank) + 1) % len(m.group)]
            by_axis = traffic.setdefault((rank, to), {})
            by_axis[m.axis] = by_axis.get(m.axis, 0.0) + m.bytes
    return traffic


def predicted_traffic(layout: Layout, sent: Mapping[str, float]) -> RankTraffic:
    """Bytes from rank to rank of any layout, of {axis: bytes}: along dp and tp, what leaves a rank for the
    next of its group, and the last rank for the first; along pp, what crosses each cut, in either direction.
    """
    traffic: RankTraffic = {}
    for axis in AXES:
        for group in layout.groups(axis):
            if len(group) < 2 or not sent.get(axis):
                continue
            pairs = list(zip(group, (*group[1:], group[0]), strict=True))
            if axis == "pp":
                pairs = [*pairs[:-1], *((b, a) for a, b in pairs[:-1])]
            for pair in pairs:
                traffic.setdefault(pair, {})[axis] = sent[axis]
    return traffic


def bytes_between_nodes(traffic: RankTraffic, node: int) -> float:
    """Bytes between ranks of different nodes, `node` consecutive ranks each."""
    return sum(sum(by_axis.values()) for (a, b), by_axis in traffic.items() if a // node != b // node)


@dataclass(frozen=True)
class TransformerOnNodes:
    """A transformer of 12 layers hidden^2 parameters, 2 bytes each, to be trained by a layout on nodes.

    `tokens` are of a whole batch, `microbatches` of each pipeline, `rate` is matmul FLOP/s of a rank, `node`
    ranks of a node, and a rank has a link `inside` its node, and `between` nodes.
    """

    layers: int
    hidden: int
    tokens: float
    microbatches: int
    rate: float
    node: int
    inside: Link
    between: Link

    @property
    def parameters(self) -> float:
        return 12.0 * self.layers * self.hidden**2

    def states(self, layout: Layout) -> float:
        """Bytes that a rank stores of weights, gradients and optimizer state, 16 a parameter."""
        return 16 * self.parameters / (layout.pp * layout.tp)

    def sent(self, layout: Layout) -> dict[str, float]:
        """{axis: bytes of a step}, as `predicted_traffic` takes them."""
        activation = 2 * self.tokens / layout.dp * self.hidden  # of all tokens of one pipeline
        return {
            "dp": bytes_sent("all_reduce", 2 * self.parameters / (layout.pp * layout.tp), layout.dp),
            "pp": activation if layout.pp > 1 else 0.0,
            "tp": 4 * self.layers / layout.pp * bytes_sent("all_reduce", activation, layout.tp),
        }

    def link(self, layout: Layout, axis: str) -> Link:
        """The slowest link of the axis, which sets the pace of a ring."""
        groups = layout.groups(axis)
        crosses = any(rank // self.node != group[0] // self.node for group in groups for rank in group)
        return self.between if crosses else self.inside

    def seconds(self, layout: Layout) -> dict[str, float]:
        """{"compute", "tp", "bubble", "pp", "dp"}: seconds of a step.

        Nothing overlaps with the all-reduces of tp, nor with a pipeline's sends, which count once in each
        direction. Gradients travel in 25 MB buckets during the backward of the last microbatch; "dp" is the
        exposed part.
        """
        m = self.microbatches if layout.pp > 1 else 1
        compute = 6 * self.parameters * self.tokens / layout.world_size / self.rate
        message = 2 * self.tokens / layout.dp / m * self.hidden
        links = {axis: self.link(layout, axis) for axis in AXES}
        tp = 4 * self.layers / layout.pp * m * seconds("all_reduce", message, layout.tp, links["tp"])
        pp = 2 * (layout.pp - 1) * seconds("send", message, 2, links["pp"]) if layout.pp > 1 else 0.0
        bubble = (layout.pp - 1) / m * (compute + tp)
        gradient = 2 * self.parameters / (layout.pp * layout.tp)
        buckets = max(1, round(gradient / 25e6))
        backward = 2 / 3 * (compute + tp) / m
        dp = exposed_seconds(backward, gradient, buckets, layout.dp, links["dp"]) if layout.dp > 1 else 0.0
        return {"compute": compute, "tp": tp, "bubble": bubble, "pp": pp, "dp": dp}

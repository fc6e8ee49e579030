"""Layouts on hosts: who sends to whom, what crosses a border, what a step would take.

    layouts.flows(messages)                 {(sender, receiver): {axis: bytes}}, recorded
    layouts.along(layout, job.sent(layout)) the same, predicted
    layouts.crossing(flows, host=8)         bytes between hosts

**From a rank's bytes to pairs of ranks.** `hpnb.record.traffic` knows what left a rank and who took part. A
send goes to its peer. In a collective a rank passes all that it sends on to the next of its group, the last
one to the first: that is the ring in which the bytes are counted. Among two ranks there is no other way;
among more a library may take another, and then these pairs are the ring's and not the link's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpnb.mesh import AXES, Layout
from hpnb.record import Message
from hpnb.theory import Link, bytes_sent, exposed_seconds, seconds

Flows = dict[tuple[int, int], dict[str, float]]
"""{(sender, receiver): {axis: bytes}}"""


# --- who sends to whom ------------------------------------------------------------------------------


def flows(messages: Sequence[Sequence[Message]], least: float = 0.0) -> Flows:
    """Bytes from rank to rank, by axis; of a collective along its ring.

    Args:
        messages: `Traffic.messages` of each rank, 0 up.
        least: messages of fewer bytes are left out, such as a loss or shapes.
    """
    found: Flows = {}
    for rank, own in enumerate(messages):
        for m in own:
            if m.bytes < max(least, 1e-9):
                continue
            to = m.peer if m.op == "send" else m.group[(m.group.index(rank) + 1) % len(m.group)]
            pair = found.setdefault((rank, to), {})
            pair[m.axis] = pair.get(m.axis, 0.0) + m.bytes
    return found


def along(layout: Layout, sent: Mapping[str, float]) -> Flows:
    """The same, predicted, for any layout.

    Args:
        sent: {axis: bytes}. Along dp and tp what leaves each rank for the next of its group, the last one's
            for the first; along pp what crosses each cut, one way and the other.
    """
    found: Flows = {}
    for axis in AXES:
        for group in layout.groups(axis):
            if len(group) < 2 or not sent.get(axis):
                continue
            pairs = list(zip(group, (*group[1:], group[0]), strict=True))
            if axis == "pp":
                pairs = [*pairs[:-1], *((b, a) for a, b in pairs[:-1])]
            for pair in pairs:
                found.setdefault(pair, {})[axis] = sent[axis]
    return found


def crossing(found: Flows, host: int, axis: str | None = None) -> float:
    """Bytes between ranks of different hosts, each of `host` consecutive ranks; of one axis, or of all."""
    return sum(
        nbytes
        for (a, b), by_axis in found.items()
        if a // host != b // host
        for name, nbytes in by_axis.items()
        if axis in (None, name)
    )


# --- a step on a mesh, in theory --------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A transformer to be trained by a layout on hosts.

    Attributes:
        layers, hidden: 12 layers hidden^2 parameters, values of 2 bytes.
        tokens: of a whole batch.
        microbatches: of each pipeline.
        rate: matmul FLOP/s of a rank.
        host: ranks of a host.
        inside, between: the link of a rank to another one of its host, and of another host.
    """

    layers: int
    hidden: int
    tokens: float
    microbatches: int
    rate: float
    host: int
    inside: Link
    between: Link

    @property
    def parameters(self) -> float:
        return 12.0 * self.layers * self.hidden**2

    def states(self, layout: Layout) -> float:
        """Bytes a rank holds of weights, gradients and optimizer, 16 a parameter."""
        return 16 * self.parameters / (layout.pp * layout.tp)

    def sent(self, layout: Layout) -> dict[str, float]:
        """{axis: bytes of a step}, as `along` takes them."""
        own = self.tokens / layout.dp  # tokens that go through each pipeline
        activation = 2 * own * self.hidden
        return {
            "dp": bytes_sent("all_reduce", 2 * self.parameters / (layout.pp * layout.tp), layout.dp),
            "pp": activation if layout.pp > 1 else 0.0,
            "tp": 4 * self.layers / layout.pp * bytes_sent("all_reduce", activation, layout.tp),
        }

    def link(self, layout: Layout, axis: str) -> Link:
        """That of the slowest hop of the axis: a ring is as quick as that."""
        groups = layout.groups(axis)
        crosses = any(rank // self.host != group[0] // self.host for group in groups for rank in group)
        return self.between if crosses else self.inside

    def seconds(self, layout: Layout) -> dict[str, float]:
        """{"compute", "tp", "bubble", "pp", "dp"}: seconds of a step.

        Sums of tp are in line; a pipeline's hops are in line once, there and back; 25 MB buckets of gradients
        hide behind the backward of the last microbatch, and what sticks out is "dp".
        """
        m = self.microbatches if layout.pp > 1 else 1
        own = self.tokens / layout.dp
        compute = 6 * self.parameters * self.tokens / layout.world_size / self.rate
        each = 2 * own / m * self.hidden
        links = {axis: self.link(layout, axis) for axis in AXES}
        sums = 4 * self.layers / layout.pp * m * seconds("all_reduce", each, layout.tp, links["tp"])
        hops = 2 * (layout.pp - 1) * seconds("send", each, 2, links["pp"]) if layout.pp > 1 else 0.0
        bubble = (layout.pp - 1) / m * (compute + sums)
        gradient = 2 * self.parameters / (layout.pp * layout.tp)
        buckets = max(1, round(gradient / 25e6))
        behind = 2 / 3 * (compute + sums) / m
        bare = exposed_seconds(behind, gradient, buckets, layout.dp, links["dp"]) if layout.dp > 1 else 0.0
        return {"compute": compute, "tp": sums, "bubble": bubble, "pp": hops, "dp": bare}

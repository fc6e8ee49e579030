"""The explorer of notebook 04: a layout and the order of its axes on nodes, its traffic and its step."""

from __future__ import annotations

from itertools import permutations

from hpnb.lesson.explorers import small_multiples
from hpnb.lesson.explorers.explorer import Challenge, Evaluation, Explorer, Picture
from hpnb.lesson.explorers.knobs import Choice, Knobs
from hpnb.lesson.programs import rank_traffic
from hpnb.lesson.tables import number
from hpnb.mesh import AXES, Layout
from hpnb.theory import LINKS

ORDERS = tuple(" > ".join(order) for order in permutations(AXES))
MAX_RANKS = 64  # more squares could not be told apart
_LAYERS, _HIDDEN, _TOKENS, _MICROBATCHES, _RATE = 32, 4096, 500_000, 16, 400e12

KNOBS: Knobs = {
    "dp": Choice((1, 2, 4, 8, 16, 32), 4),
    "pp": Choice((1, 2, 4, 8, 16), 2),
    "tp": Choice((1, 2, 4, 8, 16), 4),
    "order": Choice(ORDERS, "tp > pp > dp"),  # it opens with tp between nodes
    "node": Choice((1, 2, 4, 8, 16), 8),
    "inside": Choice(tuple(LINKS), "NVLink 4"),
    "between": Choice(tuple(LINKS), "Ethernet 100 Gb"),
}
GOAL = 1.3  # a step over its compute
ANSWER = {"dp": 4, "pp": 4, "tp": 2, "order": "pp > dp > tp"}
CHALLENGE = Challenge(
    "32 ranks on nodes of 8, NVLink 4 inside and Ethernet 100 Gb between, at most 16 GB of weights, "
    "gradients and optimizer state per rank: a step of at most 1.3 times its compute.",
    lambda at: (
        (at["dp"] * at["pp"] * at["tp"], at["node"]) == (32, 8)
        and (at["inside"], at["between"]) == ("NVLink 4", "Ethernet 100 Gb")
        and (at["states (B)"] <= 16e9 and at["step / compute"] <= GOAL)
    ),
)


class NodesExplorer(Explorer):
    """Without widgets: both atlases, and between them the steps of all orders of the answer's sizes."""

    def static_figure(self) -> Picture:
        from hpnb.lesson.figures import vit_hybrid

        start = {name: knob.value for name, knob in self._knobs.items()}
        setting = {**start, **self.answer}
        answer = ", ".join(f"{name} {value}" for name, value in self.answer.items())
        steps = {}
        for order in ORDERS:
            layout, task = _placed(**{**setting, "order": order})
            steps[order] = task.seconds(layout)
        title = f"simulated · only pp outermost keeps a step under {GOAL:g} times its compute"
        bars = vit_hybrid.orders(steps, GOAL, title)
        opening, closing = (_atlas(**at, bars=False) for at in (start, setting))
        pictures = [
            ("It opens here", opening[0]),
            ("The trade-off over order, with the answer's sizes", bars),
            (f"An answer to the challenge: {answer}", closing[0]),
        ]
        words = f"As it opens: {opening[1]} Steps over compute: {bars.get_label()}. "
        words += f"Answer, {answer}: {closing[1]}"
        return small_multiples.stack(pictures), words


def layouts_on_nodes() -> Explorer:
    """Notebook 04: which axis is sent between nodes, by sizes, order, node and both links.

    A transformer of 32 blocks of 4,096 (6.4e9 parameters), 500,000 tokens a step, 16 microbatches where there
    is a pipeline, 400 TFLOP/s a rank; `rank_traffic.TransformerOnNodes` says how a step is counted.
    """
    return NodesExplorer(KNOBS, _readings, CHALLENGE, ANSWER, trade=("order", "step / compute")).display()


def _placed(
    dp: int, pp: int, tp: int, order: str, node: int, inside: str, between: str
) -> tuple[Layout, rank_traffic.TransformerOnNodes]:
    layout = Layout(dp, pp, tp, tuple(order.split(" > ")))
    links = (LINKS[inside], LINKS[between])
    return layout, rank_traffic.TransformerOnNodes(
        _LAYERS, _HIDDEN, _TOKENS, _MICROBATCHES, _RATE, node, *links
    )


def _readings(dp: int, pp: int, tp: int, order: str, node: int, inside: str, between: str) -> Evaluation:
    layout, task = _placed(dp, pp, tp, order, node, inside, between)
    if not 2 <= layout.world_size <= MAX_RANKS:
        ranks = layout.world_size
        raise ValueError(f"{dp} x {pp} x {tp} are {ranks} ranks; 2 to {MAX_RANKS} can be drawn")
    parts = task.seconds(layout)
    traffic = rank_traffic.predicted_traffic(layout, task.sent(layout))
    step, crossing = sum(parts.values()), rank_traffic.bytes_between_nodes(traffic, node)
    readings = {
        "step (s)": step,
        "step / compute": step / parts["compute"],
        "between nodes, mean of a rank (B)": crossing / layout.world_size,
        "states (B)": task.states(layout),
    }

    def draw(fast: bool) -> Picture:
        return _atlas(dp, pp, tp, order, node, inside, between, fast=fast)

    return readings, draw


def _atlas(
    dp: int, pp: int, tp: int, order: str, node: int, inside: str, between: str,
    *, fast: bool = False, bars: bool = True,
) -> Picture:  # fmt: skip
    """Who sends to whom in this order and in the default one; with `bars` also both steps."""
    from hpnb.lesson.figures import vit_hybrid

    layout, task = _placed(dp, pp, tp, order, node, inside, between)
    plain, sent, parts = Layout(dp, pp, tp), task.sent(layout), task.seconds(layout)
    traffic, default = (rank_traffic.predicted_traffic(at, sent) for at in (layout, plain))
    nested = " > ".join(AXES)
    steps = {order: parts} if order == nested else {order: parts, nested: task.seconds(plain)}
    states = f"{number(task.states(layout), 'B')} of states"
    figure = vit_hybrid.atlas(
        {f"yours: {order}": traffic, f"the default: {nested}": default},
        node,
        steps if bars else None,
        title=f"simulated · dp {dp} x pp {pp} x tp {tp}: {states} on each of {layout.world_size} ranks",
        text=not fast,
    )
    crossing = rank_traffic.bytes_between_nodes(traffic, node)
    return figure, (
        f"Senders by receivers for dp {dp} x pp {pp} x tp {tp} nested {order}, beside the default order, "
        f"on nodes of {node}; {number(crossing, 'B')} are sent between nodes, "
        f"and a step takes {number(sum(parts.values()), 's')}."
    )

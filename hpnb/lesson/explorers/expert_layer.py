"""The explorer of notebook 11: what a layer of experts costs, by experts, top-k, ep, imbalance and link."""

from __future__ import annotations

from typing import NamedTuple

from hpnb.lesson.explorers.explorer import Challenge, Evaluation, Explorer, Picture
from hpnb.lesson.explorers.knobs import Choice, Knobs, Slider
from hpnb.lesson.tables import number
from hpnb.theory import LINKS
from hpnb.theory.communication import seconds

RATE = 400e12  # FLOP/s of matmuls in 16 bits, about what an H100 reaches
HIDDEN, TOTAL_WIDTH, TOKENS = 4096, 131_072, 8192  # of a token; of all experts together; of a rank
_EP = (1, 2, 4, 8, 16, 32, 64)

KNOBS: Knobs = {
    "experts": Choice((8, 16, 32, 64, 128, 256), 64),
    "top_k": Choice((1, 2, 4, 8), 4),
    "ep": Choice(_EP, 64),
    "imbalance": Slider(1.0, 4.0, 2.0, 0.1),
    "link": Choice(tuple(LINKS), "InfiniBand NDR"),
}
ANSWER = {"experts": 16, "ep": 4, "imbalance": 1.2}
CHALLENGE = Challenge(
    "At least 16 experts, InfiniBand NDR, an imbalance of 1.2 or more: at most 1 GB of experts on a rank, "
    "and a layer that takes at most 1.6 times its ideal.",
    lambda at: (
        (at["experts"] >= 16 and at["link"] == "InfiniBand NDR" and at["imbalance"] >= 1.2)
        and (at["experts of a rank (B)"] <= 1e9 and at["times the ideal"] <= 1.6)
    ),
)


class LayerCost(NamedTuple):
    """Seconds of forward and backward of a layer of experts on its slowest rank, and bytes of its weights."""

    ideal: float  # computing with equal loads
    waiting: float  # for the rank with the busiest experts
    messages: float
    weights: float

    @property
    def total(self) -> float:
        return self.ideal + self.waiting + self.messages


def expert_layer() -> Explorer:
    """Notebook 11: computing, waiting and messages of a layer of experts, by experts, top-k, ep and link.

    8,192 tokens a rank of 4,096 values in bfloat16, 400 TFLOP/s. The experts have three matrices each, and
    together always the same weights: twice as many experts are half as wide.
    """
    trade = "imbalance", "times the ideal"
    title = "time of a layer / its ideal, at each imbalance"
    return Explorer(KNOBS, _readings, CHALLENGE, ANSWER, trade, trade_title=title, goal=1.6).display()


def layer_cost(experts: int, top_k: int, ep: int, imbalance: float, link: str) -> LayerCost:
    """
    Args:
        imbalance: rows of the busiest rank over the mean.

    Raises:
        ValueError: fewer experts than ranks, or than a token chooses.
    """
    if experts < ep or experts < top_k:
        raise ValueError(f"{experts} experts are too few for ep {ep} and top-k {top_k}")
    width = TOTAL_WIDTH // experts
    ideal = 18 * HIDDEN * width * top_k * TOKENS / RATE
    busiest = imbalance if ep > 1 else 1.0
    rows = top_k * TOKENS * HIDDEN * 2  # bytes
    messages = 4 * seconds("all_to_all", busiest * rows, ep, LINKS[link])
    return LayerCost(ideal, (busiest - 1) * ideal, messages, 2 * 3 * HIDDEN * TOTAL_WIDTH / ep)


def _readings(experts: int, top_k: int, ep: int, imbalance: float, link: str) -> Evaluation:
    cost = layer_cost(experts, top_k, ep, imbalance, link)
    readings = {
        "times the ideal": cost.total / cost.ideal,
        "layer (ms)": 1e3 * cost.total,
        "messages (ms)": 1e3 * cost.messages,
        "experts of a rank (B)": cost.weights,
        "width of an expert": TOTAL_WIDTH // experts,
    }

    def draw(fast: bool) -> Picture:
        from hpnb.plot.bars import Bar, BarPanel, bars
        from hpnb.plot.grammar import CARD, STYLE, OpStyle

        rows = {}
        for size in _EP:
            if size > experts:
                continue
            at = layer_cost(experts, top_k, size, imbalance, link)
            parts = {"computing": at.ideal, "waiting": at.waiting, "messages": at.messages}
            rows[f"ep {size}" + (" ◀" if size == ep else "")] = [Bar(parts, words=number(at.weights, "B"))]
        looks = {"computing": OpStyle(STYLE["compute"].color, "", "computing, equal loads"),
                 "waiting": OpStyle(STYLE["wait"].color, "xx", "waiting for the busiest rank"),
                 "messages": OpStyle(STYLE["all_to_all"].color, "", "all-to-alls")}  # fmt: skip
        figure = bars(
            [BarPanel(rows, "s", "time of a layer ({unit}); at the end, bytes of experts on a rank",
                      row_inches=0.3)],
            looks, text=not fast, right=1.0,
            title=f"predicted · {experts} experts, top-{top_k}, imbalance {imbalance:g}, {link}",
        )  # fmt: skip
        for words in (words for ax in figure.axes for words in ax.texts):  # no line runs through bytes
            words.set_bbox({"facecolor": CARD, "edgecolor": "none", "pad": 1.0})
        return figure, (
            f"Time of a layer of experts over ep; at ep {ep} computing takes {number(cost.ideal, 's')}, "
            f"waiting {number(cost.waiting, 's')} and messages {number(cost.messages, 's')}."
        )

    return readings, draw

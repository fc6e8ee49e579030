"""The explorer of notebook 07: what a rank keeps of a GPT-2 from forward to backward, and what that costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpnb.lesson.explorers.explorer import Explorer, explorer
from hpnb.lesson.explorers.knobs import Challenge, Choice, Slider
from hpnb.lesson.tables import number
from hpnb.split_sizes import split_sizes
from hpnb.theory import (
    ActivationRow,
    Block,
    block_over_even,
    kept_parts,
    model_flops,
    recomputed_share,
)
from hpnb.theory.activation_table import Recompute

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAYERS = 48
HEAD = 64  # wide
LOGIT = 6  # bytes of a word and token: 2 for the logit, 4 for its softmax
RANKS = (1, 2, 4, 5, 8, 16)
AGAIN: dict[str, Recompute] = {"nothing": "", "attention": "attention", "blocks": "full"}
CAP = 5e9
_REACH = 6 * CAP  # of the picture


def kept_by_rank() -> Explorer:
    """Notebook 07: 48 blocks and a head of one row, by heads, vocabulary, t, tokens and what is recomputed.

    The published formula, on the first rank, which has the most heads; with heads 64 wide.
    """
    from hpnb import plot

    def draw(
        heads: int, vocabulary: int, ranks: int, tokens: int, between: str, recomputed: str, fast: bool
    ) -> tuple[Figure, str, dict[str, Any]]:
        block = Block(HEAD * heads, heads, tokens)
        rows = {
            f"{t} rank{'s' * (t > 1)}": _kept(block, vocabulary, t, between, AGAIN[recomputed])
            for t in RANKS
            if t <= heads
        }
        if ranks > heads:
            raise ValueError(f"{heads} heads cannot be dealt out to {ranks} ranks; use at most {heads}")
        mine = f"{ranks} rank{'s' * (ranks > 1)}"
        kept = sum(rows[mine].values())
        figure = plot.stacked(
            rows,
            limit=CAP,
            reach=_REACH,
            chosen=mine,
            text=not fast,
            title=f"predicted · {LAYERS} blocks of {heads} heads, {vocabulary:,} words, {tokens:,} tokens, "
            f"{between} between the pairs; computed again: {recomputed}",
        )
        alt = (
            f"What a rank keeps of {LAYERS} blocks and the logits, over the number of ranks; with {ranks} "
            f"it is {number(kept, 'B')}, against a limit of {number(CAP, 'B')}."
        )
        again = AGAIN[recomputed]
        whole = model_flops(LAYERS, block.hidden, vocabulary, tokens, 1)
        readings = {
            "kept (B)": kept,
            "of it logits (%)": 100 * rows[mine]["logits"] / kept,
            "computed again (%)": 100
            * recomputed_share(block, again)
            * LAYERS
            * block.training_flops
            / whole,
            "fullest rank over even": block_over_even(block, ranks),
            "_as_asked": (heads, vocabulary, tokens) == (25, 50257, 8192),
        }
        return figure, alt, readings

    return explorer(
        draw,
        {
            "heads": Slider(4, 40, 25),
            "vocabulary": Choice((509, 8000, 32000, 50257, 128256, 256000), 50257),
            "ranks": Choice(RANKS, 4),
            "tokens": Choice((512, 1024, 2048, 4096, 8192, 16384), 1024),
            "between": Choice(("whole", "cut"), "whole"),
            "recomputed": Choice(tuple(AGAIN), "nothing"),
        },
        Challenge(
            f"25 heads, 50,257 words, a row of 8,192 tokens: at most {number(CAP, 'B')} kept, at most 20 % "
            "computed again, and no rank more than 2 % over an even share.",
            lambda read: (
                bool(read["_as_asked"])
                and read["kept (B)"] <= CAP
                and read["computed again (%)"] <= 20
                and read["fullest rank over even"] <= 1.02
            ),
        ),
    )


def _kept(block: Block, vocabulary: int, ranks: int, between: str, recompute: Recompute) -> dict[str, float]:
    row = ActivationRow("", ranks > 1, between == "cut", recompute)
    parts = kept_parts(row, block, ranks, even=False)
    return {
        **{part: LAYERS * nbytes for part, nbytes in parts.items()},
        "logits": float(LOGIT * block.sequence * block.batch * split_sizes(vocabulary, ranks)[0]),
    }

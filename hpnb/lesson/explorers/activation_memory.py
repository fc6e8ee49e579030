"""The explorer of notebook 07: activations that a rank keeps of a GPT-2, and what recomputing them costs."""

from __future__ import annotations

from hpnb.comm import split_sizes
from hpnb.lesson.explorers.explorer import Challenge, Evaluation, Explorer, Picture
from hpnb.lesson.explorers.knobs import Choice, Knobs, Slider
from hpnb.lesson.tables import number
from hpnb.theory import (
    ActivationRow,
    Block,
    activation_parts,
    block_imbalance,
    model_flops,
    recomputed_share,
)
from hpnb.theory.activation_table import Recompute

LAYERS = 48
HEAD_WIDTH = 64
LOGIT_BYTES = 6  # for each vocabulary entry and token: 2 for the logit, 4 for its softmax
RANKS = (1, 2, 4, 5, 8, 16)
RECOMPUTE: dict[str, Recompute] = {"nothing": "", "attention": "attention", "blocks": "full"}
CAP = 5e9

KNOBS: Knobs = {
    "heads": Slider(4, 40, 25),
    "vocabulary": Choice((509, 8000, 32000, 50257, 128256, 256000), 50257),
    "ranks": Choice(RANKS, 4),
    "tokens": Choice((512, 1024, 2048, 4096, 8192, 16384), 1024),
    "between": Choice(("replicated", "sharded"), "replicated"),
    "recomputed": Choice(tuple(RECOMPUTE), "nothing"),
}
ANSWER = {"tokens": 8192, "ranks": 5, "between": "sharded", "recomputed": "attention"}
CHALLENGE = Challenge(
    f"25 heads, a vocabulary of 50,257, a sequence of 8,192 tokens: at most {number(CAP, 'B')} kept, at "
    "most 20 % recomputed, and no rank computes more than 1.02 times the mean.",
    lambda at: (
        (at["heads"], at["vocabulary"], at["tokens"]) == (25, 50257, 8192)
        and (at["kept (B)"] <= CAP and at["recomputed (%)"] <= 20)
        and at["largest compute (×mean)"] <= 1.02
    ),
)


def kept_by_rank() -> Explorer:
    """Notebook 07: what 48 blocks and the logits of one sequence keep.

    By the published formula, on the first rank, which has the most heads; heads are 64 wide.
    """
    trade = ("ranks", "largest compute (×mean)")
    return Explorer(KNOBS, _readings, CHALLENGE, ANSWER, trade, goal=1.02).display()


def _readings(
    heads: int, vocabulary: int, ranks: int, tokens: int, between: str, recomputed: str
) -> Evaluation:
    if ranks > heads:
        raise ValueError(f"{heads} heads cannot be split over {ranks} ranks; use at most {heads}")
    block, recompute = Block(HEAD_WIDTH * heads, heads, tokens), RECOMPUTE[recomputed]
    parts = _activations(block, vocabulary, ranks, between, recompute)
    kept = sum(parts.values())
    recomputed_flops = recomputed_share(block, recompute) * LAYERS * block.training_flops
    readings = {
        "kept (B)": kept,
        "logits, of what is kept (%)": 100 * parts["logits"] / kept,
        "recomputed (%)": 100 * recomputed_flops / model_flops(LAYERS, block.hidden, vocabulary, tokens, 1),
        "largest compute (×mean)": block_imbalance(block, ranks),
    }

    costs = (
        f"Recomputed: {recomputed}, {readings['recomputed (%)']:.1f} % of the FLOPs. Largest compute: "
        f"{readings['largest compute (×mean)']:.3f} × mean"
    )

    def draw(fast: bool) -> Picture:
        from hpnb.lesson.figures import gpt2_tensor

        rows = {
            f"{t} rank{'s' * (t > 1)}": _activations(block, vocabulary, t, between, recompute)
            for t in RANKS
            if t <= heads
        }
        figure = gpt2_tensor.stacked(
            rows,
            limit=CAP,
            reach=6 * CAP,
            chosen=f"{ranks} rank{'s' * (ranks > 1)}",
            text=not fast,
            title=f"predicted · {LAYERS} blocks, h = {block.hidden:,}, {tokens:,} tokens, {between} between "
            f"the pairs. {costs}",
        )
        return figure, (
            f"What a rank keeps of {LAYERS} blocks and the logits, over the number of ranks; with {ranks} "
            f"it is {number(kept, 'B')}, against a limit of {number(CAP, 'B')}. {costs}."
        )

    return readings, draw


def _activations(
    block: Block, vocabulary: int, ranks: int, between: str, recompute: Recompute
) -> dict[str, float]:
    """{part: bytes} that the first of `ranks` ranks keeps of all blocks and of the logits."""
    row = ActivationRow("", ranks > 1, between == "sharded", recompute)
    parts = activation_parts(row, block, ranks, even=False)
    return {
        **{part: LAYERS * nbytes for part, nbytes in parts.items()},
        "logits": float(LOGIT_BYTES * block.sequence * block.batch * split_sizes(vocabulary, ranks)[0]),
    }

"""What GPT-2 has and ViT lacks, on any layout: tied embeddings, padding, dropout, odd sizes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hybrid_cases import CHUNKS, Case, batch, build, mine, off, train, weights
from tensor_cases import apart, lm_case, own_loss, serial
from tensor_cases import train as train_cut

import hpnb
from hpnb.hybrid.model_loss import causal
from hpnb.tensor_parallel import full_gradients, full_state_dict, parallelize

pytestmark = pytest.mark.usefixtures("launches_on_a_pool")

STYLES = tuple(CHUNKS)


@pytest.fixture(scope="module")
def four() -> Iterator[hpnb.Ranks]:
    with hpnb.Ranks(4, device="cpu", timeout=120) as pool:
        yield pool


# --- tied embeddings, padded rows, clipping ----------------------------------------------------------------


def case(kind: str, style: str, zero: int) -> Case:
    """dp 2 x pp 2; 7 rows in 2 shares of 4 microbatches: ragged, and padded by 0 to 3 tokens a row."""
    many = {"chunks": 2, "microbatches": 4} if CHUNKS[style][-1] == 2 else {"microbatches": 4}
    again = "full" if zero == 3 else False
    return Case(kind, dp=2, pp=2, style=style, zero=zero, rows=7, clip=0.5, again=again, **many)  # type: ignore[arg-type]


def of_each(kind: str) -> list[Any]:
    """Every schedule with every stage of ZeRO; of these CI runs each schedule once and each stage twice."""
    every = [(style, zero) for style in STYLES for zero in (1, 2, 3)]
    often = {(style, 1 + (place + (kind == "gpt2")) % 3) for place, style in enumerate(STYLES)}
    if kind != "gpt2":
        often = {(style, zero) for style, zero in often if style in ("gpipe", "1f1b", "zb-v", "dualpipe-v")}
    return [pytest.param(*one, marks=[] if one in often else pytest.mark.slow) for one in every]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("style", "zero"), of_each("gpt2"))
def test_tied_embeddings_padded_and_clipped(four: hpnb.Ranks, style: str, zero: int) -> None:
    """Words are looked up on the first stage and are the last one's weight; a V has both on one rank."""
    one = case("gpt2", style, zero)
    assert off(one, four.run(train, one)) < 1e-11


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("style", "zero"), of_each("gpt2 classifies"))
def test_padded_classification(four: hpnb.Ranks, style: str, zero: int) -> None:
    """The last stage reads the last token that is no padding from the batch, row by row."""
    one = case("gpt2 classifies", style, zero)
    assert off(one, four.run(train, one)) < 1e-11


def broken(one: Case, fault: str) -> Any:
    from hpnb.hybrid import model_loss
    from hpnb.models.gpt2_parts import GPT2Anatomy

    def of_all(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
        """The mean over all tokens, padding included."""
        return causal(outputs, labels) * (labels[:, 1:] != -100).double().mean()

    where, name, instead = {
        "the mean is of padding too": (model_loss, "causal", of_all),
        "the last token is read": (GPT2Anatomy, "_pooled", lambda self, logits, ids: logits[:, -1]),
    }[fault]
    before = getattr(where, name)
    setattr(where, name, instead)
    try:
        return train(one)
    finally:
        setattr(where, name, before)


@pytest.mark.parametrize(
    ("kind", "fault"),
    [("gpt2", "the mean is of padding too"), ("gpt2 classifies", "the last token is read")],
)
def test_what_padding_could_break_shows(four: hpnb.Ranks, kind: str, fault: str) -> None:
    one = case(kind, "1f1b", 1)
    assert off(one, four.run(broken, one, fault)) > 1e-4


# --- 25 heads, 50,257 words --------------------------------------------------------------------------------


def uneven(sequence: bool) -> tuple[float, tuple[int, int]]:
    """As GPT-2 XL has them, in a model that is small otherwise: (distance, heads and words of this rank)."""
    torch.set_num_threads(1)
    found = lm_case(words=50257, heads=25, hidden=50, layers=1)
    model = parallelize(found.build(), hpnb.Mesh(hpnb.Layout(tp=hpnb.world_size())).tp, "1d", sequence)
    (attention,) = hpnb.models.attentions(model)
    words = model.transformer.wte.weight  # type: ignore[union-attr]
    ours = train_cut(model, found, own_loss, full_gradients, full_state_dict, steps=1)
    return apart(ours, serial(found, steps=1)), (attention.heads, len(words))  # type: ignore[arg-type]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("ranks", "sequence", "shares"),
    [
        (2, False, [(13, 25129), (12, 25128)]),
        (3, True, [(9, 16753), (8, 16752), (8, 16752)]),
        (4, False, [(7, 12565), (6, 12564), (6, 12564), (6, 12564)]),
    ],
)
def test_25_heads_and_50257_words(ranks: int, sequence: bool, shares: list[tuple[int, int]]) -> None:
    found = hpnb.launch(uneven, sequence, ranks=ranks, device="cpu", timeout=120)
    assert max(distance for distance, _ in found) < 1e-12
    assert [share for _, share in found] == shares


# --- dropout -----------------------------------------------------------------------------------------------


def dropped(seed: int, again: Any = False, dropout: float = 0.2, **knobs: Any) -> dict[str, torch.Tensor]:
    """The weights after two steps with dropout."""
    torch.set_num_threads(1)
    plugin = hpnb.HybridParallelPlugin(precision="fp64", seed=seed, activation_checkpointing=again, **knobs)
    booster = hpnb.Booster(plugin=plugin)
    model: Any = build("gpt2", dropout=dropout)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9))
    for step in range(2):
        optimizer.zero_grad()
        given = mine(batch("gpt2", step, 8), plugin.mesh.dp)
        booster.execute_pipeline(iter([given]), model, None, optimizer)
        optimizer.step()
    return weights(model)


LAYOUTS: dict[str, dict[str, Any]] = {
    "dp x zb-v, ZeRO 1": {"pp_size": 2, "pp_style": "zb-v", "num_microbatches": 2, "zero_stage": 1},
    "pp x tp, tokens cut": {
        "pp_size": 2, "tp_size": 2, "num_microbatches": 2, "enable_sequence_parallelism": True,
    },
    "dp x tp, ZeRO 3": {"tp_size": 2, "zero_stage": 3, "num_microbatches": 2},
}  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dropout_is_reproducible_and_the_same_when_computed_again(four: hpnb.Ranks, layout: str) -> None:
    run = partial(four.run, dropped, **LAYOUTS[layout])
    found = {
        "first": run(7), "again": run(7), "other seed": run(8), "none": run(7, dropout=0.0),
        "full": run(7, "full"), "attention": run(7, "attention"),
    }  # fmt: skip

    def distance(one: str, other: str) -> float:
        pairs = itertools.chain.from_iterable(
            ((a[name], b[name]) for name in b) for a, b in zip(found[one], found[other], strict=True)
        )
        return max(float((a - b).norm() / b.norm()) for a, b in pairs if float(b.norm()))

    assert distance("again", "first") == 0.0
    assert distance("other seed", "first") > 1e-3
    assert distance("none", "first") > 1e-3
    assert distance("full", "first") < 1e-11
    assert distance("attention", "first") < 1e-11

"""A ViT under context parallelism trains as on one process: 197 tokens, which neither 2 nor 4 ranks divide.

pytest tests/test_context_vit.py
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import prod
from typing import Any

import hybrid_cases
import pytest
import torch
import torch.nn.functional as F
from rank_pools import RankPools
from transformers import ViTConfig, ViTForImageClassification, ViTModel

import hpnb

CLASSES, STEPS = 5, 3
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


def make_model(name: str) -> Any:
    """ "transformers": 14 x 14 patches and the class token. "laptop": 17 tokens."""
    torch.manual_seed(1)
    if name == "laptop":
        model = hpnb.models.vit("laptop", classes=CLASSES, dtype=torch.float64)
    else:
        config = ViTConfig(
            hidden_size=16, num_hidden_layers=4, num_attention_heads=4, intermediate_size=24, image_size=28,
            patch_size=2, num_labels=CLASSES,
        )  # fmt: skip
        model = ViTForImageClassification(config).double().train()
    with torch.no_grad():  # norms and biases away from 1 and 0, positions that matter
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    return model


def make_batch(name: str, step: int, samples: int) -> Tensors:
    generator = torch.Generator().manual_seed(100 + step)
    side = 32 if name == "laptop" else 28
    images = torch.randn(samples, 3, side, side, generator=generator, dtype=torch.float64)
    return {"pixel_values": images, "labels": torch.randint(CLASSES, (samples,), generator=generator)}


def make_optimizer(kind: str, model: Any) -> torch.optim.Optimizer:
    if kind == "SGD":  # one step of it shows the gradients
        return torch.optim.SGD(model.parameters(), lr=1.0)
    # Where a gradient is near eps, Adam would magnify rounding.
    return torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-4)


@cache
def train_on_one_process(name: str, kind: str, samples: int) -> tuple[list[float], Tensors]:
    model = make_model(name)
    optimizer, losses = make_optimizer(kind, model), []
    for step in range(1 if kind == "SGD" else STEPS):
        batch = make_batch(name, step, samples)
        loss = F.cross_entropy(model(batch["pixel_values"]).logits, batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {key: value.clone() for key, value in model.state_dict().items()}


def train_boosted(
    name: str, kind: str, samples: int, options: dict[str, Any]
) -> tuple[list[float | None], Tensors]:
    """The same on ranks: with `num_microbatches` by execute_pipeline, else by a plain forward."""
    torch.set_num_threads(1)
    plugin = hpnb.HybridParallelPlugin(precision="fp64", **options)
    booster = hpnb.Booster(plugin=plugin)
    model = make_model(name)
    model, optimizer, *_ = booster.boost(model, make_optimizer(kind, model))
    losses: list[float | None] = []
    for step in range(1 if kind == "SGD" else STEPS):
        batch = hybrid_cases.mine(make_batch(name, step, samples), plugin.mesh.dp)
        optimizer.zero_grad()
        if plugin.num_microbatches is None:
            outputs = model(**batch)
            assert outputs.logits.shape == (len(batch["labels"]), CLASSES), "every rank has all logits"
            booster.backward(outputs.loss, optimizer)
            losses.append(outputs.loss.item())
        else:
            loss = booster.execute_pipeline(iter([batch]), model, None, optimizer)["loss"]
            losses.append(None if loss is None else float(loss))
        optimizer.step()
    return losses, hybrid_cases.weights(model)


LAYOUTS: dict[str, dict[str, Any]] = {
    "cp2": {"cp_size": 2},
    "cp4": {"cp_size": 4},
    "cp2-ulysses": {"cp_size": 2, "context_parallel": "ulysses"},
    "cp4-ulysses": {"cp_size": 4, "context_parallel": "ulysses"},
    "cp4-all-gather": {"cp_size": 4, "context_parallel": "all-gather"},
    "cp2-microbatches": {"cp_size": 2, "num_microbatches": 2},
    "cp2-recompute": {"cp_size": 2, "activation_checkpointing": "full"},
    "dp2-cp2": {"cp_size": 2},
    "dp2-cp2-zero1": {"cp_size": 2, "zero_stage": 1},
    "dp2-cp2-ulysses-zero1": {"cp_size": 2, "zero_stage": 1, "context_parallel": "ulysses"},
    "dp2-cp2-zero3": {"cp_size": 2, "zero_stage": 3},
    "pp2-cp2": {"cp_size": 2, "pp_size": 2, "num_microbatches": 4},
    "pp2-cp2-ulysses": {
        "cp_size": 2, "pp_size": 2, "num_microbatches": 4, "context_parallel": "ulysses",
    },
    "pp2-cp2-zb-v-zero1": {
        "cp_size": 2, "pp_size": 2, "num_microbatches": 4, "pp_style": "zb-v", "zero_stage": 1,
    },
    "cp2-tp2": {"cp_size": 2, "tp_size": 2},
    "cp2-ulysses-tp2": {"cp_size": 2, "tp_size": 2, "context_parallel": "ulysses"},
    "cp2-tp2-sequence": {"cp_size": 2, "tp_size": 2, "enable_sequence_parallelism": True},
    "pp2-cp2-tp2-sequence": {
        "cp_size": 2, "tp_size": 2, "pp_size": 2, "num_microbatches": 4, "enable_sequence_parallelism": True,
    },
    "dp2-pp2-cp2-zero1": {"cp_size": 2, "pp_size": 2, "num_microbatches": 2, "zero_stage": 1},
    "dp2-cp2-tp2-ulysses-zero1": {
        "cp_size": 2, "tp_size": 2, "zero_stage": 1, "context_parallel": "ulysses",
    },
}  # fmt: skip


def check_training(name: str, layout: str, samples: int, pools: RankPools) -> None:
    options = LAYOUTS[layout]
    sizes = [options.get(f"{axis}_size", 1) for axis in ("pp", "cp", "tp")]
    ranks = prod(sizes) * (2 if layout.startswith("dp2") else 1)
    start = make_model(name).state_dict()
    for kind in ("SGD", "AdamW"):
        wanted_losses, wanted = train_on_one_process(name, kind, samples)
        results = pools[ranks].run(train_boosted, name, kind, samples, options)
        assert any(None not in losses for losses, _ in results)
        for losses, weights in results:
            for loss, expected in zip(losses, wanted_losses, strict=True):
                assert loss is None or abs(loss - expected) < 1e-12 * expected
            assert hybrid_cases.distance(weights, wanted) < 1e-12
            if kind == "SGD":
                ours, theirs = ({n: start[n] - w[n] for n in start} for w in (weights, wanted))
                assert hybrid_cases.distance(ours, theirs) < 1e-12, "gradients"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_vit_trains_as_on_one_process(layout: str, pools: RankPools) -> None:
    check_training("transformers", layout, 4, pools)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["cp2", "cp4-ulysses", "dp2-cp2-zero1", "pp2-cp2"])
def test_so_does_the_one_of_this_library(layout: str, pools: RankPools) -> None:
    check_training("laptop", layout, 4, pools)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "layout", ["dp2-cp2", "pp2-cp2", pytest.param("dp2-pp2-cp2-zero1", marks=pytest.mark.slow)]
)
def test_samples_that_do_not_divide(layout: str, pools: RankPools) -> None:
    check_training("transformers", layout, 3, pools)  # one microbatch of pp2-cp2 is empty


# --- bytes -----------------------------------------------------------------------------------------------


def count_bytes(mode: str) -> tuple[float, float, float]:
    """Bytes of a forward and of its backward, and those of the class tokens of the batch."""
    plugin = hpnb.HybridParallelPlugin(cp_size=4, context_parallel=mode, precision="fp64")
    booster = hpnb.Booster(plugin=plugin)
    model = make_model("transformers")
    model, optimizer, *_ = booster.boost(model, make_optimizer("SGD", model))
    batch = make_batch("transformers", 0, 3)
    with hpnb.record.traffic() as sent:
        loss = model(**batch).loss
        forward = sent.bytes["cp"]
        booster.backward(loss, optimizer)
    return forward, sent.bytes["cp"] - forward, 3 * 16 * 8


@pytest.mark.parametrize("mode", ["ring", "all-gather", "ulysses"])
def test_bytes_are_those_of_the_formulas_and_of_the_class_token(mode: str, pools: RankPools) -> None:
    """Per layer: a ring sends keys and values cp - 1 times, and twice as much in the backward. Ulysses sends
    (cp - 1) / cp of queries, keys, values and outputs both ways. A broadcast sends (cp - 1) / cp, too."""
    layers, tokens = 4, 50  # of a rank: 197 tokens are padded to 200
    for forward, backward, class_tokens in pools[4].run(count_bytes, mode):
        values = tokens * class_tokens
        per_layer = (3 / 4 * 4 * values,) * 2 if mode == "ulysses" else (3 * 2 * values, 6 * 2 * values)
        assert (forward, backward) == tuple(layers * sent + 3 / 4 * class_tokens for sent in per_layer)


# --- what is refused -------------------------------------------------------------------------------------


def refusals() -> list[str]:
    messages = []
    booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(cp_size=2, precision="fp64"))
    config = make_model("transformers").config
    dropout = ViTConfig(**{**config.to_dict(), "attention_probs_dropout_prob": 0.1})
    for model in (ViTModel(config), ViTForImageClassification(dropout)):
        try:
            booster.boost(model)
        except (TypeError, ValueError) as error:
            messages.append(str(error))
    model, *_ = booster.boost(make_model("transformers"))
    batch = make_batch("transformers", 0, 2)
    for wrong in ({"labels": batch["labels"]}, {**batch, "attention_mask": torch.ones(2, 197)}):
        try:
            model(**wrong)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_what_cannot_be_split_is_refused_in_a_sentence(pools: RankPools) -> None:
    headless, dropout, images, mask = pools[2].run(refusals)[0]
    assert "transformers' ViTForImageClassification, and a ViTModel is neither; use cp_size=1" in headless
    assert "set config.attention_probs_dropout_prob=0.0 before the model is made" in dropout
    assert "splits the patches of pixel_values (B, 3, height, width); this batch has labels" in images
    assert "takes no attention_mask; leave it out: all patches are seen" in mask

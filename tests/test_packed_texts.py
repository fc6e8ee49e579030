"""Texts that position_ids pack into one sequence train as if each were a sequence, in every layout.

pytest tests/test_packed_texts.py
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rank_pools import RankPools
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    MistralConfig,
    MistralForCausalLM,
)

import hpnb
from hpnb.hybrid.packed_texts import CacheSwitch

STEPS, SAMPLES, LENGTH, FIRST = 2, 4, 12, 5  # tokens of a sequence, and those of its first text


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


def build(kind: str, use_cache: bool = True) -> Any:
    torch.manual_seed(1)
    sizes: dict[str, Any] = {
        "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": use_cache,
    }  # fmt: skip
    if kind == "gpt2":
        dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
        config = GPT2Config(
            vocab_size=61, n_positions=16, n_embd=16, n_layer=4, n_head=4, use_cache=use_cache,
            bos_token_id=1, eos_token_id=1, **dropout,
        )  # fmt: skip
        return GPT2LMHeadModel(config).double()
    if kind == "mistral":
        return MistralForCausalLM(MistralConfig(**sizes, sliding_window=3)).double()
    return LlamaForCausalLM(LlamaConfig(**sizes)).double()


def batches(masked: bool = False) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    positions = torch.arange(LENGTH)
    positions = torch.where(positions < FIRST, positions, positions - FIRST).expand(SAMPLES, -1)
    made = []
    for _ in range(STEPS):
        ids = torch.randint(61, (SAMPLES, LENGTH), generator=generator)
        labels = ids.index_fill(1, torch.tensor([FIRST]), -100)  # no text predicts the next one's first token
        made.append({"input_ids": ids, "labels": labels, "position_ids": positions})
        if masked:
            made[-1]["attention_mask"] = torch.ones_like(ids)
    return made


def next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def train_texts_apart(kind: str) -> tuple[list[float], float]:
    """Losses and the last norm of the gradients, of one process that runs each text by itself."""
    model = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses, norm = [], 0.0
    for batch in batches():
        texts = batch["input_ids"].split([FIRST, LENGTH - FIRST], 1)
        logits = torch.cat([model(input_ids=text, use_cache=False).logits for text in texts], 1)
        loss = next_token_loss(logits, batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        losses.append(loss.item())
    return losses, norm


def train_boosted(
    kind: str, layout: dict[str, Any], by_forward: bool, use_cache: bool = True, masked: bool = False,
    asks_for_cache: bool = False, verbose: bool = True,
) -> tuple[list[float], float, list[str]]:  # fmt: skip
    """The same of a boosted model, where a rank has the losses, and what it warned of."""
    plugin = hpnb.HybridParallelPlugin(precision="fp64", max_norm=1.0, **layout)
    booster = hpnb.Booster(plugin=plugin)
    model = build(kind, use_cache)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model, optimizer, *_ = booster.boost(model, optimizer, verbose=verbose)
    local = slice(plugin.mesh.dp.rank, None, plugin.mesh.dp.size)
    losses = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in batches(masked):
            part = {name: value[local] for name, value in batch.items()}
            optimizer.zero_grad()
            if by_forward:
                loss = model(**part, **({"use_cache": True} if asks_for_cache else {})).loss
                booster.backward(loss, optimizer)
            else:
                loss = booster.execute_pipeline(iter([part]), model, None, optimizer)["loss"]
            optimizer.step()
            losses.append(0.0 if loss is None else float(loss))
    places = [w.filename for w in caught if "packs texts" in str(w.message)]
    return losses, float(optimizer.last_step.norm), places


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"zero_stage": 3},
    {"tp_size": 2},
    {"tp_size": 2, "enable_sequence_parallelism": True},
    {"tp_size": 2, "activation_checkpointing": "full"},
    {"pp_size": 2, "num_microbatches": 2},
    {"cp_size": 2},
    {"cp_size": 2, "context_parallel": "ulysses"},
]


COMBINED: list[dict[str, Any]] = [
    {"tp_size": 4, "tp_mode": "2d"},
    {"cp_size": 2, "pp_size": 2, "num_microbatches": 2},
    {"cp_size": 2, "tp_size": 2, "context_parallel": "all-gather"},
    {"pp_size": 2, "tp_size": 2, "pp_style": "zb-v", "num_microbatches": 2, "num_model_chunks": 2},
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", COMBINED, ids=str)
def test_packed_texts_are_separated_in_layouts_of_four(pools: RankPools, layout: dict[str, Any]) -> None:
    kind = "gpt2" if "tp_mode" in layout else "llama"
    losses, norm = train_texts_apart(kind)
    results = pools[4].run(train_boosted, kind, layout, False)
    ours, our_norm, _ = next(of_rank for of_rank in results if of_rank[0][0])
    assert ours == pytest.approx(losses, rel=1e-6)
    assert our_norm == pytest.approx(norm, rel=1e-6)


@pytest.mark.sampled(1, cover=True)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2"])
def test_packed_texts_are_separated_in_every_layout(
    pools: RankPools, kind: str, layout: dict[str, Any]
) -> None:
    """With config.use_cache=True, as in most configs, plain model(**batch) would mix them."""
    losses, norm = train_texts_apart(kind)
    for by_forward in (False,) if "pp_size" in layout else (False, True):
        results = pools[2].run(train_boosted, kind, layout, by_forward)
        ours, our_norm, places = next(of_rank for of_rank in results if of_rank[0][0])
        assert ours == pytest.approx(losses, rel=1e-6)  # transformers computes rotary tables in float32
        assert our_norm == pytest.approx(norm, rel=1e-6)
        assert places == [__file__]  # one warning, at a line of this file


def test_a_config_without_a_cache_needs_no_warning(pools: RankPools) -> None:
    losses, norm = train_texts_apart("llama")
    for ours, our_norm, places in pools[2].run(train_boosted, "llama", {}, True, use_cache=False):
        assert ours == pytest.approx(losses, rel=1e-6)
        assert our_norm == pytest.approx(norm, rel=1e-6)
        assert not places


def test_only_a_verbose_boost_warns(pools: RankPools) -> None:
    for by_forward in (False, True):
        results = pools[2].run(train_boosted, "llama", {}, by_forward, verbose=False)
        assert [places for *_, places in results] == [[], []]


def test_training_makes_no_cache_though_the_caller_asks(pools: RankPools) -> None:
    losses, norm = train_texts_apart("llama")
    for ours, our_norm, _ in pools[2].run(train_boosted, "llama", {}, True, asks_for_cache=True):
        assert ours == pytest.approx(losses, rel=1e-6)
        assert our_norm == pytest.approx(norm, rel=1e-6)


def train_masked_on_one_process(kind: str) -> list[float]:
    model = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for batch in batches(masked=True):
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        loss = next_token_loss(model(**inputs).logits, batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_with_a_mask_all_layouts_do_what_transformers_does(pools: RankPools, layout: dict[str, Any]) -> None:
    """Where a batch has an attention_mask, it alone says what tokens see, as in model(**batch)."""
    losses = train_masked_on_one_process("llama")
    results = pools[2].run(train_boosted, "llama", layout, False, masked=True)
    ours, _, places = next(of_rank for of_rank in results if of_rank[0][0])
    assert ours == pytest.approx(losses, rel=1e-6)
    assert not places


def evaluate_with_a_cache(use_cache: bool | None) -> tuple[bool, bool]:
    """Whether an evaluation gives a cache, and whether a token that goes on from it sees what was before."""
    booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(precision="fp64"))
    model, *_ = booster.boost(build("llama"))
    model.eval()
    ids = batches()[0]["input_ids"]
    with torch.no_grad():
        start = model(input_ids=ids[:, :-1], **({} if use_cache is None else {"use_cache": use_cache}))
        if start.past_key_values is None:
            return False, False
        ours = model(input_ids=ids[:, -1:], past_key_values=start.past_key_values).logits
        wanted = model(input_ids=ids).logits[:, -1:]
    return True, bool(torch.allclose(ours, wanted))


def test_outside_of_training_a_caller_can_have_a_cache(pools: RankPools) -> None:
    assert set(pools[1].run(evaluate_with_a_cache, None)) == {(False, False)}
    assert set(pools[1].run(evaluate_with_a_cache, True)) == {(True, True)}


def test_use_cache_goes_to_the_models_inside_only_where_one_takes_it() -> None:
    sizes = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    answers = LlamaForQuestionAnswering(LlamaConfig(**sizes, num_attention_heads=4))
    assert CacheSwitch(answers).arguments({}, training=False) == {"use_cache": False}
    assert CacheSwitch(torch.nn.Linear(2, 2)).arguments({}, training=True) == {}
    llama = CacheSwitch(build("llama"))
    assert llama.arguments({"use_cache": True}, training=False) == {}
    assert llama.arguments({"past_key_values": object()}, training=False) == {}
    assert llama.arguments({}, training=True, positional=20) == {}  # it is among the positional arguments
    bert = BertForSequenceClassification(BertConfig(**sizes, num_attention_heads=4))
    ids = torch.ones((2, 3), dtype=torch.long)
    assert bert(input_ids=ids, **CacheSwitch(bert).arguments({}, training=True)).logits.shape == (2, 2)

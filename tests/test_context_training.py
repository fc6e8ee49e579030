"""Context parallelism: whole training steps equal one process's, and what cannot be split is refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plan_models import use_float64
from rank_pools import RankPools
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    OPTForCausalLM,
    Qwen3Config,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import hpnb


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


def distance(ours: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((ours - wanted).norm() / wanted.norm())


# --- training steps --------------------------------------------------------------------------------------

SMALL = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4}
CONFIGS: dict[str, Any] = {
    "gpt2": lambda: GPT2Config(
        vocab_size=61, n_embd=16, n_layer=4, n_head=4, n_positions=64, attn_pdrop=0.0, embd_pdrop=0.0,
        resid_pdrop=0.0,
    ),
    "llama": lambda: LlamaConfig(**SMALL, intermediate_size=24, num_key_value_heads=2),
    "mistral": lambda: MistralConfig(**SMALL, intermediate_size=24, num_key_value_heads=2, sliding_window=7),
    "qwen3": lambda: Qwen3Config(**SMALL, intermediate_size=24, num_key_value_heads=2, head_dim=4),
    "gemma2": lambda: Gemma2Config(
        **SMALL, intermediate_size=24, num_key_value_heads=2, head_dim=4, sliding_window=7,
        query_pre_attn_scalar=4,
    ),
}  # fmt: skip
STEPS, SAMPLES, LENGTH = 2, 4, 21


def dense_attention(
    module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
    scaling: float | None = None, softcap: float | None = None, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """In float64 throughout, and with the soft cap, which two of transformers' own leave out."""
    k, v = (x.repeat_interleave(q.size(1) // k.size(1), 1) for x in (k, v))
    scores = q @ k.mT * (q.size(-1) ** -0.5 if scaling is None else scaling)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return (scores.masked_fill(~mask, -1e300).softmax(-1) @ v).transpose(1, 2), None


def make_model(name: str) -> Any:
    torch.manual_seed(1)
    AttentionInterface.register("dense", dense_attention)
    AttentionMaskInterface.register("dense", sdpa_mask)
    config = CONFIGS[name]()
    if name != "gpt2":  # before the model is made: rotary frequencies are computed in float64, too
        use_float64(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="dense").double()
    with torch.no_grad():  # weights as large as what a step adds to them, or rounding would count more
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return model


def make_batches(packed: bool) -> list[dict[str, torch.Tensor]]:
    """Ragged sequences, padded on the right, and one sample without many targets."""
    generator = torch.Generator().manual_seed(2)
    batches = []
    for _ in range(STEPS):
        ids = torch.randint(61, (SAMPLES, LENGTH), generator=generator)
        lengths = torch.tensor([LENGTH, 13, 18, 2])[:, None]
        mask = torch.arange(LENGTH) < lengths
        batch = {"input_ids": ids, "labels": ids.masked_fill(~mask, -100), "attention_mask": mask.long()}
        if packed:
            position = torch.arange(LENGTH)
            batch |= {"position_ids": torch.where(position < 8, position, position - 8).expand(SAMPLES, -1)}
            batch["labels"] = ids.index_fill(1, torch.tensor([8]), -100)  # no text predicts the next one's
            del batch["attention_mask"]
        batches.append(batch)
    return batches


def dense_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits[:, :-1]  # with a cache packed texts are mixed
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)


def train_on_one_process(name: str, packed: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = make_model(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for batch in make_batches(packed):
        loss = dense_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {key: value.detach() for key, value in model.state_dict().items()}


def train_boosted(name: str, packed: bool, options: dict[str, Any], folder: str) -> list[float]:
    plugin = hpnb.HybridParallelPlugin(precision="fp64", max_norm=1.0, **options)
    booster = hpnb.Booster(plugin=plugin)
    model = make_model(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    model, optimizer, *_ = booster.boost(model, optimizer)
    share = SAMPLES // plugin.dp_size
    losses = []
    for batch in make_batches(packed):
        here = slice(plugin.mesh.dp.rank * share, (plugin.mesh.dp.rank + 1) * share)
        part = {key: value[here] for key, value in batch.items()}
        if plugin.pp_size > 1:
            result = booster.execute_pipeline(iter([part]), model, None, optimizer, return_loss=True)
            loss = result["loss"]
        else:
            loss = model(**part).loss
            booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float("nan") if loss is None else float(loss))
    booster.save_model(model, folder)
    return losses


LAYOUTS: dict[str, dict[str, Any]] = {
    "cp2": {"cp_size": 2},
    "cp4": {"cp_size": 4},
    "cp2-ulysses": {"cp_size": 2, "context_parallel": "ulysses"},
    "cp2-all-gather": {"cp_size": 2, "context_parallel": "all-gather"},
    "cp4-all-gather": {"cp_size": 4, "context_parallel": "all-gather"},
    "dp2-cp2": {"cp_size": 2},
    "dp2-cp2-zero1": {"cp_size": 2, "zero_stage": 1},
    "dp2-cp2-zero2": {"cp_size": 2, "zero_stage": 2},
    "dp2-cp2-zero3": {"cp_size": 2, "zero_stage": 3},
    "pp2-cp2": {"cp_size": 2, "pp_size": 2, "num_microbatches": 2},
    "pp2-cp2-zb-v-zero1": {
        "cp_size": 2, "pp_size": 2, "num_microbatches": 4, "pp_style": "zb-v", "zero_stage": 1,
    },
    "cp2-tp2": {"cp_size": 2, "tp_size": 2},
    "cp2-tp2-sequence": {"cp_size": 2, "tp_size": 2, "enable_sequence_parallelism": True},
    "cp2-ulysses-tp2": {"cp_size": 2, "tp_size": 2, "context_parallel": "ulysses"},
    "pp2-cp2-tp2": {"cp_size": 2, "tp_size": 2, "pp_size": 2, "num_microbatches": 2},
    "cp2-recompute": {"cp_size": 2, "activation_checkpointing": "full"},
    "cp2-ulysses-recompute": {
        "cp_size": 2, "context_parallel": "ulysses", "activation_checkpointing": "full",
    },
    "pp2-cp2-ulysses": {
        "cp_size": 2, "context_parallel": "ulysses", "pp_size": 2, "num_microbatches": 2,
    },
    "cp2-all-gather-recompute": {
        "cp_size": 2, "context_parallel": "all-gather", "activation_checkpointing": "full",
    },
    "cp2-all-gather-tp2-sequence": {
        "cp_size": 2, "context_parallel": "all-gather", "tp_size": 2, "enable_sequence_parallelism": True,
    },
    "pp2-cp2-all-gather-zb-v-zero1": {
        "cp_size": 2, "context_parallel": "all-gather", "pp_size": 2, "num_microbatches": 4,
        "pp_style": "zb-v", "zero_stage": 1,
    },
    "dp2-cp2-all-gather-zero3": {"cp_size": 2, "context_parallel": "all-gather", "zero_stage": 3},
}  # fmt: skip
RECOMPUTING = tuple(name for name in LAYOUTS if name.endswith("recompute"))
RANKS = {"pp2-cp2-tp2": 8} | dict.fromkeys(("cp2", "cp2-ulysses", "cp2-all-gather", *RECOMPUTING), 2)


def check_training(name: str, layout: str, packed: bool, pools: RankPools, folder: Any) -> None:
    wanted_losses, wanted = train_on_one_process(name, packed)
    ranks = RANKS.get(layout, 4)
    losses = pools[ranks].run(train_boosted, name, packed, LAYOUTS[layout], str(folder))
    for of_rank in losses:
        for loss, expected in zip(of_rank, wanted_losses, strict=True):
            assert loss != loss or abs(loss - expected) < 1e-12 * expected
    assert any(loss == loss for of_rank in losses for loss in of_rank)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).state_dict()
    for key, value in wanted.items():
        assert distance(loaded[key], value) < 1e-12, key


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_training_step_is_one_process(layout: str, pools: RankPools, tmp_path: Any) -> None:
    grouped = "cp2-tp2", "dp2-cp2-zero3", "pp2-cp2", "cp2-ulysses", "cp4-all-gather"
    name = "llama" if layout in grouped else "gpt2"
    check_training(name, layout, False, pools, tmp_path)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("mistral", "cp2"),
        ("qwen3", "cp2"),
        ("gemma2", "cp2"),
        ("mistral", "cp2-ulysses"),
        ("gemma2", "pp2-cp2"),
        ("mistral", "cp4-all-gather"),
        ("gemma2", "cp2-all-gather"),
    ],
)
def test_other_models(name: str, layout: str, pools: RankPools, tmp_path: Any) -> None:
    check_training(name, layout, False, pools, tmp_path)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama", "cp2"),
        ("llama", "cp2-ulysses"),
        ("gpt2", "pp2-cp2"),
        ("gpt2", "pp2-cp2-ulysses"),
        ("llama", "cp2-ulysses-recompute"),
        ("llama", "cp2-all-gather"),
        ("gpt2", "pp2-cp2-all-gather-zb-v-zero1"),
        ("mistral", "cp2-all-gather"),
        ("mistral", "cp2-ulysses"),
        ("gemma2", "cp2-ulysses"),
    ],
)
def test_packed_texts_do_not_see_each_other(name: str, layout: str, pools: RankPools, tmp_path: Any) -> None:
    check_training(name, layout, True, pools, tmp_path)


# --- what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cp_size": 2, "tp_size": 4, "tp_mode": "2d"}, "use tp_mode='1d' with cp_size=2"),
        ({"cp_size": 2, "activation_checkpointing": "attention"}, "activation_checkpointing='full'"),
        ({"cp_size": 0}, "cp_size=0 is not a count"),
        ({"cp_size": 2, "context_parallel": "rings"}, "use 'ring', 'all-gather' or 'ulysses'"),
    ],
)
def test_options_that_do_not_compose(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hpnb.HybridParallelPlugin(**options)


def mean_of_sequences(of_shard: bool, outputs: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum, count) of the mean over each sequence's targets, and then over sequences, by weights."""
    logits, labels, w = outputs.logits, batch["labels"], batch["w"]
    if not of_shard:
        logits, labels, w = logits[:, :-1], labels[:, 1:], w[:, 1:]
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return (w * losses).sum(), w.sum()


def weighted_batch(shifted: bool) -> dict[str, torch.Tensor]:
    batch = make_batches(packed=False)[0]
    targets = batch["labels"].ne(-100)
    targets[:, 0] = False
    w = targets.double() / targets.sum(1, keepdim=True)
    return {**batch, "w": F.pad(w[:, 1:], (0, 1)) if shifted else w}


def train_weighted(options: dict[str, Any], shifted: bool) -> tuple[float | None, list[str]]:
    booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(precision="fp64", cp_size=2, **options))
    model = make_model("llama")
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.2))
    batch, criterion = weighted_batch(shifted), lambda o, b: mean_of_sequences(True, o, b)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):  # the loss of the second has the gradients of the first in it
            optimizer.zero_grad()
            loss = booster.execute_pipeline(iter([batch]), model, criterion, optimizer)["loss"]
            optimizer.step()
    said = [str(w.message) for w in caught if "context parallelism" in str(w.message)]
    return None if loss is None else float(loss), said


@pytest.mark.parametrize("options", [{}, {"pp_size": 2, "num_microbatches": 2}])
def test_what_belongs_to_labels_is_shifted_by_the_user(options: dict[str, Any], pools: RankPools) -> None:
    model, batch = make_model("llama"), weighted_batch(shifted=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(2):
        optimizer.zero_grad()
        outputs = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        total, count = mean_of_sequences(False, outputs, batch)
        (total / count).backward()
        optimizer.step()
    pool = pools[2 * options.get("pp_size", 1)]
    for loss, said in pool.run(train_weighted, options, True):
        assert loss is None or abs(loss - (total / count).item()) < 1e-12
        assert len(said) == 1
        assert "splits 'w' (4, 21) as it is" in said[0]
    for loss, _ in pool.run(train_weighted, options, False):
        assert loss is None or abs(loss - (total / count).item()) > 1e-4


def train_on_sequences(options: dict[str, Any], counts_targets: bool) -> list[str]:
    def criterion(outputs: Any, batch: Any) -> tuple[torch.Tensor, Any]:
        labels = batch["labels"]
        losses = F.cross_entropy(outputs.logits.transpose(1, 2), labels, reduction="none")
        targets = labels.ne(-100)
        if counts_targets:
            return losses.sum(), targets.sum()
        return (losses.sum(1) / targets.sum(1).clamp(min=1)).sum(), len(losses)

    booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(precision="fp64", **options))
    model = make_model("llama")
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in make_batches(packed=False):
            booster.execute_pipeline(iter([batch]), model, criterion, optimizer)
    return [str(w.message) for w in caught if "sequences" in str(w.message)]


def test_a_count_of_sequences_is_warned_of_once_where_ranks_have_some_of_their_tokens(
    pools: RankPools,
) -> None:
    for said in pools[2].run(train_on_sequences, {"cp_size": 2}, False):
        assert len(said) == 1
        assert "its 4 sequences as count" in said[0]
    assert pools[2].run(train_on_sequences, {"cp_size": 2}, True) == [[], []]
    assert pools[2].run(train_on_sequences, {}, False) == [[], []]


def train_on_shifted_mean(shifts: bool) -> float | None:
    def criterion(outputs: Any, batch: Any) -> torch.Tensor:
        logits, labels = outputs.logits, batch["labels"]
        logits, labels = (logits[:, :-1], labels[:, 1:]) if shifts else (logits, labels)
        return F.cross_entropy(logits.transpose(1, 2), labels)

    plugin = hpnb.HybridParallelPlugin(precision="fp64", cp_size=2, num_microbatches=2)
    booster = hpnb.Booster(plugin=plugin)
    model = make_model("llama")
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.2))
    batch = make_batches(packed=False)[0]
    booster.execute_pipeline(iter([batch]), model, criterion, optimizer)
    return model.last_step.loss.item()  # type: ignore[no-any-return]


def test_a_mean_that_shifts_labels_again_is_refused(pools: RankPools) -> None:
    with pytest.raises(hpnb.RankError, match="context parallelism has shifted them already") as error:
        pools[2].run(train_on_shifted_mean, True)
    assert "at the same position" in str(error.value)
    assert "pass causal=True" not in str(error.value)  # which would shift them twice, in silence
    batch = make_batches(packed=False)[0]
    logits = make_model("llama")(batch["input_ids"], batch["attention_mask"]).logits
    expected = F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:]).item()
    assert pools[2].run(train_on_shifted_mean, False) == pytest.approx([expected] * 2, rel=1e-12)


def generate(way: str) -> list[int]:
    plugin = hpnb.HybridParallelPlugin(precision="fp64", cp_size=2, context_parallel=way)
    model, *_ = hpnb.Booster(plugin=plugin).boost(make_model("llama"))
    tokens = model.eval().generate(torch.tensor([[3, 5, 7, 9]]), max_new_tokens=3, do_sample=False)
    return tokens[0].tolist()  # type: ignore[no-any-return]


def test_generation_needs_ulysses(pools: RankPools) -> None:
    for way in ("ring", "all-gather"):
        with pytest.raises(hpnb.RankError, match=f"context_parallel='{way}' splits multiples of 4 tokens"):
            pools[2].run(generate, way)
    model = make_model("llama").eval()
    expected = model.generate(torch.tensor([[3, 5, 7, 9]]), max_new_tokens=3, do_sample=False)[0].tolist()
    assert pools[2].run(generate, "ulysses") == [expected] * 2


def refusals() -> list[str]:
    plugin = hpnb.HybridParallelPlugin(cp_size=2, precision="fp32")
    dropout = AutoModelForCausalLM.from_config(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=9))
    vit = ViTModel(ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
    sizes = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = BertForSequenceClassification(BertConfig(intermediate_size=8, **sizes))
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    )
    bloom = BloomForCausalLM(BloomConfig(vocab_size=9, hidden_size=8, n_layer=1, n_head=2))
    no_drop = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    opt = OPTForCausalLM(OPTConfig(ffn_dim=8, word_embed_proj_dim=8, **no_drop, **sizes))
    messages = []
    for model in (dropout, vit, bert, t5, bloom, opt, nn.Linear(2, 2)):
        try:
            hpnb.Booster(plugin=plugin).boost(model)
        except (ValueError, TypeError) as error:
            messages.append(str(error))
    return messages


def test_models_that_cannot_be_split_are_refused_in_a_sentence(pools: RankPools) -> None:
    dropout, vit, bert, t5, bloom, opt, linear = pools[2].run(refusals)[0]
    assert "set config.attn_pdrop=0.0" in dropout
    assert "a ViTModel is neither; use cp_size=1, or pp_size and tp_size" in vit
    for name, said in (
        ("BertForSequenceClassification", bert),
        ("T5ForConditionalGeneration", t5),
        ("Linear", linear),
    ):
        assert said.endswith(f"a {name} is neither; use cp_size=1"), "registering would not help"
    assert "does not call transformers' attention interface" in bloom
    assert "register" not in bloom
    assert "hpnb.models.register, as parts that have causal=True" in opt

"""What context and expert parallelism cannot split: one sentence on every rank at once, and nobody waits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from rank_pools import RankPools
from torch import nn

import hpnb

SECONDS = 60  # far below the pools' timeout, by which a rank that waits forever is found
SIZES: dict[str, Any] = {
    "vocab_size": 17, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
DEEPSEEK = {
    "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "q_lora_rank": 8,
    "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4,
    "moe_intermediate_size": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools(timeout=120)
    yield pools
    pools.close()


def make(kind: str, **sizes: Any) -> Any:
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **sizes})
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def said_by(act: Any) -> str:
    try:
        act()
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def boost(kind: str, sizes: dict[str, Any], options: dict[str, Any]) -> str:
    """What this rank says to a model that cannot be split."""

    def act() -> None:
        plugin = hpnb.HybridParallelPlugin(precision="fp32", **options)
        hpnb.Booster(plugin=plugin).boost(make(kind, **sizes))

    return said_by(act)


MODELS: dict[str, tuple[int, str, dict[str, Any], dict[str, Any], str]] = {
    "3 experts on 2 ranks": (
        2, "Mixtral", {"num_local_experts": 3}, {"ep_size": 2},
        "has 3 experts, which 2 ranks cannot hold in equal numbers; use an ep_size of 1 or 3",
    ),
    "6 experts on 4 ranks": (
        4, "Mixtral", {"num_local_experts": 6}, {"ep_size": 4},
        "has 6 experts, which 4 ranks cannot hold in equal numbers; use an ep_size of 1, 2, 3 or 6",
    ),
    "one expert": (
        2, "Mixtral", {"num_local_experts": 1, "num_experts_per_tok": 1}, {"ep_size": 2},
        "has 1 expert, which 2 ranks cannot share; use ep_size=1",
    ),
    "no experts": (
        2, "Llama", {}, {"ep_size": 2},
        "a LlamaForCausalLM has no experts that transformers computes as one",
    ),
    "no experts for a selection bias": (
        2, "Llama", {}, {"selection_bias_rate": 0.001},
        "as one, which a selection bias keeps equally busy; leave selection_bias_rate out",
    ),
    "ep does not divide dp": (
        2, "Mixtral", {"num_local_experts": 6}, {"ep_size": 3},
        "ep_size=3 does not divide the 2 ranks of dp x cp; use ep_size=1 or 2",
    ),
    "ep does not divide dp x cp": (
        4, "Mixtral", {"num_local_experts": 6}, {"ep_size": 3, "cp_size": 2},
        "ep_size=3 does not divide the 4 ranks of dp x cp; use ep_size=1 or 2 or 4",
    ),
    "ep with tp leaves fewer ranks": (
        4, "Mixtral", {"num_local_experts": 4}, {"ep_size": 4, "tp_size": 2},
        "ep_size=4 does not divide the 2 ranks of dp x cp; use ep_size=1 or 2",
    ),
    "more tp ranks than neurons of an expert": (
        2, "Mixtral", {"num_local_experts": 2, "intermediate_size": 1}, {"tp_size": 2},
        "has 1 units (pieces that are not split), which 2 ranks cannot share",
    ),
    "cp on a number of ranks that is no multiple": (
        4, "Llama", {}, {"cp_size": 3},
        "pp_size=1 x cp_size=3 x tp_size=1 needs a multiple of 3 ranks, and there are 4; use 3 or 6",
    ),
    "fewer heads than ranks": (
        4, "Llama", {}, {"cp_size": 4, "context_parallel": "ulysses"},
        "Ulysses gives each of 4 ranks a head, and an attention has 2 on a rank; use cp_size=2 or less, or "
        "context_parallel='ring'",
    ),
    "a balancing loss that the model does not have": (
        2, "DeepseekV3", {**DEEPSEEK, "output_router_logits": True}, {"pp_size": 2},
        "set it to False for a DeepseekV3ForCausalLM that has no such loss",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MODELS)
def test_a_model_that_cannot_be_split(pools: RankPools, case: str) -> None:
    ranks, kind, sizes, options, sentence = MODELS[case]
    pool, began = pools[ranks], time.monotonic()
    for said in pool.run(boost, kind, sizes, options):
        assert sentence in said
        assert "\n" not in said
    assert time.monotonic() - began < SECONDS


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"ep_size": 2, "tp_size": 4, "tp_mode": "2d"}, "use tp_mode='1d' with ep_size=2, not '2d'"),
        ({"ep_size": 2, "enable_jit_fused": True}, "leave enable_jit_fused out with ep_size=2"),
        ({"ep_size": 2, "pp_size": 2, "cut": "time"}, "use cut='parameters' with ep_size=2, or say how many"),
        ({"cp_size": 2, "pp_size": 2, "cut": "flops"}, "use cut='parameters' with cp_size=2, or say how"),
        ({"ep_size": 0}, "ep_size=0 is not a count; use 1 or more"),
        ({"ep_size": 2.0}, "ep_size=2.0 is not a count"),
        ({"selection_bias_rate": -0.1}, "selection_bias_rate=-0.1 must be above 0, or 0 for none"),
    ],
    ids=str,
)
def test_options_that_cannot_be(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        hpnb.HybridParallelPlugin(**options)
    assert sentence in str(error.value)


def test_a_builder_has_no_experts_yet(pools: RankPools) -> None:
    def boost_builder() -> str:
        builder = hpnb.pipeline_parallel.Builder(lambda _: nn.Linear(2, 2), 2)
        plugin = hpnb.HybridParallelPlugin(ep_size=2, precision="fp32")
        return said_by(lambda: hpnb.Booster(plugin=plugin).boost(builder))

    for said in pools[2].run(boost_builder):
        assert "ep_size=2 shards the experts of a model of transformers, not of a Builder; use 1" in said


# --- batches -----------------------------------------------------------------------------------------------


def forward(options: dict[str, Any], batch: Any, bad_replica: int | None) -> str:
    """What this rank says to a batch that cannot be split; on other replicas the batch is a good one."""
    plugin = hpnb.HybridParallelPlugin(precision="fp32", **options)
    boosted, *_ = hpnb.Booster(plugin=plugin).boost(make("Llama"))
    ids = torch.ones(2, 8, dtype=torch.long)
    here = bad_replica is None or plugin.mesh.dp.rank == bad_replica
    batch = batch if here else {"input_ids": ids, "labels": ids}
    said = said_by(lambda: boosted(*batch) if isinstance(batch, tuple) else boosted(**batch))
    if here and bad_replica is not None:
        raise ValueError(said)  # as it is without the test's except
    return said


IDS = torch.ones(2, 8, dtype=torch.long)
LEFT = (torch.arange(8) > 2).long().expand(2, -1)
BATCHES: dict[str, tuple[Any, str]] = {
    "embeddings": (
        {"inputs_embeds": torch.ones(2, 8, 8)},
        "splits input_ids (B, s); this batch has inputs_embeds",
    ),
    "one dimension": ({"input_ids": IDS[0]}, "splits input_ids (B, s)"),
    "no tokens": (
        {"input_ids": IDS[:, :0]},
        "input_ids of shape (2, 0) have no tokens to split over 2 ranks",
    ),
    "padding before tokens": (
        {"input_ids": IDS, "attention_mask": LEFT},
        "set tokenizer.padding_side='right'",
    ),
    "a mask of pairs": (
        {"input_ids": IDS, "attention_mask": torch.ones(2, 1, 8, 8)},
        "attention_mask is (B, s), 1 for tokens and 0 for padding",
    ),
    "a tuple": ((IDS,), "takes a batch by names: model(**batch) with input_ids"),
}  # fmt: skip


@pytest.mark.parametrize("case", BATCHES)
def test_a_batch_that_cannot_be_split(pools: RankPools, case: str) -> None:
    batch, sentence = BATCHES[case]
    pool, began = pools[2], time.monotonic()
    for said in pool.run(forward, {"cp_size": 2}, batch, None):
        assert sentence in said
        assert "\n" not in said
    assert time.monotonic() - began < SECONDS


def test_a_batch_that_only_one_replica_cannot_split_ends_all(pools: RankPools) -> None:
    pool, began = pools[4], time.monotonic()
    with pytest.raises(hpnb.RankError) as caught:
        pool.run(forward, {"cp_size": 2}, {"input_ids": IDS, "attention_mask": LEFT}, 1)
    assert "set tokenizer.padding_side='right'" in caught.value.summary
    assert time.monotonic() - began < SECONDS


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_a_sequence_shorter_than_the_ranks_is_padded(pools: RankPools, length: int) -> None:
    """Nothing is refused: whoever gets no token of the text computes with padding, which has no target."""
    ids = torch.randint(0, 17, (2, length), generator=torch.Generator().manual_seed(3))
    losses = [pools[ranks].run(loss_of, ids, {"cp_size": ranks}) for ranks in (1, 4)]
    assert losses[1] == pytest.approx(losses[0] * 4, rel=1e-6)


def loss_of(ids: torch.Tensor, options: dict[str, Any]) -> float:
    torch.manual_seed(0)
    plugin = hpnb.HybridParallelPlugin(precision="fp32", **options)
    boosted, *_ = hpnb.Booster(plugin=plugin).boost(make("Llama"))
    return float(boosted(input_ids=ids, labels=ids).loss)

"""What needs the full model is refused wherever a rank has a part of it, whichever option sharded it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rank_pools import RankPools
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

import hpnb
from hpnb.hybrid.sharding_options import sharding_options


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


def mixtral() -> Any:
    torch.manual_seed(0)
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, head_dim=8,
            num_attention_heads=2, num_key_value_heads=2, num_local_experts=4,
        )
    )  # fmt: skip


def gpt2() -> Any:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=16, bos_token_id=1, eos_token_id=1,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


MODELS = {"mixtral": mixtral, "gpt2": gpt2}


def refusals(kind: str, options: dict[str, Any]) -> dict[str, str]:
    """What PyTorch's clipping, save_pretrained and an optimizer of full tensors say."""
    said: dict[str, str] = {}

    def note(name: str, call: Any) -> None:
        try:
            call()
        except (RuntimeError, AttributeError, ValueError) as error:
            said[name] = str(error)

    net = MODELS[kind]()
    booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(precision="fp32", **options))
    note("full tensors", lambda: booster.boost(net, torch.optim.Adafactor(net.parameters())))
    net = MODELS[kind]()
    model, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    note("clips", lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    note("saves", lambda: model.save_pretrained)
    return said


@pytest.mark.parametrize(
    ("kind", "ranks", "options", "clips"),
    [
        ("mixtral", 2, {"ep_size": 2}, "ep_size=2"),
        ("gpt2", 2, {"zero_stage": 3, "cp_size": 2}, "zero_stage=3"),
        ("gpt2", 1, {"zero_stage": 3}, None),  # one rank has all gradients, in flat tensors
        ("gpt2", 2, {"zero_stage": 3, "zero_replicas": 2}, None),
    ],
    ids=str,
)
def test_what_needs_the_full_model_is_refused(
    pools: RankPools, kind: str, ranks: int, options: dict[str, Any], clips: str | None
) -> None:
    """With ep_size=2 clipping let replicas diverge, and save_pretrained wrote half of the experts; with ZeRO
    3 over cp alone, or on one rank, it wrote flat tensors."""
    option = "ep_size=2" if "ep_size" in options else "zero_stage=3"
    for said in pools[ranks].run(refusals, kind, options):
        assert f"with {option} a rank has shards of them" in said["full tensors"]
        assert f"because its weights are sharded ({option})" in said["saves"]
        assert ("clips" in said) == (clips is not None)
        assert clips is None or f"with {clips} a rank has only its part of the gradients" in said["clips"]


def test_every_option_that_shards_is_listed(pools: RankPools) -> None:
    def listed() -> tuple[list[str], list[str]]:
        plugin = hpnb.HybridParallelPlugin(tp_size=2, pp_size=2, zero_stage=3, ep_size=2, precision="fp32")
        return sharding_options(plugin), sharding_options(plugin, stages=False)

    for all_options, of_tensors in hpnb.launch(listed, ranks=8, device="cpu"):
        assert all_options == ["zero_stage=3", "tp_size=2", "pp_size=2", "ep_size=2"]
        assert of_tensors == ["zero_stage=3", "tp_size=2", "ep_size=2"]


def with_norm_of_experts(ep: int) -> str:
    """A step whose criterion adds the norm of an expert's weights."""
    net = mixtral()
    booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(precision="fp32", ep_size=ep))
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    experts = [p for name, p in model.named_parameters() if "experts" in name]
    batch = {"input_ids": torch.ones(2, 4, dtype=torch.long), "labels": torch.ones(2, 4, dtype=torch.long)}

    def criterion(outputs: Any, inputs: Any) -> Any:
        return outputs.loss + 0.05 * sum(p.square().sum() for p in experts)

    try:
        booster.execute_pipeline(iter([batch]), model, criterion, optimizer)
    except ValueError as error:
        return str(error)
    return ""


def test_a_criterion_with_a_norm_of_experts_is_refused(pools: RankPools) -> None:
    """Of two ranks that share the experts, each counted its norm by half."""
    assert pools[2].run(with_norm_of_experts, 1) == ["", ""]
    for said in pools[2].run(with_norm_of_experts, 2):
        assert said.startswith("the criterion uses model.layers.0.mlp.experts.down_proj and ")
        assert "of which expert parallelism leaves a rank a shard" in said
        assert "use ep_size=1, or" in said

"""What goes into a boosted model and its loss function as into a plain one, and a boost that fails midway."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rank_pools import RankPools
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
)

import hpnb
from hpnb.hybrid import apply_data_parallel

SMALL: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
                         "intermediate_size": 16, "num_labels": 3}  # fmt: skip


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools(timeout=120)
    yield pools
    pools.close()


# --- positional arguments -----------------------------------------------------------------------------------


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.linear(x) + self.linear(y), labels.dtype


def call_by(names: bool) -> list[str]:
    booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(precision="bf16"))
    net = TwoInputs()
    model, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    x = torch.ones(2, 4)
    outputs, labels = model(x=x, y=x, labels=x) if names else model(x, x, x)
    return [str(outputs.dtype), str(labels)]


@pytest.mark.parametrize("names", [True, False])
def test_every_input_gets_the_dtype_of_the_weights(pools: RankPools, names: bool) -> None:
    """The second positional one kept float32 and did not fit the weights; targets keep theirs."""
    assert pools[1].run(call_by, names) == [["torch.bfloat16", "torch.float32"]]


# --- a loss function that was replaced ----------------------------------------------------------------------


def of_texts(logits: Any, labels: Any, pooled_logits: Any, config: Any, **_: Any) -> Any:
    return F.cross_entropy(pooled_logits.view(-1, config.num_labels), labels, label_smoothing=0.1)


def of_tokens(logits: Any, labels: Any, config: Any, **_: Any) -> Any:
    return F.cross_entropy(logits.view(-1, config.num_labels), labels.view(-1), label_smoothing=0.1)


def classifier(kind: str) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, num_key_value_heads=2, pad_token_id=0, classifier_dropout=0.0, **SMALL
    )
    made: Any = LlamaForSequenceClassification if kind == "texts" else LlamaForTokenClassification
    model = made(config)
    model.loss_function = of_texts if kind == "texts" else of_tokens
    return model


def classified(kind: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 32, (4, 8), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids % 3 if kind == "tokens" else torch.arange(4) % 3}


def loss_in_stages(kind: str) -> float | None:
    net = classifier(kind)
    booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(precision="fp32", pp_size=2, num_microbatches=2))
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    loss = booster.execute_pipeline(iter([classified(kind)]), model, None, optimizer)["loss"]
    return None if loss is None else float(loss)


@pytest.mark.parametrize("kind", ["texts", "tokens"])
def test_a_replaced_loss_function_gets_in_stages_what_the_forward_passes(pools: RankPools, kind: str) -> None:
    expected = classifier(kind)(**classified(kind)).loss.item()
    _, loss = pools[2].run(loss_in_stages, kind)
    assert loss == pytest.approx(expected, rel=1e-5)


# --- a boost that fails after it has begun ------------------------------------------------------------------


def boost_again(options: dict[str, Any]) -> list[str]:
    torch.manual_seed(0)
    net = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=1, eos_token_id=1
        )
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    said = []
    for plugin in (hpnb.HybridParallelPlugin(**options), hpnb.HybridParallelPlugin(precision="fp32")):
        try:
            hpnb.Booster(plugin=plugin).boost(net, optimizer)
            said.append("")
        except (ValueError, TypeError) as error:
            said.append(str(error))
    return said


def test_a_model_that_a_failed_boost_has_changed_is_not_boosted_again(pools: RankPools) -> None:
    """Its weights were rounded to bfloat16 already."""
    for first, second in pools[2].run(boost_again, {"precision": "bf16", "pp_size": 2, "cut": [1, 2]}):
        assert "[1, 2] adds up to 3" in first
        assert second.startswith("a boost of this GPT2LMHeadModel failed after it had changed the model")


def test_a_model_that_a_failed_boost_has_left_as_it_was_is_boosted(pools: RankPools) -> None:
    for first, second in pools[2].run(boost_again, {"precision": "fp32", "ep_size": 2}):
        assert "experts" in first
        assert second == ""


# --- the kernel of Adam -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "fused"),
    [({}, True), ({"fused": False}, False), ({"foreach": False}, None), ({"foreach": True}, None)],
    ids=str,
)
def test_one_kernel_for_adam_unless_the_user_has_chosen(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], fused: bool | None
) -> None:
    monkeypatch.setattr(apply_data_parallel, "this_device", lambda: torch.device("cuda"))
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], **options)
    apply_data_parallel.use_fused_adam(optimizer)
    assert optimizer.param_groups[0]["fused"] is fused

"""Which dtype a precision gives to buffers, to norms with statistics and to complex tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import hpnb
from hpnb import precision

BF16 = torch.bfloat16


class Tables(nn.Module):
    """Buffers that lose their values in 16 bits, and complex weights, all of which the output shows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("places", torch.arange(1000.0))
        self.register_buffer("turns", torch.polar(torch.ones(2), torch.arange(2.0)), persistent=False)
        self.phases = nn.Parameter(torch.randn(2, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(self.norm(self.linear(x)).float().unflatten(-1, (2, 2)))
        turned = torch.view_as_real(pairs * self.turns * self.phases).flatten(-2)
        return turned * (self.places[513] - 512)


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: t.dtype for name, t in tensors if t.is_floating_point() or t.is_complex()}


@pytest.mark.parametrize("name", ["bf16", "fp16", "amp-bf16", "fp32"])
def test_a_precision_leaves_float32_buffers_norms_with_statistics_and_complex_tensors(name: str) -> None:
    policy = precision.policy(name)
    model = policy.cast(Tables())
    kept = {n: d for n, d in dtypes(model).items() if not n.startswith("linear")}
    assert kept.pop("turns") == kept.pop("phases") == torch.complex64
    assert set(kept.values()) == {torch.float32}
    assert model.linear.weight.dtype == policy.weights
    assert model.places[513] == 513
    with policy.autocast("cpu"):
        model(torch.ones(3, 4, dtype=policy.weights)).sum().backward()  # also the norm takes both dtypes


def test_fp64_widens_buffers_and_only_models_of_one_dtype_have_theirs_rounded() -> None:
    wide = precision.policy("fp64").cast(Tables())
    assert wide.places.dtype == wide.norm.running_mean.dtype == torch.float64
    assert wide.turns.dtype == torch.complex64  # as model.double() leaves it
    assert precision.policy("fp32").cast(wide).places.dtype == torch.float32
    mixed = Tables()
    mixed.places = mixed.places.double()
    assert precision.policy("fp32").cast(mixed).places.dtype == torch.float64
    narrow = Tables().bfloat16()
    narrow.register_buffer("count", torch.zeros(1))
    cast = precision.policy("bf16").cast(narrow)
    assert (cast.places.dtype, cast.norm.weight.dtype, cast.count.dtype) == (BF16, BF16, torch.float32)
    assert precision.policy("fp32").cast(narrow).places.dtype == torch.float32


def test_modules_that_share_a_buffer_still_share_it() -> None:
    model = nn.ModuleList([Tables(), Tables()])
    model[1].places = model[0].places
    precision.policy("fp64").cast(model)
    assert model[1].places is model[0].places


MODELS = [
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2,
        )
    ),
    transformers.ResNetForImageClassification(
        transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1])
    ),
    transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(
            vocab_size=32, hidden_size=16, intermediate_size=16, moe_intermediate_size=8, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, n_group=1, topk_group=1,
            num_experts_per_tok=2, first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8,
            qk_rope_head_dim=4, v_head_dim=8, qk_nope_head_dim=4,
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
def test_a_model_of_transformers_has_the_dtypes_of_from_pretrained(model: Any, tmp_path: Any) -> None:
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=BF16)
    assert dtypes(precision.policy("bf16").cast(model)) == dtypes(loaded)
    assert dtypes(precision.policy("bf16").cast(loaded)) == dtypes(model)


# --- on ranks ----------------------------------------------------------------------------------


class Turned(nn.Module):
    """A complex weight and a complex table, as in Fourier neural operators and Meta's Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.phases = nn.Parameter(torch.randn(2, dtype=torch.complex64))
        self.register_buffer("turns", torch.polar(torch.ones(2), torch.arange(2.0)), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(self.first(x).unflatten(-1, (2, 2)))
        return self.last(torch.view_as_real(pairs * self.turns * self.phases).flatten(-2))


def train_turned(boosts: bool, layout: dict[str, Any], kind: Any) -> list[float]:
    torch.manual_seed(0)
    model: Any = Turned()
    x, labels = torch.randn(4, 4), torch.tensor([0, 1, 1, 0])
    optimizer = kind(model.parameters(), lr=0.05)
    max_norm = layout.get("max_norm", 0.0)
    if boosts:
        plugin = hpnb.HybridParallelPlugin(precision="fp32", **layout)
        booster, first = hpnb.Booster(plugin=plugin), plugin.mesh.dp.rank * 2
        model, optimizer, *_ = booster.boost(model, optimizer)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        if boosts:
            batch = {"x": x[first : first + 2], "labels": labels[first : first + 2]}
            result = booster.execute_pipeline(
                iter([batch]), model, lambda out, batch: F.cross_entropy(out, batch["labels"]), optimizer
            )
            losses.append(float(result["loss"]))
        else:
            loss = F.cross_entropy(model(x), labels)
            loss.backward()
            losses.append(loss.item())
            if max_norm:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return losses


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_complex_weights_and_tables_train_as_in_one_process(zero_stage: int, kind: Any) -> None:
    alone = train_turned(False, {"max_norm": 0.5}, kind)
    layout = {"zero_stage": zero_stage, "max_norm": 0.5}
    for losses in hpnb.launch(train_turned, True, layout, kind, ranks=2, device="cpu"):
        assert losses == pytest.approx(alone, rel=1e-5)


class Placed(nn.Module):
    """A table of positions that is added to hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("places", torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x + self.places)


def forward_placed(pipelined: bool) -> str:
    booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(precision="bf16"))
    model, *_ = booster.boost(Placed())
    batch = {"x": torch.ones(2, 4)}
    try:
        if pipelined:
            booster.execute_pipeline(iter([batch]), model, lambda out, _: out.mean())
        else:
            model(**batch)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_table_that_meets_16_bit_weights_is_named() -> None:
    for pipelined in (False, True):
        (message,) = hpnb.launch(forward_placed, pipelined, ranks=1, device="cpu")
        assert "the buffer places keeps float32" in message
        assert "x + table.to(x.dtype)" in message


def step_with(communication_dtype: torch.dtype | None, stage: int) -> torch.Tensor:
    torch.manual_seed(0)
    phases = nn.Parameter(torch.randn(4, dtype=torch.complex64))
    axis = hpnb.Mesh(hpnb.Layout(dp=2)).dp
    sgd = torch.optim.SGD
    zero = hpnb.ZeroOptimizer([phases], sgd, axis, stage, lr=0.5, communication_dtype=communication_dtype)
    (phases * (1j + hpnb.rank())).real.sum().backward()
    zero.step()
    return phases.detach().clone()


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_sums_complex_gradients_as_they_are(stage: int) -> None:
    """A communication_dtype dropped their imaginary part."""

    def both(stage: int) -> tuple[torch.Tensor, torch.Tensor]:
        return step_with(None, stage), step_with(torch.float32, stage)

    for plain, summed in hpnb.launch(both, stage, ranks=2, device="cpu"):
        assert torch.equal(plain, summed)
        torch.manual_seed(0)
        assert torch.equal(plain, torch.randn(4, dtype=torch.complex64) - 0.5 * (0.5 - 1j))

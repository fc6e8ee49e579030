"""Expert parallelism: dispatch, combine, the gradients of experts and whole steps, equal one process's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from plan_models import use_float64
from rank_pools import RankPools

import hpnb
from hpnb import Layout, Mesh, expert_parallel
from hpnb.placement import full_state_dict

SIZES: dict[str, Any] = {
    "vocab_size": 29, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 12,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 4,
    "max_position_embeddings": 32, "num_experts_per_tok": 2, "pad_token_id": 0,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4},
    "DeepseekV3": {
        "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8,
        "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


def build(kind: str, **options: Any) -> Any:
    """A tiny model in float64, whose routers prefer expert 0 and never choose expert 3 of 4."""
    made = getattr(transformers, f"{kind}ForCausalLM")
    use_float64(made)
    options.setdefault("experts_implementation", "eager")
    torch.manual_seed(5)
    model = made(getattr(transformers, f"{kind}Config")(**{**SIZES, **KINDS[kind], **options})).double()
    model.train()
    return model


def batch(samples: int = 8) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 29, (samples, 6), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def loss_of(outputs: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())


def prefer_one_expert(model: Any) -> None:
    """Every token chooses expert 0, and none expert 3."""

    def skew(module: Any, args: Any, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        logits, weights, _ = outputs
        second = 1 + (logits[:, 1] > logits[:, 2]).long()
        return logits, weights, torch.stack([torch.zeros_like(second), second], 1)

    for name, module in model.named_modules():
        if name.endswith(("mlp.gate", "block_sparse_moe.gate")):
            module.register_forward_hook(skew)


def train(model: Any, ids: torch.Tensor, steps: int = 3, wrapped: Any = None) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of((wrapped or model)(input_ids=ids), ids)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def on_ranks(kind: str, ep: int, skewed: bool, options: dict[str, Any]) -> Any:
    """(losses, full weights, full gradients) after three steps of dp x ep."""
    mesh = Mesh(Layout(dp=hpnb.world_size(), ep=ep))
    model = build(kind, **options)
    if skewed:
        prefer_one_expert(model)
    expert_parallel.parallelize(model, mesh.ep)
    replica = hpnb.DataParallel(model, mesh.dp_cp, expert_axis=mesh.edp)
    ids = batch()["input_ids"].chunk(mesh.dp.size)[mesh.dp.rank]
    losses = train(model, ids, wrapped=replica)
    weights = full_state_dict(model, [mesh.ep])
    with torch.no_grad():
        for p in model.parameters():
            assert p.grad is not None
            p.data = p.grad
    return losses, weights, full_state_dict(model, [mesh.ep])


def distances(ours: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    assert ours.keys() == wanted.keys()
    typical = sum(float(w.norm()) for w in wanted.values()) / len(wanted)
    return {n: float((ours[n] - w).norm()) / max(float(w.norm()), 1e-3 * typical) for n, w in wanted.items()}


@pytest.mark.parametrize(("ranks", "ep"), [(2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("skewed", [False, True])
def test_steps_equal_one_process(pools: RankPools, kind: str, ranks: int, ep: int, skewed: bool) -> None:
    results = pools[ranks].run(on_ranks, kind, ep, skewed, {})
    model = build(kind)
    if skewed:
        prefer_one_expert(model)
    losses = train(model, batch()["input_ids"])
    mean = [sum(r[0][i] for r in results) / ranks for i in range(3)]
    assert mean == pytest.approx(losses, rel=1e-12)
    gradients = {n: p.grad for n, p in model.named_parameters()}
    for _, weights, grads in results:
        assert max(distances(weights, model.state_dict()).values()) < 1e-12
        found = distances({n: grads[n] for n in gradients}, gradients)
        assert max(found.values()) < 1e-12, found
    assert abs(losses[-1] - losses[0]) > 1e-3

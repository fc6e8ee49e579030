"""Expert parallelism: dispatch, combine, the gradients of experts and whole steps, equal one process's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from plan_models import replace_for_file, use_float64
from rank_pools import RankPools
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter, load_balancing_loss_func

import hpnb
from hpnb import Layout, Mesh, expert_parallel
from hpnb.context_parallel.shard_sequence import token_mask
from hpnb.expert_parallel import ExpertLoads
from hpnb.expert_parallel.parallelize import ExpertParallel
from hpnb.mesh import Axis
from hpnb.placement import full_state_dict
from hpnb.theory import experts as theory

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


def route_in_float64(
    self: Any, hidden_states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mixtral's router without its cast to float32, in which sums over ranks would differ by 1e-8."""
    logits = torch.nn.functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
    top, indices = logits.softmax(-1).topk(self.top_k, -1)
    return logits, top / top.sum(-1, keepdim=True), indices


def build(kind: str, **options: Any) -> Any:
    """A tiny model in float64, whose routers prefer expert 0 and never choose expert 3 of 4."""
    made = getattr(transformers, f"{kind}ForCausalLM")
    use_float64(made)
    replace_for_file(MixtralTopKRouter, "forward", route_in_float64)
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
    wanted = {name: w.detach() for name, w in wanted.items()}
    typical = sum(float(w.norm()) for w in wanted.values()) / len(wanted)
    return {n: float((ours[n] - w).norm()) / max(float(w.norm()), 1e-3 * typical) for n, w in wanted.items()}


@pytest.mark.sampled(4, cover=True)
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


# --- the plugin ------------------------------------------------------------------------------------------


def boosted_steps(kind: str, plugin: dict[str, Any], options: dict[str, Any], folder: str | None) -> Any:
    """(losses, norms, full weights, optimizer state, loads) of three steps, on one process or on ranks."""
    booster = hpnb.Booster(
        plugin=hpnb.HybridParallelPlugin(**{"precision": "fp64", "max_norm": 0.7, **plugin})
    )
    model = build(kind, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    boosted, optimizer, *_ = booster.boost(model, optimizer)
    dp = booster.plugin.mesh.dp
    samples = {name: value.chunk(dp.size)[dp.rank] for name, value in batch().items()}
    losses, norms = [], []
    for _ in range(3):
        optimizer.zero_grad()
        if booster.plugin.pp_size > 1 or plugin.get("num_microbatches"):
            result = booster.execute_pipeline(iter([samples]), boosted, None, optimizer, return_loss=True)
            losses.append(None if result["loss"] is None else float(result["loss"]))
        else:
            loss = boosted(**samples).loss
            booster.backward(loss, optimizer)
            losses.append(loss.item())
        optimizer.step()
        norms.append(float(optimizer.last_step.norm))
    if folder is not None:
        booster.save_model(boosted, folder)
    state = optimizer.state_dict()["state"]
    bias = {n: b for n, b in boosted.module.named_buffers() if n.endswith("correction_bias")}
    return losses, norms, {k: v["momentum_buffer"] for k, v in state.items()}, bias


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep 2": (2, {"ep_size": 2}),
    "dp 2 x ep 2": (4, {"ep_size": 2}),
    "ep 4, ZeRO 1": (4, {"ep_size": 4, "zero_stage": 1}),
    "dp 2 x ep 2, ZeRO 1": (4, {"ep_size": 2, "zero_stage": 1}),
    "dp 2 x ep 2, ZeRO 2": (4, {"ep_size": 2, "zero_stage": 2}),
    "ep 2, ZeRO 3": (2, {"ep_size": 2, "zero_stage": 3}),
    "dp 2 x ep 2, ZeRO 3": (4, {"ep_size": 2, "zero_stage": 3}),
    "dp 2 x ep 2, ZeRO 3 within nodes": (4, {"ep_size": 2, "zero_stage": 3, "zero_replicas": 2}),
    "ep 4, ZeRO 3 within nodes": (4, {"ep_size": 4, "zero_stage": 3, "zero_replicas": 2}),
    "dp 4 x ep 2, ZeRO 3 within nodes": (8, {"ep_size": 2, "zero_stage": 3, "zero_replicas": 2}),
    "dp 2 x ep 2, ZeRO 3, recomputation": (
        4,
        {"ep_size": 2, "zero_stage": 3, "activation_checkpointing": "full"},
    ),
    "cp 2 x dp 2, ep 2, ZeRO 3": (4, {"cp_size": 2, "ep_size": 2, "zero_stage": 3}),
    "tp 2 x ep 2, ZeRO 3": (4, {"tp_size": 2, "ep_size": 2, "zero_stage": 3}),
    "pp 2 x ep 2, ZeRO 3": (4, {"pp_size": 2, "ep_size": 2, "num_microbatches": 2, "zero_stage": 3}),
    "pp 2 x ep 2, dualpipe-v, ZeRO 3": (
        4,
        {"pp_size": 2, "ep_size": 2, "num_microbatches": 4, "pp_style": "dualpipe-v", "zero_stage": 3},
    ),
    "dp 2 x ep 2, recomputation": (4, {"ep_size": 2, "activation_checkpointing": "full"}),
    "pp 2 x ep 2": (4, {"pp_size": 2, "ep_size": 2, "num_microbatches": 2}),
    "cp 2 = ep 2": (2, {"cp_size": 2, "ep_size": 2}),
    "tp 2 x ep 2": (4, {"tp_size": 2, "ep_size": 2}),
    "tp 2 x ep 2, ZeRO 1": (4, {"tp_size": 2, "ep_size": 2, "zero_stage": 1}),
    "tp 2 x cp 2 = ep 2, ZeRO 2": (4, {"tp_size": 2, "cp_size": 2, "ep_size": 2, "zero_stage": 2}),
    "pp 2 x ep 2, zb-h1": (4, {"pp_size": 2, "ep_size": 2, "num_microbatches": 4, "pp_style": "zb-h1"}),
    "pp 2 x ep 2, zb-v, ZeRO 1": (
        4,
        {"pp_size": 2, "ep_size": 2, "num_microbatches": 4, "pp_style": "zb-v", "zero_stage": 1},
    ),
    "pp 2 x ep 2, dualpipe-v": (
        4,
        {"pp_size": 2, "ep_size": 2, "num_microbatches": 4, "pp_style": "dualpipe-v"},
    ),
}


# What each of these tests is also in one of the other layouts.
SIMPLER = (
    "dp 2 x ep 2", "dp 2 x ep 2, ZeRO 1", "ep 2, ZeRO 3", "dp 2 x ep 2, ZeRO 3 within nodes",
    "dp 4 x ep 2, ZeRO 3 within nodes", "tp 2 x ep 2, ZeRO 3", "pp 2 x ep 2, ZeRO 3",
    "dp 2 x ep 2, recomputation", "pp 2 x ep 2", "cp 2 = ep 2", "tp 2 x ep 2, ZeRO 1",
    "pp 2 x ep 2, dualpipe-v",
)  # fmt: skip


# tests/breakages.py names the first three.
ALWAYS = [(layout, "Mixtral") for layout in ("ep 2", "tp 2 x ep 2", "dp 2 x ep 2, ZeRO 3")]
ALWAYS.append(("cp 2 x dp 2, ep 2, ZeRO 3", "Qwen3Moe"))
OTHERS = [(layout, kind) for layout in LAYOUTS for kind in KINDS if (layout, kind) not in ALWAYS]


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        *ALWAYS,
        *(
            pytest.param(*case, marks=pytest.mark.slow if case[0] in SIMPLER else pytest.mark.sampled(3))
            for case in OTHERS
        ),
    ],
)
def test_boosted_steps_and_their_checkpoint_equal_one_process(
    pools: RankPools, kind: str, layout: str, tmp_path: Any
) -> None:
    ranks, plugin = LAYOUTS[layout]
    v_shaped = plugin.get("pp_style") in ("zb-v", "dualpipe-v")  # two stages a rank
    options = {"experts_implementation": "eager", "num_hidden_layers": 4 if v_shaped else 2}
    results = pools[ranks].run(boosted_steps, kind, plugin, options, str(tmp_path / "saved"))
    losses, norms, momenta, _ = pools[1].run(boosted_steps, kind, {}, options, str(tmp_path / "one"))[0]
    for theirs in results:
        assert None in theirs[0] or theirs[0] == pytest.approx(losses, rel=1e-12)  # of other stages
        assert theirs[1] == pytest.approx(norms, rel=1e-12)
        ours = {str(n): t for n, t in theirs[2].items()}
        assert max(distances(ours, {str(n): t for n, t in momenta.items()}).values()) < 1e-12
    kind_of = getattr(transformers, f"{kind}ForCausalLM")
    loaded, info = kind_of.from_pretrained(tmp_path / "saved", output_loading_info=True, dtype=torch.float64)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    wanted = kind_of.from_pretrained(tmp_path / "one", dtype=torch.float64)
    assert max(distances(dict(loaded.named_parameters()), dict(wanted.named_parameters())).values()) < 1e-12


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "plugin", [{}, {"ep_size": 2}, {"tp_size": 2}, {"cp_size": 2}, {"cp_size": 2, "ep_size": 2}], ids=str
)
def test_the_balancing_loss_is_that_of_all_tokens(pools: RankPools, plugin: dict[str, Any]) -> None:
    options = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    ((losses, norms, momenta, _),) = pools[1].run(boosted_steps, "Mixtral", {}, options, None)
    for theirs in pools[2].run(boosted_steps, "Mixtral", plugin, options, None):
        assert theirs[0] == pytest.approx(losses, rel=1e-12)
        assert theirs[1] == pytest.approx(norms, rel=1e-12)
        ours = {str(n): t for n, t in theirs[2].items()}
        assert max(distances(ours, {str(n): t for n, t in momenta.items()}).values()) < 1e-12
    without = pools[1].run(boosted_steps, "Mixtral", {}, {}, None)[0]
    assert losses[0] > without[0][0] + 0.4


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "plugin",
    [{"ep_size": 2}, {"ep_size": 2, "tp_size": 2}, {"ep_size": 2, "pp_size": 2, "num_microbatches": 2}],
    ids=str,
)
def test_a_selection_bias_moves_alike_on_all_ranks(pools: RankPools, plugin: dict[str, Any]) -> None:
    rate, layers = {"selection_bias_rate": 0.01}, {"num_hidden_layers": 3}  # two of them with experts
    ((*_, wanted),) = pools[1].run(boosted_steps, "DeepseekV3", rate, layers, None)
    names = set()
    for *_, bias in pools[4].run(boosted_steps, "DeepseekV3", {**rate, **plugin}, layers, None):
        assert all(torch.equal(bias[n], wanted[n]) for n in bias)
        names |= set(bias)
    assert names == wanted.keys()
    assert len(names) == 2
    assert max(float(b.abs().max()) for b in wanted.values()) > 0.009


def test_a_selection_bias_stays_in_float32_where_weights_have_16_bits(pools: RankPools) -> None:
    plugin = {"selection_bias_rate": 0.001, "precision": "bf16"}
    ((*_, biases),) = pools[1].run(boosted_steps, "DeepseekV3", plugin, {}, None)
    for bias in biases.values():
        assert bias.dtype == torch.float32
        moved = float(bias.abs().max())  # three steps, up or down as the loads are, none of them rounded
        assert any(moved == pytest.approx(0.001 * steps, rel=1e-6) for steps in (1, 3))


def balance_of_one() -> tuple[float, float]:
    """(ours, transformers' own in float32) over the tokens of one process, some of them padding."""
    torch.manual_seed(2)
    logits = tuple(torch.randn(24, 4, dtype=torch.float64) for _ in range(2))
    mask = torch.ones(4, 6).tril(3)
    ours = expert_parallel.balancing_loss(logits, 2, Mesh(Layout()).dp, mask)
    return float(ours), float(load_balancing_loss_func(logits, 4, 2, mask))


def test_the_balancing_loss_is_that_of_transformers(pools: RankPools) -> None:
    ((ours, theirs),) = pools[1].run(balance_of_one)
    assert ours == pytest.approx(theirs, rel=1e-6)


def routed_loads(rate: float) -> Any:
    """(imbalance of each step, tokens of each step and layer) under the Booster with ep 2."""
    options = {"selection_bias_rate": rate} if rate else {}
    booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(precision="fp64", ep_size=2, **options))
    model = build("DeepseekV3")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    boosted, optimizer, *_ = booster.boost(model, optimizer)
    dp = booster.plugin.mesh.dp
    samples = {name: value.chunk(dp.size)[dp.rank] for name, value in batch().items()}
    loads = boosted.selection_bias.loads if rate else ExpertLoads(boosted.experts, dp)
    for _ in range(12):
        optimizer.zero_grad()
        booster.backward(boosted(**samples).loss, optimizer)
        optimizer.step()
        if not rate:
            loads.end_step()
    return loads.imbalances, [{n: t.tolist() for n, t in step.items()} for step in loads.steps]


def test_loads_are_recorded_and_a_bias_makes_them_equal(pools: RankPools) -> None:
    (free, steps), other = pools[2].run(routed_loads, 0.0)
    assert (free, steps) == other  # all ranks read the same
    assert len(free) == 12
    for by_layer in steps:
        assert [sum(tokens) for tokens in by_layer.values()] == [8 * 6 * 2]  # one layer of experts, k = 2
    biased, _ = pools[2].run(routed_loads, 0.001)[0]
    assert biased[0] == free[0]
    assert max(biased[6:]) < min(free[6:])
    figure = hpnb.plot.expert_loads({"no bias": free, "selection bias": biased})
    drawn = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].lines}
    assert drawn["imbalance selection bias"] == biased
    with pytest.raises(ValueError, match="cannot be"):
        hpnb.plot.expert_loads({"wrong": [0.5]})


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_local_experts_compute_as_the_model_does(pools: RankPools, implementation: str) -> None:
    options = {"experts_implementation": implementation}
    precision = {"precision": "fp32"}  # torch groups no products in float64
    losses, norms, *_ = pools[1].run(boosted_steps, "Mixtral", precision, options, None)[0]
    for theirs in pools[2].run(boosted_steps, "Mixtral", {"ep_size": 2, **precision}, options, None):
        assert theirs[0] == pytest.approx(losses, rel=1e-5)
        assert theirs[1] == pytest.approx(norms, rel=1e-5)


# --- bytes and refusals ----------------------------------------------------------------------------------


class WaitsForTheGpu(TorchDispatchMode):
    """Notes operators whose output's shape or value the CPU needs: on a GPU it waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dynamic_shape = (
            torch.Tag.dynamic_output_shape in func.tags and (kwargs or {}).get("output_size") is None
        )
        if func is torch.ops.aten.index.Tensor:  # only a mask selects a number of elements that is not known
            dynamic_shape = any(i is not None and i.dtype == torch.bool for i in args[1])
        if dynamic_shape or torch.Tag.data_dependent_output in func.tags:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_plan_counts_rows_and_waits_for_the_gpu_once() -> None:
    axis = Axis("ep", 1, 0, None, (0,))
    chosen = torch.tensor([[2, 0], [2, 1]])
    with WaitsForTheGpu() as waits:
        plan = expert_parallel.plan_dispatch(chosen, 4, axis)
    assert waits.names == []  # what is left is one .tolist() of the sizes
    assert plan.order.tolist() == [1, 3, 0, 2]
    assert plan.tokens_per_expert.tolist() == [1, 1, 2, 0]
    assert (plan.sent, plan.received, plan.experts.tolist()) == ((4,), (4,), [0, 1, 2, 2])
    nobody = expert_parallel.plan_dispatch(chosen[:0], 4, axis)
    assert (nobody.tokens_per_expert.tolist(), nobody.sent, len(nobody.experts)) == ([0] * 4, (0,), 0)


def test_tokens_that_context_parallelism_adds_are_left_out_of_counts_without_a_wait() -> None:
    axis = Axis("ep", 1, 0, None, (0,))
    module = torch.nn.Identity()  # an expert that gives back what it gets
    module.num_experts, module.config = 4, transformers.MixtralConfig()  # type: ignore[assignment]
    experts = ExpertParallel(axis, {"experts": module})
    chosen = torch.tensor([[2, 0], [2, 1], [3, 1], [0, 1], [1, 0], [3, 2]])  # 2 sequences of 3 tokens
    hidden, weights = torch.randn(6, 8), torch.full((6, 2), 0.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "_compute_local", lambda module, rows, experts: rows)
        for in_batch in (None, torch.tensor([True, True, False])):
            experts.in_batch = lambda mask=in_batch: mask  # type: ignore[misc]
            with WaitsForTheGpu() as waits:
                combined = experts.compute(module, hidden, chosen, weights)
            assert waits.names == []
            assert torch.allclose(combined, hidden)
    (counts,) = experts.clear_tokens().values()
    assert counts.tolist() == [3 + 3, 4 + 3, 3 + 2, 2 + 0]


@pytest.mark.parametrize(("length", "added"), [(8, [0, 0]), (6, [2, 0]), (5, [2, 1]), (1, [1, 2])])
def test_context_parallelism_says_which_tokens_it_added_and_nothing_where_there_are_none(
    length: int, added: list[int]
) -> None:
    batch = {"input_ids": torch.zeros(2, length, dtype=torch.int64)}
    for rank in (0, 1):
        with WaitsForTheGpu() as waits:
            in_batch, no_padding = token_mask(batch, rank, 2, zigzag=True)
        assert waits.names == []
        assert (0 if in_batch is None else int((~in_batch).sum())) == added[rank]
        assert (in_batch is None) == (added[rank] == 0)
        assert int((no_padding == 0).sum()) == 2 * added[rank]


@pytest.mark.parametrize("wrong", [-1, 4])
def test_an_expert_that_does_not_exist_is_refused(wrong: int) -> None:
    with pytest.raises(ValueError, match=f"a router chose expert {wrong} of 4; use numbers from 0 to 3"):
        expert_parallel.plan_dispatch(torch.tensor([[0, wrong], [1, 2]]), 4, Axis("ep", 1, 0, None, (0,)))


def bytes_of_a_layer() -> tuple[float, float]:
    """(bytes that left this rank along ep, what the formula says for the rows that it sent and received)."""
    axis = Mesh(Layout(dp=hpnb.world_size(), ep=hpnb.world_size())).ep
    torch.manual_seed(axis.rank)
    chosen = torch.rand(12, 4).pow(3).topk(2).indices
    plan = expert_parallel.plan_dispatch(chosen, 4, axis)
    x = torch.randn(12, 8, dtype=torch.float64, requires_grad=True)
    with hpnb.record.traffic() as seen:
        rows = expert_parallel.dispatch_rows(x, plan, axis)
        expert_parallel.combine_rows(2 * rows, torch.rand(12, 2), plan, axis).sum().backward()
    there, back = (sum(n for r, n in enumerate(s) if r != axis.rank) for s in (plan.sent, plan.received))
    return seen.bytes["ep"], theory.rows_sent(there, back, 8, 8)


def test_bytes_equal_the_formula_at_any_imbalance(pools: RankPools) -> None:
    for counted, predicted in pools[4].run(bytes_of_a_layer):
        assert counted == predicted > 0
    assert theory.rows_sent(12, 12, 8, 8) == theory.experts_sent(12, 8, 2, 2, 8)  # half of 24 rows


def refused(kind: str, plugin: dict[str, Any], options: dict[str, Any]) -> str:
    try:
        boosted_steps(kind, plugin, options, None)
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def test_what_cannot_be_is_refused_in_a_sentence(pools: RankPools) -> None:
    with pytest.raises(ValueError, match=r"ep=3 takes its ranks from dp=4 x cp=1.* use ep=1 or 2 or 4"):
        Layout(dp=4, ep=3)
    six = {"num_local_experts": 3}
    assert "3 experts, which 2 ranks" in pools[2].run(refused, "Mixtral", {"ep_size": 2}, six)[0]
    assert "ep_size=3" in pools[2].run(refused, "Mixtral", {"ep_size": 3}, {})[0]
    assert "no selection bias" in pools[1].run(refused, "Mixtral", {"selection_bias_rate": 0.1}, {})[0]

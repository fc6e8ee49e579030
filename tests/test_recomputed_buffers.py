"""Blocks that change their buffers in each forward, recomputed: every microbatch changes them once.

pytest tests/test_recomputed_buffers.py
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from changing_buffers import Block, Net, parts
from hybrid_cases import distance, weights
from rank_pools import RankPools
from torch import nn

import hpnb
from hpnb.hybrid.recompute import enable_recomputation
from hpnb.hybrid.recomputed_buffers import BufferSnapshots
from hpnb.models import register, registry

D = torch.float64
STEPS = 3


def make(in_data: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(in_data).to(D)


def batches(ranks: int = 1) -> list[list[dict[str, torch.Tensor]]]:
    """The batches of every step, one for each rank."""
    g = torch.Generator().manual_seed(1)
    return [
        [
            {"x": torch.randn(8, 3, generator=g, dtype=D), "y": torch.randn(8, 2, generator=g, dtype=D)}
            for _ in range(ranks)
        ]
        for _ in range(STEPS)
    ]


def squares(outputs: torch.Tensor, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, int]:
    return (outputs - inputs["y"]).square().sum(), len(outputs)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


State = dict[str, torch.Tensor]


def serial(in_data: bool, ranks: int, microbatches: int) -> State:
    """Parameters and buffers after the steps of one process without recomputation: it runs the ranks' samples
    one after the other, all from the same buffers, and keeps those of rank 0."""
    net = make(in_data)
    optimizer = sgd(net)
    for batch in batches(ranks):
        optimizer.zero_grad()
        before = copy.deepcopy([module._buffers for module in net.modules()])
        kept: list[Any] = []
        for of_rank in batch:
            for module, table in zip(net.modules(), copy.deepcopy(before), strict=True):
                module._buffers.update(table)
            for x, y in zip(of_rank["x"].chunk(microbatches), of_rank["y"].chunk(microbatches), strict=True):
                ((net(x) - y).square().sum() / 8 / ranks).backward()
            kept = kept or [dict(module._buffers) for module in net.modules()]
        for module, table in zip(net.modules(), kept, strict=True):
            module._buffers.update(table)
        optimizer.step()
    return {name: t.detach() for name, t in net.state_dict().items()}


def boosted(in_data: bool, options: dict[str, Any]) -> tuple[State, list[int]]:
    """This rank's parameters and buffers, and how often each of its blocks ran."""
    register(Net, parts)
    plugin = hpnb.HybridParallelPlugin(precision="fp64", activation_checkpointing="full", **options)
    booster, net = hpnb.Booster(plugin=plugin), make(in_data)
    model, optimizer, *_ = booster.boost(net, sgd(net), squares)
    axis = plugin.mesh.dp
    for batch in batches(axis.size):
        booster.execute_pipeline(iter([batch[axis.rank]]), model, squares, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model), [block.calls for block in model.module.modules() if isinstance(block, Block)]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "REGISTERED", dict(registry.REGISTERED))


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


LAYOUTS: list[tuple[int, dict[str, Any]]] = [  # replicas, options
    (2, {}),
    (2, {"zero_stage": 1}),
    (2, {"zero_stage": 2}),
    (2, {"zero_stage": 3}),
    (1, {"pp_size": 2, "num_microbatches": 4}),
    (1, {"pp_size": 2, "num_microbatches": 4, "pp_style": "zb-h1"}),
    (1, {"pp_size": 2, "num_microbatches": 2, "pp_style": "zb-v", "num_model_chunks": 2}),
    (1, {"pp_size": 2, "num_microbatches": 4, "pp_style": "dualpipe-v", "num_model_chunks": 2}),
    (2, {"pp_size": 2, "num_microbatches": 4, "zero_stage": 1}),
    (2, {"pp_size": 2, "num_microbatches": 4, "zero_stage": 3}),
]


@pytest.mark.parametrize("in_data", [False, True], ids=["in place", "in .data"])
@pytest.mark.parametrize(("replicas", "options"), LAYOUTS, ids=str)
def test_each_microbatch_changes_buffers_once(
    pools: RankPools, replicas: int, options: dict[str, Any], in_data: bool
) -> None:
    stages, microbatches = options.get("pp_size", 1), options.get("num_microbatches", 1)
    wanted, parameters = serial(in_data, replicas, microbatches), dict(make().named_parameters())
    results = pools[replicas * stages].run(boosted, in_data, options)
    for rank, (state, calls) in enumerate(results):
        if rank >= stages:  # a replica has buffers of its samples until the next forward
            state |= {name: t for name, t in wanted.items() if name not in parameters}
        assert distance(state, wanted) < 1e-12
        assert set(calls) <= {2 * STEPS * microbatches, 3 * STEPS * microbatches}  # it was recomputed


def test_a_copy_of_a_recomputed_model_has_snapshots_of_its_buffers() -> None:
    def weights_after(net: nn.Module) -> State:
        optimizer = sgd(net)
        for (batch,) in batches():
            optimizer.zero_grad()
            squares(net(batch["x"]), batch)[0].backward()
            optimizer.step()
        return {name: t.clone() for name, t in net.state_dict().items()}

    net, recomputed = make(), make()
    enable_recomputation(recomputed, "full", recomputed.blocks)
    assert distance(weights_after(recomputed), weights_after(net)) == 0
    copied = copy.deepcopy(recomputed)
    assert distance(weights_after(copied), weights_after(copy.deepcopy(net))) == 0
    assert distance(weights_after(recomputed), weights_after(net)) == 0


def test_blocks_of_transformers_change_their_buffers_once() -> None:
    """ "full" calls the checkpoint of transformers there, and "attention" one inside of a block."""
    ids = torch.randint(20, (2, 5), generator=torch.Generator().manual_seed(2))

    def train(what: Any) -> State:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=20,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            attn_implementation="remembers",
        )
        model = transformers.LlamaForCausalLM(config).double().train()
        for layer in model.model.layers:
            layer.self_attn.register_buffer("mean", torch.ones((), dtype=D))
        if what:
            enable_recomputation(model, what)
        optimizer = sgd(model)
        for _ in range(STEPS):
            optimizer.zero_grad()
            logits = model(input_ids=ids, use_cache=False).logits
            F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimizer.step()
        return {name: t.clone() for name, t in model.state_dict().items()}

    calls: list[nn.Module] = []

    def remembers(module: Any, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> Any:
        calls.append(module)
        scale = module.mean.clone()
        module.mean.mul_(0.9).add_(0.1 * k.detach().abs().mean())
        return transformers.AttentionInterface()["sdpa"](module, q, k * scale, v, mask, **kwargs)

    transformers.AttentionInterface.register("remembers", remembers)
    wanted = train(False)
    num_calls = len(calls)
    assert num_calls == 2 * STEPS
    for what in ("full", "attention"):
        calls.clear()
        assert distance(train(what), wanted) == 0
        assert len(calls) == 2 * num_calls


def test_buffers_that_do_not_change_are_copied_once() -> None:
    block = nn.Linear(3, 3)
    block.register_buffer("table", torch.ones(3))
    snapshots = BufferSnapshots(block)
    for _ in range(3):
        forward, recomputation = snapshots.contexts()
        with forward:
            pass
        with recomputation:
            assert block.get_buffer("table") is block._buffers["table"]
    first = snapshots._last[block, "table"]
    with snapshots.contexts()[0]:
        block.get_buffer("table").add_(1)
    assert snapshots._last[block, "table"] is first
    snapshots.contexts()
    assert torch.equal(snapshots._last[block, "table"].value, torch.full((3,), 2.0))

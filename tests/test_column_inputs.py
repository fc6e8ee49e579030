"""Column-parallel linears of one submodule may read several tensors: gradients equal those of one process.

pytest tests/test_column_inputs.py
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rank_pools import RankPools
from torch import nn
from torch.utils.checkpoint import checkpoint

import hpnb
from hpnb import Layout, Mesh, record
from hpnb.models import Anatomy, Part, Role, register, registry
from hpnb.models.role import linear, norm
from hpnb.tensor_parallel import compare_gradients, full_gradients, parallelize

D = torch.float64
HIDDEN, HEAD = 32, 4


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "REGISTERED", dict(registry.REGISTERED))


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


class Attention(nn.Module):
    """q of x, k and v of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.k = nn.Linear(HIDDEN, HIDDEN, bias=False)  # whose gradient would be 0

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            f(z).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for f, z in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        y = F.scaled_dot_product_attention(q, k, v)
        return self.o(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Glu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(*sizes) for sizes in ((HIDDEN, 64), (HIDDEN, 64), (64, HIDDEN))
        )
        self.recomputes = self.adds_input = False

    def forward(self, a: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        b = a if b is None else b
        y = checkpoint(self.gated, a, b, use_reentrant=False) if self.recomputes else self.gated(a, b)
        return a + self.down(y) if self.adds_input else self.down(y)  # type: ignore[no-any-return]

    def gated(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.silu(self.gate(a)) * self.up(b)  # type: ignore[no-any-return]


class Block(nn.Module):
    """x + what one of `CALLS` makes of two norms of x, an attention and a gated MLP."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self.call = call
        self.norm, self.other_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention, self.mlp = Attention(), Glu()
        self.mlp.recomputes, self.mlp.adds_input = call == "recomputed inside", call == "input added inside"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (CALLS | REFUSED)[self.call](self, self.norm(x), self.other_norm(x))


def children(block: Block, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    mlp = block.mlp
    return mlp.down(mlp.gated(a, b)) + block.attention(b, a)  # type: ignore[no-any-return]


def same_column_twice(block: Block, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    mlp = block.mlp
    y = mlp.gate(a) * mlp.gate(b) + mlp.up(b)
    return mlp.down(y) + block.attention(a, b)  # type: ignore[no-any-return]


Call = Callable[[Block, torch.Tensor, torch.Tensor], torch.Tensor]
CALLS: dict[str, Call] = {
    "one tensor": lambda block, a, b: block.attention(a, a) + block.mlp(b),
    "cross attention": lambda block, a, b: block.attention(a, b) + block.mlp(a),
    "by name": lambda block, a, b: block.mlp(b, b=a) + block.attention(memory=a, x=b),
    "a copy": lambda block, a, b: block.attention(a, a.clone()) + block.mlp(b, b.clone()),
    "children": lambda block, a, b: children(block, a, a) + b,
    "children, two tensors": children,
    "same column twice": same_column_twice,
    "twice": lambda block, a, b: block.mlp(block.mlp(a, b), a) + block.attention(b, a),
    "input added inside": lambda block, a, b: block.mlp(a) + block.attention(a, b),
    "recomputed inside": lambda block, a, b: block.mlp(a, b) + block.attention(a, a),
}


class Net(nn.Module):
    def __init__(self, call: str, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(6, HIDDEN)
        self.layers = nn.ModuleList(Block(call) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 5)
        self.recompute: Any = None  # use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x) if self.recompute is None else checkpoint(layer, x, use_reentrant=self.recompute)
        return self.head(self.norm(x).mean(1))  # type: ignore[no-any-return]


class Parts(Anatomy):
    def embed(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        return self.embedding[0].module(inputs["x"])  # type: ignore[no-any-return]

    def run(self, block: Part, hidden: torch.Tensor, inputs: Mapping[str, Any]) -> torch.Tensor:
        return block.module(hidden)  # type: ignore[no-any-return]

    def finish(self, hidden: torch.Tensor, inputs: Mapping[str, Any]) -> torch.Tensor:
        norm, head = (part.module for part in self.head)
        return head(norm(hidden).mean(1))  # type: ignore[no-any-return]

    def tokens(self, inputs: Mapping[str, Any]) -> tuple[int, int]:
        return inputs["x"].shape[:2]  # type: ignore[no-any-return]


def parts(net: Net) -> Parts:
    blocks = tuple(Part(f"layers.{i}", layer) for i, layer in enumerate(net.layers))
    return Parts((Part("embed", net.embed),), blocks, (Part("norm", net.norm), Part("head", net.head)))


def roles(net: Net) -> dict[str, Role]:
    table = [*linear("embed", "embedding"), *norm("norm"), *linear("head", "head")]
    for name in (f"layers.{i}" for i in range(len(net.layers))):
        table += [*norm(f"{name}.norm"), *norm(f"{name}.other_norm")]
        for projection in "qkv":
            table += linear(f"{name}.attention.{projection}", "column", HIDDEN // HEAD)
        table += linear(f"{name}.attention.o", "row", HIDDEN // HEAD)
        table += [*linear(f"{name}.mlp.gate", "column", 64), *linear(f"{name}.mlp.up", "column", 64)]
        table += linear(f"{name}.mlp.down", "row", 64)
    return {role: kind for role, kind in table if not role.endswith("k.bias")}


def build(call: str, layers: int = 2) -> Net:
    register(Net, parts, roles)
    torch.set_num_threads(1)
    torch.manual_seed(3)
    net = Net(call, layers).to(D)
    for p in net.parameters():  # norms and biases away from 1 and 0, or a mistake with them would not show
        p.data += 0.2 * torch.randn_like(p) * (p.dim() == 1)
    return net


def batch(samples: int = 8, length: int = 5) -> torch.Tensor:
    return torch.randn(samples, length, 6, generator=torch.Generator().manual_seed(4), dtype=D)


def loss(outputs: torch.Tensor, _: Any = None) -> torch.Tensor:
    return (outputs - 0.3).square().mean()


def largest_distance(ours: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    assert ours.keys() == wanted.keys()
    return max(float((ours[name] - g).norm() / g.norm()) for name, g in wanted.items())


def gradients(net: nn.Module, x: torch.Tensor, times: int = 2) -> None:
    """Two backwards, so that what a forward leaves behind would show in the next one."""
    for _ in range(times):
        loss(net(x)).backward()


def parity(call: str, sequence: bool, samples: int = 8, mode: str = "1d", **options: Any) -> float:
    plain = build(call)
    axis = Mesh(Layout(tp=hpnb.world_size())).tp
    depth = options.pop("depth", 1)
    sharded: Any = parallelize(copy.deepcopy(plain), axis, mode, sequence, depth)
    sharded.recompute = options.get("reentrant")
    gradients(plain, batch(samples))
    gradients(sharded, batch(samples))
    with torch.no_grad():
        assert torch.allclose(sharded(batch(samples)), plain(batch(samples)), rtol=1e-12)
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    return largest_distance(full_gradients(sharded), wanted)


EXACT_ON_SEQUENCES = [call for call in CALLS if call != "input added inside"]


@pytest.mark.parametrize("tp", [2, pytest.param(3, marks=pytest.mark.sampled(1))])
@pytest.mark.parametrize("call", CALLS)
def test_equal_to_one_process(pools: RankPools, call: str, tp: int) -> None:
    assert max(pools[tp].run(parity, call, False)) < 1e-12


@pytest.mark.sampled(4)
@pytest.mark.parametrize("samples", [2, 3])  # as many samples as ranks; tokens that do not divide
@pytest.mark.parametrize("call", EXACT_ON_SEQUENCES)
def test_equal_with_sequence_parallelism(pools: RankPools, call: str, samples: int) -> None:
    assert max(pools[2].run(parity, call, True, samples)) < 1e-12


@pytest.mark.sampled(4, cover=True)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("call", ["cross attention", "by name", "children, two tensors", "recomputed inside"])
def test_equal_with_recomputation(pools: RankPools, call: str, sequence: bool, reentrant: bool) -> None:
    assert max(pools[2].run(parity, call, sequence, reentrant=reentrant)) < 1e-12


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("mode", "ranks", "options"), [("2d", 4, {}), ("2.5d", 8, {"depth": 2}), ("3d", 8, {})]
)
@pytest.mark.parametrize("call", ["cross attention", "children, two tensors", "same column twice", "twice"])
def test_equal_on_a_grid(pools: RankPools, call: str, mode: str, ranks: int, options: dict[str, int]) -> None:
    assert max(pools[ranks].run(parity, call, False, mode=mode, **options)) < 1e-12


# --- in a pipeline ---------------------------------------------------------------------------------------


def weights_after_two_steps(call: str, sequence: bool, **options: Any) -> dict[str, torch.Tensor]:
    plugin = hpnb.HybridParallelPlugin(
        precision="fp64", pp_size=2, tp_size=2, num_microbatches=3, enable_sequence_parallelism=sequence,
        **options,
    )  # fmt: skip
    booster, net = hpnb.Booster(plugin=plugin), build(call, layers=4)
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9))
    for _ in range(2):
        optimizer.zero_grad()
        booster.execute_pipeline(iter([{"x": batch()}]), model, loss, optimizer)
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("sequence", "options"),
    [
        (False, {}),
        (True, {"pp_style": "zb-h1"}),
        (False, {"pp_style": "zb-v", "num_model_chunks": 2, "activation_checkpointing": "full"}),
    ],
)
@pytest.mark.parametrize("call", ["cross attention", "children, two tensors"])
def test_equal_in_a_pipeline(pools: RankPools, call: str, sequence: bool, options: dict[str, Any]) -> None:
    """Norms and biases of rows are replicated, so they can be compared as each rank has them."""
    net = build(call, layers=4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        loss(net(batch())).backward()
        optimizer.step()
    wanted, seen = dict(net.named_parameters()), set()
    for of_rank in pools[4].run(weights_after_two_steps, call, sequence, **options):
        for name, weight in of_rank.items():
            if weight.shape == wanted[name].shape:
                seen.add(name)
                assert float((weight - wanted[name]).norm() / wanted[name].norm()) < 1e-12, name
    assert {name for name in wanted if "norm" in name or name.startswith("embed")} <= seen


# --- what is sent ----------------------------------------------------------------------------------------


def messages(call: str, sequence: bool) -> list[str]:
    net: Any = parallelize(build(call), Mesh(Layout(tp=2)).tp, "1d", sequence)
    with record.traffic() as t:
        gradients(net, batch(), times=1)
    return [message.op for message in t.messages if message.bytes > 1000]


@pytest.mark.parametrize(("call", "sums"), [("one tensor", 2), ("cross attention", 3), ("a copy", 4)])
def test_a_tensor_is_summed_once_for_all_linears_that_read_it(pools: RankPools, call: str, sums: int) -> None:
    """In each of two blocks the outputs of two rows, and the gradients of each input of columns."""
    assert pools[2].run(messages, call, False)[0] == ["all_reduce"] * 2 * (2 + sums)
    sent = pools[2].run(messages, call, True)[0]
    assert sent.count("all_gather") == 2 * (2 + sums) + 2  # and at the ends of the model
    assert sent.count("reduce_scatter") == 2 * (2 + sums)


# --- what is refused -------------------------------------------------------------------------------------


def gated_for_each_token(block: Block, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return block.mlp.down(block.mlp.up(a) * b.mean(-1, keepdim=True))  # type: ignore[no-any-return]


REFUSED: dict[str, Call] = {
    "gated for each token": gated_for_each_token,
    "all tokens to a child": lambda block, a, b: block.mlp.down(block.mlp.up(a.flatten(0, 1))),
    "a gate beside the tokens": lambda block, a, b: block.mlp(a, b.mean((0, 1))),
}


def refused(call: str, sequence: bool, samples: int) -> None:
    gradients(parallelize(build(call), Mesh(Layout(tp=2)).tp, "1d", sequence), batch(samples))


@pytest.mark.parametrize(
    ("call", "sequence", "samples", "words"),
    [
        ("gated for each token", False, 8, r"hidden states that layers\.1 gets differs .*partial_outputs"),
        ("all tokens to a child", True, 8, r"a column-parallel layer of layers\.0\.mlp gets .*\(1, 20, in\)"),
        (
            "a gate beside the tokens",
            True,
            8,
            r"layers\.0\.mlp gets a tensor of shape \(32,\) that needs a grad",
        ),
        ("input added inside", True, 2, r"layers\.0\.mlp returns \(2, 5, 32\), the tokens of all ranks"),
    ],
)
def test_what_would_train_wrongly_is_refused(
    pools: RankPools, call: str, sequence: bool, samples: int, words: str
) -> None:
    with pytest.raises(hpnb.RankError, match=words):
        pools[2].run(refused, call, sequence, samples)


def compare_block(other_inputs: bool) -> None:
    axis, rank = Mesh(Layout(tp=2)).tp, hpnb.rank()
    block = nn.Linear(3, 3)
    compare_gradients.compare_first_gradient("block 1", block, axis)
    x = torch.ones(2, 3).mul_(1 + rank * other_inputs).requires_grad_()
    block(x).sum().mul(1 + rank).backward()


@pytest.mark.parametrize(
    ("other_inputs", "words"),
    [
        (False, "the gradient of the hidden states that block 1 gets differs between"),
        (True, "the hidden states that block 1 gets differ between.* vocabulary=False"),
    ],
)
def test_a_difference_in_front_of_a_block_is_not_blamed_on_it(
    pools: RankPools, other_inputs: bool, words: str
) -> None:
    with pytest.raises(hpnb.RankError, match=words):
        pools[2].run(compare_block, other_inputs)


def test_blocks_that_get_no_gradient_are_not_compared() -> None:
    axis = SimpleNamespace(size=2, name="tp", group=None)  # whoever compared would need a group
    compare_gradients._compare(None, "block 0", axis)  # type: ignore[arg-type]


def test_a_copy_of_a_block_is_compared_once_too() -> None:
    axis = SimpleNamespace(size=2, name="tp", group=None)
    block = nn.Linear(3, 3)
    compare_gradients.compare_first_gradient("block 0", block, axis)  # type: ignore[arg-type]
    copied = copy.deepcopy(block)
    copied(torch.ones(2, 3, requires_grad=True))
    assert (len(block._forward_pre_hooks), len(copied._forward_pre_hooks)) == (1, 0)

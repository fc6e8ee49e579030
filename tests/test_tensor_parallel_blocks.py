"""Blocks that people write: in each one tensor parallelism computes what one process does, or says why not.

pytest tests/test_tensor_parallel_blocks.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rank_pools import RankPools
from torch import nn

import hpnb
from hpnb.hybrid.recompute import enable_recomputation
from hpnb.models import Anatomy, Part, Role, registry
from hpnb.models.in_place_cross_entropy import loss_and_gradient
from hpnb.models.role import linear, norm
from hpnb.tensor_parallel import full_gradients
from hpnb.tensor_parallel.block_dropout import has_dropout, may_draw
from hpnb.tensor_parallel.module_hooks import change_input
from hpnb.tensor_parallel.vocab_cross_entropy import vocab_shard

D = torch.float64
HEADS, WIDTH = 4, 4
HIDDEN = HEADS * WIDTH
RANKS = {"1d": 2, "2d": 4, "3d": 8}

Roles = Callable[[str], list[tuple[str, Role]]]


class Net(nn.Module):
    def __init__(self, block: nn.Module, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.inp, self.norm, self.out = nn.Linear(8, hidden), nn.LayerNorm(hidden), nn.Linear(hidden, 3)
        self.blocks = nn.ModuleList([block])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = run_block(block, x)
        return self.out(self.norm(x))  # type: ignore[no-any-return]


def run_block(block: Any, x: torch.Tensor) -> torch.Tensor:
    """A block with `arguments` gets them by name, in their order."""
    return block(**block.arguments(x)) if hasattr(block, "arguments") else block(x)  # type: ignore[no-any-return]


class Parts(Anatomy):
    def embed(self, inputs: Any) -> torch.Tensor:
        return self.embedding[0].module(inputs["x"])  # type: ignore[no-any-return]

    def run(self, block: Part, hidden: torch.Tensor, inputs: Any) -> torch.Tensor:
        return run_block(block.module, hidden)

    def finish(self, hidden: torch.Tensor, inputs: Any) -> torch.Tensor:
        return self.head[1].module(self.head[0].module(hidden))  # type: ignore[no-any-return]


def parts(net: Net) -> Parts:
    blocks = tuple(Part(f"blocks.{i}", block) for i, block in enumerate(net.blocks))
    return Parts((Part("inp", net.inp),), blocks, (Part("norm", net.norm), Part("out", net.out)))


def build(block: type[nn.Module], *args: Any, hidden: int = HIDDEN) -> Net:
    def roles(net: Net) -> dict[str, Role]:
        ends = [*linear("inp", "embedding"), *norm("norm"), *linear("out", "head")]
        return dict([*ends, *net.blocks[0].roles("blocks.0.")])  # type: ignore[operator]

    hpnb.models.register(Net, parts, roles)
    torch.manual_seed(5)
    return Net(block(*args), hidden).to(D)


def shard(net: Net, mode: str = "1d", **options: Any) -> Net:
    axis = hpnb.Mesh(hpnb.Layout(tp=hpnb.world_size())).tp
    return hpnb.tensor_parallel.parallelize(net, axis, mode=mode, **options)  # type: ignore[return-value]


def inputs(samples: int = 8) -> torch.Tensor:
    return torch.randn(samples, 6, 8, generator=torch.Generator().manual_seed(6), dtype=D)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "REGISTERED", dict(registry.REGISTERED))


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any = None, drop: float = 0.0) -> Any:
    q, k, v = (t.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for t in (q, k, v))
    scores = q @ k.mT / 2
    weights = (scores if mask is None else scores + mask).softmax(-1)
    return (F.dropout(weights, drop) @ v).transpose(1, 2).flatten(2)


def of_columns(prefix: str, names: str, **options: Any) -> Iterator[tuple[str, Role]]:
    for name in names.split():
        yield from linear(prefix + name, "column", HEADS, **options)


# --- sequence parallelism ---


class Experts(nn.Module):
    """Matrices without a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(16, 64) / 4), nn.Parameter(torch.randn(64, 16) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x @ self.up) @ self.down  # type: ignore[no-any-return]


class ExpertsBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.experts = nn.LayerNorm(16), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.experts(self.norm(x))  # type: ignore[no-any-return]

    def roles(self, prefix: str) -> list[tuple[str, Role]]:
        up, down = Role("column", 1, 0, units=64), Role("row", 1, 0, units=64)
        return [*norm(f"{prefix}norm"), (f"{prefix}experts.up", up), (f"{prefix}experts.down", down)]


class MLP(nn.Module):
    """With a norm that its forward leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.unused = nn.LayerNorm(16), nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]

    def roles(self, prefix: str) -> list[tuple[str, Role]]:
        linears = [*linear(f"{prefix}up", "column", 64), *linear(f"{prefix}down", "row", 64)]
        return [*norm(f"{prefix}norm"), *norm(f"{prefix}unused"), *linears]


class PartialOutputs(MLP):
    def roles(self, prefix: str) -> list[tuple[str, Role]]:
        table = dict(super().roles(prefix))
        return list((table | {f"{prefix}norm.weight": Role("norm", 0, partial_outputs=2)}).items())


def sharded_outputs(block: type[nn.Module], sequence: bool) -> torch.Tensor:
    return shard(build(block), sequence_parallel=sequence)(inputs()).detach()  # type: ignore[no-any-return]


def test_matrices_without_a_layer_are_refused_with_sequence_parallelism(pools: RankPools) -> None:
    """In silence the outputs of other tokens were added."""
    plain = build(ExpertsBlock)(inputs())
    for outputs in pools[2].run(sharded_outputs, ExpertsBlock, False):
        torch.testing.assert_close(outputs, plain, rtol=1e-12, atol=1e-12)
    with pytest.raises(hpnb.RankError, match=r"experts \(Experts\) multiplies by its shards of up and down"):
        pools[2].run(sharded_outputs, ExpertsBlock, True)
    with pytest.raises(hpnb.RankError, match=r"norm \(LayerNorm\) .*partial_outputs.*different tokens"):
        pools[2].run(sharded_outputs, PartialOutputs, True)


def after_a_step_of_adamw(sequence: bool) -> tuple[bool, torch.Tensor]:
    net: Any = shard(build(MLP), sequence_parallel=sequence)
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.5)
    net(inputs()).sum().backward()
    optimizer.step()
    weight = net.blocks[0].unused.weight
    return weight.grad is None, weight.detach()


@pytest.mark.parametrize("sequence", [False, True])
def test_an_unused_norm_has_no_gradient_and_does_not_decay(pools: RankPools, sequence: bool) -> None:
    for has_none, weight in pools[2].run(after_a_step_of_adamw, sequence):
        assert has_none
        assert torch.equal(weight, torch.ones(16, dtype=D))


# --- names of arguments ---


def test_the_hidden_states_are_the_first_tensor_of_the_forward_not_of_the_call() -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor, flag: bool = True, mask: torch.Tensor | None = None) -> Any:
            return x, mask

    block, x, mask = Masked(), torch.ones(2), torch.ones(2)
    change_input(block, lambda hidden: hidden + 1)
    for call in (lambda: block(mask=mask, x=x), lambda: block(x=x, mask=mask), lambda: block(x, True, mask)):
        changed, other = call()
        assert changed.tolist() == [2, 2]
        assert other is mask
    with pytest.raises(TypeError, match="gets no tensor"):
        block(x=None)


class MaskFirst(nn.Module):
    """Its caller names the mask first."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def arguments(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"mask": torch.linspace(0, 1, 48, dtype=D).view(8, 6), "x": x}

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x * mask[..., None])))  # type: ignore[no-any-return]

    def roles(self, prefix: str) -> list[tuple[str, Role]]:
        return [*linear(f"{prefix}up", "column", 64), *linear(f"{prefix}down", "row", 64)]


def outputs_on_a_grid(block: type[nn.Module], samples: int = 8) -> torch.Tensor:
    return shard(build(block), "2d")(inputs(samples)).detach()  # type: ignore[no-any-return]


def test_a_mask_that_a_call_names_first_is_no_hidden_state(pools: RankPools) -> None:
    plain = build(MaskFirst)(inputs())
    for outputs in pools[4].run(outputs_on_a_grid, MaskFirst):
        torch.testing.assert_close(outputs, plain, rtol=1e-12, atol=1e-12)


# --- columns of a grid ---


class Flat(nn.Module):
    """All layers on the block itself."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.o(attend(self.q(x), self.k(x), self.v(x)))
        return x + self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]

    def roles(self, prefix: str) -> list[tuple[str, Role]]:
        return flat_roles(prefix)


def flat_roles(prefix: str) -> list[tuple[str, Role]]:
    mlp = [*linear(f"{prefix}up", "column", 64), *linear(f"{prefix}down", "row", 64)]
    return [*of_columns(prefix, "q k v"), *linear(f"{prefix}o", "row", HEADS), *mlp]


class InModules(nn.Module):
    """The same with a module for each pair."""

    def __init__(self) -> None:
        super().__init__()
        flat = Flat()
        self.attention, self.mlp = nn.Module(), nn.Module()
        for name in ("q", "k", "v", "o"):
            self.attention.add_module(name, getattr(flat, name))
        self.mlp.up, self.mlp.down = flat.up, flat.down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a: Any = self.attention
        x = x + a.o(attend(a.q(x), a.k(x), a.v(x)))
        return x + self.mlp.down(F.gelu(self.mlp.up(x)))  # type: ignore[operator, no-any-return]

    def roles(self, prefix: str) -> list[tuple[str, Role]]:
        table = [
            (name, "mlp" if name.startswith(("up", "down")) else "attention") for name, _ in flat_roles("")
        ]
        return [(f"{prefix}{module}.{name}", dict(flat_roles(""))[name]) for name, module in table]


class Cross(Flat):
    """Keys and values read another tensor than queries."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = x.sin()
        x = x + self.o(attend(self.q(x), self.k(memory), self.v(memory)))
        return x + self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


class FusedKeys(nn.Module):
    """q beside one weight of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.o(attend(self.q(x), *self.kv(x).chunk(2, -1)))  # type: ignore[no-any-return]

    def roles(self, prefix: str) -> list[tuple[str, Role]]:
        kv, o = of_columns(prefix, "kv", fused=2), linear(f"{prefix}o", "row", HEADS)
        return [*of_columns(prefix, "q"), *kv, *o]


class TwoWidths(nn.Module):
    """Two columns of one module with inputs of different widths."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.wide, self.back = nn.Linear(32, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = torch.stack([x, -x], -1).flatten(-2)
        return x + self.down(F.gelu(self.up(x))) + self.back(F.gelu(self.wide(both)))  # type: ignore[no-any-return]

    def roles(self, prefix: str) -> list[tuple[str, Role]]:
        rows = [*linear(f"{prefix}down", "row", 64), *linear(f"{prefix}back", "row", 64)]
        return [*linear(f"{prefix}up", "column", 64), *linear(f"{prefix}wide", "column", 64), *rows]


def gradients_of_steps(block: type[nn.Module], mode: str) -> list[dict[str, torch.Tensor]]:
    """Of the first forward, in which columns are found to have other inputs, and of the second one."""
    net, steps = shard(build(block), mode), []
    for _ in range(2):
        net.zero_grad()
        net(inputs()).square().sum().backward()
        steps.append(full_gradients(net))
    return steps


@pytest.mark.sampled(6, cover=True)
@pytest.mark.parametrize("mode", ["1d", "2d", "3d"])
@pytest.mark.parametrize("block", [Flat, Cross, FusedKeys, TwoWidths])
def test_columns_of_one_module_compute_what_one_process_does(
    pools: RankPools, block: type[nn.Module], mode: str
) -> None:
    alone = build(block)
    alone(inputs()).square().sum().backward()
    for steps in pools[RANKS[mode]].run(gradients_of_steps, block, mode):
        for gradients in steps:
            for name, p in alone.named_parameters():
                assert p.grad is not None
                torch.testing.assert_close(gradients[name], p.grad, rtol=1e-11, atol=1e-11, msg=name)


def bytes_of_a_step(block: type[nn.Module], mode: str) -> dict[str, float]:
    net = shard(build(block), mode)
    net(inputs()).sum().backward()
    with hpnb.record.traffic() as traffic:
        net(inputs()).sum().backward()
    return dict(traffic.bytes)


@pytest.mark.parametrize("mode", ["2d", "3d"])
def test_layers_on_a_block_send_what_layers_in_modules_do(pools: RankPools, mode: str) -> None:
    ranks = pools[RANKS[mode]]
    assert ranks.run(bytes_of_a_step, Flat, mode) == ranks.run(bytes_of_a_step, InModules, mode)


# --- a bias of each head ---


class Alibi(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def arguments(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        slopes = torch.tensor([2.0**-i for i in range(HEADS)], dtype=D)
        distance = (torch.arange(6)[:, None] - torch.arange(6)).abs()
        return {"x": x, "bias": -slopes[:, None, None] * distance}  # (heads, s, s)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return x + self.o(attend(self.q(x), self.k(x), self.v(x), bias))  # type: ignore[no-any-return]

    def roles(self, prefix: str) -> list[tuple[str, Role]]:
        return [*of_columns(prefix, "q k v"), *linear(f"{prefix}o", "row", HEADS)]


def test_a_bias_of_each_head_is_not_taken_for_one_of_each_sample(pools: RankPools) -> None:
    with pytest.raises(
        hpnb.RankError, match=r"\(4, 6, 6\).*4 samples; there are 4 heads too.*\(1, 4, 6, 6\)"
    ):
        pools[4].run(outputs_on_a_grid, Alibi, 4)
    with pytest.raises(hpnb.RankError, match="must match the size"):
        pools[4].run(outputs_on_a_grid, Alibi, 8)


# --- inference mode ---


class ChangedInPlace(nn.Module):
    """k reads what q has read after it has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        q = self.q(y)
        y.mul_(3)
        return x + self.o(attend(q, self.k(y), q))  # type: ignore[no-any-return]

    def roles(self, prefix: str) -> list[tuple[str, Role]]:
        return [*of_columns(prefix, "q k"), *linear(f"{prefix}o", "row", HEADS)]


def inferred(mode: str, sequence: bool) -> torch.Tensor:
    net = shard(build(ChangedInPlace), mode, sequence_parallel=sequence)
    with torch.inference_mode():
        net(inputs())
        return net(inputs()).clone()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("mode", "sequence"), [("1d", False), ("1d", True), ("2d", False)])
def test_a_change_in_place_is_seen_in_inference_mode(pools: RankPools, mode: str, sequence: bool) -> None:
    with torch.no_grad():
        plain = build(ChangedInPlace)(inputs())
    for outputs in pools[RANKS[mode]].run(inferred, mode, sequence):
        torch.testing.assert_close(outputs, plain, rtol=1e-12, atol=1e-12)


# --- the loss of masked tokens ---


def loss_of_masked_shards() -> tuple[torch.Tensor, torch.Tensor]:
    """Where the first position may be no token of rank 1, as after a constraint of a grammar."""
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(7), dtype=D)
    logits[0, 3:] = -torch.inf
    axis = hpnb.Mesh(hpnb.Layout(tp=2)).tp
    shard = logits.chunk(2, 1)[axis.rank].clone()
    loss = loss_and_gradient(shard, 3, torch.tensor([1, 2, 5]), vocab_shard(axis, 6), None, True)
    return loss, shard


def test_a_rank_may_have_masked_tokens_alone(pools: RankPools) -> None:
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(7), dtype=D)
    logits[0, 3:] = -torch.inf
    logits.requires_grad_()
    plain = F.cross_entropy(logits, torch.tensor([1, 2, 5]), reduction="sum")
    plain.backward()
    assert logits.grad is not None
    for rank, (loss, gradient) in enumerate(pools[2].run(loss_of_masked_shards)):
        torch.testing.assert_close(loss, plain.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient, logits.grad.chunk(2, 1)[rank], rtol=1e-12, atol=1e-12)


# --- dropout without a module ---


class Dropping(nn.Module):
    """Calls F.dropout, on what is sharded and on what is replicated."""

    def __init__(self, heads: int, rate: float) -> None:
        super().__init__()
        self.heads, self.rate, hidden = heads, rate, heads * WIDTH
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden) for _ in range(4))
        self.kept: list[torch.Tensor] = []  # of values, by each forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        v = F.dropout(self.v(x), self.rate, self.training)
        self.kept.append(v.detach() != 0)
        y = self.o(attend(self.q(x), self.k(x), v))
        return x + F.dropout(y, self.rate, self.training)

    def roles(self, prefix: str) -> list[tuple[str, Role]]:
        o = linear(f"{prefix}o", "row", self.heads)
        columns = (pair for name in "qkv" for pair in linear(prefix + name, "column", self.heads))
        return [*columns, *o]


Drawn = tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor, bool]


def drawn(heads: int, rate: float, mode: str, sequence: bool) -> Drawn:
    """(outputs of two, what they keep, the generator's state after them, whether it is that before)."""
    net: Any = shard(build(Dropping, heads, rate, hidden=heads * WIDTH), mode, sequence_parallel=sequence)
    torch.manual_seed(8)
    before = torch.get_rng_state()
    with torch.no_grad():
        outputs = [net(inputs()), net(inputs())]
    after = torch.get_rng_state()
    return outputs, net.blocks[0].kept, after, torch.equal(before, after)


@pytest.mark.parametrize(
    ("heads", "mode", "sequence"), [(4, "1d", False), (3, "1d", False), (4, "1d", True), (4, "2d", False)]
)
def test_dropout_without_a_module_differs_where_activations_do(
    pools: RankPools, heads: int, mode: str, sequence: bool
) -> None:
    """In silence ranks dropped the same of their heads, or with 3 heads other outputs of one token."""
    first, *others = pools[RANKS[mode]].run(drawn, heads, 0.5, mode, sequence)
    for outputs, kept, state, _ in others:
        assert torch.equal(state, first[2])
        for output, of_first, mask, mask_of_first in zip(outputs, first[0], kept, first[1], strict=True):
            assert torch.equal(output, of_first)
            width = min(mask.size(-1), mask_of_first.size(-1))
            assert 0.4 < float((mask[..., :width] != mask_of_first[..., :width]).double().mean()) < 0.6
    assert not torch.equal(first[1][0], first[1][1])


def test_a_forward_that_draws_nothing_leaves_the_generator_alone(pools: RankPools) -> None:
    assert all(same for *_, same in pools[2].run(drawn, 4, 0.0, "1d", False))
    assert all(same for *_, same in pools[4].run(drawn, 4, 0.0, "2d", False))


def recomputed_gradients(recomputes: bool) -> dict[str, torch.Tensor]:
    """Of the first step, whose forward shows that the block draws."""
    net: Any = shard(build(Dropping, 3, 0.5, hidden=12))
    if recomputes:
        enable_recomputation(net, "full", net.blocks)
    torch.manual_seed(9)
    net(inputs()).square().sum().backward()
    return full_gradients(net)


def test_a_first_step_that_is_recomputed_drops_the_same_again(pools: RankPools) -> None:
    plain, recomputed = (pools[2].run(recomputed_gradients, how)[0] for how in (False, True))
    for name, gradient in plain.items():
        torch.testing.assert_close(recomputed[name], gradient, rtol=1e-12, atol=1e-12)


def with_other_seeds(rate: float) -> None:
    net = shard(build(Dropping, 4, rate))
    torch.manual_seed(hpnb.rank())
    net(inputs())


def test_other_seeds_are_refused_where_something_draws(pools: RankPools) -> None:
    pools[2].run(with_other_seeds, 0.0)
    with pytest.raises(hpnb.RankError, match="different random states"):
        pools[2].run(with_other_seeds, 0.5)


def test_a_function_that_drops_is_seen_before_a_forward() -> None:
    assert may_draw(Dropping(4, 0.5))
    assert not has_dropout(Dropping(4, 0.5))
    assert may_draw(hpnb.models.gpt2("laptop", dropout=0.1))
    assert not may_draw(hpnb.models.gpt2("laptop"))
    assert not may_draw(Flat())

"""Hooks and forwards of layers that tensor parallelism replaces are refused; those of other modules run.

pytest tests/test_replaced_layers.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rank_pools import RankPools
from tensor_cases import apart, gpt2, own_loss, serial, vit, vit_case
from tensor_cases import train as train_case
from torch import nn

import hpnb
from hpnb.models import Anatomy, Part, Role, register
from hpnb.models.role import linear
from hpnb.tensor_parallel import full_gradients, full_state_dict, parallelize

D = torch.float64


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


class ScaledLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class SameLinear(nn.Linear):
    """A subclass that only has a name, a buffer or another __init__ is an nn.Linear."""


def shards(model: nn.Module, mode: str = "1d", sequence: bool = False) -> nn.Module:
    world = hpnb.world_size()
    return parallelize(model, hpnb.Mesh(hpnb.Layout(tp=world)), mode, sequence)


def boosts(model: nn.Module, mode: str = "1d", sequence: bool = False) -> Any:
    plugin = hpnb.HybridParallelPlugin(
        tp_size=hpnb.world_size(), tp_mode=mode, enable_sequence_parallelism=sequence, precision="fp64"
    )
    return hpnb.Booster(plugin=plugin).boost(model, torch.optim.SGD(model.parameters(), 0.1))


def nothing(*_: Any) -> None:
    pass


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "a forward pre-hook": lambda m: m.register_forward_pre_hook(nothing),
    "a forward hook": lambda m: m.register_forward_hook(partial(nothing, m), with_kwargs=True),
    "a backward pre-hook": lambda m: m.register_full_backward_pre_hook(nothing),
    "a backward hook": lambda m: m.register_full_backward_hook(nothing),
    "a hook of its state dict": lambda m: m.register_state_dict_post_hook(nothing),
}


def refused(split: Callable[..., Any], mode: str, sequence: bool, hook: str, path: str, build: Any) -> str:
    """What `split` says of a model with such a hook on `path`; the model stays as it was."""
    model = build()
    HOOKS[hook](model.get_submodule(path))
    kinds = [type(m) for m in model.modules()]
    shapes = [p.shape for p in model.parameters()]
    with pytest.raises(ValueError) as error:
        split(model, mode, sequence)
    assert [type(m) for m in model.modules()] == kinds
    assert [p.shape for p in model.parameters()] == shapes
    return str(error.value)


def sentences(mode: str, sequence: bool) -> list[list[str]]:
    fc = "vit.layers.1.mlp.fc1"
    said = [(hook, fc, refused(shards, mode, sequence, hook, fc, vit)) for hook in HOOKS]
    for path in ("transformer.wte", "transformer.h.0.attn.c_proj", "lm_head"):
        said.append(("a forward hook", path, refused(shards, mode, sequence, "a forward hook", path, gpt2)))
    said.append(("a backward hook", fc, refused(boosts, mode, sequence, "a backward hook", fc, vit)))
    if mode != "1d":
        for path in ("vit.layers.1.layernorm_before", "vit.layernorm", "classifier"):
            said.append(("a forward hook", path, refused(shards, mode, False, "a forward hook", path, vit)))
    return [list(each) for each in said]


@pytest.mark.parametrize(("mode", "sequence", "ranks"), [("1d", False, 2), ("1d", True, 2), ("2d", False, 4)])
def test_a_hook_on_a_layer_that_is_replaced_is_refused(
    pools: RankPools, mode: str, sequence: bool, ranks: int
) -> None:
    around = {
        "vit.layers.1.mlp.fc1": "vit.layers.1", "vit.layers.1.layernorm_before": "vit.layers.1",
        "transformer.wte": "transformer", "transformer.h.0.attn.c_proj": "transformer.h.0",
        "lm_head": "the GPT2LMHeadModel", "vit.layernorm": "vit",
        "classifier": "the ViTForImageClassification",
    }  # fmt: skip
    for hook, path, sentence in (
        each for rank in pools[ranks].run(sentences, mode, sequence) for each in rank
    ):
        assert sentence.startswith(f"{path} has {hook}, which would not be called"), sentence
        assert f"hook {around[path]} instead" in sentence, sentence


def forwards() -> dict[str, str]:
    said = {}

    def replaced(name: str, change: Callable[[Any], None]) -> None:
        model: Any = vit()
        change(model.vit.layers[0].mlp)
        with pytest.raises(ValueError) as error:
            shards(model)
        said[name] = str(error.value)

    def subclass(mlp: Any) -> None:
        mlp.fc1 = ScaledLinear(48, 96, dtype=D)

    def own(mlp: Any) -> None:
        mlp.fc2.forward = partial(F.linear, weight=mlp.fc2.weight)

    def on_one_rank(mlp: Any) -> None:
        if hpnb.rank() == 1:
            mlp.fc1.register_forward_hook(nothing)

    replaced("subclass", subclass)
    replaced("own", own)
    replaced("one rank", on_one_rank)
    return said


def test_a_forward_that_would_not_run_is_refused(pools: RankPools) -> None:
    first, second = pools[2].run(forwards)
    start = "vit.layers.0.mlp.fc1 has the forward of ScaledLinear, which would not be called"
    assert first["subclass"] == second["subclass"]
    assert first["subclass"].startswith(start)
    assert "keep an nn.Linear there" in first["subclass"]
    assert first["own"].startswith("vit.layers.0.mlp.fc2 has another forward than its class")
    assert first["one rank"].startswith("on another rank of tp, a layer")
    assert second["one rank"].startswith("vit.layers.0.mlp.fc1 has a forward hook")


# --- what stays ---


def hooked_vit(seen: list[str]) -> nn.Module:
    """Hooks that change what is computed, on modules that stay."""
    model: Any = vit()
    model.vit.layers[0].mlp.fc1 = same = SameLinear(48, 96, dtype=D)
    g = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for p in same.parameters():
            p.copy_(torch.randn(p.shape, generator=g, dtype=D) / 7)
    block, mlp = model.vit.layers[1], model.vit.layers[1].mlp

    def note(name: str) -> Callable[..., None]:
        return lambda *_: seen.append(name)

    block.register_forward_pre_hook(lambda m, args: (args[0] * 1.1, *args[1:]))
    mlp.register_forward_hook(lambda m, args, output: output * 0.9)
    block.register_full_backward_hook(lambda m, grads, _: tuple(g if g is None else 0.8 * g for g in grads))
    norm, patches = block.layernorm_after, model.vit.embeddings
    norm.register_full_backward_pre_hook(note("norm"))
    patches.register_forward_hook(note("patches"))
    return model  # type: ignore[no-any-return]


def hooks_that_stay() -> tuple[float, list[str]]:
    case, seen = vit_case(), list[str]()
    case.build = lambda: hooked_vit(seen)
    wanted = serial(case)
    before, seen[:] = list(seen), []
    assert apart(serial(vit_case()), wanted) > 1e-2  # the hooks change what is trained
    found = train_case(shards(hooked_vit(seen)), case, own_loss, full_gradients, full_state_dict)
    assert seen == before
    return apart(found, wanted), seen


def test_hooks_on_blocks_and_on_layers_that_stay_run_as_on_one_process(pools: RankPools) -> None:
    for off, seen in pools[2].run(hooks_that_stay):
        assert off < 1e-12
        assert {*seen} == {"norm", "patches"}


class Lora(nn.Module):
    """What the message says works: the nn.Linear stays one, in a module around it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base, self.a = nn.Linear(inputs, outputs), nn.Linear(inputs, 3, bias=False)
        self.b = nn.Linear(3, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 0.5 * self.b(self.a(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Lora(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)  # type: ignore[no-any-return]


class Parts(Anatomy):
    def embed(self, inputs: Any) -> torch.Tensor:
        return self.embedding[0].module(inputs["x"])  # type: ignore[no-any-return]

    def run(self, block: Part, hidden: torch.Tensor, inputs: Any) -> torch.Tensor:
        return block.module(hidden)  # type: ignore[no-any-return]

    def finish(self, hidden: torch.Tensor, inputs: Any) -> torch.Tensor:
        return self.head[0].module(hidden)  # type: ignore[no-any-return]


def parts(net: Net) -> Parts:
    blocks = tuple(Part(f"blocks.{i}", block) for i, block in enumerate(net.blocks))
    return Parts((Part("first", net.first),), blocks, (Part("last", net.last),))


def roles(net: Net) -> dict[str, Role]:
    table = [*linear("first", "embedding"), *linear("last", "head")]
    for name in (f"blocks.{i}" for i in range(len(net.blocks))):
        table += [*linear(f"{name}.up.base", "column", 12), *linear(f"{name}.up.b", "column", 12)]
        table += [*linear(f"{name}.up.a", "head"), *linear(f"{name}.down", "row", 12)]
    return dict(table)


def lora_around() -> float:
    register(Net, parts, roles)
    x = torch.randn(2, 8, 5, 6, generator=torch.Generator().manual_seed(0), dtype=D)

    def trained(split: Callable[[nn.Module], nn.Module]) -> nn.Module:
        torch.manual_seed(1)
        model = split(Net().double())
        optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)
        for batch in x:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        return model

    wanted, found = trained(lambda model: model).state_dict(), full_state_dict(trained(shards))
    return max(float((found[n] - w).norm() / w.norm()) for n, w in wanted.items())


def test_lora_around_an_nn_linear_trains_as_on_one_process(pools: RankPools) -> None:
    assert max(pools[2].run(lora_around)) < 1e-12


class LinearBlocks(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 12), nn.Linear(12, 8)])


def boosted_linear_blocks() -> list[str]:
    """Boost puts hooks of hpnb's on blocks, and these blocks are replaced."""
    table = [*linear("first", "embedding"), *linear("last", "head")]
    table += [*linear("blocks.0", "column", 12), *linear("blocks.1", "row", 12)]
    register(LinearBlocks, parts, lambda net: dict(table))
    boosted, *_ = boosts(LinearBlocks().double())
    return [type(block).__name__ for block in boosted.unwrap().blocks]


def test_hooks_of_hpnb_are_not_refused(pools: RankPools) -> None:
    kinds = ["ColumnParallelLinear", "RowParallelLinear"]
    assert pools[2].run(boosted_linear_blocks) == [kinds, kinds]

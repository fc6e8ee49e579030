"""A sharded model outside of plain training: two gradients of one graph, outputs in all forms, refusals."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensor_cases import gpt2, text
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions

import hpnb
from hpnb import Layout, Mesh
from hpnb.tensor_parallel import full_gradients, parallelize
from hpnb.tensor_parallel.lazy_logits import with_lazy_logits
from hpnb.tensor_parallel.mode import check_ranks
from hpnb.tensor_parallel.replicated_grad_sum import ReplicatedGradSum
from hpnb.tensor_parallel.tp_grid_layers import GridLinear, SharedInputLinears


@pytest.fixture(scope="module")
def pools() -> Iterator[Callable[[int], hpnb.Ranks]]:
    """One pool of each size, for all tests of this file."""
    with ExitStack() as stack:
        yield cache(lambda size: stack.enter_context(hpnb.Ranks(size, device="cpu", timeout=120)))


@pytest.fixture(scope="module")
def two(pools: Callable[[int], hpnb.Ranks]) -> hpnb.Ranks:
    return pools(2)


def tensor_axis() -> hpnb.Axis:
    torch.set_num_threads(1)
    return Mesh(Layout(tp=hpnb.world_size())).tp


# --- two gradients of one graph ---


def gradient_of_an_activation_first(module: str, options: dict[str, Any]) -> float:
    """How far weights' gradients are off after that of an activation, the input of `module`."""
    model = parallelize(gpt2(), tensor_axis(), **options)
    inputs: list[torch.Tensor] = []
    model.get_submodule(module).register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    batch = text(0)
    model(**batch).loss.backward()
    wanted = full_gradients(model)
    model.zero_grad()
    loss = model(**batch).loss
    torch.autograd.grad(loss, inputs[-1], retain_graph=True)
    loss.backward()
    return max(float((g - wanted[n]).norm() / wanted[n].norm()) for n, g in full_gradients(model).items())


ACTIVATIONS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "1d, of a row": ("transformer.h.1.mlp.c_proj", 2, {}),
    "1d, of a block": ("transformer.h.1", 2, {}),
    "1d, of gathered tokens": ("transformer.h.1.attn.c_attn", 2, {"sequence_parallel": True}),
    "2.5d, of a block": ("transformer.h.1", 2, {"mode": "2.5d", "depth": 2}),
    "3d, of a block": ("transformer.h.1", 8, {"mode": "3d"}),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activations_gradient_before_those_of_weights(
    pools: Callable[[int], hpnb.Ranks], name: str
) -> None:
    module, ranks, options = ACTIVATIONS[name]
    assert max(pools(ranks).run(gradient_of_an_activation_first, module, options)) < 1e-12


# --- outputs ---

READS: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda o: o.logits,
    "getattr": lambda o: getattr(o, "logits", None),
    "key": lambda o: o["logits"],
    "get": lambda o: o.get("logits"),
    "get with a default": lambda o: o.get("logits", 0),
    "index": lambda o: o[1],
    "negative index": lambda o: o[-1],
    "slice": lambda o: o[:2][1],
    "to_tuple": lambda o: o.to_tuple()[1],
    "values": lambda o: list(o.values())[1],
    "items": lambda o: dict(o.items())["logits"],
    "reversed items": lambda o: dict(reversed(o.items()))["logits"],
    "dict": lambda o: dict(o)["logits"],
    "update": lambda o: [d := {}, d.update(o)] and d["logits"],
    "unpacked into a dict": lambda o: {**o}["logits"],
    "unpacked into a call": lambda o: SimpleNamespace(**o).logits,
    "joined": lambda o: (o | {})["logits"],
    "joined to a dict": lambda o: ({} | o)["logits"],
    "its copy": lambda o: o.copy()["logits"],
    "copy": lambda o: copy.copy(o)["logits"],
    "deepcopy": lambda o: copy.deepcopy(o).get("logits"),
    "pickle": lambda o: pickle.loads(pickle.dumps(o)).logits,
    "asdict": lambda o: dataclasses.asdict(o)["logits"],
    "replace": lambda o: dataclasses.replace(o)["logits"],
    "pytree": lambda o: tree_leaves(o)[1],
}


def logits_of_all_reads() -> dict[str, float]:
    model, batch = parallelize(gpt2(), tensor_axis()), text(0)
    with torch.no_grad():
        plain = gpt2()(**batch).logits
        by_read = {name: read(model(**batch)) for name, read in READS.items()}
    return {
        name: float((z - plain).abs().max()) if z.shape == plain.shape else torch.inf
        for name, z in by_read.items()
    }


def test_all_ways_to_read_logits_gather_them(two: hpnb.Ranks) -> None:
    for offs in two.run(logits_of_all_reads):
        assert {name: off for name, off in offs.items() if not off < 1e-13} == {}


def test_a_loss_that_is_computed_when_read_comes_first() -> None:
    """What a pipeline's last stage returns."""
    plain = CausalLMOutputWithCrossAttentions(logits=torch.ones(2, 3, 4))
    loss_reads: list[Callable[[Any], Any]] = [lambda o: o.get("loss"), lambda o: o[0], lambda o: o["loss"]]
    for read in loss_reads:
        outputs = with_lazy_logits(plain, lambda z: z, lambda z: z.sum())
        assert read(outputs) == 24
        assert outputs.to_tuple()[1] is plain.logits


# --- what is refused changes nothing, and values are those of the first rank ---


def refused_and_tried_again(what: str) -> tuple[str, bool, tuple[int, ...]]:
    """(message, whether the model is as before, the shape of a shard after what is wrong is mended)."""
    model: Any = gpt2()
    before = {n: p.clone() for n, p in model.named_parameters()}
    if what == "gradient":
        if hpnb.rank() == 1:
            model.transformer.ln_f.weight.grad = torch.ones(48, dtype=torch.float64)
    else:
        model.transformer.wte.max_norm = 1.0
    with pytest.raises(ValueError) as error:
        parallelize(model, tensor_axis())
    after = dict(model.named_parameters())
    same = before.keys() == after.keys() and all(torch.equal(p, after[n]) for n, p in before.items())
    model.zero_grad()
    model.transformer.wte.max_norm = None
    shape = parallelize(model, tensor_axis()).transformer.h[0].mlp.c_fc.weight.shape  # type: ignore
    return str(error.value), same, tuple(shape)


@pytest.mark.parametrize("what", ["gradient", "max_norm"])
def test_a_refused_model_is_as_before_on_all_ranks(two: hpnb.Ranks, what: str) -> None:
    results = two.run(refused_and_tried_again, what)
    assert [result[1:] for result in results] == [(True, (48, 96))] * 2
    if what == "gradient":
        assert "on another rank of tp, a parameter has a gradient" in results[0][0]
        assert "transformer.ln_f.weight has a gradient" in results[1][0]
    else:
        assert all("max_norm" in message for message, *_ in results)


def buffers_of_each_rank() -> dict[str, list[float]]:
    model: Any = gpt2()
    block, rank = model.transformer.h[0], float(hpnb.rank())
    block.register_buffer("mean", torch.full((3,), rank))
    block.register_buffer("float64", torch.full((2,), rank, dtype=torch.float64))
    block.register_buffer("num_batches", torch.tensor(int(rank)))
    block.register_buffer("not_saved", torch.full((1,), rank), persistent=False)
    parallelize(model, tensor_axis())
    names = ("mean", "float64", "num_batches", "not_saved")
    return {name: getattr(block, name).reshape(-1).tolist() for name in names}


def test_buffers_of_the_state_dict_are_those_of_the_first_rank(two: hpnb.Ranks) -> None:
    first, second = two.run(buffers_of_each_rank)
    assert first.pop("not_saved") == [0]
    assert second.pop("not_saved") == [1]  # what a constructor computes, and no checkpoint has
    assert first == second == {"mean": [0, 0, 0], "float64": [0, 0], "num_batches": [0]}


# --- grids ---


def test_linears_share_an_input_only_as_it_was() -> None:
    def multiply(x: torch.Tensor, weights: Any, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
        return tuple(x @ w.t() for w in weights)

    group = SharedInputLinears(multiply, ReplicatedGradSum([]), False, False)
    q, k = (GridLinear(nn.Linear(4, 4, bias=False), group) for _ in range(2))
    x = torch.randn(2, 4)
    q(x)
    x.add_(1)
    assert torch.equal(k(x), x @ k.weight.t())
    with torch.no_grad():
        q(x)
    assert k(x).requires_grad


@pytest.mark.parametrize(("ranks", "depth"), [(8, 2), (12, 3), (18, 2), (32, 2)])
def test_25d_names_the_depth_that_it_needs(ranks: int, depth: int) -> None:
    with pytest.raises(ValueError, match=f"use depth={depth}, a grid of {depth} x"):
        check_ranks("2.5d", ranks)
    check_ranks("2.5d", ranks, depth)

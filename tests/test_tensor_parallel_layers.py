"""The functions of tensor-parallel layers on one rank: what nn.Linear and F.cross_entropy do, they do too."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from hpnb import Axis
from hpnb.tensor_parallel import cross_entropy
from hpnb.tensor_parallel.async_all_reduce import (
    NO_COMMUNICATION,
    enter_region,
    linear_deferring_weight_grad,
)
from hpnb.tensor_parallel.summa import SummaGrid
from hpnb.tensor_parallel.tp_2d_linear import linear_2d, logits_2d
from hpnb.tensor_parallel.tp_3d_matmul import MatmulAxes3D, linear_3d

D = torch.float64
AXIS = Axis("tp", 1, 0, None, (0,))
GRID = SummaGrid(AXIS, AXIS, torch.device("cpu"))
CUBE = MatmulAxes3D(AXIS, AXIS, AXIS, torch.device("cpu"))


def apply(mode: str, x: torch.Tensor, layers: list[nn.Linear]) -> tuple[torch.Tensor, ...]:
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    if mode == "2d":
        return linear_2d(x, weights, biases, GRID, False)
    if mode == "3d":
        return linear_3d(x, weights, biases, CUBE, 0, False)
    ys = []
    for layer in layers:
        linear: Any = layer
        linear.transposed, linear.adds_bias = False, True
        inside, (forward_weights,) = enter_region(x, [linear], NO_COMMUNICATION)
        ys.append(linear_deferring_weight_grad(inside, forward_weights))
    return tuple(ys)


def gradients(x: torch.Tensor, layers: list[nn.Linear], ys: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """After every y has been changed in place."""
    loss = torch.stack([y.relu_().square().sum() * (i + 1) for i, y in enumerate(ys)]).sum()
    return list(torch.autograd.grad(loss, [x, *(p for layer in layers for p in layer.parameters())]))


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("mode", ["1d", "2d", "3d"])
def test_outputs_may_be_changed_in_place(mode: str, num_layers: int) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 6 + i).to(D) for i in range(num_layers)]
    x = torch.randn(2, 3, 4, dtype=D, requires_grad=True)
    wanted = gradients(x, layers, tuple(layer(x) for layer in layers))
    for ours, theirs in zip(gradients(x, layers, apply(mode, x, layers)), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_logits_may_be_changed_in_place() -> None:
    x, e = torch.randn(2, 3, 4, dtype=D, requires_grad=True), torch.randn(5, 4, dtype=D)
    (ours,) = torch.autograd.grad(logits_2d(x, e, GRID, [5]).relu_().square().sum(), x)
    (theirs,) = torch.autograd.grad((x @ e.t()).relu().square().sum(), x)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, D])
@pytest.mark.parametrize("mode", ["1d", "2d", "3d"])
def test_autocast_casts_what_it_casts_in_a_linear(mode: str, dtype: torch.dtype) -> None:
    layer, x = nn.Linear(4, 6).to(dtype), torch.randn(2, 3, 4, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        assert apply(mode, x, [layer])[0].dtype == layer(x).dtype


def test_a_second_backward_of_the_loss_is_refused() -> None:
    z = torch.randn(3, 5, dtype=D, requires_grad=True)
    loss, _ = cross_entropy(z, torch.tensor([0, 2, 4]), AXIS, 5)
    with pytest.raises(RuntimeError, match="vocabulary that is sharded cannot compute a second"):
        torch.autograd.grad(loss**2, z, create_graph=True)


def gradients_after(case: str, pair: list[nn.Linear], x: torch.Tensor) -> list[torch.Tensor]:
    """Of a column-row pair, when one graph runs backward twice; both hold operands of weight gradients."""
    layers: Any = pair
    for layer in layers:
        layer.transposed, layer.adds_bias = False, True
    inside, (up, down) = enter_region(x, layers, NO_COMMUNICATION)
    hidden = linear_deferring_weight_grad(inside, up)
    loss = linear_deferring_weight_grad(hidden, down).square().sum()

    def to_hidden() -> None:
        torch.autograd.grad(loss, hidden, retain_graph=True)

    def in_hook(_: torch.Tensor) -> None:
        hook.remove()
        if case == "raised":
            raise KeyboardInterrupt
        if case == "nested":
            to_hidden()
        elif case == "another thread":
            with ThreadPoolExecutor(1) as pool:
                pool.submit(to_hidden).result()

    if case == "one after the other":
        to_hidden()
        assert not down.deferred.operands._items  # which would keep the activations
    else:
        hook = hidden.register_hook(in_hook)
    if case == "raised":
        with pytest.raises(KeyboardInterrupt):
            loss.backward(retain_graph=True)
        assert all(p.grad is None for layer in pair for p in layer.parameters())
    parameters = [p for layer in pair for p in layer.parameters()]
    return list(torch.autograd.grad(loss, parameters, retain_graph=True))


@pytest.mark.parametrize("case", ["one after the other", "nested", "another thread", "raised"])
def test_two_backwards_of_one_graph_do_not_share_operands(case: str) -> None:
    torch.manual_seed(0)
    pair = [nn.Linear(4, 6).to(D), nn.Linear(6, 4).to(D)]
    x = torch.randn(2, 3, 4, dtype=D, requires_grad=True)
    loss = pair[1](pair[0](x)).square().sum()
    wanted = torch.autograd.grad(loss, [p for layer in pair for p in layer.parameters()])
    for ours, theirs in zip(gradients_after(case, pair, x), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)

"""A gradient penalty differentiates a gradient: ZeRO 3 refuses it, and says why in the first backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hpnb

pytestmark = pytest.mark.usefixtures("launches_on_a_pool")


def penalty(zero_stage: int, find_unused: bool, penalizes: bool = True) -> str:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    options: dict[str, Any] = {"zero_stage": zero_stage, "find_unused_parameters": find_unused}
    booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(precision="fp32", **options))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(4, 4, requires_grad=True)
    out = model(x)
    loss = out.mean()
    try:
        if penalizes:
            (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            loss = loss + gradient.square().sum(1).mean()
    except RuntimeError as error:
        # The model goes on without it.
        return f"{error} {penalty(zero_stage, find_unused, penalizes=False)}"
    booster.backward(loss, optimizer)
    optimizer.step()
    return "trained"


@pytest.mark.parametrize("find_unused", [False, True])
def test_sharded_weights_have_no_second_derivative(find_unused: bool) -> None:
    for message in hpnb.launch(penalty, 3, find_unused, ranks=2, device="cpu"):
        assert message.startswith("ZeRO 3 cannot compute a second derivative (create_graph=True")
        assert "use zero_stage 0, 1 or 2" in message
        assert message.endswith("trained")


def saliency(zero_stage: int) -> str:
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(precision="fp32", zero_stage=zero_stage))
    model, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(4, 4, requires_grad=True)
    try:
        torch.autograd.grad(model(x).sum(), x)
    except RuntimeError as error:
        return str(error)
    return "computed"


def test_gradients_by_inputs_alone_say_which_zero_stage_has_them() -> None:
    """They give no parameter a gradient, so advice about parameters alone would not help."""
    for message in hpnb.launch(saliency, 3, ranks=2, device="cpu"):
        assert message.startswith("4 of 4 parameters got no gradient")
        assert "torch.autograd.grad through the model" in message
        assert "needs zero_stage 0, 1 or 2" in message
    assert hpnb.launch(saliency, 2, ranks=2, device="cpu") == ["computed"] * 2


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_others_train_it(zero_stage: int) -> None:
    assert hpnb.launch(penalty, zero_stage, False, ranks=2, device="cpu") == ["trained"] * 2

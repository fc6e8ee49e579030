"""`models.check` compares every output and gradient, or names what it did not compare.

pytest tests/test_compare_outputs.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hpnb
from hpnb.models import Anatomy, Part, registry
from hpnb.models.compare_parts import FirstStepCheck


class PooledNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.output = nn.Linear(8, 3)

    def forward(self, input_ids: torch.Tensor) -> Any:
        hidden = self.tokens(input_ids)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return self.output(hidden.mean(1))


class LossOnlyNet(PooledNet):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return nn.functional.cross_entropy(super().forward(input_ids), labels)


class PositionsNet(PooledNet):
    """Its position_ids are (3, B, s), as those of texts with images."""

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return super().forward(input_ids) + position_ids[0].sum(1, keepdim=True)


class Parts(Anatomy):
    def embed(self, inputs: Any) -> Any:
        return self.embedding[0].module(inputs["input_ids"])

    def run(self, block: Part, hidden: Any, inputs: Any) -> Any:
        return hidden + torch.tanh(block.module(hidden))

    def finish(self, hidden: Any, inputs: Any) -> Any:
        return {"logits": self.head[0].module(hidden.mean(1))}


class NoPooling(Parts):
    def finish(self, hidden: Any, inputs: Any) -> Any:
        return self.head[0].module(hidden)


class Detached(Parts):
    def run(self, block: Part, hidden: Any, inputs: Any) -> Any:
        return hidden.detach() + torch.tanh(block.module(hidden))


class DetachedOutputs(Parts):
    def finish(self, hidden: Any, inputs: Any) -> Any:
        return {"logits": self.head[0].module(hidden.mean(1)).detach()}


class MoreOutputs(Parts):
    def finish(self, hidden: Any, inputs: Any) -> Any:
        return super().finish(hidden, inputs) | {"hidden": hidden}


def register(kind: type[Parts], net: type[PooledNet]) -> None:
    def parts(model: Any) -> Anatomy:
        blocks = tuple(Part(f"blocks.{i}", block) for i, block in enumerate(model.blocks))
        return kind((Part("tokens", model.tokens),), blocks, (Part("output", model.output),))

    hpnb.models.register(net, parts)


def batch() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.arange(20).view(4, 5) % 11, "labels": torch.arange(4) % 3}


def check(kind: type[Parts], net: type[PooledNet] = PooledNet) -> str:
    register(kind, net)
    return hpnb.models.check(net(), batch(), ranks=1)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "REGISTERED", dict(registry.REGISTERED))


def test_outputs_of_another_shape_are_a_problem() -> None:
    with pytest.raises(ValueError, match=r"give .*\(4, 5, 3\) and the forward .*\(4, 3\), from output on"):
        check(NoPooling)


@pytest.mark.parametrize("kind", [Detached, DetachedOutputs])
def test_gradients_are_compared_where_outputs_have_other_names(kind: Any) -> None:
    assert "parts against the forward, with gradients" in check(Parts)
    with pytest.raises(ValueError, match=r"the parts: .*gradient of .*tokens"):
        check(kind)


def test_what_was_not_compared_is_named() -> None:
    assert "The forward gives no hidden of shape (4, 5, 8), so that was not compared" in check(MoreOutputs)
    report = check(Parts, LossOnlyNet)
    assert "no logits of shape (4, 3)" in report
    assert "gradients" not in report


def test_a_first_step_with_three_positions_per_token_is_checked() -> None:
    register(Parts, PositionsNet)  # whose finish forgets the positions
    positions = torch.arange(5).expand(3, 4, 5)
    with pytest.raises(ValueError, match="differ by"):
        FirstStepCheck(PositionsNet()).run(batch() | {"position_ids": positions})
    with pytest.raises(ValueError, match="differ by"):
        FirstStepCheck(PositionsNet()).run({"position_ids": positions} | batch())

"""activation_checkpointing="full" of a model without a list of blocks recomputes the model as one block."""

from __future__ import annotations

import inspect
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hpnb
from hpnb.hybrid.recompute import enable_recomputation


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, *, forward: float = 1.0) -> Any:
        return self.layer(x) * forward


def criterion(outputs: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(outputs, batch["labels"])


def samples() -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.eye(4)[i % 4], "labels": torch.tensor(i % 3)} for i in range(8)]


def train(way: str, checkpointing: Any) -> list[float]:
    """The weights after an epoch of one step."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"precision": "fp32", "activation_checkpointing": checkpointing}
    plugin = hpnb.HybridParallelPlugin(**options)
    booster, model = hpnb.Booster(plugin=plugin), Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = plugin.prepare_dataloader(samples(), batch_size=4)
    boosted, optimizer, _, loader, _ = booster.boost(model, optimizer, criterion, dataloader=loader)
    if way == "trainer":
        hpnb.Trainer(booster, boosted, optimizer, criterion, display_progress=False).fit(loader, 1)
    else:
        booster.execute_pipeline(iter(loader), boosted, criterion, optimizer)
        optimizer.step()
    weights: list[float] = model.layer.weight.flatten().tolist()
    return weights


@pytest.mark.parametrize("way", ["execute_pipeline", "trainer"])
def test_its_forward_gets_what_it_takes(way: str) -> None:
    def both(way: str) -> tuple[list[float], list[float]]:
        return train(way, False), train(way, "full")

    for plain, recomputed in hpnb.launch(both, way, ranks=2, device="cpu"):
        assert plain == recomputed


def test_a_recomputed_forward_has_its_signature() -> None:
    model = Net()
    signature = inspect.signature(model.forward)
    enable_recomputation(model, "full")
    assert inspect.signature(model.forward) == signature
    copied = deepcopy(model)
    nn.init.zeros_(model.layer.weight)
    torch.testing.assert_close(copied(torch.eye(4), forward=2.0), 2 * copied.layer(torch.eye(4)))
    assert inspect.unwrap(copied.forward).__self__ is copied

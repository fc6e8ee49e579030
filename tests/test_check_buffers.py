"""`hpnb.models.check` of a model that changes its buffers in each forward: all runs start from the same ones.

pytest tests/test_check_buffers.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from changing_buffers import Net, Parts, parts

import hpnb
from hpnb.models import Part, registry
from hpnb.models.compare_parts import find_difference


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "REGISTERED", dict(registry.REGISTERED))


def make(in_data: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(in_data).double()


BATCH = {"x": torch.randn(6, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)}


@pytest.mark.parametrize("in_data", [False, True], ids=["in place", "in .data"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.usefixtures("launches_on_a_pool")
def test_a_model_that_changes_its_buffers_passes_and_keeps_them(training: bool, in_data: bool) -> None:
    hpnb.models.register(Net, parts)
    model = make(in_data).train(training)
    before = {name: b.clone() for name, b in model.named_buffers()}
    assert "parts against the forward, with gradients" in hpnb.models.check(model, BATCH)
    after = dict(model.named_buffers())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_runs_that_change_buffers_start_from_the_same() -> None:
    hpnb.models.register(Net, parts)
    model = make().train()
    with torch.no_grad():
        assert find_difference(model, BATCH, 1e-9) is None


class ScalesCodes(Parts):
    def run(self, block: Part, hidden: torch.Tensor, inputs: Mapping[str, Any]) -> torch.Tensor:
        with torch.no_grad():
            block.module.quantizer.codes.mul_(1.1)
        return super().run(block, hidden, inputs)


class DropsGradient(Parts):
    def run(self, block: Part, hidden: torch.Tensor, inputs: Mapping[str, Any]) -> torch.Tensor:
        return super().run(block, hidden.detach() if block.name == "blocks.2" else hidden, inputs)


@pytest.mark.parametrize("kind", [ScalesCodes, DropsGradient])
def test_parts_that_differ_are_rejected(kind: type[Parts]) -> None:
    hpnb.models.register(Net, lambda net: parts(net, kind))
    with pytest.raises(ValueError, match="does not fit it"):
        hpnb.models.check(make().train(), BATCH, ranks=1)

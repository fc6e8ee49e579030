"""What a call of a tensor-parallel or a pipelined model says, and takes, that a user gets wrong at first.

pytest tests/test_axes_and_tokens.py
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hpnb
from hpnb import placement
from hpnb.models.model_anatomy import Anatomy
from hpnb.pipeline_parallel import schedules
from hpnb.pipeline_parallel.layers import layers
from hpnb.placement import Cut, Placement
from hpnb.tensor_parallel.parallelize import TensorParallelAnatomy

pytestmark = pytest.mark.usefixtures("launches_on_a_pool")


def clip(grid_axes: bool) -> str:
    model = hpnb.models.vit("laptop", classes=3)
    mesh = hpnb.Mesh(hpnb.Layout(tp=4))
    hpnb.tensor_parallel.parallelize(model, mesh.tp, mode="2d")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(pixel_values=torch.randn(4, 3, 32, 32), labels=torch.arange(4) % 3).loss.backward()
    axes = list(hpnb.tensor_parallel.axes(model)) if grid_axes else [mesh.tp]
    try:
        return str(hpnb.precision.step(optimizer, [mesh.dp, *axes], max_norm=1.0).stepped)
    except ValueError as error:
        return str(error)


def test_the_axes_of_a_grid_are_named_as_one_can_write_them() -> None:
    for refused in hpnb.launch(clip, False, ranks=4, device="cpu"):
        assert "pass *hpnb.tensor_parallel.axes(model) too" in refused
        assert "[mesh.dp, *hpnb.tensor_parallel.axes(model)]" in refused
        assert "mesh.tp." not in refused
    assert hpnb.launch(clip, True, ranks=4, device="cpu") == ["True"] * 4


@pytest.mark.parametrize(("axis", "advice"), [("dp", "pass mesh.dp too"), ("dp.1", "mesh.dp.split made too")])
def test_other_axes_are_named_as_one_can_write_them(axis: str, advice: str) -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    placement.set_placement(weight, Placement("w", (4,), (Cut(axis, 0, ((0, 2),)),)))
    with pytest.raises(ValueError, match=f"{re.escape(advice)}$"):
        placement.check_axes([weight], [])


def pipeline_weights() -> list[str]:
    model = hpnb.models.vit("laptop", classes=3)
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    mesh = hpnb.Mesh(hpnb.Layout(pp=2))
    pipe = hpnb.Pipeline(model, mesh.pp, schedules.make("1f1b", 2, 2), lambda outputs, inputs: outputs)
    full = hpnb.pipeline_parallel.full_state_dict(pipe, mesh.pp)
    return [name for name in wanted if not torch.equal(full[name], wanted[name])]


def test_a_model_and_a_builder_are_cut_as_their_layers_are() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4)))
    builder = hpnb.pipeline_parallel.Builder(lambda i: torch.nn.Linear(2, 2), 4)
    for whole in (model, builder):
        of_layers = hpnb.pipeline_parallel.cut(layers(whole), 2, [1, 3])
        of_whole = hpnb.pipeline_parallel.cut(whole, 2, [1, 3])
        assert [len(stage) for stage in of_whole] == [len(stage) for stage in of_layers] == [1, 3]
        assert hpnb.pipeline_parallel.Stages(of_whole, [1], "cpu").numbers == (1,)


def test_the_weights_of_a_pipeline() -> None:
    assert hpnb.launch(pipeline_weights, ranks=2, device="cpu") == [[], []]


class Parts(Anatomy):
    def embed(self, inputs: Any) -> Any: ...
    def run(self, block: Any, hidden: Any, inputs: Any) -> Any: ...
    def finish(self, hidden: Any, inputs: Any) -> Any:
        return hidden

    def tokens(self, inputs: Any) -> Any:
        return inputs["tokens"]


@pytest.mark.parametrize("wrong", [8, (8,), (4, 8, 16), None])
def test_tokens_must_be_samples_and_tokens_of_each(wrong: Any) -> None:
    seen: list[tuple[int, int]] = []
    anatomy = TensorParallelAnatomy.around(
        Parts((), (), ()), set_batch_shape=lambda b, s: seen.append((b, s)), finish_outputs=None
    )
    anatomy.finish(torch.zeros(1), {"tokens": torch.Size([4, 8])})
    assert seen == [(4, 8)]
    with pytest.raises(
        ValueError, match=r"tokens\(self, inputs\) of Parts returned .*samples, tokens of each"
    ):
        anatomy.finish(torch.zeros(1), {"tokens": wrong})
    with pytest.raises(ValueError, match=r"tokens\(self, inputs\) of Parts returned"):
        anatomy.run(SimpleNamespace(), torch.zeros(1), {"tokens": wrong})  # type: ignore[arg-type]

"""Layers of a Builder that share a parameter, a module or a buffer, beside one process with all."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from torch import nn

import hpnb
from hpnb.pipeline_parallel import Builder, Stages, cut
from hpnb.pipeline_parallel.layers import layers

WORDS, WIDTH, LAYERS, D = 11, 6, 8, torch.float64
Make = Callable[[int], nn.Module]


class Head(nn.Module):
    """Draws its bias after the shared weight, so that it matters whether that is drawn here too."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.bias = weight, nn.Parameter(torch.randn(WORDS, dtype=D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T + self.bias


class Scaled(nn.Module):
    """A linear layer whose outputs are scaled by a table that all of them share."""

    def __init__(self, table: torch.Tensor, persistent: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=D)
        if isinstance(table, nn.Parameter):
            self.table = table
        else:
            self.register_buffer("table", table, persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x) * self.table)


def tied(embedding: Callable[[], nn.Embedding]) -> Make:
    def make(i: int) -> nn.Module:
        if i in (0, LAYERS - 1):
            return embedding() if i == 0 else Head(embedding().weight)
        return nn.Linear(WIDTH, WIDTH, dtype=D)

    return make


def embed() -> nn.Embedding:
    return nn.Embedding(WORDS, WIDTH, dtype=D)


def in_a_dict() -> Make:
    cache: dict[str, Any] = {}
    return tied(lambda: cache["table"] if "table" in cache else cache.setdefault("table", embed()))


def in_lru_cache() -> Make:
    return tied(functools.lru_cache(None)(lambda: embed()))


def drawn_anew() -> Make:
    """Layer 0 draws another weight whenever it is made, and keeps the last one."""
    cache: dict[str, nn.Embedding] = {}

    def make(i: int) -> nn.Module:
        if i == 0:
            cache["table"] = embed()
            return cache["table"]
        return Head(cache["table"].weight) if i == LAYERS - 1 else nn.Linear(WIDTH, WIDTH, dtype=D)

    return make


class Within(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(x @ self.weight.T) @ self.weight


def used_three_times() -> Make:
    """The layer before the head uses its weight, too, on one rank or another one."""
    cache: dict[str, Make] = {}

    def make(i: int) -> nn.Module:
        cache.setdefault("make", drawn_anew())
        if i != LAYERS - 2:
            return cache["make"](i)
        return Within(cache["make"](LAYERS - 1).weight)

    return make


class InAnObject:
    table: nn.Embedding | None = None

    def __call__(self, i: int) -> nn.Module:
        self.table = self.table or (embed() if i in (0, LAYERS - 1) else None)
        return tied(lambda: self.table or embed())(i)


def made_before() -> Make:
    torch.manual_seed(5)
    table = embed()
    return tied(lambda: table)


def blocks(draw: Callable[[], Any], block: Callable[[Any], nn.Module]) -> Make:
    cache: dict[str, Any] = {}

    def make(i: int) -> nn.Module:
        if i in (0, LAYERS - 1):
            return embed() if i == 0 else nn.Linear(WIDTH, WORDS, dtype=D)
        if "shared" not in cache:
            cache["shared"] = draw()
        return block(cache["shared"])

    return make


def one_block() -> Make:
    return blocks(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=D), nn.Tanh()), lambda block: block)


def one_parameter() -> Make:
    return blocks(lambda: nn.Parameter(torch.randn(WIDTH, dtype=D)), Scaled)


def one_table() -> Make:
    return blocks(lambda: torch.linspace(0.5, 1.5, WIDTH, dtype=D), Scaled)


SHARED = [
    in_a_dict,
    drawn_anew,
    used_three_times,
    in_lru_cache,
    InAnObject,
    made_before,
    one_block,
    one_parameter,
    one_table,
]
NUMBERS = torch.arange(16).view(16, 1).expand(16, 3) % WORDS
BATCH = {"input": NUMBERS, "labels": (NUMBERS + 1) % WORDS}


def loss_of(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())


def train_alone(factory: Callable[[], Make], steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    make = factory()
    made = [torch.manual_seed(i) and make(i) for i in range(LAYERS)]
    model = nn.ModuleDict({"layers": nn.Sequential(*made)})
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.05), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model["layers"](NUMBERS), BATCH)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(model.state_dict())


def step_pipelines(factory: Callable[[], Make]) -> list[float]:
    losses = []
    for name in ("1f1b", "zb-v"):
        builder, mesh = Builder(factory(), LAYERS), hpnb.Mesh(hpnb.Layout(pp=2))
        pipe = hpnb.Pipeline(builder, mesh.pp, name, loss_of, cut="parameters")
        losses.append(float(pipe.step(BATCH).loss))
    return losses


def train_boosted(
    factory: Callable[[], Make], knobs: dict[str, Any], folder: str
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Two steps, and two more of a new model that resumes them."""
    plugin, losses = hpnb.HybridParallelPlugin(precision="fp64", max_norm=0.3, **knobs), list[float]()
    booster = hpnb.Booster(plugin=plugin)
    share = {name: t[plugin.mesh.dp.rank :: plugin.mesh.dp.size] for name, t in BATCH.items()}
    for resumes in (False, True):
        builder = Builder(factory(), LAYERS)
        optimizer: Any = torch.optim.AdamW(builder.parameters(), lr=0.05)
        model, optimizer, *_ = booster.boost(builder, optimizer)
        if resumes:
            booster.load(folder, model, optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            result = booster.execute_pipeline(iter([share]), model, loss_of, optimizer)
            optimizer.step()
            losses += [] if result["loss"] is None else [float(result["loss"])]
        booster.save(folder, model, optimizer)
    axes = [axis for axis in (plugin.mesh.dp,) if plugin.zero_stage == 3]
    return losses, hpnb.pipeline_parallel.full_state_dict(model.unwrap(), plugin.mesh.pp, axes)


@pytest.fixture(scope="module")
def two() -> Iterator[hpnb.Ranks]:
    with hpnb.Ranks(2, device="cpu") as pool:
        yield pool


@pytest.mark.sampled(4)
@pytest.mark.parametrize("factory", SHARED)
def test_stages_share_what_layers_share(two: hpnb.Ranks, factory: Callable[[], Make]) -> None:
    (wanted,), _ = train_alone(factory, 1)
    assert two.run(step_pipelines, factory)[1] == pytest.approx([wanted] * 2, abs=1e-14)


@pytest.mark.sampled(5, cover=True)
@pytest.mark.parametrize(
    "knobs", [{"pp_size": 2}, {"pp_size": 2, "pp_style": "zb-v"}, {"zero_stage": 3}], ids=str
)
@pytest.mark.parametrize("factory", [in_a_dict, drawn_anew, used_three_times, one_block, one_parameter])
def test_it_trains_and_resumes_as_on_one_process(
    two: hpnb.Ranks, factory: Callable[[], Make], knobs: dict[str, Any], tmp_path: Path
) -> None:
    losses, weights = train_alone(factory, 4)
    boosted_losses, state = max(
        two.run(train_boosted, factory, knobs, str(tmp_path / "saved")), key=lambda r: len(r[0])
    )
    assert boosted_losses == pytest.approx(losses, abs=1e-13)
    assert state.keys() == weights.keys()
    assert all(torch.allclose(state[name], weights[name], rtol=0, atol=1e-12) for name in weights)


def test_the_parameters_of_a_builder_are_each_there_once() -> None:
    builder = Builder(in_a_dict(), LAYERS)
    names = [name for name, _ in builder.named_parameters()]
    assert names[0] == "layers.0.weight"
    assert "layers.7.weight" not in names
    assert names[-1] == "layers.7.bias"
    stages = [layers(builder)[:4], layers(builder)[4:]]
    (weight,) = Stages(stages, (0,), "cpu").tied
    assert (weight.names, weight.stages) == (("layers.0.weight", "layers.7.weight"), (0, 1))
    assert Stages([layers(builder)], (0,), "cpu").tied == ()


def beside_a_lock() -> Make:
    lock, cache = Lock(), dict[str, nn.Embedding]()

    def embedding() -> nn.Embedding:
        with lock:
            return cache["table"] if "table" in cache else cache.setdefault("table", embed())

    return tied(embedding)


def test_what_cannot_be_copied_is_refused() -> None:
    builder = Builder(beside_a_lock(), LAYERS)
    with pytest.raises(ValueError, match=r"layer\(0\) of the Builder returned weight .* in a dict"):
        Stages([layers(builder)], (0,), "cpu")


def test_a_shared_buffer_of_the_state_belongs_to_one_stage() -> None:
    make = blocks(lambda: torch.ones(WIDTH, dtype=D), lambda table: Scaled(table, persistent=True))
    builder = Builder(make, LAYERS)
    with pytest.raises(ValueError, match=r"layers.1.table of stage 0 is also layers.4.table of stage 1,"):
        Stages(cut(builder, 2), (0,), "cpu")
    assert len(list(Stages(cut(builder, 2, [1, 7]), (1,), "cpu").buffers())) == 1


@pytest.mark.parametrize("read", [lambda w: w.sum().item(), lambda w: w.detach().numpy()])
def test_layers_that_need_values_are_made_with_a_warning(read: Callable[[torch.Tensor], Any]) -> None:
    def make(i: int) -> nn.Module:
        layer = nn.Linear(2, 2)
        read(layer.weight)
        return layer

    with pytest.warns(UserWarning, match="cannot see whether they share parameters"):
        model = layers(Builder(make, 2))
    assert len(list(Stages([model], (0,), "cpu").parameters())) == 4


def test_a_builder_has_no_forward_to_check() -> None:
    with pytest.raises(TypeError, match="a Builder has no other forward than its layers"):
        hpnb.models.check(Builder(in_a_dict(), LAYERS), {"x": NUMBERS})  # type: ignore[arg-type]


def test_a_copied_factory_leaves_the_classes_of_the_user_as_they_are() -> None:
    calls: list[int] = []

    class Noting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(len(x))
            return super().forward(x)

    forward = Noting.forward
    (layer,) = layers(Builder(lambda i: Noting(2, 2), 1))
    assert Noting.forward is forward
    layer.built().run(None, torch.zeros(3, 2))
    assert calls == [3]

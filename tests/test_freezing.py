"""Parameters that are frozen for some steps: exact if they were trainable in boost, refused if not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from rank_pools import RankPools
from torch import nn

import hpnb

pytestmark = pytest.mark.usefixtures("launches_on_a_pool")

D = torch.float64
ZERO = [{}, {"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 3}]
STAGES = [{"pp_size": 2}, {"pp_size": 2, "zero_stage": 1}]


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


def make() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)]
    return nn.Sequential(*layers).to(D)


def freeze(model: nn.Module, layers: str, requires_grad: bool = False) -> None:
    """Layers 0, or 0 and 2, where this rank has them."""
    for name, p in model.named_parameters():
        if name[0] in layers:
            p.requires_grad_(requires_grad)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, dtype=D, generator=generator), torch.arange(8) % 3


def boost(options: dict[str, Any], model: nn.Module) -> tuple[hpnb.Booster, Any, Any]:
    booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(precision="fp64", **options))
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    return booster, model, optimizer


def train(booster: Any, model: Any, optimizer: Any, step: int, executes: bool) -> None:
    optimizer.zero_grad()
    x, y = batch(step)
    if booster is None:
        F.cross_entropy(model(x), y).backward()
    else:
        axis = booster.plugin.mesh.dp
        x, y = x.chunk(axis.size)[axis.rank], y.chunk(axis.size)[axis.rank]
        if executes:
            criterion = lambda outputs, inputs: F.cross_entropy(outputs, inputs[1])  # noqa: E731
            booster.execute_pipeline(iter([(x, y)]), model, criterion, optimizer)
        else:
            booster.backward(F.cross_entropy(model(x), y), optimizer)
    optimizer.step()


def one_process(layers: str) -> dict[str, torch.Tensor]:
    """Two steps with `layers` frozen, and two with all of them trained."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    freeze(model, layers)
    for step in range(4):
        if step == 2:
            freeze(model, layers, requires_grad=True)
        train(None, model, optimizer, step, False)
    return model.state_dict()


def frozen_after_boost(options: dict[str, Any], executes: bool, layers: str, folder: str) -> None:
    booster, model, optimizer = boost(options, make())
    freeze(model, layers)
    for step in range(4):
        if step == 2:
            freeze(model, layers, requires_grad=True)
        train(booster, model, optimizer, step, executes)
    booster.save_model(model, folder)


def from_a_checkpoint(options: dict[str, Any], executes: bool, layers: str, folder: str) -> None:
    """As the message says: the run began with a model that was frozen before boost."""
    frozen = make()
    freeze(frozen, layers)
    booster, model, optimizer = boost(options, frozen)
    for step in range(2):
        train(booster, model, optimizer, step, executes)
    booster.save(f"{folder}/checkpoint", model, optimizer)
    booster, model, optimizer = boost(options, make())
    booster.load(f"{folder}/checkpoint", model, optimizer)
    for step in range(2, 4):
        train(booster, model, optimizer, step, executes)
    booster.save_model(model, folder)


def compare(folder: Path, layers: str) -> None:
    saved = safetensors.torch.load_file(folder / "model.safetensors")
    for name, expected in one_process(layers).items():
        torch.testing.assert_close(saved[name], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.sampled(5, cover=True)
@pytest.mark.parametrize("run", [frozen_after_boost, from_a_checkpoint])
@pytest.mark.parametrize("executes", [False, True])
@pytest.mark.parametrize("options", ZERO + STAGES, ids=str)
def test_what_the_message_advises_is_exact(
    pools: RankPools, tmp_path: Path, run: Any, executes: bool, options: dict[str, Any]
) -> None:
    if "pp_size" in options and not executes:
        pytest.skip("a pipeline is run by execute_pipeline")
    pools[4 if "pp_size" in options else 2].run(run, options, executes, "0", str(tmp_path))
    compare(tmp_path, "0")


@pytest.mark.parametrize("options", STAGES, ids=str)
def test_a_first_stage_that_was_frozen_goes_on_from_a_checkpoint(
    pools: RankPools, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Only then do its outputs get gradients, which the stages have agreed on before."""
    pools[4].run(from_a_checkpoint, options, True, "02", str(tmp_path))
    compare(tmp_path, "02")


def head_first(booster: Any, model: Any, optimizer: Any, forgets: bool = True) -> None:
    """Two steps of the head alone, two of all layers, and two of all but the first two."""
    for step in range(6):
        if step in (0, 2, 4):
            freeze(model, "024", requires_grad=True)
            freeze(model, {0: "02", 2: "", 4: "02"}[step])
            if booster is not None and forgets:
                model.forget()
        train(booster, model, optimizer, step, booster is not None)


def head_first_in_stages(options: dict[str, Any], folder: str) -> None:
    booster, model, optimizer = boost(options, make())
    head_first(booster, model, optimizer)
    booster.save_model(model, folder)


@pytest.mark.sampled(5, cover=True)
@pytest.mark.parametrize("style", ["1f1b", "zb-v"])
@pytest.mark.parametrize("zero_stage", range(4))
def test_stages_are_frozen_and_thawed_between_steps(
    pools: RankPools, tmp_path: Path, zero_stage: int, style: str
) -> None:
    """After `forget`, without a checkpoint, though outputs of stages begin and cease to need gradients."""
    options = {"pp_size": 2, "zero_stage": zero_stage, "pp_style": style}
    options |= {"num_microbatches": 4, "num_model_chunks": 2 if style == "zb-v" else 1}
    pools[4].run(head_first_in_stages, options, str(tmp_path))
    expected = make()
    head_first(None, expected, torch.optim.AdamW(expected.parameters(), lr=0.01))
    saved = safetensors.torch.load_file(tmp_path / "model.safetensors")
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(saved[name], value, rtol=1e-12, atol=1e-12)


def does_not_forget() -> None:
    head_first(*boost({"pp_size": 2}, make()), forgets=False)


def test_without_forget_the_error_names_it() -> None:
    words = r"stage 0 gave \(1, 6\) .* with gradient for .* call \.forget\(\) on every rank before the next"
    with pytest.raises(hpnb.RankError, match=words):
        hpnb.launch(does_not_forget, ranks=2, device="cpu", hang_timeout=30)


def freeze_one_name_of_two(both: bool) -> None:
    model = hpnb.models.gpt2(hpnb.models.GPT2Size(hidden=8, layers=2, heads=2, mlp=8, vocab_size=9, length=4))
    booster, model, optimizer = boost({"pp_size": 2, "num_microbatches": 2}, model)
    ids = torch.arange(8).reshape(2, 4)
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith(("transformer.wte", "lm_head") if both else "transformer.wte"))
    for frozen in (True, False):
        booster.execute_pipeline(iter([{"input_ids": ids, "labels": ids}]), model, None, optimizer)
        for p in model.parameters():
            p.requires_grad_(frozen)
        model.forget()


def test_a_tied_weight_is_frozen_under_all_its_names() -> None:
    """One of its ranks waited for the other's gradient."""
    hpnb.launch(freeze_one_name_of_two, True, ranks=2, device="cpu", hang_timeout=30)
    words = r"wte.weight and lm_head.weight are one weight, trained on 1 of its ranks and frozen on 1"
    with pytest.raises(hpnb.RankError, match=words):
        hpnb.launch(freeze_one_name_of_two, False, ranks=2, device="cpu", hang_timeout=30)


def gradient_thrown_away(zero_stage: int) -> list[float]:
    """The weight after a backward whose gradient is thrown away by the model, and another that is stepped."""
    model = nn.Linear(1, 1, bias=False).to(D)
    nn.init.zeros_(model.weight)
    plugin = hpnb.HybridParallelPlugin(precision="fp64", zero_stage=zero_stage)
    booster = hpnb.Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))  # type: ignore[assignment]
    for factor in (100, 1):
        model.zero_grad()
        booster.backward(factor * model(torch.ones(1, 1, dtype=D)).mean(), optimizer)
    optimizer.step()
    return [float(p.sum()) for p in model.parameters() if p.numel()]


@pytest.mark.parametrize("zero_stage", range(4))
def test_zero_grad_of_the_model_throws_gradients_away(pools: RankPools, zero_stage: int) -> None:
    """ZeRO 1 and 2 kept them in their shards."""
    assert {w for rank in pools[2].run(gradient_thrown_away, zero_stage) for w in rank} == {-1.0}


def weighted_classes(outputs: torch.Tensor, inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    weights = torch.tensor([1.0, 5.0, 0.2], dtype=D)
    total = F.cross_entropy(outputs, inputs[1], weight=weights, reduction="sum")
    return total, weights[inputs[1]].sum()


def frozen_in_the_first_step(
    options: dict[str, Any] | None, forgets: bool = True, folder: str = ""
) -> dict[str, torch.Tensor]:
    """The head alone in the first step, then all, with a criterion that counts for itself."""
    booster: Any = None
    model: Any = make()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    if options is not None:
        booster, model, optimizer = boost(options, model)
    for step in range(4):
        freeze(model, "02", requires_grad=step > 0)
        if booster is not None and forgets:
            model.forget()
        optimizer.zero_grad()
        x, y = batch(step)
        y = y * (step + 1) % 3  # other classes, whose weights sum up to something else, in every step
        if booster is None:
            total, count = weighted_classes(model(x), (x, y))
            (total / count).backward()
        else:
            axis = booster.plugin.mesh.dp
            x, y = x.chunk(axis.size)[axis.rank], y.chunk(axis.size)[axis.rank]
            booster.execute_pipeline(iter([(x, y)]), model, weighted_classes, optimizer)
        optimizer.step()
    if booster is None:
        return dict(model.state_dict())
    booster.save_model(model, folder)
    return {}


@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("zero_stage", range(4))
def test_what_was_frozen_in_the_first_step_gets_the_gradients_of_a_counted_loss(
    pools: RankPools, tmp_path: Path, zero_stage: int, forgets: bool
) -> None:
    """The weights that were frozen when the step was made kept gradients before their correction."""
    pools[2].run(frozen_in_the_first_step, {"zero_stage": zero_stage}, forgets, str(tmp_path))
    saved = safetensors.torch.load_file(tmp_path / "model.safetensors")
    for name, value in frozen_in_the_first_step(None).items():
        torch.testing.assert_close(saved[name], value, rtol=1e-12, atol=1e-12)


def forgets_without_stages(executes: bool) -> None:
    booster, model, optimizer = boost({}, make())
    model.forget()
    train(booster, model, optimizer, 0, executes)
    model.forget()


@pytest.mark.parametrize("executes", [False, True])
def test_forget_is_there_without_stages(executes: bool) -> None:
    hpnb.launch(forgets_without_stages, executes, ranks=1, device="cpu")


def frozen_before_boost(options: dict[str, Any], executes: bool, layers: str) -> str:
    model = make()
    freeze(model, layers)
    booster, boosted, optimizer = boost(options, model)
    train(booster, boosted, optimizer, 0, executes)
    boosted.requires_grad_(True)
    try:
        train(booster, boosted, optimizer, 1, executes)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("executes", [False, True])
@pytest.mark.parametrize("options", ZERO[:3], ids=str)
def test_trained_after_boost_alone_is_refused(
    pools: RankPools, executes: bool, options: dict[str, Any]
) -> None:
    """execute_pipeline with ZeRO 0 reduced them on no rank, and said nothing: replicas diverged."""
    for message in pools[2].run(frozen_before_boost, options, executes, "0"):
        assert message.startswith("2 parameters, 0.weight first, were frozen when the model was")
        assert "boost it with these parameters trainable, and freeze them afterwards" in message


@pytest.mark.parametrize("options", STAGES, ids=str)
def test_a_stage_that_was_frozen_is_refused_too(pools: RankPools, options: dict[str, Any]) -> None:
    """A stage in which nothing is trained, as the last one here, has no reducer."""
    messages = pools[4].run(frozen_before_boost, options, True, "4")
    assert [message == "no error" for message in messages] == [True, False] * 2, messages
    assert all("2 parameters, 4.weight first, were frozen" in message for message in messages[1::2])


def wrapped_again() -> tuple[str, torch.Tensor | None]:
    model = make()
    freeze(model, "0")
    axis = hpnb.Mesh(hpnb.Layout(dp=2)).dp
    x, y = (t.chunk(2)[hpnb.rank()] for t in batch(0))
    wrapped = hpnb.DataParallel(model, axis)
    freeze(model, "0", requires_grad=True)
    try:
        F.cross_entropy(wrapped(x), y).backward()
        message = "no error"
    except RuntimeError as error:
        message = str(error)
    model.zero_grad()
    wrapped = hpnb.DataParallel(wrapped.detach(), axis)
    F.cross_entropy(wrapped(x), y).backward()
    return message, model.get_parameter("0.weight").grad


def test_a_data_parallel_model_is_wrapped_again(pools: RankPools) -> None:
    model = make()
    F.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
    for message, gradient in pools[2].run(wrapped_again):
        assert "detach() a DataParallel and wrap it again" in message
        torch.testing.assert_close(gradient, model[0].weight.grad, rtol=1e-12, atol=1e-12)

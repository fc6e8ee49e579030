"""A model of transformers whose modules were changed is saved as save_pretrained would, and trains on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_models import CHANGED, batch, build
from rank_pools import RankPools
from safetensors.torch import load_file

import hpnb

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {},
    "zero 1": {"zero_stage": 1},
    "zero 2": {"zero_stage": 2},
    "zero 3": {"zero_stage": 3},
    "pp": {"pp_size": 2, "num_microbatches": 2},
    "tp": {"tp_size": 2},
    "bf16": {"precision": "bf16", "zero_stage": 1},
}
IN_EACH = ("llama lora", "adapter", "untied", "shared lora")
CASES = [
    *((name, "dp") for name in CHANGED),
    *((name, layout) for name in IN_EACH for layout in ("zero 1", "zero 2", "zero 3", "pp")),
    *((name, "pp") for name in ("vit lora", "vit head", "weight norm", "compiled block")),
    *((name, "tp") for name in ("llama lora", "untied", "dropped block")),
    *((name, "bf16") for name in ("llama lora", "untied")),
]


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    made = RankPools()
    yield made
    made.close()


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


class Run:
    """A boosted model of changed modules in training on this rank."""

    def __init__(self, name: str, layout: str, seed: int = 3) -> None:
        torch.set_num_threads(1)
        self.name = name
        plugin = hpnb.HybridParallelPlugin(**({"precision": "fp32"} | LAYOUTS[layout]))
        self.booster, model = hpnb.Booster(plugin=plugin), build(name, seed)
        trained = [p for p in model.parameters() if p.requires_grad]
        self.model, self.optimizer, *_ = self.booster.boost(model, torch.optim.AdamW(trained, 1e-2))

    def step(self, number: int) -> float | None:
        data, dp = batch(self.name, number), self.booster.plugin.mesh.dp
        data = {key: value.chunk(dp.size)[dp.rank] for key, value in data.items()}
        self.optimizer.zero_grad()
        outputs = self.booster.execute_pipeline(iter([data]), self.model, None, self.optimizer)
        self.optimizer.step()
        return None if outputs["loss"] is None else float(outputs["loss"])


def save_and_go_on(name: str, layout: str, folder: Path) -> list[float | None]:
    """Save the model untrained, and all after two steps, while two more follow; return their losses."""
    run = Run(name, layout)
    run.booster.save_model(run.model, folder / "model")
    run.step(0)
    run.step(1)
    run.booster.save(folder / "runs" / "step-2", run.model, run.optimizer, background=True)
    losses = [run.step(2), run.step(3)]
    run.booster.wait()
    return losses


def load_and_go_on(name: str, layout: str, folder: Path) -> list[float | None]:
    run = Run(name, layout, seed=5)
    run.booster.load(folder / "runs", run.model, run.optimizer)
    return [run.step(2), run.step(3)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "layout"), CASES, ids=["-".join(case) for case in CASES])
def test_every_weight_is_saved_and_loaded(pools: RankPools, name: str, layout: str, tmp_path: Path) -> None:
    losses = pools[2].run(save_and_go_on, name, layout, tmp_path)
    assert pools[2].run(load_and_go_on, name, layout, tmp_path) == losses

    state, saved = build(name).state_dict(), weights_of(tmp_path / "model")
    if name == "tied mixtral":  # whose config ties nothing, so from_pretrained needs both names
        loaded = type(build(name)).from_pretrained(tmp_path / "model").state_dict()
        assert all(torch.equal(loaded[key], value) for key, value in state.items())
        return
    if name not in ("shared lora", "mixtral lora"):  # the first of which save_pretrained refuses
        build(name).save_pretrained(tmp_path / "plain")
        state = weights_of(tmp_path / "plain")
        assert saved.keys() == state.keys()
    dtype = torch.bfloat16 if layout == "bf16" else None  # to which boost rounds the weights
    for key, value in saved.items():
        assert torch.equal(value.to(dtype), state[key].to(dtype)), key
    left_out = {"model.layers.1.self_attn.q_proj.a.weight"} if name == "shared lora" else set()
    assert state.keys() - saved.keys() == left_out, "a second name of a weight is left out, and nothing else"
    assert (tmp_path / "model" / "config.json").is_file()


@pytest.mark.parametrize("name", ["untied", "shared lora"])
def test_another_layout_loads_it(pools: RankPools, name: str, tmp_path: Path) -> None:
    losses = pools[2].run(save_and_go_on, name, "pp", tmp_path)
    loaded = pools[2].run(load_and_go_on, name, "zero 3", tmp_path)
    assert loaded[0] == pytest.approx([x for x in losses[1] if x is not None], rel=1e-5)


# --- a Trainer ----------------------------------------------------------------------------------------------


def train(name: str, folder: Path, epochs: int, background: bool) -> list[Any]:
    run = Run(name, "dp")
    rows = [{key: value[0] for key, value in batch(name, i, samples=1).items()} for i in range(8)]
    loader = run.booster.plugin.prepare_dataloader(rows, 4, shuffle=False)
    hook = hpnb.CheckpointHook(folder, background=background)
    trainer = hpnb.Trainer(run.booster, run.model, run.optimizer, hooks=[hook], display_progress=False)
    trainer.resume(folder, missing_ok=True)
    trainer.fit(loader, epochs)
    return [t.clone() for t in run.model.state_dict().values()]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("name", ["vit head", "untied", "gpt2 lora"])
def test_a_trainer_saves_it_and_resumes(
    pools: RankPools, name: str, background: bool, tmp_path: Path
) -> None:
    pools[2].run(train, name, tmp_path / "halves", 1, background)
    halves = pools[2].run(train, name, tmp_path / "halves", 2, background)[0]
    full = pools[2].run(train, name, tmp_path / "full", 2, background)[0]
    assert all(torch.equal(a, b) for a, b in zip(halves, full, strict=True))


def test_a_warning_names_an_error_without_a_text(tmp_path: Path) -> None:
    def fail() -> None:
        raise StopIteration

    hook = hpnb.CheckpointHook(tmp_path, on_error="warn")
    with pytest.warns(UserWarning, match="training goes on: StopIteration"):
        hook._report(fail, tmp_path)


# --- what a class leaves out, and what no file has ----------------------------------------------------------


@pytest.mark.parametrize("name", ["marian", "trained positions"])
def test_what_a_class_leaves_out_is_as_it_was(pools: RankPools, name: str, tmp_path: Path) -> None:
    losses = pools[2].run(save_and_go_on, name, "zero 1", tmp_path)
    assert pools[2].run(load_and_go_on, name, "zero 1", tmp_path) == losses
    saved = weights_of(tmp_path / "model").keys()
    assert "model.encoder.embed_positions.weight" not in saved  # computed by its __init__, and frozen
    assert ("transformer.wpe.weight" in saved) == (name == "trained positions")


def save_counting(folder: Path) -> None:
    run = Run("counting", "dp")
    with pytest.warns(UserWarning, match="h.0.ln_1._extra_state is not restored"):
        run.booster.save_model(run.model, folder)


def test_a_state_that_is_no_tensor_is_warned_of(pools: RankPools, tmp_path: Path) -> None:
    pools[2].run(save_counting, tmp_path)


# --- what else reads the config -----------------------------------------------------------------------------


@pytest.mark.sampled(3, cover=True)
@pytest.mark.parametrize("layout", ["dp", "pp", "tp"])
@pytest.mark.parametrize("name", ["longer", "more classes"])
def test_a_table_or_head_of_another_size_than_the_config_trains(
    pools: RankPools, name: str, layout: str
) -> None:
    expected = float(build(name)(**batch(name, 0)).loss.detach())
    losses = [loss for loss in pools[2].run(first_loss, name, layout) if loss is not None]
    assert losses == pytest.approx([expected] * len(losses), rel=1e-5)


def first_loss(name: str, layout: str) -> float | None:
    return Run(name, layout).step(0)


# --- what does not fit --------------------------------------------------------------------------------------


REFUSED = {
    ("untied", "gpt2"): "other values in transformer.wte.weight than in lm_head.weight",
    ("gpt2", "untied"): "lacks lm_head.weight",
    ("llama", "llama lora"): "has weights that the model has not: model.layers.0.self_attn.q_proj.weight",
    ("llama lora", "llama"): "lacks model.layers.0.self_attn.q_proj.weight",
    ("vit", "vit head"): "has weights that the model has not: classifier.bias",
    ("vit head", "vit lora"): "has weights that the model has not: classifier.0.bias",
    ("gpt2", "adapter"): "lacks transformer.h.0.mlp.side.weight",
}


def refuse(saved: str, loaded: str, folder: Path) -> str:
    run, other = Run(saved, "dp"), Run(loaded, "dp", seed=5)
    run.booster.save_model(run.model, folder)
    before = [value.clone() for value in other.model.state_dict().values()]
    with pytest.raises(ValueError, match="load it into a model") as caught:
        other.booster.load_model(other.model, folder)
    after = other.model.state_dict().values()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return str(caught.value)


@pytest.mark.parametrize(("saved", "loaded"), REFUSED, ids=["-".join(case) for case in REFUSED])
def test_other_modules_than_were_saved_are_refused(
    pools: RankPools, saved: str, loaded: str, tmp_path: Path
) -> None:
    for message in pools[2].run(refuse, saved, loaded, tmp_path):
        assert REFUSED[saved, loaded] in message

"""Models: built alike everywhere, taken apart without a difference, a role for every weight, and no rows."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel, ViTConfig, ViTForImageClassification, ViTModel

import hpnb
from hpnb.data import ImageTransform, Loader, beans
from hpnb.models import (
    SIZES,
    Anatomy,
    Attention,
    Part,
    Role,
    ViTSize,
    accept_empty_batch,
    anatomy,
    attentions,
    decay_groups,
    register,
    registry,
    roles,
    tied,
    use_patch_matmul,
    vit,
    vit_model,
)
from hpnb.models.patch_matmul import PatchMatmul
from hpnb.models.role import linear

D = torch.float64
TINY = ViTSize(hidden=16, layers=2, heads=2, mlp=64, patch=8, image=16)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads that share their cores with other work wait for each other most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def images(rows: int, side: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, 3, side, side, dtype=dtype, generator=torch.Generator().manual_seed(3))


def same(a: nn.Module, b: nn.Module) -> bool:
    one, other = a.state_dict(), b.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def config(**changes: Any) -> ViTConfig:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return ViTConfig(**(sizes | {"patch_size": 8, "image_size": 16} | changes))


# --- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("classes", [3, 1000])
def test_parameters_are_those_of_the_real_model(name: str, classes: int) -> None:
    with torch.device("meta"):
        model = vit(name, classes=classes)
    assert SIZES[name].parameters(classes) == sum(p.numel() for p in model.parameters())
    assert ViTSize.of(model.config) == SIZES[name]
    positions = model.get_parameter("vit.embeddings.position_embeddings")
    assert positions.shape == (1, SIZES[name].tokens, SIZES[name].hidden)


@pytest.mark.parametrize(("name", "millions"), [("b16", 86), ("l16", 307)])
def test_sizes_are_those_that_were_published(name: str, millions: float) -> None:
    """Dosovitskiy et al. 2021, table 1; it rounds, and does not say which classifier is counted."""
    assert SIZES[name].parameters(classes=1000) / 1e6 == pytest.approx(millions, rel=0.015)
    assert SIZES[name].tokens == 197


@pytest.mark.parametrize(
    ("size", "batch", "classes"),
    [(SIZES["laptop"], 3, 5), (TINY, 2, 3), (ViTSize(24, 1, 3, 70, 4, 12), 4, 7)],
)
def test_flops_are_those_that_torch_counts(size: ViTSize, batch: int, classes: int) -> None:
    model = vit(size, classes=classes)
    model.set_attn_implementation("eager")  # products spelled out: a fused backward repeats some
    with FlopCounterMode(display=False) as counted:
        model(images(batch, size.image)).logits.sum().backward()
    assert size.training_flops(batch, classes) == counted.get_total_flops()


# --- building ------------------------------------------------------------------------------------


def test_a_model_starts_the_same_on_every_rank_and_leaves_the_generators_alone() -> None:
    def run() -> tuple[bool, bytes]:
        torch.manual_seed(hpnb.rank())
        before = torch.get_rng_state()
        model = vit(TINY, classes=3)
        untouched = torch.equal(before, torch.get_rng_state())
        values = torch.cat([p.detach().flatten() for p in model.parameters()])
        return untouched, values.numpy().tobytes()

    (left, a), (right, b) = hpnb.launch(run, ranks=2, device="cpu", timeout=60)
    assert left
    assert right
    assert a == b
    assert same(vit(TINY, classes=3), vit(TINY, classes=3))
    assert not same(vit(TINY, classes=3), vit(TINY, classes=3, seed=1))


def test_what_is_built_is_plain_and_ready_to_train() -> None:
    model = vit("laptop", classes=3)
    assert type(model) is ViTForImageClassification
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert model.config.num_labels == 3
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [0.0] * 9
    assert len(anatomy(model).blocks) >= 4
    dropped = vit("laptop", classes=3, dropout=0.5)
    x = images(2, 32)
    assert torch.equal(model(x).logits, model(x).logits)
    assert not torch.equal(dropped(x).logits, dropped(x).logits)


def test_dtype_and_default_dtype_change_no_value() -> None:
    single, double = vit(TINY, classes=3), vit(TINY, classes=3, dtype=D)
    assert double.dtype == D
    assert same(single.double(), double)
    torch.set_default_dtype(D)
    try:
        assert same(vit(TINY, classes=3), vit(TINY, classes=3, dtype=torch.float32))
        assert same(vit(TINY, classes=3, dtype=D), double)
        assert torch.get_default_dtype() == D
    finally:
        torch.set_default_dtype(torch.float32)


def test_nothing_is_built_elsewhere_and_then_moved_to_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*arguments: Any) -> ViTForImageClassification:
        used.append(torch.empty(1).device.type)
        return scratch(*arguments)

    used: list[str] = []
    scratch = vit_model._scratch
    monkeypatch.setattr(vit_model, "_scratch", build)
    vit(TINY, classes=3, device="meta")
    with torch.device("meta"):
        vit(TINY, classes=3)
        vit(TINY, classes=3, device="cpu")
    assert used == ["meta", "meta", "cpu"]


def test_the_meta_device_holds_shapes_alone() -> None:
    with torch.device("meta"):
        inside, elsewhere = vit("l16", classes=3), vit(TINY, classes=3, device="cpu")
    asked = vit("b16", classes=3, image_size=384, device="meta", dtype=torch.bfloat16)
    assert {p.device.type for p in inside.parameters()} == {"meta"}
    assert {(p.device.type, p.dtype) for p in asked.parameters()} == {("meta", torch.bfloat16)}
    assert asked.get_parameter("vit.embeddings.position_embeddings").shape == (1, 24 * 24 + 1, 768)
    assert same(elsewhere, vit(TINY, classes=3))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rows", "height", "width"), [(2, 12, 8), (3, 14, 11), (0, 8, 8)])
def test_patches_by_a_product_are_the_convolution(bias: bool, rows: int, height: int, width: int) -> None:
    made = nn.Sequential(nn.Conv2d(3, 5, kernel_size=(4, 2), stride=(4, 2), bias=bias, dtype=D))
    other = copy.deepcopy(made)
    parameters = list(other.parameters())
    use_patch_matmul(other)
    assert all(new is old for new, old in zip(other.parameters(), parameters, strict=True))
    x = torch.randn(rows, 3, height, width, dtype=D, requires_grad=True)
    found, ways = [], torch.randn(rows, 5, height // 4, width // 2, dtype=D)
    for conv in (made, other):
        y = conv(x)
        found.append([y, *torch.autograd.grad((y * ways).sum(), [x, *conv.parameters()])])
    assert isinstance(other[0], PatchMatmul)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_other_convolutions_stay_what_they_are() -> None:
    padded = nn.Conv2d(3, 4, kernel_size=4, stride=4, padding=1)
    grouped = nn.Conv2d(4, 4, kernel_size=2, stride=2, groups=2)
    overlapping = nn.Conv2d(3, 4, kernel_size=4, stride=2)
    others = nn.Sequential(padded, grouped, overlapping)
    use_patch_matmul(others)
    assert [type(conv) for conv in others] == [nn.Conv2d] * 3
    model = vit(TINY, classes=3)
    use_patch_matmul(model)
    changed = [name for name, module in model.named_modules() if isinstance(module, PatchMatmul)]
    assert changed == ["vit.embeddings.patch_embeddings.projection"]


def test_the_loss_of_images_keeps_float64() -> None:
    model, labels = vit(TINY, classes=3, dtype=D), torch.tensor([0, 2, 1, 1])
    out = model(images(4, 16), labels=labels)
    wanted = nn.functional.cross_entropy(out.logits, labels)
    assert out.loss.dtype == D
    assert torch.equal(out.loss, wanted)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"size": "huge"}, "no ViT of size 'huge'; use laptop, b16, l16 or a ViTSize"),
        ({"classes": 1}, "classes=1 .* use 2 or more"),
        ({"image_size": 60}, r"image=60 is no multiple of 8 \(patches\); 56 or 64 would work"),
        ({"image_size": 4}, r"image=4 is no multiple of 8 \(patches\); 8 would work"),
        ({"pretrained": "x", "device": "meta"}, "the meta device holds no values of x"),
    ],
)
def test_vit_refuses(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        vit(**({"classes": 3} | arguments))


def test_a_size_refuses_what_does_not_divide() -> None:
    with pytest.raises(ValueError, match="hidden 64 does not divide into 5 heads; 2 or 4 would work"):
        ViTSize(64, 2, 5, 256, 8, 32)
    with pytest.raises(ValueError, match="ViTSize layers=0 is not a size"):
        ViTSize(64, 0, 4, 256, 8, 32)


# --- pretrained ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What save_pretrained writes: of a backbone with a pooler, as the hub's in21k models are, and of a whole
    model with dropout."""
    root = tmp_path_factory.mktemp("saved")
    torch.manual_seed(5)
    ViTModel(config()).save_pretrained(root / "backbone")
    whole = ViTForImageClassification(config(num_labels=4, hidden_dropout_prob=0.1))
    whole.config.problem_type = "multi_label_classification"
    whole.save_pretrained(root / "whole")
    return root


def test_a_backbone_gets_a_new_classifier_that_all_ranks_agree_on(
    folders: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source, before = str(folders / "backbone"), torch.get_rng_state()
    model, again = (vit(classes=3, pretrained=source) for _ in range(2))
    assert capfd.readouterr().err == ""
    assert torch.equal(before, torch.get_rng_state())
    wanted = ViTModel.from_pretrained(source).state_dict()
    found = model.vit.state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in found)
    assert len(wanted) == len(found) + 2  # the pooler, which a classifier of images does not use
    assert model.classifier.weight.shape == (3, 16)
    assert 0 < float(model.classifier.weight.detach().std()) < 0.1
    assert same(model, again)
    other = vit(classes=3, pretrained=source, seed=1)
    assert not torch.equal(other.classifier.weight, model.classifier.weight)
    assert model.training
    assert model.config._attn_implementation == "sdpa"


def test_a_classifier_is_kept_if_it_has_the_classes(folders: Path) -> None:
    source = str(folders / "whole")
    kept, anew = vit(classes=4, pretrained=source), vit(TINY, classes=5, pretrained=source, dtype=D)
    assert same(kept, ViTForImageClassification.from_pretrained(source))
    assert anew.classifier.weight.shape == (5, 16)
    assert anew.classifier.weight.dtype == D
    assert torch.equal(anew.vit.layers[1].mlp.fc1.weight, kept.vit.layers[1].mlp.fc1.weight.double())
    for model in (kept, anew):
        assert {m.p for m in model.modules() if isinstance(m, nn.Dropout)} == {0.0}
        labels = torch.tensor([0, 1])
        loss = model(images(2, 16), labels=labels).loss  # one label an image, as these labels say
        assert torch.equal(loss, nn.functional.cross_entropy(model(images(2, 16)).logits, labels))


@pytest.mark.parametrize("side", [8, 32, 40])
def test_positions_are_interpolated_to_another_image_size(folders: Path, side: int) -> None:
    source, x = str(folders / "whole"), images(2, side, D)
    model = vit(classes=4, pretrained=source, image_size=side, dtype=D)
    oracle = vit(classes=4, pretrained=source).to(D)
    assert ViTSize.of(model.config).image == side
    wanted = oracle(x, interpolate_pos_encoding=True).logits
    assert float((model(x).logits - wanted).detach().norm() / wanted.detach().norm()) < 1e-6
    assert same(model.vit.layers, oracle.vit.layers)


def test_a_size_with_other_images_than_the_weights_says_which_are_kept(folders: Path) -> None:
    source, other = str(folders / "whole"), dataclasses.replace(TINY, image=32)
    with pytest.warns(UserWarning, match=r"16 pixels and keeps them, .* pass image_size=32 to resize"):
        kept = vit(other, classes=4, pretrained=source)
    assert kept.config.image_size == TINY.image


def test_what_is_loaded_saves_and_loads_again(folders: Path, tmp_path: Path) -> None:
    model = vit(classes=3, pretrained=str(folders / "backbone"), image_size=32)
    model.save_pretrained(tmp_path)
    again, found = ViTForImageClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(found.values())
    assert same(model, again)


def changed(source: Path, target: Path, **changes: Any) -> str:
    """A copy of a saved model whose config says something else."""
    shutil.copytree(source, target)
    file = target / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return str(target)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 3}, "16 weights are missing or of another shape: vit.layers.2.attention"),
        ({"intermediate_size": 32}, "6 weights are missing or of another shape: vit.layers.0.mlp.fc1.bias"),
        ({"num_hidden_layers": 1}, "16 weights are without a place: vit.layers.1.attention"),
        ({"model_type": "gpt2"}, "holds a model of type gpt2; what works is vit"),
    ],
)
def test_weights_that_are_not_those_of_the_config_are_refused(
    folders: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        vit(classes=4, pretrained=changed(folders / "whole", tmp_path / "changed", **changes))


def test_another_size_than_the_weights_have_is_refused(folders: Path) -> None:
    with pytest.raises(ValueError, match=r"hidden=16, not 64 and layers=2, not 8 .* leave size out"):
        vit("laptop", classes=4, pretrained=str(folders / "whole"))


def test_weights_that_cannot_be_had(folders: Path, tmp_path: Path) -> None:
    works = "give a folder that save_pretrained wrote, or leave pretrained out and train from scratch"
    with pytest.raises(OSError, match="vit-large.* nor its cache gives such a model; " + works) as caught:
        vit(classes=3, pretrained="google/vit-large-patch16-224-in21k")
    assert "\n" not in str(caught.value)
    with pytest.raises(OSError, match="is a folder without a whole model in it; " + works):
        vit(classes=3, pretrained=str(tmp_path))
    (tmp_path / "config.json").write_text((folders / "whole" / "config.json").read_text())
    with pytest.raises(OSError, match="is a folder without a whole model in it; " + works):
        vit(classes=3, pretrained=str(tmp_path))
    weights = (folders / "whole" / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ValueError, match="cannot be read"):
        vit(classes=4, pretrained=str(tmp_path))


def test_a_hub_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def refuse(source: str, local_files_only: bool) -> None:
        asked.append(local_files_only)
        raise OSError("as transformers does")

    room = "hpnb.models.pretrained"
    monkeypatch.setattr(f"{room}.AutoConfig.from_pretrained", refuse)
    monkeypatch.setattr(f"{room}.huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for answer in (True, False):
        monkeypatch.setattr(f"{room}.host_answers", lambda address, answer=answer: answer)
        with pytest.raises(OSError, match="ada/vit is not a folder here"):
            vit(classes=3, pretrained="ada/vit")
    assert asked == [False, True]


# --- anatomy -------------------------------------------------------------------------------------

KINDS = {
    "classifier": lambda: vit(TINY, classes=3, dtype=D),
    "pooler": lambda: ViTModel(config()).to(D),
    "no pooler": lambda: ViTModel(config(qkv_bias=False), add_pooling_layer=False, use_mask_token=True).to(D),
}


def taken_apart(model: nn.Module, inputs: dict[str, Any]) -> Any:
    """The model's forward, part by part."""
    found = anatomy(model)
    hidden = found.embed(inputs)
    for block in found.blocks:
        hidden = found.run(block, hidden, inputs)
    return found.finish(hidden, inputs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_parts_one_after_the_other_are_the_model(kind: str, attention: str) -> None:
    model = KINDS[kind]()
    model.set_attn_implementation(attention)
    for p in model.parameters():  # as after training: nothing is 0 or 1 any more
        p.data += 0.1 * torch.randn_like(p)
    x = {"pixel_values": images(3, 16)}
    whole, parts = model(**x), taken_apart(model, x)
    assert type(parts) is type(whole)
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)
    larger = {"pixel_values": images(3, 32), "interpolate_pos_encoding": True}
    assert torch.equal(taken_apart(model, larger)[0], model(**larger)[0])


def test_masked_patches_are_masked_in_parts_too() -> None:
    model = ViTModel(config(), use_mask_token=True).to(D)
    torch.nn.init.normal_(model.embeddings.mask_token)
    x = {"pixel_values": images(3, 16), "bool_masked_pos": torch.tensor([[1, 0, 0, 1]] * 3)}
    found = taken_apart(model, x).last_hidden_state
    assert torch.equal(found, model(**x).last_hidden_state)
    assert not torch.equal(found, model(x["pixel_values"]).last_hidden_state)


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_lies_in_one_part(kind: str) -> None:
    model = KINDS[kind]()
    found = anatomy(model)
    assert all(model.get_submodule(part.name) is part.module for part in found.parts)
    names = [f"{part.name}.{name}" for part in found.parts for name, _ in part.module.named_parameters()]
    assert names == [name for name, _ in model.named_parameters()]
    assert found.tied == ()


def test_blocks_are_named_in_order() -> None:
    with torch.device("meta"):
        found = anatomy(vit("l16", classes=1000))
    assert [part.name for part in found.embedding] == ["vit.embeddings"]
    assert [part.name for part in found.blocks] == [f"vit.layers.{i}" for i in range(24)]
    assert [part.name for part in found.head] == ["vit.layernorm", "classifier"]
    sizes = {sum(p.numel() for p in part.module.parameters()) for part in found.blocks}
    assert sizes == {SIZES["l16"].block().parameters}


def test_ties_are_found_under_all_their_names() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.middle = nn.Embedding(5, 4), nn.Linear(4, 4)
            self.output = nn.Linear(4, 5, bias=False)
            self.output.weight = self.embedding.weight

    assert tied(Shared()) == (("embedding.weight", "output.weight"),)
    with torch.device("meta"):
        assert tied(Shared()) == (("embedding.weight", "output.weight"),)


def test_a_mask_is_refused_and_not_forgotten() -> None:
    inputs = {"pixel_values": images(1, 16), "attention_mask": torch.ones(1, 5)}
    with pytest.raises(ValueError, match="takes no attention_mask"):
        anatomy(vit(TINY, classes=3)).embed(inputs)


@pytest.mark.parametrize("question", [anatomy, roles, lambda model: decay_groups(model, 0.1)])
def test_unknown_models_are_refused(question: Any) -> None:
    with pytest.raises(TypeError, match="parts of a Sequential; it knows those of ViTForImageClass"):
        question(nn.Sequential(vit(TINY, classes=3)))


# --- roles ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SIZES)
def test_every_parameter_has_a_role_that_fits_its_shape(name: str) -> None:
    size = SIZES[name]
    with torch.device("meta"):
        model = vit(name, classes=10)
    found = roles(model)
    assert list(found) == [name for name, _ in model.named_parameters()]
    for path, role in found.items():
        shape, module = model.get_parameter(path).shape, model.get_submodule(path.rpartition(".")[0])
        assert role.out_dim < len(shape)
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            outputs, inputs = module.weight.shape[:2]
            assert shape[role.out_dim] == outputs
            assert role.bias is path.endswith(".bias")
            assert role.bias or (role.in_dim is not None and shape[role.in_dim] == inputs)
        if role.cut_dim is not None:
            assert shape[role.cut_dim] % role.units == 0
            assert shape[role.cut_dim] // role.units in (1, size.hidden // size.heads)
        assert role.fused == 1


def test_roles_by_module() -> None:
    """The table as a reader would write it down, one row a module of the first block."""
    found = roles(vit("laptop", classes=3))
    for module, kind, units in [
        ("attention.q_proj", "column", 4), ("attention.k_proj", "column", 4),
        ("attention.v_proj", "column", 4), ("attention.o_proj", "row", 4),
        ("mlp.fc1", "column", 256), ("mlp.fc2", "row", 256),
    ]:  # fmt: skip
        weight, bias = (found[f"vit.layers.0.{module}.{part}"] for part in ("weight", "bias"))
        assert (weight.kind, bias.kind, weight.units) == (kind, kind, units)
        assert weight.cut_dim == {"column": 0, "row": 1}[kind]
        assert (bias.cut_dim, bias.units) == {"column": (0, units), "row": (None, 1)}[kind]
    kinds = {name: role.kind for name, role in found.items() if ".layers." not in name}
    assert {name.removeprefix("vit.") for name, kind in kinds.items() if kind == "embedding"} == {
        "embeddings.cls_token", "embeddings.position_embeddings",
        "embeddings.patch_embeddings.projection.weight", "embeddings.patch_embeddings.projection.bias",
    }  # fmt: skip
    assert kinds["vit.layernorm.weight"] == kinds["vit.layernorm.bias"] == "norm"
    assert kinds["classifier.weight"] == kinds["classifier.bias"] == "head"
    assert found["classifier.weight"].cut_dim is None


@pytest.mark.parametrize("kind", KINDS)
def test_roles_of_every_kind_of_vit(kind: str) -> None:
    model = KINDS[kind]()
    assert list(roles(model)) == [name for name, _ in model.named_parameters()]


def cut_block(model: ViTForImageClassification, hidden: torch.Tensor, ranks: int) -> torch.Tensor:
    """The first block as tensor parallelism computes it, rank after rank, with weights cut by role alone."""
    block = model.vit.layers[0]
    table = {n.removeprefix("vit.layers.0."): role for n, role in roles(model).items() if ".layers.0." in n}

    def share(name: str, rank: int) -> torch.Tensor:
        role, value = table[name], block.get_parameter(name)
        if role.cut_dim is None:
            return value if not role.bias or role.kind != "row" or rank == 0 else torch.zeros_like(value)
        width = value.size(role.cut_dim) // role.units
        counts = hpnb.comm.split_sizes(role.units, ranks)
        return value.narrow(role.cut_dim, sum(counts[:rank]) * width, counts[rank] * width)

    def apply(path: str, x: torch.Tensor, rank: int) -> torch.Tensor:
        return nn.functional.linear(x, share(f"{path}.weight", rank), share(f"{path}.bias", rank))

    def heads(name: str, x: torch.Tensor, rank: int) -> torch.Tensor:
        flat = apply(f"attention.{name}_proj", x, rank)
        return flat.unflatten(-1, (-1, block.attention.head_dim)).transpose(1, 2)  # (B, heads, s, d)

    x, out = block.layernorm_before(hidden), hidden
    for rank in range(ranks):
        q, k, v = (heads(name, x, rank) for name in "qkv")
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        out = out + apply("attention.o_proj", mixed, rank)
    x, hidden = block.layernorm_after(out), out
    for rank in range(ranks):
        up = block.mlp.activation_fn(apply("mlp.fc1", x, rank))
        hidden = hidden + apply("mlp.fc2", up, rank)
    return hidden


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_weights_cut_by_role_compute_the_block(ranks: int) -> None:
    model = vit("laptop", classes=3, dtype=D)
    for p in model.parameters():  # biases too
        p.data += 0.1 * torch.randn_like(p)
    hidden = torch.randn(2, 17, 64, dtype=D)
    wanted, found = model.vit.layers[0](hidden).detach(), cut_block(model, hidden, ranks).detach()
    assert float((found - wanted).norm() / wanted.norm()) < 1e-12


def test_a_parameter_without_a_role_is_named() -> None:
    model = vit(TINY, classes=3)
    model.vit.layers[0].mlp.adapter = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"2 of 42 parameters have no role in a ViTFor.*: vit.*adapter\.w"):
        roles(model)


def test_an_attention_with_fewer_heads_computes_them() -> None:
    """The weights of heads 1 and 2 of 4, and nothing else changed but the number of heads."""
    model = vit("laptop", classes=3, dtype=D)
    one, whole = model.vit.layers[3].attention, copy.deepcopy(model.vit.layers[3].attention)
    found = attentions(model)
    assert [each.path for each in found] == [f"vit.layers.{i}.attention" for i in range(8)]
    for name in ("q_proj", "k_proj", "v_proj"):
        layer = one.get_submodule(name)
        layer.weight, layer.bias = (nn.Parameter(p[16:48].clone()) for p in (layer.weight, layer.bias))
    one.o_proj.weight = nn.Parameter(one.o_proj.weight[:, 16:48].clone())
    whole.o_proj.weight.data[:, :16] = whole.o_proj.weight.data[:, 48:] = 0  # heads 0 and 3 are not heard
    found[3].resize(2)
    assert [each.heads for each in attentions(model)] == [4, 4, 4, 2, 4, 4, 4, 4]
    hidden = torch.randn(2, 17, 64, dtype=D)
    out, wanted = one(hidden)[0].detach(), whole(hidden)[0].detach()
    assert float((out - wanted).norm() / wanted.norm()) < 1e-12
    with pytest.raises(ValueError, match=r"vit\.layers\.3\.attention cannot compute with 0 heads"):
        found[3].resize(0)


# --- models of your own --------------------------------------------------------------------------


class Scale(nn.Module):
    """A norm that divides by the root mean square."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x / x.square().mean(-1, keepdim=True).add(1e-6).sqrt()


class Mix(nn.Module):
    """Attention with q, k and v in one nn.Linear."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads, self.width = heads, hidden // heads
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        folded = self.qkv(x).unflatten(-1, (3, self.heads, self.width)).movedim(2, 0)  # (3, B, s, a, d)
        q, k, v = folded.transpose(2, 3)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2).flatten(2)
        return self.out(mixed)  # type: ignore[no-any-return]


class OwnBlock(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.first, self.mix, self.second = Scale(hidden), Mix(hidden, heads), Scale(hidden)
        self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)

    def forward(self, x: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        x = x + self.mix(self.first(x), seen)
        return x + self.down(self.up(self.second(x)).relu())  # type: ignore[no-any-return]


class Own(nn.Module):
    """Words in, words out; a parameter without dims sets how sharp the logits are."""

    def __init__(self, hidden: int = 12, heads: int = 3, layers: int = 2) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(11, hidden), nn.ModuleList()
        self.blocks.extend(OwnBlock(hidden, heads) for _ in range(layers))
        self.last, self.logits = Scale(hidden), Words(hidden)
        self.logits.table = cast(nn.Parameter, self.words.weight)

    def forward(self, ids: torch.Tensor, seen: torch.Tensor | None = None) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x, seen)
        return self.logits(self.last(x))  # type: ignore[no-any-return]


class Words(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.table, self.sharp = nn.Parameter(torch.empty(11, hidden)), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.sharp * x @ self.table.mT


class OwnAnatomy(Anatomy):
    def embed(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        return self.embedding[0].module(inputs["ids"])  # type: ignore[no-any-return]

    def run(self, block: Part, hidden: torch.Tensor, inputs: Mapping[str, Any]) -> torch.Tensor:
        return block.module(hidden, inputs.get("seen"))  # type: ignore[no-any-return]

    def finish(self, hidden: torch.Tensor, inputs: Mapping[str, Any]) -> Any:
        last, logits = (part.module for part in self.head)
        return logits(last(hidden))


def own_anatomy(model: Own) -> OwnAnatomy:
    blocks = tuple(Part(f"blocks.{i}", block) for i, block in enumerate(model.blocks))
    head = (Part("last", model.last), Part("logits", model.logits))
    return OwnAnatomy((Part("words", model.words),), blocks, head, tied(model), causal=True)


def own_roles(model: Own) -> dict[str, Role]:
    found = {"words.weight": Role("embedding", 1, vocabulary=0), "logits.sharp": Role("head", 0)}
    for i in range(len(model.blocks)):
        block = f"blocks.{i}"
        found[f"{block}.first.scale"] = found[f"{block}.second.scale"] = Role("norm", 0)
        found |= linear(f"{block}.mix.qkv", "column", units=3, fused=3)
        found |= linear(f"{block}.mix.out", "row", units=3)
        found |= linear(f"{block}.up", "column", units=24)
        found |= linear(f"{block}.down", "row", units=24)
    return found | {"last.scale": Role("norm", 0)}


def own_attentions(model: Own) -> tuple[Attention, ...]:
    mixes: list[tuple[str, Any]] = [(f"blocks.{i}.mix", block.mix) for i, block in enumerate(model.blocks)]
    return tuple(Attention(path, mix.heads, partial(setattr, mix, "heads")) for path, mix in mixes)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> type[Own]:
    monkeypatch.setattr(registry, "REGISTERED", dict(registry.REGISTERED))
    register(Own, own_anatomy, own_roles, own_attentions)
    return Own


def test_a_model_of_your_own_is_taken_apart_like_the_others(own: type[Own]) -> None:
    model = own().to(D)
    ids = torch.randint(11, (2, 7))
    inputs = {"ids": ids, "seen": torch.ones(7, 7, dtype=torch.bool).tril()}
    assert torch.equal(taken_apart(model, inputs), model(**inputs))
    assert not torch.equal(taken_apart(model, {"ids": ids}), model(**inputs))
    assert anatomy(model).tied == (("words.weight", "logits.table"),)
    found = roles(model)
    assert list(found) == [name for name, _ in model.named_parameters()]
    assert (found["blocks.1.mix.qkv.weight"].units, found["blocks.1.mix.qkv.weight"].fused) == (3, 3)
    decayed, _ = decay_groups(model, 0.1)
    assert len(decayed["params"]) == 8
    assert [(each.path, each.heads) for each in attentions(model)] == [
        ("blocks.0.mix", 3),
        ("blocks.1.mix", 3),
    ]
    attentions(model)[1].resize(2)
    assert model.blocks[1].get_submodule("mix").heads == 2


def test_a_subclass_is_what_its_nearest_class_is(own: type[Own]) -> None:
    class Nearer(Own):
        pass

    class Another(ViTForImageClassification):  # type: ignore[misc]
        pass

    model = Nearer()
    assert len(attentions(model)) == 2
    register(Nearer, lambda model: own_anatomy(model), lambda model: own_roles(model))
    assert attentions(model) == ()
    assert len(attentions(own())) == 2
    assert isinstance(anatomy(model), OwnAnatomy)
    register(Nearer, own_anatomy, own_roles, own_attentions)  # as a cell that runs again
    assert len(attentions(model)) == 2
    register(Nearer, own_anatomy, own_roles)
    assert attentions(model) == ()
    assert [part.name for part in anatomy(Another(config())).head] == ["vit.layernorm", "classifier"]


@pytest.mark.parametrize(("kind", "words"), [(Own(), "an object of class Own"), (int, "int")])
def test_register_takes_a_class_of_modules(kind: Any, words: str) -> None:
    with pytest.raises(TypeError, match=f"takes a class of modules, not {words}; pass the class"):
        register(kind, own_anatomy, own_roles)


@pytest.mark.parametrize(
    ("name", "role", "words"),
    [
        ("blocks.0.mix.qkv.weight", Role("column", 0, 1, units=5, fused=3),
         r"of shape \(36, 12\): 12 in each of 3 along dim 0 do not fall into 5 equal units; 4 or 6"),
        ("blocks.0.mix.qkv.weight", Role("column", 0, 1, fused=5), "36 along dim 0 are not fused=5 equal"),
        ("blocks.1.down.weight", Role("row", 0, 1, units=7), "24 along dim 1 .* 7 equal units; 6 or 8"),
        ("blocks.1.down.weight", Role("row", 0), "cut by its inputs .row., but its role has no in_dim"),
        ("blocks.1.up.bias", Role("column", 1), "has dim 0 alone, but its role says out_dim=1"),
        ("words.weight", Role("embedding", 1, vocabulary=2), "has dims 0 to 1, .* says vocabulary=2"),
        ("words.weight", Role("embedding", 1, -1), "has dims 0 to 1, but its role says in_dim=-1"),
        ("last.scale", Role(cast(Any, "scale"), 0), "has the role 'scale'; use column, row, embedding, norm"),
        ("last.scale", Role("norm", 0, units=0), "has units=0, fused=1; use 1 or more of each"),
    ],
)  # fmt: skip
def test_roles_that_do_not_fit_are_refused(own: type[Own], name: str, role: Role, words: str) -> None:
    register(own, own_anatomy, lambda model: own_roles(model) | {name: role})
    with pytest.raises(ValueError, match=words):
        roles(own())
    assert len(decay_groups(own(), 0.1)) == 2  # of a model that is cut, whose shapes are no longer whole


def test_a_parameter_of_your_own_without_a_role_is_named(own: type[Own]) -> None:
    register(own, own_anatomy, lambda model: {"words.weight": Role("embedding", 1)})
    with pytest.raises(ValueError, match=r"20 of 21 parameters have no role in a Own: blocks\.0\.first\.s"):
        roles(own())


# --- weight decay --------------------------------------------------------------------------------


def test_matrices_decay_and_nothing_else() -> None:
    model = vit("laptop", classes=3)
    decayed, spared = decay_groups(model, 0.1)
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    matrices = [m.weight for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    assert {id(p) for p in decayed["params"]} == {id(p) for p in matrices}
    assert len(decayed["params"]) + len(spared["params"]) == len(list(model.parameters()))
    assert not {id(p) for p in decayed["params"]} & {id(p) for p in spared["params"]}


def test_weight_decay_moves_matrices_alone() -> None:
    model = vit(TINY, classes=3)
    for p in model.parameters():
        p.data += 0.5  # biases that are 0 would not decay either way
        p.grad = torch.zeros_like(p)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.optim.AdamW(decay_groups(model, 0.5), lr=0.1).step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name, role in roles(model).items() if role.decay}
    assert "vit.layers.0.mlp.fc1.weight" in moved


def test_frozen_parameters_are_in_no_group() -> None:
    model = vit(TINY, classes=3)
    model.vit.requires_grad_(False)
    decayed, spared = decay_groups(model, 0.1)
    assert decayed["params"] == [model.classifier.weight]
    assert spared["params"] == [model.classifier.bias]


# --- batches -------------------------------------------------------------------------------------


def gradients(model: nn.Module, x: torch.Tensor, labels: torch.Tensor, count: int) -> dict[str, Any]:
    """Of this share of a batch of `count` samples: the sum of its losses over the global count."""
    model.zero_grad()
    (nn.functional.cross_entropy(model(x).logits, labels, reduction="sum") / count).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable")  # renamed on the way to transformers 6
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("recompute", [False, True])
def test_no_rows_give_gradients_of_zero(attention: str, recompute: bool) -> None:
    model = vit(TINY, classes=3)
    model.set_attn_implementation(attention)
    if recompute:
        model.gradient_checkpointing_enable()
    x, labels = images(4, 16), torch.tensor([0, 1, 2, 1])
    assert model(x[:0]).logits.shape == (0, 3)
    before = gradients(model, x, labels, 4)
    for name, grad in gradients(model, x[:0], labels[:0], 4).items():
        assert grad is not None, name
        assert torch.equal(grad, torch.zeros_like(grad)), name
    after = gradients(model, x, labels, 4)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(float(g.abs().sum()) > 0 for name, g in after.items() if "k_proj.bias" not in name)


def test_no_rows_pass_each_part_and_their_gradient_comes_back() -> None:
    found = anatomy(vit(TINY, classes=3))
    hidden = torch.zeros(0, 5, 16, requires_grad=True)
    out = found.finish(found.run(found.blocks[1], hidden, {}), {}).logits
    out.sum().backward()
    assert out.shape == (0, 3)
    assert hidden.grad is not None
    assert hidden.grad.shape == (0, 5, 16)


def test_one_row_is_a_row_like_any_other() -> None:
    model, x = vit(TINY, classes=3, dtype=D), images(3, 16)
    rows = torch.cat([model(row).logits for row in x.split(1)]).detach()
    whole = model(x).logits.detach()
    assert float((rows - whole).norm() / whole.norm()) < 1e-12


def test_models_with_hooks_are_copied_and_pickled() -> None:
    model = vit(TINY, classes=3)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same(model, other)
        assert other(images(0, 16)).logits.shape == (0, 3)
        assert torch.equal(other(images(2, 16)).logits, model(images(2, 16)).logits)


def test_a_model_made_elsewhere_can_be_taught_to_accept_no_rows() -> None:
    model = ViTModel(config())
    with pytest.raises(RuntimeError):
        model(images(0, 16))  # if transformers ever does it, accept_empty_batch can go
    accept_empty_batch(anatomy(model))
    accept_empty_batch(anatomy(model))  # twice is no harm
    assert model(images(0, 16)).last_hidden_state.shape == (0, 5, 16)
    assert model(images(2, 16)).last_hidden_state.shape == (2, 5, 16)


def test_a_gpt2_block_could_be_given_no_rows_too() -> None:
    """Masks come by name and with as many rows."""
    from hpnb.models.placeholder_sample import _PlaceholderSample

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11, n_positions=6))
    block, row = model.transformer.h[0], _PlaceholderSample()
    block.register_forward_pre_hook(row.before, with_kwargs=True)
    block.register_forward_hook(row.after)
    hidden = torch.zeros(0, 6, 8, requires_grad=True)
    out = block(hidden, attention_mask=torch.zeros(0, 1, 6, 6))
    assert out.shape == (0, 6, 8)
    out.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in block.parameters())


@pytest.mark.slow  # test_data.py learns from leaves
def test_the_laptop_vit_learns_to_tell_leaves_apart() -> None:
    leaves = beans("train", size=256, image_size=32, kind="generated")
    loader = Loader(leaves, 16, transform=ImageTransform(32))
    model = vit("laptop", classes=len(leaves.classes))
    optimizer = torch.optim.AdamW(decay_groups(model, 0.05), lr=1e-3)
    losses = []
    for epoch in range(7):
        loader.set_epoch(epoch)
        for batch in loader:
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert sum(losses[-16:]) < 0.85 * sum(losses[:16])


def test_names_of_the_docstring_are_there() -> None:
    assert isinstance(roles(vit(TINY, classes=3))["vit.layers.0.mlp.fc1.weight"], Role)
    assert isinstance(anatomy(vit(TINY, classes=3)).blocks[0], Part)
    missing = [name for name in hpnb.models.__all__ if not hasattr(hpnb.models, name)]
    assert missing == []

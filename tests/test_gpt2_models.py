"""GPT-2: built alike everywhere, taken apart without a difference, a role for every weight, and its heads."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel, GPT2Model
from transformers.masking_utils import create_causal_mask
from transformers.pytorch_utils import Conv1D

import hpnb
from hpnb.data import byte_tokenizer, collate_pairs
from hpnb.models import (
    GPT2_SIZES,
    GPT2Size,
    Role,
    accept_empty_batch,
    anatomy,
    attentions,
    decay_groups,
    gpt2,
    gpt2_model,
    roles,
    vit,
)
from hpnb.models.gpt2_parts import GPT2Anatomy
from hpnb.theory.transformer import model_flops

D = torch.float64
TINY = GPT2Size(hidden=12, layers=2, heads=3, mlp=48, vocab_size=31, length=10)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads that share their cores with other work wait for each other most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tokens(rows: int, length: int, vocabulary: int = 30, seed: int = 3) -> torch.Tensor:
    """No row holds TINY's last token, which pads."""
    return torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))


def same(a: nn.Module, b: nn.Module) -> bool:
    one, other = a.state_dict(), b.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def stirred(model: Any) -> Any:
    """As after training: nothing is 0 or 1 any more."""
    generator = torch.Generator().manual_seed(11)
    for p in model.parameters():
        p.data += 0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return model


def config(**changes: Any) -> GPT2Config:
    sizes = {"n_embd": 12, "n_layer": 2, "n_head": 3, "vocab_size": 31, "n_positions": 10}
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 30, "eos_token_id": 30}
    return GPT2Config(**(sizes | drop | ends | {"use_cache": False} | changes))


KINDS = {
    "language": lambda: gpt2(TINY, dtype=D),
    "classes": lambda: gpt2(TINY, classes=4, dtype=D),
    "transformer": lambda: GPT2Model(config()).to(D),
    "untied": lambda: GPT2LMHeadModel(config(tie_word_embeddings=False)).to(D),
}

# --- sizes ---------------------------------------------------------------------------------------


@pytest.mark.sampled(5, cover=True)
@pytest.mark.parametrize("name", GPT2_SIZES)
@pytest.mark.parametrize("classes", [None, 3])
def test_parameters_are_those_of_the_real_model(name: str, classes: int | None) -> None:
    with torch.device("meta"):
        model = gpt2(name, classes=classes)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert GPT2_SIZES[name].parameters(classes) == sum(p.numel() for p in model.parameters())
    assert GPT2Size.of(model.config) == GPT2_SIZES[name]


def test_an_mlp_of_any_width_is_a_size() -> None:
    """It was refused unless it was a multiple of hidden, which nothing needs."""
    size = GPT2Size(24, 2, 3, 50, 13, 9)
    model = gpt2(size)
    assert GPT2Size.of(model.config) == size
    assert size.parameters() == sum(p.numel() for p in model.parameters())


def test_sizes_are_those_that_were_released() -> None:
    counts = {name: size.parameters() for name, size in GPT2_SIZES.items()}
    assert counts == {
        "laptop": 549_100,
        "124m": 124_439_808,
        "355m": 354_823_168,
        "774m": 774_030_080,
        "1.5b": 1_557_611_200,
    }
    for size in list(GPT2_SIZES.values())[1:]:
        assert size.hidden // size.heads == 64
        assert (size.vocab_size, size.length) == (50257, 1024)


@pytest.mark.parametrize("classes", [None, 5])
@pytest.mark.parametrize(
    ("size", "batch", "length"),
    [(GPT2_SIZES["laptop"], 3, 17), (TINY, 2, None), (GPT2Size(24, 1, 3, 50, 13, 9), 4, 9)],
)
def test_flops_are_those_that_torch_counts(
    size: GPT2Size, batch: int, length: int | None, classes: int | None
) -> None:
    model = gpt2(size, classes=classes, attention="eager")  # spelled out: a fused backward repeats some
    with FlopCounterMode(display=False) as counted:
        model(tokens(batch, length or size.length, size.vocab_size)).logits.sum().backward()
    assert size.training_flops(batch, length, classes) == counted.get_total_flops()
    if classes is None and size.mlp == 4 * size.hidden:
        told = model_flops(size.layers, size.hidden, size.vocab_size, length or size.length, batch)
        assert size.training_flops(batch, length) == told


def test_a_size_refuses_what_does_not_divide() -> None:
    with pytest.raises(ValueError, match="hidden 64 does not divide into 5 heads; 2 or 4 would work"):
        GPT2Size(64, 2, 5, 256, 31, 8)
    with pytest.raises(ValueError, match="GPT2Size vocab_size=0 is not a size"):
        replace(TINY, vocab_size=0)


# --- building ------------------------------------------------------------------------------------


def test_a_model_starts_the_same_on_every_rank_and_leaves_the_generators_alone() -> None:
    def run() -> tuple[bool, bytes]:
        torch.manual_seed(hpnb.rank())
        before = torch.get_rng_state()
        model = gpt2(TINY)
        untouched = torch.equal(before, torch.get_rng_state())
        values = torch.cat([p.detach().flatten() for p in model.parameters()])
        return untouched, values.numpy().tobytes()

    (left, a), (right, b) = hpnb.launch(run, ranks=2, device="cpu", timeout=60)
    assert left
    assert right
    assert a == b
    assert not same(gpt2(TINY), gpt2(TINY, seed=1))


def test_what_is_built_is_plain_and_ready_to_train() -> None:
    model, classifier = gpt2("laptop"), gpt2("laptop", classes=3, dropout=0.5)
    assert type(model) is GPT2LMHeadModel
    assert type(classifier) is GPT2ForSequenceClassification
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert gpt2(TINY, attention="eager").config._attn_implementation == "eager"
    assert not model.config.use_cache
    assert model(tokens(2, 5)).past_key_values is None
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [0.0] * 13
    assert [m.p for m in classifier.modules() if isinstance(m, nn.Dropout)] == [0.5] * 13
    assert (model.config.pad_token_id, classifier.config.pad_token_id) == (None, 508)
    assert classifier.config.num_labels == classifier(tokens(2, 5)).logits.shape[1] == 3
    assert len(anatomy(model).blocks) == 4


def test_what_ends_a_text_pads_a_classifier() -> None:
    for vocabulary, end in ((50257, 50256), (50304, 50256), (509, 508)):
        found = gpt2(TINY, classes=2, vocab_size=vocabulary, device="meta").config
        assert (found.pad_token_id, found.eos_token_id, found.vocab_size) == (end, end, vocabulary)


def test_dtype_and_default_dtype_change_no_value_and_no_tie() -> None:
    single, double = gpt2(TINY), gpt2(TINY, dtype=D)
    assert double.dtype == D
    assert same(single.double(), double)
    for model in (single, double, gpt2(TINY, device="meta", dtype=torch.bfloat16)):
        assert model.lm_head.weight is model.transformer.wte.weight
    torch.set_default_dtype(D)
    try:
        assert same(gpt2(TINY, dtype=D), double)
    finally:
        torch.set_default_dtype(torch.float32)


def test_nothing_is_built_elsewhere_and_then_moved_to_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*arguments: Any) -> Any:
        used.append(torch.empty(1).device.type)
        return scratch(*arguments)

    used: list[str] = []
    scratch = gpt2_model._scratch
    monkeypatch.setattr(gpt2_model, "_scratch", build)
    gpt2(TINY, device="meta")
    with torch.device("meta"):
        gpt2(TINY)
        gpt2(TINY, device="cpu")
    assert used == ["meta", "meta", "cpu"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"size": "xl"}, "no GPT-2 of size 'xl'; use laptop, 124m, 355m, 774m, 1.5b or a GPT2Size"),
        ({"classes": 1}, "classes=1 .* use 2 or more, or None"),
        ({"attention": "flash"}, "attention='flash' is not known here; use 'sdpa' or 'eager'"),
        ({"length": 0}, "GPT2Size length=0 is not a size"),
        ({"pretrained": "x", "device": "meta"}, "the meta device holds no values of x"),
    ],
)
def test_gpt2_refuses(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        gpt2(**arguments)


# --- pretrained ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    torch.manual_seed(5)
    stirred(GPT2LMHeadModel(config(attn_pdrop=0.2, use_cache=True))).save_pretrained(root / "language")
    classifier = GPT2ForSequenceClassification(config(num_labels=4, pad_token_id=7))
    classifier.config.problem_type = "regression"
    stirred(classifier).save_pretrained(root / "classifier")
    return root


def rewritten(source: Path, target: Path, weights: dict[str, torch.Tensor] | None, **changes: Any) -> str:
    """A saved model with another config, and other weights if given; without any if {}."""
    target.mkdir()
    told = json.loads((source / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(told))
    kept = load_file(source / "model.safetensors") if weights is None else weights
    save_file({name: t.clone() for name, t in kept.items()}, target / "model.safetensors", {"format": "pt"})
    return str(target)


def test_a_language_model_comes_back_as_it_was_saved(
    folders: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source, before = str(folders / "language"), torch.get_rng_state()
    model = gpt2(pretrained=source)
    assert capfd.readouterr().err == ""
    assert torch.equal(before, torch.get_rng_state())
    assert same(model, GPT2LMHeadModel.from_pretrained(source))
    assert model.training
    assert not model.config.use_cache
    assert model.lm_head.weight is model.transformer.wte.weight
    assert {m.p for m in model.modules() if isinstance(m, nn.Dropout)} == {0.0}
    assert model.config._attn_implementation == "sdpa"
    assert gpt2(pretrained=source, attention="eager").config._attn_implementation == "eager"
    assert gpt2(TINY, pretrained=source, dtype=D, vocab_size=31).dtype == D
    model.save_pretrained(tmp_path)
    again, found = GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(found.values())
    assert same(model, again)


def test_a_language_model_gets_a_new_classifier_that_all_ranks_agree_on(folders: Path) -> None:
    source = str(folders / "language")
    model, again = (gpt2(classes=3, pretrained=source) for _ in range(2))
    assert same(model, again)
    assert same(model.transformer, GPT2LMHeadModel.from_pretrained(source).transformer)
    assert model.score.weight.shape == (3, 12)
    assert 0 < float(model.score.weight.detach().std()) < 0.1
    assert model.config.pad_token_id == 30
    assert not torch.equal(gpt2(classes=3, pretrained=source, seed=1).score.weight, model.score.weight)


def test_a_classifier_is_kept_if_it_has_the_classes(folders: Path) -> None:
    source = str(folders / "classifier")
    kept, anew = gpt2(classes=4, pretrained=source), gpt2(classes=5, pretrained=source)
    assert same(kept, GPT2ForSequenceClassification.from_pretrained(source))
    assert anew.score.weight.shape == (5, 12)
    for model in (kept, anew):
        assert model.config.pad_token_id == 7
        out = model(tokens(2, 6), labels=torch.tensor([0, 1]))  # a label a row, as these labels say
        assert torch.equal(out.loss, nn.functional.cross_entropy(out.logits, torch.tensor([0, 1])))


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_a_file_of_the_first_releases(folders: Path, tmp_path: Path, form: str) -> None:
    """No "transformer." in front, the causal mask among the weights, and a config without later names."""
    wanted = GPT2LMHeadModel.from_pretrained(folders / "language")
    old = {name.removeprefix("transformer."): t.clone() for name, t in wanted.state_dict().items()}
    del old["lm_head.weight"]
    for i in range(2):
        old[f"h.{i}.attn.bias"] = torch.ones(10, 10).tril()[None, None]
        old[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    names = ("n_embd", "n_layer", "n_head", "n_positions", "vocab_size", "model_type")
    (tmp_path / "config.json").write_text(
        json.dumps({name: getattr(wanted.config, name) for name in names} | {"n_ctx": 10, "eos_token_id": 30})
    )
    if form == "bin":
        torch.save(old, tmp_path / "pytorch_model.bin")
    else:
        save_file(old, tmp_path / "model.safetensors", {"format": "pt"})
    assert same(gpt2(pretrained=str(tmp_path)), wanted)
    classifier = gpt2(classes=2, pretrained=str(tmp_path))
    assert same(classifier.transformer, wanted.transformer)
    assert classifier.config.pad_token_id == 30


def test_the_first_positions_are_kept(folders: Path, tmp_path: Path) -> None:
    whole, model = (
        gpt2(pretrained=str(folders / "language")),
        gpt2(pretrained=str(folders / "language"), length=6),
    )
    x = tokens(2, 6)
    assert GPT2Size.of(model.config).length == 6
    assert model.transformer.wpe.weight.requires_grad
    assert torch.equal(model(x).logits, whole(x).logits)
    model.save_pretrained(tmp_path)
    assert same(gpt2(pretrained=str(tmp_path)), model)
    with pytest.raises(ValueError, match="has positions for 1 to 10 tokens, not for 11"):
        gpt2(pretrained=str(folders / "language"), length=11)


@pytest.mark.parametrize(
    ("arguments", "changes", "words"),
    [
        ({}, {"n_layer": 3}, "12 weights are missing or of another shape: transformer.h.2.attn"),
        ({}, {"n_inner": 24}, "6 weights are missing or of another shape: transformer.h.0.mlp.c_fc.bias"),
        ({}, {"n_layer": 1}, "weights are without a place: (transformer.)?h.1.attn"),
        ({}, {"model_type": "vit"}, "holds a model of type vit; what works is gpt2"),
        ({}, {"tie_word_embeddings": False}, "1 weights are missing .*: lm_head.weight"),
        ({}, {"add_cross_attention": True}, "has cross attention, which cannot be cut"),
        ({"size": "laptop"}, {}, "hidden=12, not 100 and layers=2, not 4 .* leave size out"),
        ({"size": TINY, "vocab_size": 30}, {}, "has vocab_size=31, not 30; leave size out"),
        ({"vocab_size": 30}, {}, "has vocab_size=31, not 30; leave vocab_size out"),
        ({"classes": 2}, {"eos_token_id": None}, "names no token that pads and no single one that ends"),
        ({"classes": 2}, {"pad_token_id": 31}, "pads with token 31, but has tokens 0 to 30"),
    ],
)
def test_what_does_not_fit_is_refused(
    folders: Path, tmp_path: Path, arguments: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    source = rewritten(folders / "language", tmp_path / "changed", None, **changes)
    with pytest.raises(ValueError, match=words):
        gpt2(**({"pretrained": source} | arguments))


def test_weights_that_cannot_be_had(folders: Path, tmp_path: Path) -> None:
    works = "give a folder that save_pretrained wrote, or leave pretrained out and train from scratch"
    with pytest.raises(OSError, match="gpt2-xl is not a folder here.*; " + works):
        gpt2(pretrained="openai-community/gpt2-xl")
    (tmp_path / "config.json").write_text((folders / "language" / "config.json").read_text())
    with pytest.raises(OSError, match="is a folder without a whole model in it; " + works):
        gpt2(pretrained=str(tmp_path))


# --- anatomy -------------------------------------------------------------------------------------


def gpt2_anatomy(model: nn.Module) -> GPT2Anatomy:
    found = anatomy(model)
    assert isinstance(found, GPT2Anatomy)
    return found


def taken_apart(model: nn.Module, inputs: dict[str, Any]) -> Any:
    """The model's forward, part by part."""
    found = anatomy(model)
    hidden = found.embed(inputs)
    for block in found.blocks:
        hidden = found.run(block, hidden, inputs)
    return found.finish(hidden, inputs)


def batches() -> dict[str, dict[str, torch.Tensor]]:
    ids = tokens(3, 8)
    seen = torch.ones(3, 8, dtype=torch.int64)
    right, left = seen.clone(), seen.clone()
    right[0, 5:] = right[2, 7:] = 0
    left[1, :3] = 0
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]]).expand(3, -1)
    return {
        "plain": {"input_ids": ids},
        "all seen": {"input_ids": ids, "attention_mask": seen},
        "padded right": {"input_ids": ids.masked_fill(right == 0, 30), "attention_mask": right},
        "padded left": {"input_ids": ids.masked_fill(left == 0, 30), "attention_mask": left},
        "padding not masked": {"input_ids": ids.masked_fill(right == 0, 30)},
        "types": {"input_ids": ids, "token_type_ids": tokens(3, 8, seed=4)},
        "packed": {"input_ids": ids, "position_ids": packed},
        "later positions": {"input_ids": ids, "position_ids": torch.arange(2, 10).unsqueeze(0)},
        "mask of our own": {
            "input_ids": ids,
            "attention_mask": right.bool()[:, None, None, :].expand(-1, 1, 8, -1),
        },
        "one row": {"input_ids": ids[:1]},
        "one token": {"input_ids": ids[:, :1]},
    }


@pytest.mark.sampled(24, cover=True)
@pytest.mark.parametrize("batch", batches())
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_parts_one_after_the_other_are_the_model(kind: str, attention: str, batch: str) -> None:
    model, inputs = stirred(KINDS[kind]()), batches()[batch]
    model.set_attn_implementation(attention)
    if batch == "mask of our own" and attention == "eager":
        inputs = inputs | {"attention_mask": (~inputs["attention_mask"]).to(D) * -1e9}
    whole, parts = model(**inputs), taken_apart(model, inputs)
    assert torch.equal(parts[0], whole[0])
    assert list(parts) == list(whole)
    if attention == "sdpa":
        found = gpt2_anatomy(model)
        needed = batch in ("padded right", "padded left", "packed", "mask of our own")
        assert (found.mask(found.config, torch.zeros(1, dtype=D), inputs) is not None) is needed


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_is_drawn_where_the_model_draws_it(kind: str) -> None:
    model = KINDS[kind]()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
    outputs, inputs = [], batches()["plain"]
    for run in (partial(model, **inputs), partial(taken_apart, model, inputs)):
        torch.manual_seed(1)
        outputs.append(run()[0])
    assert torch.equal(*outputs)
    assert not torch.equal(outputs[0], model(**batches()["plain"])[0])


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_lies_in_one_part_unless_it_is_tied(kind: str) -> None:
    model = KINDS[kind]()
    found = anatomy(model)
    assert all(model.get_submodule(part.name) is part.module for part in found.parts)
    names = [f"{part.name}.{name}" for part in found.parts for name, _ in part.module.named_parameters()]
    assert names == [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert found.causal == isinstance(model, GPT2LMHeadModel)
    tie = (("transformer.wte.weight", "lm_head.weight"),)
    assert found.tied == (tie if kind == "language" else ())


def test_parts_are_named_in_order() -> None:
    with torch.device("meta"):
        found = anatomy(gpt2("1.5b"))
    assert [part.name for part in found.embedding] == [f"transformer.{n}" for n in ("wte", "wpe", "drop")]
    assert [part.name for part in found.blocks] == [f"transformer.h.{i}" for i in range(48)]
    assert [part.name for part in found.head] == ["transformer.ln_f", "lm_head"]
    sizes = {sum(p.numel() for p in part.module.parameters()) for part in found.blocks}
    assert sizes == {GPT2_SIZES["1.5b"].block().parameters}


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"inputs_embeds": torch.zeros(1, 3, 12)}, "takes no inputs_embeds; give it input_ids"),
        ({"input_ids": tokens(1, 3), "encoder_hidden_states": torch.zeros(1)}, "no encoder_hidden_states"),
        ({"labels": tokens(1, 3)}, r"takes input_ids \(B, s\), and this batch has labels"),
        ({"input_ids": tokens(1, 3)[0]}, r"input_ids of shape \(3,\) are not \(B, s\)"),
        ({"input_ids": tokens(2, 11)}, "rows of 11 tokens meet 10 positions; shorten them to 10"),
    ],
)
def test_batches_that_cannot_be_taken(inputs: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        anatomy(gpt2(TINY)).embed(inputs)


def test_rows_need_a_token_that_pads() -> None:
    model = GPT2ForSequenceClassification(config(num_labels=3))
    model.config.pad_token_id = None
    one, two = {"input_ids": tokens(1, 5)}, {"input_ids": tokens(2, 5)}
    assert torch.equal(taken_apart(model, one).logits, model(**one).logits)
    for run in (partial(model, **two), partial(taken_apart, model, two)):
        with pytest.raises(ValueError, match=r"batch sizes > 1|2 sequences are unknown"):
            run()


@pytest.mark.parametrize("question", [anatomy, roles, attentions])
def test_cross_attention_is_refused(question: Any) -> None:
    with pytest.raises(ValueError, match="with cross attention cannot be cut"):
        question(GPT2LMHeadModel(config(add_cross_attention=True)))


@pytest.mark.parametrize("shape", [(1, 8, 12), (3, 8, 6), (3, 4, 12)])
def test_the_mask_comes_from_the_batch_and_not_from_a_shard(shape: tuple[int, ...]) -> None:
    found, inputs = gpt2_anatomy(gpt2(TINY, dtype=D)), batches()["padded right"]
    wanted = found.mask(found.config, torch.zeros(3, 8, 12, dtype=D), inputs)
    assert wanted is not None
    assert wanted.shape == (3, 1, 8, 8)
    copied = copy.deepcopy(found)
    assert copied.mask._cache._value is None
    shard = copied.mask(found.config, torch.zeros(shape, dtype=D), inputs)
    assert shard is not None
    assert torch.equal(shard, wanted)


def test_a_mask_is_made_once_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(**arguments: Any) -> Any:
        asked.append(arguments["inputs_embeds"].dtype)
        return create_causal_mask(**arguments)

    asked: list[torch.dtype] = []
    monkeypatch.setattr("hpnb.models.gpt2_mask.create_causal_mask", made)
    model = gpt2(replace(TINY, layers=4), dtype=D)
    found, inputs = gpt2_anatomy(model), batches()["padded right"]
    alone = [
        replace(found, embedding=(), blocks=(block,), head=()) for block in found.blocks
    ]  # as a pipeline
    hidden = found.embed(inputs)
    for one in alone:
        hidden = one.run(one.blocks[0], hidden, inputs)
    assert len(asked) == 1
    first = found.run(found.blocks[0], hidden, inputs)
    inputs["attention_mask"][1, 6:] = 0  # the same tensor, other values
    assert not torch.equal(found.run(found.blocks[0], hidden, inputs), first)
    found.run(found.blocks[0], hidden, inputs)
    assert len(asked) == 2
    found.run(anatomy(gpt2(TINY)).blocks[0], hidden.float(), inputs)  # other hidden states: another mask
    assert asked == [D, D, torch.float32]
    assert found.mask._cache._value is not None
    del inputs["attention_mask"]
    assert found.mask._cache._value is None  # a mask does not outlive its batch
    with torch.inference_mode():
        hidden, padding = hidden.clone(), torch.ones(3, 8)
        for _ in range(2):
            found.run(found.blocks[0], hidden, inputs | {"attention_mask": padding})
    assert len(asked) == 5


@pytest.mark.parametrize("classes", [None, 4])
def test_shapes_alone_pass_on_the_meta_device(classes: int | None) -> None:
    """Where nobody can say whether anything is padded."""
    inputs = {name: value.to("meta") for name, value in batches()["padded right"].items()}
    logits = taken_apart(gpt2(TINY, classes=classes, device="meta"), inputs).logits
    assert logits.device.type == "meta"
    assert logits.shape == ((3, 8, 31) if classes is None else (3, 4))


def test_anatomies_are_copied_and_pickled() -> None:
    model, inputs = gpt2(TINY, classes=3), batches()["padded right"]
    found = anatomy(model)
    wanted = found.run(found.blocks[0], found.embed(inputs), inputs)
    for other in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert torch.equal(other.run(other.blocks[0], other.embed(inputs), inputs), wanted)


def test_a_pipeline_takes_a_gpt2_apart() -> None:
    """Without running one: its layers are the anatomy's, and on meta, where FLOPs are counted, they run."""
    from hpnb.pipeline_parallel.layer_costs import flops_of
    from hpnb.pipeline_parallel.layers import layers, shared_parameters

    inputs = batches()["padded right"]
    for classes in (None, 4):
        found = layers(gpt2(TINY, classes=classes, attention="eager"))
        flops = flops_of(found, inputs)
        assert 3 * sum(flops) == TINY.training_flops(3, 8, classes)
        assert all(layer.causal is (classes is None) for layer in found)
    homes = shared_parameters([[layer] for layer in layers(gpt2(TINY))])
    assert homes == {("transformer.wte.weight", "lm_head.weight"): (0, 3)}


# --- roles ---------------------------------------------------------------------------------------


@pytest.mark.sampled(5, cover=True)
@pytest.mark.parametrize("name", GPT2_SIZES)
@pytest.mark.parametrize("classes", [None, 3])
def test_every_parameter_has_a_role_that_fits_its_shape(name: str, classes: int | None) -> None:
    size = GPT2_SIZES[name]
    with torch.device("meta"):
        model = gpt2(name, classes=classes)
    found = roles(model)
    assert list(found) == [name for name, _ in model.named_parameters()]
    for path, role in found.items():
        shape, module = model.get_parameter(path).shape, model.get_submodule(path.rpartition(".")[0])
        assert role.bias is path.endswith(".bias")
        if isinstance(module, Conv1D):
            inputs, outputs = module.weight.shape
            assert shape[role.out_dim] == outputs
            assert role.bias or (role.in_dim is not None and shape[role.in_dim] == inputs)
        if role.cut_dim is not None:
            width = size.hidden // size.heads if ".attn." in path else 1
            assert shape[role.cut_dim] == role.fused * role.units * width


def test_roles_by_module() -> None:
    """The table as a reader would write it down."""
    found = roles(gpt2("laptop"))
    block = {
        "ln_1": Role("norm", 0),
        "attn.c_attn": Role("column", 1, 0, decay=True, units=5, fused=3),
        "attn.c_proj": Role("row", 1, 0, decay=True, units=5),
        "ln_2": Role("norm", 0),
        "mlp.c_fc": Role("column", 1, 0, decay=True, units=400),
        "mlp.c_proj": Role("row", 1, 0, decay=True, units=400),
    }
    for module, weight in block.items():
        assert found[f"transformer.h.3.{module}.weight"] == weight
        bias = found[f"transformer.h.3.{module}.bias"]
        assert (bias.kind, bias.out_dim, bias.in_dim, bias.decay, bias.bias) == (
            weight.kind,
            0,
            None,
            False,
            True,
        )
        cut = weight.kind == "column"
        assert bias.cut_dim == (0 if cut else None)
        assert (bias.units, bias.fused) == ((weight.units, weight.fused) if cut else (1, 1))
    rest = {name: role for name, role in found.items() if ".h." not in name}
    assert rest == {
        "transformer.wte.weight": Role("embedding", 1, decay=True, vocabulary=0),
        "transformer.wpe.weight": Role("embedding", 1, decay=True),
        "transformer.ln_f.weight": Role("norm", 0),
        "transformer.ln_f.bias": Role("norm", 0, bias=True),
    }
    assert roles(gpt2(TINY, classes=3))["score.weight"] == Role("head", 0, 1, decay=True)
    assert roles(KINDS["untied"]())["lm_head.weight"] == Role("head", 0, 1, decay=True, vocabulary=0)
    assert {role.vocabulary for role in roles(vit("laptop", classes=3)).values()} == {None}


@pytest.mark.parametrize("kind", KINDS)
def test_what_has_two_dims_decays(kind: str) -> None:
    model = KINDS[kind]()
    decayed, spared = decay_groups(model, 0.1)
    assert {id(p) for p in decayed["params"]} == {id(p) for p in model.parameters() if p.dim() >= 2}
    assert len(decayed["params"]) + len(spared["params"]) == len(list(model.parameters()))


# --- heads ---------------------------------------------------------------------------------------


def cut(module: nn.Module, path: str, table: dict[str, Role], keep: slice, one_of_all: float) -> None:
    """Leave a Conv1D the units in `keep`, as a rank of tensor parallelism has them; rows add up to a sum."""
    layer: Any = module.get_submodule(path)
    for name, p in list(layer.named_parameters()):
        role = table[f"{path}.{name}"]
        if role.cut_dim is None:
            p.data *= one_of_all  # the bias of a sum, added once
            continue
        size = p.size(role.cut_dim) // role.units // role.fused
        whole = p.data.unflatten(role.cut_dim, (role.fused, role.units, size))
        whole = whole.movedim(role.cut_dim + 1, 0)[keep].movedim(0, role.cut_dim + 1)
        setattr(layer, name, nn.Parameter(whole.flatten(role.cut_dim, role.cut_dim + 2).contiguous()))
    layer.nf = layer.weight.shape[1]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("counts", [(2, 2), (1, 3), (1, 1, 2)])
def test_shards_with_their_own_heads_compute_the_attention(attention: str, counts: tuple[int, ...]) -> None:
    size = GPT2Size(hidden=24, layers=2, heads=4, mlp=48, vocab_size=31, length=10)
    model = stirred(gpt2(size, dtype=D, attention=attention))
    hidden = torch.randn(2, 7, 24, dtype=D)
    wanted = model.transformer.h[1].attn(hidden)[0].detach()
    total = torch.zeros_like(wanted)
    for begin, n in zip(itertools.accumulate(counts, initial=0), counts, strict=False):
        shard = copy.deepcopy(model)
        table = roles(shard)
        for each in attentions(shard):
            for name in ("c_attn", "c_proj"):
                cut(shard, f"{each.path}.{name}", table, slice(begin, begin + n), 1.0 if begin == 0 else 0.0)
            each.resize(n)
        assert [each.heads for each in attentions(shard)] == [n, n]
        attn = shard.transformer.h[1].attn
        assert attn.c_attn.weight.shape == (24, 3 * n * 6)
        total += attn(hidden)[0].detach()
    assert float((total - wanted).norm() / wanted.norm()) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_attentions_come_in_the_order_of_blocks(kind: str) -> None:
    model = KINDS[kind]()
    found = attentions(model)
    assert [each.path for each in found] == [f"{part.name}.attn" for part in anatomy(model).blocks]
    assert [each.heads for each in found] == [3, 3]
    with pytest.raises(ValueError, match=r"h\.0\.attn cannot compute with 0 heads; 1 is the least"):
        found[0].resize(0)


# --- batches -------------------------------------------------------------------------------------


def gradients(model: nn.Module, inputs: dict[str, Any], labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of this share of a batch: the sum of its losses over the global count."""
    model.zero_grad()
    logits = model(**inputs).logits
    (nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum") / 24).backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    assert all(grad is not None for grad in found.values())
    return {name: grad for name, grad in found.items() if grad is not None}


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable")  # renamed on the way to transformers 6
@pytest.mark.parametrize("classes", [None, 3])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("recompute", [False, True])
def test_no_rows_give_gradients_of_zero(attention: str, recompute: bool, classes: int | None) -> None:
    model, inputs = gpt2(TINY, classes=classes, attention=attention), batches()["padded right"]
    labels = tokens(3, 8, 3) if classes is None else torch.tensor([0, 2, 1])
    if recompute:
        model.gradient_checkpointing_enable()
    none = {name: value[:0] for name, value in inputs.items()}
    before = gradients(model, inputs, labels)
    for name, grad in gradients(model, none, labels[:0]).items():
        assert torch.equal(grad, torch.zeros_like(grad)), name
    after = gradients(model, inputs, labels)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(float(g.abs().sum()) > 0 for g in after.values())
    parts = taken_apart(model, none)
    assert parts.logits.shape == model(**none).logits.shape
    assert len(parts.logits) == 0


def test_a_model_made_elsewhere_can_be_taught_to_accept_no_rows() -> None:
    model, none = GPT2Model(config()), {"input_ids": tokens(0, 5)}
    with pytest.raises(RuntimeError):
        model(**none)  # if transformers ever does it, accept_empty_batch can go
    accept_empty_batch(anatomy(model))
    assert model(**none).last_hidden_state.shape == (0, 5, 12)


def test_pairs_of_sentences_go_through_a_classifier() -> None:
    items = [
        {"sentence1": "one", "sentence2": "the same", "label": 1},
        {"sentence1": "another sentence", "sentence2": "and a longer one", "label": 0},
    ]
    batch = collate_pairs(byte_tokenizer())(items)
    model = gpt2("laptop", classes=2, vocab_size=50257, dtype=D)
    whole = model(**batch).logits
    alone = model(**collate_pairs(byte_tokenizer())(items[:1])).logits  # without padding
    assert float((whole[0] - alone[0]).detach().abs().max()) < 1e-12
    assert torch.equal(taken_apart(model, dict(batch)).logits, whole)


@pytest.mark.slow  # that it computes what transformers does is above
def test_the_laptop_gpt2_learns_to_go_on() -> None:
    """Rows that count on from a number: what comes next is known."""
    model = gpt2("laptop", length=16)
    optimizer = torch.optim.AdamW(decay_groups(model, 0.01), lr=3e-3)
    losses = []
    for step in range(30):
        ids = (tokens(8, 1, 509, seed=step) + torch.arange(16)) % 509
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.85 * losses[0]

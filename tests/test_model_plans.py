"""Models of transformers that publish how they may be cut train on every layout as on one process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import plan_models
import pytest
import torch
import transformers
from rank_pools import RankPools
from tiny_models import build, planned_architecture

import hpnb
from hpnb import HybridParallelPlugin, models, placement
from hpnb.hybrid import parallelize_model
from hpnb.models import plan_groups
from hpnb.models.compare_parts import run_parts
from hpnb.models.registry import registration_of
from hpnb.pipeline_parallel import Stages, full_state_dict
from hpnb.split_sizes import split_sizes

KINDS = tuple(plan_models.OPTIONS)
Found = dict[str, Any]


@dataclass(frozen=True)
class Layout:
    """The options of one run; ranks are dp x pp x tp."""

    dp: int = 1
    pp: int = 1
    tp: int = 1
    style: str = "1f1b"
    sequence: bool = False
    zero: int = 0
    head: str = "ForCausalLM"
    recompute: Any = False
    direct: bool = False

    @property
    def ranks(self) -> int:
        return self.dp * self.pp * self.tp


LAYOUTS = {
    "dp2": Layout(dp=2),
    "dp2-zero3": Layout(dp=2, zero=3),
    "pp2-1f1b": Layout(pp=2),
    "pp2-zb-h1": Layout(pp=2, style="zb-h1"),
    "pp2-zb-v": Layout(pp=2, style="zb-v", recompute="full"),
    "tp2": Layout(tp=2, direct=True),
    "tp2-sequence": Layout(tp=2, sequence=True, recompute="full"),
    "pp2-tp2-zero1": Layout(pp=2, tp=2, zero=1),
    "dp2-pp2-zero2-classifies": Layout(dp=2, pp=2, zero=2, head="ForSequenceClassification"),
    "pp2-tp2-sequence": Layout(pp=2, tp=2, style="zb-v", sequence=True),
}


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    made = RankPools()
    yield made
    made.close()


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(outputs: Any, inputs: Any) -> Any:
    return outputs.loss


def float64_loss(outputs: Any, inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum and count of a causal model of which hpnb knows no loss, so that transformers casts to float32."""
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
    total = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    return total, (labels != -100).sum()


def batch_for(head: str) -> plan_models.Batch:
    batch = plan_models.batch(7, classes=3 if head == "ForSequenceClassification" else 0)
    if head == "ForTokenClassification":
        labels = batch["labels"]
        batch["labels"] = torch.where(labels == -100, labels, labels % 3)
    return batch


@cache
def serial(kind: str, head: str) -> Found:
    """One process, twice the same batch."""
    model, given = plan_models.build(kind, head), batch_for(head)
    optimizer, losses = optimizer_of(model), []
    for _ in range(2):
        optimizer.zero_grad()
        outputs, labels = model(**{n: t for n, t in given.items() if n != "labels"}), given["labels"]
        logits = outputs.logits  # transformers casts them to float32 for the loss
        if head == "ForCausalLM":
            logits, labels = logits[:, :-1], labels[:, 1:]
        if logits.dim() == 3:
            logits, labels = logits.flatten(0, 1), labels.flatten()
        loss = torch.nn.functional.cross_entropy(logits, labels)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return {"losses": losses, "weights": dict(model.state_dict())}


def train(kind: str, layout: Layout, folder: Path | None = None) -> Found:
    """The same on ranks: two steps, so that the second loss and the weights have seen all gradients."""
    torch.set_num_threads(1)
    plugin = HybridParallelPlugin(
        tp_size=layout.tp, pp_size=layout.pp, zero_stage=layout.zero, precision="fp64",
        num_microbatches=3 if layout.pp > 1 else None, pp_style=layout.style,
        num_model_chunks=2 if layout.style == "zb-v" else 1, activation_checkpointing=layout.recompute,
        enable_sequence_parallelism=layout.sequence,
    )  # fmt: skip
    booster = hpnb.Booster(plugin=plugin)
    model: Any = plan_models.build(kind, layout.head)
    if folder is not None:
        model.generation_config.max_new_tokens = 77
    optimizer: Any = optimizer_of(model)
    model, optimizer, *_ = booster.boost(model, optimizer)
    given = batch_for(layout.head)
    sizes, rank = split_sizes(len(given["labels"]), layout.dp), plugin.mesh.dp.rank
    start = sum(sizes[:rank])
    local = {name: t[start : start + sizes[rank]] for name, t in given.items()}
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        if layout.direct:
            loss = model(**local).loss
            booster.backward(loss, optimizer)
        else:
            criterion = float64_loss if kind in plan_models.WITHOUT_PLAN else loss_of
            result = booster.execute_pipeline(iter([local]), model, criterion, optimizer)
            loss = result["loss"]
        losses.append(None if loss is None else loss.item())
        optimizer.step()
    if folder is not None:
        booster.save_model(model, folder)
    dp, pp, *tensor = model.axes
    if isinstance(model.module, Stages):
        weights = full_state_dict(model.module, pp, [dp, *tensor])
    else:
        weights = placement.full_state_dict(model.module, [dp, *tensor])
    return {"losses": losses, "weights": {name: value.clone() for name, value in weights.items()}}


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    return max(float((a[n] - b[n]).norm() / b[n].norm()) for n in b)


@pytest.mark.sampled(8, cover=True)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_trains_as_on_one_process(pools: RankPools, kind: str, layout: Layout) -> None:
    expected = serial(kind, layout.head)
    for found in pools[layout.ranks].run(train, kind, layout):
        for loss, wanted in zip(found["losses"], expected["losses"], strict=True):
            assert loss is None or abs(loss - wanted) < 1e-12 * wanted
        assert distance(found["weights"], expected["weights"]) < 1e-12


TAGS = {
    "dp2": Layout(dp=2, direct=True, head="ForTokenClassification"),
    "pp2": Layout(pp=2, head="ForTokenClassification"),
    "pp2-tp2-zb-v": Layout(pp=2, tp=2, style="zb-v", head="ForTokenClassification"),
    "tp2-zero3": Layout(dp=2, tp=2, zero=3, head="ForTokenClassification"),
}


@pytest.mark.sampled(4, cover=True)
@pytest.mark.parametrize("kind", ["Llama", "GPTNeoX"])
@pytest.mark.parametrize("layout", TAGS.values(), ids=TAGS)
def test_classes_of_tokens_are_learned_without_a_criterion(
    pools: RankPools, kind: str, layout: Layout
) -> None:
    expected = serial(kind, layout.head)
    for found in pools[layout.ranks].run(train, kind, layout):
        assert [loss for loss in found["losses"] if loss] == pytest.approx(
            expected["losses"][: 2 if found["losses"][0] else 0], rel=1e-12
        )
        assert distance(found["weights"], expected["weights"]) < 1e-12


def step_of_masked_model() -> None:
    """Of a class whose loss hpnb does not compute outside of its forward."""
    plugin = HybridParallelPlugin(precision="fp64", pp_size=2, num_microbatches=1)
    booster = hpnb.Booster(plugin=plugin)
    model: Any = plan_models.build("Llama", "ForCausalLM")
    model.loss_type = "ForMaskedLM"
    optimizer: Any = optimizer_of(model)
    model, optimizer, *_ = booster.boost(model, optimizer)
    booster.execute_pipeline(iter([batch_for("ForCausalLM")]), model, None, optimizer)


def test_a_loss_that_stages_cannot_compute_is_called_that(pools: RankPools) -> None:
    with pytest.raises(hpnb.RankError, match=r"the batch has labels.*Pass a criterion"):
        pools[2].run(step_of_masked_model)


RECOMPUTED = {
    "dp2": Layout(dp=2, recompute="attention"),
    "dp2-zero3": Layout(dp=2, zero=3, recompute="attention"),
    "tp2": Layout(tp=2, recompute="attention"),
    "pp2": Layout(pp=2, recompute="attention"),
}


@pytest.mark.sampled(4, cover=True)
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("GptOss", "dp2"), ("GptOss", "dp2-zero3"), ("Gemma2", "dp2-zero3"), ("Gemma2", "tp2"),
        ("Gemma2", "pp2"), ("Mistral", "tp2"),
    ],
)  # fmt: skip
def test_recomputed_attention_keeps_sinks_soft_caps_and_masks(
    pools: RankPools, kind: str, layout: str
) -> None:
    expected, options = serial(kind, "ForCausalLM"), RECOMPUTED[layout]
    for found in pools[options.ranks].run(train, kind, options):
        for loss, wanted in zip(found["losses"], expected["losses"], strict=True):
            assert loss is None or abs(loss - wanted) < 1e-12 * wanted
        assert distance(found["weights"], expected["weights"]) < 1e-12


def test_replicas_of_a_causal_model_that_hpnb_does_not_know_are_weighed_by_shifted_labels(
    pools: RankPools,
) -> None:
    """Its own loss leaves out first labels, and was weighed by a count that includes them."""
    expected = serial("GptOss", "ForCausalLM")
    for found in pools[2].run(train, "GptOss", Layout(dp=2, direct=True)):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)  # its loss is in float32
        assert distance(found["weights"], expected["weights"]) < 1e-6
    sizes = {"d_model": 8, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 8}
    bart = transformers.BartForCausalLM(transformers.BartConfig(vocab_size=9, **sizes))
    assert not parallelize_model._is_causal(bart)


def count_attentions(**layout: Any) -> tuple[int, int, int]:
    """Attentions of a forward, of its backward, and of another model that recomputes nothing."""
    calls, attention = list[int](), torch.nn.functional.scaled_dot_product_attention

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        return attention(*args, **kwargs)

    torch.nn.functional.scaled_dot_product_attention = counted
    try:
        plugin = HybridParallelPlugin(precision="fp64", activation_checkpointing="attention", **layout)
        booster, model = hpnb.Booster(plugin=plugin), plan_models.build("Llama")
        boosted: Any
        boosted, optimizer, *_ = booster.boost(model, optimizer_of(model))
        given, counts = batch_for("ForCausalLM"), list[int]()
        boosted(**given)  # the first forward also compares the parts with it
        calls.clear()
        loss = boosted(**given).loss
        counts.append(len(calls))
        booster.backward(loss, optimizer)
        counts.append(len(calls))
        plan_models.build("Llama")(**given).loss.backward()
        counts.append(len(calls))
    finally:
        torch.nn.functional.scaled_dot_product_attention = attention
    return counts[0], counts[1] - counts[0], counts[2] - counts[1]


def test_an_attention_runs_again_in_the_backward_also_if_it_is_sharded(pools: RankPools) -> None:
    """With tensor parallelism nothing was recomputed: an attention has a configuration of its own there."""
    layers = plan_models.COMMON["num_hidden_layers"]
    assert pools[1].run(count_attentions) == [(layers, layers, layers)]
    assert pools[2].run(count_attentions, tp_size=2) == [(layers, layers, layers)] * 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_opens_with_from_pretrained(pools: RankPools, kind: str, tmp_path: Path) -> None:
    pools[4].run(train, kind, LAYOUTS["pp2-tp2-zero1"], tmp_path / "model")
    made = getattr(transformers, f"{kind}ForCausalLM")
    model, info = made.from_pretrained(tmp_path / "model", dtype=torch.float64, output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert distance(dict(model.state_dict()), serial(kind, "ForCausalLM")["weights"]) < 1e-12
    assert model.generation_config.max_new_tokens == 77


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head", ["ForCausalLM", "ForSequenceClassification", "Model"])
def test_parts_are_the_forward(kind: str, head: str) -> None:
    model = plan_models.build(kind, head, num_hidden_layers=2)
    assert type(model).__name__ in models.check(model, plan_models.batch(4), ranks=1)


@pytest.mark.parametrize("kind", ["Llama", "Mistral"])
def test_packed_texts_do_not_see_each_other(kind: str) -> None:
    """Two texts in one sequence, which their positions tell apart, give what each gives alone."""
    model = plan_models.build(kind, num_hidden_layers=2).eval()
    ids = plan_models.batch(2)["input_ids"].clamp(min=3)
    packed = {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2]] * 2)}
    assert kind in models.check(model, packed, ranks=1)
    logits = run_parts(models.anatomy(model), packed).logits
    for start, stop in ((0, 4), (4, 7)):
        alone = model(input_ids=ids[:, start:stop], use_cache=False).logits
        assert torch.allclose(logits[:, start:stop], alone, rtol=1e-12, atol=1e-12)


def test_what_tensor_parallelism_does_not_take_is_refused(pools: RankPools) -> None:
    experts = {"num_key_value_heads": 2, "num_local_experts": 2}
    for kind, options, sequence, words in (
        ("Mixtral", experts, True, ("mlp.gate", "replicated", "sequence_parallel=False")),
        ("Llama", {"num_key_value_heads": 1}, False, ("self_attn", "1 heads", "2 ranks")),
    ):
        with pytest.raises(hpnb.RankError) as error:
            pools[2].run(_parallelize, kind, options, sequence)
        assert all(word in str(error.value) for word in words), error.value


def _parallelize(kind: str, options: dict[str, Any], sequence: bool) -> None:
    model = plan_models.build(kind, num_hidden_layers=1, **options)
    tp = hpnb.Mesh(hpnb.Layout(tp=2)).tp
    hpnb.tensor_parallel.parallelize(model, tp, sequence_parallel=sequence)


def test_modules_are_looked_up_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.LlamaConfig(
        num_hidden_layers=10, hidden_size=16, intermediate_size=32, num_attention_heads=4, vocab_size=20
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    plain, calls = model.named_modules, []

    def counting() -> Any:
        calls.append(1)
        return plain()

    monkeypatch.setattr(model, "named_modules", counting)
    groups = plan_groups.groups_of(model)
    assert [group.kind for group in groups.values()] == ["attention", "mlp"] * 10
    assert len(calls) == 1  # and once for each of 70 matrices, if each looks for itself


def test_an_attention_is_resized_from_what_it_was() -> None:
    """4 heads on 2 key-value heads: each of these keeps its 2 queries, whatever the size before."""
    model = plan_models.build("Llama", num_hidden_layers=1)
    attention = models.attentions(model)[0]
    for kv_heads in (1, 2):
        attention.resize(kv_heads)
        sizes = model.get_submodule(attention.path).config
        assert (sizes.num_attention_heads, sizes.num_key_value_heads) == (2 * kv_heads, kv_heads)
    assert model.config.num_attention_heads == 4


def test_layers_of_which_nothing_can_be_sharded_are_named() -> None:
    """As of MuseSpark in transformers 5.23: its plan names no columns and rows of one module."""
    model = plan_models.build("Llama", num_hidden_layers=1)
    model.config.base_model_tp_plan = {"layers.*.self_attn.q_proj": "colwise_gather_output"}
    with pytest.raises(ValueError, match=r"layers\.0: .*tp_size=1.*hpnb\.models\.register"):
        registration_of(model).check_sharding(model, "1d", False)


def test_experts_train_in_a_pipeline() -> None:
    options = {"num_key_value_heads": 2, "num_local_experts": 2, "experts_implementation": "eager"}
    model = plan_models.build("Mixtral", num_hidden_layers=2, **options)
    assert "Mixtral" in models.check(model, plan_models.batch(4), ranks=1)


def test_a_shell_has_no_parameters_and_the_model_keeps_its_parts() -> None:
    model = plan_models.build("Llama", num_hidden_layers=2)
    modules = list(model.modules())
    parts: Any = models.anatomy(model)
    inputs = plan_models.batch(2)
    hidden = parts.embed(inputs)
    for block in parts.blocks:
        hidden = parts.run(block, hidden, inputs)
    parts.finish(hidden, inputs)
    assert not list(parts.shell.parameters())
    assert list(model.modules()) == modules


def test_a_shell_recomputes_nothing() -> None:
    """transformers 5.17 recomputes a layer before its forward, by a function that a shell does not have."""
    model = plan_models.build("Llama", num_hidden_layers=2)
    for layer in model.model.layers:
        layer.gradient_checkpointing = True
    shell = models.anatomy(model).shell  # type: ignore[attr-defined]
    assert not any(getattr(module, "gradient_checkpointing", False) for module in shell.copies)
    assert all(layer.gradient_checkpointing for layer in model.model.layers)


def test_a_model_without_plans_says_how_to_register_it() -> None:
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=9
    )
    with pytest.raises(TypeError, match="register"):
        models.anatomy(transformers.BertModel(config))


def test_a_replicated_bias_of_a_head_has_the_kind_of_its_weight() -> None:
    """A classifier of two layers, whose first one got a bias of another kind, and was refused."""
    table = models.roles(build(planned_architecture("EsmcConfig"), "ForSequenceClassification"))
    for layer in ("dense", "out_proj"):
        assert {table[f"classifier.{layer}.{name}"].kind for name in ("weight", "bias")} == {"head"}


def test_what_a_file_replaces_in_transformers_is_restored_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_models, "_replaced", [])
    module = sys.modules[transformers.HeliumForCausalLM.__module__]
    norm = transformers.models.helium.modeling_helium.HeliumRMSNorm(4).to(torch.bfloat16)
    x = torch.tensor([[1.0, 2.0, 3.0, 5.0]], dtype=torch.bfloat16)

    def saved() -> set[torch.dtype]:
        dtypes = set()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: dtypes.add(t.dtype) or t, lambda t: t):
            norm(x)
        return dtypes

    before = saved()
    for _ in range(2):
        plan_models.use_float64(transformers.HeliumForCausalLM)
    assert torch.float64 in saved()
    assert module.torch is not torch
    plan_models.restore_replaced()
    assert saved() == before == {torch.float32}
    assert module.torch is torch

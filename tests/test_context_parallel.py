"""Context parallelism: attention over the ranks of cp, and whole training steps, equal one process's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plan_models import use_float64
from rank_pools import RankPools
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    OPTForCausalLM,
    Qwen3Config,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import hpnb
from hpnb import Layout, Mesh
from hpnb.context_parallel import (
    Chunk,
    Ring,
    Visibility,
    block_forward,
    merge_blocks,
    ring_attention,
    shard_batch,
    split_sequence,
    token_places,
    ulysses_attention,
    visibility,
)
from hpnb.context_parallel import fused as fused_module
from hpnb.context_parallel.blockwise import block_backward
from hpnb.context_parallel.visibility import Pair, find_pairs


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


def distance(ours: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((ours - wanted).norm() / wanted.norm())


# --- shards ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("zigzag", [False, True])
def test_every_token_is_on_one_rank_and_a_zigzag_has_equal_causal_work(ranks: int, zigzag: bool) -> None:
    length = 4 * ranks
    shards = split_sequence(length, ranks, zigzag)
    places = [token_places(chunks) for chunks in shards]
    assert torch.equal(torch.cat(places).sort().values, torch.arange(length))
    work = [int((place + 1).sum()) for place in places]  # token i attends to i + 1 tokens
    assert len(set(work)) == 1 or not zigzag
    if not zigzag and ranks > 1:
        assert work[-1] > work[0]


def test_a_length_that_cannot_be_split_names_the_next_that_can() -> None:
    with pytest.raises(ValueError, match=r"1001 tokens .* 8 equal chunks for 4 ranks; pad it to 1008"):
        split_sequence(1001, 4, zigzag=True)


def test_a_batch_is_padded_and_its_labels_are_shifted_before_it_is_split() -> None:
    ids = torch.arange(10, 15).unsqueeze(0)  # 5 tokens, padded to 8
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    first, second = (shard_batch(batch, rank, 2, zigzag=True) for rank in range(2))
    assert first["input_ids"].tolist() == [[10, 11, 14, 14]]
    assert first["position_ids"].tolist() == [[0, 1, 4, 4]]
    assert first["labels"].tolist() == [[11, 12, -100, -100]]
    assert second["input_ids"].tolist() == [[12, 13, 14, 14]]
    assert second["labels"].tolist() == [[13, 14, -100, -100]]
    assert "attention_mask" not in first


def test_padding_before_tokens_is_refused() -> None:
    batch = {"input_ids": torch.ones(1, 4, dtype=torch.int64), "attention_mask": torch.tensor([[0, 1, 1, 1]])}
    with pytest.raises(ValueError, match="padding_side='right'"):
        shard_batch(batch, 0, 2, zigzag=True)


def test_blocks_merge_to_the_attention_over_both() -> None:
    q, k, v = (torch.randn(2, 4, 6, 8, dtype=torch.float64) for _ in range(3))
    blocks = [
        block_forward(q, k[:, :, part], v[:, :, part], 8**-0.5, None) for part in (slice(2), slice(2, 6))
    ]
    out, _ = merge_blocks(*blocks[0], *blocks[1])
    assert distance(out, F.scaled_dot_product_attention(q, k, v)) < 1e-14
    # A block of which a query sees nothing changes nothing.
    nothing = torch.zeros(6, 6, dtype=torch.bool)
    empty = block_forward(q, k, v, 8**-0.5, nothing[None, None, None])
    assert torch.equal(merge_blocks(*blocks[0], *empty)[0], blocks[0][0])


# --- attention -------------------------------------------------------------------------------------------

BOTH_WAYS = ("forward", "backward")
CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "not causal": {"causal": False},
    "window": {"window": 5, "readable": BOTH_WAYS},
    "wide window": {"window": 24},
    "grouped": {"kv_heads": 2},
    "one key head": {"kv_heads": 1},
    "packed": {"packed": True},
    "packed, grouped": {"packed": True, "kv_heads": 2},
    "packed with padding": {"ragged": True},
    "packed, window": {"packed": True, "window": 5, "readable": BOTH_WAYS},
    "soft cap": {"softcap": 3.0, "readable": BOTH_WAYS},
    "padding": {"causal": False, "length": 21, "readable": BOTH_WAYS},
    "by matrix products": {"fused": False, "readable": BOTH_WAYS},
    "packed, by matrix products": {"packed": True, "fused": False, "readable": BOTH_WAYS},
}


def note_and_call(calls: set[str], name: str, function: Any, *args: Any) -> Any:
    calls.add(name)
    return function(*args)


def attend(
    mode: str, causal: bool = True, window: int | None = None, kv_heads: int = 4, packed: bool = False,
    softcap: float | None = None, length: int | None = None, ragged: bool = False, fused: bool = True,
    readable: tuple[str, ...] = (),
) -> dict[str, float]:  # fmt: skip
    """Distances of output and gradients from dense attention; bytes that were sent.

    Args:
        ragged: all samples are packed alike, and each of the last tokens is a text of its own, as padding is.
        readable: what must compute by matrix products, and nothing else may.
    """
    torch.manual_seed(0)
    blockwise_calls: set[str] = set()
    fused_module.block_forward = partial(note_and_call, blockwise_calls, "forward", block_forward)
    fused_module.block_backward = partial(note_and_call, blockwise_calls, "backward", block_backward)
    axis = Mesh(Layout(cp=hpnb.world_size())).cp
    s, d = 24, 8
    q, k, v = (
        torch.randn(2, h, s, d, dtype=torch.float64, requires_grad=True) for h in (4, kv_heads, kv_heads)
    )
    dout = torch.randn(2, 4, s, d, dtype=torch.float64)
    position = torch.arange(s)
    begins = (
        torch.stack([torch.where(position < 9, 0, 9), torch.where(position < 16, 0, 16)]) if packed else None
    )
    if ragged:  # positions stay at 11 where padding begins, so `starts` grows from 9 on
        begins = torch.where(position < 9, 0, (position - 11).clamp(min=9)).expand(2, -1)
    ring = Ring.of(axis, s // axis.size, zigzag=mode == "ring")
    places = ring.places(q.device)
    starts = begins[:, places] if begins is not None and mode == "ring" else begins
    visible = Visibility(causal, window, starts, length)
    local = [x[:, :, places].detach().requires_grad_() for x in (q, k, v)]
    with hpnb.record.traffic() as sent:
        if mode == "ring":
            out = ring_attention(*local, ring, visible, d**-0.5, softcap, fused)
        else:
            out = ulysses_attention(*local, axis, visible, d**-0.5, softcap)
        forward_bytes = sent.bytes["cp"]
        out.backward(dout[:, :, places])
    fused_module.block_forward, fused_module.block_backward = block_forward, block_backward
    if mode == "ring":
        assert blockwise_calls == set(readable)

    row, column = position[:, None], position[None]
    mask = torch.ones(2, s, s, dtype=torch.bool)
    if causal:
        mask &= column <= row
    if window is not None:
        mask &= row - column < window
    if begins is not None:
        mask &= column >= begins[:, :, None]
    if length is not None:
        mask &= column < length
    keys, values = (x.repeat_interleave(4 // kv_heads, 1) for x in (k, v))
    scores = q @ keys.mT * d**-0.5
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    wanted = scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1) @ values
    wanted.backward(dout)
    results = {"out": distance(out, wanted[:, :, places])}
    for name, ours, full in zip("qkv", local, (q, k, v), strict=True):
        assert ours.grad is not None
        assert full.grad is not None
        results[name] = distance(ours.grad, full.grad[:, :, places])
    block = 2 * local[1].nbytes  # keys and values
    return results | {
        "forward": forward_bytes / block,
        "backward": (sent.bytes["cp"] - forward_bytes) / block,
    }


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", ["ring", "ulysses"])
def test_attention_over_ranks_is_dense_attention(mode: str, case: str, pools: RankPools) -> None:
    for results in pools[3 if mode == "ring" else 2].run(attend, mode, **CASES[case]):
        assert max(results[name] for name in ("out", "q", "k", "v")) < 1e-12
        if mode == "ring":
            assert (results["forward"], results["backward"]) == (2, 4)  # (cp - 1) blocks, and twice


@pytest.mark.parametrize("rank", [0, 1])
def test_a_zigzag_is_a_triangle_and_blocks_that_need_no_mask(rank: int) -> None:
    chunks = split_sequence(16, 2, zigzag=True)
    here, there, device = chunks[rank], chunks[1 - rank], torch.device("cpu")
    everything, first, second = slice(0, 8), slice(0, 4), slice(4, 8)
    causal = Visibility(causal=True)
    assert find_pairs(here, here, causal, device, fused=True) == [Pair(everything, everything, None, True)]
    seen = Pair(second, everything, None) if rank == 0 else Pair(everything, first, None)
    assert find_pairs(here, there, causal, device, fused=True) == [seen]
    assert len(find_pairs(here, there, causal, device)) == 2


@pytest.mark.parametrize(
    ("kernel", "dtype"), [("cudnn", torch.bfloat16), ("flash", torch.bfloat16), ("efficient", torch.float32)]
)
def test_kernels_of_gpus_take_these_arguments(kernel: fused_module.Kernel, dtype: torch.dtype) -> None:
    """Shapes alone, of grouped queries whose heads are padded: values need a GPU."""
    q = torch.empty(2, 4, 50, 20, dtype=dtype, device="meta")
    k = torch.empty(2, 2, 70, 20, dtype=dtype, device="meta")
    out, lse, state = fused_module.fused_forward(kernel, q, k, k, 0.3, causal=False)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
    grads = fused_module.fused_backward(kernel, q, q, k, k, out, lse, state, 0.3, causal=False)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, k.shape]


def test_too_many_packed_texts_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    places = torch.arange(8)
    monkeypatch.setattr(visibility, "MOST_RUNS", 3)
    assert Visibility(True, starts=(places - places % 2)[None]).runs is None  # 4 texts of 2 tokens
    runs = Visibility(True, starts=(places - places % 4).expand(5, -1)).runs
    assert runs is not None
    assert [(run.first, run.stop, run.start) for run in runs] == [(0, 4, 0), (4, 8, 4)]


def test_ulysses_takes_heads_that_do_not_divide(pools: RankPools) -> None:
    for results in pools[3].run(attend, "ulysses", kv_heads=2):
        assert max(results[name] for name in ("out", "q", "k", "v")) < 1e-12


# --- training steps --------------------------------------------------------------------------------------

SMALL = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4}
CONFIGS: dict[str, Any] = {
    "gpt2": lambda: GPT2Config(
        vocab_size=61, n_embd=16, n_layer=4, n_head=4, n_positions=64, attn_pdrop=0.0, embd_pdrop=0.0,
        resid_pdrop=0.0,
    ),
    "llama": lambda: LlamaConfig(**SMALL, intermediate_size=24, num_key_value_heads=2),
    "mistral": lambda: MistralConfig(**SMALL, intermediate_size=24, num_key_value_heads=2, sliding_window=7),
    "qwen3": lambda: Qwen3Config(**SMALL, intermediate_size=24, num_key_value_heads=2, head_dim=4),
    "gemma2": lambda: Gemma2Config(
        **SMALL, intermediate_size=24, num_key_value_heads=2, head_dim=4, sliding_window=7,
        query_pre_attn_scalar=4,
    ),
}  # fmt: skip
STEPS, SAMPLES, LENGTH = 2, 4, 21


def dense_attention(
    module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
    scaling: float | None = None, softcap: float | None = None, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """In float64 throughout, and with the soft cap, which two of transformers' own leave out."""
    k, v = (x.repeat_interleave(q.size(1) // k.size(1), 1) for x in (k, v))
    scores = q @ k.mT * (q.size(-1) ** -0.5 if scaling is None else scaling)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return (scores.masked_fill(~mask, -1e300).softmax(-1) @ v).transpose(1, 2), None


def make_model(name: str) -> Any:
    torch.manual_seed(1)
    AttentionInterface.register("dense", dense_attention)
    AttentionMaskInterface.register("dense", sdpa_mask)
    config = CONFIGS[name]()
    if name != "gpt2":  # before the model is made: rotary frequencies are computed in float64, too
        use_float64(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="dense").double()
    with torch.no_grad():  # weights as large as what a step adds to them, or rounding would count more
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return model


def make_batches(packed: bool) -> list[dict[str, torch.Tensor]]:
    """Ragged sequences, padded on the right, and one sample without many targets."""
    generator = torch.Generator().manual_seed(2)
    batches = []
    for _ in range(STEPS):
        ids = torch.randint(61, (SAMPLES, LENGTH), generator=generator)
        lengths = torch.tensor([LENGTH, 13, 18, 2])[:, None]
        mask = torch.arange(LENGTH) < lengths
        batch = {"input_ids": ids, "labels": ids.masked_fill(~mask, -100), "attention_mask": mask.long()}
        if packed:
            position = torch.arange(LENGTH)
            batch |= {"position_ids": torch.where(position < 8, position, position - 8).expand(SAMPLES, -1)}
            batch["labels"] = ids.index_fill(1, torch.tensor([8]), -100)  # no text predicts the next one's
            del batch["attention_mask"]
        batches.append(batch)
    return batches


def dense_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits[:, :-1]  # with a cache packed texts are mixed
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)


def train_on_one_process(name: str, packed: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = make_model(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for batch in make_batches(packed):
        loss = dense_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {key: value.detach() for key, value in model.state_dict().items()}


def train_boosted(name: str, packed: bool, options: dict[str, Any], folder: str) -> list[float]:
    plugin = hpnb.HybridParallelPlugin(precision="fp64", max_norm=1.0, **options)
    booster = hpnb.Booster(plugin=plugin)
    model = make_model(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    model, optimizer, *_ = booster.boost(model, optimizer)
    share = SAMPLES // plugin.dp_size
    losses = []
    for batch in make_batches(packed):
        here = slice(plugin.mesh.dp.rank * share, (plugin.mesh.dp.rank + 1) * share)
        part = {key: value[here] for key, value in batch.items()}
        if plugin.pp_size > 1:
            result = booster.execute_pipeline(iter([part]), model, None, optimizer, return_loss=True)
            loss = result["loss"]
        else:
            loss = model(**part).loss
            booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float("nan") if loss is None else float(loss))
    booster.save_model(model, folder)
    return losses


LAYOUTS: dict[str, dict[str, Any]] = {
    "cp2": {"cp_size": 2},
    "cp4": {"cp_size": 4},
    "cp2-ulysses": {"cp_size": 2, "context_parallel": "ulysses"},
    "dp2-cp2": {"cp_size": 2},
    "dp2-cp2-zero1": {"cp_size": 2, "zero_stage": 1},
    "dp2-cp2-zero2": {"cp_size": 2, "zero_stage": 2},
    "dp2-cp2-zero3": {"cp_size": 2, "zero_stage": 3},
    "pp2-cp2": {"cp_size": 2, "pp_size": 2, "num_microbatches": 2},
    "pp2-cp2-zb-v-zero1": {
        "cp_size": 2, "pp_size": 2, "num_microbatches": 4, "pp_style": "zb-v", "zero_stage": 1,
    },
    "cp2-tp2": {"cp_size": 2, "tp_size": 2},
    "cp2-tp2-sequence": {"cp_size": 2, "tp_size": 2, "enable_sequence_parallelism": True},
    "cp2-ulysses-tp2": {"cp_size": 2, "tp_size": 2, "context_parallel": "ulysses"},
    "pp2-cp2-tp2": {"cp_size": 2, "tp_size": 2, "pp_size": 2, "num_microbatches": 2},
    "cp2-recompute": {"cp_size": 2, "activation_checkpointing": "full"},
    "cp2-ulysses-recompute": {
        "cp_size": 2, "context_parallel": "ulysses", "activation_checkpointing": "full",
    },
    "pp2-cp2-ulysses": {
        "cp_size": 2, "context_parallel": "ulysses", "pp_size": 2, "num_microbatches": 2,
    },
}  # fmt: skip
RANKS = {"pp2-cp2-tp2": 8} | dict.fromkeys(
    ("cp2", "cp2-ulysses", "cp2-recompute", "cp2-ulysses-recompute"), 2
)


def check_training(name: str, layout: str, packed: bool, pools: RankPools, folder: Any) -> None:
    wanted_losses, wanted = train_on_one_process(name, packed)
    ranks = RANKS.get(layout, 4)
    losses = pools[ranks].run(train_boosted, name, packed, LAYOUTS[layout], str(folder))
    for of_rank in losses:
        for loss, expected in zip(of_rank, wanted_losses, strict=True):
            assert loss != loss or abs(loss - expected) < 1e-12 * expected
    assert any(loss == loss for of_rank in losses for loss in of_rank)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).state_dict()
    for key, value in wanted.items():
        assert distance(loaded[key], value) < 1e-12, key


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_training_step_is_one_process(layout: str, pools: RankPools, tmp_path: Any) -> None:
    name = "llama" if layout in ("cp2-tp2", "dp2-cp2-zero3", "pp2-cp2", "cp2-ulysses") else "gpt2"
    check_training(name, layout, False, pools, tmp_path)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("mistral", "cp2"),
        ("qwen3", "cp2"),
        ("gemma2", "cp2"),
        ("mistral", "cp2-ulysses"),
        ("gemma2", "pp2-cp2"),
    ],
)
def test_other_models(name: str, layout: str, pools: RankPools, tmp_path: Any) -> None:
    check_training(name, layout, False, pools, tmp_path)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama", "cp2"),
        ("llama", "cp2-ulysses"),
        ("gpt2", "pp2-cp2"),
        ("gpt2", "pp2-cp2-ulysses"),
        ("llama", "cp2-ulysses-recompute"),
        ("mistral", "cp2-ulysses"),
        ("gemma2", "cp2-ulysses"),
    ],
)
def test_packed_texts_do_not_see_each_other(name: str, layout: str, pools: RankPools, tmp_path: Any) -> None:
    check_training(name, layout, True, pools, tmp_path)


# --- what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cp_size": 2, "tp_size": 4, "tp_mode": "2d"}, "use tp_mode='1d' with cp_size=2"),
        ({"cp_size": 2, "activation_checkpointing": "attention"}, "activation_checkpointing='full'"),
        ({"cp_size": 0}, "cp_size=0 is not a count"),
        ({"cp_size": 2, "context_parallel": "rings"}, "use 'ring' or 'ulysses'"),
    ],
)
def test_options_that_do_not_compose(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hpnb.HybridParallelPlugin(**options)


def refusals() -> list[str]:
    plugin = hpnb.HybridParallelPlugin(cp_size=2, precision="fp32")
    dropout = AutoModelForCausalLM.from_config(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=9))
    vit = ViTForImageClassification(ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
    sizes = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = BertForSequenceClassification(BertConfig(intermediate_size=8, **sizes))
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    )
    bloom = BloomForCausalLM(BloomConfig(vocab_size=9, hidden_size=8, n_layer=1, n_head=2))
    no_drop = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    opt = OPTForCausalLM(OPTConfig(ffn_dim=8, word_embed_proj_dim=8, **no_drop, **sizes))
    messages = []
    for model in (dropout, vit, bert, t5, bloom, opt, nn.Linear(2, 2)):
        try:
            hpnb.Booster(plugin=plugin).boost(model)
        except (ValueError, TypeError) as error:
            messages.append(str(error))
    return messages


def test_models_that_cannot_be_split_are_refused_in_a_sentence(pools: RankPools) -> None:
    dropout, vit, bert, t5, bloom, opt, linear = pools[2].run(refusals)[0]
    assert "set config.attn_pdrop=0.0" in dropout
    assert "a ViTForImageClassification is none; use cp_size=1, or pp_size and tp_size" in vit
    for name, said in (
        ("BertForSequenceClassification", bert),
        ("T5ForConditionalGeneration", t5),
        ("Linear", linear),
    ):
        assert said.endswith(f"a {name} is none; use cp_size=1"), "registering would not help"
    assert "does not call transformers' attention interface" in bloom
    assert "register" not in bloom
    assert "hpnb.models.register, as parts that have causal=True" in opt


# --- the mesh --------------------------------------------------------------------------------------------


def test_a_layout_with_a_context_axis() -> None:
    layout = Layout(dp=2, tp=2, cp=2)
    assert layout.order == ("dp", "pp", "cp", "tp")
    assert layout.world_size == 8
    assert layout.coordinates(5) == {"dp": 1, "pp": 0, "cp": 0, "tp": 1}
    assert [layout.rank(**layout.coordinates(rank)) for rank in range(8)] == list(range(8))
    assert layout.groups("cp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert layout.groups("dp_cp") == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert Layout(dp=2).order == ("dp", "pp", "tp")
    assert Layout(cp=2, order=("cp", "tp", "dp", "pp")).order == ("cp", "tp", "dp", "pp")
    with pytest.raises(ValueError, match="must name dp, pp, cp and tp once"):
        Layout(cp=2, order=("cp", "dp", "pp"))


def test_chunks_are_intervals() -> None:
    assert Chunk(3, 4).stop == 7

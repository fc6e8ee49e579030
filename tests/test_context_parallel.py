"""Context parallelism: attention over the ranks of cp is dense attention, and sends what the formula says."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rank_pools import RankPools
from torch import distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import hpnb
from hpnb import Layout, Mesh, comm
from hpnb.context_parallel import (
    Chunk,
    ContextParallel,
    Ring,
    Visibility,
    all_gather_attention,
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
from hpnb.context_parallel.visibility import Pair, find_pairs, find_pairs_with_all
from hpnb.mesh import Axis

pytestmark = pytest.mark.usefixtures("launches_on_a_pool")

parallelize_module = importlib.import_module("hpnb.context_parallel.parallelize")  # not the function


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
    without = dict.fromkeys(("attention_mask", "position_ids", "labels"))  # as a collator may leave them
    alike = shard_batch({"input_ids": ids, **without}, 0, 2, zigzag=True)
    assert alike["position_ids"].tolist() == [[0, 1, 4, 4]]


def own_loss(always_shift: bool) -> float:
    """Of all ranks' targets, by a loss that compares logits[:, i] with labels[:, i]."""
    torch.manual_seed(0)
    axis = Mesh(Layout(cp=hpnb.world_size())).cp
    model = LlamaForCausalLM(LlamaConfig(vocab_size=31, hidden_size=8, intermediate_size=8,
                                         num_hidden_layers=1, num_attention_heads=2)).double()  # fmt: skip
    context = hpnb.context_parallel.parallelize(model, axis, "ring")
    ids = torch.arange(16).view(2, 8)
    shard = context.shard_batch({"input_ids": ids, "labels": ids}, always_shift)
    labels = shard.pop("labels")
    logits = model(**shard).logits
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").detach()
    dist.all_reduce(total)
    return float(total)


def test_a_loss_of_ones_own_is_the_same_on_one_rank() -> None:
    whole, sharded = (hpnb.launch(own_loss, True, ranks=ranks, device="cpu")[0] for ranks in (1, 2))
    assert abs(whole - sharded) < 1e-6 * whole  # a Llama computes its norms in float32
    unshifted = hpnb.launch(own_loss, False, ranks=1, device="cpu")[0]
    assert abs(unshifted - whole) > 1e-2 * whole  # where the model's own loss shifts


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
    "padding": {"causal": False, "length": 21},
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
    over_ranks = {"ring": ring_attention, "all-gather": all_gather_attention}
    ring = Ring.of(axis, s // axis.size, zigzag=mode in over_ranks)
    places = ring.places(q.device)
    starts = begins[:, places] if begins is not None and mode in over_ranks else begins
    visible = Visibility(causal, window, starts, length)
    local = [x[:, :, places].detach().requires_grad_() for x in (q, k, v)]
    with hpnb.record.traffic() as sent:
        if mode in over_ranks:
            out = over_ranks[mode](*local, ring, visible, d**-0.5, softcap, fused)
        else:
            out = ulysses_attention(*local, axis, visible, d**-0.5, softcap)
        forward_bytes = sent.bytes["cp"]
        out.backward(dout[:, :, places])
    fused_module.block_forward, fused_module.block_backward = block_forward, block_backward
    if mode in over_ranks:
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


@pytest.mark.sampled(21, cover=True)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", ["ring", "all-gather", "ulysses"])
def test_attention_over_ranks_is_dense_attention(mode: str, case: str, pools: RankPools) -> None:
    for results in pools[2 if mode == "ulysses" else 3].run(attend, mode, **CASES[case]):
        assert max(results[name] for name in ("out", "q", "k", "v")) < 1e-12
        if mode != "ulysses":
            assert (results["forward"], results["backward"]) == (2, 4)  # (cp - 1) blocks, and twice


def attend_with_copies(heads: int, kv_heads: int) -> tuple[float, float]:
    """(distance to dense attention, bytes that leave this rank)."""
    axis, d, s = Mesh(Layout(cp=hpnb.world_size())).cp, 4, 12
    generator = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(1, n, s, d, generator=generator, dtype=torch.float64) for n in (heads, kv_heads, kv_heads)
    )
    here = [x.chunk(axis.size, 2)[axis.rank].contiguous() for x in (q, k, v)]
    with hpnb.record.traffic() as sent:
        out = ulysses_attention(*here, axis, Visibility(causal=True), d**-0.5)
    keys, values = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    wanted = F.scaled_dot_product_attention(q, keys, values, is_causal=True).chunk(axis.size, 2)[axis.rank]
    return distance(out, wanted), sent.bytes["cp"]


@pytest.mark.parametrize(("heads", "kv_heads", "copies"), [(12, 2, 6), (6, 1, 3), (6, 3, 3)])
def test_ulysses_repeats_no_more_heads_than_ranks_need(
    heads: int, kv_heads: int, copies: int, pools: RankPools
) -> None:
    for off, sent in pools[3].run(attend_with_copies, heads, kv_heads):
        assert off < 1e-12
        assert sent == 2 * (heads + copies) * (12 // 3) * 4 * 8 * 2 / 3


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


def test_gathered_keys_are_a_block_before_each_chunk_and_a_triangle() -> None:
    chunks, device = split_sequence(48, 4, zigzag=True)[1], torch.device("cpu")  # tokens 6 to 11, 36 to 41
    first, second = slice(0, 6), slice(6, 12)
    assert find_pairs_with_all(chunks, 48, Visibility(causal=True), device, fused=True) == [
        Pair(first, slice(0, 6), None), Pair(first, slice(6, 12), None, True),
        Pair(second, slice(0, 36), None), Pair(second, slice(36, 42), None, True),
    ]  # fmt: skip
    everything = find_pairs_with_all(chunks, 48, Visibility(causal=False), device, fused=True)
    assert everything == [Pair(first, slice(0, 48), None), Pair(second, slice(0, 48), None)]
    windowed = find_pairs_with_all(chunks, 48, Visibility(True, window=9), device, fused=True)
    assert [pair.keys for pair in windowed] == [slice(0, 6), slice(6, 12), slice(28, 36), slice(36, 42)]


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


def bytes_in_16_bits(mode: str) -> tuple[float, float]:
    """Bytes that leave this rank forward and backward, over those of its keys and values."""
    axis = Mesh(Layout(cp=hpnb.world_size())).cp
    attention = {"ring": ring_attention, "all-gather": all_gather_attention}[mode]
    q, k, v = (torch.randn(1, h, 4, 8, dtype=torch.bfloat16, requires_grad=True) for h in (4, 2, 2))
    with hpnb.record.traffic() as sent:
        out = attention(q, k, v, Ring.of(axis, 4, zigzag=True), Visibility(causal=True), 8**-0.5)
        forward = sent.bytes["cp"]
        out.sum().backward()
    return forward / (2 * k.nbytes), (sent.bytes["cp"] - forward) / (2 * k.nbytes)


@pytest.mark.parametrize("mode", ["ring", "all-gather"])
def test_gradients_of_16_bits_travel_in_float32(mode: str, pools: RankPools) -> None:
    assert pools[3].run(bytes_in_16_bits, mode) == [(2, 2 + 2 * 2)] * 3


def test_ulysses_copies_nothing_where_heads_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    exchanged: list[torch.Tensor] = []

    def exchange(x: torch.Tensor, axis: Axis, split_dim: int, concat_dim: int) -> torch.Tensor:
        exchanged.append(x)
        return x

    monkeypatch.setattr(comm, "all_to_all", exchange)
    q, k, v = (torch.randn(1, 4, 6, 8) for _ in range(3))
    ulysses_attention(q, k, v, Axis("cp", 1, 0, None, (0,)), Visibility(causal=True), 8**-0.5)
    assert [x.data_ptr() for x in exchanged[:3]] == [x.data_ptr() for x in (q, k, v)]


@pytest.mark.parametrize("mode", ["ring", "all-gather"])
def test_only_narrower_keys_or_values_are_padded(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[torch.Tensor, ...]] = []

    def attention(*args: Any) -> torch.Tensor:
        seen.append(args[:3])
        return args[0]

    monkeypatch.setattr(parallelize_module, "ring_attention", attention)
    monkeypatch.setattr(parallelize_module, "all_gather_attention", attention)
    q, k, v = (torch.randn(1, 4, 6, d) for d in (8, 8, 5))
    context = ContextParallel(Axis("cp", 1, 0, None, (0,)), mode)
    context.attend(nn.Identity(), q, k, v, None)
    assert [ours is given for ours, given in zip(seen[0], (q, k, v), strict=True)] == [True, True, False]
    assert torch.equal(seen[0][2], F.pad(v, (0, 3)))


def test_the_mean_loss_over_no_target_is_zero() -> None:
    logits, labels = torch.randn(1, 3, 5), torch.full((1, 3), -100)
    for count in (None, 0, torch.tensor(0)):
        assert parallelize_module.next_token_loss(logits, labels, num_items_in_batch=count).item() == 0


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

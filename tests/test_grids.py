"""2D, 2.5D and 3D tensor parallelism against one process, in float64; bytes, memory, dropout, refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from rank_pools import RankPools, gpu_ranks
from tensor_cases import (
    Case,
    Run,
    apart,
    causal_loss,
    classifier_case,
    gpt2,
    images,
    own_loss,
    serial,
    text,
    train,
    vit,
    vit_case,
)
from torch import nn
from transformers import ViTModel

import hpnb
from hpnb import Axis, Layout, Mesh, comm, record
from hpnb.background import Background, Pending
from hpnb.grad_norm import total_norm
from hpnb.tensor_parallel import axes, full_gradients, full_state_dict, parallelize
from hpnb.tensor_parallel.activation_layout import ActivationLayout
from hpnb.tensor_parallel.batch_arguments import BatchArguments
from hpnb.tensor_parallel.replicated_grad_sum import ReplicatedGradSum
from hpnb.tensor_parallel.sharded_layer_norm import ShardedLayerNorm
from hpnb.tensor_parallel.summa import SummaGrid, ab, abt, linear_gradients
from hpnb.tensor_parallel.tp_grid_layers import GridClassifier

D = torch.float64
# mode, depth, ranks of the tensor axis
GRIDS = {"2d": ("2d", 1, 4), "2.5d": ("2.5d", 2, 8), "3d": ("3d", 1, 8)}


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    made = RankPools(timeout=120)
    yield made
    made.close()


def tensor_axis(ranks: int) -> Axis:
    """Groups of so many ranks; they do the same side by side."""
    torch.set_num_threads(1)
    return Mesh(Layout(dp=hpnb.world_size() // ranks, tp=ranks)).tp


def cut(model: nn.Module, grid: str) -> Any:
    mode, depth, ranks = GRIDS[grid]
    return parallelize(model, tensor_axis(ranks), mode, depth=depth)


# --- what is trained ---


def holes(step: int, rows: int = 8, words: int = 53) -> dict[str, torch.Tensor]:
    """Texts of unequal length in which each row hides another of its first tokens from those after it: a rank
    with the mask of other rows would compute something else."""
    batch = text(step, rows, words)
    for row in range(rows):
        batch["attention_mask"][row, 1 + row % 4] = 0
    return batch


def lm_case(rows: int = 8, words: int = 53, **options: Any) -> Case:
    return Case(lambda: gpt2(words=words, **options), lambda step: holes(step, rows, words), causal_loss)


SMALL: dict[str, Any] = {"hidden": 16}
CASES: dict[str, Callable[[], Case]] = {
    "vit": lambda: vit_case(**SMALL),
    "gpt2": lambda: lm_case(**SMALL),
    "gpt2, untied, 3 words": lambda: lm_case(words=3, tie=False, **SMALL),
    "gpt2 classifies": lambda: classifier_case(**SMALL),
}


def parity(
    case: Case,
    grid: str,
    accumulate: int = 1,
    again: dict[str, bool] | None = None,
    expected: Run | None = None,
) -> float:
    model = cut(case.build(), grid)
    if again is not None:
        model.gradient_checkpointing_enable(again)
    found = train(model, case, own_loss, full_gradients, full_state_dict, accumulate=accumulate)
    return apart(found, expected or serial(case, accumulate=accumulate))


# Cases that are run again with accumulation and recomputation, and of which kind that is.
AGAIN: dict[str, tuple[tuple[str, bool], ...]] = {
    "2d": (("vit", False), ("gpt2", False)),
    "2.5d": (("gpt2", False), ("gpt2", True)),
    "3d": (("gpt2", False), ("gpt2", True)),
}


@cache
def serial_run(name: str, accumulate: int) -> Run:
    """Made once and not on each rank."""
    return serial(CASES[name](), accumulate=accumulate)


def parity_of(grid: str, name: str, expected: Run) -> float:
    return parity(CASES[name](), grid, expected=expected)


def parity_again(grid: str, name: str, reentrant: bool, expected: Run) -> float:
    """With accumulation and recomputation."""
    return parity(CASES[name](), grid, 2, {"use_reentrant": reentrant}, expected)


@pytest.mark.sampled(4, cover=True)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("grid", GRIDS)
def test_equal_to_one_process(pools: RankPools, grid: str, name: str) -> None:
    assert max(pools[GRIDS[grid][2]].run(parity_of, grid, name, serial_run(name, 1))) < 1e-12


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("grid", "name", "reentrant"), [(grid, *case) for grid, cases in AGAIN.items() for case in cases]
)
def test_accumulated_and_computed_again(pools: RankPools, grid: str, name: str, reentrant: bool) -> None:
    assert max(pools[GRIDS[grid][2]].run(parity_again, grid, name, reentrant, serial_run(name, 2))) < 1e-12


def three_by_three() -> float:
    case = lm_case(rows=9, heads=3, hidden=18)  # 53 words over 3 are 18, 18, 17
    model = parallelize(case.build(), tensor_axis(9), "2d")
    return apart(train(model, case, own_loss, full_gradients, full_state_dict), serial(case))


@pytest.mark.slow  # nine ranks; the grids of 4 and 8 are above
def test_three_by_three(pools: RankPools) -> None:
    assert max(pools[9].run(three_by_three)) < 1e-12


def depth_alone() -> float:
    """2 x 1 x 1: rows are cut, and nothing else."""
    case = lm_case(heads=3, hidden=15)
    model = parallelize(case.build(), tensor_axis(2), "2.5d", depth=2)
    return apart(train(model, case, own_loss, full_gradients, full_state_dict), serial(case))


def test_depth_alone(pools: RankPools) -> None:
    assert max(pools[2].run(depth_alone)) < 1e-12


@pytest.mark.one_gpu
def test_on_gpus() -> None:
    if gpu_ranks() < 4:
        pytest.skip(f"2d needs 4 GPUs, or one that ranks share; here: {torch.cuda.device_count()}")
    for name in CASES:
        found = hpnb.launch(parity_of, "2d", name, serial_run(name, 1), ranks=4, device="cuda")
        assert max(found) < 1e-12, name
    for name, reentrant in AGAIN["2d"]:
        arguments = "2d", name, reentrant, serial_run(name, 2)
        assert max(hpnb.launch(parity_again, *arguments, ranks=4, device="cuda")) < 1e-12, name


# --- a test that cannot fail proves nothing ---


def _norm_of_a_part(norm: Any, x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)


def split_mask_as_hidden(self: BatchArguments, attention: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    a, b, c = (*self.layout.batch_axes, self.layout.hidden_axis)
    layout = ActivationLayout((a, c), b)  # of the hidden states around the attention
    return args, kwargs | {"attention_mask": layout.narrow_batch(kwargs["attention_mask"])}


BREAKAGES: dict[str, tuple[type, str, Any]] = {
    "mask of other samples": (BatchArguments, "split", split_mask_as_hidden),
    "vectors not summed": (ReplicatedGradSum, "weight", lambda self, weight: weight),
    "depth not summed": (Background, "all_reduce", lambda *_: Pending()),
    "norm of a part": (ShardedLayerNorm, "forward", _norm_of_a_part),
    "targets of the first samples": (
        ActivationLayout, "narrow_batch", lambda self, x: x[: x.size(0) // self.batch_shards]
    ),
}  # fmt: skip


def broken(what: str) -> float:
    with mock.patch.object(*BREAKAGES[what]):
        return parity(lm_case(**SMALL), "3d" if what == "mask of other samples" else "2.5d")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", BREAKAGES)
def test_what_is_broken_shows(pools: RankPools, what: str) -> None:
    assert min(pools[8].run(broken, what)) > 1e-3


# --- the products ---


def products() -> tuple[float, dict[str, float], dict[str, float]]:
    """On 3 x 3: the largest error, and bytes across and down of one of each."""
    down, across = tensor_axis(9).split(3, 3)
    grid = SummaGrid(down, across, hpnb.device())
    g = torch.Generator().manual_seed(1)
    a, b = (torch.randn(*shape, dtype=D, generator=g) for shape in ((12, 15), (15, 6)))
    words = comm.split_sizes(7, 3)  # 3, 2, 2
    x = torch.randn(12, 15, dtype=D, generator=g)
    table = torch.randn(7, 15, dtype=D, generator=g)

    def block(m: torch.Tensor, i: int = down.rank, j: int = across.rank) -> torch.Tensor:
        (top, height), (left, width) = _place(m.size(0), i), _place(m.size(1), j)
        return m[top : top + height, left : left + width].contiguous()

    def _place(size: int, at: int) -> tuple[int, int]:
        share = comm.split_sizes(size, 3)
        return sum(share[:at]), share[at]

    worst = 0.0
    turned = block(b.t().contiguous(), across.rank, down.rank).t()  # b's block as an nn.Linear has it
    with record.traffic() as plain:
        worst = max(worst, _off(ab(block(a), block(b), grid), block(a @ b)))
    worst = max(worst, _off(ab(block(a), turned, grid), block(a @ b)))
    bias = torch.randn(6, dtype=D, generator=g)
    part = bias[2 * across.rank : 2 * across.rank + 2]
    worst = max(worst, _off(ab(block(a), turned, grid, part), block(a @ b + bias)))
    worst = max(worst, _off(abt(block(a), block(b.t().contiguous()), grid), block(a @ b)))
    _, dw = linear_gradients(block(b), block(a.t().contiguous()), turned, grid, False, True, True)
    worst = max(worst, _off(dw, block(a @ b)))
    with record.traffic() as uneven:
        worst = max(worst, _off(abt(block(x), block(table), grid, words), block(x @ table.t())))
    return worst, dict(plain.bytes), dict(uneven.bytes)


def _off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def test_products(pools: RankPools) -> None:
    for worst, plain, uneven in pools[9].run(products):
        assert worst < 1e-14
        assert plain == pytest.approx({"tp.0": 2 * 5 * 2 * 8, "tp.1": 2 * 4 * 5 * 8})  # (q-1) of a block
        assert uneven == pytest.approx({"tp.0": 2 / 3 * 7 * 5 * 8, "tp.1": 2 / 3 * 4 * 7 * 8})


# --- bytes ---


def linear_traffic(grid: str, transposed: bool) -> dict[str, float]:
    """One layer, 10 in and 6 out on a rank (an l-th of them in 3d), forward and backward."""
    from hpnb.tensor_parallel import tp_2d_linear, tp_3d_matmul

    _, depth, ranks = GRIDS[grid]
    axis = tensor_axis(ranks)
    x = torch.randn(3, 5, 10, requires_grad=True)
    bias = torch.randn(6, requires_grad=True)
    if grid == "3d":
        rows, into, out = axis.split(2, 2, 2)
        weight = torch.randn((5, 6) if transposed else (3, 10), requires_grad=True)
        cube = tp_3d_matmul.MatmulAxes3D(rows, into, out, hpnb.device())
        with record.traffic() as t:
            (y,) = tp_3d_matmul.linear_3d(x, [weight], [bias], cube, 0, transposed)
            y.sum().backward()
    else:
        *deep, down, across = axis.split(*([2] * (2 if depth == 1 else 3)))
        square = SummaGrid(down, across, hpnb.device(), deep[0] if deep else None)
        weight = torch.randn((10, 6) if transposed else (6, 10), requires_grad=True)
        with record.traffic() as t:
            (y,) = tp_2d_linear.linear_2d(x, [weight], [bias], square, transposed)
            y.sum().backward()
    assert y.shape == (3, 5, 6)
    assert x.grad is not None
    assert weight.grad is not None
    return dict(t.bytes)


def predicted_linear(grid: str, n_x: float, n_w: float, n_y: float) -> dict[str, float]:
    """Bytes by axis; n are of a rank's blocks, in 3d of what they are when gathered."""
    if grid == "2d":
        return {"tp.0": 3 * n_w, "tp.1": 3 * n_x}
    if grid == "2.5d":
        return {"tp.0": n_w, "tp.1": 3 * n_w, "tp.2": 3 * n_x}
    return {"tp.0": 1.5 * n_w, "tp.1": n_y, "tp.2": 1.5 * n_x}


@pytest.mark.sampled(3, cover=True)
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("transposed", [False, True])
def test_bytes_of_a_layer(pools: RankPools, grid: str, transposed: bool) -> None:
    gathered = 2 if grid == "3d" else 1
    wanted = predicted_linear(grid, gathered * 15 * 10 * 4, 10 * 6 * 4, gathered * 15 * 6 * 4)
    for found in pools[GRIDS[grid][2]].run(linear_traffic, grid, transposed):
        assert found == pytest.approx(wanted, rel=1e-12)


def block_traffic(grid: str, name: str) -> tuple[dict[str, float], dict[str, float]]:
    """The second block of a model with h = 16, on 8 rows of 6 tokens: bytes and calls."""
    model = cut(vit(hidden=16) if name == "vit" else gpt2(hidden=16), grid)
    shares = {"2d": 2, "2.5d": 4, "3d": 4}[grid]
    hidden = torch.randn(8 // shares, 6, 16 // 2, dtype=D, requires_grad=True)
    block = (model.vit.layers if name == "vit" else model.transformer.h)[1]
    with record.traffic() as t:
        block(hidden).square().sum().backward()
    return dict(t.bytes), dict(t.calls)


# Panels are two a layer and way; norms are 2 x 2 messages; vectors one for each sum.
CALLS = {
    "2d": {"tp.0": 4 * 6 + 1, "tp.1": 4 * 6 + 4},
    "2.5d": {"tp.0": 4 + 1, "tp.1": 4 * 6 + 1, "tp.2": 4 * 6 + 4},
    "3d": {"tp.0": 4 * 3 + 2, "tp.1": 2 * 2 + 2 * 3 + 4 + 1, "tp.2": 2 * 3 + 2 * 2 + 1},
}


def predicted_block(grid: str, mlp: int, h: int = 16, rows: int = 8 * 6, size: int = 8) -> dict[str, float]:
    """From the formulas at the top of tp_2d.py and tp_3d.py, with q = l = d = 2."""
    shares = {"2d": 2, "2.5d": 4, "3d": 4}[grid]
    layers = ((h, 3 * h), (h, h), (h, mlp), (mlp, h))
    inner = 3 * h + mlp  # biases of columns
    outer = 2 * h + 4 * h  # biases of rows, and two norms
    total: dict[str, float] = {}

    def add(axis: str, sent: float) -> None:
        total[axis] = total.get(axis, 0.0) + sent * size

    for i, (into, out) in enumerate(layers):
        n_w = into * out / 4
        if grid == "3d":
            n_x, n_y = rows / 2 * into / 2, rows / 2 * out / 2
            b, c = ("tp.1", "tp.2") if i % 2 == 0 else ("tp.2", "tp.1")
            add("tp.0", 1.5 * n_w)
            add(b, n_y)
            add(c, 1.5 * n_x)
        else:
            for axis, sent in predicted_linear(grid, rows / shares * into / 2, n_w, 0).items():
                add(axis, sent)
    width = {"2d": "tp.1", "2.5d": "tp.2", "3d": "tp.1"}[grid]
    add(width, 2 * 4 * rows / shares)  # two norms, two numbers a token each way, an all-reduce over two
    if grid == "3d":
        add("tp.0", (inner + outer) / 2)
        add("tp.1", inner / 2)
        add("tp.2", outer / 2)
    else:
        for axis in ("tp.0",) if grid == "2d" else ("tp.0", "tp.1"):
            add(axis, (inner + outer) / 2)
    return total


@pytest.mark.sampled(3, cover=True)
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", ["vit", "gpt2"])
def test_bytes_of_a_block(pools: RankPools, grid: str, name: str) -> None:
    wanted = predicted_block(grid, mlp=32 if name == "vit" else 64)
    for sent, calls in pools[GRIDS[grid][2]].run(block_traffic, grid, name):
        assert sent == pytest.approx(wanted, rel=1e-12)
        assert calls == CALLS[grid]


# --- memory ---


def held(grid: str) -> tuple[int, int, tuple[int, ...]]:
    vits, gpts = cut(vit(hidden=16), grid), cut(gpt2(hidden=16), grid)
    return (
        sum(p.numel() for p in vits.parameters()),
        sum(p.numel() for p in gpts.parameters()),
        tuple(axis.rank for axis in axes(vits)),
    )


@pytest.mark.parametrize("grid", GRIDS)
def test_memory_of_weights(pools: RankPools, grid: str) -> None:
    """Matrices are cut by q^2 or l^3, vectors by q or l; the bias of a classifier is whole."""
    by = 8 if grid == "3d" else 4
    for in_vit, in_gpt2, place in pools[GRIDS[grid][2]].run(held, grid):
        block = (4 * 16 * 16 + 2 * 16 * 32) // by + (4 * 16 + 5 * 16 + 32) // 2
        embedding = (3 * 8 * 8 * 16 + 16 + 16 + 17 * 16) // 2
        assert in_vit == 2 * block + embedding + 2 * 16 // 2 + 5 * 16 // 2 + 5
        block = (4 * 16 * 16 + 2 * 16 * 64) // by + (4 * 16 + 5 * 16 + 64) // 2
        if grid == "3d":
            words = comm.split_sizes(comm.split_sizes(53, 2)[place[2]], 2)[place[0]]
        else:
            words = comm.split_sizes(53, 2)[place[-2]]
        assert in_gpt2 == 2 * block + (words + 24) * 8 + 2 * 16 // 2


# --- dropout ---


def masks(grid: str) -> tuple[list[Any], bool, float]:
    """What is dropped before the first block and in one, by place; whether a seed repeats it; and how far
    gradients are apart that were computed with and without recomputation."""
    model = cut(gpt2(hidden=16, dropout=0.5), grid)
    seen: list[torch.Tensor] = []
    for module in (model.transformer.drop, model.transformer.h[0].mlp.dropout):
        module.register_forward_hook(lambda module, args, y: seen.append(y == 0))
    batch, gradients = holes(0), []
    for again in (False, True):
        if again:
            model.gradient_checkpointing_enable()
        torch.manual_seed(3)
        model.zero_grad()
        model(**batch).loss.backward()
        gradients.append(full_gradients(model))
    before, inside, *later = seen
    apart_by = max(float((gradients[0][n] - g).norm() / g.norm()) for n, g in gradients[1].items())
    repeats = torch.equal(before, later[0]) and all(torch.equal(inside, one) for one in later[1:])
    torch.manual_seed(4)
    model(**batch)
    other = not torch.equal(before, seen[-2])
    return [before.tolist(), inside.tolist()], repeats and other, apart_by


@pytest.mark.sampled(1)
@pytest.mark.parametrize("grid", GRIDS)
def test_dropout(pools: RankPools, grid: str) -> None:
    found = pools[GRIDS[grid][2]].run(masks, grid)
    ranks, width = GRIDS[grid][2], {"2d": 1, "2.5d": 1, "3d": 2}[grid]  # neighbours along it: 1 or 2 apart
    assert all(repeats for _, repeats, _ in found)
    assert max(apart_by for *_, apart_by in found) < 1e-12
    before = [torch.tensor(one[0]) for one, *_ in found]
    inside = [torch.tensor(one[1]) for one, *_ in found]
    for rank in range(ranks):
        assert 0.3 < before[rank].double().mean() < 0.7
        for other in range(rank):
            same_width = rank // width % 2 == other // width % 2
            assert torch.equal(before[rank], before[other]) == same_width
            assert not torch.equal(inside[rank], inside[other])


# --- what else a model may do ---


def logits_of(grid: str) -> list[float]:
    """Whole logits, when they are read and when the head has to give them; hidden states of a bare model."""
    batch, worst = holes(0), []
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    plain = gpt2(hidden=16)
    wanted = plain(**inputs).logits
    worst.append(_off(cut(gpt2(hidden=16), grid)(**inputs).logits, wanted))

    names = parallelize.__globals__
    before = names["_describe"]
    names["_describe"] = lambda *args: dataclasses.replace(before(*args), lazy_logits=False)
    try:
        model = cut(gpt2(hidden=16), grid)
    finally:
        names["_describe"] = before
    logits = model(**inputs).logits
    causal_loss(type("Outputs", (), {"logits": logits}), batch).backward()
    causal_loss(plain(**inputs), batch).backward()
    ours, theirs = full_gradients(model), _gradients(plain)
    worst.append(max([_off(logits, wanted), *(_off(ours[n], g) for n, g in theirs.items())]))

    bare: Any = gpt2(hidden=16).transformer
    hidden = bare(**inputs).last_hidden_state
    worst.append(_off(cut(bare, grid)(**inputs).last_hidden_state, hidden))
    pixels = images(0)["pixel_values"]
    config = vit(hidden=16).config
    poolers = [_same(ViTModel(config)) for _ in range(2)]
    wanted, found = poolers[0](pixels), cut(poolers[1], grid)(pixels)
    worst.append(max(_off(f, w) for f, w in zip(found.to_tuple(), wanted.to_tuple(), strict=True)))
    found.pooler_output.sum().backward()
    wanted.pooler_output.sum().backward()
    ours, theirs = full_gradients(poolers[1]), _gradients(poolers[0])
    worst.append(max(_off(ours[n], g) for n, g in theirs.items() if "k_proj.bias" not in n))  # which is 0
    return worst


def _same(model: nn.Module) -> nn.Module:
    g = torch.Generator().manual_seed(7)
    for p in model.to(D).parameters():
        p.data = torch.randn(p.shape, generator=g, dtype=D) * 0.1
    return model


@pytest.mark.sampled(1)
@pytest.mark.parametrize("grid", GRIDS)
def test_whole_logits(pools: RankPools, grid: str) -> None:
    for offs in pools[GRIDS[grid][2]].run(logits_of, grid):
        assert len(offs) == 5
        assert max(offs) < 1e-11


def odds(grid: str) -> dict[str, float]:
    found: dict[str, float] = {}
    # No rows: what a rank of a data axis has that got no share of the last batch.
    model = cut(hpnb.models.vit(hpnb.models.ViTSize(16, 1, 4, 32, 8, 16), classes=3, dtype=D), grid)
    out = model(pixel_values=torch.zeros(0, 3, 16, 16, dtype=D))
    out.logits.sum().backward()
    found["no rows"] = sum(float(p.grad.abs().sum()) for p in model.parameters() if p.grad is not None)
    assert out.logits.shape == (0, 3)
    # Frozen weights, and a norm and gradients that count each element once.
    model, batch = cut(gpt2(hidden=16), grid), holes(0)
    plain: Any = gpt2(hidden=16)
    for one in (model, plain):
        one.requires_grad_(False)
        one.transformer.h[1].requires_grad_(True)
        one.transformer.h[1].attn.c_attn.bias.requires_grad_(False)
        one.transformer.h[1].mlp.c_fc.weight.requires_grad_(False)
    model(**batch).loss.backward()
    causal_loss(plain(**batch), batch).backward()
    wanted = _gradients(plain)
    ours = full_gradients(model)
    assert ours.keys() == wanted.keys()
    found["frozen"] = max(_off(ours[n], g) for n, g in wanted.items())
    norm = nn.utils.get_total_norm(wanted.values())
    found["norm"] = abs(float(total_norm(model.parameters(), axes(model)) / norm) - 1)
    # Inputs without a gradient of their own, for a forward alone.
    with torch.inference_mode():
        found["inference"] = abs(float(model(**batch).loss / causal_loss(plain(**batch), batch)) - 1)
    # A large mean beside a small spread, in float32: the variance keeps its digits.
    width = model._hpnb_tensor_parallel.hidden_layout.hidden_axis
    whole, x = nn.LayerNorm(32), 1000 + torch.randn(7, 32, generator=torch.Generator().manual_seed(2))
    exact = F.layer_norm(x.double(), (32,)).chunk(width.size, -1)[width.rank]
    mine = x.chunk(width.size, -1)[width.rank]
    part = nn.LayerNorm(32 // width.size)
    found["large mean"] = _off(ShardedLayerNorm(part, width, None)(mine).double(), exact)
    found["large mean, one rank"] = _off(whole(x).double(), F.layer_norm(x.double(), (32,)))
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("grid", GRIDS)
def test_odds(pools: RankPools, grid: str) -> None:
    for found in pools[GRIDS[grid][2]].run(odds, grid):
        assert found["no rows"] == 0.0
        assert found["frozen"] < 1e-12
        assert found["norm"] < 1e-12
        assert found["inference"] < 1e-12
        assert found["large mean"] < 3 * found["large mean, one rank"] + 1e-6


def two_layers() -> float:
    """A head of two layers: the second takes what the first gives, which is whole."""
    axis = tensor_axis(4)
    down, across = axis.split(2, 2)
    lies = ActivationLayout((down,), across)
    g = torch.Generator().manual_seed(4)
    x = torch.randn(6, 8, dtype=D, generator=g)
    whole = [_same(nn.Linear(8, 8)), _same(nn.Linear(8, 3))]
    mine: list[GridClassifier] = []
    for linear in (_same(nn.Linear(8, 8)), _same(nn.Linear(8, 3))):
        assert isinstance(linear, nn.Linear)
        linear.weight.data = linear.weight.data.chunk(2, 1)[across.rank].clone()
        mine.append(GridClassifier(linear, False, lies, ReplicatedGradSum(lies.batch_axes)))
    wanted, found = x, lies.narrow_batch(x).chunk(2, 1)[across.rank].clone().requires_grad_()
    given = found
    for theirs, ours in zip(whole, mine, strict=True):
        wanted, found = theirs(wanted).tanh(), ours(found).tanh()
    wanted.square().sum().backward()
    found.square().sum().backward()
    assert given.grad is not None
    worst = _off(found, wanted)
    for theirs, ours in zip(whole, mine, strict=True):
        ((_, w), (_, b)), ((_, v), (_, c)) = theirs.named_parameters(), ours.named_parameters()
        assert w.grad is not None
        assert b.grad is not None
        assert v.grad is not None
        assert c.grad is not None
        worst = max(worst, _off(v.grad, w.grad.chunk(2, 1)[across.rank]), _off(c.grad, b.grad))
    return worst


def test_a_head_of_two_layers(pools: RankPools) -> None:
    assert max(pools[4].run(two_layers)) < 1e-12


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def sixteen_bits(grid: str) -> tuple[float, float, float]:
    """Under autocast: how far from float64 the loss and a gradient are here, and on one process."""
    batch = images(0)
    exact = vit(hidden=16)
    exact_loss = exact(**batch).loss
    exact_loss.backward()
    offs, kinds = [], set()
    for model in (vit(hidden=16).float(), cut(vit(hidden=16).float(), grid)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(pixel_values=batch["pixel_values"].float(), labels=batch["labels"]).loss
        loss.backward()
        parallel = hasattr(model, "_hpnb_tensor_parallel")
        found = full_gradients(model) if parallel else _gradients(model)
        kinds |= {g.dtype for g in found.values()}
        wanted = _gradients(exact)
        flat = [torch.cat([one[n].double().flatten() for n in wanted]) for one in (found, wanted)]
        offs.append(_off(flat[0], flat[1]))
    assert kinds == {torch.float32}
    return offs[0], offs[1], abs(float(loss / exact_loss) - 1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("grid", GRIDS)
def test_autocast(pools: RankPools, grid: str) -> None:
    for one_process, here, loss in pools[GRIDS[grid][2]].run(sixteen_bits, grid):
        assert 1e-4 < here < 3 * one_process  # far from float64, so it was 16 bits
        assert loss < 1e-2


# --- refusals ---


def refusals() -> dict[str, str]:
    said: dict[str, str] = {}

    def note(name: str, do: Callable[[], object]) -> None:
        with pytest.raises(ValueError) as error:
            do()
        said[name] = str(error.value)

    class Bare(nn.LayerNorm):
        def __init__(self, size: int) -> None:
            super().__init__(size, elementwise_affine=False)

    def with_norm(norm: nn.Module) -> nn.Module:
        model: Any = vit(hidden=16)
        model.vit.layers[0].layernorm_after = norm.to(D)
        return model  # type: ignore[no-any-return]

    def without_shift() -> nn.Module:
        model: Any = vit(hidden=16)
        norm = nn.RMSNorm(16, dtype=D)
        norm.bias = nn.Parameter(torch.zeros(16, dtype=D))  # a weight of a kind that has a role
        model.vit.layers[0].layernorm_after = norm
        return model  # type: ignore[no-any-return]

    note("batch", lambda: cut(vit(hidden=16), "2.5d")(**images(0, rows=6)))
    note("batch in 3d", lambda: cut(vit(hidden=16), "3d")(**images(0, rows=2)))
    note("heads", lambda: cut(gpt2(heads=3, hidden=18), "2d"))
    note("hidden", lambda: cut(gpt2(heads=2, hidden=10), "3d"))
    note("no weight", lambda: cut(with_norm(Bare(16)), "2d"))
    note("rms", lambda: cut(without_shift(), "2d"))
    note("width", lambda: cut(vit(heads=1, hidden=15), "2d"))
    return said


def test_refusals(pools: RankPools) -> None:
    said = pools[8].run(refusals)[0]
    for part in ("a batch of 6 ", " 4 batch shards", "2.5d grid (depth 2 x 2 x 2)", "use 4 or 8"):
        assert part in said["batch"]
    for part in ("a batch of 2 ", " 4 batch shards", "3d grid (2 x 2 x 2)", "use 4"):
        assert part in said["batch in 3d"]
    assert said["heads"] == (
        "transformer.h.0.attn has 3 heads, and a 2d grid (2 x 2) needs a multiple of 2; 2 or 4 would "
        "work, or mode='1d'"
    )
    assert "10 inputs" in said["hidden"] or "40 outputs" in said["hidden"]
    assert "multiple of 4; 8 or 12 would work" in said["hidden"]
    assert "layernorm_after has no weight to shard" in said["no weight"]
    assert "layernorm_after is a RMSNorm" in said["rms"]
    assert "has 1 heads" in said["width"]

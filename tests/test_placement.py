"""Placements: parts and wholes fit together, norms count once, and a gathered model is the whole one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pools import RankPools
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import hpnb
from hpnb import Layout, Mesh, placement
from hpnb.grad_norm import total_norm
from hpnb.pipeline_parallel import full_state_dict, schedules
from hpnb.placement import FLAT, Cut, Placement, placement_of, set_placement
from hpnb.split_sizes import split_sizes

D = torch.float64


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    shared = RankPools()
    yield shared
    shared.close()


def test_parts_go_back_where_they_came_from() -> None:
    whole = torch.arange(60.0).view(6, 10)
    cases = [
        (),
        (Cut("tp", 1, ((2, 5),)),),
        (Cut("tp", 0, ((0, 1), (3, 5))),),  # fused: two ranges
        (Cut("dp", FLAT, ((7, 19),)),),
        (Cut("tp", 1, ((0, 2), (5, 7))), Cut("dp", FLAT, ((3, 20),))),
        (Cut("tp.0", 0, ((3, 6),)), Cut("tp.1", 1, ((5, 10),)), Cut("dp", FLAT, ((0, 0),))),
    ]
    for cuts in cases:
        where = Placement("w", (6, 10), cuts)
        part = where.take(whole).clone()
        assert tuple(part.shape) == where.local_shape
        onto = torch.full_like(whole, -1.0)
        where.put(part, onto)
        kept = onto != -1.0
        assert int(kept.sum()) == part.numel()
        assert torch.equal(onto[kept], whole[kept])


def test_a_number_can_be_cut_and_stays_one() -> None:
    whole = torch.tensor(3.0)
    for cuts, shape in (
        ((Cut("pp", 0, ((0, 1),)),), ()),
        ((Cut("pp", 0, ((0, 1),)), Cut("dp", FLAT, ((0, 1),))), (1,)),
        ((Cut("dp", FLAT, ((0, 0),)), Cut("pp", 0, ((0, 0),))), (0,)),
        ((Cut("dp", FLAT, ((0, 1),)), Cut("pp", 0, ((0, 1),))), (1,)),
    ):
        where = Placement("scale", (), cuts)
        assert where.local_shape == shape
        part = where.take(whole).clone()
        assert part.shape == shape
        assert part.tolist() == (3.0 if shape == () else [3.0] * shape[0])
        onto = torch.tensor(-1.0)
        where.put(part, onto)
        assert onto.item() == (-1.0 if shape == (0,) else 3.0)


def test_two_cuts_by_hand() -> None:
    where = Placement("w", (2, 4), (Cut("tp", 1, ((1, 3),)), Cut("dp", FLAT, ((1, 3),))))
    whole = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]])
    assert where.take(whole).tolist() == [2, 5]  # of 1 2 / 5 6 the second and third
    assert where.axes == {"tp", "dp"}


def test_bad_parts_are_refused_with_their_numbers() -> None:
    where = Placement("w", (4, 4), (Cut("tp", 0, ((0, 2),)),))
    with pytest.raises(ValueError, match=r"w is placed as \(2, 4\), and the parameter here is \(3, 4\)"):
        set_placement(torch.zeros(3, 4), where)
    with pytest.raises(ValueError, match=r"w is \(4, 4\) in the full model, not \(4, 2\)"):
        where.take(torch.zeros(4, 2))


def placed_on_two_axes() -> tuple[float, float, float, bool]:
    """(norm, the whole model's, norm if nothing were placed, whether the gathered model is the whole one)."""
    mesh = Mesh(Layout(dp=2, tp=2))
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(6, 5, dtype=D), nn.Linear(5, 6, dtype=D))
    for p in whole.parameters():
        p.grad = torch.randn_like(p)
    mine = nn.Sequential(nn.Linear(6, 5, dtype=D), nn.Linear(5, 6, dtype=D))
    tied = nn.Parameter(whole[0].weight.detach().clone())
    tied.grad = torch.full_like(tied, 9.0)
    set_placement(tied, Placement("tied", tuple(tied.shape), tied_to="0.weight"))
    for name, p in whole.named_parameters():
        where = Placement(name, tuple(p.shape))
        if name == "0.weight":  # 5 rows over 2 tensor ranks: 3 and 2; then their elements over 2 data ranks
            rows = split_sizes(5, 2)
            where = where.cut(Cut("tp", 0, ((3 * mesh.tp.rank, 3 * mesh.tp.rank + rows[mesh.tp.rank]),)))
            held = where.take(p).numel()
            middle = held // 2 - 1
            where = where.cut(Cut("dp", FLAT, ((0, middle),) if mesh.dp.rank == 0 else ((middle, held),)))
        elif name == "1.bias":  # all of it on one of the data ranks
            where = where.cut(Cut("dp", FLAT, ((0, 6),) if mesh.dp.rank == 1 else ((0, 0),)))
        part = nn.Parameter(where.take(p.detach()).clone())
        part.grad = where.take(p.grad).clone()
        set_placement(part, where)
        layer, leaf = name.split(".")
        mine.get_submodule(layer).register_parameter(leaf, part)
    axes = (mesh.dp, mesh.tp)
    norm = total_norm([*mine.parameters(), tied], axes)
    naive = torch.stack([p.grad.norm() for p in mine.parameters() if p.grad is not None]).norm()
    wanted = torch.stack([p.grad.norm() for p in whole.parameters() if p.grad is not None]).norm()
    gathered = placement.full_state_dict(mine, axes)
    same = all(torch.equal(gathered[n], t) for n, t in whole.state_dict().items())
    return norm.item(), wanted.item(), naive.item(), same and list(gathered) == list(whole.state_dict())


def test_norm_and_gathering_on_two_axes(pools: RankPools) -> None:
    for norm, wanted, naive, same in pools[4].run(placed_on_two_axes):
        assert abs(norm - wanted) < 1e-12 * wanted
        assert abs(naive - wanted) > 1e-3 * wanted
        assert same


def test_the_norm_of_sixteen_bit_gradients_is_summed_in_float32() -> None:
    p = nn.Parameter(torch.zeros(4096, dtype=torch.float16))
    p.grad = torch.full_like(p, 300.0)  # its square, 9e4, is beyond float16's 65504
    norm = total_norm([p])
    assert norm.dtype is torch.float32
    assert norm.item() == pytest.approx(300.0 * 64)


def test_the_norm_of_nothing_is_zero() -> None:
    assert total_norm([nn.Parameter(torch.ones(3))]).item() == 0.0


def uneven() -> float:
    """Rank 0 has the only parameter, in float64; rank 1 has none."""
    axis = Mesh(Layout(dp=2)).dp
    p = nn.Parameter(torch.zeros(3, dtype=D))
    p.grad = torch.full_like(p, 2.0)
    set_placement(p, Placement("w", (3,), (Cut("dp", FLAT, ((0, 3),)),)))
    return total_norm([p] if axis.rank == 0 else [], [axis]).item()


def test_a_rank_without_parameters_joins_the_norm(pools: RankPools) -> None:
    assert pools[2].run(uneven) == [pytest.approx(12**0.5)] * 2


def test_a_module_that_has_some_names_takes_those() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    set_placement(model[1].bias, Placement("1.bias", (2,), tied_to="elsewhere.bias"))
    full = {name: torch.full_like(value, i) for i, (name, value) in enumerate(model.state_dict().items(), 1)}
    full["2.weight"] = torch.zeros(9)  # not even of a shape that would do
    with pytest.raises(ValueError, match=r"the state has unexpected 2\.weight"):
        placement.load_full_state_dict(model, full)
    assert model[0].weight.mean().item() != 1.0
    placement.load_full_state_dict(model, full, strict=False)
    assert [value.mean().item() for value in model.state_dict().values()] == [1.0, 2.0, 3.0, 4.0]
    full["elsewhere.bias"] = full.pop("1.bias") + 1
    placement.load_full_state_dict(model, full, strict=False)
    assert model[1].bias.mean().item() == 5.0
    del full["elsewhere.bias"]
    with pytest.raises(ValueError, match=r"the state lacks 1\.bias"):
        placement.load_full_state_dict(model, full, strict=False)


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=8)).double()


def copy_of_a_model(kind: str) -> dict[str, tuple[float, float]]:
    """{quantity: (of a copy with other weights, of a full model with the weights gathered from it)}."""
    mesh = Mesh({"ddp": Layout(dp=2), "fsdp": Layout(dp=2), "pp": Layout(pp=2)}.get(kind, Layout(tp=2)))
    axis = next(axis for axis in (mesh.dp, mesh.pp, mesh.tp) if axis.size == 2)
    axes = [axis]
    if kind == "fsdp":
        model: Any = hpnb.fully_shard(gpt2(), axis)
    elif kind == "ddp":
        model = hpnb.DataParallel(gpt2(), axis)
    elif kind == "pp":
        schedule = schedules.make("1f1b", stages=2, microbatches=2)
        pipe = hpnb.Pipeline(gpt2(), axis, schedule, lambda outputs, inputs: outputs.logits.sum())
        model, copied = pipe.module, copy.deepcopy(pipe)
        assert copied.module is not model
        with pytest.raises(RuntimeError, match="a copy of a pipeline"):
            copied.step({"input_ids": torch.zeros(2, 6, dtype=torch.long)})
    else:
        model = hpnb.tensor_parallel.parallelize(gpt2(), axis, sequence_parallel=kind == "tp, sequence")
        axes = list(hpnb.tensor_parallel.axes(model))
    ema = copied.module if kind == "pp" else copy.deepcopy(model)
    assert [placement_of(p) for p in ema.parameters()] == [placement_of(p) for p in model.parameters()]
    with torch.no_grad():
        for p in ema.parameters():
            p.mul_(1.5)
            p.grad = p.clone()
    inner = ema.module if kind == "ddp" else ema
    state = full_state_dict(ema, axis) if kind == "pp" else placement.full_state_dict(inner, axes)
    serial = gpt2()
    serial.load_state_dict(state)
    pairs = zip(serial.parameters(), gpt2().parameters(), strict=True)
    distance = sum((p - 1.5 * q).norm().item() for p, q in pairs)
    for p in serial.parameters():
        p.grad = p.detach().clone()
    quantities = {
        "norm": (total_norm(ema.parameters(), axes).item(), total_norm(serial.parameters()).item()),
        "weights": (distance, 0.0),
    }
    ids = torch.arange(12).view(2, 6)
    if kind == "ddp":
        with pytest.raises(RuntimeError, match="a copy of a DataParallel"):
            ema(input_ids=ids).logits.sum().backward()
    if kind == "fsdp":
        with pytest.raises(RuntimeError, match="a copy of a sharded module"):
            ema(input_ids=ids)
        with pytest.raises(ValueError, match="sharded along dp already"):
            hpnb.fully_shard(ema, axis)
    elif kind != "pp":
        logits = [m.eval()(input_ids=ids).logits.norm().item() for m in (ema, serial)]
        quantities["logits"] = logits[0], logits[1]
    return quantities


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "pp", "tp", "tp, sequence"])
def test_a_copy_is_placed_as_its_model(pools: RankPools, kind: str) -> None:
    for quantities in pools[2].run(copy_of_a_model, kind):
        for copied, serial in quantities.values():
            assert copied == pytest.approx(serial, rel=1e-12, abs=1e-12)


def saved_average(knobs: dict[str, int], folder: str) -> float:
    """How far the saved weights of a boosted model's copy are from twice the model's, which the copy has."""
    serial, model = gpt2().float(), gpt2().float()
    microbatches = 2 if "pp_size" in knobs else None
    plugin = hpnb.HybridParallelPlugin(precision="fp32", num_microbatches=microbatches, **knobs)  # type: ignore[arg-type]
    booster = hpnb.Booster(plugin=plugin)
    boosted, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ema = copy.deepcopy(boosted)
    with torch.no_grad():
        for p in ema.parameters():
            p.mul_(2.0)
    booster.save_model(ema, folder, shard=True)
    saved = GPT2LMHeadModel.from_pretrained(folder)
    pairs = zip(saved.parameters(), serial.parameters(), strict=True)
    return max((p - 2.0 * q).abs().max().item() for p, q in pairs)


KNOBS = ({"zero_stage": 1}, {"zero_stage": 3}, {"tp_size": 2}, {"pp_size": 2})


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_an_average_of_a_boosted_models_weights_is_saved(
    pools: RankPools, knobs: dict[str, int], tmp_path: Path
) -> None:
    assert pools[2].run(saved_average, knobs, str(tmp_path)) == [0.0, 0.0]

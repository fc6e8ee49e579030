"""Cutting a model: the best cut by brute force, every name and value kept, and the other stages let go."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch
from torch import nn

import hpnb
from hpnb import Axis, Layout, Mesh, placement
from hpnb.grad_norm import total_norm
from hpnb.models import Anatomy, GPT2Size, Part, ViTSize, chunk_loss, gpt2, tied, vit
from hpnb.models.registry import REGISTERED, Registration
from hpnb.pipeline_parallel.layer_costs import flops_of, parameters_of, seconds_of
from hpnb.pipeline_parallel.layers import Builder, Layer, first_input, layers
from hpnb.pipeline_parallel.partition import balanced, cut, uniform
from hpnb.pipeline_parallel.stages import Stages, full_state_dict
from hpnb.pipeline_parallel.tied_weights import TiedWeight
from hpnb.placement import Cut, placement_of, set_placement

pytestmark = pytest.mark.usefixtures("launches_on_a_pool")

D = torch.float64
TINY = ViTSize(hidden=16, layers=5, heads=2, mlp=64, patch=8, image=16)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads that share their cores with other work wait for each other most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def fake(size: int, rank: int, name: str = "pp") -> Axis:
    """An axis that nobody talks over."""
    return Axis(name, size, rank, cast(Any, None), tuple(range(size)))


def kinds(blocks: int, ends: bool = True) -> tuple[Layer, ...]:
    """Layers that only have a kind."""

    def run(hidden: Any, inputs: Any) -> Any:
        return hidden

    inner = [Layer((), run, "block" if ends else "layer")] * blocks
    return (Layer((), run, "embedding"), *inner, Layer((), run, "head")) if ends else tuple(inner)


def images(rows: int = 2, side: int = 16, dtype: torch.dtype = D) -> dict[str, torch.Tensor]:
    drawn = torch.randn(rows, 3, side, side, dtype=dtype, generator=torch.Generator().manual_seed(3))
    return {"pixel_values": drawn}


class Halves(nn.Module):
    """Gives two tensors where it is given one, and one where two."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=D))  # a number, ()

    def forward(self, x: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> Any:
        if isinstance(x, tuple):
            return torch.cat(x, -1) * self.scale
        return x[..., :3] * self.scale, x[..., 3:]


def tower() -> nn.Sequential:
    """With what may go wrong: names, an item in place, one used twice, tuples, batch statistics, a number."""
    torch.manual_seed(0)
    twice = nn.Linear(6, 6, dtype=D)
    return nn.Sequential(
        OrderedDict(
            stem=nn.Sequential(nn.Linear(4, 6, dtype=D), nn.BatchNorm1d(6, dtype=D)),
            act=nn.ReLU(inplace=True),
            twice=twice,
            halves=Halves(6),
            units=Halves(6),  # a name that Stages has another use for
            again=twice,
            norm=nn.BatchNorm1d(6, dtype=D),
            head=nn.Linear(6, 3, dtype=D),
        )
    )


def models() -> list[tuple[nn.Module, Any]]:
    return [
        (vit("laptop", classes=3, dtype=D), images(side=32)),
        (vit(TINY, classes=3, dtype=D, dropout=0.1), images()),
        (tower(), torch.randn(5, 4, dtype=D)),
    ]


# --- over numbers ------------------------------------------------------------------------------------


def all_cuts(count: int, stages: int) -> Iterator[tuple[int, ...]]:
    for ends in itertools.combinations(range(1, count), stages - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *ends, count)))


def price(costs: Sequence[int], counts: Sequence[int]) -> tuple[int, int, int]:
    """(largest stage, how uneven the stages are in cost, and in layers)."""
    rest = iter(costs)
    loads = [sum(itertools.islice(rest, n)) for n in counts]
    return max(loads), sum(load**2 for load in loads), sum(n**2 for n in counts)


def test_balanced_is_the_best_of_all_cuts() -> None:
    g = torch.Generator().manual_seed(5)
    for count in range(1, 9):
        for high in (2, 4, 100):
            for _ in range(6):
                costs = torch.randint(0, high, (count,), generator=g).tolist()
                for stages in range(1, count + 1):
                    found = balanced(costs, stages)
                    assert len(found) == stages
                    assert min(found) >= 1
                    assert sum(found) == count
                    assert price(costs, found) == min(price(costs, c) for c in all_cuts(count, stages))
                    tiny = [cost * 2.0**-40 for cost in costs]
                    assert balanced(tiny, stages) == found  # whatever the unit


def test_balanced_by_hand() -> None:
    assert balanced([5, 1, 1, 1, 1, 1], 2) == (1, 5)
    assert balanced([1, 1, 1, 9], 3) == (2, 1, 1) or balanced([1, 1, 1, 9], 3) == (1, 2, 1)
    assert balanced([0.1] * 9, 3) == (3, 3, 3)  # in floats the sums differ
    assert balanced([0, 0, 0, 0], 2) == (2, 2)
    assert balanced([1e-9, 1e9], 1) == (2,)
    assert len(balanced([1.0 + i % 7 for i in range(300)], 64)) == 64


def test_uniform_deals_out_blocks() -> None:
    for blocks in range(1, 14):
        for stages in range(1, blocks + 1):
            counts = uniform(kinds(blocks), stages)
            inner = list(counts)
            inner[0] -= 1  # the embedding
            inner[-1] -= 1  # the head
            assert sum(inner) == blocks
            assert max(inner) - min(inner) <= 1
            assert uniform(kinds(blocks, ends=False), stages) == tuple(inner)
    assert uniform(kinds(12), 5) == (3, 3, 3, 2, 3)  # 2 3 3 2 2 blocks
    assert uniform(kinds(8), 4) == (3, 2, 2, 3)


def test_by_hand_counts_layers_or_blocks() -> None:
    def counts(how: Sequence[int], ends: bool = True) -> list[int]:
        return [len(stage) for stage in cut(kinds(6, ends), len(how), how)]

    assert counts([1, 3, 2]) == [2, 3, 3]  # blocks
    assert counts([1, 4, 3]) == [1, 4, 3]  # layers
    assert counts([0, 6, 0]) == [1, 6, 1]
    assert counts((1, 3, 2), ends=False) == [1, 3, 2]
    whole = kinds(6)
    assert tuple(layer for stage in cut(whole, 3, "uniform") for layer in stage) == whole


@pytest.mark.parametrize(
    ("stages", "how", "says"),
    [
        (7, "uniform", "7 stages need 7 blocks or more, and there are 6: at most 6 stages"),
        (9, [1] * 9, r"adds up to 9, and the model's layers are 8, or its 6 blocks alone"),
        (0, "uniform", "0 stages hold nothing; use 1 or more"),
        (3, [3, 3], r"\[3, 3\] is for 2 stages, and there are 3"),
        (2, [3, 4], r"\[3, 4\] adds up to 7, and the model's layers are 8, or its 6 blocks alone"),
        (3, [3, 0, 3], r"stage 1 of \[4, 0, 4\] has nothing to do; give it 1"),
        (3, [5, -1, 4], r"stage 1 of \[5, -1, 4\] has nothing to do"),
        (2, "weight", "how='weight' is no way to cut; use 'uniform', 'parameters', 'flops', 'time' or"),
        (2, "time", "to cut by 'time' takes an example: pass a microbatch"),
        (9, "parameters", "9 stages need 9 layers or more, and there are 8: at most 8 stages"),
    ],
)
def test_a_bad_cut_is_refused_in_a_sentence(stages: int, how: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        cut(kinds(6), stages, how)


def test_other_bad_input() -> None:
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"is no cost of a layer; it must be 0 or more"):
            balanced([1.0, wrong], 1)
    with pytest.raises(ValueError, match="4 stages need 4 layers or more, and there are 3: at most 3 stages"):
        cut(kinds(3, ends=False), 4, "uniform")
    named = r"cannot cut a Linear: pass an nn.Sequential, .* or a .*Builder.*models\.register"
    with pytest.raises(TypeError, match=named):
        layers(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="Of a wrapped model, pass the model inside"):
        layers(nn.ModuleList([nn.Linear(2, 2)]))
    with pytest.raises(ValueError, match="no items"):
        layers(nn.Sequential())
    with pytest.raises(ValueError, match="count=0 makes nothing"):
        Builder(lambda i: nn.Linear(2, 2), 0)
    with pytest.raises(ValueError, match=r"name='a\.' is no path"):
        Builder(lambda i: nn.Linear(2, 2), 1, "a.")
    with pytest.raises(TypeError, match=r"layer\(0\) of the Builder gave a int"):
        layers(Builder(lambda i: cast(Any, i), 1))[0].built()
    with pytest.raises(RuntimeError, match="layer 1 of the Builder is not built"):
        layers(Builder(lambda i: nn.Linear(2, 2), 2))[1].run(None, None)
    with pytest.raises(ValueError, match=r"takes a batch with names.* not a Tensor"):
        layers(vit(TINY, classes=3))[0].run(None, torch.zeros(2, 3, 16, 16))
    dealt = cut(layers(tower()), 2)
    for mine in ((), (2,), (-1,)):
        with pytest.raises(ValueError, match="are not among 0 to 1"):
            Stages(dealt, mine, "cpu")
    with pytest.raises(ValueError, match="stage 0 is not here; this rank has 1"):
        Stages(dealt, (1,), "cpu")(0, None, None)


# --- costs -------------------------------------------------------------------------------------------


def test_parameters_of_each_layer() -> None:
    size = replace(TINY, layers=2)
    with torch.device("meta"):
        found = parameters_of(layers(vit(size, classes=3)))
    assert found[1] == found[2] == 4 * (16 * 16 + 16) + 2 * 16 * 64 + 64 + 16 + 4 * 16
    assert sum(found) == size.parameters(classes=3)
    twice = nn.Linear(3, 3)
    twice.weight.requires_grad_(False)
    assert parameters_of(layers(nn.Sequential(nn.Sequential(twice, twice), nn.ReLU()))) == [12.0, 0.0]


def test_flops_are_counted_without_computing() -> None:
    batch = 4
    model = vit(TINY, classes=3, device="meta")
    found = flops_of(layers(model), images(batch, dtype=torch.float32))
    n, h = TINY.tokens, TINY.hidden
    block = 2 * batch * n * (4 * h * h + 2 * h * TINY.mlp) + 4 * batch * n * n * h
    patches = 2 * batch * (n - 1) * 3 * TINY.patch**2 * h
    assert found == [patches, *[block] * 5, 2 * batch * h * 3]


class Looks(nn.Linear):
    """Cannot run without values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum().item() != 0.5 else x


def test_flops_are_counted_for_real_where_it_takes_values() -> None:
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()  # fused, it hides its products
    found = flops_of(layers(nn.Sequential(encoder, Looks(8, 3))), torch.zeros(2, 5, 8))
    assert found == [2 * 10 * (4 * 64 + 2 * 8 * 16) + 4 * 2 * 25 * 8, 2 * 10 * 8 * 3]


@pytest.mark.parametrize("measure", [flops_of, seconds_of])
def test_measuring_leaves_the_model_alone(measure: Any) -> None:
    model = tower().append(nn.Dropout(0.5)).append(Looks(3, 3, dtype=D))
    model[0][0].weight.grad = torch.ones(6, 4, dtype=D)
    before, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    found = measure(layers(model), torch.ones(5, 4, dtype=D))
    assert len(found) == 10
    assert found[2] > 0
    assert found[9] > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [n for n, p in model.named_parameters() if p.grad is not None] == ["stem.0.weight"]
    assert torch.equal(model[0][0].weight.grad, torch.ones(6, 4, dtype=D))
    assert torch.equal(generator, torch.get_rng_state())


class Branches(nn.Sequential):
    """Does not run its items one after the other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self[0](x) + self[1](x)
        return out


def test_what_would_be_lost_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot cut a Branches that defines its own forward"):
        layers(Branches(nn.Linear(2, 2), nn.Linear(2, 2)))
    whole = nn.Sequential(Branches(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert len(layers(whole)) == 1
    whole.register_parameter("scale", nn.Parameter(torch.ones(1)))
    with pytest.raises(ValueError, match="scale lie in none of the layers of this Seq"):
        layers(whole)
    model = vit(TINY, classes=3)
    model.adapter = nn.Sequential(*(nn.Linear(2, 2) for _ in range(2)))
    with pytest.raises(ValueError, match=r"adapter.0.weight, adapter.0.bias, adapter.1.weight and 1 more"):
        layers(model)


class Slow(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * sum((super(Slow, self).forward(x) for _ in range(60)), torch.zeros(()))


def test_seconds_follow_the_work() -> None:
    items = [nn.Linear(64, 64), nn.Linear(64, 64), Slow(64, 64), nn.Linear(64, 64)]
    model = nn.Sequential(*items[:1], nn.Linear(64, 64), *items[1:]).requires_grad_(True)
    model[0].requires_grad_(False)
    found = seconds_of(layers(model), [torch.randn(64, 64), "labels"])
    assert found.index(max(found)) == 3
    with torch.device("meta"):
        absent = nn.Sequential(nn.Linear(64, 64))
    assert seconds_of(layers(absent), torch.randn(64, 64))[0] > 0


class Sees(nn.Module):
    seen: list[tuple[bool, float]]  # of the class, so that a copy writes here too

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append((x.requires_grad, x.sum().item()))
        return x.add_(1.0)  # in place, though others take the same


def test_a_layer_is_measured_on_what_the_one_before_gives() -> None:
    Sees.seen = []
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), Sees(), nn.Linear(2, 2), Sees())
    x = torch.ones(1, 2)
    seconds_of(layers(model), x, repeats=3)
    hidden = model[0](x)
    behind = model[2](hidden + 1.0)
    assert Sees.seen == [(False, hidden.sum().item())] * 5 + [(True, behind.sum().item())] * 5


# --- layers ------------------------------------------------------------------------------------------


def test_the_first_input_of_a_batch() -> None:
    x, y = torch.zeros(1), torch.ones(1)
    named: list[dict[str, Any]] = [{"pixel_values": x, "labels": y}, {"labels": y, "x": x}]
    named += [{"wanted": y, "input": x}, {"step": 3, "x": x}]
    for inputs in (x, (x, y), [x, y], *named):
        assert first_input(inputs) is x
    with pytest.raises(ValueError, match=r"wanted, x .*input"):
        first_input({"wanted": y, "x": x})
    for nothing in ((), [], {}, {"labels": y}):
        with pytest.raises(ValueError, match="no entry for the first layer"):
            first_input(nothing)


@dataclass(frozen=True)
class TiedAnatomy(Anatomy):
    def embed(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        out: torch.Tensor = self.embedding[0].module(inputs["input_ids"])
        return out

    def run(self, block: Part, hidden: torch.Tensor, inputs: Mapping[str, Any]) -> torch.Tensor:
        return hidden + torch.tanh(block.module(hidden))

    def finish(self, hidden: torch.Tensor, inputs: Mapping[str, Any]) -> Any:
        norm, out = (part.module for part in self.head)
        return out(norm(hidden))


class Language(nn.Module):
    """Its embedding is its head."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.wte = nn.Embedding(11, 6, dtype=D)
        self.h = nn.ModuleList(nn.Linear(6, 6, dtype=D) for _ in range(blocks))
        self.norm = nn.LayerNorm(6, dtype=D)
        self.out = nn.Linear(6, 11, bias=False, dtype=D)
        self.out.weight = self.wte.weight

    def anatomy(self) -> Anatomy:
        blocks = (Part(f"h.{i}", block) for i, block in enumerate(self.h))
        head = (Part("norm", self.norm), Part("out", self.out))
        return TiedAnatomy((Part("wte", self.wte),), tuple(blocks), head, tied(self), causal=True)


def known() -> None:
    from hpnb.models.registry import (  # a rank's own, and not the copy that travels with this file
        REGISTERED,
        Registration,
    )

    REGISTERED[Language] = Registration(Language.anatomy, cast(Any, None))


@pytest.fixture
def language(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTERED, Language, Registration(Language.anatomy, cast(Any, None)))


def test_an_anatomy_is_causal_if_it_says_so(language: None) -> None:
    assert all(layer.causal for layer in layers(Language()))
    assert Stages([layers(Language())], (0,), "cpu").causal
    assert not Stages([layers(vit(TINY, classes=3))], (0,), "cpu").causal
    assert not Stages([layers(tower())], (0,), "cpu").causal


@pytest.mark.parametrize("which", [0, 1, 2])
def test_stages_one_after_the_other_are_the_model(which: int) -> None:
    for stages in range(1, 5):
        for mode in (True, False):
            model, inputs = models()[which]
            own = copy.deepcopy(model).train(mode)
            model.train(mode)
            names = [name for name, _ in model.named_parameters()]
            state = own.state_dict()
            objects = dict(model.named_parameters())
            first = inputs if isinstance(inputs, dict) else None
            torch.manual_seed(1)
            wanted = own(**first) if first is not None else own(inputs)
            dealt = cut(layers(model), stages)
            held = Stages(dealt, range(stages), "cpu")
            torch.manual_seed(1)
            hidden: Any = None
            for stage in range(stages):
                hidden = held(stage, hidden, inputs)
            if first is not None:
                assert torch.equal(hidden.logits, wanted.logits)
            else:
                assert torch.equal(hidden, wanted)
            found = dict(held.named_parameters())
            assert list(found) == names
            assert all(found[name] is p for name, p in objects.items())
            assert list(held.state_dict()) == list(state)
            assert all(torch.equal(value, state[name]) for name, value in held.state_dict().items())
            full = full_state_dict(held, None)
            assert list(full) == list(state)
            for name, value in full.items():
                assert torch.equal(value, held.state_dict()[name])
                value.add_(1)  # and it is not the model's own
                assert not torch.equal(value, held.state_dict()[name])


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_each_rank_has_its_own_and_says_so(which: int, stages: int) -> None:
    whole = models()[which][0]
    left, seen = dict(whole.state_dict()), list[str]()
    for rank in range(stages):
        model = models()[which][0]
        axis = fake(stages, rank)
        mine = Stages(cut(layers(model), stages), (rank,), "cpu", axis)
        seen += mine.state_dict()
        for name, value in mine.state_dict().items():
            assert torch.equal(value, left.pop(name))
        for name, p in mine.named_parameters():
            where = placement_of(p, "nobody")
            assert where.name == name
            assert where.shape == tuple(p.shape)
            every = (0, p.shape[0] if p.dim() else 1)
            assert where.cuts == ((Cut("pp", 0, (every,)),) if stages > 1 else ())
            whole_p = whole.get_parameter(name).detach()
            assert torch.equal(where.take(whole_p), p)
            onto = torch.zeros_like(whole_p)
            where.put(p.detach(), onto)
            assert torch.equal(onto, whole_p)
    assert not left
    assert seen == list(whole.state_dict())


def test_a_placement_from_before_stays() -> None:
    rows = Cut("tp", 0, ((2, 4),))
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    set_placement(model[1].weight, placement.Placement("1.weight", (4, 2), (rows,)))
    for _ in range(2):  # and the same once more
        Stages(cut(layers(model), 2), (1,), "cpu", fake(2, 1))
        where = placement_of(model[1].weight)
        assert where == placement.Placement("1.weight", (4, 2), (rows, Cut("pp", 0, ((0, 2),))))
    Stages(cut(layers(model), 1), (0,), "cpu", fake(1, 0))
    assert placement_of(model[1].weight).cuts == (rows,)


def test_units_modes_and_trained() -> None:
    model = vit(TINY, classes=3)
    model.vit.layers[1].eval()
    model.vit.layers[1].layernorm_before.requires_grad_(False)
    held = Stages(cut(layers(model), 2), (0,), "cpu")
    assert held.units == list(model.vit.layers[:3])
    assert held.training
    assert not model.vit.layers[1].training
    names = {p: name for name, p in held.named_parameters()}
    frozen = {"vit.layers.1.layernorm_before.weight", "vit.layers.1.layernorm_before.bias"}
    assert [names[p] for p in held.trained(0)] == [n for n in names.values() if n not in frozen]
    held.eval()
    assert not any(m.training for m in held.modules())
    assert model.vit.layernorm.training  # another stage's
    items = tower()
    held = Stages(cut(layers(items), 4), (0, 3), "cpu")
    assert held.units == [items[0], items[1], items[6], items[7]]
    assert len(held.trained(0)) == 4


def test_a_copy_computes_with_its_own_weights() -> None:
    for model, inputs in models()[1:]:
        held = Stages([layers(model.eval())], (0,), "cpu")
        twin = copy.deepcopy(held)
        first = held(0, None, inputs)
        with torch.no_grad():
            for p in twin.parameters():
                p.zero_()
        again, other = held(0, None, inputs), twin(0, None, inputs)
        pick = (lambda out: out.logits) if isinstance(inputs, dict) else (lambda out: out)
        assert torch.equal(pick(first), pick(again))
        assert not pick(other).any()


def test_the_rest_of_the_model_goes() -> None:
    wrapped = lambda: chunk_loss(gpt2(GPT2Size(16, 3, 2, 32, 19, 8)), 4)  # noqa: E731
    builds: tuple[Callable[[], nn.Module], ...] = (
        lambda: vit(TINY, classes=3),
        lambda: tower()[:5],
        wrapped,
    )
    for build, rank in itertools.product(builds, range(3)):
        model = build()
        held = [weakref.ref(p) for p in model.parameters()]
        mine = Stages(cut(layers(model), 3), (rank,), "cpu", fake(3, rank))
        kept = {id(p) for p in mine.parameters()}
        others = [ref for ref in held if id(ref()) not in kept]
        del model
        gc.collect()
        assert kept
        assert others
        assert all(ref() is None for ref in others)


# --- tied --------------------------------------------------------------------------------------------


def test_tied_weights_are_found(language: None) -> None:
    model = Language()
    dealt = cut(layers(model), 3)
    wanted = (TiedWeight(("wte.weight", "out.weight"), (0, 2)),)
    for rank in range(3):
        mine = Stages(cut(layers(copy.deepcopy(model)), 3), (rank,), "cpu", fake(3, rank))
        assert mine.tied == wanted
        if rank != 1:
            name = wanted[0].names[rank // 2]
            where = placement_of(mine.get_parameter(name))
            assert where.name == name
            assert where.tied_to == (None if rank == 0 else "wte.weight")
    both = Stages(dealt, (0, 2), "cpu", fake(2, 0))  # a rank with both homes, as in V-shaped schedules
    assert placement_of(model.wte.weight).tied_to is None
    assert placement_of(model.wte.weight).name == "wte.weight"
    assert [name for name, _ in both.named_parameters() if "out" in name or "wte" in name] == ["wte.weight"]
    assert both.trained(0)[0] is both.trained(2)[-1]
    assert Stages([layers(model)], (0,), "cpu").tied == ()  # one stage has all

    items = tower()
    assert Stages(cut(layers(items), 8), (0,), "cpu").tied == (
        TiedWeight(("twice.weight", "again.weight"), (2, 5)),
        TiedWeight(("twice.bias", "again.bias"), (2, 5)),
    )
    assert Stages(cut(layers(items), 2, [6, 2]), (0,), "cpu").tied == ()
    one = nn.Linear(2, 2, bias=False)
    thrice = nn.Sequential(nn.Sequential(one, one), nn.ReLU(), one)
    assert Stages(cut(layers(thrice), 3), (0,), "cpu").tied == (
        TiedWeight(("0.0.weight", "0.1.weight", "2.weight"), (0, 0, 2)),
    )

    def run(hidden: Any, inputs: Any) -> Any:
        return hidden

    first, last = (Part("a.x", nn.ReLU()), Part("b.y", one)), (Part("a.z", one),)
    crossed = Stages([[Layer(first, run)], [], [Layer(last, run)]], (0, 2), "cpu", fake(2, 0))
    assert crossed.tied == (TiedWeight(("b.y.weight", "a.z.weight"), (0, 2)),)
    assert [name for name, _ in crossed.named_parameters()] == ["a.z.weight"]  # which is not its first home
    assert placement_of(one.weight).tied_to is None


def test_batch_statistics_have_one_home() -> None:
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), norm)
    with pytest.raises(ValueError, match=r"1.running_mean of stage 0 is also 3.running_mean of stage 1"):
        Stages(cut(layers(model), 2), (0,), "cpu")
    Stages(cut(layers(model), 2, [1, 3]), (1,), "cpu")


# --- builders and the meta device --------------------------------------------------------------------


def test_a_builder_makes_what_a_rank_has() -> None:
    made = list[int]()

    def layer(i: int) -> nn.Module:
        made.append(i)
        return nn.Sequential(nn.Linear(8, 8, dtype=D), nn.Tanh())

    builder = Builder(layer, 8, "net.layers")
    before = torch.get_rng_state()
    alone = Stages([layers(builder)], (0,), "cpu")
    assert torch.equal(before, torch.get_rng_state())
    whole = alone.state_dict()
    assert list(whole)[:2] == ["net.layers.0.0.weight", "net.layers.0.0.bias"]
    assert not torch.equal(whole["net.layers.0.0.weight"], whole["net.layers.1.0.weight"])
    x = torch.randn(3, 8, dtype=D)
    hidden = x
    for rank in range(4):
        made.clear()
        torch.manual_seed(rank)
        mine = Stages(cut(layers(builder), 4), (rank,), "cpu", fake(4, rank))
        assert made == [2 * rank, 2 * rank + 1]
        assert sum(p.numel() for p in mine.parameters()) == 2 * 72
        assert all(torch.equal(value, whole[name]) for name, value in mine.state_dict().items())
        assert placement_of(next(mine.parameters())).name == f"net.layers.{2 * rank}.0.weight"
        hidden = mine(rank, hidden, x)
    assert torch.equal(hidden, alone(0, None, x))
    for how in ("parameters", "flops", "time"):
        assert sum(map(len, cut(layers(builder), 3, how, x))) == 8
    nowhere = Stages(cut(layers(builder), 4), (1,), "meta")
    assert len(list(nowhere.parameters())) == 4
    assert all(p.is_meta for p in nowhere.parameters())
    assert parameters_of(layers(builder)) == [72.0] * 8
    assert flops_of(layers(builder), x) == [2 * 3 * 64.0] * 8


def test_meta_becomes_memory_of_this_rank_alone() -> None:
    def layer(i: int) -> nn.Module:
        with torch.device("meta"):
            return nn.Linear(64, 64)

    held = Stages(cut(layers(Builder(layer, 8)), 4), (2,), "cpu")
    assert {p.device.type for p in held.parameters()} == {"cpu"}
    assert sum(p.untyped_storage().nbytes() for p in held.parameters()) == 2 * (64 * 64 + 64) * 4
    full = {f"layers.{i}.{n}": torch.full(s, i + 1.0) for i in range(8) for n, s in
            (("weight", (64, 64)), ("bias", (64,)))}  # fmt: skip
    placement.load_full_state_dict(held, full, strict=False)
    assert {name: value.mean().item() for name, value in held.state_dict().items()} == {
        "layers.4.weight": 5.0, "layers.4.bias": 5.0, "layers.5.weight": 6.0, "layers.5.bias": 6.0,
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"has unexpected layers.0.weight, layers.0.bias,.* and 7 more"):
        placement.load_full_state_dict(held, full)
    del full["layers.4.bias"]
    with pytest.raises(ValueError, match=r"the state lacks layers.4.bias"):
        placement.load_full_state_dict(held, full, strict=False)


def test_an_optimizer_from_before_stays_attached(language: None) -> None:
    torch.manual_seed(0)
    real = Language()
    with torch.device("meta"):
        model = Language()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    head = Stages(cut(layers(model), 2), (1,), "cpu", fake(2, 1))
    full = {name: value for name, value in real.state_dict().items() if name != "out.weight"}
    placement.load_full_state_dict(head, full, strict=False)  # of a tied weight the first name is enough
    assert torch.equal(head.get_parameter("out.weight"), real.out.weight)
    head(1, torch.ones(2, 6, dtype=D), {}).square().sum().backward()
    before = head.state_dict()["out.weight"].clone()
    optimizer.step()
    assert not torch.equal(before, head.state_dict()["out.weight"])
    with torch.device("meta"):
        model = Language().requires_grad_(False)
    assert not any(p.requires_grad for p in Stages([layers(model)], (0,), "cpu").parameters())
    with torch.device("meta"):
        still = Stages(cut(layers(Language()), 2), (0,), "meta", fake(2, 0))
    assert all(p.is_meta for p in still.parameters())
    assert placement_of(still.get_parameter("wte.weight")).axes == {"pp"}


def test_a_buffer_that_nothing_fills_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
        held = Stages([layers(model)], (0,), "cpu")
        assert not any(buffer.is_meta for buffer in held.buffers())
        model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
        model[1].register_buffer("mask", torch.ones(2), persistent=False)
    with pytest.raises(ValueError, match=r"buffer 1.mask is on the meta device and in no state dict"):
        Stages([layers(model)], (0,), "cpu")


# --- ranks -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def four() -> Iterator[hpnb.Ranks]:
    with hpnb.Ranks(4, device="cpu", timeout=60) as pool:
        yield pool


def gathered(
    which: str, layout: Layout, dealt: Sequence[Sequence[int]], shard: str
) -> tuple[bool, float, float, list[str]]:
    """(whether the whole model is the serial one, norm, the serial norm, names) on this rank."""
    torch.set_num_threads(1)
    known()
    mesh = Mesh(layout)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return {"vit": lambda: vit(TINY, classes=3, dtype=D), "tower": tower, "language": Language}[which]()

    serial = make()
    with torch.device("meta" if shard == "meta" else "cpu"):
        model = make()
    if mesh.dp.rank and shard != "meta":  # a replica takes the values of the first
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
    g = torch.Generator().manual_seed(7)
    for p in serial.parameters():
        p.grad = torch.randn(p.shape, dtype=D, generator=g)
    grads = {name: p.grad for name, p in serial.named_parameters(remove_duplicate=False)}
    stages = 1 + max(itertools.chain(*dealt))
    device = "meta" if shard == "meta" else None
    mine = Stages(cut(layers(model), stages), dealt[mesh.pp.rank], device, mesh.pp)
    axes = [mesh.pp]
    if shard:
        hpnb.fully_shard(mine, mesh.dp, units=mine.units)
        axes.append(mesh.dp)
    if shard == "meta":
        placement.load_full_state_dict(mine, serial.state_dict(), strict=False)
    for name, p in mine.named_parameters():
        where = placement_of(p)
        p.grad = where.take(grads[name]).clone()
    norm = total_norm(mine.parameters(), axes).item()
    wanted = torch.stack([p.grad.norm() for p in serial.parameters() if p.grad is not None]).norm().item()
    found = full_state_dict(mine, mesh.pp, axes if shard else ())
    same = all(torch.equal(found[name], value) for name, value in serial.state_dict().items())
    make().load_state_dict(found, strict=True)
    kept = [p.detach().clone() for p in mine.parameters()]
    for value in found.values():
        value.fill_(9)  # which is not the model's own memory
    same = same and all(torch.equal(p, k) for p, k in zip(mine.parameters(), kept, strict=True))
    return same, norm, wanted, list(found)


@pytest.mark.parametrize(
    ("which", "layout", "dealt", "shard"),
    [
        ("vit", Layout(pp=4), [[0], [1], [2], [3]], ""),
        ("vit", Layout(dp=2, pp=2), [[0, 3], [1, 2]], "real"),
        ("vit", Layout(dp=2, pp=2), [[0, 2], [1, 3]], "meta"),
        ("tower", Layout(pp=4), [[0, 7], [1, 6], [2, 5], [3, 4]], ""),
        ("tower", Layout(pp=4), [[0], [1], [2], [3]], ""),
        ("tower", Layout(dp=2, pp=2), [[0], [1]], "real"),
        ("language", Layout(pp=4), [[0], [1], [2], [3]], ""),
        ("language", Layout(dp=2, pp=2), [[0], [1]], "real"),
        ("language", Layout(dp=2, pp=2), [[0], [1]], "meta"),
        ("language", Layout(dp=2, pp=2), [[0, 3], [1, 2]], "real"),
    ],
)
def test_the_whole_model_and_its_norm(
    four: hpnb.Ranks, language: None, which: str, layout: Layout, dealt: list[list[int]], shard: str
) -> None:
    serial = {"vit": lambda: vit(TINY, classes=3, dtype=D), "tower": tower, "language": Language}[which]()
    for same, norm, wanted, names in four.run(gathered, which, layout, dealt, shard):
        assert same
        assert abs(norm - wanted) < 1e-12 * wanted
        assert names == list(serial.state_dict())


def disagreeing(fail: bool) -> tuple[list[int], int, str]:
    """How a cut by time comes out where every rank measures something else, and who measured."""
    from hpnb.pipeline_parallel import partition

    mesh, calls = Mesh(Layout(dp=2, pp=2)), list[int]()

    def measure(held: Sequence[Layer], example: Any) -> list[float]:
        calls.append(1)
        if fail:
            raise KeyError("pixels")
        return [1.0 + (i + 3 * hpnb.rank()) % 5 for i in range(len(held))]

    before, partition.seconds_of = partition.seconds_of, measure
    try:
        dealt = cut(layers(tower()), 2, "time", torch.zeros(2, 4), [mesh.pp, mesh.dp])
        return [len(stage) for stage in dealt], len(calls), ""
    except (ValueError, KeyError) as error:
        return [], len(calls), f"{type(error).__name__}: {error}"
    finally:
        partition.seconds_of = before


def test_ranks_cut_alike(four: hpnb.Ranks) -> None:
    found = four.run(disagreeing, False)
    assert [counts for counts, _, _ in found] == [found[0][0]] * 4
    assert [calls for _, calls, _ in found] == [1, 0, 0, 0]
    failed = four.run(disagreeing, True)
    assert failed[0][2] == "KeyError: 'pixels'"
    assert {says for _, _, says in failed[1:]} == {
        "ValueError: the rank that was to measure the layers failed with KeyError: 'pixels'"
    }


def asked_the_wrong_way() -> list[str]:
    mesh, said = Mesh(Layout(pp=4)), []
    mine = Stages(cut(layers(tower()), 4), (mesh.pp.rank,), axis=mesh.pp)
    for axes in ([], [mesh.pp]):
        try:
            placement.full_state_dict(mine, axes)
        except ValueError as error:
            said.append(str(error))
    return said


def test_a_stage_alone_is_not_the_model(four: hpnb.Ranks) -> None:
    for without, along in four.run(asked_the_wrong_way):
        assert "lies in a stage of a pipeline: the weights of all stages are put together by hpnb" in without
        assert "is not on all ranks of axis pp: the weights of all stages are put together by hpnb" in along


def on_gpus() -> tuple[bool, bool, bool]:
    """Whether this rank's stages are on its GPU, under the objects of the model, and the whole model is."""
    mesh = Mesh(Layout(pp=hpnb.world_size()))
    serial, model = (vit(TINY, classes=3, dtype=D) for _ in range(2))
    objects = set(model.parameters())
    dealt = cut(layers(model), mesh.pp.size, "time", images(), [mesh.pp])
    mine = Stages(dealt, (mesh.pp.rank,), axis=mesh.pp)
    there = all(p.device == hpnb.device() for p in mine.parameters())
    found = full_state_dict(mine, mesh.pp)
    whole = all(torch.equal(found[name], value) for name, value in serial.state_dict().items())
    return there, objects > set(mine.parameters()), whole and len(found) == len(serial.state_dict())


@pytest.mark.one_gpu
def test_stages_go_to_their_gpu() -> None:
    assert hpnb.launch(on_gpus, ranks=2, device="cuda", timeout=120) == [(True, True, True)] * 2

"""Models of one's own: what is registered is checked, and trains in every layout.

pytest tests/test_own_models.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grouped_queries
import own_models
import pytest
import torch
import torch.nn.functional as F
from own_models import LlamaParts, NoMask, NoNorm, OwnLlama, batch, parts, register_llama
from rank_pools import RankPools
from scripts_here import run_script_here
from torch import nn

import hpnb
from hpnb.hybrid import check_model
from hpnb.models import Part, Role, compare_parts, registry, root_parameters
from hpnb.models.compare_parts import first_step_check
from hpnb.models.role import check as check_role
from hpnb.models.role import linear
from hpnb.pipeline_parallel import schedules
from hpnb.pipeline_parallel.layers import layers
from hpnb.ranks.pool import launch

pytestmark = pytest.mark.usefixtures("launches_on_a_pool")


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "REGISTERED", dict(registry.REGISTERED))
    register_llama()


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


def build(**sizes: Any) -> OwnLlama:
    torch.manual_seed(4)
    return OwnLlama(**sizes).double()


# --- the check that is asked for ---------------------------------------------------------------------


def test_a_model_that_is_registered_well_passes_and_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_model, "launch", launch)  # new ranks for each layout, as users have them
    model, before = OwnLlama(), torch.get_rng_state()
    weights = {name: p.clone() for name, p in model.named_parameters()}
    report = hpnb.models.check(model, batch())
    assert "pipeline on 2 ranks" in report
    assert "tensor parallelism on 2 ranks" in report
    assert report.splitlines()[1:] == [
        "It cannot use sequence parallelism: LlamaParts has no tokens(self, inputs), which returns (samples, "
        "tokens of each)."
    ]
    assert all(torch.equal(p, weights[name]) and p.grad is None for name, p in model.named_parameters())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_batch_of_one_sample_is_called_that_and_not_a_wrong_registration() -> None:
    with pytest.raises(
        ValueError, match=r"1 sample makes no two microbatches.*pass 2 samples or more"
    ) as error:
        hpnb.models.check(OwnLlama(), batch(1))
    assert "registered" not in str(error.value)
    assert "parts against the forward" in hpnb.models.check(OwnLlama(), batch(1), ranks=1)


def test_the_kind_of_a_wrong_role_is_named() -> None:
    own_roles = own_models.roles(OwnLlama())
    wrong = own_roles | {"blocks.0.up.bias": Role("head", 0, bias=True)}
    hpnb.models.register(OwnLlama, parts, lambda net: wrong)
    with pytest.raises(
        ValueError, match=r"blocks\.0\.up\.bias has the role 'head', .* weight the role 'column'"
    ):
        hpnb.models.roles(OwnLlama())
    hpnb.models.register(OwnLlama, parts, lambda net: own_roles | dict(linear("blocks.0.up", "head")))
    with pytest.raises(ValueError, match="tensor parallelism on 2 ranks") as failure:
        hpnb.models.check(OwnLlama(), batch())
    assert "up.weight head; down.weight row, 32 units of 1" in str(failure.value)


class PartsWithTokens(LlamaParts):
    def tokens(self, inputs: Any) -> Any:
        return inputs["ids"].shape


class CenteredLlama(OwnLlama):
    """After each block the mean over the tokens goes, which a rank with half of the tokens does not know."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.tokens(ids) + self.start
        for block in self.blocks:
            x = block(x, self.rotary, mask)
            x = x - x.mean(1, keepdim=True)
        return self.logits(self.norm(x))  # type: ignore[no-any-return]


class CenteredParts(PartsWithTokens):
    def run(self, block: Any, hidden: Any, inputs: Any) -> Any:
        hidden = super().run(block, hidden, inputs)
        return hidden - hidden.mean(1, keepdim=True)


def test_a_block_that_needs_all_tokens_fails_under_sequence_parallelism_alone() -> None:
    register_llama(PartsWithTokens)
    assert "sequence parallelism on 2 ranks" in hpnb.models.check(OwnLlama(), batch())
    hpnb.models.register(CenteredLlama, lambda net: parts(net, CenteredParts), own_models.roles)
    with pytest.raises(ValueError, match="sequence parallelism on 2 ranks: output") as failed:
        hpnb.models.check(CenteredLlama(), batch())
    assert "tensor parallelism on 2 ranks:" not in str(failed.value)
    assert "use tensor parallelism without it" in str(failed.value)


class ShapedBlock(own_models.Block):
    """Takes B and t from its x, or from what its column gives."""

    of_column = False

    def forward(self, x: torch.Tensor, rotary: nn.Module, mask: torch.Tensor | None) -> torch.Tensor:
        q, k, v = (f(self.norm(x)) for f in (self.q, self.k, self.v))
        B, t = (q if self.of_column else x).shape[:2]
        q, k, v = (y.view(B, t, -1, self.width).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(rotary(q), rotary(k), v, mask, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(B, t, -1))
        return x + self.down(F.silu(self.up(x)))  # type: ignore[no-any-return]


class ShapedOfColumn(ShapedBlock):
    of_column = True


class ShapedLlama(OwnLlama):
    def __init__(self, block: type[ShapedBlock]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(16, 4, 2, nn.RMSNorm) for _ in range(2))


def test_a_block_that_takes_its_shape_from_x_is_shown_where_to_take_it() -> None:
    hpnb.models.register(ShapedLlama, lambda net: parts(net, PartsWithTokens), own_models.roles)
    report = hpnb.models.check(ShapedLlama(ShapedBlock), batch())
    assert "It cannot use sequence parallelism" in report
    assert "takes them from what a column gives: B, t = q.shape[:2]" in report
    assert "sequence parallelism on 2 ranks" in hpnb.models.check(ShapedLlama(ShapedOfColumn), batch())


@pytest.mark.parametrize(("kind", "part"), [(NoNorm, "norm"), (NoMask, "blocks.0")])
def test_parts_that_are_not_the_forward_are_named(kind: Any, part: str) -> None:
    register_llama(kind)
    with pytest.raises(ValueError, match=rf"outputs .*{part}"):
        hpnb.models.check(OwnLlama(), batch(), ranks=1)


def test_a_wrong_role_shows_on_two_ranks() -> None:
    register_llama(down=Role("norm", 0))  # replicated, though its input is sharded
    with pytest.raises(ValueError, match="tensor parallelism on 2 ranks"):
        hpnb.models.check(OwnLlama(layers=2), batch())


def test_parameters_in_no_part_are_named() -> None:
    hpnb.models.register(OwnLlama, lambda net: own_models.parts(net, root=False), own_models.roles)
    with pytest.raises(ValueError, match=r"start .*root_parameters"):
        hpnb.models.check(OwnLlama(), batch(), ranks=1)
    with pytest.raises(ValueError, match=r"no parameter 'stop'; it has start"):
        root_parameters(OwnLlama(), "stop")


# --- the check of the first step -----------------------------------------------------------------------


def test_the_first_step_is_checked_once_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    model, state = OwnLlama(), torch.get_rng_state()
    ran: list[Any] = []
    find = compare_parts.find_difference
    monkeypatch.setattr(compare_parts, "find_difference", lambda *a: ran.append(a) or find(*a))
    check = first_step_check(model)
    assert check is first_step_check(model) is not None
    check.run(batch())
    check.run(batch())
    assert len(ran) == 1
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    register_llama(NoNorm)
    wrong = first_step_check(OwnLlama())
    assert wrong is not None
    with pytest.raises(ValueError, match="norm"):
        wrong.run(batch())


def test_what_cannot_be_checked_is_not() -> None:
    assert first_step_check(hpnb.models.gpt2("laptop")) is None  # hpnb's own
    with torch.device("meta"):
        assert first_step_check(OwnLlama()) is None
    assert first_step_check(nn.Linear(2, 2)) is None


def first_step(tp: int, pp: int, wrong: bool) -> float:
    register_llama(NoNorm if wrong else own_models.LlamaParts)
    mesh, model = hpnb.Mesh(hpnb.Layout(pp=pp, tp=tp)), build()
    if tp > 1:
        hpnb.tensor_parallel.parallelize(model, mesh.tp)
    if pp == 1:
        return float(model(**batch()).square().mean().detach())
    schedule = schedules.make("1f1b", pp, 2)
    pipe = hpnb.Pipeline(model, mesh.pp, schedule, lambda outputs, _: outputs.square().mean())
    return float(pipe.step(batch()).loss)


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 1)])
def test_the_first_step_of_wrong_parts_is_refused(pools: RankPools, tp: int, pp: int) -> None:
    with pytest.raises(hpnb.RankError, match=r"parts are not .*norm.*hpnb\.models\.check"):
        pools[2].run(first_step, tp, pp, True)
    wanted = build()(**batch()).square().mean().item()
    assert pools[2].run(first_step, tp, pp, False) == pytest.approx([wanted] * 2, rel=1e-12)


# --- training ------------------------------------------------------------------------------------------


REPLICATED = ("start", "norm.weight", "tokens.weight", "blocks.0.norm.weight")


def mean_square(outputs: torch.Tensor, _: Any) -> torch.Tensor:
    return (outputs - 0.1).square().mean()


def train(with_roles: bool = True, **layout: Any) -> dict[str, torch.Tensor]:
    """Weights after two steps, of this rank's replica."""
    register_llama()
    if not with_roles:
        hpnb.models.register(OwnLlama, parts)
    booster = hpnb.Booster(plugin=(plugin := hpnb.HybridParallelPlugin(precision="fp64", **layout)))
    net = build()
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9))
    dp = plugin.mesh.dp
    share = {name: value.chunk(dp.size)[dp.rank] for name, value in batch(8).items()}
    for _ in range(2):
        optimizer.zero_grad()
        booster.execute_pipeline(iter([share]), model, mean_square, optimizer)
        optimizer.step()
    return {n: p.detach() for n, p in model.named_parameters() if n in REPLICATED}


LAYOUTS = [{"pp_size": 2}, {"tp_size": 2}, {"pp_size": 2, "tp_size": 2}, {"pp_size": 2, "zero_stage": 1}]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rotary_tables_root_parameters_and_grouped_queries_train_in_every_layout(
    pools: RankPools, layout: dict[str, int]
) -> None:
    alone = build()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.5, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        mean_square(alone(**batch(8)), None).backward()
        optimizer.step()
    wanted = {name: p.detach() for name, p in alone.named_parameters()}
    ranks = 4 if "zero_stage" in layout or len(layout) > 1 else 2
    for of_rank in pools[ranks].run(train, **layout):
        for name, found in of_rank.items():
            if found.shape == wanted[name].shape:
                assert float((found - wanted[name]).norm() / wanted[name].norm()) < 1e-12, name


def test_an_attribute_of_an_anatomy_stays_and_must_have_no_parameters() -> None:
    found = own_models.parts(build())
    assert found.with_parts(blocks=found.blocks[:1]).rotary is found.rotary
    assert list(found.shared()) == ["rotary"]
    found.rotary = nn.Linear(2, 2)
    hpnb.models.register(OwnLlama, lambda net: found, own_models.roles)
    with pytest.raises(ValueError, match=r"rotary\.weight .*Part"):
        layers(build())
    assert Part("", nn.Module()).full_name("a") == "a"


# --- arguments that are almost right -----------------------------------------------------------------------


class FixedHeads(own_models.Block):
    """Folds by a count of heads, which a rank has only some of."""

    def forward(self, x: torch.Tensor, rotary: nn.Module, mask: torch.Tensor | None) -> torch.Tensor:
        return x + self.o(self.q(self.norm(x)).view(*x.shape[:2], 4, 4).flatten(2))  # type: ignore[no-any-return]


class WrongKey(own_models.LlamaParts):
    def embed(self, inputs: Any) -> torch.Tensor:
        return super().embed({"ids": inputs["input_ids"]})


class WrongAttribute(own_models.LlamaParts):
    def run(self, block: Part, hidden: torch.Tensor, inputs: Any) -> torch.Tensor:
        return block.module(hidden, self.rotation, None)  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (WrongKey, r"WrongKey\.embed .*'input_ids'.* ids, mask"),
        (WrongAttribute, r"WrongAttribute\.run of blocks\.0 .*'rotation'"),
    ],
)
def test_the_part_that_lacks_a_key_or_an_attribute_is_named(kind: Any, names: str) -> None:
    register_llama(kind)
    with pytest.raises(ValueError, match=names):
        hpnb.models.check(OwnLlama(), batch(), ranks=1)


def boost_with_sequence_parallelism(**layout: Any) -> str:
    register_llama()
    plugin = hpnb.HybridParallelPlugin(precision="fp64", enable_sequence_parallelism=True, **layout)
    try:
        hpnb.Booster(plugin=plugin).boost(build())
    except NotImplementedError as error:
        return str(error)
    return ""


def test_parts_without_tokens_are_refused_before_a_step_of_a_pipeline(pools: RankPools) -> None:
    for refused in pools[4].run(boost_with_sequence_parallelism, tp_size=2, pp_size=2):
        assert "LlamaParts does not say how many tokens a batch has" in refused
        assert "give the class a method tokens(self, inputs)" in refused
    for layout in ({"tp_size": 2}, {"pp_size": 2}):  # nobody asks for them
        assert pools[2].run(boost_with_sequence_parallelism, **layout) == ["", ""]


# --- one weight in two places ----------------------------------------------------------------------------


class TiedByHand(OwnLlama):
    """Its embedding is its output layer, without a module for the latter."""

    def __init__(self) -> None:
        super().__init__()
        del self.logits

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.tokens(ids) + self.start
        for block in self.blocks:
            x = block(x, self.rotary, mask)
        return nn.functional.linear(self.norm(x), self.tokens.weight)


class ReadsEmbedding(own_models.LlamaParts):
    def finish(self, hidden: torch.Tensor, inputs: Any) -> torch.Tensor:
        return nn.functional.linear(self.head[0].module(hidden), self.embedding[0].module.weight)  # type: ignore[arg-type]


class InTwoParts(own_models.LlamaParts):
    def finish(self, hidden: torch.Tensor, inputs: Any) -> torch.Tensor:
        return nn.functional.linear(self.head[0].module(hidden), self.head[1].module.weight)  # type: ignore[arg-type]


def register_tied_by_hand(kind: type[own_models.LlamaParts]) -> None:
    def parts(net: TiedByHand) -> own_models.LlamaParts:
        again = (Part("tokens", net.tokens),) if kind is InTwoParts else ()
        found = kind(
            (Part("tokens", net.tokens), root_parameters(net, "start")),
            tuple(Part(f"blocks.{i}", block) for i, block in enumerate(net.blocks)),
            (Part("norm", net.norm), *again), causal=True,
        )  # fmt: skip
        found.rotary = net.rotary
        return found

    hpnb.models.register(TiedByHand, parts, own_models.roles)


def train_tied_by_hand(kind: type[own_models.LlamaParts], large: bool = False, **layout: Any) -> Any:
    if large:
        compare_parts.LARGEST = 0
    register_tied_by_hand(kind)
    torch.manual_seed(0)
    net = TiedByHand().double()
    booster = hpnb.Booster(hpnb.HybridParallelPlugin(precision="fp64", num_microbatches=2, **layout))
    try:
        model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for _ in range(2):
            optimizer.zero_grad()
            booster.execute_pipeline(iter([batch()]), model, mean_square, optimizer)
            optimizer.step()
    except ValueError as error:
        return str(error)
    return {name: p.detach() for name, p in model.named_parameters()}


def test_an_embedding_that_is_the_output_layer_trains_or_both_places_are_named() -> None:
    """In silence each tensor-parallel rank computed the logits of its own tokens."""
    (alone,) = hpnb.launch(train_tied_by_hand, ReadsEmbedding, ranks=1, device="cpu")
    stages = hpnb.launch(train_tied_by_hand, InTwoParts, ranks=2, device="cpu", pp_size=2, large=True)
    for name, trained in [item for stage in stages for item in stage.items()]:
        torch.testing.assert_close(trained, alone[name], rtol=1e-11, atol=1e-13)
    for text in hpnb.launch(train_tied_by_hand, InTwoParts, ranks=2, device="cpu", tp_size=2):
        assert "the module tokens is a Part of the embedding and of the head" in text
        assert "net.output.weight = net.tokens.weight" in text
    for axis, large in (("tp_size", True), ("pp_size", False)):
        layout = {axis: 2, "large": large}
        with pytest.raises(hpnb.RankError, match=r"ReadsEmbedding\.finish reads parts of self\.embedding"):
            hpnb.launch(raise_tied_by_hand, layout, ranks=2, device="cpu")
    register_tied_by_hand(ReadsEmbedding)
    with pytest.raises(ValueError, match=r"may only use self\.head"):
        hpnb.models.check(TiedByHand(), batch(), ranks=1)


def raise_tied_by_hand(layout: dict[str, Any]) -> None:
    """The rank that checks for all says it; the others wait for it."""
    if isinstance(text := train_tied_by_hand(ReadsEmbedding, **layout), str):
        raise ValueError(text)


def refused_on_ranks() -> list[str]:
    """Heads that are counted, a role without units, and a class that is registered elsewhere."""
    mesh, errors = hpnb.Mesh(hpnb.Layout(tp=2)), []

    def forward() -> None:
        model = hpnb.tensor_parallel.parallelize(build(), mesh.tp)
        for block in model.blocks:  # type: ignore[union-attr]
            block.__class__ = FixedHeads
        model(**batch())

    def shard() -> None:
        register_llama(q=Role("column", 0, 1))
        hpnb.tensor_parallel.parallelize(build(), mesh.tp)

    def unknown() -> None:
        del registry.REGISTERED[OwnLlama]
        hpnb.tensor_parallel.parallelize(build(), mesh.tp)

    register_llama()
    for call in (forward, shard, unknown):
        try:
            call()
        except (RuntimeError, ValueError, TypeError) as error:
            errors.append(str(error))
    return errors


def test_what_a_registration_lacks_is_said_on_the_ranks(pools: RankPools) -> None:
    heads, units, unknown = pools[2].run(refused_on_ranks)[0]
    for word in ("[4, 6, 4, 4]", "blocks.0", "2 tensor-parallel ranks", "attentions=", "-1, head_size"):
        assert word in heads
    assert "blocks.0.q.weight has 1 " in units
    assert "units=" in units
    assert "OwnLlama" in unknown
    assert "inside the function that runs on the ranks" in unknown


def with_a_mesh_and_names() -> tuple[list[str], int, float, list[str]]:
    """Axes taken of a mesh; microbatches of a named schedule, its loss; what refuses anything else."""
    mesh = hpnb.Mesh(hpnb.Layout(dp=2))
    linear = hpnb.DataParallel(nn.Linear(2, 2), mesh)
    sharded = hpnb.ZeroOptimizer(nn.Linear(2, 2).parameters(), torch.optim.SGD, mesh, lr=0.1)
    hpnb.fully_shard(nn.Linear(2, 2), mesh)(torch.ones(1, 2))
    axes = [linear.axis.name, sharded.axis.name]
    register_llama()
    cut = hpnb.tensor_parallel.parallelize(build(), hpnb.Mesh(hpnb.Layout(tp=2)))
    axes.append(hpnb.tensor_parallel.axes(cut)[0].name)
    pipe = hpnb.Pipeline(build(), hpnb.Mesh(hpnb.Layout(pp=2)), "1f1b", mean_square)
    loss = float(pipe.step(batch(8)).loss)
    refused = []
    for call in (
        lambda: hpnb.fully_shard(nn.Linear(2, 2), "dp"),
        lambda: hpnb.tensor_parallel.parallelize(build(), torch.distributed.group.WORLD),
        lambda: hpnb.Pipeline(build(), mesh.dp, 4, mean_square),
        lambda: hpnb.Booster("fp16"),
        lambda: hpnb.Booster(plugin=hpnb.HybridParallelPlugin),
    ):
        try:
            call()
        except (ValueError, TypeError) as error:
            refused.append(str(error))
    return axes, pipe.schedule.microbatches, loss, refused


def test_a_mesh_has_the_axis_and_a_name_the_schedule(pools: RankPools) -> None:
    axes, microbatches, loss, refused = pools[2].run(with_a_mesh_and_names)[0]
    assert axes == ["dp", "dp", "tp"]
    assert microbatches == 8
    assert loss == pytest.approx(mean_square(build()(**batch(8)), None).item(), rel=1e-12)
    arguments = ("mesh.dp", "mesh.tp", "schedules.make", "fp16", "Hybrid")
    for said, argument in zip(refused, arguments, strict=True):
        assert argument in said


def test_mixed_precision_is_that_of_the_plugin() -> None:
    assert hpnb.Booster(mixed_precision="bf16").plugin.policy.name == "bf16"
    plugin = hpnb.TorchDDPPlugin("bf16")
    assert hpnb.Booster(plugin, mixed_precision=torch.bfloat16).plugin is plugin
    with pytest.raises(ValueError, match=r"'fp16'.*'fp32'"):
        hpnb.Booster(hpnb.TorchDDPPlugin("fp32"), mixed_precision="fp16")
    plugin, booster_kwargs = hpnb.TorchDDPPlugin(), {"mixed_precision": "fp16"}
    assert hpnb.Booster(plugin=plugin, **booster_kwargs).plugin is plugin  # type: ignore[arg-type]
    assert plugin.policy.name == "fp16"
    with pytest.raises(ValueError, match=r"'bf16'.*'fp16'"):
        hpnb.Booster(plugin, mixed_precision="bf16")
    assert hpnb.TorchDDPPlugin().policy.name == "fp32"


# --- registered in a script or a notebook -----------------------------------------------------------------

IN_MAIN = """
import sys
import torch, hpnb
from torch import nn
from hpnb.models import Anatomy, Part
from hpnb.models.role import linear
from hpnb.pipeline_parallel import schedules

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

class OwnParts(Anatomy):
    def embed(self, inputs): return self.embedding[0].module(inputs["x"])
    def run(self, block, hidden, inputs): return block.module(hidden)
    def finish(self, hidden, inputs): return self.head[0].module(hidden)

def part(net, i):
    return Part(f"layers.{i}", net.layers[i])

def register(first):
    roles = lambda net: {k: v for i in range(4) for k, v in linear(f"layers.{i}", "head")}
    parts = lambda net: OwnParts((part(net, first),), (part(net, 1), part(net, 2)), (part(net, 3),))
    hpnb.models.register(Own, parts, roles)

def step(model, x):
    mesh = hpnb.Mesh(hpnb.Layout(pp=2))
    pipe = hpnb.Pipeline(model, mesh.pp, schedules.make("1f1b", 2, 2), lambda y, _: y.square().mean())
    return float(pipe.step({"x": x}).loss)

def blocks(model):
    return [p.name for p in hpnb.models.anatomy(model).parts]

torch.manual_seed(5)
model, x = Own().double(), torch.randn(4, 4, dtype=torch.float64)
with hpnb.Ranks(2, device="cpu") as ranks:
    try:
        ranks.run(blocks, model)
    except hpnb.RankError as error:
        print("hpnb.models.register(Own" in str(error))
    register(1)
    print(ranks.run(blocks, model)[1])
    register(0)
    print(ranks.run(blocks, model)[1])
wanted = model(x).square().mean().item()
print(max(abs(loss / wanted - 1) for loss in hpnb.launch(step, model, x, ranks=2, device="cpu")) < 1e-12)
hpnb.models.register(Own, lambda net: sys.stdout, lambda net: {})
hpnb.models.register(Own, (lambda file: lambda net: file)(open(sys.argv[0])), lambda net: {})
import own_models
own_models.register_llama()
count = lambda: len(hpnb.models.anatomy(own_models.OwnLlama()).blocks)
print(hpnb.launch(count, ranks=2, device="cpu"))
"""


def test_what_a_script_registers_reaches_its_ranks(tmp_path: Path) -> None:
    """Lambdas and classes of __main__, again when the caller registers again, and functions of a module.

    What does not pickle stays.
    """
    file = tmp_path / "script.py"
    file.write_text(IN_MAIN)
    del registry.REGISTERED[OwnLlama]
    printed, errors = run_script_here(file)
    assert errors == ""
    names = [f"layers.{i}" for i in range(4)]
    assert printed.splitlines() == ["True", str(["layers.1", *names[1:]]), str(names), "True", "[2, 2]"]


# --- what is registered in another form than it is needed in ------------------------------------------------


def lacks_a_tuple(net: OwnLlama) -> own_models.LlamaParts:
    blocks = tuple(Part(f"blocks.{i}", block) for i, block in enumerate(net.blocks))
    return own_models.LlamaParts(Part("tokens", net.tokens), blocks, (Part("norm", net.norm),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parts", "roles", "words"),
    [
        (lacks_a_tuple, own_models.roles, r"embedding of the LlamaParts .* has Part\('tokens', \.\.\), one"),
        (lambda net: None, own_models.roles, r"the parts of a OwnLlama returned None; return an object"),
        (own_models.parts, lambda net: None, r"the roles of a OwnLlama returned None; return a dict"),
        (own_models.parts, lambda net: [*own_models.roles(net).items()], r"returned a list; .*dict\(pairs\)"),
        (own_models.parts, lambda net: own_models.roles(net) | {"start": "column"}, r"role of start .*'col"),
        (
            own_models.parts,
            lambda net: {"start": own_models.roles(net)["start"]},
            r"have no role in a OwnLlama: [^;]*; add them to the roles .* ask before [a-z ]*$",
        ),
    ],
)
def test_what_is_registered_in_another_form_is_said(parts: Any, roles: Any, words: str) -> None:
    hpnb.models.register(OwnLlama, parts, roles)
    with pytest.raises(ValueError, match=words):
        hpnb.models.check(OwnLlama(), batch(), ranks=1)


@pytest.mark.parametrize("roles", [None, lambda net: {}])
def test_without_roles_the_parts_and_the_pipeline_are_checked(roles: Any) -> None:
    hpnb.models.register(OwnLlama, parts, roles)
    report = hpnb.models.check(OwnLlama(), batch())
    assert report == (
        "OwnLlama is registered well: names of parameters; parts against the forward, with gradients; "
        "pipeline on 2 ranks; ZeRO 3 on 2 ranks; ZeRO 3 in a pipeline on 2 ranks. It has no roles, so tensor "
        "and sequence parallelism are left out."
    )
    assert "left out" in hpnb.models.check(OwnLlama(), batch(), ranks=1)
    for function in (hpnb.models.roles, lambda net: hpnb.models.decay_groups(net, 0.1)):
        with pytest.raises(ValueError, match=r"OwnLlama is registered without roles, .* ZeRO need none$"):
            function(OwnLlama())


def test_without_roles_a_pipeline_trains_and_tensor_parallelism_is_refused(pools: RankPools) -> None:
    wanted, found = (pools[2].run(train, with_roles, pp_size=2) for with_roles in (True, False))
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    with pytest.raises(hpnb.RankError, match=r"OwnLlama is registered without roles"):
        pools[2].run(train, False, tp_size=2)


def test_wrong_parts_are_named_without_roles_too() -> None:
    hpnb.models.register(OwnLlama, lambda net: parts(net, NoNorm))
    with pytest.raises(ValueError, match=r"does not fit it:\n.*norm"):
        hpnb.models.check(OwnLlama(), batch(), ranks=1)


def test_what_check_cannot_compute_with_is_said() -> None:
    with pytest.raises(TypeError, match=r"takes a batch by the names .* not a Tensor"):
        hpnb.models.check(OwnLlama(), torch.zeros(2, 6))  # type: ignore[arg-type]
    with torch.device("meta"):
        meta = OwnLlama()
    with pytest.raises(ValueError, match="is on the meta device"):
        hpnb.models.check(meta, batch(), ranks=1)
    frozen = OwnLlama().requires_grad_(False)
    assert "with gradients" in hpnb.models.check(frozen, batch(), ranks=1)
    assert not any(p.requires_grad for p in frozen.parameters())


def test_names_of_tied_weights_that_are_in_no_tuple_are_named() -> None:
    def flat(net: OwnLlama) -> LlamaParts:
        return replace(parts(net), tied=("tokens.weight", "logits.weight"))  # type: ignore[arg-type]

    hpnb.models.register(OwnLlama, flat, own_models.roles)
    with pytest.raises(ValueError, match=r"tied of the LlamaParts .*one tied weight alone is") as error:
        hpnb.models.check(OwnLlama(), batch(), ranks=1)
    assert "t, o, k" not in str(error.value)


def test_a_role_of_a_linear_is_for_a_matrix() -> None:
    role = Role("column", 0, 1, units=4)
    with pytest.raises(ValueError, match=r"is 4-D, and the role 'column' is for the 2-D weight"):
        check_role("blocks.0.mix.weight", role, (8, 8, 3, 3))
    check_role("blocks.0.mix.weight", role, (8, 8))


def test_units_of_keys_that_are_those_of_queries_are_named() -> None:
    register_llama(k=(wrong := Role("column", 0, 1, units=4)), v=wrong)
    with pytest.raises(ValueError, match="tensor parallelism on 3 ranks") as error:
        hpnb.models.check(OwnLlama(), batch())
    text = str(error.value)
    assert "q.weight column, 4 units of 4; o.weight row, 4 units of 4; k.weight column, 4 units of 2" in text
    assert "key-value heads for k and v" in text
    assert "[on 3 ranks and not 2, so that units are left over]" in text


# --- keys without a gradient -------------------------------------------------------------------------------


def test_the_bias_of_keys_has_a_gradient_of_rounding_alone() -> None:
    grouped_queries.register(query_units=16, kv_units=16)
    model = grouped_queries.Net(kv_heads=16, bias=True)
    assert "registered well" in hpnb.models.check(model, {"x": torch.randn(4, 6, 8)})

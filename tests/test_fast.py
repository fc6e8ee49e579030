"""What is compiled, and Adam in one pass, compute what they stand for."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hybrid_cases import Case, Found, batch, build, distance, mean, mine, off, train
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

import hpnb
from hpnb import HybridAdam, precision
from hpnb.hybrid import compile_blocks, recompute
from hpnb.hybrid.boosted_optimizer import boosted_optimizer
from hpnb.pipeline_parallel.split_backward import SplitBackward
from hpnb.precision import Masters, flat_adam

pytestmark = pytest.mark.usefixtures("launches_on_a_pool")

D = torch.float64


@pytest.fixture(scope="module")
def pair() -> Iterator[hpnb.Ranks]:
    with hpnb.Ranks(2, device="cpu", timeout=200) as pool:
        yield pool


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """What has been compiled since the test began; autograd cuts it in two as on a GPU, and runs it so."""
    found: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append(graph)
        return aot_eager(graph, inputs)

    monkeypatch.setattr(compile_blocks, "ON_CPUS", backend)
    return found


# --- blocks ----------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "whole", "dropout", "again", "rows", "compilations"),
    [
        # All blocks share one compilation of each piece; a ragged microbatch needs another.
        ("vit", True, 0.0, False, (6, 6, 4, 3), 2),
        ("vit", False, 0.1, False, (6, 6), 1),
        ("gpt2", False, 0.1, "full", (6, 6), 1),
        pytest.param("vit", False, 0.0, False, (6, 4, 3), 2, marks=pytest.mark.slow),
        pytest.param("gpt2", True, 0.1, False, (6, 4, 1, 6), 3, marks=pytest.mark.slow),
        pytest.param("gpt2", True, 0.0, "full", (6, 4, 3), 2, marks=pytest.mark.slow),
        pytest.param("vit", True, 0.0, "attention", (6, 4, 3), 2, marks=pytest.mark.slow),
        pytest.param("gpt2", False, 0.1, False, (6, 4, 1, 6), 3, marks=pytest.mark.slow),
    ],
)
def test_compiled_blocks_compute_the_same(
    graphs: list[Any],
    kind: str,
    whole: bool,
    dropout: float,
    again: Any,
    rows: tuple[int, ...],
    compilations: int,
) -> None:
    layers = 9  # more than PyTorch compiles one function for
    plain, fast = (build(kind, layers=layers, dropout=dropout, hidden=8) for _ in range(2))
    compile_blocks.compile_blocks(fast, whole)
    recompute.enable_recomputation(fast, again)
    split = SplitBackward(fast.modules(), min_flops=1e18 if whole else 0.0)
    for step, size in enumerate(rows):
        given = batch(kind, 0, size)
        found: list[dict[str, torch.Tensor]] = []
        for model in (plain, fast):
            model.zero_grad()
            torch.manual_seed(step)
            loss = mean(model(**{n: t for n, t in given.items() if n != "labels"}), given)
            if model is plain or whole:
                loss.backward()
            else:
                with split.deferring(0):
                    loss.backward()
                assert split.pending(0)  # a compiled linear would not be split
                split.add_weight_gradients(0)
            grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            found.append({"loss": loss.detach(), **grads})
        assert len(found[0]) > 12 * layers
        assert distance(found[1], found[0]) < 1e-12
    assert len(graphs) == compilations


def test_a_wrong_region_is_noticed(graphs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above sees what happens between the linears."""
    monkeypatch.setattr(compile_blocks, "_add", lambda x, residual, p: residual + 1.001 * x)
    plain, fast = (build("vit", layers=1, hidden=8) for _ in range(2))
    compile_blocks.compile_blocks(fast, whole=False)
    given = batch("vit", 0, 2)
    a, b = (mean(model(pixel_values=given["pixel_values"]), given) for model in (plain, fast))
    assert abs(float(a.detach() - b.detach())) > 1e-9


def test_other_models_and_other_forwards(graphs: list[Any]) -> None:
    """A block with a forward that was set on it keeps it; between linears only what is known is compiled."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    x = torch.randn(3, 4)
    wanted = model(x)
    compile_blocks.compile_blocks(model, whole=False)
    assert torch.equal(model(x), wanted)
    assert not graphs
    own = model[0].forward
    model[0].forward = lambda x: own(x) + 1
    wanted = model(x)
    compile_blocks.compile_blocks(model, whole=True)
    assert torch.equal(model(x), wanted)
    assert len(graphs) == 2
    assert torch.equal(copy.deepcopy(model)(x), wanted)


def on_ranks(case: Case, knobs: dict[str, Any], backend: str = "aot_eager") -> Found:
    from hpnb.hybrid import compile_blocks as here

    here.ON_CPUS = backend
    return train(case, {"enable_jit_fused": True, **knobs})


FAST = [
    Case("vit", dp=2, zero=3, direct=True, clip=0.5),
    Case("vit", pp=2, style="zb-v", microbatches=2, again="full"),
    Case("vit", tp=2, sequence=True, clip=0.5),
]
SLOW = [
    Case("gpt2", tp=2, sequence=True, again="full"),
    Case("gpt2", dp=2, direct=True),
    Case("gpt2", dp=2, zero=1, again="full"),
    Case("gpt2", dp=2, zero=2, again="attention", rows=5),
    Case("gpt2", dp=2, zero=3, again="full", rows=1),  # a rank without samples
    Case("gpt2", pp=2, microbatches=3, zero=2, accumulate=2),
    Case("gpt2 classifies", pp=2, style="interleaved", chunks=2, microbatches=3),
    Case("gpt2", pp=2, style="zb-v", microbatches=3, rows=7),
    Case("vit", pp=2, style="zb-h1", zero=3),
    Case("vit", tp=2, zero=3, microbatches=3),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "case", [*FAST, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=str
)
def test_compiled_on_ranks_it_is_one_process(pair: hpnb.Ranks, case: Case) -> None:
    assert off(case, pair.run(on_ranks, case, {})) < 1e-11


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_compiled_on_more_ranks() -> None:
    with hpnb.Ranks(4, device="cpu", timeout=300) as ranks:
        for case in (
            Case("gpt2", dp=2, pp=2, style="zb-v", microbatches=3, zero=3, rows=7),
            Case("gpt2", pp=2, tp=2, sequence=True, style="zb-h1", microbatches=3),
            Case("vit", tp=4, tp_mode="2d", zero=1, direct=True),
        ):
            assert off(case, ranks.run(on_ranks, case, {})) < 1e-11, case


@pytest.mark.gpu
@pytest.mark.timeout(1800)
def test_compiled_on_gpus_it_is_one_process() -> None:
    with hpnb.Ranks(2, device="cuda", timeout=600) as ranks:
        for case in (*FAST, *SLOW):
            assert off(case, ranks.run(on_ranks, case, {"enable_all_optimization": True})) < 1e-10, case


def test_cpus_compile_nothing_unless_told() -> None:
    assert compile_blocks.ON_CPUS is None
    assert compile_blocks.backend() is None


# --- Adam in one pass ------------------------------------------------------------------------------------


class Net(nn.Module):
    """A weight that no batch uses, one that some do, a frozen one; sizes that are no multiple of a row."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 33), nn.Linear(33, 3)
        self.rare = nn.Linear(33, 33)
        self.frozen = nn.Linear(33, 33).requires_grad_(False)
        self.never = nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.tensor(1.1))
        self.to(dtype)

    def forward(self, x: torch.Tensor, rare: bool = False) -> torch.Tensor:
        h = (self.first(x) * self.scale).tanh()
        h = (self.rare(h) + self.frozen(h)).tanh() if rare else h
        return self.last(h)  # type: ignore[no-any-return]


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weights decay; vectors do not, and have a learning rate of their own."""
    every = list(model.parameters())
    return [
        {"params": [p for p in every if p.dim() > 1], "weight_decay": 0.2},
        {"params": [p for p in every if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.03},
    ]


def backward(model: nn.Module, step: int, rare: bool) -> None:
    dtype = next(model.parameters()).dtype
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 6, generator=g, dtype=D).to(dtype), torch.randn(8, 3, generator=g, dtype=D)
    model.zero_grad()
    (model(x, rare).double() - y).square().mean().backward()


def stays(a: nn.Module, b: nn.Module, ours: Any, theirs: Any, limit: float) -> None:
    """Masters, weights and states of two models with masters are the same."""
    own, other = Masters.attached_to(ours), Masters.attached_to(theirs)
    assert own is not None
    assert other is not None
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        mine, wanted = ours.state.get(p, {}), theirs.state.get(q, {})
        assert mine.keys() == wanted.keys()
        for x, y in ((own.of(p), other.of(q)), *((mine[k], v) for k, v in wanted.items())):
            assert x.shape == y.shape
            assert float((x - y).detach().norm()) <= limit * float(y.detach().norm()), name
        assert torch.equal(p, own.of(p).to(p.dtype))


ADAMS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"betas": (0.7, 0.95), "eps": 1e-4, "fused": True}),
    (torch.optim.Adam, {}),
    (HybridAdam, {}),
    (HybridAdam, {"adamw_mode": False}),
    (HybridAdam, {"bias_correction": False}),
]


@pytest.mark.parametrize(("make", "how"), ADAMS, ids=str)
@pytest.mark.parametrize(
    ("weights", "masters", "limit"), [(torch.float32, D, 1e-13), (torch.bfloat16, torch.float32, 1e-6)]
)
@pytest.mark.sampled(6)
@pytest.mark.parametrize("moves", [True, False])
def test_one_pass_is_adam(
    make: Any, how: dict[str, Any], weights: torch.dtype, masters: torch.dtype, limit: float, moves: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Beside an optimizer that steps masters one by one, with the same gradients; clipped, scheduled."""
    monkeypatch.setattr(flat_adam, "MAX_PASS", 600)
    monkeypatch.setattr(flat_adam, "CPU_CHUNK", 64)
    plain, fast = Net(weights), Net(weights)
    theirs, ours = (make(groups(model), lr=0.02, **how) for model in (plain, fast))
    objects = list(fast.parameters())
    Masters(theirs, masters)
    Masters(ours, masters).flatten((torch.optim.Adam, torch.optim.AdamW, HybridAdam), move_weights=moves)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.8) for one in (theirs, ours)]
    start = {n: p.detach().clone() for n, p in fast.named_parameters()}
    for step, rare in enumerate((False, True, True, False, True)):
        backward(plain, step, rare)
        for p, q in zip(fast.parameters(), plain.parameters(), strict=True):
            p.grad = None if q.grad is None else q.grad.clone()
        wide = [precision.step(one, max_norm=0.5).norm for one in (theirs, ours)]
        assert torch.equal(*wide)  # type: ignore[arg-type]
        for schedule in schedules:
            schedule.step()
        stays(fast, plain, ours, theirs, limit)
        for p, q in zip(fast.parameters(), plain.parameters(), strict=True):
            q.data.copy_(p.data)  # a bit between them is not to grow
    assert list(fast.parameters()) == objects
    assert ours.state[fast.rare.weight]["step"] == 3
    assert not ours.state.get(fast.never.weight)
    assert torch.equal(fast.never.weight, start["never.weight"])
    assert torch.equal(fast.frozen.weight, start["frozen.weight"])
    assert float((fast.first.weight - start["first.weight"]).detach().norm()) > 0.1


def test_it_compiles_as_it_is() -> None:
    """What torch.compile makes of the pass writes where the pass writes, for any length."""
    torch.manual_seed(1)
    compiled: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(graph)
        return aot_eager(graph, inputs)

    numbers = torch.tensor([0.1, 0.99, 0.01, 0.1, 0.999, 0.001, 3.0, 1e-8])
    c = torch.tensor(0.5)
    for rows in (5, 7, 3, 2):
        flat = [torch.rand(rows, flat_adam.ROW) for _ in range(5)]
        flat[0], flat[1] = flat[0].bfloat16(), flat[1].bfloat16()
        for coupled in (False, True):
            wanted, found = copy.deepcopy(flat), copy.deepcopy(flat)
            flat_adam.adam(*wanted, c, numbers, coupled)
            flat_adam._compiled(backend)(*found, c, numbers, coupled)
            assert all(map(torch.equal, found, wanted))
            assert not any(torch.equal(found[i], flat[i]) for i in (0, 2, 3, 4))
    assert len(compiled) <= 4  # two sizes, or any, of both


def test_only_a_cpu_takes_chunks_through_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat_adam, "_compiled", lambda backend: backend)
    chosen = {d: flat_adam._adam_pass(torch.device(d), None) for d in ("cpu", "cuda")}
    assert chosen == {"cpu": flat_adam._adam_in_chunks, "cuda": flat_adam.adam}
    assert flat_adam._adam_pass(torch.device("cuda"), "inductor") == "inductor"  # type: ignore[comparison-overlap]


def test_states_go_in_and_out() -> None:
    """A state from one pass loads into masters one by one, and the other way round, and training goes on."""
    runs: list[tuple[Net, Any]] = []
    for flat in (True, False):
        model = Net(torch.bfloat16)
        optimizer = torch.optim.AdamW(groups(model), lr=0.02)
        masters = Masters(optimizer)
        if flat:
            masters.flatten(move_weights=True)
        for step in range(3):
            backward(model, step, step == 1)
            optimizer.step()
        runs.append((model, optimizer))
    (fast, ours), (plain, theirs) = runs
    stays(fast, plain, ours, theirs, 1e-6)
    saved = [copy.deepcopy(one.state_dict()) for one in (ours, theirs)]
    assert saved[0].keys() == saved[1].keys()
    for model, optimizer, state in ((plain, theirs, saved[0]), (fast, ours, saved[1])):
        for step in range(5, 7):  # go elsewhere, and come back
            backward(model, step, True)
            optimizer.step()
        optimizer.load_state_dict(state)
    stays(fast, plain, ours, theirs, 1e-6)
    views = {t["exp_avg"].untyped_storage().data_ptr() for t in ours.state.values() if t}
    assert len(views) == 2  # one a group
    for step in range(3, 5):
        backward(plain, step, True)
        for p, q in zip(fast.parameters(), plain.parameters(), strict=True):
            p.grad = None if q.grad is None else q.grad.clone()
        ours.step()
        theirs.step()
    stays(fast, plain, ours, theirs, 1e-6)


def test_weights_that_others_have_written_groups_that_come_later_and_what_is_thawed() -> None:
    plain, fast = Net(torch.bfloat16), Net(torch.bfloat16)
    optimizers = []
    for model in (plain, fast):
        optimizer = torch.optim.AdamW([model.first.weight, model.last.weight, model.frozen.weight], lr=0.02)
        masters = Masters(optimizer)
        if model is fast:
            masters.flatten(move_weights=True)
        optimizers.append(optimizer)
    theirs, ours = optimizers
    for step in range(5):
        for model, optimizer in ((plain, theirs), (fast, ours)):
            if step == 1:
                optimizer.add_param_group({"params": [model.rare.weight, model.first.bias], "lr": 0.1})
            if step == 2:
                model.frozen.requires_grad_(True)
            if step == 3:
                with torch.no_grad():
                    model.last.weight.mul_(0.5)
            backward(model, step, True)
            optimizer.step()
        kept = {id(p) for group in ours.param_groups for p in group["params"]}
        for (name, p), q in zip(fast.named_parameters(), plain.named_parameters(), strict=True):
            if id(p) in kept:
                assert float((p - q[1]).detach().norm()) <= 1e-2 * float(q[1].detach().norm()), name
    assert ours.state[fast.frozen.weight]["step"] == 3
    assert ours.state[fast.rare.weight]["step"] == 4


@pytest.mark.parametrize(
    ("make", "how"),
    [
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"lr": torch.tensor(0.02)}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (type("Mine", (torch.optim.AdamW,), {}), {}),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_unusual_is_left_to_the_optimizer(make: Any, how: dict[str, Any]) -> None:
    plain, fast = Net(torch.bfloat16), Net(torch.bfloat16)
    theirs, ours = (make(model.parameters(), **{"lr": 0.02, **how}) for model in (plain, fast))
    Masters(theirs)
    Masters(ours).flatten(move_weights=True)
    for step in range(3):
        for model, optimizer in ((plain, theirs), (fast, ours)):
            backward(model, step, True)
            optimizer.step()
    stays(fast, plain, ours, theirs, 0.0)


def test_an_option_that_changes_on_the_way() -> None:
    plain, fast = Net(torch.bfloat16), Net(torch.bfloat16)
    theirs, ours = (torch.optim.AdamW(model.parameters(), lr=0.02) for model in (plain, fast))
    Masters(theirs)
    Masters(ours).flatten()
    for step, maximize in enumerate((False, True, False)):
        backward(plain, step, True)
        for p, q in zip(fast.parameters(), plain.parameters(), strict=True):
            p.grad = None if q.grad is None else q.grad.clone()
        for optimizer in (theirs, ours):
            optimizer.param_groups[0]["maximize"] = maximize
            optimizer.step()
        stays(fast, plain, ours, theirs, 1e-6)
    assert ours.state[fast.first.weight]["step"] == 3


def test_there_is_no_wide_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond what is held a step needs 2 bytes a parameter of the largest run, and not 4 of all."""
    monkeypatch.setattr(flat_adam, "MAX_PASS", 2**14)
    monkeypatch.setattr(flat_adam, "CPU_CHUNK", 2**10)
    held = []
    for flat in (False, True):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(16))).bfloat16()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=None if flat else False)
        masters = Masters(optimizer)
        if flat:
            masters.flatten(move_weights=True)
        model(torch.randn(2, 64).bfloat16()).sum().backward()
        with hpnb.record.memory(model, optimizer) as recorder:
            optimizer.step()
        held.append(recorder.profile())
    count = sum(p.numel() for p in model.parameters())
    plain, fast = held
    for kind, size in (("parameters", 2), ("gradients", 2), ("optimizer", 12)):
        assert fast.peak_of(kind) == plain.peak_of(kind) == pytest.approx(size * count, rel=1e-2)
    assert plain.peak_of("temporary") >= 4 * count
    assert fast.peak_of("temporary") < 2 * 2**14 + 8 * 4 * 2**10 < count


# --- on ranks --------------------------------------------------------------------------------------------


def half(case: Case, fast: bool, path: str | None = None) -> Found:
    """Three steps in bf16; from the state of a run, if there is a path, one more."""
    torch.set_num_threads(1)
    plugin = case.plugin(precision="bf16", enable_all_optimization=fast)
    booster = hpnb.Booster(plugin=plugin)
    model: Any = build(case.kind, layers=2)
    optimizer: Any = HybridAdam(case.optimize(model).param_groups, lr=0.02)
    for group in optimizer.param_groups:
        group["lr"] = 0.02
    model, optimizer, *_ = booster.boost(model, optimizer)
    assert bool(getattr(Masters.attached_to(boosted_optimizer(optimizer).inner), "_flat", None)) is fast

    def one(step: int) -> None:
        given = mine(batch(case.kind, step, case.rows), plugin.mesh.dp)
        booster.execute_pipeline(iter([given]), model, None, optimizer)
        optimizer.step()
        optimizer.zero_grad()

    for step in range(3):
        one(step)
    before = optimizer.state_dict()
    found = {"state": before, "weights": hybrid_weights(model)}
    if path is not None:
        booster.save_model(model, f"{path}/model")
        booster.save_optimizer(optimizer, f"{path}/optimizer")
        one(3)
        once = hybrid_weights(model)
        booster.load_model(model, f"{path}/model")
        booster.load_optimizer(optimizer, f"{path}/optimizer")
        one(3)
        found |= {"once": once, "again": hybrid_weights(model)}
    return found


def hybrid_weights(model: Any) -> dict[str, torch.Tensor]:
    from hybrid_cases import weights

    return weights(model)


HALVES = [
    Case("gpt2", dp=2, clip=0.5),
    Case("gpt2", dp=2, zero=1, clip=0.5),
    Case("vit", dp=2, zero=2),
    Case("gpt2", dp=2, zero=3, clip=0.5),
    Case("gpt2", pp=2, microbatches=2, style="zb-h1", clip=0.5),
    Case("vit", tp=2),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", HALVES, ids=str)
def test_one_pass_on_ranks(pair: hpnb.Ranks, case: Case, tmp_path: Any) -> None:
    """Masters and states of a run with one pass are those of a run without, and it resumes bit for bit."""
    plain, fast = pair.run(half, case, False)[0], pair.run(half, case, True, str(tmp_path))[0]
    a, b = fast["state"], plain["state"]
    assert a["masters"].keys() == b["masters"].keys()
    assert a["state"].keys() == b["state"].keys()
    # 16-bit gradients of equal masters are equal, until a weight rounds the other way.
    assert (
        distance({str(n): t for n, t in a["masters"].items()}, {str(n): t for n, t in b["masters"].items()})
        < 1e-3
    )
    for number, state in b["state"].items():
        assert a["state"][number].keys() == state.keys()
        assert a["state"][number]["step"] == state["step"] == 3
        assert (
            float((a["state"][number]["exp_avg"] - state["exp_avg"]).norm())
            <= 2e-2 * float(state["exp_avg"].norm()) + 1e-6
        )
    assert all(torch.equal(fast["once"][n], t) for n, t in fast["again"].items())


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_one_pass_on_gpus() -> None:
    with hpnb.Ranks(2, device="cuda", timeout=300) as ranks:
        for case in HALVES:
            plain, fast = ranks.run(half, case, False)[0], ranks.run(half, case, True)[0]
            masters = [{str(n): t for n, t in run["state"]["masters"].items()} for run in (fast, plain)]
            assert distance(*masters) < 1e-2, case

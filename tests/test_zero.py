"""ZeroOptimizer against one process with the plain optimizer on the whole batch, in float64."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from rank_pools import RankPools
from torch import nn

import hpnb
from hpnb import Layout, Mesh, placement, precision
from hpnb.data_parallel import DataParallel
from hpnb.data_parallel.buckets import assign_buckets, assign_buckets_by_group
from hpnb.data_parallel.zero import ZeroOptimizer
from hpnb.data_parallel.zero_checks import is_elementwise
from hpnb.grad_norm import total_norm
from hpnb.placement import set_placement
from hpnb.theory import model_states

D = torch.float64
SGD = {"lr": 0.3, "momentum": 0.9}  # large enough that a skipped step shows


class Branches(nn.Module):
    """What can go wrong: a frozen layer, one that only some batches use, one that none does, odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 17, dtype=D)
        self.frozen = nn.Linear(17, 17, dtype=D).requires_grad_(False)
        self.rare = nn.Linear(17, 17, dtype=D)
        self.never = nn.Linear(2, 2, dtype=D)
        self.head = nn.Linear(17, 3, bias=False, dtype=D)
        self.scale = nn.Parameter(torch.ones((), dtype=D))

    def forward(self, x: torch.Tensor, rare: bool = True) -> torch.Tensor:
        h = torch.tanh(self.frozen(self.stem(x))) * self.scale
        if rare:
            h = h + self.rare(h)
        return self.head(h)


@dataclass(frozen=True)
class Case:
    """One way to train; the defaults are the plainest."""

    stage: int = 1
    optimizer: str = "SGD"
    defaults: dict[str, Any] = field(default_factory=lambda: dict(SGD))
    options: dict[str, Any] = field(default_factory=dict)  # of ZeroOptimizer
    groups: bool = False
    accumulate: int = 1
    no_sync: bool = False
    clip: float = 0.0
    unused: bool = False
    ragged: bool = False
    schedule: bool = False
    replica: str = ""  # a DataParallel "before" or "after" the optimizer
    set_to_none: bool = True
    steps: int = 2
    matrices: bool = False  # train only those


def model_of(case: Case) -> Branches:
    torch.manual_seed(0)
    model = Branches()
    if not case.unused:
        model.never.requires_grad_(False)
    if case.matrices:
        for p in model.parameters():
            p.requires_grad_(p.requires_grad and p.dim() == 2)
    return model.to(hpnb.device())


def params_of(model: nn.Module, case: Case) -> Any:
    """What an optimizer is given: named parameters, or groups that differ in rate and decay."""
    if case.matrices:
        return [p for p in model.parameters() if p.requires_grad]
    if not case.groups:
        return list(model.named_parameters())
    named = dict(model.named_parameters())
    return [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.dim() <= 1], "lr": 0.1},
    ]


def batch_of(step: int, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(100 + step)
    rows = 3 if case.ragged and step == case.steps - 1 else 24  # 3: ranks of 4 differ, and one has none
    x, y = torch.randn(rows, 6, dtype=D, generator=g), torch.randn(rows, 3, dtype=D, generator=g)
    return x.to(hpnb.device()), y.to(hpnb.device())


def share_of(t: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    return t.tensor_split(ranks)[rank]


def uses_rare(step: int, rank: int, case: Case) -> bool:
    """With `unused`: on rank 0 alone in step 1, nowhere in the others."""
    return not case.unused or (step == 1 and rank == 0)


def clip_serially(model: nn.Module, case: Case) -> None:
    if case.clip:
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], case.clip)


def scheduler_of(optimizer: torch.optim.Optimizer, case: Case) -> torch.optim.lr_scheduler.LRScheduler | None:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if case.schedule else None


def serially(case: Case, ranks: int, steps: Iterator[int] | range, state: Any = None) -> tuple[Any, Any, Any]:
    """(model, last gradients, optimizer) of one process that sees what all `ranks` see."""
    model = model_of(case)
    optimizer = getattr(torch.optim, case.optimizer)(params_of(model, case), **case.defaults)
    if state is not None:
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
    scheduler = scheduler_of(optimizer, case)
    for step in steps:
        optimizer.zero_grad()
        x, y = batch_of(step, case)
        for mx, my in zip(x.chunk(case.accumulate), y.chunk(case.accumulate), strict=True):
            errors = [
                (model(share_of(mx, ranks, r), uses_rare(step, r, case)) - share_of(my, ranks, r)).square()
                for r in range(ranks)
            ]
            (sum(e.sum() for e in errors) / len(x)).backward()  # type: ignore[union-attr]
        clip_serially(model, case)
        gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return model, gradients, optimizer


def trained(case: Case, steps: Iterator[int] | range, state: Any = None) -> tuple[Any, Any, ZeroOptimizer]:
    """The same on the ranks that are running."""
    axis = Mesh(Layout(dp=hpnb.world_size())).dp
    model = model_of(case)
    if state is not None:
        model.load_state_dict(state[0])
    elif axis.rank:  # replicas must not rely on starting equal
        with torch.no_grad():
            for p in model.parameters():
                p.add_(axis.rank)
    average = not case.ragged
    options = {"bucket_mb": 0.001, "average": average, "find_unused_parameters": case.unused, **case.options}
    wrapping = {"average": average, "find_unused_parameters": case.unused}
    wrapped = DataParallel(model, axis, 0.001, **wrapping) if case.replica == "before" else None
    zero = ZeroOptimizer(params_of(model, case), getattr(torch.optim, case.optimizer), axis, case.stage,
                         **options, **case.defaults)  # fmt: skip
    if case.replica == "after":
        wrapped = DataParallel(model, axis, 0.001, **wrapping)
    if state is not None:
        zero.load_state_dict(state[1])
    forward, scheduler = wrapped or model, scheduler_of(zero, case)
    for step in steps:
        zero.zero_grad(case.set_to_none)
        x, y = batch_of(step, case)
        scale = axis.size if average else 1
        parts = list(zip(x.chunk(case.accumulate), y.chunk(case.accumulate), strict=True))
        for i, (mx, my) in enumerate(parts):
            waits = case.no_sync and i < len(parts) - 1
            found = forward(share_of(mx, axis.size, axis.rank), uses_rare(step, axis.rank, case))
            loss = (found - share_of(my, axis.size, axis.rank)).square().sum() * scale / len(x)
            if waits:
                with (wrapped or zero).no_sync():
                    loss.backward()
            else:
                loss.backward()
        if case.clip and case.replica == "before" and case.stage == 1:
            clip_serially(model, case)  # whole gradients are where they always are
            gradients = zero.full_gradients()
            zero.step()
        elif case.clip:
            norm = total_norm([p for g in zero.param_groups for p in g["params"]], [axis])
            full = [g for g in zero.full_gradients() if g is not None]
            assert torch.allclose(norm, nn.utils.get_total_norm(full), rtol=1e-13, atol=0)
            precision.step(zero, [axis], max_norm=case.clip)
            gradients = zero.full_gradients()  # clipped in place
        else:
            gradients = zero.full_gradients()
            zero.step()
        if scheduler is not None:
            scheduler.step()
    return model, gradients, zero


def distance(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest relative distance; a tensor that hardly moves is held to the typical norm."""
    assert found.keys() == wanted.keys()
    typical = sum(float(t.norm()) for t in wanted.values()) / len(wanted)
    return max(float((found[n] - wanted[n]).norm() / max(wanted[n].norm(), 0.01 * typical)) for n in wanted)


def compare(case: Case) -> tuple[float, float, int]:
    """Distances of the last gradients and the weights from one process, and the number of buckets."""
    model, gradients, zero = trained(case, range(case.steps))
    wanted, theirs, _ = serially(case, hpnb.world_size(), range(case.steps))
    # Matrices are given alone; otherwise an optimizer knows every parameter.
    number = {n: zero._index_of[p] for n, p in model.named_parameters() if p in zero._index_of}
    mine = {n: gradients[i] for n, i in number.items() if gradients[i] is not None}
    of = {n: g for (n, _), g in zip(wanted.named_parameters(), theirs, strict=True) if g is not None}
    assert mine.keys() == of.keys()  # none where nobody had one
    assert all(float(g.norm()) > 0 for g in of.values())
    weights = distance(dict(model.named_parameters()), dict(wanted.named_parameters()))
    return distance(mine, of), weights, len(zero.buckets)


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    shared = RankPools()
    yield shared
    shared.close()


SGD_CASES = {
    "plain": Case(),
    "one bucket": Case(options={"bucket_mb": 25.0}),
    "groups": Case(groups=True),
    "accumulated": Case(accumulate=2),
    "without sync": Case(accumulate=2, no_sync=True),
    "clipped": Case(clip=0.05),
    "unused": Case(unused=True),
    "unused, accumulated, clipped": Case(unused=True, accumulate=2, clip=0.05, groups=True),
    "ragged": Case(ragged=True),
    "schedule": Case(schedule=True, groups=True),
    "at the end": Case(options={"overlap_communication": False}),
    "offload": Case(options={"cpu_offload": True}, accumulate=2),
    "whole": Case(options={"elementwise": False}),
    "zeros": Case(set_to_none=False, accumulate=2),
    "replica before": Case(replica="before", clip=0.05),
    "replica before, accumulated": Case(replica="before", accumulate=2, no_sync=True),
    "replica before, unused": Case(replica="before", unused=True),
    "replica after": Case(replica="after", accumulate=2, no_sync=True),
}


EVERYWHERE = ("unused, accumulated, clipped", "ragged", "whole", "replica before")


@pytest.mark.parametrize(
    "ranks",
    [
        2,
        *(pytest.param(n, marks=pytest.mark.sampled(1)) for n in (1, 3)),
        pytest.param(4, marks=pytest.mark.slow),
    ],
)
def test_equal_to_one_process(pools: RankPools, ranks: int) -> None:
    for name in SGD_CASES if ranks in (2, 4) else EVERYWHERE:
        check(pools[ranks], name)


def check(pool: hpnb.Ranks, name: str) -> None:
    for stage in (1, 2):
        for gradients, weights, buckets in pool.run(compare, replace(SGD_CASES[name], stage=stage)):
            assert max(gradients, weights) < 1e-12, (name, stage, gradients, weights)
            assert (buckets > 2) == (name != "one bucket")


@pytest.mark.one_gpu
def test_equal_to_one_gpu() -> None:
    with hpnb.Ranks(2, device="cuda", timeout=120) as pool:
        for name in SGD_CASES:
            check(pool, name)


ELEMENTWISE = {
    "AdamW": {"lr": 0.01}, "Adam": {"lr": 0.01, "amsgrad": True}, "RMSprop": {"lr": 0.01},
    "Adagrad": {"lr": 0.1}, "NAdam": {"lr": 0.01}, "RAdam": {"lr": 0.01}, "ASGD": {"lr": 0.1},
    "Rprop": {"lr": 0.01}, "Adamax": {"lr": 0.01}, "Adadelta": {"lr": 0.5},
}  # fmt: skip
NOT_ELEMENTWISE = {"Adafactor": {"lr": 0.1}}


@pytest.mark.parametrize(
    ("name", "defaults"),
    [
        *(pytest.param(*case, marks=pytest.mark.sampled(2)) for case in ELEMENTWISE.items()),
        *NOT_ELEMENTWISE.items(),
    ],
)
def test_other_optimizers(pools: RankPools, name: str, defaults: dict[str, Any]) -> None:
    for gradients, weights, _ in pools[3].run(compare, Case(2, name, defaults, groups=True)):
        assert max(gradients, weights) < 1e-6


def test_muon_steps_whole_matrices(pools: RankPools) -> None:
    """Given the same gradients it does what it does on one process, bit for bit: it orthogonalizes in
    bfloat16, which magnifies any rounding of them."""

    def run(stage: int) -> tuple[bool, float, int]:
        case = Case(stage, "Muon", {"lr": 0.1}, matrices=True)
        axis = Mesh(Layout(dp=hpnb.world_size())).dp
        model, plain = model_of(case), model_of(case)
        matrices, theirs = params_of(model, case), params_of(plain, case)
        before = [p.detach().clone() for p in matrices]
        zero = ZeroOptimizer(matrices, torch.optim.Muon, axis, stage, bucket_mb=0.001, lr=0.1)
        muon = torch.optim.Muon(theirs, lr=0.1)
        for step in range(3):
            zero.zero_grad()
            x, y = (share_of(t, axis.size, axis.rank) for t in batch_of(step, case))
            (model(x) - y).square().mean().backward()
            for p, grad in zip(theirs, zero.full_gradients(), strict=True):
                p.grad = grad
            zero.step()
            muon.step()
        equal = all(torch.equal(a, b) for a, b in zip(matrices, theirs, strict=True))
        moved = min(float((a - b).norm()) for a, b in zip(matrices, before, strict=True))
        return equal, moved, len(zero.shards)

    for stage in (1, 2):
        found = pools[3].run(run, stage)
        assert all(equal and moved > 0.1 for equal, moved, _ in found)
        assert sum(pieces for *_, pieces in found) == 3  # every matrix on one rank


def test_which_optimizers_may_cut_tensors() -> None:
    class Own(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    class Says(Own):
        elementwise = True

    class Inherits(torch.optim.SGD):
        pass

    optim = torch.optim
    Inherits([nn.Parameter(torch.ones(1))])  # which wraps its step
    found = [is_elementwise(c) for c in (optim.AdamW, optim.SGD, Inherits, Says, Own)]
    assert found == [True, True, True, True, False]
    assert not any(map(is_elementwise, (optim.Muon, optim.Adafactor)))


# --- what the comparison notices -----------------------------------------------------------------------


def broken(what: str, stage: int) -> float:
    """How far weights are off if a part is left out."""
    from hpnb.data_parallel.zero_bucket import ZeroBucket

    case = Case(stage, accumulate=2)
    original = dict(vars(ZeroBucket))
    try:
        if what == "average":
            case = replace(case, options={"average": False})
        elif what == "gather":
            ZeroBucket.gather_parameters = lambda self, background: background.all_reduce(self.flat * 0)  # type: ignore[method-assign]
        elif what == "accumulation":
            start = original["start_reduction"]
            ZeroBucket.start_reduction = lambda self, b, average, replace: start(self, b, average, True)  # type: ignore[method-assign]
        model, _, _ = trained(case, range(3))
    finally:
        for name in ("gather_parameters", "start_reduction"):
            setattr(ZeroBucket, name, original[name])
    wanted, _, _ = serially(case, hpnb.world_size(), range(3))
    return distance(dict(model.named_parameters()), dict(wanted.named_parameters()))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", ["average", "gather", "accumulation"])
def test_the_comparison_notices_what_is_left_out(pools: RankPools, what: str) -> None:
    for stage in (1, 2):
        assert min(pools[2].run(broken, what, stage)) > 1e-3


def test_the_comparison_finds_nothing_where_nothing_is_left_out(pools: RankPools) -> None:
    for stage in (1, 2):
        assert max(pools[2].run(broken, "nothing", stage)) < 1e-12


# --- state ---------------------------------------------------------------------------------------------


def begin(case: Case) -> Any:
    """(model's and optimizer's state after 2 steps, weights after 4) of an uninterrupted run."""
    model, _, zero = trained(case, range(2))
    state = copy.deepcopy(model.state_dict()), zero.state_dict()
    whole, _, _ = trained(case, range(4))
    return state, whole.state_dict()


def go_on(case: Case, state: Any) -> Any:
    model, _, zero = trained(case, range(2, 4), state)
    return model.state_dict(), zero.state_dict()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adafactor"])
def test_a_state_goes_on_anywhere(pools: RankPools, name: str) -> None:
    near = 1e-12 if name == "SGD" else 1e-6
    case = Case(1, name, SGD if name == "SGD" else {"lr": 0.01}, groups=True, steps=4)
    (state, wanted), *others = pools[4].run(begin, case)
    for other, _ in others:  # every rank gets all of it
        assert {k: set(v) for k, v in other[1]["state"].items()} == {
            k: set(v) for k, v in state[1]["state"].items()
        }
    same, _ = pools[4].run(go_on, case, state)[0]
    assert all(torch.equal(same[n], wanted[n]) for n in wanted)
    for ranks in (1, 2, 3) if name == "SGD" else (3,):  # the others differ in their states' shapes only
        for found, _ in pools[ranks].run(go_on, replace(case, stage=2), state):
            assert distance(found, wanted) < near
    plain, _, optimizer = serially(case, 4, range(2, 4), copy.deepcopy(state))
    assert distance(plain.state_dict(), wanted) < near
    # And back: what a plain optimizer saves is what zero loads.
    half, _, optimizer = serially(case, 4, range(2))
    assert same_form(optimizer.state_dict(), state[1])
    found, _ = pools[3].run(go_on, case, (half.state_dict(), optimizer.state_dict()))[0]
    assert distance(found, wanted) < near


def same_form(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two states of optimizers have the same entries, shapes, dtypes and options."""

    def shapes(state: dict[int, dict[str, Any]]) -> Any:
        return {i: {k: (v.shape, v.dtype, v.device) for k, v in s.items()} for i, s in state.items()}

    return shapes(a["state"]) == shapes(b["state"]) and a["param_groups"] == b["param_groups"]


def test_masters_are_saved_and_loaded(pools: RankPools) -> None:
    def run(stage: int, offload: bool) -> tuple[bool, bool, list[float], set[torch.dtype], float]:
        axis = Mesh(Layout(dp=hpnb.world_size())).dp

        def make() -> tuple[nn.Module, ZeroOptimizer]:
            torch.manual_seed(0)
            model = nn.Linear(8, 5).to(torch.bfloat16)
            given = {"lr": 1e-3, "cpu_offload": offload}
            return model, ZeroOptimizer(model.parameters(), torch.optim.AdamW, axis, stage, **given)

        def steps(model: nn.Module, zero: ZeroOptimizer, which: range) -> None:
            for i in which:
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(4 * i + axis.rank))
                zero.zero_grad()
                model(x.to(torch.bfloat16)).float().square().mean().backward()
                precision.step(zero, [axis], max_norm=0.5)

        model, zero = make()
        steps(model, zero, range(3))
        state = zero.state_dict()
        weights = copy.deepcopy(model.state_dict())
        steps(model, zero, range(3, 6))
        again, other = make()
        again.load_state_dict(weights)
        other.load_state_dict(state)
        steps(again, other, range(3, 6))
        bit_for_bit = all(
            torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
        )
        # In float32 the masters become the weights, which a 16-bit model only rounds.
        wide = nn.Linear(8, 5)
        loaded = ZeroOptimizer(wide.parameters(), torch.optim.AdamW, axis, stage, cpu_offload=offload)
        loaded.load_state_dict(state)
        masters = [state["masters"][i] for i in range(2)]
        exact = all(torch.equal(p, m) for p, m in zip(wide.parameters(), masters, strict=True))
        rounding = [float((m - m.bfloat16()).norm()) for m in masters]
        kinds = {v.dtype for s in state["state"].values() for v in s.values()}
        # A plain optimizer with masters takes it too.
        narrow = nn.Linear(8, 5).to(torch.bfloat16)
        plain = torch.optim.AdamW(narrow.parameters())
        masters_of = precision.Masters(plain)
        plain.load_state_dict(state)
        exact = exact and torch.equal(masters_of.of(narrow.weight), masters[0])
        return bit_for_bit, exact, rounding, kinds, float((narrow.weight - weights["weight"]).abs().max())

    for ranks, stage, offload in [(1, 1, False), (2, 1, True), (3, 2, False), (4, 2, True)]:
        for bit_for_bit, exact, rounding, kinds, off in pools[ranks].run(run, stage, offload):
            assert bit_for_bit
            assert exact
            assert min(rounding) > 0
            assert kinds == {torch.float32}
            assert off == 0


def test_weights_that_others_write_are_taken(pools: RankPools) -> None:
    def run(refresh: bool) -> list[float]:
        axis = Mesh(Layout(dp=hpnb.world_size())).dp
        kinds = [(torch.bfloat16, False), (torch.float32, True)]
        found = []
        for dtype, offload in kinds:
            model = nn.Linear(8, 5, dtype=dtype)
            zero = ZeroOptimizer(model.parameters(), torch.optim.SGD, axis, cpu_offload=offload, lr=0.0)
            model.load_state_dict({"weight": torch.full((5, 8), 3.0), "bias": torch.full((5,), 3.0)})
            if refresh:
                zero.refresh()
            model(torch.ones(1, 8, dtype=dtype)).sum().backward()
            zero.step()
            found.append(float(model.weight.float().mean()))
        return found

    for by_hand in (True, False):
        assert pools[2].run(run, by_hand) == [[3.0, 3.0]] * 2


# --- bytes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_bytes_sent_are_those_of_an_all_reduce(pools: RankPools, ranks: int) -> None:
    def run(stage: int) -> tuple[float, float, int, int]:
        axis = Mesh(Layout(dp=hpnb.world_size())).dp
        model = nn.Sequential(*(nn.Linear(48, 48) for _ in range(8)))
        zero = ZeroOptimizer(model.parameters(), torch.optim.SGD, axis, stage, bucket_mb=0.01)
        with hpnb.record.traffic() as t:
            with zero.no_sync():
                model(torch.ones(1, 48)).sum().backward()
            silent = t.total
            model(torch.ones(1, 48)).sum().backward()
            zero.step()
        n = sum(p.nbytes for p in model.parameters())
        assert {m.op for m in t.messages} == {"reduce_scatter", "all_gather"}
        return silent, t.bytes["dp"] / n, int(t.calls["dp"]), len(zero.buckets)

    for stage in (1, 2):
        for silent, ratio, calls, buckets in pools[ranks].run(run, stage):
            assert silent == 0
            assert ratio == pytest.approx(2 * (ranks - 1) / ranks, rel=1e-15)
            assert calls == 2 * buckets > 4


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_memory_is_what_the_formula_says(pools: RankPools, ranks: int) -> None:
    def run(stage: int) -> tuple[Any, int, int, int, int, int]:
        axis = Mesh(Layout(dp=hpnb.world_size())).dp
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(16))).to(torch.bfloat16)
        x = torch.ones(1, 64, dtype=torch.bfloat16)
        zero = ZeroOptimizer(
            model.parameters(), torch.optim.AdamW, axis, stage, bucket_mb=64 * 64 * 2 / 2**20
        )
        with hpnb.record.memory(model, zero) as recorder:
            model(x).sum().backward()
            zero.step()
        at_end = recorder.profile().samples[-1]
        zero.zero_grad()
        loss = model(x).sum()
        with hpnb.record.memory(model, zero) as recorder:
            loss.backward()
        whole = max(s.gradients + s.temporary for s in recorder.profile().samples)
        counters = sum(4 for shard in zero.shards.values() if "step" in zero.state[shard])
        return at_end, sum(p.numel() for p in model.parameters()), counters, whole, len(zero.buckets), stage

    for stage in (1, 2):
        for at_end, n, counters, whole, buckets, _ in pools[ranks].run(run, stage):
            wanted = model_states(n, ranks, stage)
            assert at_end.parameters == wanted.parameters
            assert at_end.gradients == wanted.gradients
            assert at_end.optimizer == wanted.optimizer + counters  # Adam counts steps, 4 bytes a tensor
            assert buckets == 16
            of_bucket = 2 * n / buckets
            if stage == 1:
                assert whole >= 2 * n
            elif ranks == 4:
                # Its share; of whole gradients one that autograd has made and two on the wire; activations.
                # Threads of gloo let go of what they have sent a little later, on a busy machine much later.
                assert 2 * n / ranks + of_bucket <= whole <= 2 * n / ranks + 9 * of_bucket < 2 * n


def test_gradients_travel_in_the_dtype_that_is_asked_for(pools: RankPools) -> None:
    def run(dtype: torch.dtype, wire: torch.dtype, stage: int) -> tuple[float, float, bool]:
        axis = Mesh(Layout(dp=hpnb.world_size())).dp
        torch.manual_seed(0)
        model = nn.Linear(48, 48, bias=False, dtype=dtype)
        zero = ZeroOptimizer(
            model.parameters(), torch.optim.SGD, axis, stage, communication_dtype=wire, lr=0.0
        )
        x = [torch.randn(4, 48, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(3)]
        with hpnb.record.traffic() as t:
            model(x[axis.rank]).square().sum().backward()
        (found,) = zero.full_gradients()
        parts = [torch.autograd.grad(model(part).square().sum(), model.weight)[0].double() for part in x]
        exact = sum(parts) / 3  # type: ignore[arg-type]
        assert found is not None
        return (
            t.total / model.weight.numel(),
            float((found - exact).norm() / exact.norm()),
            found.dtype == dtype,
        )

    for stage in (1, 2):
        wide = pools[3].run(run, torch.bfloat16, torch.float32, stage)
        narrow = pools[3].run(run, torch.float32, torch.bfloat16, stage)
        assert all(sent == pytest.approx(4 * 2 / 3) and off < 2e-3 and same for sent, off, same in wide)
        assert all(
            sent == pytest.approx(2 * 2 / 3) and 1e-5 < off < 1e-2 and same for sent, off, same in narrow
        )


# --- use, and misuse -----------------------------------------------------------------------------------


def test_gradients_are_on_the_pieces_and_a_step_ends_an_accumulation(pools: RankPools) -> None:
    def run(stage: int) -> tuple[bool, list[float], list[float]]:
        axis = Mesh(Layout(dp=hpnb.world_size())).dp
        model = nn.Linear(4, 4, bias=False)
        zero = ZeroOptimizer(model.parameters(), torch.optim.SGD, axis, stage, lr=0.0)

        def backward() -> float:
            model(torch.ones(1, 4)).sum().backward()
            (whole,) = zero.full_gradients()
            assert whole is not None
            return float(whole.mean())

        twice = [backward(), backward()]
        zero.step()
        model.zero_grad()
        afresh = [backward()]
        zero.zero_grad()
        (nothing,) = zero.full_gradients()
        assert nothing is None
        return model.weight.grad is None, twice, [*afresh, backward()]

    for stage in (1, 2):
        assert pools[2].run(run, stage) == [(True, [1.0, 2.0], [1.0, 1.0])] * 2


def test_fewer_elements_than_ranks(pools: RankPools) -> None:
    """Ranks without a piece of a group, or of anything, take part all the same."""

    def run(name: str) -> tuple[float, bool, int]:
        axis = Mesh(Layout(dp=hpnb.world_size())).dp
        tiny = nn.Parameter(torch.ones(1, 1, dtype=D))
        zero = ZeroOptimizer([tiny], getattr(torch.optim, name), axis, 2, lr=0.1)
        for _ in range(2):
            zero.zero_grad()
            (tiny * (axis.rank + 1)).sum().backward()
            precision.step(zero, [axis])
        state = zero.state_dict()
        zero.load_state_dict(state)
        return tiny.item(), bool(state["state"].get(0)), len(zero.shards)

    for name in ("SGD", "AdamW", "Adagrad", "Adafactor", "Muon", "NAdam", "RMSprop"):
        found = pools[4].run(run, name)
        assert len({value for value, _, _ in found}) == 1
        assert found[0][0] != 1.0
        assert sum(pieces for _, _, pieces in found) == 1
        assert all(saved == (name != "SGD") for _, saved, _ in found)


def test_buckets_of_all_groups_in_the_order_of_the_backward() -> None:
    weights = [nn.Parameter(torch.zeros(200_000)) for _ in range(4)]
    biases = [nn.Parameter(torch.zeros(10)) for _ in range(4)]
    dealt = assign_buckets_by_group([{"params": weights}, {"params": biases}], bucket_mb=1.0)
    assert [len(b.parameters) for b in dealt] == [1, 1, 1, 4, 1]
    assert dealt[0].parameters[0] is weights[3]
    assert [len(b.parameters) for b in assign_buckets(reversed([*weights, *biases]), 1.0)] == [5, 1, 1, 1]


def test_bad_input_gets_a_sentence(pools: RankPools) -> None:
    def run() -> list[str]:
        axis = Mesh(Layout(dp=hpnb.world_size())).dp
        sgd = torch.optim.SGD
        said = []

        def refused(call: Any) -> None:
            try:
                call()
            except (ValueError, RuntimeError) as error:
                said.append(str(error))
            else:
                said.append("nothing")

        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

        def make(params: Any = None, cls: Any = sgd, stage: int = 1, **options: Any) -> ZeroOptimizer:
            params = nn.Linear(2, 2).parameters() if params is None else params
            return ZeroOptimizer(params, cls, axis, stage, **options)

        refused(lambda: make(stage=3))
        refused(lambda: make([]))
        refused(lambda: make([torch.nn.Parameter(torch.ones(2), requires_grad=False)]))
        refused(lambda: make(bucket_mb=0))
        refused(lambda: make(nn.Linear(2, 2, device="meta").parameters()))
        refused(lambda: make(cls=torch.optim.LBFGS))
        refused(lambda: make(cls=sgd([nn.Parameter(torch.ones(1))])))
        refused(lambda: make([{"params": p} for p in [model[0].weight] * 2]))
        zero = make(model.parameters(), lr=0.1)
        refused(lambda: make(model.parameters()))
        refused(lambda: zero.add_param_group({"params": [nn.Parameter(torch.ones(1))]}))
        refused(lambda: zero.step(lambda: 1.0))
        refused(lambda: zero.load_state_dict(make().state_dict()))
        refused(lambda: model[0](torch.ones(1, 4)).sum().backward())
        zero.zero_grad()
        with zero.no_sync():
            model(torch.ones(1, 4)).sum().backward()
        refused(zero.step)
        model.double()
        refused(zero.step)
        part = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        DataParallel(part, axis)
        refused(lambda: make(part[0].parameters(), stage=2))
        refused(lambda: make([*part.parameters(), nn.Parameter(torch.ones(1))]))
        cut = nn.Parameter(torch.ones(2))
        where = placement.Placement("w", (4,), (placement.Cut("dp", 0, ((0, 2),)),))
        set_placement(cut, where)
        refused(lambda: make([cut]))
        return said

    wanted = [
        "stage 3 is hpnb.fully_shard", "empty parameter list", "none of the parameters requires a gradient",
        "bucket_mb=0 must be above 0", "is on the meta device", "LBFGS evaluates the loss in its step",
        "must be a class like torch.optim.AdamW", "more than one parameter group",
        "reduced by ZeroOptimizer already", "make it with all its groups", "cannot evaluate a loss",
        "has groups of [2] parameters, and this optimizer of [4]", "2 of 4 parameters got no gradient",
        "must be outside no_sync()", "4 parameters, parameter 0 first, have moved to other memory",
        "trains 4 parameters, and this ZeroOptimizer would take over the reduction of 2",
        "reduced by DataParallel, nobody already", "is sharded along dp already",
    ]  # fmt: skip
    for said in pools[2].run(run):
        assert len(said) == len(wanted)
        for sentence, words in zip(said, wanted, strict=True):
            assert words in sentence, sentence


def test_a_step_after_an_error_starts_afresh(pools: RankPools) -> None:
    def run(stage: int) -> float:
        axis = Mesh(Layout(dp=hpnb.world_size())).dp
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        zero = ZeroOptimizer(model.parameters(), torch.optim.SGD, axis, stage, bucket_mb=1e-5)
        with pytest.raises(RuntimeError):
            model[0](torch.ones(1, 4)).sum().backward()
        model.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        last = zero.full_gradients()[1]
        assert last is not None
        return float((last - model[0](torch.ones(1, 4)).detach()).abs().max())

    for stage in (1, 2):
        assert max(pools[2].run(run, stage)) < 1e-6


def test_two_optimizers_on_one_replica(pools: RankPools) -> None:
    """Muon for matrices and AdamW for the rest, both of stage 1, over one DataParallel."""

    def run() -> float:
        axis = Mesh(Layout(dp=hpnb.world_size())).dp
        torch.manual_seed(0)
        model, serial = nn.Linear(6, 6, dtype=D), nn.Linear(6, 6, dtype=D)
        serial.load_state_dict(model.state_dict())
        replica = DataParallel(model, axis)
        sgd = torch.optim.SGD
        ours = [ZeroOptimizer([p], sgd, axis, lr=0.3 * (i + 1)) for i, p in enumerate(model.parameters())]
        theirs = [sgd([p], lr=0.3 * (i + 1)) for i, p in enumerate(serial.parameters())]
        for step in range(2):
            x = torch.randn(8, 6, dtype=D, generator=torch.Generator().manual_seed(step))
            for forward, part, optimizers in (
                (replica, share_of(x, 2, axis.rank), ours),
                (serial, x, theirs),
            ):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                forward(part).square().mean().backward()
                for optimizer in optimizers:
                    optimizer.step()
        return distance(dict(model.named_parameters()), dict(serial.named_parameters()))

    assert max(pools[2].run(run)) < 1e-12


# --- habits from elsewhere -----------------------------------------------------------------------------


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise ArithmeticError("on purpose")


def test_after_a_backward_that_failed(pools: RankPools) -> None:
    """Without zero_grad the step says so; with it, weights equal those of one process."""

    def run(stage: int, wrapped: bool) -> tuple[str, float]:
        axis = Mesh(Layout(dp=2)).dp
        torch.manual_seed(0)
        serial = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).double()
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).double()
        model.load_state_dict(serial.state_dict())
        forward = hpnb.DataParallel(model, axis) if wrapped else model
        zero = ZeroOptimizer(model.parameters(), torch.optim.SGD, axis, stage, bucket_mb=0.0001, lr=0.3)
        plain = torch.optim.SGD(serial.parameters(), lr=0.3)
        x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        hook = model[0].register_forward_hook(lambda m, i, out: Fails.apply(out))
        with contextlib.suppress(ArithmeticError):
            forward(x).sum().backward()
        hook.remove()
        said = ""
        try:
            zero.step()
        except RuntimeError as error:
            said = str(error)
        if not wrapped:  # a loop that goes on to the next batch
            with pytest.raises(RuntimeError, match="after a backward that raised call zero_grad"):
                forward(x).sum().backward()
        zero.zero_grad()
        for _ in range(2):
            zero.zero_grad()
            plain.zero_grad()
            forward(x.chunk(2)[axis.rank]).square().mean().backward()
            serial(x).square().mean().backward()
            zero.step()
            plain.step()
        pairs = zip(model.parameters(), serial.parameters(), strict=True)
        return said, max(float((a - b).norm() / b.norm()) for a, b in pairs)

    for stage in (1, 2):
        for wrapped in (False, True):
            for said, off in pools[2].run(run, stage, wrapped):
                assert off < 1e-12
                assert "the last backward raised before its end" in said, (stage, wrapped, said)


def test_what_would_go_wrong_silently_is_refused(pools: RankPools) -> None:
    def run(case: str) -> str:
        axis = Mesh(Layout(dp=2)).dp
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        x = torch.full((1, 4), axis.rank + 1.0)
        try:
            if case == "thawed":
                model[0].requires_grad_(False)
            if case == "made before":
                replica = hpnb.DataParallel(model, axis)
                replica(x).sum().backward()
            if case == "not reduced":
                replica = hpnb.DataParallel(model, axis)
            stage = 2 if case == "made before" else 1
            zero = ZeroOptimizer(model.parameters(), torch.optim.SGD, axis, stage, lr=0.1)
            if case == "thawed":
                model[0].requires_grad_(True)
            if case == "not reduced":
                with replica.no_sync():
                    replica(x).sum().backward()
            else:
                model(x).sum().backward()
            if case == "norm":
                precision.step(zero, max_norm=1.0)
            else:
                zero.step()
        except (ValueError, RuntimeError) as error:
            return str(error)
        return ""

    wanted = {
        "thawed": "frozen when this ZeroOptimizer was made are trained now",
        "made before": "call zero_grad() before the ZeroOptimizer is made",
        "not reduced": "the last one must be outside no_sync()",
        "norm": "is sharded along dp, and the axes given are none: pass mesh.dp too",
    }
    for case, words in wanted.items():
        for said in pools[2].run(run, case):
            assert words in said, (case, said)


# Options of ZeroOptimizer: the values of ranks 0 and 1.
DIFFERENT_OPTIONS: dict[str, tuple[Any, Any]] = {
    "stage": (1, 2),
    "bucket_mb": (25.0, 1.0),
    "average": (True, False),
    "elementwise": (True, False),
    "cpu_offload": (False, True),
    "communication_dtype": (None, torch.float64),
    "overlap_communication": (True, False),
    "find_unused_parameters": (False, True),
}


@pytest.mark.parametrize("option", DIFFERENT_OPTIONS)
def test_options_that_differ_between_ranks_are_refused_on_every_rank(pools: RankPools, option: str) -> None:
    def shard(values: tuple[Any, Any]) -> str:
        axis = Mesh(Layout(dp=2)).dp
        parameters = nn.Linear(4, 4).parameters()
        try:
            ZeroOptimizer(parameters, torch.optim.SGD, axis, lr=0.1, **{option: values[axis.rank]})
        except ValueError as error:
            return str(error)
        return "nothing"

    a, b = DIFFERENT_OPTIONS[option]
    expected = f"{option}={a} on rank 0 of axis dp, and {option}={b} on rank 1; pass the same on every rank"
    assert pools[2].run(shard, (a, b)) == [expected] * 2


def test_a_grad_scaler_is_refused(pools: RankPools) -> None:
    def run() -> str:
        model = nn.Linear(4, 4)
        zero = ZeroOptimizer(model.parameters(), torch.optim.SGD, Mesh(Layout(dp=2)).dp, lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        try:
            scaler.step(zero)
        except ValueError as error:
            return str(error)
        return ""

    assert all("GradScaler sees one rank's shards" in said for said in pools[2].run(run))


def test_clipping_by_its_own_method_is_that_of_one_process(pools: RankPools) -> None:
    def run() -> tuple[float, float]:
        axis = Mesh(Layout(dp=3)).dp
        torch.manual_seed(0)
        serial = nn.Linear(5, 7).double()
        model = nn.Linear(5, 7).double()
        zero = ZeroOptimizer(model.parameters(), torch.optim.SGD, axis, lr=0.5)
        model.load_state_dict(serial.state_dict())
        x = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        model(x.chunk(3)[axis.rank]).square().mean().backward()
        serial(x).square().mean().backward()
        norm = zero.clip_grad_norm_(0.01)
        wanted = nn.utils.clip_grad_norm_(serial.parameters(), 0.01)
        zero.step()
        torch.optim.SGD(serial.parameters(), lr=0.5).step()
        apart = (model.weight - serial.weight).norm() / serial.weight.norm()
        return abs(float(norm / wanted) - 1), float(apart)

    for norm, weights in pools[3].run(run):
        assert norm < 1e-12
        assert weights < 1e-14


def test_a_skipped_step_ends_its_gradients(pools: RankPools) -> None:
    """model.zero_grad() does not reach pieces: one overflow must not make every later step one."""

    def run() -> list[bool]:
        axis = Mesh(Layout(dp=2)).dp
        model = nn.Linear(4, 4)
        zero = ZeroOptimizer(model.parameters(), torch.optim.SGD, axis, lr=0.1)
        scaler = precision.LossScaler(2.0)
        stepped = []
        for factor in (float("inf") if axis.rank else 1.0, 1.0):
            scaler.scaled(model(torch.ones(1, 4)).sum() * factor).backward()
            stepped.append(precision.step(zero, [axis], scaler=scaler).stepped)
            model.zero_grad()
        return stepped

    assert pools[2].run(run) == [[False, True]] * 2

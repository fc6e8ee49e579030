"""DataParallel against one process on the whole batch, in float64: loss, every gradient, every weight."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rank_pools import RankPools
from torch import nn

import hpnb
from hpnb import Layout, Mesh, precision
from hpnb.data_parallel import DataParallel, ZeroOptimizer, broadcast, global_mean
from hpnb.data_parallel import buckets as buckets_module
from hpnb.data_parallel.buckets import assign_buckets
from hpnb.mesh import Axis
from hpnb.split_sizes import split_sizes

D = torch.float64
LR = 0.3  # large enough that a skipped step shows


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    shared = RankPools()
    yield shared
    shared.close()


class Branches(nn.Module):
    """A small net with what can go wrong: a frozen layer, a layer that only some batches use, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 16, dtype=D)
        self.frozen = nn.Linear(16, 16, dtype=D).requires_grad_(False)
        self.norm = nn.LayerNorm(16, dtype=D)
        self.rare = nn.Linear(16, 16, dtype=D)
        self.never = nn.Linear(2, 2, dtype=D)
        self.head = nn.Linear(16, 3, dtype=D)
        self.register_buffer("offset", torch.zeros(16, dtype=D))

    def forward(self, x: torch.Tensor, rare: bool = False) -> torch.Tensor:
        h = torch.tanh(self.frozen(self.stem(x))) + self.offset
        h = self.norm(h)
        if rare:
            h = h + self.rare(h)
        return self.head(h)


def batches(steps: int, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(11)
    return [(torch.randn(size, 6, dtype=D, generator=g), torch.randn(size, 3, dtype=D, generator=g))
            for _ in range(steps)]  # fmt: skip


def distance(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest relative distance; a tensor that hardly moves is held to the typical norm."""
    assert found.keys() == wanted.keys()
    typical = sum(float(t.norm()) for t in wanted.values()) / len(wanted)
    return max(float((found[n] - wanted[n]).norm() / max(wanted[n].norm(), 0.01 * typical)) for n in wanted)


def train(
    model: nn.Module,
    share: Callable[[torch.Tensor], torch.Tensor],
    forward: Callable[..., torch.Tensor],
    rare: Callable[[int], bool],
    no_sync: Callable[[], object] | None = None,
    accumulate: int = 1,
    clip: float = 0.0,
) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(losses, last gradients, weights) after three steps of SGD with momentum."""
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=LR, momentum=0.9)
    losses = []
    for step, (x, y) in enumerate(batches(3, 24)):
        optimizer.zero_grad()
        total = 0.0
        micro = list(zip(x.chunk(accumulate), y.chunk(accumulate), strict=True))
        for i, (mx, my) in enumerate(micro):
            wait = no_sync() if no_sync is not None and i < len(micro) - 1 else torch.enable_grad()
            with wait:  # type: ignore[attr-defined]
                loss = (forward(share(mx), rare(step)) - share(my)).square().sum(1).mean() / accumulate
                loss.backward()
            total += loss.item()
        gradients = {n: p.grad.clone() for n, p in trained.items() if p.grad is not None}
        if clip:
            nn.utils.clip_grad_norm_(trained.values(), clip)
        optimizer.step()
        losses.append(total)
    return losses, gradients, {n: p.detach().clone() for n, p in trained.items()}


def compare(
    accumulate: int, clip: float, unused: bool, bucket_mb: float, **knobs: bool
) -> tuple[float, float, float, int]:
    """Distances of loss, gradients and weights from one process, and the number of buckets."""
    axis = Mesh(Layout(dp=hpnb.world_size())).dp
    torch.manual_seed(0)
    serial = Branches()
    if not unused:
        serial.never.requires_grad_(False)
    torch.manual_seed(axis.rank)  # replicas must not rely on starting equal
    model = Branches()
    if not unused:
        model.never.requires_grad_(False)
    if axis.rank == 0:
        model.load_state_dict(serial.state_dict())
    replica = DataParallel(
        model, axis, bucket_mb, find_unused_parameters=unused, check_reduction=True, **knobs
    )

    def mine(t: torch.Tensor) -> torch.Tensor:
        return t.chunk(axis.size)[axis.rank]

    # The rare layer is used by rank 0 alone in step 1, and by nobody in the last step.
    everywhere = not unused
    losses, gradients, weights = train(
        model, mine, replica, lambda step: everywhere or (step == 1 and axis.rank == 0),
        replica.no_sync, accumulate, clip,
    )  # fmt: skip

    def serially(x: torch.Tensor, rare: bool) -> torch.Tensor:
        parts = x.chunk(axis.size)
        return torch.cat([serial(part, everywhere or (rare and r == 0)) for r, part in enumerate(parts)])

    s_losses, s_gradients, s_weights = train(
        serial, lambda t: t, serially, lambda step: everywhere or step == 1, None, accumulate, clip
    )
    means = torch.tensor(losses, dtype=D)
    torch.distributed.all_reduce(means)
    off = float((means / axis.size - torch.tensor(s_losses, dtype=D)).norm() / torch.tensor(s_losses).norm())
    assert all(float(g.norm()) > 0 for g in s_gradients.values())
    return off, distance(gradients, s_gradients), distance(weights, s_weights), len(replica.reducer.buckets)


KNOBS = ({"gradient_as_bucket_view": False}, {"static_graph": True}, {"overlap_communication": False})


@pytest.mark.parametrize("ranks", [1, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_equal_to_one_process(pools: RankPools, ranks: int) -> None:
    for accumulate, clip, unused, bucket_mb in [
        (1, 0.0, False, 25.0), (2, 0.0, False, 0.001), (1, 0.05, False, 0.001), (2, 0.05, True, 0.0005),
    ]:  # fmt: skip
        results = pools[ranks].run(compare, accumulate, clip, unused, bucket_mb)
        for loss, gradients, weights, buckets in results:
            assert max(loss, gradients, weights) < 1e-12
            assert (buckets > 3) == (bucket_mb < 1)
    if ranks == 3:
        for knobs in KNOBS:
            for loss, gradients, weights, _ in pools[ranks].run(compare, 2, 0.05, False, 0.0005, **knobs):
                assert max(loss, gradients, weights) < 1e-12


def ragged(samples: int, mean: bool) -> tuple[float, float, float]:
    """Distances of loss, gradients and weights where the ranks have unequally many samples, some none."""
    axis = Mesh(Layout(dp=hpnb.world_size())).dp
    torch.manual_seed(0)
    serial, model = Branches(), Branches()
    for net in (serial, model):
        net.never.requires_grad_(False)
    model.load_state_dict(serial.state_dict())
    replica = DataParallel(model, axis, 0.001, average=mean)
    sizes = split_sizes(samples, axis.size)
    start = sum(sizes[: axis.rank])
    ours, theirs = (torch.optim.SGD(n.parameters(), lr=LR, momentum=0.9) for n in (model, serial))
    off = 0.0
    for x, y in batches(3, samples):
        mine = slice(start, start + sizes[axis.rank])
        total = (replica(x[mine], True) - y[mine]).square().sum()
        loss = global_mean(total, sizes[axis.rank], axis) if mean else total / samples
        wanted = (serial(x, True) - y).square().sum() / samples
        for optimizer, value in ((ours, loss), (theirs, wanted)):
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        everywhere = loss.detach().clone()
        torch.distributed.all_reduce(everywhere)
        off = max(off, abs(float(everywhere / (axis.size if mean else 1) / wanted) - 1))
    pairs = list(zip(model.named_parameters(), serial.parameters(), strict=True))
    gradients = [({n: p.grad for (n, p), _ in pairs if p.grad is not None}),
                 ({n: q.grad for (n, _), q in pairs if q.grad is not None})]  # fmt: skip
    weights = [{n: p.detach() for (n, p), _ in pairs}, {n: q.detach() for (n, _), q in pairs}]
    return off, distance(*gradients), distance(*weights)


@pytest.mark.parametrize("mean", [True, False])
def test_a_ragged_batch_gives_the_mean_over_all_samples(pools: RankPools, mean: bool) -> None:
    for samples in (7, 2):  # 3 2 2, and 1 1 0
        for distances in pools[3].run(ragged, samples, mean):
            assert max(distances) < 1e-12


def test_a_static_graph_is_asked_once_and_orders_its_buckets(pools: RankPools) -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
            self.never = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in reversed(self.layers):
                x = layer(x)
            return x

    def run() -> tuple[list[int], list[bool], int, bool]:
        axis = Mesh(Layout(dp=2)).dp
        model = Backwards()
        replica = DataParallel(model, axis, 0.008, find_unused_parameters=True, static_graph=True)
        calls = []
        for _ in range(3):
            with hpnb.record.traffic() as t:
                replica(torch.ones(1, 32)).sum().backward()
            calls.append(len(t.messages))
        first = replica.reducer.buckets[0].parameters[0]
        return (
            calls,
            [p.grad is None for p in model.never.parameters()],
            len(replica.reducer.buckets),
            (first is model.layers[0].weight or first is model.layers[0].bias),
        )

    for calls, unused, buckets, in_order in pools[2].run(run):
        # Of the first: buckets, who is unused, the order. The buffers are none.
        assert calls[1] == calls[2] == buckets
        assert calls[0] > buckets + 1
        assert unused == [True, True]
        assert in_order


def test_a_static_graph_reduces_what_was_frozen_in_its_first_step(pools: RankPools) -> None:
    def run() -> list[float | None]:
        axis = Mesh(Layout(dp=2)).dp
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        replica = DataParallel(model, axis, find_unused_parameters=True, static_graph=True)
        for p in model.parameters():
            nn.init.ones_(p)
        means = []
        for requires_grad in (False, True, True):
            model[0].weight.requires_grad_(requires_grad)
            model.zero_grad()
            replica(torch.full((1, 1), axis.rank + 1.0)).sum().backward()
            grad = model[0].weight.grad
            means.append(None if grad is None else float(grad))
        return means

    assert pools[2].run(run) == [[None, 1.5, 1.5]] * 2


def test_gradients_of_their_own_memory(pools: RankPools) -> None:
    def run() -> bool:
        model = nn.Linear(4, 4)
        replica = DataParallel(model, Mesh(Layout(dp=2)).dp, gradient_as_bucket_view=False)
        replica(torch.ones(1, 4)).sum().backward()
        kept = model.weight.grad
        before = kept.clone()
        model.zero_grad()
        replica(torch.full((1, 4), 5.0)).sum().backward()
        return torch.equal(kept, before) and not torch.equal(model.weight.grad, before)

    assert pools[2].run(run) == [True, True]


def test_how_often_gradients_exist_is_as_the_docstring_says(pools: RankPools) -> None:
    """Eight equal layers in four buckets."""

    def run() -> list[float]:
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
        replica = DataParallel(model, Mesh(Layout(dp=2)).dp, bucket_mb=2 * 64 * 64 * 4 / 2**20)

        def step(set_to_none: bool, backwards: int) -> None:
            model.zero_grad(set_to_none)
            with replica.no_sync():
                for _ in range(backwards - 1):
                    replica(torch.ones(4, 64)).sum().backward()
            replica(torch.ones(4, 64)).sum().backward()

        ratios = []
        for how in ((False, 1), (False, 2), (True, 1), (True, 2)):
            step(*how)
            with hpnb.record.memory(model) as recorder:
                step(*how)
            profile = recorder.profile()
            ratios.append(profile.peak_of("gradients") / profile.peak_of("parameters"))
        return ratios

    for once, still_once, one_bucket_more, twice in pools[2].run(run):
        assert once == still_once == 1.0
        assert 1.0 < one_bucket_more <= 1.25
        assert twice == 2.0


def fail_without(what: str) -> float:
    """How far weights are off if a part is left out: proof that the comparison would notice."""
    axis = Mesh(Layout(dp=2)).dp
    torch.manual_seed(0)
    serial = Branches()
    serial.never.requires_grad_(False)
    model = Branches()
    model.never.requires_grad_(False)
    model.load_state_dict(serial.state_dict())
    replica = DataParallel(model, axis, 0.001, average=what != "average")

    def mine(t: torch.Tensor) -> torch.Tensor:
        return t.chunk(2)[0 if what == "own samples" else axis.rank]

    forward = model if what == "reduction" else replica
    if what == "reduction":
        for hook in replica._hooks:
            hook.remove()
    _, _, weights = train(model, mine, forward, lambda _: True)
    _, _, wanted = train(serial, lambda t: t, serial, lambda _: True)
    return distance(weights, wanted)


@pytest.mark.parametrize("what", ["reduction", "average", "own samples"])
def test_the_comparison_notices_what_is_left_out(pools: RankPools, what: str) -> None:
    assert min(pools[2].run(fail_without, what)) > 1e-3


def test_a_second_step_after_an_error_starts_afresh(pools: RankPools) -> None:
    def run() -> bool:
        model = Branches()
        model.never.requires_grad_(False)
        replica = DataParallel(model, Mesh(Layout(dp=2)).dp)
        with contextlib.suppress(RuntimeError):
            replica(torch.ones(2, 6, dtype=D)).sum().backward()
        model.zero_grad()
        replica(torch.ones(2, 6, dtype=D), True).sum().backward()
        return all(p.grad is not None for p in model.parameters() if p.requires_grad)

    assert pools[2].run(run) == [True, True]


def test_bytes_and_calls_are_those_of_the_buckets(pools: RankPools) -> None:
    def run() -> tuple[float, float, int, int]:
        axis = Mesh(Layout(dp=2)).dp
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))
        replica = DataParallel(model, axis, bucket_mb=0.01)
        with hpnb.record.traffic() as t:
            with replica.no_sync():
                replica(torch.ones(1, 32)).sum().backward()
            silent = t.total
            replica(torch.ones(1, 32)).sum().backward()
        parameters = sum(p.nbytes for p in model.parameters())
        return silent, t.bytes["dp"] / parameters, int(t.calls["dp"]), len(replica.reducer.buckets)

    for silent, ratio, calls, buckets in pools[2].run(run):
        assert silent == 0
        assert ratio == 1.0  # 2 (2-1)/2
        assert calls == buckets > 2


def test_buffers_follow_rank_0(pools: RankPools) -> None:
    def run() -> float:
        axis = Mesh(Layout(dp=2)).dp
        model = Branches()
        replica = DataParallel(model, axis, find_unused_parameters=True)
        model.offset.fill_(float(axis.rank + 5))  # type: ignore[operator,union-attr]
        replica(torch.ones(2, 6, dtype=D))
        return float(model.offset.mean())  # type: ignore[arg-type,union-attr]

    assert pools[2].run(run) == [5.0, 5.0]


class CountsReads(torch.Tensor):
    """A tensor that counts how often anybody reads the bytes of one like it."""

    reads = 0

    @property
    def nbytes(self) -> int:
        CountsReads.reads += 1
        return self.numel() * self.element_size()


@pytest.mark.parametrize("what", ["broadcast", "buckets"])
def test_many_small_tensors_are_grouped_in_linear_time(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward sends all buffers, so grouping 300 of them must not read 300 x 300 / 2 sizes."""
    tensors: list[Any] = [torch.ones(4).as_subclass(CountsReads) for _ in range(300)]
    monkeypatch.setattr(CountsReads, "reads", 0)
    if what == "buckets":
        assert len(assign_buckets(tensors, bucket_mb=1.0)) == 1
    else:
        monkeypatch.setattr(torch.distributed, "broadcast", lambda *_, **__: None)
        broadcast(tensors, Axis("dp", 2, 0, None, (0, 1)))  # type: ignore[arg-type]
    assert CountsReads.reads <= 3 * len(tensors)


def test_parameters_are_dealt_into_buckets_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets_module, "FIRST_MB", 0.5)
    sizes = [10, 400_000, 10, 10, 400_000, 10]
    parameters = [nn.Parameter(torch.zeros(n)) for n in sizes]
    parameters.append(nn.Parameter(torch.zeros(10, dtype=D)))
    buckets = assign_buckets(parameters, bucket_mb=1.2)
    dealt = [[p.numel() for p in b.parameters] for b in buckets]
    assert dealt == [[10], [400_000], [10, 10], [400_000], [10], [10]]
    with pytest.raises(ValueError, match="bucket_mb=0 must be above 0"):
        assign_buckets(parameters, 0)


# --- what users do ---------------------------------------------------------------------------------------


def several_backwards(average: bool, quiet: bool, use: tuple[bool, ...], unused: bool) -> tuple[float, float]:
    """Distances of gradients and weights; a backward for each of `use`: whether the rare layer is in it."""
    axis = Mesh(Layout(dp=hpnb.world_size())).dp
    torch.manual_seed(0)
    serial, model = Branches(), Branches()
    for net in (serial, model):
        net.never.requires_grad_(False)
    model.load_state_dict(serial.state_dict())
    replica = DataParallel(model, axis, 0.001, average=average, find_unused_parameters=unused)
    nets = (model, serial)
    optimizers = [torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9) for net in nets]
    for x, y in batches(2, 12):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for i, rare in enumerate(use):
            mx, my = x[i::2], y[i::2]
            ours, theirs = mx.chunk(axis.size)[axis.rank], my.chunk(axis.size)[axis.rank]
            with replica.no_sync() if quiet and i < len(use) - 1 else contextlib.nullcontext():
                loss = (replica(ours, rare) - theirs).square().sum() / (len(ours) if average else len(mx))
                loss.backward()
            ((serial(mx, rare) - my).square().sum() / len(mx)).backward()
        for optimizer in optimizers:
            optimizer.step()
    found = [{n: p.grad for n, p in net.named_parameters() if p.grad is not None} for net in nets]
    weights = [{n: p.detach() for n, p in net.named_parameters()} for net in nets]
    return distance(*found), distance(*weights)


@pytest.mark.parametrize("use", [(True, False), (False, True), (True, True)])
def test_several_backwards_add_up_whatever_each_uses(pools: RankPools, use: tuple[bool, ...]) -> None:
    for average in (True, False):
        for quiet in (True, False):
            for distances in pools[2].run(several_backwards, average, quiet, use, True):
                assert max(distances) < 1e-12, (average, quiet)
    for distances in pools[2].run(several_backwards, True, True, use, False):
        assert max(distances) < 1e-12


def refused(case: str) -> str:
    """What is said of a case that cannot work; the same on every rank."""
    axis = Mesh(Layout(dp=2)).dp
    odd = axis.rank == 1
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.ones(2, 4)
    try:
        if case == "shape":
            DataParallel(nn.Linear(2, 8) if odd else nn.Linear(4, 4), axis)
        elif case == "frozen":
            model[0].requires_grad_(not odd)
            DataParallel(model, axis)
        elif case == "thawed":
            model[0].requires_grad_(False)
            replica = DataParallel(model, axis)
            model[0].requires_grad_(True)
            replica(x).sum().backward()
        elif case == "static":
            net = Branches()
            net.never.requires_grad_(False)
            replica = DataParallel(net, axis, find_unused_parameters=True, static_graph=True)
            for rare in (False, True):
                replica(torch.ones(2, 6, dtype=D), rare).sum().backward()
        elif case == "wrapped":
            DataParallel(DataParallel(model, axis), axis)
        elif case == "unused":
            DataParallel(Branches(), axis)(torch.ones(2, 6, dtype=D)).sum().backward()
        elif case == "sparse":
            table = nn.Embedding(4, 4, sparse=True)
            DataParallel(table, axis)(torch.tensor([1])).sum().backward()
        elif case == "cast":
            replica = DataParallel(model, axis)
            model.double()
            replica(x.double()).sum().backward()
        elif case == "meta":
            DataParallel(nn.Linear(2, 2, device="meta"), axis)
        elif case == "nothing":
            DataParallel(model.requires_grad_(False), axis)
        elif case == "axis":
            DataParallel(model, "dp")  # type: ignore[arg-type]
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


# What each error names: parameters, numbers, and what to pass or call instead.
REFUSALS = {
    "shape": ["rank 0", "('weight', (4, 4)", "rank 1", "('weight', (8, 2)"],
    "frozen": ["('0.weight', (4, 4), 'torch.float32', True)", "('0.weight', (4, 4), 'torch.float32', False)"],
    "thawed": ["2 parameters", "0.weight", "frozen"],
    "static": ["rare.", "static_graph"],
    "wrapped": ["DataParallel", "detach()"],
    "unused": ["4 of 10 parameters", "rare.weight, rare.bias, never.weight", "find_unused_parameters=True"],
    "sparse": ["weight", "sparse=False"],
    "cast": ["torch.float32", "torch.float64"],
    "meta": ["weight", "meta device"],
    "nothing": ["Sequential", "requires a gradient"],
    "axis": ["axis='dp'", "mesh.dp"],
}


@pytest.mark.parametrize("case", REFUSALS)
def test_an_error_names_the_parameter_on_every_rank(pools: RankPools, case: str) -> None:
    for message in pools[2].run(refused, case):
        assert all(part in message for part in REFUSALS[case]), message


# Options of DataParallel: the values of ranks 0 and 1.
DIFFERENT_OPTIONS: dict[str, tuple[Any, Any]] = {
    "bucket_mb": (25.0, 1.0),
    "broadcast_buffers": (True, False),
    "find_unused_parameters": (False, True),
    "check_reduction": (False, True),
    "gradient_as_bucket_view": (True, False),
    "static_graph": (False, True),
    "overlap_communication": (True, False),
    "copy_engines": (False, True),
    "average": (True, False),
}


@pytest.mark.parametrize("option", DIFFERENT_OPTIONS)
def test_options_that_differ_between_ranks_are_refused_on_every_rank(pools: RankPools, option: str) -> None:
    def wrap(values: tuple[Any, Any]) -> str:
        axis = Mesh(Layout(dp=2)).dp
        try:
            DataParallel(nn.Linear(4, 4), axis, **{option: values[axis.rank]})
        except ValueError as error:
            return str(error)
        return "nothing"

    a, b = DIFFERENT_OPTIONS[option]
    expected = f"{option}={a} on rank 0 of axis dp, and {option}={b} on rank 1; pass the same on every rank"
    assert pools[2].run(wrap, (a, b)) == [expected] * 2


def copy_of_a_wrapper() -> tuple[str, str, bool]:
    axis = Mesh(Layout(dp=2)).dp
    copied = copy.deepcopy(DataParallel(nn.Linear(2, 1, bias=False), axis))
    x = torch.full((1, 2), axis.rank + 1.0)
    with pytest.raises(RuntimeError) as no_reducer:
        _ = copied.reducer
    with pytest.raises(RuntimeError) as refused:
        copied(x).sum().backward()
    again = DataParallel(copied.detach(), axis)
    again.zero_grad()
    again(x).sum().backward()
    gradient = again.module.weight.grad
    return str(no_reducer.value), str(refused.value), torch.equal(gradient, torch.full((1, 2), 1.5))


def test_a_copy_says_how_to_train_it(pools: RankPools) -> None:
    for no_reducer, refused, is_mean in pools[2].run(copy_of_a_wrapper):
        assert no_reducer == "nothing reduces these gradients"
        assert refused.endswith("to train it, wrap what its detach() returns")
        assert is_mean


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise ArithmeticError("on purpose")


def after_a_failure() -> float:
    """Distance of weights from one process, where a backward fails on all ranks before the second step."""
    axis = Mesh(Layout(dp=2)).dp
    torch.manual_seed(0)
    serial = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).double()
    model = copy.deepcopy(serial)
    replica = DataParallel(model, axis, 0.0001)
    optimizers = [torch.optim.SGD(net.parameters(), lr=LR) for net in (model, serial)]
    g = torch.Generator().manual_seed(3)
    for step in range(3):
        x = torch.randn(4, 4, dtype=D, generator=g)
        if step == 1:
            hook = model[0].register_forward_hook(lambda m, i, out: Fails.apply(out))
            with contextlib.suppress(ArithmeticError):
                replica(x).sum().backward()
            hook.remove()
        for optimizer in optimizers:
            optimizer.zero_grad()
        replica(x.chunk(2)[axis.rank]).square().mean().backward()
        serial(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    return distance(dict(model.state_dict()), dict(serial.state_dict()))


def test_after_a_backward_that_failed_training_goes_on(pools: RankPools) -> None:
    assert max(pools[2].run(after_a_failure)) < 1e-12


def habits() -> tuple[bool, bool, bool, bool]:
    axis = Mesh(Layout(dp=2)).dp
    model = nn.Linear(3, 3)
    replica = DataParallel(model, axis, check_reduction=True)
    (replica(torch.ones(1, 3)).sum() * float("inf")).backward()  # an overflow is no disagreement
    overflowed = not bool(model.weight.grad.isfinite().all())  # type: ignore[union-attr]
    model.zero_grad()
    replica(torch.ones(1, 3)).square().sum().backward(create_graph=True)
    copied = copy.deepcopy(model)
    saved = pickle.loads(pickle.dumps(list(model.parameters())))
    again = DataParallel(replica.detach(), axis)
    again.zero_grad()
    again(torch.full((1, 3), axis.rank + 1.0)).sum().backward()
    return (
        overflowed,
        torch.equal(copied.weight, model.weight) and torch.equal(saved[0], model.weight),
        torch.equal(model.weight.grad, torch.full((3, 3), 1.5)),
        isinstance(DataParallel(copied, axis), nn.Module),
    )


def test_overflows_second_derivatives_copies_and_wrapping_again(pools: RankPools) -> None:
    assert pools[2].run(habits) == [(True,) * 4] * 2


def test_what_is_frozen_later_keeps_no_gradient(pools: RankPools) -> None:
    def run() -> tuple[bool, bool]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        replica = DataParallel(model, Mesh(Layout(dp=2)).dp)
        model[0].requires_grad_(False)
        replica(torch.ones(2, 4)).sum().backward()
        return model[0].weight.grad is None, model[1].weight.grad is not None

    assert pools[2].run(run) == [(True, True)] * 2


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_buckets_do_not_wait_for_what_was_frozen_later(pools: RankPools, stage: int) -> None:
    """All were sent after the backward."""

    def run() -> tuple[int, int, bool]:
        axis, model = Mesh(Layout(dp=2)).dp, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        if stage:
            ZeroOptimizer(model.parameters(), torch.optim.SGD, axis, stage, bucket_mb=0.00005, lr=0.1)
        replica, sent = DataParallel(model, axis, 0.00005), []
        sink: Any = replica.sink
        finish = sink.finish

        def note() -> None:
            sent.append(sink._num_sent if stage else len(sink._sent))
            finish()

        sink.finish = note
        model[1].bias.requires_grad_(False)
        replica(torch.full((1, 4), 1.0 + axis.rank)).sum().backward()
        grad = sink.full_gradients()[2] if stage else model[1].weight.grad
        mean = torch.stack([model[0](torch.full((4,), 1.0 + r)) for r in range(2)]).mean(0)
        return sent[0], len(sink.buckets), torch.allclose(grad, mean.expand(4, 4))

    for sent, buckets, exact in pools[2].run(run):
        assert sent == buckets > 2
        assert exact


# --- 16 bits ---------------------------------------------------------------------------------------------


def sixteen_bits(name: str, average: bool) -> tuple[float, float]:
    """Relative distance of weights from one process's: of the ranks', and of the same process's in parts."""
    axis, policy = Mesh(Layout(dp=hpnb.world_size())).dp, precision.policy(name)
    x = torch.randn(24, 32, generator=torch.Generator().manual_seed(5))
    y = torch.randn(24, 8, generator=torch.Generator().manual_seed(6))
    shares_ = [slice(r * 24 // axis.size, (r + 1) * 24 // axis.size) for r in range(axis.size)]

    def run(parts: list[slice], wrap: Callable[[nn.Module], nn.Module]) -> torch.Tensor:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8))
        model = policy.cast(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        masters = precision.Masters(optimizer) if policy.masters else None
        forward = wrap(model)
        for _ in range(4):
            optimizer.zero_grad()
            for part in parts:
                with policy.autocast(x.device):
                    out = forward(x[part].to(policy.weights))
                (nn.functional.mse_loss(out.float(), y[part]) / len(parts)).backward()
            optimizer.step()
        weights = [p if masters is None else masters.of(p) for p in model.parameters()]
        return torch.cat([p.detach().double().flatten() for p in weights])

    alone = run([slice(None)], lambda model: model)
    in_parts = run(shares_, lambda model: model)
    ranks = run([shares_[axis.rank]], lambda model: DataParallel(model, axis, 0.001, average=average))
    return float((ranks - alone).norm() / alone.norm()), float((in_parts - alone).norm() / alone.norm())


@pytest.mark.parametrize("name", ["bf16", "amp-bf16"])
def test_in_16_bits_ranks_differ_as_two_orders_of_summation_do(pools: RankPools, name: str) -> None:
    for ranks, orders in pools[3].run(sixteen_bits, name, True):
        assert 0 < ranks < 3 * orders < 1e-2
    for ranks, orders in pools[3].run(sixteen_bits, name, False):  # sums in place of means
        assert ranks > 30 * orders


# --- replicas that should be equal -----------------------------------------------------------------------


def test_what_differs_between_replicas_is_named(pools: RankPools) -> None:
    def run() -> list[dict[str, float]]:
        mesh = Mesh(Layout(dp=2))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        equal = hpnb.data_parallel.compare_replicas(model, mesh.dp)
        with torch.no_grad():
            model[0].weight.mul_(1 + 0.5 * mesh.dp.rank)
        model[1].bias.grad = torch.full((4,), 2.0 + mesh.dp.rank)
        if mesh.dp.rank:
            model[1].weight.grad = torch.ones(4, 4)
        return [equal, hpnb.data_parallel.compare_replicas(model, mesh.dp)]

    for equal, differing in pools[2].run(run):
        assert equal == {}
        assert differing == pytest.approx(
            {"0.weight": 0.5, "1.weight.grad": float("inf"), "1.bias.grad": 0.5}, rel=1e-6
        )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_replica_with_a_nan_or_inf_is_named(pools: RankPools, value: float, rank: int) -> None:
    """On a rank other than 0 a nan was no difference."""

    def run() -> dict[str, float]:
        axis, model = Mesh(Layout(dp=2)).dp, nn.Linear(2, 2)
        nn.init.ones_(model.weight)
        nn.init.ones_(model.bias)
        if axis.rank == rank:
            model.weight.data[0, 0] = value
        return hpnb.data_parallel.compare_replicas(model, axis)

    for differing in pools[2].run(run):
        assert [*differing] == ["weight"]
        assert math.isnan(differing["weight"])


def test_a_replica_with_another_imaginary_part_is_named(pools: RankPools) -> None:
    """Imaginary parts were left out of the comparison."""

    def run() -> dict[str, float]:
        axis, model = Mesh(Layout(dp=2)).dp, nn.Linear(1, 1, bias=False, dtype=torch.complex64)
        nn.init.constant_(model.weight, 1.0 + 0.5j * axis.rank)  # type: ignore[arg-type]
        return hpnb.data_parallel.compare_replicas(model, axis)

    assert pools[2].run(run) == [{"weight": 0.5}] * 2

"""Hooks of parameters in every layout, against one process in float64.

pytest tests/test_parameter_hooks.py
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hybrid_cases import Case, batch, build, distance, mean, mine, weights
from rank_pools import RankPools
from torch import nn

import hpnb
from hpnb import Layout, Mesh, placement
from hpnb.data_parallel import DataParallel
from hpnb.data_parallel.fsdp import fully_shard, no_sync
from hpnb.split_sizes import split_sizes

D = torch.float64
STEPS, LR = 3, 0.2
REMOVED = "transformer.h.1.mlp.c_fc.weight"  # its hook goes after the first step
TIED = {"lm_head.weight": "transformer.wte.weight"}  # what the last stage calls the tied weight

Hook = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools(timeout=120)
    yield pools
    pools.close()


def hooks(shapes: dict[str, torch.Size]) -> dict[str, Hook]:
    """Linear in the gradient, so that the ranks' sum is one process's."""
    mask = torch.rand(shapes[REMOVED], generator=torch.Generator().manual_seed(4), dtype=D)
    return {
        "transformer.wte.weight": lambda g: g * 0.5,  # tied, and on two stages
        REMOVED: lambda g: g * mask,
        "transformer.h.2.ln_1.weight": lambda g: g * 3,
        "transformer.h.3.attn.c_proj.bias": lambda g: -g,
    }


class Hooked:
    """Registers `hooks` on the parameters that are here, and notes the shapes that they get."""

    def __init__(self, shapes: dict[str, torch.Size]) -> None:
        self.hooks, self.shapes = hooks(shapes), shapes
        self.handles: dict[str, Any] = {}
        self.calls = dict.fromkeys(self.hooks, 0)

    def register(self, module: nn.Module) -> None:
        for name, p in module.named_parameters():
            name = TIED.get(name, name)
            if name in self.hooks:
                self.handles[name] = p.register_hook(lambda g, name=name: self._run(name, g))

    def _run(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        assert gradient.shape == self.shapes[name]
        self.calls[name] += 1
        return self.hooks[name](gradient)

    def end_of_step(self, step: int) -> None:
        if step == 0 and REMOVED in self.handles:
            self.handles[REMOVED].remove()


def shapes_of(model: nn.Module) -> dict[str, torch.Size]:
    return {name: p.shape for name, p in model.named_parameters()}


def serial(rows: int, hooked: bool = True) -> dict[str, torch.Tensor]:
    model = build("gpt2")
    hooks = Hooked(shapes_of(model))
    if hooked:
        hooks.register(model)
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        given = batch("gpt2", step, rows)
        mean(model(**{n: t for n, t in given.items() if n != "labels"}), given).backward()
        optimizer.step()
        hooks.end_of_step(step)
    return {n: t.detach().clone() for n, t in model.state_dict().items()}


def boosted(case: Case, before: bool) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    plugin = case.plugin()
    booster, model = hpnb.Booster(plugin=plugin), build("gpt2")
    hooks = Hooked(shapes_of(model))
    if before:
        hooks.register(model)
    optimizer: Any = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
    made: Any
    made, optimizer, criterion, *_ = booster.boost(model, optimizer, mean)
    if not before:
        hooks.register(made.module)
    for step in range(STEPS):
        optimizer.zero_grad()
        given = mine(batch("gpt2", step, case.rows), plugin.mesh.dp)
        if case.direct:
            booster.backward(criterion(made(**given), given), optimizer)
        else:
            booster.execute_pipeline(iter([given]), made, criterion, optimizer)
        optimizer.step()
        hooks.end_of_step(step)
    return weights(made), hooks.calls


CASES = [
    Case(dp=2, zero=3, direct=True),
    Case(dp=2, zero=3, microbatches=2),
    Case(dp=2, zero=3, direct=True, again="full"),
    Case(dp=2, zero=2, microbatches=2),
    Case(dp=2, zero=0, direct=True),
    Case(dp=2, pp=2, zero=3, microbatches=3),
    Case(dp=2, pp=2, zero=3, style="zb-h1", microbatches=4, again="full"),
    Case(dp=2, pp=2, zero=3, style="zb-v", chunks=2, microbatches=3, rows=7),
    Case(dp=4, zero=3, replicas=2, microbatches=2),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_hooks_of_gradients_run_as_on_one_process(pools: RankPools, case: Case, before: bool) -> None:
    wanted = serial(case.rows)
    assert distance(serial(case.rows, hooked=False), wanted) > 1e-2
    found = pools[case.ranks].run(boosted, case, before)
    for got, _ in found:
        assert distance(got, wanted) < 1e-11
    calls = {name: max(calls[name] for _, calls in found) for name in found[0][1]}
    if case.pp == 1:
        backwards = case.microbatches or 1
        assert calls == {n: backwards * (1 if n == REMOVED else STEPS) for n in calls}


# --- fully_shard by itself ---


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.root = nn.Parameter(torch.randn(6))
        self.to(D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) + x
        return x * self.root


def data(step: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step), dtype=D)


def mean_gradient_seen(offload: bool) -> float:
    """The hook gets this rank's full gradient of this backward; the mean over the ranks is one process's."""
    axis, model, seen = Mesh(Layout(dp=hpnb.world_size())).dp, Net(), list[torch.Tensor]()
    fully_shard(model, axis, cpu_offload=offload)
    model.blocks[1].weight.register_hook(lambda g: seen.append(g.clone()))
    worst = 0.0
    for step in range(2):
        one = Net()
        one.load_state_dict(placement.full_state_dict(model, [axis]))
        x = data(step)
        one(x).square().mean().backward()
        with no_sync(model) if step == 0 else contextlib.nullcontext():
            model(x[axis.rank :: axis.size]).square().mean().backward()
        summed = seen.pop()
        torch.distributed.all_reduce(summed)
        wanted = one.blocks[1].weight.grad
        assert isinstance(wanted, torch.Tensor)
        assert not seen
        worst = max(worst, float((summed / axis.size - wanted).norm() / wanted.norm()))
    return worst


@pytest.mark.parametrize("offload", [False, True])
def test_a_hook_gets_the_full_gradient_of_its_rank_before_the_sum(pools: RankPools, offload: bool) -> None:
    assert max(pools[2].run(mean_gradient_seen, offload)) < 1e-12


def meta_and_freezing() -> float:
    """Hooks that were registered on the meta device, on a parameter that is frozen for a step."""
    axis, source = Mesh(Layout(dp=hpnb.world_size())).dp, Net()
    with torch.device("meta"):
        model = Net()
    ends = []
    for net in (model, source):
        net.blocks[0].bias.register_hook(lambda g: g * 5)
        net.root.register_hook(lambda g: g * -2)
        net.root.register_hook(lambda g: g + 0.5 * g)  # gets what the first one has returned
    fully_shard(model, axis)
    placement.load_full_state_dict(model, source.state_dict())
    for net, part in ((model, slice(axis.rank, None, axis.size)), (source, slice(None))):
        optimizer = torch.optim.SGD(net.parameters(), LR, momentum=0.9)
        for step in range(3):
            net.root.requires_grad_(step != 1)
            optimizer.zero_grad()
            net(data(step)[part]).square().mean().backward()
            optimizer.step()
        ends.append(placement.full_state_dict(net, [axis]) if net is model else net.state_dict())
    return distance(*ends)


def test_hooks_stay_over_the_meta_device_and_freezing(pools: RankPools) -> None:
    assert max(pools[2].run(meta_and_freezing)) < 1e-12


def freed_with_hooks() -> bool:
    model = fully_shard(Net(), Mesh(Layout(dp=hpnb.world_size())).dp)
    model.root.register_hook(lambda g, model=model: g)
    model(data(0)).sum().backward()
    alive = weakref.ref(model)
    del model
    gc.collect()
    return alive() is None


def test_a_model_with_hooks_is_freed(pools: RankPools) -> None:
    assert all(pools[2].run(freed_with_hooks))


# --- after the gradients have been accumulated ---


def after_sum(replicas: bool, offload: bool) -> tuple[float, bool]:
    """An optimizer in the hooks: each steps its parameter and drops the gradient."""
    world = hpnb.world_size()
    axis, wide = Mesh(Layout(dp=world)).dp, None
    if replicas:
        wide, axis = axis.split(world // 2, 2)
    model, one, shapes = Net(), Net(), list[bool]()
    fully_shard(model, axis, replicas=wide, cpu_offload=offload)

    def step(p: nn.Parameter) -> None:
        assert p.grad is not None
        assert not torch.is_grad_enabled()
        p.grad.mul_(0.3 if p.grad.dim() else 1)
        p.sub_(p.grad)
        p.grad = None

    def noted(p: nn.Parameter) -> None:
        shapes.append(p.grad is not None and p.grad.shape == p.shape and p.dim() == 1)
        step(p)

    for net, hook in ((model, noted), (one, step)):
        for p in net.parameters():
            p.register_post_accumulate_grad_hook(hook)
    for number in range(3):
        one(data(number)).square().mean().backward()
        rank = hpnb.rank()
        model(data(number)[rank::world]).square().mean().backward()
    axes = [axis] if wide is None else [axis, wide]
    off = distance(placement.full_state_dict(model, axes), dict(one.state_dict()))
    return off, all(shapes) and len(shapes) == 3 * len(list(model.parameters()))


@pytest.mark.parametrize(
    ("ranks", "replicas", "offload"), [(2, False, False), (2, False, True), (4, True, False)]
)
def test_post_accumulate_hooks_get_the_shard_of_the_sum(
    pools: RankPools, ranks: int, replicas: bool, offload: bool
) -> None:
    for off, shapes in pools[ranks].run(after_sum, replicas, offload):
        assert off < 1e-12
        assert shapes


def halve_gradients(model: nn.Module) -> None:
    def halve(p: torch.Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(0.5)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(halve)


def boosted_after_sum(case: Case) -> dict[str, torch.Tensor]:
    plugin = case.plugin()
    booster, model = hpnb.Booster(plugin=plugin), build("gpt2")
    optimizer: Any = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
    made: Any
    halve_gradients(model)
    made, optimizer, criterion, *_ = booster.boost(model, optimizer, mean)
    for step in range(STEPS):
        optimizer.zero_grad()
        given = mine(batch("gpt2", step, case.rows), plugin.mesh.dp)
        booster.execute_pipeline(iter([given]), made, criterion, optimizer)
        optimizer.step()
    return weights(made)


@pytest.mark.parametrize("case", [CASES[1], CASES[5], CASES[6]], ids=str)
def test_post_accumulate_hooks_run_once_a_step_under_zero_3(pools: RankPools, case: Case) -> None:
    model = build("gpt2")
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
    halve_gradients(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        given = batch("gpt2", step, case.rows)
        mean(model(**{n: t for n, t in given.items() if n != "labels"}), given).backward()
        optimizer.step()
    for got in pools[case.ranks].run(boosted_after_sum, case):
        assert distance(got, dict(model.state_dict())) < 1e-11


def test_data_parallel_runs_hooks_before_the_sum(pools: RankPools) -> None:
    """What ZeRO 3 is compared with above, at its plainest."""

    def run() -> float:
        axis, model = Mesh(Layout(dp=hpnb.world_size())).dp, Net()
        model.root.register_hook(lambda g: g * 2)
        DataParallel(model, axis)(data(0)[axis.rank :: axis.size]).square().mean().backward()
        one = Net()
        one(data(0)).square().mean().backward()
        assert model.root.grad is not None
        assert one.root.grad is not None
        return float((model.root.grad - 2 * one.root.grad).norm())

    assert max(pools[2].run(run)) < 1e-12


def late_hooks(zero: int) -> list[str]:
    """One that comes too late: it runs where nothing is sent, is refused where something is, and can go."""
    case, said = Case(dp=2, zero=zero, direct=True), list[str]()
    booster, model = hpnb.Booster(plugin=case.plugin()), build("gpt2")
    optimizer: Any = torch.optim.SGD(model.parameters(), LR)
    made: Any
    made, optimizer, *_ = booster.boost(model, optimizer)
    given = mine(batch("gpt2", 0, 8), booster.plugin.mesh.dp)
    first = next(made.parameters())
    handle = first.register_post_accumulate_grad_hook(lambda p: said.append("called"))
    with booster.no_sync(made, optimizer):
        booster.backward(mean(made(**given), given), optimizer)
    with pytest.raises(RuntimeError) as error:
        booster.backward(mean(made(**given), given), optimizer)
    handle.remove()
    optimizer.zero_grad()
    booster.backward(mean(made(**given), given), optimizer)
    optimizer.step()
    return [*said, str(error.value)]


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_post_accumulate_hooks_that_come_too_late_are_refused(pools: RankPools, zero: int) -> None:
    for called, sentence in pools[2].run(late_hooks, zero):
        assert called == "called"
        assert "on a parameter of shape (29, 16) after its gradients" in sentence
        assert "register it before boost" in sentence


# --- schedules that split the backward ---


def halved_after_each(model: nn.Module, calls: list[str]) -> None:
    """All but the tied weight, of which a stage has a part."""

    def halve(name: str, p: torch.Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(0.5)
        calls.append(name)

    for name, p in model.named_parameters():
        if name not in (*TIED, *TIED.values()):
            p.register_post_accumulate_grad_hook(partial(halve, name))


def split_schedule(case: Case, before: bool) -> tuple[dict[str, torch.Tensor], Counter[str]]:
    plugin = case.plugin()
    booster, model, calls = hpnb.Booster(plugin=plugin), build("gpt2"), list[str]()
    if before:
        halved_after_each(model, calls)
    optimizer: Any = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
    made: Any
    made, optimizer, criterion, *_ = booster.boost(model, optimizer, mean)
    if not before:
        halved_after_each(made.module, calls)
    for step in range(STEPS):
        optimizer.zero_grad()
        given = mine(batch("gpt2", step, case.rows), plugin.mesh.dp)
        booster.execute_pipeline(iter([given]), made, criterion, optimizer)
        optimizer.step()
    return weights(made), Counter(calls)


def serial_microbatches(rows: int, microbatches: int) -> dict[str, torch.Tensor]:
    model = build("gpt2")
    halved_after_each(model, [])
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        given = batch("gpt2", step, rows)
        count = int((given["labels"][:, 1:] >= 0).sum())
        start = 0
        for size in split_sizes(rows, microbatches):
            part = {n: t[start : start + size] for n, t in given.items()}
            start += size
            outputs = model(**{n: t for n, t in part.items() if n != "labels"})
            share = int((part["labels"][:, 1:] >= 0).sum()) / count
            (mean(outputs, part) * share).backward()
        optimizer.step()
    return dict(model.state_dict())


SPLIT = [
    Case(pp=2, style="1f1b", microbatches=3),
    Case(pp=2, style="zb-h1", microbatches=3),
    Case(pp=2, style="zb-h2", microbatches=4, again="full"),
    Case(pp=2, style="zb-v", chunks=2, microbatches=3),
    Case(pp=2, style="dualpipe-v", chunks=2, microbatches=4),
    Case(dp=2, pp=2, style="zb-h1", microbatches=3, zero=2),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("case", SPLIT, ids=str)
def test_post_accumulate_hooks_run_after_each_microbatch(pools: RankPools, case: Case, before: bool) -> None:
    assert case.microbatches is not None
    found = pools[case.ranks].run(split_schedule, case, before)
    wanted = serial_microbatches(case.rows, case.microbatches)
    if case.dp == 1:  # else a hook sees the samples of its rank, in other microbatches
        assert max(distance(got, wanted) for got, _ in found) < 1e-11
    for _, calls in found:
        assert {*calls.values()} == {STEPS * case.microbatches}

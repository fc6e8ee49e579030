"""Precision: the scaler by hand, masters against float32 and float64, skipped and clipped steps on ranks."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hpnb
from hpnb import Layout, Mesh, precision
from hpnb.placement import Cut, Placement, set_placement
from hpnb.precision import LossScaler, Masters
from hpnb.theory import model_states

pytestmark = pytest.mark.usefixtures("launches_on_a_pool")

D = torch.float64
LR = 0.3  # large enough that a skipped step shows


@pytest.fixture(scope="module")
def pair() -> Iterator[hpnb.Ranks]:
    with hpnb.Ranks(2, device="cpu", timeout=60) as pool:
        yield pool


def net(dtype: torch.dtype, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)


def backward(model: nn.Module, step: int = 0, scale: float = 1.0) -> None:
    """Gradients of a batch that differs from step to step."""
    p = next(model.parameters())
    g = torch.Generator().manual_seed(100 + step)
    x, y = torch.randn(8, 6, dtype=D, generator=g), torch.randn(8, 3, dtype=D, generator=g)
    loss = (model(x.to(p)).double() - y.to(p.device)).square().mean()
    (loss * scale).backward()


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


def sgd(parameters: Any, **how: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR, momentum=0.9, **how)


# --- policies --------------------------------------------------------------------------------


@pytest.mark.parametrize("written", ["bf16", "bfloat16", "torch.bfloat16", torch.bfloat16])
def test_a_dtype_is_a_precision_and_auto_fits_the_device(written: Any) -> None:
    assert precision.policy(written).name == precision.precision_name(written) == "bf16"
    assert hpnb.HybridParallelPlugin(precision=written).precision == "bf16"
    assert precision.policy(torch.float64).compute == torch.float64
    assert precision.policy("auto", "cpu").name == "fp32"
    assert hpnb.HybridParallelPlugin().policy.name == precision.policy("auto", hpnb.device()).name
    with pytest.raises(ValueError, match="int8"):
        precision.policy(torch.int8)


@pytest.mark.parametrize(
    ("name", "weight", "product", "masters", "scaled"),
    [
        ("fp32", torch.float32, torch.float32, False, False),
        ("fp64", torch.float64, torch.float64, False, False),
        ("fp16", torch.float16, torch.float16, True, True),
        ("bf16", torch.bfloat16, torch.bfloat16, True, False),
        ("amp-fp16", torch.float32, torch.float16, False, True),
        ("amp-bf16", torch.float32, torch.bfloat16, False, False),
    ],
)
def test_a_policy_says_which_dtype_does_what(
    name: str, weight: torch.dtype, product: torch.dtype, masters: bool, scaled: bool
) -> None:
    policy = precision.policy(name)
    model = policy.cast(nn.Linear(4, 4))
    assert (policy.name, policy.masters, policy.scaled) == (name, masters, scaled)
    assert model.weight.dtype == model.bias.dtype == weight
    x = torch.ones(2, 4, dtype=weight)
    with policy.autocast("cpu"):
        y = model(x)
    assert y.dtype == product
    y.sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == weight
    assert model(x).dtype == weight  # outside of the block nothing has changed


def test_an_unknown_policy_is_told_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'int8' is not one of fp32, amp-fp16, amp-bf16, fp16, bf16, fp64"):
        precision.policy("int8")


def test_fp16_where_bf16_is_not_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    assert precision.best_16_bit("cpu") == "bf16"
    for capability, best in [((7, 5), "fp16"), ((8, 0), "bf16"), ((9, 0), "bf16"), ((12, 0), "bf16")]:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert precision.best_16_bit("cuda") == best
        assert precision.policy(precision.best_16_bit(torch.device("cuda", 0))).masters


# --- the loss scaler -------------------------------------------------------------------------

# Worked out by hand: x overflows. The scale after each step.
RUN = "x.xx...x..."
KNOBS: dict[str, float] = {
    "initial_scale": 8, "min_scale": 1, "growth_factor": 2, "backoff_factor": 0.5, "growth_interval": 3,
    "hysteresis": 2, "max_scale": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "run", "scales"),
    [
        ({}, RUN, [8, 8, 4, 2, 2, 2, 4, 4, 4, 4, 8]),
        ({"initial_scale": 16}, RUN, [16, 16, 8, 4, 4, 4, 8, 8, 8, 8, 16]),
        ({"min_scale": 4}, RUN, [8, 8, 4, 4, 4, 4, 8, 8, 8, 8, 16]),
        ({"growth_factor": 4}, RUN, [8, 8, 4, 2, 2, 2, 8, 8, 8, 8, 32]),
        ({"backoff_factor": 0.25}, RUN, [8, 8, 2, 1, 1, 1, 2, 2, 2, 2, 4]),
        ({"growth_interval": 2}, RUN, [8, 8, 4, 2, 2, 4, 4, 4, 4, 8, 8]),
        ({"hysteresis": 1}, RUN, [4, 4, 2, 1, 1, 1, 2, 1, 1, 1, 2]),
        ({"hysteresis": 3}, RUN, [8, 8, 8, 4, 4, 4, 8, 8, 8, 8, 16]),
        ({"max_scale": 8}, RUN, [8, 8, 4, 2, 2, 2, 4, 4, 4, 4, 8]),
        ({}, "." * 9, [8, 8, 16, 16, 16, 32, 32, 32, 32]),
        ({"max_scale": 16}, "." * 9, [8, 8, 16, 16, 16, 16, 16, 16, 16]),
        # Two overflows need not follow each other; a growth between them forgives the first.
        ({}, "x..x", [8, 8, 8, 4]),
        ({}, "x...x", [8, 8, 8, 16, 16]),
        ({}, "..x..", [8, 8, 8, 8, 8]),  # the count of clean steps starts anew
    ],
)
def test_the_scale_after_each_step(changed: dict[str, float], run: str, scales: list[float]) -> None:
    scaler = LossScaler(**{**KNOBS, **changed})  # type: ignore[arg-type]
    found = []
    for event in run:
        scaler.update(event == "x")
        found.append(scaler.scale)
    assert found == scales
    assert scaler.skipped == run.count("x")


def test_every_knob_has_the_default_of_the_tutorials() -> None:
    s = LossScaler()
    assert (s.scale, s.min_scale, s.growth_factor, s.backoff_factor) == (65536, 1, 2, 0.5)
    assert (s.growth_interval, s.hysteresis, s.max_scale) == (1000, 2, 2**32)


def test_a_scaler_goes_on_where_another_stood() -> None:
    run = "x..x.x...xx......"
    for cut in range(len(run)):
        whole, first, second = (LossScaler(**KNOBS) for _ in range(3))  # type: ignore[arg-type]
        for event in run[:cut]:
            first.update(event == "x")
        second.load_state_dict(first.state_dict())
        for event in run:
            whole.update(event == "x")
        for event in run[cut:]:
            second.update(event == "x")
        assert second.state_dict() == whole.state_dict()


def test_a_scaler_grows_at_its_next_step_where_another_had_waited_longer() -> None:
    saved, scaler = LossScaler(growth_interval=1000), LossScaler(growth_interval=100)
    for _ in range(500):
        saved.update(False)
    scaler.load_state_dict(saved.state_dict())
    scaler.update(False)
    assert scaler.scale == 2 * saved.scale


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"initial_scale": 0.5}, "initial_scale=0.5 must lie between min_scale=1.0 and"),
        ({"initial_scale": 2.0**33}, "max_scale=4294967296.0"),
        ({"min_scale": 0}, "all above 0"),
        ({"growth_factor": 1.0}, "growth_factor=1.0 must be above 1"),
        ({"backoff_factor": 1.0}, "backoff_factor=1.0 between 0 and 1"),
        ({"backoff_factor": 0.0}, "backoff_factor=0.0 between 0 and 1"),
        ({"growth_interval": 0}, "growth_interval=0 and hysteresis=2 count steps"),
        ({"hysteresis": 0}, "hysteresis=0 count steps"),
    ],
)
def test_a_knob_that_cannot_work_is_refused(knobs: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LossScaler(**knobs)


def test_a_scaled_loss_does_not_overflow_itself() -> None:
    scaler = LossScaler()
    assert scaler.scaled(torch.tensor(2.0, dtype=torch.float16)).item() == 131072
    assert scaler.scaled(torch.tensor(2.0, dtype=D)).dtype == D


# --- masters ---------------------------------------------------------------------------------


def test_updates_that_16_bits_lose_add_up_in_masters() -> None:
    """20 steps of 1/1000 at 1.0, where bf16's neighbours are 1 - 1/256 and 1 + 1/128."""
    found = {}
    for masters in (False, True):
        p = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        optimizer = torch.optim.SGD([p], lr=1e-3)
        if masters:
            Masters(optimizer)
        for _ in range(20):
            p.grad = torch.ones_like(p)
            optimizer.step()
        found[masters] = p.detach()
    assert torch.equal(found[False], torch.ones(4, dtype=torch.bfloat16))
    assert torch.equal(found[True], torch.full((4,), 0.98).bfloat16())


HOW: list[tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": LR, "momentum": 0.9, "foreach": False}),
    (torch.optim.SGD, {"lr": LR, "momentum": 0.9, "foreach": True}),
    (torch.optim.SGD, {"lr": LR, "momentum": 0.9, "fused": True}),
    (torch.optim.AdamW, {"lr": 0.01, "foreach": False}),
    (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    (torch.optim.AdamW, {"lr": torch.tensor(0.01), "amsgrad": True, "foreach": False}),
    (torch.optim.Adagrad, {"lr": 0.1}),  # its state is there before the first step
]


@pytest.mark.parametrize(("make", "how"), HOW)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_are_what_float32_parameters_would_be(
    make: Callable[..., torch.optim.Optimizer], how: dict[str, Any], dtype: torch.dtype
) -> None:
    """A 16-bit model with masters beside float32 copies that get the same gradients, times a coefficient."""
    model = net(dtype)
    wanted = [p.detach().float() for p in model.parameters()]
    optimizer, plain = make(model.parameters(), **how), make(wanted, **how)
    masters = Masters(optimizer)
    for step in range(5):
        optimizer.zero_grad()
        backward(model, step)
        for p, w in zip(model.parameters(), wanted, strict=True):
            assert p.grad is not None
            w.grad = p.grad.float() * 0.25
        masters.coefficient = 0.25
        optimizer.step()
        plain.step()
        assert masters.coefficient == 1.0
        for p, w in zip(model.parameters(), wanted, strict=True):
            assert torch.equal(masters.of(p), w)
            assert torch.equal(p, w.to(dtype))
            assert masters.of(p).grad is None
            assert optimizer.state[p].keys() == plain.state[w].keys()
            for key, value in plain.state[w].items():
                assert torch.equal(optimizer.state[p][key], value)
                assert optimizer.state[p][key].dtype == torch.float32
    assert distance(weights(model), torch.cat([p.flatten() for p in net(dtype).parameters()])) > 0.01


def test_training_stays_near_float64() -> None:
    """bf16 with masters ends nearer to float64 than bf16 alone, whose small updates vanish."""
    found = {}
    for dtype, masters in [(D, False), (torch.bfloat16, True), (torch.bfloat16, False)]:
        model = net(torch.bfloat16).to(dtype)  # equal starts
        optimizer = torch.optim.SGD(model.parameters(), lr=0.002)
        if masters:
            Masters(optimizer)
        start = weights(model)
        for step in range(20):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
        attached = Masters.attached_to(optimizer)
        ends = [p if attached is None else attached.of(p) for p in model.parameters()]
        found[dtype, masters] = torch.cat([p.detach().double().flatten() for p in ends]) - start
    exact = found[D, False]
    assert distance(found[torch.bfloat16, True], exact) < 0.02
    assert distance(found[torch.bfloat16, False], exact) > 0.3


class Mixed(nn.Module):
    """16-bit and float32 weights, a frozen one, one that is never used, one that some batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(6, 16).bfloat16()
        self.wide = nn.LayerNorm(16)
        self.frozen = nn.Linear(16, 16).bfloat16().requires_grad_(False)
        self.never = nn.Linear(2, 2).bfloat16()
        self.rare = nn.Linear(16, 16).bfloat16()

    def forward(self, x: torch.Tensor, rare: bool) -> torch.Tensor:
        h = self.wide(self.narrow(x.bfloat16()).float()).bfloat16()
        return (self.rare(h) if rare else self.frozen(h)).float()


def test_a_mixed_model_is_stepped_part_by_part() -> None:
    torch.manual_seed(0)
    model = Mixed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    masters = Masters(optimizer)
    start = copy.deepcopy(model.state_dict())
    x = torch.randn(4, 6)
    for rare in (False, True, False):
        moments = copy.deepcopy(optimizer.state.get(model.rare.weight, {}))
        optimizer.zero_grad()
        model(x, rare).square().sum().backward()
        wide, gradient = model.wide.weight.detach().clone(), model.wide.weight.grad
        assert gradient is not None
        masters.coefficient = 0.5
        half = gradient * 0.5
        optimizer.step()
        assert torch.equal(gradient, half)
        assert not torch.equal(model.wide.weight, wide)
        if not rare:  # without a gradient no moment moves and no weight decays
            for key, value in moments.items():
                assert torch.equal(optimizer.state[model.rare.weight][key], value)
    assert masters.of(model.wide.weight) is model.wide.weight
    assert masters.of(model.frozen.weight) is model.frozen.weight
    assert masters.of(model.narrow.weight).dtype == torch.float32
    for name, value in model.state_dict().items():
        assert torch.equal(value, start[name]) == name.startswith(("never", "frozen"))
    # Thawed later, or added later, a parameter gets its master when it gets a gradient.
    late = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer.add_param_group({"params": [late]})
    model.frozen.requires_grad_(True)
    model(x, False).sum().backward()
    late.grad = torch.ones_like(late)
    optimizer.step()
    for p in (late, model.frozen.weight):
        assert masters.of(p).dtype == torch.float32
        assert torch.equal(masters.of(p).bfloat16(), p)
    assert late[0] < 1
    # A state dict has masters for those that have one, and brings everything back; never's have no state.
    state_dict = copy.deepcopy(optimizer.state_dict())
    every = [p for group in optimizer.param_groups for p in group["params"]]
    assert set(state_dict["masters"]) == {i for i, p in enumerate(every) if masters.of(p) is not p}
    assert set(state_dict["masters"]) - set(state_dict["state"])
    kept = [(masters.of(p).detach().clone(), p.detach().clone()) for p in every]
    moments = copy.deepcopy(state_dict["state"])
    with torch.no_grad():
        for p in every:
            if masters.of(p) is not p:
                masters.of(p).zero_()
                p.zero_()
    optimizer.load_state_dict(state_dict)
    for p, (master, weight) in zip(every, kept, strict=True):
        assert torch.equal(masters.of(p), master)
        assert torch.equal(p, weight)
    for i, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, moments[i][key]) for key, value in state.items())
    # An optimizer without masters can read it, and so can one whose masters are yet to be made.
    torch.optim.AdamW(Mixed().parameters()).load_state_dict(
        {**state_dict, "param_groups": state_dict["param_groups"][:1]}
    )
    other = Mixed().requires_grad_(False)
    reader = torch.optim.AdamW([{"params": other.parameters()}, {"params": [torch.zeros(3).bfloat16()]}])
    theirs = Masters(reader)
    assert theirs.tensors_by_category()["optimizer"] == []
    reader.load_state_dict(state_dict)
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        if not name.startswith("wide"):
            assert torch.equal(theirs.of(q), masters.of(p))
            assert torch.equal(q, p)


@pytest.mark.parametrize("part", ["narrow", "wide"])
def test_an_overflow_in_any_part_of_a_mixed_model_skips_the_step(part: str) -> None:
    torch.manual_seed(0)
    model = Mixed()
    optimizer = sgd(model.parameters())
    Masters(optimizer)
    start = copy.deepcopy(model.state_dict())
    model(torch.randn(4, 6), False).sum().backward()
    model.get_submodule(part).bias.grad[0] = math.nan  # type: ignore[union-attr,index,operator]
    assert not precision.step(optimizer, scaler=LossScaler(1.0)).stepped
    assert all(torch.equal(value, start[name]) for name, value in model.state_dict().items())


def test_a_scheduler_made_before_stays_attached() -> None:
    model = net(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    masters = Masters(optimizer)
    p = next(model.parameters())
    for rate in (1.0, 0.5, 0.25):
        before = masters.of(p).clone()
        for q in model.parameters():
            q.grad = torch.ones_like(q)
        optimizer.step()
        assert float((before - masters.of(p)).mean()) == pytest.approx(rate)
        scheduler.step()
    assert optimizer.param_groups[0]["params"][0] is p


class Faulty(torch.optim.SGD):
    """Calls its superclass's step, which has hooks too, goes on from there, takes notes, and may fail."""

    fails = False
    steps = 0

    def step(self, closure: Any = None) -> None:
        super().step()
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.mul_(0.5)
        self.steps += 1
        self.param_groups[0]["seen"] = self.steps
        if self.fails:
            raise ArithmeticError("in the step")


def test_an_error_in_a_step_leaves_the_groups_as_they_were() -> None:
    sgd(net(torch.float32).parameters())  # PyTorch hooks a class's step when the first of it is made
    model = net(torch.bfloat16)
    optimizer = Faulty(model.parameters(), lr=LR, momentum=0.9)
    masters = Masters(optimizer)
    inside: list[torch.Tensor] = []
    optimizer.register_step_post_hook(lambda o, *_: inside.extend(o.param_groups[0]["params"]))
    backward(model)
    optimizer.fails = True
    with pytest.raises(ArithmeticError):
        optimizer.step()
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    first, second, *_ = model.parameters()
    first.grad, optimizer.fails = None, False
    before = masters.of(first).clone()
    optimizer.step()
    assert torch.equal(masters.of(first), before * 0.5)  # not with the gradient of the step that failed
    assert torch.equal(masters.of(second).bfloat16(), second)
    assert second.grad is not None
    assert torch.equal(optimizer.state[second]["momentum_buffer"], second.grad.float())
    assert all(masters.of(p).grad is None for p in model.parameters())
    assert (optimizer.steps, optimizer.param_groups[0]["seen"]) == (1, 1)
    assert {id(p) for p in model.parameters()} <= {id(p) for p in inside}  # hooks of others see the model's


@pytest.mark.parametrize("make", [sgd, torch.optim.AdamW, torch.optim.SGD])
def test_training_resumes_bit_for_bit(make: Callable[..., torch.optim.Optimizer], tmp_path: Any) -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()

    model = net(torch.bfloat16)
    optimizer = make(model.parameters())
    masters = Masters(optimizer)
    run(model, optimizer, range(4))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved")
    run(model, optimizer, range(4, 8))

    saved = torch.load(tmp_path / "saved")
    assert [m.dtype for m in saved["optimizer"]["masters"].values()] == [torch.float32] * 4
    again = net(torch.bfloat16, seed=1)
    resumed = make(again.parameters())
    restored = Masters(resumed)
    resumed.load_state_dict(saved["optimizer"])
    for p, value in zip(again.parameters(), saved["model"].values(), strict=True):
        assert torch.equal(p, value)  # rounded masters
    again.load_state_dict(saved["model"])
    run(again, resumed, range(4, 8))
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(masters.of(p), restored.of(q))
        assert torch.equal(p, q)
        assert optimizer.state[p].keys() == resumed.state[q].keys()
        for key, value in optimizer.state[p].items():
            same = value == resumed.state[q][key]
            assert same.all() if isinstance(same, torch.Tensor) else same


def test_loading_needs_the_same_groups_and_takes_the_weights_where_it_has_no_masters() -> None:
    model = net(torch.bfloat16)
    optimizer = sgd(model.parameters())
    masters = Masters(optimizer)
    backward(model)
    optimizer.step()
    groups, before = optimizer.param_groups[0]["params"], copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    assert optimizer.param_groups[0]["params"] is groups
    after = optimizer.state_dict()
    for i, state in after["state"].items():
        assert torch.equal(state["momentum_buffer"], before["state"][i]["momentum_buffer"])
        assert torch.equal(after["masters"][i], before["masters"][i])
    p = next(model.parameters())
    plain = sgd(net(torch.float32).parameters()).state_dict()
    with torch.no_grad():
        p.fill_(3.0)
    optimizer.load_state_dict(plain)
    assert not optimizer.state
    assert torch.equal(masters.of(p), torch.full(p.shape, 3.0))
    with torch.no_grad():
        p.fill_(5.0)
    masters.refresh()
    assert torch.equal(masters.of(p), torch.full(p.shape, 5.0))


def test_masters_given_in_the_middle_of_training_widen_the_state() -> None:
    model = net(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    backward(model)
    optimizer.step()
    p = next(model.parameters())
    moment = optimizer.state[p]["exp_avg"].clone()
    assert moment.dtype == torch.bfloat16
    masters = Masters(optimizer)
    assert torch.equal(optimizer.state[p]["exp_avg"], moment.float())
    before = masters.of(p).clone()
    backward(model, 1)
    optimizer.step()
    assert not torch.equal(masters.of(p), before)


def test_what_cannot_be_is_refused() -> None:
    model = net(torch.bfloat16)
    optimizer = sgd(model.parameters())
    assert Masters.attached_to(optimizer) is None
    masters = Masters(optimizer)
    assert Masters.attached_to(optimizer) is masters
    with pytest.raises(ValueError, match="this SGD has masters already"):
        Masters(optimizer)
    for how in [{"closure": lambda: 0.0}, {}]:
        with pytest.raises(ValueError, match=r"SGD.step\(closure\) cannot step masters"):
            optimizer.step(*([] if how else [lambda: 0.0]), **how)
    optimizer.step(closure=None)
    with pytest.raises(ValueError, match="max_norm=-1 must be above 0, or 0 for no clipping"):
        precision.step(optimizer, max_norm=-1)


def test_masters_weigh_what_the_table_says_and_go_with_their_optimizer() -> None:
    model = net(torch.bfloat16)
    count = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    masters = Masters(optimizer)
    backward(model)
    optimizer.step()
    moments = [s[key] for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    by_category = optimizer.tensors_by_category()  # type: ignore[attr-defined]
    states = model_states(count)
    assert sum(t.nbytes for t in (*moments, *by_category["optimizer"])) == states.optimizer == 12 * count
    assert sum(p.nbytes for p in model.parameters()) == states.parameters
    assert sum(p.grad.nbytes for p in model.parameters() if p.grad is not None) == states.gradients
    gone, first = weakref.ref(masters), weakref.ref(masters.of(next(model.parameters())))
    gc.disable()
    try:
        del optimizer, masters, moments, by_category
        assert gone() is None  # and without a garbage collection
        assert first() is None
    finally:
        gc.enable()


# --- steps -----------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [1e-3, 0.5, 1e3])
@pytest.mark.parametrize("scaled", [False, True])
def test_clipping_is_that_of_torch(max_norm: float, scaled: bool) -> None:
    """Three steps in float64; with a scaler gradients carry 2^16, later 2^17, and the result is the same."""
    model, oracle = net(D), net(D)
    optimizer, plain = sgd(model.parameters()), sgd(oracle.parameters())
    scaler = LossScaler(growth_interval=2) if scaled else None
    start = weights(model)
    for i in range(3):
        optimizer.zero_grad()
        plain.zero_grad()
        backward(model, i, scaler.scale if scaler else 1.0)
        backward(oracle, i)
        wanted = nn.utils.clip_grad_norm_(oracle.parameters(), max_norm)
        result = precision.step(optimizer, scaler=scaler, max_norm=max_norm)
        plain.step()
        assert result.stepped
        assert result.norm is not None
        assert distance(result.norm, wanted) < 1e-12
        assert result.scale == ([65536, 65536, 131072][i] if scaled else 1)
    assert distance(weights(model) - start, weights(oracle) - start) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masters_get_unscaled_and_clipped_gradients_in_float32(dtype: torch.dtype) -> None:
    model = net(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    masters = Masters(optimizer)
    start = [masters.of(p).clone() for p in model.parameters()]
    scaler = LossScaler(initial_scale=1024.0)
    backward(model, scale=scaler.scale)
    carried = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    wide = [g.double() / 1024 for g in carried]
    norm = torch.cat([g.flatten() for g in wide]).norm()
    result = precision.step(optimizer, scaler=scaler, max_norm=0.1)
    assert result.norm is not None
    assert distance(result.norm, norm) < 1e-6
    for p, before, g, was in zip(model.parameters(), start, wide, carried, strict=True):
        assert float((before - masters.of(p) - g * 0.1 / (norm + 1e-6)).norm()) < 1e-6
        assert p.grad is not None
        assert torch.equal(p.grad, was)  # left as they came
    assert 0.099 < math.sqrt(sum(float((b - masters.of(p)).square().sum()) for p, b in
                                 zip(model.parameters(), start, strict=True))) < 0.101  # fmt: skip


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("wide", [False, True])
def test_a_skipped_step_leaves_everything_as_it_was(bad: float, wide: bool) -> None:
    model = net(torch.float32 if wide else torch.float16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if not wide:
        Masters(optimizer)
    scaler = LossScaler(initial_scale=16.0, hysteresis=1)
    backward(model, scale=16.0)
    assert precision.step(optimizer, scaler=scaler, max_norm=1.0).stepped
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    attached = Masters.attached_to(optimizer)
    masters = [attached.of(p).detach().clone() for p in model.parameters()] if attached else []
    backward(model, 1)
    last = list(model.parameters())[-1]
    assert last.grad is not None
    last.grad[1] = bad
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    result = precision.step(optimizer, scaler=scaler, max_norm=1.0)
    assert (result.stepped, result.norm, result.scale) == (False, None, 16.0)
    assert (scaler.scale, scaler.skipped) == (8.0, 1)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[0][name])
    for i, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, before[1][i][key]) for key, value in state.items())
    if attached:
        assert all(torch.equal(attached.of(p), m) for p, m in zip(model.parameters(), masters, strict=True))
    for p, g in zip(model.parameters(), gradients, strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad.nan_to_num(), g.nan_to_num())
    optimizer.zero_grad()
    backward(model, 1, scaler.scale)
    assert precision.step(optimizer, scaler=scaler, max_norm=1.0).stepped
    assert not torch.equal(next(model.parameters()), next(iter(before[0].values())))


def test_large_but_finite_gradients_are_no_overflow() -> None:
    """The squares of 60000 are beyond fp16, and those of 1e30 beyond float32: the elements are not."""
    for dtype, value in [(torch.float16, 6e4), (torch.bfloat16, 1e30)]:
        p = nn.Parameter(torch.zeros(1000, dtype=dtype))
        empty = nn.Parameter(torch.zeros(0, dtype=dtype))
        optimizer = torch.optim.SGD([p, empty], lr=1.0)
        Masters(optimizer)
        p.grad, empty.grad = torch.full_like(p, value), torch.zeros_like(empty)
        assert precision.step(optimizer, scaler=LossScaler(65536.0)).stepped
        assert p[0] != 0


def test_without_scaler_and_clipping_gradients_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net(torch.float32)
    optimizer = sgd(model.parameters())
    backward(model)
    optimizer.step()
    before = weights(model)
    monkeypatch.setattr(torch, "_foreach_norm", None)
    monkeypatch.setattr(torch, "_foreach_mul_", None)
    result = precision.step(optimizer)
    assert (result.stepped, result.norm, result.scale) == (True, None, 1.0)
    assert not torch.equal(weights(model), before)


# --- ranks -----------------------------------------------------------------------------------


def overflow_on_one(
    dtype: torch.dtype, agree: bool, where: int
) -> tuple[list[bool], list[torch.Tensor], float]:
    """Three steps, of which the second overflows on rank `where` alone. What each did, and the weights."""
    axis = Mesh(Layout(dp=2)).dp
    model = net(dtype)
    optimizer = sgd(model.parameters())
    if dtype == torch.float16:
        Masters(optimizer)
    scaler = LossScaler(initial_scale=4.0, hysteresis=1)
    stepped = []
    for i in range(3):
        optimizer.zero_grad()
        backward(model, i, scaler.scale)
        if i == 1 and axis.rank == where:
            next(model.parameters()).grad[2, 3] = math.inf  # type: ignore[index]
        stepped.append(precision.step(optimizer, (axis,) if agree else (), scaler=scaler).stepped)
    return stepped, [p.detach() for p in model.parameters()], scaler.scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("where", [0, 1])
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    pair: hpnb.Ranks, dtype: torch.dtype, where: int
) -> None:
    (a, weights_a, scale_a), (b, weights_b, scale_b) = pair.run(overflow_on_one, dtype, True, where)
    assert a == b == [True, False, True]
    assert scale_a == scale_b == 2.0
    assert all(torch.equal(p, q) for p, q in zip(weights_a, weights_b, strict=True))


def test_ranks_that_agree_with_nobody_drift_apart(pair: hpnb.Ranks) -> None:
    found = pair.run(overflow_on_one, torch.float32, False, 1)
    assert [stepped for stepped, _, _ in found] == [[True] * 3, [True, False, True]]
    assert [scale for _, _, scale in found] == [4.0, 2.0]
    assert all(distance(p, q) > 1e-3 for p, q in zip(found[0][1], found[1][1], strict=True))


def messages() -> list[int]:
    """Bytes that leave this rank for a step: plain, clipped, scaled, scaled on an axis of one rank."""
    mesh = Mesh(Layout(dp=2))
    model = net(torch.float32)
    optimizer = sgd(model.parameters())
    backward(model)
    found = []
    for axes, how in [
        ((mesh.dp,), {}),
        ((mesh.dp,), {"scaler": LossScaler()}),
        ((mesh.pp, mesh.tp), {"scaler": LossScaler(), "max_norm": 1.0}),
    ]:
        with hpnb.record.traffic() as t:
            precision.step(optimizer, axes, **how)  # type: ignore[arg-type]
        found.append(int(t.total))
    return found


def test_agreement_is_one_small_message_an_axis(pair: hpnb.Ranks) -> None:
    assert pair.run(messages) == [[0, 4, 0], [0, 4, 0]]


def clip_what_is_cut(scaled: bool) -> tuple[float, float, float]:
    """A (4, 6) weight cut along tp and a bias that both ranks hold: norm and step beside one process's."""
    axis = Mesh(Layout(tp=2)).tp
    torch.manual_seed(5)
    w, b = torch.randn(4, 6, dtype=D), torch.randn(4, dtype=D)
    gw, gb = torch.randn(4, 6, dtype=D), torch.randn(4, dtype=D)
    whole = [nn.Parameter(w.clone()), nn.Parameter(b.clone())]
    whole[0].grad, whole[1].grad = gw.clone(), gb.clone()
    wanted = nn.utils.clip_grad_norm_(whole, 0.7)
    sgd(whole).step()

    rows = slice(2 * axis.rank, 2 * axis.rank + 2)
    part, bias = nn.Parameter(w[rows].clone()), nn.Parameter(b.clone())
    set_placement(part, Placement("w", (4, 6), (Cut("tp", 0, ((rows.start, rows.stop),)),)))
    scaler = LossScaler(256.0) if scaled else None
    scale = scaler.scale if scaler else 1.0
    part.grad, bias.grad = gw[rows] * scale, gb * scale
    result = precision.step(sgd([part, bias]), (axis,), scaler=scaler, max_norm=0.7)
    assert result.norm is not None
    return distance(result.norm, wanted), distance(part, whole[0][rows]), distance(bias, whole[1])


@pytest.mark.parametrize("scaled", [False, True])
def test_a_cut_gradient_counts_once(pair: hpnb.Ranks, scaled: bool) -> None:
    for off in pair.run(clip_what_is_cut, scaled):
        assert max(off) < 1e-12


def step_without_waiting(how: dict[str, Any]) -> bool:
    """Whether masters on this rank's GPU are stepped and clipped while the host may not wait."""
    model = net(torch.bfloat16).to(hpnb.device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **how)
    masters = Masters(optimizer)
    for i in range(3):
        optimizer.zero_grad()
        backward(model, i)
        before = masters.of(next(model.parameters())).clone()
        torch.cuda.set_sync_debug_mode("error")
        try:
            precision.step(optimizer, max_norm=0.1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not torch.equal(before, masters.of(next(model.parameters())))
    return True


@pytest.mark.gpu
@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": True}])
def test_on_a_gpu_a_clipped_step_does_not_wait_for_the_device(how: dict[str, Any]) -> None:
    assert hpnb.launch(step_without_waiting, how, ranks=2, timeout=120) == [True, True]


def test_masters_follow_weights_that_others_write_and_keep_their_digits() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    masters = Masters(optimizer)
    for _ in range(3):  # masters now know more than the weights
        model.zero_grad()
        model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    known = masters.of(model.weight).clone()
    assert not torch.equal(known, model.weight.float())
    with torch.no_grad():
        model.weight[0].fill_(5.0)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.equal(model.weight[0], torch.full((4,), 5.0, dtype=torch.bfloat16))
    assert torch.equal(masters.of(model.weight)[1:], known[1:])

"""Every schedule computes what one process computes: loss, all gradients, all weights, in float64."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from rank_pools import gpu_ranks
from torch import nn

import hpnb
from hpnb import Layout, Mesh
from hpnb.grad_norm import total_norm
from hpnb.pipeline_parallel import Builder, Schedule, full_state_dict, schedules
from hpnb.pipeline_parallel.microbatches import split_batch

HIDDEN, TOKENS, CLASSES, LAYERS = 6, 3, 5, 8
STEPS = 2
EXACT = 1e-12


# --- a model whose stages pass tensors, tuples and dicts --------------------------------------------------


class Block(nn.Module):
    """A residual block; `form` is what it passes on beside the hidden states."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)
        self.scale = nn.Parameter(torch.ones(HIDDEN))
        self.form = form

    def forward(self, given: Any) -> Any:
        x, mask = (
            given.values()
            if isinstance(given, dict)
            else given
            if isinstance(given, tuple)
            else (given, None)
        )
        x = x + self.scale * self.down(F.gelu(self.up(self.norm(x))))
        if mask is not None:
            x = x * mask
        if self.form == "tuple":
            return x, torch.ones_like(x[:, :, :1], requires_grad=False)
        if self.form == "dict":
            return {"x": x, "mask": None if mask is None else mask.detach()}
        return x


class Head(nn.Linear):
    def forward(self, given: Any) -> torch.Tensor:
        x = given["x"] if isinstance(given, dict) else given[0] if isinstance(given, tuple) else given
        return super().forward(x).transpose(1, 2)  # (B, classes, s): a view


def model(layers: int = LAYERS) -> nn.Sequential:
    torch.manual_seed(0)
    forms = itertools.cycle(["tensor", "tuple", "dict"])
    blocks = [Block(form) for form, _ in zip(forms, range(layers - 2), strict=False)]
    found = nn.Sequential(nn.Linear(4, HIDDEN), *blocks, Head(HIDDEN, CLASSES)).double()
    for p in found.parameters():  # nothing at its special start
        p.data += 0.1 * torch.randn_like(p)
    return found


def batch(samples: int, seed: int) -> dict[str, torch.Tensor]:
    """Samples that differ, with unequally many targets; the third sample has none."""
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, TOKENS, 4, generator=made, dtype=torch.float64)
    labels = torch.randint(0, CLASSES, (samples, TOKENS), generator=made)
    labels[torch.rand(samples, TOKENS, generator=made) < 0.3] = -100
    labels[0, 0] = 1
    labels[2 % samples] = -100 if samples > 2 else labels[2 % samples]
    return {"x": x, "labels": labels}


def mean_loss(outputs: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(outputs, inputs["labels"])


def pair_loss(outputs: torch.Tensor, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts for itself, and something else than targets: each weighs its label."""
    weights = torch.arange(1, CLASSES + 1, dtype=outputs.dtype, device=outputs.device)
    valid = inputs["labels"].clamp(min=0)
    counted = weights[valid] * (inputs["labels"] >= 0)
    return F.cross_entropy(outputs, inputs["labels"], weights, reduction="sum"), counted.sum()


LOSSES = {"mean": mean_loss, "pair": pair_loss}


Pools = Callable[[int], hpnb.Ranks]


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    """A pool of so many ranks, for all tests that leave it in order."""
    with ExitStack() as stack:
        yield cache(lambda ranks: stack.enter_context(hpnb.Ranks(ranks, device="cpu", timeout=120)))


# --- the oracle ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    name: str
    stages: int
    microbatches: int
    ragged: bool
    dp: int = 1
    chunks: int = 1
    loss: str = "mean"
    sink: str = "replicas"

    @property
    def pp(self) -> int:
        return self.stages // self.chunks

    def batches(self, step: int) -> list[dict[str, torch.Tensor]]:
        """One a replica."""
        sizes = [
            2 * self.microbatches + (self.ragged and self.microbatches > 1) + r * self.ragged
            for r in range(self.dp)
        ]
        return [batch(size, 100 * step + r) for r, size in enumerate(sizes)]

    def schedule(self) -> Any:
        return schedules.make(self.name, self.stages, self.microbatches, self.chunks)


Found = dict[str, Any]


def serial(case: Case) -> Found:
    """One process, the batch of all replicas, one backward."""
    alone = model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for step in range(STEPS):
        parts = case.batches(step)
        whole = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        optimizer.zero_grad()
        found = LOSSES[case.loss](alone(whole["x"]), whole)
        value = found[0] / found[1] if isinstance(found, tuple) else found
        value.backward()
        losses.append(value.item())
        gradients = {name: p.grad.clone() for name, p in alone.named_parameters() if p.grad is not None}
        optimizer.step()
    return {"losses": losses, "gradients": gradients, "weights": dict(alone.state_dict())}


def train(case: Case) -> Found | None:
    """The same on ranks: the loss as each sees it, and its parts of gradients and weights."""
    mesh = Mesh(Layout(dp=case.dp, pp=case.pp))
    pipe = hpnb.Pipeline(model(), mesh.pp, case.schedule(), LOSSES[case.loss])
    optimizer: torch.optim.Optimizer
    if case.sink == "replicas":
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.3, momentum=0.9)
        if case.dp > 1:
            pipe.gradients = hpnb.DataParallel(pipe.module, mesh.dp, bucket_mb=1e-3)
    elif case.sink in ("zero 1", "zero 2"):
        optimizer = hpnb.ZeroOptimizer(
            pipe.parameters(), torch.optim.SGD, mesh.dp, stage=int(case.sink[-1]), lr=0.3, momentum=0.9
        )
        pipe.gradients = optimizer
    else:
        hpnb.fully_shard(pipe.module, mesh.dp, units=pipe.module.units)
        pipe.gradients = hpnb.data_parallel.sink(pipe.module)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        result = pipe.step(case.batches(step)[mesh.dp.rank])
        losses.append(result.loss.item())
        gradients = {n: p.grad.cpu().clone() for n, p in pipe.named_parameters() if p.grad is not None}
        optimizer.step()
    whole = full_state_dict(pipe.module, mesh.pp, [mesh.dp])
    weights = {n: whole[n] for n, _ in pipe.named_parameters()}
    return {"losses": losses, "gradients": gradients, "weights": weights}


def run_cases(cases: list[Case]) -> list[Any]:
    found = []
    for case in cases:
        torch.distributed.barrier()
        layout = case.dp * case.pp
        assert layout == hpnb.world_size()
        found.append(train(case))
    return found


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The worst relative distance of a tensor; one that hardly moves is held to the typical norm."""
    typical = sum(float(t.norm()) for t in b.values()) / len(b)
    return max(float((a[n] - b[n]).norm()) / max(float(b[n].norm()), 1e-2 * typical) for n in b)


def compare(case: Case, found: list[Found]) -> None:
    """What the ranks found, put together, beside one process."""
    wanted = serial(case)
    for one in found:
        for a, b in zip(one["losses"], wanted["losses"], strict=True):
            assert abs(a - b) <= EXACT * abs(b), (case, a, b)
    for what in ("gradients", "weights"):
        if what == "gradients" and case.sink != "replicas":
            continue
        for replica in range(case.dp):
            together: dict[str, torch.Tensor] = {}
            for one in found[replica * case.pp : (replica + 1) * case.pp]:
                together.update(one[what])
            assert together.keys() == wanted[what].keys(), (case, what)
            assert distance(together, wanted[what]) < EXACT, (case, what, distance(together, wanted[what]))


# --- the sweep -------------------------------------------------------------------------------------------

CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "breadth-first": 2, "zb-h1": 1, "zb-h2": 1, "zb-v": 2,
          "dualpipe-v": 2}  # fmt: skip


def every_case() -> list[Case]:
    found = []
    for name, pp, m, ragged, dp in itertools.product(
        CHUNKS, (1, 2, 3, 4), (1, 2, 3, 4, 5, 8), (False, True), (1, 2)
    ):
        case = Case(name, pp * CHUNKS[name], m, ragged, dp, CHUNKS[name])
        try:
            case.schedule()
        except ValueError:
            continue  # the definition does not allow it: test_schedules
        losses, sinks = ("mean", "pair"), ("replicas", "zero 1", "zero 2", "zero 3")
        kind = random.Random(str(case))
        sink = kind.choice(sinks) if dp > 1 else "replicas"
        found.append(Case(name, case.stages, m, ragged, dp, case.chunks, kind.choice(losses), sink))
    return found


def a_sample(seed: int) -> list[Case]:
    """Every schedule on more than 2 ranks of a pipeline, and every other kind, as the seed has it."""
    every = every_case()
    random.Random(seed).shuffle(every)
    kinds: tuple[Callable[[Case], Any], ...] = (
        lambda case: case.pp > 2 and case.name,
        lambda case: (case.sink, case.pp > 1),
        lambda case: case.pp,
        lambda case: (case.ragged, case.loss),
    )
    drawn: list[Case] = []
    for kind in kinds:
        seen = set(map(kind, drawn))
        drawn += {kind(case): case for case in every if kind(case) not in seen}.values()
    return drawn


def check_cases(cases: list[Case], pools: Pools) -> None:
    by_world: dict[int, list[Case]] = {}
    for case in cases:
        by_world.setdefault(case.pp * case.dp, []).append(case)
    for world, of_world in sorted(by_world.items()):
        by_rank = pools(world).run(run_cases, of_world)
        for i, case in enumerate(of_world):
            compare(case, [found[i] for found in by_rank])


def test_every_schedule_is_one_process(pools: Pools) -> None:
    check_cases(a_sample(seed=4), pools)


@pytest.mark.slow
def test_all_of_them_are_one_process(pools: Pools) -> None:
    check_cases(every_case(), pools)


@pytest.mark.one_gpu
def test_on_gpus_every_schedule_is_one_process() -> None:
    ranks = gpu_ranks()
    cases = [case for case in every_case() if case.pp * case.dp <= ranks and case.pp > 1]
    with ExitStack() as stack:
        check_cases(
            random.Random(5).sample(cases, 12),
            cache(lambda n: stack.enter_context(hpnb.Ranks(n, device="cuda", timeout=120))),
        )


# --- what the sweep would not show -----------------------------------------------------------------------


def _swap_labels(pipe: Any) -> None:
    loss_fn = pipe.loss_fn

    def swapping(outputs: Any, inputs: Any) -> Any:
        number = next(m for m, part in enumerate(pipe.parts) if torch.equal(part["x"], inputs["x"]))
        return loss_fn(outputs, pipe.parts[(0, 2, 1)[number]])

    pipe.loss_fn = swapping


def _skip_a_weight_gradient(pipe: Any) -> None:
    weights, calls = pipe._split_backward.add_weight_gradients, itertools.count()

    def skipping(key: Any, *rest: Any) -> None:
        if next(calls) == 1:
            pipe._split_backward._queues[key].deferred.pop()
        weights(key, *rest)

    pipe._split_backward.add_weight_gradients = skipping


def _mean_of_means(pipe: Any) -> None:
    from hpnb.pipeline_parallel import loss

    loss.count_targets = lambda inputs, causal=False: 1


FAULTS = {
    "none": lambda pipe: None,
    "swap": _swap_labels,
    "skip": _skip_a_weight_gradient,
    "means": _mean_of_means,
}


def train_with(fault: str) -> Found:
    from hpnb.pipeline_parallel import loss, microbatches

    case, kept = Case("zb-h1", 2, 3, True), loss.count_targets
    mesh = Mesh(Layout(pp=2))
    pipe = hpnb.Pipeline(model(), mesh.pp, case.schedule(), mean_loss)
    (given,) = case.batches(0)
    pipe.parts = microbatches.split_batch(given, 3)  # type: ignore[attr-defined]
    FAULTS[fault](pipe)
    try:
        value = pipe.step(given).loss.item()
    finally:
        loss.count_targets = kept
    return {"loss": value, "gradients": {n: p.grad for n, p in pipe.named_parameters()}}


def test_a_fault_is_seen(pools: Pools) -> None:
    case = Case("zb-h1", 2, 3, True)
    alone = model()
    (given,) = case.batches(0)
    value = mean_loss(alone(given["x"]), given)
    value.backward()
    wanted = {name: p.grad for name, p in alone.named_parameters()}
    pool = pools(2)
    for fault in FAULTS:
        found = pool.run(train_with, fault)
        together = {**found[0]["gradients"], **found[1]["gradients"]}
        if fault == "none":
            assert distance(together, wanted) < EXACT
        else:
            assert distance(together, wanted) > 1e-3, fault


def _vit_loss(outputs: Any, inputs: Any) -> torch.Tensor:
    return F.cross_entropy(outputs.logits, inputs["labels"])


def _pictures(samples: int, seed: int = 0) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    pixels = torch.randn(samples, 3, 32, 32, generator=made, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.randint(0, 3, (samples,), generator=made)}


def _vit(checkpoints: bool) -> Any:
    size = hpnb.models.ViTSize(hidden=32, layers=5, heads=4, mlp=64, patch=8, image=32)
    built = hpnb.models.vit(size, classes=3, seed=0).double().train()
    if checkpoints:
        built.gradient_checkpointing_enable()
    return built


def train_vit(
    name: str, chunks: int, cut: Any, checkpoints: bool
) -> tuple[float, dict[str, Any], dict[str, Any]]:
    mesh = Mesh(Layout(pp=2))
    pipe = hpnb.Pipeline(
        _vit(checkpoints),
        mesh.pp,
        schedules.make(name, 2 * chunks, 4, chunks),
        _vit_loss,
        cut=cut,
        example=_pictures(8),
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        optimizer.zero_grad()
        result = pipe.step(_pictures(9, step))
        optimizer.step()
    outputs = result.outputs
    shape = None if outputs is None else tuple(outputs.logits.shape)
    return (
        result.loss.item(),
        full_state_dict(pipe.module, mesh.pp),
        {"outputs": shape, "stages": pipe.stages},
    )


@cache
def serial_vit() -> tuple[float, dict[str, Any]]:
    alone = _vit(False)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        optimizer.zero_grad()
        given = _pictures(9, step)
        loss = _vit_loss(alone(pixel_values=given["pixel_values"]), given)
        loss.backward()
        optimizer.step()
    return loss.item(), alone.state_dict()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize(
    ("schedule", "cut"), list(zip(CHUNKS, itertools.cycle(["uniform", "parameters", "flops", "time"])))
)
def test_a_transformers_vit_under_every_schedule_with_and_without_checkpoints(
    pools: Pools, schedule: str, cut: Any, checkpoints: bool
) -> None:
    loss, wanted = serial_vit()
    chunks = CHUNKS[schedule]
    for value, weights, told in pools(2).run(train_vit, schedule, chunks, cut, checkpoints):
        assert abs(value - loss) < EXACT
        assert distance(weights, wanted) < EXACT
        assert told["outputs"] == ((9, 3) if 2 * chunks - 1 in told["stages"] else None)
        _vit(False).load_state_dict(weights)  # strict


def more(what: str) -> Any:
    """What is tried on two ranks, by name."""
    mesh = Mesh(Layout(pp=2))
    schedule = schedules.make("1f1b", 2, 3)
    pipe = hpnb.Pipeline(model(), mesh.pp, schedule, mean_loss)
    if what == "evaluate":
        before = pipe.step(batch(7, 0), forward_only=True)
        assert all(p.grad is None for p in pipe.parameters())
        pipe.step(batch(7, 0))
        after = pipe.step(batch(7, 0), forward_only=True)
        assert after.loss == before.loss
        assert all(p.grad is not None for p in pipe.parameters())
        return before.loss.item(), before.outputs
    if what == "lengths":  # padded to the longest: another shape in every step
        found = []
        for tokens in (2, 5, 3, 5, 2):
            given = batch(7, tokens)
            given = {key: value[:, :1].repeat_interleave(tokens, 1) for key, value in given.items()}
            found.append(pipe.step(given).loss.item())
        return found
    if what == "accumulate":
        for step in range(3):
            pipe.step(batch(7, step), reduce=step == 2, scale=1 / 3)
        return {n: p.grad for n, p in pipe.named_parameters()}
    if what == "traffic":
        pipe.step(batch(7, 0))
        with hpnb.record.traffic() as counted:
            pipe.step(batch(7, 0))
        return counted.bytes["pp"]
    if what == "timeline":
        timeline = pipe.step(batch(7, 0)).timeline
        return timeline.source, [
            (e.rank, e.stage, e.op, e.microbatch) for e in timeline.events if e.is_compute
        ]
    raise AssertionError(what)


def test_evaluation_lengths_accumulation_traffic_and_timeline(pools: Pools) -> None:
    alone = model()
    pool = pools(2)
    given = batch(7, 0)
    outputs = alone(given["x"])
    for rank, (value, found) in enumerate(pool.run(more, "evaluate")):
        assert abs(value - mean_loss(outputs, given).item()) < EXACT
        assert found is None if rank == 0 else torch.allclose(found, outputs, rtol=EXACT)

    for tokens, value in zip((2, 5, 3, 5, 2), pool.run(more, "lengths")[0], strict=True):
        given = {k: v[:, :1].repeat_interleave(tokens, 1) for k, v in batch(7, tokens).items()}
        assert abs(value - mean_loss(alone(given["x"]), given).item()) < EXACT

    for step in range(3):
        (mean_loss(alone(batch(7, step)["x"]), batch(7, step)) / 3).backward()
    found = pool.run(more, "accumulate")
    assert distance({**found[0], **found[1]}, {n: p.grad for n, p in alone.named_parameters()}) < EXACT

    # Between layers 3 and 4 hidden states pass, and a mask of one value a token that needs no gradient;
    # the loss goes to the other rank as a ring would send it, half of 8 bytes.
    hidden = 8 * 7 * TOKENS * HIDDEN
    passes = "tuple" if model()[3].form == "tuple" else model()[3].form
    mask = {"tuple": 8 * 7 * TOKENS, "dict": 8 * 7 * TOKENS, "tensor": 0}[passes]
    assert pool.run(more, "traffic") == [hidden + mask + 4, hidden + 4]

    for source, events in pool.run(more, "timeline"):
        assert source == ("measured" if hpnb.ranks.usable_cores() >= 2 else "replayed from measured CPU time")
        rows = enumerate(schedules.make("1f1b", 2, 3).actions)
        wanted = [(r, a.stage, a.op, a.microbatch) for r, row in rows for a in row]
        assert sorted(events) == sorted(wanted)


def replayed() -> Any:
    mesh, schedule = Mesh(Layout(pp=hpnb.world_size())), schedules.make("1f1b", hpnb.world_size(), 8)
    pipe = hpnb.Pipeline(model(), mesh.pp, schedule, mean_loss)
    with mock.patch("hpnb.pipeline_parallel.executor.usable_cores", return_value=2):
        timeline = pipe.step(batch(16, 0)).timeline
    return timeline.source, [timeline.peak_in_flight(rank) for rank in range(mesh.pp.size)]


def test_more_ranks_than_cores_are_replayed() -> None:
    for source, in_flight in hpnb.launch(replayed, ranks=4, device="cpu", timeout=60):
        assert source == "replayed from measured CPU time"
        assert in_flight == [4, 3, 2, 1]


class Twice(nn.Module):
    """A weight that is used by the first and by the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def tied_model() -> nn.Sequential:
    torch.manual_seed(1)
    found = nn.Sequential(
        Twice(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), Twice()
    ).double()
    found[4].weight = found[0].weight
    return found


def squares(outputs: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    return (outputs - inputs).square().mean()


def train_tied(name: str, chunks: int) -> tuple[dict[str, Any], float]:
    mesh = Mesh(Layout(pp=2))
    torch.manual_seed(mesh.pp.rank)  # copies that start apart are made equal
    built = tied_model()
    if mesh.pp.rank:
        built[4].weight.data.add_(1.0)
    pipe = hpnb.Pipeline(built, mesh.pp, schedules.make(name, 2 * chunks, 4, chunks), squares)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for seed in range(2):
        optimizer.zero_grad()
        made = torch.Generator().manual_seed(seed)
        pipe.step(torch.randn(9, HIDDEN, generator=made, dtype=torch.float64))
        norm = total_norm(pipe.parameters(), [mesh.pp]).item()
        optimizer.step()
    return full_state_dict(pipe.module, mesh.pp), norm


def test_a_weight_with_two_homes_is_one_weight(pools: Pools) -> None:
    alone = tied_model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for seed in range(2):
        optimizer.zero_grad()
        x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        squares(alone(x), x).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in alone.parameters()]).item()
        optimizer.step()
    pool = pools(2)
    for name, chunks in (("1f1b", 1), ("zb-h1", 1), ("zb-v", 2), ("interleaved", 2)):
        for weights, counted in pool.run(train_tied, name, chunks):
            assert distance(weights, alone.state_dict()) < EXACT, name
            assert abs(counted - norm) < EXACT * norm, name


def refuse(what: str) -> str:
    mesh, schedule = Mesh(Layout(pp=2)), schedules.make("1f1b", 2, 4)
    loss: Any = mean_loss
    if what == "loss":
        loss = lambda outputs, inputs: outputs  # noqa: E731
    elif what == "ranks":
        schedule = schedules.make("1f1b", 3, 4)
    elif what == "stages":
        schedule = schedules.make("interleaved", 20, 4, 10)
    try:
        pipe = hpnb.Pipeline(model(), mesh.pp, schedule, loss)
        if what == "sink":
            pipe.gradients = lambda module: 3
        if what != "loss":
            pipe.step(batch(3, 0))
    except ValueError as error:
        return str(error)
    pipe.step(batch(8, 0))
    return ""


def test_what_cannot_work_is_said_in_a_sentence() -> None:
    with hpnb.Ranks(2, device="cpu", timeout=60) as pool:
        for what, words in (
            ("batch", "3 samples cannot be split into 4 microbatches"),
            ("ranks", "for 3 ranks, and axis pp has 2; make it with stages=2"),
            ("stages", "20 stages need 20 layers or more, and there are 8"),
            ("sink", "this int does not reduce gradients"),
        ):
            found = pool.run(refuse, what)
            assert words in found[1], (what, found)
        with pytest.raises(hpnb.RankError, match="return a scalar"):  # one rank fails, and takes all with it
            pool.run(refuse, "loss")


WRITTEN = {
    "out of order": ["0F0 0F1 0F2 0B2 0B0 0B1", "1F2 1B2 1F0 1B0 1F1 1B1"],
    "I and W beside B": ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1I0 1F1 1I1 1W1 1F2 1I2 1W2 1W0"],
    "anywhere": [
        "0F0 0F1 0F2 3F0 3F1 3F2 3B0 3B2 3B1 0B1 0B0 0B2",
        "1F0 2F0 1F1 2F1 1F2 2F2 2B0 2B2 2I1 1I1 1W1 2W1 1B0 1B2",
    ],
}


def train_written(rows: list[str], sink: bool) -> dict[str, Any]:
    mesh = Mesh(Layout(dp=hpnb.world_size() // 2, pp=2))
    pipe = hpnb.Pipeline(model(), mesh.pp, Schedule(rows), pair_loss)
    if sink:
        pipe.gradients = lambda module: hpnb.DataParallel(module, mesh.dp, average=False)
    for _ in range(2):
        pipe.zero_grad()
        pipe.step(batch(7, mesh.dp.rank))
    return {n: p.grad.cpu() for n, p in pipe.named_parameters()}


def check_written(device: str) -> None:
    for ranks in (2, 4):
        alone = model()
        parts = [batch(7, replica) for replica in range(ranks // 2)]
        whole = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        total, count = pair_loss(alone(whole["x"]), whole)
        (total / count).backward()
        wanted = {n: p.grad for n, p in alone.named_parameters()}
        with hpnb.Ranks(ranks, device=device, timeout=60) as pool:
            for name, rows in WRITTEN.items():
                found = pool.run(train_written, rows, ranks > 2)
                for a, b in (found[i : i + 2] for i in range(0, ranks, 2)):
                    assert distance({**a, **b}, wanted) < EXACT, (name, ranks)


def test_a_list_that_somebody_wrote() -> None:
    check_written("cpu")


def build_and_train(on_meta: bool) -> tuple[dict[str, Any], int]:
    mesh = Mesh(Layout(pp=2))

    def layer(i: int) -> nn.Module:
        with torch.device("meta" if on_meta else "cpu"):
            return nn.Linear(4 if i == 0 else HIDDEN, HIDDEN, dtype=torch.float64)

    builder = Builder(layer, 6)
    pipe = hpnb.Pipeline(builder, mesh.pp, schedules.make("1f1b", 2, 3), squares_of)
    if on_meta:
        full = {f"layers.{i}.{n}": v for i in range(6) for n, v in drawn(i).state_dict().items()}
        hpnb.placement.load_full_state_dict(pipe.module, full, strict=False)
    pipe.step(batch(7, 0)["x"])
    return {n: p.grad for n, p in pipe.named_parameters()}, sum(p.numel() for p in pipe.parameters())


def drawn(i: int) -> nn.Module:
    torch.manual_seed(i)  # as a Builder draws
    return nn.Linear(4 if i == 0 else HIDDEN, HIDDEN, dtype=torch.float64)


def squares_of(outputs: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    return outputs.square().mean()


def test_a_model_that_no_rank_has_whole(pools: Pools) -> None:
    alone = nn.Sequential(*(drawn(i) for i in range(6)))
    squares_of(alone(batch(7, 0)["x"]), torch.empty(0)).backward()
    wanted = {f"layers.{n}": p.grad for n, p in alone.named_parameters()}
    pool = pools(2)
    for on_meta in (False, True):
        (a, here), (b, there) = pool.run(build_and_train, on_meta)
        assert distance({**a, **b}, wanted) < EXACT
        assert here + there == sum(p.numel() for p in alone.parameters())


@pytest.mark.one_gpu
def test_on_gpus_a_list_that_somebody_wrote() -> None:
    if gpu_ranks() < 4:
        pytest.skip("the list is one of 4 ranks")
    check_written("cuda")


def no_waiting() -> float:
    mesh = Mesh(Layout(pp=hpnb.world_size()))
    pipe = hpnb.Pipeline(model(), mesh.pp, schedules.make("zb-h1", mesh.pp.size, 8), pair_loss)
    given = {key: value.to(hpnb.device()) for key, value in batch(16, 0).items()}
    pipe.step(given)
    pipe.step(given)
    assert pipe._queues.symmetric.queues or hpnb.world_size() == 1, "transfers go from memory to memory"
    with hpnb.record.traffic() as counted:
        pipe.step(given)
    assert counted.bytes["pp"] > 8 * 16 * TOKENS * HIDDEN  # hidden states, or their gradients
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # the host must not wait for the device
    try:
        result = pipe.step(given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return result.loss.item()


@pytest.mark.gpu
def test_on_gpus_the_host_does_not_wait() -> None:
    total, count = pair_loss(model()(batch(16, 0)["x"]), batch(16, 0))
    for value in hpnb.launch(no_waiting, ranks=2, device="cuda", timeout=60):
        assert abs(value - (total / count).item()) < 1e-12


# --- traps that it once fell into ------------------------------------------------------------------------


class Sometimes(nn.Module):
    """Half of it is used only by microbatches whose first number is positive."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.always, self.rare = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.always(x) + (self.rare(x) if x[0, 0, 0] > 0 else 0)


ACCUMULATED = ((False, True), (True, False, True))  # whether to reduce, step by step, before a look


def reduced_by_hand(kind: str, pair: bool, plan: tuple[bool, ...], tied: bool) -> dict[str, Any]:
    """Gradients after several steps without zero_grad; with `tied`, of a weight with homes on two ranks."""
    mesh = Mesh(Layout(dp=2, pp=2))
    built = tied_model() if tied else nn.Sequential(Sometimes(), *model()).double()
    loss: Any = (lambda y, x: ((y - x).square().sum(), len(x))) if tied else pair_loss if pair else mean_loss
    pipe = hpnb.Pipeline(built, mesh.pp, schedules.make("zb-h1", 2, 3), loss)
    if kind == "zero 3":
        hpnb.fully_shard(pipe.module, mesh.dp, units=pipe.module.units, find_unused_parameters=not tied)
        pipe.gradients = hpnb.data_parallel.sink(pipe.module)
    else:
        options = {"average": kind == "average", "find_unused_parameters": True}
        pipe.gradients = hpnb.DataParallel(pipe.module, mesh.dp, **options)
    for step, reduce in enumerate(plan):
        given = batch(7 + mesh.dp.rank, 10 * step + mesh.dp.rank)
        pipe.step(given["x"].repeat(1, 1, 2)[:, 0, :HIDDEN] if tied else given, reduce=reduce)
    for p in pipe.parameters():
        p.data.zero_() if p.grad is None else p.data.copy_(p.grad)
    return full_state_dict(pipe.module, mesh.pp, [mesh.dp])


def by_one_process(pair: bool, plan: tuple[bool, ...], tied: bool) -> dict[str, Any]:
    alone = tied_model() if tied else nn.Sequential(Sometimes(), *model()).double()
    for step in range(len(plan)):
        total = torch.zeros((), dtype=torch.float64)
        count: Any = 0
        for replica in range(2):
            given = batch(7 + replica, 10 * step + replica)
            for one in split_batch(given, 3):
                if tied:
                    x = one["x"].repeat(1, 1, 2)[:, 0, :HIDDEN]
                    total, count = total + (alone(x) - x).square().sum(), count + len(x)
                    continue
                found = pair_loss(alone(one["x"]), one)
                if not pair:
                    valid = (one["labels"] >= 0).sum()
                    found = F.cross_entropy(alone(one["x"]), one["labels"], reduction="sum"), valid
                total, count = total + found[0], count + found[1]
        (total / count).backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in alone.named_parameters()}


@pytest.mark.sampled(4, cover=True)
@pytest.mark.parametrize("plan", ACCUMULATED, ids=str)
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("kind", ["average", "sum", "zero 3"])
def test_accumulated_and_corrected_gradients_under_every_sink(
    pools: Pools, kind: str, pair: bool, plan: tuple[bool, ...]
) -> None:
    found = pools(4).run(reduced_by_hand, kind, pair, plan, False)[0]
    assert distance(found, by_one_process(pair, plan, False)) < EXACT


@pytest.mark.sampled(2, cover=True)
@pytest.mark.parametrize("plan", ACCUMULATED, ids=str)
@pytest.mark.parametrize("kind", ["average", "zero 3"])
def test_accumulated_tied_gradients(pools: Pools, kind: str, plan: tuple[bool, ...]) -> None:
    found = pools(4).run(reduced_by_hand, kind, True, plan, True)[0]
    assert distance(found, by_one_process(True, plan, True)) < EXACT


class Unused(nn.Linear):
    """A layer that has a weight for another stage and does not use it."""

    shared: nn.Parameter


def partly_unused_model() -> nn.Sequential:
    """One weight in layers 0, 1 and 2, of which layer 2 makes no use."""
    torch.manual_seed(1)
    built = nn.Sequential(Twice(), Twice(), Unused(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)).double()
    built[1].weight = built[2].shared = built[0].weight
    return built


def sum_of_squares(outputs: torch.Tensor, inputs: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (outputs - inputs).square().sum(), outputs.numel()


def train_partly_unused() -> dict[str, Any]:
    """Rank 0 has stages 0 and 2. Stage 2 ends first, and leaves the shared weight without a gradient."""
    mesh = Mesh(Layout(pp=2))
    schedule = schedules.make("breadth-first", 4, 3, 2)
    pipe = hpnb.Pipeline(partly_unused_model(), mesh.pp, schedule, sum_of_squares)
    pipe.step(batch(7, 0)["x"].repeat(1, 1, 2)[:, 0, :HIDDEN])
    for p in pipe.parameters():
        p.data.copy_(p.grad)
    return full_state_dict(pipe.module, mesh.pp)


def test_a_stage_that_leaves_a_tied_weight_unused_does_not_keep_it_uncorrected(pools: Pools) -> None:
    alone = partly_unused_model()
    x = batch(7, 0)["x"].repeat(1, 1, 2)[:, 0, :HIDDEN]
    total, count = sum_of_squares(alone(x), x)
    (total / count).backward()
    grads = {name: p.grad for name, p in alone.named_parameters(remove_duplicate=False)}
    assert distance(pools(2).run(train_partly_unused)[0], grads) < EXACT


def interrupted_capture() -> bool:
    """Whether gradients of earlier steps survive a step that ends before its first action."""
    pipe = hpnb.Pipeline(model(), Mesh(Layout(pp=2)).pp, schedules.make("1f1b", 2, 3), pair_loss)
    pipe.step(batch(7, 0))
    before = [p.grad.clone() for p in pipe.parameters() if p.grad is not None]

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    pipe._graphs = SimpleNamespace(begin_step=interrupt)  # type: ignore[assignment]
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            pipe.step(batch(7, 1))
    after = [p.grad for p in pipe.parameters() if p.grad is not None]
    return len(before) == len(after) and all(map(torch.equal, before, after))


def test_an_interrupted_capture_loses_no_gradient(pools: Pools) -> None:
    assert pools(2).run(interrupted_capture) == [True, True]


def trap(what: str) -> Any:
    mesh = Mesh(Layout(dp=2, pp=1))
    if what == "forgotten":
        pipe = hpnb.Pipeline(model(), mesh.pp, schedules.make("zb-h1", 1, 3), mean_loss)
        hpnb.DataParallel(pipe.module, mesh.dp)
        return pipe.step(batch(7, 0))
    mesh = Mesh(Layout(pp=2))
    loss: Any = pair_loss
    if what == "detached":
        loss = lambda outputs, inputs: outputs.detach().mean()  # noqa: E731
    pipe = hpnb.Pipeline(model(), mesh.pp, schedules.make("1f1b", 2, 3), loss)
    given = batch(7, 0)
    if what == "no targets":
        given["labels"][:] = -100
        pipe.loss_fn = lambda outputs, inputs: (outputs.square().sum(), outputs.numel())
    if what == "nothing counted":  # in a first step, which is nan, as it is on one process; the next is not
        pipe.loss_fn = lambda outputs, inputs: (outputs.square().sum(), 0)
        pipe.step(given)
        pipe.zero_grad()
        pipe.loss_fn = pair_loss
    pipe.step(given)
    if what == "modes":  # one rank's layers in another mode than the other's
        pipe.train(mesh.pp.rank == 0)
        pipe.step(batch(7, 1), forward_only=True)
        pipe.train()
        pipe.step(batch(7, 2))
    if what == "names":  # what is no tensor may differ from step to step
        for step in range(3):
            given = batch(7, step)
            given["input"] = given.pop("x")  # beside entries that could be it
            pipe.step({**given, "step": step, "names": ["a", "b"], "who": object()})
        return len(pipe._known_boundaries)
    return all(p.grad.isfinite().all() for p in pipe.parameters())


def test_traps() -> None:
    with hpnb.Ranks(2, device="cpu", timeout=60) as pool:
        assert pool.run(trap, "no targets") == [True, True]
        assert pool.run(trap, "modes") == [True, True]
        assert pool.run(trap, "nothing counted") == [True, True]
        assert max(pool.run(trap, "names")) == 4  # two sizes, with and without names, however many steps
        with pytest.raises(hpnb.RankError, match=r"set pipe\.gradients to it"):
            pool.run(trap, "forgotten")
        with pytest.raises(hpnb.RankError, match="the loss has no gradient"):
            pool.run(trap, "detached")


def train_with_losses(kinds: list[str], **stated: Any) -> list[tuple[float, dict[str, Any]]]:
    """Loss and gradients of steps whose loss function returns what `kinds` say, one after the other."""
    mesh, kind = Mesh(Layout(pp=2)), ""

    def loss_fn(outputs: Any, inputs: Any) -> Any:
        return LOSSES[kind](outputs, inputs)

    pipe = hpnb.Pipeline(model(), mesh.pp, schedules.make("1f1b", 2, 3), loss_fn, **stated)
    steps = []
    for kind in kinds:  # noqa: B007  # loss_fn reads it
        pipe.zero_grad()
        loss = pipe.step(batch(7, 0)).loss.item()
        steps.append((loss, {n: p.grad for n, p in pipe.named_parameters()}))
    return steps


def test_what_a_loss_returns_is_stated_or_as_in_the_first_step() -> None:
    wanted = {}
    for kind in LOSSES:
        alone, given = model(), batch(7, 0)
        result: Any = LOSSES[kind](alone(given["x"]), given)
        loss = result[0] / result[1] if isinstance(result, tuple) else result
        loss.backward()
        wanted[kind] = loss.item(), {n: p.grad for n, p in alone.named_parameters()}
    with hpnb.Ranks(2, device="cpu", timeout=20) as pool:
        for kinds, stated in (
            (["pair", "mean", "pair"], {}),
            (["mean", "pair", "mean"], {"loss_reduction": "sum_and_count"}),
            (["mean", "mean"], {"loss_reduction": "mean"}),
        ):
            first, last = pool.run(train_with_losses, kinds, **stated)
            for kind, (loss, a), (same, b) in zip(kinds, first, last, strict=True):
                assert loss == same == pytest.approx(wanted[kind][0], rel=EXACT), (kinds, kind)
                assert distance({**a, **b}, wanted[kind][1]) < EXACT, (kinds, kind)
    for kinds, stated in ((["mean", "pair"], {}), (["pair"], {"loss_reduction": "mean"})):
        with pytest.raises(hpnb.RankError, match="set loss_reduction = 'sum_and_count'"):
            hpnb.launch(train_with_losses, kinds, ranks=2, device="cpu", timeout=20, **stated)


def train_fused(fused: bool) -> dict[str, Any]:
    from hpnb.pipeline_parallel.split_backward import SplitBackward

    mesh = Mesh(Layout(dp=2, pp=2))
    pipe = hpnb.Pipeline(model(), mesh.pp, schedules.make("1f1b", 2, 3), pair_loss)
    pipe.gradients = lambda module: hpnb.DataParallel(module, mesh.dp, bucket_mb=1e-3)
    if fused:  # as on GPUs, where matmuls are large enough for it
        pipe._split_backward = SplitBackward(pipe.module.modules())
    for step in range(2):
        pipe.step(batch(7 + mesh.dp.rank, step), reduce=step == 1)
    return {n: p.grad for n, p in pipe.named_parameters()}


def test_matmuls_that_add_to_gradients_themselves_change_nothing(pools: Pools) -> None:
    pool = pools(4)
    plain, fused = pool.run(train_fused, False), pool.run(train_fused, True)
    for a, b in zip(plain, fused, strict=True):
        assert distance(a, b) < EXACT

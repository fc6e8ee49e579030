"""CUDA graphs of pipeline stages. On a CPU a capture calls the function again (`replayed_graphs.py`): slots,
static tensors, gradients, losses and fall-backs are those of a GPU. On a GPU everything is real."""

from __future__ import annotations

import gc
import itertools
import random
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import test_pipeline
import torch
import torch.nn.functional as F
from rank_pools import RankPools
from replayed_graphs import with_graphs
from test_pipeline import LOSSES, Case, distance, every_case, model
from torch import nn
from torch.utils.checkpoint import checkpoint

import hpnb
from hpnb import Layout, Mesh
from hpnb.pipeline_parallel import cuda_graphs, schedules
from hpnb.pipeline_parallel.graph_slots import assign_slots
from hpnb.pipeline_parallel.stage_graph import CudaCapture

STEPS = 5  # two that warm up, three that replay
EXACT = 1e-12
ACCUMULATING = [Case("1f1b", 2, 3, True, 1), Case("zb-h1", 1, 3, True, 2, loss="pair")]
SHARDED = [
    Case("zb-h1", 2, 3, True, 2, loss="pair", sink="zero 3"), Case("1f1b", 2, 3, False, 2, sink="zero 3"),
    Case("interleaved", 4, 4, False, 2, 2, loss="pair", sink="zero 3"),
]  # fmt: skip


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools(timeout=120)
    yield pools
    pools.close()


# --- slots -----------------------------------------------------------------------------------------------


def all_schedules() -> list[Any]:
    made = []
    for name, chunks in test_pipeline.CHUNKS.items():
        for ranks, m in itertools.product((1, 2, 4), (1, 3, 4, 8)):
            try:
                made.append(schedules.make(name, ranks * chunks, m, chunks))
            except ValueError:
                continue
    return made


def test_a_slot_has_one_microbatch_at_a_time_and_there_are_no_more_than_in_flight() -> None:
    for schedule in all_schedules():
        timeline = schedule.simulate(hpnb.pipeline_parallel.Costs(1.0, 1.0, 1.0, 0.0))
        for rank, actions in enumerate(schedule.actions):
            slots = assign_slots(actions)
            occupied: dict[int, tuple[int, int]] = {}
            last = {(a.stage, a.microbatch): a for a in actions if a.op != "F"}
            for action in actions:
                work = action.stage, action.microbatch
                if action.op == "F":
                    assert slots[work] not in occupied, (schedule.name, rank, str(action))
                    occupied[slots[work]] = work
                assert occupied[slots[work]] == work
                if last[work] is action:
                    del occupied[slots[work]]
            assert not occupied
            assert len(set(slots.values())) == timeline.peak_in_flight(rank), (schedule.name, rank)


def test_a_stage_returns_to_its_slots() -> None:
    """Each pair of a stage and a slot is captured: in 1F1B one on the last rank."""
    actions = schedules.make("1f1b", 4, 32).actions
    assert set(assign_slots(actions[3]).values()) == {0}
    assert set(assign_slots(actions[0]).values()) == {0, 1, 2, 3}


# --- every schedule, beside one process ------------------------------------------------------------------


def serial(case: Case) -> dict[str, Any]:
    alone = model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for step in range(STEPS):
        parts = case.batches(step)
        whole = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        optimizer.zero_grad()
        returned = LOSSES[case.loss](alone(whole["x"]), whole)
        value = returned[0] / returned[1] if isinstance(returned, tuple) else returned
        value.backward()
        losses.append(value.item())
        optimizer.step()
    return {"losses": losses, "weights": dict(alone.state_dict())}


def train(case: Case, graphs: bool, accumulates: bool = False) -> dict[str, Any]:
    """STEPS steps of a rank. Without graphs gradients start at zero as well, so that the same kernels run."""
    mesh = Mesh(Layout(dp=case.dp, pp=case.pp))
    on_gpu = hpnb.device().type == "cuda"
    pipe = hpnb.Pipeline(model(), mesh.pp, case.schedule(), LOSSES[case.loss], cuda_graphs=graphs and on_gpu)
    stage_graphs = with_graphs(pipe, [mesh.dp]) if graphs and not on_gpu else pipe._graphs
    pipe._split_backward.min_flops = 0.0  # as in a graph: matmuls add to gradients themselves
    optimizer: torch.optim.Optimizer = torch.optim.SGD(pipe.parameters(), lr=0.3, momentum=0.9)
    if case.dp > 1 and case.sink == "replicas":
        pipe.gradients = hpnb.DataParallel(pipe.module, mesh.dp, bucket_mb=1e-3)
    elif case.dp > 1 and case.sink == "zero 3":
        hpnb.fully_shard(pipe.module, mesh.dp, units=pipe.module.units)
        pipe.gradients = hpnb.data_parallel.sink(pipe.module)
    elif case.dp > 1:
        optimizer = hpnb.ZeroOptimizer(
            pipe.parameters(), torch.optim.SGD, mesh.dp, stage=int(case.sink[-1]), lr=0.3, momentum=0.9
        )
        pipe.gradients = optimizer
    losses, replayed = [], 0
    for step in range(STEPS):
        optimizer.zero_grad()
        for p in pipe._grad_ready._holders.values() if not graphs else ():
            p.grad = torch.zeros_like(p)
        mine = case.batches(step)[mesh.dp.rank]
        if accumulates:
            pipe.step(mine, reduce=False, scale=0.25)
        result = pipe.step(mine, scale=0.75 if accumulates else 1.0)
        losses.append(result.loss.item())
        optimizer.step()
    if stage_graphs is not None:
        assert not stage_graphs.reasons, stage_graphs.reasons
        replayed = len(stage_graphs._graphs)
    full = hpnb.pipeline_parallel.full_state_dict(pipe.module, mesh.pp, [mesh.dp])
    outputs = None if result.outputs is None else result.outputs.cpu()
    return {
        "losses": losses,
        "weights": {n: full[n].clone() for n, _ in pipe.named_parameters()},
        "graphs": replayed,
        "outputs": outputs,
    }


def both(cases: list[Case], accumulates: bool = False) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(train(case, True, accumulates), train(case, False, accumulates)) for case in cases]


def compare(case: Case, by_rank: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    wanted = serial(case)
    for graphs, eager in by_rank:
        assert graphs["graphs"] > 0, case
        assert graphs["losses"] == eager["losses"], case
        for name, weight in eager["weights"].items():
            assert torch.equal(graphs["weights"][name], weight), (case, name)
        if eager["outputs"] is not None:
            assert torch.equal(graphs["outputs"], eager["outputs"]), case
        for a, b in zip(graphs["losses"], wanted["losses"], strict=True):
            assert abs(a - b) <= EXACT * abs(b), (case, a, b)
    together = {name: w for graphs, _ in by_rank for name, w in graphs["weights"].items()}
    assert distance(together, wanted["weights"]) < EXACT, case


def some_cases(seed: int, count: int, worlds: tuple[int, ...]) -> list[Case]:
    """Every schedule at least once."""
    cases = [c for c in every_case() if c.sink != "zero 3" and c.pp * c.dp in worlds and c.microbatches > 1]
    random.Random(seed).shuffle(cases)
    first = {case.name: case for case in cases}
    return list(dict.fromkeys([*first.values(), *cases]))[:count]


def check(cases: list[Case], pools: Any, accumulates: bool = False) -> None:
    for world in sorted({case.pp * case.dp for case in cases}):
        of_world = [case for case in cases if case.pp * case.dp == world]
        by_rank = pools[world].run(both, of_world, accumulates)
        for i, case in enumerate(of_world):
            compare(case, [results[i] for results in by_rank])


def test_replayed_steps_are_eager_steps_bit_for_bit_and_one_process(pools: RankPools) -> None:
    check(some_cases(1, 9, (1, 2, 4)), pools)


def test_replayed_steps_accumulate(pools: RankPools) -> None:
    check(ACCUMULATING, pools, accumulates=True)


@pytest.mark.parametrize("accumulates", [False, True])
def test_replayed_steps_of_sharded_parameters(pools: RankPools, accumulates: bool) -> None:
    """ZeRO 3, which on GPUs needs one a rank: test_cuda_graphs_zero.py."""
    check(SHARDED, pools, accumulates)


# --- what is captured anew, and what runs eagerly --------------------------------------------------------


class Odd(nn.Module):
    """A linear layer that does one thing more."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(6, 6), kind
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.kind == "communicates":
            x = hpnb.comm.all_reduce(x, Mesh(Layout(pp=1, tp=hpnb.world_size())).tp) / hpnb.world_size()
        if self.kind == "random" and random.random() < 0.5:
            return x
        if self.kind == "raises" and torch.is_grad_enabled() and CAPTURING:
            raise RuntimeError("operation not permitted when stream is capturing")
        y: torch.Tensor = self.linear(x)
        return y if self.training else 2 * y


CAPTURING: list[bool] = []
Step = tuple[torch.Tensor, torch.Tensor]


def note_captures(stage_graphs: Any) -> None:
    """`CAPTURING` is true while one of these graphs is captured."""
    capture = stage_graphs._capture.capture

    def noted(*args: Any) -> Any:
        CAPTURING.append(True)
        try:
            return capture(*args)
        finally:
            CAPTURING.clear()

    stage_graphs._capture.capture = noted


def draw_batches(lengths: Sequence[int]) -> list[Step]:
    made = torch.Generator().manual_seed(3)
    return [
        (torch.randn(4, length, 6, generator=made), torch.randn(4, length, 6, generator=made))
        for length in lengths
    ]


def square_error(outputs: torch.Tensor, batch: Step) -> torch.Tensor:
    return (outputs - batch[1]).square().mean()


def train_odd(kind: str, lengths: Sequence[int], between: str = "") -> dict[str, Any]:
    """Steps with graphs and without, with a change `between` them: losses, gradients, warnings, captures."""
    results: dict[str, Any] = {}
    for graphs in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        axis = Mesh(Layout(pp=1, tp=hpnb.world_size())).pp
        pipe = hpnb.Pipeline(nn.Sequential(Odd(kind), nn.Linear(6, 6)), axis, "gpipe", square_error)
        made = with_graphs(pipe) if graphs else None
        if made is not None:
            note_captures(made)
        losses = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step, batch in enumerate(draw_batches(lengths)):
                pipe.zero_grad(set_to_none=step % 3 > 0)
                change(pipe, between, step)
                losses.append(pipe.step(batch, return_outputs=False).loss.item())
                for p in pipe.parameters():
                    if p.grad is not None:
                        p.data -= 0.1 * p.grad
        results["graphs" if graphs else "eager"] = losses, {n: p.grad for n, p in pipe.named_parameters()}
        results["calls"] = pipe.module.get_buffer("0.calls").item()
        if made is not None:
            results["reasons"], results["captures"] = made.reasons, len(made._capture.captured)
            results["live"] = len(made._graphs)
            results["warned"] = [str(w.message) for w in caught if "without CUDA graphs" in str(w.message)]
    return results


def waiting_loss(outputs: torch.Tensor, batch: Step) -> torch.Tensor:
    """A loss that a capture refuses."""
    if CAPTURING:
        raise RuntimeError("operation not permitted when stream is capturing")
    return square_error(outputs, batch)


def change(pipe: hpnb.Pipeline, what: str, step: int) -> None:
    if what == "loss that waits":
        pipe._loss_fn = waiting_loss
    elif what == "criterion":  # another lambda in every step, of the same code
        pipe._loss_fn = lambda outputs, batch: square_error(outputs, batch)
    elif what == "weight of the loss":
        pipe._loss_fn = lambda outputs, batch, weight=float(step > 3): weight * square_error(outputs, batch)
    elif what == "always":
        pipe._loss_fn = lambda outputs, batch, weight=float(step // 3): weight * square_error(outputs, batch)
    elif what == "eval" and step == 5:
        pipe.eval()
    elif what == "memory" and step == 5:
        for p in pipe.parameters():
            p.data = p.data.clone()
    elif what == "forget" and step == 4:
        pipe.forget()


def check_odd(results: dict[str, Any]) -> None:
    (losses, grads), (eager_losses, eager_grads) = results["graphs"], results["eager"]
    assert losses == pytest.approx(eager_losses, rel=1e-6)
    for name, grad in eager_grads.items():
        assert (grad is None) == (grads[name] is None), name
        if grad is not None:
            assert torch.allclose(grads[name], grad, atol=1e-6), name


@pytest.mark.parametrize("between", ["", "criterion", "weight of the loss", "eval", "memory", "forget"])
def test_what_changes_between_steps_is_captured_anew(pools: RankPools, between: str) -> None:
    """And only that: a criterion that is another lambda of the same code is the same."""
    results = pools[1].run(train_odd, "", [3] * 9, between)[0]
    check_odd(results)
    assert not results["reasons"], results
    slots, graphs_of_a_slot = 4, 2  # F and B
    captures = 2 if between in ("weight of the loss", "eval", "memory", "forget") else 1
    assert results["captures"] == captures * slots * graphs_of_a_slot, results
    assert results["live"] == slots


def test_an_unused_parameter_has_no_gradient_and_buffers_move_on(pools: RankPools) -> None:
    results = pools[1].run(train_odd, "", [3] * 6)[0]
    assert results["graphs"][1]["0.unused"] is None
    assert results["calls"] == 6 * 4


def test_too_many_changes_end_it(pools: RankPools) -> None:
    results = pools[1].run(train_odd, "", [3] * 3 * (cuda_graphs.MAX_RECAPTURES + 3), "always")[0]
    check_odd(results)
    assert results["reasons"].keys() == {0}
    assert "the loss function changed for the 9th time" in results["reasons"][0]
    assert results["live"] == 0


def test_each_length_is_captured_up_to_a_number_of_them(pools: RankPools) -> None:
    lengths = [1, 2] * 4 + list(range(3, 3 + cuda_graphs.MAX_FORMS)) + [cuda_graphs.MAX_FORMS + 2] * 3
    results = pools[1].run(train_odd, "", lengths)[0]
    check_odd(results)
    assert not results["reasons"]
    assert results["live"] == 2 * 4  # lengths that came three times, in each slot
    (warning,) = results["warned"]
    assert "more than 16 shapes of microbatches" in warning


@pytest.mark.parametrize(
    ("kind", "ranks", "reason"),
    [
        ("communicates", 2, "it communicates within the stage (all_reduce along tp)"),
        ("random", 1, "it draws random numbers on the CPU"),
        ("raises", 1, "Python waits there for a value of the GPU"),
    ],
)
def test_what_cannot_be_captured_runs_eagerly_and_says_why(
    pools: RankPools, kind: str, ranks: int, reason: str
) -> None:
    for results in pools[ranks].run(train_odd, kind, [3] * 5):
        check_odd(results)
        assert reason in results["reasons"][0]
        assert len(results["warned"]) == 1
        assert results["warned"][0].startswith("stage 0 runs without CUDA graphs, because ")
        assert results["live"] == 0


def compile_and_capture() -> list[bool]:
    """Of each compilation of a block in three steps, whether it happened inside a capture."""
    compiled: list[bool] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        compiled.append(bool(CAPTURING))
        return graph

    block = Odd("")
    block.forward = torch.compile(block.forward, backend=backend)  # type: ignore[method-assign]
    pipe = hpnb.Pipeline(nn.Sequential(block, nn.Linear(6, 6)), Mesh(Layout(pp=1)).pp, "gpipe", square_error)
    made = with_graphs(pipe)
    note_captures(made)
    for batch in draw_batches([3] * 3):
        pipe.step(batch)
    assert made._graphs
    assert not made.reasons
    return compiled


def test_nothing_is_compiled_in_a_capture(pools: RankPools) -> None:
    """A compiler times new kernels, which waits for the GPU. So warm-up steps compile what captures need."""
    compiled = pools[1].run(compile_and_capture)[0]
    assert False in compiled
    assert True not in compiled


def test_a_loss_that_cannot_be_captured_runs_eagerly_behind_the_graph(pools: RankPools) -> None:
    results = pools[1].run(train_odd, "", [3] * 6, "loss that waits")[0]
    check_odd(results)
    assert not results["reasons"]
    assert results["live"] == 4
    (warning,) = results["warned"]
    assert warning.startswith("the loss runs without CUDA graphs, because Python waits there for a value")


def ask_on_a_cpu() -> list[tuple[str, str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe = hpnb.Pipeline(model(), Mesh(Layout(pp=1)).pp, "1f1b", LOSSES["mean"], cuda_graphs=True)
        pipe.step(test_pipeline.batch(8, 0))
        pipe.step(test_pipeline.batch(8, 0))
    return [(str(w.message), w.filename) for w in caught if "cuda_graphs" in str(w.message)]


def boost_on_a_cpu(pp_size: int) -> list[tuple[str, str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plugin = hpnb.HybridParallelPlugin(
            pp_size=pp_size, num_microbatches=1, precision="fp32", enable_cuda_graphs=True
        )
        booster, net = (
            hpnb.Booster(plugin=plugin),
            torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4))),
        )
        boosted: Any
        boosted, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
        batches = iter([(torch.ones(2, 4), torch.zeros(2, 4))] * 2)
        for _ in range(2):
            booster.execute_pipeline(
                batches, boosted, lambda y, batch: (y - batch[1]).square().mean(), optimizer
            )
    return [(str(w.message), w.filename) for w in caught if "cuda_graphs" in str(w.message)]


def test_on_a_cpu_everything_runs_eagerly_and_says_so_once(pools: RankPools) -> None:
    """At a line of this file, and by the name of the option that it has there."""
    message = "cuda_graphs=True needs a GPU; on this CPU all stages run eagerly"
    assert pools[1].run(ask_on_a_cpu)[0] == [(message, __file__)]
    for pp_size in (1, 2):
        assert set(map(tuple, pools[pp_size].run(boost_on_a_cpu, pp_size))) == {
            ((f"enable_{message}", __file__),)
        }


def test_functions_of_the_same_code_and_values_are_the_same() -> None:
    def make(weight: float) -> Any:
        return lambda outputs, batch: weight * outputs

    key = cuda_graphs._function_key
    assert key(make(0.5)) == key(make(0.5))
    assert key(make(0.5)) != key(make(0.25))
    assert key(partial(make, 1.0)) == key(partial(make, 1.0))
    assert key(partial(make, 1.0)) != key(partial(make, 2.0))
    module = nn.MSELoss()
    assert key(module) == key(module)
    assert key(module) != key(nn.MSELoss())


# --- on a GPU --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpu_pools() -> Iterator[RankPools]:
    pools = RankPools(timeout=60, device="cuda")
    yield pools
    pools.close()


@pytest.mark.one_gpu
@pytest.mark.parametrize("case", some_cases(2, 12, (1, 2, 4)), ids=str)
def test_on_a_gpu_replayed_steps_are_eager_steps_and_one_process(gpu_pools: RankPools, case: Case) -> None:
    """One, two and four ranks, which share a GPU if there is one."""
    check([case], gpu_pools)


@pytest.mark.one_gpu
def test_on_a_gpu_replayed_steps_accumulate(gpu_pools: RankPools) -> None:
    check(ACCUMULATING, gpu_pools, accumulates=True)


def capture_again() -> list[float]:
    """Of two captures into one slot, the first of which is dropped before the second."""
    capture, x = CudaCapture(hpnb.device()), torch.ones((), device=hpnb.device())
    values = []
    for _ in range(2):
        with capture.session():
            replay = capture.capture(lambda: x.mul_(2), 0)
        replay()
        values.append(x.item())
        del replay
        gc.collect()
    return values


@pytest.mark.one_gpu
def test_a_slot_is_captured_again_when_all_its_graphs_are_dropped(gpu_pools: RankPools) -> None:
    assert gpu_pools[1].run(capture_again)[0] == [2, 4]


class Dropping(nn.Module):
    """A block with dropout; `recomputes` its activations, or waits for a value of the GPU."""

    def __init__(self, p: float, kind: str) -> None:
        super().__init__()
        self.up, self.down, self.kind = nn.Linear(64, 256), nn.Linear(256, 64), kind
        self.dropout = nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "recomputes":
            recomputed: torch.Tensor = checkpoint(self.run, x, use_reentrant=False)
            return recomputed
        if self.kind == "waits" and x.sum().item() > 1e9:
            return x
        return self.run(x)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(x))))


def train_dropping(p: float, kind: str, style: str) -> dict[str, Any]:
    """Losses of graphs and of eager steps, why a stage ran eagerly, and bytes that were reserved."""
    results: dict[str, Any] = {}
    for graphs in (True, False):
        torch.manual_seed(0)
        mesh = Mesh(Layout(pp=1))
        stack = nn.Sequential(*(Dropping(p, kind) for _ in range(3)), nn.Linear(64, 8))
        pipe = hpnb.Pipeline(stack, mesh.pp, style, cross_entropy, cuda_graphs=graphs)
        pipe._split_backward.min_flops = 0.0
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(1)
        losses = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(6):
                optimizer.zero_grad(set_to_none=graphs)
                for q in pipe.parameters() if not graphs else ():
                    q.grad = torch.zeros_like(q)
                x = torch.randn(16, 64, generator=generator)
                labels = torch.randint(0, 8, (16,), generator=generator)
                losses.append(pipe.step((x, labels)).loss.item())
                optimizer.step()
        stage_graphs = pipe._graphs
        results["graphs" if graphs else "eager"] = losses
        if stage_graphs is not None:
            results["reasons"] = dict(stage_graphs.reasons)
            results["warned"] = [str(w.message) for w in caught if "without CUDA graphs" in str(w.message)]
            results["captured"] = len(stage_graphs._graphs)
    return results


def cross_entropy(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(outputs, batch[1])


@pytest.mark.one_gpu
@pytest.mark.parametrize("style", ["1f1b", "gpipe"])
def test_dropout_draws_what_it_draws_in_an_eager_step(gpu_pools: RankPools, style: str) -> None:
    results = gpu_pools[1].run(train_dropping, 0.5, "plain", style)[0]
    assert not results["reasons"], results
    assert results["captured"] == (4 if style == "gpipe" else 1)
    assert results["graphs"] == results["eager"]


@pytest.mark.one_gpu
def test_recomputation_is_captured_unless_it_draws_random_numbers(gpu_pools: RankPools) -> None:
    without = gpu_pools[1].run(train_dropping, 0.0, "recomputes", "1f1b")[0]
    assert without["captured"] == 1
    assert without["graphs"] == without["eager"]
    dropping = gpu_pools[1].run(train_dropping, 0.5, "recomputes", "1f1b")[0]
    assert "recomputes activations and draws random numbers" in dropping["reasons"][0]
    assert dropping["graphs"] == dropping["eager"]


@pytest.mark.one_gpu
def test_a_stage_that_waits_for_the_gpu_runs_eagerly_and_says_why(gpu_pools: RankPools) -> None:
    results = gpu_pools[1].run(train_dropping, 0.0, "waits", "1f1b")[0]
    assert "waits there for a value of the GPU" in results["reasons"][0]
    assert len(results["warned"]) == 1
    assert results["captured"] == 0
    assert results["graphs"] == results["eager"]


def boost(graphs: bool, options: dict[str, Any]) -> tuple[list[float], int, list[str]]:
    """Losses of a boosted GPT-2, how many graphs a rank has, and why a stage has none."""
    plugin = hpnb.HybridParallelPlugin(
        precision="fp32" if hpnb.device().type == "cuda" else "fp64",
        num_microbatches=4, seed=0, enable_cuda_graphs=graphs, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    on_gpu = hpnb.device().type == "cuda"
    gpt2 = hpnb.models.gpt2("laptop", dropout=0.1 * on_gpu)
    optimizer = torch.optim.AdamW(gpt2.parameters(), lr=1e-3)
    booster = hpnb.Booster(plugin=plugin)
    boosted, optimizer, *_ = booster.boost(gpt2, optimizer)
    made = torch.Generator().manual_seed(mesh_rank(plugin))
    losses = []
    for _ in range(6):
        ids = torch.randint(0, 509, (8, 32), generator=made)
        lengths = torch.randint(8, 33, (8, 1), generator=made)
        mask = (torch.arange(32) < lengths).long()
        batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
        result = booster.execute_pipeline(iter([batch]), boosted, lambda outputs, _: outputs.loss, optimizer)
        losses.append(float(result["loss"]) if result["loss"] is not None else 0.0)
        optimizer.step()
        optimizer.zero_grad()
        if graphs and not on_gpu and boosted._pipe._graphs is None:
            with_graphs(boosted._pipe, [plugin.mesh.dp])
    stage_graphs = boosted._pipe._graphs
    if stage_graphs is None:
        return losses, 0, []
    reasons = [*stage_graphs.reasons.values(), *["the loss"] * stage_graphs._loss_runs_eagerly]
    return losses, len(stage_graphs._graphs), reasons


def mesh_rank(plugin: Any) -> int:
    rank: int = plugin.mesh.dp.rank
    return rank


PLUGINS: list[dict[str, Any]] = [
    {"pp_size": 2}, {"pp_size": 1}, {"pp_size": 2, "pp_style": "zb-h1", "zero_stage": 1}, {"zero_stage": 2},
    {"pp_size": 2, "zero_stage": 0, "gradient_as_bucket_view": True, "loss_chunk": 16},
]  # fmt: skip


def check_plugin(pools: Any, options: dict[str, Any], tolerance: float) -> None:
    ranks = 4 if options.get("pp_size") == 2 and "zero_stage" in options else 2
    graphs = pools[ranks].run(boost, True, options)
    eager = pools[ranks].run(boost, False, options)
    for (losses, captured, reasons), (eager_losses, _, _) in zip(graphs, eager, strict=True):
        assert captured > 0, reasons
        assert not reasons
        assert losses == pytest.approx(eager_losses, rel=tolerance)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", PLUGINS)
def test_a_plugin_with_graphs_trains_as_without(pools: RankPools, options: dict[str, Any]) -> None:
    """Masks and labels of every batch, replicas and ZeRO."""
    check_plugin(pools, options, 1e-9)


@pytest.mark.one_gpu
@pytest.mark.parametrize("options", PLUGINS)
def test_on_a_gpu_a_plugin_with_graphs_trains_as_without(
    gpu_pools: RankPools, options: dict[str, Any]
) -> None:
    """The same with dropout."""
    check_plugin(gpu_pools, options, 2e-5)


@pytest.mark.one_gpu
def test_tensor_parallelism_and_zero_3_on_a_shared_gpu_run_eagerly_and_say_why(gpu_pools: RankPools) -> None:
    """Over NCCL they are captured."""
    if torch.cuda.device_count() > 1:
        pytest.skip("each rank has a GPU")
    for options, reason in [
        ({"zero_stage": 3}, "sharded (ZeRO 3) along"),
        ({"tp_size": 2}, "it communicates within"),
    ]:
        for losses, captured, reasons in gpu_pools[2].run(boost, True, options):
            assert captured == 0
            assert reason in reasons[0]
            assert losses[-1] < 10

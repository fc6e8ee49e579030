"""CUDA graphs of stages that communicate by tensor parallelism. On a CPU a capture calls the function again
(`replayed_graphs.py`), and a test says that collectives of gloo are captured. On GPUs everything is real."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from hybrid_cases import batch, build, distance, mean, mine, own, weights
from rank_pools import RankPools
from replayed_graphs import with_graphs

import hpnb
from hpnb import Layout, Mesh
from hpnb.dropout_rng import CapturedRankStates, DropoutRng, noting_rank_states
from hpnb.pipeline_parallel import capture_watch
from hpnb.pipeline_parallel.graph_agreement import CAPTURE, EAGER, REPLAY, GraphAgreement

STEPS = 7  # two or three that warm up, and the others replay
EXACT = 1e-12


@dataclass(frozen=True)
class Case:
    """A way to train a GPT-2, whose embeddings are tied.

    Attributes:
        rows: samples of a step; what 4 microbatches do not divide makes the last ones smaller.
        lengths: of the batches, one after the other and again: 0, 1, 2 stand for 6, 7, 8 tokens.
    """

    tp: int = 2
    pp: int = 1
    dp: int = 1
    sequence: bool = False
    style: str = "1f1b"
    mode: str = "1d"
    zero: int = 0
    rows: int = 8
    lengths: tuple[int, ...] = (0,)
    kind: str = "gpt2"

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        return batch(self.kind, 3 * step + self.lengths[step % len(self.lengths)], self.rows)

    def plugin(self, **options: Any) -> hpnb.HybridParallelPlugin:
        return hpnb.HybridParallelPlugin(**{
            "tp_size": self.tp, "pp_size": self.pp, "pp_style": self.style, "zero_stage": self.zero,
            "tp_mode": self.mode, "enable_sequence_parallelism": self.sequence, "precision": "fp64",
            "num_microbatches": 4 if self.pp > 1 else 1, **options,
        })  # fmt: skip


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools(timeout=120)
    yield pools
    pools.close()


@cache
def serial(kind: str, rows: int, lengths: tuple[int, ...]) -> dict[str, Any]:
    """One process."""
    case, model = Case(kind=kind, rows=rows, lengths=lengths), build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        given = case.batch(step)
        outputs = model(**{name: t for name, t in given.items() if name != "labels"})
        loss = mean(outputs, given)  # the model's own loss is of float32
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "weights": dict(model.state_dict())}


def train(
    case: Case, graphs: bool, between: str = "", dropout: float = 0.0, steps: int = STEPS
) -> dict[str, Any]:
    """Losses, weights, bytes of the last step, and what was captured."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    on_gpu = hpnb.device().type == "cuda"
    plugin = case.plugin(enable_cuda_graphs=graphs and on_gpu)
    booster, model = hpnb.Booster(plugin=plugin), build(case.kind, dropout=dropout)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    boosted: Any
    boosted, optimizer, *_ = booster.boost(model, optimizer)
    axes = list(hpnb.tensor_parallel.axes(model)) if plugin.tp_size > 1 else []
    axes += [plugin.mesh.dp] if case.zero == 3 else []
    losses, made = [], None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            optimizer.zero_grad()
            given = mine(case.batch(step), plugin.mesh.dp)
            if between == "lengths" and plugin.mesh.dp.rank == 1 and step % 2:
                given = {name: t[:, :-1] for name, t in given.items()}
            if boosted._pipe is not None and graphs and not on_gpu and made is None:
                made = with_graphs(boosted._pipe, axes if between != "gloo" else ())
            if made is not None and max(plugin.mesh.tp.rank, plugin.mesh.dp.rank * (case.zero == 3)) == 1:
                change(boosted, made, between, step)
            with hpnb.record.traffic() as sent:
                loss = booster.execute_pipeline(iter([given]), boosted, own, optimizer)["loss"]
            losses.append(None if loss is None else float(loss))
            optimizer.step()
    made = boosted._pipe._graphs
    return {
        "losses": losses,
        "weights": {name: w.cpu() for name, w in weights(boosted).items()},
        "sent": {axis: (sent.calls[axis], sent.bytes[axis]) for axis in sorted(sent.bytes)},
        "graphs": 0 if made is None else len(made._graphs),
        "captures": 0 if made is None or on_gpu else len(made._capture.captured),
        "reasons": {} if made is None else dict(made.reasons),
        "warned": [str(w.message) for w in caught if "without CUDA graphs" in str(w.message)],
    }


def both(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    return train(case, True), train(case, False)


CASES = [
    Case(), Case(sequence=True), Case(pp=2), Case(pp=2, sequence=True, style="zb-h1"),
    Case(pp=2, style="interleaved", rows=7), Case(dp=2, zero=1, sequence=True), Case(dp=2, rows=7),
    Case(sequence=True, pp=2, rows=7, lengths=(0, 1)), Case(tp=4, mode="2d"), Case(kind="vit", sequence=True),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_replayed_steps_are_eager_steps_and_one_process(pools: RankPools, case: Case) -> None:
    expected = serial(case.kind, case.rows, case.lengths)
    for graphs, eager in pools[case.ranks].run(both, case):
        assert graphs["graphs"] > 0, graphs
        assert not graphs["reasons"]
        assert graphs["sent"] == eager["sent"]
        for a, b in zip(graphs["losses"], expected["losses"], strict=True):
            assert a is None or abs(a - b) < EXACT * abs(b)
        assert distance(graphs["weights"], expected["weights"]) < EXACT


def change(boosted: Any, stage_graphs: Any, what: str, step: int) -> None:
    """What happens on one of the tensor-parallel ranks alone."""
    if what == "memory" and step == 4:
        for p in boosted.module.parameters():
            p.data = p.data.clone()
    if what == "failed capture":
        original = type(stage_graphs)._capture_stage

        def fail(*args: Any) -> None:
            original(stage_graphs, *args)  # on a CPU it sends, and the other rank receives
            stage_graphs._run_eagerly(0, "out of memory")

        stage_graphs._capture_stage = fail
    if what == "reason" and step == 1:
        stage_graphs._run_eagerly(0, "this rank says so")


def train_twice(case: Case, between: str, dropout: float) -> tuple[dict[str, Any], dict[str, Any]]:
    original = capture_watch._cpu_states
    if dropout:
        capture_watch._cpu_states = lambda: ()  # these ranks compute on the CPU, and so may draw there
    try:
        return train(case, True, between, dropout), train(case, False, dropout=dropout)
    finally:
        capture_watch._cpu_states = original


def test_what_one_rank_sees_alone_is_captured_anew_on_all(pools: RankPools) -> None:
    """Weights lie elsewhere on rank 1 from step 4 on. It warms up in two more steps, and so do all."""
    for graphs, _ in pools[2].run(train_twice, Case(), "memory", 0.0):
        assert graphs["captures"] == 2 * 2  # forward and backward
        assert graphs["graphs"] == 1
        assert not graphs["reasons"]
        assert distance(graphs["weights"], serial("gpt2", 8, (0,))["weights"]) < EXACT


@pytest.mark.parametrize(
    ("between", "reasons"),
    [
        (
            "failed capture",
            ["another rank that communicates within it could not capture it", "out of memory"],
        ),
        ("reason", ["", "this rank says so"]),
    ],
)
def test_one_rank_that_cannot_capture_lets_all_run_eagerly(
    pools: RankPools, between: str, reasons: list[str]
) -> None:
    for reason, (graphs, _) in zip(reasons, pools[2].run(train_twice, Case(), between, 0.0), strict=True):
        assert graphs["graphs"] == 0
        assert reason in graphs["reasons"].get(0, "")
        assert distance(graphs["weights"], serial("gpt2", 8, (0,))["weights"]) < EXACT


def test_over_gloo_a_stage_runs_eagerly_and_says_why(pools: RankPools) -> None:
    for graphs, eager in pools[2].run(train_twice, Case(), "gloo", 0.0):
        assert graphs["graphs"] == 0
        (warned,) = graphs["warned"]
        assert warned.startswith(
            "stage 0 runs without CUDA graphs, because it communicates within the stage ("
        )
        assert "tp), and only the collectives of tensor parallelism" in warned
        assert graphs["losses"] == eager["losses"]


@pytest.mark.parametrize("sequence", [False, True])
def test_replayed_dropouts_are_those_of_eager_steps(pools: RankPools, sequence: bool) -> None:
    for graphs, eager in pools[2].run(train_twice, Case(sequence=sequence), "", 0.3):
        assert graphs["graphs"] == 1, graphs["reasons"]
        assert graphs["losses"] == eager["losses"]
        assert distance(graphs["weights"], eager["weights"]) == 0


# --- who decides -----------------------------------------------------------------------------------------


def least_over_a_grid() -> list[int]:
    tp = Mesh(Layout(tp=4)).tp
    agreement = GraphAgreement(tp.split(2, 2))
    states = [REPLAY, REPLAY if tp.rank else CAPTURE, CAPTURE if tp.rank < 3 else EAGER, REPLAY, REPLAY]
    return agreement.least(states, [0, 0, 0, tp.rank % 2, 0], [7, 7 * (tp.rank > 0), 0, 7, 7 + (tp.rank > 2)])


def test_the_least_of_all_ranks_is_done(pools: RankPools) -> None:
    """And nothing is replayed where ranks would replay different graphs, or those of different captures."""
    assert pools[4].run(least_over_a_grid) == [[REPLAY, CAPTURE, EAGER, EAGER, EAGER]] * 4
    assert GraphAgreement().least([REPLAY, EAGER], [1, 2]) == [REPLAY, EAGER]


# --- dropout ---------------------------------------------------------------------------------------------


class PhiloxGenerator:
    """A generator like that of a GPU: a seed, and an offset that each draw advances."""

    device = torch.device("cpu")

    def __init__(self, seed: int = 0, offset: int = 0) -> None:
        self.at = [seed, offset]

    def draw(self) -> tuple[int, int]:
        self.at[1] += 4
        return self.at[0], self.at[1]

    def manual_seed(self, seed: int) -> None:
        self.at[:] = seed, 0

    def get_offset(self) -> int:
        return self.at[1]

    def set_offset(self, offset: int) -> None:
        self.at[1] = offset

    def get_state(self) -> torch.Tensor:
        return torch.tensor(self.at)

    def set_state(self, state: torch.Tensor) -> None:
        self.at[:] = state.tolist()

    def clone_state(self) -> PhiloxGenerator:
        return PhiloxGenerator(*self.at)


def test_a_graph_draws_from_the_states_that_an_eager_forward_would_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of three blocks that draw before, in and after what is sharded, in the second and the fifth step."""
    generator: Any = PhiloxGenerator(7)
    axis: Any = type("Axis", (), {"size": 2, "rank": 1})()
    rng = DropoutRng(axis, torch.device("cuda"))
    rng._seeds_agree = True
    monkeypatch.setattr(DropoutRng, "generator", lambda _: generator)
    monkeypatch.setattr(torch, "rand", lambda *_, **__: generator.draw())
    monkeypatch.setattr(torch, "Generator", lambda _: PhiloxGenerator())
    forwards, replays, states = [], [], None
    for step in range(5):
        if step == 4:
            assert states is not None
            states.seed()
            replays = [state.at for state in states.generators]  # type: ignore[attr-defined]
        before, seeds = generator.get_offset(), []
        with noting_rank_states() as starts:
            for draws in range(3):
                for _ in range(draws):
                    generator.draw()
                rng.use_rank_state()
                seeds.append(generator.at[:])
                generator.draw()
                rng.use_common_state()
                generator.draw()
        if step == 1:
            states = CapturedRankStates([(rng, at - before) for rng, at in starts])
        forwards.append(seeds)
    assert replays == forwards[4]
    assert len({seed for seeds in forwards for seed, _ in seeds}) == 15


# --- on GPUs ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpu_pools() -> Iterator[RankPools]:
    pools = RankPools(timeout=60, device="cuda")
    yield pools
    pools.close()


GPU_CASES = [
    Case(), Case(sequence=True), Case(dp=2, zero=1, sequence=True), Case(tp=2, pp=2),
    Case(tp=2, pp=2, sequence=True, style="zb-h1", rows=7, lengths=(0, 1)), Case(tp=4, mode="2d"),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_on_gpus_replayed_steps_are_eager_steps(gpu_pools: RankPools, case: Case, dropout: float) -> None:
    if torch.cuda.device_count() < case.ranks:
        pytest.skip(f"needs {case.ranks} GPUs")
    for graphs, eager in gpu_pools[case.ranks].run(train_twice, case, "", dropout):
        assert graphs["graphs"] > 0, graphs["reasons"]
        assert not graphs["reasons"]
        assert graphs["sent"] == eager["sent"]
        for a, b in zip(graphs["losses"], eager["losses"], strict=True):
            assert a is None or abs(a - b) <= EXACT * abs(b)
        assert distance(graphs["weights"], eager["weights"]) < EXACT

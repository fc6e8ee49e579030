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
from hpnb.pipeline_parallel.graph_agreement import CAPTURE, EAGER, REPLAY, GraphAgreement
from hpnb.tensor_parallel.parallelize import axes_of

STEPS = 6  # two that warm up, four that replay
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


def train(case: Case, graphs: bool, **options: Any) -> dict[str, Any]:
    """Losses, weights, bytes of the last step, and what was captured."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    on_gpu = hpnb.device().type == "cuda"
    plugin = case.plugin(enable_cuda_graphs=graphs and on_gpu, **options)
    booster, model = hpnb.Booster(plugin=plugin), build(case.kind)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    boosted: Any
    boosted, optimizer, *_ = booster.boost(model, optimizer)
    axes = axes_of(model)
    losses, made = [], None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(STEPS):
            optimizer.zero_grad()
            given = mine(case.batch(step), plugin.mesh.dp)
            if boosted._pipe is not None and graphs and not on_gpu and made is None:
                made = with_graphs(boosted._pipe, axes)
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

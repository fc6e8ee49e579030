"""`python -m hpnb.bench experts`: how much all-to-all of a DualPipe-V step is exposed."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hpnb
from hpnb.bench import expert_step, experts, experts_on_gpus
from hpnb.overlapped_pair import run_pair
from hpnb.pipeline_parallel import executor
from hpnb.theory.links import Link


@pytest.mark.timeout(600)
def test_pairs_hide_messages_in_the_prediction_and_in_the_replay(capsys: pytest.CaptureFixture[str]) -> None:
    size = expert_step.Size(hidden=32, layers=4, tokens=16, samples=12, microbatches=6)
    link = Link(1e-5, 2e8)
    predicted, replayed = experts.compare(link, size)
    for result in (predicted, replayed):
        assert result.apart.exposed == pytest.approx(result.apart.sent)
        assert result.paired.sent == pytest.approx(result.apart.sent)
        assert result.paired.compute == pytest.approx(result.apart.compute)
        assert all(a < b for a, b in zip(result.paired.exposed, result.apart.exposed, strict=True))
        assert all(exposed >= -1e-12 for exposed in result.paired.exposed)
    # Without the exchange of sizes, and with even routing: the same number of large messages.
    assert 0.3 < sum(predicted.apart.sent) / sum(replayed.apart.sent) < 1.2
    printed = capsys.readouterr().out
    assert "replayed from measured CPU time: no message was timed" in printed
    assert "predicted, in pairs" in printed


def messages_left_out() -> tuple[bool, list[list[float]]]:
    """Whether PyTorch's all-to-all is back in its place, and what arrives: rows, numbers, and more rows."""
    send, arrived = dist.all_to_all_single, []
    rank = hpnb.rank()
    rows, numbers = torch.full((4,), float(rank)), torch.full((2,), rank)
    for tensor in (rows, numbers):
        with experts_on_gpus._messages_left_out():
            received = torch.empty_like(tensor)
            dist.all_to_all_single(received, tensor)
        arrived.append(received.tolist())
    longer = torch.empty(5)
    with experts_on_gpus._messages_left_out():
        work = dist.all_to_all_single(longer, rows, [3, 2], [2, 2], async_op=True)
        assert work.wait()
    return dist.all_to_all_single is send, [*arrived, longer.tolist()]


def test_only_rows_of_experts_are_left_out() -> None:
    results = hpnb.launch(messages_left_out, ranks=2, device="cpu")
    for rank, (restored, (rows, numbers, longer)) in enumerate(results):
        assert restored
        assert rows == [rank] * 4  # its own
        assert numbers == [0, 1]
        assert longer == [rank] * 4 + [0]


def bytes_and_pairs(size: expert_step.Size) -> dict[str, tuple[float, int]]:
    """Of each of the three steps: bytes of ep that leave this rank, and how many pairs ran."""
    boosted, batch, _ = expert_step.boost_mixtral(size, "eager")
    steps: dict[str, tuple[float, int]] = {}
    for name in (experts_on_gpus.APART, experts_on_gpus.PAIRED, experts_on_gpus.LEFT_OUT):
        experts_on_gpus._train_step(boosted, batch, name)
        with mock.patch.object(executor, "run_pair", wraps=run_pair) as paired, hpnb.record.traffic() as sent:
            experts_on_gpus._train_step(boosted, batch, name)
        steps[name] = sent.bytes["ep"], paired.call_count
    return steps


def test_three_steps_differ_in_pairs_and_in_messages() -> None:
    size = expert_step.Size(hidden=32, layers=4, tokens=16, samples=12, microbatches=6)
    for of_rank in hpnb.launch(bytes_and_pairs, size, ranks=4, device="cpu", timeout=120):
        (apart, no_pairs), (paired, pairs), (left_out, none) = of_rank.values()
        assert (no_pairs, none) == (0, 0)
        assert pairs > 0
        assert paired == pytest.approx(apart, rel=0.2)  # routing follows the weights, which were trained
        assert left_out < 0.1 * apart  # the numbers of rows alone


@pytest.mark.slow  # the three steps are compared above
@pytest.mark.timeout(600)
def test_steps_by_the_clock() -> None:
    """The program for GPUs, on a CPU: its times mean nothing here."""
    size = expert_step.Size(hidden=32, layers=4, tokens=16, samples=12, microbatches=6)
    results = hpnb.launch(experts_on_gpus._measure, size, 2, ranks=4, device="cpu", timeout=300)
    link, seconds, predicted = results[0]
    assert link.bandwidth > 0
    assert seconds.keys() == {experts_on_gpus.APART, experts_on_gpus.PAIRED, experts_on_gpus.LEFT_OUT}
    assert all(len(times) == 2 and min(times) > 0 for times in seconds.values())
    assert max(predicted.paired.exposed) < max(predicted.apart.exposed)

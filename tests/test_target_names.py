"""Targets under a name that nobody counts are refused where a mean would be weighted wrongly."""

import pytest
import torch

from hpnb.pipeline_parallel.loss import BatchLoss


def run_loss(entry, value, returns):
    inputs = [{"tokens": torch.ones(2, 3, dtype=torch.long), entry: one} for one in value]
    cpu = torch.device("cpu")
    loss = BatchLoss(returns, inputs, cpu, reduction=None, causal=False, replicas=(), scale=1.0)
    for m in range(len(inputs)):
        loss(m, torch.ones(()))
    return loss.mean()


def mean(outputs, inputs):
    return outputs


def sum_and_count(outputs, inputs):
    return outputs * 2, 2


FULL = torch.ones(2, 3, dtype=torch.long)
RAGGED = FULL.masked_fill(torch.eye(2, 3, dtype=torch.bool), -100)


def test_mean_over_ragged_targets_under_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match=r"'y'.*labels"):
        run_loss("y", (FULL, RAGGED), mean)


@pytest.mark.parametrize(
    ("entry", "value", "returns"),
    [
        ("labels", (FULL, RAGGED), mean),
        ("target", (FULL, RAGGED), mean),
        ("y", (FULL, RAGGED), sum_and_count),
        ("y", (FULL, FULL), mean),
        ("y", (RAGGED,), mean),
        ("y", (FULL.double(), -100.0 * FULL), mean),
    ],
)
def test_targets_that_can_be_counted_are_taken(entry, value, returns):
    assert run_loss(entry, value, returns) == 1

"""What an error says that a criterion or a model raises because it was called with no samples."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import hpnb
from hpnb.pipeline_parallel.empty_batch_error import EmptyBatchError, explaining_empty_batch
from hpnb.pipeline_parallel.loss import call_criterion

MODEL = r"the model raised RuntimeError \(cannot reshape .*\) for an empty batch: .* outputs of 0 samples"
CRITERION = (
    r"the criterion raised RuntimeError \(cannot reshape .*\) for an empty batch: this replica has no "
    r"samples in this call, .* a sum of 0 that depends on its outputs .*logits.reshape\(-1, width\)"
    r".*drop_last=True"
)
EMPTY = {"input": torch.ones(0, 3), "labels": torch.ones(0, 3)}


def per_sample(outputs: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    losses = (outputs - batch["labels"]).square().view(len(outputs), -1)  # no size for -1 of 0 samples
    return losses.sum(), losses.numel()


class PerSample(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.linear(input).view(len(input), -1)  # type: ignore[no-any-return]


def step_without_samples(how: str, criterion: Any, first: nn.Module, pp_size: int = 1) -> None:
    plugin = hpnb.HybridParallelPlugin(precision="fp32", pp_size=pp_size, num_microbatches=pp_size)
    booster, model = hpnb.Booster(plugin=plugin), nn.Sequential(first, nn.Linear(3, 3))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, *_ = booster.boost(model, optimizer)
    batch = EMPTY if pp_size == 1 else {name: torch.ones(1, 3) for name in EMPTY}  # 2 microbatches of it
    if how == "evaluate":
        hpnb.Trainer(booster, model, optimizer, criterion, display_progress=False).evaluate([batch])
    elif how == "forward":
        model(batch["input"])
    else:
        booster.execute_pipeline(iter([batch]), model, criterion, optimizer)


def said_without_samples(*case: Any) -> str:
    """All ranks have no samples, so that none waits for another and they go on."""
    with pytest.raises(EmptyBatchError) as error:
        step_without_samples(*case)
    return str(error.value)


def test_of_replicas() -> None:
    square = lambda outputs, batch: outputs.square().sum()  # noqa: E731
    with hpnb.Ranks(2, device="cpu") as two:
        for how in ("step", "evaluate"):
            for said in two.run(said_without_samples, how, per_sample, nn.Linear(3, 3)):
                assert re.match(CRITERION, said)
        for how in ("step", "forward"):
            for said in two.run(said_without_samples, how, square, PerSample()):
                assert re.match(MODEL, said)


def test_of_microbatches() -> None:
    with pytest.raises(hpnb.RankError, match=CRITERION) as error:
        hpnb.launch(step_without_samples, "step", per_sample, nn.Linear(3, 3), 2, ranks=2, device="cpu")
    assert error.value.rank == 1
    assert "losses = (outputs" in str(error.value)  # the line of the criterion


def test_what_else_is_raised_stays_as_it_is() -> None:
    def stop(outputs: torch.Tensor, batch: Any) -> Any:
        raise Stop

    class Stop(Exception):
        pass

    with pytest.raises(Stop):
        call_criterion(stop, EMPTY["input"], EMPTY)
    with pytest.raises(RuntimeError, match="invalid for input of size 3"):
        call_criterion(lambda outputs, batch: outputs.view(2, 2), torch.ones(1, 3), {"labels": torch.ones(1)})
    with pytest.raises(EmptyBatchError) as error, explaining_empty_batch("model", EMPTY):
        call_criterion(per_sample, EMPTY["input"], EMPTY)
    assert str(error.value).startswith("the criterion raised RuntimeError")  # once
    assert isinstance(error.value.__cause__, RuntimeError)

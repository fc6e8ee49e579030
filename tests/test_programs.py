"""Mistakes in programs of one's own that once went unseen: each is right now, or one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rank_pools import RankPools
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import hpnb

EXACT = 1e-12


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


def message_of(failed: pytest.ExceptionInfo[hpnb.RankError]) -> str:
    """What the exception says, without the traceback, which repeats lines of the test."""
    return failed.value.summary


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=17, n_positions=8, n_embd=8, n_layer=2, n_head=2, **off))


def words(lengths: tuple[int, ...] = (8, 3, 6, 8)) -> dict[str, torch.Tensor]:
    """Sequences of 8 tokens, of which so many have labels."""
    ids = torch.randint(17, (len(lengths), 8), generator=torch.Generator().manual_seed(1))
    hidden = torch.arange(8) >= torch.tensor(lengths)[:, None]
    return {"input_ids": ids, "labels": ids.masked_fill(hidden, -100)}


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    worst = max(float((a[name] - b[name]).norm()) for name in a)
    return worst / max(float(b[name].norm()) for name in b)


# --- labels that are shifted already -----------------------------------------------------------------------


def without_shift(outputs: Any, inputs: Any) -> torch.Tensor:
    logits = outputs.logits if hasattr(outputs, "logits") else outputs
    return F.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())


def with_shift(outputs: Any, inputs: Any) -> torch.Tensor:
    logits = outputs.logits if hasattr(outputs, "logits") else outputs
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())


def step_of_gpt2(criterion: Any, batch: Any, **how: Any) -> tuple[float, dict[str, torch.Tensor]]:
    plugin = hpnb.HybridParallelPlugin(pp_size=2, num_microbatches=2, precision="fp64")
    booster = hpnb.Booster(plugin=plugin)
    model = gpt2()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    result = booster.execute_pipeline(iter([batch]), model, criterion, optimizer, **how)
    loss = model.last_step.loss.item()
    assert (result["loss"] is None) == (hpnb.rank() == 0)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if name != "lm_head.weight"}
    # The same criterion once more, and forward alone.
    booster.execute_pipeline(iter([batch]), model, criterion, None, **how)
    return loss, gradients


def layered() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(17, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 17)).double()


def step_of_layers(criterion: Any, batch: Any, **how: Any) -> tuple[float, dict[str, torch.Tensor]]:
    schedule = hpnb.pipeline_parallel.schedules.make("1f1b", 2, 2)
    pipe = hpnb.Pipeline(layered(), hpnb.Mesh(hpnb.Layout(pp=2)).pp, schedule, criterion, **how)
    loss = pipe.step(batch).loss.item()
    return loss, {name: p.grad for name, p in pipe.named_parameters()}


def by_one_process(model: nn.Module, criterion: Any, batch: Any) -> tuple[float, dict[str, torch.Tensor]]:
    outputs = model(batch["input_ids"])
    loss = criterion(outputs, batch)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("shifts", [False, True], ids=["shifted already", "shifts itself"])
@pytest.mark.parametrize("known", [True, False], ids=["GPT-2", "layers"])
def test_labels_that_are_shifted_already_are_stated_and_checked(
    pools: RankPools, shifts: bool, known: bool
) -> None:
    criterion, batch = (with_shift if shifts else without_shift), words()
    step, model = (step_of_gpt2, gpt2().double()) if known else (step_of_layers, layered())
    loss, gradients = by_one_process(model, criterion, batch)
    found = pools[2].run(step, criterion, batch, causal=shifts)
    assert found[0][0] == found[1][0] == pytest.approx(loss, rel=EXACT)
    assert distance(found[0][1] | found[1][1], gradients) < EXACT
    for stated in (None, not shifts):
        if stated is None and shifts == known:  # what the model says is right
            assert pools[2].run(step, criterion, batch)[0][0] == found[0][0]
            continue
        with pytest.raises(hpnb.RankError) as failed:
            pools[2].run(step, criterion, batch, causal=stated)
        shifted, all_labels = "9 of 21", "11 of 25"
        counted, instead = (all_labels, shifted) if shifts else (shifted, all_labels)
        assert f"{counted} targets, would have to be {instead}: pass causal" in message_of(failed)
        assert f"pass causal={shifts} to execute_pipeline or Pipeline" in message_of(failed)


def own_loss(outputs: Any, inputs: Any) -> torch.Tensor:
    return outputs.logits.square().mean()


def sums(outputs: Any, inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    count = inputs["labels"].ne(-100).sum()
    return without_shift(outputs, inputs) * count, count


def test_a_loss_whose_weights_are_right_or_that_takes_no_labels_is_left_alone(pools: RankPools) -> None:
    even = words((8, 3, 3, 8))  # 11 targets in each microbatch, shifted or not 9
    assert pools[2].run(step_of_gpt2, without_shift, even)[0][0] == pytest.approx(
        by_one_process(gpt2().double(), without_shift, even)[0], rel=EXACT
    )
    pools[2].run(step_of_gpt2, own_loss, words())
    pools[2].run(step_of_gpt2, None, words())
    loss, _ = by_one_process(gpt2().double(), without_shift, words())
    assert pools[2].run(step_of_gpt2, sums, words())[0][0] == pytest.approx(loss, rel=EXACT)

"""Notebook 06: an optimal cut, a weight with two homes, records of such, a token mean, W under a cap."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

import torch
from torch import nn

import hpnb
from hpnb import Layout, Mesh
from hpnb.data.tokenizer import IGNORE_INDEX
from hpnb.hybrid.model_loss import causal
from hpnb.lesson.exercises.checker import Exercise, Finding
from hpnb.lesson.exercises.gpt2_pipeline_cap import JOBS, Job, beat, family
from hpnb.lesson.programs.step_timing import relative_distance as distance
from hpnb.lesson.tables import number
from hpnb.mesh import Axis
from hpnb.models import GPT2Size
from hpnb.pipeline_parallel import full_state_dict, schedules
from hpnb.pipeline_parallel.microbatches import count_targets, split_batch
from hpnb.pipeline_parallel.partition import balanced
from hpnb.theory import bytes_sent, stage_loads

_TIMEOUT = 20.0
_EXACT = 1e-12  # relative norm, float64
TINY = GPT2Size(hidden=12, layers=3, heads=3, mlp=24, vocab_size=37, length=10)


def _off(apart: float) -> str:
    if apart < _EXACT:
        return "equal"
    small = apart < 1e-4  # looks like rounding, and is not
    return f"off by {apart:.1e}" + (" (in float64 rounding is 1e-16)" if small else "")


def _worst(distances: Iterable[float]) -> float:
    """The largest; NaN, which compares with nothing, is worse than any number."""
    return max(distances, key=lambda apart: math.inf if math.isnan(apart) else apart)


# --- where to cut --------------------------------------------------------------------------------------

Partition = Callable[[list[float], int], Any]  # (cost of each layer, stages) -> layers of each stage


def exhaustive(costs: Sequence[float], stages: int) -> float:
    """The least possible largest stage: every cut is tried."""
    n = len(costs)
    cuts = ((0, *inner, n) for inner in combinations(range(1, n), stages - 1))
    return min(max(sum(costs[a:b]) for a, b in pairwise(ends)) for ends in cuts)


def _partition_cases() -> Iterable[tuple[list[float], int]]:
    yield [1, 8, 8, 8, 8, 8, 8, 29], 4  # such a skyline, in small
    yield [4.0, 1.0, 1.0, 1.0, 4.0], 3
    yield [0.0, 0.0, 5.0, 0.0], 3  # as many stages as that: some cost nothing
    yield [3.0, 2.0, 4.0], 3
    yield [2.5, 1.0], 1
    draw = random.Random(6)
    for _ in range(12):
        n = draw.randint(3, 9)
        yield [float(draw.randint(1, 9)) for _ in range(n)], draw.randint(2, n)


def _judged(answer: Any, costs: Sequence[float], stages: int, best: float) -> str:
    """What is wrong with it, or ""."""
    counts = list(answer) if isinstance(answer, (list, tuple)) else None
    if counts is None or not all(isinstance(n, int) and not isinstance(n, bool) for n in counts):
        return f"{answer!r} is no list of {stages} whole numbers, how many layers each stage gets"
    if len(counts) != stages or sum(counts) != len(costs) or min(counts) < 1:
        return f"{counts}: {stages} stages of at least one layer are wanted, {len(costs)} layers in all"
    largest = max(stage_loads(costs, counts))
    if largest > best * (1 + 1e-9):
        return f"{counts} has a stage of {largest:g}, and {best:g} is possible"
    return ""


def _verify_partition(partition: Partition) -> Sequence[Finding]:
    wrong, cases = [], list(_partition_cases())
    for costs, stages in cases:
        said = _judged(partition(list(costs), stages), costs, stages, exhaustive(costs, stages))
        if said:
            wrong.append(f"costs {', '.join(f'{c:g}' for c in costs)} over {stages} stages: {said}")
    words = f"of {len(cases)} skylines all are cut as well as by exhaustive search"
    findings = [Finding(not wrong, wrong[0] if wrong else words)]
    if wrong:
        return findings  # the large one would only take long
    draw = random.Random(7)
    costs, stages = [draw.uniform(1, 2) for _ in range(49)] + [5.0], 8
    many = f"50 layers over 8 stages, which {math.comb(49, 7):,} cuts are possible of"
    try:
        (answer,) = hpnb.launch(partition, costs, stages, ranks=1, device="cpu", timeout=_TIMEOUT)
    except hpnb.RankError as error:
        if error.error != "timed out":
            raise
        return [*findings, Finding(False, f"{many}: not done after {_TIMEOUT:g} s")]
    said = _judged(answer, costs, stages, max(stage_loads(costs, balanced(costs, stages))))
    return [*findings, Finding(not said, f"{many}: {said or 'the best of them'}")]


partition = Exercise("06.1", "an optimal partition", 25, _verify_partition)


# --- one weight, two homes -------------------------------------------------------------------------------

Tie = Callable[[nn.Parameter | None, Axis], Any]  # (this rank's home, the pipeline's axis) -> add()


class NoAdd(Exception):
    """What `tie` returned cannot be called. Raised, so that ranks that wait for this one end with it."""


def tiny(tied: bool = True) -> Any:
    """A GPT-2 in float64 on the CPU; with tied=False its head starts from the table of words, as a copy."""
    model = hpnb.models.gpt2(TINY, dtype=torch.float64, device="cpu")
    if not tied:
        model.lm_head.weight = nn.Parameter(model.transformer.wte.weight.detach().clone())
    return model


def tiny_batch(rows: int, seed: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, TINY.vocab_size, (rows, TINY.length), generator=made)
    return {"input_ids": ids, "labels": ids}


def _loss(outputs: Any, inputs: Any) -> torch.Tensor:
    return causal(outputs, inputs["labels"])


def _of_one(model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The loss of the whole batch in one process; given labels, a model would compute its own in float32."""
    return _loss(model(**{name: value for name, value in batch.items() if name != "labels"}), batch)


def _run_tied(tie: Tie) -> tuple[tuple[float, float], list[float]]:
    """On a rank, after three steps: ((one home off the other, weights off one), bytes of each add)."""
    axis = Mesh(Layout(pp=hpnb.world_size())).pp
    model = tiny(tied=False)
    with torch.no_grad():  # as if each program had drawn its own
        model.lm_head.weight.normal_(std=0.02, generator=torch.Generator().manual_seed(5))
    pipe = hpnb.Pipeline(model, axis, schedules.make("1f1b", axis.size, 4), _loss)
    homes = {0: model.transformer.wte.weight, axis.size - 1: model.lm_head.weight}
    add = tie(homes.get(axis.rank), axis)
    if not callable(add):
        raise NoAdd(f"rank {axis.rank} got a {type(add).__name__} from tie, and a function `add` is wanted")
    alone, sent = tiny(), []
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5, momentum=0.9) for each in (pipe, alone)]
    for seed in range(3):
        batch = tiny_batch(5, seed)
        pipe.step(batch, record=False, return_outputs=False)
        with hpnb.record.traffic() as t:
            add()
        sent.append(t.total)
        _of_one(alone, batch).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    whole = full_state_dict(pipe.module, axis)
    apart = distance(whole.values(), [alone.state_dict()[name] for name in whole])
    homes_apart = distance([whole["lm_head.weight"]], [whole["transformer.wte.weight"]])
    return (homes_apart, apart), sent


def _verify_tie(tie: Tie) -> Sequence[Finding]:
    findings = []
    for ranks in (2, 3):
        try:
            found = hpnb.launch(_run_tied, tie, ranks=ranks, device="cpu", timeout=_TIMEOUT)
        except hpnb.RankError as error:
            if error.error != NoAdd.__name__:
                raise
            return [Finding(False, f"{ranks} ranks: {error.summary.partition(': ')[2]}")]
        text = f"{ranks} ranks, three steps"
        homes_apart, apart = (_worst(off[i] for off, _ in found) for i in (0, 1))
        findings.append(Finding(homes_apart < _EXACT, f"{text}: the two homes are {_off(homes_apart)}"))
        findings.append(Finding(apart < _EXACT, f"{text}: weights beside one process's are {_off(apart)}"))
        most = bytes_sent("all_reduce", TINY.vocab_size * TINY.hidden * 8, 2)
        sent = [max(each) for _, each in found]
        wanted = [most if rank in (0, ranks - 1) else 0.0 for rank in range(ranks)]
        words = ", ".join(number(s, "B") for s in sent)
        goal = ", ".join(number(w, "B") for w in wanted)
        good = all(s <= w + 0.1 for s, w in zip(sent, wanted, strict=True))
        findings.append(Finding(good, f"{text}: add() sends {words} a rank, at most {goal}"))
    return findings


tie = Exercise("06.2", "one weight, two homes", 15, _verify_tie)


# --- whose tie is it? --------------------------------------------------------------------------------------

RIGHT, FORGOTTEN, UNEQUAL, HALVED = "right", "never summed", "never made equal", "averaged"


@dataclass(frozen=True)
class Homes:
    """What was recorded of a weight with two homes.

    Attributes:
        losses: of each step.
        apart: distance between the homes, relative norm: before the first step, then after each.
        off: in the first step, how far the gradient of the first home, and of the last, are from that of the
            same model in one process; relative norm.
    """

    losses: tuple[float, ...]
    apart: tuple[float, ...]
    off: tuple[float, float]


def homes(case: str, seed: int, steps: int = 6) -> Homes:
    """A tiny GPT-2 with two tables, trained in this process, with `case` done to their gradients."""
    model, batch = tiny(tied=False), tiny_batch(6, seed)
    first, last = model.transformer.wte.weight, model.lm_head.weight
    if case == UNEQUAL:
        with torch.no_grad():
            last.normal_(std=0.02, generator=torch.Generator().manual_seed(seed))
    alone = tiny()
    _of_one(alone, batch).backward()
    serial = alone.transformer.wte.weight.grad
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses, apart, off = [], [distance([last], [first])], (0.0, 0.0)
    for step in range(steps):
        loss = _of_one(model, batch)
        loss.backward()
        assert first.grad is not None
        assert last.grad is not None
        if case != FORGOTTEN:
            whole = (first.grad + last.grad) * (0.5 if case == HALVED else 1.0)
            first.grad, last.grad = whole, whole.clone()
        if step == 0:
            off = distance([first.grad], [serial]), distance([last.grad], [serial])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        apart.append(distance([last], [first]))
    return Homes(tuple(losses), tuple(apart), off)


def _verify_diagnose(diagnose: Callable[[Homes], Any]) -> Sequence[Finding]:
    findings = []
    cases = (FORGOTTEN, RIGHT, HALVED, UNEQUAL, HALVED, FORGOTTEN)
    for seed, case in enumerate(cases, 1):
        record = homes(case, seed)
        answer = diagnose(record)
        shown = f"record {seed}, loss {record.losses[0]:.2f} to {record.losses[-1]:.2f}, homes apart by "
        shown += f"{record.apart[0]:.0e} to {record.apart[-1]:.0e}"
        findings.append(Finding(answer == case, f"{shown}: it is {case!r}, you say {answer!r}"))
    return findings


diagnosis = Exercise("06.3", "whose tie is it", 10, _verify_diagnose)


# --- the exact token mean -------------------------------------------------------------------------------

TokenLoss = Callable[[Any, Any], Any]  # (outputs, inputs) of a microbatch -> (sum, count)


class NoPair(Exception):
    """What the loss function returned is no (sum, count)."""


def ragged(lengths: Sequence[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Rows of so many tokens, padded on the right with the last word and labels of -100."""
    batch = tiny_batch(len(lengths), seed)
    keep = torch.arange(TINY.length) < torch.tensor(lengths).unsqueeze(1)  # (B, s)
    ids = batch["input_ids"].masked_fill(~keep, TINY.vocab_size - 1)
    return {
        "input_ids": ids,
        "attention_mask": keep.long(),
        "labels": batch["labels"].masked_fill(~keep, IGNORE_INDEX),
    }


_BATCHES = {
    "rows as long as each other": (10, 10, 10, 10),
    "ragged rows": (10, 3, 2, 5),
    "a microbatch of single tokens, which asks for nothing": (10, 4, 1, 1),
}


def _run_tokens(token_loss: TokenLoss) -> dict[str, tuple[tuple[float, float], list[int]]]:
    """On a rank: {batch: ((loss off one process's, gradients off), targets of each microbatch)}."""
    axis = Mesh(Layout(pp=hpnb.world_size())).pp

    def checked(outputs: Any, inputs: Any) -> Any:
        pair = token_loss(outputs, inputs)
        two = isinstance(pair, tuple) and len(pair) == 2
        if not two or not isinstance(pair[0], torch.Tensor) or pair[0].dim():
            what = f"a tensor of shape {tuple(pair.shape)}" if isinstance(pair, torch.Tensor) else repr(pair)
            raise NoPair(f"it returned {what}, and (sum, count) is wanted, the sum a tensor of shape ()")
        return pair

    found = {}
    for name, lengths in _BATCHES.items():
        batch = ragged(lengths)
        alone, model = tiny(), tiny()
        value = _of_one(alone, batch)  # over all rows at once
        value.backward()
        pipe = hpnb.Pipeline(model, axis, schedules.make("1f1b", axis.size, 2), checked)
        result = pipe.step(batch, record=False, return_outputs=False)
        right = {n: p.grad for n, p in alone.named_parameters()}
        right["lm_head.weight"] = right["transformer.wte.weight"]  # a name of its own on the last rank
        mine = [(p.grad, right[n]) for n, p in pipe.named_parameters()]
        off = distance([a for a, _ in mine if a is not None], [b for _, b in mine if b is not None])
        counts = [int(count_targets(each, causal=True)) for each in split_batch(batch, 2)]
        found[name] = (distance([result.loss], [value]), off), counts
    return found


def _verify_tokens(token_loss: TokenLoss) -> Sequence[Finding]:
    try:
        ranks = hpnb.launch(_run_tokens, token_loss, ranks=2, device="cpu", timeout=_TIMEOUT)
    except hpnb.RankError as error:
        if error.error != NoPair.__name__:
            raise
        return [Finding(False, error.summary.partition(": ")[2])]
    findings = []
    for name in _BATCHES:
        counts = " and ".join(map(str, ranks[0][name][1]))
        loss, gradients = (_worst(each[name][0][i] for each in ranks) for i in (0, 1))
        text = f"{name} ({counts} targets): beside one process"
        findings.append(Finding(loss < _EXACT, f"{text} the loss is {_off(loss)}"))
        findings.append(Finding(gradients < _EXACT, f"{text} gradients are {_off(gradients)}"))
    return findings


tokens = Exercise("06.4", "the exact token mean", 15, _verify_tokens)

__all__ = ["JOBS", "Homes", "Job", "beat", "diagnosis", "family", "homes", "partition", "tie", "tokens"]

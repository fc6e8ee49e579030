"""Exercises of notebook 06: an optimal partition, a tied weight, a token mean, a schedule under a cap."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

import torch
from torch import nn

import hpnb
from hpnb.data.tokenizer import IGNORE_INDEX
from hpnb.hybrid.model_loss import causal
from hpnb.lesson.exercises.checker import Finding, WrongAnswer, exercise
from hpnb.lesson.exercises.findings import TIMEOUT, exact, keeps_to_cap, run_on_ranks
from hpnb.lesson.exercises.vit_pipeline_parallel import parse_schedule
from hpnb.lesson.programs.device_timing import all_ranks
from hpnb.lesson.programs.step_timing import relative_distance
from hpnb.lesson.tables import number
from hpnb.mesh import Axis
from hpnb.models import GPT2Size
from hpnb.pipeline_parallel import Costs, Schedule, full_state_dict, schedules
from hpnb.pipeline_parallel.microbatches import count_targets, split_batch
from hpnb.pipeline_parallel.partition import balanced
from hpnb.theory import bytes_sent, stage_loads

TINY = GPT2Size(hidden=12, layers=3, heads=3, mlp=24, vocab_size=37, length=10)


# --- where to cut --------------------------------------------------------------------------------------

Partition = Callable[[list[float], int], Any]  # (cost of each layer, stages) -> layers of each stage


def exhaustive(costs: Sequence[float], stages: int) -> float:
    """The least possible largest stage: every cut is tried."""
    n = len(costs)
    cuts = ((0, *inner, n) for inner in combinations(range(1, n), stages - 1))
    return min(max(sum(costs[a:b]) for a, b in pairwise(ends)) for ends in cuts)


def partition_cases() -> Iterator[tuple[list[float], int]]:
    """(costs of layers, stages), small enough for exhaustive search."""
    yield [1, 8, 8, 8, 8, 8, 8, 29], 4  # the costs of a GPT-2, in small
    yield [4.0, 1.0, 1.0, 1.0, 4.0], 3
    yield [0.0, 0.0, 5.0, 0.0], 3  # some stages cost nothing
    yield [3.0, 2.0, 4.0], 3
    yield [2.5, 1.0], 1
    draw = random.Random(6)
    for _ in range(12):
        n = draw.randint(3, 9)
        yield [float(draw.randint(1, 9)) for _ in range(n)], draw.randint(2, n)


def _problem(answer: Any, costs: Sequence[float], stages: int, best: float) -> str:
    """What is wrong with a partition, or ""."""
    counts = list(answer) if isinstance(answer, (list, tuple)) else None
    if counts is None or not all(isinstance(n, int) and not isinstance(n, bool) for n in counts):
        return f"{answer!r} is no list of {stages} whole numbers, how many layers each stage gets"
    if len(counts) != stages or sum(counts) != len(costs) or min(counts) < 1:
        return f"{counts}: {stages} stages of at least one layer are wanted, {len(costs)} layers in all"
    largest = max(stage_loads(costs, counts))
    if largest > best * (1 + 1e-9):
        return f"{counts} has a stage of {largest:g}, and {best:g} is possible"
    return ""


@exercise("06.1", "an optimal partition", 25)
def partition(answer: Partition) -> Iterator[Finding]:
    wrong, cases = [], list(partition_cases())
    for costs, stages in cases:
        if problem := _problem(answer(list(costs), stages), costs, stages, exhaustive(costs, stages)):
            wrong.append(f"costs {', '.join(f'{c:g}' for c in costs)} over {stages} stages: {problem}")
    all_right = f"of {len(cases)} skylines all are cut as well as by exhaustive search"
    yield Finding(not wrong, wrong[0] if wrong else all_right)
    if wrong:
        return  # the large one would only take long
    draw = random.Random(7)
    costs, stages = [draw.uniform(1, 2) for _ in range(49)] + [5.0], 8
    text = f"50 layers over 8 stages, which {math.comb(49, 7):,} cuts are possible of"
    try:
        (counts,) = hpnb.launch(answer, costs, stages, ranks=1, device="cpu", timeout=TIMEOUT)
    except hpnb.RankError as error:
        if error.error != "timed out":
            raise
        yield Finding(False, f"{text}: not done after {TIMEOUT:g} s")
        return
    problem = _problem(counts, costs, stages, max(stage_loads(costs, balanced(costs, stages))))
    yield Finding(not problem, f"{text}: {problem or 'the best of them'}")


# --- one weight on two ranks -----------------------------------------------------------------------------

Tie = Callable[[nn.Parameter | None, Axis], Any]  # (this rank's copy, the pipeline's axis) -> add()


def tiny(tied: bool = True) -> Any:
    """A GPT-2 in float64 on the CPU; with tied=False its head starts from the embedding, as a copy."""
    model = hpnb.models.gpt2(TINY, dtype=torch.float64, device="cpu")
    if not tied:
        model.lm_head.weight = nn.Parameter(model.transformer.wte.weight.detach().clone())
    return model


def tiny_batch(rows: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, TINY.vocab_size, (rows, TINY.length), generator=generator)
    return {"input_ids": ids, "labels": ids}


def _loss(outputs: Any, inputs: Any) -> torch.Tensor:
    return causal(outputs, inputs["labels"])


def serial_loss(model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The loss of all rows in one process; given labels, a model would compute its own in float32."""
    return _loss(model(**{name: value for name, value in batch.items() if name != "labels"}), batch)


def _redraw(weight: nn.Parameter, seed: int) -> None:
    with torch.no_grad():
        weight.normal_(std=0.02, generator=torch.Generator().manual_seed(seed))


def _run_tied(tie: Tie) -> tuple[float, float, list[float]]:
    """On a rank, after three steps: (one copy off the other, weights off one process's, bytes of adds)."""
    axis = all_ranks("pp")
    model, serial = tiny(tied=False), tiny()
    _redraw(model.lm_head.weight, 5)  # as if each program had drawn its own
    pipe = hpnb.Pipeline(model, axis, schedules.make("1f1b", axis.size, 4), _loss)
    copies = {0: model.transformer.wte.weight, axis.size - 1: model.lm_head.weight}
    add = tie(copies.get(axis.rank), axis)
    if not callable(add):
        problem = f"rank {axis.rank} got a {type(add).__name__} from tie"
        raise WrongAnswer(f"{problem}, and a function `add` is wanted")
    sent = []
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in (pipe, serial)]
    for seed in range(3):
        batch = tiny_batch(5, seed)
        pipe.step(batch, record=False, return_outputs=False)
        with hpnb.record.traffic() as t:
            add()
        sent.append(t.total)
        serial_loss(serial, batch).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    weights = full_state_dict(pipe.module, axis)
    off = relative_distance(weights.values(), [serial.state_dict()[name] for name in weights])
    apart = relative_distance([weights["lm_head.weight"]], [weights["transformer.wte.weight"]])
    return apart, off, sent


@exercise("06.2", "one weight, two homes", 15)
def tied_weight(tie: Tie) -> Iterator[Finding]:
    for ranks in (2, 3):
        runs = run_on_ranks(_run_tied, tie, ranks=ranks, case=f"{ranks} ranks")
        text = f"{ranks} ranks, three steps"
        yield exact((apart for apart, _, _ in runs), f"{text}: the two copies are")
        yield exact((off for _, off, _ in runs), f"{text}: weights beside one process's are")
        once = bytes_sent("all_reduce", TINY.vocab_size * TINY.hidden * 8, 2)
        sent = [max(nbytes) for *_, nbytes in runs]
        wanted = [once if rank in (0, ranks - 1) else 0.0 for rank in range(ranks)]
        measured, goal = (", ".join(number(n, "B") for n in values) for values in (sent, wanted))
        good = all(s <= w + 0.1 for s, w in zip(sent, wanted, strict=True))
        yield Finding(good, f"{text}: add() sends {measured} a rank, at most {goal}")


# --- the exact token mean -------------------------------------------------------------------------------

TokenLoss = Callable[[Any, Any], Any]  # (outputs, inputs) of a microbatch -> (sum, count)


def ragged(lengths: Sequence[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Rows of so many tokens, padded on the right with the last token id and labels of -100."""
    batch = tiny_batch(len(lengths), seed)
    keep = torch.arange(TINY.length) < torch.tensor(lengths).unsqueeze(1)  # (B, s)
    return {
        "input_ids": batch["input_ids"].masked_fill(~keep, TINY.vocab_size - 1),
        "attention_mask": keep.long(),
        "labels": batch["labels"].masked_fill(~keep, IGNORE_INDEX),
    }


_BATCHES = {
    "rows as long as each other": (10, 10, 10, 10),
    "ragged rows": (10, 3, 2, 5),
    "a microbatch of single tokens, which asks for nothing": (10, 4, 1, 1),
}


def _run_tokens(token_loss: TokenLoss) -> dict[str, tuple[float, float, list[int]]]:
    """On a rank: {batch: (loss off one process's, gradients off, targets of each microbatch)}."""
    axis = all_ranks("pp")

    def checked(outputs: Any, inputs: Any) -> Any:
        pair = token_loss(outputs, inputs)
        two = isinstance(pair, tuple) and len(pair) == 2
        if not two or not isinstance(pair[0], torch.Tensor) or pair[0].dim():
            what = f"a tensor of shape {tuple(pair.shape)}" if isinstance(pair, torch.Tensor) else repr(pair)
            raise WrongAnswer(f"it returned {what}, and (sum, count) is wanted, the sum a tensor of shape ()")
        return pair

    results = {}
    for name, lengths in _BATCHES.items():
        batch = ragged(lengths)
        serial, model = tiny(), tiny()
        loss = serial_loss(serial, batch)  # over all rows at once
        loss.backward()
        pipe = hpnb.Pipeline(model, axis, schedules.make("1f1b", axis.size, 2), checked)
        result = pipe.step(batch, record=False, return_outputs=False)
        right = {n: p.grad for n, p in serial.named_parameters()}
        right["lm_head.weight"] = right["transformer.wte.weight"]  # its name on the last rank
        pairs = [(p.grad, right[n]) for n, p in pipe.named_parameters()]
        off = relative_distance(
            [a for a, _ in pairs if a is not None], [b for _, b in pairs if b is not None]
        )
        counts = [int(count_targets(part, causal=True)) for part in split_batch(batch, 2)]
        results[name] = relative_distance([result.loss], [loss]), off, counts
    return results


@exercise("06.3", "the exact token mean", 15)
def token_mean(token_loss: TokenLoss) -> Iterator[Finding]:
    runs = run_on_ranks(_run_tokens, token_loss, ranks=2)
    for name in _BATCHES:
        losses, gradients, counts = zip(*(run[name] for run in runs), strict=True)
        text = f"{name} ({' and '.join(map(str, counts[0]))} targets): beside one process"
        yield exact(losses, f"{text} the loss is")
        yield exact(gradients, f"{text} gradients are")


# --- a schedule under a cap -----------------------------------------------------------------------------


@dataclass(frozen=True)
class CappedPipeline:
    """A pipeline of unequal stages, stage r on rank r, to be scheduled.

    Attributes:
        ranks, microbatches: p and m.
        costs: seconds of F, I and W of each stage.
        microbatch_bytes: bytes that each stage keeps of one microbatch, from its F to its W.
        cap: bytes that a rank may keep of all.
    """

    ranks: int
    microbatches: int
    costs: Costs
    microbatch_bytes: tuple[float, ...]
    cap: float


_SLACK = 1.01
_A100_COSTS = Costs([29.718e-3] * 8, [29.444e-3] * 8, [19.927e-3] * 8, 0.527e-3)
TASKS = {
    "a GPT-2 of 16 blocks, recorded on a CPU": CappedPipeline(
        4, 8, Costs([16.2e-3, 19.1e-3, 16.9e-3, 13.1e-3], [18.8e-3, 16.1e-3, 16.5e-3, 11.3e-3],
                    [6.2e-3, 6.4e-3, 7.1e-3, 6.5e-3]), (9.2e6, 9.2e6, 9.2e6, 7.5e6), 37e6),
    "GPT-2 124M by its FLOPs, the head alone on rank 3": CappedPipeline(
        4, 8, Costs([4.0, 4.0, 4.0, 4.5], [4.0, 4.0, 4.0, 4.5], [4.0, 4.0, 4.0, 4.5]),
        (0.43e9, 0.43e9, 0.43e9, 1.24e9), 2.6e9),
    "6.2B, recorded on A100s, with room": CappedPipeline(8, 24, _A100_COSTS, (1.0e9,) * 8, 15.5e9),
    "the same, with room for 12": CappedPipeline(8, 24, _A100_COSTS, (1.0e9,) * 8, 12.5e9),
}  # fmt: skip


def family(task: CappedPipeline) -> list[Schedule]:
    """What fits of 1F1B and of twice its warm-up, with W as late as a rank's memory lets it be."""
    fitting = []
    for stretch in (1, 2):
        warmups = [stretch * (task.ranks - r) - stretch + 1 for r in range(task.ranks)]
        room = [int(task.cap // nbytes) for nbytes in task.microbatch_bytes]
        if all(warmup <= most for warmup, most in zip(warmups, room, strict=True)):
            lags = [min(stretch * r, room[r] - warmups[r]) for r in range(task.ranks)]
            ranks = enumerate(zip(warmups, lags, strict=True))
            rows = [_rank_actions(r, warmup, lag, task.microbatches) for r, (warmup, lag) in ranks]
            fitting.append(Schedule(rows))
    return fitting


def _rank_actions(r: int, warmup: int, lag: int, m: int) -> list[str]:
    """`warmup` forwards, then I, W and F in turn, W `lag` microbatches behind I."""
    row = [f"{r}F{k}" for k in range(min(warmup, m))]
    for k in range(m):
        row.append(f"{r}I{k}")
        row += [f"{r}W{k - lag}"] * (k >= lag) + [f"{r}F{k + warmup}"] * (k + warmup < m)
    return row + [f"{r}W{k}" for k in range(max(0, m - lag), m)]


@exercise("06.4", "beat 1F1B under a cap", 30)
def beat_1f1b(plan: Callable[[CappedPipeline], Any]) -> Iterator[Finding]:
    for name, task in TASKS.items():
        schedule = parse_schedule(plan(task), task.ranks, task.microbatches, task.ranks, f"{name}: ")
        tl = schedule.simulate(task.costs)
        kept = [tl.peak_in_flight(r) * task.microbatch_bytes[schedule.stages_of(r)[0]] for r in tl.ranks]
        worst = max(range(task.ranks), key=lambda r: kept[r])
        yield keeps_to_cap(f"{name}: rank {worst}", kept[worst], task.cap)
        usual = schedules.make("1f1b", task.ranks, task.microbatches).simulate(task.costs).makespan
        target = _SLACK * min(other.simulate(task.costs).makespan for other in family(task))
        bubble = 1 - (1 - tl.bubble_fraction) * tl.makespan / target  # the same work in the target's time
        text = f"{name}: {tl.makespan / usual:.3f} of 1F1B's step, target {target / usual:.3f}"
        text += f"; bubble {100 * tl.bubble_fraction:.1f} %, target {100 * bubble:.1f} %"
        yield Finding(tl.makespan <= target, text)

"""Notebook 05: bytes of any ZeRO stage, blocks to recompute, the order of all-gathers, a noise scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch

import hpnb
from hpnb.lesson.exercises.checker import Finding, WrongAnswer, exercise
from hpnb.lesson.exercises.findings import is_number
from hpnb.lesson.programs.device_timing import all_ranks
from hpnb.models import GPT2Size
from hpnb.theory import GatherTimeline, simulate_gathers

_TIMEOUT = 60.0

# --- bytes of any stage ----------------------------------------------------------------------

# GB on a GPU for 7.5e9 parameters: Rajbhandari et al. 2020 (arXiv 1910.02054), table 1.
PUBLISHED = {4: (120, 52.5, 41.3, 30.0), 16: (120, 35.6, 21.6, 7.5), 64: (120, 31.4, 16.6, 1.88),
             256: (120, 30.4, 15.4, 0.47), 1024: (120, 30.1, 15.1, 0.12)}  # fmt: skip
_TINY = GPT2Size(hidden=32, layers=2, heads=2, mlp=128, vocab_size=62, length=32)  # everything divides by 2


def _measure_states(stage: int) -> dict[str, int]:
    """On a rank: bytes of state after two steps of a tiny GPT-2 in float32 without AdamW's step counters."""
    axis = all_ranks("dp")
    model: Any = hpnb.models.gpt2(_TINY)
    model.loss_type = "ForCausalLM"
    wrapped: Any = model
    optimizer: torch.optim.Optimizer
    if stage in (1, 2):
        optimizer = hpnb.ZeroOptimizer(model.parameters(), torch.optim.AdamW, axis, stage=stage)
    else:
        wrapped = hpnb.fully_shard(model, axis) if stage == 3 else hpnb.DataParallel(model, axis)
        optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.arange(_TINY.length)[None] % _TINY.vocab_size

    def step() -> None:
        optimizer.zero_grad()
        wrapped(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    step()
    with hpnb.record.memory(model, optimizer) as recorder:
        step()
    last = recorder.profile().samples[-1]
    counters = sum(v.nbytes for state in optimizer.state.values() for v in state.values() if v.numel() == 1)
    optimizer_bytes = last.optimizer - counters
    return {"parameters": last.parameters, "gradients": last.gradients, "optimizer": optimizer_bytes}


def _parse_bytes(answer: Any) -> dict[str, float]:
    """An answer as {category: bytes}. Raises WrongAnswer where it is no such thing."""
    names = ("parameters", "gradients", "optimizer")
    if not isinstance(answer, Mapping) or set(answer) != {*names} or not all(map(is_number, answer.values())):
        wanted = "{'parameters': .., 'gradients': .., 'optimizer': ..}"
        raise WrongAnswer(f"{answer!r} is no {wanted} in bytes")
    return {name: float(answer[name]) for name in names}


def _rounding(published: float) -> float:
    """Half a unit of its last digit."""
    return 0.5 * 10.0 ** -len(f"{published:g}".partition(".")[2])


@exercise("05.1", "bytes of any stage", 10)
def state_bytes(answer: Callable[..., Any]) -> Iterator[Finding]:
    off: list[str] = []
    for ranks, row in PUBLISHED.items():
        for stage, published in enumerate(row):
            total = sum(_parse_bytes(answer(7.5e9, ranks, stage, 2, 2, 12)).values()) / 1e9
            if abs(total - published) > _rounding(published) * 1.001:
                off.append(f"stage {stage} on {ranks}: {total:.4g} GB, published {published:g}")
    text = "20 entries of the published table, 7.5e9 parameters"
    yield Finding(not off, f"{text}: " + (f"{len(off)} off; {off[0]}" if off else "all equal"))
    values = _TINY.parameters()
    with hpnb.Ranks(2, device="cpu", timeout=_TIMEOUT) as pool:
        for stage in range(4):
            measured = pool.run(_measure_states, stage)[0]
            parsed = _parse_bytes(answer(values, 2, stage, 4, 4, 8))
            wrong = [
                f"{name} {parsed[name]:,.0f}, measured {nbytes:,}"
                for name, nbytes in measured.items()
                if parsed[name] != nbytes
            ]
            result = "; ".join(wrong) or f"{sum(measured.values()):,} bytes, as recorded"
            yield Finding(not wrong, f"stage {stage}, {values:,} float32 parameters on 2 ranks: {result}")


# --- which blocks to recompute ---------------------------------------------------------------


@dataclass(frozen=True)
class BlockCost:
    """What a block costs. Bytes, seconds.

    Attributes:
        activations: what its forward stores for its backward.
        input: what goes into it: all that is stored if it is recomputed.
        seconds: of its forward.
    """

    activations: float
    input: float
    seconds: float


def peak_activations(layers: Sequence[BlockCost], chosen: Sequence[int], head: float) -> float:
    """The most bytes of activations at any moment of a backward, if the `chosen` blocks are recomputed."""
    recomputed = set(chosen)
    stored = [layer.input if i in recomputed else layer.activations for i, layer in enumerate(layers)]
    before_backward = sum(stored) + head
    inside = [
        sum(stored[:i]) + layer.input * (i in recomputed) + layer.activations
        for i, layer in enumerate(layers)
    ]
    return max(before_backward, *inside)


def _least_seconds(layers: Sequence[BlockCost], head: float, budget: float) -> float:
    """The fewest seconds of recomputation, by trying every choice."""
    fitting = (
        sum(layers[i].seconds for i in choice)
        for count in range(len(layers) + 1)
        for choice in combinations(range(len(layers)), count)
        if peak_activations(layers, choice, head) <= budget
    )
    return min(fitting, default=math.inf)


_EQUAL = tuple(BlockCost(28, 1, 3.0) for _ in range(6))
_SIZES = ((30, 1, 4.0), (24, 1, 2.5), (40, 2, 7.0), (12, 1, 1.0), (30, 1, 3.0), (18, 1, 2.0), (44, 2, 6.5),
          (26, 1, 3.0))  # fmt: skip
_MIXED = tuple(BlockCost(*sizes) for sizes in _SIZES)
CASES = (  # name, blocks, bytes of the head, budget
    ("six equal blocks", _EQUAL, 40.0, 150.0),
    ("six equal blocks, a light head", _EQUAL, 2.0, 150.0),
    ("eight that differ", _MIXED, 30.0, 180.0),
    ("eight that differ, a third of the memory", _MIXED, 10.0, 85.0),
    ("eight that differ, and memory for all", _MIXED, 10.0, 400.0),
)


@exercise("05.2", "which blocks to recompute", 20)
def recompute_choice(choose: Callable[..., Any]) -> Iterator[Finding]:
    for name, layers, head, budget in CASES:
        answer = choose(layers, head, budget)
        try:
            chosen = sorted({int(i) for i in answer})
        except TypeError:
            raise WrongAnswer(f"{name}: {answer!r} is no set of blocks") from None
        if any(i not in range(len(layers)) for i in chosen):
            raise WrongAnswer(f"{name}: {chosen}, and the blocks are 0 to {len(layers) - 1}")
        peak, best = peak_activations(layers, chosen, head), _least_seconds(layers, head, budget)
        took = sum(layers[i].seconds for i in chosen)
        text = f"{name}: recomputing {chosen or 'none'}"
        yield Finding(peak <= budget, f"{text}: peak {peak:g}, budget {budget:g}")
        if peak <= budget:
            least = took <= best * (1 + 1e-9)
            yield Finding(least, f"{text}: {took:g} s of recomputation, the least is {best:g}")


# --- the order of all-gathers ----------------------------------------------------------------


@dataclass(frozen=True)
class GatherTask:
    """A step of ZeRO stage 3 to plan for: blocks 0 to L-1 forward, then L-1 to 0 backward.

    Attributes:
        uses: the block of each use, in order.
        compute_seconds: of each use.
        gather_seconds: of an all-gather of each block.
        sizes: bytes of each gathered block.
        limit: bytes that gathered blocks may have together.
    """

    uses: tuple[int, ...]
    compute_seconds: tuple[float, ...]
    gather_seconds: tuple[float, ...]
    sizes: tuple[float, ...]
    limit: float


def gather_task(
    forward: Sequence[float], gather_seconds: Sequence[float], sizes: Sequence[float], limit: float
) -> GatherTask:
    """Backwards take twice as long as forwards."""
    order = list(range(len(forward)))
    seconds = [*forward, *(2 * forward[i] for i in reversed(order))]
    return GatherTask((*order, *reversed(order)), tuple(seconds), tuple(gather_seconds), tuple(sizes), limit)


TASKS = {
    "six equal blocks, memory for two": gather_task([1.0] * 6, [0.9] * 6, [1.0] * 6, 2.0),
    "a wide block behind narrow ones, memory for four": gather_task(
        [1.0, 1.0, 1.0, 2.0, 1.0, 1.0], [0.5, 0.5, 0.5, 1.9, 0.5, 0.5], [1.0, 1.0, 1.0, 2.0, 1.0, 1.0], 4.0
    ),
    "short forwards, memory for three": gather_task(
        [1.0, 0.4, 1.6, 0.4, 1.6, 1.0], [0.6] * 6, [1.0] * 6, 3.0
    ),
}


def run_plan(task: GatherTask, plan: Iterable[Iterable[int]]) -> GatherTimeline:
    """The simulation that judges a plan.

    Raises:
        ValueError: it computes with a block that is not gathered, or gathers one that is.
    """
    blocks = [[int(block) for block in starts] for starts in plan]
    return simulate_gathers(task.uses, task.compute_seconds, task.gather_seconds, task.sizes, blocks)


@exercise("05.3", "all-gathers without a stall", 25)
def gather_order(plan: Callable[[GatherTask], Any]) -> Iterator[Finding]:
    for name, task in TASKS.items():
        answer = plan(task)
        try:
            gathers = run_plan(task, answer)
        except (TypeError, ValueError, IndexError) as error:
            yield Finding(False, f"{name}: {error}")
            continue
        fits = gathers.most <= task.limit
        yield Finding(fits, f"{name}: at most {gathers.most:g} bytes gathered, limit {task.limit:g}")
        late = {k: wait for k, wait in enumerate(gathers.stalls) if k and wait > 1e-9}
        waits = ", ".join(f"use {k} (block {task.uses[k]}) {wait:.2g} s" for k, wait in late.items())
        yield Finding(not late, f"{name}: {f'waits: {waits}' if late else 'no use but the first waits'}")
        count, enough = len(gathers.gathers), 2 * len(task.sizes) - 1
        yield Finding(count <= enough, f"{name}: {count} gathers, {enough} are enough")


def plan_within_limit(task: GatherTask) -> list[list[int]]:
    """Gathers that start as early as the limit allows, in the order of uses: a right answer."""
    queue = [block for k, block in enumerate(task.uses) if k == 0 or task.uses[k - 1] != block]
    ready: set[int] = set()
    plan: list[list[int]] = [[] for _ in task.uses]
    for k, block in enumerate(task.uses):
        while queue and queue[0] not in ready:
            if sum(task.sizes[b] for b in {*ready, queue[0]}) > task.limit:
                break
            ready.add(queue[0])
            plan[k].append(queue.pop(0))
        if task.uses[k + 1 : k + 2] != (block,):
            ready.discard(block)
    return plan


def compared_plans(
    plan: Callable[[GatherTask], Any],
) -> tuple[dict[str, GatherTimeline], tuple[int, ...], str] | None:
    """For a figure: (the reader's simulated step above a right one, their uses, the task).

    It is the first task in which the reader's step waits or has too many bytes or gathers, or else the one
    with a wide block. None for a stub, and where none of the reader's plans can be simulated: `gather_order`
    then says why.
    """
    steps: dict[str, tuple[bool, GatherTimeline, GatherTimeline]] = {}
    for name, task in TASKS.items():
        try:
            answer = run_plan(task, plan(task))
        except Exception:
            continue
        right = run_plan(task, plan_within_limit(task))
        off = answer.stall > 1e-9 or answer.most > task.limit or len(answer.gathers) > len(right.gathers)
        steps[name] = (off, answer, right)
    if not steps:
        return None
    name = next((name for name, (off, *_) in steps.items() if off), "")
    name = name or next((name for name in steps if "wide" in name), next(iter(steps)))
    _, answer, right = steps[name]
    words = {f"{whose}, at most {step.most:g} bytes gathered": step
             for whose, step in (("yours", answer), ("right", right))}  # fmt: skip
    return words, TASKS[name].uses, f"{name[0].upper()}{name[1:]}"


# --- the noise scale -------------------------------------------------------------------------


def planted(
    signal: float, noise: float, small: int, ranks: int, steps: int, seed: int = 0
) -> tuple[list[list[float]], list[float]]:
    """(squared norms [step][rank] of gradients over `small` samples, squared norms of their mean).

    Gradients of 100 numbers: `signal` is |G|^2, `noise` is tr(S). The noise of a few steps is ten times as
    large as that of the others, as in training.
    """
    generator = torch.Generator().manual_seed(seed)
    size = 100
    G = torch.ones(size, dtype=torch.float64) * (signal / size) ** 0.5
    per_rank, reduced = [], []
    loudness = torch.ones(steps, dtype=torch.float64)
    loudness[:: max(1, steps // 8)] = 10.0
    loudness /= loudness.mean()
    for step in range(steps):
        deviation = (noise * float(loudness[step]) / small / size) ** 0.5
        g = G + deviation * torch.randn(ranks, size, generator=generator, dtype=torch.float64)
        per_rank.append(g.square().sum(1).tolist())
        reduced.append(float(g.mean(0).square().sum()))
    return per_rank, reduced


@exercise("05.4", "a noise scale from two norms", 15)
def noise_scale(scale: Callable[..., Any]) -> Iterator[Finding]:
    for seed, (signal, noise, small, ranks) in enumerate(
        ((1.0, 40.0, 4, 4), (0.2, 30.0, 16, 8), (1.0, 2.0, 2, 16))
    ):
        answer = scale(*planted(signal, noise, small, ranks, 4000, seed), small)
        text = f"{ranks} ranks of {small} samples, planted {noise / signal:g}"
        if not is_number(answer):
            raise WrongAnswer(f"{text}: {answer!r} is no number")
        ratio = answer * signal / noise
        yield Finding(0.9 <= ratio <= 1.1, f"{text}: your answer is {answer:.3g}, {ratio:.2f} times that")

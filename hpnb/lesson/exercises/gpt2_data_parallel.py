"""Notebook 05: bytes of any stage, blocks to compute again, gathers that nobody waits for, a noise scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch

import hpnb
from hpnb.lesson.exercises.checker import Exercise, Finding
from hpnb.mesh import Layout, Mesh
from hpnb.models import GPT2Size
from hpnb.theory import GatherTimeline, simulate_gathers

_TIMEOUT = 60.0

# --- bytes of any stage ----------------------------------------------------------------------

# GB on a device for 7.5e9 parameters: Rajbhandari et al. 2020 (arXiv 1910.02054), table 1.
PUBLISHED = {4: (120, 52.5, 41.3, 30.0), 16: (120, 35.6, 21.6, 7.5), 64: (120, 31.4, 16.6, 1.88),
             256: (120, 30.4, 15.4, 0.47), 1024: (120, 30.1, 15.1, 0.12)}  # fmt: skip
_TINY = GPT2Size(hidden=32, layers=2, heads=2, mlp=128, vocab_size=62, length=32)  # everything divides by 2


def _keep(stage: int) -> dict[str, int]:
    """On a rank: what is held after two steps of a tiny GPT-2 in float32, AdamW's counters left out."""
    axis = Mesh(Layout(dp=hpnb.world_size())).dp
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
    held = recorder.profile().samples[-1]
    counters = sum(v.nbytes for state in optimizer.state.values() for v in state.values() if v.numel() == 1)
    return {
        "parameters": held.parameters,
        "gradients": held.gradients,
        "optimizer": held.optimizer - counters,
    }


def _said(answer: Any) -> dict[str, float] | None:
    """An answer as {category: bytes}, or None where it is no such thing."""
    if not isinstance(answer, Mapping) or set(answer) != {"parameters", "gradients", "optimizer"}:
        return None
    try:
        return {name: float(value) for name, value in answer.items()}
    except (TypeError, ValueError):
        return None


def _digits(published: float) -> float:
    """Half a unit of its last digit."""
    return 0.5 * 10.0 ** -len(f"{published:g}".partition(".")[2])


def _verify_bytes(kept: Callable[..., Any]) -> Sequence[Finding]:
    findings = []
    off: list[str] = []
    for ranks, row in PUBLISHED.items():
        for stage, published in enumerate(row):
            answer = kept(7.5e9, ranks, stage, 2, 2, 12)
            said = _said(answer)
            if said is None:
                wanted = "{'parameters': .., 'gradients': .., 'optimizer': ..}"
                return [Finding(False, f"{answer!r} is no {wanted} in bytes")]
            total = sum(said.values()) / 1e9
            if abs(total - published) > _digits(published) * 1.001:
                off.append(f"stage {stage} on {ranks}: {total:.4g} GB, published {published:g}")
    text = "20 entries of the published table, 7.5e9 parameters"
    findings.append(Finding(not off, f"{text}: " + (f"{len(off)} off; {off[0]}" if off else "all equal")))
    values = _TINY.parameters()
    with hpnb.Ranks(2, device="cpu", timeout=_TIMEOUT) as ranks_:
        for stage in range(4):
            held = ranks_.run(_keep, stage)[0]
            said = _said(kept(values, 2, stage, 4, 4, 8)) or {}
            told = {n: said.get(n, math.nan) for n in held}
            wrong = [f"{n} {told[n]:,.0f}, held {held[n]:,}" for n in held if told[n] != held[n]]
            words = "; ".join(wrong) or f"{sum(held.values()):,} bytes, as recorded"
            text = f"stage {stage}, {values:,} float32 parameters on 2 ranks"
            findings.append(Finding(not wrong, f"{text}: {words}"))
    return findings


kept = Exercise("05.1", "bytes of any stage", 10, _verify_bytes)


# --- which blocks to compute again -----------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """What a block costs. Bytes, seconds.

    Attributes:
        kept: what its forward keeps for its backward.
        input: what goes into it: all that is kept if it is computed again.
        seconds: of its forward.
    """

    kept: float
    input: float
    seconds: float


def peak(layers: Sequence[Layer], again: Sequence[int], head: float) -> float:
    """The most activations that a backward holds if the blocks in `again` are computed again."""
    chosen = set(again)
    stays = [layer.input if i in chosen else layer.kept for i, layer in enumerate(layers)]
    turn = sum(stays) + head  # the loss is there, and no backward has begun
    inside = [sum(stays[:i]) + layer.input * (i in chosen) + layer.kept for i, layer in enumerate(layers)]
    return max(turn, *inside)


def _best(layers: Sequence[Layer], head: float, budget: float) -> float:
    """The fewest seconds of computing again, by trying every choice."""
    able = (
        sum(layers[i].seconds for i in choice)
        for count in range(len(layers) + 1)
        for choice in combinations(range(len(layers)), count)
        if peak(layers, choice, head) <= budget
    )
    return min(able, default=math.inf)


_EQUAL = tuple(Layer(28, 1, 3.0) for _ in range(6))
_SIZES = ((30, 1, 4.0), (24, 1, 2.5), (40, 2, 7.0), (12, 1, 1.0), (30, 1, 3.0), (18, 1, 2.0), (44, 2, 6.5),
          (26, 1, 3.0))  # fmt: skip
_MIXED = tuple(Layer(*sizes) for sizes in _SIZES)
CASES = (
    ("six equal blocks", _EQUAL, 40.0, 150.0),
    ("six equal blocks, a light head", _EQUAL, 2.0, 150.0),
    ("eight that differ", _MIXED, 30.0, 180.0),
    ("eight that differ, a third of the memory", _MIXED, 10.0, 85.0),
    ("eight that differ, and room for all", _MIXED, 10.0, 400.0),
)


def _verify_choice(choose: Callable[..., Any]) -> Sequence[Finding]:
    findings = []
    for name, layers, head, budget in CASES:
        answer = choose(layers, head, budget)
        try:
            chosen = sorted({int(i) for i in answer})
        except TypeError:
            return [Finding(False, f"{name}: {answer!r} is no set of blocks")]
        if any(i not in range(len(layers)) for i in chosen):
            return [Finding(False, f"{name}: {chosen}, and the blocks are 0 to {len(layers) - 1}")]
        held, best = peak(layers, chosen, head), _best(layers, head, budget)
        took = sum(layers[i].seconds for i in chosen)
        text = f"{name}: again {chosen or 'none'}"
        findings.append(Finding(held <= budget, f"{text}: {held:g} held, budget {budget:g}"))
        if held <= budget:
            least = took <= best * (1 + 1e-9)
            findings.append(Finding(least, f"{text}: {took:g} s computed again, the least is {best:g}"))
    return findings


again = Exercise("05.2", "which blocks to compute again", 20, _verify_choice)


# --- the noise scale -------------------------------------------------------------------------


def planted(
    signal: float, noise: float, small: int, ranks: int, steps: int, seed: int = 0
) -> tuple[list[list[float]], list[float]]:
    """(squared norms [step][rank] of gradients over `small` samples, squared norms of their mean).

    Gradients of 100 numbers: `signal` is |G|^2, `noise` is tr(S). The noise of a few steps is ten times as
    large as that of the others, as in training.
    """
    draw = torch.Generator().manual_seed(seed)
    size = 100
    G = torch.ones(size, dtype=torch.float64) * (signal / size) ** 0.5
    per_rank, reduced = [], []
    loud = torch.ones(steps, dtype=torch.float64)
    loud[:: max(1, steps // 8)] = 10.0
    loud /= loud.mean()
    for step in range(steps):
        scale = (noise * float(loud[step]) / small / size) ** 0.5
        g = G + scale * torch.randn(ranks, size, generator=draw, dtype=torch.float64)
        per_rank.append(g.square().sum(1).tolist())
        reduced.append(float(g.mean(0).square().sum()))
    return per_rank, reduced


def _verify_noise(scale: Callable[..., Any]) -> Sequence[Finding]:
    findings = []
    cases = ((1.0, 40.0, 4, 4), (0.2, 30.0, 16, 8), (1.0, 2.0, 2, 16))
    for seed, (signal, noise, small, ranks) in enumerate(cases):
        per_rank, reduced = planted(signal, noise, small, ranks, 4000, seed)
        answer = scale(per_rank, reduced, small)
        text = f"{ranks} ranks of {small} samples, planted {noise / signal:g}"
        if not isinstance(answer, (int, float)) or not math.isfinite(answer):
            findings.append(Finding(False, f"{text}: {answer!r} is no number"))
            continue
        ratio = answer * signal / noise
        said = f"{text}: you find {answer:.3g}, {ratio:.2f} times that"
        findings.append(Finding(0.9 <= ratio <= 1.1, said))
    return findings


scale = Exercise("05.4", "a noise scale from two norms", 15, _verify_noise)


# --- the order of gathers --------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A step of ZeRO-3 to plan for: blocks 0 to L-1 forward, then L-1 to 0 backward.

    Attributes:
        uses: the block of each use, in order.
        computing: seconds of each use.
        moving: seconds of a gather of each block.
        sizes: bytes of each whole block.
        room: bytes that whole blocks may have together.
    """

    uses: tuple[int, ...]
    computing: tuple[float, ...]
    moving: tuple[float, ...]
    sizes: tuple[float, ...]
    room: float


def step_of(forward: Sequence[float], moving: Sequence[float], sizes: Sequence[float], room: float) -> Step:
    """Backwards take twice as long as forwards."""
    order = list(range(len(forward)))
    computing = [*forward, *(2 * forward[i] for i in reversed(order))]
    return Step((*order, *reversed(order)), tuple(computing), tuple(moving), tuple(sizes), room)


STEPS = {
    "six equal blocks, room for two": step_of([1.0] * 6, [0.9] * 6, [1.0] * 6, 2.0),
    "a wide block behind narrow ones, room for four": step_of(
        [1.0, 1.0, 1.0, 2.0, 1.0, 1.0], [0.5, 0.5, 0.5, 1.9, 0.5, 0.5], [1.0, 1.0, 1.0, 2.0, 1.0, 1.0], 4.0
    ),
    "short forwards, room for three": step_of([1.0, 0.4, 1.6, 0.4, 1.6, 1.0], [0.6] * 6, [1.0] * 6, 3.0),
}


def run_plan(step: Step, plan: Sequence[Sequence[int]]) -> GatherTimeline:
    """The simulation that judges a plan.

    Raises:
        ValueError: it computes with a block that is not whole, or gathers one that is.
    """
    return simulate_gathers(step.uses, step.computing, step.moving, step.sizes, plan)


def _verify_order(plan: Callable[[Step], Any]) -> Sequence[Finding]:
    findings = []
    for name, step in STEPS.items():
        answer = plan(step)
        try:
            found = run_plan(step, [[int(block) for block in starts] for starts in answer])
        except (TypeError, ValueError, IndexError) as error:
            findings.append(Finding(False, f"{name}: {error}"))
            continue
        said = f"{name}: at most {found.most:g} bytes whole, room for {step.room:g}"
        findings.append(Finding(found.most <= step.room, said))
        late = {k: wait for k, wait in enumerate(found.stalls) if k and wait > 1e-9}
        waits = [f"use {k} (block {step.uses[k]}) {wait:.2g} s" for k, wait in late.items()]
        said = f"waits: {', '.join(waits)}" if waits else "no use but the first waits"
        findings.append(Finding(not waits, f"{name}: {said}"))
        fewest = 2 * len(step.sizes) - 1
        said = f"{name}: {len(found.gathers)} gathers, {fewest} are enough"
        findings.append(Finding(len(found.gathers) <= fewest, said))
    return findings


order = Exercise("05.3", "gathers that keep nobody waiting", 25, _verify_order)

__all__ = ["Layer", "Step", "again", "kept", "order", "peak", "run_plan", "scale"]

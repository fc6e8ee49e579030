"""Notebook 07: sharded heads, a vocabulary-parallel loss, masks to read, seeds, activation bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F

import hpnb
from hpnb import comm
from hpnb.data.tokenizer import IGNORE_INDEX
from hpnb.lesson.exercises.checker import Finding, WrongAnswer, exercise
from hpnb.lesson.exercises.findings import (
    ComparedRun,
    bytes_of,
    calls_of,
    diagnosis,
    exact,
    exact_runs,
    is_number,
    most_sent,
    normal,
    run_on_ranks,
)
from hpnb.lesson.programs.device_timing import all_ranks
from hpnb.lesson.programs.gpt2_tensor import attention
from hpnb.lesson.programs.step_timing import relative_distance
from hpnb.lesson.tables import number
from hpnb.theory import ACTIVATION_ROWS, Block

# --- heads -------------------------------------------------------------------------------------------

_HEAD_WIDTH = 4
_TOKENS = 6


def _run_split_heads(split: Callable[..., Any], heads: int) -> tuple[int, float]:
    """On a rank: (heads that it got, how far the summed output is from one process's)."""
    axis, h = all_ranks("tp"), heads * _HEAD_WIDTH
    shapes = ((_TOKENS, h), (h, 3 * h), (3 * h,), (h, h))
    x, qkv, bias, out = (normal(*shape, seed=i) for i, shape in enumerate(shapes))
    parts = split(qkv.clone(), bias.clone(), out.clone(), heads, axis)
    who = f"rank {axis.rank} of {axis.size} returned"
    if not isinstance(parts, tuple | list) or len(parts) != 3:
        raise WrongAnswer(f"{who} {type(parts).__name__}, and (columns, their bias, rows) are wanted")
    columns, column_bias, rows = parts
    width = rows.size(0)
    good = (columns.shape, column_bias.shape, rows.shape) == ((h, 3 * width), (3 * width,), (width, h))
    if not good or width % _HEAD_WIDTH or not width:
        has = ", ".join(str(tuple(part.shape)) for part in parts)
        wanted = f"for k heads of {_HEAD_WIDTH} they are ({h}, 3w), (3w,) and (w, {h}), w = {_HEAD_WIDTH}k"
        raise WrongAnswer(f"{who} shapes {has}; {wanted}")
    z = comm.all_reduce(attention(x @ columns + column_bias, width // _HEAD_WIDTH) @ rows, axis)
    right = attention(x @ qkv + bias, heads) @ out
    return width // _HEAD_WIDTH, relative_distance([z], [right])


@exercise("07.1", "split heads", 15)
def split_heads(split: Callable[..., Any]) -> Iterator[Finding]:
    for heads, ranks in ((12, 2), (25, 2), (23, 4), (25, 4)):
        text = f"{heads} heads over {ranks} ranks"
        runs = run_on_ranks(_run_split_heads, split, heads, ranks=ranks, case=text)
        yield exact((off for _, off in runs), f"{text}: the output beside one process's is")
        counts, most = [count for count, _ in runs], -(-heads // ranks)
        total = f"the ranks have {counts}, {sum(counts)} in all; none should have more than {most}"
        yield Finding(sum(counts) == heads and max(counts) <= most, f"{text}: {total}")


# --- a vocabulary-parallel loss --------------------------------------------------------------------------

_VOCAB_SIZE = 37
_LOSSES = {
    "all targets count": ([0, 36, 12, 13, 18, 25], 1.0),
    "some are -100": ([5, IGNORE_INDEX, 36, IGNORE_INDEX, 0, 20], 1e4),  # exp of such logits is infinite
    "all targets on one rank": ([1, 2, 3, 1, IGNORE_INDEX, 2], 1.0),
    "none counts": ([IGNORE_INDEX] * 6, 1.0),
}  # targets, and how large logits are


def _run_losses(loss: Callable[..., Any]) -> dict[str, ComparedRun]:
    axis, runs = all_ranks("tp"), {}
    share = comm.split_sizes(_VOCAB_SIZE, axis.size)
    first = sum(share[: axis.rank])
    local = slice(first, first + share[axis.rank])
    for k, (name, (targets, scale)) in enumerate(_LOSSES.items()):
        ids = torch.tensor(targets)
        full = (scale * normal(len(targets), _VOCAB_SIZE, seed=k)).requires_grad_()
        logits = full.detach()[:, local].clone().requires_grad_()
        right = F.cross_entropy(full, ids, ignore_index=IGNORE_INDEX, reduction="sum")
        right.backward()
        with hpnb.record.traffic() as forward:
            pair = loss(logits, ids.clone(), first, axis)
        who = f"{name}: rank {axis.rank} returned"
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], torch.Tensor):
            raise WrongAnswer(f"{who} {type(pair).__name__}, and (sum, count) is wanted")
        total, count = pair
        if total.dim() or not total.requires_grad:
            has = "with" if total.requires_grad else "without"
            what = f"a sum of shape {tuple(total.shape)}, {has} a gradient"
            raise WrongAnswer(f"{who} {what}; it is one number that depends on the logits")
        with hpnb.record.traffic() as backward:
            total.backward()
        assert full.grad is not None
        grad, wanted = torch.zeros_like(logits) if logits.grad is None else logits.grad, full.grad[:, local]
        # Where no gradient is wanted, a relative distance has no meaning.
        gap = relative_distance([grad], [wanted]) if float(wanted.norm()) else float(grad.norm())
        distances = {
            "the sum": relative_distance([total], [right]),
            "the gradient of this rank's logits": gap,
        }
        runs[name] = ComparedRun(distances, list(forward.messages), list(backward.messages), float(count))
    return runs


@exercise("07.2", "a vocabulary-parallel loss", 25)
def vocab_parallel_loss(loss: Callable[..., Any]) -> Iterator[Finding]:
    for ranks in (2, 3):
        results = run_on_ranks(_run_losses, loss, ranks=ranks, case=f"{ranks} ranks")
        for name, (targets, _) in _LOSSES.items():
            runs = [result[name] for result in results]
            yield from exact_runs(runs, f"{ranks} ranks, {name}")
            counts, right = {run.measured for run in runs}, len(targets) - targets.count(IGNORE_INDEX)
            listed = ", ".join(f"{count:g}" for count in sorted(counts))
            text = f"{ranks} ranks, {name}: the count is {listed}, and {right} targets count"
            yield Finding(counts == {float(right)}, text)
        runs = [result["some are -100"] for result in results]
        forward, backward = (most_sent(runs, way) for way in ("forward", "backward"))
        text = f"{ranks} ranks: forward {calls_of(forward)}, at most 3 calls"
        text += f"; backward {calls_of(backward)}, target nothing"
        yield Finding(len(forward) <= 3 and not backward, text)
        most, total = 2 * (ranks - 1) / ranks * 8 * 3 * 6, bytes_of(forward)
        text = f"{ranks} ranks: {number(total, 'B')} leave a rank for 6 tokens, at most {number(most, 'B')}"
        if not total:
            text = f"{ranks} ranks: nothing leaves a rank, and no rank has all logits"
        yield Finding(0 < total <= most + 1e-6, text)


# --- masks to read -------------------------------------------------------------------------------------

RIGHT, DIFFERS, AGREES, REPEATS = "right", "differs", "agrees", "repeats"
_PLACES = ("embedding", "attention", "after attention", "MLP")
_ELEMENTS = 400


@dataclass(frozen=True)
class DropoutRecord:
    """What was dropped in a run, place by place.

    Attributes:
        sharded: {place: whether ranks have different parts of this activation; else it is replicated}.
        masks: {place: (steps, ranks, elements) of bool, True is dropped}.
    """

    sharded: Mapping[str, bool]
    masks: Mapping[str, torch.Tensor]


Seeds = Callable[[int, int, int, bool], int]  # (place, step, rank, sharded) -> a seed


def record_of(seeds: Seeds, sequence: bool, ranks: int = 4, steps: int = 3, p: float = 0.1) -> DropoutRecord:
    """The masks that generators with these seeds draw, of a model with or without sequence parallelism."""
    sharded = {place: place == "attention" or (sequence and place != "embedding") for place in _PLACES}
    masks = {}
    for i, place in enumerate(_PLACES):
        rows = [
            [_draw_mask(seeds(i, step, rank, sharded[place]), p) for rank in range(ranks)]
            for step in range(steps)
        ]
        masks[place] = torch.stack([torch.stack(row) for row in rows])
    return DropoutRecord(sharded, masks)


def _draw_mask(seed: int, p: float, elements: int = _ELEMENTS) -> torch.Tensor:
    return torch.rand(elements, generator=torch.Generator().manual_seed(seed)) < p


def _right_seed(place: int, step: int, rank: int, sharded: bool) -> int:
    return 1000 * place + 100 * step + (rank + 1 if sharded else 0)


def _wrong_in_one_place(place: int, step: int, rank: int, sharded: bool) -> int:
    """Right except after attention, where ranks always differ."""
    return _right_seed(place, step, rank, sharded or _PLACES[place] == "after attention")


RECORDS: tuple[tuple[str, Seeds, bool], ...] = (
    (DIFFERS, lambda place, step, rank, sharded: 1000 * place + 100 * step + rank, False),
    (RIGHT, _right_seed, False),
    (AGREES, lambda place, step, rank, sharded: _right_seed(place, step, 0, sharded), False),
    (RIGHT, _right_seed, True),
    # Ranks 0 and 2 share masks, and so do 1 and 3.
    (AGREES, lambda place, step, rank, sharded: _right_seed(place, step, rank % 2, sharded), True),
    (REPEATS, lambda place, step, rank, sharded: _right_seed(place, 0, rank, sharded), False),
    (DIFFERS, _wrong_in_one_place, False),
)


def _described() -> Iterator[tuple[str, DropoutRecord, str]]:
    for count, (truth, seeds, sequence) in enumerate(RECORDS, 1):
        record = record_of(seeds, sequence)
        sharded = ", ".join(place for place, is_sharded in record.sharded.items() if is_sharded)
        yield f"record {count}, sharded are {sharded}", record, truth


read_masks = diagnosis("07.3", "read the masks", 15, _described)


# --- a policy of seeds ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeshCoordinates:
    dp: int
    tp: int


@dataclass(frozen=True)
class DropoutSite:
    """A dropout of the model.

    Attributes:
        index: from 0, in the order of the forward; sites have different ones.
        sharded: whether its activation is sharded along tp; else it is replicated there.
    """

    index: int
    sharded: bool


_SITES = tuple(DropoutSite(index, sharded=index in (1, 4)) for index in range(6))
_MESH = [MeshCoordinates(dp, tp) for dp in range(2) for tp in range(4)]
_STEPS = (0, 1, 2, 3, 1000)
SeedKey = tuple[int, MeshCoordinates, DropoutSite, int]  # base seed, rank, site, step


def _collect_seeds(policy: Callable[..., Any]) -> dict[SeedKey, int]:
    """The seed of every rank, site and step.

    Raises:
        WrongAnswer: one is no seed, or is another when asked again.
    """
    seeds: dict[SeedKey, int] = {}
    keys = [
        (base, at, site, step) for base in (0, 1, 42) for at in _MESH for site in _SITES for step in _STEPS
    ]
    for key in keys:
        base, at, site, step = key
        seed, again = (policy(base, at, site, step) for _ in range(2))
        case = f"{at}, {site}, step {step}"
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise WrongAnswer(f"{case}: it returned {seed!r}, and an int is wanted")
        if not 0 <= seed < 2**63:
            raise WrongAnswer(f"{case}: it returned {seed}, and a generator takes 0 to 2^63 - 1")
        if seed != again:
            twice = f"called twice it says {seed} and {again}"
            raise WrongAnswer(f"{case}: {twice}, so a recomputed block drops something else")
        seeds[key] = seed
    return seeds


@exercise("07.4", "a policy of seeds", 20)
def seed_policy(policy: Callable[..., Any]) -> Iterator[Finding]:
    seeds = _collect_seeds(policy)
    masks = {seed: _draw_mask(seed, 0.5, 64) for seed in set(seeds.values())}
    yield Finding(True, "called twice it says the same, so a block can be recomputed")

    def pairs_are(equal: bool, pairs: list[tuple[SeedKey, SeedKey]], text: str) -> Finding:
        wrong = [(a, b) for a, b in pairs if torch.equal(masks[seeds[a]], masks[seeds[b]]) != equal]
        if not wrong:
            return Finding(True, f"{text}: all {len(pairs)} pairs of masks")
        a, b = wrong[0]
        bases = "" if a[0] == b[0] else f"seeds {a[0]} and {b[0]}, "
        example = f"such as {bases}{_describe_key(a)} and {_describe_key(b)}"
        return Finding(False, f"{text}: {len(wrong)} of {len(pairs)} pairs of masks do not, {example}")

    keys = list(seeds)
    ranks = [(a, b) for a, b in combinations(keys, 2) if (a[0], a[2], a[3]) == (b[0], b[2], b[3])]
    same_dp = [(a, b) for a, b in ranks if a[1].dp == b[1].dp]
    other_dp = [(a, b) for a, b in ranks if a[1].dp != b[1].dp]
    replicated, sharded = ([(a, b) for a, b in same_dp if a[2].sharded == kind] for kind in (False, True))
    yield pairs_are(True, replicated, "replicated along tp: ranks agree")
    yield pairs_are(False, sharded, "sharded along tp: ranks differ")
    yield pairs_are(False, other_dp, "other samples (dp): ranks differ")
    one_base = [key for key in keys if key[0] == 42]
    others = [(a, b) for a, b in combinations(one_base, 2) if (a[2], a[3]) != (b[2], b[3])]
    yield pairs_are(False, others, "other sites and steps, on any ranks: masks differ")
    # Not only of one step: a run whose base is 1 must not begin where that of base 0 stands after a step.
    bases = [(a, b) for a, b in combinations(keys, 2) if a[0] != b[0] and a[1] == b[1]]
    yield pairs_are(False, bases, "another base seed, whatever the sites and steps: masks differ")


def _describe_key(key: SeedKey) -> str:
    _, at, site, step = key
    return f"(dp {at.dp}, tp {at.tp}, site {site.index}, step {step})"


# --- activation bytes ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShardedLayer:
    """A transformer layer in 16 bits, and how ranks share it.

    Attributes:
        s, b, h, a: sequence length, batch size, hidden size, heads.
        t: ranks that share it; 1 is no parallelism.
        sequence: whether tokens are sharded between the pairs of matrices.
        recompute: "", "attention" or "full".
    """

    s: int
    b: int
    h: int
    a: int
    t: int = 1
    sequence: bool = False
    recompute: str = ""


_SHAPES = (ShardedLayer(1024, 1, 1600, 25), ShardedLayer(2048, 4, 12288, 96), ShardedLayer(8192, 2, 1024, 16))


def published(layer: ShardedLayer) -> float:
    """Bytes by the row of the table that fits.

    Raises:
        ValueError: there is no such row.
    """
    block = Block(layer.h, layer.a, layer.s, layer.b)
    for row in ACTIVATION_ROWS:
        key = (row.recompute, row.parallel, row.sequence)
        if key == (layer.recompute, layer.t > 1, layer.sequence):
            return row.published(block, layer.t)
    if layer.recompute == "full" and not layer.sequence:
        # The table has it on one rank alone: a block keeps its input, which tensor parallelism replicates.
        return next(row for row in ACTIVATION_ROWS if row.recompute == "full").published(block)
    raise ValueError(
        f"no row of the table has t={layer.t}, sequence={layer.sequence}, recompute={layer.recompute!r}; "
        "tokens are sharded over 2 ranks or more, and not where blocks are recomputed"
    )


@exercise("07.5", "activation bytes", 15)
def activation_bytes(kept: Callable[[ShardedLayer], Any]) -> Iterator[Finding]:
    for row in ACTIVATION_ROWS:
        wrong = []
        for shape in _SHAPES:
            for t in (2, 5) if row.parallel else (1,):
                layer = replace(shape, t=t, sequence=row.sequence, recompute=row.recompute)
                answer, wanted = kept(layer), published(layer)
                if is_number(answer) and math.isclose(answer, wanted, rel_tol=1e-9):
                    continue
                answered = repr(answer)
                if is_number(answer):
                    answered = f"{number(answer, 'B')}, {answer / wanted:.3f} times the formula"
                wrong.append(f"s {shape.s}, b {shape.b}, h {shape.h}, a {shape.a}, t {t}: {answered}")
        yield Finding(not wrong, f"{row.name}: " + (wrong[0] if wrong else "the published formula"))

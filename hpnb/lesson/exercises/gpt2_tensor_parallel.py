"""Notebook 07: heads dealt out, a loss of cut words, masks to read, a policy of seeds, activation bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F

import hpnb
from hpnb import comm
from hpnb.data.tokenizer import IGNORE_INDEX
from hpnb.lesson.exercises.checker import Exercise, Finding
from hpnb.lesson.exercises.gpt2_tensor_kept import Layer, kept, published
from hpnb.lesson.exercises.rank_checks import EXACT, NotThat, calls_of, launched, normal, off_by, worst_of
from hpnb.lesson.programs import vit_tensor
from hpnb.lesson.programs.gpt2_tensor import attention
from hpnb.lesson.programs.step_timing import relative_distance as distance
from hpnb.lesson.tables import number
from hpnb.record import Message

# --- heads -------------------------------------------------------------------------------------------

_WIDTH = 4  # of a head
_TOKENS = 6


def _run_share(share: Callable[..., Any], heads: int) -> tuple[int, float]:
    """On a rank: (heads that it got, how far the summed output is from one process's)."""
    axis, h = vit_tensor.tensor_axis(), heads * _WIDTH
    x, qkv, bias, out = (
        normal(*shape, seed=i) for i, shape in enumerate([(_TOKENS, h), (h, 3 * h), (3 * h,), (h, h)])
    )
    found = share(qkv.clone(), bias.clone(), out.clone(), heads, axis)
    who = f"rank {axis.rank} of {axis.size} returned"
    if not isinstance(found, tuple | list) or len(found) != 3:
        raise NotThat(f"{who} {type(found).__name__}, and (columns, their bias, rows) are wanted")
    columns, own_bias, rows = found
    width = rows.size(0)
    good = columns.shape == (h, 3 * width) and own_bias.shape == (3 * width,) and rows.shape == (width, h)
    if not good or width % _WIDTH or not width:
        shapes = ", ".join(str(tuple(each.shape)) for each in found)
        raise NotThat(
            f"{who} shapes {shapes}; for k heads of {_WIDTH} they are ({h}, 3w), (3w,) and (w, {h}), "
            f"w = {_WIDTH}k"
        )
    z = comm.all_reduce(attention(x @ columns + own_bias, width // _WIDTH) @ rows, axis)
    right = attention(x @ qkv + bias, heads) @ out
    return width // _WIDTH, distance([z], [right])


def _verify_share(share: Callable[..., Any]) -> Sequence[Finding]:
    findings = []
    for heads, ranks in ((12, 2), (25, 2), (23, 4), (25, 4)):
        ran = launched(_run_share, share, heads, ranks=ranks)
        text = f"{heads} heads over {ranks} ranks"
        if isinstance(ran, Finding):
            findings.append(Finding(False, f"{text}: {ran.text}"))
            continue
        dealt, apart = [got for got, _ in ran], worst_of([off for _, off in ran])
        findings.append(Finding(apart < EXACT, f"{text}: the output beside one process's is {off_by(apart)}"))
        most = -(-heads // ranks)
        said = f"{text}: dealt out as {dealt}, {sum(dealt)} in all; nobody should have more than {most}"
        findings.append(Finding(sum(dealt) == heads and max(dealt) <= most, said))
    return findings


share = Exercise("07.1", "deal out heads", 15, _verify_share)


# --- a loss of cut words -------------------------------------------------------------------------------

_VOCABULARY = 37
_LOSSES = {
    "all targets count": ([0, 36, 12, 13, 18, 25], 1.0),
    "some are -100": ([5, IGNORE_INDEX, 36, IGNORE_INDEX, 0, 20], 1e4),  # exp of such logits is infinite
    "all words of one rank": ([1, 2, 3, 1, IGNORE_INDEX, 2], 1.0),
    "none counts": ([IGNORE_INDEX] * 6, 1.0),
}  # targets, and how large logits are


@dataclass(frozen=True)
class _Loss:
    apart: dict[str, float]
    count: float
    forward: list[Message]
    backward: list[Message]


def _run_losses(loss: Callable[..., Any]) -> dict[str, _Loss]:
    axis, found = vit_tensor.tensor_axis(), {}
    for k, (name, (asked, scale)) in enumerate(_LOSSES.items()):
        targets = torch.tensor(asked)
        whole = (scale * normal(len(asked), _VOCABULARY, seed=k)).requires_grad_()
        share = comm.split_sizes(_VOCABULARY, axis.size)
        first = sum(share[: axis.rank])
        own = whole.detach()[:, first : first + share[axis.rank]].clone().requires_grad_()
        right = F.cross_entropy(whole, targets, ignore_index=IGNORE_INDEX, reduction="sum")
        right.backward()
        with hpnb.record.traffic() as there:
            pair = loss(own, targets.clone(), first, axis)
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], torch.Tensor):
            raise NotThat(
                f"{name}: rank {axis.rank} returned {type(pair).__name__}, and (sum, count) is wanted"
            )
        total, count = pair
        if total.dim() or not total.requires_grad:
            has = "with" if total.requires_grad else "without"
            words = f"a sum of shape {tuple(total.shape)}, {has} a gradient"
            raise NotThat(
                f"{name}: rank {axis.rank} returned {words}; it is one number that depends on the logits"
            )
        with hpnb.record.traffic() as back:
            total.backward()
        assert whole.grad is not None
        grad = torch.zeros_like(own) if own.grad is None else own.grad
        wanted = whole.grad[:, first : first + share[axis.rank]]
        apart = {
            "the sum": distance([total], [right]),
            "the gradient of this rank's logits": _gap(grad, wanted),
        }
        found[name] = _Loss(apart, float(count), list(there.messages), list(back.messages))
    return found


def _gap(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative norm; where nothing is wanted, the norm itself."""
    return distance([found], [wanted]) if float(wanted.norm()) else float(found.norm())


def _verify_loss(loss: Callable[..., Any]) -> Sequence[Finding]:
    findings = []
    for ranks in (2, 3):
        ran = launched(_run_losses, loss, ranks=ranks)
        if isinstance(ran, Finding):
            findings.append(Finding(False, f"{ranks} ranks, {ran.text}"))
            continue
        for name, (asked, _) in _LOSSES.items():
            each = [one[name] for one in ran]
            for what in each[0].apart:
                apart = worst_of([one.apart[what] for one in each])
                findings.append(Finding(apart < EXACT, f"{ranks} ranks, {name}: {what}: {off_by(apart)}"))
            counts, true = {one.count for one in each}, len(asked) - asked.count(IGNORE_INDEX)
            words = ", ".join(f"{count:g}" for count in sorted(counts))
            said = f"{ranks} ranks, {name}: the count is {words}, and {true} targets count"
            findings.append(Finding(counts == {float(true)}, said))
        sent = ran[0]["some are -100"]
        said = f"{ranks} ranks: forward {calls_of(sent.forward)}, at most 3 calls"
        said += f"; backward {calls_of(sent.backward)}, target nothing"
        findings.append(Finding(len(sent.forward) <= 3 and not sent.backward, said))
        most = 2 * (ranks - 1) / ranks * 8 * 3 * 6
        total = sum(m.bytes for m in sent.forward)
        said = f"{ranks} ranks: {number(total, 'B')} leave a rank for 6 tokens, at most {number(most, 'B')}"
        if not total:
            said = f"{ranks} ranks: nothing leaves a rank, and no rank has all words"
        findings.append(Finding(0 < total <= most + 1e-6, said))
    return findings


loss = Exercise("07.2", "a loss of cut words", 25, _verify_loss)


# --- masks to read -------------------------------------------------------------------------------------

RIGHT, DIFFERS, AGREES, REPEATS = "right", "differs", "agrees", "repeats"
_PLACES = ("embedding", "attention", "after attention", "MLP")
_ELEMENTS = 400


@dataclass(frozen=True)
class Masks:
    """What was dropped in a run, place by place.

    Attributes:
        cut: {place: whether each rank has a part of this activation of its own; else all have a copy}.
        masks: {place: (steps, ranks, elements) of bool, True is dropped}.
    """

    cut: Mapping[str, bool]
    masks: Mapping[str, torch.Tensor]


Seeds = Callable[[int, int, int, bool], int]  # (place, step, rank, cut) -> a seed


def record_of(seeds: Seeds, sequence: bool, ranks: int = 4, steps: int = 3, p: float = 0.1) -> Masks:
    """The masks that generators with these seeds draw, of a model with or without sequence parallelism."""
    cut = {place: place == "attention" or (sequence and place != "embedding") for place in _PLACES}
    masks = {}
    for i, place in enumerate(_PLACES):
        rows = [
            [_dropped(seeds(i, step, rank, cut[place]), p) for rank in range(ranks)] for step in range(steps)
        ]
        masks[place] = torch.stack([torch.stack(row) for row in rows])
    return Masks(cut, masks)


def _dropped(seed: int, p: float, elements: int = _ELEMENTS) -> torch.Tensor:
    return torch.rand(elements, generator=torch.Generator().manual_seed(seed)) < p


def _apart(place: int, step: int, rank: int, cut: bool) -> int:
    return 1000 * place + 100 * step + (rank + 1 if cut else 0)


def _one_place(place: int, step: int, rank: int, cut: bool) -> int:
    """Right but after attention, where ranks draw apart whether it is cut or not."""
    return _apart(place, step, rank, cut or _PLACES[place] == "after attention")


_RECORDS: tuple[tuple[str, Seeds, bool], ...] = (
    (DIFFERS, lambda place, step, rank, cut: 1000 * place + 100 * step + rank, False),
    (RIGHT, _apart, False),
    (AGREES, lambda place, step, rank, cut: _apart(place, step, 0, cut), False),
    (RIGHT, _apart, True),
    (AGREES, lambda place, step, rank, cut: _apart(place, step, rank % 2, cut), True),  # 0 and 2, 1 and 3
    (REPEATS, lambda place, step, rank, cut: _apart(place, 0, rank, cut), False),
    (DIFFERS, _one_place, False),
)


def _verify_read(read: Callable[[Masks], Any]) -> Sequence[Finding]:
    findings = []
    for count, (truth, seeds, sequence) in enumerate(_RECORDS, 1):
        record = record_of(seeds, sequence)
        answer = read(Masks(dict(record.cut), {place: m.clone() for place, m in record.masks.items()}))
        cut = ", ".join(place for place, is_cut in record.cut.items() if is_cut)
        said = f"record {count}, cut are {cut}: you say {answer!r}"
        findings.append(Finding(answer == truth, said + ("" if answer == truth else f", it is {truth!r}")))
    return findings


read = Exercise("07.3", "read the masks", 15, _verify_read)


# --- a policy of seeds ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Where:
    """The place of a rank in the mesh."""

    dp: int
    tp: int


@dataclass(frozen=True)
class Site:
    """A dropout of the model.

    Attributes:
        index: from 0, in the order of the forward; each site has another.
        cut: whether its activation is cut along tp; else it is replicated there.
    """

    index: int
    cut: bool


_SITES = (Site(0, False), Site(1, True), Site(2, False), Site(3, False), Site(4, True), Site(5, False))
_MESH = [Where(dp, tp) for dp in range(2) for tp in range(4)]
_STEPS = (0, 1, 2, 3, 1000)


def _seed(policy: Callable[..., Any], base: int, where: Where, site: Site, step: int) -> int | str:
    """A seed, or what is wrong with it."""
    answer = policy(base, where, site, step)
    if isinstance(answer, bool) or not isinstance(answer, int):
        return f"it returned {answer!r}, and an int is wanted"
    if not 0 <= answer < 2**63:
        return f"it returned {answer}, and a generator takes 0 to 2^63 - 1"
    return answer


def _verify_policy(policy: Callable[..., Any]) -> Sequence[Finding]:
    seeds: dict[tuple[int, Where, Site, int], int] = {}
    for base in (0, 1, 42):
        for where in _MESH:
            for site in _SITES:
                for step in _STEPS:
                    seed, again = (_seed(policy, base, where, site, step) for _ in range(2))
                    if isinstance(seed, str) or isinstance(again, str):
                        said = seed if isinstance(seed, str) else str(again)
                        return [Finding(False, f"{where}, {site}, step {step}: {said}")]
                    if seed != again:
                        said = f"{where}, {site}, step {step}: asked twice it says {seed} and {again}, so a "
                        return [Finding(False, said + "block that is computed again drops something else")]
                    seeds[base, where, site, step] = seed
    masks = {seed: _dropped(seed, 0.5, 64) for seed in set(seeds.values())}
    findings = [Finding(True, "asked twice it says the same, so a block can be computed again")]

    def same(a: tuple[int, Where, Site, int], b: tuple[int, Where, Site, int]) -> bool:
        return bool(torch.equal(masks[seeds[a]], masks[seeds[b]]))

    def told(pairs: list[Any], alike: bool, good: str) -> None:
        wrong = [(a, b) for a, b in pairs if same(a, b) != alike]
        words = f"{good}: all {len(pairs)} pairs of masks"
        if wrong:
            (base, *a), (other, *b) = wrong[0]
            seed = "" if base == other else f"seeds {base} and {other}, "
            words = f"{good}: {len(wrong)} of {len(pairs)} pairs of masks do not, such as {seed}"
            words += f"{_in_words(*a)} and {_in_words(*b)}"
        findings.append(Finding(not wrong, words))

    at = list(seeds)
    ranks = [(a, b) for a, b in combinations(at, 2) if (a[0], a[2], a[3]) == (b[0], b[2], b[3])]
    same_dp = [(a, b) for a, b in ranks if a[1].dp == b[1].dp]
    told([(a, b) for a, b in same_dp if not a[2].cut], True, "replicated along tp: ranks agree")
    told([(a, b) for a, b in same_dp if a[2].cut], False, "cut along tp: ranks differ")
    told([(a, b) for a, b in ranks if a[1].dp != b[1].dp], False, "other samples (dp): ranks differ")
    first = [key for key in at if key[0] == 42]
    others = [
        (a, b) for a, b in combinations(first, 2) if (a[2], a[3]) != (b[2], b[3])
    ]  # whatever their ranks: a seed is not used twice
    told(others, False, "other sites and steps, on any ranks: masks differ")
    # Not only of one step: a run whose base is 1 must not begin where that of base 0 stands after a step.
    seeded = [(a, b) for a, b in combinations(at, 2) if a[0] != b[0] and a[1] == b[1]]
    told(seeded, False, "another base seed, whatever the sites and steps: masks differ")
    return findings


def _in_words(where: Where, site: Site, step: int) -> str:
    return f"(dp {where.dp}, tp {where.tp}, site {site.index}, step {step})"


policy = Exercise("07.4", "a policy of seeds", 20, _verify_policy)


__all__ = [
    "Layer",
    "Masks",
    "Site",
    "Where",
    "kept",
    "loss",
    "policy",
    "published",
    "read",
    "record_of",
    "share",
]

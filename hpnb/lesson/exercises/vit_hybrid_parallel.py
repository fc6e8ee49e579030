"""Notebook 04: rank to coordinates, axes on hosts, four curves, a norm, a tensor that is dealt anew."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch

import hpnb
from hpnb import comm
from hpnb.lesson.exercises.checker import Exercise, Finding
from hpnb.lesson.programs import host_traffic, vit_hybrid, vit_tensor
from hpnb.lesson.programs.step_timing import relative_distance as distance
from hpnb.lesson.tables import number
from hpnb.mesh import AXES, Layout, Mesh
from hpnb.models import GPT2Size, ViTSize
from hpnb.tensor_parallel import parallelize

_D = torch.float64
_EXACT = 1e-12
_TIMEOUT = 120.0
_TINY = ViTSize(hidden=16, layers=2, heads=4, mlp=32, patch=8, image=16)

# --- rank to coordinates ----------------------------------------------------------------------------

_LAYOUTS = (
    Layout(2, 2, 2),
    Layout(2, 3, 4),
    Layout(3, 2, 4, order=("pp", "dp", "tp")),
    Layout(4, 1, 2, order=("tp", "pp", "dp")),
)


def _verify_coordinates(coordinates: Callable[..., Any]) -> Sequence[Finding]:
    findings = []
    for layout in _LAYOUTS:
        sizes = {axis: getattr(layout, axis) for axis in AXES}
        name = ", ".join(f"{axis} {sizes[axis]}" for axis in layout.order)
        off = ""
        for rank in range(layout.world_size):
            answer, right = coordinates(rank, dict(sizes), tuple(layout.order)), layout.coordinates(rank)
            if not isinstance(answer, Mapping) or dict(answer) != right:
                off = f"rank {rank} is at {right}, you say {answer!r}"
                break
        findings.append(Finding(not off, f"{name}: {off or f'all {layout.world_size} ranks'}"))
    return findings


coordinates = Exercise("04.1", "rank to coordinates", 10, _verify_coordinates)


# --- axes on hosts ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Ranks that are to be laid on hosts.

    Attributes:
        sizes: {axis: ranks along it}.
        host: consecutive ranks share a host of so many.
        sent: {axis: bytes from a rank to its next on that axis}.
    """

    sizes: Mapping[str, int]
    host: int
    sent: Mapping[str, float]

    def flows(self, order: Sequence[str]) -> dict[tuple[int, int], float]:
        """{(sender, receiver): bytes} if the axes are nested in `order`, outermost first."""
        found = host_traffic.predicted_traffic(Layout(**self.sizes, order=tuple(order)), self.sent)
        return {pair: sum(by.values()) for pair, by in found.items()}


_PLACES = {
    "tp is the loudest": Place({"dp": 2, "pp": 2, "tp": 4}, 4, {"dp": 5e8, "pp": 1e8, "tp": 9e9}),
    "a wide model, few tokens": Place({"dp": 4, "pp": 2, "tp": 2}, 4, {"dp": 8e9, "pp": 2e8, "tp": 2e9}),
    "the loudest does not fit a host": Place(
        {"dp": 2, "pp": 3, "tp": 8}, 6, {"dp": 4e9, "pp": 3e9, "tp": 4.5e9}
    ),
    "hosts of 3": Place({"dp": 3, "pp": 2, "tp": 2}, 3, {"dp": 2e9, "pp": 1e9, "tp": 2.2e9}),
}


def over_the_border(job: Place, order: Sequence[str]) -> float:
    """Bytes of a step between ranks of different hosts."""
    return sum(n for (a, b), n in job.flows(order).items() if a // job.host != b // job.host)


def _verify_place(place: Callable[[Place], Any]) -> Sequence[Finding]:
    findings = []
    for name, job in _PLACES.items():
        order = place(job)
        if not isinstance(order, tuple | list) or sorted(map(str, order)) != sorted(AXES):
            findings.append(Finding(False, f"{name}: {order!r} does not name dp, pp and tp once each"))
            continue
        over, best = (over_the_border(job, each) for each in (order, fewest(job)))
        said = f"{name}: {' > '.join(order)} sends {number(over, 'B')} over borders"
        findings.append(Finding(over == best, f"{said}, the best {number(best, 'B')}"))
    return findings


def fewest(job: Place) -> tuple[str, ...]:
    """The order of the fewest bytes over borders."""
    return min(permutations(AXES), key=lambda order: over_the_border(job, order))


place = Exercise("04.2", "place the axes", 15, _verify_place)


# --- four healthy curves ----------------------------------------------------------------------------------

RIGHT, SWAPPED, NOT_DEALT, NOT_REDUCED = "right", "swapped", "not dealt out", "not reduced"


@dataclass(frozen=True)
class Run:
    """What instruments say of a few steps on dp 2 x tp 2.

    Attributes:
        losses: of rank 0.
        same_samples: {axis: whether the ranks along it had the same samples}.
        copies: {axis: how far apart the copies along it are of what no rank cuts, norms and embeddings;
            relative norm, after the last step}.
        calls: {axis: collectives of a step that rank 0 took part in, gradients and activations}.
    """

    losses: tuple[float, ...]
    same_samples: Mapping[str, bool]
    copies: Mapping[str, float]
    calls: Mapping[str, int]


def records() -> list[tuple[Run, str]]:
    """On 4 ranks: a record of each fault, and its name."""
    mesh = Mesh(Layout(dp=2, tp=2))
    draw = torch.Generator().manual_seed(3)
    whole = {
        "pixel_values": torch.randn(8, 3, 16, 16, dtype=_D, generator=draw),
        "labels": torch.arange(8) % 3,
    }
    whole["number"] = torch.arange(8)
    found = []
    for fault in (SWAPPED, NOT_DEALT, RIGHT, NOT_REDUCED):
        dp, tp = (mesh.tp, mesh.dp) if fault == SWAPPED else (mesh.dp, mesh.tp)
        batch = (
            {n: t[:4] for n, t in whole.items()}
            if fault == NOT_DEALT
            else vit_hybrid.local_rows(whole, mesh.dp)
        )
        numbers = batch.pop("number")
        model: Any = parallelize(vit_tensor.float64_vit(_TINY), tp)
        wrapped = model if fault == NOT_REDUCED else hpnb.DataParallel(model, dp)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses: list[float] = []
        calls: dict[str, int] = {}
        for _ in range(6):
            with hpnb.record.traffic() as counted:
                loss = wrapped(**batch).loss
                loss.backward()
            calls = {name: sum(m.axis == name for m in counted.messages) for name in ("dp", "tp")}
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        copies = vit_hybrid.replicated_parameters(model)
        axes = (mesh.dp, mesh.tp)
        same = {axis.name: vit_hybrid.replica_distance([numbers.double()], axis) == 0 for axis in axes}
        found.append(
            (
                Run(
                    tuple(losses), same, {a.name: vit_hybrid.replica_distance(copies, a) for a in axes}, calls
                ),
                fault,
            )
        )
    return found


def _verify_diagnose(diagnose: Callable[[Run], Any]) -> Sequence[Finding]:
    findings = []
    for count, (run, truth) in enumerate(hpnb.launch(records, ranks=4, device="cpu", timeout=_TIMEOUT)[0], 1):
        answer = diagnose(run)
        fell = f"record {count}, loss {run.losses[0]:.2f} to {run.losses[-1]:.2f}"
        findings.append(Finding(answer == truth, f"{fell}: it is {truth!r}, you say {answer!r}"))
    return findings


diagnose = Exercise("04.3", "four healthy curves", 15, _verify_diagnose)


# --- a norm counted once ----------------------------------------------------------------------------

_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT, dp 2 x tp 2": ("vit", {"tp_size": 2}),
    "GPT-2 with a tied embedding, dp 2 x pp 2": ("gpt2", {"pp_size": 2, "num_microbatches": 2}),
    "ViT, tp 2 x ZeRO 3 over dp 2": ("vit", {"tp_size": 2, "zero_stage": 3}),
}


def _model_and_batch(kind: str) -> tuple[Any, dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(4)
    if kind == "vit":
        batch = {
            "pixel_values": torch.randn(8, 3, 16, 16, dtype=_D, generator=draw),
            "labels": torch.arange(8) % 3,
        }
        return vit_tensor.float64_vit(_TINY), batch
    ids = torch.randint(0, 29, (8, 6), generator=draw)
    size = GPT2Size(hidden=16, layers=2, heads=4, mlp=32, vocab_size=29, length=8)
    return hpnb.models.gpt2(size, dtype=_D), {"input_ids": ids, "labels": ids}


def _norm_of_one(kind: str) -> float:
    model, batch = _model_and_batch(kind)
    logits = model(**{n: t for n, t in batch.items() if n != "labels"}).logits
    labels = batch["labels"]
    if kind == "gpt2":  # transformers' own loss is in float32
        logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    torch.nn.functional.cross_entropy(logits, labels).backward()
    return float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


def _norms(norm: Callable[..., Any]) -> dict[str, tuple[float, float, int, float]]:
    """On 4 ranks, of each case: the reader's, one process's, and how many messages and bytes it took."""
    found = {}
    for case, (kind, knobs) in _CASES.items():
        model, batch = _model_and_batch(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plugin = hpnb.HybridParallelPlugin(precision="fp64", **knobs)
        booster = hpnb.Booster(plugin=plugin)
        boosted: Any
        boosted, optimizer, *_ = booster.boost(model, optimizer)
        given = vit_hybrid.local_rows(batch, plugin.mesh.dp)
        booster.execute_pipeline(iter([given]), boosted, None, optimizer)
        held = [p for p in boosted.parameters() if p.grad is not None]
        with hpnb.record.traffic() as counted:
            mine = norm(held, [plugin.mesh.dp, plugin.mesh.pp, plugin.mesh.tp])
        if mine is None or mine is ...:
            raise NotImplementedError
        sent = [m for m in counted.messages if len(m.group) > 1]
        found[case] = (float(mine), _norm_of_one(kind), len(sent), max((m.bytes for m in sent), default=0.0))
    return found


def _verify_norm(norm: Callable[..., Any]) -> Sequence[Finding]:
    findings = []
    ran = hpnb.launch(_norms, norm, ranks=4, device="cpu", timeout=_TIMEOUT)
    for case in _CASES:
        each = [one[case] for one in ran]
        right = each[0][1]
        worst = max((mine for mine, *_ in each), key=lambda x: math.inf if math.isnan(x) else abs(x - right))
        off = abs(worst - right) / right
        said = f"{case}: {worst:.6f}, one process's {right:.6f}, {worst / right:.4f} times"
        findings.append(Finding(off < _EXACT, said))
        most, size = max(calls for *_, calls, _ in each), max(size for *_, size in each)
        said = f"{case}: {most} messages of at most {size:g} B a rank; target 3 at most, of a number or so"
        findings.append(Finding(most <= 3 and size <= 64, said))
    return findings


norm = Exercise("04.4", "a norm counted once", 20, _verify_norm)


# --- a tensor that changes its shares ---------------------------------------------------------------

_RESHARDS = ((12, 4, 2), (10, 3, 4), (7, 2, 7), (9, 3, 3), (25, 4, 3))


def _ranges(rows: int, ranks: int) -> list[range]:
    sizes = comm.split_sizes(rows, ranks)
    return [range(sum(sizes[:r]), sum(sizes[: r + 1])) for r in range(ranks)]


def _verify_reshard(moves: Callable[[int, int, int], Any]) -> Sequence[Finding]:
    findings = []
    for rows, old, new in _RESHARDS:
        name, plan = f"{rows} rows, {old} ranks to {new}", moves(rows, old, new)
        try:
            messages = [tuple(map(int, message)) for message in plan]
            fits = all(len(message) == 4 for message in messages)
        except (TypeError, ValueError):
            fits = False
        if not fits:
            findings.append(Finding(False, f"{name}: {plan!r} is no list of (source, target, start, stop)"))
            continue
        findings.append(_carried_out(name, rows, old, new, messages))
    return findings


def _carried_out(name: str, rows: int, old: int, new: int, messages: Sequence[tuple[int, ...]]) -> Finding:
    """Carry the messages out on a tensor, and see what each rank then has."""
    whole = torch.randn(rows, 3, dtype=_D, generator=torch.Generator().manual_seed(0))
    before, after = _ranges(rows, old), _ranges(rows, new)
    held = [{i: whole[i] for i in own} for own in before] + [
        dict[int, torch.Tensor]() for _ in range(new - old)
    ]
    arrived: list[dict[int, torch.Tensor]] = [{} for _ in range(max(old, new))]
    sent = 0
    for source, target, start, stop in messages:
        if not (0 <= source < old and 0 <= target < new):
            return Finding(
                False, f"{name}: ({source}, {target}, {start}, {stop}) names a rank that is not there"
            )
        if lacking := [i for i in range(start, stop) if i not in held[source]]:
            own = before[source]
            said = f"{name}: rank {source} cannot send row {lacking[0]}; it has {own.start} to {own.stop}"
            return Finding(False, said)
        arrived[target] |= {i: held[source][i] for i in range(start, stop)}
        sent += stop - start
    for rank, own in enumerate(after):
        has = held[rank] | arrived[rank]
        if missing := [i for i in own if i not in has]:
            return Finding(
                False, f"{name}: rank {rank} needs {own.start} to {own.stop} and lacks row {missing[0]}"
            )
        if distance([has[i] for i in own], [whole[i] for i in own]) > 0:
            return Finding(False, f"{name}: rank {rank} got other rows than its own")
    least = sum(i not in held[rank] for rank, own in enumerate(after) for i in own)
    return Finding(sent == least, f"{name}: {sent} rows travel, {least} must")


reshard = Exercise("04.5", "other shares of a tensor", 20, _verify_reshard)

__all__ = ["Place", "Run", "coordinates", "diagnose", "norm", "place", "records", "reshard"]

"""Notebook 04: rank to coordinates, axes on hosts, four curves, a norm, a tensor that changes its shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch

import hpnb
from hpnb import comm
from hpnb.lesson.exercises.checker import Finding, exercise
from hpnb.lesson.exercises.findings import EXACT
from hpnb.lesson.exercises.findings import diagnosis as diagnosis_exercise
from hpnb.lesson.programs import host_traffic, vit_hybrid, vit_tensor
from hpnb.lesson.tables import number
from hpnb.mesh import AXES, Layout, Mesh
from hpnb.models import GPT2Size, ViTSize
from hpnb.tensor_parallel import parallelize

_D = torch.float64
_TIMEOUT = 120.0
_TINY = ViTSize(hidden=16, layers=2, heads=4, mlp=32, patch=8, image=16)


def _vit_batch(seed: int) -> dict[str, torch.Tensor]:
    pixels = torch.randn(8, 3, 16, 16, dtype=_D, generator=torch.Generator().manual_seed(seed))
    return {"pixel_values": pixels, "labels": torch.arange(8) % 3}


# --- rank to coordinates ----------------------------------------------------------------------------

_LAYOUTS = (
    Layout(2, 2, 2),
    Layout(2, 3, 4),
    Layout(3, 2, 4, order=("pp", "dp", "tp")),
    Layout(4, 1, 2, order=("tp", "pp", "dp")),
)


@exercise("04.1", "rank to coordinates", 10)
def coordinates(answer: Callable[..., Any]) -> Iterator[Finding]:
    for layout in _LAYOUTS:
        sizes = {axis: getattr(layout, axis) for axis in AXES}
        name = ", ".join(f"{axis} {sizes[axis]}" for axis in layout.order)
        off = ""
        for rank in range(layout.world_size):
            at, right = answer(rank, dict(sizes), tuple(layout.order)), layout.coordinates(rank)
            if not isinstance(at, Mapping) or dict(at) != right:
                off = f"rank {rank} is at {right}, you say {at!r}"
                break
        yield Finding(not off, f"{name}: {off or f'all {layout.world_size} ranks'}")


# --- axes on hosts ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostPlacement:
    """Ranks that are to be placed on hosts.

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
        traffic = host_traffic.predicted_traffic(Layout(**self.sizes, order=tuple(order)), self.sent)
        return {pair: sum(by_axis.values()) for pair, by_axis in traffic.items()}

    def crossing_bytes(self, order: Sequence[str]) -> float:
        """Bytes of a step between ranks of different hosts."""
        return sum(n for (a, b), n in self.flows(order).items() if a // self.host != b // self.host)

    def best_order(self) -> tuple[str, ...]:
        """The order with the fewest bytes over borders."""
        return min(permutations(AXES), key=self.crossing_bytes)


_PLACEMENTS = {
    "tp is the loudest": ({"dp": 2, "pp": 2, "tp": 4}, 4, {"dp": 5e8, "pp": 1e8, "tp": 9e9}),
    "a wide model, few tokens": ({"dp": 4, "pp": 2, "tp": 2}, 4, {"dp": 8e9, "pp": 2e8, "tp": 2e9}),
    "the loudest does not fit a host": ({"dp": 2, "pp": 3, "tp": 8}, 6, {"dp": 4e9, "pp": 3e9, "tp": 4.5e9}),
    "hosts of 3": ({"dp": 3, "pp": 2, "tp": 2}, 3, {"dp": 2e9, "pp": 1e9, "tp": 2.2e9}),
}


@exercise("04.2", "place the axes", 15)
def place_axes(place: Callable[[HostPlacement], Any]) -> Iterator[Finding]:
    for name, case in _PLACEMENTS.items():
        task = HostPlacement(*case)
        order = place(task)
        if not isinstance(order, tuple | list) or sorted(map(str, order)) != sorted(AXES):
            yield Finding(False, f"{name}: {order!r} does not name dp, pp and tp once each")
            continue
        crossing, best = task.crossing_bytes(order), task.crossing_bytes(task.best_order())
        text = f"{name}: {' > '.join(order)} sends {number(crossing, 'B')} over borders"
        yield Finding(crossing == best, f"{text}, the best {number(best, 'B')}")


# --- four healthy curves ----------------------------------------------------------------------------------

RIGHT, SWAPPED, NOT_DEALT, NOT_REDUCED = "right", "swapped", "not dealt out", "not reduced"


@dataclass(frozen=True)
class MeshSymptoms:
    """What instruments say of a few steps on dp 2 x tp 2.

    Attributes:
        losses: of rank 0.
        same_samples: {axis: whether the ranks along it had the same samples}.
        copies: {axis: how far the copies of replicated parameters, norms and embeddings, have diverged along
            it; relative norm, after the last step}.
        calls: {axis: collectives of a step that rank 0 took part in, gradients and activations}.
    """

    losses: tuple[float, ...]
    same_samples: Mapping[str, bool]
    copies: Mapping[str, float]
    calls: Mapping[str, int]


def records() -> list[tuple[MeshSymptoms, str]]:
    """On 4 ranks: a record of each fault, and its name."""
    mesh = Mesh(Layout(dp=2, tp=2))
    full_batch = {**_vit_batch(3), "number": torch.arange(8)}
    symptoms = []
    for fault in (SWAPPED, NOT_DEALT, RIGHT, NOT_REDUCED):
        dp, tp = (mesh.tp, mesh.dp) if fault == SWAPPED else (mesh.dp, mesh.tp)
        batch = vit_hybrid.local_rows(full_batch, mesh.dp)
        if fault == NOT_DEALT:
            batch = {name: rows[:4] for name, rows in full_batch.items()}
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
        copies, axes = vit_hybrid.replicated_parameters(model), (mesh.dp, mesh.tp)
        same = {axis.name: vit_hybrid.replica_distance([numbers.double()], axis) == 0 for axis in axes}
        distances = {axis.name: vit_hybrid.replica_distance(copies, axis) for axis in axes}
        symptoms.append((MeshSymptoms(tuple(losses), same, distances, calls), fault))
    return symptoms


def _described() -> Iterator[tuple[str, MeshSymptoms, str]]:
    symptoms = hpnb.launch(records, ranks=4, device="cpu", timeout=_TIMEOUT)[0]
    for count, (record, truth) in enumerate(symptoms, 1):
        yield f"record {count}, loss {record.losses[0]:.2f} to {record.losses[-1]:.2f}", record, truth


diagnose = diagnosis_exercise("04.3", "four healthy curves", 15, _described)


# --- a norm counted once ----------------------------------------------------------------------------

_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT, dp 2 x tp 2": ("vit", {"tp_size": 2}),
    "GPT-2 with a tied embedding, dp 2 x pp 2": ("gpt2", {"pp_size": 2, "num_microbatches": 2}),
    "ViT, tp 2 x ZeRO 3 over dp 2": ("vit", {"tp_size": 2, "zero_stage": 3}),
}


def _model_and_batch(kind: str) -> tuple[Any, dict[str, torch.Tensor]]:
    if kind == "vit":
        return vit_tensor.float64_vit(_TINY), _vit_batch(4)
    ids = torch.randint(0, 29, (8, 6), generator=torch.Generator().manual_seed(4))
    size = GPT2Size(hidden=16, layers=2, heads=4, mlp=32, vocab_size=29, length=8)
    return hpnb.models.gpt2(size, dtype=_D), {"input_ids": ids, "labels": ids}


def _serial_norm(kind: str) -> float:
    model, batch = _model_and_batch(kind)
    logits = model(**{n: t for n, t in batch.items() if n != "labels"}).logits
    labels = batch["labels"]
    if kind == "gpt2":  # transformers' own loss is in float32
        logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    torch.nn.functional.cross_entropy(logits, labels).backward()
    return float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


def _run_norms(norm: Callable[..., Any]) -> dict[str, tuple[float, float, int, float]]:
    """On 4 ranks, of each case: the reader's norm, one process's, and how many messages and bytes it took."""
    results = {}
    for case, (kind, knobs) in _CASES.items():
        model, batch = _model_and_batch(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plugin = hpnb.HybridParallelPlugin(precision="fp64", **knobs)
        booster = hpnb.Booster(plugin=plugin)
        boosted: Any
        boosted, optimizer, *_ = booster.boost(model, optimizer)
        rows = vit_hybrid.local_rows(batch, plugin.mesh.dp)
        booster.execute_pipeline(iter([rows]), boosted, None, optimizer)
        parameters = [p for p in boosted.parameters() if p.grad is not None]
        with hpnb.record.traffic() as counted:
            answer = norm(parameters, [plugin.mesh.dp, plugin.mesh.pp, plugin.mesh.tp])
        if answer is None or answer is ...:
            raise NotImplementedError
        sent = [m.bytes for m in counted.messages if len(m.group) > 1]
        results[case] = (float(answer), _serial_norm(kind), len(sent), max(sent, default=0.0))
    return results


@exercise("04.4", "a norm counted once", 20)
def global_norm(norm: Callable[..., Any]) -> Iterator[Finding]:
    runs = hpnb.launch(_run_norms, norm, ranks=4, device="cpu", timeout=_TIMEOUT)
    for case in _CASES:
        norms, (right, *_), calls, sizes = zip(*(run[case] for run in runs), strict=True)
        worst = max(norms, key=lambda x: math.inf if math.isnan(x) else abs(x - right))
        off = abs(worst - right) / right
        text = f"{case}: {worst:.6f}, one process's {right:.6f}, {worst / right:.4f} times"
        yield Finding(off < EXACT, text)
        most, size = max(calls), max(sizes)
        text = f"{case}: {most} messages of at most {size:g} B a rank; target 3 at most, of a number or so"
        yield Finding(most <= 3 and size <= 64, text)


# --- a tensor that changes its shards ---------------------------------------------------------------

_RESHARDS = ((12, 4, 2), (10, 3, 4), (7, 2, 7), (9, 3, 3), (25, 4, 3))  # rows, ranks before, ranks after
Moves = Sequence[tuple[int, ...]]  # (source, target, start, stop)


def _ranges(rows: int, ranks: int) -> list[range]:
    sizes = comm.split_sizes(rows, ranks)
    return [range(sum(sizes[:r]), sum(sizes[: r + 1])) for r in range(ranks)]


@exercise("04.5", "other shares of a tensor", 20)
def reshard(answer: Callable[[int, int, int], Any]) -> Iterator[Finding]:
    for rows, old, new in _RESHARDS:
        name, plan = f"{rows} rows, {old} ranks to {new}", answer(rows, old, new)
        try:
            moves = [tuple(map(int, move)) for move in plan]
            fits = all(len(move) == 4 for move in moves)
        except (TypeError, ValueError):
            fits = False
        if not fits:
            yield Finding(False, f"{name}: {plan!r} is no list of (source, target, start, stop)")
            continue
        problem, sent, least = _carry_out(rows, old, new, moves)
        yield Finding(
            not problem and sent == least, f"{name}: {problem or f'{sent} rows travel, {least} must'}"
        )


def _carry_out(rows: int, old: int, new: int, moves: Moves) -> tuple[str, int, int]:
    """Carry the moves out on row numbers: (what is wrong, rows sent, rows that must be sent)."""
    before, after = _ranges(rows, old), _ranges(rows, new)
    held = [set(shard) for shard in before] + [set[int]() for _ in range(new - old)]
    arrived: list[set[int]] = [set() for _ in range(max(old, new))]
    sent = 0
    for source, target, start, stop in moves:
        if not (0 <= source < old and 0 <= target < new):
            return f"({source}, {target}, {start}, {stop}) names a rank that is not there", 0, 0
        if lacking := [i for i in range(start, stop) if i not in held[source]]:
            shard = before[source]
            has = f"it has {shard.start} to {shard.stop}"
            return f"rank {source} cannot send row {lacking[0]}; {has}", 0, 0
        arrived[target] |= set(range(start, stop))
        sent += stop - start
    for rank, shard in enumerate(after):
        if missing := [i for i in shard if i not in held[rank] | arrived[rank]]:
            return f"rank {rank} needs {shard.start} to {shard.stop} and lacks row {missing[0]}", 0, 0
    return "", sent, sum(i not in held[rank] for rank, shard in enumerate(after) for i in shard)

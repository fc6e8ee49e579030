"""Notebook 04: rank to coordinates, axes on nodes, four runs, a gradient norm, a tensor resharded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch

import hpnb
from hpnb import comm
from hpnb.lesson.exercises.checker import Finding, WrongAnswer, exercise
from hpnb.lesson.exercises.findings import EXACT
from hpnb.lesson.exercises.findings import diagnosis as diagnosis_exercise
from hpnb.lesson.programs import rank_traffic, vit_tensor
from hpnb.lesson.programs.step_timing import relative_distance
from hpnb.lesson.programs.vit_hybrid import local_samples
from hpnb.lesson.tables import number
from hpnb.mesh import AXES, Layout, Mesh
from hpnb.models import GPT2Size, ViTSize
from hpnb.placement import placement_of
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


# --- axes on nodes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlacementTask:
    """Ranks that are to be placed on nodes.

    Attributes:
        sizes: {axis: ranks along it}.
        node: consecutive ranks share a node of so many.
        sent: {axis: bytes from a rank to its next on that axis}.
    """

    sizes: Mapping[str, int]
    node: int
    sent: Mapping[str, float]

    def traffic(self, order: Sequence[str]) -> dict[tuple[int, int], float]:
        """{(sender, receiver): bytes} if the axes are nested in `order`, outermost first."""
        traffic = rank_traffic.predicted_traffic(Layout(**self.sizes, order=tuple(order)), self.sent)
        return {pair: sum(by_axis.values()) for pair, by_axis in traffic.items()}

    def bytes_between_nodes(self, order: Sequence[str]) -> float:
        return sum(n for (a, b), n in self.traffic(order).items() if a // self.node != b // self.node)

    def best_order(self) -> tuple[str, ...]:
        return min(permutations(AXES), key=self.bytes_between_nodes)


_PLACEMENTS = {
    "tp sends most": ({"dp": 2, "pp": 2, "tp": 4}, 4, {"dp": 5e8, "pp": 1e8, "tp": 9e9}),
    "a wide model, few tokens": ({"dp": 4, "pp": 2, "tp": 2}, 4, {"dp": 8e9, "pp": 2e8, "tp": 2e9}),
    "tp does not fit a node": ({"dp": 2, "pp": 3, "tp": 8}, 6, {"dp": 4e9, "pp": 3e9, "tp": 4.5e9}),
    "nodes of 3": ({"dp": 3, "pp": 2, "tp": 2}, 3, {"dp": 2e9, "pp": 1e9, "tp": 2.2e9}),
}


@exercise("04.2", "place the axes", 15)
def place_axes(place: Callable[[PlacementTask], Any]) -> Iterator[Finding]:
    for name, case in _PLACEMENTS.items():
        task = PlacementTask(*case)
        order = place(task)
        if not isinstance(order, tuple | list) or sorted(map(str, order)) != sorted(AXES):
            raise WrongAnswer(f"{name}: {order!r} does not name dp, pp and tp once each")
        crossing, best = task.bytes_between_nodes(order), task.bytes_between_nodes(task.best_order())
        text = f"{name}: {' > '.join(order)} sends {number(crossing, 'B')} between nodes"
        yield Finding(crossing == best, f"{text}, the best {number(best, 'B')}")


# --- four falling losses ----------------------------------------------------------------------------

CORRECT, SWAPPED, SAME_SAMPLES, NOT_REDUCED = "correct", "swapped", "same samples", "not reduced"


@dataclass(frozen=True)
class MeshSymptoms:
    """What instruments say of a few steps on dp 2 x tp 2. Each mapping has "dp" and "tp".

    Attributes:
        losses: of rank 0.
        same_samples: whether the ranks along the axis had the same samples.
        distances: between copies of norms and embeddings along the axis, after the last step; relative norm.
        collectives: of a step along the axis, of gradients and of activations.
    """

    losses: tuple[float, ...]
    same_samples: Mapping[str, bool]
    distances: Mapping[str, float]
    collectives: Mapping[str, int]


def replicated_parameters(module: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters that no axis but pp shards: norms, embeddings, biases of row-parallel layers."""
    return [p for p in module.parameters() if not placement_of(p).axes - {"pp"}]


@torch.no_grad()
def largest_distance(copies: Sequence[torch.Tensor], axis: hpnb.Axis) -> float:
    """Distance to the axis's first rank: the largest relative norm on any rank of the world."""
    first = [t.detach().clone() for t in copies]
    hpnb.data_parallel.broadcast(first, axis)
    distance = torch.tensor(relative_distance(copies, first), dtype=torch.float64, device=hpnb.device())
    torch.distributed.all_reduce(distance, torch.distributed.ReduceOp.MAX)
    return float(distance)


def records() -> list[tuple[MeshSymptoms, str]]:
    """On 4 ranks: a record of each fault, and its name."""
    mesh = Mesh(Layout(dp=2, tp=2))
    full_batch = {**_vit_batch(3), "number": torch.arange(8)}
    symptoms = []
    for fault in (SWAPPED, SAME_SAMPLES, CORRECT, NOT_REDUCED):
        dp, tp = (mesh.tp, mesh.dp) if fault == SWAPPED else (mesh.dp, mesh.tp)
        batch = local_samples(full_batch, mesh.dp)
        if fault == SAME_SAMPLES:
            batch = {name: samples[:4] for name, samples in full_batch.items()}
        numbers = batch.pop("number")
        model: Any = parallelize(vit_tensor.float64_vit(_TINY), tp)
        wrapped = model if fault == NOT_REDUCED else hpnb.DataParallel(model, dp)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses: list[float] = []
        collectives: dict[str, int] = {}
        for _ in range(6):
            with hpnb.record.traffic() as counted:
                loss = wrapped(**batch).loss
                loss.backward()
            collectives = {name: sum(m.axis == name for m in counted.messages) for name in ("dp", "tp")}
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        copies, axes = replicated_parameters(model), (mesh.dp, mesh.tp)
        same = {axis.name: largest_distance([numbers.double()], axis) == 0 for axis in axes}
        distances = {axis.name: largest_distance(copies, axis) for axis in axes}
        symptoms.append((MeshSymptoms(tuple(losses), same, distances, collectives), fault))
    return symptoms


def _described() -> Iterator[tuple[str, MeshSymptoms, str]]:
    symptoms = hpnb.launch(records, ranks=4, device="cpu", timeout=_TIMEOUT)[0]
    for count, (record, truth) in enumerate(symptoms, 1):
        yield f"record {count}, loss {record.losses[0]:.2f} to {record.losses[-1]:.2f}", record, truth


diagnose = diagnosis_exercise("04.3", "four falling losses", 15, _described)


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
        samples = local_samples(batch, plugin.mesh.dp)
        booster.execute_pipeline(iter([samples]), boosted, None, optimizer)
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
        text = f"{case}: {worst:.6f}, one process has {right:.6f}, {worst / right:.4f} times"
        yield Finding(off < EXACT, text)
        most, size = max(calls), max(sizes)
        text = f"{case}: {most} messages of at most {size:g} B a rank; target 3 at most, of a number or so"
        yield Finding(most <= 3 and size <= 64, text)


# --- a tensor resharded -----------------------------------------------------------------------------

_RESHARDS = ((12, 4, 2), (10, 3, 4), (7, 2, 7), (9, 3, 3), (25, 4, 3))  # rows, ranks before, ranks after
Moves = Sequence[tuple[int, ...]]  # (source, target, start, stop)


def _ranges(rows: int, ranks: int) -> list[range]:
    sizes = comm.split_sizes(rows, ranks)
    return [range(sum(sizes[:r]), sum(sizes[: r + 1])) for r in range(ranks)]


@exercise("04.5", "reshard a tensor", 20)
def reshard(answer: Callable[[int, int, int], Any]) -> Iterator[Finding]:
    for rows, old, new in _RESHARDS:
        name, plan = f"{rows} rows, {old} ranks to {new}", answer(rows, old, new)
        try:
            moves = [
                (int(source), int(target), int(start), int(stop)) for source, target, start, stop in plan
            ]
        except (TypeError, ValueError):
            raise WrongAnswer(f"{name}: {plan!r} is no list of (source, target, start, stop)") from None
        sent, least = _carry_out(name, rows, old, new, moves)
        yield Finding(sent == least, f"{name}: {sent} rows travel, {least} must")


def _carry_out(name: str, rows: int, old: int, new: int, moves: Moves) -> tuple[int, int]:
    """Carry the moves out on row numbers: (rows sent, rows that must be sent).

    Raises:
        WrongAnswer: a move cannot be carried out, or a rank lacks rows in the end.
    """
    before, after = _ranges(rows, old), _ranges(rows, new)
    stored = [set(shard) for shard in before] + [set[int]() for _ in range(new - old)]
    arrived: list[set[int]] = [set() for _ in range(max(old, new))]
    sent = 0
    for source, target, start, stop in moves:
        if not (0 <= source < old and 0 <= target < new):
            raise WrongAnswer(
                f"{name}: ({source}, {target}, {start}, {stop}) names a rank that does not exist"
            )
        if lacking := [i for i in range(start, stop) if i not in stored[source]]:
            shard = before[source]
            has = f"it has {shard.start} to {shard.stop}"
            raise WrongAnswer(f"{name}: rank {source} cannot send row {lacking[0]}; {has}")
        arrived[target] |= set(range(start, stop))
        sent += stop - start
    for rank, shard in enumerate(after):
        if missing := [i for i in shard if i not in stored[rank] | arrived[rank]]:
            needs = f"needs {shard.start} to {shard.stop}"
            raise WrongAnswer(f"{name}: rank {rank} {needs} and lacks row {missing[0]}")
    return sent, sum(i not in stored[rank] for rank, shard in enumerate(after) for i in shard)

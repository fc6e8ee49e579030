"""What notebook 03 runs on its ranks: a ViT in tensor parallelism, its gradients compared, its blocks timed.

Every rank calls what is here. In a Timeline from here I is all of the backward that an earlier layer waits
for, and W is the weight gradients that were deferred (`hpnb.tensor_parallel.async_all_reduce`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import hpnb
from hpnb import comm, theory
from hpnb.lesson import ledger
from hpnb.lesson.machine_card import MachineCard
from hpnb.lesson.page_sizes import PageSizes, choose_sizes
from hpnb.lesson.programs.device_timing import Batch, all_ranks, vit_and_batch, warmup_steps
from hpnb.lesson.programs.step_timing import median_by, relative_distance
from hpnb.mesh import Axis, Layout
from hpnb.models import ViTSize
from hpnb.record import Event, Timeline
from hpnb.record.recorder import Recorder, recording
from hpnb.tensor_parallel import full_gradients, full_state_dict, parallelize
from hpnb.tensor_parallel.async_all_reduce import DeferredWeightGrad


def tensor_axis() -> Axis:
    """All ranks, along tp."""
    return all_ranks("tp")


class ExclusiveRecorder(Recorder):
    """A recorder in which a span of computing ends where the rank itself carries a communication."""

    def _turn(self, event: Event) -> AbstractContextManager[object]:
        return self.paused() if event.axis else super()._turn(event)


def record_step(model: nn.Module, forward: Callable[[], torch.Tensor], repeats: int = 5) -> Timeline:
    """A forward and its backward on all ranks, and what travels: the repeat with the median makespan.

    Every rank calls it, with a model that `parallelize` has split. Gradients are dropped.
    """
    for _ in range(warmup_steps()):  # not recorded: ranks that share a GPU would take turns
        y = forward()
        y.backward(torch.ones_like(y))
        model.zero_grad(set_to_none=True)
    timelines = []
    for _ in range(repeats):
        recorder = ExclusiveRecorder()
        with recording(recorder), _weight_gradients(recorder):
            with recorder.span("F"):
                y = forward()
            seed = torch.ones_like(y)
            with recorder.span("I"):
                y.backward(seed)
        timelines.append(close_gaps(recorder.gather().shifted()))
        model.zero_grad(set_to_none=True)
    return median_by(timelines, lambda tl: tl.makespan)


def close_gaps(tl: Timeline) -> Timeline:
    """Compute after compute without a gap, where that is shorter than 1/300 of the makespan: there a rank
    only reads the clock, and does not wait.
    """
    events = []
    for on_rank in tl.by_rank.values():
        compute = [e for e in on_rank if e.is_compute]
        events += [e for e in on_rank if not e.is_compute]
        for e, after in pairwise(compute):
            near = 0 <= after.start - e.end < tl.makespan / 300
            events.append(replace(e, end=after.start) if near else e)
        events += compute[-1:]
    return replace(tl, events=tuple(events))


@contextmanager
def _weight_gradients(recorder: Recorder) -> Iterator[None]:
    """Inside, deferred weight gradients are recorded as "W"."""
    original = DeferredWeightGrad.compute

    def gradients(
        deferred: DeferredWeightGrad, weight: bool, bias: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        with recorder.paused(), recorder.span("W"):
            return original(deferred, weight, bias)

    DeferredWeightGrad.compute = gradients  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        DeferredWeightGrad.compute = original  # type: ignore[method-assign]


def blocks(
    size: ViTSize, images: int, dtype: torch.dtype, mode: str = "1d"
) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """A ViT split by `mode`, such as "1d", "1d+sp" for sequence parallelism, or "2d", and the forward of its
    blocks alone on random hidden states of `images` of the whole batch.
    """
    model, _ = vit_and_batch(size, 1, dtype)
    parallelize(model, tensor_axis(), mode.removesuffix("+sp"), mode.endswith("+sp"))
    layers: Any = model.get_submodule("vit.layers")
    width = layers[0].layernorm_before.weight.numel()  # of this rank
    x = torch.randn(images, size.tokens, width, device=hpnb.device(), dtype=dtype)

    def forward() -> torch.Tensor:
        y = x
        for layer in layers:
            y = layer(y)
        return y

    return model, forward


def record_block(
    size: ViTSize, images: int, dtype: torch.dtype, mode: str = "1d", repeats: int = 5
) -> Timeline:
    """Record forward and backward of one of `size`'s blocks. Every rank calls it.

    Where ranks share a GPU they compute by turns, and the record is replayed over `REPLAY_LINK`.
    """
    recorded = record_step(*blocks(replace(size, layers=1), images, dtype, mode), repeats)
    return replay_turns(recorded)


def replay_turns(tl: Timeline) -> Timeline:
    """The timeline as it is, or replayed over `REPLAY_LINK` where several ranks on one GPU took turns."""
    return theory.replay(tl, theory.REPLAY_LINK) if tl.source == "measured by turns" else tl


def mean_seconds(tl: Timeline, ops: Iterable[str] | None = None) -> float:
    """Seconds of events of these kinds ("FIW"; None: of what is sent), mean over the ranks."""
    wanted = None if ops is None else frozenset(ops)
    chosen = (e for e in tl.events if (not e.is_compute if wanted is None else e.op in wanted))
    return sum(e.duration for e in chosen) / len(tl.ranks)


def float64_vit(size: ViTSize) -> Any:
    """A float64 ViT of three classes; biases and norms are not 0 and 1, where a mistake would not show."""
    model = hpnb.models.vit(size, classes=3, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() < 2:
                p.add_(0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model.to(hpnb.device())


def serial_gradients(size: ViTSize, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    """(loss, {parameter: gradient}) of one process's float64_vit, in the order of the backward."""
    model = float64_vit(size)
    gradients: dict[str, torch.Tensor] = {}

    def complete(name: str, p: torch.Tensor) -> None:
        assert p.grad is not None
        gradients[name] = p.grad

    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(partial(complete, name))
    loss = model(**batch).loss
    loss.backward()
    return float(loss.detach()), gradients


def gradient_errors(model: nn.Module, right: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """{module: || g - g_right || / || g_right ||}, from the loss down. Every rank calls it.

    A module's bias and weight count together, because the gradient of a key's bias is only rounding.
    """
    gradients = full_gradients(model)
    modules: dict[str, list[str]] = {}
    for name in right:
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    return {
        module: relative_distance([gradients[name] for name in names], [right[name] for name in names])
        for module, names in modules.items()
    }


def distances_from(serial: nn.Module, sharded: nn.Module) -> dict[str, float]:
    """Relative distances of all gradients and of all weights of a sharded model. Every rank calls it."""
    gradients, weights = full_gradients(sharded), full_state_dict(sharded)
    right: dict[str, Any] = {n: p.grad for n, p in serial.named_parameters()}
    serial_weights = serial.state_dict()
    return {
        "gradients": relative_distance(gradients.values(), [right[n] for n in gradients]),
        "weights": relative_distance(weights.values(), [serial_weights[n] for n in weights]),
    }


def train_beside_one_process(size: ViTSize, data: Any, steps: int = 3) -> dict[str, float]:
    """`distances_from` of a serial and a 1D `float64_vit(size)` that trained alike. Every rank calls it."""
    transform = hpnb.data.ImageTransform(size.image, device=hpnb.device())
    batch = next(iter(hpnb.data.Loader(data, 16, transform=transform)))
    serial, sharded = float64_vit(size), float64_vit(size)
    parallelize(sharded, tensor_axis(), mode="1d")
    for model in (serial, sharded):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for _ in range(steps):
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
    return distances_from(serial, sharded)


@dataclass(frozen=True)
class TrainingRun:
    """What a rank saw of a training run: `gradient_errors` in the first step, losses of every step, and after
    every step the distances of this rank's norms and embeddings from those of rank 0.
    """

    errors: dict[str, float]
    losses: list[float]
    distances: list[float]


def train_and_compare(model: nn.Module, size: ViTSize, batch: Batch, axis: Axis, steps: int) -> TrainingRun:
    """Train a sharded `float64_vit(size)` on one batch with AdamW. Every rank calls it."""
    replicated = [p for n, p in model.named_parameters() if "norm" in n or "embeddings" in n]
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)
    errors: dict[str, float] = {}
    losses, distances = [], []
    for _ in range(steps):
        loss = model(**batch).loss
        loss.backward()
        errors = errors or gradient_errors(model, serial_gradients(size, batch)[1])
        optimizer.step()
        optimizer.zero_grad()
        rank_0 = [p.detach().clone() for p in replicated]
        hpnb.data_parallel.broadcast(rank_0, axis)
        losses.append(float(loss.detach()))
        distances.append(relative_distance(replicated, rank_0))
    return TrainingRun(errors, losses, distances)


def worst_gradient_error(size: ViTSize, mode: str, sequence_parallel: bool = False, depth: int = 1) -> float:
    """The largest error of a loss or a gradient of a ViT sharded over all ranks. Every rank calls it."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(8, 3, size.image, size.image, generator=generator)
    batch: Batch = {"pixel_values": pixels, "labels": torch.arange(8) % 3}
    model = parallelize(float64_vit(size), tensor_axis(), mode, sequence_parallel, depth)
    loss = model(**batch).loss
    loss.backward()
    serial_loss, right = serial_gradients(size, batch)
    off = abs(float(loss.detach()) / serial_loss - 1)
    return max(off, *gradient_errors(model, right).values())


def measure_block(
    size: ViTSize,
    images: int,
    dtype: torch.dtype,
    mode: str = "1d",
    sequence_parallel: bool = False,
    depth: int = 1,
) -> tuple[float, float]:
    """(bytes that leave this rank, bytes kept from forward to backward) of one block; every rank calls it.

    A ViT of two blocks less one of one block: everything outside the blocks cancels.
    """
    sent, kept = [], []
    for layers in (1, 2):
        model, batch = vit_and_batch(replace(size, layers=layers), images, dtype)
        parallelize(model, tensor_axis(), mode, sequence_parallel, depth)
        with hpnb.record.traffic() as traffic:
            with hpnb.record.memory(model) as recorder:
                loss = model(**batch).loss
            loss.backward()
        del loss
        sent.append(traffic.total)
        kept.append(recorder.profile().peak_of("activations"))
    return sent[1] - sent[0], float(kept[1] - kept[0])


def time_blocks(
    size: ViTSize, images: int, dtype: torch.dtype, modes: Sequence[str], repeats: int = 5
) -> dict[str, float]:
    """{mode: seconds of forward and backward of one of `size`'s blocks}, the median; modes take turns.

    Where ranks share a GPU, the recorded steps are replayed over `REPLAY_LINK`.
    """
    programs = {mode: blocks(size, images, dtype, mode) for mode in modes}

    def step(mode: str) -> None:
        _, forward = programs[mode]
        y = forward()
        y.backward(torch.ones_like(y))

    def drop_gradients(mode: str) -> None:
        model, _ = programs[mode]
        model.zero_grad(set_to_none=True)

    took = _median_makespans({mode: partial(step, mode) for mode in modes}, repeats, drop_gradients)
    return {mode: seconds / size.layers for mode, seconds in took.items()}


def time_halves(size: ViTSize, images: int, dtype: torch.dtype, repeats: int = 15) -> dict[str, float]:
    """{"all-reduce" | "reduce-scatter, all-gather": seconds} of hidden states, timed as in `time_blocks`."""
    axis = tensor_axis()
    tokens = images * size.tokens // axis.size * axis.size
    x = torch.randn(tokens, size.hidden, device=hpnb.device(), dtype=dtype)
    calls: dict[str, Callable[[], object]] = {
        "all-reduce": lambda: comm.all_reduce(x, axis),
        "reduce-scatter, all-gather": lambda: comm.all_gather(comm.reduce_scatter(x, axis, 0), axis, 0),
    }
    return _median_makespans(calls, repeats)


def _median_makespans(
    calls: Mapping[str, Callable[[], object]], repeats: int, clean_up: Callable[[str], None] | None = None
) -> dict[str, float]:
    """{name: median makespan} of calls that take turns; `clean_up(name)` runs after each, untimed."""
    took: dict[str, list[float]] = {name: [] for name in calls}
    warmup = warmup_steps()
    for repeat in range(warmup + repeats):
        for name, call in calls.items():
            if repeat < warmup:
                call()  # not recorded, so not by turns
            else:
                with hpnb.record.timeline() as recorder, recorder.span():
                    call()
                took[name].append(replay_turns(recorder.gather()).makespan)
            if clean_up is not None:
                clean_up(name)
    return {name: statistics.median(times) for name, times in took.items()}


ModeSeconds = dict[tuple[ViTSize, int], dict[str, float]]
"""{(size, images): {mode: seconds of one block}}"""


def source_of(ranks: hpnb.Ranks) -> str:
    """How `time_blocks` and `time_halves` get seconds on these ranks: "measured", or "replayed" where ranks
    take turns on a GPU."""
    return "replayed" if ranks.choice.shares_gpus else "measured"


def four_ranks(pool: hpnb.Ranks) -> tuple[hpnb.Ranks, PageSizes]:
    """(four ranks, which are those of `pool` if it has four; a width and a batch that keep them busy)."""
    ranks = pool if len(pool.members) == 4 else hpnb.Ranks(4)
    return ranks, choose_sizes("03.modes", ranks)


def add_to_ledger(
    ranks: hpnb.Ranks, measured: ModeSeconds, predicted: ModeSeconds, card: MachineCard, dtype: torch.dtype
) -> None:
    """A row of the ledger for each mode, of the largest batch: bytes, and seconds."""
    (size, images), seconds = max(measured.items(), key=lambda item: item[0][1])
    block = size.block(images, dtype.itemsize)
    for mode, took in seconds.items():
        grid = mode.removesuffix("+sp")
        sent, kept = ranks.run(measure_block, size, images, dtype, grid, mode != grid)[0]
        quantities = {
            "sent (B)": (theory.block_sent(block, grid, 4, 1, mode != grid).bytes(), sent),
            "kept (B)": (theory.activation_bytes(block, grid, 4, 1, mode != grid), kept),
            "forward and backward (s)": (predicted[size, images][mode], took),
        }
        name = f"one block of {size.hidden}, {str(dtype)[6:]}, {images} images, {mode}"
        ledger.add("03", Layout(tp=4), name, quantities, card.hardware)

"""What notebook 03 runs on its ranks: a ViT whose matrices are cut, its gradients compared, its blocks timed.

    pool.run(tensors.block_timeline, SIZE, 16, torch.float32)[0]          F, I, W and what is sent
    pool.run(tensors.per_block, SIZE, 16, torch.float32, "2d")[0]         bytes that a block sends and keeps
    pool.run(tensors.block_seconds, SIZE, 16, torch.float32, modes)[0]    seconds, modes taking turns

In a Timeline from here I is all of the backward that somebody upstream waits for, W the gradients of matrices
that were put off (`hpnb.tensor_parallel.async_all_reduce`). Nothing here imports matplotlib before it draws.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import hpnb
from hpnb import theory
from hpnb.lesson import ledger
from hpnb.lesson.machine_card import MachineCard
from hpnb.lesson.programs import vit_pipeline
from hpnb.lesson.programs.step_timing import distance
from hpnb.mesh import Axis, Layout, Mesh
from hpnb.models import SIZES, ViTSize
from hpnb.record import Timeline
from hpnb.record.recorder import Recorder, recording
from hpnb.tensor_parallel import full_gradients, parallelize
from hpnb.tensor_parallel.async_all_reduce import DeferredWeightGrad
from hpnb.theory import Block

Batch = Mapping[str, torch.Tensor]
_WARM = {"cpu": 1, "cuda": 3}  # steps before the first that counts


def tensor_axis() -> Axis:
    """All ranks, along tp."""
    return Mesh(Layout(tp=hpnb.world_size())).tp


# --- a step, recorded -------------------------------------------------------------------------------


class _Apart(Recorder):
    """A recorder of which a span of computing ends where the rank itself carries a communication."""

    @contextmanager
    def span(
        self,
        op: str = "compute",
        stage: int = -1,
        microbatch: int = -1,
        axis: str = "",
        nbytes: float = 0.0,
        group: Sequence[int] = (),
    ) -> Iterator[None]:
        with ExitStack() as stack:
            if axis:
                stack.enter_context(self.paused())
            stack.enter_context(super().span(op, stage, microbatch, axis, nbytes, group))
            yield


def record(model: nn.Module, forward: Callable[[], torch.Tensor], repeats: int = 5) -> Timeline:
    """A forward and its backward on all ranks, and what travels: the repeat with the median makespan.

    Every rank calls it, with a model that `parallelize` has cut. Gradients are dropped.
    """
    found = []
    for _ in range(_WARM[hpnb.device().type] + repeats):
        recorder = _Apart()
        with recording(recorder), _weight_gradients(recorder):
            with recorder.span("F"):
                y = forward()
            seed = torch.ones_like(y)
            with recorder.span("I"):
                y.backward(seed)
        found.append(closed(recorder.gather().shifted()))
        model.zero_grad(set_to_none=True)
    return sorted(found[-repeats:], key=lambda tl: tl.makespan)[repeats // 2]


def closed(tl: Timeline, gap: float = 1 / 300) -> Timeline:
    """Compute after compute without a gap, where that is shorter than `gap` of the makespan.

    Between two spans a rank looks at the clock, and that is no waiting.
    """
    events = []
    for own in tl.by_rank.values():
        compute = [e for e in own if e.is_compute]
        events += [e for e in own if not e.is_compute]
        for e, after in pairwise(compute):
            near = 0 <= after.start - e.end < gap * tl.makespan
            events.append(replace(e, end=after.start) if near else e)
        events += compute[-1:]
    return replace(tl, events=tuple(events))


@contextmanager
def _weight_gradients(recorder: Recorder) -> Iterator[None]:
    """Inside, gradients that were put off are "W"."""
    plain = DeferredWeightGrad.gradients

    def gradients(
        deferred: DeferredWeightGrad, weight: bool, bias: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        with recorder.paused(), recorder.span("W"):
            return plain(deferred, weight, bias)

    DeferredWeightGrad.gradients = gradients  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        DeferredWeightGrad.gradients = plain  # type: ignore[method-assign]


def blocks(
    size: ViTSize, images: int, dtype: torch.dtype, mode: str = "1d"
) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """A ViT that is cut by `mode`, and the forward of its blocks alone, on hidden states that are drawn.

    Every rank calls it.

    Args:
        images: rows of the whole batch.
        mode: "1d", "1d+sp" for sequence parallelism, "2d", ...
    """
    model, _ = vit_pipeline.vit_and_batch(size, 1, dtype)
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


def block_timeline(
    size: ViTSize, images: int, dtype: torch.dtype, mode: str = "1d", repeats: int = 5
) -> Timeline:
    """Record forward and backward of one of `size`'s blocks. Every rank calls it."""
    return record(*blocks(replace(size, layers=1), images, dtype, mode), repeats)


def spent(tl: Timeline, ops: Iterable[str] | None = None) -> float:
    """Seconds of events of these kinds ("FIW"; None: of what is sent), mean over the ranks."""
    wanted = None if ops is None else frozenset(ops)
    chosen = (e for e in tl.events if (not e.is_compute if wanted is None else e.op in wanted))
    return sum(e.duration for e in chosen) / len(tl.ranks)


# --- gradients, compared ----------------------------------------------------------------------------


def vit64(size: ViTSize) -> Any:
    """A float64 ViT of three classes; biases and norms are not 0 and 1, where a mistake would not show."""
    model = hpnb.models.vit(size, classes=3, dtype=torch.float64)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() < 2:
                p.add_(0.1 * torch.randn(p.shape, generator=draw, dtype=p.dtype))
    return model.to(hpnb.device())


def gradients_of_one(size: ViTSize, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    """(loss, {parameter: gradient}) of one process's vit64, in the order in which the backward has them."""
    model = vit64(size)
    found: dict[str, torch.Tensor] = {}

    def complete(name: str, p: torch.Tensor) -> None:
        assert p.grad is not None
        found[name] = p.grad

    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(partial(complete, name))
    loss = model(**batch).loss
    loss.backward()
    return float(loss.detach()), found


def gradient_errors(model: nn.Module, right: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """{module: || g - g_right || / || g_right ||}, from the loss down. Every rank calls it.

    A module's bias and weight count together, for the gradient of a key's bias is zero but for rounding.
    """
    found = full_gradients(model)
    modules: dict[str, list[str]] = {}
    for name in right:
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    return {
        module: distance([found[name] for name in names], [right[name] for name in names])
        for module, names in modules.items()
    }


# --- one block, by the difference of two models -----------------------------------------------------


def per_block(
    size: ViTSize,
    images: int,
    dtype: torch.dtype,
    mode: str = "1d",
    sequence_parallel: bool = False,
    depth: int = 1,
) -> tuple[float, float]:
    """(bytes that leave this rank, bytes kept from forward to backward) of one block; every rank calls it.

    A ViT of two blocks less one of one block: what lies around the blocks cancels.
    """
    found = []
    for layers in (1, 2):
        model, batch = vit_pipeline.vit_and_batch(replace(size, layers=layers), images, dtype)
        parallelize(model, tensor_axis(), mode, sequence_parallel, depth)
        with hpnb.record.traffic() as traffic:
            model(**batch).loss.backward()
        with hpnb.record.memory(model) as recorder:
            loss = model(**batch).loss
        del loss
        found.append((traffic.total, recorder.profile().peak_of("activations")))
    (sent, kept), (more, most) = found
    return more - sent, float(most - kept)


def block_seconds(
    size: ViTSize, images: int, dtype: torch.dtype, modes: Sequence[str], repeats: int = 5
) -> dict[str, float]:
    """{mode: seconds of forward and backward of one of `size`'s blocks}, the median; modes take turns.

    Every rank calls it. The arguments are those of `blocks`.
    """
    made = {mode: blocks(size, images, dtype, mode) for mode in modes}
    took: dict[str, list[float]] = {mode: [] for mode in modes}
    for _ in range(_WARM[hpnb.device().type] + repeats):
        for mode, (model, forward) in made.items():
            with hpnb.record.timeline() as recorder, recorder.span():
                y = forward()
                y.backward(torch.ones_like(y))
            took[mode].append(recorder.gather().makespan / size.layers)
            model.zero_grad(set_to_none=True)
    return {mode: statistics.median(times[-repeats:]) for mode, times in took.items()}


# --- modes that race on four ranks ------------------------------------------------------------------

Raced = dict[tuple[ViTSize, int], dict[str, float]]
"""{(size, images): {mode: seconds of one block}}"""


def four(pool: hpnb.Ranks) -> tuple[hpnb.Ranks, ViTSize, torch.dtype]:
    """(four ranks, on GPUs if there are as many; a ViT that is worth their while; its numbers).

    Args:
        pool: ranks on the default device; they are the four if they are four.
    """
    square = pool if len(pool.members) == 4 else hpnb.Ranks(4)
    if hpnb.ranks.choose_device("auto", 4).device == "cuda":
        return square, SIZES["l16"], torch.bfloat16
    return square, ViTSize(256, 8, 8, 1024, 8, 32), torch.float32


def race(square: hpnb.Ranks, shape: ViTSize, dtype: torch.dtype, modes: Sequence[str]) -> Raced:
    """Seconds of a block of two widths and a few batches in each mode, modes taking turns."""
    large = dtype == torch.bfloat16
    head = 64 if large else 16  # wide
    found: Raced = {}
    for hidden in (shape.hidden, 4 * shape.hidden if large else shape.hidden // 4):
        size = replace(shape, hidden=hidden, heads=hidden // head, mlp=4 * hidden, layers=2 if large else 1)
        for images in (4, 32, 256) if large else (8, 64):
            found[size, images] = square.run(block_seconds, size, images, dtype, modes, 5 if large else 3)[0]
    return found


def predicted(raced: Raced, card: MachineCard, dtype: torch.dtype) -> Raced:
    """The same by `theory.block_seconds`: matmuls at the card's rate, messages on its link, none hidden."""
    return {
        (size, images): {
            mode: _block_seconds(size.block(images, dtype.itemsize), mode, card) for mode in modes
        }
        for (size, images), modes in raced.items()
    }


def _block_seconds(block: Block, mode: str, card: MachineCard) -> float:
    plain = mode.removesuffix("+sp")
    return theory.block_seconds(block, plain, card.ranks, card.link, card.matmul, 1, mode != plain).total


def write_down(square: hpnb.Ranks, raced: Raced, told: Raced, card: MachineCard, dtype: torch.dtype) -> None:
    """A row of the ledger for each mode, of the first width and the second batch: bytes, and seconds."""
    (size, images), seconds = list(raced.items())[1]
    block = size.block(images, dtype.itemsize)
    for mode, took in seconds.items():
        plain = mode.removesuffix("+sp")
        sent, kept = square.run(per_block, size, images, dtype, plain, mode != plain)[0]
        quantities = {
            "sent (B)": (theory.block_sent(block, plain, 4, 1, mode != plain).bytes(), sent),
            "kept (B)": (theory.activation_bytes(block, plain, 4, 1, mode != plain), kept),
            "forward and backward (s)": (told[size, images][mode], took),
        }
        name = f"one block of {size.hidden}, {str(dtype)[6:]}, {images} images, {mode}"
        ledger.add("03", Layout(tp=4), name, quantities, card.hardware)

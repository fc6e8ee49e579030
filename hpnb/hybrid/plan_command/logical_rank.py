"""One rank of a thousand, alone: its real code on tensors without values, and the memory that it would take.

    profile = logical_rank(make_step, rank=37, world_size=1024, first=32)
    profile.at_peak                        # parameters, gradients, optimizer, activations, temporary

The model and the batch are on the meta device, where a tensor has a shape and no memory. The process group is
torch's fake one, whose collectives return at once. What a rank would read from others is filled in:

    numbers read from a tensor     ones: counts of targets, of parameters in use, of steps
    objects gathered               its own, once for each member
    objects broadcast              its own; a loss is a mean
    shapes of a pipeline's input   those that the first stage sends, whose rank runs before

So the loss means nothing, and every byte is one that the rank's own code allocates. Kernels are those of the
CPU. A rank whose code depends on values of others (routers of experts) is not predicted.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from hpnb import models
from hpnb.hybrid.booster import Booster
from hpnb.hybrid.plan_command.read_model import CLASSES, read_config, read_size
from hpnb.hybrid.plan_command.run_lines import plugin_options
from hpnb.hybrid.plugins import HybridParallelPlugin
from hpnb.mesh import ParallelLayout
from hpnb.models import GPT2_SIZES, SIZES, GPT2Size
from hpnb.pipeline_parallel.transfers import GroupQueue
from hpnb.ranks.current_rank import current, device
from hpnb.record import MemoryRecorder, memory
from hpnb.record.memory_profile import MemoryProfile
from hpnb.tensor_parallel import tp_1d
from hpnb.theory.model_shape import IMAGE_CHANNELS
from hpnb.theory.plan_task import PlanTask

META = torch.device("meta")
_attention = functional.scaled_dot_product_attention
Step = Callable[[], MemoryProfile]


def plan_rank(name: str, task: PlanTask, layout: ParallelLayout, dtype: str, rank: int) -> MemoryProfile:
    """The memory of the second step of the model `name` on one rank of `layout`."""
    first = layout.rank(**{**layout.coordinates(rank), "pp": 0})
    return logical_rank(lambda: make_step(name, task, layout, dtype), rank, layout.world_size, first)


@dataclass(frozen=True)
class RankTraining:
    """A model in training on this rank; `step` is forward, backward and update."""

    step: Callable[[], None]
    modules: Any
    optimizer: torch.optim.Optimizer

    def recording(self) -> AbstractContextManager[MemoryRecorder]:
        """`hpnb.record.memory` of this model and its optimizer."""
        return memory(self.modules, self.optimizer)


def build_training(
    name: str,
    task: PlanTask,
    layout: ParallelLayout,
    dtype: str,
    optimized: bool = False,
    look: Callable[[str], None] = lambda moment: None,
) -> RankTraining:
    """Model, AdamW and a batch on this rank's device, boosted. Inside ranks.

    Args:
        optimized: with `enable_all_optimization`, as the plan assumes. A logical rank has no device whose
            kernels a fused AdamW and compiled blocks need.
        look: called at "loss" between a forward and its backward, at "update" and at the "end" of a step.
    """
    where, m = device(), task.microbatches(layout)
    model, samples = _make_model(name, task), task.batch // layout.dp
    accumulated = m if layout.pp == 1 else 1  # without a pipeline microbatches are batches of their own
    options = {**plugin_options(task, layout), "enable_all_optimization": optimized}
    plugin = HybridParallelPlugin(**options, precision=dtype)
    fused = True if where.type == "cuda" else None  # torch's default takes copies of all states on a GPU
    booster, optimizer = Booster(plugin=plugin), torch.optim.AdamW(model.parameters(), fused=fused)

    def loss_of(outputs: Any, _: Any) -> Any:
        look("loss")
        return outputs.loss

    side = 0 if task.model.causal else model.config.image_size
    boosted, optimizer, criterion, *_ = booster.boost(model, optimizer, loss_of)
    del model  # which has the blocks of other stages, too

    def batch() -> Iterator[dict[str, torch.Tensor]]:
        size = samples // accumulated
        if task.model.causal:
            # The same on all ranks of a pipeline, whose generators differ.
            ids = torch.arange(size * task.sequence, device=where).remainder(task.model.outputs)
            ids = ids.view(size, task.sequence)
            yield {"input_ids": ids, "labels": ids}
        else:
            labels = torch.zeros(size, dtype=torch.long, device=where)
            yield {
                "pixel_values": torch.zeros(size, IMAGE_CHANNELS, side, side, device=where),
                "labels": labels,
            }

    def step() -> None:
        for left in reversed(range(min(2, accumulated))):  # the third adds to the same gradients
            with booster.no_sync(boosted, optimizer) if left else contextlib.nullcontext():
                booster.execute_pipeline(batch(), boosted, criterion, optimizer)
        look("update")
        optimizer.step()
        optimizer.zero_grad()
        look("end")

    return RankTraining(step, boosted.unwrap(), optimizer)


def make_step(name: str, task: PlanTask, layout: ParallelLayout, dtype: str) -> Step:
    """`build_training` whose result records a step, the second. Inside ranks."""
    training = build_training(name, task, layout, dtype)

    def record() -> MemoryProfile:
        training.step()  # makes the optimizer's state
        with training.recording() as recorder:
            training.step()
        return recorder.profile()

    return record


def _make_model(name: str, task: PlanTask) -> Any:
    """The model on this rank's device."""
    size = read_size(name)
    if size is None:
        from transformers import AutoModelForCausalLM

        with torch.device(device()):
            return AutoModelForCausalLM.from_config(read_config(name))
    if isinstance(size, str):  # a name of this library's
        size = GPT2_SIZES[size] if task.model.causal else SIZES[size]
    if isinstance(size, GPT2Size):
        return models.gpt2(size, length=task.sequence, device=device())
    return models.vit(size, classes=CLASSES, device=device())


def logical_rank(make_step: Callable[[], Step], rank: int, world_size: int, first: int = 0) -> MemoryProfile:
    """The memory of a step on `rank`. `make_step`, called inside the rank, builds model, optimizer and batch
    where `hpnb.device()` says, and returns a function that runs a step under `hpnb.record.memory`. `first` is
    the rank with the first stage of the same pipeline."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not one of {world_size}; use 0 to {world_size - 1}")
    boundaries: list[Any] = []
    if rank != first:
        with _alone(first, world_size, boundaries, []):
            make_step()()
    with _alone(rank, world_size, [], boundaries):
        return make_step()()


@contextlib.contextmanager
def _alone(rank: int, world_size: int, sent: list[Any], received: list[Any]) -> Iterator[None]:
    """This process as one rank of a world that is not there. `sent` takes the objects that the pipeline
    sends. It receives what is in `received`, in turn, the last one for ever, or what it has sent itself."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ValueError("a logical rank needs a process that is no rank of a group; call it in another one")
    waiting, before = deque(received), current.device

    def receive(_: GroupQueue) -> Any:
        return waiting.popleft() if len(waiting) > 1 else (waiting or sent)[0]

    def broadcast(objects: list[Any], *_: Any, **__: Any) -> None:
        objects[:] = ["mean" if value is None else value for value in objects]

    dist.init_process_group("cpu:fake,meta:fake", rank=rank, world_size=world_size, store=FakeStore())
    current.device = META
    try:
        with (
            patch.object(GroupQueue, "send_object", lambda _, value: sent.append(value)),
            patch.object(GroupQueue, "receive_object", receive),
            patch.object(dist, "broadcast_object_list", broadcast),
            # Ranks have no values to compare: each number read would be a one, a difference of 100 %.
            patch.object(tp_1d, "compare_first_gradient", lambda *_: None),
            # Models on the meta device are refused, because they have no values yet. Here none ever comes.
            patch.object(torch.Tensor, "is_meta", False, create=True),
            # torch knows no autocast of the meta device, and hpnb uses none.
            patch.object(torch, "is_autocast_enabled", lambda *_: False),
            patch.object(torch, "autocast", lambda *_, **__: contextlib.nullcontext()),
            patch.object(functional, "scaled_dot_product_attention", _fused_attention),
            _OnesForValues(),  # type: ignore[no-untyped-call]
        ):
            yield
    finally:
        current.device = before
        dist.destroy_process_group()


class _OnesForValues(TorchDispatchMode):
    """Numbers that are read from tensors without values are ones."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, aten = kwargs or {}, torch.ops.aten
        if func is aten._local_scalar_dense.default and args[0].device == META:
            return torch.ones((), dtype=args[0].dtype).item()
        if func is aten._to_copy.default and args[0].device == META:
            device = kwargs.get("device")
            if device is not None and torch.device(device) != META:
                return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        return func(*args, **kwargs)


def _fused_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """The CPU's fused attention, where the CPU would choose it. On the meta device torch chooses none."""
    if dropout_p or query.device != META or query.size(-1) != value.size(-1):
        return _attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask, -torch.inf)
    output: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return output

"""PyTorch's programs of one GPU and of data parallelism: DDP, ZeroRedundancyOptimizer, FSDP2.

    one            the model itself
    DDP            DistributedDataParallel, gradients as views of buckets, a static graph
    ZeRO 1         DDP and ZeroRedundancyOptimizer
    ZeRO 2         FSDP2 that keeps what it has gathered until the backward (reshard_after_forward=False)
    ZeRO 3         FSDP2

Microbatches, where a batch does not fit at once, are accumulated before anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_outputs import ImageClassifierOutput

import hpnb
from hpnb.bench import torch_precision
from hpnb.bench.program import Program
from hpnb.bench.tasks import CLASSES, BatchFeed, TrainingTask, cast_inputs
from hpnb.bench.torch_precision import Compiled, OptimizerLike
from hpnb.mesh import ParallelLayout

Around = Callable[[], AbstractContextManager[Any]]


def replicas(
    how: Compiled, task: TrainingTask, layout: ParallelLayout, *, autocast: bool = False, zero_1: bool = False
) -> Program:
    """Replicas in DDP; on one GPU the model itself.

    Args:
        autocast: float32 weights, and gradients that DDP compresses to bf16 on their way. By default bf16
            weights with masters, whose gradients travel as bf16.
        zero_1: shard optimizer state, and masters if there are any, by ZeroRedundancyOptimizer.
    """
    model: Any = task.build()
    if not autocast:
        model = model.to(task.dtype)
    torch_precision.use_loss(model, how)
    torch_precision.compile_parts(model, how)
    module = model
    if layout.dp > 1:
        # ZeroRedundancyOptimizer steps views, which a static graph forbids.
        module = wrap_ddp(model, static=task.count_microbatches(layout) == 1 and not zero_1)
        if autocast and task.bits == 16:
            module.register_comm_hook(None, bf16_compress_hook)
    optimizer: OptimizerLike = (
        _zero_1(model, task.lr) if zero_1 else torch_precision.adamw(model.parameters(), task.lr)
    )
    around = partial(torch_precision.autocast, task) if autocast else nullcontext
    return accumulating(task, layout, _compile_model(module, how), optimizer, module, around=around)


def fsdp(how: Compiled, reshard: bool, sharded: bool, task: TrainingTask, layout: ParallelLayout) -> Program:
    """FSDP2.

    Args:
        reshard: let gathered parameters go after the forward.
        sharded: False keeps replicas, by a mesh of (dp, 1).
    """
    model: Any = task.build()
    torch_precision.use_loss(model, how)
    torch_precision.compile_parts(model, how)
    mesh = mesh_of(("dp",), (layout.dp,)) if sharded else mesh_of(("dp", "one"), (layout.dp, 1))
    shard(task, model, mesh, reshard)
    optimizer = torch_precision.adamw(model.parameters(), task.lr)
    return accumulating(task, layout, model, optimizer, model, reshard=reshard)


def timm(how: Compiled, task: TrainingTask, layout: ParallelLayout) -> Program:
    """timm's ViT of the same size in DDP, with masters.

    Raises:
        ValueError: timm is not installed, or it has no ViT of this size.
    """
    try:
        import timm as library  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise ValueError("timm is not installed here, so its ViT is not measured") from None
    if getattr(task.size, "image", None) != 224:
        raise ValueError("timm has a ViT-L/16 of 224 pixels, and not this size")
    torch.manual_seed(0)
    model = Classifier(library.create_model("vit_large_patch16_224", num_classes=CLASSES))
    model = model.to(hpnb.device(), task.dtype)
    if how == "blocks" and hpnb.device().type == "cuda":
        for block in model.inner.blocks:
            block.compile(dynamic=False)
    optimizer = torch_precision.adamw(model.parameters(), task.lr)
    module = wrap_ddp(model, True) if layout.dp > 1 else model
    return accumulating(task, layout, _compile_model(module, how), optimizer, module)


# --- what they are made of -----------------------------------------------------------------------------


def _zero_1(model: nn.Module, lr: float) -> ZeroRedundancyOptimizer:
    parameters = list(model.parameters())
    adamw: type[torch.optim.Optimizer] = torch.optim.AdamW
    options: dict[str, Any] = {"lr": lr, "fused": True}
    if parameters[0].dtype == torch.bfloat16:
        adamw, options = torch_precision.ShardMasterAdamW, {"lr": lr}
    return ZeroRedundancyOptimizer(parameters, adamw, parameters_as_bucket_view=True, **options)


@lru_cache(maxsize=8)
def mesh_of(names: tuple[str, ...], sizes: tuple[int, ...]) -> DeviceMesh:
    """All programs of a layout share its groups."""
    return init_device_mesh(hpnb.device().type, sizes, mesh_dim_names=names)


def wrap_ddp(model: nn.Module, static: bool, group: dist.ProcessGroup | None = None) -> Any:
    return DistributedDataParallel(
        model, process_group=group, gradient_as_bucket_view=True, static_graph=static
    )


def shard(task: TrainingTask, model: nn.Module, mesh: DeviceMesh, reshard: bool) -> None:
    """In place: each block by itself, and the rest, which the backward needs first: it stays gathered."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if task.bits == 16 else None)
    for block in torch_precision.blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def _compile_model(model: Any, how: Compiled) -> Any:
    return torch.compile(model, dynamic=False) if how == "model" and hpnb.device().type == "cuda" else model


def accumulating(
    task: TrainingTask,
    layout: ParallelLayout,
    runs: Any,
    optimizer: OptimizerLike,
    sends: Any = None,
    around: Around = nullcontext,
    within: Around = nullcontext,
    reshard: bool = True,
) -> Program:
    """A step: microbatch after microbatch, of which the last one's backward sends gradients.

    Args:
        runs: is called with a microbatch and gives outputs with a loss.
        sends: the DDP, FSDP2 or hpnb.DataParallel module that is not to send before.
        around: each forward; `within`: forward and backward.
        reshard: let FSDP2's parameters go after every backward, and not after the last alone.
    """
    count, dtype = task.count_microbatches(layout), next(runs.parameters()).dtype
    coordinate = hpnb.rank() // (layout.pp * layout.tp) % layout.dp  # of dp, which is outermost
    feed, last_losses = BatchFeed(task, coordinate, layout.dp), list[torch.Tensor]()

    def sync_if(last: bool) -> AbstractContextManager[Any]:
        if isinstance(sends, DistributedDataParallel | hpnb.DataParallel):
            return nullcontext() if last else sends.no_sync()
        if isinstance(sends, FSDPModule) and count > 1:
            sends.set_requires_gradient_sync(last)
            if not reshard:
                sends.set_reshard_after_backward(last)
        return nullcontext()

    def step() -> None:
        optimizer.zero_grad()
        losses = []
        for i, microbatch in enumerate(feed.split(count)):
            with sync_if(i == count - 1), within():
                with around():
                    loss = runs(**cast_inputs(microbatch, dtype)).loss / count
                loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        last_losses[:] = losses

    def loss() -> float:
        return mean(torch.stack([_number(one) for one in last_losses]).sum())

    parameters = runs.parameters if isinstance(sends, DistributedDataParallel) else tuple
    return Program(step, loss, feed, replicas=parameters)


def _number(loss: torch.Tensor) -> torch.Tensor:
    value: Any = loss
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).double()  # type: ignore[no-any-return]


def mean(loss: torch.Tensor, ranks: int | None = None) -> float:
    """Over those ranks that have a loss, by default all; several may have the same one."""
    total = loss.detach().double().clone()
    dist.all_reduce(total)
    return total.item() / (ranks or dist.get_world_size())


class Classifier(nn.Module):
    """An image model as transformers' are called.

    What it returns must be a container that PyTorch looks into: DDP with a static graph reduces nothing if it
    finds no tensor in the first output, and says nothing.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> ImageClassifierOutput:
        return ImageClassifierOutput(loss=F.cross_entropy(self.inner(pixel_values).float(), labels))

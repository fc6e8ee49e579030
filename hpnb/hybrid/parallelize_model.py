"""The order in which a model is parallelised, one strategy around what the one before has left.

    the model, on the CPU or on meta
    parallelize        each matrix shared by the ranks of tp                     hpnb.tensor_parallel
    chunk_loss         the loss so many tokens at a time                         hpnb.models
    compile_blocks     blocks, or what lies between their linears                compile_blocks.py
    use_patch_matmul    patches by a matrix product in place of a convolution     hpnb.models
    recompute          what is let go and computed again                         recompute.py
    cast               weights in the dtype of the precision                     hpnb.precision
    Pipeline           this rank's stages of what is left                        hpnb.pipeline_parallel
    replicas, shares   who reduces their gradients over dp, told by the above    hpnb.data_parallel
    optimizer          steps what is here, with float32 masters of 16 bits       boosted_optimizer.py

Nothing is computed here: each line is a call. Losses are divided by the targets of all ranks
(`global_loss.py`), so every sum over dp is a sum, and never a mean.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from hpnb import data_parallel, tensor_parallel
from hpnb.data_parallel import DataParallel
from hpnb.data_parallel.zero_checks import treats_elements_alike
from hpnb.hybrid import boosted_optimizer, compile_blocks, recompute
from hpnb.hybrid.boosted_model import Boosted
from hpnb.hybrid.boosted_optimizer import BoostedOptimizer, Stepper
from hpnb.hybrid.model_loss import own_loss
from hpnb.hybrid.plugins import HybridParallelPlugin
from hpnb.hybrid.training.hybrid_adam import HybridAdam
from hpnb.models import accept_empty_batch, anatomy, chunk_loss, use_patch_matmul
from hpnb.models.empty_batch import without_mask
from hpnb.pipeline_parallel import Builder, Pipeline
from hpnb.pipeline_parallel.stages import move_module
from hpnb.placement import placement_of, set_placement
from hpnb.precision import Masters
from hpnb.ranks.current_rank import device as this_device

Model = nn.Module | Builder


def parallelize_model(
    plugin: HybridParallelPlugin, model: Model, optimizer: Optimizer | None, example: Any
) -> Boosted:
    """Parallelise `model` as `plugin` says, and make `optimizer` step it, in place.

    Args:
        example: a batch, for cut="flops" and "time".
    """
    _check(model, optimizer)
    mesh = plugin.connect()
    axes = [mesh.dp, mesh.pp]
    state = optimizer.state_dict() if optimizer is not None and optimizer.state else None
    if isinstance(model, nn.Module):
        _prepare(model, plugin, optimizer)
    if plugin.tp_size > 1:
        assert isinstance(model, nn.Module)
        tensor_parallel.parallelize(
            model, mesh.tp, plugin.tp_mode, plugin.enable_sequence_parallelism, plugin.tp_depth
        )
        axes += tensor_parallel.axes(model)
    if plugin.loss_chunk:
        # Where the last stage holds many microbatches, what each keeps counts more than what it computes.
        holds = plugin.pp_size > 1 and plugin.pp_style not in ("1f1b", "interleaved")
        backend = compile_blocks.backend() if _compiles(plugin) else None
        chunk_loss(model, plugin.loss_chunk, recompute=holds, backend=backend)  # type: ignore[type-var]
    own = own_loss(model) if isinstance(model, nn.Module) else None
    causal = _is_causal(model)
    kind: type[Any] = type(model)
    config = getattr(model, "config", None)
    if isinstance(model, nn.Module):
        if _compiles(plugin):
            compile_blocks.compile_blocks(model, whole=_in_one_piece(plugin))
            if _in_one_piece(plugin):  # a backward in two parts defers the weight gradients of a Conv2d
                use_patch_matmul(model)
        recompute.enable_recomputation(model, plugin.activation_checkpointing)
        plugin.policy.cast(model)
    pipe: Pipeline | None = None
    if plugin.pp_size > 1 or isinstance(model, Builder):
        first = plugin.schedule(plugin.num_microbatches or plugin.least_microbatches)
        pipe = Pipeline(model, mesh.pp, first, _never, replicas=mesh.dp, cut=plugin.cut, example=example)
        if isinstance(model, Builder):
            plugin.policy.cast(pipe.module)
    elif plugin.zero_stage < 3:  # which brings it unit by unit
        move_module(model, this_device())
    module = model if pipe is None else pipe.module
    assert isinstance(module, nn.Module)
    for name, p in module.named_parameters():  # which thereby know their names
        set_placement(p, placement_of(p, name))

    numbering, held = ([], {}) if optimizer is None else boosted_optimizer.keep(optimizer, _by_id(module))
    replica, inner = _replicate(module, plugin, pipe, optimizer)
    boosted = Boosted(
        module, plugin, axes, pipe=pipe, replica=replica, own=own, causal=causal, kind=kind, config=config
    )
    if optimizer is not None:
        assert inner is not None
        _flatten(plugin, inner)
        stepper = Stepper(inner, axes, plugin.scaler(), plugin.max_norm, numbering, held, boosted)
        boosted_optimizer.adopt(optimizer, stepper)
        boosted.stepper = weakref.ref(stepper)
        if state is not None:
            optimizer.load_state_dict(state)
    _seed(plugin)
    return boosted


def _replicate(
    module: nn.Module, plugin: HybridParallelPlugin, pipe: Pipeline | None, optimizer: Optimizer | None
) -> tuple[DataParallel | None, Optimizer | None]:
    """Who reduces gradients after a backward, and what steps."""
    axis, stage, wide = plugin.mesh.dp, plugin.zero_stage, plugin.policy.masters
    trained = any(p.requires_grad for p in module.parameters())
    if stage == 3:
        data_parallel.fully_shard(
            module,
            axis,
            units=None if pipe is None else pipe.module.units,
            communication_dtype=plugin.communication_dtype,
            prefetch=int(plugin.overlap_communication),
            average=False,
            find_unused_parameters=plugin.find_unused_parameters,
            cpu_offload=plugin.cpu_offload,
        )
        if pipe is not None:
            pipe.gradients = data_parallel.sink(module)
        return None, None if optimizer is None else boosted_optimizer.plain(optimizer, wide)
    inner: Optimizer | None = None
    if optimizer is not None and stage and trained:
        inner = boosted_optimizer.dealt_out(
            optimizer,
            axis,
            stage,
            bucket_mb=plugin.zero_bucket_size_in_m * 1e6 * plugin.policy.weights.itemsize / 2**20,
            average=False,
            cpu_offload=plugin.cpu_offload,
            communication_dtype=plugin.communication_dtype,
            overlap_communication=plugin.overlap_communication,
            find_unused_parameters=plugin.find_unused_parameters,
        )
    replica: DataParallel | None = None
    if trained and (axis.size > 1 or inner is not None) and (pipe is None or inner is None):
        replica = DataParallel(
            module,
            axis,
            plugin.ddp_bucket_cap_mb,
            broadcast_buffers=False,  # `Boosted` does, for a pipeline too
            find_unused_parameters=plugin.find_unused_parameters,
            check_reduction=plugin.check_reduction,
            gradient_as_bucket_view=plugin.gradient_as_bucket_view,
            static_graph=plugin.static_graph,
            overlap_communication=plugin.overlap_communication,
            copy_engines=plugin.ddp_copy_engines,
            average=False,
        )
    if pipe is not None:
        pipe.gradients = inner if inner is not None else replica  # type: ignore[assignment]
        replica = None
    if optimizer is not None and inner is None:
        inner = boosted_optimizer.plain(optimizer, wide)
    return replica, inner


# --- before ----------------------------------------------------------------------------------------------


def _check(model: Model, optimizer: Optimizer | None) -> None:
    if isinstance(model, Boosted | DataParallel):
        raise ValueError(f"this is a {type(model).__name__}; boost the model inside")
    if not isinstance(model, nn.Module | Builder):
        raise TypeError(f"boost takes a model, not a {type(model).__name__}")
    if optimizer is None:
        return
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"boost takes an optimizer of torch.optim, not a {type(optimizer).__name__}")
    taken = isinstance(optimizer, BoostedOptimizer | data_parallel.ZeroOptimizer)
    if taken or Masters.attached_to(optimizer):
        raise ValueError(
            f"this {type(optimizer).__name__} has been boosted, dealt out or given masters before; pass a "
            "new one of torch.optim"
        )
    known = {id(p) for p in model.parameters()} if isinstance(model, nn.Module) else set()
    given = [p for group in optimizer.param_groups for p in group["params"]]
    if strange := sum(id(p) not in known for p in given):
        raise ValueError(
            f"{strange} of the {len(given)} parameters of this {type(optimizer).__name__} are not the "
            "model's; make it of the parameters of the model that is boosted"
        )


def _prepare(model: nn.Module, plugin: HybridParallelPlugin, optimizer: Optimizer | None) -> None:
    """What is to be known or changed while the model is whole."""
    model.zero_grad()  # gradients of before fit no part
    parts = plugin.tp_size > 1 or plugin.zero_stage == 3
    if optimizer is not None and parts and not treats_elements_alike(type(optimizer)):
        raise ValueError(
            f"a {type(optimizer).__name__} may look at whole tensors, and with tensor parallelism or ZeRO 3 "
            "a rank has parts of them; use zero_stage=1 or 2, AdamW, or say elementwise = True in the class"
        )
    _accept_no_rows(model)
    if plugin.enable_flash_attention or plugin.enable_all_optimization:
        implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
        if implementation == "eager":
            model.set_attn_implementation("sdpa")  # type: ignore[operator]
    if plugin.enable_all_optimization and optimizer is not None:
        _fuse(optimizer)


def _accept_no_rows(model: nn.Module) -> None:
    """Ragged batches leave ranks, and microbatches, without samples."""
    try:
        found = anatomy(model)
    except TypeError:  # a model that hpnb does not know copes by itself, or says that it does not
        return
    hooks, module = found.blocks[0].module._forward_pre_hooks.values(), inspect.getmodule(accept_empty_batch)
    if any(inspect.getmodule(getattr(h, "__func__", h)) is module for h in hooks):
        return
    accept_empty_batch(found)
    core = getattr(model, "transformer", None)
    if core is not None:
        core.register_forward_pre_hook(without_mask, with_kwargs=True)


def _fuse(optimizer: Optimizer) -> None:
    """One kernel for Adam, on GPUs, if nobody has said how."""
    if this_device().type != "cuda" or type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return
    for group in optimizer.param_groups:
        if not any(group.get(other) for other in ("foreach", "capturable", "differentiable")):
            group["fused"] = True


def _compiles(plugin: HybridParallelPlugin) -> bool:
    """Where it is asked for; with all that is fast, only on GPUs."""
    asked = plugin.enable_jit_fused or (plugin.enable_all_optimization and this_device().type == "cuda")
    return asked and compile_blocks.backend() is not None


def _in_one_piece(plugin: HybridParallelPlugin) -> bool:
    """Whether a block may be one node of autograd, with nothing sent inside."""
    splits = plugin.pp_size > 1 and plugin.schedule(plugin.least_microbatches).splits
    return plugin.tp_size == 1 and not splits


def _flatten(plugin: HybridParallelPlugin, inner: Optimizer) -> None:
    """Adam in one pass, where weights have masters."""
    masters = Masters.attached_to(inner)
    asked = plugin.enable_all_optimization or plugin.enable_jit_fused
    if masters is None or not asked or plugin.cpu_offload:  # a CPU has PyTorch's fused kernel
        return
    kinds = (torch.optim.Adam, torch.optim.AdamW, HybridAdam)
    # ZeRO's shares stay where they are gathered from.
    masters.flatten(kinds, backend=compile_blocks.backend(), moves=plugin.zero_stage == 0)


def _is_causal(model: Model) -> bool:
    if isinstance(model, nn.Module):
        try:
            return anatomy(model).causal
        except TypeError:
            pass
    return False


def _by_id(module: nn.Module) -> Mapping[int, nn.Parameter]:
    return {id(p): p for p in module.parameters()}


def _seed(plugin: HybridParallelPlugin) -> None:
    """Dropout differs where ranks have different samples or layers, and agrees where they share them."""
    world, mesh = dist.group.WORLD, plugin.mesh
    assert world is not None
    box = [torch.initial_seed() if plugin.seed is None else plugin.seed]
    dist.broadcast_object_list(box, src=0)
    torch.manual_seed((box[0] + mesh.dp.rank * mesh.pp.size + mesh.pp.rank) % 2**63)


def _never(outputs: Any, inputs: Any) -> Any:
    raise AssertionError("every step sets its loss function before")

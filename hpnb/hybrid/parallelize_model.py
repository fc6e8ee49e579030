"""The order in which the strategies are applied to a model, each one on top of the one before.

    the model, on the CPU or on meta
    parallelize           each matrix is sharded over the ranks of tp              hpnb.tensor_parallel
    context parallelism   attention runs over the ranks of cp                      hpnb.context_parallel
    expert parallelism    experts are sharded over the ranks of ep                 hpnb.expert_parallel
    chunk_loss            the loss is computed so many tokens at a time            hpnb.models
    compile_blocks        whole blocks, or what lies between their linears         compile_blocks.py
    use_patch_matmul      ViT's patches by a matrix product                        hpnb.models
    enable_recomputation  activations are dropped and recomputed                   recompute.py
    cast                  weights get the dtype of the precision                   hpnb.precision
    Pipeline              each rank keeps its own stages                           hpnb.pipeline_parallel
    DataParallel or ZeRO  gradients are reduced over dp                            apply_data_parallel.py
    BoostedOptimizer      steps this rank's parameters                             boosted_optimizer.py

Nothing is computed here: each line is a call. A `Builder` makes its layers inside Pipeline, so what comes
before Pipeline in the list comes after it there, on this rank's layers alone. Losses are divided by the
targets of all ranks (`global_loss.py`), so every sum over dp is a sum and never a mean.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from hpnb import context_parallel, expert_parallel, tensor_parallel
from hpnb.caller_frame import warn_caller
from hpnb.expert_parallel import ExpertParallel, SelectionBias
from hpnb.hybrid.apply_data_parallel import apply_data_parallel, flatten_masters, use_fused_adam
from hpnb.hybrid.boost_checks import (
    boosted_models,
    check_boost,
    check_parameters_of_stages,
    marked_if_changed,
)
from hpnb.hybrid.boosted_model import Boosted
from hpnb.hybrid.boosted_optimizer import BoostedOptimizer, drop_remote_parameters
from hpnb.hybrid.checkpoint.model_outline import ModelOutline
from hpnb.hybrid.compile_blocks import backend, compile_blocks
from hpnb.hybrid.model_loss import find_model_loss
from hpnb.hybrid.plugins import HybridParallelPlugin
from hpnb.hybrid.recompute import enable_recomputation
from hpnb.meta_device import Unfilled, move_module
from hpnb.models import accept_empty_batch, anatomy, chunk_loss, use_patch_matmul
from hpnb.models.compare_parts import skip_first_step_check
from hpnb.models.placeholder_sample import drop_empty_mask
from hpnb.pipeline_parallel import Builder, Pipeline
from hpnb.placement import keep_placements, placement_of, set_placement
from hpnb.ranks.current_rank import device as this_device
from hpnb.tensor_parallel.block_dropout import may_draw

Model = nn.Module | Builder


def parallelize_model(
    plugin: HybridParallelPlugin, model: Model, optimizer: Optimizer | None, example: Any
) -> Boosted:
    """Parallelize `model` as `plugin` says, and make `optimizer` step it; both in place. The batch `example`
    is for cut="flops" and "time"."""
    check_boost(plugin, model, optimizer)
    plugin.connect()
    state = optimizer.state_dict() if optimizer is not None and optimizer.state else None
    unfilled = Unfilled(model) if isinstance(model, nn.Module) else None
    outline = ModelOutline(model) if isinstance(model, PreTrainedModel) else None
    if isinstance(model, nn.Module):
        _prepare(model, plugin, optimizer)
    with marked_if_changed(model):
        boosted = _apply_strategies(plugin, model, optimizer, example, state, unfilled, outline)
    if isinstance(model, nn.Module):
        boosted_models.add(model)
    return boosted


def _apply_strategies(
    plugin: HybridParallelPlugin,
    model: Model,
    optimizer: Optimizer | None,
    example: Any,
    state: dict[str, Any] | None,
    unfilled: Unfilled | None,
    outline: ModelOutline | None,
) -> Boosted:
    """Change the model, strategy after strategy; `state` is what the optimizer has before."""
    mesh, cuda_graphs = plugin.mesh, _uses_cuda_graphs(plugin)
    replicas_of_shards, data_axis = plugin.zero_axes
    axes = [data_axis, mesh.pp]
    model_loss, causal, context, experts, selection_bias = None, False, None, None, None
    if isinstance(model, nn.Module):
        if plugin.cp_size > 1:
            skip_first_step_check(model)
        if plugin.tp_size > 1:
            tensor_parallel.parallelize(
                model, mesh.tp, plugin.tp_mode, plugin.enable_sequence_parallelism, plugin.tp_depth,
                plugin.enable_sequence_overlap,
            )  # fmt: skip
            axes += tensor_parallel.axes(model)
        adds_balance = bool(getattr(getattr(model, "config", None), "output_router_logits", False))
        if adds_balance:
            _check_router_loss(plugin)
            expert_parallel.share_balancing_loss(model, mesh.dp_cp)
        experts, selection_bias = _shard_experts(model, plugin)
        if plugin.ep_size > 1:
            expert_axes = plugin.expert_zero_axes if plugin.zero_stage == 3 else (None, mesh.edp)
            axes += [mesh.ep, *(axis for axis in expert_axes if axis is not None)]
        if plugin.loss_chunk:
            _chunk_loss(model, plugin)
        if plugin.cp_size > 1:
            context = made = context_parallel.parallelize(model, mesh.cp, plugin.context_parallel)
            context.keeps_mask = adds_balance  # by which the loss of routers knows padding
            if experts is not None:
                experts.in_batch = lambda: made.in_batch
        # Tensor parallelism and the chunked loss set a loss function for what their output layer gives.
        of_shards = hasattr(vars(model).get("_loss_function"), "vocab_shard")
        last_stage_calls_loss = plugin.pp_size > 1 and not of_shards and not plugin.loss_chunk
        model_loss, causal = find_model_loss(model, last_stage_calls_loss), _is_causal(model)
        if _compiles(plugin) and not (adds_balance and plugin.pp_size > 1):  # stages look into their blocks
            compile_blocks(model, whole=_compiles_whole_blocks(plugin))
            if _compiles_whole_blocks(plugin):  # a split backward defers the weight gradients of a Conv2d
                use_patch_matmul(model)
        enable_recomputation(model, plugin.activation_checkpointing)
        plugin.policy.cast(model)
        if selection_bias is not None:
            selection_bias.widen()
    model_class: type[Any] = type(model)
    config = getattr(model, "config", None)
    generation_config = getattr(model, "generation_config", None)

    pipe: Pipeline | None = None
    if plugin.pp_size > 1 or isinstance(model, Builder):
        schedule = plugin.schedule(plugin.num_microbatches or plugin.least_microbatches)
        pipe = Pipeline(
            model, mesh.pp, schedule, _never, replicas=mesh.dp_cp, cut=plugin.cut, example=example,
            cuda_graphs=cuda_graphs,
        )  # fmt: skip
        pipe.overlaps_pairs = _overlaps_experts(plugin, model)
    elif plugin.zero_stage < 3:  # which moves the model block by block
        move_module(model, this_device())
    module: Any = model if pipe is None else pipe.module
    if isinstance(model, Builder):
        _finish_built_layers(module, plugin)
        if optimizer is not None:
            _use_built_parameters(optimizer, model, module)
    for name, p in module.named_parameters():
        set_placement(p, placement_of(p, name))  # a placement has the parameter's name
    keep_placements(module)

    if replicas_of_shards is not None:
        axes.append(replicas_of_shards)
    numbering: list[list[int]] = []
    parameters: dict[int, nn.Parameter] = {}
    if optimizer is not None:
        numbering, parameters = drop_remote_parameters(optimizer, {id(p) for p in module.parameters()})
        if isinstance(model, Builder):
            check_parameters_of_stages(optimizer, numbering, parameters, mesh.pp)
    replica, inner = apply_data_parallel(module, plugin, pipe, optimizer)
    boosted = Boosted(
        module, plugin, axes, pipe=pipe, replica=replica, model_loss=model_loss, causal=causal,
        context=context, experts=experts, selection_bias=selection_bias,
        kind=model_class, config=config, generation_config=generation_config, outline=outline,
        unfilled=unfilled,
    )  # fmt: skip
    if optimizer is not None:
        assert inner is not None
        flatten_masters(plugin, inner, backend())
        boosted_optimizer = BoostedOptimizer(
            optimizer, inner, axes, scaler=plugin.scaler(), max_norm=plugin.max_norm,
            numbering=numbering, parameters=parameters, model=boosted,
        )  # fmt: skip
        boosted.optimizer_ref = weakref.ref(boosted_optimizer)
        if state is not None:
            boosted_optimizer.load_state_dict(state)
    _seed_dropout(plugin)
    return boosted


# --- a model in memory -----------------------------------------------------------------------------------


def _prepare(model: nn.Module, plugin: HybridParallelPlugin, optimizer: Optimizer | None) -> None:
    """What is to be changed while no strategy has been applied. Doing it twice changes nothing more."""
    model.zero_grad()  # full gradients fit no shard
    _accept_empty_batch(model)
    if plugin.enable_flash_attention or plugin.enable_all_optimization:
        _use_fused_attention(model, plugin.enable_flash_attention)
    if plugin.enable_all_optimization and optimizer is not None:
        use_fused_adam(optimizer)


def _uses_cuda_graphs(plugin: HybridParallelPlugin) -> bool:
    """Whether stages replay CUDA graphs; a warning if they should and there is no GPU."""
    kind = this_device().type
    if plugin.enable_cuda_graphs and kind != "cuda":
        warn_caller(f"enable_cuda_graphs=True needs a GPU; on this {kind.upper()} all stages run eagerly")
    return plugin.enable_cuda_graphs and kind == "cuda"


def _use_fused_attention(model: nn.Module, asked: bool) -> None:
    """
    Raises:
        ValueError: it is `asked` for, and the model has none.
    """
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if implementation != "eager":
        return
    if not _switch_to_fused_attention(model) and asked:
        raise ValueError(
            "enable_flash_attention needs PyTorch's scaled_dot_product_attention, which a "
            f"{type(model).__name__} cannot use in transformers, as with attention sinks or a soft cap "
            "of the scores; leave it out for this model (enable_all_optimization keeps the model's own "
            "attention)"
        )


def _switch_to_fused_attention(model: nn.Module) -> bool:
    """False, with the attention that it has, if a model cannot."""
    if any(getattr(module, "attn_logit_softcapping", None) is not None for module in model.modules()):
        return False  # transformers 5.17 switches these all the same, and computes without the cap
    set_implementation: Callable[[str], None] = model.set_attn_implementation  # type: ignore[assignment]
    try:
        set_implementation("sdpa")
    except ValueError:
        set_implementation("eager")  # also of models inside of it that have been changed
        return False
    return True


def _check_router_loss(plugin: HybridParallelPlugin) -> None:
    if plugin.pp_size > 1 and plugin.cut in ("flops", "time") and plugin.mesh.dp_cp.size > 1:
        raise ValueError(
            f"cut={plugin.cut!r} lets one rank measure for all, and with output_router_logits=True the head "
            f"sums over {plugin.mesh.dp_cp.size} ranks: use cut='parameters', or say how many layers each "
            "stage gets"
        )


def _shard_experts(
    model: nn.Module, plugin: HybridParallelPlugin
) -> tuple[ExpertParallel | None, SelectionBias | None]:
    """Experts over ep, and what keeps them equally busy on all ranks."""
    mesh = plugin.mesh
    if plugin.ep_size == 1 and not plugin.selection_bias_rate:
        return None, None
    if plugin.ep_size == 1 and not any(expert_parallel.expert_modules(model)):
        raise TypeError(expert_parallel.without_experts(type(model).__name__, biased=True))
    experts = expert_parallel.parallelize(model, mesh.ep)
    if not plugin.selection_bias_rate:
        return experts, None
    return experts, SelectionBias(model, experts, mesh.dp_cp, plugin.selection_bias_rate)


def _overlaps_experts(plugin: HybridParallelPlugin, model: Model) -> bool:
    """Whether tokens travel to experts while another microbatch computes, for which DualPipe is made. What
    recomputes dropout sets the state of the random numbers that the other microbatch would draw."""
    draws = plugin.activation_checkpointing and isinstance(model, nn.Module) and may_draw(model)
    return plugin.ep_size > 1 and plugin.pp_style == "dualpipe-v" and not draws


def _accept_empty_batch(model: nn.Module) -> None:
    """Ragged batches leave some ranks, and some microbatches, without samples."""
    try:
        parts = anatomy(model)
    except TypeError:  # a model that hpnb does not know copes by itself, or says that it does not
        return
    hooks = [hook for block in parts.blocks[:1] for hook in block.module._forward_pre_hooks.values()]
    module = inspect.getmodule(accept_empty_batch)
    if any(inspect.getmodule(getattr(h, "__func__", h)) is module for h in hooks):
        return
    accept_empty_batch(parts)
    core = getattr(model, "transformer", None)
    if core is not None:
        core.register_forward_pre_hook(drop_empty_mask, with_kwargs=True)


def _is_causal(model: nn.Module) -> bool:
    try:
        return anatomy(model).causal
    except TypeError:
        return _shifts_labels(model)


def _shifts_labels(model: nn.Module) -> bool:
    """Whether a model of transformers that hpnb does not know computes the loss of the next token. Some that
    are called ForCausalLM, such as Bart's decoder, take labels that are shifted already."""
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    calls_loss_function = code is not None and "loss_function" in code.co_names
    return calls_loss_function and getattr(model, "loss_type", None) == "ForCausalLM"


def _chunk_loss(model: Any, plugin: HybridParallelPlugin) -> None:
    # Where the last stage keeps many microbatches, memory matters more than the time to recompute.
    keeps_many = plugin.pp_size > 1 and plugin.pp_style not in ("1f1b", "interleaved")
    compiler = backend() if _compiles(plugin) else None
    chunk_loss(model, plugin.loss_chunk, recompute=keeps_many, backend=compiler)


def _compiles(plugin: HybridParallelPlugin) -> bool:
    """Whether blocks are compiled: if asked for; with enable_all_optimization only on GPUs."""
    asked = plugin.enable_jit_fused or (plugin.enable_all_optimization and this_device().type == "cuda")
    return asked and backend() is not None and plugin.cp_size == plugin.ep_size == 1  # messages in a block


def _compiles_whole_blocks(plugin: HybridParallelPlugin) -> bool:
    """Whether a block may be one autograd node: no message inside, and no split backward."""
    splits = plugin.pp_size > 1 and plugin.schedule(plugin.least_microbatches).splits
    return plugin.tp_size == 1 and not splits


# --- a model that no rank can hold -----------------------------------------------------------------------


def _finish_built_layers(stages: Any, plugin: HybridParallelPlugin) -> None:
    """What `parallelize_model` does to a model in memory, on this rank's layers alone."""
    if _compiles(plugin) and _compiles_whole_blocks(plugin):
        compile_blocks(stages, whole=True, blocks=stages.units)
    enable_recomputation(stages, plugin.activation_checkpointing, stages.units)
    plugin.policy.cast(stages)


def _use_built_parameters(optimizer: Optimizer, builder: Builder, stages: nn.Module) -> None:
    """Put this rank's parameters in the places of the builder's, which are on the meta device."""
    tied, survey = builder.survey().tied, builder.survey().parameters
    built = {tied.get(name, name): p for name, p in stages.named_parameters()}
    local = {id(p): built[name] for name, p in survey.items() if name in built}
    for group in optimizer.param_groups:
        group["params"] = [local.get(id(p), p) for p in group["params"]]


# --- all models ------------------------------------------------------------------------------------------


def _seed_dropout(plugin: HybridParallelPlugin) -> None:
    """Dropout differs where ranks have different samples or layers, and agrees where they share them."""
    mesh = plugin.mesh
    seed = [torch.initial_seed() if plugin.seed is None else plugin.seed]
    dist.broadcast_object_list(seed, src=0)
    torch.manual_seed((seed[0] + mesh.dp_cp.rank * mesh.pp.size + mesh.pp.rank) % 2**63)


def _never(outputs: Any, inputs: Any) -> Any:
    raise AssertionError("every step sets its loss function before")

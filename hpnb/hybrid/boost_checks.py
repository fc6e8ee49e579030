"""What `Booster.boost` refuses before it changes anything, each in a sentence with what would work."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hpnb.data_parallel import DataParallel, ZeroOptimizer
from hpnb.data_parallel.zero_checks import is_elementwise
from hpnb.hybrid.boosted_model import Boosted
from hpnb.hybrid.boosted_optimizer import is_boosted
from hpnb.hybrid.checkpoint.agreement import gather_objects
from hpnb.hybrid.plugins import HybridParallelPlugin
from hpnb.hybrid.sharding_options import sharding_options
from hpnb.mesh import Axis
from hpnb.pipeline_parallel import Builder
from hpnb.precision import Masters

boosted_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_half_boosted: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # by a boost that failed
_OF_TORCH = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel")


def check_boost(plugin: HybridParallelPlugin, model: Any, optimizer: Any) -> None:
    """
    Raises:
        TypeError, ValueError: a model or an optimizer that cannot be boosted.
    """
    if isinstance(model, Boosted | DataParallel):
        raise ValueError(f"this is a {type(model).__name__}; boost the model inside")
    if isinstance(model, nn.Module):
        _refuse_torch_data_parallel(model)
        _refuse_max_norm(plugin, model)
        if optimizer is not None:
            _refuse_sparse_gradients(plugin, model)
        if model in boosted_models:
            raise ValueError(
                f"this {type(model).__name__} has been boosted before, which changes it in place: go on with "
                "what that boost returned, or boost a new model"
            )
        if model in _half_boosted:
            raise ValueError(
                f"a boost of this {type(model).__name__} failed after it had changed the model in place: "
                "boost a new model"
            )
    elif isinstance(model, Builder):
        _check_builder(plugin)
    else:
        raise TypeError(f"boost takes a model, not a {type(model).__name__}")
    if optimizer is None:
        return
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"boost takes an optimizer of torch.optim, not a {type(optimizer).__name__}")
    if type(optimizer).__module__.startswith("accelerate."):
        raise ValueError(
            f"boost takes an optimizer of torch.optim, not accelerate's {type(optimizer).__name__}; pass the "
            ".optimizer in it, and leave accelerator.prepare out, because the Booster does its work"
        )
    taken = is_boosted(optimizer) or isinstance(optimizer, ZeroOptimizer)
    if taken or Masters.attached_to(optimizer):
        raise ValueError(
            f"this {type(optimizer).__name__} has been boosted, sharded or given masters before; pass a new "
            "one of torch.optim"
        )
    options = sharding_options(plugin, stages=False)
    if options and not is_elementwise(type(optimizer)):
        raise ValueError(
            f"a {type(optimizer).__name__} may look at full tensors, and with {', '.join(options)} a rank "
            "has shards of them; use zero_stage 0 to 2 without tp_size and ep_size, AdamW, or say "
            "elementwise = True in the class"
        )
    if isinstance(model, nn.Module):
        known = {id(p) for p in model.parameters()}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if foreign := sum(id(p) not in known for p in parameters):
            raise ValueError(
                f"{foreign} of the {len(parameters)} parameters of this {type(optimizer).__name__} are not "
                "the model's; make it of the parameters of the model that is boosted"
            )


@contextmanager
def marked_if_changed(model: Any) -> Iterator[None]:
    """Strategies are applied to `model`: if they fail after they have changed it, no later boost takes it."""
    if not isinstance(model, nn.Module):
        yield
        return
    before = _describe(model)
    try:
        yield
    except BaseException:
        if _describe(model) != before:
            _half_boosted.add(model)
        raise


def _describe(model: nn.Module) -> list[Any]:
    """What strategies change of a model: the classes of modules, their forwards and hooks, and parameters."""
    modules = [
        (name, type(m), id(vars(m).get("forward")), len(m._forward_hooks), len(m._forward_pre_hooks))
        for name, m in model.named_modules()
    ]
    tensors = [(name, id(p), p.dtype, tuple(p.shape), p.device) for name, p in model.named_parameters()]
    return [modules, tensors, id(vars(model).get("_loss_function"))]


def _refuse_torch_data_parallel(model: nn.Module) -> None:
    for name, module in model.named_modules():
        for kind in type(module).__mro__:
            if kind.__name__ in _OF_TORCH and kind.__module__.startswith("torch."):
                where = f"its module {name} is" if name else "this model is"
                instead = (
                    "boost a new model, because fully_shard changes a model in place"
                    if kind.__name__ == "FSDPModule"
                    else "boost the model without it, which is the wrapper's .module"
                )
                raise ValueError(
                    f"{where} wrapped in torch's {kind.__name__} already, and gradients would be reduced "
                    f"twice; {instead}"
                )


def _refuse_max_norm(plugin: HybridParallelPlugin, model: nn.Module) -> None:
    """With max_norm a forward scales the rows that it looks up, in place. Ranks look up different rows, so
    their copies would diverge, and a shard of the table does not know the norm of a row."""
    ranks = plugin.replica_size // plugin.pp_size * plugin.dp_size
    for name, module in model.named_modules():
        if ranks > 1 and isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ValueError(
                f"{name} has max_norm={module.max_norm}, so a forward scales the rows that it looks up; "
                f"{ranks} ranks look up different rows, and their copies would diverge: use max_norm=None, "
                "and scale the weight after the optimizer's step"
            )


def _refuse_sparse_gradients(plugin: HybridParallelPlugin, model: nn.Module) -> None:
    """One process trains an embedding with sparse gradients, and so does a pipeline without replicas: the
    optimizer gets the gradient as it is. Nothing else takes one."""
    ranks = plugin.dp_size * plugin.cp_size * plugin.tp_size
    reasons = {
        f"zero_stage={plugin.zero_stage} shards gradients": plugin.zero_stage > 0,
        f"{ranks} ranks sum gradients": ranks > 1,
        f"max_norm={plugin.max_norm} takes their norm": plugin.max_norm > 0,
        f"precision={plugin.policy.name!r} copies them to float32": plugin.policy.masters,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    used = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag) or not module.sparse:
            continue
        is_tied = plugin.pp_size > 1 and used[id(module.weight)] > 1
        why = reason or ("stages sum the gradients of a tied weight" if is_tied else None)
        if module.weight.requires_grad and why is not None:
            raise ValueError(
                f"{name or 'the model'} is an {type(module).__name__} with sparse=True, and {why}, which "
                "must be dense: use sparse=False"
            )


def _check_builder(plugin: HybridParallelPlugin) -> None:
    if plugin.tp_size > 1:
        raise ValueError(
            f"tp_size={plugin.tp_size} cannot shard the layers of a Builder, because tensor parallelism must "
            "know the role of each weight: use tp_size=1 and more stages, or a model on the meta device that "
            "hpnb.models knows"
        )
    for name, does in (("ep_size", "shards the experts"), ("cp_size", "splits the tokens")):
        if (size := getattr(plugin, name)) > 1:
            raise ValueError(f"{name}={size} {does} of a model of transformers, not of a Builder; use 1")
    if plugin.activation_checkpointing == "attention":
        raise ValueError(
            "activation_checkpointing='attention' finds no attention in a Builder, whose layers are not a "
            "model of transformers; use 'full'"
        )
    if plugin.loss_chunk:
        raise ValueError(f"loss_chunk={plugin.loss_chunk} is for a GPT2LMHeadModel, not for a Builder; use 0")


def check_parameters_of_stages(
    optimizer: Optimizer, numbering: list[list[int]], parameters: dict[int, nn.Parameter], pp: Axis
) -> None:
    """Each parameter of the optimizer must belong to a layer of some stage."""
    numbers_by_stage: list[list[int]] = gather_objects(list(parameters), pp.group)
    count = sum(map(len, numbering))
    if foreign := count - len({number for numbers in numbers_by_stage for number in numbers}):
        raise ValueError(
            f"{foreign} of the {count} parameters of this {type(optimizer).__name__} are not the model's; "
            "make it of builder.parameters(), which are on the meta device until boost"
        )

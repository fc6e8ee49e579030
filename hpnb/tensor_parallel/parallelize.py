"""Shard a transformers model so that the ranks of one axis compute it together.

    model = hpnb.models.vit("laptop", classes=3)
    hpnb.tensor_parallel.parallelize(model, mesh.tp, mode="1d", sequence_parallel=True)
    loss = model(pixel_values=pixels, labels=labels).loss         # the full batch in, the full loss out
    loss.backward()
    hpnb.tensor_parallel.full_state_dict(model)                   # of the full model

The model's class and its forward stay unchanged. What changes is read off one table, the role of each weight
(`hpnb.models.roles`): a weight keeps this rank's shard under its old name, a linear layer is replaced by one
that computes with shards. On a grid, and with sequence parallelism, hooks also shard the hidden states before
the first block and gather them at the head. The same table serves every mode; a grid takes no other norm than
nn.LayerNorm.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpnb import placement
from hpnb.mesh import Axis, Mesh, axis_of
from hpnb.meta_device import move_module
from hpnb.models import Role, anatomy, attentions, roles
from hpnb.models.compare_parts import FirstStepCheck, first_step_check
from hpnb.models.model_anatomy import Inputs, Part, WrappedAnatomy, wrap_anatomy
from hpnb.models.registry import explain_alias, is_not_built_in, registration_of
from hpnb.placement import Placement
from hpnb.ranks.current_rank import device as this_device
from hpnb.tensor_parallel.grouped_queries import heads_per_unit, keep_groups_together
from hpnb.tensor_parallel.mode import NAMES, ModelToShard, Section, TensorParallelMode, check_ranks
from hpnb.tensor_parallel.model_checks import (
    check_embeddings,
    check_fused_attentions,
    check_has_blocks,
    check_no_gradients,
    check_repeated,
    check_sections,
    places_of_blocks,
)
from hpnb.tensor_parallel.module_hooks import explain_first_failure
from hpnb.tensor_parallel.replaced_layers import check_replaced_layers
from hpnb.tensor_parallel.sharded_logits import keep_logits_sharded
from hpnb.tensor_parallel.tp_1d import TensorParallel1D
from hpnb.tensor_parallel.tp_2d import TensorParallel2D
from hpnb.tensor_parallel.tp_3d import TensorParallel3D
from hpnb.tensor_parallel.tp_25d import TensorParallel25D

_MODE = "_hpnb_tensor_parallel"


def parallelize(
    model: nn.Module,
    axis: Axis | Mesh,
    mode: str = "1d",
    sequence_parallel: bool = False,
    depth: int = 1,
    overlap: bool = True,
) -> nn.Module:
    """Shard `model` along `axis`, in place, and return it.

    Every rank of the axis passes the same batch and reads the same loss. Parameters, and the buffers of the
    state dict, get the values of the axis's first rank. A model on the meta device stays there, until
    `load_full_state_dict` fills it; any other goes to `hpnb.device()`, one parameter after the other. A
    parameter stays the same object and holds this rank's shard afterwards. An optimizer may therefore be made
    before, but not have stepped: its state would have the old shapes.

    Two things happen in the first forward only. If the class was given to `hpnb.models.register`, rank 0
    checks that its parts, one after the other, are its forward. If a block raises a RuntimeError, the message
    says what a rank has of it: of a class that was registered on a grid, and of any that has no attentions.

    Args:
        model: one that `hpnb.models` knows: a ViTForImageClassification, GPT2LMHeadModel or
            GPT2ForSequenceClassification, or a class given to `hpnb.models.register`.
        axis: the tensor axis, `mesh.tp`; of a mesh that one is taken.
        mode: "1d" (column- and row-parallel; any number of ranks), "2d" (q x q ranks), "2.5d" (depth x q x
            q), "3d" (l x l x l).
        sequence_parallel: shard what lies between the matrices along the tokens. For "1d"; the grids shard
            everything anyway.
        depth: the d of "2.5d".
        overlap: let sequence parallelism's reduce-scatters overlap the computation of weight gradients
            (without sequence parallelism the all-reduce always overlaps).

    Raises:
        TypeError: a model of another kind, or a wrapped one.
        ValueError: a mode that this many ranks cannot serve, sizes that do not divide where they must, more
            ranks than heads, a model that has been sharded before, a parameter with a gradient, or a
            layer to replace that carries a hook or the forward of a subclass, on any rank. The model has not
            been changed then.

    >>> def forward(batch):
    ...     model = hpnb.models.vit("laptop", classes=3)
    ...     hpnb.tensor_parallel.parallelize(model, hpnb.Mesh(hpnb.Layout(tp=2)).tp)
    ...     return tuple(model.vit.layers[0].mlp.fc1.weight.shape), tuple(model(**batch).logits.shape)
    >>> hpnb.launch(forward, {"pixel_values": torch.randn(4, 3, 32, 32)}, ranks=2, device="cpu")[0]
    ((128, 64), (4, 3))
    """
    axis = axis_of(axis, "tp")
    if _mode_of(model) is not None:
        raise ValueError("this model has been sharded by parallelize before; shard a new one")
    if axis.size > 1:
        registration_of(model).check_sharding(model, mode, sequence_parallel)
    to_shard = _describe(model, axis.size if mode == "1d" else 1)
    registered = roles(model)  # asked while its weights are those of the full model
    if axis.size > 1:
        check_sections(to_shard.anatomy)
        check_fused_attentions(to_shard)
        check_embeddings(to_shard)
        if mode != "1d" or sequence_parallel:
            check_has_blocks(to_shard)
            check_repeated(model)
    first_forward_check = first_step_check(model) if dist.get_rank() == 0 else None  # of the full model
    tp_mode = make_mode(mode, axis, sequence_parallel, depth, overlap)
    tp_mode.check(to_shard)
    check_replaced_layers(to_shard, tp_mode, axis)
    _shard_weights(to_shard, axis, tp_mode)
    for path in to_shard.layers:
        old = model.get_submodule(path)
        if (new := tp_mode.replace_layer(path, old, to_shard)) is not None:
            model.set_submodule(path, new)
    for attention in to_shard.attentions:
        per_unit = heads_per_unit(attention, registered, to_shard.roles)
        attention.resize(tp_mode.local_heads(attention.heads // per_unit) * per_unit)
    tp_mode.connect(to_shard)
    finish = None
    if to_shard.vocab_size is not None and to_shard.lazy_logits:
        finish = keep_logits_sharded(model, tp_mode, to_shard.vocab_size)
    wrap = partial(
        TensorParallelAnatomy.around, set_batch_shape=tp_mode.set_batch_shape, finish_outputs=finish
    )
    wrap_anatomy(model, wrap)
    setattr(model, _MODE, tp_mode)
    placement.keep_placements(model)
    if first_forward_check is not None:
        _check_first_forward(model, first_forward_check)
    if axis.size > 1 and (not to_shard.attentions or (mode != "1d" and is_not_built_in(model))):
        for block in to_shard.anatomy.blocks:
            explain_first_failure(block, axis.size, to_shard, sequence_parallel, is_grid=mode != "1d")
    if not any(p.is_meta for p in model.parameters()):
        model.to(this_device())
        stored = model.state_dict().keys() if axis.size > 1 else ()
        for buffer in (b.detach() for name, b in model.named_buffers() if name in stored):
            value = buffer.contiguous()
            dist.broadcast(value, axis.ranks[0], axis.group)
            buffer.copy_(value)
    return model


def make_mode(
    mode: str, axis: Axis, sequence_parallel: bool = False, depth: int = 1, overlap: bool = True
) -> TensorParallelMode:
    """The mode of that name on `axis`. All ranks call it, because it makes the groups of a grid."""
    if mode not in NAMES:
        raise ValueError(f"no tensor-parallel mode {mode!r}; use {', '.join(NAMES)}")
    if depth < 1:
        raise ValueError(f"depth={depth} is not a count; use 1 or more")
    if depth > 1 and mode != "2.5d":
        raise ValueError(f"mode {mode!r} has no depth; depth={depth} goes with mode='2.5d'")
    if mode == "1d":
        return TensorParallel1D(axis, sequence_parallel, overlap)
    if sequence_parallel:
        raise ValueError(
            f"mode {mode!r} shards every activation over all ranks already; sequence_parallel goes with "
            "mode='1d'"
        )
    check_ranks(mode, axis.size, depth)
    if mode == "3d":
        return TensorParallel3D(axis)
    return TensorParallel25D(axis, depth) if depth > 1 else TensorParallel2D(axis)


def axes(model: nn.Module) -> tuple[Axis, ...]:
    """The axes along which `model`, or what it wraps, has been sharded.

    Raises:
        ValueError: it has not been.
    """
    if (mode := _mode_of(model)) is None:
        raise ValueError(
            "this model has not been sharded by tensor parallelism, or it is in stages of a pipeline: "
            "hpnb.tensor_parallel.parallelize(model, mesh.tp) shards a model, and "
            "booster.save_model(model, folder) writes the full weights of any boosted one"
        )
    return mode.axes


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """{name: tensor} of the full model, on every rank; all ranks call it. The model may be boosted.

    Raises:
        ValueError: a model that has not been sharded, or one that is sharded along another axis too:
            `hpnb.placement.full_state_dict(model, [*axes(model), mesh.dp])` is for that.

    >>> def full_shape():
    ...     model = hpnb.models.vit("laptop", classes=3)
    ...     hpnb.tensor_parallel.parallelize(model, hpnb.Mesh(hpnb.Layout(tp=2)).tp)
    ...     return tuple(hpnb.tensor_parallel.full_state_dict(model)["vit.layers.0.mlp.fc1.weight"].shape)
    >>> hpnb.launch(full_shape, ranks=2, device="cpu")
    [(256, 64), (256, 64)]
    """
    _check_axes(model)
    return placement.full_state_dict(model, axes(model))


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """{name: gradient} of the full model's parameters that have one, on every rank; all ranks call it.

    A tied parameter stands under its first name. The errors are those of `full_state_dict`.

    >>> def full_shape(batch):
    ...     model = hpnb.models.vit("laptop", classes=3)
    ...     hpnb.tensor_parallel.parallelize(model, hpnb.Mesh(hpnb.Layout(tp=2)).tp)
    ...     model(**batch).loss.backward()
    ...     return tuple(hpnb.tensor_parallel.full_gradients(model)["vit.layers.0.mlp.fc1.weight"].shape)
    >>> batch = {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.arange(4) % 3}
    >>> hpnb.launch(full_shape, batch, ranks=2, device="cpu")
    [(256, 64), (256, 64)]
    """
    _check_axes(model)
    return placement.full_gradients(model, axes(model))


def load_full_state_dict(model: nn.Module, full: Mapping[str, torch.Tensor]) -> None:
    """Fill `model` from the full model's tensors. Each rank takes its shards, and nothing is sent.

    A parameter on the meta device gets memory on `hpnb.device()`, and stays the same object.

    Args:
        full: {name: tensor}; read one after the other, so that a mapping that reads files never holds all.

    Raises:
        ValueError: a missing or unexpected name, or another shape.
    """
    if any(p.is_meta for p in model.parameters()):
        move_module(model, this_device())
    placement.load_full_state_dict(model, full)


# --- the steps of parallelize --------------------------------------------------------------------------


def _mode_of(model: nn.Module) -> TensorParallelMode | None:
    for module in model.modules():
        if (mode := getattr(module, _MODE, None)) is not None:  # a boosted model has its model's attributes
            return mode  # type: ignore[no-any-return]
    return None


def _check_axes(model: nn.Module) -> None:
    names = {axis.name for axis in axes(model)}
    for name, p in model.named_parameters():
        if others := [axis for axis in placement.placement_of(p, name).axes if axis not in names]:
            raise ValueError(
                f"{name} is sharded along {' and '.join(others)} too, and here it is gathered along "
                f"{' and '.join(sorted(names))} alone: hpnb.placement.full_state_dict takes all axes, and "
                "booster.save_model(model, folder) writes the full weights of a boosted model"
            )


def _describe(model: nn.Module, ranks: int) -> ModelToShard:
    """What to shard. A block that runs at several places is one module, and stands here once.

    Args:
        ranks: of 1D. What a grid splits divides, so that groups of heads stay together by themselves.
    """
    parts, table = anatomy(model), roles(model)
    places = places_of_blocks(parts)
    again = tuple(f"{name}." for names in places.values() for name in names[1:] if name != names[0])
    parts = parts.with_parts(
        parts.embedding, tuple(Part(names[0], block) for block, names in places.items()), parts.head
    )
    sections: dict[str, Section] = {}
    sections |= {part.name: "embedding" for part in parts.embedding}
    sections |= {part.name: "block" for part in parts.blocks}
    sections |= {part.name: "head" for part in parts.head}
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters(remove_duplicate=False)}
    if ranks > 1:
        table = keep_groups_together(parts.blocks, table, shapes, ranks)
    layers: dict[str, tuple[Section, dict[str, Role]]] = {}
    role_of = {p: table[name] for name, p in model.named_parameters()}
    for name, p in model.named_parameters(remove_duplicate=False):
        path, _, attribute = name.rpartition(".")
        if name.startswith(again):
            continue
        section = next((sections[s] for s in sections if path == s or path.startswith(s + ".")), None)
        if section is None:
            inside = [n for n in model.state_dict() if n.startswith(tuple(f"{s}." for s in sections if s))]
            if (sentence := explain_alias(model, name, inside)) is not None:
                raise ValueError(sentence)
            raise ValueError(
                f"{name} lies in no part of this {type(model).__name__}, so it is neither embedding, block "
                "nor head: put its module into a Part (hpnb.models.root_parameters makes one of what is on "
                "the model itself); hpnb.models.check(model, batch) says what else is missing"
            )
        layers.setdefault(path, (section, {}))[1][attribute] = role_of[p]
    return ModelToShard(
        module=model,
        anatomy=parts,
        attentions=attentions(model),
        roles=table,
        shapes=shapes,
        layers=layers,
        lazy_logits=hasattr(type(model), "loss_function"),
    )


def _check_first_forward(model: nn.Module, check: FirstStepCheck) -> None:
    signature = inspect.signature(model.forward)

    def run(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        hook.remove()
        bound = signature.bind_partial(*args, **kwargs).arguments
        check.run(dict(bound))

    hook = model.register_forward_pre_hook(run, with_kwargs=True, prepend=True)


def _shard_weights(model: ModelToShard, axis: Axis, mode: TensorParallelMode) -> None:
    """Replace the data of each parameter by this rank's shard, on this rank's device unless it is on meta.
    What cannot be sharded is refused before, on all ranks."""
    check_no_gradients(model.module, axis)
    places = {
        name: Placement(name, tuple(p.shape), mode.weight_cuts(model.roles[name], p.shape))
        for name, p in model.module.named_parameters()
    }
    for name, p in model.module.named_parameters():
        full, place = p.detach(), places[name]
        if not p.is_meta:
            full = full.to(this_device(), copy=True).contiguous()
            if axis.size > 1:
                dist.broadcast(full, axis.ranks[0], axis.group)
        shard = place.take(full)
        p.data = shard.clone() if place.cuts else shard  # a clone, or the view would keep `full` alive
        if place.cuts:
            placement.set_placement(p, place)


@dataclass(frozen=True)
class TensorParallelAnatomy(WrappedAnatomy):
    """The parts of a sharded model. A pipeline runs them without the model's own forward, so what that would
    have prepared comes from the batch, which every stage has.

    Attributes:
        finish_outputs: applied to the outputs of the head: (outputs, inputs) -> outputs; None leaves them.
    """

    set_batch_shape: Callable[[int, int], None] | None = field(kw_only=True)
    finish_outputs: Callable[[Any, Inputs], Any] | None = field(kw_only=True)

    def check_stages(self, needs_tokens: bool = False) -> None:
        super().check_stages(needs_tokens or self.set_batch_shape is not None)

    def run(self, block: Part, hidden: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        if self.set_batch_shape is not None:
            self.set_batch_shape(*self._batch_shape(inputs))
        return super().run(block, hidden, inputs)

    def finish(self, hidden: torch.Tensor, inputs: Inputs) -> Any:
        if self.set_batch_shape is not None:
            self.set_batch_shape(*self._batch_shape(inputs))
        outputs = super().finish(hidden, inputs)
        return outputs if self.finish_outputs is None else self.finish_outputs(outputs, inputs)

    def _batch_shape(self, inputs: Inputs) -> tuple[int, int]:
        shape: Any = self.inner.tokens(inputs)
        if isinstance(shape, tuple | list) and len(shape) == 2:
            return shape[0], shape[1]
        inner: Any = self.inner
        while isinstance(inner, WrappedAnatomy):
            inner = inner.inner
        raise ValueError(
            f"tokens(self, inputs) of {type(inner).__name__} returned {shape!r}; return (samples, tokens of "
            "each), such as tuple(inputs['input_ids'].shape)"
        )

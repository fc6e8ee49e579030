"""The layers of one rank's pipeline stages, under the names that they have in the model.

    the model    vit.embeddings | vit.layers.0 .. vit.layers.11 | vit.layernorm, classifier
    rank 1 of 4  Stages: vit.layers.3.attention.q_proj.weight ... vit.layers.5.mlp.fc2.bias

The modules are those of the model, so an optimizer that was made before stays attached; the other stages are
let go. The placement of each parameter says: divided along the pipeline's axis, with all of it here. So a
norm sums it over that axis instead of counting it as replicated. A tied weight counts on the first of its
stages.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

from hpnb import comm
from hpnb.mesh import Axis
from hpnb.meta_device import move_module
from hpnb.models import Part
from hpnb.pipeline_parallel import microbatches
from hpnb.pipeline_parallel.boundary import clone_leaf
from hpnb.pipeline_parallel.empty_batch_error import explaining_empty_batch
from hpnb.pipeline_parallel.layers import (
    Builder,
    Inputs,
    Layer,
    built_together,
    first_input,
    layers,
    shared_parameters,
)
from hpnb.pipeline_parallel.partition import How, cut
from hpnb.pipeline_parallel.schedule import Schedule
from hpnb.pipeline_parallel.tied_weights import TiedWeight
from hpnb.placement import Cut, full_tensors, keep_placements, placement_of, set_placement
from hpnb.ranks.current_rank import device as this_device


class Stages(nn.Module):
    """The layers of this rank's stages, on `device`. Names, values and module objects are the model's.

    They move to `device`, and so does what all blocks share, such as rotary tables, although it belongs to
    the other stages too. What is on the meta device gets memory here and zeros, to be filled by
    `hpnb.placement.load_full_state_dict(stages, full, strict=False)`; with device="meta" it stays there, for
    `fully_shard` to shard. A Builder's layers are made here.

    Args:
        stage_layers: the layers of all stages, from `hpnb.pipeline_parallel.cut`.
        numbers: those of this rank's stages.
        device: `hpnb.device()` by default.
        axis: the pipeline's axis, `mesh.pp`; None without ranks.

    Attributes:
        units: what FSDP wraps, its blocks, or its layers where the model does not tell them apart:
            `hpnb.fully_shard(stages, mesh.dp, units=stages.units)`.
        root_holders: modules of `hpnb.models.root_parameters`, from which `embed` and `finish` read what is
            on the root. They are no submodules of this one, and `fully_shard` has to know them.
        tied: the tied weights of the model, that is those which several stages use.
        causal: whether the model's targets are its inputs, shifted by one.

    Raises:
        ValueError: a stage that is not in the cut, or none; a buffer that several stages use, or one
            on the meta device and in no state dict.
    """

    def __init__(
        self,
        stage_layers: Sequence[Sequence[Layer]],
        numbers: Sequence[int],
        device: torch.device | str | None = None,
        axis: Axis | None = None,
    ) -> None:
        super().__init__()
        self.numbers = tuple(sorted(set(numbers)))
        if not self.numbers or self.numbers[0] < 0 or self.numbers[-1] >= len(stage_layers):
            raise ValueError(f"stages {tuple(numbers)} are not among 0 to {len(stage_layers) - 1}")
        _check_buffers(stage_layers)
        self.tied = tuple(
            TiedWeight(names, stages)
            for names, stages in shared_parameters(stage_layers).items()
            if len(set(stages)) > 1
        )
        self.causal = any(layer.causal for of_stage in stage_layers for layer in of_stage)
        target = this_device() if device is None else torch.device(device)
        # A Builder's layers are made on the CPU and moved: values drawn there are the same everywhere.
        build_on = target if target.type == "meta" else None
        with built_together():
            self._layers = {
                s: tuple(layer.built(build_on) for layer in stage_layers[s]) for s in self.numbers
            }
        rank_layers = [layer for of_stage in self._layers.values() for layer in of_stage]
        wrapped = [layer for layer in rank_layers if layer.kind in ("block", "layer")]
        self.units = [part.module for layer in wrapped for part in layer.parts]
        parts = [part for layer in rank_layers for part in layer.parts]
        self.root_holders = [part.module for part in parts if not part.name]
        for part in parts:
            _add_submodule(self, part.name, part.module)
        self.training = any(part.module.training for part in parts)
        if target.type != "meta":
            move_module(self, target)
        for layer in rank_layers:
            if layer.anatomy is not None:
                layer.anatomy.move_shared(this_device() if target.type == "meta" else target)
        if axis is not None:
            self._mark_owned_by_stage(axis)

    def forward(self, stage: int, hidden: Any, inputs: Inputs) -> Any:
        """Run one of this rank's stages.

        Args:
            hidden: the output of the stage before; None for stage 0.
            inputs: the microbatch, on this rank's device.
        """
        if stage not in self._layers:
            raise ValueError(f"stage {stage} is not here; this rank has {', '.join(map(str, self.numbers))}")
        first, *others = self._layers[stage]
        # `hidden` arrives as a leaf, which autograd does not let change.
        if hidden is not None and first.parts and _changes_its_input(first.parts[0].module):
            hidden = tree_map(clone_leaf, hidden)
        with explaining_empty_batch("model", inputs):
            with _explaining_in_place(stage, first):
                hidden = first.run(hidden, inputs)
            for layer in others:
                hidden = layer.run(hidden, inputs)
        return hidden

    def trained(self, stage: int) -> list[nn.Parameter]:
        """The trained parameters of one of this rank's stages, each once."""
        parts = (part for layer in self._layers[stage] for part in layer.parts)
        return list({p: None for part in parts for p in part.module.parameters() if p.requires_grad})

    def _mark_owned_by_stage(self, axis: Axis) -> None:
        elsewhere = [tied for tied in self.tied if tied.stages[0] not in self.numbers]
        first = {name: tied.names[0] for tied in elsewhere for name in tied.names[1:]}
        for name, p in self.named_parameters():
            where = placement_of(p, name)
            shape = where.local_shape
            cuts = [other for other in where.cuts if other.axis != axis.name]
            if axis.size > 1:
                cuts.append(Cut(axis.name, 0, ((0, shape[0] if shape else 1),)))
            set_placement(p, replace(where, name=name, cuts=tuple(cuts), tied_to=first.get(name)))
        keep_placements(self)


class WholeModel(Stages):
    """A model as the only stage: any model that takes the batch by name, since nothing is taken apart.

    Names, hooks and the forward are those of the model.

    Args:
        model: on its device already.
        takes: which entries of a mapping its forward takes, (names) -> names; by default all. Of another kind
            of batch, and of a mapping if the model is a Sequential, it takes `first_input`.
        causal: whether its targets are its inputs, shifted by one.
        adds: what its forward gets besides these entries, or in place of them, (entries) -> arguments.
        trained: the parameters that steps may train, though some are frozen now; by default those that are
            trained now.
    """

    _whole_model: nn.Module

    def __init__(
        self,
        model: nn.Module,
        takes: Callable[[Collection[str]], Collection[str]] = lambda names: names,
        causal: bool = False,
        adds: Callable[[Inputs], Inputs] = lambda given: {},
        trained: Sequence[nn.Parameter] | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self._trained = trained
        # The model is no child, or its name would stand in front of all others: the two modules share their
        # tables of parameters, buffers and children.
        self.__dict__["_whole_model"] = model
        for table in ("_parameters", "_buffers", "_modules"):
            setattr(self, table, getattr(model, table))
        self.numbers, self.tied, self.units, self.causal = (0,), (), [], causal
        self._layers = {0: (Layer((Part("", model),), partial(_run_whole_model, model, takes, adds)),)}
        self.training = model.training

    def train(self, mode: bool = True) -> WholeModel:
        self.training = mode
        self._whole_model.train(mode)
        return self

    def trained(self, stage: int) -> list[nn.Parameter]:
        return super().trained(stage) if self._trained is None else list(self._trained)


def _run_whole_model(
    model: nn.Module,
    takes: Callable[[Collection[str]], Collection[str]],
    adds: Callable[[Inputs], Inputs],
    hidden: Any,
    inputs: Inputs,
) -> Any:
    if not isinstance(inputs, Mapping):
        return model(first_input(inputs))
    if names := takes(inputs.keys()):
        given = {name: inputs[name] for name in names}
        return model(**{**given, **adds(given)})
    if type(model).forward is nn.Sequential.forward:  # whose argument has no name of its own
        return model(first_input(inputs))
    arguments = ", ".join(inspect.signature(model.forward).parameters) or "nothing"
    raise TypeError(
        f"the batch has {', '.join(map(str, inputs)) or 'no entries'}, and the forward of this "
        f"{type(model).__name__} takes {arguments}: no name is in both; rename entries of the batch "
        "(a collate_fn can), or arguments of the forward"
    )


def build_stages(
    model: nn.Module | Builder | Stages, axis: Axis, schedule: Schedule, how: How, example: Inputs = None
) -> Stages:
    """This rank's stages of `model`, for `hpnb.Pipeline`; all ranks of the world call it.

    Args:
        how, example: see `hpnb.pipeline_parallel.cut`; `example` is a whole batch.
    """
    numbers = schedule.stages_of(axis.rank)
    if isinstance(model, Stages):
        if model.numbers != tuple(sorted(numbers)):
            raise ValueError(
                f"these are stages {model.numbers}, and {schedule.name} gives this rank {numbers}"
            )
        return model
    if example is not None:
        example = microbatches.split_batch(example, schedule.microbatches)[0]
    size, group = dist.get_world_size(), dist.group.WORLD
    assert group is not None
    everybody = Axis("world", size, dist.get_rank(), group, tuple(range(size)))
    stages = cut(layers(model), schedule.stages, how, example, everybody)  # replicas must cut alike
    return Stages(stages, numbers, this_device(), axis)


class HasStages(Protocol):
    """A Pipeline: its `module` is the Stages of this rank."""

    module: Stages


def full_state_dict(
    stages: Stages | HasStages, axis: Axis | None, axes: Iterable[Axis] = ()
) -> dict[str, torch.Tensor]:
    """{name: tensor} of the whole model on the CPU, in its order: parameters and buffers of all stages.

    Every rank of the axes calls it, and it returns the whole model on every rank, gathered one tensor at a
    time: each rank's memory must hold it. All names of a tied weight are there, so the model loads it with
    strict=True.

    Args:
        stages: a Pipeline, or its `module`.
        axis: the pipeline's, `mesh.pp`.
        axes: others along which parameters are cut: `mesh.dp` after `fully_shard`, and of a tensor-parallel
            model `hpnb.tensor_parallel.axes(model)`.

    Raises:
        ValueError: a parameter is cut along an axis that is in neither.
    """
    if not isinstance(stages, nn.Module):
        stages = stages.module
    apart = frozenset() if axis is None else frozenset({axis.name})
    others = [other for other in axes if other.name not in apart]
    state, full_tensor = full_tensors(stages, others, apart=apart)
    here = {stage: _describe_stage(stages, stage, state) for stage in stages.numbers}
    by_rank = [here]
    if axis is not None and axis.size > 1:
        by_rank = [{} for _ in range(axis.size)]
        dist.all_gather_object(by_rank, here, axis.group)
    owners = sorted((stage, rank) for rank, stages_there in enumerate(by_rank) for stage in stages_there)
    full: dict[str, torch.Tensor] = {}
    for stage, rank in owners:
        for name, (shape, dtype) in by_rank[rank][stage].items():
            value = torch.empty(shape, dtype=dtype, device=this_device())
            if stage in here:
                value.copy_(full_tensor(name))
            if axis is not None:
                value = comm.broadcast(value, axis, rank)
            full[name] = value.cpu()
    return full


def _describe_stage(
    stages: Stages, stage: int, state: dict[str, torch.Tensor]
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """{name: (full shape, dtype)} of what one stage has in `state`."""
    parts = [part for layer in stages._layers[stage] for part in layer.parts]
    roots = tuple(f"{part.name}." for part in parts if part.name)
    names = {name for part in parts if not part.name for name in part.module.state_dict()}
    parameters = dict(stages.named_parameters(remove_duplicate=False))
    return {
        name: (placement_of(parameters.get(name, value), name).shape, value.dtype)
        for name, value in state.items()
        if name.startswith(roots) or name in names
    }


@contextmanager
def _explaining_in_place(stage: int, first: Layer) -> Iterator[None]:
    """Around the first layer of a stage: autograd's error does not say which leaf it means."""
    try:
        yield
    except RuntimeError as error:
        if "leaf Variable that requires grad" not in str(error):
            raise
        name = f"layer {first.parts[0].name}" if first.parts else "a layer"
        raise RuntimeError(
            f"{name}, the first one of stage {stage}, changes its input in place, and no stage may change "
            "what it receives from the stage before: cut the model elsewhere (cut=[...] says how many layers "
            "each stage gets), or let the layer compute a new tensor (relu instead of relu_)"
        ) from error


def _changes_its_input(module: nn.Module) -> bool:
    """Whether the first that `module` does is an in-place operation, as far as modules say so."""
    while isinstance(module, nn.Sequential) and len(module):
        module = module[0]
    return bool(getattr(module, "inplace", False))


class _Path(nn.Module):
    """One step of a dotted name: a module that has children and no forward."""


def _add_submodule(root: nn.Module, name: str, module: nn.Module) -> None:
    """Make `module` a descendant of `root` by its full name; under no name, its parameters are the root's."""
    if not name:
        root._parameters.update(module._parameters)
        return
    *path, leaf = name.split(".")
    for step in path:
        # Straight into the table, for the model may have a child whose name Stages uses for something else.
        below = root._modules.get(step)
        if below is None:
            below = root._modules[step] = _Path()
        root = below
    root._modules[leaf] = module


def _check_buffers(stage_layers: Sequence[Sequence[Layer]]) -> None:
    """A buffer in the state dict is state: if two stages changed it, their values would diverge."""
    first_use: dict[torch.Tensor | str, tuple[str, int]] = {}
    numbered = [(stage, layer) for stage, of_stage in enumerate(stage_layers) for layer in of_stage]
    for stage, layer in numbered:
        # A layer that is not built has names in place of tensors.
        named: list[tuple[str, torch.Tensor | str]] = list(layer.tied_buffers.items())
        for part in layer.parts:
            values = part.module.state_dict(keep_vars=True).items()
            named += [
                (part.full_name(name), value)
                for name, value in values
                if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
            ]
        for name, value in named:
            first, at = first_use.setdefault(value, (name, stage))
            if at != stage:
                raise ValueError(
                    f"buffer {first} of stage {at} is also {name} of stage {stage}, and would have two "
                    "values: cut so that one stage has both, or use persistent=False if none changes it"
                )

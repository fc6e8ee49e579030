"""Where each parameter lives: its name and shape in the full model, and which shard of it this rank holds.

    full parameter   (50257, 1600)
    tensor parallel  sharded along tp at dim 0: rows [12565, 25130)
    ZeRO-3           then sharded along dp: elements [0, 5026000) of these rows
    this rank        a tensor of 5,026,000 elements

A sharded model keeps the full model's parameter names. A `Placement` says which shard stands under a name. It
is what DTensorSpec is to a DTensor, and a `Cut` is one `Shard` of it, which here may be uneven or in ranges.
Gradient norms, ZeRO, checkpoints and `full_state_dict` read it and need to know nothing else about the
layout. A parameter without a placement is replicated along every axis.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpnb.mesh import Axis
from hpnb.ranks.current_rank import device as this_device

FLAT = -1  # as a dim: not the last one, but the elements of all dims, one behind the other

Range = tuple[int, int]  # [start, stop)


@dataclass(frozen=True, slots=True)
class Cut:
    """A parameter is sharded along one axis: its ranks hold different elements, and together all of them.

    Attributes:
        axis: its name in the mesh.
        dim: which dim is split, or FLAT.
        ranges: what this rank holds of that dim, in order. Fused parameters, as Q, K and V, have several.
    """

    axis: str
    dim: int
    ranges: tuple[Range, ...]

    @property
    def size(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


@dataclass(frozen=True, slots=True)
class Placement:
    """What a parameter is in the full model, and which shard of it this rank holds.

    Attributes:
        name, shape: in the full model.
        cuts: one after the other; each splits what the one before has left. In a pipeline, a parameter of one
            stage is sharded along pp with everything in one range.
        tied_to: the parameter whose value and gradient it shares, if it has no separate gradient.
    """

    name: str
    shape: tuple[int, ...]
    cuts: tuple[Cut, ...] = ()
    tied_to: str | None = None

    @property
    def axes(self) -> frozenset[str]:
        """Axes along which it is sharded. Along the others it is replicated."""
        return frozenset(cut.axis for cut in self.cuts)

    @property
    def local_shape(self) -> tuple[int, ...]:
        return _shape_after(self.shape, self.cuts)

    def cut(self, cut: Cut) -> Placement:
        """This placement, sharded once more."""
        return replace(self, cuts=(*self.cuts, cut))

    def without(self, axis: str) -> Placement:
        """This placement, not sharded along `axis`."""
        return replace(self, cuts=tuple(cut for cut in self.cuts if cut.axis != axis))

    def take(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's shard of the full parameter, or of any tensor of its shape."""
        if tuple(full.shape) != self.shape:
            raise ValueError(f"{self.name} is {self.shape} in the full model, not {tuple(full.shape)}")
        for cut in self.cuts:
            views = _views(full, cut)
            full = views[0] if len(views) == 1 else torch.cat(views, max(cut.dim, 0))
        return full

    def put(self, shard: torch.Tensor, full: torch.Tensor) -> None:
        """Write this rank's shard into its position in `full`."""
        if not self.cuts:
            full.copy_(shard.reshape(full.shape))
            return
        *outer_cuts, last = self.cuts
        if not outer_cuts:
            _write(shard, full, last)
            return
        outer = replace(self, cuts=tuple(outer_cuts))
        outer_shard = outer.take(full).clone()
        _write(shard, outer_shard, last)
        outer.put(outer_shard, full)


# --- parameters and their placements ---------------------------------------------------------------

# Noted on the parameter, as Megatron notes `partition_dim`, because an optimizer knows parameters only.
_ON_PARAMETER = "hpnb_placement"
_IN_MODULE = "hpnb_placed_parameters"


def set_placement(parameter: torch.Tensor, placement: Placement) -> None:
    """Note the placement on `parameter` itself. `keep_placements` takes care of copies.

    Raises:
        ValueError: the parameter has another shape than the placement gives it on this rank.
    """
    shape, expected = tuple(parameter.shape), placement.local_shape
    if shape != expected:
        raise ValueError(f"{placement.name} is placed as {expected}, and the parameter here is {shape}")
    setattr(parameter, _ON_PARAMETER, placement)


def placement_of(parameter: torch.Tensor, name: str = "") -> Placement:
    """The placement of `parameter`. Without one it is the full parameter, replicated, and called `name`."""
    placement: Placement | None = getattr(parameter, _ON_PARAMETER, None)
    return Placement(name, tuple(parameter.shape)) if placement is None else placement


def keep_placements(module: nn.Module) -> None:
    """Make `copy.deepcopy` of `module`, or of a part of it, keep the placements of its parameters.

    PyTorch copies a Parameter without its attributes, so an EMA copy would count as replicated.
    """
    for owner in module.modules():
        if owner._parameters:
            owner.__dict__.setdefault(_IN_MODULE, _PlacedParameters(owner._parameters))


class _PlacedParameters:
    """Keeps placements in copies of a module: it is an attribute of it, so `copy.deepcopy` copies it too."""

    def __init__(self, parameters: dict[str, nn.Parameter | None]) -> None:
        self.parameters = parameters

    def __deepcopy__(self, memo: dict[int, Any]) -> _PlacedParameters:
        # The module's dict has been copied before. With its memo, deepcopy returns the copied module's dict.
        copies = deepcopy(self.parameters, memo)
        for parameter, copied in zip(self.parameters.values(), copies.values(), strict=True):
            if parameter is not None and copied is not None and hasattr(parameter, _ON_PARAMETER):
                set_placement(copied, placement_of(parameter))
        return _PlacedParameters(copies)


def check_axes(parameters: Iterable[torch.Tensor], axes: Sequence[Axis]) -> None:
    """Make sure that `axes` reach all ranks that hold a shard of a parameter.

    Raises:
        ValueError: a parameter is sharded along an axis that is not among `axes`.
    """
    _check_axis_names(map(placement_of, parameters), {axis.name for axis in axes})


def _check_axis_names(placements: Iterable[Placement], names: Collection[str]) -> None:
    for placement in placements:
        if missing := sorted(placement.axes - set(names)):
            raise ValueError(
                f"{placement.name or 'a parameter'} is sharded along {' and '.join(missing)}, and the axes "
                f"given are {', '.join(sorted(names)) or 'none'}: {_which_to_pass(missing)}"
            )


def _which_to_pass(missing: Sequence[str]) -> str:
    """What to write for axes of these names; those of a grid are no attributes of the mesh."""
    on_mesh = [f"mesh.{name}" for name in missing if "." not in name]
    grid = ["*hpnb.tensor_parallel.axes(model)"] if any(name.startswith("tp.") for name in missing) else []
    parts = sorted({name.split(".")[0] for name in missing if "." in name} - {"tp"})
    other = [f"the axes that mesh.{name}.split made" for name in parts]
    sentence = f"pass {' and '.join([*on_mesh, *grid, *other])} too"
    return f"{sentence}, as in [mesh.dp, *hpnb.tensor_parallel.axes(model)]" if grid else sentence


# --- the full model's tensors ----------------------------------------------------------------------


def full_state_dict(module: nn.Module, axes: Iterable[Axis]) -> dict[str, torch.Tensor]:
    """{name: tensor} of the full model, gathered along `axes`; buffers as they are here.

    Every rank of the axes calls it and gets all of it, one parameter gathered after the other. The axes of a
    tensor-parallel model are `hpnb.tensor_parallel.axes(model)`, on a grid several: pass
    `[mesh.dp, *hpnb.tensor_parallel.axes(model)]` after `fully_shard`.

    Raises:
        ValueError: a parameter is sharded along an axis that is not among `axes`, or lies in a stage of a
            pipeline; `hpnb.pipeline_parallel.full_state_dict` is for that.
    """
    state, gather_tensor = full_tensors(module, axes)
    return {name: gather_tensor(name) for name in state}


def full_gradients(module: nn.Module, axes: Iterable[Axis]) -> dict[str, torch.Tensor]:
    """{name: gradient} of the full model's parameters that have one; see `full_state_dict`."""
    grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    placements = {name: placement_of(module.get_parameter(name), name) for name in grads}
    gather_tensor = _gatherer(grads, placements, axes)
    return {name: gather_tensor(name) for name in grads}


def full_tensors(
    module: nn.Module, axes: Iterable[Axis], *, apart: frozenset[str] = frozenset()
) -> tuple[dict[str, torch.Tensor], Callable[[str], torch.Tensor]]:
    """This rank's state dict, and a function that gathers one of its tensors in full.

        state, gather_tensor = full_tensors(module, axes)
        full = {name: gather_tensor(name) for name in state}

    Both are collective: every rank of the axes calls this, and then gather_tensor with the same names in the
    same order.

    Args:
        apart: names of axes whose ranks hold different parameters, as stages of a pipeline do. Nothing is
            gathered along these.
    """
    state = module.state_dict()  # first: ZeRO 3 then registers shards again, if a forward was interrupted
    shards, placements = dict[str, torch.Tensor](), dict[str, Placement]()
    for name, p in module.named_parameters(remove_duplicate=False):
        placement = placement_of(p, name)
        shards[name] = p.detach()
        cuts = tuple(cut for cut in placement.cuts if cut.axis not in apart)
        placements[name] = replace(placement, cuts=cuts)
    gather_shards = _gatherer(shards, placements, axes)

    def gather_tensor(name: str) -> torch.Tensor:
        buffer: torch.Tensor = state[name]
        return gather_shards(name) if name in shards else buffer.detach()

    return state, gather_tensor


_STAGES = (
    "the weights of all stages are put together by "
    "hpnb.pipeline_parallel.full_state_dict(pipe.module, mesh.pp, other_axes)"
)


def _gatherer(
    shards: Mapping[str, torch.Tensor], placements: Mapping[str, Placement], axes: Iterable[Axis]
) -> Callable[[str], torch.Tensor]:
    """A function that gathers one of `shards` in full. Every rank of the axes calls this, and then that with
    the same names in the same order."""
    by_name = {axis.name: axis for axis in axes}
    for name, placement in placements.items():
        if "pp" in placement.axes and "pp" not in by_name:  # with mesh.pp it would fail below
            raise ValueError(f"{name} lies in a stage of a pipeline: {_STAGES}")
    _check_axis_names(placements.values(), by_name)
    peers: dict[str, list[dict[str, Placement]]] = {}
    for axis in by_name.values():  # what every rank of an axis holds, in one message
        messages: list[dict[str, Placement]] = [{} for _ in range(axis.size)]
        dist.all_gather_object(messages, dict(placements), axis.group)
        peers[axis.name] = messages
        for name, placement in placements.items():
            if axis.name in placement.axes and not all(name in message for message in messages):
                raise ValueError(f"{name} is not on all ranks of axis {axis.name}: {_STAGES}")

    def gather_tensor(name: str) -> torch.Tensor:
        placement = placements[name]
        along = {axis: [message[name] for message in peers[axis]] for axis in placement.axes}
        return gather_full(shards[name], placement, along, by_name)

    return gather_tensor


@torch.no_grad()
def load_full_state_dict(module: nn.Module, full: Mapping[str, torch.Tensor], *, strict: bool = True) -> None:
    """Fill `module` from the full model's tensors. Each rank takes its shards, and nothing is sent.

    Args:
        full: {name: tensor}, read one after the other, so it may be a mapping that reads files. Names are
            those of `module.state_dict()`. Of the names of a tied parameter one is enough.
        strict: False skips names that `module` does not have, as a pipeline stage has only some of them. All
            that it has must be there either way.

    Raises:
        ValueError: a missing or unexpected name, or another shape.
    """
    targets = module.state_dict(keep_vars=True)
    names_of: dict[int, list[str]] = {}
    for name, target in targets.items():
        names_of.setdefault(id(target), []).append(name)
    for names in names_of.values():  # a parameter that is tied to one of another rank takes its values
        if (other := placement_of(targets[names[0]]).tied_to) is not None and other not in targets:
            names.append(other)
    missing = [names[0] for names in names_of.values() if not any(name in full for name in names)]
    unexpected = [name for name in full if name not in targets] if strict else []
    for problem, wrong in (("lacks", missing), ("has unexpected", unexpected)):
        if wrong:
            more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise ValueError(f"the state {problem} {', '.join(wrong[:5])}{more}")
    for names in names_of.values():
        target = targets[names[0]]
        value = full[next(name for name in names if name in full)]
        target.copy_(placement_of(target, names[0]).take(value))


def gather_full(
    shard: torch.Tensor,
    placement: Placement,
    peers: Mapping[str, Sequence[Placement]],
    axes: Mapping[str, Axis],
) -> torch.Tensor:
    """The full tensor of which this rank holds `shard`. All ranks of the placement's axes call it.

    The last cut is undone first: an all-gather along its axis brings the ranks' shards, padded to the
    largest, and each is written to its ranges. Then the cut before it is undone, and so on.

    Args:
        peers: {axis: the placements of its ranks, in order}.
    """
    for depth in reversed(range(len(placement.cuts))):
        axis = axes[placement.cuts[depth].axis]
        cuts = [peer.cuts[depth] for peer in peers[axis.name]]
        joined = shard.new_empty(_shape_after(placement.shape, placement.cuts[:depth]))
        shapes = [_shape_after(joined.shape, (cut,)) for cut in cuts]
        largest = max(map(prod, shapes))
        if largest:
            padded = shard.new_zeros(largest, device=this_device())  # an offloaded shard is on the CPU
            padded[: shard.numel()] = shard.reshape(-1)
            gathered = padded.new_empty(axis.size * largest)
            dist.all_gather_into_tensor(gathered, padded, group=axis.group)
            for cut, shape, values in zip(cuts, shapes, gathered.split(largest), strict=True):
                _write(values[: prod(shape)].view(shape), joined, cut)
        shard = joined
    return shard


# --- one cut ---------------------------------------------------------------------------------------


def _shape_after(shape: Sequence[int], cuts: Sequence[Cut]) -> tuple[int, ...]:
    """The shape that `cuts` leave of `shape`. A number, (), has no dim to split and stays one."""
    left = tuple(shape)
    for cut in cuts:
        if not left and cut.dim != FLAT:
            continue
        left = (cut.size,) if cut.dim == FLAT else (*left[: cut.dim], cut.size, *left[cut.dim + 1 :])
    return left


def _views(full: torch.Tensor, cut: Cut) -> list[torch.Tensor]:
    """One view of `full` for each range of `cut`."""
    if full.dim() == 0 and cut.dim != FLAT:
        return [full]
    split, dim = (full.reshape(-1), 0) if cut.dim == FLAT else (full, cut.dim)
    return [split.narrow(dim, start, stop - start) for start, stop in cut.ranges]


def _write(shard: torch.Tensor, full: torch.Tensor, cut: Cut) -> None:
    if cut.dim == FLAT and not full.is_contiguous():
        raise ValueError(f"a shard can be written into contiguous memory only, not strides {full.stride()}")
    if full.dim() == 0 and cut.dim != FLAT:
        full.copy_(shard)
        return
    sizes = [stop - start for start, stop in cut.ranges]
    values = shard.reshape(-1) if cut.dim == FLAT else shard
    for view, value in zip(_views(full, cut), values.split(sizes, max(cut.dim, 0)), strict=True):
        view.copy_(value)

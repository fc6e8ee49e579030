"""Where each parameter lives: its name and shape in the whole model, and which part of it this rank holds.

    shape (50257, 1600)      cut along tp at dim 0 [12565, 25130)       tensor parallelism
                             then along dp, elements [0, 5026000)       ZeRO-3
    held here                a tensor of 5,026,000 elements

A cut or sharded model keeps the whole model's parameter names; what it holds under a name is a part, and a
`Placement` says which. Gradient norms, ZeRO and checkpoints read it and ask nothing else about a layout. A
parameter that nobody has placed is whole, and replicated along every axis.
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

FLAT = -1  # as a dim: all elements one behind the other

Range = tuple[int, int]  # from, up to


@dataclass(frozen=True, slots=True)
class Cut:
    """Dealt out along one axis: the ranks hold different parts, which together are all of it.

    Attributes:
        axis: its name in the mesh.
        dim: which dim is cut, or FLAT.
        ranges: what this rank holds of it, in order; several where parts were fused, as Q, K and V are.
    """

    axis: str
    dim: int
    ranges: tuple[Range, ...]

    @property
    def size(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


@dataclass(frozen=True, slots=True)
class Placement:
    """What a parameter is in the whole model, and which part of it this rank holds.

    Attributes:
        name, shape: in the whole model.
        cuts: one behind the other; each cuts what the one before has left. Under a pipeline, a parameter of
            one stage is cut along pp with everything in one range.
        tied_to: the parameter whose value and gradient it shares, if it has no gradient of its own.
    """

    name: str
    shape: tuple[int, ...]
    cuts: tuple[Cut, ...] = ()
    tied_to: str | None = None

    @property
    def axes(self) -> frozenset[str]:
        """Axes along which the ranks hold different parts; along the others they hold the same."""
        return frozenset(cut.axis for cut in self.cuts)

    @property
    def local_shape(self) -> tuple[int, ...]:
        return _after(self.shape, self.cuts)

    def cut(self, cut: Cut) -> Placement:
        """This, cut once more."""
        return replace(self, cuts=(*self.cuts, cut))

    def without(self, axis: str) -> Placement:
        """This, without its cuts along `axis`."""
        return replace(self, cuts=tuple(cut for cut in self.cuts if cut.axis != axis))

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of the whole parameter (or of whatever has its shape)."""
        if tuple(whole.shape) != self.shape:
            raise ValueError(f"{self.name} is {self.shape} in the whole model, not {tuple(whole.shape)}")
        for cut in self.cuts:
            whole = _join(_parts(whole, cut), cut.dim)
        return whole

    def put(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """Write this rank's part into its place in `whole`."""
        *before, last = self.cuts or (Cut("", FLAT, ((0, whole.numel()),)),)
        if not before:
            _write(part, whole, last)
            return
        outer = replace(self, cuts=tuple(before))
        middle = outer.take(whole).clone()
        _write(part, middle, last)
        outer.put(middle, whole)


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
    """Stands in a module beside its table of parameters, is copied with it, and places the copies."""

    def __init__(self, parameters: dict[str, nn.Parameter | None]) -> None:
        self.parameters = parameters

    def __deepcopy__(self, memo: dict[int, Any]) -> _PlacedParameters:
        copies = deepcopy(self.parameters, memo)  # the copied module's own table, which the memo knows
        for parameter, copied in zip(self.parameters.values(), copies.values(), strict=True):
            if parameter is not None and copied is not None and hasattr(parameter, _ON_PARAMETER):
                set_placement(copied, placement_of(parameter))
        return _PlacedParameters(copies)


# --- what reads it ---------------------------------------------------------------------------------


def check_axes(parameters: Iterable[torch.Tensor], axes: Sequence[Axis]) -> None:
    """Make sure that what is asked of all of a parameter asks all who hold a part of it.

    Raises:
        ValueError: a parameter is cut along an axis that is not among `axes`.
    """
    _check_known(map(placement_of, parameters), {axis.name for axis in axes})


def _check_known(places: Iterable[Placement], known: Collection[str]) -> None:
    for where in places:
        if missing := sorted(where.axes - set(known)):
            raise ValueError(
                f"{where.name or 'a parameter'} is cut along {' and '.join(missing)}, and the axes given are "
                f"{', '.join(sorted(known)) or 'none'}: pass mesh.{missing[0]} too"
            )


def full_state_dict(module: nn.Module, axes: Iterable[Axis]) -> dict[str, torch.Tensor]:
    """{name: tensor} of the whole model, from parts that lie along `axes`; buffers as they are here.

    Every rank of the axes calls it and gets all of it, one parameter gathered after the other.

    Raises:
        ValueError: a parameter is cut along an axis that is not among `axes`.
    """
    state, whole = full_tensors(module, axes)
    return {name: whole(name) for name in state}


def full_tensors(
    module: nn.Module, axes: Iterable[Axis], *, apart: frozenset[str] = frozenset()
) -> tuple[dict[str, torch.Tensor], Callable[[str], torch.Tensor]]:
    """The state of `module` as it is here, and what gathers the whole tensor of a name, one at a time.

    Every rank of the axes calls both, the latter for the same names in the same order.

    Args:
        apart: axes whose ranks hold different parameters, as the stages of a pipeline do: they are not asked.

    Raises:
        ValueError: a parameter is cut along an axis that is in neither, or is not on all ranks of one.
    """
    by_name = {axis.name: axis for axis in axes}
    state = module.state_dict()  # first, for it puts a module in order whose forward was interrupted
    parts, places = dict[str, torch.Tensor](), dict[str, Placement]()
    for name, p in module.named_parameters(remove_duplicate=False):
        where = placement_of(p, name)
        parts[name] = p.detach()
        places[name] = replace(where, cuts=tuple(cut for cut in where.cuts if cut.axis not in apart))
    _check_known(places.values(), by_name)
    peers: dict[str, list[dict[str, Placement]]] = {}
    for axis in by_name.values():  # who holds what: one message an axis
        everyone: list[dict[str, Placement]] = [{} for _ in range(axis.size)]
        dist.all_gather_object(everyone, places, axis.group)
        peers[axis.name] = everyone
        for name, where in places.items():
            if axis.name in where.axes and not all(name in theirs for theirs in everyone):
                raise ValueError(
                    f"{name} is not on all ranks of axis {axis.name}: the stages of a pipeline are put "
                    "together by hpnb.pipeline_parallel.full_state_dict"
                )

    def whole(name: str) -> torch.Tensor:
        if name not in parts:
            buffer: torch.Tensor = state[name]
            return buffer.detach()
        where = places[name]
        return gather_full(parts[name], where, {a: [o[name] for o in peers[a]] for a in where.axes}, by_name)

    return state, whole


@torch.no_grad()
def load_full_state_dict(
    module: nn.Module, full: Mapping[str, torch.Tensor], *, strict: bool = True
) -> None:
    """Fill `module` from the whole model's tensors, each rank taking its parts; nothing is sent.

    Args:
        full: {name: tensor}, read one after the other, so it may be a mapping that reads files. Names are
            those of `module.state_dict()`; of the names of a tied parameter one is enough.
        strict: False skips names that `module` does not have, as a stage of a pipeline has some of them only.
            What it has must be there either way.

    Raises:
        ValueError: a missing or unexpected name, or another shape.
    """
    held = module.state_dict(keep_vars=True)
    tied: dict[int, list[str]] = {}
    for name, value in held.items():
        tied.setdefault(id(value), []).append(name)
    for names in tied.values():  # what is tied to a parameter of another rank takes its values
        if (home := placement_of(held[names[0]]).tied_to) is not None and home not in held:
            names.append(home)
    missing = [names[0] for names in tied.values() if not any(name in full for name in names)]
    unexpected = [name for name in full if name not in held] if strict else []
    for what, wrong in (("lacks", missing), ("has unexpected", unexpected)):
        if wrong:
            more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise ValueError(f"the state {what} {', '.join(wrong[:5])}{more}")
    for names in tied.values():
        value = held[names[0]]
        value.copy_(placement_of(value, names[0]).take(full[next(name for name in names if name in full)]))


def gather_full(
    part: torch.Tensor,
    placement: Placement,
    peers: Mapping[str, Sequence[Placement]],
    axes: Mapping[str, Axis],
) -> torch.Tensor:
    """The whole of what this rank and its `peers` (by axis, in order of rank) hold parts of."""
    for depth in reversed(range(len(placement.cuts))):
        cut = placement.cuts[depth]
        axis, held = axes[cut.axis], [other.cuts[depth] for other in peers[cut.axis]]
        whole = part.new_empty(_after(placement.shape, placement.cuts[:depth]))
        most = max(prod(_after(whole.shape, (other,))) for other in held)
        if most == 0:
            part = whole
            continue
        padded = part.new_zeros(most, device=this_device())  # what is offloaded is on the CPU
        padded[: part.numel()] = part.reshape(-1)
        everyone = padded.new_empty(axis.size * most)
        dist.all_gather_into_tensor(everyone, padded, group=axis.group)
        for other, values in zip(held, everyone.split(most), strict=True):
            shape = _after(whole.shape, (other,))
            _write(values[: prod(shape)].view(shape), whole, other)
        part = whole
    return part


# --- one cut ---------------------------------------------------------------------------------------


def _after(shape: Sequence[int], cuts: Sequence[Cut]) -> tuple[int, ...]:
    """The shape of what is left of `shape`. A number, (), has no dim to cut and stays one."""
    left = tuple(shape)
    for cut in cuts:
        if not left and cut.dim != FLAT:
            continue
        left = (cut.size,) if cut.dim == FLAT else (*left[: cut.dim], cut.size, *left[cut.dim + 1 :])
    return left


def _parts(whole: torch.Tensor, cut: Cut) -> list[torch.Tensor]:
    """Views of what `cut` leaves of `whole`, a range each."""
    if whole.dim() == 0 and cut.dim != FLAT:
        return [whole]
    flat, dim = (whole.reshape(-1), 0) if cut.dim == FLAT else (whole, cut.dim)
    return [flat.narrow(dim, start, stop - start) for start, stop in cut.ranges]


def _join(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, max(dim, 0))


def _write(part: torch.Tensor, whole: torch.Tensor, cut: Cut) -> None:
    if cut.dim == FLAT and not whole.is_contiguous():
        raise ValueError(f"a part can be written into contiguous memory only, not strides {whole.stride()}")
    if whole.dim() == 0 and cut.dim != FLAT:
        whole.copy_(part)
        return
    sizes = [stop - start for start, stop in cut.ranges]
    dim = max(cut.dim, 0)
    values = part.reshape(-1) if cut.dim == FLAT else part
    for view, value in zip(_parts(whole, cut), values.split(sizes, dim), strict=True):
        view.copy_(value)

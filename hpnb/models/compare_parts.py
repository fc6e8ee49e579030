"""Whether the parts of a model, run one after the other, are its forward.

    forward          outputs = model(**inputs)
    parts            hidden = embed(inputs)
                     hidden = run(block, hidden, inputs)           for each block
                     outputs = finish(hidden, inputs)

Parts that forget a norm train another model, and no error says so. So both are run on a copy, with weights
drawn anew: a norm that starts at 1 and a bias that starts at 0 would not show. `hpnb.models.check` does it
when it is asked; the first step of a model that was registered does it by itself (`FirstStepCheck`).
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from hpnb.models.model_anatomy import TARGETS, Anatomy, Part, WrappedAnatomy
from hpnb.models.registry import anatomy, is_not_built_in

LARGEST = 2**26  # parameters whose values the check of a first step compares, in a second and not a minute
_CHECKS: WeakKeyDictionary[nn.Module, FirstStepCheck | None] = WeakKeyDictionary()


class ReadsOtherParts(ValueError):
    """A function of an Anatomy uses parts that only another pipeline stage is sure to have."""


class FirstStepCheck:
    """Compares parts and forward once, on two samples of the first batch, on the CPU.

    With more than `LARGEST` parameters it runs the parts alone, on the meta device: that finds a part that
    reads another one's weight, and no wrong value. It has a copy of the model's structure and buffers,
    whose weights are on the meta device until it runs. So the model itself may be sharded, partitioned or
    gone, and its random numbers, buffers and gradients stay.
    """

    def __init__(self, model: nn.Module) -> None:
        copies: dict[int, Any] = {id(p): _empty(p) for p in model.parameters()}
        copies |= {id(b): _of_float32(b.detach().to("cpu", copy=True)) for b in model.buffers()}
        self._model: nn.Module | None = deepcopy(model, copies)
        self._compares = sum(p.numel() for p in model.parameters()) <= LARGEST

    def run(self, inputs: Any) -> None:
        """Compare them, unless that has been done, or cannot be."""
        model, self._model = self._model, None
        if model is None or not isinstance(inputs, Mapping):
            return
        try:
            few = _first_two_samples(dict(inputs))
            device = torch.device("cpu" if self._compares else "meta")
            with torch.autocast("cpu", enabled=False), device, torch.no_grad():
                if not self._compares:
                    run_parts(anatomy(model.to(device).eval()), tree_map(partial(_moved, device), few))
                    return
                _fill(model)
                draw_weights(model)
                difference = find_difference(model.eval(), few)
        except ReadsOtherParts:  # tensor parallelism would go on, with a part of the weight
            raise
        except Exception:  # it will fail in the step too, with a traceback through the model
            return
        if difference is not None:
            raise ValueError(f"{difference}; hpnb.models.check(model, batch) says more")


def first_step_check(model: nn.Module) -> FirstStepCheck | None:
    """The check of the first step of `model`, one a model; None for hpnb's own models, and where it cannot be
    run: on the meta device, or of a model that cannot be copied."""
    if model not in _CHECKS:
        tensors = [*model.parameters(), *model.buffers()]
        _CHECKS[model] = None
        if not is_not_built_in(model) or any(t.is_meta for t in tensors):
            return None
        try:
            _CHECKS[model] = FirstStepCheck(model)
        except Exception:  # a module that deepcopy cannot follow
            return None
    return _CHECKS[model]


def skip_first_step_check(model: nn.Module) -> None:
    """No step of `model` is checked: its attention needs other ranks, and only one of them would check."""
    _CHECKS[model] = None


class Comparison(NamedTuple):
    """How the outputs of the parts compare with those of the forward.

    Attributes:
        difference: what differs, in words; None if nothing does.
        pairs: {an output of the parts: the output of the forward that it equals}, by name.
        unpaired: outputs of the parts, with their shapes, for which the forward has none of that shape.
        with_targets: whether the forward of `pairs` gets the targets of the batch.
    """

    difference: str | None
    pairs: dict[str, str]
    unpaired: tuple[str, ...]
    with_targets: bool


def find_difference(model: nn.Module, inputs: Mapping[str, Any], tolerance: float = 1e-3) -> str | None:
    """In which output the parts differ from the forward, and after which part; None if they do not."""
    return compare_outputs(model, inputs, tolerance).difference


def compare_outputs(model: nn.Module, inputs: Mapping[str, Any], tolerance: float) -> Comparison:
    """Run the parts and the forward, and pair their outputs by shape."""
    parts = anatomy(model)
    after_parts: dict[str, torch.Tensor] = {}
    with _fixed_seed(), restoring_buffers(model), _outputs_of(parts, after_parts):
        ours = tensors_of(run_parts(parts, inputs))
    pairs: dict[str, str] = {}
    paired: set[str] = set()
    differences: dict[str, str] = {}
    with_targets, others, where = False, [], ""
    for targets in (False, True):  # some models give all logits only where they get targets
        after_forward: dict[str, torch.Tensor] = {}
        try:
            with _fixed_seed(), restoring_buffers(model), _outputs_of(parts, after_forward):
                theirs = tensors_of(model(**arguments_of(model, inputs, targets)))
        except TypeError:  # it must have targets
            if targets:
                raise
            continue
        equal = {}
        others += [_described(name, value) for name, value in theirs.items() if value.dim()]
        where = where or _where(parts, after_parts, after_forward, tolerance)
        for name, value in ours.items():
            same_shape = {other: x for other, x in theirs.items() if x.shape == value.shape}
            if not same_shape:
                continue
            distances = {other: distance(value, x) for other, x in same_shape.items()}
            closest = min(distances, key=lambda other: distances[other])
            if distances[closest] <= tolerance:
                equal[name] = closest
            elif value.dim() or not targets:  # a loss is no counterpart of another scalar
                differences.setdefault(
                    name,
                    f"the registered parts are not the model's forward: outputs {_described(name, value)} "
                    f"differ by {distances[closest]:.1e} in relative norm, "
                    f"{_where(parts, after_parts, after_forward, tolerance)}",
                )
        paired |= equal.keys()
        if len(equal) > len(pairs):
            pairs, with_targets = equal, targets
        if len(equal) == len(ours) or not any(name in TARGETS for name in inputs):
            break
    difference = next((text for name, text in differences.items() if name not in paired), None)
    unpaired = tuple(_described(name, value) for name, value in ours.items() if name not in paired)
    if difference is None and not pairs and others:
        difference = (
            f"the registered parts are not the model's forward: they give {', '.join(unpaired) or 'nothing'} "
            f"and the forward gives {', '.join(dict.fromkeys(others))}, {where}"
        )
    return Comparison(difference, pairs, unpaired, with_targets)


def _described(name: str, value: torch.Tensor) -> str:
    return f"{name} of shape {tuple(value.shape)}"


def _where(
    parts: Anatomy, ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float
) -> str:
    for part in parts.parts:
        if part.name not in ours and part.name not in theirs:
            continue  # as root parameters are
        if part.name not in ours:
            return f"because embed, run and finish never call {part.name}"
        if part.name not in theirs:
            return f"because the forward never calls {part.name}"
        a, b = ours[part.name], theirs[part.name]
        if a.shape != b.shape or distance(a, b) > tolerance:
            return f"from {part.name} on, whose outputs differ"
    return "after the last part: compare what finish does with the end of the forward"


def run_parts(parts: Anatomy, inputs: Mapping[str, Any]) -> Any:
    """The model's forward, part by part.

    Each runs with its own section alone, as on a pipeline stage.
    """
    innermost = parts
    while isinstance(innermost, WrappedAnatomy):
        innermost = innermost.inner
    kind = type(innermost).__name__
    with _naming(f"{kind}.embed", inputs):
        hidden = _run_alone(f"{kind}.embed", parts, "embedding", lambda a: a.embed(inputs))
    for block in parts.blocks:
        with _naming(f"{kind}.run of {block.name}", inputs):
            hidden = _run_alone(f"{kind}.run", parts, "blocks", partial(_run_block, block, hidden, inputs))
    with _naming(f"{kind}.finish", inputs):
        return _run_alone(f"{kind}.finish", parts, "head", lambda a: a.finish(hidden, inputs))


def _run_block(block: Part, hidden: torch.Tensor, inputs: Mapping[str, Any], parts: Anatomy) -> Any:
    return parts.run(block, hidden, inputs)


def _run_alone(what: str, parts: Anatomy, section: str, run: Callable[[Anatomy], Any]) -> Any:
    """`run` of an anatomy with this section alone."""
    try:
        return run(parts.with_parts(**{section: getattr(parts, section)}))
    except (IndexError, TypeError, ValueError) as error:
        run(parts)  # if this fails too, it is not for want of the other parts
        others = " or ".join(f"self.{name}" for name in ("embedding", "blocks", "head") if name != section)
        raise ReadsOtherParts(
            f"{what} reads parts of {others}, and may only use self.{section}, because another rank can have "
            f"the others ({type(error).__name__}: {error}). For one weight in two places, such as an "
            "embedding that is the output layer too, give each place a module of its own with the same "
            "Parameter, as in net.output.weight = net.tokens.weight, and a Part"
        ) from error


@contextmanager
def _naming(what: str, inputs: Mapping[str, Any]) -> Iterator[None]:
    """Say what was run when a key or attribute is missing."""
    try:
        yield
    except KeyError as error:
        names = ", ".join(map(str, inputs)) or "no entry"
        raise ValueError(
            f"{what} asks for the key {error}, and the batch has {names}; use the names that the model's "
            "forward takes"
        ) from error
    except AttributeError as error:
        raise ValueError(
            f"{what} fails: {error}; what parts share must be set as an attribute of the Anatomy"
        ) from error


def arguments_of(model: nn.Module, inputs: Mapping[str, Any], targets: bool = False) -> dict[str, Any]:
    """The entries of a batch that the forward of `model` takes; with or without targets.

    A model that would make a cache of keys is told not to: parts make none, and transformers keeps texts that
    `position_ids` pack into one sequence apart only without it.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    names = {p.name for p in parameters}
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
    taken = {name: value for name, value in inputs.items() if name in names}
    taken = taken or (dict(inputs) if any_name else {})
    taken = {name: value for name, value in taken.items() if targets or name not in TARGETS}
    makes_cache = getattr(getattr(model, "config", None), "use_cache", False) and "use_cache" in names
    return {**taken, "use_cache": False} if makes_cache else taken


def model_forward(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """Its outputs without targets; with them, if it must have them."""
    try:
        return model(**arguments_of(model, inputs))
    except TypeError:
        return model(**arguments_of(model, inputs, targets=True))


def tensors_of(outputs: Any, name: str = "") -> dict[str, torch.Tensor]:
    """{path: tensor} of the floating-point tensors in what a model returns; of complex ones the two parts."""
    if isinstance(outputs, torch.Tensor):
        outputs = torch.view_as_real(outputs.resolve_conj()) if outputs.is_complex() else outputs
        return {name or "(the tensor)": outputs} if outputs.is_floating_point() else {}
    if is_dataclass(outputs) and not isinstance(outputs, Mapping):
        outputs = {f.name: getattr(outputs, f.name) for f in fields(outputs)}
    if isinstance(outputs, tuple | list):
        outputs = dict(enumerate(outputs))
    tensors: dict[str, torch.Tensor] = {}
    for key, value in outputs.items() if isinstance(outputs, Mapping) else ():
        tensors |= tensors_of(value, f"{name}.{key}" if name else str(key))
    return tensors


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """||a - b|| / ||b||."""
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    a, b = a.detach().to("cpu", wide), b.detach().to("cpu", wide)
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


@torch.no_grad()
def draw_weights(model: nn.Module, seed: int = 0) -> None:
    """Weights as after some training: no scale is 1 and no bias is 0."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        noise = torch.randn(p.shape, generator=generator, dtype=p.dtype if p.is_complex() else torch.float32)
        p.copy_(noise / p.size(-1) ** 0.5 if p.dim() > 1 else 1 + 0.3 * noise)


@contextmanager
def _outputs_of(parts: Anatomy, outputs: dict[str, torch.Tensor]) -> Iterator[None]:
    """Note what each part gives in the run inside."""

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            for tensor in tensors_of(output).values():
                outputs[name] = tensor.detach()
                return

        return hook

    hooks = [part.module.register_forward_hook(note(part.name)) for part in parts.parts if part.name]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def restoring_buffers(model: nn.Module) -> Iterator[None]:
    """Every run inside such a block starts from the same buffers, which the model has again after it."""
    tables = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    values = {buffer: buffer.detach().clone() for buffer in model.buffers()}
    try:
        yield
    finally:
        for buffers, table in tables:
            buffers.clear()
            buffers.update(table)
        with torch.no_grad():
            for buffer, value in values.items():
                buffer.copy_(value)


@contextmanager
def _fixed_seed() -> Iterator[None]:
    """Dropout draws the same numbers in every run inside such a block, and the caller's are not used up."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def _fill(model: nn.Module) -> None:
    """Give the parameters memory; a tied one stays one."""
    filled: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                empty = torch.empty_like(p, device="cpu", requires_grad=False)
                module._parameters[name] = filled.setdefault(p, nn.Parameter(empty, False))


def _empty(p: nn.Parameter) -> nn.Parameter:
    dtype = torch.float32 if p.is_floating_point() else p.dtype
    return nn.Parameter(torch.empty_like(p, device="meta", dtype=dtype), requires_grad=False)


def _first_two_samples(inputs: Any) -> Any:
    """On the CPU, in float32. The number of samples is the first size that most tensors have."""
    tensors = [value for value in tree_leaves(inputs) if isinstance(value, torch.Tensor) and value.dim()]
    sizes = Counter(len(tensor) for tensor in sorted(tensors, key=lambda tensor: tensor.dim()))
    samples = sizes.most_common(1)[0][0] if sizes else 0

    def first_two(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.dim() and len(value) == samples:
            value = value[:2]
        elif value.dim() > 2 and value.size(1) == samples:  # position_ids (3, B, s) of images in texts
            value = value[:, :2]
        return _of_float32(value.detach().cpu())

    return tree_map(first_two, inputs)


def _moved(device: torch.device, value: Any) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _of_float32(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.is_floating_point() else value

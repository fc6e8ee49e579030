"""The layers of a model, which a pipeline assigns to stages and never splits.

    nn.Sequential       its items
    a model with an     embedding | block | block | ... | head          (`hpnb.models.anatomy`)
      anatomy
    Builder             layers that do not exist yet; a rank makes only those of its stages

    hidden = None
    for layer in layers(model):
        hidden = layer.run(hidden, inputs)        # is what model(inputs) is

A layer refers only to its modules, so a rank that keeps some layers lets the rest of the model go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from hpnb.caller_frame import warn_caller
from hpnb.models import Anatomy, Part, anatomy
from hpnb.models.plan_parts import refuse_router_loss
from hpnb.models.registry import explain_alias, how_to_register
from hpnb.pipeline_parallel.builder_ties import Factory, Survey, copy_factory, survey_layers
from hpnb.pipeline_parallel.microbatches import TARGET_NAMES

Inputs = Any  # one microbatch: a mapping, a tensor, or a tuple or list whose first item is meant
Kind = Literal["embedding", "block", "head", "layer"]


@dataclass(frozen=True)
class Layer:
    """One layer, which is never split: an item of a Sequential, a block, an embedding or a head.

    Attributes:
        parts: its modules under their names in the model; a head may be a norm and a classifier. Empty while
            the layer is not built.
        run: from what the layer before gave and this microbatch's inputs, what the next one takes: a tensor,
            or a tuple or dict of tensors. The first layer gets None.
        kind: "layer" where the model does not tell its layers apart.
        causal: whether the model's targets are its inputs, shifted by one.
        anatomy: what `run` runs, with what all blocks share; None for a layer of a Sequential or Builder.
        tied: of a layer that is not built, {name: first name} of the parameters that others of the model have
            too, and `tied_buffers` of its buffers.
    """

    parts: tuple[Part, ...]
    run: Callable[[Any, Inputs], Any]
    kind: Kind = "layer"
    causal: bool = False
    build: Callable[[], Layer] | None = None
    anatomy: Anatomy | None = None
    tied: Mapping[str, str] = field(default_factory=dict)
    tied_buffers: Mapping[str, str] = field(default_factory=dict)

    def built(self, device: torch.device | str | None = None) -> Layer:
        """This layer with its modules; a new one at every call if it has to be made, on `device`."""
        if self.build is None:
            return self
        with nullcontext() if device is None else torch.device(device):
            return self.build()


@dataclass(frozen=True)
class Builder:
    """A model that no process holds: `layer(i)` makes layer i, and only the rank that has it asks for it.

    An optimizer for `hpnb.Booster` is made of `parameters()`, which take no memory. Boosting it puts the
    parameters of this rank's layers in their places.

    Layers may share parameters or modules, such as a tied embedding and head: `layer` keeps what it made and
    uses it again. To see this, every rank makes each layer on the meta device too, by a copy of `layer`. A
    rank makes the layer in which a shared weight is drawn as well, so that it gets the same values.

    Args:
        layer: makes layer i, 0 to count - 1; it takes what layer i - 1 gives, the first one `first_input`.
            What layers share is best kept in a dict or an object that no other model uses.
        count: how many layers there are.
        name: the weights of layer 3 are "layers.3.weight" and so on.
        seed: layer i is drawn from seed + i, so the model is the same however it is cut. The generators of
            the caller are left as they were.

    Raises:
        ValueError: count below 1, or no name.
    """

    layer: Callable[[int], nn.Module]
    count: int
    name: str = "layers"
    seed: int = 0
    _surveys: list[Survey] = field(default_factory=list, init=False, repr=False, compare=False)
    _ties: list[Survey] = field(default_factory=list, init=False, repr=False, compare=False)
    _copies: list[Factory] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"a Builder with count={self.count} makes nothing; use 1 or more")
        if not self.name or not all(self.name.split(".")):
            raise ValueError(f"name={self.name!r} is no path for the layers; 'layers' would do")

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of all layers on the meta device, each once, the same objects at every call.

        Each layer is made once for this, on the meta device unless it names another, and dropped.
        """
        yield from self.survey().parameters.items()

    def survey(self) -> Survey:
        """What the layers have and share, on the meta device; made at the first call."""
        if not self._surveys:
            make = partial(_call_factory, self)
            self._surveys.append(survey_layers(make, self.meta_factory(), self.count, self.name))
        return self._surveys[0]

    def ties(self) -> Survey:
        """The survey; an empty one, with a warning, if layers cannot be made on the meta device."""
        if not self._ties:
            try:
                self._ties.append(self.survey())
            except NoModuleError:
                raise
            except Exception as error:  # whatever a factory says that needs values
                warn_caller(
                    f"layers of this Builder cannot be made on the meta device ({type(error).__name__}: "
                    f"{error}), so hpnb cannot see whether they share parameters; if layers of two stages "
                    "do, each stage trains a copy: let layer(i) make modules under torch.device('meta')"
                )
                self._ties.append(Survey({}, {}, {}, [frozenset()] * self.count, []))
        return self._ties[0]

    def meta_factory(self) -> Factory:
        """A copy of `layer` that makes all layers of the meta device, so that none of these is kept in it."""
        if not self._copies:
            self._copies.append(copy_factory(self.layer))
        return self._copies[0]

    def parameters(self) -> Iterator[nn.Parameter]:
        """The same without names, for an optimizer."""
        return (p for _, p in self.named_parameters())


def layers(model: nn.Module | Builder) -> tuple[Layer, ...]:
    """The layers of `model` in the order in which its forward uses them.

    Args:
        model: an nn.Sequential, whose items are the layers (a Sequential inside is one of them); a model that
            `hpnb.models.anatomy` knows; or a Builder.

    Hooks of the model itself do not run, those of its layers do.
    """
    if isinstance(model, Builder):
        return tuple(_unbuilt_layer(model, i) for i in range(model.count))
    if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        # not named_children, which leaves out a module that is there a second time
        items = [Part(name, item) for name, item in model._modules.items() if item is not None]
        if not items:
            raise ValueError("this Sequential has no items; a pipeline needs one or more")
        model_layers = [_layer_of_module(part, first=i == 0) for i, part in enumerate(items)]
    else:
        model_layers = _layers_of_anatomy(_anatomy_of(model))
    parts = [part for layer in model_layers for part in layer.parts]
    in_layers = {part.full_name(name) for part in parts for name in part.module.state_dict()}
    if lost := [name for name in model.state_dict() if name not in in_layers]:
        names = ", ".join(lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
        if (sentence := explain_alias(model, lost[0], in_layers)) is not None:
            raise ValueError(sentence)
        raise ValueError(
            f"{names} lie in none of the layers of this {type(model).__name__}, and would be lost; put them "
            "into a Part by hpnb.models.register (hpnb.models.root_parameters makes one of what is on the "
            "model itself), and keep a table that all blocks read out of the state dict (persistent=False); "
            "hpnb.models.check(model, batch) says what else is missing"
        )
    return tuple(model_layers)


def first_input(inputs: Inputs) -> Any:
    """The entry of a microbatch that the first layer of a Sequential or Builder takes.

    A tensor is that entry itself. Of a tuple or list it is the first item; of a mapping the entry called
    "input", or the only tensor with rows that is not called "labels", "label", "targets" or "target".
    """
    if isinstance(inputs, Mapping):
        names = [name for name in inputs if name not in TARGET_NAMES]
        names = [name for name in names if _has_rows(inputs[name])] or names
        if len(names) > 1 and "input" not in names:
            raise ValueError(
                f"any of {', '.join(map(str, names))} could be the input of the first layer, which takes one "
                f"tensor: call that entry 'input', or what is a target one of {', '.join(TARGET_NAMES)}"
            )
        inputs = [inputs[name] for name in (["input"] if "input" in names else names)]
    if isinstance(inputs, Sequence):
        if not len(inputs):
            raise ValueError("the batch has no entry for the first layer; put its input in front")
        return inputs[0]
    return inputs


def _has_rows(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def shared_parameters(stages: Sequence[Sequence[Layer]]) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Parameters that have several names: {their names: the stage of each name}.

    Names are those of the model, in its order.
    """
    places: dict[nn.Parameter | str, list[tuple[str, int]]] = {}  # (name, stage)
    for stage, stage_layers in enumerate(stages):
        for layer in stage_layers:
            for name, first in layer.tied.items():
                places.setdefault(first, []).append((name, stage))
            for part in layer.parts:
                for name, p in part.module.named_parameters(part.name, remove_duplicate=False):
                    places.setdefault(p, []).append((name, stage))
    return {
        tuple(name for name, _ in of_one): tuple(stage for _, stage in of_one)
        for of_one in places.values()
        if len(of_one) > 1
    }


def _anatomy_of(model: nn.Module) -> Anatomy:
    try:
        parts = anatomy(model)
    except TypeError:
        kind = type(model).__name__
        if isinstance(model, nn.Sequential):
            kind += " that defines its own forward"
        raise TypeError(
            f"hpnb cannot cut a {kind}: pass an nn.Sequential, a model whose parts hpnb.models.anatomy "
            f"knows, or a hpnb.pipeline_parallel.Builder. {how_to_register(model)}"
        ) from None
    refuse_router_loss(model, parts)
    return parts


# --- one layer: functions and no lambdas, so that a layer can be copied, modules and all ---------------


def _layer_of_module(part: Part, first: bool) -> Layer:
    return Layer((part,), partial(_run_first if first else _run_next, part.module))


def _run_first(module: nn.Module, hidden: Any, inputs: Inputs) -> Any:
    return module(first_input(inputs))


def _run_next(module: nn.Module, hidden: Any, inputs: Inputs) -> Any:
    return module(hidden)


def _unbuilt_layer(builder: Builder, i: int) -> Layer:
    ties, prefix = builder.ties(), f"{builder.name}.{i}."
    tied, buffers = (
        {name: first for name, first in names.items() if name.startswith(prefix)}
        for names in (ties.tied, ties.tied_buffers)
    )
    build = partial(_build_layer, builder, i)
    return Layer((), partial(_run_unbuilt, i), build=build, tied=tied, tied_buffers=buffers)


class NoModuleError(TypeError):
    """What a Builder's factory has returned is no module."""


_MADE: ContextVar[dict[tuple[int, int], nn.Module] | None] = ContextVar("made", default=None)


@contextmanager
def built_together() -> Iterator[None]:
    """Inside, each layer of a Builder is made once, so that those of one rank share what they should."""
    before = _MADE.set({})
    try:
        yield
    finally:
        _MADE.reset(before)


def _build_layer(builder: Builder, i: int) -> Layer:
    if torch.get_default_device().type == "meta":
        module = _call_factory(builder, builder.meta_factory(), i)
    else:
        made = _MADE.get()
        made = {} if made is None else made  # alive to the end: the factory may have weak references
        # What the layer shares is drawn where it would be if one process made all layers in turn. Made a
        # second time it would be another weight than the one that this rank's earlier layers have.
        for j in (*sorted(builder.ties().needs[i]), i):
            if (id(builder), j) not in made:
                made[id(builder), j] = _call_factory(builder, builder.layer, j)
        module = made[id(builder), i]
        builder.ties().check_made(module, i)
    return _layer_of_module(Part(f"{builder.name}.{i}", module), first=i == 0)


def _call_factory(builder: Builder, factory: Factory, i: int) -> nn.Module:
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=gpus):
        torch.manual_seed(builder.seed + i)
        module = factory(i)
    if not isinstance(module, nn.Module):
        raise NoModuleError(f"layer({i}) of the Builder gave a {type(module).__name__}, not an nn.Module")
    return module


def _run_unbuilt(i: int, hidden: Any, inputs: Inputs) -> Any:
    raise RuntimeError(f"layer {i} of the Builder is not built; run layer.built()")


def _layers_of_anatomy(model: Anatomy) -> list[Layer]:
    """One layer per embedding, block and head. Its `run` refers to the modules of that layer alone."""
    _check_shared(model)
    model.check_stages()

    def layer(run: Callable[..., Any], kind: Kind, **parts: tuple[Part, ...]) -> Layer:
        part = model.with_parts(**parts)
        return Layer(part.parts, partial(run, part), kind, model.causal, anatomy=part)

    blocks = (layer(_run_block, "block", blocks=(block,)) for block in model.blocks)
    embedding = layer(_run_embedding, "embedding", embedding=model.embedding)
    return [embedding, *blocks, layer(_run_head, "head", head=model.head)]


def _check_shared(model: Anatomy) -> None:
    """A stage trains the parameters of its parts alone; those of an attribute would stay as they are."""
    for attribute, value in model.shared().items():
        if isinstance(value, torch.Tensor):
            trained = attribute if value.requires_grad else None
        else:
            trained = next((f"{attribute}.{name}" for name, _ in value.named_parameters()), None)
        if trained is not None:
            raise ValueError(
                f"{trained} of this {type(model).__name__} is a parameter, and stages train those of their "
                "parts alone: put its module into a Part; if two stages use it, into both, as a tied "
                "weight; an attribute is for what has no parameters, such as rotary tables"
            )


def _run_embedding(embedding: Anatomy, hidden: Any, inputs: Inputs) -> torch.Tensor:
    if not isinstance(inputs, Mapping):
        raise ValueError(
            "the model takes a batch with names, such as {'pixel_values': ...}, not a "
            f"{type(inputs).__name__}"
        )
    return embedding.embed(inputs)


def _run_block(block: Anatomy, hidden: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    return block.run(block.blocks[0], hidden, inputs)


def _run_head(head: Anatomy, hidden: torch.Tensor, inputs: Inputs) -> Any:
    return head.finish(hidden, inputs)

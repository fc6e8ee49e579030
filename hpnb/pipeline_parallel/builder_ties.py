"""What several layers of a Builder share: a tied weight, a module or a buffer.

    layer(0)   an Embedding, which the factory keeps          layers.0.weight
    layer(3)   a Linear that takes its weight from there      layers.3.weight, the same Parameter

No rank makes both of these layers, so none would see the tie. `survey_layers` makes all of them, one after
the other and on the meta device, and compares their tensors as objects. It calls a copy of the factory:
otherwise what the factory keeps would be on the meta device when layers are made for training.
"""

from __future__ import annotations

import functools
import io
import pickle
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from torch import nn

Factory = Callable[[int], nn.Module]


@dataclass(frozen=True)
class Survey:
    """
    Attributes:
        parameters: {name: parameter on the meta device}, each once, under the first of its names.
        tied: {name: first name} of the parameters with several names, of all their names.
        tied_buffers: the same of buffers in the state dict.
        needs: for each layer, the earlier ones in which a weight of this layer is drawn.
        on_meta: what was made, to recognise it.
    """

    parameters: Mapping[str, nn.Parameter]
    tied: Mapping[str, str]
    tied_buffers: Mapping[str, str]
    needs: Sequence[frozenset[int]]
    on_meta: Sequence[torch.Tensor]

    def check_made(self, module: nn.Module, i: int) -> None:
        """
        Raises:
            ValueError: a factory that kept a tensor of the survey, whose values nobody has drawn.
        """
        kept = {id(t) for t in self.on_meta}
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if tensor.is_meta and id(tensor) in kept:
                raise ValueError(
                    f"layer({i}) of the Builder returned {name} as it was made on the meta device, without "
                    "values, when hpnb looked for what layers share, because the factory keeps it where "
                    "hpnb cannot copy it, such as in a class, in another module or beside a lock: keep what "
                    "layers share in a dict that the factory refers to, or in an attribute of it"
                )


def survey_layers(
    make: Callable[[Factory, int], nn.Module], factory: Factory, count: int, name: str
) -> Survey:
    """
    Args:
        make: what calls a factory for layer i.
        factory: a copy of the Builder's.
        name: that of the layers.
    """
    tied, parameters, needs = _Names(), dict[str, nn.Parameter](), list[frozenset[int]]()
    buffers, on_meta = _Names(), list[torch.Tensor]()
    for i in range(count):
        with torch.device("meta"):
            module = make(factory, i)
        prefix = f"{name}.{i}"
        first_layers = set[int]()
        for path, p in module.named_parameters(prefix, remove_duplicate=False):
            first, layer = tied.add(path, p, i)
            first_layers.add(layer)
            if first == path:
                parameters[path] = p if p.is_meta else _placeholder(p)
        for path, value in module.state_dict(prefix=f"{prefix}.", keep_vars=True).items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                buffers.add(path, value, i)
        on_meta += [t for t in (*module.parameters(), *module.buffers()) if t.is_meta]
        earlier = first_layers - {i}
        needs.append(frozenset(earlier).union(*(needs[j] for j in earlier)))
    return Survey(parameters, tied.shared(), buffers.shared(), needs, on_meta)


class _Names:
    """The names of each tensor. It keeps those on the meta device alive and no others, which take memory."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Callable[[], torch.Tensor | None], str, int]] = {}
        self._names: dict[str, list[str]] = {}

    def add(self, name: str, tensor: torch.Tensor, layer: int) -> tuple[str, int]:
        """(the first name of this tensor, the layer of that)."""
        known = self._seen.get(id(tensor))
        if known is None or known[0]() is not tensor:
            refer = functools.partial(_itself, tensor) if tensor.is_meta else weakref.ref(tensor)
            known = self._seen[id(tensor)] = refer, name, layer
        self._names.setdefault(known[1], []).append(name)
        return known[1:]

    def shared(self) -> dict[str, str]:
        return {name: first for first, names in self._names.items() if len(names) > 1 for name in names}


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _placeholder(p: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)


# --- a copy of a factory ---------------------------------------------------------------------------------


def copy_factory(factory: Factory) -> Factory:
    """A copy with copies of containers, objects and modules, so that what it keeps does not reach the
    original. Tensors that are there already, and classes, are the same. A factory that cannot be copied comes
    back."""
    file = io.BytesIO()
    pickler = _Pickler(file, getattr(factory, "__module__", None))
    try:
        pickler.dump(factory)
        file.seek(0)
        copied: Factory = _Unpickler(file, pickler.kept).load()
    except Exception:  # whatever an object that cannot be pickled says
        return factory
    return copied


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Functions of the factory's module go by value, with the globals that they read. Tensors and classes are
    kept as they are: a class by value would be unpickled into itself, with other globals."""

    def __init__(self, file: io.BytesIO, module: str | None) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.module, self.kept = module, list[Any]()

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, torch.Tensor | type):
            return None
        self.kept.append(obj)
        return len(self.kept) - 1

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, functools._lru_cache_wrapper):
            return _cached, (obj.__wrapped__, obj.cache_parameters())
        if isinstance(obj, types.FunctionType) and obj.__module__ == self.module:
            return self._dynamic_function_reduce(obj)
        return super().reducer_override(obj)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, kept: Sequence[Any]) -> None:
        super().__init__(file)
        self._kept = kept

    def persistent_load(self, number: int) -> Any:
        return self._kept[number]


def _cached(function: Callable[..., Any], parameters: Mapping[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)

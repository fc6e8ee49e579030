"""The outline of a model of transformers as the user passed it: its modules and names, without values.

transformers renames weights when it saves them, by the classes of the models inside of a model. A fresh model
of the same config knows these classes, but none of the modules that a user has replaced or added since. So
`boost` keeps an outline of the model itself, before any strategy changes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

_PLAIN = (str, int, float, type(None), PretrainedConfig)  # of attributes; others may refer to weights


class ModelOutline:
    """The modules of a model of transformers, with empty tensors as parameters and buffers.

    Attributes:
        order: {name in the state dict: its place}.
        trained: names of the parameters that are not frozen.
        formats: what a checkpoint of it contains, as far as it was asked for (`hf_names.py`).
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._root = _outline(model, None, {})
        self.order = {name: i for i, name in enumerate(self._root.state_dict())}
        self.trained = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
        self.formats: dict[Any, Any] = {}

    def __deepcopy__(self, _: dict[int, object]) -> ModelOutline:
        return self  # nothing changes it

    def model(self, config: Any, dtype: torch.dtype) -> Any:
        """A model of the same class and tree, with a copy of `config` and parameters of `dtype`, whose
        save_pretrained writes a state dict that is passed to it."""
        root = _outline(self._root, dtype, {})
        root.config = deepcopy(config)
        if root.can_generate():
            root.generation_config = GenerationConfig()
        return root

    def declared_ties(self) -> Iterator[str]:
        """Patterns of names that the classes of models say are other names of a weight."""
        for path, module in self._root.named_modules():
            for pattern in getattr(module, "_tied_weights_keys", None) or ():
                yield f"{path}.{pattern}" if path else pattern


def _outline(module: nn.Module, dtype: torch.dtype | None, done: dict[int, Any]) -> Any:
    """Models of transformers keep their class, because save_pretrained asks it; other modules need none."""
    if id(module) in done:
        return done[id(module)]
    keeps_class = isinstance(module, PreTrainedModel)
    new: Any = object.__new__(type(module)) if keeps_class else nn.Module()
    done[id(module)] = new
    nn.Module.__init__(new)
    if keeps_class:
        new.__dict__.update({k: v for k, v in vars(module).items() if isinstance(v, _PLAIN)})
        new._hf_peft_config_loaded = False  # with adapters of PEFT, save_pretrained writes these alone
    for name, p in module._parameters.items():
        new._parameters[name] = None if p is None else nn.Parameter(_empty(p, dtype), requires_grad=False)
    for name, buffer in module._buffers.items():
        new._buffers[name] = None if buffer is None else _empty(buffer, dtype)
    new._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
    for name, child in module._modules.items():
        new._modules[name] = None if child is None else _outline(child, dtype, done)
    return new


def _empty(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    is_cast = dtype is not None and tensor.is_floating_point()
    return torch.empty(0, dtype=dtype if is_cast else tensor.dtype, device="meta")

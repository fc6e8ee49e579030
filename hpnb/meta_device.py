"""A model on the meta device has no values: it gets zeros when it is parallelized, to be filled afterwards.

Whoever forgets to fill it would train from zeros, where a transformer's gradients are zero as well, and the
loss looks like that of any model at its start.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from hpnb.placement import placement_of, set_placement


class Unfilled:
    """The parameters of `model` that are on the meta device now, and have to be filled before its first step.

    Args:
        model: not parallelized yet. Its parameters stay the same objects.
    """

    def __init__(self, model: nn.Module) -> None:
        self._on_meta = {id(p) for p in model.parameters() if p.is_meta}

    def check(self, parameters: Iterable[nn.Parameter]) -> None:
        """Refuse parameters of this rank that were on the meta device if all of them are zero; once."""
        if not self._on_meta:
            return
        zeros = [p for p in parameters if id(p) in self._on_meta and p.numel()]
        if zeros and not any(bool(p.detach().any()) for p in zeros):
            raise ValueError(
                f"{len(zeros)} parameters of this rank were on the meta device, which holds no values, and "
                "are all zero: fill the model before its first step, by booster.load_model(model, folder), "
                "booster.load, hpnb.placement.load_full_state_dict or an initialiser of your own; or make it "
                "by from_pretrained or on the CPU, or layer by layer with hpnb.pipeline_parallel.Builder"
            )
        self._on_meta = set()


def move_module(module: nn.Module, device: torch.device) -> None:
    """Move `module` to `device`, in place. What is on the meta device gets zeros there; a parameter stays the
    same object, placed as it was."""
    fill_buffers(module, device)
    for name, p in module.named_parameters():
        if p.is_meta:  # swapped, which keeps the object; .data cannot go from meta to real
            where = placement_of(p, name)
            torch.utils.swap_tensors(p, nn.Parameter(torch.zeros_like(p, device=device), p.requires_grad))
            if where.cuts:
                set_placement(p, where)
    module.to(device)


def fill_buffers(module: nn.Module, device: torch.device, name: str = "model") -> None:
    """Give buffers on the meta device zeros on `device`.

    Args:
        name: what an error calls `module`; "" if it has the model as its attribute `model`.
    """
    on_meta = {path for path, buffer in module.named_buffers() if buffer.is_meta}
    if on_meta and (lost := on_meta - module.state_dict().keys()):
        owner = ".".join([*([name] if name else []), *min(lost).split(".")[:-1]])
        raise ValueError(
            f"buffer {min(lost)} is on the meta device and in no state dict, so nothing would fill it. Make "
            f"its module anew on the CPU before; in transformers: {owner} = type({owner})(config)"
        )
    filled: dict[torch.Tensor, torch.Tensor] = {}
    for inner in module.modules():
        for key, buffer in inner._buffers.items():
            if buffer is not None and buffer.is_meta:
                inner._buffers[key] = filled.setdefault(buffer, torch.zeros_like(buffer, device=device))

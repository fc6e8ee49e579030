"""What each layer costs: parameters, FLOPs of a forward, or seconds of forward and backward.

parameters   by the layer's shapes alone                      what it takes of memory
FLOPs        of one microbatch, counted on the meta device    what it takes of time, as far as products do
seconds      of one microbatch, measured                      what it takes of time, here
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from hpnb.pipeline_parallel.layers import Inputs, Layer
from hpnb.ranks.current_rank import device as this_device

_WARM_UP = 2


def parameters_of(layers: Sequence[Layer]) -> list[float]:
    """Parameters of each layer, trained and frozen; one that is used twice in a layer counts once."""
    found = []
    for layer in (layer.built("meta") for layer in layers):
        held = {p: p.numel() for part in layer.parts for p in part.module.parameters()}
        found.append(float(sum(held.values())))
    return found


def flops_of(layers: Sequence[Layer], example: Inputs) -> list[float]:
    """FLOPs of each layer's forward on the microbatch `example`, as torch's FlopCounterMode counts products.

    On the meta device, where nothing is computed; for real where a layer looks at values.
    """
    try:
        return _flops(layers, example, torch.device("meta"))
    except Exception:  # whatever an operator says that needs values
        return _flops(layers, example, this_device())


def _flops(layers: Sequence[Layer], example: Inputs, device: torch.device) -> list[float]:
    inputs, hidden, found = _moved(example, device), None, []
    with _undrawn(device):
        for layer in layers:
            own = _copied(layer, device)
            # Without gradients a layer in evaluation mode may take a fused path, which is not counted.
            with torch.enable_grad(), FlopCounterMode(display=False) as counter:
                hidden = own.run(_given(hidden), inputs)
            found.append(float(counter.get_total_flops()))
    return found


def seconds_of(layers: Sequence[Layer], example: Inputs, repeats: int = 5) -> list[float]:
    """Seconds of each layer's forward and backward on this device: the least of `repeats`, after a warm-up.

    The least, because whatever else runs here can only add. Each layer takes what the one before really gave.
    One after the other is copied to the device, so the model needs no room there, and its gradients, its
    buffers and the generators stay as they are.

    Args:
        example: a microbatch, on any device.
    """
    device = this_device()
    inputs, hidden, found = _moved(example, device), None, []
    with _undrawn(device):
        for layer in layers:
            own = _copied(layer, device)
            times, out = [], None
            for _ in range(_WARM_UP + repeats):
                seconds, out = _timed(own, hidden, inputs, device)
                times.append(seconds)
            found.append(min(times[_WARM_UP:]))
            hidden = out
    return found


def _timed(layer: Layer, hidden: Any, inputs: Inputs, device: torch.device) -> tuple[float, Any]:
    """(seconds of forward and backward, what the layer gives)."""
    hidden = _given(hidden)
    clock = _Clock(device)
    with torch.enable_grad():
        out = layer.run(hidden, inputs)
        ends = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
        if ends:
            torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
    seconds = clock.seconds()
    return seconds, tree_map(lambda t: _leaf(t) if isinstance(t, torch.Tensor) else t, out)


class _Clock:
    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        if self._cuda:
            self._start = torch.cuda.Event(enable_timing=True)
            self._start.record()
        self._began = time.perf_counter()

    def seconds(self) -> float:
        if not self._cuda:
            return time.perf_counter() - self._began
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        end.synchronize()
        return float(self._start.elapsed_time(end)) / 1e3


def _copied(layer: Layer, device: torch.device) -> Layer:
    """The layer again with its tensors on `device`, and zeros where there were no values."""
    own = layer.built(device if device.type == "meta" else None)
    tensors = [t for part in own.parts for t in (*part.module.parameters(), *part.module.buffers())]
    there: dict[int, Any] = {}
    for t in tensors:
        lost = t.is_meta and device.type != "meta"
        value = torch.zeros_like(t, device=device) if lost else t.detach().to(device, copy=True)
        there[id(t)] = nn.Parameter(value, t.requires_grad) if isinstance(t, nn.Parameter) else value
    return copy.deepcopy(own, there)  # which looks there first, so nothing else is copied


def _moved(inputs: Inputs, device: torch.device) -> Inputs:
    inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs
    return tree_map(lambda t: t.to(device) if isinstance(t, torch.Tensor) else t, inputs)


def _leaf(t: torch.Tensor) -> torch.Tensor:
    return t.detach().requires_grad_(t.requires_grad)


def _given(hidden: Any) -> Any:
    """What a layer is given: a copy, no leaf, since the layer may change it in place."""
    return tree_map(lambda t: _leaf(t).clone() if isinstance(t, torch.Tensor) else t, hidden)


def _undrawn(device: torch.device) -> Any:
    """Leaves the generators as they were, for dropout draws from them."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])

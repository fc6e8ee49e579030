"""The cost of each layer: parameters, FLOPs of a forward, or seconds of forward and backward.

parameters   counted from the layer's shapes                  its memory
FLOPs        of one microbatch, counted on the meta device    its time, as far as matmuls take it
seconds      of one microbatch, measured                      its time on this device
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from hpnb.pipeline_parallel.layers import Inputs, Layer
from hpnb.ranks.current_rank import device as this_device

_WARM_UP = 2


def parameters_of(layers: Sequence[Layer]) -> list[float]:
    """Parameters of each layer, trained and frozen; one that is used twice in a layer counts once."""
    totals = []
    for layer in (layer.built("meta") for layer in layers):
        sizes = {p: p.numel() for part in layer.parts for p in part.module.parameters()}
        totals.append(float(sum(sizes.values())))
    return totals


def flops_of(layers: Sequence[Layer], example: Inputs) -> list[float]:
    """FLOPs of each layer's forward on the microbatch `example`, as torch's FlopCounterMode counts products.

    On the meta device, where nothing is computed; for real where a layer looks at values.
    """
    try:
        return _flops(layers, example, torch.device("meta"))
    except Exception:  # whatever an operator says that needs values
        return _flops(layers, example, this_device())


def _flops(layers: Sequence[Layer], example: Inputs, device: torch.device) -> list[float]:
    inputs, hidden, flops = _move_inputs(example, device), None, []
    with _keep_generators(device):
        for layer in layers:
            copied = _copy_layer(layer, device)
            # Without gradients a layer in evaluation mode may take a fused path, which is not counted; nor is
            # PyTorch 2.11's fused attention on a CPU.
            counter = FlopCounterMode(display=False)
            with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), counter:
                hidden = copied.run(_fresh_input(hidden), inputs)
            flops.append(float(counter.get_total_flops()))
    return flops


def seconds_of(layers: Sequence[Layer], example: Inputs, repeats: int = 5) -> list[float]:
    """Seconds of each layer's forward and backward on this device: the least of `repeats`, after a warm-up.

    The least, because whatever else runs here can only add. A layer takes the real output of the one before.
    Layers are copied to the device one at a time, so the model needs no room there, and its gradients, its
    buffers and the generators stay as they are.

    Args:
        example: a microbatch, on any device.
    """
    device = this_device()
    inputs, hidden, seconds = _move_inputs(example, device), None, []
    with _keep_generators(device):
        for layer in layers:
            copied = _copy_layer(layer, device)
            times, out = [], None
            for _ in range(_WARM_UP + repeats):
                elapsed, out = _time_layer(copied, hidden, inputs, device)
                times.append(elapsed)
            seconds.append(min(times[_WARM_UP:]))
            hidden = out
    return seconds


def _time_layer(layer: Layer, hidden: Any, inputs: Inputs, device: torch.device) -> tuple[float, Any]:
    """(seconds of forward and backward, the layer's output)."""
    hidden = _fresh_input(hidden)
    _wait_for(device)
    began = time.perf_counter()
    with torch.enable_grad():
        out = layer.run(hidden, inputs)
        ends = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
        if ends:
            torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
    _wait_for(device)
    seconds = time.perf_counter() - began
    return seconds, tree_map(lambda t: _leaf(t) if isinstance(t, torch.Tensor) else t, out)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _copy_layer(layer: Layer, device: torch.device) -> Layer:
    """The layer again with its tensors on `device`, and zeros where there were no values."""
    built = layer.built(device if device.type == "meta" else None)
    shared = () if built.anatomy is None else built.anatomy.shared().values()
    modules = [part.module for part in built.parts] + [m for m in shared if isinstance(m, nn.Module)]
    tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    tensors += [t for t in shared if isinstance(t, torch.Tensor)]
    copies: dict[int, Any] = {}
    for t in tensors:
        has_no_values = t.is_meta and device.type != "meta"
        value = torch.zeros_like(t, device=device) if has_no_values else t.detach().to(device, copy=True)
        copies[id(t)] = nn.Parameter(value, t.requires_grad) if isinstance(t, nn.Parameter) else value
    return copy.deepcopy(built, copies)  # which looks there first, so nothing else is copied


def _move_inputs(inputs: Inputs, device: torch.device) -> Inputs:
    inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs
    return tree_map(lambda t: t.to(device) if isinstance(t, torch.Tensor) else t, inputs)


def _leaf(t: torch.Tensor) -> torch.Tensor:
    return t.detach().requires_grad_(t.requires_grad)


def _fresh_input(hidden: Any) -> Any:
    """A copy of a layer's input that is no leaf, since the layer may change it in place."""
    return tree_map(lambda t: _leaf(t).clone() if isinstance(t, torch.Tensor) else t, hidden)


def _keep_generators(device: torch.device) -> Any:
    """Leave the random generators as they were, because dropout draws from them."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])

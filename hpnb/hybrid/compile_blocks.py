"""torch.compile for the blocks of a model: each as a whole, or what lies between its linears.

    whole      [ norm, q k v, attention, o, add, norm, up, gelu, down, add ]               one graph a block
    between    norm, q k v, attention, o, [ dropout, add, norm ], up, gelu, down, dropout, add

A compiled block is one node of autograd. So where a schedule splits backwards into I and W, or where ranks of
a tensor axis send to each other inside a block, linears stay as they are, with their hooks, and what is in
brackets is compiled: a kernel each, forward and backward. The rest between two linears is one kernel already
(norm, attention, add) or none (reshapes are views). transformers writes GPT-2's gelu as eight kernels, which
keep several (B, s, 4h) for the backward; PyTorch has the same function as one, which keeps its input.

Less is compiled here than could be. A call of something compiled takes the host longer than that of a kernel,
and between linears the host is soon the slower of the two: with norms, gelu and adds compiled too, a step of
24 small blocks on two ranks took it 160 ms in place of 99.

All blocks of a model share a compilation. Another kind of call needs another: training and evaluation; with a
mask and without; a single row; other numbers of rows or tokens than the first, for all of which PyTorch makes
one graph (a ragged last microbatch costs that once, and full ones keep theirs). Beyond eight kinds
(torch._dynamo.config.recompile_limit) PyTorch warns, and computes new ones uncompiled.

Hooks around a block run outside of what is compiled: those that gather and free it (ZeRO 3), that deal out
tokens, that lend a row to an empty batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import NewGELUActivation
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.vit.modeling_vit import ViTLayer

from hpnb.data_parallel.fsdp_units import find_blocks
from hpnb.pipeline_parallel.split_backward import COMPILED
from hpnb.ranks.current_rank import device as this_device

ON_CPUS: Any = None  # the backend of torch.compile there, where compiling costs more than it saves

_number = count()


def backend() -> Any:
    """What torch.compile is to use on this rank's device; None does not compile."""
    return "inductor" if this_device().type == "cuda" else ON_CPUS


def compile_blocks(model: nn.Module, whole: bool) -> None:
    """Compile the blocks of `model`, in place.

    Args:
        whole: each as one piece; otherwise between linears, in GPT-2 and ViT. Blocks of another model then
            stay as they are.
    """
    regions = Regions(_compiled(_forward), _compiled(_add_and_norm))
    for block in find_blocks(model):
        if whole:
            setattr(block, COMPILED, True)
            own = vars(block).get("forward")  # somebody has given it another
            block.forward = partial(regions.forward, block) if own is None else _compiled(own)
        elif type(block) in _BETWEEN:
            _BETWEEN[type(block)](block, regions)


def _compiled(function: Callable[..., Any]) -> Any:
    """PyTorch counts compilations by code object, and a process may boost many models: each gets its own."""
    if isinstance(function, FunctionType) and function.__closure__ is None:
        name = f"{function.__name__}_{next(_number)}"
        code = function.__code__.replace(co_name=name, co_qualname=name)
        function = FunctionType(code, function.__globals__, name)
    return torch.compile(function, backend=backend() or "eager")


# --- what is compiled ------------------------------------------------------------------------------------


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


def _add(x: torch.Tensor, residual: torch.Tensor, p: float | None) -> torch.Tensor:
    """residual + dropout(x)."""
    return residual + (x if p is None else F.dropout(x, p))


def _add_and_norm(
    x: torch.Tensor, residual: torch.Tensor, p: float | None, weight: Any, bias: Any, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden = residual + dropout(x), and norm(hidden)."""
    hidden = residual + (x if p is None else F.dropout(x, p))
    return hidden, F.layer_norm(hidden, hidden.shape[-1:], weight, bias, eps)


@dataclass(frozen=True)
class Regions:
    """Compiled for one model: the forward of any module, and the above."""

    forward: Callable[..., Any]
    add_and_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]


# --- blocks whose linears are left alone -----------------------------------------------------------------
#
# An object is given another class, a subclass of its own: names, weights and hooks stay, and transformers
# goes on to checkpoint its forward.


class AddNorm(nn.LayerNorm):
    """A norm that is given the residual too, so that its own hooks lend it the weights that it uses."""

    regions: Regions

    def forward(self, x: torch.Tensor, residual: Any = None, p: float | None = None) -> Any:
        """(..., h) twice -> residual + dropout(x), and the norm of that; of x alone, its norm."""
        if residual is None:
            return super().forward(x)
        return self.regions.add_and_norm(x, residual, p, self.weight, self.bias, self.eps)


class GPT2Between(GPT2Block):  # type: ignore[misc]
    """A GPT2Block without cross attention, which hpnb takes nowhere."""

    regions: Regions

    def forward(
        self,
        x: torch.Tensor,
        past_key_values: Any = None,
        attention_mask: Any = None,
        encoder_hidden_states: Any = None,
        encoder_attention_mask: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        kwargs |= {"past_key_values": past_key_values, "attention_mask": attention_mask}
        attended = self.attn(self.ln_1(x), **kwargs)[0]
        x, normed = _join(self.regions, self.ln_2, attended, x, self.attn.resid_dropout)
        return _add(self.mlp(normed), x, _share(self.mlp.dropout))


class ViTBetween(ViTLayer):  # type: ignore[misc]
    """A ViTLayer."""

    regions: Regions

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        attended = self.attention(self.layernorm_before(x), *args, **kwargs)[0]
        x, normed = _join(self.regions, self.layernorm_after, attended, x, self.dropout)
        return _add(self.mlp(normed), x, _share(self.dropout))


class Later(nn.Dropout):
    """A dropout that a region does, when the residual is added."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def _gpt2(block: Any, regions: Regions) -> None:
    block.__class__, block.regions = GPT2Between, regions
    block.attn.resid_dropout.__class__ = block.mlp.dropout.__class__ = Later
    if type(block.mlp.act) is NewGELUActivation:
        block.mlp.act.forward = partial(F.gelu, approximate="tanh")
    _use(regions, block.ln_2)


def _vit(block: Any, regions: Regions) -> None:
    block.__class__, block.regions = ViTBetween, regions
    _use(regions, block.layernorm_after)


_BETWEEN: dict[type[nn.Module], Callable[[Any, Regions], None]] = {GPT2Block: _gpt2, ViTLayer: _vit}


def _use(regions: Regions, norm: Any) -> None:
    if type(norm) is nn.LayerNorm:  # a grid's is cut along the width, and sends
        norm.__class__ = AddNorm
        vars(norm).update(regions=regions)


def _join(
    regions: Regions, norm: nn.Module, x: torch.Tensor, residual: torch.Tensor, drop: nn.Dropout
) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(norm, AddNorm):
        joined: tuple[torch.Tensor, torch.Tensor] = norm(x, residual, _share(drop))
        return joined
    hidden = _add(x, residual, _share(drop))
    return hidden, norm(hidden)


def _share(drop: nn.Dropout) -> float | None:
    return drop.p if drop.training and drop.p else None

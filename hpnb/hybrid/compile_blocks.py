"""torch.compile for the blocks of a model: each as a whole, or only what lies between its linears.

    whole      [ norm, q k v, attention, o, add, norm, up, gelu, down, add ]               one graph a block
    between    norm, q k v, attention, o, [ dropout, add, norm ], up, gelu, down, dropout, add

A compiled block is one autograd node. That rules out a schedule that splits the backward into I and W, and
tensor-parallel ranks that send messages inside a block. There only what is in brackets is compiled.
Everything else between two linears is one kernel already, or none; transformers writes GPT-2's gelu as eight,
so PyTorch's is used instead. We compile no more than that, because calling a compiled function costs the CPU
more than launching a kernel: with norms, gelu and adds compiled too, a step of 24 small blocks on two ranks
took 160 ms instead of 99.

All blocks of a model share one compilation. Another kind of call needs another one: training and evaluation,
with a mask and without, a single sample, another number of samples or tokens (one graph serves all of those).
Beyond eight kinds (torch._dynamo.config.recompile_limit) PyTorch warns and runs new ones uncompiled. Hooks of
a block run outside the compiled region.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

ON_CPUS: Any = None  # backend of torch.compile on CPUs, where compiling costs more than it saves

_number = count()


def backend() -> Any:
    """The backend of torch.compile for this rank's device. None means: do not compile."""
    return "inductor" if this_device().type == "cuda" else ON_CPUS


def compile_blocks(model: nn.Module, whole: bool, blocks: Sequence[nn.Module] | None = None) -> None:
    """Compile the blocks of `model`, or those that are given, in place: each as one piece if `whole`,
    otherwise only between linears, in GPT-2 and ViT. Blocks of other models, and blocks whose forward
    somebody has replaced, then stay as they are."""
    run_forward, add_and_norm = _compiled(_run_forward), _compiled(_add_and_norm)
    for block in find_blocks(model) if blocks is None else blocks:
        replaced = vars(block).get("forward")
        if whole:
            setattr(block, COMPILED, True)
            block.forward = partial(run_forward, block) if replaced is None else _compiled(replaced)
        elif type(block) in _BETWEEN_LINEARS and replaced is None:
            _BETWEEN_LINEARS[type(block)](block, add_and_norm)


def _compiled(function: Callable[..., Any]) -> Any:
    """PyTorch counts compilations by code object, and a process may boost many models: each gets its own."""
    if isinstance(function, FunctionType) and function.__closure__ is None:
        name = f"{function.__name__}_{next(_number)}"
        code = function.__code__.replace(co_name=name, co_qualname=name)
        function = FunctionType(code, function.__globals__, name)
    return torch.compile(function, backend=backend() or "eager")


# --- what is compiled ------------------------------------------------------------------------------------


def _run_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


def _add(x: torch.Tensor, residual: torch.Tensor, p: float | None) -> torch.Tensor:
    """residual + dropout(x)."""
    return residual + (x if p is None else F.dropout(x, p))


def _add_and_norm(
    x: torch.Tensor, residual: torch.Tensor, p: float | None, weight: Any, bias: Any, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden = residual + dropout(x), and norm(hidden)."""
    hidden = _add(x, residual, p)
    return hidden, F.layer_norm(hidden, hidden.shape[-1:], weight, bias, eps)


# --- blocks whose linears are left alone -----------------------------------------------------------------


class AddNorm(nn.LayerNorm):
    """Takes the place of a LayerNorm, and can add the residual as well: norm(residual + dropout(x)). It has
    the tables of that norm, so hooks that swap the norm's weights during a forward work here too."""

    def __init__(self, norm: nn.LayerNorm, add_and_norm: Callable[..., Any]) -> None:
        nn.Module.__init__(self)
        vars(self).update(vars(norm))
        self.add_and_norm = add_and_norm

    def forward(self, x: torch.Tensor, residual: Any = None, p: float | None = None) -> Any:
        """(..., h) twice -> residual + dropout(x), and its norm; of x alone, its norm."""
        if residual is None:
            return super().forward(x)
        return self.add_and_norm(x, residual, p, self.weight, self.bias, self.eps)


class DeferredDropout(nn.Dropout):
    """Takes the place of a dropout that is applied later, together with the add of the residual."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    @property
    def active_p(self) -> float | None:
        """The probability while training; None where nothing is dropped."""
        return self.p if self.training and self.p else None


def _run_gpt2_block(
    block: Any,
    x: torch.Tensor,
    past_key_values: Any = None,
    attention_mask: Any = None,
    encoder_hidden_states: Any = None,
    encoder_attention_mask: Any = None,
    **kwargs: Any,
) -> torch.Tensor:
    """The forward of a GPT2Block without cross attention, which hpnb does not support."""
    kwargs |= {"past_key_values": past_key_values, "attention_mask": attention_mask}
    attended = block.attn(block.ln_1(x), **kwargs)[0]
    x, normed = _join(block.ln_2, attended, x, block.attn.resid_dropout.active_p)
    return _add(block.mlp(normed), x, block.mlp.dropout.active_p)


def _run_vit_layer(block: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The forward of a ViTLayer."""
    attended = block.attention(block.layernorm_before(x), *args, **kwargs)[0]
    p = block.dropout.p if block.training and block.dropout.p else None
    x, normed = _join(block.layernorm_after, attended, x, p)
    return _add(block.mlp(normed), x, p)


def _compile_gpt2_block(block: Any, add_and_norm: Callable[..., Any]) -> None:
    block.attn.resid_dropout = _defer(block.attn.resid_dropout)
    block.mlp.dropout = _defer(block.mlp.dropout)
    if type(block.mlp.act) is NewGELUActivation:
        block.mlp.act.forward = partial(F.gelu, approximate="tanh")
    block.ln_2 = _with_add(block.ln_2, add_and_norm)
    block.forward = partial(_run_gpt2_block, block)


def _compile_vit_layer(block: Any, add_and_norm: Callable[..., Any]) -> None:
    block.layernorm_after = _with_add(block.layernorm_after, add_and_norm)
    block.forward = partial(_run_vit_layer, block)


_BETWEEN_LINEARS: dict[type[nn.Module], Callable[[Any, Callable[..., Any]], None]] = {
    GPT2Block: _compile_gpt2_block,
    ViTLayer: _compile_vit_layer,
}


def _defer(dropout: nn.Dropout) -> DeferredDropout:
    return DeferredDropout(dropout.p).train(dropout.training)


def _with_add(norm: Any, add_and_norm: Callable[..., Any]) -> nn.Module:
    # A grid's norm is another class: it is sharded along the width, and sends messages.
    return AddNorm(norm, add_and_norm) if type(norm) is nn.LayerNorm else norm


def _join(
    norm: nn.Module, x: torch.Tensor, residual: torch.Tensor, p: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(norm, AddNorm):
        joined: tuple[torch.Tensor, torch.Tensor] = norm(x, residual, p)
        return joined
    hidden = _add(x, residual, p)
    return hidden, norm(hidden)

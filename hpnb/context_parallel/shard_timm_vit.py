"""The tokens of timm's ViT on the ranks of a context axis: the law of `shard_patches.py`, at other places.

    patch_embed, tokens, pos_embed   (B, s, h)         by every rank
       | shard_tokens                before blocks.0, or in a pipeline after the embedding
    blocks                           (B, s / cp, h)    F.scaled_dot_product_attention over all ranks
    norm                             (B, s / cp, h)
       | broadcast_first_tokens      those of class and distillation, from rank 0
    head, head_dist                  (B, t, h)         the same logits on every rank

timm's attention asks nobody which function to call. So while one runs, its call of
F.scaled_dot_product_attention is exchanged. Norms of queries and keys, gates and projections work on each
token by itself, and stay as they are.

Ranks of cp have the same samples and draw other random numbers. So what drops whole samples or patches, or
elements after the broadcast, is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from hpnb import comm
from hpnb.context_parallel.shard_patches import PatchShards, shard_tokens
from hpnb.context_parallel.ulysses import too_few_heads_message
from hpnb.mesh import Axis
from hpnb.models.model_anatomy import Anatomy, Inputs, wrap_anatomy
from hpnb.models.registry import attentions, registration_of
from hpnb.models.timm_vit import anatomy as timm_anatomy

Attend = Callable[..., torch.Tensor]


def is_timm_vit(model: nn.Module) -> bool:
    """Whether `hpnb.models.timm_vit.register` was called for its class."""
    try:
        return registration_of(model).anatomy is timm_anatomy
    except TypeError:  # nobody has registered it
        return False


def shard_timm_vit(model: nn.Module, axis: Axis, mode: str, attend: Attend) -> Callable[[Inputs], int]:
    """Let the blocks of `model` run on this rank's tokens, in place.

    Args:
        attend: called instead of F.scaled_dot_product_attention.

    Returns:
        A function of a batch that returns s, the tokens of an image.

    Raises:
        ValueError: random numbers on which ranks would have to agree, an attention that is not fused, or
            fewer heads than ranks of "ulysses".
    """
    parts = timm_anatomy(model)
    _refuse_random_choices(model)
    for attention in attentions(model):
        module = model.get_submodule(attention.path)
        if not getattr(module, "fused_attn", True):
            raise ValueError(
                f"{attention.path} has fused_attn=False, and context parallelism exchanges its call of "
                "F.scaled_dot_product_attention; make the model after timm.layers.set_fused_attn(True)"
            )
        if mode == "ulysses" and attention.heads < axis.size:
            raise ValueError(too_few_heads_message(attention.heads, axis.size))
        ExchangedAttention(attention.path, attend).hook(module)
    first = 2 if any(part.name == "head_dist" for part in parts.head) else 1
    by_name = {part.name: part.module for part in parts.head}
    shard = partial(_shard_input, axis, parts.length)
    parts.blocks[0].module.register_forward_pre_hook(shard, prepend=True)
    by_name["norm"].register_forward_hook(partial(_broadcast_output, axis, first))
    wrap_anatomy(model, partial(_around, axis), innermost=True)
    length = parts.length  # the function refers to no weights
    return lambda inputs: length


@dataclass(frozen=True)
class TimmPatchShards(PatchShards):
    """Of a ViT of timm whose blocks get this rank's tokens."""

    axis: Axis = field(kw_only=True)

    def embed(self, inputs: Inputs) -> torch.Tensor:
        return shard_tokens(super().embed(inputs), self.axis)


def _around(axis: Axis, inner: Anatomy) -> Anatomy:
    return TimmPatchShards.around(inner, ranks=axis.size, axis=axis)


def _shard_input(axis: Axis, length: int, module: nn.Module, args: tuple[Any, ...]) -> Any:
    """The first block gets all tokens from the model's forward, and its shard from a pipeline's stage."""
    hidden, *others = args
    return (shard_tokens(hidden, axis), *others) if hidden.size(1) == length else None


def _broadcast_output(
    axis: Axis, first: int, module: nn.Module, args: Any, hidden: torch.Tensor
) -> torch.Tensor:
    """The first tokens of rank 0, (B, s / cp, h) -> (B, t, h). The backward sums over the ranks."""
    if hidden.size(1) < first:
        raise ValueError(
            f"rank 0 of axis {axis.name} has {hidden.size(1)} token, and the heads read {first}; use a "
            f"cp_size below {axis.size}"
        )
    return comm.broadcast(hidden[:, :first], axis)


class ExchangedAttention:
    """While an attention runs, `attend` is called instead of F.scaled_dot_product_attention."""

    def __init__(self, path: str, attend: Attend) -> None:
        self.path, self.attend = path, attend
        self._running: list[_Exchange] = []

    def hook(self, attention: nn.Module) -> None:
        attention.register_forward_pre_hook(self._begin)
        attention.register_forward_hook(self._end, always_call=True)

    def _begin(self, *_: Any) -> None:
        exchange = _Exchange(self.attend)
        exchange.__enter__()  # type: ignore[no-untyped-call]
        self._running.append(exchange)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._running:  # a hook before `_begin` has failed
            return
        exchange = self._running.pop()
        exchange.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if output is not None and not exchange.calls:
            raise ValueError(
                f"{self.path} does not call F.scaled_dot_product_attention, so context parallelism cannot "
                "exchange its attention; use cp_size=1"
            )


class _Exchange(TorchFunctionMode):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend, self.calls = attend, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.calls += 1
            return self.attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _refuse_random_choices(model: nn.Module) -> None:
    """Refuse what drops paths or patches of a sample, attention weights, or elements of the head's input."""
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        probability = getattr(module, "drop_prob", None) or getattr(module, "prob", None)
        if last in ("attn_drop", "head_drop"):
            probability = getattr(module, "p", None)
        elif not last.startswith("drop_path") and last != "patch_drop":
            continue
        if probability:
            raise ValueError(
                f"{name} drops with probability {probability}, and ranks of context parallelism have the "
                "same samples and draw other random numbers; make the model with "
                f"{_OPTIONS[last.rstrip('12')]}=0, or use cp_size=1"
            )


_OPTIONS = {
    "attn_drop": "attn_drop_rate",
    "head_drop": "drop_rate",
    "drop_path": "drop_path_rate",
    "patch_drop": "patch_drop_rate",
}
